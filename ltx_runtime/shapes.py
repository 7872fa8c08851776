"""Pixel, latent and token arithmetic, in one place.

Source: transformer.md section 4 (video factor 8 x 32 x 32, audio 25 latent frames a second).
"""
from __future__ import annotations

from dataclasses import dataclass

from .errors import ShapeError

TIME_FACTOR = 8
SPACE_FACTOR = 32
VIDEO_CHANNELS = 128
AUDIO_CHANNELS = 8
AUDIO_MEL_BINS = 16
AUDIO_LATENTS_PER_SECOND = 25


def _neighbours(value: int, step: int, offset: int) -> str:
    """The nearest legal values of the grid step*k + offset, as words."""
    below = max((value - offset) // step * step + offset, offset or step)
    above = below if below >= value else below + step
    return str(below) if below == above else f"{below} or {above}"


def check_pixel_size(width: int, height: int, num_frames: int, *, frames_name: str = "num_frames") -> None:
    """Raise ShapeError, naming the nearest legal values, unless width and height are multiples of 32 and
    num_frames lies on the 8k+1 grid.

    frames_name: what the user calls num_frames.
    """
    for name, value in (("width", width), ("height", height)):
        if value < SPACE_FACTOR or value % SPACE_FACTOR:
            raise ShapeError(
                f"{name}={value} is off the {SPACE_FACTOR}-pixel grid of the video VAE. "
                f"Use {_neighbours(value, SPACE_FACTOR, 0)}."
            )
    if num_frames < 1 or (num_frames - 1) % TIME_FACTOR:
        raise ShapeError(
            f"{frames_name}={num_frames} is off the {TIME_FACTOR}k+1 grid of the video VAE. "
            f"Use {_neighbours(num_frames, TIME_FACTOR, 1)}."
        )


def longest_clip(num_frames: int) -> int:
    """The largest count on the 8k+1 grid that is not above num_frames (at least 1): frames beyond it are left out."""
    return (num_frames - 1) // TIME_FACTOR * TIME_FACTOR + 1


def audio_latent_frames(num_frames: int, frame_rate: float) -> int:
    """Audio latent frames for a clip: round(frames / fps * 25), Python rounding (121 at 24 fps gives 126)."""
    return round(num_frames / frame_rate * AUDIO_LATENTS_PER_SECOND)


@dataclass(frozen=True)
class VideoLatentShape:
    """(B, C, F, H, W) of a video latent. tokens = F*H*W, frame-major."""

    batch: int
    channels: int
    frames: int
    height: int
    width: int

    @classmethod
    def from_pixels(cls, width: int, height: int, num_frames: int, batch: int = 1) -> VideoLatentShape:
        """Raises ShapeError when a size is off the grid."""
        check_pixel_size(width, height, num_frames)
        return cls(
            batch, VIDEO_CHANNELS, (num_frames - 1) // TIME_FACTOR + 1, height // SPACE_FACTOR, width // SPACE_FACTOR
        )

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def num_frames(self) -> int:
        """Pixel frames of the decoded clip: 8(F-1)+1."""
        return TIME_FACTOR * (self.frames - 1) + 1

    def as_tuple(self) -> tuple[int, int, int, int, int]:
        return (self.batch, self.channels, self.frames, self.height, self.width)


@dataclass(frozen=True)
class AudioLatentShape:
    """(B, C, T, mel) of an audio latent. tokens = T, each of C*mel features."""

    batch: int
    channels: int
    frames: int
    mel_bins: int

    @property
    def tokens(self) -> int:
        return self.frames

    def as_tuple(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, self.frames, self.mel_bins)
