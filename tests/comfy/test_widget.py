"""The timeline widget in a real browser, on the installed frontend and on a newer one. Screenshots: tests/artifacts."""

from __future__ import annotations

import json
import subprocess
import urllib.error

import pytest
from server import ROOT, ComfyServer, install_pack, install_tiny, make_base
from trace_rules import problems_of

import dev

browser = [
    pytest.mark.browser,
    pytest.mark.skipif(dev.why_no_browser() is not None, reason=f"browser tests not run: {dev.why_no_browser()}"),
]
ARTIFACTS = ROOT / "tests" / "artifacts"


def read(name: str) -> dict:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def small(name: str) -> dict:
    """A demo workflow that renders in seconds, and still in more than one."""
    workflow = read(name)
    for node in workflow["nodes"]:
        if node["type"] == "LTXGraphParityRun":
            values = node["widgets_values"]
            assert values[5:7] == [3, 2], "replays and seeds have moved"
            values[6] = 1
    return workflow


def looked_at(url: str, frontend: str) -> dict:
    """What timeline.mjs saw."""
    ARTIFACTS.mkdir(exist_ok=True)
    options = {
        "url": url,
        "browser": dev.find_browser(),
        "playwright": str(dev.playwright_dir()),
        "artifacts": str(ARTIFACTS),
        "frontend": frontend,
        "render": read("demo_text_to_video"),
        "parity": small("demo_parity"),
    }
    script = ROOT / "tests" / "comfy" / "browser" / "timeline.mjs"
    done = subprocess.run(
        ["node", script, json.dumps(options)], capture_output=True, text=True, encoding="utf-8", timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["installed", dev.NEWER_FRONTEND_VERSION])
def seen(request, tmp_path_factory, comfyui, comfyui_overlay) -> dict:
    if request.param == "installed":
        return looked_at(request.getfixturevalue("server").url, "installed")
    base = make_base(tmp_path_factory.mktemp("newer"))
    install_pack(base)
    install_tiny(base)
    frontend = ["--front-end-root", str(dev.newer_frontend_dir())]
    with ComfyServer(base, comfyui, overlay=comfyui_overlay, arguments=frontend) as server:
        return looked_at(server.url, dev.NEWER_FRONTEND_VERSION)


def of_type(nodes: dict[str, dict], node_type: str) -> list[dict]:
    return [node for node in nodes.values() if node["type"] == node_type]


