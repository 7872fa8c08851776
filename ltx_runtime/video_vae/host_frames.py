"""Decoded frames on their way out: range and layout on the device, then into ComfyUI's IMAGE on the host.

Source: video_vae.md section 7.
"""
from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import RequestError
from ..memory import in_words

# Pinning costs about 0.75 s a GB (h200_baseline.md section 4) and an IMAGE may live long in the host's cache, so the
# frames go through a few small pinned buffers, which PyTorch keeps for the next decode; the result is never pinned.
_STAGED_BYTES = 8 << 20
_STAGED = 8
# On the host of an H200 one core copies at 7 GB/s and makes new pages at 3 to 8; six copy at 30, twelve no faster.
_MOST_THREADS = 6
# What a thread makes pages of at once, so that it neither outlives a decode by much nor holds up a copy.
_PAGES_BYTES = 16 << 20
_BYTES_PER_PIXEL = 3 * torch.float32.itemsize


def to_frames(pixels: Tensor) -> Tensor:
    """Unclamped pixels (1, 3, F, H, W), nominally in [-1, 1] -> frames (F, H, W, 3) float32 in [0, 1], contiguous,
    computed in float32 on the device that holds them: clamp((pixels + 1) / 2, 0, 1), bit for bit.

    Halves are exact, so 0.5 + pixels / 2 rounds as (pixels + 1) / 2 does; and it never falls, so that the clamp may
    come first, where it moves fewer bytes.
    """
    _, channels, frames, height, width = pixels.shape
    out = torch.empty(frames, height, width, channels, device=pixels.device)
    half = torch.full((1,), 0.5, device=pixels.device)
    return torch.add(half, pixels[0].permute(1, 2, 3, 0).clamp(-1, 1), alpha=0.5, out=out)


def frames_bytes(count: int, height: int, width: int) -> int:
    """Host memory of count frames as an IMAGE."""
    return count * height * width * _BYTES_PER_PIXEL


def allocate_frames(count: int, height: int, width: int, available_bytes: int | None) -> Tensor:
    """A host tensor (count, height, width, 3) float32, not pinned, not filled.

    Raises RequestError with the numbers when it is larger than available_bytes (None = unknown) or can't be had.
    """
    num_bytes = frames_bytes(count, height, width)
    wanted = f"{count} frames of {width}x{height} take {in_words(num_bytes)} of host memory as an IMAGE (float32)"
    remedy = "Decode fewer frames or a smaller picture, or free host memory."
    if available_bytes is not None and num_bytes > available_bytes:
        raise RequestError(f"{wanted}; {in_words(available_bytes)} are available. {remedy}")
    try:
        frames = torch.empty(count, height, width, 3, dtype=torch.float32)
    except RuntimeError as error:
        raise RequestError(f"{wanted}, which the system refused. {remedy}") from error
    _hint_huge_pages(frames)
    return frames


def _hint_huge_pages(memory: Tensor) -> None:
    """Pages of 2 MB cost a third of as many small ones, and nothing to give back. A system may not listen."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = memory.data_ptr() + memory.nbytes - start
    if sys.platform == "linux" and num_bytes >= _PAGES_BYTES:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes // mmap.PAGESIZE * mmap.PAGESIZE), mmap.MADV_HUGEPAGE)


class HostWriter:
    """Threads that fill a host tensor.

    New host memory has no pages yet, and making them takes longer than the copy. So some threads begin with that at
    once, front to back, others copy, and a copy takes over what the first have not come to. A context manager, which
    ends its threads.
    """

    def __init__(self, host: Tensor) -> None:
        """host: float32, contiguous, its contents without a meaning yet."""
        self._start = host.data_ptr()
        threads = _threads()
        self._copiers, self._page_makers = (
            ThreadPoolExecutor(threads, f"ltxgraph-{name}") for name in ("copy", "pages")
        )
        parts = host.view(-1).view(torch.uint8).split(_PAGES_BYTES)
        self._pages = [self._page_makers.submit(_make_pages, part) for part in parts]

    def __enter__(self) -> HostWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for threads in (self._page_makers, self._copiers):
            threads.shutdown(cancel_futures=True)

    def copy(self, source: Tensor, place: Tensor, arrived: Callable[[], None]) -> Future:
        """Copy source to place, a contiguous part of the host tensor, once arrived() has returned."""
        return self._copiers.submit(self._copy, source, place, arrived)

    def _copy(self, source: Tensor, place: Tensor, arrived: Callable[[], None]) -> None:
        arrived()
        first = place.data_ptr() - self._start
        for pages in self._pages[first // _PAGES_BYTES : (first + place.nbytes - 1) // _PAGES_BYTES + 1]:
            if not pages.cancel():
                pages.result()
        # It holds no lock of Python's and starts no threads of its own, as a tensor's copy does.
        ctypes.memmove(place.data_ptr(), source.data_ptr(), place.nbytes)


class FrameTransfer:
    """Copies device frames into a host tensor while the device computes on: on a stream of its own, into pinned
    buffers, from there by a HostWriter. A context manager."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        """host: (N, H, W, 3) float32, contiguous, its contents without a meaning yet."""
        self._host = host
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            self._writer = HostWriter(host)
            self._staging: Tensor | None = None
            self._copies: list[Future | None] = [None] * _STAGED
            self._turn = 0

    def __enter__(self) -> FrameTransfer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._writer.__exit__(*error)

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Makes its stream the current one, so that what is timed around `write` does not wait for the next chunk."""
        return torch.cuda.stream(self._stream) if self._cuda else nullcontext()

    def mark_ready(self) -> torch.cuda.Event | None:
        """An event after the work issued so far on the current stream, for `write`."""
        if not self._cuda:
            return None
        if self._staging is None:  # here, because the device has work meanwhile
            self._staging = torch.empty(_STAGED, _STAGED_BYTES // 4, dtype=torch.float32, pin_memory=True)
        return torch.cuda.current_stream(self._stream.device).record_event()

    def write(self, frames: Tensor, start: int, ready: torch.cuda.Event | None) -> None:
        """Put frames (n, H, W, 3), computed when ready has passed, at host[start : start + n]; returns when they are
        there. What a thread raises is raised here."""
        target = self._host[start : start + frames.shape[0]]
        if not self._cuda:
            target.copy_(frames)
            return
        self._stream.wait_event(ready)
        values = self._staging.shape[1]
        for piece, place in zip(frames.view(-1).split(values), target.view(-1).split(values)):
            turn, self._turn = self._turn, (self._turn + 1) % _STAGED
            self._finish(turn)
            staged = self._staging[turn, : piece.numel()]
            with torch.cuda.stream(self._stream):
                staged.copy_(piece, non_blocking=True)
                arrived = self._stream.record_event()
            self._copies[turn] = self._writer.copy(staged, place, arrived.synchronize)
        for turn in range(_STAGED):
            self._finish(turn)

    def _finish(self, turn: int) -> None:
        copy, self._copies[turn] = self._copies[turn], None
        if copy is not None:
            copy.result()


def _threads() -> int:
    """One core is left to the thread that issues the device's work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, cores - 1))


def _make_pages(memory: Tensor) -> None:
    """Write into every page of new memory (bytes), which has the system make it."""
    with torch.inference_mode():  # of a thread's own; without it a tensor that was made in one refuses
        memory[:: mmap.PAGESIZE].fill_(0)
