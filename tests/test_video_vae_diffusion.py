"""Diffusion video VAE: its file, noise, groups of heads, tiles and plans, and everything it refuses.

Agreement with the reference is in golden_kinds/video_vae_diffusion.py; what both decoders share (frames on the host,
log, progress, cancel) is in test_video_vae.py.
"""
from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_at
from model_files import rewritten
from safetensors import safe_open

from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import DiffusionVAEConfig
from ltx_runtime.errors import CheckpointError, NonFiniteError, RequestError
from ltx_runtime.seams import compare_at_seams
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import tiny_diffusion_vae_config, write_tiny_diffusion_vae
from ltx_runtime.video_vae import AskedSizes, DecodeNoise, DecodePlan, Tiling, VideoVAE, load_video_vae
from ltx_runtime.video_vae.diffusion_grid import DecodeGrid, smallest_latent, smallest_overlap, smallest_tile
from ltx_runtime.video_vae.diffusion_plan import (
    exact_diffusion_bytes,
    plan_diffusion_decode,
    smaller_diffusion_plan,
)
from ltx_runtime.video_vae.tiling import split_axis

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
CHANNELS = 128
PHASE = "decode.video.chunk"
# Two float32 runs whose matrix products sum in another order; outputs reach 2.
ROUNDING = 2e-5
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_diffusion_vae(tmp_path_factory.mktemp("tiny") / "vae.safetensors")


