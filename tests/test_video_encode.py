"""Video encoder: either file, exact chunks, tiles and plans, sizes and ranges of images, and everything it refuses.

Agreement with the reference is in golden_kinds/video_vae_conv.py.
"""
from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_at
from model_files import rewritten
from safetensors.torch import load_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import ConvVAEConfig, VideoEncoderConfig
from ltx_runtime.errors import CheckpointError, NonFiniteError, RequestError, ShapeError
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import EncodePlan, VideoEncoder, load_video_encoder
from ltx_runtime.video_vae.frame_upload import centre_crop
from ltx_runtime.video_vae.plan import MAX_ELEMENTS, plan_encode, smaller_encode_plan
from ltx_runtime.video_vae.tiling import split_axis

HERE = Path(__file__).parent
GOLDENS = HERE / "goldens"
TINY = GOLDENS / "video_vae_conv_tiny.safetensors"
DIFFUSION = GOLDENS / "video_vae_diffusion_tiny.safetensors"
CHANNELS = 4  # of the tiny VAE's latents
PHASE = "encode.video.chunk"
# Two float32 runs that sum in another order; latents reach 3.
ROUNDING = 2e-5


@pytest.fixture(scope="module")
def encoder() -> VideoEncoder:
    return load_video_encoder(TINY, device="cpu", dtype=torch.float32)


@pytest.fixture
def fresh_encoder() -> VideoEncoder:
    """For tests that hang hooks on the module."""
    return load_video_encoder(TINY, device="cpu", dtype=torch.float32)


def random_images(frames: int, height: int = 32, width: int = 32, channels: int = 3) -> torch.Tensor:
    return torch.rand(frames, height, width, channels, generator=torch.Generator().manual_seed(frames))


def planned(chunk: int, *, tile: int = 0, overlap: int = 0) -> EncodePlan:
    return EncodePlan(chunk, tile, overlap, 0, "set by a test")


def published_encoder() -> VideoEncoderConfig:
    config = json.loads((HERE / "configs" / "video_vae_conv.json").read_text())
    return ConvVAEConfig.from_shapes(config, {}).encoder


def published_plan(height: int = 16, width: int = 24, frames: int = 16, **options) -> EncodePlan:
    """768x512x121 unless told otherwise."""
    options.setdefault("fused", True)
    return plan_encode(published_encoder(), (1, 128, frames, height, width), item_bytes=2, **options)


GIB = 2**30


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_diffusion_vaes_file_holds_the_same_encoder():
    golden = load_file(GOLDENS / "video_vae_diffusion_cases.safetensors")
    encoder = load_video_encoder(DIFFUSION, device="cpu", dtype=torch.float32)
    latent = encoder.encode(golden["enc.video_u8"][0].permute(1, 2, 3, 0) / 255)
    assert (latent - golden["enc.latent"]).abs().max() < 1e-4


def test_only_the_encoder_is_loaded(encoder):
    header = read_header(TINY)
    wanted = {name for name in header.tensors if not name.startswith("decoder.")}
    assert set(encoder.module.state_dict()) == wanted
    assert encoder.weights_bytes == 2 * sum(header.tensors[name].num_bytes for name in wanted)  # float32 of a bf16 file


def test_a_monolith_encodes_to_the_same_bits_and_evicted_weights_come_back(encoder, tmp_path):
    path = rewritten(TINY, tmp_path / "m.safetensors", prefix="vae.")
    images = random_images(9)
    prefixed = load_video_encoder(path, device="cpu", dtype=torch.float32)
    expected = encoder.encode(images)
    assert torch.equal(prefixed.encode(images), expected)
    prefixed.evict()
    assert not prefixed.resident
    assert torch.equal(prefixed.encode(images), expected)


def test_bf16_stays_close_to_float32(encoder):
    images = random_images(9, 64, 64)
    exact, rounded = encoder.encode(images), load_video_encoder(TINY, device="cpu").encode(images)
    assert rounded.dtype == torch.float32
    # The decoder's reference run: relative rms up to 1.9e-2 (video_vae.md section 9).
    assert ((rounded - exact).square().mean() / exact.square().mean()).sqrt() < 3e-2


@pytest.mark.parametrize("change, words", [
    (lambda config: config.update(timestep_conditioning=True), "timestep_conditioning"),
    (lambda config: config.update(encoder_blocks=[["attn_x", {"num_layers": 1}]]), "attn_x"),
])
def test_an_encoder_that_this_runtime_does_not_have_is_refused(tmp_path, change, words):
    path = rewritten(TINY, tmp_path / "v.safetensors", config=lambda config: change(config["vae"]))
    with pytest.raises(CheckpointError, match=words):
        VideoEncoder(read_header(path), device="cpu")


