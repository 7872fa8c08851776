"""Images on their way in: from ComfyUI's IMAGE to the encoder's pixels, size, range and layout on the device.

Source: video_vae.md section 4; the crop and the resampling are those of ComfyUI's image-to-video nodes.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..shapes import SPACE_FACTOR, VideoLatentShape

# Pinned memory is dear (see host_frames.py), so frames go through two small buffers.
_STAGING_BYTES = 32 << 20


def centre_crop(width: int, height: int, to_width: int, to_height: int) -> tuple[slice, slice]:
    """(rows, columns) of the largest centred part of a picture with the proportions of another, rounded to pixels, of
    which at least one stays."""
    have, want = width / height, to_width / to_height
    x = round((width - width * (want / have)) / 2) if have > want else 0
    y = round((height - height * (have / want)) / 2) if have < want else 0
    x, y = min(x, (width - 1) // 2), min(y, (height - 1) // 2)
    return slice(y, height - y), slice(x, width - x)


class FrameUpload:
    """Pieces of a clip as encoder input, brought over on a stream of their own while the device computes on."""

    def __init__(self, frames: Tensor, shape: VideoLatentShape, device: torch.device, dtype: torch.dtype) -> None:
        """frames: (N, H, W, C) float, C >= 3, on any device. shape: of the latent; frames of another size than it wants
        are cropped around the centre to its proportions and resampled bilinearly."""
        height, width = shape.height * SPACE_FACTOR, shape.width * SPACE_FACTOR
        self._frames = frames[..., :3]
        self._size = None if frames.shape[1:3] == (height, width) else (height, width)
        if self._size:
            rows, columns = centre_crop(frames.shape[2], frames.shape[1], width, height)
            self._frames = self._frames[:, rows, columns]
        self._device = device
        self._dtype = dtype
        self._staged = device.type == "cuda" and frames.device.type == "cpu"
        if self._staged:
            self._stream = torch.cuda.Stream(device)
            num_bytes = max(_STAGING_BYTES, self._frames[0].numel() * frames.element_size())
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._copied: list[torch.cuda.Event | None] = [None, None]
            self._turn = 0

    def pixels(self, start: int, stop: int, rows: slice, columns: slice) -> Tensor:
        """(1, 3, stop - start, h, w) in [-1, 1] where the frames are in [0, 1]: the part (rows, columns) of the frames
        start to stop. It may still be under way; work on the current stream waits for it."""
        if not self._staged:
            return self._convert(self._frames[start:stop].to(self._device), rows, columns).to(self._dtype)[None]
        shape = (1, 3, stop - start, rows.stop - rows.start, columns.stop - columns.start)
        source = self._frames[start:stop]
        if self._size is None:
            source, rows, columns = source[:, rows, columns], slice(None), slice(None)
        count = max(1, self._buffers[0].numel() // (source[0].numel() * source.element_size()))
        with torch.cuda.stream(self._stream):
            pixels = torch.empty(shape, dtype=self._dtype, device=self._device)
            for first in range(0, stop - start, count):
                piece = self._through_staging(source[first : first + count])
                pixels[0, :, first : first + count] = self._convert(piece, rows, columns)
            ready = self._stream.record_event()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(ready)
        pixels.record_stream(current)  # made on the other stream: its memory must not go back there too early
        return pixels

    def _through_staging(self, piece: Tensor) -> Tensor:
        slot, self._turn = self._turn, 1 - self._turn
        if self._copied[slot] is not None:
            self._copied[slot].synchronize()
        buffer = self._buffers[slot][: piece.numel() * piece.element_size()]
        staged = buffer.view(piece.dtype).view(piece.shape)
        staged.copy_(piece)
        there = staged.to(self._device, non_blocking=True)
        self._copied[slot] = self._stream.record_event()
        return there

    def _convert(self, frames: Tensor, rows: slice, columns: slice) -> Tensor:
        """(n, H, W, 3) on the device to (3, n, h, w) float32 in [-1, 1]."""
        channels = frames.movedim(-1, 1).float()
        if self._size is not None:
            channels = F.interpolate(channels, size=self._size, mode="bilinear")
        return (channels[:, :, rows, columns] * 2 - 1).transpose(0, 1)
