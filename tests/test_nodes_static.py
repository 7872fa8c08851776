"""The nodes and bundled workflows, as far as they can be read without ComfyUI in the process."""
from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from workflow_rules import without_text_nodes

from ltx_runtime.published import CONV_VAE_FILE, TRANSFORMER_FILE
from ltx_runtime.tiny import POSITIVE_FILE

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
# Core nodes that bundled workflows may use: unchanged from ComfyUI 0.30 to 0.33. MarkdownNote is the frontend's.
CORE_NODES = {
    "CLIPLoader", "CLIPTextEncode", "CreateVideo", "GetVideoComponents", "LTXVAddGuide", "LTXVConcatAVLatent",
    "LTXVConditioning", "LTXVCropGuides", "LTXVPreprocess", "LTXVSeparateAVLatent", "LoadAudio", "LoadImage",
    "LoadVideo", "MarkdownNote", "PreviewAny", "PrimitiveFloat", "PrimitiveInt", "SamplerEulerAncestral",
    "SaveImage", "SaveVideo", "VAELoader",
}
# Folders of the published files, by the input that names one.
MODEL_FOLDERS = {
    "unet_name": "diffusion_models", "vae_name": "vae", "clip_name": "text_encoders",
    "model_name": "latent_upscale_models", "lora_name": "loras",
}
TITLE_HEIGHT = 30


def sources() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "nodes").glob("*.py"))}


def node_ids() -> dict[str, str]:
    """Node class -> node_id, from the schemas in the sources."""
    found = {}
    for tree in sources().values():
        for cls in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            keywords = [k for n in ast.walk(cls) if isinstance(n, ast.Call) for k in n.keywords]
            found.update((cls.name, k.value.value) for k in keywords if k.arg == "node_id")
    return found


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_node_class_is_listed_and_named_by_its_id():
    ids = node_ids()
    listed = next(
        ast.literal_eval(node.value)
        for node in sources()[ROOT / "nodes" / "__init__.py"].body
        if isinstance(node, ast.Assign) and node.targets[0].id == "NODES"
    )
    assert {name for _, name in listed} == set(ids)
    assert all(name == node_id for name, node_id in ids.items())


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_every_input_has_a_tooltip(path):
    inputs = [
        call
        for call in ast.walk(sources()[path])
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "Input"
    ]
    silent = [ast.unparse(i.args[0]) for i in inputs if "tooltip" not in {k.arg for k in i.keywords}]
    assert not silent, f"{path.name}: no tooltip: {', '.join(silent)}"


def test_every_node_has_a_help_page():
    pages = {path.stem for path in (ROOT / "web" / "docs").glob("*.md")}
    assert pages == set(node_ids().values())


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_only_host_touches_comfyui_services(path):
    allowed, services = {"comfy_api"}, {"folder_paths", "latent_preview", "nodes", "server", "execution"}
    for node in ast.walk(sources()[path]):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        for name in (n.split(".")[0] for n in names):
            assert not name.startswith("comfy") or name in allowed, f"{path.name} imports {name}"
            assert name not in services, f"{path.name} imports {name}"
    if path.name != "host.py":
        assert "import_module" not in path.read_text(encoding="utf-8") or path.name == "__init__.py"


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_what_comfyui_asks_before_a_prompt_runs_takes_missing_inputs(path):
    """ComfyUI leaves out the inputs that are linked to another node."""
    for method in (n for n in ast.walk(sources()[path]) if isinstance(n, ast.FunctionDef)):
        if method.name in ("fingerprint_inputs", "validate_inputs"):
            given = [argument.arg for argument in method.args.args[1:]]
            assert len(method.args.defaults) == len(given), f"{path.name}:{method.lineno} {method.name} needs {given}"


def test_each_workflow_has_its_twin():
    names = [path.name for path in WORKFLOWS]
    assert names == sorted(path.name for path in (ROOT / "workflows" / "api").glob("*.json"))
    assert {"text_to_video.json", "demo_text_to_video.json", "demo_parity.json"} <= set(names)


