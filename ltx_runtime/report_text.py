"""The report of one or more renders: as plain values for programs, and as text for people.

`json_report` gathers, `as_text` writes out what was gathered, so that the two can't disagree.

Schema `ltxgraph.report/1`. `[]` stands for every item of a list, `{}` for every value of a mapping; a trailing `?` on
the type means that the value may be null; `any` is a value whose inside belongs to its maker. Fields are added without
a new version; a field that changes its meaning or goes makes a new one.

    schema                                  str     always "ltxgraph.report/1"
    verdict.status                          str     equal, within tolerance, different, not tested
    verdict.words                           str     one sentence, begins with the status
    verdict.bit_exact                       bool
    verdict.numbers                         any     parity.judge
    environment.device                      str     name of the GPU, or "cpu"
    environment.torch                       str
    environment.cuda                        str?    CUDA version that torch was built for
    environment.allocator                   str     native, cudaMallocAsync, cpu
    environment.python                      str
    environment.platform                    str
    renders[].name                          str     the arm: "eager", "graphed"
    renders[].render                        str     render id
    renders[].log                           str?    file of the phase log
    renders[].settings                      any     what was asked for, by name
    renders[].notes[]                       str     sentences for the user
    renders[].graph                         any?    SampleResult.graph of the arm's last render; null when unknown
    renders[].timeline                      any     timing.summarize: wall, unaccounted, segments, phases
    renders[].steps[].step                  int     counted from 0; starts again with each render of the arm
    renders[].steps[].phase                 str     sample.step, .measure, .warmup, .capture, .replay
    renders[].steps[].wall_ms               number
    renders[].steps[].gpu_ms                number? kernels' own time, where measured
    renders[].steps[].stream_ms             number? event pair, gaps included
    renders[].residency.resident            bool?   null when no step was profiled
    renders[].residency.words               str
    renders[].residency.profiled_steps      int
    renders[].residency.host_to_device_bytes int?   in the profiled steps
    renders[].residency.device_to_host_bytes int?
    renders[].residency.host_waits          int?    calls in which the host waited for the device
    renders[].residency.gpu_busy{}          number? share, by phase
    renders[].residency.nvml_zero_share{}   number? share of NVML samples that read 0 % utilisation, by phase

Source: design.md sections 5 and 6; issue B points 5 and 8.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .cuda_graph import allocator_backend
from .parity import Verdict
from .timing import Timeline

SCHEMA = "ltxgraph.report/1"


class Render(Protocol):
    """What a report needs to know of a render. settings: plain values by name. graph: `SampleResult.graph`."""

    timeline: Timeline
    settings: Mapping[str, Any]
    notes: Sequence[str]
    graph: Mapping[str, Any] | None


def json_report(
    verdict: Verdict, renders: Mapping[str, Render], environment: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The report as plain values, ready for json.dumps. renders: by the name of the arm. environment: `environment_of`
    the first render's device when None."""
    if environment is None:
        devices = [render.timeline.device for render in renders.values()]
        environment = environment_of(devices[0] if devices else torch.device("cpu"))
    return {
        "schema": SCHEMA,
        "verdict": {
            "status": verdict.status,
            "words": verdict.words,
            "bit_exact": verdict.bit_exact,
            "numbers": dict(verdict.numbers),
        },
        "environment": dict(environment),
        "renders": [_render(name, render) for name, render in renders.items()],
    }


def text_report(verdict: Verdict, renders: Mapping[str, Render]) -> str:
    """The report for people; plain ASCII, made for a monospaced font."""
    return as_text(json_report(verdict, renders))


