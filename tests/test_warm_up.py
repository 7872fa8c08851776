"""Recording ahead of time: what the CPU answers, what is refused, and what a person reads afterwards."""

from __future__ import annotations

import pytest
import torch

from ltx_runtime import tiny
from ltx_runtime.conditioning import text_to_video_state
from ltx_runtime.errors import CaptureError, RequestError
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.shapes import VideoLatentShape
from ltx_runtime.timing import Timeline
from ltx_runtime.warm_up import recorded_words, warm_up

CAPTURE = {
    "warmup_ms": 250.0,
    "capture_ms": 310.0,
    "first_replay_ms": 120.4,
    "static_bytes": 2**20,
    "graph_bytes": 3 * 2**20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny.write_tiny_transformer(tmp_path_factory.mktemp("tiny") / "transformer.safetensors")
    return load_transformer(path, device="cpu")


def request_(**changes) -> SampleRequest:
    wanted = {
        "video": text_to_video_state(VideoLatentShape(1, 128, 2, 1, 2), 24.0),
        "audio": None,
        "text": TextFeatures(torch.randn(1, 5, 192, generator=torch.Generator().manual_seed(0)), processed=False),
        "sigmas": torch.tensor([1.0, 0.5, 0.0]),
        "seed": 0,
    }
    return SampleRequest(**wanted | changes)


def test_the_cpu_records_nothing_and_says_why(model):
    timeline = Timeline(None)
    account = warm_up(model, request_(), timeline=timeline)
    assert account["fallback"].startswith(("no CUDA", "the model is on cpu")) and account["steps"] == []
    assert recorded_words(account) == f"nothing recorded: {account['fallback']}"
    assert "sample.step" not in timeline.summary()["phases"], "nothing was rendered"
    with pytest.raises(CaptureError, match="no CUDA graph"):
        warm_up(model, request_(), on_capture_failure="error")


def test_a_request_that_the_sampler_would_refuse_is_refused(model):
    with pytest.raises(RequestError, match="sampler='heun'"):
        warm_up(model, request_(sampler="heun"))


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        ({"capture": CAPTURE}, "recorded in 680 ms, holds 4 MiB: the next render of this shape replays at once"),
        ({}, "recorded already: the next render of this shape replays at once"),
        ({"fallback": "capture failed: ValueError"}, "nothing recorded: capture failed: ValueError"),
    ],
)
def test_what_a_person_reads(graph, words):
    assert recorded_words(graph) == words
