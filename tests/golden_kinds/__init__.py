"""One module for each golden kind (the `kind` in a golden file's metadata).

A kind's module has
  cases(path) -> list of case names in the file,
  PENDING: glob over case names -> why these are not built yet,
  check(path, case) -> Results to judge.
Kinds of which nothing is built yet stand in pending.py instead.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor


class Result(NamedTuple):
    """A comparison with a golden tensor. Fails when the worst error is above the tolerance or NaN."""

    name: str
    worst_error: float
    tolerance: float


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def metadata_json(path: Path, key: str):
    return json.loads(metadata(path)[key])


def worst_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference in float64; NaN when the shapes differ or either is not finite."""
    if tuple(actual.shape) != tuple(expected.shape):
        return float("nan")
    if not actual.numel():
        return 0.0
    return (actual.to(torch.float64) - expected.to(torch.float64)).abs().max().item()


def compare(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> Result:
    return Result(name, worst_error(actual, expected), tolerance)