def environment_of(device: torch.device) -> dict[str, Any]:
    """What the numbers were measured on."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "allocator": allocator_backend() if on_cuda else "cpu",
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def residency(events: Iterable[Mapping], summary: Mapping, graph: Mapping | None) -> dict[str, Any]:
    """Did the denoising loop stay on the device? Judged from steps that ran under the profiler, whose phases carry
    `GpuActivity.attrs()`: no copy to or from the host and no wait of the host inside them.

    events, summary: of the phase log. graph: `SampleResult.graph`, for the busy share that `auto` measured.
    """
    profiled = [e["attrs"] for e in events if _is_step(e) and "memcpys" in e["attrs"]]
    loop = {name: phase for name, phase in summary["phases"].items() if name.startswith("sample.")}
    # Measuring stretches the measured step's own wall; the engine sets its GPU time against an undisturbed step.
    busy = {name: phase["gpu_busy"] for name, phase in loop.items() if name != "sample.measure"}
    if graph and graph.get("measured") and "sample.step" in busy:
        busy["sample.step"] = graph["measured"]["gpu_busy"]
    zero = {name: phase["nvml"]["util_zero_share"] if phase["nvml"] else None for name, phase in loop.items()}
    found = {
        "resident": None,
        "words": "resident: not measured, no step ran under the profiler",
        "profiled_steps": len(profiled),
        "host_to_device_bytes": None,
        "device_to_host_bytes": None,
        "host_waits": None,
        "gpu_busy": busy,
        "nvml_zero_share": zero,
    }
    if not profiled:
        return found
    copies = [_copies(attrs["memcpys"]) for attrs in profiled]
    unknown = any(attrs["host_waits"] is None for attrs in profiled)
    waits = sum(sum((attrs["host_waits"] or {}).values()) for attrs in profiled)
    counts = sum(count for count, _, _ in copies)
    to_device, to_host = (None if None in column else sum(column) for column in list(zip(*copies))[1:])
    if counts or waits:
        resident, answer = False, "no"
    else:
        resident, answer = (None, "not known, the profiler did not show the host's calls") if unknown else (True, "yes")
    facts = [
        f"{_bytes(to_device)} to the device",
        f"{_bytes(to_host)} to the host",
        "waits of the host unknown" if unknown else f"{waits} waits of the host",
    ]
    facts += [f"GPU busy {share:.0%} in {name}" for name, share in busy.items() if share is not None]
    facts += [
        f"NVML read zero in {share:.0%} of samples in {name}" for name, share in zero.items() if share is not None
    ]
    steps = "1 profiled step" if len(profiled) == 1 else f"{len(profiled)} profiled steps"
    return found | {
        "resident": resident,
        "words": f"resident: {answer}; in {steps}: {', '.join(facts)}",
        "host_to_device_bytes": to_device,
        "device_to_host_bytes": to_host,
        "host_waits": None if unknown else waits,
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Write out a report of `json_report`."""
    environment = report["environment"]
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    software = (
        f"torch {environment['torch']}{cuda}, allocator {environment['allocator']}, Python {environment['python']}"
    )
    lines = [
        f"parity: {report['verdict']['words']}",
        "",
        f"{environment['device']}, {software}, {environment['platform']}",
    ]
    for render in report["renders"]:
        lines += ["", "", _heading(f"{render['name']}: render {render['render']}")]
        lines += [f"log: {render['log']}"] if render["log"] else []
        lines += _settings_lines(render["settings"])
        lines += [f"note: {note}" for note in render["notes"]]
        lines += ["", phase_table(render["timeline"])]
        lines += ["", *_step_lines(render["steps"])] if render["steps"] else []
        lines += ["", *_graph_lines(render["graph"])]
        lines += ["", render["residency"]["words"]]
    return "\n".join(lines) + "\n"


def phase_table(summary: Mapping[str, Any]) -> str:
    """One row a phase from `timing.summarize`, then what no phase covers, and the wall. A dash: nobody measured it."""
    wall = summary["wall_ms"] or 1.0
    rows = [("phase", "count", "wall ms", "share", "GPU ms", "busy", "stream ms", "CPU ms", "NVML zero", "peak GiB")]
    for name, phase in summary["phases"].items():
        partly = phase["gpu_ms"] is not None and phase["gpu_measured"] < phase["count"]
        rows.append(
            (
                name,
                str(phase["count"]),
                _ms(phase["wall_ms"]),
                f"{phase['wall_ms'] / wall:.1%}",
                _ms(phase["gpu_ms"]) + (f" of {phase['gpu_measured']}" if partly else ""),
                # The measured step's own wall is stretched by the measuring.
                "-" if name == "sample.measure" else _share(phase["gpu_busy"]),
                _ms(phase["stream_ms"]),
                _ms(phase["cpu_ms"]),
                _share(phase["nvml"]["util_zero_share"] if phase["nvml"] else None),
                _gib(phase["mem_peak_bytes"]),
            )
        )
    rest = ("", "", "", "", "", "")
    rows.append(("unaccounted", "", _ms(summary["unaccounted_ms"]), f"{summary['unaccounted_ms'] / wall:.1%}", *rest))
    rows.append(("wall", "", _ms(summary["wall_ms"]), "", "", "", "", "", "", _gib(summary["mem_peak_bytes"])))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    if summary["outside_ms"]:
        lines.append(f"elsewhere, between our nodes, not counted: {_ms(summary['outside_ms'])} ms")
    errors = [f"{name}: {error}" for name, phase in summary["phases"].items() for error in phase["errors"]]
    return "\n".join(lines + [f"failed in {error}" for error in errors])


