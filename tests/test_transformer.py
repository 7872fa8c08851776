"""What the forward goldens don't show: structure, compatibility, shapes of the step's inputs, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from golden_kinds import worst_error
from golden_kinds.forward import TOLERANCE, load_case
from golden_kinds.transformer_weights import golden_transformer

from ltx_runtime.conditioning import append_keyframe, append_slots, audio_state, replace_frame, text_to_video_state
from ltx_runtime.config import TransformerConfig
from ltx_runtime.errors import CheckpointError, RequestError, ShapeError
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.tensor_tree import map_tensors, named_tensors, static_values
from ltx_runtime.transformer import LTXTransformer
from ltx_runtime.transformer import model as transformer_model

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"
PREFIX = "model.diffusion_model."
FPS = 24.0


@pytest.fixture
def model() -> LTXTransformer:
    return golden_transformer(GOLDENS / "transformer_w_av25.safetensors")


def case(name: str):
    return load_case(GOLDENS / f"transformer_fwd_av25_{name}.safetensors")


def random_states(model: LTXTransformer, batch: int = 1):
    generator = torch.Generator().manual_seed(5)
    c = model.config
    video_shape = VideoLatentShape(batch, c.in_channels, 3, 2, 3)
    audio_shape = AudioLatentShape(batch, 1, 7, c.audio_in_channels)
    video = text_to_video_state(video_shape, FPS, torch.randn(video_shape.as_tuple(), generator=generator))
    audio = audio_state(audio_shape, torch.randn(audio_shape.as_tuple(), generator=generator))
    contexts = {
        "video_context": torch.randn(batch, 5, c.context_width, generator=generator),
        "audio_context": torch.randn(batch, 5, c.audio_context_width, generator=generator),
    }
    return video, audio, contexts


def run(model: LTXTransformer, video, audio, contexts, sigma, **options):
    constants = model.prepare(video=video, audio=audio, **contexts, **options)
    modulation = model.modulation(constants, sigma)
    return model(video.initial, audio.initial, constants, modulation)


# --- structure ------------------------------------------------------------------------------------------------------


def test_meta_model_is_the_published_22b_file():
    manifest = json.loads((TESTS / "manifests" / "transformer-22b.json").read_text())
    config = json.loads((TESTS / "configs" / "transformer-22b.json").read_text())["metadata"]["config"]
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    published = {name: (dtypes[dtype], tuple(shape)) for name, (dtype, shape) in manifest.items()}
    shapes = {name.removeprefix(PREFIX): shape for name, (_, shape) in published.items()}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = LTXTransformer(TransformerConfig.from_shapes(config, shapes, model_version="2.5.0"))
    finally:
        torch.set_default_dtype(torch.float32)
    built = {PREFIX + name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in model.state_dict().items()}
    assert built == published


def test_forward_reads_no_data_on_the_host(model):
    """On the meta device every read of a value raises, so a pass there proves that Python branches on no tensor."""
    forward = case("i2v")
    constants, modulation, _ = forward.run(model)
    with torch.device("meta"):
        empty = LTXTransformer(model.config)

    def to_meta(tree):
        return map_tensors(lambda name, tensor: tensor.to("meta"), tree)

    tokens = (forward.golden[f"in.{stream}.latent"].to("meta") for stream in ("video", "audio"))
    velocities = empty(*tokens, to_meta(constants), to_meta(modulation))
    assert [tuple(v.shape) for v in velocities] == [(1, 36, 16), (1, 8, 16)]


def test_forward_changes_none_of_its_inputs(model):
    """The blocks add in place; a replayed step must find its constants as they were."""
    forward = case("guidance4")
    constants, modulation, first = forward.run(model)
    inputs = (forward.golden["in.video.latent"], forward.golden["in.audio.latent"], constants, modulation)
    before = {name: tensor.clone() for name, tensor in named_tensors(inputs)}
    second = model(*inputs)
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(inputs))
    assert torch.equal(first["video"], second[0]) and torch.equal(first["audio"], second[1])


# --- noise levels ---------------------------------------------------------------------------------------------------


def test_text_to_video_has_one_noise_level_and_nothing_per_token(model):
    video, audio, contexts = random_states(model, batch=2)
    constants = model.prepare(video=video, audio=audio, **contexts)
    modulation = model.modulation(constants, torch.tensor(0.7))
    assert constants.video.timestep_index is None and constants.audio.timestep_index is None
    assert modulation.video.blocks.shape == (3, 9, 1, 64)
    tokens = {video.tokens, audio.tokens}
    assert not any(tokens & set(tensor.shape) for _, tensor in named_tensors(modulation))


def test_levels_per_distinct_value_equal_levels_per_token(model):
    video, audio, contexts = random_states(model)
    video = replace_frame(video, 0, torch.zeros(1, 16, 1, 2, 3))
    video = append_keyframe(video, 9, torch.ones(1, 16, 1, 2, 3), FPS, strength=0.7)
    constants = model.prepare(video=video, audio=audio, **contexts)
    assert constants.video.mask_values.numel() == 3
    per_token = dataclasses.replace(
        constants,
        video=dataclasses.replace(
            constants.video, mask_values=video.denoise_mask.flatten(), timestep_index=torch.arange(video.tokens)[None]
        ),
    )
    results = []
    for c in (constants, per_token):
        modulation = model.modulation(c, torch.tensor(0.6))
        results.append(model(video.initial, audio.initial, c, modulation))
    for distinct, full in zip(*results, strict=True):
        assert worst_error(distinct, full) < TOLERANCE


def test_sigma_per_sample_with_several_mask_values_equals_each_sample_alone(model):
    video, audio, contexts = random_states(model, batch=2)
    video = replace_frame(video, 0, torch.zeros(1, 16, 1, 2, 3), strength=0.4)
    sigmas = torch.tensor([0.9, 0.3])
    together = run(model, video, audio, contexts, sigmas, per_sample_sigma=True)
    for i in range(2):
        sample = slice(i, i + 1)

        def one(state, sample=sample):
            state = map_tensors(lambda name, tensor: tensor[sample], state)
            return dataclasses.replace(state, shape=dataclasses.replace(state.shape, batch=1))

        alone = run(model, one(video), one(audio), {k: v[sample] for k, v in contexts.items()}, sigmas[sample])
        for batched, single in zip(together, alone, strict=True):
            assert worst_error(batched[sample], single) < TOLERANCE


def test_steps_of_a_stage_differ_in_values_only(model):
    """One recording serves all steps: same static values, shapes, strides, whatever the sigma."""
    forward = case("i2v")
    constants, _, _ = forward.run(model)

    def layout(tree):
        return [(name, t.shape, t.stride(), t.dtype) for name, t in named_tensors(tree)], static_values(tree)

    first, last = (model.modulation(constants, torch.tensor(sigma)) for sigma in (1.0, 0.1))
    assert layout((constants, first)) == layout((constants, last))
    assert not torch.equal(first.video.blocks, last.video.blocks)


@pytest.mark.parametrize("compatibility", ["reference", "comfyui"])
@pytest.mark.parametrize("many_levels", [False, True])
def test_rows_of_a_step_do_not_depend_on_the_other_steps(model, monkeypatch, many_levels, compatibility):
    if many_levels:
        monkeypatch.setattr(transformer_model, "MANY_LEVELS", 1)
    video, audio, contexts = random_states(model, batch=2)
    video = replace_frame(video, 0, torch.zeros(2, 16, 1, 2, 3), strength=0.3)
    constants = model.prepare(
        video=video, audio=audio, **contexts, per_sample_sigma=True, compatibility=compatibility
    )
    sigmas, audio_sigmas = torch.rand(5, 2), torch.rand(5, 2)
    together = model.modulations(constants, sigmas, audio_sigmas)
    assert len(together) == 5
    for step, rows in enumerate(together):
        alone = model.modulation(constants, sigmas[step], audio_sigmas[step])
        for (name, mine), (_, other) in zip(named_tensors(rows), named_tensors(alone), strict=True):
            assert torch.equal(mine, other), (step, name)
    assert not torch.equal(together[0].video.cross_gate, together[1].video.cross_gate)


@pytest.mark.parametrize("many_levels", [False, True])
def test_the_memory_of_rows_is_known_before_they_are_made(model, monkeypatch, many_levels):
    video, audio, contexts = random_states(model)
    if many_levels:
        monkeypatch.setattr(transformer_model, "MANY_LEVELS", 6)
        video = dataclasses.replace(video, denoise_mask=torch.linspace(0.1, 1, video.tokens).reshape(1, -1, 1))
    constants = model.prepare(video=video, audio=audio, **contexts)
    rows = model.modulation(constants, torch.tensor(0.5))
    held = sum(part.nbytes for stream in (rows.video, rows.audio) for part in (stream.blocks, stream.cross))
    assert model.modulation_bytes(constants) == held


# --- ComfyUI compatibility (transformer.md sections 18.1 to 18.3) ---------------------------------------------------


def test_comfyui_feeds_v2a_with_the_video_after_a2v(model):
    video, audio, contexts = random_states(model)
    keep = torch.ones(4, 3, 1)
    keep[2] = 0  # no a2v: the order of the two directions then can't matter
    sigma = torch.tensor(0.8)

    def difference(perturbations):
        options = [{"compatibility": c, "perturbations": perturbations} for c in ("reference", "comfyui")]
        results = [run(model, video, audio, contexts, sigma, **o) for o in options]
        return worst_error(results[0][1], results[1][1])

    assert difference(None) > 1e-2
    # What is left is the q/k eps, 1e-5 instead of 1e-6.
    assert 0 < difference(keep) < 1e-3


def test_comfyui_gates_by_the_largest_level_of_the_batch(model):
    video, audio, contexts = random_states(model, batch=2)

    def gates(compatibility, sigmas):
        constants = model.prepare(
            video=video, audio=audio, **contexts, per_sample_sigma=True, compatibility=compatibility
        )
        return model.modulation(constants, torch.tensor(sigmas))

    reference, alike = gates("reference", [0.9, 0.3]), gates("reference", [0.9, 0.9])
    comfyui = gates("comfyui", [0.9, 0.3])
    assert torch.allclose(comfyui.video.cross_gate[:, 0], alike.video.cross_gate[:, 1], atol=1e-6)
    assert not torch.allclose(reference.video.cross_gate[:, 1], alike.video.cross_gate[:, 1], atol=1e-3)
    # The prompt follows its own sample in both.
    assert torch.equal(comfyui.video.prompt, reference.video.prompt)


def test_comfyui_modulates_the_prompt_by_the_largest_token_level(model):
    video, audio, contexts = random_states(model)
    video = dataclasses.replace(video, denoise_mask=video.denoise_mask * 0.5)

    def prompt(compatibility, sigma):
        constants = model.prepare(video=video, audio=audio, **contexts, compatibility=compatibility)
        return model.modulation(constants, torch.tensor(sigma)).video.prompt

    assert torch.equal(prompt("comfyui", 0.8), prompt("reference", 0.4))
    assert not torch.allclose(prompt("reference", 0.8), prompt("reference", 0.4), atol=1e-3)


# --- text -----------------------------------------------------------------------------------------------------------


def test_contexts_are_1024_long_and_grow_by_whole_register_sets(model):
    features = torch.randn(1, 1100, 96, generator=torch.Generator().manual_seed(1))
    assert [c.shape for c in model.connect_text(features[:, :7])] == [(1, 1024, 64), (1, 1024, 32)]
    assert [c.shape for c in model.connect_text(features)] == [(1, 1152, 64), (1, 1152, 32)]
    connector = model.video_embeddings_connector
    filled = connector.fill_with_registers(features[..., :64], torch.tensor([1100]), 1152)
    assert torch.equal(filled[0, :1100], features[0, :, :64])
    assert torch.equal(filled[0, 1100:], connector.learnable_registers[1100 % 128 :])


def test_comfyui_connectors_differ_by_their_eps_only(model):
    features = torch.randn(1, 9, 96, generator=torch.Generator().manual_seed(1))
    reference, comfyui = (model.connect_text(features, compatibility=c)[0] for c in ("reference", "comfyui"))
    assert 0 < worst_error(reference, comfyui) < 1e-3


def test_a_file_without_connectors_says_so():
    model = golden_transformer(GOLDENS / "transformer_w_av23.safetensors")
    with pytest.raises(CheckpointError, match="no text connectors"):
        model.connect_text(torch.zeros(1, 4, 96))


# --- bad input ------------------------------------------------------------------------------------------------------


def test_bad_input_is_named(model):
    video, audio, contexts = random_states(model)
    with pytest.raises(RequestError, match="nothing to denoise"):
        model.prepare(video=None, audio=None, **contexts)
    with pytest.raises(RequestError, match="no audio text context"):
        model.prepare(video=video, audio=audio, video_context=contexts["video_context"], audio_context=None)
    with pytest.raises(ShapeError, match=r"video text context has shape \(1, 5, 32\).*64"):
        model.prepare(video=video, audio=None, video_context=contexts["audio_context"], audio_context=None)
    with pytest.raises(RequestError, match="compatibility='comfy'"):
        model.prepare(video=video, audio=audio, **contexts, compatibility="comfy")
    with pytest.raises(ShapeError, match=r"perturbations have shape \(4, 2, 1\), expected \(4, 3, 1\)"):
        model.prepare(video=video, audio=audio, **contexts, perturbations=torch.ones(4, 2, 1))
    with pytest.raises(ShapeError, match="batch 1 and audio batch 2"):
        model.prepare(video=video, audio=random_states(model, batch=2)[1], **contexts)
    with pytest.raises(ShapeError, match="2 sigmas for a step prepared for 1"):
        model.modulation(model.prepare(video=video, audio=audio, **contexts), torch.tensor([0.5, 0.4]))
    with pytest.raises(ShapeError, match=r"text features have shape \(1, 4, 64\).*96"):
        model.connect_text(torch.zeros(1, 4, 64))


def test_bad_conditioning_is_named(model):
    video = random_states(model)[0]
    with pytest.raises(ShapeError, match="latent frame 3 does not fit"):
        replace_frame(video, 3, torch.zeros(1, 16, 1, 2, 3))
    with pytest.raises(ShapeError, match=r"expected \(1 or 1, 16, F, H, W\)"):
        replace_frame(video, 0, torch.zeros(1, 8, 1, 2, 3))
    with pytest.raises(ShapeError, match="Use append_clip"):
        append_keyframe(video, 5, torch.zeros(1, 16, 2, 2, 3), FPS)
    with pytest.raises(RequestError, match="rising"):
        append_slots(video, (9, 5), FPS)
    with pytest.raises(ShapeError, match="the target's is"):
        text_to_video_state(video.shape, FPS, torch.zeros(1, 16, 3, 2, 2))
