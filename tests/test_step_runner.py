"""How a render under "auto" measures, and what it may not drop: the runner on the CPU, with recordings and GPU times of
our own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import test_graph_policy
import torch
from tiny_sampling import tiny_model, tiny_request

from ltx_runtime import cuda_graph, graph_policy, step_runner
from ltx_runtime.gpu_time import GpuTime
from ltx_runtime.graph_policy import Decision
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.sampler import sample


@pytest.fixture
def model(monkeypatch):
    """The tiny model, as if its device could record."""
    model = tiny_model()
    monkeypatch.setattr(step_runner, "unavailable_reason", lambda device: None)
    monkeypatch.setattr(model, "graphs", cuda_graph.GraphCache(model.device, max_bytes=1 << 40))
    return model


@pytest.fixture
def tries(monkeypatch):
    """What was asked of queued_gpu_time; the first `late` tries come to nothing. None leads to a recording."""

    class Tries(list):
        late = 0

        def measure(self, fn, cuts, **options):
            self.append(options | {"cuts": len(cuts)})
            method = "queued_events" if options["host_ahead"] else "delayed_events"
            if len(self) <= self.late:
                return GpuTime(fn(), method, 2, 2, reason="2 of 2 parts were not queued in time")
            return GpuTime(fn(), method, 2, 0, 1e-3, 2e-3)

    tries = Tries()
    monkeypatch.setattr(step_runner, "queued_gpu_time", tries.measure)
    monkeypatch.setattr(step_runner, "decide", lambda *_, **__: Decision(False, "decided by a test"))
    return tries


def render(model, steps=8, **changes):
    request = tiny_request(sigmas=torch.linspace(1, 0, steps + 1), **changes)
    return sample(model, request, cuda_graph="auto")


def test_the_first_step_is_counted_the_second_timed_and_the_third_measured(model, tries):
    expected = sample(model, tiny_request(sigmas=torch.linspace(1, 0, 9)), cuda_graph="off")
    result = render(model)
    assert result.graph["steps"] == ["eager", "eager", "measure"] + ["eager"] * 5
    assert torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)
    (asked,) = tries
    measured = result.graph["measured"]
    # Three blocks in parts of four: one cut, two parts.
    assert asked["cuts"] == 1 and asked["launches"] == measured["launches"] > 300
    assert asked["part_ms"] == pytest.approx(min(measured["wall_ms"], asked["launches"] * 0.06) / 2)
    assert asked["host_ahead"] is False, "on the CPU nothing is left to do when a step was issued"
    assert "measure" not in render(model).graph["steps"]


def test_a_late_try_is_made_again_with_longer_delays_and_not_for_ever(model, tries):
    tries.late = 99
    result = render(model)
    assert result.graph["steps"][2:6] == ["measure", "measure", "measure", "eager"]
    first, second, third = (asked["part_ms"] for asked in tries)
    assert (second, third) == pytest.approx((3 * first, 9 * first))
    assert "could not be measured" in result.graph["decision"] and result.graph["mode"] == "eager"


def test_a_device_that_lags_behind_needs_no_delay_at_each_part_until_that_fails(model, tries, monkeypatch):
    monkeypatch.setattr(step_runner.time, "perf_counter", lambda: 0.0)  # issuing takes no time
    tries.late = 2
    render(model)
    assert [asked["host_ahead"] for asked in tries] == [True, False, False]
    first, second, third = (asked["part_ms"] for asked in tries)
    assert second == pytest.approx(first), "the first failure says nothing about the delays"
    assert third == pytest.approx(3 * first)


@dataclass
class Recording:
    """Of an eager step."""

    report: cuda_graph.CaptureReport
    step: object
    device_bytes: int = 10
    closed: bool = False

    def load(self, constants, inputs):
        assert not self.closed
        self.loaded = constants, inputs

    def replay(self):
        return self.step(*self.loaded)

    def forget_constants(self):
        self.loaded = None

    def close(self):
        self.closed = True


class Event:
    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.0


@pytest.fixture
def recorder(monkeypatch):
    """Recordings are of an eager step."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(step_runner, "_recorded_event", Event)

    def record(fn, constants, inputs, stream, device, phase):
        return Recording(cuda_graph.CaptureReport(), fn), fn(constants, inputs)

    monkeypatch.setattr(cuda_graph, "_record", record)


@pytest.mark.parametrize(
    "name, renders",
    [
        # Pays within the render: captured in the render that measured.
        ("S0_SLOW_HOST", [["eager", "eager", "measure", "capture", *["replay"] * 4], ["replay"] * 8]),
        # Pays, but not within a render: captured when the shape comes back.
        ("S0", [["eager", "eager", "measure", *["eager"] * 5], ["capture", *["replay"] * 7], ["replay"] * 8]),
        # Would gain nothing: never.
        ("S1", [["eager", "eager", "measure", *["eager"] * 5], ["eager"] * 8, ["eager"] * 8]),
    ],
)
def test_auto_captures_when_it_pays_in_this_render_or_the_shape_comes_back(
    model, tries, recorder, monkeypatch, name, renders
):
    decided = []

    def decide(_, remaining_steps, *, seen_before):
        decided.append((remaining_steps, seen_before))
        return graph_policy.decide(getattr(test_graph_policy, name), remaining_steps, seen_before=seen_before)

    monkeypatch.setattr(step_runner, "decide", decide)
    assert [render(model).graph["steps"] for _ in renders] == renders
    assert decided == [(5, False), (8, True), (8, True)][: sum(steps[0] != "replay" for steps in renders)]


def test_a_render_never_drops_its_own_recordings(model, recorder):
    """Four kinds of steps under a bound of one recording's memory; the next render finds them all."""
    model.graphs = cuda_graph.GraphCache(model.device, max_bytes=10)
    guidance = Guidance(GuidanceSpec(3.0, skip_step=1), GuidanceSpec(5.0, skip_step=2), "sequential")
    request = tiny_request(sigmas=torch.linspace(1, 0, 8), guidance=guidance)
    expected = sample(model, request, cuda_graph="off")
    other = sample(model, tiny_request(batch=2), cuda_graph="on")
    assert other.graph["mode"] == "graph" and len(model.graphs) == 1
    for _ in range(2):
        result = sample(model, request, cuda_graph="on")
        assert torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)
    assert result.graph["steps"] == ["replay"] * 7
    counters = model.graphs.counters
    assert (counters.captures, counters.evictions, len(model.graphs)) == (1 + 4, 1, 4)
