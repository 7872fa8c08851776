"""When a loop counts as resident, from what the profiler saw; and what the CPU answers."""

from __future__ import annotations

import pytest

from ltx_runtime.gpu_activity import ActivityRecord, summarize_activity
from ltx_runtime.loop_activity import judge_activity, plain_activity

STEPS = 8


def seen(*copies: tuple[str, int | None], waits: int = 0, host: bool = True) -> dict:
    """Activity of a call: one kernel, these copies (name, bytes), and so many waits of the host; host False: calls
    unseen."""
    records = [ActivityRecord("kernel", "gemm", 1000, 3000)]
    records += [ActivityRecord("gpu_memcpy", f"Memcpy {kind}", 4000, 5000, size) for kind, size in copies]
    if host:
        records += [
            ActivityRecord("host", name, t, t + 1)
            for t, name in enumerate(
                ["cudaMemGetInfo", *["cudaEventSynchronize"] * waits, "cudaLaunchKernel", "cudaMemGetInfo"]
            )
        ]
    return plain_activity(summarize_activity(records, None, 1.0))


FLAGS = seen(("DtoH (Device -> Pinned)", 8 * STEPS), waits=STEPS)


def test_copies_are_added_up_by_direction():
    activity = seen(
        ("HtoD (Pinned -> Device)", 10),
        ("HtoD (Pageable -> Device)", 5),
        ("DtoH (Device -> Pinned)", 7),
        ("DtoD (Device -> Device)", 1000),
        waits=3,
    )
    assert (activity["host_to_device_bytes"], activity["device_to_host_bytes"], activity["waits"]) == (15, 7, 3)
    assert activity["kernel_count"] == 1 and activity["gpu_ms"] == pytest.approx(0.003)


def test_one_copy_of_unknown_size_makes_the_sum_unknown():
    activity = seen(
        ("HtoD (Pinned -> Device)", 10), ("HtoD (Pageable -> Device)", None), ("DtoH (Device -> Pinned)", 7)
    )
    assert (activity["host_to_device_bytes"], activity["device_to_host_bytes"]) == (None, 7)
    words = judge_activity(activity, FLAGS, STEPS, 1.0).words
    counted = "between the kernels of a step an unknown number of bytes to the device, 7 bytes to the host, 0 waits"
    assert counted in words


@pytest.mark.parametrize(
    ("step", "loop", "resident"),
    [
        (seen(("DtoD (Device -> Device)", 4096)), FLAGS, True),
        (seen(), seen(("DtoH (Device -> Pinned)", 8 * STEPS + 1), waits=STEPS), False),
        (seen(), seen(("HtoD (Pinned -> Device)", 1)), False),
        (seen(("HtoD (Pinned -> Device)", 1)), FLAGS, False),
        (seen(("DtoH (Device -> Pinned)", None)), FLAGS, None),
        (seen(), seen(("DtoH (Device -> Pinned)", 8), ("DtoH (Device -> Pageable)", None), waits=STEPS), None),
        (seen(("HtoD (Pageable -> Device)", None), waits=1), FLAGS, False),
        (seen(waits=1), FLAGS, False),
        (seen(host=False), FLAGS, None),
        (seen(("DtoH (Device -> Pinned)", 4), host=False), FLAGS, False),
    ],
    ids=[
        "on the device",
        "more than the flags",
        "copied at the edge",
        "copied inside",
        "size unknown inside",
        "size unknown at the edge",
        "size unknown, waited inside",
        "waited inside",
        "waits unseen",
        "copied, waits unseen",
    ],
)
def test_resident(step, loop, resident):
    found = judge_activity(step, loop, STEPS, 12.0)
    assert found.resident is resident
    word = {True: "yes", False: "no", None: "not known"}[resident]
    assert (
        found.words.startswith(f"resident: {word}: between the kernels of a step ")
        and "whole loop of 8 steps" in found.words
    )
    assert (found.steps, found.took_ms) == (STEPS, 12.0)
