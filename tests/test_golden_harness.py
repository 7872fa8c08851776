"""The golden harness must not call an unknown or unbuilt golden a pass."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import torch
from golden_kinds import Result, worst_error
from golden_kinds.report import GoldenReport
from safetensors.torch import save_file

TESTS = Path(__file__).parent


def test_unknown_kind_fails_and_pending_stands_in_the_last_line(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "strange.safetensors", metadata={"kind": "hologram"})
    save_file({"x": torch.zeros(1)}, tmp_path / "heads.safetensors", metadata={"kind": "quant"})
    save_file({"x": torch.zeros(1)}, tmp_path / "tiny.safetensors", metadata={"kind": "weights"})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/test_goldens.py",
        "-p",
        "no:cacheprovider",
        "--goldens",
        str(tmp_path),
    ]
    run = subprocess.run(command, check=False, cwd=TESTS.parent, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "golden kind 'hologram' is unknown" in run.stdout
    assert run.stdout.rstrip().splitlines()[-1] == "pending: 1 cases: heads:*"
    assert "tiny" not in run.stdout


def test_worst_error_of_other_shapes_or_nan_is_nan():
    assert math.isnan(worst_error(torch.zeros(2), torch.zeros(1, 2)))
    assert math.isnan(worst_error(torch.tensor([math.nan, 0.0]), torch.zeros(2)))
    assert worst_error(torch.tensor([1.0, 5.0]), torch.tensor([1.5, 3.0])) == 2.0


def test_table_shows_the_comparison_nearest_to_its_tolerance():
    results = [Result("far", 1e-3, 1.0), Result("near", 9e-6, 1e-5), Result("exact", 0.0, 0.0)]
    line = GoldenReport(rows={("file", "case"): results}).table()[1]
    assert "near (3)" in line and "9.00e-06" in line
    broken = GoldenReport(rows={("file", "case"): [*results, Result("broken", math.nan, 1.0)]}).table()[1]
    assert "broken (4)" in broken
