"""LTX Graph Warm Up through a real ComfyUI without CUDA: it passes the model through, says why, and changes no
pixel."""

from __future__ import annotations

import json

import numpy as np
import prompts
import pytest
from prompts import node

WORDS = "nothing recorded: no CUDA"


@pytest.fixture
def warmed() -> dict:
    """A render whose model and report come through the warm-up."""
    prompt = prompts.render()
    given = prompt["sampler"]["inputs"]
    left_out = ("seed", "cuda_graph", "report")
    prompt["warm_up"] = node("LTXGraphWarmUp", **{name: value for name, value in given.items() if name not in left_out})
    given |= {"model": ["warm_up", 0], "report": ["warm_up", 1], "cuda_graph": "on"}
    return prompt


def test_the_render_behind_it_is_the_same_and_stands_in_one_log(client, base, warmed, frames_of):
    plain = prompts.render()
    # `steps` has no effect on the distilled schedule; another value makes both run.
    plain["sampler"]["inputs"]["steps"] = warmed["sampler"]["inputs"]["steps"] = 41
    expected = frames_of(client.run(plain))
    run = client.run(warmed)
    assert np.array_equal(frames_of(run), expected)
    assert run.outputs["warm_up"]["text"] == [WORDS]
    newest = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    events = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    nodes = [event["attrs"]["name"] for event in events if event["phase"] == "segment" and event["event"] == "begin"]
    assert nodes == ["LTXGraphWarmUp", "LTXGraphSampler", "LTXGraphVideoDecode"]
    assert [e["message"] for e in events if e["phase"] == "sample.warmup" and e["event"] == "note"] == [WORDS]


def test_alone_it_is_a_whole_workflow(client, warmed):
    run = client.run({name: warmed[name] for name in ("model", "positive", "latent", "warm_up")})
    assert run.outcome == "execution_success", run.error
    assert run.outputs["warm_up"]["text"] == [WORDS]


def test_it_can_be_told_to_fail(client, warmed):
    warmed["warm_up"]["inputs"]["on_capture_failure"] = "error"
    run = client.run({name: warmed[name] for name in ("model", "positive", "latent", "warm_up")})
    assert run.outcome == "execution_error" and WORDS in run.error


def test_it_runs_again_once_the_weights_have_left(client, warmed):
    def executed(seed: int) -> list[str]:
        warmed["sampler"]["inputs"]["seed"] = seed
        run = client.run(warmed)
        assert run.outcome == "execution_success", run.error
        return run.executed_nodes

    executed(100)
    assert "warm_up" not in executed(101) and "warm_up" not in executed(102)
    client.read("/free", {"unload_models": True})  # the cached results stay
    again = [executed(seed) for seed in (103, 104)]  # ComfyUI unloads before the first, or right behind it
    assert any("warm_up" in nodes for nodes in again) and not any("model" in nodes for nodes in again)
    assert "warm_up" not in executed(105)


def test_a_vae_that_leaves_does_not_bring_back_renders_that_are_done(client, warmed):
    """It runs again after a loss, and ComfyUI then runs all that is behind it again."""
    warmed["sampler"]["inputs"]["seed"] = 200
    assert client.run(warmed).outcome == "execution_success"
    assert not {"warm_up", "sampler"} & set(client.run(warmed).executed_nodes)
    evicted = client.run({**warmed, "evict": node("LTXTestEvict", video_vae=["video_vae", 0])})
    assert evicted.outputs["evict"]["text"] == ["VideoVAE"], evicted.error
    assert not {"warm_up", "sampler"} & set(client.run(warmed).executed_nodes)
