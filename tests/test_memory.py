"""Memory asked for before a render, against peaks measured on other implementations (h200_baseline.md section 3)."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.config import TransformerConfig
from ltx_runtime.memory import sampling_bytes
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape

DATA = Path(__file__).parent


@pytest.fixture(scope="module")
def config() -> TransformerConfig:
    settings = json.loads((DATA / "configs" / "transformer-22b.json").read_text())
    manifest = json.loads((DATA / "manifests" / "transformer-22b.json").read_text())
    prefix = "model.diffusion_model."
    shapes = {name.removeprefix(prefix): tuple(shape) for name, (_, shape) in manifest.items()}
    return TransformerConfig.from_shapes(settings, shapes)


# Peak less 38.0 GB of weights: fused at S0 and S1, ComfyUI's own at S2.
@pytest.mark.parametrize("width, height, measured_gb", [(384, 256, 0.2), (768, 512, 0.6), (1536, 1024, 2.9)])
def test_within_a_factor_of_two_of_measured_peaks(config, width, height, measured_gb):
    request = SampleRequest(
        video=text_to_video_state(VideoLatentShape.from_pixels(width, height, 121), 24.0, device="meta"),
        audio=audio_state(AudioLatentShape(1, 8, 126, 16), device="meta"),
        text=TextFeatures(torch.empty(1, 1, 6144, device="meta"), False),
        sigmas=torch.tensor([1.0, 0.0]),
        seed=0,
    )
    eager = sampling_bytes(config, request, item_bytes=2, recorded=False)
    assert measured_gb / 2 < eager / 1e9 < measured_gb * 2
    assert sampling_bytes(config, request, item_bytes=2, recorded=True) == 2 * eager
