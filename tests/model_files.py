"""Model files for what a loader must accept or refuse: made out of others, and published ones without their data."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

TESTS = Path(__file__).parent
ITEM_BYTES = {"BF16": 2, "F32": 4}


def rewritten(
    source: Path,
    path: Path,
    *,
    prefix: str = "",
    tensors: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    config: Callable[[dict], Any] = lambda config: None,
) -> Path:
    """A copy of source under path, its tensors and the config in its metadata changed in place by these functions, its
    names then prefixed."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    settings, loaded = json.loads(metadata["config"]), load_file(source)
    config(settings)
    tensors(loaded)
    metadata["config"] = json.dumps(settings)
    save_file({prefix + name: tensor for name, tensor in loaded.items()}, path, metadata)
    return path


def manifest(name: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor -> (dtype, shape) of a published file."""
    entries = json.loads((TESTS / "manifests" / f"{name}.json").read_text())
    return {tensor: (dtype, tuple(shape)) for tensor, (dtype, shape) in entries.items()}


def config_json(name: str) -> dict:
    config = json.loads((TESTS / "configs" / f"{name}.json").read_text())
    return config.get("metadata", {}).get("config", config)


def published_file(path: Path, name: str) -> Path:
    """A file with the published header and no data on the disk: holes instead."""
    header: dict = {"__metadata__": {"config": json.dumps(config_json(name)), "model_version": "2.5.0"}}
    end = 0
    for tensor, (dtype, shape) in manifest(name).items():
        start, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)
    return path


def structure(module: torch.nn.Module, prefix: str = "") -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same of a module."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    return {
        prefix + name: (names[tensor.dtype], tuple(tensor.shape)) for name, tensor in module.state_dict().items()
    }
