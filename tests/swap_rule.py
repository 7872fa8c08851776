"""docs/swap_rule.md as a function: a native LTX-2.5 workflow in API format with LTX Graph's nodes in it."""

from __future__ import annotations

import copy

OURS = {
    "UNETLoader": "LTXGraphModelLoader",
    "LatentUpscaleModelLoader": "LTXGraphUpscalerLoader",
    "VAEDecode": "LTXGraphVideoDecode",
    "VAEDecodeTiled": "LTXGraphVideoDecode",
    "LTXVAudioVAEDecode": "LTXGraphAudioDecode",
    "LTXVLatentUpsampler": "LTXGraphLatentUpscale",
    "SamplerCustomAdvanced": "LTXGraphSampler",
}
# Guider -> the inputs that hold its scales of video and sound.
GUIDERS = {"LTXVDualCFGGuider": ("video_cfg", "audio_cfg"), "CFGGuider": ("cfg", "cfg")}
# Input of a native node that reads a VAE -> the loader and the input that replace it.
VAE_INPUTS = {
    ("VAEDecode", "vae"): ("LTXGraphVideoVAELoader", "video_vae"),
    ("VAEDecodeTiled", "vae"): ("LTXGraphVideoVAELoader", "video_vae"),
    ("LTXVLatentUpsampler", "vae"): ("LTXGraphVideoVAELoader", "video_vae"),
    ("LTXVAudioVAEDecode", "audio_vae"): ("LTXGraphAudioVAELoader", "audio_vae"),
}
# File that a template names -> the form of it that LTX Graph reads, both without .safetensors.
FILES = {
    "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot": "ltx-2.5-22b-distilled-transformer-bf16",
    "ltx-2.5-video-vae-bf16": "ltx-2.5-video-vae-conv-bf16",
}
SAMPLER_SETTINGS = {
    "seed": 0,
    "schedule": "auto",
    "steps": 30,
    "sampler_name": "auto",
    "cuda_graph": "auto",
    "on_capture_failure": "eager",
    "noise_convention": "comfyui",
    "compatibility": "reference",
}
GUIDANCE_OFF = {f"{stream}_{name}": 0.0 for stream in ("video", "audio") for name in ("stg", "rescale")} | {
    "video_modality": 1.0,
    "audio_modality": 1.0,
    "video_skip_step": 0,
    "audio_skip_step": 0,
    "stg_blocks": "",
    "passes": "auto",
}


def swap(native: dict[str, dict]) -> dict[str, dict]:
    """Replaced nodes keep their ids; a loader of ours beside a native one that stays has its id and -ltxgraph."""
    api = copy.deepcopy(native)
    for node in api.values():
        for name, value in node["inputs"].items():
            if isinstance(value, str) and value.removesuffix(".safetensors") in FILES:
                node["inputs"][name] = FILES[value.removesuffix(".safetensors")] + ".safetensors"
    _swap_vae_loaders(api)
    for node_id, node in list(api.items()):
        if node["class_type"] == "SamplerCustomAdvanced":
            _swap_sampler(api, node_id)
        elif node["class_type"] in OURS:
            _rename(node, OURS[node["class_type"]])
            for name in ("weight_dtype", "tile_size", "overlap", "temporal_overlap"):
                node["inputs"].pop(name, None)
            if node["class_type"] == "LTXGraphVideoDecode":
                node["inputs"]["temporal_size"] = 0
    for node_id in [i for i, node in api.items() if node["class_type"] in GUIDERS]:
        del api[node_id]
    return api


def _swap_vae_loaders(api: dict[str, dict]) -> None:
    for loader_id in [i for i, node in api.items() if node["class_type"] == "VAELoader"]:
        readers = [
            (node, name) for node in api.values() for name, value in node["inputs"].items() if value == [loader_id, 0]
        ]
        ours = [(node, name) for node, name in readers if (node["class_type"], name) in VAE_INPUTS]
        if not ours:
            continue
        kinds = {VAE_INPUTS[node["class_type"], name][0] for node, name in ours}
        (kind,) = kinds  # one file is either a video VAE or an audio VAE
        new_id = loader_id if len(ours) == len(readers) else f"{loader_id}-ltxgraph"
        api[new_id] = copy.deepcopy(api[loader_id])
        _rename(api[new_id], kind)
        for node, name in ours:
            del node["inputs"][name]
            node["inputs"][VAE_INPUTS[node["class_type"], name][1]] = [new_id, 0]


def _swap_sampler(api: dict[str, dict], node_id: str) -> None:
    node = api[node_id]
    guider_id = node["inputs"].pop("guider")[0]
    guider = api[guider_id]
    for name in ("model", "positive", "negative"):
        node["inputs"][name] = guider["inputs"][name]
    node["inputs"] |= SAMPLER_SETTINGS
    _rename(node, "LTXGraphSampler")
    video_cfg, audio_cfg = (guider["inputs"][name] for name in GUIDERS[guider["class_type"]])
    if (video_cfg, audio_cfg) != (1, 1):
        values = GUIDANCE_OFF | {"preset": "custom", "video_cfg": video_cfg, "audio_cfg": audio_cfg}
        api[f"{guider_id}-ltxgraph"] = {"class_type": "LTXGraphGuidance", "inputs": values, "_meta": guider["_meta"]}
        node["inputs"]["guidance"] = [f"{guider_id}-ltxgraph", 0]
    for reader in api.values():
        for name, value in reader["inputs"].items():
            if value == [node_id, 1]:  # denoised_output; ours has the latent at 0 and the report at 1
                reader["inputs"][name] = [node_id, 0]


def _rename(node: dict, class_type: str) -> None:
    node["class_type"] = class_type
    node["_meta"] = {"title": class_type}
