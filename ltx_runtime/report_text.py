"""The report of one or more renders: as plain values for programs, and as text for people.

`json_report` gathers, `as_text` writes out what was gathered, so that the two can't disagree.

Schema `ltxgraph.report/1`. `[]` stands for every item of a list, `{}` for every value of a mapping; a trailing `?` on
the type means that the value may be null; `any` is a value whose inside belongs to its maker. Fields are added without
a new version; a field that changes its meaning or goes makes a new one.

    schema                                  str     always "ltxgraph.report/1"
    verdict.status                          str     equal, within tolerance, different, not tested
    verdict.words                           str     one sentence, begins with the status
    verdict.bit_exact                       bool
    verdict.numbers                         any     parity.judge; "seams" of seams.SeamFindings, for tiles of one arm
    notes[]                                 str     sentences for the user about the report itself
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
    renders[].residency.resident            bool?   null when it was not measured
    renders[].residency.words               str     one sentence, begins with "resident: "
    renders[].residency.profiled_steps      int     steps whose inside was measured: 1, or 0
    renders[].residency.host_to_device_bytes int?   between the kernels of that step
    renders[].residency.device_to_host_bytes int?
    renders[].residency.host_waits          int?    calls in which the host waited for the device
    renders[].residency.took_ms             number? what the measurement cost; it is in no other time of the report
    renders[].residency.activity[].part     str     "step" (between its kernels, run eager), "loop" (all steps, edges
                                                    included), "decode" (of one clip)
    renders[].residency.activity[].gpu_ms   number  union of the intervals in which the GPU worked
    renders[].residency.activity[].kernels  int
    renders[].residency.activity[].longest_gap_ms number without any work on the GPU, under the profiler
    renders[].residency.activity[].host_to_device_bytes int?
    renders[].residency.activity[].device_to_host_bytes int?
    renders[].residency.activity[].host_waits int?
    renders[].residency.gpu_busy{}          number? share, by phase: from the phase log where it was measured there,
                                                    else the profiler's GPU time over the unprofiled wall of the work
    renders[].residency.nvml_zero_share{}   number? share of NVML samples that read 0 % utilisation, by phase
    residency.arm                           str?    the arm that the sentence is about; null when none was measured
    residency.resident                      bool?   false as soon as one measured arm is not resident
    residency.words                         str     the sentence of that arm

Source: design.md sections 5 and 6; issue B points 5 and 8.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from .cuda_graph import allocator_backend
from .loop_activity import LoopActivity
from .parity import Verdict
from .timing import Timeline

SCHEMA = "ltxgraph.report/1"
NOT_MEASURED = "resident: not measured; LTX Graph Parity Run measures it"


class Render(Protocol):
    """What a report needs to know of a render. settings: plain values by name. graph: `SampleResult.graph`. activity:
    what the profiler saw of the arm, None where nobody measured."""

    timeline: Timeline
    settings: Mapping[str, Any]
    notes: Sequence[str]
    graph: Mapping[str, Any] | None
    activity: LoopActivity | None


def json_report(
    verdict: Verdict,
    renders: Mapping[str, Render],
    environment: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The report as plain values, ready for json.dumps. renders: by the name of the arm. environment: `environment_of`
    the first render's device when None. notes: what belongs to no single render."""
    if environment is None:
        devices = [render.timeline.device for render in renders.values()]
        environment = environment_of(devices[0] if devices else torch.device("cpu"))
    rendered = [_render(name, render) for name, render in renders.items()]
    return {
        "schema": SCHEMA,
        "verdict": {
            "status": verdict.status,
            "words": verdict.words,
            "bit_exact": verdict.bit_exact,
            "numbers": dict(verdict.numbers),
        },
        "residency": _worst_residency(rendered),
        "notes": list(notes),
        "environment": dict(environment),
        "renders": rendered,
    }


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


