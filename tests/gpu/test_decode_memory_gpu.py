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
from cancelling import Cancelled
from model_files import published_file
from rendering import RandomVAE

from ltx_runtime.checkpoint import read_header
from ltx_runtime.memory import DeviceMemoryError
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_diffusion_vae
from ltx_runtime.video_vae import (
    DecodeNoise,
    DecodePlan,
    Tiling,
    VideoVAE,
    load_video_vae,
    neighbourhood_attention,
)
from ltx_runtime.video_vae.diffusion_grid import DecodeGrid
from ltx_runtime.video_vae.host_frames import to_frames

TINY_CONV = Path(__file__).parents[1] / "goldens" / "video_vae_conv_tiny.safetensors"
SIZES = {"small": (7, 8, 12), "medium": (16, 8, 12), "large": (16, 16, 24)}  # large: 768x512x121


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


@pytest.fixture(autouse=True)
def without_recordings(vaes) -> Iterator[None]:
    """A shortage would drop them first, and run the same plan once more."""
    yield
    for vae in vaes.values():
        vae.graphs.close()


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


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest, as one number for a message; 0 only for equal bits (no NaN comes here)."""
    return 0.0 if torch.equal(a, b) else float((a - b).abs().max())


def peak_of(vae: VideoVAE, latent: torch.Tensor, plan: DecodePlan) -> int:
    """Device memory that a decode takes beyond what is there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # Phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=vae.device)
    vae.decode(latent, cuda_graph="off", plan=plan, timeline=timeline)
    return timeline.summary()["mem_peak_bytes"] - before


def noted_plans(timeline: Timeline) -> list[str]:
    """What was tried, in words; checks what every decode must leave behind."""
    noted = [e["message"] for e in timeline.events if e["event"] == "note" and "peak_bytes" in e["attrs"]]
    assert ("out of memory before with" in noted[-1]) == (len(noted) > 1)
    timeline.child()  # raises if a failed attempt had left a phase open
    return noted


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_with_less_memory_free_a_smaller_plan_is_made_and_fits(vaes, kind):
    vae = vaes[kind]
    latent = random_latent(vae, SIZES["medium"])
    plans = plans_of(vae, latent)
    before = [vae.decode(latent, cuda_graph="off", plan=plan) for plan in plans[:2]]
    reached = []
    for plan in plans:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # More than this plan asks for, by what the allocator rounds up and keeps in pieces. It is told, since what lies
        # unused between the weights would count as free too.
        room = int(1.1 * plan.peak_bytes) + (128 << 20)
        ballast = torch.empty(torch.cuda.mem_get_info()[0] - room, dtype=torch.uint8, device=vae.device)
        timeline, ran = Timeline(None, device=vae.device), []
        frames = vae.decode(latent, cuda_graph="off", free_bytes=room, timeline=timeline, on_plan=ran.append)
        del ballast
        torch.cuda.empty_cache()
        noted = noted_plans(timeline)
        fits = len(noted) == 1 and ran[0].peak_bytes <= room
        assert fits, f"{room >> 20} MiB, {len(noted)} plans: {noted[-1][:250]}"
        reached.append(ran[0].peak_bytes)
        largest = difference(frames, vae.decode(latent, cuda_graph="off", plan=ran[0]))
        assert largest == 0, f"{noted[-1][:100]} differs by {largest} from the same plan with more memory"
    assert len(set(reached)) > 1 and reached == sorted(reached, reverse=True), reached
    for plan, frames in zip(plans[:2], before, strict=True):
        largest = difference(vae.decode(latent, cuda_graph="off", plan=plan), frames)
        assert largest == 0, f"after all, {plan.reason[:40]} differs by {largest}"


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_every_plan_stays_within_the_memory_it_names(vaes, kind):
    vae = vaes[kind]
    latent = random_latent(vae, SIZES["medium"])
    used = []
    for plan in plans_of(vae, latent):
        vae.decode(latent, cuda_graph="off", plan=plan)  # kernels and their workspace
        used.append((peak_of(vae, latent, plan), plan.peak_bytes, plan.reason[:50]))
    print("".join(f"\n{kind}: {peak / 1e9:.3f} of {planned / 1e9:.3f} GB, {what}" for peak, planned, what in used))
    over = [what for peak, planned, what in used if not planned / 4 < peak <= planned]
    assert not over, over


