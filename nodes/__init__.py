"""The node list. A node that this ComfyUI can't support is left out with a reason; the others still load."""
from __future__ import annotations

import logging
from importlib import import_module

from comfy_api.latest import ComfyExtension, io

logger = logging.getLogger("ltxgraph")

NODES = (
    ("load", "LTXGraphModelLoader"),
    ("lora", "LTXGraphLoRA"),
    ("load", "LTXGraphVideoVAELoader"),
    ("audio", "LTXGraphAudioVAELoader"),
    ("upscale", "LTXGraphUpscalerLoader"),
    ("latents", "LTXGraphEmptyLatent"),
    ("conditioning", "LTXGraphSaveConditioning"),
    ("conditioning", "LTXGraphLoadConditioning"),
    ("duration", "LTXGraphDuration"),
    ("encode", "LTXGraphVideoEncode"),
    ("audio", "LTXGraphAudioEncode"),
    ("given", "LTXGraphImageToVideo"),
    ("given", "LTXGraphTemporalRegion"),
    ("guidance", "LTXGraphGuidance"),
    ("warm_up", "LTXGraphWarmUp"),
    ("sample", "LTXGraphSampler"),
    ("upscale", "LTXGraphLatentUpscale"),
    ("decode", "LTXGraphVideoDecode"),
    ("audio", "LTXGraphAudioDecode"),
    ("timing_parity", "LTXGraphTimingParity"),
    ("timing_parity", "LTXGraphParityRun"),
)


class LTXGraphExtension(ComfyExtension):
    async def on_load(self) -> None:
        import_module(".host", __package__).register_timeline_route()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        usable = []
        for module, name in NODES:
            try:
                node = getattr(import_module(f".{module}", __package__), name)
                node.GET_SCHEMA()
            except Exception as error:  # noqa: BLE001 - whatever an update took away, nodes that don't need it must load
                logger.error("node %s is not available: %s: %s", name, type(error).__name__, error)
                continue
            usable.append(node)
        return usable
