"""Conv video VAE: the file's names, exact streaming, decode plans, frames on the host, and everything it refuses.

Agreement with the reference is in golden_kinds/video_vae_conv.py.
"""
from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_at
from live_memory import LiveMemory
from model_files import rewritten

from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import ConvVAEConfig
from ltx_runtime.errors import CheckpointError, NonFiniteError, RequestError, ShapeError
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import AskedSizes, ConvVideoVAE, DecodePlan, Tiling, VideoVAE, conv_pointwise, load_video_vae
from ltx_runtime.video_vae.host_frames import allocate_frames
from ltx_runtime.video_vae.plan import MAX_ELEMENTS, exact_decode_bytes, plan_decode, smaller_decode_plan
from ltx_runtime.video_vae.streaming import ClipMemory

HERE = Path(__file__).parent
TINY = HERE / "goldens" / "video_vae_conv_tiny.safetensors"
CHANNELS = 4  # of the tiny VAE's latents
PHASE = "decode.video.chunk"
CHUNK = 2  # latent frames, where a test needs several chunks
# Two float32 runs of the decoder differ by this much when the convolutions sum in another order (the reference and a
# float64 run: 6e-6; outputs reach 3.6).
ROUNDING = 3e-5


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return load_video_vae(TINY, device="cpu", dtype=torch.float32)


@pytest.fixture
def fresh_vae() -> VideoVAE:
    """For tests that change the weights or hang hooks on the module."""
    return load_video_vae(TINY, device="cpu", dtype=torch.float32)


def random_latent(frames: int, *, batch: int = 1, height: int = 1, width: int = 1) -> torch.Tensor:
    return torch.randn(batch, CHANNELS, frames, height, width, generator=torch.Generator().manual_seed(frames))


def chunks_of(latent_frames: int) -> DecodePlan:
    return DecodePlan(latent_frames, 0, f"{latent_frames} latent frames a chunk, set by a test")


def published_config() -> ConvVAEConfig:
    config = json.loads((HERE / "configs" / "video_vae_conv.json").read_text())
    return ConvVAEConfig.from_shapes(config, {})


# --- names and loading ----------------------------------------------------------------------------------------------


def test_the_encoder_is_not_loaded(vae):
    header = read_header(TINY)
    wanted = {name for name in header.tensors if not name.startswith("encoder.")}
    assert set(vae.module.state_dict()) == wanted
    # float32 of a bf16 file
    assert vae.weights_bytes == 2 * sum(header.tensors[name].num_bytes for name in wanted)


def test_a_monolith_with_vae_prefix_decodes_to_the_same_bits(vae, tmp_path):
    latent = random_latent(2)
    prefixed = load_video_vae(
        rewritten(TINY, tmp_path / "monolith.safetensors", prefix="vae."), device="cpu", dtype=torch.float32
    )
    assert torch.equal(prefixed.decode_raw(latent), vae.decode_raw(latent))


def test_evicted_weights_come_back_at_the_next_decode(fresh_vae):
    latent = random_latent(2)
    before = fresh_vae.decode(latent)
    fresh_vae.evict()
    assert not fresh_vae.resident
    assert torch.equal(fresh_vae.decode(latent), before)


def test_bf16_stays_as_close_to_float32_as_the_reference_does(vae):
    latent = random_latent(3)
    exact = vae.decode_raw(latent)
    rounded = load_video_vae(TINY, device="cpu").decode_raw(latent)
    assert rounded.dtype == torch.bfloat16
    # The reference's own bf16 run: relative rms 1.3e-2 to 1.9e-2 (video_vae.md section 9).
    assert ((rounded.float() - exact).square().mean() / exact.square().mean()).sqrt() < 2.5e-2


# --- streaming ------------------------------------------------------------------------------------------------------


