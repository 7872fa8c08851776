"""Faults that people met in neighbouring software, groups A, B, C and H; docs/cases.md: which test holds which case.

Run under both allocators:

    python3 -m pytest tests/gpu
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu
"""

import dataclasses
import gc
import itertools
import statistics

import pytest
import torch
from cancelling import Cancelled, cancel_at
from rendering import render, spoil_replays, tiny_request, tiny_transformer, tiny_video_vae

from ltx_runtime import cuda_graph, step_runner, steps
from ltx_runtime.conditioning import replace_frame
from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.parity import digest
from ltx_runtime.parity_run import run_parity
from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import AskedSizes
from ltx_runtime.video_vae.host_frames import FrameTransfer


@pytest.fixture(scope="module")
def vae():
    return tiny_video_vae("cuda")


def same(a, b) -> bool:
    return (
        torch.equal(a.video, b.video)
        and (a.audio is None) == (b.audio is None)
        and (a.audio is None or torch.equal(a.audio, b.audio))
    )


def counters(model) -> tuple[int, int]:
    return model.graphs.counters.captures, model.graphs.counters.hits


def held_after_closing(model, device) -> int:
    model.graphs.close()
    gc.collect()
    cuda_graph.return_graph_memory(device)
    return cuda_graph.held_bytes(device)


# A: captures, correctness


def test_a1_replays_survive_collected_garbage_and_memory_full_of_nan(model, device):
    expected = [render(model, seed=seed) for seed in (1, 2, 3)]
    render(model, "on", seed=1)
    for seed, eager in zip((1, 2, 3), expected, strict=True):
        gc.collect()
        torch.cuda.empty_cache()
        poison = [torch.full((1 << 22,), float("nan"), device=device) for _ in range(32)]
        del poison
        poison = [torch.full((1 << 20,), float("nan"), device=device) for _ in range(64)]
        result = render(model, "on", seed=seed)
        assert result.graph["steps"] == ["replay"] * 8 and same(result, eager)
        assert bool(result.video.isfinite().all())
        del poison


def test_a2_every_frame_count_has_its_own_recording_at_its_own_length(model):
    for num_frames in (9, 17, 25, 9, 17, 25):
        assert same(render(model, "on", num_frames=num_frames), render(model, num_frames=num_frames))
    assert counters(model) == (3, 3)


@pytest.mark.parametrize("convention", ["reference", "comfyui"])
def test_a3_an_image_makes_another_recording_and_text_alone_still_hits(model, convention):
    text = tiny_request(noise_convention=convention)
    picture = torch.randn(1, 128, 1, 3, 4, generator=torch.Generator().manual_seed(5))
    image = dataclasses.replace(text, video=replace_frame(text.video, 0, picture, 0.7))
    for request in (text, image, text, image):
        graphed = sample(model, request, cuda_graph="on")
        assert graphed.graph["mode"] == "graph", graphed.graph["decision"]
        assert same(graphed, sample(model, request, cuda_graph="off"))
    assert counters(model) == (2, 2)
    assert any("mask" in field or "timestep_index" in field for field in model.graphs.counters.last_miss)


@pytest.mark.parametrize("sampler", ["euler_ancestral", "res_2s"])
def test_a4_noise_is_drawn_outside_the_graph(model, sampler):
    results = {}
    for seed, run in itertools.product((1, 2), (1, 2)):
        results[seed, run] = render(model, "on", seed=seed, sampler=sampler)
        assert results[seed, run].graph["mode"] == "graph", results[seed, run].graph["decision"]
        assert same(results[seed, run], render(model, seed=seed, sampler=sampler))
    assert same(results[1, 1], results[1, 2]) and same(results[2, 1], results[2, 2])
    assert not torch.equal(results[1, 1].video, results[2, 1].video)


# B: captures, failure, fallback, allocator, threads


def test_b1_a_recording_outlives_the_one_made_before_it(model, monkeypatch):
    monkeypatch.setattr(model.graphs, "max_graphs", 2)
    render(model, "on")
    second = {"num_frames": 17}
    expected = [render(model, seed=seed, **second) for seed in range(5)]
    render(model, "on", **second)
    render(model, "on", num_frames=9)  # drops the first
    assert model.graphs.counters.evictions == 1
    for seed, eager in enumerate(expected):
        result = render(model, "on", seed=seed, **second)
        assert result.graph["steps"] == ["replay"] * 8 and same(result, eager)


