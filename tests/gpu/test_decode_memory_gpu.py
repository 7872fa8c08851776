"""Both video decoders on the GPU: real shortages of memory at every plan, memory that stays flat, frames through the
pinned buffers, cancel, tensors of more than 2**31 elements."""
from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_manifests import published_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.memory import DeviceMemoryError
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import fill_random, write_tiny_diffusion_vae
from ltx_runtime.video_vae import DecodeNoise, DecodePlan, Tiling, VideoVAE, decode, load_video_vae
from ltx_runtime.video_vae.diffusion_grid import DecodeGrid
from ltx_runtime.video_vae.host_frames import to_frames

TINY_CONV = Path(__file__).parents[1] / "goldens" / "video_vae_conv_tiny.safetensors"
SIZES = {"small": (7, 8, 12), "medium": (16, 8, 12), "large": (16, 16, 24)}  # large: 768x512x121


class RandomVAE(VideoVAE):
    """The published layout, filled on the device."""

    def _fill(self, module, timeline, on_progress):
        fill_random(module, device=self.device)


@pytest.fixture(scope="module")
def vaes(tmp_path_factory) -> dict[str, VideoVAE]:
    folder, device = tmp_path_factory.mktemp("vaes"), torch.device("cuda", 0)

    def published(name: str) -> VideoVAE:
        vae = RandomVAE(read_header(published_file(folder / f"{name}.safetensors", name)), device=device)
        vae.ensure_resident()
        return vae

    return {
        "tiny conv": load_video_vae(TINY_CONV, device=device),
        "tiny diffusion": load_video_vae(write_tiny_diffusion_vae(folder / "tiny.safetensors"), device=device),
        "conv": published("video_vae_conv"),
        "diffusion": published("video_vae_diffusion"),
    }


def random_latent(vae: VideoVAE, size: tuple[int, int, int]) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(size))
    return torch.randn(1, vae.config.latent_channels, *size, generator=generator, device="cuda")


def plans_of(vae: VideoVAE, latent: torch.Tensor) -> list[DecodePlan]:
    """From the largest to the smallest."""
    plans = [vae.plan(latent.shape, free_bytes=1 << 40)]
    while True:
        smaller = vae._decoding.smaller(latent.shape, plans[-1], item_bytes=vae.module.dtype.itemsize)
        if smaller is None:
            return plans
        plans.append(smaller)


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """The allocator has this much beside what is in use now. mem_get_info, by which plans are made, does not know."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def peak_of(vae: VideoVAE, latent: torch.Tensor, plan: DecodePlan) -> int:
    """Device memory that a decode takes beyond what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # Phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=vae.device)
    vae.decode(latent, plan=plan, timeline=timeline)
    return timeline.summary()["mem_peak_bytes"] - before


LADDERS = [
    ("tiny conv", (9, 32, 32)),
    ("tiny diffusion", (9, 12, 16)),
    ("conv", SIZES["medium"]),
    ("diffusion", SIZES["medium"]),
]


def decode_within(vae: VideoVAE, latent: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, int]:
    """(frames, how many plans ran out of memory before)."""
    timeline = Timeline(None, device=vae.device)
    with memory_limit(num_bytes):
        frames = vae.decode(latent, timeline=timeline)
    noted = [e for e in timeline.events if e["event"] == "note" and "peak_bytes" in e["attrs"]]
    assert ("out of memory before with" in noted[-1]["message"]) == (len(noted) > 1)
    timeline.child()  # raises if a failed attempt had left a phase open
    return frames, len(noted) - 1


@pytest.mark.parametrize("kind, size", LADDERS)
def test_a_real_shortage_at_every_plan_ends_in_the_frames_of_the_next(vaes, kind, size):
    vae = vaes[kind]
    latent = random_latent(vae, size)
    plans = plans_of(vae, latent)
    expected = [vae.decode(latent, plan=plan) for plan in plans]
    for rung, plan in enumerate(plans):
        # More than this plan asks for, by what the allocator rounds up and keeps in pieces; less than those before it.
        room = int(1.03 * plan.peak_bytes) + (64 << 20)
        if rung and room >= min(before.peak_bytes for before in plans[:rung]):
            continue  # smaller in another sense: this one is not reached by memory
        frames, fallen = decode_within(vae, latent, room)
        assert fallen == rung, [plan.peak_bytes for plan in plans]
        assert torch.equal(frames, expected[rung]), plan.reason
    with pytest.raises(DeviceMemoryError, match="are free beside the .*Nothing smaller is planned"):
        decode_within(vae, latent, 0)
    assert all(torch.equal(vae.decode(latent, plan=plan), e) for plan, e in zip(plans[:2], expected))


