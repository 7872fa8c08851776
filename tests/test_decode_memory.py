"""Decodes that run out of device memory, and the host side of a decode: range and layout, pages, copying threads.

The same on a real device is in gpu/test_decode_memory_gpu.py.
"""
from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import os
import sys
import threading
import time
import types
import weakref
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_at

from ltx_runtime.checkpoint import read_header
from ltx_runtime.errors import LTXError
from ltx_runtime.memory import DeviceMemoryError, is_out_of_memory
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_diffusion_vae
from ltx_runtime.video_vae import DecodePlan, VideoVAE, decode, host_frames, load_video_vae
from ltx_runtime.video_vae.host_frames import HostWriter, allocate_frames, to_frames
from ltx_runtime.video_vae.in_flight import Pace

TINY_CONV = Path(__file__).parent / "goldens" / "video_vae_conv_tiny.safetensors"
PHASE = "decode.video.chunk"
# Large enough for every kind of plan: the clip whole, streamed (conv), in tiles of falling sizes.
LATENTS = {"conv": (1, 4, 3, 1, 32), "diffusion": (1, 128, 3, 3, 4)}
PIECES = 3
FIRST, MIDDLE, LAST = range(PIECES)
# Attempts that fail, and where each of them does.
FALLS = {
    "conv": [[where] * times for where, times in itertools.product(range(PIECES), (1, 2, 3))],
    "diffusion": [[FIRST], [MIDDLE], [LAST], [LAST, MIDDLE], [FIRST, LAST, MIDDLE]],
}


@pytest.fixture(scope="module")
def tiny_diffusion(tmp_path_factory) -> Path:
    return write_tiny_diffusion_vae(tmp_path_factory.mktemp("tiny") / "vae.safetensors")


class Decoder:
    """A tiny VAE, a latent, its plans from the largest to the smallest, and what each gives."""

    def __init__(self, kind: str, path: Path):
        self.vae: VideoVAE = load_video_vae(path, device="cpu", dtype=torch.float32)
        self.latent = torch.randn(LATENTS[kind], generator=torch.Generator().manual_seed(1))
        self.plans: list[DecodePlan] = [self.vae.plan(self.latent.shape, free_bytes=1 << 40)]
        while (smaller := self._smaller(self.plans[-1])) is not None:
            self.plans.append(smaller)
        self.frames = functools.cache(lambda rung: self.vae.decode(self.latent, plan=self.plans[rung]))

    def _smaller(self, plan: DecodePlan) -> DecodePlan | None:
        return self.vae._decoding.smaller(self.latent.shape, plan, item_bytes=4)


@pytest.fixture(scope="module")
def decoders(tiny_diffusion) -> dict[str, Decoder]:
    return {"conv": Decoder("conv", TINY_CONV), "diffusion": Decoder("diffusion", tiny_diffusion)}


def run_out_of_memory(monkeypatch, vae: VideoVAE, falls: list[int], error=torch.OutOfMemoryError):
    """The first decodes of this VAE deliver white pieces until they raise before the piece that falls names."""
    real, attempts = vae._decoding.pieces, iter(falls)

    def pieces(module, latent, item, plan, noise, on_share, recorder):
        where = next(attempts, None)
        if where is None:
            yield from real(module, latent, item, plan, noise, on_share, recorder)
            return
        frames, height, width = 8 * (latent.shape[2] - 1) + 1, 32 * latent.shape[3], 32 * latent.shape[4]
        for index, part in enumerate(torch.arange(frames).tensor_split(PIECES)):
            on_share(index / PIECES)
            if index == where:
                raise error(f"injected at piece {index}")
            yield torch.full((1, 3, len(part), height, width), 3.0)

    monkeypatch.setattr(vae._decoding, "pieces", pieces)


