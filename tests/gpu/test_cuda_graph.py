"""The graph engine on a plain MLP: keys, replays, aliasing, eviction, failures. Run under both allocators:

    python3 -m pytest tests/gpu
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 -m pytest tests/gpu
"""
import contextlib
import gc
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ltx_runtime import cuda_graph
from ltx_runtime.cuda_graph import GraphCache, GraphKey
from ltx_runtime.errors import CaptureError


@dataclass(frozen=True)
class Constants:
    bias: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Inputs:
    x: torch.Tensor


class Layers(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        self.weights = [
            torch.randn(256, 256, device=device, dtype=torch.bfloat16, generator=generator) / 16 for _ in range(6)
        ]

    def forward(self, constants: Constants, inputs: Inputs) -> torch.Tensor:
        x = inputs.x
        for weight in self.weights:
            x = torch.nn.functional.gelu(x @ weight) * constants.scale + constants.bias
        return x


def phase(name):
    return contextlib.nullcontext()


def inputs_of(shape, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    return Inputs(torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator))


def constants_of(value, device):
    return Constants(torch.full((256,), value, device=device, dtype=torch.bfloat16), 1.5)


def key_of(constants, inputs, generation=1):
    return GraphKey.of((constants, inputs), weight_generation=generation)


def run(cache, fn, constants, inputs):
    """Replay or capture, as the runner does. Returns a clone of the outputs."""
    key = key_of(constants, inputs)
    step = cache.find(key)
    if step is None:
        step, outputs = cache.capture(key, fn, constants, inputs, phase)
    else:
        step.load(constants, inputs)
        outputs = step.replay()
    return outputs.clone()


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture
def cache(device):
    cache = GraphCache(device, max_graphs=2)
    yield cache
    cache.close()


def test_replays_with_changed_inputs_and_constants_equal_eager_bit_for_bit(device, cache):
    fn = Layers(device)
    for constant in (0.25, -0.5):
        constants = constants_of(constant, device)
        for seed in range(4):
            inputs = inputs_of((64, 256), seed, device)
            assert torch.equal(run(cache, fn, constants, inputs), fn(constants, inputs))
    assert (cache.counters.captures, cache.counters.hits, cache.counters.misses) == (1, 7, 1)


def test_a_new_shape_or_static_value_is_a_miss_that_names_the_field_and_the_old_one_is_still_a_hit(device, cache):
    fn = Layers(device)
    constants = constants_of(0.25, device)
    small, large = inputs_of((64, 256), 0, device), inputs_of((96, 256), 1, device)
    for inputs in (small, large, small):
        assert torch.equal(run(cache, fn, constants, inputs), fn(constants, inputs))
    assert (cache.counters.captures, cache.counters.hits) == (2, 1)
    assert any(difference.startswith("1.x: [64, 256]") for difference in cache.counters.last_miss)
    other = Constants(constants.bias, 2.0)
    assert torch.equal(run(cache, fn, other, small), fn(other, small))
    assert cache.counters.last_miss == ["0.scale: 1.5 -> 2.0"]
    assert cache.counters.evictions == 1 and len(cache) == 2


def test_weight_generation_is_part_of_the_key(device):
    constants, inputs = constants_of(0.25, device), inputs_of((64, 256), 0, device)
    before, after = key_of(constants, inputs, 1), key_of(constants, inputs, 2)
    assert after != before and after.differences(before) == ["weight generation: 1 -> 2"]


def test_outputs_are_the_recordings_own_buffer(device, cache):
    """Documents the alias: what `replay` returns changes with the next replay."""
    fn = Layers(device)
    constants, inputs = constants_of(0.25, device), inputs_of((64, 256), 0, device)
    step, first = cache.capture(key_of(constants, inputs), fn, constants, inputs, phase)
    held = first.clone()
    step.load(constants, inputs_of((64, 256), 1, device))
    assert step.replay() is first and not torch.equal(first, held)


def test_replay_survives_garbage_collection_and_poisoned_memory(device, cache):
    fn = Layers(device)
    constants, inputs = constants_of(0.25, device), inputs_of((64, 256), 0, device)
    expected = fn(constants, inputs)
    run(cache, fn, constants, inputs)
    gc.collect()
    torch.cuda.empty_cache()
    poison = [torch.full((1 << 22,), float("nan"), device=device) for _ in range(16)]
    assert torch.equal(run(cache, fn, constants, inputs), expected)
    del poison


def test_memory_returns_to_the_baseline_after_close(device):
    fn = Layers(device)
    constants, inputs = constants_of(0.25, device), inputs_of((1 << 16, 256), 0, device)
    cache = GraphCache(device)
    fn(constants, inputs)
    run(cache, fn, constants, inputs)
    cache.close()
    cuda_graph.return_graph_memory(device)
    baseline = cuda_graph.held_bytes(device)
    for _ in range(3):
        run(cache, fn, constants, inputs)
        assert cache.device_bytes > 2 * inputs.x.nbytes
        cache.close()
        assert cuda_graph.held_bytes(device) <= baseline


def failing(kind):
    def fn(constants, inputs):
        x = inputs.x * constants.scale
        if torch.cuda.is_current_stream_capturing() or kind == "sync":
            if kind == "python":
                raise ValueError("injected")
            if kind == "sync":
                x = x * x.sum().item()
            if kind == "memory":
                x = torch.empty(1 << 50, device=x.device)
            if kind == "capture_sync":
                x = x * x.sum().item()
        return x * 2

    return fn


@pytest.mark.parametrize("kind", ["python", "sync", "memory", "capture_sync"])
def test_a_failed_capture_says_why_and_leaves_the_process_healthy(device, cache, kind):
    constants, inputs = constants_of(0.25, device), inputs_of((64, 256), 0, device)
    for _ in range(2):
        with pytest.raises(CaptureError, match={"python": "injected", "memory": "memory"}.get(kind, "")) as caught:
            cache.capture(key_of(constants, inputs), failing(kind), constants, inputs, phase)
        if kind.endswith("sync"):
            assert "test_cuda_graph.py" in str(caught.value), "a host sync is refused with its place"
        del caught
    gc.collect()
    assert cache.counters.fallbacks == 2
    assert "twice" in cache.refusal(key_of(constants, inputs))
    fn = Layers(device)
    other = inputs_of((80, 256), 0, device)
    assert torch.equal(run(cache, fn, constants, other), fn(constants, other))
    assert torch.randn(8, device=device).isfinite().all()


def test_a_recording_is_made_and_dropped_without_a_word():
    """cudaMallocAsync warns of every tensor made in a capture that is freed outside of it."""
    script = """
import torch
from ltx_runtime.cuda_graph import GraphCache, GraphKey
from test_cuda_graph import Layers, constants_of, inputs_of, key_of, phase
device = torch.device("cuda", 0)
with torch.inference_mode():
    layers, constants, cache = Layers(device), constants_of(0.25, device), GraphCache(device, max_graphs=2)
    fn = lambda constants, inputs: (layers(constants, inputs), inputs.x * 2, inputs.x)
    for rows in (64, 96, 128, 64):
        inputs = inputs_of((rows, 256), rows, device)
        step, outputs = cache.capture(key_of(constants, inputs), fn, constants, inputs, phase)
        for seed in range(3):
            inputs = inputs_of((rows, 256), seed, device)
            step.load(constants, inputs)
            assert all(torch.equal(a, b) for a, b in zip(step.replay(), fn(constants, inputs)))
    cache.close()
print(torch.cuda.get_allocator_backend(), cache.counters.evictions)
"""
    here = Path(__file__).parent
    for backend in ("native", "cudaMallocAsync"):
        environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}"}
        environment.pop("PYTORCH_ALLOC_CONF", None)
        environment["PYTORCH_CUDA_ALLOC_CONF"] = f"backend:{backend}"
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, check=False, capture_output=True, text=True, timeout=90
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.split() == [backend, "2"]
        assert "captured allocation" not in done.stderr and "debug mode" not in done.stderr, done.stderr[:500]
