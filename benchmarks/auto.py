"""Does "auto" ever cost more than eager once it has decided, and what does deciding cost?

    python3 dev.py bench auto [S0 S1 S2] [--runs 6] [--steps 8] [--json FILE] [--tiny]

Per size: eager renders; then "auto" from a cache that knows nothing: the render that measures, the one that captures if
it comes to that, and as many settled ones as eager ones, eager and settled in turns for the second half. A render is
the preparation and all steps, device idle at both ends. Ends with exit code 1 when the median of the settled ones is
over the slowest eager one, or when measuring or capturing leaves its budget; but not with --tiny, whose figures mean
nothing.
"""

from __future__ import annotations

import sys
import time

import torch
from _models import (
    Models,
    clip_request,
    clip_sizes,
    finish,
    markdown,
    open_models,
    parse,
    parser_of,
    size_name,
    spread,
    synchronize,
)

from ltx_runtime.sampler import sample
from ltx_runtime.timing import Timeline

# The budget (docs/decisions.md). Measuring: so many eager steps for the measured one. Capturing: a warm-up and a first
# replay, each an eager step with reserve, and time for each launch to be recorded. Both have a fixed part, most of it
# at tiny sizes. Memory: a share of the card.
MEASURE_STEPS, MEASURE_MS = 4, 60.0
CAPTURE_STEPS, CAPTURE_LAUNCH_MS, CAPTURE_MS = 3, 0.1, 100.0
MEMORY_SHARE = 1 / 8
# Renders after the first within which "auto" has to settle.
SETTLES_WITHIN = 3


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="S0 and S1 by default")
    parser.add_argument("--runs", type=int, default=6, help="eager renders, and settled ones, of each size")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parse(parser, sizes=["S0"], runs=2, steps=2)
    models = open_models(arguments.tiny)
    rows = []
    for name, size in clip_sizes(arguments.sizes or ("S0", "S1"), arguments.tiny).items():
        rows.append({"size": name, **measure(models, size, arguments.runs, arguments.steps)})
        print(words(rows[-1]), flush=True)
    finish("auto", arguments, models.device, table(rows), rows)
    if not arguments.tiny and not all(row["not_slower"] and row["within_budget"] for row in rows):
        sys.exit("auto is slower than eager, or over its budget")


