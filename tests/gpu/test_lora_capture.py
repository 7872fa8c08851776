"""LoRA with capture on (cases A5 to A7): every chain's video equals eager and a fresh model; copies on the device."""
import gc

import pytest
import torch
from cancelling import Cancelled, cancel_after
from rendering import tiny_files, tiny_request, tiny_transformer

from ltx_runtime.cuda_graph import return_graph_memory
from ltx_runtime.errors import CheckpointError
from ltx_runtime.lora import LoraSpec
from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_lora


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return write_tiny_lora(tmp_path_factory.mktemp("lora") / "other.safetensors", seed=5, form="kohya")


@pytest.fixture
def model():
    model = tiny_transformer("cuda")
    yield model
    model.evict()


def adapter(strength: float) -> LoraSpec:
    return LoraSpec(tiny_files()["lora"], strength)


def render(model, mode, *chain, **changes):
    model.set_loras(chain)
    result = sample(model, tiny_request(**changes), cuda_graph=mode)
    assert result.graph["mode"] == ("graph" if mode == "on" else "eager")
    return torch.cat((result.video.flatten(), result.audio.flatten()))


def state(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def assert_same_state(model, expected) -> None:
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.module.state_dict().items())


def last_read(timeline: Timeline) -> dict:
    return [event["attrs"] for event in timeline.events if event["event"] == "end"][-1]


def test_every_chain_is_captured_anew_and_equals_eager_and_a_fresh_model(model, other):
    """A5: strengths 0, 0.5, 1, another adapter, both, none; three replays each, the seed changed in between."""
    chains = [
        [],
        [adapter(0.0)],
        [adapter(0.5)],
        [adapter(1.0)],
        [LoraSpec(other, 1.0)],
        [adapter(1.0), LoraSpec(other, 0.7)],
        [],
    ]
    videos = []
    for chain in chains:
        captures = model.graphs.counters.captures
        graphed = [render(model, "on", *chain, seed=seed) for seed in (1, 2, 1)]
        # Strength 0 after none: the weights are the same, and so is their recording.
        assert model.graphs.counters.captures - captures == (0 if chain == [adapter(0.0)] else 1)
        assert len(model.graphs) == 1, "recordings of earlier weights are gone"
        assert torch.equal(graphed[0], graphed[2]) and not torch.equal(graphed[0], graphed[1])
        assert torch.equal(graphed[0], render(model, "off", *chain, seed=1))
        fresh = tiny_transformer("cuda")
        assert torch.equal(graphed[0], render(fresh, "on", *chain, seed=1))
        fresh.evict()
        videos.append(graphed[0])
    kinds = [next(i for i, other_video in enumerate(videos) if torch.equal(other_video, video)) for video in videos]
    assert kinds == [0, 0, 2, 3, 4, 5, 0]


def test_a_failed_switch_leaves_no_trace(model, tmp_path):
    """A6: adapter A, a corrupt one, A again, none."""
    base, first = render(model, "on"), render(model, "on", adapter(1.0))
    corrupt = tmp_path / "corrupt.safetensors"
    corrupt.write_bytes(tiny_files()["lora"].read_bytes()[:-100])
    for path in (corrupt, tmp_path / "missing.safetensors"):
        with pytest.raises(CheckpointError):
            render(model, "on", LoraSpec(path, 1.0))
        assert torch.equal(render(model, "on", adapter(1.0)), first)
    assert torch.equal(render(model, "on"), base)


def test_a_switch_stopped_half_way_leaves_no_recording_and_the_previous_weights(model, other, monkeypatch):
    """A6: the failure comes after some weights were changed."""
    monkeypatch.setattr("ltx_runtime.lora.GROUP_BYTES", 1 << 16)
    first = render(model, "on", adapter(1.0))
    before, captures = state(model), model.graphs.counters.captures

    with pytest.raises(Cancelled):
        model.set_loras([LoraSpec(other, 1.0)], on_progress=cancel_after(0.5))
    assert len(model.graphs) == 0
    assert_same_state(model, before)
    assert torch.equal(render(model, "on", adapter(1.0)), first)
    assert model.graphs.counters.captures == captures + 1


@pytest.mark.parametrize("mode", ["on", "off"])
def test_the_same_prompt_again_is_not_fused_twice(model, mode):
    """A7: the same adapter three times, another seed in between."""
    first, second, third = (render(model, mode, adapter(1.0), seed=seed) for seed in (1, 2, 1))
    assert torch.equal(first, third) and not torch.equal(first, second)
    if mode == "on":
        assert (model.graphs.counters.captures, model.graphs.counters.hits) == (1, 2)


def test_base_weights_come_from_copies_on_the_device_and_from_the_file_without_them(model):
    base = state(model)
    addresses = [parameter.data_ptr() for parameter in model.module.parameters()]
    timeline = Timeline(None, device="cuda")
    model.set_loras([adapter(1.0)], timeline)
    assert model.lora_copies_bytes == last_read(timeline)["copies_bytes"] > 0
    model.set_loras([adapter(0.5)], timeline)
    assert last_read(timeline)["base_bytes"] == 0
    model.drop_lora_copies()
    assert model.lora_copies_bytes == 0
    model.set_loras((), timeline)
    assert last_read(timeline)["base_bytes"] > 0
    assert_same_state(model, base)
    assert [parameter.data_ptr() for parameter in model.module.parameters()] == addresses


def test_copies_stand_back_when_the_memory_is_wanted(model):
    model.set_loras([adapter(1.0)])
    model.leave_free(1 << 20)
    assert model.lora_copies_bytes > 0
    model.leave_free(1 << 60)
    assert model.lora_copies_bytes == 0


def test_memory_returns_to_the_baseline(model):
    def allocated() -> int:
        gc.collect()
        return_graph_memory(model.device)
        return torch.cuda.memory_allocated()

    model.set_loras([adapter(1.0)])  # the first product brings a workspace that stays
    model.set_loras(())
    before = allocated()
    for strength in (1.0, 0.5, 1.0):
        model.set_loras([adapter(strength)])
        assert allocated() - before == pytest.approx(model.lora_copies_bytes, rel=0.2)
    model.set_loras(())
    assert allocated() == before


@pytest.mark.parametrize("loaded_inside", [True, False], ids=["loaded in inference mode", "loaded outside"])
@pytest.mark.parametrize("changed_inside", [True, False], ids=["changed in inference mode", "changed outside"])
def test_inference_mode_of_the_caller_does_not_matter(loaded_inside, changed_inside):
    with torch.inference_mode(loaded_inside):
        model = tiny_transformer("cuda")
    with torch.inference_mode(changed_inside):
        model.set_loras([adapter(0.5)])
        model.set_loras([adapter(1.0)])
    fresh = tiny_transformer("cuda")
    fresh.set_loras([adapter(1.0)])
    assert_same_state(fresh, state(model))