# 19 latent frames are more than fill the stream (14); chunks that divide the clip, that don't, and one short of it.
@pytest.mark.parametrize("frames, chunks", [(1, [1]), (2, [1]), (3, [1, 2]), (19, [1, 2, 3, 5, 10, 18])])
def test_every_chunking_equals_the_whole_clip(vae, frames, chunks):
    latent = random_latent(frames, width=2)
    whole = vae.decode_raw(latent, plan=chunks_of(frames))
    assert whole.shape == (1, 3, 8 * (frames - 1) + 1, 32, 64)
    for chunk in chunks:
        with torch.inference_mode():
            pieces = list(vae.module.decode(latent, chunk))
        # One frame more than a chunk: the last layer answers one frame late.
        assert max(piece.shape[2] for piece in pieces) <= 8 * chunk + 1
        assert (torch.cat(pieces, dim=2) - whole).abs().max() < ROUNDING, f"{chunk} latent frames a chunk"


def test_a_causal_decoder_streams_too(tmp_path):
    path = rewritten(
        TINY, tmp_path / "causal.safetensors", config=lambda config: config["vae"].update(causal_decoder=True)
    )
    vae = load_video_vae(path, device="cpu", dtype=torch.float32)
    latent = random_latent(4)
    whole = vae.decode_raw(latent, plan=chunks_of(4))
    for chunk in (1, 2, 3):
        assert (vae.decode_raw(latent, plan=chunks_of(chunk)) - whole).abs().max() < ROUNDING
    longer = vae.decode_raw(torch.cat([latent, random_latent(2)], dim=2), plan=chunks_of(6))
    assert (longer[:, :, : whole.shape[2]] - whole).abs().max() < ROUNDING, "later frames reached earlier ones"


def test_no_layer_gets_more_frames_than_its_share_of_a_chunk(fresh_vae):
    seen: dict[int, int] = {}

    def note(layer, args):
        seen[id(layer)] = max(seen.get(id(layer), 0), args[0].shape[2])

    layers = fresh_vae.module.decoder.layers()
    for layer, _ in layers:
        layer.register_forward_pre_hook(note)
    fresh_vae.decode(random_latent(20), plan=chunks_of(CHUNK))
    assert [seen[id(layer)] for layer, _ in layers] == [rate * CHUNK for _, rate in layers]


def test_a_steady_chunk_finds_its_memory_laid_out_alike_and_leaves_it_as_it_is(vae):
    """So that it is one function from tensors to tensors, and can be recorded once."""
    layers = vae.module.decoder.layers()
    modules = list(vae.module.decoder.modules())
    memory = ClipMemory()

    def advance():
        x = torch.randn(1, CHANNELS, CHUNK, 1, 1)
        for layer, _ in layers:
            x = layer(x, memory, False)
            if not x.shape[2]:
                return

    def layout(state):
        return [None if kept is None else (kept.shape, kept.stride()) for kept in state.frames], state.started

    with torch.inference_mode():
        for _ in range(10):  # 14 latent frames fill the stream
            advance()
        before = memory.state(modules)
        contents = [None if kept is None else kept.clone() for kept in before.frames]
        advance()
        after = memory.state(modules)
    assert layout(after) == layout(before) and any(kept is not None for kept in before.frames)
    for kept, content, new in zip(before.frames, contents, after.frames):
        assert kept is None or (torch.equal(kept, content) and (new is not kept or not kept.numel()))


def test_a_kernel_that_cannot_be_built_leaves_the_plain_decode(fresh_vae, monkeypatch):
    """It shows in the first pass, when weights and window already lie as the kernels want them."""
    pytest.importorskip("triton")
    latent = random_latent(3, width=2)
    expected = fresh_vae.decode_raw(latent)
    tried = []

    def fail(launch, owner, kernel, device):
        tried.append((owner, kernel))
        return False

    monkeypatch.setattr(conv_pointwise, "is_fused", lambda device, dtype: not tried)
    monkeypatch.setattr(conv_pointwise, "try_triton", fail)
    assert (fresh_vae.decode_raw(latent) - expected).abs().max() < ROUNDING
    assert tried == [("conv video VAE", "finish")]
    assert torch.equal(fresh_vae.decode_raw(latent), expected)


