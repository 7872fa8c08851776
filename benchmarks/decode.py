"""The conv video decode: whole and streamed, to frames on the host and raw on the device; GPU time, memory against the
plan.

    python3 dev.py bench decode [S0 S1 S2] [--chunks 0 8 4 2] [--repeats 5] [--json FILE] [--tiny]

A chunk is a number of latent frames, 0 the whole clip. GPU time comes from CUPTI at the very end. Differences are of
the streamed frames to those of the whole clip.
"""

from __future__ import annotations

import time

import torch
from _models import Models, finish, markdown, open_models, parser_of, plan_of_chunk, size_name, spread
from full_size import FRAMES, SIZES
from ltx_runtime.gpu_activity import measure_gpu_busy
from ltx_runtime.shapes import VideoLatentShape
from ltx_runtime.video_vae import DecodePlan

TINY = {"S0": (64, 64, 17), "S1": (96, 64, 17), "S2": (128, 64, 17)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("sizes", nargs="*", choices=list(SIZES), help="default: all")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 8, 4, 2])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    models = open_models(arguments.tiny)
    models.transformer.evict()  # its place is not for the decoder's plan to reckon with
    sizes = {name: TINY[name] if arguments.tiny else (*SIZES[name], FRAMES) for name in arguments.sizes or SIZES}
    rows = []
    for name, size in sizes.items():
        rows += measure(models, name, size, arguments.chunks, arguments.repeats)
    # CUPTI last of all: once used, every launch of the process is slower.
    if models.device.type == "cuda":
        for row in rows:
            row |= profile(models, sizes[row["size"]], row["chunk_latent_frames"])
    finish("decode", arguments, models.device, table(rows), rows)


def plan_of(models: Models, size, chunk: int) -> tuple[torch.Tensor, DecodePlan]:
    """A latent of this size, and the plan of this chunk (0 = whole). A whole clip may be refused by its size."""
    shape = VideoLatentShape.from_pixels(*size).as_tuple()
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(models.device)
    return latent, plan_of_chunk(models.vae, shape, chunk)


def measure(models: Models, name: str, size, chunks, repeats: int) -> list[dict]:
    rows = []
    whole = None
    for chunk in chunks:
        latent, plan = plan_of(models, size, chunk)
        frames = models.vae.decode(latent, plan=plan)  # cold kernels
        to_host = [timed(models, lambda: models.vae.decode(latent, plan=plan)) for _ in range(repeats)]
        raw = [timed(models, lambda: models.vae.decode_raw(latent, plan=plan)) for _ in range(repeats)]
        if chunk == 0:
            whole = frames
        difference = None if whole is None else float((frames - whole).abs().max())
        rows.append(
            {
                "size": name,
                "pixels": size_name(size),
                "chunk_latent_frames": chunk,
                "ran_as": plan.reason,
                "decode_ms": spread([wall for wall, _ in to_host]),
                "decode_raw_ms": spread([wall for wall, _ in raw]),
                "peak_bytes": to_host[-1][1],
                "raw_peak_bytes": raw[-1][1],
                "planned_peak_bytes": plan.peak_bytes,
                "max_difference_to_whole": difference,
                "differing_values": None if whole is None else int((frames != whole).sum()),
            }
        )
        del frames
    return rows


def timed(models: Models, fn) -> tuple[float, int | None]:
    """Wall ms, and the device memory that it took beyond what was there, None on the CPU."""
    cuda = models.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    result = fn()
    if cuda:
        torch.cuda.synchronize()
    wall_ms = (time.perf_counter() - started) * 1e3
    del result
    return wall_ms, torch.cuda.max_memory_allocated() - before if cuda else None


def profile(models: Models, size, chunk: int) -> dict:
    latent, plan = plan_of(models, size, chunk)
    activity = measure_gpu_busy(lambda: models.vae.decode(latent, plan=plan), device=models.device)
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
        "chunk",
        "decode ms (min-max)",
        "raw on the device ms",
        "GPU ms",
        "busy",
        "launches",
        "peak / planned GB",
        "largest difference to the whole",
    ]
    lines = []
    for row in rows:
        wall, raw, gpu = row["decode_ms"], row["decode_raw_ms"], row.get("gpu_ms")
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}"
        difference, count = row["max_difference_to_whole"], row["differing_values"]
        lines.append(
            [
                f"{row['size']} {row['pixels']}",
                str(row["chunk_latent_frames"] or "whole"),
                f"{wall['median']:.1f} ({wall['min']:.1f}-{wall['max']:.1f})",
                f"{raw['median']:.1f} ({raw['min']:.1f}-{raw['max']:.1f})",
                "-" if gpu is None else f"{gpu:.1f}",
                "-" if gpu is None else f"{gpu / raw['median']:.0%}",
                str(row.get("launches", "-")),
                f"{peak} / {row['planned_peak_bytes'] / 1e9:.2f}",
                "-"
                if difference is None
                else "equal bit for bit"
                if not count
                else f"{difference:.2g} in {count:,} values",
            ]
        )
    return markdown(head, lines)


if __name__ == "__main__":
    main()
