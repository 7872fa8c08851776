"""The Triton kernels in Triton's interpreter, which runs them in numpy, program by program: slow, but it needs no GPU.

The interpreter is switched on before triton is imported, hence a process of its own. Its matrix product can't do bf16.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_neighbourhood_attention import definition, random_qkv

HERE = Path(__file__).parent
ATTENTION = [
    # grid, window, heads, head_dim, batch, tile, keys a step
    ((5, 4, 9), (3, 3, 5), 1, 16, 1, (4, 4, 8), 32),
    ((3, 5, 5), (3, 5, 5), 2, 16, 2, (4, 4, 4), 32),
    ((5, 5, 3), (2, 4, 3), 1, 24, 1, (4, 4, 2), 16),
    ((4, 4, 4), (3, 1, 3), 1, 64, 1, (4, 4, 8), 64),
]
POINTWISE = [(16, torch.float32), (24, torch.float16), (64, torch.bfloat16)]  # head_dim, dtype


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_compute_what_the_plain_paths_do():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(lines) == len(ATTENTION) + 2 * len(POINTWISE)
    bad = [name for name, error, tolerance in lines if not float(error) <= float(tolerance)]
    assert not bad, done.stdout


def main() -> None:
    """Print name, worst error and tolerance of every case."""
    torch.set_num_threads(1)
    for index, case in enumerate(ATTENTION):
        print(f"attention {index}", attention_error(*case, in_place=not index), 4e-3)
    for head_dim, dtype in POINTWISE:
        tolerance = 8 * torch.finfo(dtype).eps
        print("split_norm_rope", split_norm_rope_error(head_dim, dtype), tolerance)
        print("silu_mul", silu_mul_error(dtype), tolerance)


def attention_error(grid, window, heads, head_dim, batch, tile, block_keys, *, in_place) -> float:
    from ltx_runtime.video_vae.neighbourhood_kernel import KernelShape, launch

    q, k, v = random_qkv(grid, heads, head_dim, torch.float16, batch=batch)
    exact = definition(q, k, v, window)
    out = q if in_place else torch.full_like(q, float("nan"))
    launch(q, k, v, window, out, KernelShape(tile=tile, block_keys=block_keys))
    return (out.double() - exact).abs().max().item()


def split_norm_rope_error(head_dim, dtype) -> float:
    from ltx_runtime.video_vae import pointwise, pointwise_kernels
    from ltx_runtime.video_vae.rotary import RotaryTables

    count, first, heads = 40, 13, 2
    tables = RotaryTables.of((3, 4, 5), head_dim, torch.device("cpu"))
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(count, 3 * heads * head_dim, generator=generator).to(dtype)
    weights = [torch.randn(head_dim, generator=generator) for _ in range(2)]
    results = []
    for module in (pointwise, pointwise_kernels):
        q = torch.zeros(count, 4, head_dim, dtype=dtype)  # two heads of four are written
        k, v = (torch.zeros(count, heads, head_dim, dtype=dtype) for _ in range(2))
        module.split_norm_rope(qkv, *weights, tables, first, q[:, 1:3], k, v)
        results.append((q, k, v))
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(*results))


def silu_mul_error(dtype) -> float:
    from ltx_runtime.video_vae import pointwise, pointwise_kernels

    generator = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(33, 70, generator=generator).to(dtype) for _ in range(2))
    fused = gate.clone()
    pointwise_kernels.silu_mul(fused, up)
    return (pointwise.silu_mul_(gate, up).double() - fused.double()).abs().max().item()


if __name__ == "__main__":
    main()