def measure(models: Models, size: tuple[int, int, int], runs: int, steps: int) -> dict:
    model = models.transformer
    model.graphs.close()
    model.graphs.forget_measurements()
    render(models, size, steps, "off")  # cold kernels
    eager = [render(models, size, steps, "off")[0] for _ in range(runs - runs // 2)]
    first = [render(models, size, steps, "auto")]
    while has_work_left(first[-1][1]) and len(first) <= SETTLES_WITHIN:
        first.append(render(models, size, steps, "auto"))
    settled = []
    for index in range(runs):
        settled.append(render(models, size, steps, "auto"))
        if index < runs // 2:
            eager.append(render(models, size, steps, "off")[0])
    accounts = [account for _, account, _ in first]
    measured = next((account["measured"] for account in accounts if account.get("measured")), None)
    capture = next((account["capture"] for account in accounts if account.get("capture")), None)
    summaries = [timeline.summary()["phases"] for *_, timeline in first]
    phases = {
        phase: sum(summary[phase]["wall_ms"] for summary in summaries if phase in summary)
        for phase in ("sample.measure", "sample.warmup", "sample.capture")
    }
    measuring = [
        {"wall_ms": event["wall_ms"], "method": event["gpu_method"], **event["attrs"]}
        for *_, timeline in first
        for event in timeline.events
        if event["event"] == "end" and event["phase"] == "sample.measure"
    ]
    eager_spread, settled_spread = spread(eager), spread([wall for wall, *_ in settled])
    model.graphs.close()
    row = {
        "clip": size_name(size),
        "steps": steps,
        "eager_ms": eager_spread,
        "eager_walls_ms": eager,
        "first_ms": [wall for wall, *_ in first],
        "settled_walls_ms": [wall for wall, *_ in settled],
        "settled_ms": settled_spread,
        "settled_as": sorted({account["mode"] for _, account, _ in settled}),
        "decisions": [account["decision"] for account in accounts],
        "ran": [account["steps"] for account in accounts],
        "measured": measured,
        "measuring": measuring,
        "phases_ms": phases,
        "capture": capture,
    }
    return row | verdict(row, card_bytes(models.device))


def render(models: Models, size, steps: int, mode: str) -> tuple[float, dict, Timeline]:
    """Wall ms, what happened about graphs, the log."""
    timeline = Timeline(None, device=models.device)
    synchronize(models.device)
    started = time.perf_counter()
    result = sample(
        models.transformer,
        clip_request(models.transformer, size, steps=steps),
        cuda_graph=mode,
        timeline=timeline,
    )
    synchronize(models.device)
    return (time.perf_counter() - started) * 1e3, result.graph, timeline


def card_bytes(device: torch.device) -> int | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def has_work_left(account: dict) -> bool:
    """Whether the next render of this shape may still measure or capture: this one did, or could do neither."""
    return "measure" in account["steps"] or "capture" in account["steps"]


def verdict(row: dict, card: int | None) -> dict:
    """not_slower: the settled median against the spread of the eager runs. within_budget: phases and memory against the
    budget above; what did not happen costs nothing."""
    over = []
    measured, capture, phases = row["measured"], row["capture"], row["phases_ms"]
    if measured:
        wall = measured["wall_ms"]
        if phases["sample.measure"] > MEASURE_STEPS * wall + MEASURE_MS:
            over.append("measuring")
        if phases["sample.warmup"] + phases["sample.capture"] > (
            CAPTURE_STEPS * wall + CAPTURE_LAUNCH_MS * measured["launches"] + CAPTURE_MS
        ):
            over.append("capturing")
    if capture and card and capture["graph_bytes"] + capture["static_bytes"] > MEMORY_SHARE * card:
        over.append("memory")
    return {
        "not_slower": row["settled_ms"]["median"] <= row["eager_ms"]["max"],
        "within_budget": not over,
        "over_budget": over,
    }


def words(row: dict) -> str:
    lines = [f"{row['size']} {row['clip']}, {row['steps']} steps:"]
    for number, (wall, ran, decision) in enumerate(zip(row["first_ms"], row["ran"], row["decisions"]), start=1):
        counted = ", ".join(f"{ran.count(kind)} {kind}" for kind in dict.fromkeys(ran))
        lines.append(f"  auto render {number}: {wall:.1f} ms ({counted}); {decision}")
    answer = "yes" if row["not_slower"] else "NO"
    lines.append(
        f"  not slower than eager once settled: {answer}: {row['settled_ms']['median']:.1f} against "
        f"{row['eager_ms']['median']:.1f} ({row['eager_ms']['min']:.1f}-{row['eager_ms']['max']:.1f}) ms"
    )
    budget = "yes" if row["within_budget"] else f"NO: {', '.join(row['over_budget'])}"
    lines.append(f"  within the budget: {budget}")
    return "\n".join(lines)


def table(rows: list[dict]) -> str:
    head = [
        "size",
        "eager ms (min-max, runs)",
        "auto settled ms (min-max, runs)",
        "settled as",
        "not slower",
        "measure ms",
        "warm-up + capture ms",
        "capture MB",
        "within budget",
    ]
    lines = []
    for row in rows:
        times = [
            f"{s['median']:.1f} ({s['min']:.1f}-{s['max']:.1f}, {s['runs']})"
            for s in (row["eager_ms"], row["settled_ms"])
        ]
        phases, capture = row["phases_ms"], row["capture"]
        held = "-" if capture is None else f"{(capture['graph_bytes'] + capture['static_bytes']) / 1e6:.0f}"
        lines.append(
            [
                f"{row['size']} {row['clip']}",
                *times,
                ", ".join(row["settled_as"]),
                "yes" if row["not_slower"] else "NO",
                f"{phases['sample.measure']:.0f}",
                f"{phases['sample.warmup']:.0f} + {phases['sample.capture']:.0f}",
                held,
                "yes" if row["within_budget"] else "NO",
            ]
        )
    return markdown(head, lines)


if __name__ == "__main__":
    main()
