"""Many renders in random order of shapes, toggles, frame rates and prompt lengths, some cancelled: every bit right,
memory flat.

    python3 dev.py bench soak --tiny [--count 100] [--seed 0] [--json FILE]
    PYTORCH_ALLOC_CONF=backend:cudaMallocAsync python3 dev.py bench soak --tiny

Each result is compared with the eager one of the same request: latents of both streams and unclamped frames. Ends with
exit code 1 when one differs or memory grows.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import sys
from collections import Counter
from pathlib import Path

import torch
from _models import Models, clip_request, finish, markdown, open_models, parse, parser_of, plan_of_chunk, size_name

from ltx_runtime import cuda_graph
from ltx_runtime.parity import Digest, digest
from ltx_runtime.sampler import SampleRequest, sample

TINY = ((128, 96, 25), (128, 96, 17), (160, 96, 25), (96, 96, 9), (128, 128, 25), (192, 96, 17))
ON_CPU = ((64, 64, 9), (96, 64, 9), (64, 64, 17))
FULL = ((384, 256, 49), (384, 256, 25), (512, 320, 25), (256, 256, 49))
KINDS, RECORDINGS, SEEDS = 12, 4, 3
CANCEL_EVERY, EVICT_EVERY, CHECK_EVERY = 7, 25, 10
# Once every shape has been met. What comes after may not grow by more.
WARM = 20
DEVICE_GROWTH, HOST_GROWTH = 4 << 20, 100 << 20


class Cancelled(Exception):
    pass


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the random order")
    arguments = parse(parser, count=7)
    models = open_models(arguments.tiny)
    models.transformer.graphs.max_graphs = RECORDINGS
    random_ = random.Random(arguments.seed)
    sizes = FULL if not arguments.tiny else TINY if models.device.type == "cuda" else ON_CPU
    # Few kinds, so that each comes back, and more than RECORDINGS, so that recordings are dropped too.
    kinds = [random_kind(random_, sizes) for _ in range(KINDS)]
    expected: dict[tuple, tuple[Digest, ...]] = {}
    rows, memory = [], []
    for number in range(1, arguments.count + 1):
        key = (*random_.choice(kinds), random_.randrange(SEEDS))
        mode = random_.choice(("on", "on", "auto", "off"))
        cancel_at = random_.randrange(4) if number % CANCEL_EVERY == 0 else None
        if key not in expected:
            expected[key] = render(models, request_of(models, key), "off")[0]
        found, graph = render(models, request_of(models, key), mode, cancel_at)
        rows.append(
            {
                "number": number,
                "request": dict(zip(("size", "frame_rate", "prompt_tokens", "sampler", "audio", "noise", "seed"), key)),
                "mode": mode,
                "cancelled": cancel_at is not None,
                "ran": graph.get("mode"),
                "fallback": graph.get("fallback"),
                "equal": None if found is None else found == expected[key],
            }
        )
        if number % CHECK_EVERY == 0:
            memory.append({"after": number, **memory_now(models)})
        if number % EVICT_EVERY == 0:
            models.transformer.evict()
            models.transformer.ensure_resident()
    counters = {k: v for k, v in vars(models.transformer.graphs.counters).items() if k != "last_miss"}
    wrong = [row for row in rows if row["equal"] is False]
    grown = growth(memory)
    finish(
        "soak",
        arguments,
        models.device,
        table(rows, memory, counters),
        rows,
        memory=memory,
        counters=counters,
        growth=grown,
        wrong=len(wrong),
    )
    too_much = grown["device_bytes"] > DEVICE_GROWTH or grown["host_bytes"] > HOST_GROWTH
    if wrong or too_much:
        sys.exit(f"{len(wrong)} wrong results; memory grew by {grown}")


def random_kind(random_: random.Random, sizes) -> tuple:
    return (
        random_.choice(sizes),
        random_.choice((24.0, 25.0, 30.0)),
        random_.choice((11, 200, 1100)),
        random_.choice(("euler", "euler_ancestral")),
        random_.choice((True, True, False)),
        random_.choice(("comfyui", "reference")),
    )


def request_of(models: Models, key: tuple) -> SampleRequest:
    size, frame_rate, prompt_tokens, sampler, audio, noise, seed = key
    request = clip_request(
        models.transformer,
        size,
        frame_rate=frame_rate,
        prompt_tokens=prompt_tokens,
        prompt=seed,
        sampler=sampler,
        audio=audio,
        seed=seed,
    )
    return dataclasses.replace(request, noise_convention=noise)


def render(
    models: Models, request: SampleRequest, mode: str, cancel_at: int | None = None
) -> tuple[tuple[Digest, ...] | None, dict]:
    """Digests of latents and unclamped frames, and what happened about graphs. cancel_at: stop before this step; no
    digests then."""
    steps = iter(range(1000))

    def check() -> None:
        if cancel_at is not None and next(steps) == cancel_at:
            raise Cancelled

    try:
        result = sample(models.transformer, request, cuda_graph=mode, check_cancelled=check)
    except Cancelled:
        return None, {"mode": "cancelled"}
    # One plan for all: another chunk size is another order of rounding.
    plan = plan_of_chunk(models.vae, request.video.shape.as_tuple(), 1)
    frames = models.vae.decode_raw(result.video, plan=plan)
    parts = [part for part in (result.video, result.audio, frames) if part is not None]
    return tuple(digest(part) for part in parts), result.graph


def memory_now(models: Models) -> dict:
    """Device memory with all that is kept between renders, after that was dropped, and the host's."""
    found: dict = {"device_bytes": 0, "device_bytes_with_graphs": 0, "graphs": len(models.transformer.graphs)}
    if models.device.type == "cuda":
        torch.cuda.synchronize()
        found["device_bytes_with_graphs"] = cuda_graph.held_bytes(models.device)
        models.transformer.graphs.close()
        models.transformer.contexts.clear()
        gc.collect()
        cuda_graph.return_graph_memory(models.device)
        found["device_bytes"] = cuda_graph.held_bytes(models.device)
    return found | {"host_bytes": host_bytes()}