@pytest.mark.parametrize("cuda_graph", ["off", "auto"])
def test_memory_stays_flat_over_twenty_settled_decodes_of_alternating_shapes(vaes, cuda_graph):
    kinds = [(vaes[kind], size) for size in ("small", "medium") for kind in ("conv", "diffusion")]
    reserved, pinned, allocated = [], [], []
    for index in range(36):
        vae, size = kinds[index % len(kinds)]
        vae.decode(random_latent(vae, SIZES[size]), cuda_graph=cuda_graph, free_bytes=1 << 40)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated() >> 10)
        reserved.append(torch.cuda.memory_reserved() >> 20)
        pinned.append(torch.cuda.host_memory_stats()["num_host_alloc"])
    # In the third round auto records what it records, and gives the allocator's cache back: it is full again in the
    # fourth.
    rounds = 4 * len(kinds)
    assert max(allocated[rounds:]) - min(allocated[rounds:]) <= 1 << 10, f"KiB allocated: {allocated}"
    assert max(reserved[rounds:]) <= max(reserved[:rounds]), f"MiB reserved: {reserved}"
    assert pinned[-1] == pinned[rounds], f"pinned buffers made: {pinned}"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ltxgraph-")]


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_frames_on_the_host_are_those_of_the_device_bit_for_bit(vaes, kind):
    vae = vaes[kind]
    latent = random_latent(vae, SIZES["medium"])  # several times as many bytes as all buffers hold
    for plan in plans_of(vae, latent)[:2]:
        raw = vae.decode_raw(latent, cuda_graph="off", plan=plan)
        expected = to_frames(raw).cpu()
        differences = [difference(vae.decode(latent, cuda_graph="off", plan=plan), expected) for _ in range(3)]
        assert differences == [0, 0, 0], f"{plan.reason[:40]}: {differences}"


def test_every_bf16_pixel_becomes_the_frame_value_of_the_formula(device):
    values = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(torch.bfloat16)
    pixels = values.view(1, 1, 4, 64, 256).expand(1, 3, 4, 64, 256)
    expected = (pixels[0].permute(1, 2, 3, 0).float() + 1).mul(0.5).clamp(0, 1)
    bits, expected_bits = (x.nan_to_num(2).contiguous().view(torch.int32) for x in (to_frames(pixels), expected))
    assert int((bits != expected_bits).sum()) == 0


def test_a_whole_clip_of_the_diffusion_decoder_is_cancelled_within_a_block(vaes):
    vae = vaes["diffusion"]
    latent = random_latent(vae, SIZES["large"])
    expected = vae.decode(latent, cuda_graph="off", free_bytes=1 << 40)
    pressed: list[float] = []

    def check():
        if pressed:
            raise Cancelled

    told = []
    timer = threading.Timer(0.15, lambda: pressed.append(time.perf_counter()))
    timer.start()
    with pytest.raises(Cancelled):
        vae.decode(
            latent,
            cuda_graph="off",
            free_bytes=1 << 40,
            check_cancelled=check,
            on_progress=lambda done, total: told.append(done / total),
        )
    torch.cuda.synchronize()
    stopped_after = time.perf_counter() - pressed[0]
    timer.join()
    print(f"\nstopped {stopped_after * 1e3:.0f} ms after the press, at {told[-1:]}")
    assert stopped_after < 1 and told == sorted(told) and told[-1] < 1
    told.clear()
    again = vae.decode(
        latent,
        cuda_graph="off",
        free_bytes=1 << 40,
        on_progress=lambda done, total: told.append(done / total),
    )
    assert difference(again, expected) == 0
    assert len(told) > 10 and told[-1] == 1, told


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
    assert whole.shape == shape
    assert all(bool(part.isfinite().all()) for part in whole.split(8, dim=2))
    found = {
        (row, column): corner_differences(vae, latent, canvas, whole, row, column, corner, seen)
        for row in (0, side - corner)
        for column in (0, side - corner)
    }
    print(f"\nrelative rms and largest difference of the corners: {found}")
    # The far corners have other positions when they are alone, so rotated queries and keys round otherwise: up to the
    # error of bf16 itself, 2e-2 to 4e-2 at these weights (float32 on a smaller grid: 2e-6). Other content is 1.4 off.
    assert found[0, 0][0] < 5e-3 and all(rms < 5e-2 for rms, _ in found.values()), found


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


