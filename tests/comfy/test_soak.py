"""Many prompts in random order of shapes and toggles through one server: every result right, memory flat.

LTXGRAPH_SOAK sets how many (40 without it; 100 is the whole).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

import prompts
import pytest
from prompts import node

COUNT = int(os.environ.get("LTXGRAPH_SOAK", "40"))
# Of some 600 MiB. From prompt WARM on: a new kind of render, and a parity run's pictures until ComfyUI's cache lets go
# of them. Between the last two quarters, when all kinds have run: peaks against peaks, floors against floors.
WARM, WARM_GROWTH = 10, 150 << 20
LATE_GROWTH = 20 << 20
SIZES = ((64, 64, 9), (96, 64, 9), (64, 96, 9), (64, 64, 17))
WITHOUT_CUDA = "not tested: no CUDA; eager repeated: equal"


def renders(random_: random.Random) -> list[dict]:
    """Ten renders that differ in what decides their pixels. Few, so that each comes back with other toggles."""
    choices = {
        "size": SIZES,
        "seed": (1, 2),
        "sampler_name": ("euler", "euler_ancestral"),
        "noise_convention": ("comfyui", "reference"),
        "compatibility": ("reference", "comfyui"),
        "with_audio": (True, False),
        "frame_rate": (24.0, 25.0),
    }
    return [{name: random_.choice(values) for name, values in choices.items()} for _ in range(10)]


def render_prompt(render: dict, toggles: dict, number: int) -> dict:
    """number: makes the sampler run though ComfyUI knows its result; connected sigmas leave `steps` without effect."""
    prompt = prompts.render()
    width, height, length = render["size"]
    prompt["latent"]["inputs"].update(width=width, height=height, length=length, with_audio=render["with_audio"])
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.75, 0.4, 0.0")
    prompt["rate"] = node(
        "LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=render["frame_rate"]
    )
    prompt["sampler"]["inputs"].update(
        {name: render[name] for name in ("seed", "sampler_name", "noise_convention", "compatibility")},
        positive=["rate", 0],
        sigmas=["sigmas", 0],
        steps=100 + number,
        cuda_graph=toggles["cuda_graph"],
    )
    prompt["decode"]["inputs"]["temporal_size"] = toggles["temporal_size"]
    return prompt


def parity_prompt(render: dict) -> dict:
    prompt = prompts.parity_run()
    width, height, length = render["size"]
    prompt["latent"]["inputs"].update(width=width, height=height, length=length, with_audio=render["with_audio"])
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.5, 0.0")
    prompt["parity"]["inputs"].update(seed=render["seed"], sigmas=["sigmas", 0], seeds=1, replays=1)
    return prompt


def resident_bytes(pid: int) -> int | None:
    """Memory of a process; None where the system does not tell it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS:")).split()[1]) * 1024


@pytest.mark.slow
def test_random_prompts_are_right_and_memory_stays_flat(server, client, frames_of):
    random_ = random.Random(2026)
    known = renders(random_)
    digests: dict[int, str] = {}
    memory = []
    again = 0
    for number in range(COUNT):
        which = random_.randrange(len(known))
        toggles = {"cuda_graph": random_.choice(("auto", "on", "off")), "temporal_size": random_.choice((0, 8))}
        if number % 10 == 9:
            client.free()
        if number % 8 == 7:
            run = client.run(parity_prompt(known[which]))
            assert run.outcome == "execution_success", run.error
            verdict = json.loads(run.outputs["parity"]["ltxgraph_report"][0])["verdict"]
            assert verdict["words"] == WITHOUT_CUDA, (number, known[which], verdict["words"])
        else:
            frames = frames_of(client.run(render_prompt(known[which], toggles, number)))
            width, height, length = known[which]["size"]
            assert frames.shape == (length, height, width, 3)
            found = hashlib.sha256(frames.tobytes()).hexdigest()
            again += which in digests
            assert digests.setdefault(which, found) == found, (number, known[which], toggles)
        memory.append(resident_bytes(server.pid))
    assert len(set(digests.values())) == len(digests), "two different renders gave the same frames"
    assert again >= COUNT // 4, "most renders must have come back"
    if memory[0] is not None and COUNT > 2 * WARM:
        in_mib = [value >> 20 for value in memory]
        print(f"resident MiB: {in_mib}")
        assert max(memory[WARM:]) - memory[WARM] <= WARM_GROWTH, in_mib
        before, last = memory[COUNT // 2 : 3 * COUNT // 4], memory[3 * COUNT // 4 :]
        assert max(last) - max(before) <= LATE_GROWTH and min(last) - min(before) <= LATE_GROWTH, in_mib
