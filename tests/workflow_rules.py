"""The demo rule of workflows/README.md as a function, for tests and CI."""
from __future__ import annotations

import copy

TEXT_ENCODER_LOADERS = ("CLIPLoader", "DualCLIPLoader", "LTXAVTextEncoderLoader")


def without_text_nodes(api: dict[str, dict], conditioning_name: str) -> dict[str, dict]:
    """An API workflow whose text nodes are replaced by LTXGraphLoadConditioning, everything else untouched."""
    replaced = {}
    for node_id, node in api.items():
        if node["class_type"] in TEXT_ENCODER_LOADERS:
            continue
        if node["class_type"] == "CLIPTextEncode":
            node = {
                "class_type": "LTXGraphLoadConditioning",
                "inputs": {"conditioning_name": conditioning_name},
                "_meta": {"title": "LTX Graph Load Conditioning"},
            }
        replaced[node_id] = copy.deepcopy(node)
    return replaced