@pytest.mark.parametrize(
    "shape, tiles", [((1, 1, 1), False), ((1, 3, 5), False), ((2, 7, 4), False), ((5, 5, 3), False), ((3, 3, 7), True)]
)
def test_the_fused_diffusion_decoder_is_as_near_to_float32_as_the_plain_one(vaes, tmp_path, monkeypatch, shape, tiles):
    """One frame, below the smallest grid, odd sizes."""
    exact_vae = load_video_vae(write_tiny_diffusion_vae(tmp_path / "t.safetensors"), device="cuda", dtype=torch.float32)
    vae = vaes["tiny diffusion"]
    latent = random_latent(vae, shape)
    grid = DecodeGrid.of(vae.config, shape)
    noise = torch.randn(1, 3, grid.frames, grid.height, grid.width, device="cuda").bfloat16()
    plan = DecodePlan(99, 0, "set by a test", Tiling((7, 8, 8), (4, 4, 4)) if tiles else None, 2)

    def raw(of: VideoVAE) -> torch.Tensor:
        return of.decode_raw(latent, noise=DecodeNoise(canvas=noise), plan=plan).float()

    exact, fused = raw(exact_vae), raw(vae)
    monkeypatch.setattr(neighbourhood_attention, "triton_refusal", lambda *_: "switched off by a test")
    plain = raw(vae)
    errors = [float((x - exact).square().mean().sqrt() / exact.square().mean().sqrt()) for x in (fused, plain)]
    print(f"\nrelative rms against float32: fused {errors[0]:.4f}, plain {errors[1]:.4f}")
    assert 0 < errors[0] <= 1.15 * errors[1], errors
    assert difference(fused, plain) > 0  # so that two paths were compared


def test_a_slow_device_gets_the_right_frames_out(vaes, monkeypatch):
    """The device lags behind the host: what is copied must wait for it."""
    vae = vaes["tiny conv"]
    latent = random_latent(vae, (9, 16, 16))
    plan = plans_of(vae, latent)[1]
    expected = vae.decode(latent, cuda_graph="off", plan=plan)
    real: Callable = vae.module.decode

    def slow(*arguments):
        for pixels in real(*arguments):
            torch.cuda._sleep(30_000_000)
            yield pixels

    monkeypatch.setattr(vae.module, "decode", slow)
    assert difference(vae.decode(latent, cuda_graph="off", plan=plan), expected) == 0


# Last of all: what it does to cuDNN's choices stays with the process.
@pytest.mark.parametrize(
    "kind, size",
    [
        ("tiny diffusion", (9, 12, 16)),
        ("diffusion", SIZES["medium"]),
        ("tiny conv", (9, 32, 32)),
        ("conv", SIZES["medium"]),
    ],
)
def test_a_shortage_in_the_middle_of_a_decode_ends_in_the_picture_of_a_smaller_plan(vaes, kind, size):
    """Plans that count on memory that is not there, so that it runs out somewhere inside."""
    vae = vaes[kind]
    latent = random_latent(vae, size)
    plans = plans_of(vae, latent)
    expected = [vae.decode(latent, cuda_graph="off", plan=plan) for plan in plans]
    most = peak_of(vae, latent, plans[0])
    reached = []
    for share in (0.85, 0.6, 0.4, 0.25, 0.15):
        timeline = Timeline(None, device=vae.device)
        try:
            with memory_limit(int(share * most)):
                frames = vae.decode(latent, cuda_graph="off", free_bytes=1 << 40, timeline=timeline)
        except DeviceMemoryError as error:
            words = str(error)
            assert "are free beside the" in words and "Nothing smaller is planned" in words, words[-300:]
            break
        rung = len(noted_plans(timeline)) - 1
        reached.append((share, rung))
        if "diffusion" in kind:
            largest = difference(frames, expected[rung])
            assert largest == 0, f"at {share} of {most >> 20} MiB plan {rung} differs by {largest}"
        else:  # convolutions short of workspace took other algorithms: rounded otherwise, as bf16 rounds
            gap = float((frames - expected[rung]).square().mean().sqrt() / expected[rung].square().mean().sqrt())
            assert gap < 3e-2, f"at {share} of {most >> 20} MiB plan {rung} differs by {gap}"
    print(f"\n{kind}: share of {most >> 20} MiB and plan that it ended in: {reached}, of {len(plans)} plans")
    assert any(rung > 0 for _, rung in reached), f"no plan was left at once, or none failed: {reached}"
    assert vae.decode(latent, cuda_graph="off").shape == expected[0].shape


def test_when_nothing_fits_the_numbers_are_named(vaes):
    vae = vaes["diffusion"]
    latent = random_latent(vae, SIZES["medium"])
    expected = vae.decode(latent, cuda_graph="off")
    with memory_limit(64 << 20), pytest.raises(DeviceMemoryError) as error:
        vae.decode(latent, cuda_graph="off")
    words = str(error.value)
    assert "are free beside the" in words and "Nothing smaller is planned" in words, words[-300:]
    assert difference(vae.decode(latent, cuda_graph="off"), expected) == 0
