"""The widget's own reading of events, in Node.js, against the runtime's: bars, GPU shares, unaccounted time."""

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from ltx_runtime.intervals import phase_interval
from ltx_runtime.pictures import PHASE_COLOURS, _gpu_share
from ltx_runtime.timeline_view import compact
from ltx_runtime.timing import SEGMENT, Timeline

SCRIPT = Path(__file__).resolve().parents[1] / "web" / "js" / "timeline_data.js"
READ = """
const { readEvents, Axis, uncovered } = await import(process.argv[1]);
const { events, now } = JSON.parse(await new Response(process.stdin).text());
const model = readEvents(events, now);
const axis = new Axis(model);
const free = uncovered(model.segments.map((s) => [s.start, s.end]), model.bars.map((b) => [b.start, b.end]));
console.log(JSON.stringify({
  bars: model.bars.map((b) => ({ phase: b.phase, start: b.start, end: b.end, open: b.open, busy: b.busy })),
  segments: model.segments, rows: model.rows, unaccounted: free.reduce((sum, [a, b]) => sum + b - a, 0),
  hatched: axis.hatched, ends: [axis.place(axis.start), axis.place(axis.end)],
  places: model.bars.map((b) => axis.place(b.start)),
}));
"""

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="browser tests not run: no Node.js is installed")


def read(events, now=None) -> dict:
    given = json.dumps({"events": [compact(event) for event in events], "now": now})
    command = ["node", "--no-warnings", "--input-type=module", "-e", READ, SCRIPT.as_uri()]
    done = subprocess.run(
        command, input=given, check=False, capture_output=True, text=True, encoding="utf-8", timeout=60
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(tmp_path) -> Timeline:
    timeline = Timeline(tmp_path / "r.jsonl")
    with timeline.segment("LTXGraphSampler"):
        with timeline.phase("prepare.constants"):
            time.sleep(0.002)
        time.sleep(0.003)
        with timeline.phase("sample.step", step=0):
            time.sleep(0.002)
        with timeline.phase("sample.measure", step=1, eager_wall_ms=8.0) as phase:
            time.sleep(0.002)
            phase.gpu_ms, phase.gpu_method = 6.0, "cupti"
        flying = timeline.begin("sample.replay", step=2)
        following = timeline.begin("sample.replay", step=3)
        time.sleep(0.002)
        flying.gpu_ms, flying.gpu_method = 1.0, "graph_events"
        timeline.end(flying)
        timeline.end(following)
    time.sleep(0.01)
    timeline = timeline.child()
    with timeline.segment("LTXGraphVideoDecode"), timeline.phase("decode.video.chunk", chunk=0):
        time.sleep(0.002)
    return timeline


def test_bars_shares_and_unaccounted_time_are_the_runtimes(tmp_path):
    timeline = rendered(tmp_path)
    ends = [e for e in timeline.events if e["event"] == "end" and e["phase"] != SEGMENT]
    ends.sort(key=phase_interval)
    seen = read(timeline.events)
    assert [bar["phase"] for bar in seen["bars"]] == [end["phase"] for end in ends]
    for bar, end in zip(seen["bars"], ends, strict=True):
        assert (bar["start"], bar["end"]) == pytest.approx(phase_interval(end))
        share = _gpu_share(end, ends)[0]
        assert bar["busy"] == (None if share is None else pytest.approx(share))
        assert not bar["open"]
    assert seen["unaccounted"] == pytest.approx(timeline.summary()["unaccounted_ms"], abs=1e-3)
    assert seen["rows"] == ["prepare.constants", "sample.measure", "sample.step", "sample.replay", "decode.video.chunk"]


def test_the_axis_cuts_what_others_took_and_keeps_the_order(tmp_path):
    seen = read(rendered(tmp_path).events)
    assert [h["words"].split(" ", 2)[2] for h in seen["hatched"]] == ["elsewhere"]
    assert seen["ends"] == pytest.approx([0, 1])
    assert seen["places"] == sorted(seen["places"])


def test_a_long_load_does_not_dwarf_the_render():
    loaded = Timeline(None)
    events = []
    with loaded.segment("LTXGraphSampler"):
        with loaded.phase("load.read"):
            time.sleep(0.2)
        with loaded.phase("sample.step", step=0):
            time.sleep(0.01)
        events = loaded.events
    seen = read(events)
    load, step = seen["bars"]
    assert seen["hatched"][0]["words"].endswith("load")
    assert step["end"] - step["start"] < 0.2 * (load["end"] - load["start"])
    assert seen["places"][1] < 0.3  # the step has most of the width


def test_a_running_phase_lasts_until_now():
    timeline = Timeline(None)
    with timeline.segment("LTXGraphSampler"):
        first = timeline.begin("sample.step", step=0)
        second = timeline.begin("sample.step", step=1)
        timeline.end(first)
        events = timeline.events
        now = events[-1]["t_ms"] + 50
        done, running = read(events, now)["bars"]
        timeline.end(second)
    assert (done["open"], running["open"]) == (False, True)
    assert running["end"] == pytest.approx(now)
    assert running["start"] == pytest.approx(next(e["t_ms"] for e in events if e.get("attrs") == {"step": 1}))


def test_the_widget_paints_phases_in_the_colours_of_the_picture():
    source = SCRIPT.with_name("timeline_view.js").read_text(encoding="utf-8")
    table = re.search(r"const COLOURS = \{(.*?)\};", source, re.DOTALL)[1]
    found = re.findall(r'"?([a-z.]+)"?: (\[[0-9, ]+\])', table)
    assert {phase: tuple(json.loads(colour)) for phase, colour in found} == PHASE_COLOURS
