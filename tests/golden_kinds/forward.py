"""Full forward passes: preprocessing, block 0's parts, every block, velocities (transformer.md sections 6, 8 and 13).

Where a file tells how its tokens were conditioned, they are built again by conditioning.py and compared too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from golden_kinds import Result, compare, metadata, metadata_json, worst_error
from golden_kinds.transformer_weights import golden_transformer
from ltx_runtime import conditioning as C
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.steps import x0_from_velocity
from ltx_runtime.transformer import ForwardConstants, LTXTransformer, StepModulation

PENDING: dict[str, str] = {}
TOLERANCE = 1e-5
STREAMS = ("video", "audio")
BF16 = " in bf16"
BLOCK_PARTS = (
    "attn1",
    "attn2",
    "ff",
    "audio_attn1",
    "audio_attn2",
    "audio_ff",
    "audio_to_video_attn",
    "video_to_audio_attn",
)


@dataclass
class ForwardCase:
    """A golden forward pass as inputs of our model."""

    golden: dict[str, Tensor]
    spec: dict
    states: dict[str, C.TokenState | None]
    sigmas: dict[str, Tensor]
    per_sample_sigma: bool

    def run(self, model: LTXTransformer, **options):
        """(constants, modulation, {"video": velocity, "audio": velocity})."""
        golden = self.golden
        enabled = {
            f"{s}_enabled": bool(golden[f"in.{s}.enabled"].item()) for s in STREAMS if f"in.{s}.enabled" in golden
        }
        constants = model.prepare(
            video=self.states["video"],
            audio=self.states["audio"],
            video_context=golden.get("in.video.context"),
            audio_context=golden.get("in.audio.context"),
            perturbations=golden.get("in.perturbation_keep_mask"),
            per_sample_sigma=self.per_sample_sigma,
            **enabled,
            **options,
        )
        sigma_video = self.sigmas.get("video", self.sigmas.get("audio"))
        modulation = model.modulation(constants, sigma_video, self.sigmas.get("audio"))
        velocities = model(golden.get("in.video.latent"), golden.get("in.audio.latent"), constants, modulation)
        return constants, modulation, dict(zip(STREAMS, velocities, strict=True))


def load_case(path: Path) -> ForwardCase:
    golden, spec = load_file(path), metadata_json(path, "case")
    states: dict[str, C.TokenState | None] = {}
    for stream in STREAMS:
        latent = golden.get(f"in.{stream}.latent")
        if latent is None:
            states[stream] = None
            continue
        batch, tokens, channels = latent.shape
        if stream == "video":
            shape = VideoLatentShape(batch, channels, *spec["vshape"])
        else:
            shape = AudioLatentShape(batch, 1, tokens, channels)
        states[stream] = C.TokenState(
            initial=latent,
            clean=golden[f"in.{stream}.clean_latent"],
            denoise_mask=golden[f"in.{stream}.denoise_mask"],
            positions=golden[f"in.{stream}.positions"],
            keyframe_marker=golden.get(f"in.{stream}.keyframes_mask"),
            attention_strength=golden.get(f"in.{stream}.attention_mask"),
            shape=shape,
        )
    sigmas = {s: golden[f"in.{s}.sigma"] for s in STREAMS if states[s] is not None}
    per_sample = any(bool((sigma != sigma[0]).any()) for sigma in sigmas.values())
    if not per_sample:
        sigmas = {s: sigma[:1] for s, sigma in sigmas.items()}
    return ForwardCase(golden, spec, states, sigmas, per_sample)


def cases(path: Path) -> list[str]:
    name = metadata_json(path, "case")["name"]
    return [name, name + BF16] if "out.video.velocity_bf16" in load_file(path) else [name]


def check(path: Path, case: str):
    forward = load_case(path)
    golden = forward.golden
    weights = path.parent / metadata(path)["weights"]
    if case.endswith(BF16):
        yield from _check_bf16(forward, golden_transformer(weights, dtype=None))
        return
    model = golden_transformer(weights)
    watch = _Watch(model)
    try:
        constants, modulation, velocities = forward.run(model)
    finally:
        watch.remove()

    yield from _check_conditioning(forward)
    found = {**_preprocessing(model, constants, modulation, forward), **watch.seen}
    for name in (name for name in golden if name.startswith("mid.")):
        if name in found:
            yield compare(name, found[name], golden[name], TOLERANCE)
        else:
            yield Result(f"{name} is not compared", math.nan, TOLERANCE)
    for stream, velocity in velocities.items():
        if velocity is None:
            assert f"out.{stream}.velocity" not in golden
            continue
        yield compare(f"out.{stream}.velocity", velocity, golden[f"out.{stream}.velocity"], TOLERANCE)
        x0 = x0_from_velocity(golden[f"in.{stream}.latent"], velocity, golden[f"in.{stream}.timesteps"])
        yield compare(f"out.{stream}.x0", x0, golden[f"out.{stream}.x0"], TOLERANCE)


def _check_bf16(forward: ForwardCase, model: LTXTransformer):
    """In bf16 we may be as far from float32 as twice the reference's own bf16 run is: two roundings of one kind."""
    for stream, velocity in forward.run(model)[2].items():
        expected = forward.golden[f"out.{stream}.velocity"]
        reference = worst_error(forward.golden[f"out.{stream}.velocity_bf16"], expected)
        yield compare(f"out.{stream}.velocity", velocity, expected, 2 * reference)


