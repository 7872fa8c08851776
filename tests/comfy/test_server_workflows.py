"""The bundled API workflows on a real ComfyUI, changed by the demo rule and the small rule alone."""

from __future__ import annotations

import json

import pytest
from comfy_cli.workflow_to_api import convert_ui_to_api
from input_files import SOUND_RATE
from make_workflows import WORKFLOWS, make
from saved_video import read_video
from server import ROOT
from workflow_rules import in_bundled_names, small, small_size, with_decoder, without_text_nodes

from ltx_runtime.published import CONV_VAE_FILE, DIFFUSION_VAE_FILE
from ltx_runtime.tiny import NEGATIVE_FILE, POSITIVE_FILE

NAMES = sorted(path.stem for path in (ROOT / "workflows" / "api").glob("*.json"))
FRAME_RATE = 24
SAMPLE_RATE = 48000
# Sound ends 30 ms before its latent does, the latent at most 20 ms beside the video, and AAC has frames of 21 ms.
LARGEST_GAP_S = 0.05
# The workflow whose sound goes into the file as it was loaded.
GIVEN_SOUND = "audio_to_video"
# The workflow that has both decoders.
BOTH_DECODERS = "decode_compare"


def read(*parts: str) -> dict:
    return json.loads(ROOT.joinpath("workflows", *parts).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def object_info(server) -> dict:
    return server.client().object_info()


def by_class(workflow: dict, outputs: dict) -> dict[str, dict]:
    return {workflow[node_id]["class_type"]: output for node_id, output in outputs.items()}


def tiny(name: str) -> dict:
    return small(without_text_nodes(read("api", f"{name}.json"), POSITIVE_FILE, NEGATIVE_FILE))


@pytest.mark.parametrize("decoder", ["conv", "diffusion"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != BOTH_DECODERS])
def test_runs_on_tiny_files_under_published_names(client, name, decoder):
    """With either decoder: the file in the loader is all that changes."""
    workflow = tiny(name)
    other = with_decoder(workflow, {"conv": CONV_VAE_FILE, "diffusion": DIFFUSION_VAE_FILE}[decoder])
    assert (other == workflow) == (decoder == "conv")
    workflow = other
    run = client.run(workflow)
    assert run.outcome == "execution_success", run.error
    outputs = by_class(workflow, run.outputs)
    parity = outputs.get("LTXGraphTimingParity") or outputs.get("LTXGraphParityRun")
    if parity:
        verdict = json.loads(parity["ltxgraph_report"][0])["verdict"]
        assert verdict["words"] == "not tested: no CUDA; eager repeated: equal"
        waveforms = [c["shape"] for c in verdict["numbers"]["comparisons"] if c["name"] == "waveform"]
        assert waveforms and all(shape == [1, 2, 480 * (4 * 18 - 3)] for shape in waveforms)  # 18 latents for 17 frames
    if "SaveVideo" in outputs:
        video = read_video(client.view(outputs["SaveVideo"]["images"][0]))
        frames, *size = small_size(workflow)
        assert (video.sizes, video.frame_rate) == ([tuple(size)] * frames, FRAME_RATE)
        given = name == GIVEN_SOUND
        assert (video.sample_rate, len(video.sound)) == ((SOUND_RATE, 1) if given else (SAMPLE_RATE, 2))
        assert abs(video.sound_seconds - video.seconds) <= LARGEST_GAP_S and video.sound.std() > 0.01
    assert parity or "SaveVideo" in outputs


def test_both_decoders_are_compared_with_their_tiles_and_with_each_other(client):
    workflow = tiny(BOTH_DECODERS)
    run = client.run(workflow)
    assert run.outcome == "execution_success", run.error

    def outputs_of(class_type: str) -> list[dict]:
        return [output for node_id, output in run.outputs.items() if workflow[node_id]["class_type"] == class_type]

    reports = [json.loads(output["ltxgraph_report"][0]) for output in outputs_of("LTXGraphTimingParity")]
    names = {tuple(render["name"] for render in report["renders"]): report["verdict"] for report in reports}
    tiled = {
        ("decode whole clip", "decode 2 tiles sharing 32 px"): None,
        ("decode whole clip", "decode 4 tiles sharing 32 px"): True,  # the padded picture has more rows
    }
    decoders = tuple(f"video_vae {file}".removesuffix(".safetensors") for file in (CONV_VAE_FILE, DIFFUSION_VAE_FILE))
    assert set(names) == {*tiled, decoders}
    for arms, verdict in names.items():
        assert verdict["status"] == "different", verdict["words"]
        assert ("seams" in verdict["numbers"]) == (arms in tiled)
        if tiled.get(arms):
            assert verdict["numbers"]["seams"]["at_seams"] is tiled[arms]
    videos = [read_video(client.view(output["images"][0])) for output in outputs_of("SaveVideo")]
    frames, *size = small_size(workflow)
    assert [video.sizes for video in videos] == [[tuple(size)] * frames] * 2 and all(len(v.sound) == 2 for v in videos)


@pytest.mark.parametrize("name", NAMES)
def test_offline_conversion_gives_the_api_twin(object_info, name):
    """comfy-cli's own conversion, which headless users have; the browser's is in test_browser.py."""
    converted = in_bundled_names(convert_ui_to_api(read(f"{name}.json"), object_info))
    twin = read("api", f"{name}.json")
    assert set(converted) == set(twin)
    for node_id, node in twin.items():
        assert converted[node_id]["class_type"] == node["class_type"]
        assert converted[node_id]["inputs"] == node["inputs"], node_id


def test_the_files_are_what_the_script_makes(object_info, server):
    assert sorted(WORKFLOWS) == NAMES
    if not server.client().system_stats()["system"]["comfyui_version"].startswith("0.30."):
        pytest.skip("the files are made with ComfyUI 0.30's descriptions of the nodes")
    for name in NAMES:
        assert make(name, object_info) == (read(f"{name}.json"), read("api", f"{name}.json")), name
