"""Eight distilled steps and the conv decode: a phase table per size, and the parity verdict on decoded frames.

    python3 dev.py bench end_to_end [S0 S1 S2] [--replays 3] [--seeds 2] [--json FILE] [--tiny]

Weights are random, so the pictures mean nothing; times, memory and bits are real.
"""
from __future__ import annotations

import time

from _models import (
    SIZES,
    Models,
    clip_request,
    clip_sizes,
    finish,
    open_models,
    parse,
    parser_of,
    size_name,
    spread,
    synchronize,
)

from ltx_runtime.parity_run import run_parity
from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="all by default")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parse(parser, sizes=["S0"], replays=1, seeds=1)
    models = open_models(arguments.tiny)
    rows = []
    for name, size in clip_sizes(arguments.sizes or SIZES, arguments.tiny).items():
        rows.append({"size": name, **renders(models, size)})
        print(words(rows[-1]), flush=True)
        rows[-1] |= parity(models, size, arguments)
        print(f"parity: {rows[-1]['verdict']}\n", flush=True)
    finish("end_to_end", arguments, models.device, "\n".join(map(words, rows)), rows)


def renders(models: Models, size: tuple[int, int, int]) -> dict:
    """Warm renders, eager and graphed: medians of wall time, and the last one's phases."""
    row: dict = {"clip": size_name(size)}
    for mode in ("off", "on"):
        walls = []
        for index in range(4):  # the first warms up, or captures
            timeline = Timeline(None, device=models.device)
            models.transformer.contexts.clear()  # a new prompt, as the first render has it
            synchronize(models.device)
            started = time.perf_counter()
            with timeline.segment("sampler"):
                request = clip_request(models.transformer, size)
                result = sample(models.transformer, request, cuda_graph=mode, timeline=timeline)
            with timeline.segment("decode"):
                frames = models.vae.decode(result.video, timeline=timeline)
            walls.append((time.perf_counter() - started) * 1e3)
            if index == 0 and mode == "on":
                row["capture"] = result.graph.get("capture")
        row["eager" if mode == "off" else "graphed"] = {"render_ms": spread(walls[1:]), **timeline.summary()}
        row["frames"] = list(frames.shape)
    return row


def parity(models: Models, size: tuple[int, int, int], arguments) -> dict:
    timelines: dict[str, Timeline] = {}

    def timeline(arm: str) -> Timeline:
        return timelines.setdefault(arm, Timeline(None, device=models.device))

    outcome = run_parity(
        models.transformer,
        models.vae,
        clip_request(models.transformer, size),
        replays=arguments.replays,
        seeds=arguments.seeds,
        tolerance=0.0,
        timelines=timeline,
    )
    models.transformer.graphs.close()
    verdict = outcome.verdict
    return {"verdict": verdict.words, "bit_exact": verdict.bit_exact, "numbers": verdict.numbers}


def words(row: dict) -> str:
    lines = [f"## {row['size']} {row['clip']}: {row['frames']}", ""]
    for name in ("eager", "graphed"):
        arm = row[name]
        walls = arm["render_ms"]
        lines.append(f"{name}: median {walls['median']:.0f} ms ({walls['min']:.0f}-{walls['max']:.0f}), "
                     f"phases cover {arm['coverage']:.1%}, unaccounted {arm['unaccounted_ms']:.1f} ms")
        lines.append("| phase | count | wall ms | stream ms | GPU ms | CPU ms | peak GB |")
        lines.append("|---|---|---|---|---|---|---|")
        for phase, numbers in arm["phases"].items():
            gpu = "-" if numbers["gpu_ms"] is None else f"{numbers['gpu_ms']:.1f}"
            lines.append(f"| {phase} | {numbers['count']} | {numbers['wall_ms']:.1f} | {numbers['stream_ms'] or 0:.1f} "
                         f"| {gpu} | {numbers['cpu_ms']:.1f} | {(numbers['mem_peak_bytes'] or 0) / 1e9:.1f} |")
        lines.append("")
    if "verdict" in row:
        lines.append(f"parity: {row['verdict']}\n")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