def _render(name: str, render: Render) -> dict[str, Any]:
    events, summary = render.timeline.events, render.timeline.summary()
    steps = [
        {
            "step": event["attrs"]["step"],
            "phase": event["phase"],
            "wall_ms": event["wall_ms"],
            "gpu_ms": event["gpu_ms"],
            "stream_ms": event["stream_ms"],
        }
        for event in events
        if _is_step(event) and "step" in event["attrs"]
    ]
    return {
        "name": name,
        "render": render.timeline.render_id,
        "log": str(render.timeline.path) if render.timeline.path else None,
        "settings": dict(render.settings),
        "notes": list(render.notes),
        "graph": dict(render.graph) if render.graph is not None else None,
        "timeline": summary,
        "steps": steps,
        "residency": residency(events, summary, render.graph),
    }


def _is_step(event: Mapping) -> bool:
    return event["event"] == "end" and event["phase"].startswith("sample.")


def _copies(memcpys: Mapping[str, Mapping]) -> tuple[int, int | None, int | None]:
    """Copies between host and device: count, bytes to the device, bytes to the host (None: size unknown)."""
    count, to_device, to_host = 0, 0, 0
    for kind, total in memcpys.items():
        if kind.startswith("HtoD"):
            count += total["count"]
            to_device = None if to_device is None or total["bytes"] is None else to_device + total["bytes"]
        elif kind.startswith("DtoH"):
            count += total["count"]
            to_host = None if to_host is None or total["bytes"] is None else to_host + total["bytes"]
    return count, to_device, to_host


def _heading(words: str) -> str:
    return f"{words}\n{'=' * len(words)}"


def _settings_lines(settings: Mapping[str, Any]) -> list[str]:
    """`name value` pairs, filled into lines of at most 110 characters."""
    lines: list[str] = []
    for name, value in settings.items():
        if isinstance(value, (list, tuple)):
            value = (
                "x".join(map(str, value))
                if all(isinstance(v, int) for v in value)
                else " ".join(f"{v:.6g}" for v in value)
            )
        item = f"{name} {'-' if value is None else value}"
        if lines and len(lines[-1]) + len(item) < 108:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines


_STEP_KINDS = {
    "sample.step": "",
    "sample.measure": "m",
    "sample.warmup": "w",
    "sample.capture": "c",
    "sample.replay": "r",
}


def _step_lines(steps: Sequence[Mapping]) -> list[str]:
    """One line a render of the arm: wall of each step in ms, marked with what it was."""
    lines: list[str] = []
    last = None
    for step in steps:
        if last is None or step["step"] < last:
            lines.append(" ")
        lines[-1] += f" {_ms(step['wall_ms'])}{_STEP_KINDS.get(step['phase'], '?')}"
        last = step["step"]
    return ["wall ms of each step (m measured, w warm-up, c capture, r replay):", *lines]


def _graph_lines(graph: Mapping[str, Any] | None) -> list[str]:
    if graph is None:
        return ["CUDA graph: not known"]
    lines = [f"CUDA graph: requested {graph['requested']}, ran {graph['mode']}", f"  decision: {graph['decision']}"]
    if graph.get("fallback") and graph["fallback"] not in graph["decision"]:
        lines.append(f"  fallback: {graph['fallback']}")
    if measured := graph.get("measured"):
        wall, gpu = _ms(measured["wall_ms"]), _ms(measured["gpu_ms"])
        lines.append(f"  eager step: wall {wall} ms, GPU {gpu} ms, busy {measured['gpu_busy']:.0%}")
    if capture := graph.get("capture"):
        cost = " + ".join(f"{key.removesuffix('_ms')} {_ms(capture[key])}" for key in capture if key.endswith("_ms"))
        size = sum(capture[key] for key in capture if key.endswith("_bytes"))
        lines.append(f"  capture cost: {cost} ms, {_bytes(size)}")
    kinds = graph.get("steps", [])
    if kinds:
        lines.append("  steps: " + ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)))
    if counters := graph.get("counters"):
        lines.append("  since loading: " + ", ".join(f"{counters[name]} {name}" for name in counters))
    if graph.get("missed"):
        lines.append("  last miss, because of: " + "; ".join(graph["missed"]))
    if graph.get("graph_bytes") is not None:
        lines.append(f"  held now: {graph['graphs']} graphs, {_bytes(graph['graph_bytes'])}")
    return lines


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _gib(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f}"


def _bytes(value: int | None) -> str:
    if value is None:
        return "an unknown number of bytes"
    if value < 10_000:
        return f"{value} bytes"
    return f"{value / 2**20:.1f} MiB" if value < 2**30 else f"{value / 2**30:.2f} GiB"
