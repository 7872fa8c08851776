"""Sigma schedules of LTX-2.x, and how a request's `auto` is resolved.

Source: transformer.md sections 12.1 and 12.3.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch

from .config import generation
from .errors import RequestError

DISTILLED_SIGMAS = (1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0)
DISTILLED_STAGE2_SIGMAS = (0.909375, 0.725, 0.421875, 0.0)
# Of the reference's tiled second stage. No request resolves to it: `sample` takes it as sigmas, and the golden
# schedules (tests/golden_kinds/schedules.py) check it.
DISTILLED_TILED_SIGMAS = (0.625, 0.4, 0.0)
# Second stage of ComfyUI's official LTX-2.5 templates, as written there.
TEMPLATE_STAGE2_SIGMAS = (0.85, 0.7250, 0.4219, 0.0)
# Where a res_2s schedule that ends at 0 ends instead; the prediction there is the result (section 12.5).
RES_2S_LAST_SIGMA = 0.0011

SCHEDULES = ("auto", "distilled", "distilled stage 2", "template stage 2", "dev", "dev HQ")
SAMPLERS = ("auto", "euler", "euler_ancestral", "res_2s")


def distilled_sigmas() -> torch.Tensor:
    """Stage 1 of the distilled model: 8 steps, (9,) float32."""
    return torch.tensor(DISTILLED_SIGMAS, dtype=torch.float32)


def distilled_stage2_sigmas() -> torch.Tensor:
    """Stage 2 of the distilled model, after the x2 upscale: 3 steps, (4,) float32."""
    return torch.tensor(DISTILLED_STAGE2_SIGMAS, dtype=torch.float32)


def template_stage2_sigmas() -> torch.Tensor:
    """Stage 2 as ComfyUI's official templates run it: 3 steps, (4,) float32."""
    return torch.tensor(TEMPLATE_STAGE2_SIGMAS, dtype=torch.float32)


def dev_sigmas(
    steps: int = 30,
    *,
    tokens: int = 4096,
    max_shift: float = 2.05,
    base_shift: float = 0.95,
    terminal: float | None = 0.1,
) -> torch.Tensor:
    """Token-shifted schedule of the dev model, (steps+1,) float32, from 1 to 0.

    tokens: video tokens that set the shift. The one- and two-stage pipelines always pass 4096; the HQ pipeline and
    ComfyUI's scheduler node with a latent pass F*H*W.
    terminal: value the last sigma above zero is stretched to; None leaves the curve as it is.
    Float64 throughout: 1 - sigma cancels in float32, and the reference turns to NaN above about 50,000 tokens.
    """
    slope = (max_shift - base_shift) / (4096 - 1024)
    shift = math.exp(slope * tokens + base_shift - slope * 1024)
    # 1 - sigma, written without the cancellation: sigma = e^mu / (e^mu + 1/s - 1).
    complements = [(1 / s - 1) / (shift + 1 / s - 1) for s in (1 - i / steps for i in range(steps))]
    if terminal is not None and complements[-1] > 0:
        stretch = (1 - terminal) / complements[-1]
        complements = [c * stretch for c in complements]
    return torch.tensor([1 - c for c in complements] + [0.0], dtype=torch.float64).float()


def linear_quadratic_sigmas(
    steps: int, *, threshold_noise: float = 0.025, linear_steps: int | None = None
) -> torch.Tensor:
    """The schedule that the checkpoint's `scheduler` section names, (steps+1,) float32. With 8 steps it is the
    distilled table. No pipeline and no official template uses it, so resolve_schedule does not offer it: for scripts,
    which pass it as SampleRequest.sigmas.

    1 - sigma rises linearly to threshold_noise over linear_steps (half of the steps by default), then quadratically to
    1, with the same slope at the joint.
    """
    if steps == 1:
        return torch.tensor([1.0, 0.0])
    linear = steps // 2 if linear_steps is None else linear_steps
    rest = steps - linear
    slope = threshold_noise / linear
    curve = (1 - threshold_noise - slope * rest) / rest**2
    complements = [slope * i for i in range(linear)]
    complements += [threshold_noise + slope * i + curve * i * i for i in range(rest)]
    return torch.tensor([1 - c for c in complements] + [0.0], dtype=torch.float64).float()


