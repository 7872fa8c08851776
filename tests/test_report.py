"""The JSON report against the schema that its module documents, and the text a person reads."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ltx_runtime import report_text
from ltx_runtime.loop_activity import LoopActivity
from ltx_runtime.parity import Arm, Trial, compare_frames, frame_range, judge
from ltx_runtime.report_text import as_text, environment_of, json_report, phase_table, residency
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
    activity: LoopActivity | None = None


def part(gpu_ms: float, to_device: int | None = 0, to_host: int = 0, waits: int | None = 0) -> dict:
    """As `loop_activity.plain_activity` leaves it."""
    return {
        "gpu_ms": gpu_ms,
        "kernel_count": 9195,
        "longest_gap_ms": 0.25,
        "host_to_device_bytes": to_device,
        "device_to_host_bytes": to_host,
        "waits": waits,
    }


def measured(answer: bool | None = True, **parts) -> LoopActivity:
    word = {True: "yes", False: "no", None: "not known"}[answer]
    parts = {"step": part(0.001), "loop": part(900.0, to_host=64, waits=8)} | parts
    return LoopActivity(
        answer, f"resident: {word}: between the kernels of a step ...", **parts, steps=8, took_ms=2345.6
    )


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
        fine = kind == "any" or (isinstance(document, TYPES[kind]) and (kind == "bool") == isinstance(document, bool))
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
    assert report["residency"] == {"arm": None, "resident": None, "words": report_text.NOT_MEASURED}
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


def test_notes_on_the_report_itself_stand_at_its_head():
    report = json_report(verdict(), {}, notes=["the timeline picture failed"])
    assert report["notes"] == ["the timeline picture failed"]
    assert as_text(report).splitlines()[2] == "note: the timeline picture failed"


def test_the_text_says_what_a_person_asks_for():
    text = as_text(json_report(verdict(), {"eager": rendered()}))
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
        "resident: not measured; LTX Graph Parity Run measures it",
    ):
        assert words in text, words
    assert text.isascii() and max(map(len, text.splitlines())) < 160


def test_settings_of_every_kind_are_readable():
    render = rendered()
    render.settings |= {
        "loras": [{"file": "a.safetensors", "strength": 0.8}, {"file": "b.safetensors", "strength": -1.0}],
        "guidance": {"batching": "auto", "video": {"cfg": 3.0, "stg_blocks": (28,)}, "audio": None},
        "no_loras": [],
    }
    text = as_text(json_report(verdict(), {"eager": render}))
    for words in (
        "loras (file a.safetensors, strength 0.8) (file b.safetensors, strength -1)",
        "guidance (batching auto, video (cfg 3, stg_blocks 28), audio -)",
        "no_loras -",
        "sigmas 1 0.99375 0",
        "video_latent 1x128x2x4x4",
    ):
        assert words in text, words


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


def with_activity(activity: LoopActivity, graph=NO_GRAPH) -> Render:
    render = rendered(graph)
    render.activity = activity
    return render


def test_what_the_profiler_saw_is_in_the_report_as_documented():
    arms = {
        "eager": with_activity(measured(decode=part(120.0))),
        "graphed": with_activity(measured(None, step=part(0.001, to_device=None))),
        "repeated": rendered(),
    }
    report = json.loads(json.dumps(json_report(verdict(), arms), allow_nan=False))
    assert problems(report, documented()) == []
    found = report["renders"][0]["residency"]
    assert found["resident"] is True and found["profiled_steps"] == 1 and found["took_ms"] == 2345.6
    assert (found["host_to_device_bytes"], found["device_to_host_bytes"], found["host_waits"]) == (0, 0, 0)
    loop = {name: value for name, value in found["activity"][1].items() if name != "longest_gap_ms"}
    assert [activity["part"] for activity in found["activity"]] == ["step", "loop", "decode"]
    assert loop == {
        "part": "loop",
        "gpu_ms": 900.0,
        "kernels": 9195,
        "host_to_device_bytes": 0,
        "device_to_host_bytes": 64,
        "host_waits": 8,
    }
    assert report["renders"][2]["residency"]["resident"] is None
    assert report["renders"][1]["residency"]["activity"][0]["host_to_device_bytes"] is None
    assert "an unknown number of bytes to the device" in as_text(report)


@pytest.mark.parametrize(
    ("answers", "arm", "resident"),
    [
        ((True, True), "graphed", True),
        ((False, True), "eager", False),
        ((None, True), "eager", None),
        ((True, None), "graphed", None),
        ((None, False), "graphed", False),
    ],
)
def test_the_head_of_the_report_carries_the_worst_answer(answers, arm, resident):
    arms = {name: with_activity(measured(answer)) for name, answer in zip(("eager", "graphed"), answers, strict=True)}
    report = json_report(verdict(), arms)
    assert (report["residency"]["arm"], report["residency"]["resident"]) == (arm, resident)
    words = {True: "yes", False: "no", None: "not known"}[resident]
    assert as_text(report).splitlines()[1] == f"resident: {words}: between the kernels of a step ... ({arm})"


def test_the_head_says_why_nothing_was_measured():
    arms = {
        "eager": with_activity(LoopActivity(None, "resident: not measured, the model is on cpu")),
        "other": rendered(),
    }
    report = json_report(verdict(), arms)
    assert report["residency"] == {
        "arm": None,
        "resident": None,
        "words": "resident: not measured, the model is on cpu",
    }


def test_busy_and_idle_shares_by_phase_stand_in_the_report():
    render = rendered()
    with render.timeline.segment("decode"), render.timeline.phase("decode.video.chunk", chunk=0):
        sum(range(100_000))
    events = [e for e in render.timeline.events if e["event"] == "end"]
    wall_ms = sorted(e["wall_ms"] for e in events if e["phase"] == "sample.step")[1]
    decode_ms = next(e["wall_ms"] for e in events if e["phase"] == "decode.video.chunk")
    for event in events:  # as NVML would have left them
        event["nvml"] = {"util_mean": 0.5, "util_zero_share": 0.25, "samples": 4}
    render.activity = measured(step=part(wall_ms / 2), decode=part(decode_ms / 4))
    found = residency(render)
    assert found["gpu_busy"]["sample.step"] == pytest.approx(0.5)
    assert found["gpu_busy"]["decode.video.chunk"] == pytest.approx(0.25)
    assert found["gpu_busy"]["prepare.constants"] is None, "nobody measured it"
    assert set(found["nvml_zero_share"].values()) == {0.25}
    text = as_text(json_report(verdict(), {"eager": render}))
    for words in (
        "one step, between its kernels: 9,195 kernels, GPU ",
        "the whole loop, edges included: 9,195 kernels, GPU 900.0 ms, ",
        ", 0 bytes to the device, 64 bytes to the host, 8 waits of the host",
        "measured in 2346 ms after all renders",
        "GPU busy: sample.step 50%, decode.video.chunk 25%",
        "NVML read zero in: prepare.constants 25%, sample.step 25%, decode.video.chunk 25%",
    ):
        assert words in text, words


def test_what_auto_measured_is_the_busy_share_of_a_step():
    assert residency(with_activity(measured(), CAPTURED))["gpu_busy"]["sample.step"] == 0.489


def test_the_environment_of_the_cpu():
    environment = environment_of(torch.device("cpu"))
    assert environment["device"] == "cpu" and environment["torch"] == torch.__version__
    assert environment["allocator"] == "cpu"
