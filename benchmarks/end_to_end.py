"""Eight distilled steps and the conv decode: a phase table per size, and the parity verdict on decoded frames.

    python3 dev.py bench end_to_end [S0 S1 S2] [--replays 3] [--seeds 2] [--json FILE]

Weights are random, so the pictures mean nothing; times, memory and bits are real.
"""
from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from full_size import SIZES, RandomTransformer, RandomVideoVAE, environment, request

from ltx_runtime.parity_run import run_parity
from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="all by default")
    parser.add_argument("--replays", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", help="write the full numbers here")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or list(SIZES)
    device = torch.device("cuda", 0)
    model, vae = RandomTransformer(device), RandomVideoVAE(device)
    model.ensure_resident()
    vae.ensure_resident()
    rows = []
    for size in arguments.sizes:
        rows.append(renders(model, vae, size))
        print(words(rows[-1]), flush=True)
        rows[-1] |= parity(model, vae, size, arguments)
        print(f"parity: {rows[-1]['verdict']}\n", flush=True)
    result = {"benchmark": "end_to_end", "environment": environment(), "rows": rows}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    print(json.dumps(result))


def renders(model, vae, size: str) -> dict:
    """Warm renders, eager and graphed: medians of wall time, and the last one's phases."""
    row: dict = {"size": size}
    for mode in ("off", "on"):
        walls = []
        for index in range(4):  # the first warms up, or captures
            timeline = Timeline(None, device=model.device)
            torch.cuda.synchronize()
            started = time.perf_counter()
            with timeline.segment("sampler"):
                result = sample(model, request(size), cuda_graph=mode, timeline=timeline)
            with timeline.segment("decode"):
                frames = vae.decode(result.video, timeline=timeline)
            walls.append((time.perf_counter() - started) * 1e3)
            if index == 0 and mode == "on":
                row["capture"] = result.graph["capture"]
        name = "eager" if mode == "off" else "graphed"
        spread = {"median_ms": statistics.median(walls[1:]), "range_ms": [min(walls[1:]), max(walls[1:])]}
        row[name] = {**spread, **timeline.summary()}
        row["frames"] = list(frames.shape)
    return row


def parity(model, vae, size: str, arguments) -> dict:
    timelines: dict[str, Timeline] = {}

    def timeline(arm: str) -> Timeline:
        return timelines.setdefault(arm, Timeline(None, device=model.device))

    outcome = run_parity(
        model, vae, request(size), replays=arguments.replays, seeds=arguments.seeds, tolerance=0.0, timelines=timeline
    )
    model.graphs.close()
    verdict = outcome.verdict
    return {"verdict": verdict.words, "bit_exact": verdict.bit_exact, "numbers": verdict.numbers}


def words(row: dict) -> str:
    lines = [f"## {row['size']}: {row['frames']}", ""]
    for name in ("eager", "graphed"):
        arm = row[name]
        lines.append(f"{name}: median {arm['median_ms']:.0f} ms ({arm['range_ms'][0]:.0f}-{arm['range_ms'][1]:.0f}), "
                     f"phases cover {arm['coverage']:.1%}, unaccounted {arm['unaccounted_ms']:.1f} ms")
        lines.append("| phase | count | wall ms | stream ms | GPU ms | CPU ms | peak GB |")
        lines.append("|---|---|---|---|---|---|---|")
        for phase, numbers in arm["phases"].items():
            gpu = "-" if numbers["gpu_ms"] is None else f"{numbers['gpu_ms']:.1f}"
            lines.append(f"| {phase} | {numbers['count']} | {numbers['wall_ms']:.1f} | {numbers['stream_ms'] or 0:.1f} "
                         f"| {gpu} | {numbers['cpu_ms']:.1f} | {(numbers['mem_peak_bytes'] or 0) / 1e9:.1f} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
