"""Tiny renders on the GPU, shared by the GPU tests."""
from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ltx_runtime import cuda_graph
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, SampleResult, TextFeatures, sample
from ltx_runtime.schedules import distilled_sigmas
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.steps import StepOutputs
from ltx_runtime.tiny import fill_random, write_tiny_checkpoints
from ltx_runtime.video_vae import VideoEncoder, VideoVAE, load_video_vae


@functools.cache
def tiny_files() -> dict[str, Path]:
    return write_tiny_checkpoints(tempfile.mkdtemp(prefix="ltxgraph-tiny-"))


def tiny_transformer(device) -> TransformerModel:
    return load_transformer(tiny_files()["transformer"], device=device)


def tiny_video_vae(device) -> VideoVAE:
    return load_video_vae(tiny_files()["video_vae"], device=device)


def tiny_request(
    *,
    width=128,
    height=96,
    num_frames=25,
    frame_rate=24.0,
    seed=1,
    prompt_tokens=11,
    prompt=0,
    audio=True,
    steps=8,
    **changes,
) -> SampleRequest:
    (features, _), = load_conditioning(tiny_files()["positive"])
    if prompt or prompt_tokens != features.shape[1]:
        generator = torch.Generator().manual_seed(prompt)
        features = torch.randn(1, prompt_tokens, features.shape[2], generator=generator)
    request = SampleRequest(
        video=text_to_video_state(VideoLatentShape.from_pixels(width, height, num_frames), frame_rate),
        audio=audio_state(AudioLatentShape(1, 8, audio_latent_frames(num_frames, frame_rate), 16)) if audio else None,
        text=TextFeatures(features, processed=False),
        sigmas=distilled_sigmas()[-steps - 1 :],
        seed=seed,
        sampler="euler_ancestral",
    )
    return dataclasses.replace(request, **changes)


def render(model: TransformerModel, mode: str = "off", **changes) -> SampleResult:
    return sample(model, tiny_request(**changes), cuda_graph=mode)


class _FilledAtRandom:
    """A published layout whose weights are made on the device; its file holds none."""

    def _fill(self, module, timeline, on_progress):
        fill_random(module, device=self.device)


class RandomVAE(_FilledAtRandom, VideoVAE):
    pass


class RandomEncoder(_FilledAtRandom, VideoEncoder):
    pass


def spoil_replays(monkeypatch, spoil: Callable[[int, StepOutputs], None]) -> None:
    """Calls spoil(how many there were before, outputs) after every replay of a denoising step; decodes replay too."""
    replay = cuda_graph.GraphedStep.replay
    steps = itertools.count()

    def spoiled(self):
        outputs = replay(self)
        if isinstance(outputs, StepOutputs):
            spoil(next(steps), outputs)
        return outputs

    monkeypatch.setattr(cuda_graph.GraphedStep, "replay", spoiled)
