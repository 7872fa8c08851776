"""The phase log: its lines, its file, its arithmetic. GPU times and memory: tests/gpu/test_phase_log.py."""

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ltx_runtime.timing import SCHEMA, Timeline, new_render_id, summarize

COMMON = {"schema", "render", "time", "t_ms", "phase", "event", "attrs"}
ON_END = COMMON | {"wall_ms", "gpu_ms", "gpu_method", "gpu_busy", "stream_ms", "cpu_ms", "mem_peak_bytes", "nvml"}


def strict_json(text: str):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict]:
    return [strict_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def kinds(events) -> list[tuple[str, str]]:
    return [(event["event"], event["phase"]) for event in events]


def test_every_line_has_the_fields_of_the_schema(tmp_path):
    timeline = Timeline(tmp_path / "deep" / "r1.jsonl")
    with timeline.segment("Sampler"):
        with timeline.phase("sample.step", step=0):
            time.sleep(0.01)
        timeline.note("sample.capture", "90 % busy: not captured", gain=1.1)
    written = lines(tmp_path / "deep" / "r1.jsonl")
    assert written == list(timeline.events)
    assert kinds(written)[:5] == [
        ("begin", "segment"),
        ("begin", "sample.step"),
        ("end", "sample.step"),
        ("note", "sample.capture"),
        ("end", "segment"),
    ]
    assert {event["schema"] for event in written} == {SCHEMA} and {event["render"] for event in written} == {"r1"}
    for event in written:
        expected = {"begin": COMMON, "note": COMMON | {"message"}, "end": ON_END}[event["event"]]
        assert set(event) == expected
        assert event["time"].endswith("+00:00")
    step = written[2]
    assert 10 <= step["wall_ms"] < 1000 and step["t_ms"] >= 10
    assert step["cpu_ms"] < step["wall_ms"]
    assert [step[field] for field in ("gpu_ms", "gpu_method", "gpu_busy", "stream_ms", "mem_peak_bytes", "nvml")] == [
        None
    ] * 6
    assert written[3]["message"] == "90 % busy: not captured" and written[3]["attrs"] == {"gain": 1.1}


def test_attributes_become_valid_json(tmp_path):
    timeline = Timeline(tmp_path / "r.jsonl")
    with timeline.phase(
        "load.read",
        file=Path("a") / "b",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        sigmas=(float("inf"), -float("inf"), float("nan"), 0.5),
        shape=torch.Size([1, 2]),
        done=True,
    ) as phase:
        phase.attrs["bytes"] = 12
    begin, end = lines(tmp_path / "r.jsonl")
    assert end["attrs"] == begin["attrs"] | {"bytes": 12}
    assert begin["attrs"] == {
        "file": str(Path("a") / "b"),
        "dtype": "torch.bfloat16",
        "device": "cpu",
        "sigmas": ["inf", "-inf", "nan", 0.5],
        "shape": [1, 2],
        "done": True,
    }


def test_a_tensor_is_refused_and_leaves_no_phase_open():
    timeline = Timeline(None)
    with pytest.raises(TypeError, match=r"sample\.step\.sigma: a tensor"):
        timeline.begin("sample.step", sigma=torch.ones(1))
    timeline.child()
    assert timeline.events == ()


@pytest.mark.parametrize("name", ["sample.steps", "load", "segment", "decode", "prepare"])
def test_a_name_outside_the_list_is_refused(name):
    with pytest.raises(ValueError, match=r"is not a phase of the log\. Known: .*sample\.step"):
        Timeline(None).begin(name)


def test_names_below_decode_and_encode_are_free():
    timeline = Timeline(None)
    for name in ("decode.video.chunk", "decode.audio.vocoder", "encode.video"):
        timeline.end(timeline.begin(name))
    assert set(timeline.summary()["phases"]) == {"decode.video.chunk", "decode.audio.vocoder", "encode.video"}


def test_a_killed_process_keeps_what_was_written(tmp_path):
    path = tmp_path / "killed.jsonl"
    program = (
        "import sys, time\n"
        "from ltx_runtime.timing import Timeline\n"
        "timeline = Timeline(sys.argv[1])\n"
        "with timeline.segment('Sampler'):\n"
        "    with timeline.phase('sample.step', step=0): pass\n"
        "    with timeline.phase('sample.step', step=1):\n"
        "        print('inside', flush=True)\n"
        "        time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    try:
        assert process.stdout.readline() == "inside\n"
    finally:
        process.kill()
        process.wait()
    assert kinds(lines(path)) == [
        ("begin", "segment"),
        ("begin", "sample.step"),
        ("end", "sample.step"),
        ("begin", "sample.step"),
    ]


def test_a_line_is_in_the_file_before_the_next_event(tmp_path):
    timeline = Timeline(tmp_path / "r.jsonl")
    phase = timeline.begin("load.read")
    assert kinds(lines(timeline.path)) == [("begin", "load.read")]
    timeline.end(phase)
    assert kinds(lines(timeline.path))[-1] == ("end", "load.read")


def test_a_file_that_cannot_be_written_ends_no_render(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    timeline = Timeline(tmp_path / "file" / "r.jsonl")
    with timeline.phase("load.read"):
        pass
    assert len(timeline.events) == 2
    assert len([r for r in caplog.records if "can't be written" in r.message]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_no_render_and_holds_no_file(tmp_path, caplog):
    (tmp_path / "r.jsonl").symlink_to("/dev/full")
    timeline = Timeline(tmp_path / "r.jsonl")
    with timeline.segment("node"), timeline.phase("sample.step"):
        pass
    assert "No space left" in caplog.text
    assert len([event for event in timeline.events if event["event"] == "end"]) == 2
    assert not [link for link in Path("/proc/self/fd").iterdir() if os.path.realpath(link) == "/dev/full"]


def test_a_trace_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    timeline = Timeline(None)
    timeline.note("sample.step", "first")
    timeline.write_chrome_trace(tmp_path / "t.json")
    before = (tmp_path / "t.json").read_text(encoding="utf-8")

    def half(path, text, encoding):
        path.write_bytes(text.encode()[:20])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    timeline.note("sample.step", "second")
    with pytest.raises(OSError, match="No space left"):
        timeline.write_chrome_trace(tmp_path / "t.json")
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").read_text(encoding="utf-8") == before


def test_one_readable_logger_line_an_event(caplog):
    caplog.set_level(logging.INFO, logger="ltxgraph")
    timeline = Timeline(None)
    with timeline.segment("Sampler"), timeline.phase("sample.step", step=3) as phase:
        phase.gpu_ms, phase.gpu_method = 0.001, "cupti"
        phase.attrs["top_kernels"] = [{"name": "gemm"}]
    texts = [record.message for record in caplog.records if record.name == "ltxgraph"]
    assert len(texts) == len(timeline.events) and not any("\n" in text for text in texts)
    assert texts[1] == "ltxgraph: begin sample.step step=3"
    assert (
        texts[2].startswith("ltxgraph: end sample.step ") and "GPU 0.0 ms" in texts[2] and texts[2].endswith(" step=3")
    )


def test_on_event_sees_every_event_once():
    seen = []
    timeline = Timeline(None, on_event=seen.append)
    with timeline.phase("upscale"):
        timeline.note("upscale", "x2")
    assert tuple(seen) == timeline.events


def test_gpu_time_needs_its_method_and_gives_busy():
    timeline = Timeline(None)
    phase = timeline.begin("sample.replay")
    time.sleep(0.01)
    phase.gpu_ms, phase.gpu_method = 5.0, "stopwatch"
    with pytest.raises(ValueError, match=r"stopwatch.*cupti"):
        timeline.end(phase)
    phase.gpu_method = "graph_events"
    timeline.end(phase)
    end = timeline.events[-1]
    assert end["gpu_method"] == "graph_events"
    assert end["gpu_busy"] == pytest.approx(5.0 / end["wall_ms"], rel=1e-3)


class Interrupt(BaseException):
    """ComfyUI's interrupt is no Exception in every version."""


def test_an_exception_ends_the_phases_it_leaves():
    timeline = Timeline(None)
    with pytest.raises(Interrupt), timeline.segment("Sampler"):
        timeline.begin("sample.step", step=0)
        timeline.begin("sample.step", step=1)
        with timeline.phase("transfer.to_host"):
            raise Interrupt
    ends = [event for event in timeline.events if event["event"] == "end"]
    assert [(e["phase"], e["attrs"]["error"]) for e in ends] == [
        ("transfer.to_host", "Interrupt"),
        ("sample.step", "Interrupt"),
        ("sample.step", "Interrupt"),
        ("segment", "Interrupt"),
    ]
    assert timeline.summary()["phases"]["sample.step"]["errors"] == ["Interrupt", "Interrupt"]
    timeline.child()  # nothing is left open


def test_a_phase_ends_once():
    timeline = Timeline(None)
    phase = timeline.begin("upscale")
    timeline.end(phase)
    with pytest.raises(RuntimeError, match="already ended"):
        timeline.end(phase)


def test_walls_of_steps_in_flight_add_up_to_elapsed_time():
    """The sampler's way: issue a step, then end the one before. On the CPU a step is done when it is issued."""
    timeline = Timeline(None)
    started = time.perf_counter()
    in_flight = None
    for step in range(4):
        phase = timeline.begin("sample.step", step=step)
        time.sleep(0.02)
        phase.issued()
        if in_flight is not None:
            timeline.end(in_flight)
        in_flight = phase
    timeline.end(in_flight)
    elapsed_ms = (time.perf_counter() - started) * 1e3
    walls = [event["wall_ms"] for event in timeline.events if event["event"] == "end"]
    assert all(wall >= 20 for wall in walls)
    assert sum(walls) <= elapsed_ms
    assert timeline.summary()["phases"]["sample.step"]["wall_ms"] == pytest.approx(sum(walls), abs=0.1)


def test_a_phase_that_began_before_the_last_one_ended_is_measured_from_there():
    timeline = Timeline(None)
    first = timeline.begin("sample.step", step=0)
    second = timeline.begin("sample.step", step=1)
    time.sleep(0.03)
    timeline.end(first)
    time.sleep(0.01)
    timeline.end(second)
    ends = [event for event in timeline.events if event["event"] == "end"]
    assert ends[0]["wall_ms"] >= 30
    assert ends[1]["t_ms"] - ends[1]["wall_ms"] == pytest.approx(ends[0]["t_ms"], abs=0.01)


def test_waiting_fixes_the_end_time():
    timeline = Timeline(None)
    phase = timeline.begin("sample.step")
    phase.wait()
    time.sleep(0.05)
    timeline.end(phase)
    assert phase.wall_ms < 50


# renders across nodes


def test_a_child_continues_the_same_file(tmp_path):
    timeline = Timeline(tmp_path / "r.jsonl")
    with timeline.segment("Sampler"):
        pass
    sampled = timeline.events
    child = timeline.child()
    with child.segment("Decode"), child.phase("decode.video.chunk", chunk=0):
        pass
    assert timeline.events == sampled
    assert child.events[: len(sampled)] == sampled
    assert lines(tmp_path / "r.jsonl") == list(child.events)
    assert [s["name"] for s in child.summary()["segments"]] == ["Sampler", "Decode"]
    assert child.events[-1]["t_ms"] > sampled[-1]["t_ms"]
    with pytest.raises(RuntimeError, match="was continued"):
        timeline.note("upscale", "too late")
    with pytest.raises(RuntimeError, match="was continued"):
        timeline.begin("upscale")


def test_a_second_child_is_a_fork_with_its_own_file(tmp_path):
    timeline = Timeline(tmp_path / f"{new_render_id()}.jsonl")
    with timeline.phase("sample.step"):
        pass
    with timeline.child().phase("decode.audio"):
        pass
    fork = timeline.child()
    with fork.phase("decode.video.chunk"):
        pass
    assert fork.render_id != timeline.render_id and fork.path == tmp_path / f"{fork.render_id}.jsonl"
    written = lines(fork.path)
    assert written == list(fork.events)
    assert {event["render"] for event in written} == {fork.render_id}
    assert {phase for kind, phase in kinds(written) if kind == "end"} == {"sample.step", "decode.video.chunk"}
    assert any(timeline.render_id in event.get("message", "") for event in written)
    assert {phase for kind, phase in kinds(lines(timeline.path)) if kind == "end"} == {"sample.step", "decode.audio"}


def test_an_open_phase_cannot_be_continued():
    timeline = Timeline(None)
    timeline.begin("upscale")
    with pytest.raises(RuntimeError, match="upscale is still open"):
        timeline.child()


def test_adopted_load_events_keep_their_true_time(tmp_path):
    loader = Timeline(None)
    with loader.phase("load.read", bytes=10):
        time.sleep(0.02)
    time.sleep(0.03)
    render = Timeline(tmp_path / "r.jsonl")
    render.adopt(loader.events)
    with render.segment("Sampler"), render.phase("sample.step"):
        time.sleep(0.01)
    written = lines(tmp_path / "r.jsonl")
    assert kinds(written)[:3] == [("begin", "load.read"), ("end", "load.read"), ("begin", "segment")]
    assert {event["render"] for event in written} == {"r"}
    begin, end = written[:2]
    assert end["t_ms"] <= -30 + 1 and end["t_ms"] - begin["t_ms"] == pytest.approx(end["wall_ms"], abs=0.01)
    assert begin["time"] == loader.events[0]["time"]
    summary = render.summary()
    assert summary["phases"]["load.read"]["wall_ms"] == end["wall_ms"]
    assert summary["wall_ms"] == pytest.approx(end["wall_ms"] + summary["segments"][0]["wall_ms"], abs=0.01)
    assert summary["outside_ms"] == pytest.approx(summary["segments"][0]["t_ms"], abs=0.01)  # not the wait before it
    render2 = Timeline(None)
    render2.adopt(())
    assert render2.events == ()


# arithmetic, on times chosen by hand


def begin(t_ms, phase, **attrs):
    return {"render": "r", "t_ms": t_ms, "phase": phase, "event": "begin", "attrs": attrs}


def end(t_ms, phase, wall_ms, **fields):
    nothing = {
        "gpu_ms": None,
        "gpu_method": None,
        "gpu_busy": None,
        "stream_ms": None,
        "cpu_ms": 1.0,
        "mem_peak_bytes": None,
        "nvml": None,
        "attrs": {},
    }
    return {"render": "r", "t_ms": t_ms, "phase": phase, "event": "end", "wall_ms": wall_ms, **nothing, **fields}


def test_summary_counts_nested_and_overlapping_time_once():
    summary = summarize(
        [
            begin(0, "segment", name="Sampler"),
            end(50, "sample.step", 40),  # 10..50
            end(45, "sample.measure", 30),  # 15..45, inside
            end(70, "sample.step", 25),  # 45..70, overlaps
            end(100, "segment", 100),
            begin(250, "segment", name="Decode"),
            end(300, "decode.video.chunk", 50),
            end(350, "segment", 100),
        ]
    )
    assert summary["wall_ms"] == 200 and summary["outside_ms"] == 150
    assert summary["covered_ms"] == 110 and summary["unaccounted_ms"] == 90 and summary["coverage"] == 0.55
    assert summary["phases"]["sample.step"]["wall_ms"] == 60 and summary["phases"]["sample.step"]["count"] == 2
    assert summary["segments"] == [
        {"name": "Sampler", "t_ms": 0, "wall_ms": 100},
        {"name": "Decode", "t_ms": 250, "wall_ms": 100},
    ]


def test_summary_without_segments_spans_first_to_last_event():
    summary = summarize(
        [begin(10, "sample.step"), end(20, "sample.step", 10), begin(30, "upscale"), end(50, "upscale", 20)]
    )
    assert (summary["wall_ms"], summary["unaccounted_ms"], summary["outside_ms"]) == (40, 10, 0)


def test_summary_in_the_middle_of_a_segment_reaches_to_the_last_event():
    summary = summarize([begin(0, "segment", name="Parity"), begin(2, "upscale"), end(10, "upscale", 8)])
    assert (summary["wall_ms"], summary["unaccounted_ms"]) == (10, 2)


def test_summary_of_nothing():
    summary = summarize([])
    assert summary["wall_ms"] == 0 and summary["coverage"] is None and summary["phases"] == {}


def test_summary_pools_what_was_measured():
    zero, some = (
        {"util_mean": 0.0, "util_zero_share": 1.0, "samples": 1},
        {"util_mean": 0.8, "util_zero_share": 0.0, "samples": 3},
    )
    summary = summarize(
        [
            end(10, "sample.step", 10, gpu_ms=6.0, gpu_method="cupti", stream_ms=9.0, mem_peak_bytes=5, nvml=zero),
            end(20, "sample.step", 10, stream_ms=9.5, mem_peak_bytes=7, nvml=some),
            end(30, "sample.step", 10, nvml={"util_mean": None, "util_zero_share": None, "samples": 0}),
        ]
    )
    step = summary["phases"]["sample.step"]
    assert (
        step["gpu_ms"] == 6.0
        and step["gpu_measured"] == 1
        and step["gpu_busy"] == 0.6
        and step["gpu_methods"] == ["cupti"]
    )
    assert step["stream_ms"] == 18.5 and step["cpu_ms"] == 3.0
    assert step["mem_peak_bytes"] == summary["mem_peak_bytes"] == 7
    assert step["nvml"] == {"util_mean": 0.6, "util_zero_share": 0.25, "samples": 4}


def test_render_ids_sort_by_time_and_are_safe_names():
    first = new_render_id()
    time.sleep(0.002)
    second = new_render_id()
    assert first < second
    assert set(first) <= set("0123456789abcdef-")
    assert len({new_render_id() for _ in range(200)}) == 200


def test_a_phase_costs_little(tmp_path):
    """About 60 us on an idle machine; an fsync would cost far more than the limit."""
    timeline = Timeline(tmp_path / "r.jsonl")
    costs = []
    with timeline.segment("Sampler"):
        for _ in range(20):
            started = time.perf_counter()
            for step in range(25):
                timeline.end(timeline.begin("sample.step", step=step))
            costs.append((time.perf_counter() - started) / 25)
    assert min(costs) < 200e-6