def residency(render: Render, summary: Mapping | None = None) -> dict[str, Any]:
    """Did the denoising loop of this arm stay on the device, and how busy was the GPU in each phase?

    The bytes and waits are those of `render.activity`. summary: `render.timeline.summary()`, when it is at hand.
    """
    phases = (summary or render.timeline.summary())["phases"]
    activity = render.activity
    # Measuring stretches the measured step's own wall; the engine sets its GPU time against an undisturbed step.
    busy = {name: phase["gpu_busy"] for name, phase in phases.items() if name != "sample.measure"}
    if render.graph and render.graph.get("measured") and "sample.step" in busy:
        busy["sample.step"] = render.graph["measured"]["gpu_busy"]
    parts = {}
    if activity is not None:
        parts = {name: part for name in ("step", "loop", "decode") if (part := getattr(activity, name)) is not None}
        walls = {"step": ("sample.step", _step_wall_ms), "decode": ("decode.video.chunk", _decode_wall_ms)}
        for part, (name, wall_of) in walls.items():
            if part in parts and name in busy and busy[name] is None:
                busy[name] = min(parts[part]["gpu_ms"] / wall_of(render.timeline.events), 1.0)
    step = parts.get("step", {})
    return {
        "resident": activity.resident if activity is not None else None,
        "words": activity.words if activity is not None else NOT_MEASURED,
        "profiled_steps": 1 if step else 0,
        "host_to_device_bytes": step.get("host_to_device_bytes"),
        "device_to_host_bytes": step.get("device_to_host_bytes"),
        "host_waits": step.get("waits"),
        "took_ms": activity.took_ms if parts else None,
        "activity": [
            {
                "part": name,
                "gpu_ms": part["gpu_ms"],
                "kernels": part["kernel_count"],
                "longest_gap_ms": part["longest_gap_ms"],
                "host_to_device_bytes": part["host_to_device_bytes"],
                "device_to_host_bytes": part["device_to_host_bytes"],
                "host_waits": part["waits"],
            }
            for name, part in parts.items()
        ],
        "gpu_busy": busy,
        "nvml_zero_share": {
            name: phase["nvml"]["util_zero_share"] if phase["nvml"] else None for name, phase in phases.items()
        },
    }


def _step_wall_ms(events: Iterable[Mapping]) -> float:
    """Median wall of the eager steps, none of which ran under the profiler."""
    return statistics.median(e["wall_ms"] for e in events if e["event"] == "end" and e["phase"] == "sample.step")


def _decode_wall_ms(events: Iterable[Mapping]) -> float:
    """Mean wall of one decode: a decode starts with its chunk 0."""
    chunks = [e for e in events if e["event"] == "end" and e["phase"] == "decode.video.chunk"]
    decodes = sum(e["attrs"].get("chunk") == 0 for e in chunks)
    return sum(e["wall_ms"] for e in chunks) / max(decodes, 1)


def _worst_residency(rendered: Sequence[Mapping]) -> dict[str, Any]:
    """The sentence for the head of the report: a measured "no" before "not known" before "yes", the later arm of
    equals."""
    measured = [render for render in rendered if render["residency"]["activity"]]
    if not measured:
        words = next(
            (r["residency"]["words"] for r in rendered if r["residency"]["words"] != NOT_MEASURED), NOT_MEASURED
        )
        return {"arm": None, "resident": None, "words": words}
    severity = {True: 0, None: 1, False: 2}
    shown = max(reversed(measured), key=lambda render: severity[render["residency"]["resident"]])
    return {
        "arm": shown["name"],
        "resident": shown["residency"]["resident"],
        "words": f"{shown['residency']['words']} ({shown['name']})",
    }


def as_text(report: Mapping[str, Any]) -> str:
    """Write out a report of `json_report`: plain ASCII, made for a monospaced font."""
    environment = report["environment"]
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    software = (
        f"torch {environment['torch']}{cuda}, allocator {environment['allocator']}, Python {environment['python']}"
    )
    lines = [
        f"parity: {report['verdict']['words']}",
        report["residency"]["words"],
        *(f"note: {note}" for note in report["notes"]),
        "",
        f"{environment['device']}, {software}, {environment['platform']}",
    ]
    lines += _comparison_lines(report["verdict"]["numbers"].get("comparisons", []))
    for render in report["renders"]:
        lines += ["", "", _heading(f"{render['name']}: render {render['render']}")]
        lines += [f"log: {render['log']}"] if render["log"] else []
        lines += _settings_lines(render["settings"])
        lines += [f"note: {note}" for note in render["notes"]]
        lines += ["", phase_table(render["timeline"])]
        lines += ["", *_step_lines(render["steps"])] if render["steps"] else []
        lines += ["", *_graph_lines(render["graph"])]
        lines += ["", *_residency_lines(render["residency"])]
    return "\n".join(lines) + "\n"