class _Watch:
    """Hooks that keep what passes through the model. Tokens are cloned: blocks update their streams in place."""

    def __init__(self, model: LTXTransformer):
        self.seen: dict[str, Tensor] = {}
        blocks = model.transformer_blocks
        entry = "mid.{}.tokens_after_patchify"
        self.hooks = [blocks[0].register_forward_pre_hook(lambda module, args: self._streams(args[1:3], entry))]
        for i, block in enumerate(blocks):
            name = f"mid.block{i}.{{}}"
            self.hooks.append(
                block.register_forward_hook(lambda module, args, out, name=name: self._streams(args[1:3], name))
            )
        for part in BLOCK_PARTS:
            name = f"mid.block0.{part}"
            self.hooks.append(
                getattr(blocks[0], part).register_forward_hook(
                    lambda module, args, out, name=name: self.seen.__setitem__(name, out.clone())
                )
            )

    def _streams(self, streams, name: str) -> None:
        for name_of_stream, stream in zip(STREAMS, streams, strict=True):
            if stream is not None:
                self.seen[name.format(name_of_stream)] = stream.tokens().clone()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()


def _preprocessing(
    model: LTXTransformer, constants: ForwardConstants, modulation: StepModulation, forward: ForwardCase
) -> dict[str, Tensor]:
    """Our constants and rows in the goldens' form: per token, without the last block's table, plain scales."""
    block = model.transformer_blocks[-1]
    tables = {
        "video": (block.scale_shift_table, block.prompt_scale_shift_table, block.scale_shift_table_a2v_ca_video),
        "audio": (
            block.audio_scale_shift_table,
            block.audio_prompt_scale_shift_table,
            block.scale_shift_table_a2v_ca_audio,
        ),
    }
    out_tables = {"video": model.scale_shift_table, "audio": model.audio_scale_shift_table}
    found: dict[str, Tensor] = {}
    for stream in STREAMS:
        c, m = getattr(constants, stream), getattr(modulation, stream)
        if c is None:
            continue
        batch, tokens, _ = forward.golden[f"in.{stream}.latent"].shape
        table, prompt_table, cross_table = tables[stream]

        def per_token(
            rows: Tensor, table: Tensor, scales: slice, batch=batch, tokens=tokens, index=c.timestep_index
        ) -> Tensor:
            rows = rows - table[:, None]
            rows[scales] -= 1
            rows = rows[:, index] if index is not None else rows.unsqueeze(2)  # (rows, 1 or B, 1 or N, width)
            return rows.expand(-1, batch, tokens, -1).permute(1, 2, 0, 3).flatten(2)

        found[f"mid.{stream}.adaln"] = per_token(m.blocks[-1], table, slice(1, None, 3))
        output = per_token(m.output, out_tables[stream], slice(1, None))
        shift, scale = output.chunk(2, dim=2)
        assert worst_error(shift, scale) < TOLERANCE  # both rows are table + embedding
        found[f"mid.{stream}.embedded_timestep"] = shift
        if model.prompt_adaln_single is not None:
            rows = m.prompt[-1] - prompt_table[:, None]
            rows[1] -= 1
            found[f"mid.{stream}.prompt_adaln"] = rows.transpose(0, 1).flatten(1)[:, None].expand(batch, -1, -1)
        found[f"mid.{stream}.rope_cos"] = c.rope.cos.transpose(1, 2).expand(batch, -1, -1, -1)
        found[f"mid.{stream}.rope_sin"] = c.rope.sin.transpose(1, 2).expand(batch, -1, -1, -1)
        if c.attention_bias is not None:
            found[f"mid.{stream}.self_attention_bias"] = c.attention_bias
        if c.cross_rope is not None:
            found[f"mid.{stream}.cross_rope_cos"] = c.cross_rope.cos.transpose(1, 2).expand(batch, -1, -1, -1)
            found[f"mid.{stream}.cross_rope_sin"] = c.cross_rope.sin.transpose(1, 2).expand(batch, -1, -1, -1)
            found[f"mid.{stream}.cross_scale_shift"] = per_token(m.cross[-1], cross_table[:4], slice(0, None, 2))
            gate = m.cross_gate[-1] - cross_table[4]
            found[f"mid.{stream}.cross_gate"] = gate[:, None].expand(batch, -1, -1)
    return found


