"""Latents <-> tokens, and the positions of tokens.

Video tokens stand in frame, height, width order (width fastest), one token per latent cell. An audio token is one
latent frame, its features channel-major. Positions are intervals [start, end) in float32: seconds for time, pixels of
the current resolution for height and width.

Source: transformer.md section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ShapeError
from .shapes import AUDIO_LATENTS_PER_SECOND, SPACE_FACTOR, TIME_FACTOR, AudioLatentShape, VideoLatentShape

# One audio latent frame is 4 mel frames of 160 samples at 16 kHz.
_MEL_FRAMES_PER_LATENT = 4
_SECONDS_PER_MEL_FRAME = (160, 16000)
assert _SECONDS_PER_MEL_FRAME[1] == AUDIO_LATENTS_PER_SECOND * _MEL_FRAMES_PER_LATENT * _SECONDS_PER_MEL_FRAME[0]


def patchify_video(latent: Tensor) -> Tensor:
    """(B, C, F, H, W) -> tokens (B, F*H*W, C), same dtype and device."""
    if latent.ndim != 5:
        raise ShapeError(f"video latent has shape {tuple(latent.shape)}, expected (B, C, F, H, W).")
    return latent.flatten(2).transpose(1, 2).contiguous()


def unpatchify_video(tokens: Tensor, shape: VideoLatentShape) -> Tensor:
    """(B, F*H*W, C) -> (B, C, F, H, W), same dtype and device. Raises ShapeError when tokens don't fit the shape."""
    expected = (shape.batch, shape.tokens, shape.channels)
    if tuple(tokens.shape) != expected:
        raise ShapeError(f"video tokens have shape {tuple(tokens.shape)}, the latent grid needs {expected}.")
    return tokens.transpose(1, 2).reshape(shape.as_tuple())


def patchify_audio(latent: Tensor) -> Tensor:
    """(B, C, T, mel) -> tokens (B, T, C*mel), feature index = channel * mel bins + mel bin."""
    if latent.ndim != 4:
        raise ShapeError(f"audio latent has shape {tuple(latent.shape)}, expected (B, C, T, mel bins).")
    return latent.transpose(1, 2).flatten(2).contiguous()


def unpatchify_audio(tokens: Tensor, shape: AudioLatentShape) -> Tensor:
    """(B, T, C*mel) -> (B, C, T, mel), same dtype and device. Raises ShapeError when tokens don't fit the shape."""
    expected = (shape.batch, shape.tokens, shape.channels * shape.mel_bins)
    if tuple(tokens.shape) != expected:
        raise ShapeError(f"audio tokens have shape {tuple(tokens.shape)}, the latent needs {expected}.")
    return tokens.unflatten(2, (shape.channels, shape.mel_bins)).transpose(1, 2).contiguous()


def video_positions(
    frames: int,
    height: int,
    width: int,
    frame_rate: float,
    *,
    start_frame: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions (1, 3, F*H*W, 2) of a grid of latent cells: seconds, pixels, pixels.

    start_frame is the pixel frame at which the grid begins. A grid that begins at frame 0 is causal: its first cell
    covers one pixel frame, each later one TIME_FACTOR. Elsewhere every cell covers TIME_FACTOR frames.
    """
    time = _cell_intervals(frames, TIME_FACTOR, device)
    if start_frame == 0:
        time = (time + (1 - TIME_FACTOR)).clamp_(min=0)
    return _grid_positions((time + start_frame) / frame_rate, height, width)


def frame_positions(
    height: int, width: int, frame: int, frame_rate: float, device: torch.device | str | None = None
) -> Tensor:
    """Positions (1, 3, H*W, 2) of single encoded pixel frame `frame`: it covers [frame, frame + 1) / frame_rate."""
    time = torch.tensor([[frame, frame + 1]], dtype=torch.float32, device=device) / frame_rate
    return _grid_positions(time, height, width)


def audio_positions(frames: int, *, start: int = 0, device: torch.device | str | None = None) -> Tensor:
    """Positions (1, 1, T, 2) of audio latent frames start..start+T-1, in seconds. Frame 0 is causal."""
    cells = _cell_intervals(frames, _MEL_FRAMES_PER_LATENT, device, first=start)
    mel_frames = (cells + (1 - _MEL_FRAMES_PER_LATENT)).clamp_(min=0)
    samples, rate = _SECONDS_PER_MEL_FRAME
    return (mel_frames * samples / rate)[None, None]


def _cell_intervals(cells: int, size: int, device: torch.device | str | None, first: int = 0) -> Tensor:
    """(cells, 2) float32: [size*i, size*(i+1)) for i = first..first+cells-1."""
    starts = torch.arange(first, first + cells, dtype=torch.float32, device=device) * size
    return torch.stack((starts, starts + size), dim=-1)


def _grid_positions(time: Tensor, height: int, width: int) -> Tensor:
    """time (F, 2) in seconds -> (1, 3, F*H*W, 2)."""
    rows = _cell_intervals(height, SPACE_FACTOR, time.device)
    columns = _cell_intervals(width, SPACE_FACTOR, time.device)
    size = (time.shape[0], height, width, 2)
    axes = (time[:, None, None], rows[None, :, None], columns[None, None, :])
    return torch.stack([axis.expand(size) for axis in axes]).flatten(1, 3)[None]
