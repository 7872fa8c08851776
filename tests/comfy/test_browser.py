"""The bundled workflows in a real browser: opened from the template list, converted, run, photographed.

Screenshots stay in tests/artifacts.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from server import ROOT
from workflow_rules import in_bundled_names

import dev

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(dev.why_no_browser() is not None, reason=f"browser tests not run: {dev.why_no_browser()}"),
]

WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
# The others encode their prompt with a text encoder, which no tiny file replaces.
RUNNABLE = ("demo_parity", "demo_text_to_video")
ARTIFACTS = ROOT / "tests" / "artifacts"


def read(path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def opened(server) -> dict[str, dict]:
    """What the browser found, by workflow."""
    ARTIFACTS.mkdir(exist_ok=True)
    options = {
        "url": server.url,
        "browser": dev.find_browser(),
        "playwright": str(dev.playwright_dir()),
        "artifacts": str(ARTIFACTS),
        "workflows": [
            {"name": name, "id": ui["id"], "nodes": len(ui["nodes"]), "run": name in RUNNABLE}
            for name, ui in ((name, read(ROOT / "workflows" / f"{name}.json")) for name in WORKFLOWS)
        ],
    }
    script = ROOT / "tests" / "comfy" / "browser" / "workflows.mjs"
    done = subprocess.run(
        ["node", script, json.dumps(options)],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", WORKFLOWS)
def test_opens_from_the_template_list_with_no_missing_node(opened, name):
    assert opened[name]["missing"] == []
    assert not opened[name]["complaint"]
    assert (ARTIFACTS / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", WORKFLOWS)
def test_shows_its_graph_in_the_template_list(opened, name):
    assert opened[name]["hasPicture"]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_converts_to_its_api_twin(opened, name):
    api = in_bundled_names(opened[name]["api"])
    for node in api.values():
        node["inputs"].pop("video-preview", None)  # the page's own: no input of LoadVideo
    assert api == read(ROOT / "workflows" / "api" / f"{name}.json")


@pytest.mark.parametrize("name", RUNNABLE)
def test_runs(opened, name):
    assert (opened[name]["outcome"], opened[name]["error"]) == ("execution_success", "")
