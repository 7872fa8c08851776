"""A cancel as ComfyUI sends one: an exception that is no Exception, raised by a callback in the middle of the work."""
from __future__ import annotations

from collections.abc import Callable


class Cancelled(BaseException):
    pass


def cancel_at(call: int) -> Callable[[], None]:
    """A check_cancelled that lets the work go on until it is asked for the `call`-th time, the first being 1."""
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Cancelled

    return check


def cancel_after(share: float) -> Callable[[int, int], None]:
    """An on_progress(done, total) that raises once more than this share of the total is done."""

    def progress(done: int, total: int) -> None:
        if done > share * total:
            raise Cancelled

    return progress
