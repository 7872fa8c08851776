"""Every value of every choice that our nodes offer: it works, or it is refused with words of ours (cases B9 and C1)."""

from __future__ import annotations

import numpy as np
import prompts
import pytest
from prompts import node

from ltx_runtime import errors

# Choices among files have tests of their own.
FILES = ("unet_name", "vae_name", "conditioning_name", "model_name", "lora_name", "image", "audio")
OUR_ERRORS = {cls.__name__ for cls in vars(errors).values() if isinstance(cls, type)} | {"HostError", "RendersDiffer"}


def whole() -> dict:
    """A prompt in which every node of ours that has a choice stands, as small as it gets."""
    prompt = prompts.render()
    prompt["latent"]["inputs"].update(width=64, height=64)
    given = prompt["sampler"]["inputs"]
    given["steps"] = 2  # of the dev schedule
    without = ("seed", "cuda_graph", "report")
    prompt["warm_up"] = node("LTXGraphWarmUp", **{name: v for name, v in given.items() if name not in without})
    parity = prompts.parity_run()["parity"]
    parity["inputs"].update(steps=2, replays=1, seeds=1)
    prompt["parity"] = parity
    compared = {"frames_a": ["decode", 0], "frames_b": ["decode", 0], "tolerance": 0.0, "on_difference": "fail"}
    prompt["compare"] = node("LTXGraphTimingParity", **compared)
    return prompt


def alone(prompt: dict, name: str) -> dict:
    """The nodes that one node needs, and it; with a node that shows its result, where it does not itself."""
    wanted, found = [name], {}
    while wanted:
        at = wanted.pop()
        found[at] = prompt[at]
        wanted += [v[0] for v in prompt[at]["inputs"].values() if isinstance(v, list)]
    shows = {"latent": "sampler", "sampler": "save", "decode": "save"}
    return alone(prompt, shows[name]) if name in shows else found


def choices(info: dict) -> dict[str, list]:
    """Input -> values, of the choices and switches of a node as ComfyUI lists it."""
    found = {}
    for group in ("required", "optional"):
        for name, (kind, *options) in info["input"].get(group, {}).items():
            if name in FILES:
                continue
            if isinstance(kind, list):
                found[name] = kind
            elif kind == "COMBO":
                found[name] = options[0]["options"]
            elif kind == "BOOLEAN":
                found[name] = [True, False]
    return found


@pytest.fixture(scope="module")
def listed(server) -> dict[str, dict]:
    return server.client().object_info()


def check(client, prompt: dict, what: str) -> None:
    run = client.run(prompt)
    if run.outcome == "execution_success":
        return
    failed = run.data("execution_error")[0]
    kind = failed["exception_type"].split(".")[-1]
    assert kind in OUR_ERRORS and len(run.error) > 20, f"{what}: {failed['exception_type']}: {run.error}"


@pytest.mark.parametrize("name", ["latent", "sampler", "warm_up", "decode", "parity", "compare"])
def test_every_value_of_every_choice(client, listed, name):
    offered = choices(listed[whole()[name]["class_type"]])
    if name == "parity":  # it hands the sampler's own choices to the same function, and renders four times for each
        offered = {key: offered[key] for key in set(offered) - set(choices(listed["LTXGraphSampler"]))}
        assert set(offered) == {"on_difference", "measure_residency"}
    for input_name, values in offered.items():
        for value in values:
            prompt = whole()
            if prompt[name]["inputs"].get(input_name) == value:
                continue  # as in the prompt; the other choices run with it
            prompt[name]["inputs"][input_name] = value
            check(client, alone(prompt, name), f"{name}.{input_name}={value!r}")


def test_every_graph_toggle_with_every_answer_to_a_failure(client, listed):
    offered = choices(listed["LTXGraphSampler"])
    assert {"cuda_graph", "on_capture_failure", "noise_convention", "compatibility"} <= set(offered)
    for cuda_graph in offered["cuda_graph"]:
        for answer in offered["on_capture_failure"]:
            prompt = whole()
            prompt["sampler"]["inputs"].update(cuda_graph=cuda_graph, on_capture_failure=answer)
            check(client, alone(prompt, "sampler"), f"cuda_graph={cuda_graph}, on_capture_failure={answer}")


def test_junk_in_a_conditioning_is_refused_by_name_and_under_a_key_without_effect_changes_nothing(client, frames_of):
    plain = prompts.render()
    frames = frames_of(client.run(plain))
    prompt = prompts.render()
    prompt["junk"] = node("LTXTestConditioningJunk", conditioning=["positive", 0], key="pooled_output")
    prompt["sampler"]["inputs"]["positive"] = ["junk", 0]
    assert np.array_equal(frames_of(client.run(prompt)), frames)
    prompt["junk"]["inputs"]["key"] = "hooks_of_somebody"
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "hooks_of_somebody" in run.error and len(run.error) < 500
