"""Norm epsilons made visible by tiny activations (transformer.md sections 2 and 18.2)."""

from __future__ import annotations

from pathlib import Path

import torch.nn.functional as F
from safetensors.torch import load_file

from golden_kinds import compare
from ltx_runtime.transformer.attention import Attention
from ltx_runtime.transformer.rope import RopeTable

PENDING: dict[str, str] = {}
TOLERANCE = 1e-6
EPS = 1e-6


def cases(path: Path) -> list[str]:
    norms = (name.removesuffix(".in") for name in load_file(path) if name.startswith("norm.") and name.endswith(".in"))
    return ["attention", *norms]


def check(path: Path, case: str):
    golden = load_file(path)
    if case == "attention":
        x = golden["attn.in"]
        heads = golden["attn.rope_cos"].shape[1]
        attention = Attention(x.shape[2], x.shape[2], heads, x.shape[2] // heads, gated=True, eps=EPS)
        attention.load_state_dict({k.removeprefix("attn.w."): v for k, v in golden.items() if k.startswith("attn.w.")})
        rope = RopeTable(golden["attn.rope_cos"].transpose(1, 2), golden["attn.rope_sin"].transpose(1, 2))
        yield compare("attention", attention.requires_grad_(False)(x, rope=rope), golden["attn.out"], TOLERANCE)
    else:
        x = golden[f"{case}.in"]
        yield compare("rms", F.rms_norm(x, x.shape[-1:], None, EPS), golden[f"{case}.rms"], TOLERANCE)
        yield compare("layer", F.layer_norm(x, x.shape[-1:], eps=EPS), golden[f"{case}.layer"], TOLERANCE)
