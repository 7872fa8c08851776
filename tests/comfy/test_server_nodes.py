"""What ComfyUI lists of the pack: nodes, sockets, help pages, templates."""
from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from server import PACK_NAME, ROOT

# Node id -> input names that design.md section 3 fixes. A node id and its input names never change after release.
NODES = {
    "LTXGraphModelLoader": {"unet_name", "lora"},
    "LTXGraphLoRA": {"lora_name", "strength_model", "lora"},
    "LTXGraphVideoVAELoader": {"vae_name"},
    "LTXGraphUpscalerLoader": {"model_name"},
    "LTXGraphLatentUpscale": {"samples", "upscale_model", "video_vae", "report"},
    "LTXGraphVideoEncode": {
        "video_vae", "pixels", "width", "height", "temporal_size", "tile_size", "overlap", "report",
    },
    "LTXGraphAudioVAELoader": {"vae_name"},
    "LTXGraphAudioDecode": {"audio_vae", "samples", "report"},
    "LTXGraphAudioEncode": {"audio_vae", "audio", "length", "frame_rate", "video_latent", "report"},
    "LTXGraphImageToVideo": {"video_vae", "image", "latent", "strength", "report"},
    "LTXGraphTemporalRegion": {"latent", "start_time", "end_time", "regenerate", "frame_rate"},
    "LTXGraphDuration": {
        "model", "positive", "duration_head", "frame_rate", "min_seconds", "max_seconds", "report",
    },
    "LTXGraphEmptyLatent": {"width", "height", "length", "batch_size", "frame_rate", "with_audio"},
    "LTXGraphGuidance": {
        "preset", "stg_blocks", "passes",
        *(f"video_{name}" for name in ("cfg", "stg", "modality", "rescale", "skip_step")),
        *(f"audio_{name}" for name in ("cfg", "stg", "modality", "rescale", "skip_step")),
    },
    "LTXGraphSampler": {
        "model", "positive", "negative", "guidance", "latent_image", "seed", "noise", "schedule", "steps", "sigmas",
        "sampler_name", "sampler",
        "cuda_graph", "on_capture_failure", "noise_convention", "compatibility", "report",
    },
    "LTXGraphWarmUp": {
        "model", "positive", "negative", "guidance", "latent_image", "schedule", "steps", "sigmas",
        "sampler_name", "sampler", "on_capture_failure", "noise_convention", "compatibility", "report",
    },
    "LTXGraphVideoDecode": {
        "video_vae", "samples", "temporal_size", "temporal_overlap", "tile_size", "overlap", "decoder_seed",
        "cuda_graph", "report",
    },
    "LTXGraphTimingParity": {
        "frames_a", "frames_b", "audio_a", "audio_b", "report_a", "report_b", "tolerance", "on_difference",
    },
    "LTXGraphParityRun": {
        "model", "positive", "negative", "guidance", "latent_image", "seed", "noise", "schedule", "steps", "sigmas",
        "sampler_name", "sampler",
        "noise_convention", "compatibility", "video_vae", "replays", "seeds", "tolerance", "on_difference",
        "measure_residency", "audio_vae",
        "positive_b",
    },
    "LTXGraphSaveConditioning": {"conditioning", "filename_prefix"},
    "LTXGraphLoadConditioning": {"conditioning_name"},
}
WORKFLOWS = sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))


@pytest.fixture(scope="module")
def listed(server) -> dict[str, dict]:
    return {name: info for name, info in server.client().object_info().items() if name.startswith("LTXGraph")}


def test_every_node_is_listed(listed):
    assert set(listed) == set(NODES)
    for name, info in listed.items():
        assert info["category"] == "LTXGraph"
        assert info["display_name"].startswith("LTX Graph")
        assert info["description"], name


@pytest.mark.parametrize("name", sorted(NODES))
def test_input_names(listed, name):
    inputs = listed[name]["input"]
    assert set(inputs.get("required", {})) | set(inputs.get("optional", {})) == NODES[name]


def test_sockets_are_comfyuis_own(listed):
    outputs = {name: info["output"] for name, info in listed.items()}
    assert outputs["LTXGraphSampler"] == ["LATENT", "LTXGRAPH_REPORT"]
    assert outputs["LTXGraphVideoDecode"] == ["IMAGE", "LTXGRAPH_REPORT"]
    assert outputs["LTXGraphLatentUpscale"] == outputs["LTXGraphVideoEncode"] == ["LATENT", "LTXGRAPH_REPORT"]
    assert outputs["LTXGraphDuration"] == ["FLOAT", "INT", "LTXGRAPH_REPORT"]
    assert outputs["LTXGraphEmptyLatent"] == ["LATENT"]
    assert outputs["LTXGraphGuidance"] == ["LTXGRAPH_GUIDANCE"]
    assert outputs["LTXGraphLoadConditioning"] == ["CONDITIONING"]
    assert outputs["LTXGraphTimingParity"] == outputs["LTXGraphParityRun"] == ["STRING", "BOOLEAN", "IMAGE", "IMAGE"]


@pytest.mark.parametrize("name", sorted(NODES))
def test_help_page_names_every_input_and_output(listed, name):
    """Loaders have one output, which says nothing that the page does not."""
    info = listed[name]
    page = (ROOT / "web" / "docs" / f"{name}.md").read_text(encoding="utf-8")
    given = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    named = {socket: {socket, (spec[1:] or [{}])[0].get("display_name")} for socket, spec in given.items()}
    if name == "LTXGraphGuidance":  # one line for both streams
        named = {socket: {re.sub("^(video|audio)_", "…_", socket)} for socket in named}
    named |= {} if name.endswith("Loader") else {output: {output} for output in info["output_name"]}
    silent = [socket for socket, words in named.items() if not any(word and word in page for word in words)]
    assert not silent, f"{name}.md says nothing of {', '.join(silent)}"


@pytest.mark.parametrize("name", sorted(NODES))
def test_help_page_is_served(client, name):
    page = client.read(f"/extensions/{PACK_NAME}/docs/{name}.md")
    assert page == (ROOT / "web" / "docs" / f"{name}.md").read_bytes()


def test_templates_are_listed_and_served(client):
    assert WORKFLOWS, "no workflow is bundled"
    assert sorted(client.get("/workflow_templates")[PACK_NAME]) == WORKFLOWS
    for name in WORKFLOWS:
        served = client.read(f"/api/workflow_templates/{PACK_NAME}/{quote(name)}.json")
        assert json.loads(served) == json.loads((ROOT / "workflows" / f"{name}.json").read_bytes())


def test_start_up_says_nothing_about_missing_nodes(server):
    assert "is not available" not in server.log()