@pytest.mark.parametrize("kind, size", LADDERS)
def test_a_shortage_in_the_middle_of_a_decode_ends_in_the_picture_of_a_smaller_plan(vaes, kind, size, monkeypatch):
    """Plans that say nothing of memory, so that it runs out somewhere inside."""
    vae = vaes[kind]
    latent = random_latent(vae, size)
    plans = plans_of(vae, latent)
    expected = [vae.decode(latent, plan=plan) for plan in plans]
    most = peak_of(vae, latent, plans[0])
    monkeypatch.setattr(decode, "_claim", lambda num_bytes, device: None)
    reached = set()
    for share in (0.85, 0.6, 0.4, 0.25, 0.15):
        try:
            frames, rung = decode_within(vae, latent, int(share * most))
        except DeviceMemoryError:
            assert reached, "the first fall already found no plan"
            break
        assert rung > 0
        reached.add(rung)
        if "diffusion" in kind:
            assert torch.equal(frames, expected[rung]), plans[rung].reason
        else:  # convolutions short of workspace took other algorithms: once rounded otherwise, up to bf16
            gap = frames - expected[rung]
            assert gap.square().mean().sqrt() < 2e-2 * expected[rung].square().mean().sqrt(), plans[rung].reason
    planned = [(plan.peak_bytes, plan.reason[:60]) for plan in plans]
    assert len(reached) >= min(2, len(plans) - 1), (reached, most, planned)


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_every_plan_stays_within_the_memory_it_names(vaes, kind):
    vae = vaes[kind]
    latent = random_latent(vae, SIZES["medium"])
    used = []
    for plan in plans_of(vae, latent):
        vae.decode(latent, plan=plan)  # kernels and their workspace
        used.append((peak_of(vae, latent, plan), plan.peak_bytes, plan.reason[:60]))
    print(*(f"{peak / 1e9:.3f} of {planned / 1e9:.3f} GB: {what}" for peak, planned, what in used), sep="\n")
    assert all(planned / 4 < peak <= planned for peak, planned, _ in used), used


def test_memory_stays_flat_over_twenty_decodes_of_alternating_shapes(vaes):
    kinds = [(vaes[kind], size) for size in ("small", "medium") for kind in ("conv", "diffusion")]
    device, pinned, allocated = [], [], []
    for index in range(20):
        vae, size = kinds[index % len(kinds)]
        vae.decode(random_latent(vae, SIZES[size]))
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
        device.append(torch.cuda.memory_reserved())
        pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    rounds = 2 * len(kinds)
    assert max(allocated[rounds:]) - min(allocated[rounds:]) <= 1 << 20, allocated
    assert max(device[rounds:]) == device[rounds], device
    assert pinned[-1] == pinned[len(kinds)], "pinned buffers were made anew"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ltxgraph-")]


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_frames_on_the_host_are_those_of_the_device_bit_for_bit(vaes, kind):
    vae = vaes[kind]
    latent = random_latent(vae, SIZES["medium"])  # several times as many bytes as all buffers hold
    for plan in plans_of(vae, latent)[:2]:
        raw = vae.decode_raw(latent, plan=plan)
        expected = to_frames(raw).cpu()
        for _ in range(3):
            assert torch.equal(vae.decode(latent, plan=plan), expected)


def test_every_bf16_pixel_becomes_the_frame_value_of_the_formula(device):
    values = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    pixels = values.view(1, 1, 4, 64, 256).expand(1, 3, 4, 64, 256)
    expected = (pixels[0].permute(1, 2, 3, 0).float() + 1).mul(0.5).clamp(0, 1)
    bits, expected_bits = (x.nan_to_num(2).contiguous().view(torch.int32) for x in (to_frames(pixels), expected))
    assert torch.equal(bits, expected_bits)


def test_a_whole_clip_of_the_diffusion_decoder_is_cancelled_within_a_block(vaes):
    vae = vaes["diffusion"]
    latent = random_latent(vae, SIZES["large"])
    expected = vae.decode(latent)
    pressed: list[float] = []

    def check():
        if pressed:
            raise KeyboardInterrupt

    told = []
    timer = threading.Timer(0.15, lambda: pressed.append(time.perf_counter()))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        vae.decode(latent, check_cancelled=check, on_progress=lambda done, total: told.append(done / total))
    torch.cuda.synchronize()
    stopped_after = time.perf_counter() - pressed[0]
    timer.join()
    assert stopped_after < 0.3, f"{stopped_after * 1e3:.0f} ms after the press"
    assert told == sorted(told) and told[-1] < 0.9
    told.clear()
    assert torch.equal(vae.decode(latent, on_progress=lambda done, total: told.append(done / total)), expected)
    assert len(told) > 10 and told[-1] == 1


