"""LoRA nodes through a real ComfyUI (cases A5 to A7): chains, strengths, failures; the model is read once."""

from __future__ import annotations

import json

import numpy as np
import prompts
import pytest
from prompts import node
from server import ComfyServer, PromptRefused

from ltx_runtime.published import LORA_FILE
from ltx_runtime.tiny import write_tiny_lora


@pytest.fixture(scope="module", autouse=True)
def lora_files(base):
    """The distilled adapter's tiny twin (A) and what others may bring, in models/loras."""
    folder = base / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_lora(folder / LORA_FILE, seed=1)
    write_tiny_lora(folder / "community.safetensors", seed=2, form="community")
    write_tiny_lora(folder / "old.safetensors", seed=3, flavour="2.3")
    (folder / "corrupt.safetensors").write_bytes((folder / LORA_FILE).read_bytes()[:-100])


def adapted(*links: tuple[str, float], seed: int = 7) -> dict:
    """A render of two steps with a chain of LoRAs in front of the model loader."""
    prompt = prompts.render()
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.5, 0.0")
    prompt["sampler"]["inputs"] |= {"seed": seed, "sigmas": ["sigmas", 0]}
    chain = None
    for index, (name, strength) in enumerate(links):
        inputs = {"lora_name": name, "strength_model": strength}
        if chain:
            inputs["lora"] = chain
        prompt[f"lora{index}"] = node("LTXGraphLoRA", **inputs)
        chain = [f"lora{index}", 0]
    if chain:
        prompt["model"]["inputs"]["lora"] = chain
    return prompt


def last_log(base) -> list[dict]:
    file = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def reads(base) -> list[dict]:
    """What the last render read: the attributes of every load.read."""
    return [e["attrs"] for e in last_log(base) if e["phase"] == "load.read" and e["event"] == "end"]


def assert_only_loras_were_read(base):
    assert reads(base) and all(read.get("what") == "LoRA" for read in reads(base)), reads(base)


def test_every_chain_gives_its_own_video_and_the_model_is_read_once(client, base, frames_of):
    """A5, with another adapter and a chain of two."""
    bare = frames_of(client.run(adapted()))
    videos = {}
    for name, links in {
        "0": [(LORA_FILE, 0.0)],
        "0.5": [(LORA_FILE, 0.5)],
        "1": [(LORA_FILE, 1.0)],
        "other": [("community.safetensors", 1.0)],
        "both": [(LORA_FILE, 1.0), ("community.safetensors", 0.7)],
        "none": [],
    }.items():
        videos[name] = frames_of(client.run(adapted(*links)))
        if name != "0":
            assert_only_loras_were_read(base)
    assert np.array_equal(videos["0"], bare) and np.array_equal(videos["none"], bare)
    different = {video.tobytes() for video in videos.values()}
    assert len(different) == 5


def test_what_a_refused_lora_leaves_behind(client, frames_of):
    """A6: adapter A, a corrupt one, a missing one, A again, none."""
    bare, first = frames_of(client.run(adapted())), frames_of(client.run(adapted((LORA_FILE, 1.0))))
    with pytest.raises(PromptRefused) as refused:
        client.run(adapted(("corrupt.safetensors", 1.0)))
    assert "corrupt.safetensors is truncated" in refused.value.details()
    with pytest.raises(PromptRefused) as refused:
        client.run(adapted(("missing.safetensors", 1.0)))
    assert "missing.safetensors" in refused.value.details()
    assert np.array_equal(frames_of(client.run(adapted((LORA_FILE, 1.0)))), first)
    assert np.array_equal(frames_of(client.run(adapted())), bare)


def test_the_same_lora_three_times(client, frames_of):
    """A7: a new seed, then the first again."""
    videos = [frames_of(client.run(adapted((LORA_FILE, 1.0), seed=seed))) for seed in (7, 8, 7)]
    assert np.array_equal(videos[0], videos[2]) and not np.array_equal(videos[0], videos[1])


def test_a_lora_that_changes_on_disk_is_read_again(client, base, frames_of):
    path = base / "models" / "loras" / "changing.safetensors"
    write_tiny_lora(path, seed=4)
    before = frames_of(client.run(adapted((path.name, 1.0))))
    write_tiny_lora(path, seed=5)
    run = client.run(adapted((path.name, 1.0)))
    assert "lora0" in run.executed_nodes and not np.array_equal(frames_of(run), before)
    assert_only_loras_were_read(base)


