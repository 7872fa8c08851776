"""What stands between the matrix products of the diffusion decoder: fused on a GPU that Triton knows, else plain torch.

Both write where they are told to: inside a capture Triton takes no tensor that was made there
(neighbourhood_attention.py).
Source: video_vae.md sections 6.2-6.4.
"""
from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from .neighbourhood_attention import attention_backend
from .rotary import RotaryTables

EPS = 1e-6


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
    if attention_backend(qkv.device, qkv.dtype, q.shape[2])[0] == "triton":
        kernels = importlib.import_module(".pointwise_kernels", __package__)
        kernels.split_norm_rope(qkv, q_weight, k_weight, rotary, first, q, k, v)
        return
    count, heads, head_dim = q.shape
    cos, sin = (part.unsqueeze(1) for part in rotary.of_tokens(first, first + count))
    parts = qkv.view(count, 3, heads, head_dim).unbind(1)
    for part, weight, target in ((parts[0], q_weight, q), (parts[1], k_weight, k)):
        even, odd = F.rms_norm(part.float(), (head_dim,), weight, EPS).unflatten(2, (-1, 2)).unbind(3)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=3)
        target.copy_(turned.flatten(2))
    v.copy_(parts[2])


def silu_mul_(gate: Tensor, up: Tensor) -> Tensor:
    """gate = silu(gate) * up, in place. Both (n, C), contiguous."""
    if attention_backend(gate.device, gate.dtype, 1)[0] == "triton":
        importlib.import_module(".pointwise_kernels", __package__).silu_mul(gate, up)
        return gate
    return F.silu(gate, inplace=True).mul_(up)
