"""Walk the tensors of nested frozen dataclasses.

The step function takes its inputs as frozen dataclasses of tensors. The graph engine needs their names (for the key), a
rebuilt copy over its static buffers, and every value that is not a tensor: Python may branch on it, so it goes into the
key by itself. A new branch can't be written without its key this way.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

_STATIC = (bool, int, float, str, type(None), torch.dtype)


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (dotted name, tensor) in field order."""
    for name, leaf in _leaves(tree, prefix):
        if isinstance(leaf, torch.Tensor):
            yield name, leaf


def static_values(tree: Any, prefix: str = "") -> tuple[tuple[str, Any], ...]:
    """Every leaf that is not a tensor, as (dotted name, value). Raises TypeError on an object that can't be compared by
    value, because a graph would silently bake it in."""
    values = []
    for name, leaf in _leaves(tree, prefix):
        if isinstance(leaf, torch.Tensor):
            continue
        if not isinstance(leaf, _STATIC):
            raise TypeError(f"{name} is a {type(leaf).__name__}; a captured step takes tensors and plain values only")
        values.append((name, leaf))
    return tuple(values)


def map_tensors(fn: Callable[[str, torch.Tensor], torch.Tensor], tree: Any, prefix: str = "") -> Any:
    """Rebuild tree with fn(dotted name, tensor) in place of every tensor."""
    if isinstance(tree, torch.Tensor):
        return fn(prefix, tree)
    if dataclasses.is_dataclass(tree):
        fields = {
            f.name: map_tensors(fn, getattr(tree, f.name), _join(prefix, f.name)) for f in dataclasses.fields(tree)
        }
        return type(tree)(**fields)
    if isinstance(tree, tuple):
        items = [map_tensors(fn, item, _join(prefix, str(i))) for i, item in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(tree):
        for f in dataclasses.fields(tree):
            yield from _leaves(getattr(tree, f.name), _join(prefix, f.name))
    elif isinstance(tree, tuple):
        for i, item in enumerate(tree):
            yield from _leaves(item, _join(prefix, str(i)))
    else:
        yield prefix, tree


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
