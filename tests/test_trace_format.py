"""The Chrome trace of a render against the rules of the format."""

import json

import pytest
from trace_rules import problems_of

from ltx_runtime.chrome_trace import chrome_trace
from ltx_runtime.timing import Timeline


def render(path) -> Timeline:
    """All that a trace can hold: a load from before, several nodes, steps in flight, a capture, chunks, tiles, notes,
    an error."""
    loader = Timeline(None)
    with loader.phase("load.read", file="a.safetensors"):
        pass
    timeline = Timeline(path)
    timeline.adopt(loader.events)
    with timeline.segment("LTXGraphSampler"):
        timeline.note("sample.capture", "90 % busy: not captured", busy=0.9)
        with timeline.phase("sample.capture", step=0):
            pass
        flying = timeline.begin("sample.replay", step=1)
        following = timeline.begin("sample.replay", step=2)
        timeline.end(flying)
        timeline.end(following)
    timeline = timeline.child()
    with pytest.raises(MemoryError), timeline.segment("LTXGraphVideoDecode"):
        with timeline.phase("decode.video.chunk", chunk=0, shape=[1, 128, 2, 2, 3]):
            pass
        with timeline.phase("decode.video.tile", tile=3):
            raise MemoryError
    return timeline


def test_a_render_is_a_good_trace(tmp_path):
    timeline = render(tmp_path / "r.jsonl")
    timeline.write_chrome_trace(tmp_path / "r.trace.json")
    text = (tmp_path / "r.trace.json").read_text(encoding="utf-8")
    # The format is JSON proper: NaN and the like are a viewer's syntax error.
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in the file"))
    assert problems_of(trace) == []
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {
        "load.read",
        "sample.capture 0",
        "sample.replay 1",
        "sample.replay 2",
        "decode.video.chunk 0",
        "decode.video.tile 3",
        "LTXGraphSampler",
        "LTXGraphVideoDecode",
    } <= names
    assert problems_of(chrome_trace(())) == []


def test_counters_are_in_the_format():
    peak = {
        "render": "r", "t_ms": 5.0, "phase": "sample.step", "event": "end", "wall_ms": 5.0, "gpu_ms": None,
        "gpu_method": None, "gpu_busy": None, "stream_ms": None, "cpu_ms": 0.0, "mem_peak_bytes": 2**30, "nvml": None,
        "attrs": {},
    }  # fmt: skip
    assert problems_of(chrome_trace([peak], [(1.0, 90, 40), (2.0, 0, 0)])) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda event: event.pop("name"),
        lambda event: event.pop("dur"),
        lambda event: event.update(ts=-1.0),
        lambda event: event.update(ts=float("nan")),
        lambda event: event.update(tid=77),
        lambda event: event.update(ph="Z"),
    ],
)
def test_the_rules_catch_a_bad_trace(tmp_path, spoil):
    trace = chrome_trace(render(tmp_path / "r.jsonl").events)
    spoil(next(event for event in trace["traceEvents"] if event["ph"] == "X"))
    assert problems_of(trace)