def _check_conditioning(forward: ForwardCase):
    """Build the video's and audio's tokens from the file's `cond` list and compare states."""
    golden, spec = forward.golden, forward.spec
    video, audio, fps = forward.states["video"], forward.states["audio"], spec["fps"]
    built: dict[str, C.TokenState] = {}
    if video is not None:
        built["video"] = C.text_to_video_state(video.shape, fps)
    if audio is not None:
        built["audio"] = C.audio_state(audio.shape)
    for item in spec.get("cond", []):
        kind, attention = item["kind"], item.get("attn")
        if kind == "first_frame":
            built["video"] = C.replace_frame(built["video"], 0, golden["in.cond.first_frame_latent"], item["strength"])
        elif kind == "keyframe":
            latent = golden[f"in.cond.keyframe_latent_{item['frame']}"]
            built["video"] = C.append_keyframe(built["video"], item["frame"], latent, fps, item["strength"], attention)
        elif kind == "slots":
            built["video"] = C.append_slots(built["video"], item["frames"], fps)
        elif kind == "reference":
            built["video"] = C.append_reference(
                built["video"],
                golden["in.cond.reference_latent"],
                fps,
                item["strength"],
                spatial_ratio=item["down"],
                attention_strength=attention,
            )
        elif kind == "region_audio":
            built["audio"] = C.temporal_region(built["audio"], item["start"], item["end"])
        else:
            raise AssertionError(f"unknown conditioning {kind!r}")
    for stream, state in built.items():
        fields = ["positions", "keyframe_marker", "attention_strength"]
        if not (stream == "audio" and spec.get("frozen_audio")):
            fields.append("denoise_mask")
        if stream == "video" and spec.get("cond"):
            fields.append("clean")
        for field in fields:
            ours, expected = getattr(state, field), getattr(forward.states[stream], field)
            if ours is None or expected is None:
                yield Result(f"state.{stream}.{field} present", float((ours is None) != (expected is None)), 0.0)
            else:
                yield compare(f"state.{stream}.{field}", ours, expected, 0.0)
