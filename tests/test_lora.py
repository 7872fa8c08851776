"""LoRA: files checked and named, arithmetic through files, weights changed in place and given back bit for bit."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled
from safetensors.torch import load_file, save_file

from ltx_runtime import lora
from ltx_runtime.checkpoint import CheckpointHeader, TensorSpec, read_header
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.errors import CheckpointError, RequestError
from ltx_runtime.lora import LoraSpec, fit_loras, generation_notes, linear_specs, read_lora
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, sample
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import (
    TRANSFORMER_PREFIX,
    write_tiny_conditioning,
    write_tiny_lora,
    write_tiny_transformer,
    write_tiny_video_vae,
)

TESTS = Path(__file__).parent
TO_Q = "transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lora")
    return {
        "transformer": write_tiny_transformer(folder / "transformer.safetensors"),
        "A": write_tiny_lora(folder / "A.safetensors", seed=1),
        "B": write_tiny_lora(folder / "B.safetensors", seed=2, form="community"),
        "C": write_tiny_lora(folder / "C.safetensors", seed=3, form="kohya"),
        "vae": write_tiny_video_vae(folder / "vae.safetensors"),
        "prompt": write_tiny_conditioning(folder / "prompt.safetensors", num_tokens=11),
    }


@pytest.fixture(scope="module")
def shared_model(files) -> TransformerModel:
    return load_transformer(files["transformer"], device="cpu")


@pytest.fixture(params=[False, True], ids=["base from the file", "base from copies"])
def model(shared_model, monkeypatch, request) -> TransformerModel:
    """A resident model without adapters, with either source of base weights. A CPU keeps no copies by itself."""
    monkeypatch.setattr(lora.FusedWeights, "_copies_fit", lambda self, modules: request.param)
    if request.param:
        monkeypatch.setattr(shared_model._fused, "_read_base", no_reading)
    shared_model.ensure_resident()
    shared_model.set_loras(())
    yield shared_model
    monkeypatch.undo()
    shared_model.evict()
    shared_model.ensure_resident()
    shared_model.set_loras(())


def no_reading(modules, on_progress):
    raise AssertionError("base weights were read from the file, though there are copies")


def weights(model: TransformerModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.module.state_dict().items()}


def fresh(files, *chain: LoraSpec, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    model = TransformerModel(read_header(files["transformer"]), device="cpu", dtype=dtype)
    model.set_loras(chain)
    model.ensure_resident()
    return weights(model)


def assert_equal(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"{len(different)} tensors differ, the first is {different[0]}"


def changed(actual: dict, base: dict) -> set[str]:
    return {name for name in base if not torch.equal(actual[name], base[name])}


def rewritten(source: Path, target: Path, rename=lambda name: name, change=None, **metadata: str) -> Path:
    """A copy of a LoRA file with other names, other tensors, other metadata."""
    tensors = {rename(name): tensor for name, tensor in load_file(source).items()}
    if change:
        change(tensors)
    save_file(tensors, target, metadata=metadata)
    return target


def kohya_name(name: str) -> str:
    module, part, _ = name.removeprefix("diffusion_model.").rsplit(".", 2)
    return f"lora_unet_{module.replace('.', '_')}.{'lora_down' if part == 'lora_A' else 'lora_up'}.weight"


def published_header() -> CheckpointHeader:
    manifest = json.loads((TESTS / "manifests" / "transformer-22b.json").read_text())
    tensors = {name: TensorSpec(dtype, tuple(shape), 0, 0) for name, (dtype, shape) in manifest.items()}
    return CheckpointHeader(Path("published"), 0, 0, {}, {}, tensors, {"transformer": TRANSFORMER_PREFIX})


# --- files ----------------------------------------------------------------------------------------------------------


def test_the_distilled_adapter_covers_what_the_published_layout_says(tmp_path):
    """1,660 Linears, rank min(450, in, out), 8.9 GB of bf16 (transformer.md section 15), fitted by header alone."""
    linears = {m: s for m, s in linear_specs(published_header()).items() if "embeddings_connector" not in m}
    header, end = {"__metadata__": {"model_version": "2.5.0"}}, 0
    for module, spec in linears.items():
        rank = min(450, *spec.shape)
        for part, shape in (("lora_A", (rank, spec.shape[1])), ("lora_B", (spec.shape[0], rank))):
            start, end = end, end + 2 * shape[0] * shape[1]
            name = f"diffusion_model.{module}.{part}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    assert end == 8_899_362_816 and len(header) == 3320 + 1
    text = json.dumps(header).encode()
    path = tmp_path / "distilled.safetensors"
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # sparse: the data takes no room
    (adapter,) = fit_loras([LoraSpec(path, 1.0)], published_header())
    assert len(adapter.pairs) == 1660 and set(adapter.scales.values()) == {1.0}
    assert generation_notes([adapter], "2.5.0") == ()


def test_tiny_official_file_has_every_linear_of_the_denoiser_and_none_of_the_connectors(files):
    linears = linear_specs(read_header(files["transformer"]))
    expected = {module for module in linears if "embeddings_connector" not in module}
    assert set(read_lora(files["A"]).pairs) == expected and len(expected) < len(linears)
    assert {pair.rank for pair in read_lora(files["A"]).pairs.values()} == {4}


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: "model." + name,
        lambda name: name.removeprefix("diffusion_model."),
        lambda name: name.replace("diffusion_model.", "transformer."),
        lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up"),
        kohya_name,
    ],
    ids=["model.diffusion_model.", "none", "transformer.", "down/up", "kohya"],
)
def test_every_key_form_gives_the_same_weights(files, tmp_path, rename):
    other = rewritten(files["A"], tmp_path / "other.safetensors", rename)
    assert_equal(fresh(files, LoraSpec(other, 0.75)), fresh(files, LoraSpec(files["A"], 0.75)))


def test_alpha_scales_by_alpha_over_rank(files, tmp_path):
    def with_alpha(tensors):
        for name in [name for name in tensors if "lora_A" in name]:
            tensors[name.replace("lora_A.weight", "alpha")] = torch.tensor(1.0)

    quarter = rewritten(files["A"], tmp_path / "alpha.safetensors", change=with_alpha)
    assert_equal(fresh(files, LoraSpec(quarter, 2.0)), fresh(files, LoraSpec(files["A"], 0.5)))


def test_ic_lora_metadata_is_read(files, tmp_path):
    plain = read_lora(files["A"])
    assert (plain.reference_downscale_factor, plain.reference_temporal_scale_factor) == (1, 1)
    assert plain.model_version == "2.5.0"
    metadata = {"reference_downscale_factor": "2", "reference_temporal_scale_factor": "4.0"}
    control = read_lora(rewritten(files["A"], tmp_path / "ic.safetensors", **metadata))
    assert (control.reference_downscale_factor, control.reference_temporal_scale_factor) == (2, 4)
    assert control.model_version is None
    for wrong in ("0", "half", "1.5", "nan"):
        path = rewritten(files["A"], tmp_path / "wrong.safetensors", reference_downscale_factor=wrong)
        with pytest.raises(CheckpointError, match=f"reference_downscale_factor is '{wrong}', expected a whole number"):
            read_lora(path)


def test_every_fault_of_a_file_is_named_together(files, tmp_path):
    def spoil(tensors):
        del tensors[f"diffusion_model.{TO_Q}.lora_B.weight"]
        tensors["diffusion_model.proj_out.lora_B.weight"] = torch.zeros(128, 3)
        tensors["diffusion_model.patchify_proj.dora_scale"] = torch.zeros(128, 1)
        tensors[f"transformer.{TO_Q}.lora_A.weight"] = torch.zeros(4, 128)

    with pytest.raises(CheckpointError) as caught:
        read_lora(rewritten(files["A"], tmp_path / "spoilt.safetensors", change=spoil))
    text = str(caught.value)
    assert text.startswith("spoilt.safetensors is not a LoRA that can be fused: 1 not understood, 1 without partner,")
    assert "not understood: diffusion_model.patchify_proj.dora_scale (F32 [128, 1])" in text
    assert f"without partner: {TO_Q} has only lora_A (down)" in text
    assert "misshapen: proj_out: A [4, 128], B [128, 3]" in text
    assert re.search(rf"twice in the file: (diffusion_model|transformer)\.{TO_Q}\.lora_A\.weight", text)


def test_what_does_not_fit_is_named_for_the_whole_chain(files, tmp_path):
    def rename(name):
        return name.replace("transformer_blocks.1.", "transformer_blocks.7.")

    def widen(tensors):
        tensors[f"diffusion_model.{TO_Q}.lora_A.weight"] = torch.zeros(4, 256)

    far = rewritten(files["A"], tmp_path / "far.safetensors", rename, model_version="2.3.0")
    wide = rewritten(files["A"], tmp_path / "wide.safetensors", change=widen)
    chain = [LoraSpec(path, 1.0) for path in (far, files["vae"], files["A"], wide, tmp_path / "none.safetensors")]
    with pytest.raises(CheckpointError) as caught:
        fit_loras(chain, read_header(files["transformer"]))
    text = str(caught.value)
    assert "far.safetensors does not fit transformer.safetensors: 34 unknown of 96 modules. It says it was" in text
    assert "trained for LTX 2.3.0" in text and "and 14 more" in text
    assert "unknown: transformer_blocks.7.attn1.to_q" in text
    assert "vae.safetensors is the conv video VAE, not a LoRA. Pick" in text and "models/loras" in text
    assert f"misshapen: {TO_Q}: A [4, 256], B [128, 4], its weight is [128, 128]" in text
    assert "none.safetensors: no such file" in text
    assert "A.safetensors is" not in text and "A.safetensors does" not in text


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_a_strength_that_is_no_number_is_refused(files, strength):
    with pytest.raises(RequestError, match=r"A\.safetensors: strength is"):
        fit_loras([LoraSpec(files["A"], strength)], read_header(files["transformer"]))


def test_alpha_that_is_not_finite_is_refused(files, tmp_path):
    def spoil(tensors):
        tensors[f"transformer.{TO_Q}.alpha"] = torch.tensor(float("nan"))

    path = rewritten(files["B"], tmp_path / "nan.safetensors", change=spoil)
    with pytest.raises(CheckpointError, match=f"(?s)nan.safetensors is damaged: 1 alpha not finite.*{TO_Q}: nan"):
        fit_loras([LoraSpec(path, 1.0)], read_header(files["transformer"]))


def test_another_generation_is_noted_where_it_fits(files, tmp_path):
    old = write_tiny_lora(tmp_path / "old.safetensors", flavour="2.3")
    adapters = fit_loras([LoraSpec(old, 1.0), LoraSpec(files["A"], 1.0)], read_header(files["transformer"]))
    assert generation_notes(adapters, "2.5.0") == (
        "old.safetensors was trained for LTX 2.3.0, the model is 2.5.0: it fits, but is not meant for it",
    )


# --- weights --------------------------------------------------------------------------------------------------------


def test_fused_weights_are_the_references(files):
    """The formula written out: (B strength) A for the first adapter, addmm with alpha for the second, then the sum."""
    base = load_file(files["transformer"])
    first, second = load_file(files["A"]), load_file(files["B"])
    fused = fresh(files, LoraSpec(files["A"], 0.7), LoraSpec(files["B"], -0.4))
    for module in (TO_Q, "transformer_blocks.1.ff.net.0.proj"):
        a, b = (first[f"diffusion_model.{module}.lora_{part}.weight"] for part in "AB")
        delta = (b * 0.7) @ a
        if module == TO_Q:
            a, b = (second[f"transformer.{module}.lora_{part}.weight"] for part in ("down", "up"))
            delta = torch.addmm(delta, b, a, alpha=-0.4 * 2.0 / 4)
        assert torch.equal(fused[f"{module}.weight"], base[f"{TRANSFORMER_PREFIX}{module}.weight"] + delta)
    linears = {f"{module}.weight" for module in read_lora(files["A"]).pairs}
    assert changed(fused, fresh(files)) == linears, "biases, norms, tables and connectors are never touched"


def test_a_chain_of_strengths_and_adapters_always_equals_a_fresh_model(files, model):
    base = weights(model)
    addresses = [parameter.data_ptr() for parameter in model.module.parameters()]
    a, b, c = (lambda s, f=files[name]: LoraSpec(f, s) for name in "ABC")
    several = (a(1), b(-0.4), c(0.3)), (b(-0.4), a(1)), (a(1), a(1))
    seen = []
    for chain in ((a(0),), (a(0.5),), (a(1),), (b(1),), *several, (c(1),), (), (a(0), b(0))):
        generation, acts = model.generation, any(spec.strength for spec in (*chain, *model.loras))
        assert model.set_loras(chain) == acts and (model.generation > generation) == acts
        assert_equal(weights(model), fresh(files, *chain))
        assert not model.set_loras(chain), "the same chain again changes nothing"
        seen.append(model.module.transformer_blocks[0].attn1.to_q.weight.clone())
    assert_equal(weights(model), base)
    assert [parameter.data_ptr() for parameter in model.module.parameters()] == addresses
    kinds = [next(i for i, other in enumerate(seen) if torch.equal(other, tensor)) for tensor in seen]
    assert kinds == [0, 1, 2, 3, 4, 5, 6, 7, 0, 0], "strength 0 is the base, every other chain is its own"


def test_copies_can_be_dropped_at_any_time(files, shared_model, monkeypatch):
    monkeypatch.setattr(lora.FusedWeights, "_copies_fit", lambda self, modules: True)
    model, base = shared_model, fresh(files)
    assert model.lora_copies_bytes == 0
    model.set_loras([LoraSpec(files["A"], 1.0)])
    linears = linear_specs(model.header)
    assert model.lora_copies_bytes == sum(linears[module].num_bytes for module in read_lora(files["A"]).pairs)
    model.drop_lora_copies()
    assert model.lora_copies_bytes == 0
    model.set_loras([LoraSpec(files["B"], 1.0)])
    assert_equal(weights(model), fresh(files, LoraSpec(files["B"], 1.0)))
    assert model.lora_copies_bytes == sum(linears[module].num_bytes for module in read_lora(files["B"]).pairs)
    model.set_loras(())
    assert model.lora_copies_bytes == 0
    assert_equal(weights(model), base)


def test_float32_weights_are_fused_in_float32(files):
    fused = fresh(files, LoraSpec(files["A"], 0.7), dtype=torch.float32)
    pair = load_file(files["A"])
    a, b = (pair[f"diffusion_model.{TO_Q}.lora_{part}.weight"].double() for part in "AB")
    exact = load_file(files["transformer"])[f"{TRANSFORMER_PREFIX}{TO_Q}.weight"].double() + 0.7 * b @ a
    assert (fused[f"{TO_Q}.weight"].double() - exact).abs().max() < 1e-6


@pytest.mark.parametrize("group_bytes", [1, 1 << 16])
def test_reading_in_small_pieces_gives_the_same_weights(files, model, monkeypatch, group_bytes):
    expected = fresh(files, LoraSpec(files["A"], 1.0), LoraSpec(files["C"], 1.0))
    monkeypatch.setattr(lora, "GROUP_BYTES", group_bytes)
    progress = []
    chain = [LoraSpec(files["A"], 1.0), LoraSpec(files["C"], 1.0)]
    model.set_loras(chain, on_progress=lambda done, total: progress.append((done, total)))
    assert_equal(weights(model), expected)
    totals = {total for _, total in progress}
    assert len(totals) == 1 and progress[-1][0] == totals.pop()
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_evicted_weights_come_back_with_their_adapters(files, shared_model):
    model = shared_model
    chain = [LoraSpec(files["A"], 1.0), LoraSpec(files["B"], 0.5)]
    model.set_loras(chain)
    before = weights(model)
    model.evict()
    assert not model.set_loras(chain)
    model.ensure_resident()
    assert_equal(weights(model), before)
    model.evict()
    assert model.set_loras(()), "a chain set while evicted counts from the next load on"
    model.ensure_resident()
    assert_equal(weights(model), fresh(files))


def test_a_file_written_anew_is_fused_anew(files, model, tmp_path):
    path = Path(shutil.copy(files["A"], tmp_path / "mine.safetensors"))
    chain = [LoraSpec(path, 1.0)]
    model.set_loras(chain)
    shutil.copy(files["B"], path)
    assert model.set_loras(chain)
    assert_equal(weights(model), fresh(files, LoraSpec(files["B"], 1.0)))


def test_the_log_says_what_was_read(files, model):
    timeline = Timeline(None)
    model.set_loras([LoraSpec(files["A"], 0.5)], timeline)
    model.set_loras([LoraSpec(files["A"], 1.0)], timeline)
    ends = [event["attrs"] for event in timeline.events if event["event"] == "end"]
    assert [attrs["loras"] for attrs in ends] == [[{"file": "A.safetensors", "strength": s}] for s in (0.5, 1.0)]
    linears = linear_specs(model.header)
    touched = sum(linears[module].num_bytes for module in read_lora(files["A"]).pairs)
    assert ends[0]["base_bytes"] == 0 and ends[0]["linears"] == 96
    assert (ends[1]["base_bytes"], ends[1]["copies_bytes"]) in ((touched, 0), (0, touched))


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_refused_chain_changes_nothing(files, model, tmp_path):
    """Case A6: a missing or corrupt adapter."""
    model.set_loras([LoraSpec(files["A"], 1.0)])
    before, generation = weights(model), model.generation
    corrupt = tmp_path / "corrupt.safetensors"
    corrupt.write_bytes(files["B"].read_bytes()[:-100])
    missing = tmp_path / "none.safetensors"
    for path, words in ((missing, "can't be opened"), (corrupt, "truncated"), (files["vae"], "not a LoRA")):
        with pytest.raises(CheckpointError, match=words):
            model.set_loras([LoraSpec(files["B"], 1.0), LoraSpec(path, 1.0)])
        assert model.generation == generation and [spec.name for spec in model.loras] == ["A.safetensors"]
        assert_equal(weights(model), before)
    assert not model.set_loras([LoraSpec(files["A"], 1.0)])


@pytest.mark.parametrize("previous", [(), ("A",), ("B", "C")], ids=["none", "one", "two"])
def test_an_error_in_the_middle_brings_the_previous_chain_back(files, model, monkeypatch, previous):
    monkeypatch.setattr(lora, "GROUP_BYTES", 1 << 16)
    chain = [LoraSpec(files[name], 0.5) for name in previous]
    model.set_loras(chain)
    before, generation = weights(model), model.generation
    half_way = []

    def stop(done: int, total: int) -> None:
        if done > 0.6 * total:
            half_way.append(changed(weights(model), before))
            raise Cancelled

    with pytest.raises(Cancelled):
        model.set_loras([LoraSpec(files["A"], 1.0)], on_progress=stop)
    assert half_way[0], "some weights had been changed"
    assert_equal(weights(model), before)
    assert model.generation > generation, "recordings of half-changed weights can't be found"
    assert not model.set_loras(chain)
    model.set_loras([LoraSpec(files["A"], 1.0)])
    assert_equal(weights(model), fresh(files, LoraSpec(files["A"], 1.0)))


def test_weights_that_can_not_be_brought_back_are_evicted(files, model, monkeypatch, tmp_path):
    monkeypatch.setattr(lora, "GROUP_BYTES", 1 << 16)
    path = Path(shutil.copy(files["A"], tmp_path / "mine.safetensors"))
    chain = [LoraSpec(path, 1.0)]
    model.set_loras(chain)
    before = weights(model)

    def stop(done: int, total: int) -> None:
        if done > 0.6 * total:
            path.rename(tmp_path / "away.safetensors")
            raise Cancelled

    with pytest.raises(Cancelled):
        model.set_loras([LoraSpec(files["B"], 1.0)], on_progress=stop)
    assert not model.resident
    with pytest.raises(CheckpointError, match=r"mine\.safetensors: no such file"):
        model.ensure_resident()
    assert not model.resident
    (tmp_path / "away.safetensors").rename(path)
    model.ensure_resident()
    assert_equal(weights(model), before)


def test_an_adapter_that_changed_while_evicted_is_refused_by_the_load(files, shared_model, tmp_path):
    model = shared_model
    path = Path(shutil.copy(files["A"], tmp_path / "mine.safetensors"))
    model.set_loras([LoraSpec(path, 1.0)])
    model.evict()
    os.utime(path, ns=(0, 1))
    with pytest.raises(CheckpointError, match=r"mine\.safetensors changed on disk since it was opened"):
        model.ensure_resident()
    assert not model.resident
    model.set_loras(())
    model.ensure_resident()
    assert_equal(weights(model), fresh(files))


# --- renders (cases A5 to A7, eager; with capture on: tests/gpu/test_lora_capture.py) ---


@pytest.fixture(scope="module")
def request_(files) -> SampleRequest:
    ((features, _),) = load_conditioning(files["prompt"])
    return SampleRequest(
        video=text_to_video_state(VideoLatentShape(1, 128, 2, 1, 2), 24.0),
        audio=audio_state(AudioLatentShape(1, 8, 9, 16)),
        text=TextFeatures(features, processed=False),
        sigmas=torch.tensor([1.0, 0.0]),
        seed=7,
    )


def render(model: TransformerModel, request: SampleRequest, *chain: LoraSpec) -> torch.Tensor:
    model.set_loras(chain)
    result = sample(model, request, cuda_graph="on")
    return torch.cat((result.video.flatten(), result.audio.flatten()))


def test_every_chain_renders_its_own_video_as_a_fresh_model_does(files, shared_model, request_):
    """A5: strengths 0, 0.5, 1, another adapter, none."""
    a, b = files["A"], files["B"]
    chains = {"0": [(a, 0.0)], "0.5": [(a, 0.5)], "1": [(a, 1.0)], "B": [(b, 1.0)], "none": []}
    chains = {name: [LoraSpec(*link) for link in links] for name, links in chains.items()}
    videos = {name: render(shared_model, request_, *chain) for name, chain in chains.items()}
    for name in ("0.5", "B"):
        loaded = load_transformer(files["transformer"], device="cpu")
        assert torch.equal(videos[name], render(loaded, request_, *chains[name]))
    assert torch.equal(videos.pop("0"), videos["none"])
    assert len({tuple(video.tolist()) for video in videos.values()}) == 4


def test_a_failed_switch_leaves_no_trace(files, shared_model, request_, tmp_path):
    """A6: adapter A, a corrupt B, A again, none."""
    base = render(shared_model, request_)
    first = render(shared_model, request_, LoraSpec(files["A"], 1.0))
    corrupt = tmp_path / "corrupt.safetensors"
    corrupt.write_bytes(files["B"].read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        render(shared_model, request_, LoraSpec(corrupt, 1.0))
    assert torch.equal(render(shared_model, request_, LoraSpec(files["A"], 1.0)), first)
    assert torch.equal(render(shared_model, request_), base)


def test_the_same_prompt_again_is_not_fused_twice(files, shared_model, request_):
    """A7: the same adapter three times, another seed in between."""
    chain = [LoraSpec(files["A"], 1.0)]
    first = render(shared_model, request_, *chain)
    other = render(shared_model, dataclasses.replace(request_, seed=8), *chain)
    assert torch.equal(render(shared_model, request_, *chain), first) and not torch.equal(other, first)


def test_tiny_adapters_of_every_form_change_a_video_without_breaking_it(files, shared_model, request_):
    base = render(shared_model, request_)
    for name in "ABC":
        adapted = render(shared_model, request_, LoraSpec(files[name], 1.0))
        assert adapted.isfinite().all() and (adapted - base).abs().max() > 0.1
        assert 0.5 < adapted.std() / base.std() < 2
