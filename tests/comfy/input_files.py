"""The images, the sound and the clip that bundled workflows and official templates load from ComfyUI's input folder."""

from __future__ import annotations

import wave
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

# None of them fits a small render: the images are too large, one with alpha; the sound is mono, at 44.1 kHz and too
# long; the clip has frames beyond 8k+1.
IMAGE_SIZE = (200, 150)
SOUND_RATE, SOUND_SECONDS = 44100, 1.2
CLIP_FRAMES, CLIP_SIZE, CLIP_RATE = 20, (128, 96), 24


def write_input_files(folder: Path) -> None:
    """first_frame.png, last_frame.png, sound.wav and clip.mp4."""
    _gradient(1.0, alpha=True).save(folder / "first_frame.png")
    _gradient(-1.0, alpha=False).save(folder / "last_frame.png")
    tone = _tone(440, SOUND_SECONDS)
    with wave.open(str(folder / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SOUND_RATE)
        file.writeframes((tone * 32767).astype("<i2").tobytes())
    _write_clip(folder / "clip.mp4")


def _gradient(slope: float, *, alpha: bool) -> Image.Image:
    width, height = IMAGE_SIZE
    rows, columns = np.mgrid[0:height, 0:width]
    channels = [rows, columns, (rows + columns) // 2] + ([np.full_like(rows, 180)] if alpha else [])
    pixels = np.stack(channels, axis=2).astype(np.uint8)
    return Image.fromarray(pixels if slope > 0 else 255 - pixels)


def _tone(hertz: float, seconds: float) -> np.ndarray:
    time = np.arange(int(SOUND_RATE * seconds)) / SOUND_RATE
    return (0.5 * np.sin(2 * np.pi * hertz * time)).astype(np.float32)


def _write_clip(path: Path) -> None:
    """Moving stripes with a stereo tone."""
    width, height = CLIP_SIZE
    with av.open(str(path), "w") as container:
        video = container.add_stream("h264", rate=CLIP_RATE)
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        audio = container.add_stream("aac", rate=SOUND_RATE, layout="stereo")
        for index in range(CLIP_FRAMES):
            columns = np.tile((np.arange(width) * 2 + 8 * index) % 256, (height, 1))
            pixels = np.stack([columns, 255 - columns, np.full_like(columns, 90)], axis=2).astype(np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        tone = _tone(330, CLIP_FRAMES / CLIP_RATE)
        frame = av.AudioFrame.from_ndarray(np.stack([tone, tone]), format="fltp", layout="stereo")
        frame.sample_rate, frame.time_base = SOUND_RATE, Fraction(1, SOUND_RATE)
        container.mux(audio.encode(frame))
        container.mux(audio.encode())
