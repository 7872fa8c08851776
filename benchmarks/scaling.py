"""What does not shrink with the picture: each phase's cost as constant + slope * size, and the phases that run on the
host alone.

    python3 dev.py bench scaling [--steps 4] [--repeats 3] [--modes off on] [--json FILE] [--tiny]

Warm renders of three sizes x two lengths, eager and graphed. Sizes: video tokens for prepare and sampling (with a
quadratic term, for attention), output voxels for decode and transfer. Loads, captures and first uses are not in it. GPU
time comes from CUPTI at the very end, and from event pairs around replays.
"""

from __future__ import annotations

import statistics

import torch
from _fit import Point, judge_phase
from _models import Models, clip_request, finish, markdown, open_models, parse, parser_of, size_name

from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.sampler import prepare, sample
from ltx_runtime.steps import denoise_step
from ltx_runtime.timing import Timeline

FULL = [(width, height, frames) for width, height in ((384, 256), (768, 512), (1536, 1024)) for frames in (49, 121)]
TINY = [(width, height, frames) for width, height in ((64, 64), (96, 64), (128, 64)) for frames in (9, 17)]
# Size that a phase's cost is set against; what is not named here goes by voxels.
BY_TOKENS = ("prepare", "sample.step", "sample.replay")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--modes", nargs="+", default=None, choices=["off", "on"], help="cuda_graph; default: both with CUDA"
    )
    arguments = parse(parser, steps=1, repeats=1)
    models = open_models(arguments.tiny)
    modes = arguments.modes or (["off", "on"] if models.device.type == "cuda" else ["off"])
    sizes = TINY if arguments.tiny else FULL
    renders = {}
    for size in sizes:
        for mode in modes:
            renders[mode, size] = warm_renders(models, size, mode, arguments.steps, arguments.repeats)
            print(words(mode, size, renders[mode, size]), flush=True)
    # CUPTI last of all: once used, every launch of the process is slower.
    gpu = {size: gpu_times(models, size, arguments.steps) for size in sizes} if models.device.type == "cuda" else {}
    rows = []
    for mode in modes:
        rows += judged(mode, sizes, {size: renders[mode, size] for size in sizes}, gpu)
    finish(
        "scaling",
        arguments,
        models.device,
        table(rows, sizes),
        rows,
        sizes=[size_name(size) for size in sizes],
        steps=arguments.steps,
        renders=[plain(key, value) for key, value in renders.items()],
    )


def warm_renders(models: Models, size, mode: str, steps: int, repeats: int) -> dict[str, dict]:
    """Medians over warm renders, by phase: wall_ms, cpu_ms, and gpu_ms where the log has it; "render" is the whole."""
    summaries = []
    for index in range(repeats + 1):  # the first warms up, or captures
        timeline = Timeline(None, device=models.device)
        models.transformer.contexts.clear()  # a new prompt, as the first render has it
        with timeline.segment("sampler"):
            result = sample(
                models.transformer,
                clip_request(models.transformer, size, steps=steps),
                cuda_graph=mode,
                timeline=timeline,
            )
        with timeline.segment("decode"):
            models.vae.decode(result.video, timeline=timeline)
        if index:
            summaries.append(timeline.summary())
    models.transformer.graphs.close()
    found: dict[str, list[dict]] = {}
    for summary in summaries:
        for name, phase in merged(summary).items():
            found.setdefault(name, []).append(phase)
    return {name: {key: median(phase[key] for phase in phases) for key in phases[0]} for name, phases in found.items()}


def merged(summary: dict) -> dict[str, dict]:
    """Phases of one render; the parts of the preparation as one, because the profiler sees them as one."""
    phases = {
        "render": {"wall_ms": summary["wall_ms"], "cpu_ms": None, "gpu_ms": None},
        "unaccounted": {"wall_ms": max(summary["unaccounted_ms"], 1e-3), "cpu_ms": None, "gpu_ms": None},
    }
    for name, phase in summary["phases"].items():
        key = "prepare" if name.startswith("prepare.") else name
        whole = phase["gpu_ms"] if phase["gpu_measured"] == phase["count"] else None
        part = {"wall_ms": phase["wall_ms"], "cpu_ms": phase["cpu_ms"], "gpu_ms": whole}
        if key in phases:
            part = {field: None if part[field] is None else part[field] + phases[key][field] for field in part}
        phases[key] = part
    return phases


def median(values) -> float | None:
    values = list(values)
    return None if None in values else statistics.median(values)