def test_evicted_weights_come_back_with_the_lora(client, base, frames_of):
    before = frames_of(client.run(adapted((LORA_FILE, 0.5))))
    client.free()
    assert np.array_equal(frames_of(client.run(adapted((LORA_FILE, 0.5)))), before)
    assert [read.get("what", "weights") for read in reads(base)] == ["weights", "LoRA", "weights"]


def test_two_chains_in_one_workflow_share_the_weights(client, frames_of):
    """Both samplers get what their own loader wants, in whatever order they run."""
    bare, adapted_frames = frames_of(client.run(adapted())), frames_of(client.run(adapted((LORA_FILE, 1.0))))
    prompt = adapted((LORA_FILE, 1.0), seed=7)
    plain = adapted()
    for name in ("model", "sampler", "decode", "save"):
        prompt[f"{name}_plain"] = plain[name]
    prompt["sampler_plain"]["inputs"]["model"] = ["model_plain", 0]
    prompt["decode_plain"]["inputs"] |= {"samples": ["sampler_plain", 0], "report": ["sampler_plain", 1]}
    prompt["save_plain"]["inputs"]["images"] = ["decode_plain", 0]
    run = client.run(prompt)
    assert np.array_equal(frames_of(run), adapted_frames) and np.array_equal(frames_of(run, "save_plain"), bare)


@pytest.mark.parametrize("strength", [1.0, 0.0], ids=["two strengths", "with and without"])
def test_strengths_are_compared_as_two_arms(client, strength):
    """By dragging: a second LoRA node, loader, sampler and decode, and the parity node."""
    prompt = adapted((LORA_FILE, 0.5))
    other = adapted((LORA_FILE, strength)) if strength else adapted()
    prompt["sampler"]["inputs"]["cuda_graph"] = other["sampler"]["inputs"]["cuda_graph"] = "off"
    for name in ("model", "sampler", "decode", "lora0"):
        if name in other:
            prompt[f"{name}_b"] = other[name]
    if strength:
        prompt["model_b"]["inputs"]["lora"] = ["lora0_b", 0]
    prompt["sampler_b"]["inputs"]["model"] = ["model_b", 0]
    prompt["decode_b"]["inputs"] |= {"samples": ["sampler_b", 0], "report": ["sampler_b", 1]}
    prompt["parity"] = node(
        "LTXGraphTimingParity", frames_a=["decode", 0], frames_b=["decode_b", 0], report_a=["decode", 1],
        report_b=["decode_b", 1], tolerance=0.0, on_difference="report",
    )  # fmt: skip
    del prompt["save"]
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    report = json.loads(run.outputs["parity"]["ltxgraph_report"][0])
    file = LORA_FILE.removesuffix(".safetensors")
    names = [f"LoRA {file} 0.5", f"LoRA {file} {strength}"]
    assert [render["name"] for render in report["renders"]] == names
    words = report["verdict"]["words"]
    assert words.startswith(f"different: {names[1]} differs from {names[0]} in frames")
    assert words.endswith(f"settings that differ: LoRA {file} 0.5 and {strength}")


def test_a_lora_of_another_generation_is_noted(client, base, frames_of):
    frames_of(client.run(adapted(("old.safetensors", 1.0))))
    notes = [event["message"] for event in last_log(base) if event["event"] == "note"]
    assert any("old.safetensors was trained for LTX 2.3.0, the model is 2.5.0" in note for note in notes), notes


def test_iclora_parameters_fit_core_nodes(client):
    info = client.object_info()
    outputs = info["LTXGraphLoRA"]["output"]
    assert outputs == ["LTXGRAPH_LORA", "IC_LORA_PARAMETERS"]
    assert info["LTXVAddGuide"]["input"]["optional"]["iclora_parameters"][0] == "IC_LORA_PARAMETERS"


def test_a_strength_reads_nothing_again_under_the_classic_cache(base, comfyui, comfyui_overlay):
    """That cache drops the old loader's output before the new loader runs."""
    with ComfyServer(base, comfyui, overlay=comfyui_overlay, arguments=["--cache-classic"]) as running:
        client = running.client()
        for strength in (0.5, 1.0):
            run = client.run(adapted((LORA_FILE, strength)))
            assert run.outcome == "execution_success", run.error
        assert_only_loras_were_read(base)
