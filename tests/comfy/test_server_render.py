"""Renders through a real ComfyUI: outputs, caching, native neighbours on the sockets, eviction, interruption."""

from __future__ import annotations

import io
import json

import numpy as np
import prompts
import pytest
from PIL import Image
from prompts import FRAMES, HEIGHT, WIDTH, node

VERDICT_WITHOUT_CUDA = "not tested: no CUDA; eager repeated: equal"


@pytest.fixture(scope="module")
def first_run(server):
    return server.client().run(prompts.render())


@pytest.fixture(scope="module")
def frames(first_run, frames_of):
    return frames_of(first_run)


def with_sampler(**inputs) -> dict:
    prompt = prompts.render()
    prompt["sampler"]["inputs"].update(inputs)
    return prompt


def phase_logs(base) -> list[list[dict]]:
    """Events of every render so far, oldest first."""
    files = sorted((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]


def test_frames(frames):
    assert frames.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert not np.array_equal(frames[0], frames[-1])
    assert ((frames == 0) | (frames == 255)).mean() < 0.05


def test_progress_reaches_every_step(first_run):
    states = [event["nodes"]["sampler"] for event in first_run.data("progress_state") if "sampler" in event["nodes"]]
    assert states[-1]["value"] == states[-1]["max"] == 8


def test_one_render_writes_one_log(first_run, base, client):
    before = phase_logs(base)
    client.run(with_sampler(seed=100))
    logs = phase_logs(base)
    assert len(logs) == len(before) + 1
    events = logs[-1]
    assert len({event["render"] for event in events}) == 1
    ended = [event["phase"] for event in events if event["event"] == "end"]
    assert ended.count("sample.step") == 8
    assert {"prepare.connectors", "prepare.constants", "decode.video.chunk", "transfer.to_host"} <= set(ended)
    assert "load.read" not in ended, "the weights stayed on the device"
    trace = next((base / "output" / "ltxgraph").glob(f"{events[0]['render']}*.trace.json"))
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_the_same_prompt_again_runs_nothing(client, frames, frames_of):
    # Twice: on a machine with little memory ComfyUI keeps only the last prompt's outputs.
    client.run(prompts.render())
    again = client.run(prompts.render())
    assert again.executed_nodes == []
    assert np.array_equal(frames_of(again), frames)


def test_one_toggle_runs_only_what_depends_on_it(client, frames, frames_of):
    toggled = client.run(with_sampler(cuda_graph="off"))
    assert set(toggled.executed_nodes) == {"sampler", "decode", "save"}
    assert np.array_equal(frames_of(toggled), frames)


def test_another_seed_gives_another_video(client, frames, frames_of):
    assert not np.array_equal(frames_of(client.run(with_sampler(seed=8))), frames)


def test_decode_in_chunks_gives_the_same_frames(client, frames, frames_of):
    prompt = prompts.render()
    prompt["decode"]["inputs"]["temporal_size"] = 8
    assert np.array_equal(frames_of(client.run(prompt)), frames)


def test_free_drops_the_weights_and_the_next_prompt_gives_equal_frames(client, base, frames, frames_of):
    client.free()
    again = client.run(prompts.render())
    assert "sampler" in again.executed_nodes
    assert np.array_equal(frames_of(again), frames)
    loads = [event for event in phase_logs(base)[-1] if event["phase"] == "load.read" and event["event"] == "end"]
    assert len(loads) == 2, "transformer and video VAE were read again"


def test_interrupt_in_mid_render(client, base, frames, frames_of):
    steps = 1000
    sent = []

    def interrupt_once(event):
        state = event["data"].get("nodes", {}).get("sampler", {}) if event["type"] == "progress_state" else {}
        if not sent and state.get("value", 0) >= 2:
            sent.append(state["value"])
            client.interrupt()

    run = client.run(with_sampler(schedule="dev", steps=steps, seed=9), on_event=interrupt_once)
    assert run.outcome == "execution_interrupted"
    done = sum(event["phase"] == "sample.step" and event["event"] == "end" for event in phase_logs(base)[-1])
    assert sent[0] <= done < steps / 2
    assert np.array_equal(frames_of(client.run(with_sampler(seed=7, steps=31))), frames), (
        "steps is unused by the distilled schedule"
    )


def test_a_raising_node_downstream_leaves_the_model_usable(client, frames, frames_of):
    prompt = with_sampler(seed=10)
    prompt["raise"] = node("LTXTestRaise", images=["decode", 0])
    del prompt["save"]
    failed = client.run(prompt)
    assert failed.outcome == "execution_error" and failed.error == "this node always fails"
    prompt["save"] = prompts.render()["save"]
    del prompt["raise"]
    repaired = client.run(prompt)
    assert repaired.executed_nodes == ["save"], "what had been rendered before the failure is kept"
    assert not np.array_equal(frames_of(repaired), frames)


def test_previews(client, base, frames, frames_of):
    """Shown when the user has them on; marked in the log, since they read the device back; no effect on the video."""
    run = client.run(with_sampler(steps=32), extra_data={"preview_method": "latent2rgb"})
    assert np.array_equal(frames_of(run), frames)
    jpegs = [message[message.index(b"\xff\xd8\xff") :] for message in run.previews]
    width, height = Image.open(io.BytesIO(jpegs[-1])).size
    assert width / height == pytest.approx(WIDTH / HEIGHT, rel=0.01)
    events = phase_logs(base)[-1]
    shown = [
        e
        for e in events
        if e["phase"] == "transfer.to_host" and e["attrs"].get("what") == "preview" and e["event"] == "end"
    ]
    assert len(shown) == 8


def test_batch(client, frames_of):
    prompt = with_sampler(seed=7)
    prompt["latent"]["inputs"]["batch_size"] = 2
    both = frames_of(client.run(prompt))
    assert both.shape == (2 * FRAMES, HEIGHT, WIDTH, 3)
    assert not np.array_equal(both[:FRAMES], both[FRAMES:])


def test_plain_video_latent(client, frames, frames_of):
    prompt = prompts.render()
    prompt["latent"]["inputs"]["with_audio"] = False
    plain = frames_of(client.run(prompt))
    assert plain.shape == frames.shape and not np.array_equal(plain, frames)


def test_plain_audio_latent(client):
    prompt = prompts.render()
    prompt["latent"] = node("LTXTestLatent", kind="audio")
    prompt["save"] = node("SaveLatent", samples=["sampler", 0], filename_prefix="sound")
    del prompt["decode"]
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    assert run.outputs["save"]["latents"]


def test_native_nodes_on_the_sockets_give_the_same_video(client, frames, frames_of):
    """Core's noise, sigmas, sampler and conditioning in place of our widgets; core's separator behind our sampler."""
    sigmas = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
    prompt = with_sampler(
        seed=0,
        noise=["noise", 0],
        sigmas=["sigmas", 0],
        sampler=["core_sampler", 0],
        positive=["rate", 0],
        negative=["rate", 1],
    )
    prompt["noise"] = node("RandomNoise", noise_seed=7)
    prompt["sigmas"] = node("ManualSigmas", sigmas=sigmas)
    prompt["core_sampler"] = node("KSamplerSelect", sampler_name="euler_ancestral")
    # 25 frames a second is what native ComfyUI assumes of a conditioning that names none.
    prompt["rate"] = node("LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=25.0)
    prompt["separate"] = node("LTXVSeparateAVLatent", av_latent=["sampler", 0])
    prompt["decode"]["inputs"]["samples"] = ["separate", 0]
    assert np.array_equal(frames_of(client.run(prompt)), frames)


def test_native_empty_latent(client, frames_of):
    ours, native = prompts.render(), prompts.render()
    ours["latent"]["inputs"]["with_audio"] = False
    native["latent"] = node("EmptyLTXVLatentVideo", width=WIDTH, height=HEIGHT, length=FRAMES, batch_size=1)
    assert np.array_equal(frames_of(client.run(ours)), frames_of(client.run(native)))


def test_frame_rate_enters_the_picture(client, frames, frames_of):
    prompt = with_sampler(positive=["rate", 0])
    prompt["rate"] = node("LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=48.0)
    assert not np.array_equal(frames_of(client.run(prompt)), frames)


def test_conditioning_survives_its_file(client, base, frames, frames_of):
    prompt = {name: prompts.render()[name] for name in ("positive",)}
    prompt["keep"] = node("LTXGraphSaveConditioning", conditioning=["positive", 0], filename_prefix="kept")
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    file = base / "output" / "ltxgraph" / "conditioning" / "kept_00001.safetensors"
    assert file.is_file() and file.name in run.outputs["keep"]["text"][0]
    reloaded = prompts.render()
    reloaded["positive"]["inputs"]["conditioning_name"] = f"{file.name} [output]"
    assert np.array_equal(frames_of(client.run(reloaded)), frames)


def test_timing_parity_compares_two_arms(client):
    prompt = with_sampler(seed=7, cuda_graph="off")
    prompt["sampler_b"] = with_sampler(seed=7, cuda_graph="on")["sampler"]
    prompt["decode_b"] = node(
        "LTXGraphVideoDecode",
        video_vae=["video_vae", 0],
        samples=["sampler_b", 0],
        temporal_size=0,
        report=["sampler_b", 1],
    )
    prompt["parity"] = node(
        "LTXGraphTimingParity",
        frames_a=["decode", 0],
        frames_b=["decode_b", 0],
        report_a=["decode", 1],
        report_b=["decode_b", 1],
        tolerance=0.0,
        on_difference="fail",
    )
    assert_not_tested(client.run(prompt))


def test_timing_parity_sees_one_different_seed(client):
    prompt = with_sampler(seed=7, cuda_graph="off")
    prompt["sampler_b"] = with_sampler(seed=11, cuda_graph="off")["sampler"]
    prompt["decode_b"] = node(
        "LTXGraphVideoDecode", video_vae=["video_vae", 0], samples=["sampler_b", 0], temporal_size=0
    )
    prompt["parity"] = node(
        "LTXGraphTimingParity", frames_a=["decode", 0], frames_b=["decode_b", 0], tolerance=0.0, on_difference="report"
    )
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    report = json.loads(run.outputs["parity"]["ltxgraph_report"][0])
    assert report["verdict"]["status"] == "different"
    assert run.outputs["parity"]["text"][0].startswith("parity: different")
    prompt["parity"]["inputs"]["on_difference"] = "fail"
    failed = client.run(prompt)
    assert failed.outcome == "execution_error" and "different" in failed.error


def test_parity_run_judges_both_arms_every_time(client):
    assert_not_tested(client.run(prompts.parity_run()))
    assert client.run(prompts.parity_run()).executed_nodes == ["parity"], (
        "it measures, so it is never served from the cache"
    )


def assert_not_tested(run):
    assert run.outcome == "execution_success", run.error
    shown = run.outputs["parity"]
    assert shown["text"][0].splitlines()[0] == f"parity: {VERDICT_WITHOUT_CUDA}"
    verdict = json.loads(shown["ltxgraph_report"][0])["verdict"]
    assert (verdict["status"], verdict["words"], verdict["bit_exact"]) == ("not tested", VERDICT_WITHOUT_CUDA, False)
    assert len(shown["images"]) >= 2, "difference and timeline pictures"
