"""The JSON report against the schema that its module documents, and the text a person reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ltx_runtime import report_text
from ltx_runtime.parity import Arm, Trial, compare_frames, frame_range, judge
from ltx_runtime.report_text import as_text, environment_of, json_report, phase_table, residency, text_report
from ltx_runtime.timing import Timeline

TYPES = {"str": str, "bool": bool, "int": int, "number": (int, float)}
H200 = {
    "device": "NVIDIA H200",
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "allocator": "cudaMallocAsync",
    "python": "3.12.3",
    "platform": "Linux",
}
# As StepRunner.account leaves it after a render that measured, captured and replayed.
CAPTURED = {
    "requested": "auto",
    "mode": "graph",
    "decision": "auto: 49% busy (112.0 of 229.0 ms): pays after 3 steps, 5 remain, captured",
    "steps": ["eager", "eager", "measure", "capture", "replay", "replay"],
    "missed": ["0.forward.video.context: [1, 1024, 64] -> [1, 2048, 64]"],
    "measured": {"wall_ms": 229.0, "gpu_ms": 112.0, "gpu_busy": 0.489},
    "capture": {
        "warmup_ms": 250.0,
        "capture_ms": 310.0,
        "first_replay_ms": 120.0,
        "static_bytes": 2**20,
        "graph_bytes": 3 * 2**20,
    },
    "allocator": "cudaMallocAsync",
    "graphs": 1,
    "graph_bytes": 4 * 2**20,
    "counters": {"hits": 0, "misses": 1, "captures": 1, "evictions": 0, "fallbacks": 0},
}
NO_GRAPH = {
    "requested": "on",
    "mode": "eager",
    "decision": "eager: no CUDA",
    "fallback": "no CUDA",
    "steps": ["eager"] * 3,
    "allocator": "cpu",
    "graphs": 0,
    "graph_bytes": 0,
    "counters": {"hits": 0, "misses": 0, "captures": 0, "evictions": 0, "fallbacks": 0},
}


@dataclass
class Render:
    timeline: Timeline
    settings: dict = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    graph: dict | None = None


def rendered(graph=NO_GRAPH, renders=1, **attrs) -> Render:
    """A render with a real phase log."""
    timeline = Timeline(None)
    with timeline.segment("LTXGraphSampler"):
        with timeline.phase("prepare.constants"):
            pass
        for _ in range(renders):
            for step in range(3):
                with timeline.phase("sample.step", step=step, **attrs):
                    sum(range(10_000))
    settings = {"model": "x.safetensors", "seed": 7, "sigmas": [1.0, 0.99375, 0.0], "video_latent": [1, 128, 2, 4, 4]}
    return Render(timeline, settings | {"audio_latent": None}, ("schedule: distilled, by the file name",), graph)


def verdict():
    frames = torch.rand(3, 8, 8, 3, generator=torch.Generator().manual_seed(0)) * 0.9 + 0.05
    trial = Trial("seed 7", (compare_frames(frames, frames),), (frame_range(frames),))
    return judge(Arm("graphed", "eager", not_run="no CUDA"), [Arm("eager repeated", "eager", (trial,))])


def documented() -> dict[str, str]:
    """Path -> type of every field in the module's docstring."""
    return dict(re.findall(r"^    ([a-z_\[\]{}.]+)\s+(\w+\??)(?:\s|$)", report_text.__doc__, re.MULTILINE))


def problems(document: Any, fields: dict[str, str], path: str = "") -> list[str]:
    """Where a document and the documented fields disagree; also notes which fields were met."""
    if path in fields:
        kind = fields[path]
        if document is None:
            return [] if kind.endswith("?") else [f"{path} is null"]
        kind = kind.rstrip("?")
        fine = kind == "any" or isinstance(document, TYPES[kind]) and (kind == "bool") == isinstance(document, bool)
        return [] if fine else [f"{path} is {type(document).__name__}, documented as {kind}"]
    if isinstance(document, list):
        return [p for item in document for p in problems(item, fields, f"{path}[]")]
    if not isinstance(document, dict):
        return [f"{path} is not documented"]
    if any(name.startswith(f"{path}{{}}") for name in fields):
        return [p for value in document.values() for p in problems(value, fields, f"{path}{{}}")]
    known = {
        name[len(path) :].lstrip(".").split(".")[0].split("[")[0].split("{")[0]
        for name in fields
        if name.startswith(path)
    }
    found = [f"{path}.{name} is missing" for name in sorted(known - set(document))]
    return found + [
        p for name, value in document.items() for p in problems(value, fields, f"{path}.{name}".lstrip("."))
    ]


@pytest.mark.parametrize("graph", [NO_GRAPH, CAPTURED, None], ids=["no CUDA", "captured", "unknown"])
def test_the_json_report_is_what_the_module_documents(graph):
    report = json_report(verdict(), {"eager": rendered(graph), "graphed": rendered(graph)})
    report = json.loads(json.dumps(report, allow_nan=False))
    assert len(documented()) > 25
    assert problems(report, documented()) == []
    assert report["schema"] == "ltxgraph.report/1" and [r["name"] for r in report["renders"]] == ["eager", "graphed"]