@pytest.mark.parametrize("chunk", [3, 1])
def test_a_kernel_that_fails_in_mid_decode_leaves_the_right_picture(fresh_vae, monkeypatch, chunk):
    """Wherever: what a stream remembers lies as the kernels wanted it."""
    latent, plan = random_latent(3, width=2), chunks_of(chunk)
    expected = fresh_vae.decode_raw(latent, plan=plan)
    launched: list[str] = []
    fused = True

    def launch(kernel, x, *args):
        """As conv_pointwise._fused: the first `good` kernels run (here in plain torch), the next can't be built."""
        nonlocal fused
        fused = False
        if len(launched) == good:
            return False
        launched.append(kernel)
        if kernel == "finish":
            bias, residual, keep, out, activate = args
            conv_pointwise.finish(x, bias, residual, keep=keep, out=out, activate=activate)
        else:
            *args, out = args
            out.copy_(getattr(conv_pointwise, kernel)(x.clone(), *args))
        fused = True
        return True

    monkeypatch.setattr(conv_pointwise, "is_fused", lambda device, dtype: fused)
    monkeypatch.setattr(conv_pointwise, "_fused", launch)
    for good in itertools.count():  # noqa: B007 - launch reads it
        fused = True
        launched.clear()
        assert (fresh_vae.decode_raw(latent, plan=plan) - expected).abs().max() < ROUNDING
        if fused:
            break
    assert set(launched) == {"finish", "depth_to_space", "unpatchify"}


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [3, 1])
def test_frames_are_the_raw_pixels_in_image_range_and_layout(vae, chunk):
    latent = random_latent(3, batch=2, height=2, width=3)
    raw = vae.decode_raw(latent, plan=chunks_of(chunk))
    frames = vae.decode(latent, plan=chunks_of(chunk))
    assert frames.shape == (2 * 17, 64, 96, 3)
    assert (frames.dtype, frames.device.type, frames.is_contiguous()) == (torch.float32, "cpu", True)
    assert torch.equal(frames, ((raw + 1) / 2).clamp(0, 1).permute(0, 2, 3, 4, 1).reshape(frames.shape))
    assert raw.abs().max() > 1 and frames.min() == 0 and frames.max() == 1  # so the clamp was seen at work


def test_bf16_pixels_become_frames_in_float32():
    latent = random_latent(2)
    coarse = load_video_vae(TINY, device="cpu")
    raw, frames = coarse.decode_raw(latent), coarse.decode(latent)
    inside = (raw[0].permute(1, 2, 3, 0).float() + 1) / 2
    assert torch.equal(frames, inside.clamp(0, 1))
    assert not torch.equal(frames, frames.bfloat16().float())


def test_a_clip_of_a_batch_is_decoded_as_if_alone(vae):
    latent = random_latent(2, batch=2)
    both = vae.decode(latent)
    assert torch.equal(both, torch.cat([vae.decode(latent[:1]), vae.decode(latent[1:])]))


def test_one_flipped_latent_element_changes_pixels(vae):
    latent = random_latent(3)
    flipped = latent.clone()
    flipped[0, 1, 2, 0, 0] *= -1
    changed = (vae.decode(latent) - vae.decode(flipped)).abs().amax(dim=(1, 2, 3))
    assert changed.max() > 1e-2


def test_the_same_plan_gives_the_same_bits(vae):
    latent = random_latent(5)
    assert torch.equal(vae.decode(latent, plan=chunks_of(CHUNK)), vae.decode(latent, plan=chunks_of(CHUNK)))


# --- plans ----------------------------------------------------------------------------------------------------------

S0 = (1, 128, 16, 8, 12)  # 384x256x121
S1 = (1, 128, 16, 16, 24)  # 768x512x121
GIB = 2**30


def published_plan(shape=S1, **options) -> DecodePlan:
    options.setdefault("fused", True)
    return plan_decode(published_config(), shape, item_bytes=2, **options)


