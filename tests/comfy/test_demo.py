"""The README's first command, once everything is installed: the demo on a real server, on tiny checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


def test_the_demo_renders_judges_and_names_its_files(tmp_path):
    demo = tmp_path / "demo"
    done = subprocess.run(
        [sys.executable, HERE / "demo.py", demo],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    named = [line.split()[:2] for line in done.stdout.splitlines() if line.split()[1:2] and "demo/base" in line]
    kinds = [what for what, _ in named if what in ("video", "difference", "timeline")]
    assert kinds == ["video", *2 * ["difference", "timeline", "timeline"]]
    assert all((tmp_path / file).is_file() for what, file in named if what in kinds)
    verdict = "equal" if torch.cuda.is_available() else "not tested: no CUDA; eager repeated: equal"
    assert done.stdout.count(f"verdict       {verdict}") == 2
