"""The parity nodes through a real ComfyUI: residency, a second prompt, arms named by what was asked for."""

from __future__ import annotations

import json
import shutil

import prompts
import pytest
from prompts import node

ON_CPU = "resident: not measured, the model is on cpu"


def parity(**inputs) -> dict:
    """A parity run as small as it gets."""
    prompt = prompts.parity_run()
    prompt["latent"]["inputs"].update(width=64, height=64)
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.5, 0.0")
    prompt["parity"]["inputs"].update({"replays": 1, "seeds": 2, "sigmas": ["sigmas", 0], **inputs})
    return prompt


def shown(run) -> dict:
    assert run.outcome == "execution_success", run.error
    return run.outputs["parity"]


def test_the_second_line_says_whether_the_loop_is_resident(client):
    output = shown(client.run(parity(measure_residency=True)))
    assert output["text"][0].splitlines()[1] == ON_CPU
    report = json.loads(output["ltxgraph_report"][0])
    assert report["residency"] == {"arm": None, "resident": None, "words": ON_CPU}
    residency = report["renders"][0]["residency"]
    assert residency["words"] == ON_CPU and "decode.video.chunk" in residency["gpu_busy"]


def test_the_report_is_one_json_text_and_counts_as_no_file(client):
    run = client.run(parity())
    report = json.loads(shown(run)["ltxgraph_report"][0])
    assert report["schema"] == "ltxgraph.report/1"
    assert client.get(f"/api/jobs/{run.prompt_id}")["outputs_count"] == len(shown(run)["images"])


def test_residency_is_measured_when_asked_for_only(client):
    output = shown(client.run(parity()))
    assert output["text"][0].splitlines()[1].startswith("resident: not measured; LTX Graph Parity Run measures it")


def test_what_was_compared_is_counted(client):
    output = shown(client.run(parity()))
    tally = "2 x latent, 2 x audio latent, 2 x unclamped frames, 2 x frames"
    assert f"compared: {tally}; all equal bit for bit" in output["text"][0]


def test_a_second_prompt_takes_every_other_seed(client):
    prompt = parity(positive_b=["second", 0])
    prompt["second"] = node("LTXGraphLoadConditioning", conditioning_name="tiny-conditioning-negative.safetensors")
    numbers = json.loads(shown(client.run(prompt))["ltxgraph_report"][0])["verdict"]["numbers"]
    assert list(dict.fromkeys(c["case"] for c in numbers["comparisons"])) == ["seed 7", "seed 8, second prompt"]


def test_a_second_prompt_of_another_frame_rate_is_refused(client):
    prompt = parity(positive_b=["rate", 0])
    prompt["rate"] = node("LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=30.0)
    run = client.run(prompt)
    assert run.outcome == "execution_error"
    assert "positive_b" in run.error and "30" in run.error and "25" in run.error


@pytest.mark.parametrize(
    ("change", "names", "asked"),
    [
        ({"seed": 8}, ("seed 7", "seed 8"), "seed 7 and 8"),
        ({"sampler_name": "euler"}, ("sampler euler_ancestral", "sampler euler"), "sampler euler_ancestral and euler"),
        (
            {"seed": 8, "compatibility": "comfyui"},
            ("eager A", "eager B"),
            "seed 7 and 8, compatibility reference and comfyui",
        ),
    ],
    ids=["seed", "setting", "two"],
)
def test_two_renders_are_named_by_what_differs(client, change, names, asked):
    prompt = prompts.render()
    prompt["latent"]["inputs"].update(width=64, height=64)
    prompt["sampler"]["inputs"]["cuda_graph"] = "off"
    prompt["sampler_b"] = node("LTXGraphSampler", **prompt["sampler"]["inputs"] | change)
    prompt["decode_b"] = node("LTXGraphVideoDecode", **prompt["decode"]["inputs"])
    prompt["decode_b"]["inputs"].update(samples=["sampler_b", 0], report=["sampler_b", 1])
    prompt["parity"] = node(
        "LTXGraphTimingParity", frames_a=["decode", 0], frames_b=["decode_b", 0], report_a=["decode", 1],
        report_b=["decode_b", 1], tolerance=0.0, on_difference="report",
    )  # fmt: skip
    del prompt["save"]
    report = json.loads(shown(client.run(prompt))["ltxgraph_report"][0])
    assert [render["name"] for render in report["renders"]] == list(names)
    words = report["verdict"]["words"]
    assert words.startswith(f"different: {names[1]} differs from {names[0]} in frames")
    assert words.endswith(f"; settings that differ: {asked}")


def judging(**junk) -> dict:
    """A Timing Parity alone. junk: kinds of LTXTestJunk, by input."""
    kinds = {"frames_a": "a clip", "frames_b": "a clip", **junk}
    prompt = {name: node("LTXTestJunk", kind=kind) for name, kind in kinds.items()}
    inputs = {name: [name, 0] for name in kinds}
    prompt["parity"] = node("LTXGraphTimingParity", **inputs, tolerance=0.0, on_difference="report")
    return prompt


def test_a_picture_that_can_not_be_written_does_not_cost_the_verdict(client, server, base):
    temp = base / "temp"
    shutil.rmtree(temp)
    temp.write_text("no folder", encoding="utf-8")  # as a full disk: every write fails
    try:
        output = shown(client.run(parity()))
    finally:
        temp.unlink()
        temp.mkdir()
    report = json.loads(output["ltxgraph_report"][0])
    assert report["verdict"]["status"] == "not tested" and report["verdict"]["words"].endswith("eager repeated: equal")
    for name, note in zip(("difference", "timeline"), report["notes"], strict=True):
        assert note.startswith(f"the {name} picture failed, the verdict stands: ") and str(temp) in note
        assert f"note: {note}\n" in output["text"][0]
        assert f"the {name} picture failed\nTraceback" in server.log()
    assert not output.get("images")


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("frames_a", "one frame", "frames_a: frames of shape (8, 8, 3), expected (frames, height, width, channels)"),
        ("frames_b", "flow", "frames_b: frames of shape (2, 8, 8, 2)"),
        ("frames_b", "bytes", "frames_b: these frames are torch.uint8, expected float in [0, 1]"),
        ("frames_a", "sound", "frames_a: a dict came. Connect the frames of LTX Graph Video Decode"),
        ("audio_b", "no waveform", "audio_b: this AUDIO has no waveform"),
        ("audio_b", "no channels", "audio_b: a waveform of shape (2, 480), expected (batch, channels, samples)"),
        ("audio_a", "integers", "audio_a: a waveform of torch.int16, expected float in [-1, 1]"),
        ("audio_a", "a clip", "audio_a: this AUDIO has no waveform"),
    ],
)
def test_what_is_no_clip_and_no_sound_is_refused_by_name(client, name, kind, words):
    sound = {"audio_a": "sound", "audio_b": "sound"} if name.startswith("audio") else {}
    run = client.run(judging(**{**sound, name: kind}))
    assert run.outcome == "execution_error" and run.error.startswith(words), run.error


def test_frames_that_did_not_come_are_refused_by_name(client):
    prompt = judging()
    prompt["frames_b"] = node("LTXTestNothing")
    run = client.run(prompt)
    assert run.outcome == "execution_error" and run.error.startswith("frames_b: nothing came."), run.error
