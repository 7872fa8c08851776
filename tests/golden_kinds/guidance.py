"""How the predictions of several passes combine (transformer.md section 13)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from golden_kinds import Result, compare, metadata_json
from ltx_runtime.guidance import GuidanceSpec, GuidanceTerms, apg_delta, cfg_star_delta, guide

PENDING: dict[str, str] = {}
TOLERANCE = 1e-6
BF16 = " in bf16"
# Not in the metadata: found from the tensor (the projection's factor is exact at this scale only).
CFG_STAR_SCALE = 4.0
INPUTS = {"cond": "cond", "uncond": "uncond_text", "ptb": "uncond_perturbed", "mod": "uncond_modality"}


def cases(path: Path) -> list[str]:
    named = list(metadata_json(path, "cases"))
    return [*named, *(name + BF16 for name in named if name.startswith("multimodal")), "cfg_star"]


def check(path: Path, case: str):
    golden = load_file(path)
    passes = {name: golden[f"in.{key}"] for name, key in INPUTS.items()}
    name = case.removesuffix(BF16)
    settings = metadata_json(path, "cases").get(name)
    if case == "cfg_star":
        delta = cfg_star_delta(passes["cond"][:1], passes["uncond"][:1], CFG_STAR_SCALE)
        yield compare("delta", delta, golden["cfg_star.delta"], TOLERANCE)
    elif case == "apg":
        delta = apg_delta(passes["cond"][:1], passes["uncond"][:1], **settings)
        yield compare("delta", delta, golden["apg.delta"], TOLERANCE)
    else:
        skips = settings.pop("skips")
        spec = _spec(**settings)
        wrong = sum(spec.skips(step) != skip for step, skip in enumerate(skips))
        yield Result("skipped steps", wrong, 0)
        expected = golden[name]
        if case.endswith(BF16):
            passes = {name: x0.bfloat16() for name, x0 in passes.items()}
            expected = golden[name.replace("multimodal", "multimodal_bf16")]
        terms = GuidanceTerms.of(spec, torch.device("cpu"))
        yield compare("guided", passes["cond"] if terms is None else guide(passes, terms), expected, TOLERANCE)


def _spec(*, rescale_scale: float = 0.0, stg_blocks: list[int] = (), **scales) -> GuidanceSpec:
    return GuidanceSpec(rescale=rescale_scale, stg_blocks=tuple(stg_blocks), **scales)
