"""Neighbourhood attention of the diffusion decoder: the kernel against its definition, then a sweep of its constants.

    python3 dev.py bench neighbourhood_attention [--grid 121 128 192] [--window 11 11 11] [--heads 4] [--json FILE]
        [--tiny]

Prints what every configuration takes on that grid, its rate over the work that the window asks for and over the work it
does, comfy-kitchen's na3d where it is installed, and the other stages of a 768x512x121 decode. Under a minute. On the
CPU (--tiny) there is the definition in plain torch alone.

Predicted for the default grid on an H200 (see neighbourhood_kernel.py): 25 ms for tiles of 4x4x8, 64 keys, 8 warps, 3
stages at 128 registers; two stages 10-20 % slower (nothing in flight while a block computes); 128 keys without the
register limit 30 % slower (one block a multiprocessor); tiles of 2x4x8 limited by L2 (150 GB: 27 ms or more).
"""
from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _models import device_of, finish, parse, parser_of, spread, synchronize

from ltx_runtime.video_vae.neighbourhood_attention import (
    Sizes,
    attention_backend,
    neighbourhood_attention,
    plain_attention,
)

# Of KernelShape, beside the best one.
SWEEP = (
    {"stages": 2},
    {"stages": 4},
    {"block_keys": 128, "stages": 2, "registers": None},
    {"block_keys": 128, "stages": 2},
    {"tile": (2, 4, 8), "warps": 4, "stages": 2},
    {"tile": (2, 4, 8), "warps": 4, "stages": 3},
    {"tile": (8, 4, 8), "stages": 2, "registers": None},
)
TINY_GRID, TINY_WINDOW = (5, 8, 12), (3, 5, 5)
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
    parser = parser_of(__doc__)
    parser.add_argument("--grid", type=int, nargs=3, metavar=("T", "H", "W"), help="121 128 192 by default")
    parser.add_argument("--window", type=int, nargs=3, metavar=("T", "H", "W"), help="11 11 11 by default")
    parser.add_argument("--heads", type=int, default=4)
    arguments = parse(parser)
    grid = tuple(arguments.grid or (TINY_GRID if arguments.tiny else (121, 128, 192)))
    window = tuple(arguments.window or (TINY_WINDOW if arguments.tiny else (11, 11, 11)))
    device = device_of(arguments.tiny)
    print(f"backend: {attention_backend(device, torch.bfloat16, 64)}")
    best, *others = candidates(device)
    with torch.inference_mode():
        first, *rest = CHECKS[2:] if arguments.tiny else CHECKS
        checks = [check(way, *first, device) for way in (best, *others)]
        checks += [check(best, *case, device) for case in rest]
        for line in (f"{c['name']}: worst error {c['error']:.1e}" for c in checks):
            print(line)
        q, k, v = random_qkv(grid, arguments.heads, 64, device)
        out = torch.empty_like(q)
        rows = [measure(way, q, k, v, window, out) for way in (best, *others)]
        rows += peer(q, k, v, window) if device.type == "cuda" else []
        stages = [] if arguments.tiny else [stage(best, *case, device) for case in OTHER_STAGES]
    finish(
        "neighbourhood_attention",
        arguments,
        device,
        "\n".join(map(line_of, [*rows, *stages])),
        rows,
        grid=grid,
        window=window,
        heads=arguments.heads,
        checks=checks,
        other_stages=stages,
        other_stages_ms=sum(row["ms"]["median"] * row["calls"] for row in stages),
    )
    bad = [c["name"] for c in checks if not c["error"] <= TOLERANCE]
    if bad:
        raise SystemExit(f"wrong: {', '.join(bad)}")


@dataclass(frozen=True)
class Way:
    """name: its constants. attend: (q, k, v, window, out). done_flop: (grid, heads, head_dim, window) -> what it does,
    None where that is what the window asks for."""

    name: str
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sizes, torch.Tensor], object]
    done_flop: Callable[[Sizes, int, int, Sizes], int] | None = None


