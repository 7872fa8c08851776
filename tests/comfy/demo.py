"""The demo: bundled API workflows on a real ComfyUI with tiny checkpoints, followed, decoded back, judged.

    python3 dev.py demo

Works in DEMO_DIR/base, a ComfyUI base directory of its own, made anew each time. Exits 0 only when the video could be
decoded, its frames counted and its sound measured, and the verdicts are what this machine should give: `equal` with
CUDA; without it the graph arm can't run, so `not tested`, with the eager arm repeated and equal.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from saved_video import SavedVideo, read_video
from server import ComfyServer, Run, install_pack, install_tiny, make_base

import dev
from ltx_runtime.shapes import audio_latent_frames

WORKFLOWS = dev.ROOT / "workflows" / "api"
WITHOUT_CUDA = "not tested: no CUDA; eager repeated: equal"
WITH_CUDA = "equal"
BAR = 24
SAMPLE_RATE = 48000
# Of the sound in the file from the video's length. Audio latents end up to 20 ms beside it, their sound 30 ms earlier.
LARGEST_GAP_S = 0.05
FRAME_RATE = 24.0


class DemoFailed(Exception):
    pass


class ProgressLine:
    """The running node and its bar, rewritten on a terminal; elsewhere a line for each node of more than one step."""

    def __init__(self, workflow: dict[str, dict]):
        self._titles = {node_id: node["_meta"]["title"] for node_id, node in workflow.items()}
        self._live = sys.stdout.isatty()
        self._finished: set[str] = set()

    def __call__(self, event: dict) -> None:
        if event["type"] != "progress_state":
            return
        for node_id, state in event["data"]["nodes"].items():
            value, total = int(state["value"]), max(1, int(state["max"]))
            filled = BAR * value // total
            line = f"  [{'#' * filled}{'-' * (BAR - filled)}] {self._titles[node_id]} {value}/{total}"
            if self._live and state["state"] == "running":
                print("\r" + line[:100].ljust(100), end="", flush=True)
            if not self._live and state["state"] == "finished" and total > 1 and node_id not in self._finished:
                self._finished.add(node_id)
                print(line, flush=True)

    def clear(self) -> None:
        if self._live:
            print("\r" + " " * 100 + "\r", end="", flush=True)


def run_workflow(server: ComfyServer, name: str) -> tuple[dict, Run]:
    """Run workflows/api/NAME.json to its end. Raises DemoFailed with the server's words, PromptRefused."""
    workflow = json.loads((WORKFLOWS / f"{name}.json").read_text(encoding="utf-8"))
    print(f"\n{name}: workflows/api/{name}.json", flush=True)
    progress = ProgressLine(workflow)
    run = server.client().run(workflow, on_event=progress)
    progress.clear()
    if run.outcome != "execution_success":
        raise DemoFailed(f"{name}: {run.outcome}: {run.error}\n{server.log()[-4000:]}")
    return workflow, run


def output_of(workflow: dict, run: Run, *class_types: str) -> dict:
    """What the first node of these classes put into the history."""
    return next(run.outputs[node_id] for node_id, node in workflow.items() if node["class_type"] in class_types)


def saved_files(base: Path, workflow: dict, run: Run, class_type: str) -> list[Path]:
    nodes = [node_id for node_id, node in workflow.items() if node["class_type"] == class_type]
    files = [file for node_id in nodes for file in run.outputs[node_id]["images"]]
    return [base / file["type"] / file["subfolder"] / file["filename"] for file in files]


def check_sound(video: SavedVideo, parity: dict, length: int, frame_rate: float) -> str:
    """The sound as the decoder gave it and as the file holds it, in words. Raises DemoFailed."""
    latents = audio_latent_frames(length, frame_rate)
    expected = [1, 2, 480 * max(4 * latents - 3, 1)]
    comparisons = json.loads(parity["ltxgraph_report"][0])["verdict"]["numbers"]["comparisons"]
    shape = next((c["shape"] for c in comparisons if c["name"] == "waveform"), None)
    if shape != expected:
        raise DemoFailed(f"the waveform has shape {shape}; {latents} audio latents should give {expected}.")
    if video.sound is None:
        raise DemoFailed("the video has no sound.")
    rate, channels, seconds = video.sample_rate, len(video.sound), video.sound_seconds
    if (rate, channels) != (SAMPLE_RATE, 2) or abs(seconds - video.seconds) > LARGEST_GAP_S:
        raise DemoFailed(
            f"the video holds {seconds:.3f} s of sound at {rate} Hz in {channels} channels, expected "
            f"{video.seconds:.3f} s at {SAMPLE_RATE} Hz in 2."
        )
    return f"{rate} Hz stereo, {expected[2]:,} samples for {latents} latents; {seconds:.3f} s in the file"


