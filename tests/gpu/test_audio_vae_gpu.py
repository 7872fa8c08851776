"""The audio VAE on the GPU: graphed equals eager bit for bit, eager equals itself, and float32 is float32. Run under
both allocators:

    python3 -m pytest tests/gpu
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ltx_runtime.audio_vae import AudioVAEConfig, AudioVAENetwork, load_audio_vae
from ltx_runtime.audio_vae.network import run_stages
from ltx_runtime.audio_vae.resample import Resampler
from ltx_runtime.cuda_graph import GraphCache, GraphKey
from ltx_runtime.parity import waveform_range
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import fill_random, tiny_audio_vae_config, write_tiny_audio_vae

TESTS = Path(__file__).parents[1]
FIVE_SECONDS = 126  # latent frames of 121 frames at 24 a second
REPLAYS = 3


@dataclass(frozen=True)
class Inputs:
    x: Tensor


def published_config() -> AudioVAEConfig:
    return AudioVAEConfig.from_json(json.loads((TESTS / "configs" / "audio_vae.json").read_text()))


def random_latent(frames: int, seed: int, device: torch.device) -> Tensor:
    return torch.randn(1, 8, frames, 16, device=device, generator=torch.Generator(device).manual_seed(seed))


def random_sound(samples: int, seed: int, device: torch.device) -> Tensor:
    return torch.rand(1, 2, samples, device=device, generator=torch.Generator(device).manual_seed(seed)) - 0.5


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["tiny", "published"])
def network(request) -> AudioVAENetwork:
    """Random weights at both widths, the vocoder's in float32 and the mel VAE's in bfloat16."""
    config = tiny_audio_vae_config() if request.param == "tiny" else published_config()
    with torch.inference_mode():
        network = build_on_meta(lambda: AudioVAENetwork(config))
        fill_random(network, device="cuda")
        network.prepare()
    return network


@pytest.fixture
def cache(device):
    cache = GraphCache(device)
    yield cache
    cache.close()


def assert_replays_equal_eager(cache: GraphCache, stages, inputs: list[Tensor]) -> None:
    """Record on the first input, replay on all others, and compare each with an eager run before and after."""

    def forward(_, inputs: Inputs) -> Tensor:
        return run_stages(stages, inputs.x)

    before = [run_stages(stages, x) for x in inputs]
    assert not torch.equal(before[0], before[1]), "the inputs do not reach the output"
    key = GraphKey.of(Inputs(inputs[0]), weight_generation=1)
    step, outputs = cache.capture(key, forward, (), Inputs(inputs[0]), lambda name: contextlib.nullcontext())
    assert torch.equal(outputs, before[0])
    for x, expected in zip(inputs[1:], before[1:], strict=True):
        step.load((), Inputs(x))
        assert torch.equal(step.replay(), expected)
    for x, expected in zip(inputs, before, strict=True):
        assert torch.equal(run_stages(stages, x), expected), "eager changed after the capture"


def test_a_graph_of_the_whole_decode_equals_eager(device, network, cache):
    latents = [random_latent(FIVE_SECONDS, seed, device) for seed in range(1 + REPLAYS)]
    assert_replays_equal_eager(cache, network.decode_stages(network.workspace(1, FIVE_SECONDS)), latents)


@pytest.mark.parametrize("rate", [16000, 44100])
def test_a_graph_of_the_whole_encode_equals_eager(device, network, cache, rate):
    sounds = [random_sound(rate, seed, device) for seed in range(1 + REPLAYS)]
    assert_replays_equal_eager(cache, network.encode_stages(Resampler(rate, 16000, device)), sounds)


def test_the_same_latent_gives_the_same_bits_whatever_runs_between(device, network):
    latent = random_latent(FIVE_SECONDS, 0, device)
    stages = network.decode_stages(network.workspace(1, 200))
    expected = run_stages(stages, latent)
    assert not waveform_range(expected.clamp(-1, 1)).degenerate
    benchmark = torch.backends.cudnn.benchmark
    try:
        for other in (1, 31, 200):
            torch.backends.cudnn.benchmark = other == 31  # as a host may have set it
            run_stages(stages, random_latent(other, other, device))
            assert torch.equal(run_stages(stages, latent), expected)
    finally:
        torch.backends.cudnn.benchmark = benchmark


def test_float32_is_not_rounded_to_tf32(device, tmp_path):
    """The tolerance of the goldens, between two devices; TF32 would be off by more than ten times as much."""
    path = write_tiny_audio_vae(tmp_path / "a.safetensors")
    on_cpu, on_gpu = (load_audio_vae(path, device=where, dtype=torch.float32) for where in ("cpu", device))
    latent = random_latent(9, 0, device)
    waveform = on_gpu.decode(latent)
    assert waveform.device == device
    assert (waveform.cpu() - on_cpu.decode(latent)).abs().max() < 1e-4
    assert (on_gpu.encode(waveform, 48000).cpu() - on_cpu.encode(waveform, 48000)).abs().max() < 1e-3


@pytest.mark.parametrize("frames", [26, FIVE_SECONDS, 501])
def test_memory_is_as_estimated(device, tmp_path, frames):
    """The estimate makes room in ComfyUI: never too little, and not so much that other models go for nothing."""
    vae = load_audio_vae(write_tiny_audio_vae(tmp_path / "a.safetensors"), device=device)
    # The same handle on the published sizes: the estimate reads the config, the work the module.
    vae.config = published_config()
    vae.module = build_on_meta(lambda: AudioVAENetwork(vae.config))
    fill_random(vae.module, device=device)
    vae.module.prepare()
    latent = random_latent(frames, 0, device)
    vae.decode(latent, cuda_graph="off")
    before = torch.cuda.memory_allocated(device)
    # The phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=device)
    vae.decode(latent, cuda_graph="off", timeline=timeline)
    used = timeline.summary()["mem_peak_bytes"] - before
    estimate = vae.decode_bytes(latent.shape)
    assert 0.3 * estimate < used < estimate, f"{used / 2**20:.0f} MiB used, {estimate / 2**20:.0f} MiB estimated"


def test_time_grows_with_length_and_not_faster(device, network):
    def milliseconds(frames: int) -> float:
        latent = random_latent(frames, 0, device)
        stages = network.decode_stages(network.workspace(1, frames))
        times = []
        for _ in range(4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run_stages(stages, latent)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    assert milliseconds(501) < 6 * milliseconds(126)
