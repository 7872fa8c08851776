"""The vocoder's kernels on the GPU: as exact as plain float32, the same bits every time, and decodes that replay. Run
under both allocators, as test_audio_vae_gpu.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ltx_runtime.audio_vae import AudioVAE, AudioVAEConfig, AudioVAENetwork, load_audio_vae
from ltx_runtime.audio_vae.filters import Downsampling, Upsampling, hann_sinc_kernel
from ltx_runtime.audio_vae.network import exact_convolutions
from ltx_runtime.audio_vae.vocoder import FILTER_TAPS, AntiAliasedSnake, Vocoder
from ltx_runtime.config import published_dtype
from ltx_runtime.cuda_graph import held_bytes
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import fill_random, tiny_audio_vae_config, write_tiny_audio_vae

TESTS = Path(__file__).parents[1]
REPLAYS = 3


def config_of(name: str) -> AudioVAEConfig:
    if name == "tiny":
        return tiny_audio_vae_config()
    return AudioVAEConfig.from_json(json.loads((TESTS / "configs" / "audio_vae.json").read_text()))


def random_network(config: AudioVAEConfig, **how) -> AudioVAENetwork:
    network = build_on_meta(lambda: AudioVAENetwork(config))
    fill_random(network, device="cuda")
    network.prepare(**how)
    return network


def in_float64(vocoder: Vocoder) -> Vocoder:
    """All its arithmetic in float64, on the same weights."""
    vocoder.double()
    for module in vocoder.modules():
        if isinstance(module, AntiAliasedSnake):
            act, channels = module.act, module.act.alpha.shape[0]
            act._frequency, act._gain = act.alpha.exp().unsqueeze(1), 1 / (act.beta.exp() + 1e-9).unsqueeze(1)
            up, down = module.upsample.filter.flatten(), module.downsample.lowpass.filter.flatten()
            module._up = Upsampling(2 * up, 2, FILTER_TAPS // 2 - 1, channels)
            module._down = Downsampling(down, 2, channels)
    kernel = (3 * hann_sinc_kernel(3)).cuda()
    vocoder.skip = Upsampling(kernel, 3, kernel.shape[0] // 2, 2)
    return vocoder


def random_mel(batch: int, frames: int, bins: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return 2 * torch.randn(batch, 2, frames, bins, device="cuda", generator=generator) - 4


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=["tiny", "published"])
def networks(request) -> tuple[AudioVAENetwork, AudioVAENetwork]:
    """(on kernels, plain), with the same weights."""
    with torch.inference_mode():
        config = config_of(request.param)
        fused, plain = random_network(config), random_network(config, plain=True)
    assert (fused.backend, plain.backend) == ("triton", "torch"), fused.plain_reason
    return fused, plain


@pytest.mark.parametrize("batch, latent_frames", [(1, 1), (2, 3), (1, 26)])
def test_the_kernels_are_as_exact_as_plain_float32(networks, batch, latent_frames):
    fused, plain = networks
    workspace = fused.workspace(batch, latent_frames)
    for memory in (workspace.parts, *workspace.signals):
        memory.fill_(float("nan"))
    mel = random_mel(batch, 4 * latent_frames - 3, 64)
    with exact_convolutions():
        base = plain.vocoder.waveform(mel)
        extended = plain.vocoder.extend(base)
        exact = in_float64(random_network(fused._config, plain=True).vocoder)
        cases = (
            (fused._fused.waveform(mel, workspace), base, exact.waveform(mel.double())),
            (fused._fused.extend(base, workspace), extended, exact.extend(base.double())),
        )
    for got, single, reference in cases:
        scale = reference.square().mean().sqrt()
        mine, plain_error = ((x.double() - reference).square().mean().sqrt() / scale for x in (got, single))
        assert mine < 2 * plain_error + 1e-7, f"{mine:.2e}, plain {plain_error:.2e}"
        assert (got - single).abs().max() < 1e-4


def test_the_generators_weights_are_held_once(networks):
    fused, _ = networks
    for generator in (fused.vocoder.vocoder, fused.vocoder.bwe_generator):
        assert {p.device.type for p in generator.parameters()} == {"meta"}


def test_weights_take_what_is_announced_and_then_what_is_held(device):
    before = torch.cuda.memory_allocated(device)
    network = build_on_meta(lambda: AudioVAENetwork(config_of("published")))
    fill_random(network, device=device)
    # As AudioVAE.weights_bytes does: bfloat16, the vocoder's twice.
    announced = 2 * sum(p.numel() for part in (network, network.vocoder) for p in part.parameters())
    torch.cuda.reset_peak_memory_stats(device)
    network.prepare()
    peak = torch.cuda.max_memory_allocated(device) - before
    held = torch.cuda.memory_allocated(device) - before
    assert network.backend == "triton"
    assert 0.97 * held < network.weights_bytes <= held
    assert 0.85 * peak < announced, f"{announced / 2**20:.0f} MiB announced, {peak / 2**20:.0f} taken"


def test_weights_of_more_bits_run_plain(device):
    network = build_on_meta(lambda: AudioVAENetwork(tiny_audio_vae_config()))
    fill_random(network, device=device)
    assert published_dtype("vocoder.conv_pre.weight") == torch.bfloat16
    network.vocoder.float()
    network.vocoder.vocoder.conv_pre.weight += 1e-5
    network.prepare()
    assert network.backend == "torch" and "not bfloat16" in network.plain_reason


def decoded(vae: AudioVAE, latents: list[Tensor], mode: str) -> list[Tensor]:
    return [vae.decode_raw(latent, cuda_graph=mode) for latent in latents]


def random_latents(frames: int, count: int, device, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(1, 8, frames, 16, device=device, generator=generator) for _ in range(count)]


@pytest.fixture
def vae(device, tmp_path) -> AudioVAE:
    vae = load_audio_vae(write_tiny_audio_vae(tmp_path / "a.safetensors"), device=device)
    yield vae
    vae.evict()


def test_replays_equal_eager_and_lengths_take_turns(vae, device):
    lengths = (26, 126)
    latents = {frames: random_latents(frames, 1 + REPLAYS, device) for frames in lengths}
    eager = {frames: decoded(vae, latents[frames], "off") for frames in lengths}
    for _ in range(2):
        for frames in lengths:
            for got, expected in zip(decoded(vae, latents[frames], "on"), eager[frames], strict=True):
                assert torch.equal(got, expected)
    assert vae.graphs.counters.captures == len(lengths)
    for frames in lengths:
        assert all(map(torch.equal, decoded(vae, latents[frames], "off"), eager[frames]))


def test_auto_captures_at_the_second_use(vae, device):
    timeline = Timeline(None, device=device)
    for latent in random_latents(9, 3, device):
        vae.decode(latent, timeline=timeline)
    stages = [event["attrs"]["stage"] for event in timeline.events if event["event"] == "end"]
    assert stages == ["mel decoder", "vocoder", "bandwidth extension", "warmup", "capture", "replay"]


def test_memory_stays_flat_and_goes_with_the_weights(vae, device):
    before = held_bytes(device)
    latents = [random_latents(frames, 1, device)[0] for frames in (26, 51, 76, 101, 126, 151)]
    peaks = []
    for _ in range(4):
        for latent in latents:  # more lengths than recordings
            vae.decode(latent, cuda_graph="on")
        peaks.append(held_bytes(device))
    assert len(vae.graphs) == vae.graphs.max_graphs
    assert max(peaks[1:]) <= peaks[0] + (32 << 20)
    assert vae.graphs.device_bytes > 0
    vae.evict()
    torch.cuda.empty_cache()
    assert held_bytes(device) < before + (64 << 20)
