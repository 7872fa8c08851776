"""Token order, positions, appended tokens, attention strengths, regions, counts (transformer.md 4 and 11)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from golden_kinds import Result, compare, metadata_json
from ltx_runtime import conditioning as C
from ltx_runtime.patchify import audio_positions, patchify_audio, patchify_video, unpatchify_audio, unpatchify_video
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames

PENDING: dict[str, str] = {}
EXACT = 0.0
# Of the golden mask, not in its metadata: first the reference, then the keyframe.
STRENGTHS = (0.35, 0.8)


def cases(path: Path) -> list[str]:
    return list(metadata_json(path, "cases"))


def check(path: Path, case: str):
    spec = metadata_json(path, "cases")[case]
    golden = {name.removeprefix(f"{case}."): t for name, t in load_file(path).items() if name.startswith(f"{case}.")}
    if case == "audio_token_counts":
        for row in spec:
            error = abs(audio_latent_frames(row["frames"], row["fps"]) - row["audio_tokens"])
            yield Result(f"{row['frames']} frames at {row['fps']} fps", error, EXACT)
    elif case.startswith("a"):
        yield from _check_audio(golden, spec)
    else:
        yield from _check_video(golden, spec)


def _check_audio(golden, spec):
    shape = AudioLatentShape(*golden["latent"].shape)
    tokens = patchify_audio(golden["latent"])
    yield compare("tokens", tokens, golden["tokens"], EXACT)
    yield compare("back to the latent", unpatchify_audio(tokens, shape), golden["latent"], EXACT)
    yield compare("positions", audio_positions(spec["frames"], start=spec.get("shift", 0)), golden["positions"], EXACT)


def _check_video(golden, spec):
    latent, fps = golden["latent"], spec["fps"]
    shape = VideoLatentShape(*latent.shape)
    channels, height, width = shape.channels, shape.height, shape.width
    tokens = patchify_video(latent)
    yield compare("tokens", tokens, golden["tokens"], EXACT)
    yield compare("back to the latent", unpatchify_video(tokens, shape), latent, EXACT)

    state = C.text_to_video_state(shape, fps, latent)
    yield compare("state.initial", state.initial, golden["tokens"], EXACT)
    yield compare("positions", state.positions, golden["positions"], EXACT)
    yield compare("keyframes_mask", state.keyframe_marker, golden["keyframes_mask"], EXACT)
    region = C.temporal_region(state, *spec["region"])
    yield compare("region_mask", region.denoise_mask, golden["region_mask"], EXACT)

    def appended(longer: C.TokenState) -> torch.Tensor:
        return longer.positions[:, :, shape.tokens :]

    image = torch.randn(1, channels, 1, height, width)
    for frame in spec["keyframes"]:
        keyed = C.append_keyframe(state, frame, image, fps)
        yield compare(f"keyframe_{frame}.positions", appended(keyed), golden[f"keyframe_{frame}.positions"], EXACT)
    clip = C.append_clip(state, spec["keyframes"][-1], image.expand(-1, -1, 2, -1, -1), fps)
    yield compare("keyframe_clip.positions", appended(clip), golden["keyframe_clip.positions"], EXACT)

    slots = C.append_slots(state, spec["slots"], fps)
    yield compare("slots.positions", appended(slots), golden["slots.positions"], EXACT)
    yield compare("slots.keyframes_mask", slots.keyframe_marker, golden["slots.keyframes_mask"], EXACT)
    evenly = torch.tensor(C.evenly_spaced_slots(5, shape.num_frames))
    yield compare("evenly_spaced_5", evenly, torch.tensor(spec["evenly_spaced_5"]), EXACT)

    reference = C.append_reference(
        state,
        torch.randn(1, channels, *spec["ref"]),
        fps,
        spatial_ratio=spec["down"],
        temporal_ratio=spec["tscale"],
        attention_strength=STRENGTHS[0],
    )
    yield compare("reference.positions", appended(reference), golden["reference.positions"], EXACT)
    both = C.append_keyframe(reference, spec["keyframes"][-1], image, fps, attention_strength=STRENGTHS[1])
    yield compare("attention_mask", both.attention_strength, golden["attention_mask"], EXACT)
