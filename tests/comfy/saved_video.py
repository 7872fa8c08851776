"""A video file as a decoder finds it."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np


@dataclass(frozen=True)
class SavedVideo:
    """sizes: (width, height) of every frame. frame_rate: as the file says. sound: (channels, samples) or None."""

    sizes: list[tuple[int, int]]
    frame_rate: float
    sample_rate: int
    sound: np.ndarray | None

    @property
    def seconds(self) -> float:
        return len(self.sizes) / self.frame_rate

    @property
    def sound_seconds(self) -> float:
        return self.sound.shape[1] / self.sample_rate


def read_video(source: Path | bytes) -> SavedVideo:
    """Decode every frame and every sample."""

    def opened():
        return av.open(io.BytesIO(source) if isinstance(source, bytes) else str(source))

    with opened() as container:
        sizes = [(frame.width, frame.height) for frame in container.decode(video=0)]
        frame_rate = float(container.streams.video[0].average_rate)
    with opened() as container:
        if not container.streams.audio:
            return SavedVideo(sizes, frame_rate, 0, None)
        stream = container.streams.audio[0]
        sound = np.concatenate([frame.to_ndarray() for frame in container.decode(stream)], axis=1)
        return SavedVideo(sizes, frame_rate, stream.rate, sound)