def test_a_small_clip_runs_whole():
    plan = published_plan(S0, free_bytes=100 * GIB)
    assert plan.chunk_frames == 16
    # Three tensors of the largest activation (0.19 GB here): a ResBlock's input, a window and a convolution's output.
    assert 3 * 0.19e9 < plan.peak_bytes < 1e9
    # In PyTorch's own layout 4 to 5, and the workspace of a convolution: video_vae.md section 5
    assert 0.75e9 < published_plan(S0, free_bytes=100 * GIB, fused=False).peak_bytes < 1.6e9
    assert "whole clip: 121 frames of 384x256" in plan.reason and "100.00 GiB are free" in plan.reason


def test_a_chunk_is_as_large_as_keeps_the_gpu_busy_and_chunks_are_alike():
    plan = published_plan(free_bytes=100 * GIB)
    assert plan.chunk_frames == 8 and plan.peak_bytes < 4e9
    assert "64 frames of 768x512 a chunk, which keep the GPU busy" in plan.reason
    plan = published_plan((1, 128, 16, 32, 48), free_bytes=100 * GIB)  # 1536x1024x121
    assert plan.chunk_frames == 4 and plan.peak_bytes < 8e9
    # 9 latent frames as 5 and 4, not as 8 and 1
    assert published_plan((1, 128, 9, 16, 24), free_bytes=100 * GIB).chunk_frames == 5
    asked = AskedSizes(temporal_size=8 * 16)
    assert published_plan(free_bytes=100 * GIB, asked=asked).chunk_frames == 16


@pytest.mark.parametrize(
    "shape, chunk, held_mib",
    [
        ((1, 128, 2, 8, 8), 0, (47, 67)),  # 256x256x9
        ((1, 128, 1, 8, 8), 0, (24,)),
        (S0, 0, (972, 804)),
        (S1, 16, (3795,)),
        (S1, 8, (3069,)),
        ((1, 128, 61, 16, 24), 4, (987 + 1292, 987 + 1344)),  # a steady chunk of 481 frames
    ],
)
def test_a_recording_holds_no_more_than_its_plan_says(shape, chunk, held_mib):
    """held_mib: on an H200 (benchmarks/results/decode_h200_202611.md), the native allocator first."""
    asked = AskedSizes(temporal_size=8 * (chunk or shape[2]))
    plan = published_plan(shape, free_bytes=100 * GIB, asked=asked)
    assert plan.chunk_frames == chunk or plan.chunk_frames >= shape[2]
    planned_mib = plan.recording_bytes / 2**20
    assert max(held_mib) < planned_mib < 1.55 * max(held_mib) + 32  # 32: of pools that are smaller than that


def test_less_memory_means_smaller_chunks_down_to_one():
    limits = (3, 1.6, 1, 0.75)
    chunks = [published_plan(free_bytes=int(gib * GIB)) for gib in limits]
    sizes = [plan.chunk_frames for plan in chunks]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4 and sizes[-1] == 1
    assert all(plan.peak_bytes <= gib * GIB for plan, gib in zip(chunks, limits, strict=True))
    assert "exact stream" in chunks[-1].reason and "64 frames a chunk would take" in chunks[-1].reason


