"""Neighbourhood attention in three dimensions: every query sees the keys of a window around it.

On an axis of L tokens with a window of K the window starts at clamp(i - K // 2, 0, L - K): it shifts inwards at the
borders, so every query sees exactly K keys (NATTEN's rule; nothing is masked, padded or causal).

The one place that picks a kernel: our Triton kernel, then comfy-kitchen's na3d, then plain torch.

Source: video_vae.md section 6.3.
"""
from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ShapeError
from ..triton_use import import_refusal, triton_refusal, try_triton

Sizes = tuple[int, int, int]

TRITON_OWNER = "neighbourhood attention"

# Queries that the plain path takes at once; with a window of 11^3 they see 4536 keys.
_PLAIN_TILE: Sizes = (4, 8, 8)


def neighbourhood_attention(
    q: Tensor, k: Tensor, v: Tensor, kernel_size: Sizes, *, out: Tensor | None = None
) -> Tensor:
    """softmax(q . k) v over each query's window, softmax and sums in float32. No scale: scale the queries before.

    q, k, v: (B, T, H, W, heads, head_dim), one float dtype, head_dim up to 64; consecutive tokens lie at one distance
    and a head's values side by side (a contiguous tensor, or some heads of one). kernel_size: window along T, H, W,
    none larger than its axis.
    out: where to write, of q's shape and dtype and laid out under the same rule; q itself will do. A new tensor without
    it.
    No host sync, no gradient. Raises ShapeError.
    """
    _check(q, k, v, kernel_size)
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        _check_layout("out", out, q)
    backend = attention_backend(q.device, q.dtype, q.shape[-1])[0]
    if backend == "triton" and _try_triton(q, k, v, kernel_size, out):
        return out
    if backend != "torch" and _kitchen_refusal(q.device, q.dtype, q.shape[-1]) is None:
        na3d = importlib.import_module("comfy_kitchen").na3d
        return out.copy_(na3d(q, k, v, list(kernel_size), scale=1.0))
    plain_attention(q, k, v, kernel_size, out)
    return out


def attention_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """("triton", "comfy-kitchen" or "torch", why the ones before it can't run here, "" for the first)."""
    refusal = _triton_refusal(device, dtype, head_dim)
    if refusal is None:
        return "triton", ""
    kitchen = _kitchen_refusal(device, dtype, head_dim)
    if kitchen is None:
        return "comfy-kitchen", f"Triton: {refusal}"
    return "torch", f"Triton: {refusal}; comfy-kitchen: {kitchen}"


def window_start(position: int, kernel: int, cells: int) -> int:
    """First key that a query at this position sees on an axis of so many cells."""
    return min(max(position - kernel // 2, 0), cells - kernel)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sizes, out: Tensor) -> None:
    """The definition in plain torch, tile by tile of queries so that memory stays bounded. out may be q."""
    axes = [
        list(_tiles(cells, tile, kernel, q.device))
        for cells, tile, kernel in zip(q.shape[1:4], _PLAIN_TILE, kernel_size)
    ]
    for queries_t, keys_t, seen_t in axes[0]:
        for queries_h, keys_h, seen_h in axes[1]:
            for queries_w, keys_w, seen_w in axes[2]:
                queries, keys = (slice(None), queries_t, queries_h, queries_w), (slice(None), keys_t, keys_h, keys_w)
                seen = (
                    seen_t[:, None, None, :, None, None]
                    & seen_h[None, :, None, None, :, None]
                    & seen_w[None, None, :, None, None, :]
                )
                mask = seen.flatten(3).flatten(0, 2)
                tile = out[queries]
                attended = F.scaled_dot_product_attention(
                    _heads_first(q[queries]), _heads_first(k[keys]), _heads_first(v[keys]), attn_mask=mask, scale=1.0
                )
                tile.copy_(attended.transpose(1, 2).unflatten(1, tile.shape[1:4]))


def _heads_first(x: Tensor) -> Tensor:
    """(B, t, h, w, heads, head_dim) -> (B, heads, t*h*w, head_dim)."""
    return x.flatten(1, 3).transpose(1, 2)


def _tiles(
    cells: int, tile: int, kernel: int, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(queries of a tile on one axis, keys that any of them sees, (queries, keys) bool: which sees which)."""
    for first in range(0, cells, tile):
        stop = min(first + tile, cells)
        start, end = window_start(first, kernel, cells), window_start(stop - 1, kernel, cells) + kernel
        starts = (torch.arange(first, stop, device=device) - kernel // 2).clamp(0, cells - kernel)[:, None]
        keys = torch.arange(start, end, device=device)
        yield slice(first, stop), slice(start, end), (keys >= starts) & (keys < starts + kernel)


def _try_triton(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sizes, out: Tensor) -> bool:
    """Run the Triton kernel; False, and never again in this process, where it can't be built."""
    kernel = importlib.import_module(".neighbourhood_kernel", __package__)
    box = kernel.box_sizes(tuple(q.shape[1:4]), kernel_size)
    if box[0] * q.shape[2] * q.shape[3] * max(k.stride(3), v.stride(3)) > kernel.MAX_BOX_ELEMENTS:
        return False
    return try_triton(lambda: kernel.attend(q, k, v, kernel_size, out), TRITON_OWNER, "attend", q.device)


def _triton_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    too_wide = f"head_dim {head_dim} is above 64" if head_dim > 64 else None
    return triton_refusal(device, dtype, TRITON_OWNER) or too_wide


def _kitchen_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim > 64 or head_dim % 16:
        return "no kernel for this device, dtype or head_dim"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    refusal = import_refusal("comfy_kitchen")
    if refusal:
        return refusal
    return None if hasattr(importlib.import_module("comfy_kitchen"), "na3d") else "this version has no na3d"


def _check(q: Tensor, k: Tensor, v: Tensor, kernel_size: Sizes) -> None:
    if q.ndim != 6:
        raise ShapeError(f"queries of shape {tuple(q.shape)}, expected (B, T, H, W, heads, head_dim)")
    for name, tensor in (("queries", q), ("keys", k), ("values", v)):
        _check_layout(name, tensor, q)
    grid = tuple(q.shape[1:4])
    if len(kernel_size) != 3 or not all(1 <= kernel <= cells for kernel, cells in zip(kernel_size, grid)):
        raise ShapeError(
            f"a window of {tuple(kernel_size)} does not fit into {grid} tokens (T, H, W): on every axis it must be "
            "between 1 and the axis."
        )


def _check_layout(name: str, x: Tensor, like: Tensor) -> None:
    if x.shape != like.shape or x.dtype != like.dtype or x.device != like.device:
        raise ShapeError(
            f"{name}: {tuple(x.shape)} {x.dtype} on {x.device}, expected as the queries "
            f"{tuple(like.shape)} {like.dtype} on {like.device}"
        )
    batch, frames, height, width, _, _ = x.shape
    token = x.stride(3)
    expected = (frames * height * width * token, height * width * token, width * token)
    even = all(size == 1 or have == want for size, have, want in zip((batch, frames, height), x.stride(), expected))
    if not even or x.stride(5) != 1:
        raise ShapeError(f"{name}: strides {x.stride()}; tokens must lie at one distance, a head's values side by side")
