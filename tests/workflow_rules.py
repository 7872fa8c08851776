"""Rules of workflows/README.md as functions, for tests and CI: workflows in API format, changed by nothing else."""

from __future__ import annotations

import copy

TEXT_ENCODER_LOADERS = ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader")
# Inputs that a newer core node has under another name; it still takes that of the bundled files. SaveVideo's codec
# moved under its format in 0.33.
RENAMED_SINCE = {("SaveVideo", "format.codec"): "codec"}
# What the small rule sets, by node. Two stages double the size, so it must be a multiple of 32 before that.
SMALL_WIDTH, SMALL_HEIGHT, SMALL_LENGTH = 64, 64, 17
# A workflow with tiles is made as wide as two of them.
SMALL_TILES = {"tile_size": 64, "overlap": 32}
SMALL_TILED_WIDTH = 96
SMALL_STEPS = 2
SMALL_REGION = {"start_time": 0.2, "end_time": 0.5}


def without_text_nodes(
    api: dict[str, dict], conditioning_name: str, negative_name: str | None = None
) -> dict[str, dict]:
    """The demo rule: text nodes are replaced by LTXGraphLoadConditioning, everything else is untouched.

    What hangs on a text encoder's loader otherwise (a prompt enhancer and what shows its words) goes with the loader.
    negative_name: for text nodes with "negative" in their title; none: conditioning_name for all.
    """
    replaced = {}
    for node_id, node in api.items():
        if node["class_type"] in TEXT_ENCODER_LOADERS:
            continue
        if node["class_type"] == "CLIPTextEncode":
            is_negative = negative_name is not None and "negative" in node["_meta"]["title"].lower()
            node = {
                "class_type": "LTXGraphLoadConditioning",
                "inputs": {"conditioning_name": negative_name if is_negative else conditioning_name},
                "_meta": {"title": "LTX Graph Load Conditioning"},
            }
        replaced[node_id] = copy.deepcopy(node)
    while hanging := [i for i, node in replaced.items() if not _sources(node) <= set(replaced)]:
        for node_id in hanging:
            del replaced[node_id]
    return replaced


def in_bundled_names(api: dict[str, dict]) -> dict[str, dict]:
    """A conversion by a newer ComfyUI with its core inputs under the names that the bundled files have."""
    api = copy.deepcopy(api)
    for node in api.values():
        names = {new: old for (kind, new), old in RENAMED_SINCE.items() if kind == node["class_type"]}
        node["inputs"] = {names.get(name, name): value for name, value in node["inputs"].items()}
    return api


def _sources(node: dict) -> set[str]:
    """Ids of the nodes that this one is connected to."""
    return {value[0] for value in node["inputs"].values() if isinstance(value, list)}


def with_decoder(api: dict[str, dict], vae_name: str) -> dict[str, dict]:
    """The decoder rule: every LTX Graph Video VAE Loader has this file, everything else is untouched."""
    api = copy.deepcopy(api)
    for node in api.values():
        if node["class_type"] == "LTXGraphVideoVAELoader":
            node["inputs"]["vae_name"] = vae_name
    return api


def small(api: dict[str, dict]) -> dict[str, dict]:
    """The small rule: sizes, lengths, steps, tiles and seconds that tiny files render in no time on a CPU."""
    api = copy.deepcopy(api)
    width = SMALL_TILED_WIDTH if _tiled(api) else SMALL_WIDTH
    for node in api.values():
        inputs = node["inputs"]
        if node["class_type"] == "LTXGraphVideoDecode" and inputs["tile_size"]:
            inputs |= SMALL_TILES
        if node["class_type"] == "LTXGraphEmptyLatent":
            inputs |= {"width": width, "height": SMALL_HEIGHT, "length": SMALL_LENGTH}
        elif node["class_type"] == "LTXGraphVideoEncode":
            inputs |= {"width": SMALL_WIDTH, "height": SMALL_HEIGHT}
        elif node["class_type"] == "LTXGraphTemporalRegion" and inputs["end_time"]:
            inputs |= SMALL_REGION
        if "steps" in inputs:
            inputs["steps"] = SMALL_STEPS
    return api


def _tiled(api: dict[str, dict]) -> bool:
    return any(node["inputs"].get("tile_size") for node in api.values() if node["class_type"] == "LTXGraphVideoDecode")


def small_size(api: dict[str, dict]) -> tuple[int, int, int]:
    """(frames, width, height) of the video that a workflow of the small rule saves."""
    scale = 2 if any(node["class_type"] == "LTXGraphLatentUpscale" for node in api.values()) else 1
    return SMALL_LENGTH, (SMALL_TILED_WIDTH if _tiled(api) else SMALL_WIDTH) * scale, SMALL_HEIGHT * scale
