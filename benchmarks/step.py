"""One denoising step at S0, S1, S2, eager and graphed: times, busy share, launches, copies, syncs, memory, capture.

    python3 dev.py bench step [S0 S1 S2] [--json FILE] [--tiny]

Each size's row is printed as soon as it is measured, CUPTI's columns later; at the end both tables.

Eager wall and GPU time come from separate renders: CUPTI slows the host. GPU time is measured by CUPTI and, as `auto`
does inside a render, by events (ltx_runtime/gpu_time.py); the second table sets one against the other. Graphed GPU time
is an event pair around the replay.
"""
from __future__ import annotations

import json
from collections.abc import Callable

import torch
from _models import (
    SIZES,
    clip_request,
    clip_sizes,
    device_of,
    finish,
    markdown,
    open_each,
    parse,
    parser_of,
    size_name,
    spread,
)

from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.gpu_time import SHORTEST_KERNEL_MS, LaunchCount, launch_gap_ms, queue_pace_ms, queued_gpu_time
from ltx_runtime.sampler import prepare, sample
from ltx_runtime.step_runner import BLOCKS_PER_PART, SLOW_LAUNCH_MS
from ltx_runtime.steps import denoise_step
from ltx_runtime.timing import Timeline

Size = tuple[int, int, int]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="all by default")
    arguments = parse(parser, sizes=["S0"])
    device = device_of(arguments.tiny)
    model = open_each(["transformer"], arguments.tiny)["transformer"]
    sizes = clip_sizes(arguments.sizes or SIZES, arguments.tiny)
    rows = []
    for name, size in sizes.items():
        rows.append({"size": name, **measure(model, size)})
        print(f"{table(rows[-1:])}\n\nauto: {rows[-1]['auto']}\n", flush=True)
    if device.type != "cuda":
        finish("step", arguments, device, table(rows), rows)
        return
    for row in rows:
        row["by_events"] = by_events(model, sizes[row["size"]], row["eager_ms"]["median"])
        print(f"{row['size']} by events: {json.dumps(row['by_events'])}\n", flush=True)
    gap = {"pace_us": (queue_pace_ms(device) or 0) * 1e3, "gap_us": launch_gap_ms(device) * 1e3}
    # CUPTI last of all: once used, every launch of the process is slower.
    for row in rows:
        row |= profile(model, sizes[row["size"]])
        print(f"{table([row])}\n", flush=True)
    shortest = measure_gpu_busy(lambda: [torch.cuda._sleep(1) for _ in range(400)], device=device)
    gap["shortest_kernel_us"] = shortest.kernel_ms / shortest.kernel_count * 1e3
    finish("step", arguments, device, f"{table(rows)}\n{agreement(rows, gap)}", rows, gap=gap)


def render(model, size: Size, mode: str) -> tuple[list[float], list[float], dict, Timeline, tuple]:
    """One distilled render. Returns step times (on the stream; wall where there is none) and GPU times, the account,
    the timeline and the latents."""
    timeline = Timeline(None, device=model.device)
    with timeline.segment("sampler"):
        result = sample(model, clip_request(model, size), cuda_graph=mode, timeline=timeline)
    ends = [e for e in timeline.events if e["event"] == "end" and e["phase"] in ("sample.step", "sample.replay")]
    times = [e["wall_ms"] if e["stream_ms"] is None else e["stream_ms"] for e in ends]
    return times, [e["gpu_ms"] for e in ends], result.graph, timeline, (result.video, result.audio)


def measure(model, size: Size) -> dict:
    render(model, size, "off")
    before = torch.cuda.memory_allocated()
    eager_steps, peaks = [], []
    for _ in range(2):
        steps, _, _, timeline, eager = render(model, size, "off")
        eager_steps += steps[1:]
        peaks += [e["mem_peak_bytes"] or 0 for e in timeline.events if e["event"] == "end"]
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
        "clip": size_name(size),
        "eager_ms": spread(eager_steps),
        "graphed_ms": spread(replay_steps),
        "graphed_gpu_ms": None if None in replay_gpu else spread(replay_gpu),
        "equal_bit_for_bit": all(equal),
        "auto": render_auto["decision"],
        "auto_measured": render_auto.get("measured"),
        "capture": captured.get("capture"),
        "peak_gb": max(peaks) / 1e9,
        "activations_gb": (max(peaks) - before) / 1e9,
    }
    model.graphs.close()
    return row


def first_step(model, size: Size) -> Callable[[], object]:
    """A call of the step at the start of a render."""
    prepared = prepare(model, clip_request(model, size), Timeline(None, device=model.device))
    inputs = prepared.inputs(0, prepared.start)
    return lambda: denoise_step(model.module, prepared.constants[0], inputs)


def by_events(model, size: Size, wall_ms: float) -> dict:
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


def profile(model, size: Size) -> dict:
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
    """What is not measured, or not yet by CUPTI, is `-`."""
    head = [
        "size", "eager ms", "GPU ms (CUPTI)", "busy", "launches", "graphed ms", "graphed GPU ms", "equal",
        "copies, waits", "capture ms (warm-up + record + first replay)", "graph MB", "peak GB",
    ]  # fmt: skip
    lines = []
    for r in rows:
        capture, gpu = r["capture"], r["graphed_gpu_ms"]
        profiled, captured = ["-"] * 4, ["-"] * 2
        if "eager_gpu_ms" in r:
            profiled = [
                f"{r['eager_gpu_ms']:.1f}",
                f"{r['eager_gpu_ms'] / r['eager_ms']['median']:.0%}",
                str(r["launches"]),
                f"{r['copies_in_step']}, {sum(r['host_waits_in_step'].values())}",
            ]
        if capture:
            parts = (capture["warmup_ms"], capture["capture_ms"], capture["first_replay_ms"])
            captured = [
                " + ".join(f"{ms:.0f}" for ms in parts),
                f"{(capture['graph_bytes'] + capture['static_bytes']) / 2**20:.0f}",
            ]
        walls = (r["eager_ms"], r["graphed_ms"])
        eager, graphed = (f"{s['median']:.1f} ({s['min']:.1f}-{s['max']:.1f})" for s in walls)
        lines.append(
            [
                r["size"],
                eager,
                *profiled[:3],
                graphed,
                "-" if gpu is None else f"{gpu['median']:.1f}",
                str(r["equal_bit_for_bit"]),
                profiled[3],
                *captured,
                f"{r['peak_gb']:.1f}",
            ]
        )
    return markdown(head, lines)


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
