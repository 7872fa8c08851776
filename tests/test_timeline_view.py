"""The phase log as the timeline widget reads it."""
import json

import pytest

from ltx_runtime.timeline_view import RENDER_ID, compact, read_timeline
from ltx_runtime.timing import Timeline, new_render_id


def render(folder) -> Timeline:
    timeline = Timeline(folder / f"{new_render_id()}.jsonl")
    with timeline.segment("LTXGraphSampler"):
        timeline.note("sample.capture", "eager: no CUDA")
        with timeline.phase("sample.step", step=0, top_kernels=[{"name": "gemm"}], shape=[1, 128]) as phase:
            phase.gpu_ms, phase.gpu_method = 0.5, "cupti"
    return timeline


def test_a_log_is_read_back_with_its_totals(tmp_path):
    timeline = render(tmp_path)
    view = read_timeline(timeline.path)
    assert view["render"] == timeline.render_id and view["time"] == timeline.events[0]["time"]
    assert view["events"] == [compact(event) for event in timeline.events]
    assert view["summary"] == timeline.summary()


def test_compact_events_keep_numbers_and_drop_what_repeats(tmp_path):
    begin, end = [e for e in map(compact, render(tmp_path).events) if e["phase"] == "sample.step"]
    attrs = {"step": 0, "shape": [1, 128]}
    assert begin == {"t_ms": begin["t_ms"], "phase": "sample.step", "event": "begin", "attrs": attrs}
    assert (end["gpu_ms"], end["gpu_method"], end["attrs"]) == (0.5, "cupti", attrs)
    assert set(end) == {"t_ms", "phase", "event", "wall_ms", "gpu_ms", "gpu_method", "gpu_busy", "cpu_ms", "attrs"}


def test_what_no_line_holds_is_left_out_of_the_log_lines_and_of_the_widget_alike(caplog):
    caplog.set_level("INFO", logger="ltxgraph")
    timeline = Timeline(None)
    with timeline.phase("sample.step", step=0, copies={"HtoD": 1}, kernels=[{"name": "gemm"}], shape=[1, 128]):
        pass
    assert caplog.records[0].message == "ltxgraph: begin sample.step step=0 shape=[1, 128]"
    assert compact(timeline.events[0])["attrs"] == {"step": 0, "shape": [1, 128]}


def test_half_a_last_line_is_left_out(tmp_path):
    timeline = render(tmp_path)
    whole = timeline.path.read_text(encoding="utf-8")
    timeline.path.write_text(whole[:-20], encoding="utf-8")
    view = read_timeline(timeline.path)
    assert len(view["events"]) == len(timeline.events) - 1
    # The segment is open then and lasts to the last event.
    first, *_, last = view["events"]
    assert view["summary"]["segments"][0]["wall_ms"] == pytest.approx(last["t_ms"] - first["t_ms"], abs=1e-3)
    timeline.path.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="no event"):
        read_timeline(timeline.path)


def test_a_node_sees_the_render_as_far_as_itself(tmp_path):
    timeline = render(tmp_path)
    far = len(timeline.events)
    alone = timeline.summary()
    timeline = timeline.child()
    with timeline.segment("LTXGraphVideoDecode"):
        pass
    assert read_timeline(timeline.path, far)["summary"] == alone
    assert len(read_timeline(timeline.path)["events"]) == len(timeline.events) > far


def test_render_ids_are_known_and_nothing_else():
    for name in (new_render_id(), new_render_id() + "-eager", new_render_id() + "-eager-repeated"):
        assert RENDER_ID.fullmatch(name), name
    whole = new_render_id()
    for name in ("", "..", "../secret", f"{whole}/..", f"{whole}.trace", f"{whole}\n", "a" * 40):
        assert not RENDER_ID.fullmatch(name), name


def test_the_view_is_json(tmp_path):
    json.dumps(read_timeline(render(tmp_path).path), allow_nan=False)
