"""Whole tiny renders on the GPU: graphed equals eager bit for bit, keys follow changes, nothing is left behind."""
import gc
import threading
import time

import pytest
import torch
from cancelling import Cancelled, cancel_at
from rendering import render, spoil_replays, tiny_request, tiny_transformer, tiny_video_vae

from ltx_runtime import cuda_graph
from ltx_runtime.errors import CaptureError, NonFiniteError
from ltx_runtime.loop_activity import measure_loop_activity
from ltx_runtime.parity_run import run_parity
from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline
from ltx_runtime.warm_up import warm_up


def latents(result):
    return [part.clone() for part in (result.video, result.audio) if part is not None]


def assert_equal(a, b):
    for x, y in zip(latents(a), latents(b), strict=True):
        assert torch.equal(x, y)


def test_graphed_latents_equal_eager_over_replays_seeds_and_prompts(model):
    for seed, prompt in ((1, 0), (2, 0), (3, 5), (1, 0)):
        eager, graphed = render(model, seed=seed, prompt=prompt), render(model, "on", seed=seed, prompt=prompt)
        assert graphed.graph["mode"] == "graph" and eager.graph["mode"] == "eager"
        assert_equal(eager, graphed)
    assert vars(model.graphs.counters) | {"last_miss": []} == {
        "hits": 3, "misses": 1, "captures": 1, "evictions": 0, "fallbacks": 0, "last_miss": [],
    }


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(model):
    first, again, other = render(model, seed=7), render(model, seed=7), render(model, seed=8)
    assert_equal(first, again)
    assert not torch.equal(first.video, other.video)


