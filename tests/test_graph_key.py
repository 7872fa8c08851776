"""What identifies a recording: every tensor's layout, every plain value a step branches on, the kernel switches."""
from dataclasses import dataclass, replace

import pytest
import torch

from ltx_runtime.cuda_graph import GraphKey, unavailable_reason


@dataclass(frozen=True)
class Stream:
    x: torch.Tensor
    noise: torch.Tensor | None
    enabled: bool = True


@dataclass(frozen=True)
class Inputs:
    stream: Stream
    sampler: str
    modes: tuple = (("keep", "skip"),)


def key(inputs, generation=1):
    return GraphKey.of(inputs, weight_generation=generation)


@pytest.fixture
def inputs():
    return Inputs(Stream(torch.zeros(2, 3), torch.zeros(2, 3)), "euler")


def test_equal_layouts_with_other_contents_share_a_key(inputs):
    other = Inputs(Stream(torch.ones(2, 3), torch.ones(2, 3)), "euler")
    assert key(inputs) == key(other) and hash(key(inputs)) == hash(key(other))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda i: replace(i, stream=replace(i.stream, x=torch.zeros(2, 4))),
            "stream.x: [2, 3] float32 -> [2, 4] float32",
        ),
        (
            lambda i: replace(i, stream=replace(i.stream, x=torch.zeros(2, 3).double())),
            "stream.x: [2, 3] float32 -> [2, 3] float64",
        ),
        (lambda i: replace(i, stream=replace(i.stream, x=torch.zeros(3, 2).T)), "stream.x.stride: (3, 1) -> (1, 2)"),
        (lambda i: replace(i, stream=replace(i.stream, noise=None)), "stream.noise: [2, 3] float32 -> None"),
        (lambda i: replace(i, stream=replace(i.stream, enabled=False)), "stream.enabled: True -> False"),
        (lambda i: replace(i, sampler="euler_ancestral"), "sampler: euler -> euler_ancestral"),
        (lambda i: replace(i, modes=(("keep", "mix"),)), "modes.0.1: skip -> mix"),
    ],
)
def test_every_change_that_a_recording_would_bake_in_is_another_key_and_is_named(inputs, change, words):
    changed = change(inputs)
    assert key(changed) != key(inputs)
    assert words in key(changed).differences(key(inputs))


def test_weights_and_kernel_switches_are_part_of_the_key(inputs):
    before = key(inputs)
    assert key(inputs, 2).differences(before) == ["weight generation: 1 -> 2"]
    assert key(inputs, 2).shape == before.shape
    previous = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = not previous
    try:
        assert key(inputs).differences(before) == [f"kernels.cudnn_deterministic: {previous} -> {not previous}"]
    finally:
        torch.backends.cudnn.deterministic = previous


def test_an_object_that_would_be_baked_in_unseen_is_refused_by_name(inputs):
    with pytest.raises(TypeError, match="sampler is a list"):
        key(replace(inputs, sampler=["euler"]))


def test_a_long_list_in_the_statics_costs_little(inputs):
    import time

    started = time.perf_counter()
    key(replace(inputs, modes=tuple("keep" for _ in range(2_000))))
    assert time.perf_counter() - started < 0.1


def test_the_cpu_answers_with_a_reason():
    assert unavailable_reason(torch.device("cpu")) in ("no CUDA", "the model is on cpu, not on CUDA")
