"""The bundled API workflows, run as they are; the one with text nodes by the demo rule of workflows/README.md."""

from __future__ import annotations

import io
import json

import av
import pytest
from comfy_cli.workflow_to_api import convert_ui_to_api
from server import ROOT
from workflow_rules import without_text_nodes

NAMES = sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json"))
CONDITIONING = "tiny-conditioning-positive.safetensors"
SMALL = {"width": 96, "height": 64, "length": 25}


def read(*parts: str) -> dict:
    return json.loads(ROOT.joinpath("workflows", *parts).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def object_info(server) -> dict:
    return server.client().object_info()


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_tiny_files_under_published_names(client, name):
    workflow = without_text_nodes(read("api", f"{name}.json"), CONDITIONING)
    for node in workflow.values():
        if node["class_type"] == "LTXGraphEmptyLatent":
            node["inputs"].update(SMALL)
    run = client.run(workflow)
    assert run.outcome == "execution_success", run.error
    by_type = {workflow[node_id]["class_type"]: output for node_id, output in run.outputs.items()}
    parity = by_type.get("LTXGraphTimingParity") or by_type["LTXGraphParityRun"]
    assert parity["ltxgraph_report"][0]["verdict"]["words"] == "not tested: no CUDA; eager repeated: equal"
    if "SaveVideo" in by_type:
        video = client.view(by_type["SaveVideo"]["images"][0])
        with av.open(io.BytesIO(video)) as container:
            frames = [(frame.width, frame.height) for frame in container.decode(video=0)]
            rate = container.streams.video[0].average_rate
        assert frames == [(SMALL["width"], SMALL["height"])] * SMALL["length"]
        assert rate == 24


@pytest.mark.parametrize("name", NAMES)
def test_offline_conversion_gives_the_api_twin(object_info, name):
    """comfy-cli's own conversion, which headless users have; the browser's is in test_browser.py."""
    converted = convert_ui_to_api(read(f"{name}.json"), object_info)
    twin = read("api", f"{name}.json")
    assert set(converted) == set(twin)
    for node_id, node in twin.items():
        assert converted[node_id]["class_type"] == node["class_type"]
        assert converted[node_id]["inputs"] == node["inputs"], node_id
