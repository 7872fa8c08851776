"""Decodes, conv, diffusion and sound: to frames on the host against the work on the device, memory against the plan,
tiles against the whole.

    python3 dev.py bench decode [S0 S1 S2] [--decoder conv diffusion audio] [--chunks 0 1] [--repeats 5]
        [--cuda-graph] [--no-profile] [--json FILE] [--tiny]

Everything runs eager; --cuda-graph adds a table of the same video decodes by recordings. A chunk is a number of latent
frames, 0 the whole clip; the diffusion decoder has no chunks.
Tiles are those of ComfyUI's template for LTX-2.5: 512 pixels that share 64, 64 frames that share 16; where a decoder
needs more overlap it takes it and says so. All tiles take their noise from one canvas, so differences show seams.
Sound is 5 seconds. GPU time comes from CUPTI at the very end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from _models import (
    FRAME_RATE,
    SIZES,
    clip_sizes,
    device_of,
    finish,
    markdown,
    open_each,
    parse,
    parser_of,
    plan_of_chunk,
    size_name,
    spread,
)

from ltx_runtime.audio_vae import AudioVAE
from ltx_runtime.cuda_graph import GRAPH_NOTE
from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.seams import compare_at_seams
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import AskedSizes, DecodePlan, VideoVAE

DECODERS = ("conv", "diffusion", "audio")
TEMPLATE = AskedSizes(tile_size=512, overlap=64, temporal_size=64, temporal_overlap=16)
TINY_TILES = AskedSizes(tile_size=64, overlap=32)
SECONDS, TINY_SECONDS = 5, 1


def main() -> None:
    parser = parser_of(__doc__)
    # No choices: before Python 3.12 argparse holds an empty list against them.
    parser.add_argument("sizes", nargs="*", metavar="S0|S1|S2", help="default: all")
    parser.add_argument("--decoder", nargs="+", choices=DECODERS, default=DECODERS)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 1], help="beside the planned one, 0 = whole")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cuda-graph", action="store_true", help="video decodes by recordings too")
    parser.add_argument("--no-profile", action="store_true", help="no CUPTI")
    arguments = parse(parser, sizes=["S0"], repeats=1)
    device = device_of(arguments.tiny)
    models = open_each(arguments.decoder, arguments.tiny)
    sizes = clip_sizes(arguments.sizes or SIZES, arguments.tiny)
    tiles = TINY_TILES if arguments.tiny else TEMPLATE
    cases = [
        case
        for name, size in sizes.items()
        for decoder in arguments.decoder
        if decoder != "audio"
        for case in cases_of(models[decoder], decoder, name, size, arguments.chunks, tiles)
    ]
    rows = measure_video(cases, arguments.repeats)
    tables = []
    if arguments.cuda_graph:
        for row, case in zip(rows, cases):
            row["recorded"] = measure_recorded(case, arguments.repeats)
            print(f"{recorded_table([row])}\n", flush=True)
        tables = [recorded_table(rows)]
    sound = []
    if "audio" in arguments.decoder:
        latent = sound_latent(TINY_SECONDS if arguments.tiny else SECONDS).to(device)
        sound = [measure_sound(models["audio"], latent, arguments.repeats)]
        print(f"{sound_table(sound)}\n", flush=True)
    # CUPTI last of all: once used, every launch of the process is slower.
    if device.type == "cuda" and not arguments.no_profile:
        for row, case in zip(rows, cases):
            row |= profile(case.to_host, device)
            print(f"{table([row])}\n", flush=True)
        for row in sound:
            row |= profile(lambda: models["audio"].decode(latent), device)
    tables = "\n\n".join([table(rows), *tables, sound_table(sound)])
    finish("decode", arguments, device, tables, [*rows, *sound])


@dataclass(frozen=True)
class Case:
    """One plan at one size. how: "whole", "stream of N" latent frames, or "tiles"; "planned" is what a user gets."""

    vae: VideoVAE
    decoder: str
    name: str
    size: tuple[int, int, int]
    how: str
    plan: DecodePlan

    def latent(self) -> torch.Tensor:
        shape = VideoLatentShape.from_pixels(*self.size).as_tuple()
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(self.vae.device)

    def to_host(self) -> torch.Tensor:
        return self.vae.decode(self.latent(), plan=self.plan, cuda_graph="off")


def cases_of(vae: VideoVAE, decoder: str, name: str, size, chunks: list[int], tiles: AskedSizes) -> list[Case]:
    shape = VideoLatentShape.from_pixels(*size).as_tuple()
    planned = vae.plan(shape, free_bytes=1 << 50)
    cases = [Case(vae, decoder, name, size, "whole", plan_of_chunk(vae, shape, 0))] if 0 in chunks else []
    if decoder == "conv":
        chunk = planned.chunk_frames
        if chunk < shape[2]:
            cases.append(Case(vae, decoder, name, size, f"stream of {chunk}, planned", planned))
        cases.extend(
            Case(vae, decoder, name, size, f"stream of {other}", plan_of_chunk(vae, shape, other))
            for other in set(chunks) - {0, chunk}
        )
    tiled = vae.plan(shape, free_bytes=1 << 50, sizes=tiles)
    return [*cases, Case(vae, decoder, name, size, "tiles", tiled)] if tiled.tiling else cases


def measure_video(cases: list[Case], repeats: int) -> list[dict]:
    rows, whole, wholes_of = [], None, None
    for case in cases:
        latent, plan, vae = case.latent(), case.plan, case.vae
        if wholes_of != (case.decoder, case.name):
            whole, wholes_of = None, (case.decoder, case.name)
        frames = vae.decode(latent, plan=plan, cuda_graph="off")  # cold kernels, cold pinned memory
        if case.how == "whole":
            whole = frames
        to_host = [timed(vae, vae.decode, latent, plan=plan, cuda_graph="off") for _ in range(repeats)]
        raw = [timed(vae, vae.decode_raw, latent, plan=plan, cuda_graph="off") for _ in range(repeats)]
        largest, mean, differing = differences(frames, whole, vae.device)
        seams = None
        if plan.tiling is not None and whole is not None:
            seams = compare_at_seams(frames.to(vae.device), whole, [vae.overlaps(latent.shape, plan)])
        rows.append(
            {
                "size": case.name,
                "pixels": size_name(case.size),
                "decoder": case.decoder,
                "how": case.how,
                "chunk_latent_frames": plan.chunk_frames,
                "ran_as": plan.reason,
                "decode_ms": spread([wall for wall, _ in to_host]),
                "decode_raw_ms": spread([wall for wall, _ in raw]),
                "peak_bytes": to_host[-1][1],
                "raw_peak_bytes": raw[-1][1],
                "planned_peak_bytes": plan.peak_bytes,
                "max_difference_to_whole": largest,
                "mean_difference_to_whole": mean,
                "differing_values": differing,
                "seams": None if seams is None else seams.as_dict() | {"words": seams.words()},
            }
        )
        print(f"{table(rows[-1:])}\n", flush=True)  # an interrupted run keeps what it measured
        del frames
    return rows


def measure_recorded(case: Case, repeats: int) -> dict:
    """On the device. What auto comes to say of this decode, and how it is by recordings: the first time, when they are
    made, and replayed; None where none was made."""
    vae, latent, plan = case.vae, case.latent(), case.plan
    decode = partial(vae.decode_raw, latent, plan=plan)
    vae.graphs.close()
    vae.graphs.forget_measurements()
    expected = decode(cuda_graph="off")
    auto = [said_of_graphs(decode, vae, "auto") for _ in range(3)][-1]
    vae.graphs.close()
    first_ms, _ = timed(vae, decode, cuda_graph="on")
    graphs = len(vae.graphs)
    found = {
        "auto": auto,
        "on": said_of_graphs(decode, vae, "on"),
        "recordings": graphs,
        "held_bytes": vae.graphs.device_bytes,
        "planned_bytes": plan.recording_bytes,
        "bit_for_bit": torch.equal(decode(cuda_graph="on"), expected),
        "first_ms": first_ms if graphs else None,
        "replayed_ms": spread([timed(vae, decode, cuda_graph="on")[0] for _ in range(repeats)]) if graphs else None,
    }
    vae.graphs.close()
    return found


def said_of_graphs(decode: Callable[..., torch.Tensor], vae: VideoVAE, cuda_graph: str) -> str:
    timeline = Timeline(None, device=vae.device)
    decode(cuda_graph=cuda_graph, timeline=timeline)
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    return "; ".join(note.removeprefix(GRAPH_NOTE) for note in notes if note.startswith(GRAPH_NOTE))


def differences(
    frames: torch.Tensor, whole: torch.Tensor | None, device: torch.device
) -> tuple[float | None, float | None, int | None]:
    """(largest, mean, how many values differ) of frames in [0, 1]."""
    if whole is None:
        return None, None, None
    largest, total, differing = 0.0, 0.0, 0
    for a, b in zip(frames.split(8), whole.split(8), strict=True):
        gap = (a.to(device) - b.to(device)).abs()
        largest = max(largest, float(gap.max()))
        total += float(gap.sum(dtype=torch.float64))
        differing += int(gap.count_nonzero())
    return largest, total / frames.numel(), differing


def sound_latent(seconds: int) -> torch.Tensor:
    frames = audio_latent_frames(round(seconds * FRAME_RATE) + 1, FRAME_RATE)
    shape = AudioLatentShape(1, 8, frames, 16).as_tuple()
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def measure_sound(vae: AudioVAE, latent: torch.Tensor, repeats: int) -> dict:
    first = vae.decode(latent)
    walls = [timed(vae, vae.decode, latent) for _ in range(repeats)]
    return {
        "latent_frames": latent.shape[2],
        "decoder": "audio",
        "decode_ms": spread([wall for wall, _ in walls]),
        "peak_bytes": walls[-1][1],
        "repeats_bit_for_bit": torch.equal(vae.decode(latent), first),
    }


def timed(
    vae: VideoVAE | AudioVAE, decode: Callable[..., torch.Tensor], *latent: torch.Tensor, **given
) -> tuple[float, int | None]:
    """Wall ms, and the device memory that it took beyond what was there, None on the CPU."""
    cuda = vae.device.type == "cuda"
    # Phases reset PyTorch's own peak counter; theirs are the peaks.
    timeline = Timeline(None, device=vae.device)
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    result = decode(*latent, timeline=timeline, **given)
    if cuda:
        torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - started) * 1e3
    del result
    return wall_ms, timeline.summary()["mem_peak_bytes"] - before if cuda else None


def profile(decode: Callable[[], torch.Tensor], device: torch.device) -> dict:
    activity = measure_gpu_busy(decode, device=device)
    if activity.reason is not None:
        return {"gpu_ms": None, "gpu_reason": activity.reason}
    copies = [copy for copy in activity.memcpys if copy.kind == "DtoH"]
    return {
        "gpu_ms": activity.kernel_ms,
        "launches": activity.kernel_count,
        "to_host_ms": sum(copy.ms for copy in copies),
        "host_waits": dict(activity.host_waits or ()),
        "top_kernels": [vars(kernel) for kernel in activity.top_kernels],
    }


def table(rows: list[dict]) -> str:
    head = [
        "size",
        "decoder",
        "how",
        "to the host ms (min-max)",
        "on the device ms",
        "on top",
        "kernels ms",
        "launches",
        "peak / planned GB",
        "difference to the whole: largest, mean",
    ]
    lines = []
    for row in rows:
        wall, raw, gpu = row["decode_ms"], row["decode_raw_ms"], row.get("gpu_ms")
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}"
        largest, mean = row["max_difference_to_whole"], row["mean_difference_to_whole"]
        lines.append(
            [
                f"{row['size']} {row['pixels']}",
                row["decoder"],
                row["how"],
                f"{wall['median']:.1f} ({wall['min']:.1f}-{wall['max']:.1f})",
                f"{raw['median']:.1f} ({raw['min']:.1f}-{raw['max']:.1f})",
                f"{wall['median'] / raw['median'] - 1:.0%}",
                "-" if gpu is None else f"{gpu:.1f}",
                str(row.get("launches", "-")),
                f"{peak} / {row['planned_peak_bytes'] / 1e9:.2f}",
                "-" if largest is None else "none" if not row["differing_values"] else f"{largest:.2g}, {mean:.2g}",
            ]
        )
    seams = [f"- {row['pixels']} {row['decoder']}: {row['seams']['words']}" for row in rows if row["seams"]]
    return "\n\n".join([markdown(head, lines), *(["Tiles against the whole:\n\n" + "\n".join(seams)] if seams else [])])


def recorded_table(rows: list[dict]) -> str:
    head = [
        "by recordings",
        "decoder",
        "how",
        "eager, on the device ms",
        "replayed ms (min-max)",
        "with the recording ms",
        "held / planned MB",
        "bits of eager",
        "on",
        "auto, third use",
    ]
    lines = []
    for row in rows:
        found, replayed = row["recorded"], row["recorded"]["replayed_ms"]
        ran = found["recordings"] > 0
        lines.append(
            [
                f"{row['size']} {row['pixels']}",
                row["decoder"],
                row["how"],
                f"{row['decode_raw_ms']['median']:.1f}",
                f"{replayed['median']:.1f} ({replayed['min']:.1f}-{replayed['max']:.1f})" if ran else "-",
                f"{found['first_ms']:.1f}" if ran else "-",
                f"{found['held_bytes'] / 1e6:.0f} / {found['planned_bytes'] / 1e6:.0f}" if ran else "-",
                str(found["bit_for_bit"]),
                found["on"],
                found["auto"] or "-",
            ]
        )
    return markdown(head, lines)


def sound_table(rows: list[dict]) -> str:
    head = ["sound", "ms (min-max)", "kernels ms", "launches", "peak GB", "repeats bit for bit"]
    lines = []
    for row in rows:
        wall, gpu = row["decode_ms"], row.get("gpu_ms")
        lines.append(
            [
                f"{row['latent_frames']} latent frames",
                f"{wall['median']:.1f} ({wall['min']:.1f}-{wall['max']:.1f})",
                "-" if gpu is None else f"{gpu:.1f}",
                str(row.get("launches", "-")),
                "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}",
                str(row["repeats_bit_for_bit"]),
            ]
        )
    return markdown(head, lines)


if __name__ == "__main__":
    main()
