"""What is refused before a weight is read: 42 GB are not loaded for a request that can't run."""

from __future__ import annotations

import pytest
import torch
from tiny_sampling import WEIGHTS, audio_shape, random, tiny_request, video_shape

from ltx_runtime.checkpoint import read_header
from ltx_runtime.errors import CaptureError, RequestError
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.runtime import TransformerModel
from ltx_runtime.sampler import TextFeatures, sample
from ltx_runtime.warm_up import warm_up

VIDEO, AUDIO = video_shape().as_tuple(), audio_shape().as_tuple()


@pytest.fixture
def model() -> TransformerModel:
    return TransformerModel(read_header(WEIGHTS), device="cpu", dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": (random(1, 16, 9, 2, 2), random(*AUDIO)), "noise_convention": "comfyui"}, "the noise for video"),
        ({"noise": (random(*VIDEO), None), "noise_convention": "comfyui"}, "the noise for audio has shape None"),
        ({"sampler": "res_2s", "sigmas": torch.tensor([1.0, 0.001, 0.0])}, "the sigma before 0 must be above it"),
        ({"sigmas": torch.tensor([0.5, 1.0])}, "decrease strictly"),
        ({"guidance": Guidance(video=GuidanceSpec(rescale=1.5))}, "rescale=1.5"),
        ({"guidance": Guidance(batching="both")}, "batching='both'"),
        ({"text": TextFeatures(torch.zeros(1, 0, 96), processed=False)}, "no token"),
    ],
)
@pytest.mark.parametrize("run", [sample, warm_up])
def test_a_request(model, changes, words, run):
    with pytest.raises(RequestError, match=words):
        run(model, tiny_request(**changes))
    assert not model.resident


@pytest.mark.parametrize("cuda_graph", ["on", "auto"])
def test_a_graph_that_is_impossible(model, cuda_graph):
    with pytest.raises(CaptureError, match="no CUDA graph: graphs forbidden"):
        sample(
            model,
            tiny_request(),
            cuda_graph=cuda_graph,
            on_capture_failure="error",
            graphs_refused="graphs forbidden",
        )
    with pytest.raises(CaptureError, match="no CUDA graph"):
        warm_up(model, tiny_request(), on_capture_failure="error")
    assert not model.resident
