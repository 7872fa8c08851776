"""What ComfyUI's memory management knows of our models, also after a load that failed."""

from __future__ import annotations

import json

import prompts
from prompts import node

from ltx_runtime.published import AUDIO_VAE_FILE


def resident(client, call: int) -> list:
    """[class, known to ComfyUI] of every model that holds weights. call: another number every time."""
    run = client.run({"resident": node("LTXTestResident", call=call)})
    return json.loads(run.outputs["resident"]["text"][0])


def test_a_load_that_fails_leaves_the_other_models_evictable(client):
    client.free()
    assert resident(client, 1) == []
    sampled = {name: part for name, part in prompts.render().items() if name not in ("video_vae", "decode", "save")}
    sampled["show"] = node("PreviewAny", source=["sampler", 0])
    assert client.run(sampled).outcome == "execution_success"
    assert resident(client, 2) == [["TransformerModel", True]]
    prompt = prompts.parity_run()
    prompt["touch"] = node("LTXTestTouchFile", video_vae=["video_vae", 0])
    prompt["parity"]["inputs"] |= {"video_vae": ["touch", 0], "replays": 1, "seeds": 1}
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "changed" in run.error
    assert resident(client, 3) == [["TransformerModel", True]]
    client.free()
    assert resident(client, 4) == []


def test_comfyui_is_told_what_the_weights_hold_once_they_are_read(client):
    """Packed for the vocoder's kernels they hold less than their load takes."""
    vae = node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE)
    run = client.run({"vae": vae, "sizes": node("LTXTestSizes", audio_vae=["vae", 0])})
    announced, read, packed, evicted = json.loads(run.outputs["sizes"]["text"][0])
    assert announced == evicted == [announced[0], 0]
    assert read == [announced[0]] * 2
    assert packed[0] == packed[1] < read[0]


def test_contexts_of_prompts_count_and_make_way(client):
    run = client.run({"model": prompts.render()["model"], "sizes": node("LTXTestContexts", model=["model", 0])})
    (alone, kept, after), freed = json.loads(run.outputs["sizes"]["text"][0])
    assert kept - alone == freed > 0 and after == alone


def test_a_load_can_be_cancelled(client, base):
    client.free()
    assert resident(client, 5) == []
    prompt = prompts.render()
    prompt["cancel"] = node("LTXTestCancelTheLoad", model=["model", 0])
    prompt["sampler"]["inputs"]["model"] = ["cancel", 0]
    assert client.run(prompt).outcome == "execution_interrupted"
    newest = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    events = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    (read,) = [event for event in events if event["event"] == "end" and event["phase"] == "load.read"]
    assert read["attrs"]["error"] == "InterruptProcessingException"
    assert resident(client, 6) == []
    assert client.run(prompts.render()).outcome == "execution_success"
