"""Contexts kept between renders: the same prompt is connected once, and nothing that changed is ever taken for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.context_cache import ContextCache
from ltx_runtime.errors import RequestError
from ltx_runtime.guidance import GuidanceSpec
from ltx_runtime.lora import LoraSpec
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import Guidance, SampleRequest, TextFeatures, sample
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_transformer

WIDTH = 192


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("contexts")
    linear = "diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_v"
    factors = {f"{linear}.lora_A.weight": torch.ones(1, 128), f"{linear}.lora_B.weight": torch.ones(128, 1)}
    save_file(factors, folder / "lora.safetensors", {"model_version": "2.5.0"})
    return {"transformer": write_tiny_transformer(folder / "t.safetensors"), "lora": folder / "lora.safetensors"}


@pytest.fixture(scope="module")
def shared_model(files) -> TransformerModel:
    return load_transformer(files["transformer"], device="cpu")


@pytest.fixture
def model(shared_model) -> TransformerModel:
    shared_model.set_loras([])
    shared_model.ensure_resident()
    shared_model.contexts.clear()
    return shared_model


def features(seed: int = 1, tokens: int = 6) -> torch.Tensor:
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed))


def request(text: torch.Tensor, **changes) -> SampleRequest:
    settings = {
        "video": text_to_video_state(VideoLatentShape(1, 128, 2, 2, 2), 24.0),
        "audio": audio_state(AudioLatentShape(1, 8, 3, 16)),
        "text": TextFeatures(text, processed=False),
        "sigmas": torch.tensor([1.0, 0.0]),
        "seed": 1,
    }
    return SampleRequest(**settings | changes)


def rendered(model: TransformerModel, asked: SampleRequest) -> tuple[dict[str, str], torch.Tensor, torch.Tensor]:
    """What the log says of the contexts, and the latents."""
    timeline = Timeline(None)
    result = sample(model, asked, cuda_graph="off", timeline=timeline)
    (said,) = (e["attrs"] for e in timeline.events if (e["phase"], e["event"]) == ("prepare.connectors", "end"))
    return said, result.video, result.audio


def fresh(model: TransformerModel, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle: the connectors, with nothing kept."""
    with torch.inference_mode():
        return model.module.connect_text(text)


def assert_fresh(model: TransformerModel, text: torch.Tensor, *, reused: bool) -> None:
    contexts, known = model.connect_text(text)
    assert known == reused
    assert all(map(torch.equal, contexts, fresh(model, text)))


def test_another_seed_and_another_stage_reuse_contexts_with_the_same_bits(model):
    asked = request(features())
    first = rendered(model, asked)
    again = rendered(model, dataclasses.replace(asked, text=TextFeatures(features(), processed=False)))
    assert (first[0], again[0]) == ({"prompt": "made"}, {"prompt": "reused"})
    assert torch.equal(first[1], again[1]) and torch.equal(first[2], again[2])
    larger = text_to_video_state(VideoLatentShape(1, 128, 2, 4, 2), 24.0)
    assert rendered(model, dataclasses.replace(asked, video=larger, seed=2))[0] == {"prompt": "reused"}


def test_the_log_speaks_of_both_prompts(model):
    guidance = Guidance(GuidanceSpec(cfg_scale=3.0), GuidanceSpec())
    asked = request(features(), guidance=guidance, negative=TextFeatures(features(2), processed=False))
    assert rendered(model, asked)[0] == {"prompt": "made", "negative": "made"}
    other = dataclasses.replace(asked, text=TextFeatures(features(3), processed=False))
    assert rendered(model, other)[0] == {"prompt": "made", "negative": "reused"}
    given = dataclasses.replace(asked, text=TextFeatures(torch.randn(1, 1024, WIDTH), processed=True))
    assert rendered(model, given)[0] == {"prompt": "given", "negative": "reused"}


def test_a_tensor_changed_in_place_is_another_prompt(model):
    text = features()
    assert_fresh(model, text, reused=False)
    text[0, -1, -1] += 1e-3
    assert_fresh(model, text, reused=False)
    assert_fresh(model, features(), reused=True)


def test_shape_dtype_and_compatibility_are_part_of_a_prompt(model):
    assert_fresh(model, features(), reused=False)
    assert_fresh(model, features()[:, :5], reused=False)
    assert_fresh(model, features().bfloat16(), reused=False)
    assert not model.connect_text(features(), "comfyui")[1]
    assert_fresh(model, features(), reused=True)


def test_other_weights_drop_them(files, model):
    before, _ = model.connect_text(features())
    model.set_loras([LoraSpec(files["lora"], 1.0)])
    assert model.contexts.device_bytes == 0
    assert_fresh(model, features(), reused=False)
    assert not torch.equal(model.connect_text(features())[0][0], before[0]), "the adapter acts on the connectors"
    model.set_loras([])
    assert_fresh(model, features(), reused=False)
    model.evict()
    assert model.contexts.device_bytes == 0
    model.ensure_resident()
    assert_fresh(model, features(), reused=False)


def test_a_prompt_that_is_not_finite_is_refused_every_time(model):
    for _ in range(2):
        with pytest.raises(RequestError, match="NaN or Inf after the connectors"):
            model.connect_text(features() * float("nan"))
    assert len(model.contexts) == 0


def test_the_least_recently_used_goes_first():
    cache, prompts = ContextCache(max_prompts=2, max_bytes=1 << 20), [features(seed) for seed in range(3)]
    for prompt in prompts[:2]:
        cache.keep(prompt, "reference", (prompt, prompt))
    assert cache.find(prompts[0], "reference") is not None
    cache.keep(prompts[2], "reference", (prompts[2], prompts[2]))
    assert [cache.find(prompt, "reference") is not None for prompt in prompts] == [True, False, True]


def test_memory_is_bounded_and_counted():
    prompt = features()
    cache = ContextCache(max_prompts=9, max_bytes=7 * prompt.nbytes)
    for seed in range(4):
        cache.keep(features(seed), "reference", (features(seed), features(seed)))
        assert cache.device_bytes == min(seed + 1, 2) * 3 * prompt.nbytes
    wide = features(tokens=60)
    cache.keep(wide, "reference", (wide, wide))
    assert len(cache) == 2 and cache.find(wide, "reference") is None, "one that is too large alone is not kept"
