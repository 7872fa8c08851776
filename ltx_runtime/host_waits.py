"""Calls that make the host wait for the device: found in an eager pass, refused in a capture. Of this thread only:
PyTorch's own switch (`torch.cuda.set_sync_debug_mode`) holds for the whole process, and in its mode "error" a harmless
`.cpu()` of another thread would raise there.
"""
from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What PyTorch says in mode "warn", and once a process about the switch itself.
_WAITED = "called a synchronizing CUDA operation"
_ABOUT_THE_SWITCH = "Synchronization debug mode is a prototype"
# Calls whose result has to be known to the host. Others that copy to the host are refused by CUDA without harm.
_WAITING = frozenset(
    {
        "item", "tolist", "is_nonzero", "equal", "allclose",
        "__bool__", "__int__", "__float__", "__index__", "__complex__",
        "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive",
    }
)  # fmt: skip


@contextlib.contextmanager
def host_waits_seen() -> Iterator[list[str]]:
    """Gives a list that fills with the places, "file.py:12", at which this thread waits for the device, in Python or
    below.

    The switch is set to warn, so nothing is stopped, here or in other threads; the warnings that it causes are not
    shown, but for a call of another thread that outlasts the block.
    """
    places: list[str] = []
    thread = threading.get_ident()
    with warnings.catch_warnings():
        show_others = warnings.showwarning

        def show(message, category, filename: str, lineno: int, *rest) -> None:
            if _WAITED not in str(message):
                show_others(message, category, filename, lineno, *rest)
            elif threading.get_ident() == thread:
                places.append(f"{_file_name(filename)}:{lineno}")

        warnings.filterwarnings("always", message=f".*{_WAITED}")
        warnings.filterwarnings("ignore", message=_ABOUT_THE_SWITCH)
        warnings.showwarning = show
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode(before)


class NoHostWaits(TorchFunctionMode):
    """Raises RuntimeError in place of a call of this thread that would wait, before CUDA hears of it: a capture stays
    valid that way. It sees calls from Python only; what waits below is found by `host_waits_seen` in the pass
    before."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _WAITING or (name in ("__getitem__", "__setitem__") and _has_mask(args[1])):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _file_name(path: str) -> str:
    return path.replace("\\", "/").rsplit("/", 1)[-1]
