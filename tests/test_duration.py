"""Duration head: prompts to seconds, seconds to frames, and everything it refuses.

Agreement with the reference is in golden_kinds/duration_head.py.
"""
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.duration import DurationHead, duration_frames, load_duration_head, predict_seconds
from ltx_runtime.errors import CheckpointError, NonFiniteError, RequestError, ShapeError
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import TextFeatures
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_conditioning, write_tiny_duration_head, write_tiny_transformer

GOLDENS = Path(__file__).parent / "goldens"
TINY = GOLDENS / "duration_head_tiny.safetensors"


@pytest.fixture(scope="module")
def head() -> DurationHead:
    return load_duration_head(TINY, device="cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(transformer, head, features of two prompts)."""
    folder = tmp_path_factory.mktemp("tiny")
    model = load_transformer(write_tiny_transformer(folder / "t.safetensors"), device="cpu")
    head = load_duration_head(write_tiny_duration_head(folder / "d.safetensors"), device="cpu")
    prompts = [
        load_conditioning(write_tiny_conditioning(folder / f"{tokens}.safetensors", num_tokens=tokens))[0][0]
        for tokens in (7, 11)
    ]
    return model, head, prompts


def contexts(batch: int = 1, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return tuple(torch.randn(batch, tokens, width, generator=generator) for width in (24, 16))


def test_it_runs_in_float32_whatever_the_contexts_are(head):
    assert {parameter.dtype for parameter in head.module.parameters()} == {torch.float32}
    video, audio = contexts()
    assert torch.equal(head.seconds(video.bfloat16(), audio), head.seconds(video.bfloat16().float(), audio))


def test_prompts_of_a_batch_do_not_meet(head):
    video, audio = contexts(batch=3)
    alone = torch.cat([head.seconds(video[i : i + 1], audio[i : i + 1]) for i in range(3)])
    assert torch.allclose(head.seconds(video, audio), alone, rtol=1e-6)


def test_the_order_of_tokens_does_not_matter_but_each_one_counts(head):
    video, audio = contexts()
    seconds = head.seconds(video, audio)
    assert torch.allclose(head.seconds(video.flip(1), audio.flip(1)), seconds, rtol=1e-5)
    assert not torch.allclose(head.seconds(video[:, 1:], audio), seconds, rtol=1e-4)


def test_a_prompt_goes_through_the_connectors_once(tiny):
    model, head, (features, other) = tiny
    timeline = Timeline(None)
    seconds = predict_seconds(model, head, TextFeatures(features, processed=False), timeline=timeline)
    assert [event["phase"] for event in timeline.events if event["event"] == "end"] == ["prepare.connectors"]
    with torch.inference_mode():
        connected = torch.cat(model.module.connect_text(features), dim=2)
    assert predict_seconds(model, head, TextFeatures(connected, processed=True)) == seconds
    assert seconds == predict_seconds(model, head, TextFeatures(features, processed=False))
    assert seconds != predict_seconds(model, head, TextFeatures(other, processed=False))
    assert 1 < seconds < 20


def test_one_clip_has_one_prompt(tiny):
    model, head, (features, _) = tiny
    with pytest.raises(RequestError, match="2 prompts at once"):
        predict_seconds(model, head, TextFeatures(features.expand(2, -1, -1), processed=False))


def test_an_answer_that_is_no_length_is_refused(tiny):
    model, head, (features, _) = tiny
    with pytest.raises(NonFiniteError, match="nan seconds"):
        predict_seconds(model, head, TextFeatures(features * float("nan"), processed=True))
    with pytest.raises(RequestError, match="NaN or Inf after the connectors"):
        predict_seconds(model, head, TextFeatures(features * float("nan"), processed=False))


def test_contexts_of_another_model_and_none_are_refused(head):
    video, audio = contexts()
    with pytest.raises(ShapeError, match=r"takes video contexts of shape \(batch, tokens, 24\).*\(1, 5, 16\)"):
        head.seconds(audio, audio)
    with pytest.raises(ShapeError, match="takes audio contexts"):
        head.seconds(video, video)
    with pytest.raises(RequestError, match="got none"):
        head.seconds(None, None)


def test_another_kind_of_file_is_named_and_a_missing_tensor_too(tmp_path):
    with pytest.raises(CheckpointError, match=r"is a latent upscaler, not the duration head.*models/model_patches"):
        load_duration_head(GOLDENS / "latent_upsampler_spatial_x2_tiny.safetensors", device="cpu")
    tensors = load_file(TINY)
    del tensors["duration_head.mlp_out.bias"]
    save_file(tensors, tmp_path / "d.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: duration_head\.mlp_out\.bias"):
        load_duration_head(tmp_path / "d.safetensors", device="cpu")


# --- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.01, 0.9, 1.0, 1.04, 3.3, 7.77, 19.99, 500.0])
@pytest.mark.parametrize("frame_rate", [12, 23.976, 24, 29.97, 50])
def test_frames_are_on_the_grid_and_within_the_limits(seconds, frame_rate):
    frames = duration_frames(seconds, frame_rate, min_seconds=1, max_seconds=20)
    assert frames % 8 == 1
    assert round(frame_rate) <= frames <= round(20 * frame_rate)
    if 1.5 < seconds < 20:
        assert 0 <= round(seconds * frame_rate) - frames < 8  # the grid point below


def test_limits_without_a_grid_point_between_them_still_give_a_clip():
    assert duration_frames(2.0, 24, min_seconds=2, max_seconds=2) == 49
    assert duration_frames(0.01, 1, min_seconds=0.01, max_seconds=0.02) == 1


@pytest.mark.parametrize("options", [
    {"frame_rate": 0}, {"frame_rate": float("nan")}, {"min_seconds": 0}, {"min_seconds": 3, "max_seconds": 2},
])
def test_limits_out_of_order_are_refused(options):
    with pytest.raises(RequestError, match="must be positive"):
        duration_frames(2.0, **{"frame_rate": 24, "min_seconds": 1, "max_seconds": 20} | options)
