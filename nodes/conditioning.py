"""CONDITIONING sockets: what the sampler reads out of one, and files that keep one."""
from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx_runtime.conditioning_file import load_conditioning, save_conditioning
from ..ltx_runtime.config import TransformerConfig
from ..ltx_runtime.errors import LTXError, RequestError
from ..ltx_runtime.sampler import TextFeatures
from . import host
from .checks import check_socket

# What native ComfyUI assumes when the conditioning says nothing.
DEFAULT_FRAME_RATE = 25.0

# Keys that mean nothing to LTX-2.x, in core's sampler as here.
_WITHOUT_EFFECT = ("pooled_output",)
# Values of other keys at which they change nothing.
_NEUTRAL: dict[str, Any] = {"start_percent": 0.0, "end_percent": 1.0, "strength": 1.0}
# Guides as native nodes emit them; comfyui_conditioning.py reads them.
_GUIDE_KEYS = {"keyframe_idxs": torch.Tensor, "guide_attention_entries": (list, tuple), "generated_keyframes": dict}
# The sound of a reference voice: {"tokens": (B, T, features)}.
_VOICE_KEY = "ref_audio"
_READ = ("unprocessed_ltxav_embeds", "frame_rate", _VOICE_KEY, *_GUIDE_KEYS)


@dataclass(frozen=True)
class Prompt:
    """A CONDITIONING in plain values. guides: its keys about guides, as they came. voice: (B, T, features), tokens of a
    reference sound, or None. notes: what the report should say."""

    text: TextFeatures
    frame_rate: float
    guides: dict[str, Any]
    voice: torch.Tensor | None
    notes: tuple[str, ...]


def read_conditioning(conditioning: Any, name: str, config: TransformerConfig) -> Prompt:
    """Read the one entry of a CONDITIONING for this transformer. name: the input it came in by, for messages.

    Raises RequestError for several entries, a key with a value that this sampler doesn't honour, a wrong width, or a
    frame rate that is not a positive number.
    """
    check_socket(conditioning, list, name, "an encoded prompt")
    if len(conditioning) != 1:
        raise RequestError(
            f"{name}: {len(conditioning)} conditioning entries; LTX Graph Sampler takes one prompt. Combined, "
            f"scheduled or regional prompts are not supported."
        )
    features, settings = conditioning[0]
    _refuse_unknown(settings, name)
    unprocessed = bool(settings.get("unprocessed_ltxav_embeds"))
    width = config.context_width + config.audio_context_width
    if features is None or features.ndim != 3 or features.shape[-1] != width:
        shape = None if features is None else tuple(features.shape)
        raise RequestError(
            f"{name}: the text features have shape {shape}, this transformer (LTX {config.model_version}) takes "
            f"(batch, tokens, {width}): {config.context_width} for video and {config.audio_context_width} for sound. "
            f"Encode the prompt with the LTX text encoder that belongs to this transformer."
        )
    frame_rate = settings.get("frame_rate")
    notes = ()
    if frame_rate is None:
        frame_rate = DEFAULT_FRAME_RATE
        note = (
            f"{name} names no frame_rate: {DEFAULT_FRAME_RATE:g} is taken, as native ComfyUI does (LTXVConditioning "
            "sets it)"
        )
        notes = (note,)
    if not isinstance(frame_rate, Real) or not math.isfinite(frame_rate) or frame_rate <= 0:
        raise RequestError(f"{name}: frame_rate={frame_rate!r} must be a positive number of frames a second.")
    frame_rate = float(frame_rate)
    guides = {key: settings[key] for key in _GUIDE_KEYS if settings.get(key) is not None}
    for key, value in guides.items():
        if not isinstance(value, _GUIDE_KEYS[key]):
            raise RequestError(f"{name}: {key} is a {type(value).__name__}; LTXVAddGuide writes something else there.")
    voice = _read_voice(settings, name)
    if voice is not None:
        note = (
            f"{name}: a reference voice of {voice.shape[1]} tokens conditions the sound. The identity guidance of "
            "LTXVReferenceAudio is in its model output, which LTX Graph does not take: it is off here"
        )
        notes += (note,)
    text = TextFeatures(features.float(), processed=not unprocessed)
    return Prompt(text, frame_rate, guides, voice, notes)


