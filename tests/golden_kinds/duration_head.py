"""The duration head, and seconds to frames (upsampler_and_duration.md section 2)."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from golden_kinds import Result, compare, metadata, metadata_json
from ltx_runtime.duration import duration_frames, load_duration_head

PENDING: dict[str, str] = {}
TOLERANCE = 1e-4  # of the logarithm of the seconds
_TABLE = "seconds_to_frames_table"


def cases(path: Path) -> list[str]:
    return list(metadata_json(path, "cases"))


def check(path: Path, case: str):
    if case.startswith(_TABLE):
        for seconds, frame_rate, frames in metadata_json(path, "cases")[case]:
            found = duration_frames(seconds, frame_rate, min_seconds=1, max_seconds=20)
            yield Result(f"{seconds} s at {frame_rate}", abs(found - frames), 0)
        return
    golden = load_file(path)
    head = load_duration_head(path.parent / metadata(path)["weights"], device="cpu")
    seconds = head.seconds(golden.get(f"{case}.video_tokens"), golden.get(f"{case}.audio_tokens"))
    yield compare("log seconds", seconds.log(), golden[f"{case}.seconds"].log(), TOLERANCE)