_SHOWN_DIFFERENCES = 12


def _comparison_lines(comparisons: Sequence[Mapping]) -> list[str]:
    """How many of each kind were compared, and for those that are not equal: where, by how much, in how many frames."""
    if not comparisons:
        return []
    differing = [c for c in comparisons if not c["bit_exact"]]
    names = [c["name"] for c in comparisons]
    tally = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    empty = sum(not c["total"] for c in comparisons)
    counts = {"differ": len(differing) - empty, "empty": empty}
    found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    found = f"{found}:" if found else "all equal bit for bit"
    lines = ["", f"compared: {tally}; {found}"]
    for c in differing[:_SHOWN_DIFFERENCES]:
        where = f"  {c['arm']}, {c['case']}, replay {c['replay']}, {c['name']}: "
        if c["max_abs"] is None:
            lines.append(where + c["note"])
            continue
        groups = [gap is None or gap > 0 for gap in c["group_max"]]
        unit = f"{c['group_axis']}s" if c["group_size"] == 1 else f"groups of {c['group_size']} {c['group_axis']}s"
        facts = [f"{c['differing']:,} of {c['total']:,} values, in {sum(groups)} of {len(groups)} {unit}"]
        facts += (
            [f"largest {c['max_abs']:.3g} at {_place(c['largest'])}, mean {c['mean_abs']:.3g}"] if c["largest"] else []
        )
        facts += [f"first at {_place(c['first'])}"] if c["first"] != c["largest"] else []
        facts += [f"{c['signed_zeros']:,} zeros of another sign"] if c["signed_zeros"] else []
        facts += [f"not finite: {c['nonfinite'][0]:,} and {c['nonfinite'][1]:,}"] if any(c["nonfinite"]) else []
        lines.append(where + "; ".join(facts))
    if len(differing) > _SHOWN_DIFFERENCES:
        lines.append(f"  and {len(differing) - _SHOWN_DIFFERENCES} more, in the JSON report")
    return lines


def _place(location: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in location.items())


def _residency_lines(residency: Mapping[str, Any]) -> list[str]:
    lines = [residency["words"]]
    for part in residency["activity"]:
        what = {
            "step": "one step, between its kernels",
            "loop": "the whole loop, edges included",
            "decode": "one decode",
        }
        waits = "waits unknown" if part["host_waits"] is None else f"{part['host_waits']} waits of the host"
        lines.append(
            f"  {what[part['part']]}: {part['kernels']:,} kernels, GPU {_ms(part['gpu_ms'])} ms, "
            f"{_bytes(part['host_to_device_bytes'])} to the device, "
            f"{_bytes(part['device_to_host_bytes'])} to the host, {waits}"
        )
    if residency["took_ms"] is not None:
        lines.append(f"  measured in {_ms(residency['took_ms'])} ms after all renders, in none of the times above")
    for words, shares in (("GPU busy", residency["gpu_busy"]), ("NVML read zero in", residency["nvml_zero_share"])):
        known = [f"{name} {share:.0%}" for name, share in shares.items() if share is not None]
        lines += [f"  {words}: {', '.join(known)}"] if known else []
    return lines


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
        "residency": residency(render, summary),
    }


def _is_step(event: Mapping) -> bool:
    return event["event"] == "end" and event["phase"].startswith("sample.")


def _heading(words: str) -> str:
    return f"{words}\n{'=' * len(words)}"


def _settings_lines(settings: Mapping[str, Any]) -> list[str]:
    """`name value` pairs, filled into lines of at most 110 characters."""
    lines: list[str] = []
    for name, value in settings.items():
        item = f"{name} {_plain(value)}"
        if lines and len(lines[-1]) + len(item) < 108:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines


def _plain(value: Any) -> str:
    """A setting in words: a shape as 1x128x2, numbers to six digits, a mapping in brackets."""
    if value is None or value == [] or value == ():
        return "-"
    if isinstance(value, Mapping):
        return f"({', '.join(f'{name} {_plain(part)}' for name, part in value.items())})"
    if isinstance(value, (list, tuple)):
        return ("x" if all(isinstance(part, int) for part in value) else " ").join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
