"""Adapters fused into weights (transformer.md section 15): bf16 as the reference rounds, float32, scaled FP8."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor

from golden_kinds import Result, compare, metadata_json
from ltx_runtime.lora import fuse_scaled_fp8, lora_delta

PENDING: dict[str, str] = {}
BF16_ULPS = 1.0
FLOAT32_TOLERANCE = 1e-6
PREFIX = "model.diffusion_model."
FP8_MODULE = "transformer_blocks.0.attn1.to_q"


def cases(path):
    return ["bf16", "float32", "fp8"]


def check(path, case):
    golden = load_file(path)
    strengths = metadata_json(path, "strengths")
    if case == "fp8":
        yield from _fp8(golden, strengths)
        return
    for name in sorted(golden):
        if not name.startswith(f"base.{PREFIX}"):
            continue
        name = name.removeprefix("base.")
        base, expected = golden[f"base.{name}"], golden[f"fused_bf16.{name}"]
        if not name.endswith(".weight"):
            yield Result(f"{name} untouched", float(not torch.equal(base, expected)), 0.0)
            continue
        module = name.removeprefix(PREFIX).removesuffix(".weight")
        if case == "bf16":
            fused = base + lora_delta(_factors(golden, module, strengths), torch.bfloat16)
            yield Result(module, _ulps(fused, expected, base), BF16_ULPS)
        else:
            fused = base.float() + lora_delta(_factors(golden, module, strengths), torch.float32)
            yield compare(module, fused, golden[f"exact_f32.{name}"], FLOAT32_TOLERANCE)


def _fp8(golden, strengths):
    delta = lora_delta(_factors(golden, FP8_MODULE, strengths), torch.bfloat16)
    name = f"{FP8_MODULE}.weight"
    weight, scale = fuse_scaled_fp8(golden[f"fp8.base.{name}"], golden[f"fp8.base.{name}_scale"], delta)
    yield compare("scale", scale, golden[f"fp8.fused.{name}_scale"], FLOAT32_TOLERANCE)
    yield compare("weight", weight.float(), golden[f"fp8.fused.{name}"].float(), 0.0)


def _factors(golden, module: str, strengths) -> list[tuple[Tensor, Tensor, float]]:
    names = [f"lora{index}.diffusion_model.{module}.lora" for index in range(len(strengths))]
    return [
        (golden[f"{name}_A.weight"], golden[f"{name}_B.weight"], strength)
        for name, strength in zip(names, strengths, strict=True)
        if f"{name}_A.weight" in golden
    ]


def _ulps(fused: Tensor, expected: Tensor, base: Tensor) -> float:
    """Largest difference in bf16 steps at the size of what is added up: where weight and delta nearly cancel, a step of
    the result is much smaller than what rounding the delta may give."""
    size = base.double().abs() + expected.double().abs()
    step = torch.exp2(torch.floor(torch.log2(size)) - 7)
    return ((fused.double() - expected.double()).abs() / step).max().item()
