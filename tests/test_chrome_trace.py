import json
import time

from ltx_runtime.chrome_trace import chrome_trace
from ltx_runtime.timing import Timeline


def render() -> Timeline:
    timeline = Timeline(None)
    loader = Timeline(None)
    with loader.phase("load.read"):
        time.sleep(0.002)
    time.sleep(0.002)
    timeline = Timeline(None)
    timeline.adopt(loader.events)
    with timeline.segment("Sampler"):
        with timeline.phase("sample.capture"):
            time.sleep(0.002)
        flying = timeline.begin("sample.step", step=0)
        with timeline.phase("prepare.constants"):  # ends after the step in which it began: no nesting possible
            time.sleep(0.002)
            timeline.end(flying)
            time.sleep(0.002)
        timeline.note("sample.capture", "1.1x at most")
    timeline = timeline.child()
    with timeline.segment("Decode"), timeline.phase("decode.video.chunk", chunk=3, frames=9):
        time.sleep(0.002)
    return timeline


def slices(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def track_names(trace):
    return {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M" and e["name"] == "thread_name"}


def test_slices_lie_on_the_track_of_their_node_and_nest():
    timeline = render()
    trace = chrome_trace(timeline.events)
    names = track_names(trace)
    by_track = {(names[s["tid"]], s["name"]) for s in slices(trace)}
    assert {
        ("outside nodes", "load.read"),
        ("Sampler", "Sampler"),
        ("Sampler", "sample.capture"),
        ("Decode", "Decode"),
        ("Decode", "decode.video.chunk 3"),
    } <= by_track
    in_flight = {name for track, name in by_track if track == "Sampler, in flight 1"}
    assert in_flight == {"prepare.constants"} and ("Sampler", "sample.step 0") in by_track
    for tid in names:
        spans = sorted((s["ts"], s["ts"] + s["dur"]) for s in slices(trace) if s["tid"] == tid)
        for i, (_, stop) in enumerate(spans):
            for other_start, other_stop in spans[i + 1 :]:
                assert other_start >= stop - 0.01 or other_stop <= stop + 0.01, "half-overlapping slices on one track"


def test_steps_in_flight_share_a_track():
    """Each starts where the one before it ended; rounding must not tear them apart."""
    timeline = Timeline(None)
    with timeline.segment("Sampler"):
        phases = [timeline.begin("sample.step", step=0)]
        for step in range(1, 60):
            phases.append(timeline.begin("sample.step", step=step))
            timeline.end(phases[-2])
        timeline.end(phases[-1])
    assert set(track_names(chrome_trace(timeline.events)).values()) == {"Sampler"}


def test_times_start_at_zero_and_keep_their_distances():
    timeline = render()
    trace = chrome_trace(timeline.events)
    assert 0 <= min(s["ts"] for s in slices(trace)) < 1  # us; the log rounds
    load, chunk = (
        next(e for e in timeline.events if e["event"] == "end" and e["phase"] == p)
        for p in ("load.read", "decode.video.chunk")
    )
    shown = {s["name"]: s for s in slices(trace)}
    apart = shown["decode.video.chunk 3"]["ts"] + shown["decode.video.chunk 3"]["dur"] - shown["load.read"]["dur"]
    assert abs(apart / 1e3 - (chunk["t_ms"] - load["t_ms"])) < 0.01
    assert trace["otherData"]["origin_t_ms"] < 0
    assert shown["decode.video.chunk 3"]["args"]["attrs"] == {"chunk": 3, "frames": 9}


def test_capture_and_notes_are_marked_across_tracks():
    marks = [e["name"] for e in chrome_trace(render().events)["traceEvents"] if e["ph"] == "i"]
    assert marks[0] == "graph capture" and "1.1x at most" in marks


def test_counters_for_memory_and_utilisation():
    events = [
        {
            "render": "r",
            "t_ms": 5.0,
            "phase": "sample.step",
            "event": "end",
            "wall_ms": 5.0,
            "gpu_ms": None,
            "gpu_method": None,
            "gpu_busy": None,
            "stream_ms": None,
            "cpu_ms": 0.0,
            "mem_peak_bytes": 2**30,
            "nvml": None,
            "attrs": {},
        },
    ]
    trace = chrome_trace(events, [(1.0, 90, 40), (2.0, 0, 0)])
    counters = [(e["name"], e["ts"], e["args"]) for e in trace["traceEvents"] if e["ph"] == "C"]
    assert counters == [
        ("peak memory GiB", 0.0, {"allocated": 1.0}),
        ("NVML utilisation %", 1000.0, {"gpu": 90, "memory": 40}),
        ("NVML utilisation %", 2000.0, {"gpu": 0, "memory": 0}),
    ]


def test_the_file_is_a_trace(tmp_path):
    path = tmp_path / "new" / "r.trace.json"
    timeline = render()
    timeline.write_chrome_trace(path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert slices(trace) == slices(chrome_trace(timeline.events))
    Timeline(None).write_chrome_trace(path)
    assert slices(json.loads(path.read_text(encoding="utf-8"))) == []
