"""Noise of renders whose seed is at the end of what ComfyUI's seed box takes."""

from __future__ import annotations

import pytest
import torch
from tiny_sampling import tiny_model, tiny_request

from ltx_runtime.noise import ANCESTRAL_SEED_OFFSET, ComfyNoise, ReferenceNoise
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