def test_the_schema_check_itself_can_fail():
    report = json_report(verdict(), {"eager": rendered()})
    del report["environment"]["torch"]
    report["renders"][0]["steps"][0]["wall_ms"] = "fast"
    report["extra"] = 1
    found = problems(report, documented())
    assert found == [
        "environment.torch is missing",
        "renders[].steps[].wall_ms is str, documented as number",
        "extra is not documented",
    ]


def test_the_report_without_a_render_still_has_its_verdict():
    report = json_report(verdict(), {})
    assert problems(report, documented()) == [] and report["renders"] == []
    assert as_text(report).startswith("parity: not tested: no CUDA; eager repeated: equal\n")


def test_the_text_says_what_a_person_asks_for():
    text = text_report(verdict(), {"eager": rendered()})
    for words in (
        "parity: not tested: no CUDA; eager repeated: equal",
        "cpu, torch ",
        "seed 7",
        "sigmas 1 0.99375 0",
        "video_latent 1x128x2x4x4",
        "audio_latent -",
        "note: schedule: distilled, by the file name",
        "sample.step",
        "unaccounted",
        "CUDA graph: requested on, ran eager",
        "decision: eager: no CUDA",
        "resident: not measured, no step ran under the profiler",
    ):
        assert words in text, words
    assert text.isascii() and max(map(len, text.splitlines())) < 160


def test_the_graph_section_has_every_number():
    text = as_text(json_report(verdict(), {"graphed": rendered(CAPTURED)}, H200))
    for words in (
        "NVIDIA H200, torch 2.11.0+cu130, CUDA 13.0, allocator cudaMallocAsync, Python 3.12.3, Linux",
        "requested auto, ran graph",
        "49% busy (112.0 of 229.0 ms)",
        "eager step: wall 229.0 ms, GPU 112.0 ms, busy 49%",
        "capture cost: warmup 250.0 + capture 310.0 + first_replay 120.0 ms, 4.0 MiB",
        "steps: 2 eager, 1 measure, 1 capture, 2 replay",
        "0 hits, 1 misses, 1 captures, 0 evictions, 0 fallbacks",
        "last miss, because of: 0.forward.video.context: [1, 1024, 64] -> [1, 2048, 64]",
        "held now: 1 graphs, 4.0 MiB",
    ):
        assert words in text, words


def test_each_render_of_an_arm_has_its_line_of_steps():
    text = as_text(json_report(verdict(), {"eager": rendered(renders=2)}))
    after = text.split("wall ms of each step")[1].splitlines()[1:]
    assert [len(line.split()) for line in after[:3]] == [3, 3, 0]


def test_the_phase_table_adds_up():
    summary = rendered().timeline.summary()
    lines = phase_table(summary).splitlines()
    assert lines[0].split()[:4] == ["phase", "count", "wall", "ms"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:]}
    assert rows["sample.step"][0] == "3"
    assert float(rows["wall"][0]) == pytest.approx(summary["wall_ms"], rel=0.05)  # two digits are printed
    shares = [
        float(next(cell for cell in cells if cell.endswith("%"))[:-1]) for name, cells in rows.items() if name != "wall"
    ]
    assert len(shares) == 3 and sum(shares) == pytest.approx(100, abs=0.3)


def test_a_failed_phase_is_in_the_table():
    timeline = Timeline(None)
    with pytest.raises(KeyError), timeline.segment("LTXGraphSampler"), timeline.phase("sample.step", step=0):
        raise KeyError
    assert "failed in sample.step: KeyError" in phase_table(timeline.summary())


def profiled(memcpys: dict, host_waits: dict | None) -> dict:
    timeline = rendered(memcpys=memcpys, host_waits=host_waits).timeline
    return residency(timeline.events, timeline.summary(), CAPTURED)


def test_resident_is_yes_only_without_copies_and_waits():
    on_device = {"DtoD (Device -> Device)": {"count": 4, "bytes": 4096}}
    found = profiled(on_device, {})
    assert found["resident"] is True and (found["profiled_steps"], found["host_to_device_bytes"]) == (3, 0)
    assert found["words"] == (
        "resident: yes; in 3 profiled steps: 0 bytes to the device, 0 bytes to the host, 0 waits of the host, "
        "GPU busy 49% in sample.step"
    )
    copied = profiled(on_device | {"HtoD (Pinned -> Device)": {"count": 1, "bytes": 512}}, {})
    assert copied["resident"] is False and copied["host_to_device_bytes"] == 3 * 512
    assert copied["words"].startswith("resident: no; in 3 profiled steps: 1536 bytes to the device")
    waited = profiled({}, {"cudaStreamSynchronize": 2})
    assert waited["resident"] is False and waited["host_waits"] == 6


def test_resident_is_not_claimed_when_something_was_not_seen():
    assert profiled({}, None)["resident"] is None
    unsized = profiled({"DtoH (Device -> Pageable)": {"count": 1, "bytes": None}}, {})
    assert unsized["resident"] is False and unsized["device_to_host_bytes"] is None


def test_the_environment_of_the_cpu():
    environment = environment_of(torch.device("cpu"))
    assert environment["device"] == "cpu" and environment["torch"] == torch.__version__
    assert environment["allocator"] == "cpu"