@pytest.mark.parametrize("kind, falls", [(kind, falls) for kind in FALLS for falls in FALLS[kind]])
def test_every_fall_ends_in_the_frames_of_the_smaller_plan(decoders, monkeypatch, kind, falls):
    decoder = decoders[kind]
    expected = decoder.frames(len(falls))
    run_out_of_memory(monkeypatch, decoder.vae, falls)
    timeline, told = Timeline(None), []
    frames = decoder.vae.decode(decoder.latent, timeline=timeline, on_progress=lambda *counts: told.append(counts))
    assert torch.equal(frames, expected)  # not one white frame of the attempts before

    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    plans = [note for note in notes if "neighbourhood attention" not in note]
    assert len(plans) == len(falls) + 1 and "out of memory before" not in plans[0]
    for note, plan in zip(plans[1:], decoder.plans[1:]):
        # What is done, what memory that is thought to take, and why.
        assert note.split(",")[0] == plan.reason.split(",")[0] and "out of memory before with: " in note
        assert "MiB" in note.split(";")[0]
    timeline.child()  # raises if a failed attempt had left a phase open

    total = len(frames)
    assert told[-1] == (total, total) and {most for _, most in told} == {total}
    done = [count for count, _ in told]
    restarts = [index for index, count in enumerate(done) if count == 0]
    assert len(restarts) == sum(where != FIRST for where in falls)
    for start, stop in itertools.pairwise([0, *restarts, len(done)]):
        assert done[start:stop] == sorted(done[start:stop])


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_what_a_failed_plan_held_is_free_before_the_next_begins(decoders, monkeypatch, kind):
    decoder = decoders[kind]
    real, held, alive = decoder.vae._decoding.pieces, [], []

    def pieces(*args):
        if not held:
            activation = torch.empty(1000)
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("injected")
        alive.append(held[0]() is not None)
        yield from real(*args)

    monkeypatch.setattr(decoder.vae._decoding, "pieces", pieces)
    decoder.vae.decode(decoder.latent)
    assert alive == [False]


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_every_plan_after_a_shortage_asks_for_less(decoders, kind):
    sizes = [plan.peak_bytes for plan in decoders[kind].plans]
    assert len(sizes) > 3 and sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_when_no_plan_is_left_the_error_has_the_numbers_and_a_remedy(decoders, monkeypatch, kind):
    decoder = decoders[kind]
    count = len(decoder.plans)
    assert decoder.plans[0].tiling is None and decoder.plans[-1].tiling is not None and count > 2
    run_out_of_memory(monkeypatch, decoder.vae, [MIDDLE] * count)
    timeline = Timeline(None)
    words = (
        r"decode.video.chunk: out of device memory with .*tiles .*whole clip.* are free beside the .* of weights\. "
        r"Nothing smaller .*Decode a smaller picture .*at piece 1"
    )
    with pytest.raises(DeviceMemoryError, match=words) as error:
        decoder.vae.decode(decoder.latent, timeline=timeline)
    # PyTorch's error too: ComfyUI frees its models at one.
    assert isinstance(error.value, LTXError) and isinstance(error.value, torch.OutOfMemoryError)
    timeline.child()
    monkeypatch.undo()
    assert torch.equal(decoder.vae.decode(decoder.latent), decoder.frames(0))


def test_a_plan_that_was_given_is_kept_and_the_error_says_so(decoders, monkeypatch):
    decoder = decoders["conv"]
    run_out_of_memory(monkeypatch, decoder.vae, [FIRST])
    with pytest.raises(DeviceMemoryError, match="This plan was asked for; without it smaller ones are tried"):
        decoder.vae.decode(decoder.latent, plan=decoder.plans[0])