def test_a_plan_that_may_not_fit_says_so():
    plan = published_plan(free_bytes=GIB // 4)
    assert plan.chunk_frames == 1
    assert "256.0 MiB are free" in plan.reason and "may run out of memory" in plan.reason


def test_the_users_chunk_size_is_honoured():
    plan = published_plan(free_bytes=100 * GIB, asked=AskedSizes(temporal_size=33))
    assert plan.chunk_frames == 4
    assert "32 frames of 768x512 a chunk (temporal_size 33)" in plan.reason
    assert published_plan(free_bytes=None, asked=AskedSizes(temporal_size=1)).chunk_frames == 1


def test_a_chunk_size_beyond_the_clip_or_the_memory_is_reduced_in_words():
    assert published_plan(free_bytes=100 * GIB, asked=AskedSizes(temporal_size=4096)).chunk_frames == 16
    plan = published_plan(free_bytes=2 * GIB, asked=AskedSizes(temporal_size=96))
    assert plan.chunk_frames < 12 and plan.peak_bytes <= 2 * GIB
    assert "96 frames a chunk as asked would take" in plan.reason


def test_tiles_come_when_the_smallest_chunk_does_not_fit():
    shape = (1, 128, 8, 32, 48)  # 57 frames of 1536x1024
    least = published_plan(shape, free_bytes=None, asked=AskedSizes(temporal_size=8)).peak_bytes
    plan = published_plan(shape, free_bytes=int(0.9 * least))
    assert plan.chunk_frames == 1 and plan.peak_bytes <= 0.9 * least
    size, overlap = plan.tiling.size, plan.tiling.overlap
    assert size[0] == 0 and 8 <= max(size) < 48 and overlap[1] >= 2
    assert "tiles of" in plan.reason and "the smallest chunk of the whole picture would not fit" in plan.reason


def test_asked_tiles_are_made():
    plan = published_plan(free_bytes=100 * GIB, asked=AskedSizes(512, 64, 80, 24))
    assert plan.tiling == Tiling((10, 0, 16), (3, 2, 2))
    assert plan.chunk_frames == 11  # whole: a later tile begins one latent frame earlier
    asked = AskedSizes(temporal_size=24, temporal_overlap=40)
    assert published_plan(free_bytes=100 * GIB, asked=asked).tiling == Tiling((6, 0, 0), (5, 0, 0))
    assert "tiles of 80 frames that share 24 and of 512 pixels that share 64" in plan.reason
    assert published_plan(free_bytes=100 * GIB, asked=AskedSizes(tile_size=768, temporal_overlap=8)).tiling is None


def test_asked_tiles_are_kept_where_they_may_not_fit():
    plan = published_plan(free_bytes=GIB // 16, asked=AskedSizes(tile_size=384))
    assert plan.tiling.size == (0, 12, 12) and "may run out of memory" in plan.reason


def test_smaller_tiles_share_no_more_than_half():
    failed = DecodePlan(1, 1 << 50, "tiles", tiling=Tiling((0, 0, 16), (0, 14, 14)))
    plan = smaller_decode_plan(published_config(), S1, failed, item_bytes=2, fused=True)
    assert plan.tiling == Tiling((0, 8, 8), (0, 4, 4))


def test_room_is_asked_for_the_smallest_exact_stream():
    exact = exact_decode_bytes(published_config(), S1, item_bytes=2, fused=True)
    assert published_plan(free_bytes=exact).tiling is None and published_plan(free_bytes=exact - 1).tiling
    # A short clip takes less as a whole: nothing of it is remembered.
    short = (1, 128, 2, 16, 24)
    exact = exact_decode_bytes(published_config(), short, item_bytes=2, fused=True)
    assert exact == published_plan(short, free_bytes=None).peak_bytes
    tiled = exact_decode_bytes(published_config(), S1, item_bytes=2, fused=True, asked=AskedSizes(tile_size=384))
    assert tiled == published_plan(free_bytes=0, asked=AskedSizes(tile_size=384)).peak_bytes


def test_plans_after_a_failure_end_in_tiles_where_these_take_less():
    large = (1, 128, 16, 32, 48)  # 1536x1024x121
    for shape, expected in ((S1, [(8, 0), (4, 0), (2, 0), (1, 0)]), (large, [(4, 0), (2, 0), (1, 0), (1, 12)])):
        plan, seen, sizes = published_plan(shape, free_bytes=100 * GIB), [], []
        while plan is not None:
            seen.append((plan.chunk_frames, max(plan.tiling.size) if plan.tiling else 0))
            sizes.append(plan.peak_bytes)
            plan = smaller_decode_plan(published_config(), shape, plan, item_bytes=2, fused=True)
        assert seen == expected and sizes == sorted(sizes, reverse=True)


def test_streamed_tiles_give_the_bits_of_whole_ones_up_to_rounding(vae):
    latent = random_latent(5, height=2, width=5)
    tiling = Tiling((0, 0, 3), (0, 0, 1))
    whole, streamed = (
        vae.decode_raw(latent, plan=DecodePlan(chunk, 0, "set by a test", tiling)) for chunk in (5, 1)
    )
    assert whole.shape == (1, 3, 33, 64, 160) and (whole - streamed).abs().max() < ROUNDING


def test_the_overlaps_of_a_plan_are_those_of_its_tiles(vae):
    shape = (1, 4, 4, 3, 5)
    plan = vae.plan(shape, sizes=AskedSizes(tile_size=96, overlap=32, temporal_size=16, temporal_overlap=8))
    overlaps = vae.overlaps(shape, plan)
    assert overlaps.size == (25, 96, 160) and overlaps.tiles == (3, 1, 2)
    assert overlaps.shared == (((1, 9), (9, 17)), (), ((64, 96),))
    assert overlaps.words() == "6 tiles sharing 8 frames, 32 px"
    assert vae.overlaps(shape, vae.plan(shape)) is None


# Whole, streamed, and streamed clips too short to fill the decoder.
@pytest.mark.parametrize(
    "frames, height, width, chunk", [(16, 16, 24, 16), (24, 16, 24, 4), (24, 4, 6, 1), (5, 34, 60, 4)]
)
def test_a_plan_covers_what_a_decode_holds_and_not_much_more(monkeypatch, frames, height, width, chunk):
    """Fused: what cuDNN holds by itself in the plain layout shows on a GPU only (test_conv_decode_gpu.py)."""
    monkeypatch.setattr(conv_pointwise, "is_fused", lambda device, dtype: True)
    monkeypatch.setattr(conv_pointwise, "try_triton", lambda launch, *_: True)
    monkeypatch.setattr(torch.nn.functional, "conv3d", channels_last_conv3d)
    module = build_on_meta(lambda: ConvVideoVAE(published_config()))
    latent = torch.empty(1, 128, frames, height, width, device="meta")
    with torch.inference_mode():
        list(module.decode(latent[:, :, :1, :1, :1], 1))  # lays the weights out
        on_the_way = None
        with LiveMemory() as memory:
            for pixels in module.decode(latent, chunk):
                on_the_way = torch.empty(pixels.shape, dtype=torch.float32, device="meta")
                del pixels
        assert on_the_way is not None
    options = {"free_bytes": None, "asked": AskedSizes(temporal_size=8 * chunk)}
    assert memory.peak_bytes < published_plan(tuple(latent.shape), **options).peak_bytes < 1.6 * memory.peak_bytes


def channels_last_conv3d(x, weight, padding):
    shape = (x.shape[0], weight.shape[0], x.shape[2] - 2, *x.shape[3:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last_3d)


def test_no_tensor_of_a_plan_passes_the_index_limit():
    shape = (1, 128, 64, 34, 60)  # 1920x1088x505
    plan = published_plan(shape, free_bytes=1000 * GIB, asked=AskedSizes(temporal_size=8 * 64))
    assert 1 < plan.chunk_frames < 64
    assert 128 * (8 * plan.chunk_frames + 2) * (8 * 34) * (8 * 60) <= MAX_ELEMENTS
    assert "elements, the limit is 2.15e+09" in plan.reason


def test_a_decode_out_of_memory_starts_again_smaller(fresh_vae):
    latent = random_latent(8)
    expected = fresh_vae.decode(latent)
    timeline = Timeline(None)

    def small_device(layer, args):
        if args[0].shape[2] > 8 * 3:
            raise torch.OutOfMemoryError("no room for more than three latent frames")

    fresh_vae.module.decoder.conv_out.register_forward_pre_hook(small_device)
    frames = fresh_vae.decode(latent, timeline=timeline)
    assert (frames - expected).abs().max() < ROUNDING
    notes = [event for event in timeline.events if event["event"] == "note"]
    assert [note["attrs"]["chunk_latent_frames"] for note in notes] == [8, 2]  # four would take no less than the whole
    assert "out of memory before" in notes[-1]["message"]
    timeline.child()  # raises if a failed run had left a phase open

    with pytest.raises(torch.OutOfMemoryError):  # a given plan is never changed behind the caller's back
        fresh_vae.decode(latent, plan=chunks_of(8))


# --- log, progress, cancel ------------------------------------------------------------------------------------------


def test_phases_and_progress_follow_the_chunks(vae):
    timeline, seen = Timeline(None), []
    plan = chunks_of(CHUNK)
    vae.decode(random_latent(5), plan=plan, timeline=timeline, on_progress=lambda *counts: seen.append(counts))
    ends = [event for event in timeline.events if event["event"] == "end"]
    chunks = [event["attrs"] for event in ends if event["phase"] == PHASE]
    assert [chunk["chunk"] for chunk in chunks] == list(range(len(chunks))) and len(chunks) > 1
    assert sum(chunk["frames"] for chunk in chunks) == 33
    assert len([event for event in ends if event["phase"] == "transfer.to_host"]) == len(chunks)
    done = [count for count, _ in seen]
    assert done == [chunk["frame"] + chunk["frames"] for chunk in chunks]
    assert {total for _, total in seen} == {33}


def test_cancel_stops_between_chunks_and_leaves_the_vae_usable(vae):
    latent, timeline = random_latent(8), Timeline(None)
    expected = vae.decode(latent, plan=chunks_of(1))
    with pytest.raises(Cancelled):
        vae.decode(latent, plan=chunks_of(1), timeline=timeline, check_cancelled=cancel_at(3))
    begun = [event for event in timeline.events if event["phase"] == PHASE and event["event"] == "begin"]
    assert len(begun) == 2
    timeline.child()  # raises if a phase were still open
    assert torch.equal(vae.decode(latent, plan=chunks_of(1)), expected)


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, words",
    [
        ((1, CHANNELS, 8, 8), "has 4 dimensions .*takes 5.*image latent"),
        ((1, 16, 2, 8, 8), "this latent has 16 channels; the LTX-2.5 VAE wants 4"),
        ((1, CHANNELS, 0, 8, 8), "empty"),
    ],
)
def test_latents_of_another_kind_are_refused(vae, shape, words):
    with pytest.raises(ShapeError, match=words):
        vae.decode(torch.zeros(shape))
    with pytest.raises(ShapeError, match=words):
        vae.plan(shape)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_latent_that_is_not_finite_is_refused(vae, bad):
    latent = random_latent(2)
    latent[0, 0, 1, 0, 0] = bad
    with pytest.raises(NonFiniteError, match="1 of 8 values of the latent are NaN or Inf") as error:
        vae.decode(latent)
    assert error.value.phase == PHASE


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("decode", ["decode", "decode_raw"])
def test_pixels_that_are_not_finite_name_phase_and_chunk(fresh_vae, bad, decode):
    clean = []

    def spoil_the_second(layer, args, output):
        clean.append(output.shape[2])
        if len(clean) == 2:
            output.completed()[0, 5, 0, 0, 0] = bad

    fresh_vae.module.decoder.conv_out.register_forward_hook(spoil_the_second)
    with pytest.raises(NonFiniteError, match=r"NaN or Inf in chunk 1, frames 15 to \d+ of clip 0\.") as error:
        getattr(fresh_vae, decode)(random_latent(8), plan=chunks_of(CHUNK))
    assert error.value.phase == PHASE


def test_frames_larger_than_host_memory_are_refused_with_numbers():
    with pytest.raises(RequestError, match=r"121 frames of 768x512 take 544\.5 MiB .* 100\.0 MiB are available"):
        allocate_frames(121, 512, 768, available_bytes=100 * 2**20)
    with pytest.raises(RequestError, match="refused"):
        allocate_frames(2**30, 2**13, 2**13, available_bytes=None)


def test_another_models_file_is_named():
    words = "is the LTX transformer, not the diffusion video VAE or the conv video VAE. Pick ltx-2.5-video-vae-bf16.saf"
    with pytest.raises(CheckpointError, match=words):
        load_video_vae(HERE / "goldens" / "transformer_w_av25.safetensors", device="cpu")


def test_a_vae_of_the_2_0_generation_is_refused(tmp_path):
    path = rewritten(
        TINY, tmp_path / "old.safetensors", config=lambda config: config["vae"].update(timestep_conditioning=True)
    )
    with pytest.raises(CheckpointError, match="timestep_conditioning"):
        load_video_vae(path, device="cpu")
