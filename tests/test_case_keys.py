"""Cases of docs/cases.md that the key of a recording answers, with real requests on the CPU: what is another recording,
and what is not."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from ltx_runtime import tiny
from ltx_runtime.conditioning import audio_state, replace_frame, text_to_video_state
from ltx_runtime.cuda_graph import GraphKey
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, prepare
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny.write_tiny_transformer(tmp_path_factory.mktemp("tiny") / "transformer.safetensors")
    return load_transformer(path, device="cpu")


def request_(frames: int = 3, frame_rate: float = 24.0, tokens: int = 11, **changes) -> SampleRequest:
    features = torch.randn(1, tokens, 192, generator=torch.Generator().manual_seed(0))
    wanted = {
        "video": text_to_video_state(VideoLatentShape(1, 128, frames, 2, 2), frame_rate),
        "audio": audio_state(AudioLatentShape(1, 8, 9, 16)),
        "text": TextFeatures(features, processed=False),
        "sigmas": torch.tensor([1.0, 0.5, 0.0]),
        "seed": 1,
        "sampler": "euler_ancestral",
    }
    return SampleRequest(**wanted | changes)


def first_step(model, request: SampleRequest):
    with torch.inference_mode():
        prepared = prepare(model, request, Timeline(None))
        return prepared.constants[0], prepared.inputs(0, prepared.start)


def key(model, request: SampleRequest) -> GraphKey:
    return GraphKey.of(first_step(model, request), weight_generation=1)


def test_a2_each_frame_count_is_a_key_of_its_own(model):
    keys = [key(model, request_(frames=frames)) for frames in (2, 3, 4)]
    assert len(set(keys)) == 3
    assert any("1.video.x: [1, 8, 128]" in words for words in keys[1].differences(keys[0]))


def test_a3_text_image_text(model):
    text = request_()
    image = dataclasses.replace(text, video=replace_frame(text.video, 0, torch.zeros(1, 128, 1, 2, 2), 0.7))
    first, other, again = (key(model, request) for request in (text, image, text))
    assert first == again != other
    assert any("timestep_index" in words for words in other.differences(first))


def test_a4_the_noise_of_a_step_is_an_input_of_the_recording(model):
    _, inputs = first_step(model, request_())
    _, other = first_step(model, request_(seed=2))
    assert inputs.video.noise.shape == inputs.video.x.shape and not torch.equal(inputs.video.noise, other.video.noise)
    assert key(model, request_()) == key(model, request_(seed=2))


@pytest.mark.parametrize("tokens", [1, 300, 1024])
def test_prompts_up_to_1024_tokens_share_a_recording(model, tokens):
    assert key(model, request_(tokens=tokens)) == key(model, request_())


def test_a_longer_prompt_is_another(model):
    assert key(model, request_(tokens=1025)) != key(model, request_())


def test_c1_a_key_is_made_in_a_few_milliseconds_and_a_second_time_it_is_the_same(model):
    step = first_step(model, request_())
    keys, took = [], []
    for _ in range(20):
        started = time.perf_counter()
        keys.append(GraphKey.of(step, weight_generation=1))
        took.append(time.perf_counter() - started)
    assert len(set(keys)) == 1 and min(took) < 0.005


def test_c2_the_frame_rate_is_in_the_positions_and_not_in_the_key(model):
    assert (
        key(model, request_(frame_rate=24.0))
        == key(model, request_(frame_rate=25.0))
        == key(model, request_(frame_rate=30.0))
    )
    ropes = [first_step(model, request_(frame_rate=rate))[0].forwards[0].video.rope for rate in (24.0, 25.0)]
    assert not torch.equal(ropes[0].cos, ropes[1].cos)
