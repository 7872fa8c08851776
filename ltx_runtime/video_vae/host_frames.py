"""Decoded frames on their way out: range and layout on the device, then into ComfyUI's IMAGE on the host.

Source: video_vae.md section 7.
"""
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..errors import RequestError
from ..memory import in_words

# Pinning costs about 0.75 s a GB (h200_baseline.md section 4) and an IMAGE may live long in the host's cache, so the
# frames go through two small pinned buffers and never pin the result itself.
_STAGING_BYTES = 32 << 20
_BYTES_PER_PIXEL = 3 * torch.float32.itemsize


def to_frames(pixels: Tensor) -> Tensor:
    """Unclamped pixels (1, 3, F, H, W), nominally in [-1, 1] -> frames (F, H, W, 3) float32 in [0, 1], contiguous,
    computed in float32 on the device that holds them."""
    frames = pixels[0].permute(1, 2, 3, 0).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    return frames.add_(1).mul_(0.5).clamp_(0, 1)


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
        return torch.empty(count, height, width, 3, dtype=torch.float32)
    except RuntimeError as error:
        raise RequestError(f"{wanted}, which the system refused. {remedy}") from error


class FrameTransfer:
    """Copies device frames into a host tensor, on a stream of its own so that the device computes on meanwhile."""

    def __init__(self, host: Tensor, device: torch.device) -> None:
        """host: (N, H, W, 3) float32."""
        self._host = host
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._stream = torch.cuda.Stream(device)
            count = max(1, _STAGING_BYTES // (host[0].numel() * host.element_size()))
            shape = (min(count, host.shape[0]), *host.shape[1:])
            self._staging = [torch.empty(shape, dtype=torch.float32, pin_memory=True) for _ in range(2)]

    def on_its_stream(self) -> AbstractContextManager[object]:
        """Makes its stream the current one, so that what is timed around `write` does not wait for the next chunk."""
        return torch.cuda.stream(self._stream) if self._cuda else nullcontext()

    def mark_ready(self) -> torch.cuda.Event | None:
        """An event after the work issued so far on the current stream, for `write`."""
        if not self._cuda:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    def write(self, frames: Tensor, start: int, ready: torch.cuda.Event | None) -> None:
        """Put frames (n, H, W, 3), computed when ready has passed, at host[start : start + n]; returns when they are
        there."""
        target = self._host[start : start + frames.shape[0]]
        if not self._cuda:
            target.copy_(frames)
            return
        self._stream.wait_event(ready)
        pieces = frames.split(self._staging[0].shape[0])
        targets = target.split(self._staging[0].shape[0])
        arriving: list[tuple[torch.cuda.Event, Tensor, Tensor]] = []
        for index, (piece, place) in enumerate(zip(pieces, targets)):
            staged = self._staging[index % 2][: piece.shape[0]]
            with torch.cuda.stream(self._stream):
                staged.copy_(piece, non_blocking=True)
                arriving.append((self._stream.record_event(), staged, place))
            if index:
                self._finish(*arriving.pop(0))
        self._finish(*arriving.pop())

    @staticmethod
    def _finish(arrived: torch.cuda.Event, staged: Tensor, place: Tensor) -> None:
        arrived.synchronize()
        place.copy_(staged)