def host_bytes() -> int:
    """This process's resident memory; 0 where the system does not tell it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024


def growth(memory: list[dict]) -> dict[str, int]:
    """Largest value since WARM renders less the first of them."""
    late = [entry for entry in memory if entry["after"] >= WARM]
    keys = ("device_bytes", "device_bytes_with_graphs", "host_bytes")
    return {key: max(entry[key] for entry in late) - late[0][key] if late else 0 for key in keys}


def table(rows: list[dict], memory: list[dict], counters: dict) -> str:
    head = ["toggle", "renders", "cancelled", "equal to eager", "ran as", "fallbacks"]
    lines = []
    for mode in ("off", "auto", "on"):
        of_mode = [row for row in rows if row["mode"] == mode]
        done = [row for row in of_mode if not row["cancelled"]]
        ran = ", ".join(f"{count} {name}" for name, count in Counter(row["ran"] for row in done).items())
        equal = sum(row["equal"] for row in done)
        cancelled = len(of_mode) - len(done)
        fallbacks = sum(bool(row["fallback"]) for row in done)
        lines.append([mode, str(len(of_mode)), str(cancelled), f"{equal} of {len(done)}", ran, str(fallbacks)])
    held = [
        [
            str(entry["after"]),
            str(entry["graphs"]),
            *(f"{entry[key] / 2**20:.1f}" for key in ("device_bytes_with_graphs", "device_bytes", "host_bytes")),
        ]
        for entry in memory
    ]
    sizes = {size_name(row["request"]["size"]) for row in rows}
    return "\n\n".join(
        [
            f"{len(rows)} renders of {len(sizes)} sizes; " + ", ".join(f"{v} {k}" for k, v in counters.items()),
            markdown(head, lines),
            markdown(["after", "graphs", "device MiB with graphs", "device MiB without", "host MiB"], held),
        ]
    )


if __name__ == "__main__":
    main()
