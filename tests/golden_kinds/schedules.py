"""Sigma schedules, float32 (transformer.md section 12.1)."""
import json

from safetensors import safe_open

from ltx_runtime import schedules

PENDING: dict[str, str] = {}
TOLERANCE = 1e-6
_TABLES = {
    "distilled_stage1": schedules.DISTILLED_SIGMAS,
    "distilled_stage2": schedules.DISTILLED_STAGE2_SIGMAS,
    "distilled_tiled": schedules.DISTILLED_TILED_SIGMAS,
}


def cases(path):
    with safe_open(path, "pt") as file:
        return sorted(file.keys())


def check(path, case):
    with safe_open(path, "pt") as file:
        golden = file.get_tensor(case)
        settings = json.loads(file.metadata()["cases"]).get(case)
    if settings is None:
        sigmas = golden.new_tensor(_TABLES[case])
    elif case.startswith("linear_quadratic"):
        sigmas = schedules.linear_quadratic_sigmas(**settings)
    else:
        settings.pop("latent_shape")
        if settings.pop("stretch", True) is False:
            settings["terminal"] = None
        sigmas = schedules.dev_sigmas(**settings)
    yield "sigmas", (sigmas - golden).abs().max().item(), TOLERANCE