@pytest.fixture(scope="module")
def vae(tiny) -> VideoVAE:
    return load_video_vae(tiny, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def latent() -> torch.Tensor:
    """Large enough for two tiles along time and width."""
    return random_latent(3, 3, 4)


@pytest.fixture(scope="module")
def whole(vae, latent) -> torch.Tensor:
    return vae.decode_raw(latent)


def random_latent(frames: int, height: int = 1, width: int = 1, *, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(frames + height + width)
    return torch.randn(batch, CHANNELS, frames, height, width, generator=generator)


def plan_of(tiling: Tiling | None = None, head_groups: int = 1) -> DecodePlan:
    return DecodePlan(99, 0, "set by a test", tiling, head_groups)


TILES = Tiling((7, 0, 10), (4, 0, 4))  # cells of stage 4, of a grid of 9 x 12 x 16: two by one by two


# --- the file -------------------------------------------------------------------------------------------------------


def test_the_encoder_is_not_loaded(vae, tiny):
    header = read_header(tiny)
    assert set(vae.module.state_dict()) == {name for name in header.tensors if not name.startswith("encoder.")}


def test_a_monolith_with_vae_prefix_and_an_eviction_give_the_same_bits(vae, tiny, tmp_path):
    small = random_latent(1)
    expected = vae.decode_raw(small)
    prefixed = load_video_vae(
        rewritten(tiny, tmp_path / "m.safetensors", prefix="vae."), device="cpu", dtype=torch.float32
    )
    assert torch.equal(prefixed.decode_raw(small), expected)
    prefixed.evict()
    assert torch.equal(prefixed.decode_raw(small), expected)
    assert prefixed.statistics().channels == CHANNELS


def test_coarse_tensors_of_other_exports_are_left_out_and_strange_ones_refused(tiny, tmp_path):
    def coarse(tensors):
        tensors["decoder.coarse_head.weight"] = torch.zeros(3)

    def strange(tensors):
        tensors["decoder.refiner.weight"] = torch.zeros(3)

    assert load_video_vae(rewritten(tiny, tmp_path / "c.safetensors", tensors=coarse), device="cpu").resident
    with pytest.raises(CheckpointError, match=r"unexpected: decoder\.refiner\.weight"):
        load_video_vae(rewritten(tiny, tmp_path / "s.safetensors", tensors=strange), device="cpu")


def test_gates_scale_the_rows_of_the_output_projections(tiny, tmp_path):
    gates: dict[str, torch.Tensor] = {}

    def gated(tensors):
        generator = torch.Generator().manual_seed(5)
        for block in range(2):
            for gate in ("gate_msa", "gate_mlp", "gate_ctx"):
                name = f"decoder.diff_blocks.{block}.{gate}"
                gates[name] = tensors[name] = torch.rand(32, generator=generator)

    def multiplied(tensors):
        for block in range(2):
            start = f"decoder.diff_blocks.{block}"
            for gate, linear in (("gate_msa", "attn.proj"), ("gate_mlp", "mlp.w_down"), ("gate_ctx", "context_proj")):
                for part in ("weight", "bias"):
                    name = f"{start}.{linear}.{part}"
                    if name in tensors:
                        rows = gates[f"{start}.{gate}"].view(-1, *[1] * (tensors[name].ndim - 1))
                        tensors[name] = tensors[name].float() * rows

    paths = [
        rewritten(tiny, tmp_path / f"{change.__name__}.safetensors", tensors=change) for change in (gated, multiplied)
    ]
    by_gate, by_hand = (
        load_video_vae(path, device="cpu", dtype=torch.float32).decode_raw(random_latent(1)) for path in paths
    )
    assert (by_gate - by_hand).abs().max() < ROUNDING


def test_bf16_stays_as_close_to_the_reference_as_its_own_run_does():
    weights = GOLDENS / "video_vae_diffusion_tiny.safetensors"
    with safe_open(GOLDENS / "video_vae_diffusion_cases.safetensors", "pt") as file:
        latent, exact = file.get_tensor("dec_17f.latent"), file.get_tensor("dec_17f.out")
        case = json.loads(file.metadata()["cases"])["dec_17f"]
    generator = torch.Generator().manual_seed(case["noise_seed"])
    canvas = torch.randn(case["noise_draws"][0], generator=generator)
    raw = load_video_vae(weights, device="cpu").decode_raw(latent, noise=DecodeNoise(canvas=canvas))
    assert raw.dtype == torch.bfloat16
    error = raw[:, :, case["out_frames_stored"]].float() - exact
    # The reference's own bf16 run: 1.56e-2.
    assert (error.square().mean() / exact.square().mean()).sqrt() < 2e-2


# --- frames and noise -----------------------------------------------------------------------------------------------


def test_frames_are_the_raw_pixels_and_a_clip_of_a_batch_is_decoded_as_if_alone(vae):
    both = random_latent(2, batch=2)
    raw = vae.decode_raw(both)
    assert raw.shape == (2, 3, 9, 32, 32)
    assert torch.equal(raw[1:], vae.decode_raw(both[1:]))
    seen = []
    frames = vae.decode(both, on_progress=lambda *counts: seen.append(counts))
    assert torch.equal(frames, ((raw + 1) / 2).clamp(0, 1).permute(0, 2, 3, 4, 1).reshape(frames.shape))
    assert seen[-1] == (18, 18)


def test_the_noise_is_comfyuis_by_default_and_any_seed_or_canvas_on_request(vae):
    small = random_latent(1)
    default = vae.decode_raw(small)
    shape = (1, 3, 17, 96, 96)  # of the smallest grid: 3 latent frames of 3 x 3
    canvas = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(vae.decode_raw(small, noise=DecodeNoise(canvas=canvas)), default)
    assert torch.equal(vae.decode_raw(small, noise=DecodeNoise(seed=0)), default)
    assert (vae.decode_raw(small, noise=DecodeNoise(seed=1)) - default).abs().mean() > 0.05


@pytest.mark.parametrize("shape", [(1, 3, 9, 96, 96), (2, 3, 17, 96, 96), (17, 96, 96)])
def test_a_canvas_of_another_shape_is_refused(vae, shape):
    with pytest.raises(RequestError, match=r"this latent is decoded from \(1, 3, 17, 96, 96\)"):
        vae.decode(random_latent(1), noise=DecodeNoise(canvas=torch.zeros(shape)))


def test_one_flipped_latent_element_changes_pixels(vae, latent, whole):
    flipped = latent.clone()
    flipped[0, 1, 2, 0, 0] *= -1
    assert (vae.decode_raw(flipped) - whole).abs().amax(dim=(0, 1, 3, 4)).max() > 1e-2


def test_a_latent_that_is_not_finite_is_refused(vae):
    bad = random_latent(1)
    bad[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="1 of 128 values of the latent are NaN or Inf"):
        vae.decode(bad)


# --- groups of heads, tiles -----------------------------------------------------------------------------------------


def test_groups_of_heads_change_no_value(vae, latent, whole):
    grouped = vae.decode_raw(latent, plan=plan_of(head_groups=2))
    assert (grouped - vae.decode_raw(latent, plan=plan_of(head_groups=1))).abs().max() < ROUNDING
    assert torch.equal(grouped, whole)  # what is planned here


def test_tiles_share_the_noise_of_the_whole_decode(vae, latent, whole):
    tiled = vae.decode_raw(latent, plan=plan_of(TILES))
    assert tiled.shape == whole.shape
    seams = (tiled - whole).abs().mean()
    # Tiles that draw their own noise differ from the whole by their noise, not by their seams.
    own = (vae.decode_raw(latent, plan=plan_of(TILES), noise=DecodeNoise(per_tile=True)) - whole).abs().mean()
    assert seams < own / 4
    # Where one tile alone counts, and as far from its cut edges as stage 5 looks: exact up to what stage 4 saw.
    assert torch.equal(tiled, vae.decode_raw(latent, plan=plan_of(TILES)))


def test_one_noise_for_all_tiles_leaves_their_seams_as_the_difference(vae, latent, whole):
    """With noise of its own in each tile a comparison with the untiled picture shows noise, and no seams."""
    plan = plan_of(TILES)
    overlaps = vae.overlaps(latent.shape, plan)
    assert overlaps.tiles == (2, 1, 2) and overlaps.size == (17, 96, 128)
    found = {}
    for per_tile in (False, True):
        tiled = vae.decode_raw(latent, plan=plan, noise=DecodeNoise(per_tile=per_tile))
        found[per_tile] = compare_at_seams(whole[0].movedim(0, -1), tiled[0].movedim(0, -1), [overlaps])
    assert found[False].at_seams is True and found[True].at_seams is False
    assert found[True].inside.mean_abs > 10 * found[False].inside.mean_abs


def test_one_tile_is_the_whole(vae, latent, whole):
    assert (vae.decode_raw(latent, plan=plan_of(Tiling((0, 0, 0), (0, 0, 0)))) - whole).abs().max() < ROUNDING


def test_cancel_stops_between_tiles_and_leaves_the_vae_usable(vae, latent):
    timeline, small = Timeline(None), random_latent(1)
    expected = vae.decode(small)
    with pytest.raises(Cancelled):
        vae.decode(latent, plan=plan_of(TILES), timeline=timeline, check_cancelled=cancel_at(3))
    timeline.child()  # raises if a phase were still open
    assert torch.equal(vae.decode(small), expected)


def test_a_last_tile_that_is_too_short_reaches_further_back():
    tiles = split_axis(12, 6, 2, minimum=6)
    found = [(tile.start, tile.stop, tile.left, tile.right) for tile in tiles]
    assert found == [(0, 6, 0, 2), (4, 10, 2, 4), (6, 12, 4, 0)]
    sums = torch.zeros(12)
    for tile in tiles:
        sums[tile.cells()] += tile.ramp()
    assert sums[[0, 3, 5, 11]].tolist() == pytest.approx([1, 1, 1, 1])


# --- sizes and plans ------------------------------------------------------------------------------------------------


def published_config() -> DiffusionVAEConfig:
    config = json.loads((HERE / "configs" / "video_vae_diffusion.json").read_text())
    manifest = json.loads((HERE / "manifests" / "video_vae_diffusion.json").read_text())
    return DiffusionVAEConfig.from_shapes(config, {name: tuple(shape) for name, (_, shape) in manifest.items()})


S1, S2 = (1, 128, 16, 16, 24), (1, 128, 16, 32, 48)  # 768x512x121, 1536x1024x121


def published_plan(shape=S1, *, free_bytes=None, asked=None) -> DecodePlan:
    asked = asked or AskedSizes()
    return plan_diffusion_decode(published_config(), shape, item_bytes=2, free_bytes=free_bytes, asked=asked)


@pytest.mark.parametrize(
    "shape, held_mib",
    [
        ((1, 128, 4, 8, 8), (838, 722)),  # 256x256x25
        ((1, 128, 1, 8, 8), (680, 620)),
        ((1, 128, 16, 8, 12), (2542, 2088)),  # 384x256x121
        (S1, (7422,)),
    ],
)
def test_a_recording_holds_no_more_than_its_plan_says(shape, held_mib):
    """held_mib: on an H200 (benchmarks/results/decode_h200_202611.md), the native allocator first."""
    plan = published_plan(shape, free_bytes=1 << 50)
    assert plan.tiling is None
    assert max(held_mib) < plan.recording_bytes / 2**20 < 1.2 * max(held_mib)


def test_the_published_sizes():
    config = published_config()
    assert smallest_latent(config) == (3, 7, 7)
    assert smallest_tile(config) == (6, 6, 6)
    assert smallest_overlap(config) == (20, 20, 20)
    grid = DecodeGrid.of(config, S1[2:])
    assert (grid.cells, grid.ghost_cells) == ((61, 64, 96), 8)
    assert (grid.frames, grid.height, grid.width) == (121, 512, 768)
    # Below the floor: 3 x 7 x 7 latents, of which the middle and the first frame are wanted.
    small = DecodeGrid.of(config, (1, 4, 1))
    assert (small.frames, small.height, small.width) == (17, 224, 224)
    assert small.padding == (3, 3, 1, 2, 0, 4)
    assert (small.content_frames, small.content) == (1, (slice(32, 160), slice(96, 128)))


def test_the_whole_clip_is_decoded_at_once_where_it_fits():
    plan = published_plan(free_bytes=100 * GIB)
    assert plan.tiling is None and plan.head_groups == 2
    # Stream, queries, half of keys and values: 3 tensors of 1.52 GB, stage 4 another 0.4 (video_vae.md section 6.10).
    assert 4.9e9 < plan.peak_bytes < 7.5e9
    assert "whole clip: 121 frames of 768x512, heads in 2 groups" in plan.reason
    assert "100.00 GiB are free" in plan.reason
    assert published_plan(S2, free_bytes=100 * GIB).peak_bytes < 24e9


def test_less_memory_means_more_groups_then_tiles():
    plans = [published_plan(free_bytes=int(gib * GIB)) for gib in (6.5, 5.5, 5, 4, 3)]
    assert [plan.head_groups for plan in plans[:2]] == [2, 4] and not any(plan.tiling for plan in plans[:2])
    assert all(plan.tiling for plan in plans[2:])
    assert all(plan.peak_bytes <= gib * GIB for plan, gib in zip(plans, (6.5, 5.5, 5, 4, 3), strict=True))
    assert "tiles of up to" in plans[-1].reason and "the whole clip, heads in 2 groups, would take" in plans[-1].reason


def test_a_plan_that_may_not_fit_says_so():
    plan = published_plan(free_bytes=GIB)
    assert plan.tiling and "1.00 GiB are free" in plan.reason and "may run out of memory" in plan.reason


def test_asked_sizes_are_honoured_and_short_overlaps_raised_in_words():
    plan = published_plan(free_bytes=100 * GIB, asked=AskedSizes(512, 64, 64, 16))  # the official template's
    assert plan.tiling == Tiling((32, 0, 64), (20, 0, 20))
    assert "temporal_overlap 16 raised to 40 and overlap 64 raised to 160" in plan.reason
    assert published_plan(free_bytes=100 * GIB, asked=AskedSizes(tile_size=768)).tiling is None
    wide = published_plan(free_bytes=100 * GIB, asked=AskedSizes(tile_size=512, overlap=256))
    assert wide.tiling == Tiling((0, 0, 64), (0, 0, 32)) and "raised" not in wide.reason


def test_room_is_asked_for_the_picture_without_tiles():
    config = published_config()
    exact = exact_diffusion_bytes(config, S1, item_bytes=2)
    assert exact == published_plan(free_bytes=exact).peak_bytes
    assert published_plan(free_bytes=exact).tiling is None and published_plan(free_bytes=exact - 1).tiling
    asked = AskedSizes(tile_size=384, temporal_size=64)
    assert exact_diffusion_bytes(config, S1, item_bytes=2, asked=asked) < 0.6 * exact


def test_plans_after_a_failure_get_smaller_until_there_are_none():
    config = published_config()
    plan, plans = published_plan(), []
    while plan is not None:
        plans.append(plan)
        plan = smaller_diffusion_plan(config, S1, plan, item_bytes=2)
    assert [(plan.head_groups, plan.tiling) for plan in plans[:2]] == [(2, None), (4, None)]  # the same picture first
    sizes = [plan.peak_bytes for plan in plans]
    assert sizes[1] < sizes[0] and len(sizes) > 3
    assert all(plan.tiling for plan in plans[2:]) and all(b < 0.85 * a for a, b in itertools.pairwise(sizes[1:]))


def test_a_decode_out_of_memory_starts_again_in_tiles(tiny, latent):
    vae = load_video_vae(tiny, device="cpu", dtype=torch.float32)
    timeline = Timeline(None)
    expected = vae.decode(latent)

    def small_device(layer, args):
        if args[0].shape[1:4] == (16, 24, 32):
            raise torch.OutOfMemoryError("no room for all 24 x 32 tokens of a frame")

    hook = vae.module.decoder.norm_out.register_forward_pre_hook(small_device)
    frames = vae.decode(latent, timeline=timeline)
    assert frames.shape == expected.shape and (frames - expected).abs().mean() < 0.05
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    assert "neighbourhood attention by torch" in notes[0]
    assert "whole clip" in notes[1] and "tiles" in notes[2] and "out of memory before" in notes[2]
    timeline.child()  # raises if a failed run had left a phase open
    with pytest.raises(torch.OutOfMemoryError):  # a given plan is never changed behind the caller's back
        vae.decode(latent, plan=plan_of())
    hook.remove()


def test_more_steps_keep_one_canvas_for_all_tiles(tiny, latent):
    """Several steps go through the same tiles: each takes its own part of one canvas, whatever the convention."""
    header = read_header(tiny)
    config = header.config["vae"]
    config["decoder"]["default_num_inference_steps"] = 2
    vae = VideoVAE(replace(header, config={"vae": config}), device="cpu", dtype=torch.float32)
    assert vae.config == replace(tiny_diffusion_vae_config(), num_steps=2)
    parts = [
        vae.decode_raw(latent, plan=plan_of(TILES), noise=DecodeNoise(per_tile=per_tile)) for per_tile in (True, False)
    ]
    assert torch.equal(*parts)
