"""Noise: seeds at the end of what ComfyUI's seed box takes, statistics of res_2s, order of the reference's draws."""

from __future__ import annotations

import pytest
import torch
from tiny_sampling import tiny_model, tiny_request

from ltx_runtime.noise import ANCESTRAL_SEED_OFFSET, ComfyNoise, ReferenceNoise, SdeNoise
from ltx_runtime.sampler import sample

LAST = 2**64 - 1


@pytest.mark.parametrize("convention", ["comfyui", "reference"])
@pytest.mark.parametrize("sampler", ["euler", "euler_ancestral"])
def test_the_last_seed_renders(sampler, convention):
    request = tiny_request(seed=LAST, sampler=sampler, noise_convention=convention)
    assert bool(sample(tiny_model(), request).video.isfinite().all())


def test_a_derived_seed_behind_the_last_starts_over():
    request = tiny_request()
    pairs = (
        (ComfyNoise(LAST, torch.device("cpu")), ComfyNoise(2**64 - 2, torch.device("cpu")), 0),
        (
            ReferenceNoise(LAST, torch.device("cpu"), torch.float32),
            ReferenceNoise(0, torch.device("cpu"), torch.float32),
            ANCESTRAL_SEED_OFFSET - 1,
        ),
    )
    for source, other, expected_seed in pairs:
        generator = torch.Generator().manual_seed(expected_seed)
        drawn, elsewhere = source.step(request.video, None)[0], other.step(request.video, None)[0]
        values = torch.randn(drawn.numel(), generator=generator).sort().values
        assert torch.equal(drawn.flatten().sort().values, values) and not torch.equal(drawn, elsewhere)


def test_start_noise_of_the_reference_is_one_stream_of_draws_video_first():
    request = tiny_request()
    source = ReferenceNoise(5, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(5)
    for drawn, state in zip(source.initial(request.video, request.audio), (request.video, request.audio)):
        assert torch.equal(drawn, torch.randn(state.initial.shape, generator=generator))


def test_noise_of_res_2s_is_standardised_in_every_sample():
    request = tiny_request(batch=3)
    for drawn in SdeNoise(-1, torch.device("cpu")).step(request.video, request.audio):
        assert drawn.dtype == torch.float64 and len(drawn) == 3
        for sample_noise in drawn:
            assert abs(sample_noise.mean()) < 1e-12 and abs(sample_noise.std() - 1) < 1e-12


def test_start_noise_drawn_ahead_is_that_of_one_cpu_generator():
    request = tiny_request()
    source, device = ComfyNoise(5, torch.device("cpu")), torch.device("cpu")
    source.draw_ahead(request.video, request.audio)
    ahead = source.initial(request.video, request.audio)
    generator = torch.Generator().manual_seed(5)
    drawn = tuple(torch.randn(s.shape.as_tuple(), generator=generator) for s in (request.video, request.audio))
    for tokens, given in zip(ahead, ComfyNoise(6, device, drawn).initial(request.video, request.audio)):
        assert torch.equal(tokens, given)
    given = ComfyNoise(6, device, drawn)
    given.draw_ahead(request.video, request.audio)
    assert torch.equal(given.initial(request.video, request.audio)[0], ahead[0]), "a given noise wins"
