"""The timeline widget in a real browser, on the installed frontend and on a newer one. Screenshots: tests/artifacts."""

from __future__ import annotations

import json
import subprocess
import urllib.error
from pathlib import Path

import pytest
from server import ROOT, ComfyServer, install_pack, install_test_pack, install_tiny, make_base
from trace_rules import problems_of

import dev

browser = [
    pytest.mark.browser,
    pytest.mark.skipif(dev.why_no_browser() is not None, reason=f"browser tests not run: {dev.why_no_browser()}"),
]
ARTIFACTS = ROOT / "tests" / "artifacts"


def read(name: str) -> dict:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def workflow() -> dict:
    """The demo of text to video with the parity run of the other demo below it, on one seed."""
    whole = read("demo_text_to_video")
    run = next(node for node in read("demo_parity")["nodes"] if node["type"] == "LTXGraphParityRun")
    assert run["widgets_values"][5:7] == [3, 2], "replays and seeds have moved"
    run["widgets_values"][6] = 1
    nodes = {node["id"]: node for node in whole["nodes"]}
    links = {link[0]: link for link in whole["links"]}
    given = {
        socket["name"]: links[socket["link"]]
        for node in nodes.values()
        if node["type"] in ("LTXGraphSampler", "LTXGraphVideoDecode")
        for socket in node["inputs"]
        if socket["link"] is not None and socket["name"] in ("model", "positive", "latent_image", "video_vae")
    }
    whole["last_node_id"] += 1
    run["id"] = whole["last_node_id"]
    run["pos"] = [0, 200 + max(node["pos"][1] + node["size"][1] for node in nodes.values())]
    for slot, socket in enumerate(run["inputs"]):
        socket["link"] = None
        if socket["name"] in given:
            _, origin, origin_slot, _, _, kind = given[socket["name"]]
            whole["last_link_id"] += 1
            socket["link"] = whole["last_link_id"]
            whole["links"].append([socket["link"], origin, origin_slot, run["id"], slot, kind])
            nodes[origin]["outputs"][origin_slot]["links"].append(socket["link"])
    for output in run["outputs"]:
        output["links"] = []
    whole["nodes"].append(run)
    return whole


def looked_at(url: str, frontend: str, base: Path) -> dict:
    """What timeline.mjs saw. base: the server's base directory, with the test pack."""
    ARTIFACTS.mkdir(exist_ok=True)
    options = {
        "url": url,
        "browser": dev.find_browser(),
        "playwright": str(dev.playwright_dir()),
        "artifacts": str(ARTIFACTS),
        "frontend": frontend,
        "workflow": workflow(),
        "hold": str(base / "input" / "hold"),
    }
    script = ROOT / "tests" / "comfy" / "browser" / "timeline.mjs"
    try:
        done = subprocess.run(
            ["node", script, json.dumps(options)],
            check=False,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=600,
        )
    finally:
        Path(options["hold"]).unlink(missing_ok=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["installed", dev.NEWER_FRONTEND_VERSION])
def seen(request, tmp_path_factory, comfyui, comfyui_overlay) -> dict:
    if request.param == "installed":
        return looked_at(request.getfixturevalue("server").url, "installed", request.getfixturevalue("base"))
    base = make_base(tmp_path_factory.mktemp("newer"))
    install_pack(base)
    install_tiny(base)
    install_test_pack(base)
    frontend = ["--front-end-root", str(dev.newer_frontend_dir())]
    with ComfyServer(base, comfyui, overlay=comfyui_overlay, arguments=frontend) as server:
        return looked_at(server.url, dev.NEWER_FRONTEND_VERSION, base)


def of_type(nodes: dict[str, dict], node_type: str) -> list[dict]:
    return [node for node in nodes.values() if node["type"] == node_type]


class TestInTheBrowser:
    pytestmark = browser

    def test_fills_while_the_render_runs(self, seen):
        watched = seen["watched"]
        assert (watched["outcome"], watched["error"]) == ("execution_success", "")
        for painted in (watched["sampler"], watched["decode"]):
            assert [events for events, *_ in painted] == sorted(events for events, *_ in painted)
        running = [(events, words) for events, live, words in watched["sampler"] if live == "true"]
        assert len(running) >= 3
        assert any("sample.step, step" in words for _, words in running)

    def test_is_the_same_after_a_reload(self, seen):
        before, after = seen["before"], seen["after"]
        assert len(before) == 6  # two samplers, two decoders, both parity nodes
        run = next(key for key, node in before.items() if node["type"] == "LTXGraphParityRun")
        for node_id, shown in before.items():
            if node_id == run:  # it has not run yet, and is running at the reload
                continue
            assert int(shown["events"]) > 8 and "covered" in shown["summary"]
            again = after[node_id]
            # When it was rendered is said only of what an earlier page showed.
            assert again["words"].split(" · rendered ")[0] == shown["words"]
            # The pictures below it are not there again, so the parity node's chart has more room.
            same = set(shown) - {"words"} - ({"picture"} if shown["type"] == "LTXGraphTimingParity" else set())
            assert {key: again[key] for key in same} == {key: shown[key] for key in same}, node_id
        assert of_type(before, "LTXGraphTimingParity")[0]["verdict"] == "NOT TESTED"
        # A sampler's timeline ends with the sampler, also once the decoder has gone on.
        sampler, decode = (of_type(before, kind)[0] for kind in ("LTXGraphSampler", "LTXGraphVideoDecode"))
        assert sampler["render"] == decode["render"] and int(sampler["events"]) < int(decode["events"])

    def test_goes_on_after_a_reload_in_mid_render(self, seen):
        """It shows the arm that runs, and the first one once the node has ended, even if a log comes later still."""
        middle, end, second = seen["middle"], seen["end"], seen["second"]
        assert middle["live"] == "true" and middle["render"].endswith("-eager-repeated")
        assert [middle["render"], "true"] in seen["painted"], "it did not go on with the arm that ran"
        assert end["live"] == "false" and end["render"].endswith("-eager")
        assert int(end["events"]) == len(seen["log"]["events"])
        assert second["render"] == middle["render"] and second["live"] == "false"
        assert int(second["events"]) == len(seen["secondLog"]["events"]) > int(middle["events"])
        assert end["verdict"] == "NOT TESTED" and "eager repeated" in end["arms"]
        assert end["words"].startswith("no CUDA; eager repeated: equal · resident: not measured")

    def test_leaves_the_workflow_as_it_was(self, seen):
        """Neither render ids nor a widget value go into a saved workflow."""
        saved = json.loads(seen["saved"])
        for node in saved["nodes"]:
            original = next(n for n in workflow()["nodes"] if n["id"] == node["id"])
            if node["type"].startswith("LTXGraph"):
                assert (node.get("widgets_values") or []) == original["widgets_values"], node["type"]
        for shown in of_type(seen["after"], "LTXGraphSampler"):
            assert shown["render"] and shown["render"] not in seen["saved"]

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
        assert {"LTXGraphSampler", "LTXGraphVideoDecode"} <= names
        assert {"sample.step 0", "sample.step 7", "decode.video.chunk 0"} <= names

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
