"""Work that overlaps: chunks of which one is issued while the one before it is still being computed, and a host that
stays near its device."""
from __future__ import annotations

from collections.abc import Callable

import torch

from ..timing import Phase, Timeline

# Work is waited for in pieces of at least this share of a decode: a wait costs the host some 10 us.
_SHARE = 0.01


class PhasesInFlight:
    """Open phases of one name: the one being issued and the one behind it. An exception ends them all."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._open: list[Phase] = []

    def __enter__(self) -> PhasesInFlight:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for phase in self._open:
            self._timeline.end(phase, error=error)

    def begin(self, **attrs: int) -> Phase:
        phase = self._timeline.begin(self._name, **attrs)
        self._open.append(phase)
        return phase

    def end(self, phase: Phase) -> None:
        """Waits for the chunk."""
        self._open.remove(phase)
        self._timeline.end(phase)


class Pace:
    """Progress and cancel inside a chunk. The host, which could issue seconds of work ahead, stays one piece ahead of
    the device, so that both are true; the device never runs dry for it, and no value depends on it."""

    def __init__(
        self, device: torch.device, check_cancelled: Callable[[], None], on_share: Callable[[float], None]
    ) -> None:
        """on_share: gets the share of the work that is done, from 0 to 1."""
        self.check_cancelled = check_cancelled
        self._on_share = on_share
        self._device = device
        self._marked = 0.0
        self._behind: tuple[torch.cuda.Event, float] | None = None

    def issued(self, clip: int, clips: int, share: float) -> None:
        """This share of clip number `clip` of all is issued on the current stream: wait until what was issued before
        the last piece is done, tell it, and raise what check_cancelled raises."""
        share = (clip + share) / clips
        if share - self._marked < _SHARE and share < 1:
            return
        self._marked = share
        if self._device.type == "cuda":
            behind, self._behind = self._behind, (torch.cuda.current_stream(self._device).record_event(), share)
            if behind is None:
                return
            event, share = behind
            event.synchronize()
        self._on_share(share)
        self.check_cancelled()
