"""Full-size models with random weights, built on the device from the published manifests: no file of 42 GB is needed.

The numbers they give are the real ones in time and memory; their pictures mean nothing.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ltx_runtime.audio_vae import AudioVAE
from ltx_runtime.checkpoint import CheckpointHeader, TensorSpec
from ltx_runtime.cuda_graph import allocator_backend
from ltx_runtime.runtime import TransformerModel
from ltx_runtime.tiny import fill_random
from ltx_runtime.upsampler import LatentUpsampler
from ltx_runtime.video_vae import VideoVAE
from ltx_runtime.video_vae.encode import VideoEncoder

FRAMES, FRAME_RATE = 121, 24.0
SIZES = {"S0": (384, 256), "S1": (768, 512), "S2": (1536, 1024)}
_BYTES = {"BF16": 2, "F32": 4, "I64": 8}


class _RandomWeights:
    """Beside a ResidentModule: the weights are random, filled on the device, instead of read from the file."""

    published: tuple[str, str]  # manifest and config name, component

    def __init__(self, device: torch.device):
        super().__init__(_published_header(*self.published), device=device)

    def _fill(self, module, timeline, on_progress):
        fill_random(module, device=self.device)


class RandomTransformer(_RandomWeights, TransformerModel):
    """The published 22B layout."""

    published = ("transformer-22b", "transformer")


class RandomVideoVAE(_RandomWeights, VideoVAE):
    """The decoder of the published conv video VAE."""

    published = ("video_vae_conv", "video_vae_conv")


class RandomDiffusionVAE(_RandomWeights, VideoVAE):
    """The decoder of the published diffusion video VAE."""

    published = ("video_vae_diffusion", "video_vae_diffusion")


class RandomVideoEncoder(_RandomWeights, VideoEncoder):
    """The encoder of the published video VAEs."""

    published = ("video_vae_conv", "video_vae_conv")


class RandomUpsampler(_RandomWeights, LatentUpsampler):
    """The published spatial x2 upsampler."""

    published = ("latent_upsampler_spatial_x2", "latent_upsampler")


class RandomAudioVAE(_RandomWeights, AudioVAE):
    """The published audio VAE and vocoder."""

    published = ("audio_vae", "audio_vae")

    def _fill(self, module, timeline, on_progress):
        super()._fill(module, timeline, on_progress)
        module.prepare()


def environment() -> dict:
    """Where a figure was measured."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_gib": round(properties.total_memory / 2**30),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "allocator": allocator_backend(),
        "python": sys.version.split()[0],
        "weights": "random, published 22B layout",
    }


def _published_header(name: str, component: str) -> CheckpointHeader:
    """A header as the published file has it, from its manifest and config. There is no file behind it."""
    manifest = json.loads((ROOT / "tests" / "manifests" / f"{name}.json").read_text())
    config = json.loads((ROOT / "tests" / "configs" / f"{name}.json").read_text())
    config = config.get("metadata", {}).get("config", config)
    tensors, end = {}, 0
    for tensor, (dtype, shape) in manifest.items():
        start, end = end, end + torch.Size(shape).numel() * _BYTES[dtype]
        tensors[tensor] = TensorSpec(dtype, tuple(shape), start, end)
    prefix = "model.diffusion_model." if component == "transformer" else ""
    return CheckpointHeader(
        Path(f"{name} with random weights"), end, 0, {"model_version": "2.5.0"}, config, tensors, {component: prefix}
    )
