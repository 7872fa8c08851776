"""The video encoder on the GPU: frames brought in beside the computing, float32 is float32, memory as planned."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_files import published_file
from rendering import RandomEncoder

from ltx_runtime.checkpoint import read_header
from ltx_runtime.errors import NonFiniteError
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_video_vae
from ltx_runtime.video_vae import EncodePlan, VideoEncoder, frame_upload, load_video_encoder

GOLDENS = Path(__file__).parents[1] / "goldens"


def planned(chunk: int, *, tile: int = 0, overlap: int = 0) -> EncodePlan:
    return EncodePlan(chunk, tile, overlap, 0, "set by a test")


def random_images(frames: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    return torch.rand(frames, height, width, channels, generator=torch.Generator().manual_seed(frames))


@pytest.fixture
def encoder(device, tmp_path) -> VideoEncoder:
    return load_video_encoder(write_tiny_video_vae(tmp_path / "v.safetensors"), device=device)


@pytest.fixture
def small_staging(monkeypatch):
    """Two frames of 128x96 fit, so that both buffers are used many times in a chunk."""
    monkeypatch.setattr(frame_upload, "_STAGING_BYTES", 2 * 96 * 128 * 3 * 4)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("size", [None, (96, 64)])
@pytest.mark.parametrize(
    "plan", [planned(99), planned(2), planned(1, tile=3, overlap=2)], ids=["whole", "chunks", "tiles"]
)
def test_frames_through_staging_give_the_bits_of_frames_on_the_device(
    encoder, device, small_staging, plan, size, channels
):
    images = random_images(41, 96, 128, channels)
    expected = encoder.encode(images.to(device), plan=plan, size=size)
    assert expected.device == device
    for _ in range(10):  # a buffer overwritten too early would show now and then
        assert torch.equal(encoder.encode(images, plan=plan, size=size), expected)


def test_a_slow_device_gets_the_right_frames(encoder, device, small_staging):
    """The device lags behind the host: what was staged must wait for it."""
    images = random_images(41, 96, 128)
    expected = encoder.encode(images, plan=planned(1))
    encoder.module.encoder.conv_in.register_forward_pre_hook(lambda *_: torch.cuda._sleep(20_000_000))
    assert torch.equal(encoder.encode(images, plan=planned(1)), expected)


def test_the_device_computes_a_chunk_while_the_next_one_comes(encoder, device):
    """The host waits for a chunk only after the next one was fetched, so no chunk's kernels wait for the bus."""
    images = random_images(33, 96, 128)
    order = []
    pixels = frame_upload.FrameUpload.pixels

    def fetch(self, start, *args):
        order.append(("fetch", start))
        return pixels(self, start, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame_upload.FrameUpload, "pixels", fetch)
        encoder.encode(images, plan=planned(2), on_chunk=lambda done, total: order.append(("done", done)))
    assert order == [("fetch", 0), ("fetch", 9), ("done", 9), ("fetch", 25), ("done", 25), ("done", 33)]


def test_nan_in_host_frames_is_named(encoder):
    images = random_images(25, 64, 64)
    images[20, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="frames 17 to 24 of the images"):
        encoder.encode(images, plan=planned(1))


def test_float32_on_the_device_is_float32_on_the_cpu(device):
    path = GOLDENS / "video_vae_conv_tiny.safetensors"
    images = random_images(17, 64, 96)
    expected = load_video_encoder(path, device="cpu", dtype=torch.float32).encode(images)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        found = load_video_encoder(path, device=device, dtype=torch.float32).encode(images)
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert (found.cpu() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [16, 4, 1])
def test_a_full_size_encode_stays_within_its_plan(device, tmp_path, chunk):
    """768x512x121 at the published widths."""
    encoder = RandomEncoder(read_header(published_file(tmp_path / "v.safetensors", "video_vae_conv")), device=device)
    encoder.ensure_resident()
    images = torch.rand(121, 512, 768, 3)
    plan = encoder.plan(encoder.latent_shape(images), free_bytes=1 << 40, temporal_size=8 * chunk)
    assert plan.chunk_frames == chunk
    encoder.encode(images, plan=plan)  # makes cuDNN's workspace
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    # The phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=device)
    latent = encoder.encode(images, plan=plan, timeline=timeline)
    peak = timeline.summary()["mem_peak_bytes"] - before
    assert tuple(latent.shape) == (1, 128, 16, 16, 24)
    assert plan.peak_bytes / 4 < peak < plan.peak_bytes, f"{peak / 2**20:.0f} MiB of {plan.peak_bytes / 2**20:.0f}"
