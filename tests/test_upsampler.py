"""Latent upsamplers: shapes, batches, one norm over the whole clip, memory, and everything they refuse.

Agreement with the reference is in golden_kinds/upsampler_cases.py.
"""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_at
from model_files import rewritten
from safetensors.torch import load_file, save_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.errors import CheckpointError, NonFiniteError, ShapeError
from ltx_runtime.timing import Timeline
from ltx_runtime.upsampler import CUDNN_WORKSPACE_BYTES, LatentUpsampler, load_upsampler
from ltx_runtime.video_vae import PerChannelStatistics, load_video_vae

GOLDENS = Path(__file__).parent / "goldens"
VAE = GOLDENS / "video_vae_conv_tiny.safetensors"
FILES = {kind: GOLDENS / f"latent_upsampler_{kind}_x2_tiny.safetensors" for kind in ("spatial", "temporal")}
CHANNELS = 4


@pytest.fixture(scope="module", params=list(FILES))
def upsampler(request) -> LatentUpsampler:
    return load_upsampler(FILES[request.param], device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def statistics() -> PerChannelStatistics:
    return load_video_vae(VAE, device="cpu").statistics()


def random_latent(batch: int = 1, frames: int = 3, height: int = 2, width: int = 3) -> torch.Tensor:
    return torch.randn(batch, CHANNELS, frames, height, width, generator=torch.Generator().manual_seed(frames))


def test_one_axis_pair_is_doubled(upsampler, statistics):
    result = upsampler.upscale(random_latent(), statistics)
    assert result.dtype == torch.float32
    assert tuple(result.shape) == ((1, 4, 3, 4, 6) if upsampler.config.spatial else (1, 4, 5, 2, 3))
    assert upsampler.output_shape((1, 4, 3, 2, 3)).as_tuple() == tuple(result.shape)
    assert upsampler.words == ("spatial x2" if upsampler.config.spatial else "temporal x2")


def test_a_clip_of_a_batch_is_upscaled_as_if_alone(upsampler, statistics):
    latent = random_latent(batch=3)
    alone = torch.cat([upsampler.upscale(clip, statistics) for clip in latent.split(1)])
    assert torch.equal(upsampler.upscale(latent, statistics), alone)


def test_every_frame_reaches_every_other(upsampler, statistics):
    """The norms span the clip, which is why it is never cut."""
    latent = random_latent(frames=9)
    changed = latent.clone()
    changed[:, :, -1] *= 2
    off = (upsampler.upscale(latent, statistics) - upsampler.upscale(changed, statistics)).abs()
    assert off.amax(dim=(0, 1, 3, 4)).min() > 1e-5


def test_the_vaes_statistics_are_read_without_its_weights(statistics):
    vae = load_video_vae(VAE, device="cpu")
    vae.evict()
    latent = random_latent()
    assert torch.equal(vae.statistics().denormalize(latent), statistics.denormalize(latent))
    assert not vae.resident
    vae.ensure_resident()
    assert torch.equal(vae.module.per_channel_statistics.denormalize(latent), statistics.denormalize(latent))


def test_bf16_stays_as_close_to_float32_as_the_reference_does(upsampler, statistics):
    latent = random_latent(frames=5, height=4)
    exact = upsampler.upscale(latent, statistics)
    rounded = load_upsampler(upsampler.header.path, device="cpu").upscale(latent, statistics)
    # The reference's own bf16 run: relative rms 0.7e-2 to 1.3e-2 (upsampler_and_duration.md section 1).
    assert ((rounded - exact).square().mean() / exact.square().mean()).sqrt() < 2e-2


def test_phase_cancel_and_evicted_weights(upsampler, statistics):
    latent = random_latent(batch=3)
    expected = upsampler.upscale(latent, statistics)
    timeline = Timeline(None)
    with pytest.raises(Cancelled):
        upsampler.upscale(latent, statistics, timeline=timeline, check_cancelled=cancel_at(3))
    upsampler.evict()
    assert torch.equal(upsampler.upscale(latent, statistics, timeline=timeline), expected)
    ends = [event for event in timeline.events if event["event"] == "end"]
    assert [event["phase"] for event in ends] == ["upscale", "load.read", "load.place", "upscale"]
    assert ends[-1]["attrs"] == {
        "kind": upsampler.words, "latent": [3, 4, 3, 2, 3], "result": list(expected.shape)
    }


def test_the_memory_estimate_is_of_the_right_size():
    spatial, temporal = (LatentUpsampler(read_header(path), device="cpu") for path in FILES.values())
    # Tensors of 64 channels on the doubled grid, and of 32 on the doubled frames, in bf16.
    tensors = spatial.activation_bytes((2, 4, 16, 16, 24)) - CUDNN_WORKSPACE_BYTES
    assert 4 <= tensors / (64 * 16 * 32 * 48 * 2) <= 8
    tensors = temporal.activation_bytes((1, 4, 16, 16, 24)) - CUDNN_WORKSPACE_BYTES
    assert 4 <= tensors / (32 * 32 * 16 * 24 * 2) <= 8


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 8, 3, 2, 2), (1, CHANNELS, 2, 2), (1, CHANNELS, 0, 2, 2)])
def test_latents_of_another_kind_are_refused(upsampler, statistics, shape):
    with pytest.raises(ShapeError, match=r"upscales latents of shape \(batch, 4, frames, height, width\)"):
        upsampler.upscale(torch.zeros(shape), statistics)


