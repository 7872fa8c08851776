"""Neighbourhood attention of the diffusion decoder: the kernel against its definition, then a sweep of its constants.

    python3 dev.py bench neighbourhood_attention [--grid 121 128 192] [--window 11 11 11] [--heads 4] [--json FILE]

Prints what every configuration takes on that grid, its rate over the work that the window asks for and over the work it
does, comfy-kitchen's na3d where it is installed, and the other stages of a 768x512x121 decode. Under a minute.

Predicted for the default grid on an H200 (see neighbourhood_kernel.py): 25 ms for tiles of 4x4x8, 64 keys, 8 warps, 3
stages at 128 registers; two stages 10-20 % slower (nothing in flight while a block computes); 128 keys without the
register limit 30 % slower (one block a multiprocessor); tiles of 2x4x8 limited by L2 (150 GB: 27 ms or more).
"""
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from full_size import environment

from ltx_runtime.video_vae.neighbourhood_attention import Sizes, attention_backend, plain_attention
from ltx_runtime.video_vae.neighbourhood_kernel import BEST, KernelShape, attend, box_sizes

SWEEP = (
    BEST,
    KernelShape(stages=2),
    KernelShape(stages=4),
    KernelShape(block_keys=128, stages=2, registers=None),
    KernelShape(block_keys=128, stages=2),
    KernelShape(tile=(2, 4, 8), warps=4, stages=2),
    KernelShape(tile=(2, 4, 8), warps=4, stages=3),
    KernelShape(tile=(8, 4, 8), stages=2, registers=None),
)
# Of 768x512x121: grid, window, heads, calls. video_vae.md section 6.1; stage 5 is the default grid.
OTHER_STAGES = (
    ((18, 16, 24), (3, 7, 7), 32, 4),
    ((18, 32, 48), (3, 7, 7), 16, 6),
    ((35, 32, 48), (3, 5, 5), 8, 4),
    ((69, 64, 96), (3, 5, 5), 8, 2),
)
# Every border, odd sizes, windows as large as the grid. The first has the boxes of the sweep's default grid.
CHECKS = (
    ((27, 19, 43), (11, 11, 11), 2, 64),
    ((11, 11, 11), (11, 11, 11), 1, 64),
    ((7, 13, 21), (3, 7, 7), 3, 64),
    ((9, 10, 11), (4, 5, 6), 2, 48),
    ((5, 17, 9), (3, 5, 5), 1, 16),
)
# bf16: the inputs are exact, weights and result are rounded (2^-9 each, relative to values near 1).
TOLERANCE = 2e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", type=int, nargs=3, default=(121, 128, 192), metavar=("T", "H", "W"))
    parser.add_argument("--window", type=int, nargs=3, default=(11, 11, 11), metavar=("T", "H", "W"))
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--json", help="write the full numbers here")
    arguments = parser.parse_args()
    grid, window = tuple(arguments.grid), tuple(arguments.window)
    device = torch.device("cuda", 0)
    print(f"backend: {attention_backend(device, torch.bfloat16, 64)}")
    with torch.inference_mode():
        checks = [check(shape, *case, device) for case in CHECKS for shape in (SWEEP if case is CHECKS[0] else (BEST,))]
        for line in (f"{c['name']}: worst error {c['error']:.1e}" for c in checks):
            print(line)
        q, k, v = random_qkv(grid, arguments.heads, 64, device)
        out = torch.empty_like(q)
        rows = [measure(shape, q, k, v, window, out) for shape in SWEEP]
        rows += peer(q, k, v, window)
        stages = [stage(*case, device) for case in OTHER_STAGES]
    for row in [*rows, *stages]:
        print(line_of(row))
    result = {
        "benchmark": "neighbourhood_attention",
        "environment": environment(),
        "grid": grid,
        "window": window,
        "heads": arguments.heads,
        "checks": checks,
        "rows": rows,
        "other_stages": stages,
        "other_stages_ms": sum(row["ms"] * row["calls"] for row in stages),
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    print(json.dumps(result))
    bad = [c["name"] for c in checks if not c["error"] <= TOLERANCE]
    if bad:
        raise SystemExit(f"wrong: {', '.join(bad)}")


def random_qkv(grid: Sizes, heads: int, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    """Queries as the decoder makes them: scores have a deviation of about 1."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, *grid, heads, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(3))
    return [q.mul_(head_dim**-0.5), k, v]


def check(
    shape: KernelShape, grid: Sizes, window: Sizes, heads: int, head_dim: int, device: torch.device
) -> dict:
    q, k, v = random_qkv(grid, heads, head_dim, device)
    exact = torch.empty_like(q, dtype=torch.float32)
    plain_attention(q.float(), k.float(), v.float(), window, exact)
    out = torch.full_like(q, float("nan"))
    attend(q, k, v, window, out, shape)
    name = f"{words(shape)} on {'x'.join(map(str, grid))}, window {'x'.join(map(str, window))}, head_dim {head_dim}"
    return {"name": name, "error": (out.float() - exact).abs().max().item()}


def measure(
    shape: KernelShape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: Sizes,
    out: torch.Tensor,
) -> dict:
    started = time.perf_counter()
    attend(q, k, v, window, out, shape)
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - started) * 1e3
    times = timed(lambda: attend(q, k, v, window, out, shape))
    grid, heads, head_dim = tuple(q.shape[1:4]), q.shape[4], q.shape[5]
    box = box_sizes(grid, window, shape)
    blocks = -(-box[1] * box[2] // shape.block_keys)
    queries = 1
    for cells, tile in zip(grid, shape.tile):
        queries *= -(-cells // tile) * tile
    done = 4 * queries * heads * head_dim * box[0] * blocks * shape.block_keys
    return rated(words(shape), times, q, window) | {"first_ms": first_ms, "done_flop": done}


def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Sizes) -> list[dict]:
    try:
        from comfy_kitchen import na3d
    except ImportError as error:
        print(f"comfy-kitchen na3d: not measured, {error}")
        return []
    return [rated("comfy-kitchen na3d", timed(lambda: na3d(q, k, v, list(window), scale=1.0), repeats=3), q, window)]


def stage(grid: Sizes, window: Sizes, heads: int, calls: int, device: torch.device) -> dict:
    q, k, v = random_qkv(grid, heads, 64, device)
    out = torch.empty_like(q)
    name = f"{'x'.join(map(str, grid))}, {heads} heads, window {'x'.join(map(str, window))}"
    return rated(name, timed(lambda: attend(q, k, v, window, out)), q, window) | {"calls": calls}


def rated(name: str, times: list[float], q: torch.Tensor, window: Sizes) -> dict:
    exact = 4 * q.numel() * window[0] * window[1] * window[2]
    return {"name": name, "ms": statistics.median(times), "range_ms": [min(times), max(times)], "exact_flop": exact}


def timed(call: Callable[[], object], repeats: int = 7) -> list[float]:
    """Milliseconds of each call by events, after two that are not counted."""
    times = []
    for _ in range(2 + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[2:]


def words(shape: KernelShape) -> str:
    registers = f"{shape.registers} registers" if shape.registers else "registers free"
    tile = "x".join(map(str, shape.tile))
    return f"tile {tile}, {shape.block_keys} keys, {shape.warps} warps, {shape.stages} stages, {registers}"


def line_of(row: dict) -> str:
    rate = row["exact_flop"] / row["ms"] / 1e9
    low, high = row["range_ms"]
    line = f"{row['name']:<62} {row['ms']:8.2f} ms ({low:.2f}-{high:.2f})  {rate:6.0f} TFLOP/s"
    if "done_flop" in row:
        line += f", {row['done_flop'] / row['ms'] / 1e9:.0f} with waste; first call {row['first_ms']:.0f} ms"
    return line + (f"; {row['calls']} calls a decode" if "calls" in row else "")


if __name__ == "__main__":
    main()
