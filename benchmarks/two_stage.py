"""The distilled two-stage render with sound, 384x256 -> 768x512, from text and image: phases, eager against graphed.

    python3 dev.py bench two_stage [t2v i2v] [--decoder conv|diffusion] [--replays 3] [--json FILE]
        [--tiny]

Two requests (seed and prompt both differ) are rendered eager and, three times in turns, graphed; frames and waveform
are compared bit for bit. Weights are random: times, memory and bits are real, pictures and sound are not.
"""
from __future__ import annotations

import dataclasses
import statistics
import time

import torch
from _models import (
    FRAME_RATE,
    clip_request,
    clip_sizes,
    device_of,
    finish,
    open_each,
    parse,
    parser_of,
    synchronize,
)

from ltx_runtime.conditioning import audio_state, replace_frame, text_to_video_state
from ltx_runtime.sampler import sample
from ltx_runtime.schedules import distilled_stage2_sigmas
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline

DECODERS = ("conv", "diffusion")


class Models:
    """All of a two-stage render with sound. size: of the first stage's clip."""

    def __init__(self, decoder: str, tiny: bool):
        opened = open_each(("transformer", "upsampler", decoder, "audio", "encoder"), tiny)
        self.transformer, self.upsampler = opened["transformer"], opened["upsampler"]
        self.vae, self.audio_vae, self.encoder = opened[decoder], opened["audio"], opened["encoder"]
        self.device = device_of(tiny)
        self.size = clip_sizes(("S0",), tiny)["S0"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("kinds", nargs="*", metavar="t2v|i2v", help="both by default")
    parser.add_argument("--decoder", choices=DECODERS, default="conv")
    parser.add_argument("--replays", type=int, default=3)
    arguments = parse(parser, kinds=["t2v"], replays=1)
    arguments.kinds = arguments.kinds or ["t2v", "i2v"]
    models = Models(arguments.decoder, arguments.tiny)
    rows = []
    for kind in arguments.kinds:
        rows.append(measure(models, kind, arguments.replays))
        print(words(rows[-1]), flush=True)
    again = render(models, "t2v", 1, "on")[2] if len(arguments.kinds) == 2 else None
    counters = models.transformer.graphs.counters
    found = {
        "decoder": arguments.decoder,
        "t2v_after_i2v": None if again is None else [graph["steps"] for graph in again],
        "captures": counters.captures,
        "hits": counters.hits,
    }
    last = f"captures {counters.captures}, hits {counters.hits}; t2v after i2v: {found['t2v_after_i2v']}"
    finish("two_stage", arguments, models.device, "\n".join([*map(words, rows), last]), rows, **found)


def render(
    models: Models, kind: str, case: int, mode: str
) -> tuple[torch.Tensor, torch.Tensor, list[dict], Timeline, float]:
    """Frames, waveform, graph accounts of both stages, timeline, wall ms."""
    timeline = Timeline(None, device=models.device)
    width, height, _ = models.size
    first = clip_request(models.transformer, models.size, seed=case, prompt=case)
    if kind == "i2v":
        first = dataclasses.replace(first, noise_convention="reference")
    models.transformer.contexts.clear()  # a new prompt, as the first render has it
    synchronize(models.device)
    started = time.perf_counter()
    with timeline.segment("stage 1"):
        if kind == "i2v":
            picture = torch.rand(1, 2 * height, 2 * width, 3, generator=torch.Generator().manual_seed(case))
            small, large = (
                models.encoder.encode(picture, size=(scale * width, scale * height), timeline=timeline)
                for scale in (1, 2)
            )
            first = dataclasses.replace(first, video=replace_frame(first.video.to(small.device), 0, small, 0.7))
        one = sample(models.transformer, first, cuda_graph=mode, timeline=timeline)
    with timeline.segment("upscale"):
        upscaled = models.upsampler.upscale(one.video, models.vae.module.per_channel_statistics, timeline=timeline)
    with timeline.segment("stage 2"):
        video = text_to_video_state(VideoLatentShape(*upscaled.shape), FRAME_RATE, upscaled)
        if kind == "i2v":
            video = replace_frame(video, 0, large, 1.0)
        second = dataclasses.replace(
            first,
            video=video,
            audio=audio_state(AudioLatentShape(*one.audio.shape), one.audio),
            sigmas=distilled_stage2_sigmas(),
            sampler="euler",
        )
        two = sample(models.transformer, second, cuda_graph=mode, timeline=timeline)
    with timeline.segment("decode"):
        frames = models.vae.decode(two.video, timeline=timeline)
        waveform = models.audio_vae.decode(two.audio, cuda_graph=mode, timeline=timeline).cpu()
    wall_ms = (time.perf_counter() - started) * 1e3
    return frames, waveform, [one.graph, two.graph], timeline, wall_ms


def measure(models: Models, kind: str, replays: int) -> dict:
    cases = (1, 2)
    render(models, kind, 1, "off")
    eager, eager_walls, graphed_walls, equal = {}, [], [], []
    for case in cases:
        *eager[case], _, eager_timeline, wall = render(models, kind, case, "off")
        eager_walls.append(wall)
    capture = None
    for replay in range(replays):
        for case in cases:
            frames, waveform, graphs, timeline, wall = render(models, kind, case, "on")
            equal += [torch.equal(frames, eager[case][0]), torch.equal(waveform, eager[case][1])]
            if replay == 0 and case == cases[0]:
                capture = [graph.get("capture") for graph in graphs]
            else:
                graphed_walls.append(wall)
    different = not torch.equal(eager[1][0], eager[2][0]) and not torch.equal(eager[1][1], eager[2][1])
    return {
        "kind": kind,
        "frames": list(frames.shape),
        "waveform": list(waveform.shape),
        "frames_and_waveform_equal": all(equal),
        "comparisons": len(equal),
        "the_two_requests_differ": different,
        "saturated_share": float(((frames == 0) | (frames == 1)).float().mean()),
        "eager_ms": [min(eager_walls), max(eager_walls)],
        "graphed_ms": statistics.median(graphed_walls),
        "graphed_range_ms": [min(graphed_walls), max(graphed_walls)],
        "capture": capture,
        "eager": eager_timeline.summary(),
        "graphed": timeline.summary(),
        "steps": [graph["steps"] for graph in graphs],
    }


def words(row: dict) -> str:
    lines = [
        f"## {row['kind']}: frames {row['frames']}, waveform {row['waveform']}",
        (
            f"frames and waveform graphed = eager: {row['frames_and_waveform_equal']} "
            f"in {row['comparisons']} comparisons; "
            f"requests differ: {row['the_two_requests_differ']}; saturated {row['saturated_share']:.1%}"
        ),
        (
            f"eager {row['eager_ms'][0]:.0f}-{row['eager_ms'][1]:.0f} ms, graphed {row['graphed_ms']:.0f} "
            f"({row['graphed_range_ms'][0]:.0f}-{row['graphed_range_ms'][1]:.0f}) ms, "
            f"graphed phases cover {row['graphed']['coverage']:.1%}"
        ),
        "| phase | count | eager ms | graphed ms | peak GB |",
        "|---|---|---|---|---|",
    ]
    phases = {**row["eager"]["phases"], **row["graphed"]["phases"]}
    for phase, numbers in phases.items():
        walls = [row[arm]["phases"].get(phase, {}).get("wall_ms") for arm in ("eager", "graphed")]
        cells = " | ".join("-" if wall is None else f"{wall:.1f}" for wall in walls)
        lines.append(f"| {phase} | {numbers['count']} | {cells} | {(numbers['mem_peak_bytes'] or 0) / 1e9:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