def test_b4_the_warm_up_runs_first_on_the_capture_stream_and_nothing_else_gets_the_captures_memory(model, monkeypatch):
    seen = []
    warm_up, capture = cuda_graph._warm_up, cuda_graph._guarded_capture

    def watched(name, fn):
        def call(body, stream, device):
            def watched_body():
                seen.append((name, torch.cuda.current_stream(device).cuda_stream, stream.cuda_stream))
                return body()

            before = segments()
            result = fn(watched_body, stream, device)
            if name == "capture":
                seen.append([segment for segment in segments() if segment not in before])
            return result

        return call

    def segments() -> list[tuple]:
        if cuda_graph.allocator_backend() != "native":
            return []  # cudaMallocAsync has no snapshot; its graphs own what they allocate by construction
        return [(s["address"], tuple(s["segment_pool_id"])) for s in torch.cuda.memory_snapshot()]

    monkeypatch.setattr(cuda_graph, "_warm_up", watched("warm-up", warm_up))
    monkeypatch.setattr(cuda_graph, "_guarded_capture", watched("capture", capture))
    assert render(model, "on").graph["mode"] == "graph"
    (first, warm_stream, asked), (second, capture_stream, _), new_segments = seen
    assert (first, second) == ("warm-up", "capture")
    assert warm_stream == capture_stream == asked != torch.cuda.default_stream().cuda_stream
    assert all(pool != (0, 0) for _, pool in new_segments), "memory of the capture came from outside its pool"


def test_b5_after_a_failed_capture_other_models_work(model, device, monkeypatch):
    """As an image model would use the process: default generator, convolutions, attention, an emptied cache."""

    def other_model() -> torch.Tensor:
        torch.manual_seed(3)
        x = torch.randn(2, 8, 32, 32, device=device)
        x = torch.nn.functional.conv2d(x, torch.randn(16, 8, 3, 3, device=device), padding=1)
        x = torch.nn.functional.group_norm(x, 4)
        tokens = x.flatten(2).transpose(1, 2).half()[:, None]
        x = torch.nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        torch.cuda.empty_cache()
        return (x.float() * torch.randn_like(x.float())).cpu()

    expected = other_model()

    def fails(module, constants, inputs):
        outputs = steps.denoise_step(module, constants, inputs)
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("injected")
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(step_runner, "denoise_step", fails)
        result = render(model, "on")
        assert result.graph["mode"] == "eager" and "injected" in result.graph["fallback"]
    for _ in range(3):
        assert torch.equal(other_model(), expected)
    assert same(render(model, "on"), render(model)) and model.graphs.counters.captures == 1


def test_b6_called_on_the_default_stream_or_on_another_the_result_is_ordered_with_it(model, device):
    expected = render(model)
    side = torch.cuda.Stream(device)
    for stream in (torch.cuda.default_stream(device), side):
        with torch.cuda.stream(stream):
            for mode in ("off", "on", "on"):
                result = render(model, mode)
                # Read on the caller's stream at once: without an order the copy would be of unfinished memory.
                copy = result.video.clone()
                stream.synchronize()
                assert torch.equal(copy, expected.video)
    assert model.graphs._stream.cuda_stream not in (torch.cuda.default_stream(device).cuda_stream, side.cuda_stream)


def test_b7_two_checkpoints_in_turns(device):
    models = [tiny_transformer("cuda") for _ in range(2)]
    with torch.no_grad():  # another checkpoint of the same shape
        for parameter in models[1].module.parameters():
            parameter.mul_(1.01)
    expected = [render(each) for each in models]
    assert not torch.equal(expected[0].video, expected[1].video)
    marks = []
    for _ in range(5):
        for each, eager in zip(models, expected, strict=True):
            assert same(render(each, "on"), eager)
            each.graphs.close()
        cuda_graph.return_graph_memory(device)
        marks.append(cuda_graph.held_bytes(device))
    assert max(marks[1:]) - min(marks[1:]) <= 4 << 20, marks
    for each in models:
        each.evict()


def test_b8_switched_off_after_use_nothing_is_left_of_it(model, device):
    def activity():
        return measure_gpu_busy(lambda: render(model, "off"), device=device)

    activity()
    before = [activity() for _ in range(5)]
    render(model, "on")
    render(model, "auto")
    after = [activity() for _ in range(5)]
    assert {a.kernel_count for a in after} == {a.kernel_count for a in before}
    times = [statistics.median(a.kernel_ms for a in group) for group in (before, after)]
    # 1 % on a full-size step; tiny kernels of 2 us are measured to 5 %.
    assert times[1] <= times[0] * 1.05, times


# C: captures, policy, cost, honesty


def test_c2_the_frame_rate_moves_the_positions_of_a_recording(model):
    results = {}
    for frame_rate in (24.0, 25.0, 30.0):
        results[frame_rate] = render(model, "on", frame_rate=frame_rate, audio=False)
        assert same(results[frame_rate], render(model, frame_rate=frame_rate, audio=False))
    assert counters(model) == (1, 2)
    assert len({digest(result.video) for result in results.values()}) == 3