def test_each_workflow_has_a_small_picture_for_the_template_list():
    assert [path.stem for path in WORKFLOWS] == sorted(path.stem for path in (ROOT / "workflows").glob("*.jpg"))
    for path in WORKFLOWS:
        content = path.with_suffix(".jpg").read_bytes()
        assert content.startswith(b"\xff\xd8\xff") and len(content) < 30_000, path.name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_uses_known_nodes(path):
    known = CORE_NODES | set(node_ids().values())
    assert {node["type"] for node in read(path)["nodes"]} <= known
    assert {node["class_type"] for node in read(path.parent / "api" / path.name).values()} <= known


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_links_agree_at_both_ends(path):
    workflow = read(path)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    seen = set()
    for link_id, source, source_slot, target, target_slot, type_name in workflow["links"]:
        output = nodes[source]["outputs"][source_slot]
        socket = nodes[target]["inputs"][target_slot]
        assert link_id in output["links"] and socket["link"] == link_id
        assert output["type"] == type_name
        assert socket["type"] in (type_name, "*"), (path.name, link_id)
        seen.add(link_id)
    ends = [socket["link"] for node in nodes.values() for socket in node["inputs"] if socket["link"] is not None]
    assert sorted(ends) == sorted(seen)
    assert workflow["last_node_id"] == max(nodes) and workflow["last_link_id"] == max(seen)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_reads_left_to_right_without_overlap(path):
    workflow = read(path)
    boxes = {}
    for node in workflow["nodes"]:
        (x, y), (width, height) = node["pos"], node["size"]
        boxes[node["id"]] = (x, y - TITLE_HEIGHT, x + width, y + height)
    for a, first in boxes.items():
        for b, second in boxes.items():
            apart = first[2] <= second[0] or second[2] <= first[0] or first[3] <= second[1] or second[3] <= first[1]
            assert a == b or apart, f"nodes {a} and {b} overlap"
    for _, source, _, target, *_ in workflow["links"]:
        assert boxes[source][2] <= boxes[target][0] or boxes[source][0] == boxes[target][0], (source, target)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_seeds_stay_fixed(path):
    """Loading a workflow must not give another video each time; `randomize` is the frontend's default."""
    for node in read(path)["nodes"]:
        assert not {"randomize", "increment", "decrement"} & {v for v in node["widgets_values"] if isinstance(v, str)}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_files_have_published_names_and_addresses(path):
    workflow = read(path)
    named = {
        (folder, node["inputs"][name])
        for node in read(path.parent / "api" / path.name).values()
        for name, folder in MODEL_FOLDERS.items()
        if name in node["inputs"]
    }
    offered = {
        (model["directory"], model["name"])
        for node in workflow["nodes"]
        for model in node["properties"].get("models", [])
    }
    assert named == offered
    transformer = TRANSFORMER_FILE.replace("distilled", "dev") if path.stem.startswith("dev") else TRANSFORMER_FILE
    assert ("diffusion_models", transformer) in named and ("vae", CONV_VAE_FILE) in named
    for node in workflow["nodes"]:
        for model in node["properties"].get("models", []):
            place = f"{model['directory']}/{model['name']}"
            assert model["url"] == f"https://huggingface.co/Lightricks/LTX-2.5/resolve/main/{place}"


def test_the_demo_is_text_to_video_by_the_rule():
    full = read(ROOT / "workflows" / "api" / "text_to_video.json")
    demo = read(ROOT / "workflows" / "api" / "demo_text_to_video.json")
    expected = without_text_nodes(full, POSITIVE_FILE)
    for node in expected.values():
        if node["class_type"] == "LTXGraphEmptyLatent":
            node["inputs"] |= {"width": 96, "height": 64, "length": 25}
    assert demo == expected
