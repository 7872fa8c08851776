"""What the step goldens don't show: the summed-up fixed point of res_2s, the plan of its steps, and choices by name."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from tiny_sampling import prepared, random, sampled, tiny_request

from ltx_runtime.errors import NonFiniteError, RequestError
from ltx_runtime.schedules import RES_2S_LAST_SIGMA, dev_sigmas, resolve_sampler, resolve_schedule, sampler_steps
from ltx_runtime.steps import Res2sCoefficients, step_coefficients


@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.5, 0.31), (0.04, 0.0301), (1.0, 0.5), (0.02, 0.015)])
def test_the_fixed_point_is_a_hundred_iterations(sigma, sigma_next):
    """anchor <- x_mid - h*a21*(denoised - anchor), 100 times when h < 0.5 and sigma > 0.03 (section 12.5)."""
    c = Res2sCoefficients(*step_coefficients("res_2s", torch.tensor(sigma), torch.tensor(sigma_next), eta=1, s_noise=1))
    x, x_mid, denoised = (random(1, 6, 4, seed=seed).double() for seed in range(3))
    anchor = x
    h = math.log(float(torch.tensor(sigma)) / float(torch.tensor(sigma_next)))
    for _ in range(100 if h < 0.5 and sigma > 0.03 else 0):
        anchor = x_mid - c.half * (denoised - anchor)
    summed = c.gain * (x_mid - c.half * denoised) + c.rest * x
    assert (summed - anchor).abs().max() <= 1e-13
    assert (c.rest == 1) == (h >= 0.5 or sigma <= 0.03)


def test_res_2s_ends_above_zero_and_takes_the_prediction_there():
    plan = sampler_steps("res_2s", dev_sigmas(15))
    assert [step.sampler for step in plan] == ["res_2s"] * 15 + ["x0"]
    assert float(plan[-1].sigma) == pytest.approx(RES_2S_LAST_SIGMA) and plan[-2].sigma_next == plan[-1].sigma
    assert [step.sampler for step in sampler_steps("res_2s", torch.tensor([1.0, 0.5]))] == ["res_2s"]
    assert [step.sampler for step in sampler_steps("euler", torch.tensor([1.0, 0.5, 0.0]))] == ["euler"] * 2
    with pytest.raises(RequestError, match=r"must be above it, got 0\.001"):
        sampler_steps("res_2s", torch.tensor([1.0, 0.001, 0.0]))


def test_res_2s_steps_are_one_kind_and_report_their_number():
    """All but the last prediction share a key; h below and above 0.5 makes no difference."""
    steps = prepared(tiny_request(sampler="res_2s", sigmas=torch.tensor([1.0, 0.9, 0.1, 0.0])))
    assert len(steps.constants) == 4 and len({id(constants) for constants in steps.constants}) == 2
    seen = []
    sampled(tiny_request(sampler="res_2s"), on_step=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def test_res_2s_repeats_and_follows_the_seed():
    for convention in ("reference", "comfyui"):
        first, again, other = (
            sampled(tiny_request(sampler="res_2s", noise_convention=convention, seed=seed)).video for seed in (1, 1, 2)
        )
        assert torch.equal(first, again) and (first - other).abs().max() > 0.01


def test_the_hq_schedule_follows_the_latent():
    plain, hq = (resolve_schedule(name, 15, "", video_tokens=1536) for name in ("dev", "dev HQ"))
    assert torch.equal(plain[0], dev_sigmas(15)) and torch.equal(hq[0], dev_sigmas(15, tokens=1536))
    assert "shifted for 1536 video tokens" in hq[1] and not torch.equal(plain[0], hq[0])
    assert torch.equal(resolve_schedule("dev HQ", 15, "")[0], dev_sigmas(15))


@pytest.mark.parametrize(
    ("file", "version", "first", "expected"),
    [
        ("ltx-2.5-22b-distilled-transformer-bf16.safetensors", "2.5.0", 1.0, "euler_ancestral"),
        ("LTX-Distilled.safetensors", "2.10.0", 1.0, "euler_ancestral"),
        ("ltx-2.5-22b-distilled-transformer-bf16.safetensors", "2.5.0", 0.909375, "euler"),
        ("ltx-2.3-22b-distilled.safetensors", "2.3.0", 1.0, "euler"),
        ("ltx-2.5-22b-dev-transformer-bf16.safetensors", "2.5.0", 1.0, "euler"),
    ],
)
def test_auto_takes_ancestral_euler_for_the_first_stage_of_the_distilled_model_alone(file, version, first, expected):
    chosen, words = resolve_sampler("auto", torch.tensor([first, 0.0]), file, version)
    assert chosen == expected and expected in words and "auto" in words


def test_auto_reads_the_schedule_off_the_file_name():
    distilled = resolve_schedule("auto", 30, "LTX-Distilled.safetensors")
    assert torch.equal(distilled[0], resolve_schedule("distilled", 30, "")[0]) and "LTX-Distilled" in distilled[1]
    assert torch.equal(resolve_schedule("auto", 12, "ltx-dev.safetensors")[0], dev_sigmas(12))
    with pytest.raises(RequestError, match=r"can't tell .* 'ltx-2.5.safetensors'.*Choose schedule"):
        resolve_schedule("auto", 30, "ltx-2.5.safetensors")


def test_samplers_are_chosen_by_name():
    sigmas = torch.tensor([1.0, 0.0])
    assert resolve_sampler("res_2s", sigmas, "any", "2.5.0")[0] == "res_2s"
    with pytest.raises(RequestError, match="heun"):
        resolve_sampler("heun", sigmas, "any", "2.5.0")
    with pytest.raises(RequestError, match="sampler='auto' is not one of euler, euler_ancestral, res_2s"):
        sampled(tiny_request(sampler="auto"))


def test_the_host_is_one_step_behind_what_is_issued():
    """So the GPU has its next step before the host waits for the last one."""
    seen = []
    sampled(
        tiny_request(),
        on_step=lambda done, total: seen.append(("ended", done)),
        on_preview=lambda index, total, denoised: seen.append(("issued", index + 1)),
    )
    assert seen == [(what, step) for step in range(1, 5) for what in ("issued", "ended")]


@pytest.mark.parametrize("stream", ["video", "audio"])
def test_nan_ends_the_render_at_its_step_and_names_the_stream(stream):
    other = {"video": "audio", "audio": "video"}[stream]
    request = tiny_request(noise_convention="comfyui", **{other: None})
    noise = random(*request.states[stream].latent_shape.as_tuple())
    noise[0, 0, 0, 0] = float("nan")
    given = (noise, None) if stream == "video" else (None, noise)
    issued = []
    with pytest.raises(NonFiniteError, match=f"sample.step: the {stream} latent holds NaN or Inf after step 1 of 4"):
        sampled(dataclasses.replace(request, noise=given), on_preview=lambda index, *_: issued.append(index))
    assert issued == [0]