def check_verdict(name: str, words: str, expected: str) -> None:
    if not words.startswith(expected):
        raise DemoFailed(f"{name}: the verdict is {words!r}; this machine should give {expected!r}.")
    print(f"verdict       {words} (as expected on this machine)")


def show(demo: Path, what: str, path: Path, note: str = "") -> None:
    print(f"{what:<13} {path.relative_to(demo.parent)}{'  ' + note if note else ''}")


def show_pictures(demo: Path, server: ComfyServer, workflow: dict, run: Run) -> None:
    """By the names that the workflows save them under: the difference, and a timeline for each render."""
    for picture in saved_files(server.base, workflow, run, "SaveImage"):
        show(demo, picture.name.split("_")[0], picture)


def text_to_video(demo: Path, server: ComfyServer, expected: str) -> None:
    workflow, run = run_workflow(server, "demo_text_to_video")
    parity = output_of(workflow, run, "LTXGraphTimingParity")
    print(parity["text"][0])
    path = saved_files(server.base, workflow, run, "SaveVideo")[0]
    video = read_video(path)
    frames, (width, height) = len(video.sizes), video.sizes[0]
    wanted = next(node["inputs"] for node in workflow.values() if node["class_type"] == "LTXGraphEmptyLatent")
    if (frames, width, height) != (wanted["length"], wanted["width"], wanted["height"]):
        raise DemoFailed(f"{path} decodes to {frames} frames of {width}x{height}, the workflow asks for {wanted}.")
    show(demo, "video", path, f"decoded back: {frames} frames of {width}x{height}")
    print(f"{'sound':<13} {check_sound(video, parity, wanted['length'], FRAME_RATE)}")
    show_pictures(demo, server, workflow, run)
    for render in json.loads(parity["ltxgraph_report"][0])["renders"]:
        log = server.base / "output" / "ltxgraph" / f"{render['render']}.jsonl"
        show(demo, "phase log", log, f"{render['name']}, {sum(1 for _ in log.open(encoding='utf-8'))} events")
    check_verdict("demo_text_to_video", json.loads(parity["ltxgraph_report"][0])["verdict"]["words"], expected)


def parity_run(demo: Path, server: ComfyServer, expected: str) -> None:
    workflow, run = run_workflow(server, "demo_parity")
    parity = output_of(workflow, run, "LTXGraphParityRun")
    show_pictures(demo, server, workflow, run)
    check_verdict("demo_parity", json.loads(parity["ltxgraph_report"][0])["verdict"]["words"], expected)


def main(demo: Path) -> None:
    import torch

    cuda = torch.cuda.is_available()
    expected = WITH_CUDA if cuda else WITHOUT_CUDA
    shutil.rmtree(demo, ignore_errors=True)
    base = make_base(demo / "base")
    install_pack(base)
    print("writing tiny checkpoints under the published names", flush=True)
    install_tiny(base)
    print("starting ComfyUI", flush=True)
    with ComfyServer(base, dev.comfyui_dir(), overlay=dev.overlay_dir(), cpu=not cuda) as server:
        version = server.client().system_stats()["system"]["comfyui_version"]
        print(f"ComfyUI {version} at {server.url} on {'CUDA' if cuda else 'CPU'}")
        show(demo, "server log", server.log_path)
        text_to_video(demo, server, expected)
        parity_run(demo, server, expected)
    print(
        "\nThe weights are random, so picture and sound mean nothing; frames, timing and verdicts are real."
        "\nOpen the same workflow in your ComfyUI: Templates, ComfyUI-LTXGraph."
    )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except DemoFailed as failure:
        sys.exit(f"demo failed: {failure}")