def test_more_than_2_to_the_31_elements_give_the_pixels_of_a_smaller_decode(vaes):
    """3104x3104x121 at tiny widths: 2.3e9 values in the stream of tokens, 3.5e9 in noise and pixels. Each corner is
    decoded again by itself; as far from where it was cut out as the decoder looks, it must be the same picture."""
    vae = vaes["tiny diffusion"]
    frames, side, corner, seen = 16, 97, 12, 4
    generator = torch.Generator("cuda").manual_seed(1)
    latent = torch.randn(1, 128, frames, side, side, generator=generator, device="cuda")
    shape = (1, 3, 8 * (frames - 1) + 1, 32 * side, 32 * side)
    canvas = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
    assert canvas.numel() // 3 // 16 * 32 > 2**31
    whole = vae.decode_raw(latent, noise=DecodeNoise(canvas=canvas), plan=DecodePlan(frames, 0, "whole", None, 2))
    assert whole.shape == shape and bool(torch.stack([part.isfinite().all() for part in whole.split(8, dim=2)]).all())
    for rows, columns in ((0, 0), (0, side - corner), (side - corner, 0), (side - corner, side - corner)):
        differences = corner_differences(vae, latent, canvas, whole, rows, columns, corner, seen)
        assert differences[0] < 2e-2 and differences[1] < 0.3, (rows, columns, differences)


def corner_differences(
    vae: VideoVAE, latent, canvas, whole, row: int, column: int, corner: int, seen: int
) -> tuple[float, float]:
    """(relative rms, largest) difference of a corner, `corner` latents a side, decoded alone, without the `seen`
    latents next to its cuts."""

    def cut(tensor, scale: int, first: tuple[int, int], size: int):
        y, x = (scale * start for start in first)
        return tensor[..., y : y + scale * size, x : x + scale * size]

    alone = vae.decode_raw(
        cut(latent, 1, (row, column), corner).contiguous(),
        noise=DecodeNoise(canvas=cut(canvas, 32, (row, column), corner).contiguous()),
        plan=DecodePlan(latent.shape[2], 0, "whole", None, 2),
    )
    inner = (seen if row else 0, seen if column else 0)
    there = cut(whole, 32, (row + inner[0], column + inner[1]), corner - seen).float()
    gap = cut(alone, 32, inner, corner - seen).float() - there
    return float(gap.square().mean().sqrt() / there.square().mean().sqrt()), float(gap.abs().max())


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 5), (2, 7, 4), (5, 9, 3), (3, 8, 13)])
@pytest.mark.parametrize("tiles", [False, True])
def test_the_fused_diffusion_decoder_gives_the_picture_of_the_plain_one(vaes, tmp_path, shape, tiles):
    """One frame, below the smallest grid, odd sizes; bf16 with kernels against float32 without."""
    plain = load_video_vae(write_tiny_diffusion_vae(tmp_path / "t.safetensors"), device="cuda", dtype=torch.float32)
    fused = vaes["tiny diffusion"]
    latent = random_latent(fused, shape)
    grid = DecodeGrid.of(fused.config, shape)
    noise = torch.randn(1, 3, grid.frames, grid.height, grid.width, device="cuda").bfloat16()
    tiling = Tiling((7, 8, 8), (4, 4, 4)) if tiles else None
    exact, found = (
        vae.decode_raw(latent, noise=DecodeNoise(canvas=noise), plan=DecodePlan(99, 0, "set by a test", tiling, 2))
        for vae in (plain, fused)
    )
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    # The reference's own bf16 run: 1.56e-2 (video_vae.md section 9).
    assert ((found.float() - exact).square().mean() / exact.square().mean()).sqrt() < 2.5e-2


def test_a_slow_device_gets_the_right_frames_out(vaes, monkeypatch):
    """The device lags behind the host: what is copied must wait for it."""
    vae = vaes["tiny conv"]
    latent = random_latent(vae, (9, 16, 16))
    plan = plans_of(vae, latent)[1]
    expected = vae.decode(latent, plan=plan)
    real: Callable = vae.module.decode

    def slow(*arguments):
        for pixels in real(*arguments):
            torch.cuda._sleep(30_000_000)
            yield pixels

    monkeypatch.setattr(vae.module, "decode", slow)
    assert torch.equal(vae.decode(latent, plan=plan), expected)
