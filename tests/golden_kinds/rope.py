"""RoPE tables at the 22B sizes, frequency grids, timestep sinusoid (transformer.md sections 5 and 6)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from golden_kinds import compare, metadata_json
from ltx_runtime.patchify import audio_positions, video_positions
from ltx_runtime.shapes import audio_latent_frames
from ltx_runtime.transformer.adaln import sinusoid
from ltx_runtime.transformer.rope import frequency_grid, rope_table

PENDING: dict[str, str] = {}
TOLERANCE = 1e-6
THETA = 10000.0
HEADS = 32
VIDEO_WIDTH, AUDIO_WIDTH = 4096, 2048


def cases(path: Path) -> list[str]:
    return [str(i) for i in range(len(metadata_json(path, "cases")))] + ["connector", "freq_grid", "timestep_embedding"]


def check(path: Path, case: str):
    golden = load_file(path)
    if case == "freq_grid":
        for name, width, axes in (
            ("video", VIDEO_WIDTH, 3),
            ("audio", AUDIO_WIDTH, 1),
            ("connector_video", VIDEO_WIDTH, 1),
        ):
            # Up to pi/2 * 10000 large: compared relative to that.
            grid, expected = frequency_grid(THETA, width, axes), golden[f"freq_grid.{name}"]
            yield compare(f"freq_grid.{name}", grid / expected, torch.ones_like(expected), TOLERANCE)
    elif case == "timestep_embedding":
        yield compare("sinusoid", sinusoid(golden["timestep_embedding.t"]), golden["timestep_embedding.out"], TOLERANCE)
    elif case == "connector":
        index = golden["connector.index"]
        positions = torch.arange(int(index.max()) + 1, dtype=torch.float32)[None, None]
        for name, width in (("video", VIDEO_WIDTH), ("audio", AUDIO_WIDTH)):
            yield from _tables(golden, f"connector.{name}", positions[..., index], (4096,), width)
    else:
        spec = metadata_json(path, "cases")[int(case)]
        assert audio_latent_frames(spec["pixel_frames"], spec["fps"]) == spec["audio_tokens"]
        video = video_positions(*spec["latent_grid"], spec["fps"])[:, :, golden[f"{case}.video.index"]]
        audio = audio_positions(spec["audio_tokens"])[:, :, golden[f"{case}.audio.index"]]
        yield compare("video.positions", video, golden[f"{case}.video.positions"], 0)
        yield compare("audio.positions", audio, golden[f"{case}.audio.positions"], 0)
        video, audio = video.mean(-1), audio.mean(-1)
        yield from _tables(golden, f"{case}.video", video, (20, 2048, 2048), VIDEO_WIDTH)
        yield from _tables(golden, f"{case}.audio", audio, (20,), AUDIO_WIDTH)
        yield from _tables(golden, f"{case}.video_cross", video[:, :1], (20,), AUDIO_WIDTH)
        yield from _tables(golden, f"{case}.audio_cross", audio, (20,), AUDIO_WIDTH)


def _tables(golden, name, positions, max_pos, width):
    table = rope_table(positions, max_pos, width=width, heads=HEADS, theta=THETA, dtype=torch.float32)
    # Ours stand as (B, N, heads, half), the goldens as (B, heads, N, half).
    yield compare(f"{name}.cos", table.cos.transpose(1, 2), golden[f"{name}.cos"], TOLERANCE)
    yield compare(f"{name}.sin", table.sin.transpose(1, 2), golden[f"{name}.sin"], TOLERANCE)
