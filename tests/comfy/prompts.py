"""API workflows of the server tests, built from the node ids and input names that design.md section 3 fixes."""
from __future__ import annotations

import copy

from ltx_runtime.published import CONV_VAE_FILE, TRANSFORMER_FILE
from ltx_runtime.tiny import POSITIVE_FILE

FRAMES, HEIGHT, WIDTH = 9, 64, 96


def node(class_type: str, **inputs) -> dict:
    return {"class_type": class_type, "inputs": inputs}


def render() -> dict:
    """Text to video at the smallest size with every structure: two latent frames, sound, eight distilled steps."""
    return copy.deepcopy(_RENDER)


def parity_run() -> dict:
    """The same render's inputs into the node that runs both arms."""
    prompt = render()
    inputs = prompt["sampler"]["inputs"]
    for name in ("cuda_graph", "on_capture_failure"):
        del inputs[name]
    for name in ("sampler", "decode", "save"):
        del prompt[name]
    inputs |= {"video_vae": ["video_vae", 0], "replays": 3, "seeds": 2, "tolerance": 0.0, "on_difference": "report"}
    prompt["parity"] = node("LTXGraphParityRun", **inputs)
    return prompt


_RENDER = {
    "model": node("LTXGraphModelLoader", unet_name=TRANSFORMER_FILE),
    "video_vae": node("LTXGraphVideoVAELoader", vae_name=CONV_VAE_FILE),
    "positive": node("LTXGraphLoadConditioning", conditioning_name=POSITIVE_FILE),
    "latent": node("LTXGraphEmptyLatent", width=WIDTH, height=HEIGHT, length=FRAMES, batch_size=1, frame_rate=24.0,
                   with_audio=True),
    "sampler": node("LTXGraphSampler", model=["model", 0], positive=["positive", 0], latent_image=["latent", 0], seed=7,
                    schedule="auto", steps=30, sampler_name="auto", cuda_graph="auto", on_capture_failure="eager",
                    noise_convention="comfyui", compatibility="reference"),
    "decode": node("LTXGraphVideoDecode", video_vae=["video_vae", 0], samples=["sampler", 0], temporal_size=0,
                   report=["sampler", 1]),
    "save": node("SaveImage", images=["decode", 0], filename_prefix="frames"),
}
