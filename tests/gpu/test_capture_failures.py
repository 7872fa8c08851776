"""Injected failures x allocators x comfy-aimdo, each in a process of its own: an unguarded failure would kill it."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASE = Path(__file__).with_name("capture_failure_case.py")
ALLOCATORS = {"native": "", "cudaMallocAsync": "backend:cudaMallocAsync"}
CLASS_B = {"device_sync"}


def run(kind: str, allocator: str, aimdo: bool) -> dict:
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[allocator]}
    environment.pop("PYTORCH_ALLOC_CONF", None)
    if not ALLOCATORS[allocator]:
        environment.pop("PYTORCH_CUDA_ALLOC_CONF")
    done = subprocess.run(
        [sys.executable, str(CASE), kind, *(["aimdo"] if aimdo else [])],
        env=environment, check=False, capture_output=True, text=True, timeout=90,
    )
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("aimdo", [False, True], ids=["plain", "aimdo"])
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("kind", ["python", "sync", "memory", "device_sync"])
def test_the_render_finishes_eager_and_the_next_prompts_are_right(kind, allocator, aimdo):
    if aimdo and importlib.util.find_spec("comfy_aimdo") is None:
        pytest.skip("comfy-aimdo is not installed")
    outcome = run(kind, allocator, aimdo)
    assert outcome["allocator"] == allocator and outcome["healthy"]
    first, *later = outcome["renders"]
    assert all(render["equal"] for render in outcome["renders"])
    assert first["mode"] == "eager" and "capture failed" in first["fallback"]
    if kind in CLASS_B and allocator == "cudaMallocAsync":
        assert all(render["mode"] == "eager" and "no further capture" in render["fallback"] for render in later)
    else:
        assert all(render["mode"] == "graph" for render in later), [render["decision"] for render in later]