@pytest.mark.parametrize(
    "change",
    [
        {"num_frames": 17},
        {"width": 160},
        {"prompt_tokens": 1100},
        {"sampler": "euler"},
        {"audio": False},
        {"compatibility": "comfyui"},
        {"noise_convention": "reference"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_kind_of_render_is_another_recording_and_the_first_still_hits(model, change):
    base, changed = render(model), render(model, **change)
    for mode_changes, expected in (({}, base), (change, changed), ({}, base)):
        assert_equal(render(model, "on", **mode_changes), expected)
    assert (model.graphs.counters.captures, model.graphs.counters.hits) == (2, 1)
    assert model.graphs.counters.last_miss != ["first use"]


def test_frame_rate_is_no_part_of_the_key_and_positions_follow_it(model):
    for frame_rate in (24.0, 25.0, 30.0, 24.0):
        # Same shapes: 25 frames give 26, 25 or 21 sound latents, so compare without sound.
        changes = {"frame_rate": frame_rate, "audio": False}
        assert_equal(render(model, "on", **changes), render(model, **changes))
    assert model.graphs.counters.captures == 1
    slow, fast = (render(model, frame_rate=frame_rate, audio=False).video for frame_rate in (24.0, 30.0))
    assert not torch.equal(slow, fast)


def test_weights_read_again_are_captured_again(model):
    before = render(model, "on")
    model.evict()
    assert len(model.graphs) == 0
    after = render(model, "on")
    assert model.graphs.counters.captures == 2 and "weight generation" not in after.graph["missed"]
    assert_equal(before, after)


def test_a_batch_is_its_items(model):
    import dataclasses

    from ltx_runtime.conditioning import audio_state, text_to_video_state
    from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape

    one = tiny_request()
    two = dataclasses.replace(
        one,
        video=text_to_video_state(VideoLatentShape(2, *one.video.shape.as_tuple()[1:]), 24.0),
        audio=audio_state(AudioLatentShape(2, *one.audio.shape.as_tuple()[1:])),
    )
    eager, graphed = sample(model, two, cuda_graph="off"), sample(model, two, cuda_graph="on")
    assert_equal(eager, graphed)
    assert eager.video.shape[0] == 2 and not torch.equal(eager.video[0], eager.video[1])


def test_parity_run_over_seeds_and_replays_is_equal_on_decoded_frames(model):
    timelines = {}
    outcome = run_parity(
        model,
        tiny_video_vae("cuda"),
        tiny_request(),
        replays=3,
        seeds=2,
        tolerance=0.0,
        timelines=lambda arm: timelines.setdefault(arm, Timeline(None, device="cuda")),
    )
    assert outcome.verdict.bit_exact, outcome.verdict.words
    assert outcome.verdict.status == "equal" and "2 seeds x 3 replays" in outcome.verdict.words


def test_one_flipped_element_on_replay_two_is_caught(model, monkeypatch):
    """A stub that corrupts one element of the second replay's latent."""

    def corrupt(index, outputs):
        if index == 7 + 8 + 2:  # behind the replays of both seeds' first graphed render, the first with a capture
            outputs.video.x.view(-1)[1234] += 0.01

    spoil_replays(monkeypatch, corrupt)
    outcome = run_parity(
        model,
        tiny_video_vae("cuda"),
        tiny_request(),
        replays=3,
        seeds=2,
        tolerance=0.0,
        timelines=lambda arm: Timeline(None, device="cuda"),
    )
    assert outcome.verdict.status == "different" and not outcome.verdict.bit_exact


def test_warm_up_makes_the_first_render_a_hit(model):
    account = warm_up(model, tiny_request(seed=5))
    assert account["mode"] == "graph" and account["steps"] == []
    result = render(model, "on", seed=1)
    assert result.graph["steps"] == ["replay"] * 8 and model.graphs.counters.captures == 1
    assert_equal(result, render(model))


def test_auto_measures_decides_and_remembers_without_changing_a_bit(model):
    eager = render(model, seed=3)
    first = render(model, "auto", seed=3)
    assert first.graph["steps"][:3] == ["eager", "eager", "measure"]
    measured = first.graph["measured"]
    assert 0 < measured["gpu_ms"] <= measured["wall_ms"] and "% busy" in first.graph["decision"]
    second = render(model, "auto", seed=3)
    assert "measure" not in second.graph["steps"], "the verdict is remembered"
    # A tiny step is host-bound on any machine: the second render of the shape captures at the latest.
    assert second.graph["mode"] == "graph"
    for result in (first, second):
        assert_equal(result, eager)


def test_replays_report_gpu_time_and_eager_steps_stream_time(model):
    timeline = Timeline(None, device="cuda")
    for mode in ("off", "on", "on"):
        sample(model, tiny_request(), cuda_graph=mode, timeline=timeline)
    ends = [event for event in timeline.events if event["event"] == "end"]
    steps = [event for event in ends if event["phase"] == "sample.step"]
    replays = [event for event in ends if event["phase"] == "sample.replay"]
    assert len(steps) == 8 and all(event["stream_ms"] > 0 and event["gpu_ms"] is None for event in steps)
    assert len(replays) == 15
    assert all(event["gpu_ms"] > 0 and event["gpu_method"] == "graph_events" for event in replays)
    others = {"sample.warmup", "sample.capture", "prepare.connectors", "prepare.constants"}
    assert others <= {event["phase"] for event in ends}


@pytest.mark.parametrize("mode", ["off", "on"])
def test_the_loop_is_resident(model, mode):
    render(model, mode)
    activity = measure_loop_activity(model, tiny_request(), cuda_graph=mode)
    assert activity.resident, activity.words
    assert activity.step["device_to_host_bytes"] == activity.step["host_to_device_bytes"] == 0
    # One pinned read of the finite flags a step is all that leaves.
    assert 0 < activity.loop["device_to_host_bytes"] <= 8 * 8


def test_a_copy_in_the_step_is_found(model, monkeypatch):
    """The residency check must be able to fail."""
    from ltx_runtime import loop_activity, step_runner, steps

    def leaky(module, constants, inputs):
        outputs = steps.denoise_step(module, constants, inputs)
        outputs.probe.cpu()
        return outputs

    monkeypatch.setattr(step_runner, "denoise_step", leaky)
    monkeypatch.setattr(loop_activity, "denoise_step", leaky)
    activity = measure_loop_activity(model, tiny_request(), cuda_graph="off")
    assert activity.resident is False and activity.words.startswith("resident: no")


def test_cancel_frees_the_render_and_the_next_one_is_right(model):
    expected = render(model)
    for mode in ("off", "on"):
        for call in (1, 3, 6):
            with pytest.raises(Cancelled):
                sample(model, tiny_request(), cuda_graph=mode, check_cancelled=cancel_at(call))
            assert_equal(render(model, mode), expected)


def test_nan_names_the_phase_and_the_stream(model):
    weight = model.module.proj_out.weight
    saved = weight.clone()
    try:
        weight.fill_(float("nan"))
        for mode in ("off", "on"):
            with pytest.raises(NonFiniteError, match="video latent holds NaN or Inf after step 1") as caught:
                render(model, mode)
            assert caught.value.phase == "sample.step"
    finally:
        weight.copy_(saved)


def test_memory_is_flat_over_alternating_shapes_and_returns_after_eviction(device):
    cuda_graph.return_graph_memory(device)
    start = cuda_graph.held_bytes(device)
    model = tiny_transformer("cuda")
    model.graphs.max_graphs = 4
    marks = []
    for _ in range(6):
        for changes in ({}, {"num_frames": 17}, {"width": 160}, {"width": 192}, {"height": 128}, {"audio": False}):
            render(model, "on", **changes)
        gc.collect()
        cuda_graph.return_graph_memory(device)
        marks.append(cuda_graph.held_bytes(device))
    assert max(marks[2:]) - min(marks[2:]) <= 4 << 20, marks
    assert len(model.graphs) <= 4 and model.graphs.counters.evictions > 0
    model.evict()
    del model
    gc.collect()
    cuda_graph.return_graph_memory(device)
    assert cuda_graph.held_bytes(device) - start <= 80 << 20  # cuBLAS workspaces stay with the process


def test_other_threads_do_not_break_a_capture(model):
    """Pinned allocations, statistics, events, kernels and waits on other streams, while captures run."""
    expected = render(model)
    stop = threading.Event()
    calls = {"n": 0}
    failures = []

    def disturb():
        try:
            disturb_until_stopped()
        except BaseException as error:  # noqa: BLE001 - a thread's error reaches no test by itself
            failures.append(error)

    def disturb_until_stopped():
        stream = torch.cuda.Stream()
        event = torch.cuda.Event()
        while not stop.is_set():
            torch.cuda.mem_get_info()
            if cuda_graph.allocator_backend() == "native":
                torch.cuda.memory_stats()
            pinned = torch.zeros(1 << 16, pin_memory=True)
            with torch.cuda.stream(stream):
                copy = pinned.to("cuda", non_blocking=True)
                event.record()
                assert copy.sum().item() >= 0 and copy.cpu().numel() == 1 << 16
            event.query()
            del pinned
            calls["n"] += 1
            if calls["n"] % 40 == 0:
                gc.collect()  # holds the interpreter for long: not every time, or the test only waits for it
            time.sleep(0.02)

    threads = [threading.Thread(target=disturb) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(10):
            result = render(model, "on")
            assert result.graph["mode"] == "graph", result.graph["decision"]
            assert_equal(result, expected)
            model.graphs.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures and calls["n"] > 10, failures


def test_capture_failure_error_raises(model, monkeypatch):
    from ltx_runtime import step_runner, steps

    def fails(module, constants, inputs):
        if torch.cuda.is_current_stream_capturing():
            raise ValueError("injected")
        return steps.denoise_step(module, constants, inputs)

    monkeypatch.setattr(step_runner, "denoise_step", fails)
    with pytest.raises(CaptureError, match="injected"):
        sample(model, tiny_request(), cuda_graph="on", on_capture_failure="error")