def check_same_guides(positive: Prompt, negative: Prompt) -> None:
    """Raise RequestError unless both prompts belong to one clip: the same frame rate, guides and reference voice."""
    if negative.frame_rate != positive.frame_rate:
        raise RequestError(
            f"negative: frame_rate={negative.frame_rate:g}, positive has {positive.frame_rate:g}. Set it on both "
            f"(LTXVConditioning)."
        )
    if not _same(*(prompt.guides.get("keyframe_idxs") for prompt in (positive, negative))):
        raise RequestError("negative: its guides are not those of positive. Take both from the same guide node.")
    if positive.guides.get("generated_keyframes") != negative.guides.get("generated_keyframes"):
        raise RequestError(
            "negative: its generated_keyframes are not those of positive. Take both from the same keyframe node."
        )
    if not _same(positive.voice, negative.voice):
        raise RequestError(
            "negative: its reference voice (ref_audio) is not that of positive. Take both from the same node."
        )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _read_voice(settings: dict[str, Any], name: str) -> torch.Tensor | None:
    voice = settings.get(_VOICE_KEY)
    if voice is None:
        return None
    tokens = voice.get("tokens") if isinstance(voice, dict) else None
    if not isinstance(tokens, torch.Tensor):
        raise RequestError(
            f"{name}: {_VOICE_KEY} is a {type(voice).__name__}; LTXVReferenceAudio writes a dict with its tokens there."
        )
    return tokens


def _refuse_unknown(settings: dict[str, Any], name: str) -> None:
    refused = []
    for key, value in settings.items():
        if value is None or key in _READ or key in _WITHOUT_EFFECT:
            continue
        if key in _NEUTRAL and isinstance(value, (int, float)) and value == _NEUTRAL[key]:
            continue
        refused.append(key)
    if refused:
        raise RequestError(
            f"{name}: this conditioning carries {', '.join(sorted(map(str, refused)))}, which LTX Graph Sampler does "
            f"not honour yet and will not ignore. Remove the node that sets it, or use the native sampler."
        )


class LTXGraphSaveConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphSaveConditioning",
            display_name="LTX Graph Save Conditioning",
            category="LTXGraph",
            description="Keeps an encoded prompt as a file in output/ltxgraph/conditioning, so that later renders need "
            "no text encoder (24 GB).",
            search_aliases=["LTX 2.5", "save prompt", "text encoder cache"],
            is_output_node=True,
            inputs=[
                io.Conditioning.Input("conditioning", tooltip="The encoded prompt to save; it is passed on unchanged."),
                io.String.Input(
                    "filename_prefix", default="prompt", tooltip="A plain name; a number and .safetensors are added."
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning", tooltip="What came in, unchanged.")],
        )

    @classmethod
    def validate_inputs(cls, filename_prefix: str | None = None) -> bool | str:
        if filename_prefix is None:
            return True
        try:
            host.saved_conditioning_path(filename_prefix)
        except RequestError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, conditioning, filename_prefix: str) -> io.NodeOutput:
        path = host.new_conditioning_path(filename_prefix)
        try:
            save_conditioning(path, conditioning)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return io.NodeOutput(conditioning, ui={"text": [f"{path.name} in {path.parent}"]})


class LTXGraphLoadConditioning(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphLoadConditioning",
            display_name="LTX Graph Load Conditioning",
            category="LTXGraph",
            description="Reads an encoded prompt that LTX Graph Save Conditioning wrote, from "
            "output/ltxgraph/conditioning or input.",
            search_aliases=["LTX 2.5", "load prompt", "text encoder cache"],
            inputs=[
                io.Combo.Input(
                    "conditioning_name",
                    options=host.conditioning_names(),
                    display_name="file",
                    tooltip="Names marked [output] are in output/ltxgraph/conditioning, the others in input.",
                ),
            ],
            outputs=[io.Conditioning.Output(display_name="conditioning", tooltip="As it was saved, bit for bit.")],
        )

    @classmethod
    def validate_inputs(cls, conditioning_name: str | None = None) -> bool | str:
        if conditioning_name is None:
            return True
        try:
            host.conditioning_path(conditioning_name)
        except (LTXError, OSError) as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, conditioning_name: str | None = None):
        return None if conditioning_name is None else host.file_state(host.conditioning_path(conditioning_name))

    @classmethod
    def execute(cls, conditioning_name: str) -> io.NodeOutput:
        # Lists, not tuples: core nodes that set values index an entry's parts and copy its dict.
        entries = load_conditioning(host.conditioning_path(conditioning_name))
        return io.NodeOutput([[features, dict(settings)] for features, settings in entries])
