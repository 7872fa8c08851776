"""The attention's Triton kernels in Triton's interpreter against float64, on odd widths, heads and tokens.

A process of its own, see triton_interpreter.py.
"""

from __future__ import annotations

import torch
from triton_interpreter import check_cases, needs_triton

from ltx_runtime.transformer.attention import Attention
from ltx_runtime.transformer.inputs import GuideBias
from ltx_runtime.transformer.rope import RopeTable, apply_rope

ROTATED = [
    # batch, tokens of q, of k, heads, head_dim, samples that have an own table (None: no rope), dtype
    (1, 5, 5, 2, 16, 1, torch.float32),
    (2, 7, 3, 3, 12, 1, torch.float32),
    (2, 1, 6, 5, 10, 2, torch.float16),
    (3, 4, 9, 1, 64, 3, torch.bfloat16),
    (2, 6, 2, 3, 12, None, torch.float32),
    (1, 1, 1, 32, 64, None, torch.bfloat16),
]
GATED = [(1, 1, 1, 16, torch.float32), (2, 7, 3, 12, torch.float32), (1, 300, 5, 64, torch.bfloat16)]
MODULES = ["self", "cross", "text", "one head", "skip", "keep", "no gates", "guides", "eps"]


@needs_triton
def test_the_kernels_compute_what_the_plain_path_does():
    check_cases(__file__, 2 * len(ROTATED) + len(GATED) + len(MODULES))


def main() -> None:
    """Print name, worst error and tolerance of every case."""
    from ltx_runtime.transformer import attention_kernels

    torch.set_num_threads(1)
    torch.manual_seed(0)
    attention_kernels.probe(torch.device("cpu"), torch.float32, 2, 16)
    for case in ROTATED:
        for name, error in zip("qk", rotated_errors(*case)):
            print(f"{name} {case}", error, rounded_once(case[-1]))
    for case in GATED:
        print(f"gates {case}", gated_error(*case), rounded_once(case[-1]))
    for name in MODULES:
        print(name, module_error(name), 2e-6)


def rounded_once(dtype: torch.dtype) -> float:
    """Half a unit in the last place, and float32's own errors. The interpreter cuts off what bfloat16 can't hold."""
    return (1.01 if dtype == torch.bfloat16 else 0.51) * torch.finfo(dtype).eps + 3e-6


def random_table(samples: int, tokens: int, heads: int, half: int, dtype: torch.dtype) -> RopeTable:
    angles = 10 * torch.randn(samples, tokens, heads, half)
    return RopeTable(angles.cos().to(dtype), angles.sin().to(dtype))


def rotated_errors(batch, q_tokens, k_tokens, heads, head_dim, samples, dtype) -> list[float]:
    """Relative to the values themselves, whose rows have lengths of all magnitudes: eps counts in the first."""
    from ltx_runtime.transformer.attention_kernels import norm_and_rotate_

    inner, eps = heads * head_dim, 1e-4
    xs, weights, tables, expected = [], [], [], []
    for tokens in (q_tokens, k_tokens):
        x = torch.randn(batch, tokens, inner) * 10.0 ** torch.linspace(-3, 2, batch * tokens).reshape(batch, tokens, 1)
        weight = 1 + torch.randn(inner) / 4
        table = None if samples is None else random_table(samples, tokens, heads, head_dim // 2, dtype)
        x, weight = x.to(dtype), weight.to(dtype)
        wide = x.double()
        normed = wide * (wide.square().mean(dim=2, keepdim=True) + eps).rsqrt() * weight.double()
        if table is not None:
            table_64 = RopeTable(table.cos.double(), table.sin.double())
            normed = apply_rope(normed.unflatten(2, (heads, head_dim)), table_64).flatten(2)
        xs.append(x)
        weights.append(weight)
        tables.append(table)
        expected.append(normed)
    norm_and_rotate_(*xs, *weights, *tables, head_dim, eps=eps)
    return [((x.double() - right).abs() / (1e-2 + right.abs())).max().item() for x, right in zip(xs, expected)]


def gated_error(batch, tokens, heads, head_dim, dtype) -> float:
    from ltx_runtime.transformer.attention_kernels import gate_heads_

    x, logits = torch.randn(batch, tokens, heads, head_dim).to(dtype), 3 * torch.randn(batch, tokens, heads).to(dtype)
    expected = x.double() * 2 * logits.double().sigmoid().unsqueeze(-1)
    gate_heads_(x, logits)
    return ((x.double() - expected).abs() / (1e-2 + expected.abs())).max().item()


def module_error(name: str) -> float:
    """A whole Attention, fused in float32 against plain in float64."""
    heads, head_dim, batch, tokens = (1 if name == "one head" else 3), 12, 2, 7
    width, context_width = 20, (28 if name in ("cross", "text") else 20)
    attention = Attention(width, context_width, heads, head_dim, gated=name != "no gates", eps=1e-6)
    for norm in (attention.q_norm, attention.k_norm):
        torch.nn.init.normal_(norm.weight, 1, 0.2)
    x = torch.randn(batch, tokens, width)
    options = {"skip": name == "skip", "qk_eps": 1e-2 if name == "eps" else None}
    if name in ("cross", "text"):
        options["context"] = torch.randn(batch, 5, context_width)
    if name != "text":
        options["rope"] = random_table(1, tokens, heads, head_dim // 2, torch.float32)
    if name == "cross":
        options["context_rope"] = random_table(2, 5, heads, head_dim // 2, torch.float32)
    if name == "keep":
        options["keep"] = torch.tensor([1.0, 0.25])[:, None, None, None]
    if name == "guides":
        options["bias"] = GuideBias(torch.randn(1, 1, 1, tokens), torch.randn(1, 1, 2, tokens))

    def wide(value):
        if isinstance(value, torch.Tensor):
            return value.double()
        if isinstance(value, RopeTable):
            return RopeTable(value.cos.double(), value.sin.double())
        return GuideBias(value.keys.double(), value.queries.double()) if isinstance(value, GuideBias) else value

    with torch.inference_mode():
        fused = attention(x, **options, fused=True)
        exact = attention.double()(x.double(), **{key: wide(value) for key, value in options.items()})
    return ((fused - exact).abs() / (1 + exact.abs())).max().item()


if __name__ == "__main__":
    main()
