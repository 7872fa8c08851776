"""What stands between the matrix products of the diffusion decoder: fused on a GPU that Triton knows, else plain torch.

All write where they are told to, so that a stage makes its buffers once.
Source: video_vae.md sections 6.2-6.4.
"""
from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_use import triton_refusal, try_triton
from .rotary import RotaryTables

EPS = 1e-6
TRITON_OWNER = "diffusion video VAE"


def split_norm_rope(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rotary: RotaryTables,
    first: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> None:
    """Queries and keys normalised per head and turned to their positions, values as they are.

    qkv: (n, 3 * heads * head_dim), rows q, k, v, head by head, of the tokens from `first` on. q_weight, k_weight:
    (head_dim,) float32; a scale of the scores belongs into q_weight. q, k, v: (n, heads, head_dim), written; q may be
    some heads of more.
    Norm and rotation in float32 from end to end, rounded once.
    """
    if _fused("split_norm_rope", qkv, q_weight, k_weight, rotary, first, q, k, v):
        return
    count, heads, head_dim = q.shape
    cos, sin = (part.unsqueeze(1) for part in rotary.of_tokens(first, first + count))
    parts = qkv.view(count, 3, heads, head_dim).unbind(1)
    for part, weight, target in ((parts[0], q_weight, q), (parts[1], k_weight, k)):
        even, odd = F.rms_norm(part.float(), (head_dim,), weight, EPS).unflatten(2, (-1, 2)).unbind(3)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=3)
        target.copy_(turned.flatten(2))
    v.copy_(parts[2])


def rms_norm(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """out = x / rms(x) * weight over the channels, in float32, rounded once. x, out: (n, C), contiguous."""
    if _fused("rms_norm", x, weight, out):
        return out
    return out.copy_(F.rms_norm(x, x.shape[1:], weight, EPS))


def add_cells_(x: Tensor, grown: Tensor, stride: tuple[int, int, int], first: int, dropped: int) -> None:
    """x += values that were made cell by cell.

    x: (F, h, w, C), contiguous. grown: (n, h/p2, w/p3, p1 * p2 * p3 * C), contiguous, of the cells from plane `first`
    on, offsets in a cell before channels. stride: (p1, p2, p3). dropped: how many of the frames of the first cell x
    does not have; frames of the last cells that it does not hold are left out.
    """
    if _fused("add_cells", x, grown, stride, first, dropped):
        return
    p1, p2, p3 = stride
    cells, rows, columns = grown.shape[:3]
    grown = grown.view(cells, rows, columns, p1, p2, p3, x.shape[3])
    for offset in range(p1):
        # Cell c holds the frame c * p1 + offset - dropped.
        low = max(first, -(-(dropped - offset) // p1))
        high = min(first + cells, (x.shape[0] - 1 - offset + dropped) // p1 + 1)
        if low >= high:
            continue
        frame = low * p1 + offset - dropped
        target = x[frame : frame + (high - low - 1) * p1 + 1 : p1]
        part = grown[low - first : high - first, :, :, offset]
        target.unflatten(1, (rows, p2)).unflatten(3, (columns, p3)).add_(part.permute(0, 1, 3, 2, 4, 5))


def silu_mul_(gate: Tensor, up: Tensor) -> Tensor:
    """gate = silu(gate) * up, in place. Both (n, C), contiguous."""
    if _fused("silu_mul", gate, up):
        return gate
    return F.silu(gate, inplace=True).mul_(up)


def _fused(kernel: str, x: Tensor, *args: object) -> bool:
    """Run one of pointwise_kernels on x; False where it can't run, and from then on for all where it can't be built."""
    if triton_refusal(x.device, x.dtype, TRITON_OWNER):
        return False
    launch = getattr(importlib.import_module(".pointwise_kernels", __package__), kernel)
    return try_triton(lambda: launch(x, *args), TRITON_OWNER, kernel, x.device)