def test_another_kind_of_file_is_named():
    with pytest.raises(CheckpointError, match="is a latent upscaler, not the conv video VAE"):
        load_video_encoder(GOLDENS / "latent_upsampler_spatial_x2_tiny.safetensors", device="cpu")


# --- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames, chunks", [(1, [1]), (9, [1]), (17, [1, 2]), (49, [1, 2, 3, 5, 6])])
def test_every_chunking_equals_the_whole_clip(encoder, frames, chunks):
    images = random_images(frames, width=64)
    whole = encoder.encode(images, plan=planned(99))
    assert whole.shape == (1, CHANNELS, (frames - 1) // 8 + 1, 1, 2) and whole.dtype == torch.float32
    for chunk in chunks:
        assert (encoder.encode(images, plan=planned(chunk)) - whole).abs().max() < ROUNDING, f"{chunk} a chunk"


def test_chunks_between_first_and_last_are_alike_in_every_layer(fresh_encoder):
    seen: dict[int, list[int]] = {}
    layers = fresh_encoder.module.encoder.layers()
    for layer, _ in layers:
        layer.register_forward_pre_hook(lambda layer, args: seen.setdefault(id(layer), []).append(args[0].shape[2]))
    fresh_encoder.encode(random_images(73), plan=planned(3))
    for layer, rate in layers:
        first, *steady, last = seen[id(layer)]
        assert (first, steady, last) == (2 * rate + 1, [3 * rate, 3 * rate], rate)


def test_later_images_do_not_reach_earlier_latents(encoder):
    images = random_images(25)
    changed = images.clone()
    changed[17:] = 1 - changed[17:]
    a, b = encoder.encode(images), encoder.encode(changed)
    assert torch.equal(a[:, :, :3], b[:, :, :3]) and (a[:, :, 3] - b[:, :, 3]).abs().max() > 1e-2


# --- images ---------------------------------------------------------------------------------------------------------


def test_frames_beyond_the_grid_and_alpha_are_left_out(encoder):
    images = random_images(9)
    expected = encoder.encode(images)
    for extra in (1, 7):
        assert torch.equal(encoder.encode(torch.cat([images, random_images(extra)])), expected)
    assert torch.equal(encoder.encode(torch.cat([images, torch.rand(9, 32, 32, 1)], dim=3)), expected)


def test_half_precision_images_are_converted_not_refused(encoder):
    images = random_images(1).half()
    assert torch.equal(encoder.encode(images), encoder.encode(images.float()))


@pytest.mark.parametrize("height, width, box", [
    (50, 100, (0, 50, 25, 75)),  # wider than asked: the sides go
    (90, 60, (15, 75, 0, 60)),  # taller: top and bottom go
    (128, 128, (0, 128, 0, 128)),
    (33, 32, (0, 33, 0, 32)),  # half a pixel too many on either side is none
])
def test_images_are_cropped_around_the_centre_and_resampled_when_told(encoder, height, width, box):
    images = random_images(9, height, width)
    top, bottom, left, right = box
    part = images[:, top:bottom, left:right].movedim(-1, 1)
    resampled = torch.nn.functional.interpolate(part, size=(64, 64), mode="bilinear").movedim(1, -1)
    assert torch.equal(encoder.encode(images, size=(64, 64)), encoder.encode(resampled))


def test_a_size_that_the_images_already_have_changes_nothing(encoder):
    images = random_images(1, 64, 32)
    assert torch.equal(encoder.encode(images, size=(32, 64)), encoder.encode(images))


@pytest.mark.parametrize("shape, words", [
    ((9, 48, 64, 3), "height=48 .* Use 32 or 64"),
    ((9, 64, 100, 3), "width=100 .* Use 96 or 128"),
    ((1, 20, 64, 3), "height=20 .* Use 32"),
    ((9, 64, 64), "images of shape"),
    ((0, 64, 64, 3), "images of shape"),
    ((1, 64, 64, 1), "images of 1 channels"),
])
def test_images_off_the_grid_are_refused(encoder, shape, words):
    with pytest.raises(ShapeError, match=words):
        encoder.encode(torch.zeros(shape))


def test_a_size_off_the_grid_and_bytes_are_refused(encoder):
    with pytest.raises(ShapeError, match=r"width=720 .* Use 704 or 736"):
        encoder.encode(random_images(1), size=(720, 480))
    with pytest.raises(RequestError, match="uint8"):
        encoder.encode(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_images_that_are_not_finite_are_named(encoder, bad):
    images = random_images(25)
    images[12, 3, 4, 1] = bad
    with pytest.raises(NonFiniteError, match="NaN or Inf in frames 9 to 16 of the images") as error:
        encoder.encode(images, plan=planned(1))
    assert error.value.phase == PHASE


def test_an_encoder_that_overflows_is_named(fresh_encoder):
    fresh_encoder.module.encoder.conv_out.register_forward_hook(lambda *args: args[-1].completed().fill_(float("inf")))
    with pytest.raises(NonFiniteError, match="though the images are finite"):
        fresh_encoder.encode(random_images(1))


# --- tiles ----------------------------------------------------------------------------------------------------------


def test_tiles_follow_the_references_rule():
    found = [(tile.start, tile.stop, tile.left, tile.right) for tile in split_axis(11, 4, 2)]
    assert found == [(0, 4, 0, 2), (2, 6, 2, 2), (4, 8, 2, 2), (6, 10, 2, 2), (8, 11, 2, 0)]
    assert [(tile.start, tile.stop) for tile in split_axis(5, 2, 3)] == [(0, 4), (1, 5)]  # a tile outgrows its overlap
    assert split_axis(4, 4, 2) == split_axis(4, 0, 0)
    ramps = torch.zeros(11)
    for tile in split_axis(11, 5, 2):
        ramps[tile.cells()] += tile.ramp()
    assert torch.allclose(ramps, torch.ones(11))


def test_tiles_stream_in_time_and_differ_from_the_whole_picture_near_seams_only(encoder):
    images = random_images(17, 32, 32 * 20)
    whole = encoder.encode(images)
    plan = planned(1, tile=12, overlap=4)
    tiled = encoder.encode(images, plan=plan)
    assert (tiled - encoder.encode(images, plan=planned(9, tile=12, overlap=4))).abs().max() < ROUNDING
    off = (tiled - whole).abs().amax(dim=(0, 1, 2, 3))
    assert off.max() > 1e-3, "these tiles were expected to show"
    assert off[0] < ROUNDING and off[-1] < ROUNDING


def test_a_moving_bar_is_encoded_at_a_seam_in_time_as_anywhere_else(encoder):
    """Ghosts between temporal chunks: an exact stream has none."""
    images = torch.zeros(41, 32, 64, 3)
    for frame in range(41):
        images[frame, :, frame : frame + 8] = 1
    whole = encoder.encode(images, plan=planned(99))
    off = (encoder.encode(images, plan=planned(1)) - whole).abs().amax(dim=(0, 1, 3, 4))
    assert off.max() < ROUNDING


# --- plans ----------------------------------------------------------------------------------------------------------


def test_smaller_tiles_share_no_more_than_half():
    failed = EncodePlan(1, 16, 14, 1 << 50, "tiles")
    plan = smaller_encode_plan(published_encoder(), (1, 128, 16, 16, 24), failed, item_bytes=2, fused=True)
    assert (plan.tile, plan.overlap) == (8, 4)


def test_plans_shrink_with_memory_to_chunks_and_then_to_tiles():
    limits = (60, 4, 2.5, 1.2, 0.5)
    plans = [published_plan(32, 48, free_bytes=int(gib * GIB)) for gib in limits]
    assert [plan.chunk_frames for plan in plans] == sorted((plan.chunk_frames for plan in plans), reverse=True)
    assert plans[0].chunk_frames == 4 and "32 frames of 1536x1024 a chunk, which keep the GPU busy" in plans[0].reason
    assert 1 < plans[1].chunk_frames < 4 and "32 frames a chunk would take" in plans[1].reason and not plans[1].tile
    for plan in plans[3:]:
        assert plan.chunk_frames == 1 and 8 <= plan.tile < 48 and plan.overlap == max(2, plan.tile // 4)
        assert plan.reason.startswith(f"tiles of {plan.tile * 32} pixels that share {plan.overlap * 32}")
        assert "the smallest chunk of the whole picture would not fit" in plan.reason
    assert plans[4].tile < plans[3].tile
    for plan, gib in zip(plans, limits, strict=True):
        assert plan.peak_bytes <= gib * GIB


def test_a_plan_that_may_not_fit_says_so():
    assert "may run out of memory" in published_plan(free_bytes=1 << 20).reason
    assert "may run out of memory" in published_plan(8, 8, free_bytes=1 << 20).reason


def test_the_users_sizes_are_honoured():
    plan = published_plan(free_bytes=100 * GIB, temporal_size=32, tile_size=256, overlap=64)
    assert (plan.chunk_frames, plan.tile, plan.overlap) == (4, 8, 2)
    assert published_plan(free_bytes=100 * GIB, tile_size=768).tile == 0, "one tile is no tile"
    assert published_plan(free_bytes=None, temporal_size=1).chunk_frames == 1


def test_no_tensor_of_a_plan_passes_the_index_limit():
    plan = published_plan(34, 60, 64, free_bytes=1000 * GIB)  # 1920x1088x505
    assert 1 < plan.chunk_frames < 64
    assert 128 * (8 * plan.chunk_frames + 2) * (8 * 34) * (8 * 60) <= MAX_ELEMENTS


def test_an_encode_out_of_memory_starts_again_smaller(fresh_encoder):
    images = random_images(33, 32, 32 * 20)
    expected = fresh_encoder.encode(images)
    limits = [10**9]

    def small_device(layer, args):
        if args[0].shape[2:].numel() > limits[0]:
            raise torch.OutOfMemoryError("no room")

    fresh_encoder.module.encoder.conv_in.register_forward_pre_hook(small_device)
    frame = 8 * 8 * 20  # cells of a picture at the first layer
    for limits[0], chunks, tiled in ((20 * frame, [5, 2], False), (5 * frame, [5, 2, 1, 1], True)):
        timeline = Timeline(None)
        latent = fresh_encoder.encode(images, timeline=timeline)
        notes = [event for event in timeline.events if event["event"] == "note"]
        assert [note["attrs"]["chunk_latent_frames"] for note in notes] == chunks
        assert "out of memory before" in notes[-1]["message"]
        assert ("tiles of 320 pixels" in notes[-1]["message"]) is tiled
        timeline.child()  # raises if a failed run had left a phase open
        if not tiled:
            assert (latent - expected).abs().max() < ROUNDING
    with pytest.raises(torch.OutOfMemoryError):  # a given plan is never changed behind the caller's back
        fresh_encoder.encode(images, plan=planned(99))


def test_a_library_without_room_is_out_of_memory_too(fresh_encoder):
    """cuDNN finds no algorithm when none gets its workspace."""
    errors = [RuntimeError("GET was unable to find an engine to execute this computation"), RuntimeError("broken")]
    fresh_encoder.module.encoder.conv_in.register_forward_pre_hook(lambda layer, args: _raise_next(errors))
    with pytest.raises(RuntimeError, match="broken"):
        fresh_encoder.encode(random_images(17, 32, 32))
    assert not errors
    fresh_encoder.encode(random_images(17, 32, 32))


def _raise_next(errors: list[RuntimeError]) -> None:
    if errors:
        raise errors.pop(0)


# --- log, progress, cancel ------------------------------------------------------------------------------------------


def test_phases_and_progress_follow_the_chunks(encoder):
    timeline = Timeline(None)
    seen = []
    encoder.encode(
        random_images(35, 32, 128), plan=planned(2, tile=3, overlap=2), timeline=timeline,
        on_chunk=lambda *counts: seen.append(counts),
    )
    chunks = [e["attrs"] for e in timeline.events if e["event"] == "end" and e["phase"] == PHASE]
    assert [(c["chunk"], c["frame"], c["frames"], c["column"]) for c in chunks] == [
        (index, frame, frames, column)
        for column in (0, 1)
        for index, (frame, frames) in enumerate([(0, 9), (9, 16), (25, 8)])
    ]
    assert seen == [(9, 66), (25, 66), (33, 66), (42, 66), (58, 66), (66, 66)]


def test_cancel_stops_between_chunks_and_leaves_the_encoder_usable(encoder):
    images, timeline = random_images(33), Timeline(None)
    with pytest.raises(Cancelled):
        encoder.encode(images, plan=planned(1), timeline=timeline, check_cancelled=cancel_at(3))
    begun = [event for event in timeline.events if event["phase"] == PHASE and event["event"] == "begin"]
    assert len(begun) == 2
    timeline.child()  # raises if a phase were still open
    assert (encoder.encode(images, plan=planned(1)) - encoder.encode(images)).abs().max() < ROUNDING


@pytest.mark.parametrize(("size", "wanted"), [((96, 64), (65536, 64)), ((64, 96), (32, 16384)), ((1, 1), (64, 32))])
def test_a_crop_to_extreme_proportions_keeps_a_pixel(size, wanted):
    rows, columns = centre_crop(*size, *wanted)
    assert rows.stop > rows.start >= 0 and columns.stop > columns.start >= 0
    assert rows.start + rows.stop == size[1] and columns.start + columns.stop == size[0]  # around the centre
