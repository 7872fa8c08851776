"""One denoising step at S0, S1, S2, eager and graphed: times, busy share, launches, copies, syncs, memory, capture.

    python3 dev.py bench step [S0 S1 S2] [--json FILE]

Each size's row is printed as soon as it is measured, CUPTI's columns later; at the end both tables.

Eager wall and GPU time come from separate renders: CUPTI slows the host. GPU time is measured by CUPTI and, as `auto`
does inside a render, by events (ltx_runtime/gpu_time.py); the second table sets one against the other. Graphed GPU time
is an event pair around the replay.
"""
from __future__ import annotations

import argparse
import json
import statistics

import torch
from full_size import SIZES, RandomTransformer, environment, request

from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.gpu_time import SHORTEST_KERNEL_MS, LaunchCount, launch_gap_ms, queue_pace_ms, queued_gpu_time
from ltx_runtime.sampler import prepare, sample
from ltx_runtime.step_runner import BLOCKS_PER_PART, SLOW_LAUNCH_MS
from ltx_runtime.steps import denoise_step
from ltx_runtime.timing import Timeline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="all by default")
    parser.add_argument("--json", help="write the full numbers here")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or list(SIZES)
    device = torch.device("cuda", 0)
    model = RandomTransformer(device)
    model.ensure_resident()
    rows = []
    for size in arguments.sizes:
        rows.append(measure(model, size))
        print(f"{table(rows[-1:])}\n\nauto: {rows[-1]['auto']}\n", flush=True)
    for row in rows:
        row["by_events"] = by_events(model, row["size"], row["eager_ms"])
        print(f"{row['size']} by events: {json.dumps(row['by_events'])}\n", flush=True)
    gap = {"pace_us": (queue_pace_ms(device) or 0) * 1e3, "gap_us": launch_gap_ms(device) * 1e3}
    # CUPTI last of all: once used, every launch of the process is slower.
    for row in rows:
        row |= profile(model, row["size"])
        print(f"{table([row])}\n", flush=True)
    shortest = measure_gpu_busy(lambda: [torch.cuda._sleep(1) for _ in range(400)], device=device)
    gap["shortest_kernel_us"] = shortest.kernel_ms / shortest.kernel_count * 1e3
    result = {"benchmark": "step", "environment": environment(), "rows": rows, "gap": gap}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    print(table(rows))
    print(agreement(rows, gap))
    print(json.dumps(result))


def render(model, size: str, mode: str) -> tuple[list[float], list[float], dict, Timeline, tuple]:
    """One distilled render. Returns step stream times and GPU times, the account, the timeline and the latents."""
    timeline = Timeline(None, device=model.device)
    with timeline.segment("sampler"):
        result = sample(model, request(size), cuda_graph=mode, timeline=timeline)
    ends = [e for e in timeline.events if e["event"] == "end" and e["phase"] in ("sample.step", "sample.replay")]
    latents = (result.video, result.audio)
    return [e["stream_ms"] for e in ends], [e["gpu_ms"] for e in ends], result.graph, timeline, latents


def measure(model, size: str) -> dict:
    render(model, size, "off")
    before = torch.cuda.memory_allocated()
    eager_steps, peaks = [], []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        steps, _, _, timeline, eager = render(model, size, "off")
        eager_steps += steps[1:]
        peaks.append(max(e["mem_peak_bytes"] for e in timeline.events if e["event"] == "end"))
    render_auto = render(model, size, "auto")[2]
    model.graphs.close()
    _, _, captured, _, first = render(model, size, "on")
    replay_steps, replay_gpu = [], []
    equal = [torch.equal(a, b) for a, b in zip(eager, first, strict=True)]
    for _ in range(2):
        steps, gpu, _, _, graphed = render(model, size, "on")
        replay_steps += steps
        replay_gpu += gpu
        equal += [torch.equal(a, b) for a, b in zip(eager, graphed, strict=True)]
    row = {
        "size": size,
        "eager_ms": statistics.median(eager_steps),
        "eager_range_ms": [min(eager_steps), max(eager_steps)],
        "graphed_ms": statistics.median(replay_steps),
        "graphed_range_ms": [min(replay_steps), max(replay_steps)],
        "graphed_gpu_ms": statistics.median(replay_gpu),
        "equal_bit_for_bit": all(equal),
        "auto": render_auto["decision"],
        "auto_measured": render_auto.get("measured"),
        "capture": captured["capture"],
        "peak_gb": max(peaks) / 1e9,
        "activations_gb": (max(peaks) - before) / 1e9,
    }
    model.graphs.close()
    return row


