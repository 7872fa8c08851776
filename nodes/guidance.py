"""LTX Graph Guidance: how far each stream is pushed, and away from what."""

from __future__ import annotations

import re

from comfy_api.latest import io

from ..ltx_runtime.errors import RequestError
from ..ltx_runtime.guidance import PASS_MODES, PRESETS, Guidance, GuidanceSpec

GuidanceSocket = io.Custom("LTXGRAPH_GUIDANCE")
CUSTOM = "custom"


class LTXGraphGuidance(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphGuidance",
            display_name="LTX Graph Guidance",
            category="LTXGraph",
            description="Guidance of the dev model: CFG, STG and modality guidance for video and sound, each an extra "
            "pass a step. The presets are Lightricks'.",
            search_aliases=["LTX 2.5", "CFG", "CFGGuider", "LTXVDualCFGGuider", "STG", "modality guidance", "rescale"],
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="dev",
                    tooltip="dev: 4 passes a step. dev HQ: 3 passes, for res_2s. distilled: no guidance. custom: the "
                    "values below, which the presets leave unread.",
                ),
                *_stream_inputs("video", 3.0),
                *_stream_inputs("audio", 7.0),
                io.String.Input("stg_blocks", default="28", tooltip="Blocks that STG perturbs, as 28 or 10, 28."),
                io.Combo.Input(
                    "passes",
                    options=list(PASS_MODES),
                    default="auto",
                    advanced=True,
                    tooltip="auto: all passes of a step as one batch where that fits in memory, else one after the "
                    "other. Read with every preset.",
                ),
            ],
            outputs=[
                GuidanceSocket.Output(display_name="guidance", tooltip="For LTX Graph Sampler, Warm Up and Parity Run.")
            ],
        )

    @classmethod
    def validate_inputs(cls, stg_blocks: str | None = None) -> bool | str:
        if stg_blocks is None:
            return True
        try:
            read_blocks(stg_blocks)
        except RequestError as error:
            return str(error)
        return True

    @classmethod
    def execute(cls, preset: str, passes: str, stg_blocks: str, **values) -> io.NodeOutput:
        if preset != CUSTOM:
            chosen = PRESETS[preset]
            return io.NodeOutput(Guidance(chosen.video, chosen.audio, passes))
        blocks = read_blocks(stg_blocks)
        video, audio = (
            GuidanceSpec(
                cfg_scale=values[f"{stream}_cfg"],
                stg_scale=values[f"{stream}_stg"],
                modality_scale=values[f"{stream}_modality"],
                rescale=values[f"{stream}_rescale"],
                skip_step=values[f"{stream}_skip_step"],
                stg_blocks=blocks,
            )
            for stream in ("video", "audio")
        )
        return io.NodeOutput(Guidance(video, audio, passes))


def _stream_inputs(stream: str, cfg: float) -> list[io.Input]:
    def scale(name: str, default: float, high: float, tooltip: str) -> io.Input:
        return io.Float.Input(f"{stream}_{name}", default=default, min=0.0, max=high, step=0.01, tooltip=tooltip)

    return [
        scale("cfg", cfg, 100.0, f"Pushes the {stream} away from the negative prompt; 1 = off."),
        scale("stg", 1.0, 100.0, f"Pushes the {stream} away from a pass with perturbed attention; 0 = off."),
        scale("modality", 3.0, 100.0, f"Pushes the {stream} away from a pass without the other stream; 1 = off."),
        scale("rescale", 0.7, 1.0, "Brings the spread back to that of the prompt's own pass; 0 = off, 1 = all of it."),
        io.Int.Input(
            f"{stream}_skip_step",
            default=0,
            min=0,
            max=100,
            advanced=True,
            tooltip=f"n: of every n + 1 steps the {stream} is predicted in the first only. Faster, coarser.",
        ),
    ]


def read_blocks(text: str) -> tuple[int, ...]:
    """Block numbers out of "10, 28". Raises RequestError for anything else."""
    words = [word for word in re.split(r"[,;\s]+", text.strip()) if word]
    if not all(word.isdecimal() for word in words):
        raise RequestError(f"stg_blocks={text!r}: write block numbers, as 28 or 10, 28.")
    return tuple(sorted({int(word) for word in words}))