def candidates(device: torch.device) -> list[Way]:
    """The best first."""
    if device.type != "cuda":
        return [Way("plain torch", lambda q, k, v, window, out: neighbourhood_attention(q, k, v, window, out=out))]
    kernel = importlib.import_module("ltx_runtime.video_vae.neighbourhood_kernel")  # imports triton

    def way(shape) -> Way:
        def done_flop(grid: Sizes, heads: int, head_dim: int, window: Sizes) -> int:
            box = kernel.box_sizes(grid, window, shape)
            blocks = -(-box[1] * box[2] // shape.block_keys)
            queries = 1
            for cells, tile in zip(grid, shape.tile):
                queries *= -(-cells // tile) * tile
            return 4 * queries * heads * head_dim * box[0] * blocks * shape.block_keys

        return Way(words(shape), partial(kernel.attend, shape=shape), done_flop)

    return [way(kernel.BEST), *(way(kernel.KernelShape(**constants)) for constants in SWEEP)]


def random_qkv(grid: Sizes, heads: int, head_dim: int, device: torch.device) -> list[torch.Tensor]:
    """Queries as the decoder makes them: scores have a deviation of about 1."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, *grid, heads, head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(3))
    return [q.mul_(head_dim**-0.5), k, v]


def check(way: Way, grid: Sizes, window: Sizes, heads: int, head_dim: int, device: torch.device) -> dict:
    q, k, v = random_qkv(grid, heads, head_dim, device)
    exact = torch.empty_like(q, dtype=torch.float32)
    plain_attention(q.float(), k.float(), v.float(), window, exact)
    out = torch.full_like(q, float("nan"))
    way.attend(q, k, v, window, out)
    name = f"{way.name} on {'x'.join(map(str, grid))}, window {'x'.join(map(str, window))}, head_dim {head_dim}"
    return {"name": name, "error": (out.float() - exact).abs().max().item()}


def measure(
    way: Way, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Sizes, out: torch.Tensor
) -> dict:
    started = time.perf_counter()
    way.attend(q, k, v, window, out)
    synchronize(q.device)
    first_ms = (time.perf_counter() - started) * 1e3
    row = rated(way.name, timed(lambda: way.attend(q, k, v, window, out), q.device), q, window) | {"first_ms": first_ms}
    if way.done_flop is not None:
        row["done_flop"] = way.done_flop(tuple(q.shape[1:4]), q.shape[4], q.shape[5], window)
    return row


def peer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: Sizes) -> list[dict]:
    try:
        from comfy_kitchen import na3d
    except ImportError as error:
        print(f"comfy-kitchen na3d: not measured, {error}")
        return []
    return [rated("comfy-kitchen na3d", timed(lambda: na3d(q, k, v, list(window), scale=1.0), q.device, 3), q, window)]


def stage(way: Way, grid: Sizes, window: Sizes, heads: int, calls: int, device: torch.device) -> dict:
    q, k, v = random_qkv(grid, heads, 64, device)
    out = torch.empty_like(q)
    name = f"{'x'.join(map(str, grid))}, {heads} heads, window {'x'.join(map(str, window))}"
    return rated(name, timed(lambda: way.attend(q, k, v, window, out), device), q, window) | {"calls": calls}


def rated(name: str, times: list[float], q: torch.Tensor, window: Sizes) -> dict:
    exact = 4 * q.numel() * window[0] * window[1] * window[2]
    return {"name": name, "ms": spread(times), "exact_flop": exact}


def timed(call: Callable[[], object], device: torch.device, repeats: int = 7) -> list[float]:
    """Milliseconds of each call, by events on a GPU, after two that are not counted."""
    times = []
    for _ in range(2 + repeats):
        if device.type != "cuda":
            started = time.perf_counter()
            call()
            times.append((time.perf_counter() - started) * 1e3)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return times[2:]


def words(shape) -> str:
    registers = f"{shape.registers} registers" if shape.registers else "registers free"
    tile = "x".join(map(str, shape.tile))
    return f"tile {tile}, {shape.block_keys} keys, {shape.warps} warps, {shape.stages} stages, {registers}"


def line_of(row: dict) -> str:
    ms = row["ms"]
    rate = row["exact_flop"] / ms["median"] / 1e9
    line = f"{row['name']:<62} {ms['median']:8.2f} ms ({ms['min']:.2f}-{ms['max']:.2f})  {rate:6.0f} TFLOP/s"
    if "done_flop" in row:
        line += f", {row['done_flop'] / ms['median'] / 1e9:.0f} with waste; first call {row['first_ms']:.0f} ms"
    return line + (f"; {row['calls']} calls a decode" if "calls" in row else "")


if __name__ == "__main__":
    main()