def first_step(model, size: str):
    """A call of the step at the start of a render."""
    prepared = prepare(model, request(size), Timeline(None, device=model.device))
    inputs = prepared.inputs(0, prepared.start)
    return lambda: denoise_step(model.module, prepared.constants[0], inputs)


def by_events(model, size: str, wall_ms: float) -> dict:
    """GPU time of an eager step by both ways of gpu_time.py; None where the host was too slow for the way."""
    with torch.inference_mode():
        step = first_step(model, size)
        with LaunchCount() as count:
            step()
        cuts = list(model.module.transformer_blocks)[::BLOCKS_PER_PART]
        found: dict = {"launches": count.launches}
        for host_ahead in (False, True):
            measured = queued_gpu_time(
                step,
                cuts,
                part_ms=min(wall_ms, count.launches * SLOW_LAUNCH_MS) / (1 + len(cuts)),
                launches=count.launches,
                host_ahead=host_ahead,
                device=model.device,
            )
            found[measured.method] = {"gpu_ms": measured.gpu_ms, "event_ms": measured.event_ms}
    return found


def profile(model, size: str) -> dict:
    """Activity of one eager step under CUPTI."""
    with torch.inference_mode():
        step = first_step(model, size)
        step()
        activity = measure_gpu_busy(step, device=model.device)
    return {
        "eager_gpu_ms": activity.gpu_ms,
        "launches": activity.kernel_count,
        "copies_in_step": len(activity.memcpys),
        "host_waits_in_step": dict(activity.host_waits or ()),
        "top_kernels": [vars(kernel) for kernel in activity.top_kernels],
    }


def table(rows: list[dict]) -> str:
    """What CUPTI has not measured yet is `-`."""
    lines = [
        (
            "| size | eager ms | GPU ms (CUPTI) | busy | launches | graphed ms | graphed GPU ms | equal "
            "| copies, waits | capture ms (warm-up + record + first replay) | graph MB | peak GB |"
        ),
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        capture = r["capture"]
        profiled = ["-"] * 4
        if "eager_gpu_ms" in r:
            profiled = [
                f"{r['eager_gpu_ms']:.1f}",
                f"{r['eager_gpu_ms'] / r['eager_ms']:.0%}",
                str(r["launches"]),
                f"{r['copies_in_step']}, {sum(r['host_waits_in_step'].values())}",
            ]
        lines.append(
            f"| {r['size']} | {r['eager_ms']:.1f} ({r['eager_range_ms'][0]:.1f}-{r['eager_range_ms'][1]:.1f}) "
            f"| {' | '.join(profiled[:3])} "
            f"| {r['graphed_ms']:.1f} ({r['graphed_range_ms'][0]:.1f}-{r['graphed_range_ms'][1]:.1f}) "
            f"| {r['graphed_gpu_ms']:.1f} | {r['equal_bit_for_bit']} "
            f"| {profiled[3]} "
            f"| {capture['warmup_ms']:.0f} + {capture['capture_ms']:.0f} + {capture['first_replay_ms']:.0f} "
            f"| {(capture['graph_bytes'] + capture['static_bytes']) / 2**20:.0f} | {r['peak_gb']:.1f} |"
        )
    return "\n".join(lines)


def agreement(rows: list[dict], gap: dict) -> str:
    """GPU time by events against CUPTI, with the gaps between kernels in it and without; `auto`: as a render found
    it."""
    lines = [
        (
            f"queue pace {gap['pace_us']:.2f} us, of it {gap['shortest_kernel_us']:.2f} us kernel by CUPTI "
            f"({SHORTEST_KERNEL_MS * 1e3:.2f} assumed); gap taken off {gap['gap_us']:.2f} us"
        ),
        (
            "| size | CUPTI ms | launches counted / CUPTI | auto ms | delayed_events ms (with gaps) "
            "| queued_events ms (with gaps) |"
        ),
        "|---|---|---|---|---|---|",
    ]

    def against(found: float | None, cupti: float) -> str:
        return "-" if found is None else f"{found:.1f} ({found / cupti - 1:+.1%})"

    for r in rows:
        cupti = r["eager_gpu_ms"]
        ways = [
            f"{against(way['gpu_ms'], cupti)} ({against(way['event_ms'], cupti)})"
            for way in (r["by_events"]["delayed_events"], r["by_events"]["queued_events"])
        ]
        lines.append(
            f"| {r['size']} | {cupti:.1f} | {r['by_events']['launches']} / {r['launches']} "
            f"| {against((r['auto_measured'] or {}).get('gpu_ms'), cupti)} | {ways[0]} | {ways[1]} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