def test_a_latent_of_one_value_a_channel_is_refused_by_a_file_of_one_channel_a_group(statistics):
    spatial, temporal = (LatentUpsampler(read_header(path), device="cpu") for path in FILES.values())
    with pytest.raises(ShapeError, match=r"\(1, 4, 1, 1, 1\) has one value in each"):
        temporal.activation_bytes((1, CHANNELS, 1, 1, 1))
    spatial.output_shape((1, CHANNELS, 1, 1, 1))  # two channels in a group
    assert temporal.upscale(random_latent(frames=2, height=1, width=1), statistics).shape == (1, CHANNELS, 3, 1, 1)


def test_statistics_of_another_vae_are_refused(upsampler):
    with pytest.raises(ShapeError, match="statistics have 128 channels, the latent has 4"):
        upsampler.upscale(random_latent(), PerChannelStatistics(128))


def test_a_latent_that_is_not_finite_is_refused(upsampler, statistics):
    latent = random_latent()
    latent[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="what made it failed") as error:
        upsampler.upscale(latent, statistics)
    assert error.value.phase == "upscale"


def test_weights_that_overflow_are_named(statistics):
    upsampler = load_upsampler(FILES["spatial"], device="cpu", dtype=torch.float32)
    upsampler.module.final_conv.bias.data.fill_(float("inf"))
    with pytest.raises(NonFiniteError, match=r"latent_upsampler_spatial_x2_tiny\.safetensors is damaged"):
        upsampler.upscale(random_latent(), statistics)


def test_another_kind_of_file_is_named():
    with pytest.raises(CheckpointError, match=r"is the conv video VAE, not a latent upscaler.*latent_upscale_models"):
        load_upsampler(VAE, device="cpu")


@pytest.mark.parametrize("kind, config, words", [
    ("spatial", {"spatial_upsample": False, "temporal_upsample": True}, "upscaler of another kind"),
    ("spatial", {"temporal_upsample": True}, "upscaler of another kind"),
    ("spatial", {"spatial_scale": 1.5}, "spatial_scale=1.5"),
    ("spatial", {"rational_resampler": True}, "rational_resampler=True"),
    ("temporal", {"spatial_upsample": True}, "upscaler of another kind"),
    ("temporal", {"dims": 2}, "dims=2"),
    ("temporal", {"mid_channels": 64}, "does not fit"),
])
def test_another_upsampler_is_refused_before_its_weights_are_read(tmp_path, kind, config, words):
    path = rewritten(FILES[kind], tmp_path / "u.safetensors", config=lambda settings: settings.update(config))
    with pytest.raises(CheckpointError, match=words):
        LatentUpsampler(read_header(path), device="cpu")


def test_a_file_without_config_shows_all_by_its_tensors(upsampler, statistics, tmp_path):
    save_file(load_file(upsampler.header.path), tmp_path / "u.safetensors")
    bare = load_upsampler(tmp_path / "u.safetensors", device="cpu", dtype=torch.float32)
    assert bare.config == upsampler.config
    latent = random_latent()
    assert torch.equal(bare.upscale(latent, statistics), upsampler.upscale(latent, statistics))


def test_a_missing_tensor_is_named(tmp_path):
    path = rewritten(
        FILES["spatial"], tmp_path / "u.safetensors", tensors=lambda tensors: tensors.pop("final_conv.bias")
    )
    with pytest.raises(CheckpointError, match=r"missing: final_conv\.bias"):
        load_upsampler(path, device="cpu")
