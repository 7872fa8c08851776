"""Single sampler steps, start noise and masks (transformer.md sections 10 to 12)."""

import json

import torch
from safetensors.torch import safe_open

from ltx_runtime import steps
from ltx_runtime.conditioning import audio_state
from ltx_runtime.noise import SdeNoise
from ltx_runtime.shapes import AudioLatentShape

PENDING: dict[str, str] = {}
TOLERANCE = 1e-6
CFG_PP_ETA = 0.8


def cases(path):
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if not name.startswith("in.")]
    noisers = {".".join(name.split(".")[:2]) for name in names if name.startswith("noiser")}
    whole = {"mask.x0_from_velocity", "mask.post_process", "res2s_noise"}
    return sorted({name for name in names if not name.startswith(("noiser", "mask", "res2s_noise"))} | noisers | whole)


def check(path, case):
    with safe_open(path, "pt") as file:
        golden = {name: file.get_tensor(name) for name in file.keys()}
        settings = json.loads(file.metadata()["cases"])
    sample, denoised, noise = golden["in.sample"], golden["in.denoised"], golden["in.noise"]
    sigmas = golden["in.sigmas"]
    kind = case.split(".")[0]
    if kind in ("euler", "euler_bf16"):
        index = int(case.split(".")[1])
        coefficients = steps.step_coefficients("euler", sigmas[index], sigmas[index + 1], eta=1.0, s_noise=1.0)
        dtype = golden[case].dtype
        out = steps.euler_step(sample.to(dtype), denoised.to(dtype), coefficients)
    elif kind == "ancestral":
        # ancestral.eta1.0.s0.6.3: eta, s_noise, index
        numbers, index = case.removeprefix("ancestral.eta").rsplit(".", 1)
        eta, s_noise = numbers.split(".s")
        index = int(index)
        coefficients = steps.step_coefficients(
            "euler_ancestral", sigmas[index], sigmas[index + 1], eta=float(eta), s_noise=float(s_noise)
        )
        out = steps.ancestral_step(sample, denoised, noise, coefficients)
    elif kind == "cfgpp":
        index = int(case.split(".")[1])
        sigma, sigma_next = float(sigmas[index]), float(sigmas[index + 1])
        # The file's steps use the last of its etas.
        coefficients = steps.cfg_pp_coefficients(sigma, sigma_next, eta=CFG_PP_ETA, s_noise=1.0)
        out = steps.cfg_pp_euler_step(sample, denoised, golden["in.uncond_denoised"], noise, coefficients)
    elif kind == "res2s_coeff":
        index = int(case.split(".")[1])
        out = torch.tensor(
            steps.runge_kutta_coefficients(float(sigmas[index]), float(sigmas[index + 1])), dtype=torch.float64
        )
    elif kind == "res2s_sde":
        index = int(case.split(".")[1])
        coefficients = steps.sde_coefficients(float(sigmas[index]), float(sigmas[index + 1]))
        out = steps.sde_mix(sample.double(), denoised.double(), noise.double(), coefficients)
    elif kind == "res2s_noise":
        draws = [golden[f"{case}.draw{i}"] for i in range(2)]
        batch, tokens, channels = draws[0].shape
        state = audio_state(AudioLatentShape(batch, 1, tokens, channels))
        source = SdeNoise(settings[case]["seed"], torch.device("cpu"))
        for index, draw in enumerate(draws):
            yield f"draw {index}", (source.step(None, state)[1] - draw).abs().max().item(), TOLERANCE
        return
    elif kind == "noiser":
        drawn = golden[f"{case}.noise"]
        noisy = torch.lerp(sample, drawn, settings[case]["noise_scale"])
        out, case = torch.lerp(golden["mask.clean"], noisy, golden["mask.denoise_mask"]), f"{case}.out"
    elif case == "mask.post_process":
        out = steps.blend_clean(denoised, golden["mask.denoise_mask"], golden["mask.clean"])
    else:
        # The golden file uses in.denoised as the velocity.
        out = steps.x0_from_velocity(sample, denoised, golden["mask.timesteps"])
    yield "out", (out.double() - golden[case].double()).abs().max().item(), TOLERANCE