def test_memory_that_cuda_or_its_libraries_ran_out_of_counts_and_other_errors_do_not(decoders, monkeypatch):
    decoder = decoders["conv"]
    run_out_of_memory(monkeypatch, decoder.vae, [LAST], lambda at: RuntimeError(f"CUDA error: out of memory {at}"))
    assert torch.equal(decoder.vae.decode(decoder.latent), decoder.frames(1))
    monkeypatch.undo()
    run_out_of_memory(monkeypatch, decoder.vae, [LAST], RuntimeError)
    with pytest.raises(RuntimeError, match=r"^injected at piece 2$"):
        decoder.vae.decode(decoder.latent)
    assert is_out_of_memory(RuntimeError("CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_free_memory_that_is_given_bounds_the_plan(decoders):
    decoder = decoders["conv"]
    timeline = Timeline(None)
    decoder.vae.decode(decoder.latent, free_bytes=decoder.plans[1].peak_bytes, timeline=timeline)
    (note,) = (event for event in timeline.events if event["event"] == "note")
    assert note["attrs"]["peak_bytes"] <= decoder.plans[1].peak_bytes < decoder.plans[0].peak_bytes
    assert "exact stream" in note["message"] and "are free" in note["message"]


# --- progress and cancel inside a clip ------------------------------------------------------------------------------


def test_a_whole_clip_of_the_diffusion_decoder_tells_its_progress_and_can_be_cancelled(decoders):
    decoder = decoders["diffusion"]
    told, total = [], len(decoder.frames(0))
    decoder.vae.decode(decoder.latent, on_progress=lambda done, most: told.append(done))
    assert len(told) > 5 and told == sorted(set(told)) and told[-1] == total

    timeline = Timeline(None)
    with pytest.raises(Cancelled):
        decoder.vae.decode(decoder.latent, timeline=timeline, check_cancelled=cancel_at(6))
    ends = [event for event in timeline.events if event["event"] == "end" and event["phase"] == PHASE]
    assert [end["attrs"]["error"] for end in ends] == ["Cancelled"]  # in its one chunk
    assert torch.equal(decoder.vae.decode(decoder.latent), decoder.frames(0))


def test_the_host_asks_about_every_hundredth_of_the_work():
    told, asked = [], []
    pace = Pace(torch.device("cpu"), lambda: asked.append(None), told.append)
    for clip in range(2):
        for piece in range(1, 1001):
            pace.issued(clip, 2, piece / 1000)
        assert told == sorted(told) and told[-1] == pytest.approx((clip + 1) / 2, abs=0.01)
    assert told[-1] == 1
    assert 90 < len(told) <= 101 and len(asked) == len(told)


@pytest.mark.parametrize("kind", ["conv", "diffusion"])
def test_tiles_tell_their_progress_too(decoders, kind):
    decoder, told = decoders[kind], []
    decoder.vae.decode(decoder.latent, plan=decoder.plans[-1], on_progress=lambda done, most: told.append(done))
    assert len(told) > 2 and told == sorted(set(told)) and told[-1] == len(decoder.frames(0))


# --- range and layout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_frames_are_half_of_the_pixels_plus_one_bit_for_bit(dtype):
    if dtype == torch.float32:
        magnitudes = 10.0 ** torch.arange(-20, 12).repeat(2**11)
        values = torch.randn(2**16, generator=torch.Generator().manual_seed(0)) * magnitudes
    else:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)  # all there are, NaN and infinities included
    pixels = values.view(1, 1, 4, 64, 256).repeat(1, 3, 1, 1, 1)
    pixels[:, 1] = pixels[:, 1].flip(-1)
    expected = (pixels[0].permute(1, 2, 3, 0).float() + 1).mul(0.5).clamp(0, 1)
    frames = to_frames(pixels)
    assert frames.dtype == torch.float32 and frames.is_contiguous()
    bits, expected_bits = (x.nan_to_num(2).contiguous().view(torch.int32) for x in (frames, expected))
    assert torch.equal(bits, expected_bits)
    assert int(frames.isnan().sum()) == int(expected.isnan().sum())


# --- threads on the host --------------------------------------------------------------------------------------------


@pytest.fixture
def small_pages(monkeypatch):
    """Many parts in little memory."""
    monkeypatch.setattr(host_frames, "_PAGES_BYTES", 8192)
    monkeypatch.setattr(host_frames, "_threads", lambda: 4)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ltxgraph-")]


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_making_pages_never_overwrites_what_was_copied(small_pages, monkeypatch, delay):
    make = host_frames._make_pages

    def slow(memory):
        time.sleep(delay)
        make(memory)

    monkeypatch.setattr(host_frames, "_make_pages", slow)
    for run in range(10):
        source = torch.randn(50, 30, 40, 3, generator=torch.Generator().manual_seed(run))
        host = torch.full_like(source, float("nan"))
        with HostWriter(host) as writer:
            parts = list(zip(source.view(-1).split(5000), host.view(-1).split(5000), strict=True))
            copies = [writer.copy(*part, lambda: None) for part in parts[::-1]]  # against the order of the pages
            for copy in copies:
                copy.result()
            assert torch.equal(host, source)
        assert torch.equal(host, source) and own_threads() == []


def test_a_copy_waits_for_its_source_and_errors_of_threads_come_out(small_pages, monkeypatch):
    host, source, arrived = torch.zeros(5000), torch.ones(5000), threading.Event()
    with HostWriter(host) as writer:
        copy = writer.copy(source, host, arrived.wait)
        time.sleep(0.05)
        assert not copy.done() and not host.any()
        arrived.set()
        copy.result()
        assert torch.equal(host, source)

    def fail(memory):
        raise OSError("no page")

    monkeypatch.setattr(host_frames, "_make_pages", fail)
    with HostWriter(host) as writer, pytest.raises(OSError, match="no page"):
        time.sleep(0.05)
        writer.copy(source, host, lambda: None).result()


def test_leaving_early_ends_the_threads_at_once(small_pages, monkeypatch):
    made = []

    def slow(memory):
        time.sleep(0.02)
        made.append(None)

    monkeypatch.setattr(host_frames, "_make_pages", slow)
    with pytest.raises(KeyboardInterrupt), HostWriter(torch.empty(2**20)):
        time.sleep(0.01)
        raise KeyboardInterrupt
    assert len(made) < 100 and own_threads() == []  # of 512


def test_frames_made_in_inference_mode_are_filled_too(small_pages):
    with torch.inference_mode():
        host = allocate_frames(8, 512, 512, None)
        source = torch.rand(8, 512, 512, 3)
        with HostWriter(host) as writer:
            writer.copy(source, host, lambda: None).result()
        assert torch.equal(host, source)


def test_a_plan_counts_on_what_frames_and_weights_leave(monkeypatch):
    """On a CPU the frames lie in the memory that the decode takes."""
    vae = VideoVAE(read_header(TINY_CONV), device="cpu", dtype=torch.float32)
    given, real = [], vae._decoding.plan

    def plan(*args, free_bytes, **options):
        given.append(free_bytes)
        return real(*args, free_bytes=free_bytes, **options)

    monkeypatch.setattr(vae._decoding, "plan", plan)
    monkeypatch.setattr(decode, "device_free_bytes", lambda device: 1 << 30)
    vae.plan(LATENTS["conv"])
    vae.ensure_resident()
    vae.plan(LATENTS["conv"])
    left = (1 << 30) - 17 * 32 * 1024 * 3 * 4
    assert given == [left - vae.weights_bytes, left] and vae.weights_bytes > 0


def test_one_core_is_left_to_the_thread_that_issues(monkeypatch):
    for cores, threads in ((1, 1), (2, 1), (4, 3), (64, 6)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        assert host_frames._threads() == threads


def test_every_page_is_made():
    memory = torch.full((5 * mmap.PAGESIZE,), 255, dtype=torch.uint8)
    host_frames._make_pages(memory)
    assert not memory[:: mmap.PAGESIZE].any()


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_huge_pages_are_asked_for_by_whole_pages_inside_the_frames(monkeypatch):
    asked = []
    libc = types.SimpleNamespace(madvise=lambda start, count, advice: asked.append((start.value, count.value, advice)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    memory = torch.empty(2 * host_frames._PAGES_BYTES, dtype=torch.uint8)[1000:]
    host_frames._hint_huge_pages(memory)
    ((start, count, advice),) = asked
    assert start % mmap.PAGESIZE == count % mmap.PAGESIZE == 0 and advice == mmap.MADV_HUGEPAGE
    assert memory.data_ptr() <= start and start + count <= memory.data_ptr() + memory.nbytes
    assert memory.nbytes - count < 2 * mmap.PAGESIZE


def test_a_plan_leaves_room_for_the_clips_that_are_kept_beside_it(tiny_diffusion):
    vae = load_video_vae(tiny_diffusion, device="cpu")
    shape = (1, vae.config.latent_channels, 3, 4, 4)
    clip = 3 * 17 * 128 * 128 * (vae.module.dtype.itemsize + 4)
    smallest = vae.plan(shape, free_bytes=1 << 40).peak_bytes
    plan = vae.plan(shape, free_bytes=smallest, clips_kept=0)
    assert vae.plan(shape, free_bytes=smallest + 2 * clip, clips_kept=2) == plan
    assert vae.plan(shape, free_bytes=smallest + 2 * clip - 1, clips_kept=2) != plan
