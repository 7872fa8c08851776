"""Conv video VAE on a GPU: fused passes against plain ones in float32, whole decodes, memory against the plan, tensors
of more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from model_files import published_file
from rendering import RandomVAE

from ltx_runtime import triton_use
from ltx_runtime.checkpoint import read_header
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import AskedSizes, VideoVAE, cells, conv_pointwise

pytestmark = pytest.mark.usefixtures("exact_float32")

# clips, frames, height, width
GRIDS = [(1, 1, 1, 1), (1, 9, 33, 47), (2, 4, 16, 24), (1, 1, 7, 5)]


@pytest.fixture
def vae(device, tmp_path) -> VideoVAE:
    vae = RandomVAE(read_header(published_file(tmp_path / "v.safetensors", "video_vae_conv")), device=device)
    vae.ensure_resident()
    return vae


def activations(grid, channels: int, device) -> torch.Tensor:
    """Some frames of more, channels last."""
    clips, frames, height, width = grid
    generator = torch.Generator(device).manual_seed(channels + frames)
    x = torch.randn(clips, frames + 2, height, width, channels, device=device, generator=generator)
    return x.bfloat16().movedim(-1, 1)[:, :, 1:-1]


def bias(channels: int, device) -> torch.Tensor:
    return torch.linspace(-1, 1, channels, device=device).bfloat16()


def wide(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.float() + b.float().view(-1, 1, 1, 1)


def assert_rounded_once(found: torch.Tensor, expected: torch.Tensor) -> None:
    """found: bfloat16 of the float32 result, but for what the order of its sums and approximate roots leave."""
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=2e-6)


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.float()
    return float(((found.float() - expected).square().mean() / expected.square().mean()).sqrt())


def latent_of(height: int, width: int, frames: int) -> torch.Tensor:
    return torch.randn(1, 128, frames, height, width, generator=torch.Generator().manual_seed(frames))


# --- the passes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [24, 128, 256, 512, 1024])
@pytest.mark.parametrize("grid", GRIDS)
def test_activation_and_sum_round_the_float32_result_once(device, grid, channels):
    x, residual, b = activations(grid, channels, device), activations(grid, channels, device), bias(channels, device)
    out = torch.full_like(x._base, 7).movedim(-1, 1)
    total = wide(x, b) + residual.float()
    conv_pointwise.finish(x, b, residual, keep=False, out=out[:, :, 1:-1])
    assert_rounded_once(out[:, :, 1:-1], total)
    conv_pointwise.finish(x, b, residual, keep=True, out=out[:, :, 1:-1], activate=True)
    assert_rounded_once(x, total)
    assert_rounded_once(out[:, :, 1:-1], F.silu(conv_pointwise.pixel_norm(total)))
    assert (out[:, :, 0] == 7).all() and (out[:, :, -1] == 7).all()
    assert triton_use.triton_refusal(device, x.dtype, conv_pointwise.TRITON_OWNER) is None


@pytest.mark.parametrize("stride", [(2, 2, 2), (2, 1, 1), (1, 2, 2)])
@pytest.mark.parametrize("grid", GRIDS)
def test_cells_change_places_with_channels(device, grid, stride):
    growth = stride[0] * stride[1] * stride[2]
    for channels in (12, 128, 512):
        x, b = activations(grid, channels * growth, device), bias(channels * growth, device)
        for skip in range(stride[0]):
            expected = cells.depth_to_space(wide(x, b), stride)[:, :, skip:].bfloat16()
            assert torch.equal(conv_pointwise.depth_to_space(x, b, stride, skip), expected)
        finer = (grid[0], *(size * step for size, step in zip(grid[1:], stride)))
        for group in (1, growth):
            main, skipped = activations(finer, channels, device), activations(finer, channels * group, device)
            b = bias(channels, device)
            expected = cells.space_to_depth(wide(main, b), stride)
            expected += cells.space_to_depth(skipped.float(), stride).unflatten(1, (expected.shape[1], -1)).mean(dim=2)
            assert_rounded_once(conv_pointwise.add_space_to_depth(main, b, skipped, stride), expected)
    patches = activations(grid, 48, device)
    assert torch.equal(conv_pointwise.unpatchify(patches, 4), cells.unpatchify(patches, 4))


def test_more_than_2_to_the_31_elements(device):
    grid = (1, 138, 256, 480)
    frames = (slice(None), slice(None), slice(-1, None))  # beyond the border
    x = torch.zeros(grid[0], *grid[1:], 128, dtype=torch.bfloat16, device=device).movedim(-1, 1)
    assert x.numel() > 2**31
    x[frames] = torch.randn(x[frames].shape, device=device).bfloat16()
    b = bias(128, device)
    last = x[frames].clone()
    out = torch.empty_like(x)
    conv_pointwise.finish(x, b, keep=False, out=out, activate=True)
    assert_rounded_once(out[frames], F.silu(conv_pointwise.pixel_norm(wide(last, b))))
    conv_pointwise.finish(x, b, x)
    assert_rounded_once(x[frames], wide(last, b) + last.float())
    del out

    coarse = x.movedim(1, -1).view(1, 138, 128, 240, 512).movedim(-1, 1)
    last, b = coarse[frames].clone(), bias(512, device)
    found = conv_pointwise.depth_to_space(coarse, b, (1, 2, 2), 0)
    assert torch.equal(found[frames], cells.depth_to_space(wide(last, b), (1, 2, 2)).bfloat16())
    del found
    back = conv_pointwise.add_space_to_depth(x, bias(128, device), x, (1, 2, 2))
    main = cells.space_to_depth(wide(x[frames], bias(128, device)), (1, 2, 2))
    assert_rounded_once(back[frames], main + cells.space_to_depth(x[frames].float(), (1, 2, 2)))
    del back, coarse

    patches = x.movedim(1, -1).reshape(-1)[: 48 * 88 * 512 * 1000].view(1, 88, 512, 1000, 48).movedim(-1, 1)
    assert patches.numel() > 2**31
    assert torch.equal(conv_pointwise.unpatchify(patches, 4)[frames], cells.unpatchify(patches[frames], 4))


# --- the decoder ----------------------------------------------------------------------------------------------------


def test_a_decode_is_no_further_from_float32_than_the_plain_one(vae, monkeypatch):
    latent = latent_of(5, 8, 5)  # 256x160x33
    fused = vae.decode_raw(latent)
    streamed = vae.decode_raw(latent, sizes=AskedSizes(temporal_size=8))
    with monkeypatch.context() as patch:
        patch.setitem(triton_use._failures, conv_pointwise.TRITON_OWNER, "switched off by a test")
        plain = vae.decode_raw(latent)
        with torch.inference_mode():
            exact = torch.cat(list(vae.module.float().decode(latent.to(vae.device), 5)), dim=2)
    error = relative_rms(plain, exact)
    assert 0 < relative_rms(fused, exact) < 1.1 * error
    assert 0 < relative_rms(streamed, exact) < 1.1 * error


@pytest.mark.parametrize("height, width, chunk", [(16, 24, 0), (16, 24, 4), (16, 24, 1), (32, 48, 0), (8, 12, 0)])
def test_a_full_size_decode_stays_within_its_plan(vae, device, height, width, chunk):
    """121 frames at the published widths, 0 = the planned chunk."""
    latent = latent_of(height, width, 16).to(device)
    plan = vae.plan(latent.shape, free_bytes=1 << 40, sizes=AskedSizes(temporal_size=8 * chunk))
    vae.decode(latent, plan=plan)  # makes cuDNN's workspace
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    # The phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=device)
    vae.decode(latent, plan=plan, timeline=timeline)
    peak = timeline.summary()["mem_peak_bytes"] - before
    assert plan.peak_bytes / 4 < peak < plan.peak_bytes, f"{peak / 2**20:.0f} MiB of {plan.peak_bytes / 2**20:.0f}"


def test_weights_are_laid_out_once(vae, device):
    latent = latent_of(2, 3, 2)
    first = vae.decode_raw(latent)
    weights = [parameter.data_ptr() for parameter in vae.module.parameters()]
    assert torch.equal(vae.decode_raw(latent), first)
    assert [parameter.data_ptr() for parameter in vae.module.parameters()] == weights
    vae.evict()
    assert torch.equal(vae.decode_raw(latent), first)