class TestInTheBrowser:
    pytestmark = browser

    def test_fills_while_the_render_runs(self, seen):
        watched = seen["watched"]
        assert (watched["outcome"], watched["error"]) == ("execution_success", "")
        for node in watched["seen"].values():
            running = [events for events, live, _ in node if live == "true"]
            assert running and running == sorted(running), node
        sampler = next(iter(watched["seen"].values()))
        assert len({events for events, *_ in sampler}) >= 4
        assert any("sample.step, step" in words for *_, words in sampler)

    def test_is_the_same_after_a_reload(self, seen):
        before, after = seen["before"], seen["after"]
        assert len(before) == 5  # two samplers, two decoders, the parity node
        for node_id, shown in before.items():
            assert int(shown["events"]) > 8 and "covered" in shown["summary"]
            again = after[node_id]
            # When it was rendered is said only of what an earlier page showed.
            assert again.pop("words").split(" · rendered ")[0] == shown.pop("words")
            # The pictures below it are not there again, so the parity node's chart has more room.
            same = set(shown) - ({"picture"} if shown["type"] == "LTXGraphTimingParity" else set())
            assert {key: again[key] for key in same} == {key: shown[key] for key in same}, node_id
        assert of_type(before, "LTXGraphTimingParity")[0]["verdict"] == "NOT TESTED"
        # A sampler's timeline ends with the sampler, also once the decoder has gone on.
        sampler, decode = (of_type(before, kind)[0] for kind in ("LTXGraphSampler", "LTXGraphVideoDecode"))
        assert sampler["render"] == decode["render"] and int(sampler["events"]) < int(decode["events"])

    def test_goes_on_after_a_reload_in_mid_render(self, seen):
        middle, end = seen["middle"], seen["end"]
        assert middle["live"] == "true" and int(middle["events"]) >= 5
        assert end["live"] == "false" and end["render"].endswith("-eager")
        assert int(end["events"]) == len(seen["log"]["events"]) > int(middle["events"])
        assert end["verdict"] == "NOT TESTED" and "eager repeated" in end["arms"]
        assert end["words"].startswith("no CUDA; eager repeated: equal · resident: not measured")

    def test_leaves_the_workflow_as_it_was(self, seen):
        """Neither render ids nor a widget value go into a saved workflow."""
        saved = json.loads(seen["saved"])
        for node in saved["nodes"]:
            original = next(n for n in read("demo_text_to_video")["nodes"] if n["id"] == node["id"])
            if node["type"].startswith("LTXGraph"):
                assert (node.get("widgets_values") or []) == original["widgets_values"], node["type"]
        for shown in seen["after"].values():
            assert shown["render"] not in seen["saved"]

    def test_hover_shows_numbers_and_a_click_pins_them(self, seen):
        for words in ("sample.step, step", "wall", "CPU", "GPU", "not measured"):
            assert words in seen["tip"]
        assert seen["pin"].replace("×", "").strip().startswith(seen["tip"].splitlines()[0])
        assert "begins at" in seen["pin"] and seen["zoom"]["back"] is True

    def test_the_wheel_zooms_the_chart_and_not_the_graph(self, seen):
        zoom = seen["zoom"]
        assert zoom["before"] != zoom["after"]
        assert zoom["graph"] == [1, 1]

    def test_themes_designs_and_narrow_nodes(self, seen):
        for name in ("dark", "light", "narrow", "vue"):
            assert seen[name]["inside"] and not seen[name]["overflows"], (name, seen[name])
            assert seen[name]["height"] >= 140
        assert seen["dark"]["paper"] != seen["light"]["paper"]
        assert seen["narrow"]["width"] < 230
        assert seen["vue"]["events"] == seen["end"]["events"]

    def test_the_trace_is_a_link_away(self, seen):
        """What the widget's link gives opens in Perfetto: named phases and steps on the tracks of their nodes."""
        assert problems_of(seen["trace"]) == []
        names = {event["name"] for event in seen["trace"]["traceEvents"]}
        assert {"LTXGraphSampler", "LTXGraphVideoDecode", "sample.step 0", "sample.step 7", "decode.video.chunk 0"} <= names

    def test_no_errors(self, seen):
        assert seen["problems"] == []


def test_logs_are_served_by_render_id_alone(client, base):
    """The route reads <output>/ltxgraph and nothing else."""
    logs = base / "output" / "ltxgraph"
    logs.mkdir(parents=True, exist_ok=True)
    event = {"render": "r", "time": "t", "t_ms": 0.0, "phase": "segment", "event": "note", "message": "m", "attrs": {}}
    line = json.dumps(event) + "\n"
    render = "20260101-000000-000-abcdef"
    (logs / f"{render}.jsonl").write_text(line * 3, encoding="utf-8")
    (base / "output" / f"{render}-out.jsonl").write_text(line, encoding="utf-8")
    assert len(client.get(f"/ltxgraph/timeline/{render}")["events"]) == 3
    assert len(client.get(f"/ltxgraph/timeline/{render}?events=2")["events"]) == 2
    refused = {
        f"{render}-none": 404,
        f"..%2F{render}-out": 400,
        f"{render}.jsonl": 400,
        f"{render}?events=-1": 400,
        "%2Fetc%2Fpasswd": 400,
    }
    link = logs / f"{render}-link.jsonl"
    try:
        link.symlink_to(base / "output" / f"{render}-out.jsonl")
        refused[f"{render}-link"] = 404
    except OSError:  # Windows without the right to
        pass
    for name, status in refused.items():
        with pytest.raises(urllib.error.HTTPError) as refusal:
            client.get(f"/ltxgraph/timeline/{name}")
        assert refusal.value.code == status, name