def resolve_schedule(
    schedule: str, steps: int, file_name: str, *, video_tokens: int | None = None
) -> tuple[torch.Tensor, str]:
    """Sigmas for a schedule choice, and one sentence that says what was chosen and why.

    steps: of the dev schedules. video_tokens: F*H*W of the video latent, which sets the shift of "dev HQ"; None = 4096.

    `auto` reads the file name, because the headers of the dev and the distilled file are identical. Raises RequestError
    when the name says neither, or for an unknown schedule.
    """
    reason = ""
    if schedule == "auto":
        name = file_name.lower()
        if "distilled" in name:
            schedule = "distilled"
        elif "dev" in name:
            schedule = "dev"
        else:
            raise RequestError(
                f"schedule=auto can't tell a dev from a distilled model by the file name {file_name!r}, and their "
                f"headers are identical. Choose schedule 'distilled' or 'dev', or connect sigmas."
            )
        reason = f" (auto, from the file name {file_name})"
    if schedule == "distilled":
        return distilled_sigmas(), f"distilled schedule, 8 steps{reason}"
    if schedule == "distilled stage 2":
        return distilled_stage2_sigmas(), f"distilled stage 2 schedule, 3 steps{reason}"
    if schedule == "template stage 2":
        return template_stage2_sigmas(), f"stage 2 schedule of the official ComfyUI templates, 3 steps{reason}"
    if schedule in ("dev", "dev HQ"):
        if steps < 1:
            raise RequestError(f"steps={steps}: the dev schedule needs at least 1 step.")
        tokens = 4096 if schedule == "dev" or video_tokens is None else video_tokens
        shift = "" if schedule == "dev" else f", shifted for {tokens} video tokens"
        return dev_sigmas(steps, tokens=tokens), f"{schedule} schedule, {steps} steps{shift}{reason}"
    raise RequestError(f"schedule={schedule!r} is not one of {', '.join(SCHEDULES)}.")


def resolve_sampler(sampler: str, sigmas: torch.Tensor, file_name: str, model_version: str) -> tuple[str, str]:
    """Sampler name for a choice, and one sentence about it.

    `auto` follows the reference: ancestral Euler (eta 1) for the first stage of a distilled model of version 2.5 or
    newer, plain Euler everywhere else.
    """
    if sampler != "auto":
        if sampler not in SAMPLERS:
            raise RequestError(f"sampler_name={sampler!r} is not one of {', '.join(SAMPLERS)}.")
        return sampler, f"{sampler} sampler"
    first_stage = float(sigmas[0]) == 1.0
    newer = generation(model_version) >= (2, 5)
    if "distilled" in file_name.lower() and first_stage and newer:
        return "euler_ancestral", "euler_ancestral sampler (auto: distilled model, first stage)"
    return "euler", "euler sampler (auto)"


class SamplerStep(NamedTuple):
    """One step of a loop. sampler: also "x0", a prediction that is the result. sigma, sigma_next: () float32, on the
    CPU."""

    sampler: str
    sigma: torch.Tensor
    sigma_next: torch.Tensor

    @property
    def sigma_mid(self) -> torch.Tensor | None:
        """Where a res_2s step calls the model a second time; None for other steps."""
        if self.sampler != "res_2s":
            return None
        return torch.tensor(res_2s_middle_sigma(float(self.sigma), float(self.sigma_next)))


def res_2s_middle_sigma(sigma: float, sigma_next: float) -> float:
    return math.sqrt(sigma * sigma_next)


def sampler_steps(sampler: str, sigmas: torch.Tensor) -> list[SamplerStep]:
    """The steps that a sampler takes over checked sigmas.

    res_2s steps in log sigma, so it ends just above 0 and takes the prediction there: one step more than sigmas say.
    """
    if sampler == "res_2s" and sigmas[-1] == 0:
        if sigmas[-2] <= RES_2S_LAST_SIGMA:
            raise RequestError(
                f"res_2s ends at {RES_2S_LAST_SIGMA} in place of 0, so the sigma before 0 must be above it, got "
                f"{float(sigmas[-2]):g}."
            )
        sigmas = torch.cat((sigmas[:-1], sigmas.new_tensor([RES_2S_LAST_SIGMA])))
        last = [SamplerStep("x0", sigmas[-1], torch.zeros(()))]
    else:
        last = []
    return [SamplerStep(sampler, a, b) for a, b in itertools.pairwise(sigmas)] + last


def check_sigmas(sigmas: torch.Tensor) -> torch.Tensor:
    """Sigmas as a (n+1,) float32 CPU tensor. Raises RequestError unless they are finite, at least two, strictly
    decreasing and within [0, 1]."""
    sigmas = sigmas.detach().to("cpu", torch.float32)
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise RequestError(f"sigmas has shape {tuple(sigmas.shape)}; give n+1 >= 2 values for n steps.")
    values = sigmas.tolist()
    if not all(math.isfinite(v) for v in values):
        raise RequestError(f"sigmas must be finite, got {values}.")
    if values[0] > 1 or values[-1] < 0:
        raise RequestError(f"sigmas must lie in [0, 1] (this is a flow model), got {values[0]} ... {values[-1]}.")
    if any(b >= a for a, b in itertools.pairwise(values)):
        raise RequestError(f"sigmas must decrease strictly, got {values}.")
    return sigmas