def test_c3_twenty_seeds_every_fifth_cancelled_one_capture(model, vae, device):
    request = tiny_request()
    plan = vae.plan(request.video.shape.as_tuple())
    marks = []
    for seed in range(20):
        if seed % 5 == 4:
            with pytest.raises(Cancelled):
                sample(model, tiny_request(seed=seed), cuda_graph="on", check_cancelled=cancel_at(1 + seed % 8))
            continue
        graphed, eager = render(model, "on", seed=seed), render(model, seed=seed)
        assert same(graphed, eager)
        assert torch.equal(vae.decode(graphed.video, plan=plan), vae.decode(eager.video, plan=plan))
        del graphed, eager
        marks.append(cuda_graph.held_bytes(device))
    assert model.graphs.counters.captures == 1 and model.graphs.counters.fallbacks == 0
    assert max(marks[2:]) - marks[2] <= 4 << 20, marks


# H: cancel, memory, concurrency


def test_h2_cancelled_in_mid_capture_no_half_made_recording_stays(model, monkeypatch):
    expected = render(model)

    def interrupted(module, constants, inputs):
        outputs = steps.denoise_step(module, constants, inputs)
        if torch.cuda.is_current_stream_capturing():
            raise Cancelled
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(step_runner, "denoise_step", interrupted)
        with pytest.raises(Cancelled):
            render(model, "on")
    assert len(model.graphs) == 0
    result = render(model, "on")
    assert result.graph["mode"] == "graph" and same(result, expected)


def test_h3_ten_cancels_leave_no_memory_behind(model, device):
    render(model, "on")
    start = held_after_closing(model, device)
    for at in range(10):
        with pytest.raises(Cancelled):
            sample(model, tiny_request(), cuda_graph="on", check_cancelled=cancel_at(1 + at % 8))
    assert held_after_closing(model, device) - start <= 4 << 20


def test_h4_h5_twenty_prompts_with_decode_neither_grow_nor_slow_down(model, vae, device):
    plan = vae.plan(tiny_request().video.shape.as_tuple())
    held, step_ms = [], []
    for seed in range(20):
        timeline = Timeline(None, device=device)
        result = sample(model, tiny_request(seed=seed), cuda_graph="on", timeline=timeline)
        vae.decode(result.video, plan=plan, timeline=timeline)
        del result
        held.append(cuda_graph.held_bytes(device))
        replays = [e["gpu_ms"] for e in timeline.events if e["event"] == "end" and e["phase"] == "sample.replay"]
        step_ms.append(statistics.median(replays))
    assert max(held[1:]) - held[1] <= 4 << 20, held
    # The case asks for 3 % at full size; replays of 2-us kernels on an idling clock are within 15 %.
    assert statistics.median(step_ms[-5:]) <= statistics.median(step_ms[1:6]) * 1.15, step_ms


def test_h6_fifty_decodes_with_delays_on_either_stream_are_alike(model, vae, monkeypatch):
    latent = render(model).video
    plan = vae.plan(latent.shape, sizes=AskedSizes(temporal_size=8))
    expected = digest(vae.decode(latent, plan=plan))
    write, to_frames = FrameTransfer.write, vae.module.decode
    delays = itertools.cycle((0, 2_000_000, 300_000, 6_000_000))

    def slow_write(self, frames, start, ready):
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(next(delays))
        write(self, frames, start, ready)

    def slow_decode(*arguments):
        for pixels in to_frames(*arguments):
            torch.cuda._sleep(next(delays))
            yield pixels

    monkeypatch.setattr(FrameTransfer, "write", slow_write)
    monkeypatch.setattr(vae.module, "decode", slow_decode)
    assert {digest(vae.decode(latent, plan=plan)) for _ in range(50)} == {expected}


# The parity run as a product, with the profiler last


def test_the_parity_run_measures_residency_of_both_arms_after_everything_else(model, vae):
    timelines = {}
    outcome = run_parity(
        model,
        vae,
        tiny_request(),
        replays=2,
        seeds=2,
        tolerance=0.0,
        timelines=lambda arm: timelines.setdefault(arm, Timeline(None, device="cuda")),
        measure_residency=True,
    )
    assert outcome.verdict.bit_exact, outcome.verdict.words
    for arm in ("eager", "graphed"):
        activity = outcome.activities[arm]
        assert activity.resident, activity.words
        assert activity.decode["gpu_ms"] > 0 and activity.steps == 8 and activity.took_ms > 0
        notes = [e for e in timelines[arm].events if e["phase"] == "sample.measure"]
        assert notes[-1]["message"] == activity.words
    assert outcome.activities["graphed"].loop["kernel_count"] >= 8 * outcome.activities["graphed"].step["kernel_count"]


def test_a_fault_in_every_replay_is_found_at_its_step(model, vae, monkeypatch):
    def corrupt(index, outputs):
        if index % 8 == 3:  # the same step of every graphed render
            outputs.video.x.view(-1)[77] += 0.01

    render(model, "on")  # its first step is the capture, and replays nothing
    spoil_replays(monkeypatch, corrupt)
    outcome = run_parity(
        model,
        vae,
        tiny_request(),
        replays=1,
        seeds=1,
        tolerance=0.0,
        timelines=lambda arm: Timeline(None, device="cuda"),
    )
    assert outcome.verdict.status == "different"
    assert "first differing stage: step 4 latent (found in a rerun of both)" in outcome.verdict.words