def gpu_times(models: Models, size, steps: int) -> dict[str, float]:
    """GPU time by phase, for what the log can't tell."""
    request = clip_request(models.transformer, size, steps=steps)
    with torch.inference_mode():
        preparing = measure_gpu_busy(
            lambda: prepare(models.transformer, request, Timeline(None, device=models.device)), device=models.device
        )
        prepared = preparing.result
        inputs = prepared.inputs(0, prepared.start)
        step = measure_gpu_busy(
            lambda: denoise_step(models.transformer.module, prepared.constants[0], inputs), device=models.device
        )
    latent = torch.randn(request.video.shape.as_tuple(), generator=torch.Generator().manual_seed(0))
    decode = measure_gpu_busy(lambda: models.vae.decode(latent), device=models.device)
    for activity in (preparing, step, decode):
        if activity.reason is not None:
            raise SystemExit(f"no GPU times: {activity.reason}")
    return {
        "prepare": preparing.gpu_ms,
        "sample.step": steps * step.gpu_ms,
        "decode.video.chunk": decode.kernel_ms,
        "transfer.to_host": sum(copy.ms for copy in decode.memcpys if copy.kind == "DtoH"),
    }


def judged(mode: str, sizes, renders: dict, gpu: dict) -> list[dict]:
    """A row a phase."""
    rows = []
    for name in dict.fromkeys(name for size in sizes for name in renders[size] if name != "render"):
        points = []
        for size in sizes:
            phase = renders[size].get(name)
            if phase is None:
                continue
            gpu_ms = phase["gpu_ms"] if phase["gpu_ms"] is not None else gpu.get(size, {}).get(name)
            points.append(
                Point(
                    extent(size, name),
                    phase["wall_ms"],
                    phase["cpu_ms"] or 0.0,
                    gpu_ms,
                    renders[size]["render"]["wall_ms"],
                )
            )
        if len({point.x for point in points}) > 1:
            unit = "tokens" if name in BY_TOKENS else "voxels"
            row = judge_phase(points, quadratic=name in BY_TOKENS)
            rows.append(
                {"mode": mode, "phase": name, "unit": unit, **row, "measured": [vars(point) for point in points]}
            )
    return rows


def extent(size, phase: str) -> float:
    width, height, frames = size
    if phase in BY_TOKENS:
        return (width // 32) * (height // 32) * ((frames - 1) // 8 + 1)
    return width * height * frames


def plain(key, phases: dict) -> dict:
    mode, size = key
    return {"mode": mode, "size": size_name(size), "phases": phases}


def words(mode: str, size, phases: dict[str, dict]) -> str:
    """One line a size, printed as soon as it is measured."""
    walls = ", ".join(f"{name} {phase['wall_ms']:.1f}" for name, phase in phases.items())
    return f"{mode} {size_name(size)}, wall ms: {walls}"


def table(rows: list[dict], sizes) -> str:
    small, large = (edge(sizes, key=lambda size: extent(size, "")) for edge in (min, max))
    head = [
        "mode",
        "phase",
        "constant ms",
        "slope",
        "worst error",
        f"share of wall {size_name(small)}",
        f"share of wall {size_name(large)}",
        "fixed part there",
        "GPU busy small-large",
        "flags",
    ]
    lines = []
    for row in rows:
        per, words = (1e3, "ms/1000 tokens") if row["unit"] == "tokens" else (1e6, "ms/Mvoxel")
        slope = f"{row['slope_ms'] * per:.3g} {words}"
        if row["quadratic_ms"]:
            slope += f" + {row['quadratic_ms'] * 1e6:.3g} ms/(1000 tokens)^2"
        points = sorted(row["measured"], key=lambda point: point["x"])
        busy = ["-" if p["gpu_ms"] is None else f"{p['gpu_ms'] / p['wall_ms']:.0%}" for p in (points[0], points[-1])]
        flags = ", ".join(
            f"{flag} at {row['serial_points']} of {row['points']} sizes" if flag == "serial" else flag
            for flag in row["flags"]
        )
        lines.append(
            [
                row["mode"],
                row["phase"],
                f"{row['constant_ms']:.2f}",
                slope,
                f"{row['error']:.0%}",
                f"{row['share_smallest']:.1%}",
                f"{row['share_largest']:.1%}",
                f"{row['constant_share_smallest']:.0%} - {row['constant_share_largest']:.0%}",
                " - ".join(busy),
                flags,
            ]
        )
    fixed = {}
    for row in rows:
        fixed[row["mode"]] = fixed.get(row["mode"], 0.0) + row["constant_ms"]
    totals = "; ".join(f"{mode}: {ms:.1f} ms" for mode, ms in fixed.items())
    return f"{markdown(head, lines)}\n\nfixed cost of a render, all phases: {totals}"


if __name__ == "__main__":
    main()
