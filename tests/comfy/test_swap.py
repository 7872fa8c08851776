"""ComfyUI's official LTX-2.5 templates with LTX Graph's nodes in them, by docs/swap_rule.md: validated by a real server
as they are, and rendered small with tiny files."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from comfy_cli.workflow_to_api import convert_ui_to_api
from PIL import Image
from saved_video import read_video
from swap_rule import GUIDERS, OURS, swap
from workflow_rules import without_text_nodes

from ltx_runtime.tiny import POSITIVE_FILE

# Template -> what it renders at: (frames, width, height) of the small variant.
TEMPLATES = {"t2v": (25, 128, 64), "i2v": (25, 128, 64), "flf2v": (25, 128, 64)}
IMAGES = ("neon_cyborg_portrait.png", "robot_hand.png", "robot_hand_energy.png")
TEXT_ENCODERS = (
    "gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors",
    "gemma4_e2b_it_int8_convrot.safetensors",
)
# Native nodes that the rule replaces, and those that keep a native VAELoader in use.
REPLACED = {*OURS, *GUIDERS}
NATIVE_VAE_READERS = {"LTXVImgToVideoInplace", "LTXVAddGuide", "LTXVEmptyLatentAudio"}


@pytest.fixture(scope="module")
def swapped(server, base) -> dict[str, dict]:
    """The templates in API format with the rule applied, and what they name in the folders."""
    for name in IMAGES:
        Image.new("RGB", (160, 120), (90, 140, 60)).save(base / "input" / name)
    folder = base / "models" / "text_encoders"
    folder.mkdir(parents=True, exist_ok=True)
    for name in TEXT_ENCODERS:
        (folder / name).write_bytes(b"only its name is read")
    object_info = server.client().object_info()
    templates = files("comfyui_workflow_templates_json") / "templates"
    return {
        name: swap(convert_ui_to_api(json.loads((templates / f"video_ltx2_5_{name}.json").read_bytes()), object_info))
        for name in TEMPLATES
    }


def test_core_brings_its_own_dual_guider(client):
    """From 0.32 on; before, the test pack's stand-in of the same name is what the templates are validated with."""
    version = client.system_stats()["system"]["comfyui_version"]
    module = client.object_info()["LTXVDualCFGGuider"]["python_module"]
    if tuple(int(part) for part in version.split(".")[:2]) < (0, 32):
        assert module.endswith("ltxgraph_test_pack")
        pytest.skip(f"not run: the templates with core's LTXVDualCFGGuider; ComfyUI {version} has a stand-in for it")
    assert module == "comfy_extras.nodes_lt"


def classes(api: dict[str, dict]) -> set[str]:
    return {node["class_type"] for node in api.values()}


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_native_readers_keep_a_native_loader(swapped, name):
    api = swapped[name]
    assert not classes(api) & REPLACED
    loaders = {node_id for node_id, node in api.items() if node["class_type"] == "VAELoader"}
    read_by = {
        node["class_type"]
        for node in api.values()
        for value in node["inputs"].values()
        if isinstance(value, list) and value[0] in loaders
    }
    assert read_by <= NATIVE_VAE_READERS
    assert all(any([loader, 0] in node["inputs"].values() for node in api.values()) for loader in loaders)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_real_server_accepts_the_whole_of_it(client, swapped, name):
    """Every output node validates: the client raises on any node error. It then ends at the text encoder, whose file
    holds nothing."""
    run = client.run(swapped[name])
    assert run.outcome == "execution_error"
    assert run.data("execution_error")[0]["node_type"] == "CLIPLoader"


def small(api: dict[str, dict]) -> dict[str, dict]:
    """A second of 128x64, by the template's own inputs."""
    for node in api.values():
        title, inputs = node["_meta"]["title"].lower(), node["inputs"]
        if title == "duration":
            inputs["value"] = 1
        elif title in ("width", "height"):
            inputs["value"] = {"width": 128, "height": 64}[title]  # in place of a link, where there is one
        elif node["class_type"] == "ResizeImageMaskNode" and "resize_type.longer_size" in inputs:
            inputs["resize_type.longer_size"] = 256
    return api


@pytest.mark.parametrize("name", TEMPLATES)
def test_it_renders_on_tiny_files(client, swapped, name):
    api = small(without_text_nodes(swapped[name], POSITIVE_FILE))
    run = client.run(api)
    assert run.outcome == "execution_success", run.error
    (saved,) = (node_id for node_id, node in api.items() if node["class_type"] == "SaveVideo")
    video = read_video(client.view(run.outputs[saved]["images"][0]))
    frames, width, height = TEMPLATES[name]
    assert video.sizes == [(width, height)] * frames and video.frame_rate == 24
    assert video.sample_rate == 48000 and abs(video.sound_seconds - video.seconds) <= 0.05
