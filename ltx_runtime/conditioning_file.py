"""Prompts encoded once: ComfyUI CONDITIONING as a safetensors file, so that a render needs no text encoder.

Layout: tensor `entry.{i}.cond` and one `entry.{i}.{key}` per tensor in entry i's dictionary; metadata `format`,
`format_version` and `entries`, a JSON list with each entry's plain values. The bits of every tensor survive.
"""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from .checkpoint import CONDITIONING_FORMAT, read_header, require_component
from .errors import CheckpointError, RequestError

Entry = tuple[Tensor, dict[str, Any]]

_FORMAT_VERSION = "1"
_PLAIN = (type(None), bool, int, float, str)


def save_conditioning(path: str | os.PathLike[str], entries: Sequence[Entry]) -> None:
    """Write CONDITIONING: a list of (tensor (B, n, W), dictionary), as ComfyUI nodes pass it.

    Values may be None, bool, int, float, str and tensors of any dtype. The file appears whole or not at all.
    Raises RequestError, naming the key, for any other value.
    """
    if not entries:
        raise RequestError("the conditioning is empty: there is nothing to save. Connect the output of a text encoder.")
    tensors: dict[str, Tensor] = {}
    plain_values: list[dict[str, Any]] = []
    for index, (cond, values) in enumerate(entries):
        if not isinstance(cond, Tensor) or cond.ndim != 3:
            shape = tuple(cond.shape) if isinstance(cond, Tensor) else type(cond).__name__
            raise RequestError(f"conditioning entry {index} is {shape}, expected a tensor (batch, tokens, width).")
        tensors[f"entry.{index}.cond"] = _own_copy(cond)
        plain_values.append({})
        for key, value in values.items():
            if isinstance(value, Tensor):
                if key == "cond":
                    raise RequestError(f"conditioning entry {index} holds a tensor 'cond', a name of this format.")
                tensors[f"entry.{index}.{key}"] = _own_copy(value)
            elif type(value) in _PLAIN:
                plain_values[index][key] = value
            else:
                raise RequestError(
                    f"conditioning entry {index} holds {key!r} of type {type(value).__name__}; a conditioning file "
                    "takes tensors, numbers, strings, booleans and None. Save the text encoder's output before other "
                    "nodes add to it."
                )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    metadata = {
        "format": CONDITIONING_FORMAT,
        "format_version": _FORMAT_VERSION,
        "entries": json.dumps(plain_values),
    }
    try:
        # Not save_file: what it writes, only its owner may read.
        unfinished.write_bytes(save(tensors, metadata))
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_conditioning(path: str | os.PathLike[str]) -> list[Entry]:
    """Read what save_conditioning wrote; tensors are on the CPU.

    Raises CheckpointError, saying what the file is, for another kind of file and for a damaged one.
    """
    path = Path(path)
    header = read_header(path)
    require_component(header, "conditioning")
    version = header.metadata.get("format_version")
    if version != _FORMAT_VERSION:
        raise CheckpointError(
            f"{path.name}: conditioning format version {version}, this runtime reads {_FORMAT_VERSION}. Save it again."
        )
    try:
        plain_values = [dict(values) for values in json.loads(header.metadata["entries"])]
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path.name}: its list of entries is damaged ({error}). Save it again.") from None
    tensors = load(path.read_bytes())
    entries = []
    for index, values in enumerate(plain_values):
        start = f"entry.{index}."
        values |= {name[len(start):]: tensors.pop(name) for name in list(tensors) if name.startswith(start)}
        if "cond" not in values:
            raise CheckpointError(f"{path.name}: entry {index} has no tensor. Save it again.")
        entries.append((values.pop("cond"), values))
    if tensors or not entries:
        raise CheckpointError(f"{path.name}: {len(tensors)} tensors belong to none of its {len(entries)} entries.")
    return entries


def _own_copy(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous and sharing memory with no other tensor, as safetensors demands."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
