"""Latent upsamplers on the GPU: graphed equals eager bit for bit, float32 is float32, memory as announced. Run under
both allocators:

    python3 -m pytest tests/gpu
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu
"""
from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ltx_runtime.config import UpsamplerConfig
from ltx_runtime.cuda_graph import GraphCache, GraphKey
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.tiny import fill_random, write_tiny_upsampler
from ltx_runtime.upsampler import LatentUpsampler, UpsamplerNetwork, load_upsampler
from ltx_runtime.video_vae import PerChannelStatistics

GOLDENS = Path(__file__).parents[1] / "goldens"
KINDS = ("spatial", "temporal")
REPLAYS = 3


@dataclass(frozen=True)
class Nothing:
    pass


@dataclass(frozen=True)
class Inputs:
    latent: torch.Tensor


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def cache(device):
    cache = GraphCache(device)
    yield cache
    cache.close()


def statistics(device, channels: int = 128) -> PerChannelStatistics:
    module = build_on_meta(lambda: PerChannelStatistics(channels))
    fill_random(module, device=device)
    return module


def random_latent(shape, seed: int, device) -> torch.Tensor:
    return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))


@pytest.fixture(params=[(kind, size) for kind in KINDS for size in ("tiny", "published")], ids="-".join)
def upsampler(request, device, tmp_path) -> LatentUpsampler:
    """Random weights, at the tiny width or at the published one."""
    kind, size = request.param
    path = write_tiny_upsampler(tmp_path / "u.safetensors", spatial=kind == "spatial")
    upsampler = load_upsampler(path, device=device)
    if size == "published":
        width = 1024 if kind == "spatial" else 512
        upsampler.config = UpsamplerConfig(in_channels=128, mid_channels=width, num_blocks=4, spatial=kind == "spatial")
        upsampler.module = build_on_meta(lambda: UpsamplerNetwork(upsampler.config))
        fill_random(upsampler.module, device=device)
    return upsampler


def test_replays_equal_eager_bit_for_bit(upsampler, cache, device):
    """A render of 384x256x121 between its stages, four latents with different values."""
    constants = statistics(device)
    latents = [random_latent((1, 128, 16, 8, 12), seed, device) for seed in range(1 + REPLAYS)]
    eager = [upsampler.compute(latent, constants) for latent in latents]

    def run(_, inputs: Inputs) -> torch.Tensor:
        return upsampler.compute(inputs.latent, constants)

    key = GraphKey.of((Nothing(), Inputs(latents[0])), weight_generation=upsampler.generation)
    recording, first = cache.capture(key, run, Nothing(), Inputs(latents[0]), lambda name: contextlib.nullcontext())
    assert torch.equal(first, eager[0])
    for latent, expected in zip(latents[1:], eager[1:], strict=True):
        recording.load(Nothing(), Inputs(latent))
        assert torch.equal(recording.replay(), expected)
        assert torch.equal(upsampler.compute(latent, constants), expected), "eager does not equal itself"
    assert not torch.equal(eager[0], eager[1])


def test_the_device_work_never_waits_for_the_host(upsampler, device):
    constants = statistics(device)
    latent = random_latent((1, 128, 3, 4, 6), 0, device)
    upsampler.compute(latent, constants)
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        upsampler.compute(latent, constants)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_takes_the_memory_that_it_announces(upsampler, device):
    constants = statistics(device)
    shape = (1, 128, 16, 16, 24)  # 768x512x121
    latent = random_latent(shape, 0, device)
    upsampler.compute(latent, constants)  # makes cuDNN's workspace
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    upsampler.compute(latent, constants)
    peak = torch.cuda.max_memory_allocated(device) - before
    announced = upsampler.activation_bytes(shape)
    assert announced / 3 < peak < announced * 1.1, f"{peak / 2**20:.0f} MiB of {announced / 2**20:.0f}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("exact_float32")
def test_float32_on_the_device_is_float32_on_the_cpu(kind, device):
    path = GOLDENS / f"latent_upsampler_{kind}_x2_tiny.safetensors"
    latent = torch.randn(2, 4, 5, 6, 7, generator=torch.Generator().manual_seed(0))
    constants = statistics("cpu", channels=4)
    expected = load_upsampler(path, device="cpu", dtype=torch.float32).upscale(latent, constants)
    found = load_upsampler(path, device=device, dtype=torch.float32).upscale(latent, constants.to(device))
    assert (found.cpu() - expected).abs().max() < 1e-4
