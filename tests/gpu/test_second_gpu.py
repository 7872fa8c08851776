"""Both GPUs of a host give the same, whichever of them is the current one: Triton launches on the current device."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ltx_runtime import triton_use
from ltx_runtime.audio_vae import load_audio_vae
from ltx_runtime.tiny import write_tiny_audio_vae, write_tiny_diffusion_vae, write_tiny_video_vae
from ltx_runtime.video_vae import load_video_encoder, load_video_vae

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
DEVICES = [torch.device("cuda", index) for index in range(2)]


def same_on_both(run) -> None:
    first, second = (run(device) for device in DEVICES)
    assert torch.cuda.current_device() == 0
    assert all(triton_use.triton_refusal(device, torch.bfloat16, "any") is None for device in DEVICES)
    assert not triton_use._failures
    assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("cuda_graph", ["off", "on", "auto"])
@pytest.mark.parametrize("write", [write_tiny_video_vae, write_tiny_diffusion_vae])
def test_video(tmp_path: Path, write, cuda_graph):
    path = write(tmp_path / "vae.safetensors")
    latent = torch.randn(1, 128, 3, 4, 6)

    def run(device: torch.device) -> torch.Tensor:
        vae = load_video_vae(path, device=device, dtype=torch.bfloat16)
        return [vae.decode(latent, cuda_graph=cuda_graph) for _ in range(4)][3]

    same_on_both(run)


def test_images(tmp_path: Path):
    path = write_tiny_video_vae(tmp_path / "vae.safetensors")
    images = torch.rand(17, 64, 96, 3)
    same_on_both(lambda device: load_video_encoder(path, device=device, dtype=torch.bfloat16).encode(images))


@pytest.mark.parametrize("cuda_graph", ["off", "on"])
def test_sound(tmp_path: Path, cuda_graph):
    path = write_tiny_audio_vae(tmp_path / "vae.safetensors")
    latent = torch.randn(1, 8, 26, 16)

    def run(device: torch.device) -> torch.Tensor:
        vae = load_audio_vae(path, device=device)
        assert vae.module.backend == "triton", vae.module.plain_reason
        return [vae.decode(latent, cuda_graph=cuda_graph) for _ in range(2)][1]

    same_on_both(run)
