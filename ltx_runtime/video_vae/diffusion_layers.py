"""The blocks of the diffusion video decoder: weights with the published names, and the work on one grid.

All tensors are (1, T, H, W, C), contiguous: channels last, so that a grid is a row of tokens for every matrix product.
The residual stream is changed in place. Work without neighbours runs in chunks of tokens, into buffers made once a
stage.

Source: video_vae.md sections 6.2-6.7.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .neighbourhood_attention import Sizes, neighbourhood_attention
from .pointwise import EPS, add_cells_, rms_norm, silu_mul_, split_norm_rope
from .rotary import RotaryTables

MLP_GROWTH = 4
# scale, shift, gate of the attention, the same of the MLP, gate of the context. The gates' rows are not used.
MODULATION_ROWS = 7
# The two hidden layers of an MLP are eight times as wide as the stream: so much of them is alive at once.
HIDDEN_BYTES = 256 << 20

Linear = tuple[Tensor, Tensor | None]


class Attention(nn.Module):
    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(channels, 3 * channels)
        self.q_norm = nn.RMSNorm(head_dim, eps=EPS)
        self.k_norm = nn.RMSNorm(head_dim, eps=EPS)
        self.proj = nn.Linear(channels, channels)


class FeedForward(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.w_gate = nn.Linear(channels, MLP_GROWTH * channels, bias=False)
        self.w_up = nn.Linear(channels, MLP_GROWTH * channels, bias=False)
        self.w_down = nn.Linear(MLP_GROWTH * channels, channels, bias=False)


@dataclass(frozen=True)
class BlockWeights:
    """What a block computes with. Linears are (weight, bias or None).

    qkv: one Linear for each group of heads, rows q, k, v of the group. q_norm, k_norm: (head_dim,) float32, q_norm with
    the scale of the scores. context: of a diffusion block, see DiffusionBlock.weights.
    """

    norm1: Tensor
    qkv: tuple[Linear, ...]
    q_norm: Tensor
    k_norm: Tensor
    proj: Linear
    norm2: Tensor
    gate: Linear
    up: Linear
    down: Tensor
    context: Linear | None = None


class NeighbourhoodBlock(nn.Module):
    """x += proj(attention(norm1(x))); x += w_down(silu(w_gate(y)) * w_up(y)) with y = norm2(x)."""

    def __init__(self, channels: int, head_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(channels, eps=EPS)
        self.attn = Attention(channels, head_dim)
        self.norm2 = nn.RMSNorm(channels, eps=EPS)
        self.mlp = FeedForward(channels)

    def weights(self) -> BlockWeights:
        attn, mlp = self.attn, self.mlp
        head_dim = attn.q_norm.weight.shape[0]
        return BlockWeights(
            norm1=self.norm1.weight,
            qkv=((attn.qkv.weight, attn.qkv.bias),),
            q_norm=attn.q_norm.weight.float() * head_dim**-0.5,
            k_norm=attn.k_norm.weight.float(),
            proj=(attn.proj.weight, attn.proj.bias),
            norm2=self.norm2.weight,
            gate=(mlp.w_gate.weight, None),
            up=(mlp.w_up.weight, None),
            down=mlp.w_down.weight,
        )


class DiffusionBlock(NeighbourhoodBlock):
    """x += context_proj(context), then the block with both norms modulated: norm(x) * (1 + scale) + shift.

    gated: other exports than the published one hold a gate for each row of the three output projections.
    """

    def __init__(self, channels: int, head_dim: int, *, gated: bool) -> None:
        super().__init__(channels, head_dim)
        self.context_proj = nn.Linear(channels, channels)
        self.scale_shift_table = nn.Parameter(torch.empty(MODULATION_ROWS, channels))
        for name in ("gate_msa", "gate_mlp", "gate_ctx"):
            self.register_parameter(name, nn.Parameter(torch.empty(channels)) if gated else None)

    def weights(self, modulation: Tensor, upsample: nn.Linear, head_groups: int) -> BlockWeights:
        """With everything that is constant at one timestep folded in, in float32, and rounded once.

        modulation: (7, C) float32, the timestep's part. The scales go into the norms, the shifts through the matrices
        behind them into their biases.
        upsample: the projection behind stage 4, rows (channel, offset in the cell). It and the context's projection are
        linear, and commute with the change of grid between them: context is one matrix from stage 4 to the rows
        (offset, channel), and the context itself never has to be made at full resolution.
        """
        plain = super().weights()
        dtype = plain.norm1.dtype
        scale1, shift1, _, scale2, shift2, _, _ = (modulation + self.scale_shift_table.float()).unbind()

        def shifted(linear: Linear, shift: Tensor) -> Linear:
            weight, bias = linear
            moved = weight.float() @ shift
            return weight, (moved if bias is None else moved + bias.float()).to(dtype)

        projection = _gated((self.context_proj.weight, self.context_proj.bias), self.gate_ctx)
        weight, bias = (part.float() for part in projection)
        channels = weight.shape[0]
        grown = upsample.weight.float().view(channels, -1, upsample.in_features)
        context = torch.einsum("dc,cok->odk", weight, grown).flatten(0, 1)
        context_bias = (weight @ upsample.bias.float().view(channels, -1) + bias[:, None]).T.flatten()
        return replace(
            plain,
            norm1=(plain.norm1.float() * (1 + scale1)).to(dtype),
            qkv=_by_groups(shifted(plain.qkv[0], shift1), head_groups),
            proj=_gated(plain.proj, self.gate_msa),
            norm2=(plain.norm2.float() * (1 + scale2)).to(dtype),
            gate=shifted(plain.gate, shift2),
            up=shifted(plain.up, shift2),
            down=_gated((plain.down, None), self.gate_mlp)[0],
            context=(context.to(dtype), context_bias.to(dtype)),
        )


def _gated(linear: Linear, gate: Tensor | None) -> Linear:
    if gate is None:
        return linear
    weight, bias = linear
    gate = gate.float()
    gated_bias = None if bias is None else (bias.float() * gate).to(bias.dtype)
    return (weight.float() * gate[:, None]).to(weight.dtype), gated_bias


def _by_groups(qkv: Linear, groups: int) -> tuple[Linear, ...]:
    """Rows q, k, v of all heads -> for each group of heads its rows q, k, v."""
    if groups == 1:
        return (qkv,)
    weight, bias = (part.unflatten(0, (3, groups, -1)).transpose(0, 1) for part in qkv)
    return tuple(
        (weight[group].flatten(0, 1).contiguous(), bias[group].flatten().contiguous()) for group in range(groups)
    )


class Workspace:
    """The buffers that the blocks of one stage share, and its rotary tables.

    Attention takes the heads in groups, one after the other: queries and results of all (a result takes the place of
    its queries), keys and values of one group. So groups cost a little time and save memory, and change no value.
    """

    def __init__(self, grid: Sizes, channels: int, head_dim: int, head_groups: int, like: Tensor) -> None:
        """like: gives dtype and device."""
        count = grid[0] * grid[1] * grid[2]
        heads = channels // head_dim
        group = heads // head_groups
        rows = chunk_tokens(count, channels, like.element_size())
        self.chunks = [(first, min(first + rows, count)) for first in range(0, count, rows)]
        self.queries = like.new_empty(1, *grid, heads, head_dim)
        self.keys = like.new_empty(1, *grid, group, head_dim)
        self.values = like.new_empty(1, *grid, group, head_dim)
        self.normed = like.new_empty(rows, channels)
        self.qkv = like.new_empty(rows, 3 * group * head_dim)
        self.hidden = [like.new_empty(rows, MLP_GROWTH * channels) for _ in range(2)]
        self.rotary = RotaryTables.of(grid, head_dim, like.device)
        self.group = group
        self.grid = grid


def chunk_tokens(count: int, channels: int, item_bytes: int) -> int:
    """Tokens that work without neighbours takes at once."""
    return min(count, max(1, HIDDEN_BYTES // (2 * MLP_GROWTH * channels * item_bytes)))


def attend_(x: Tensor, weights: BlockWeights, kernel_size: Sizes, work: Workspace) -> None:
    """x += proj(attention(norm1(x)))."""
    tokens = x.view(-1, x.shape[4])
    for index, (weight, bias) in enumerate(weights.qkv):
        heads = slice(index * work.group, (index + 1) * work.group)
        queries = work.queries[..., heads, :]
        targets = [part.view(-1, *part.shape[4:]) for part in (queries, work.keys, work.values)]
        for first, stop in work.chunks:
            y = rms_norm(tokens[first:stop], weights.norm1, work.normed[: stop - first])
            qkv = torch.addmm(bias, y, weight.T, out=work.qkv[: stop - first])
            q, k, v = (part[first:stop] for part in targets)
            split_norm_rope(qkv, weights.q_norm, weights.k_norm, work.rotary, first, q, k, v)
        neighbourhood_attention(queries, work.keys, work.values, kernel_size, out=queries)
    attended = work.queries.view(tokens.shape)
    for first, stop in work.chunks:
        tokens[first:stop] += F.linear(attended[first:stop], *weights.proj)


def feed_forward_(x: Tensor, weights: BlockWeights, work: Workspace) -> None:
    """x += w_down(silu(w_gate(y)) * w_up(y)), y = norm2(x)."""
    tokens = x.view(-1, x.shape[4])
    for first, stop in work.chunks:
        rows = tokens[first:stop]
        y = rms_norm(rows, weights.norm2, work.normed[: stop - first])
        gate, up = (
            _linear_into(y, linear, buffer[: stop - first])
            for linear, buffer in zip((weights.gate, weights.up), work.hidden)
        )
        rows.addmm_(silu_mul_(gate, up), weights.down.T)


def _linear_into(x: Tensor, linear: Linear, out: Tensor) -> Tensor:
    weight, bias = linear
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def add_context_(x: Tensor, features: Tensor, context: Linear, stride: Sizes, dropped: int) -> None:
    """x += context of every token, out of stage 4.

    x: (1, F, h, w, C). features: (1, t, h/p2, w/p3, C4). context: rows (offset in the cell, channel), see
    DiffusionBlock.weights. dropped: how many of the frames of the first cell are not there. Frames of the last cells
    that x does not hold are left out.
    """
    cells, rows, columns = features.shape[1:4]
    grown_bytes = rows * columns * context[0].shape[0] * x.element_size()
    planes = max(1, HIDDEN_BYTES // grown_bytes)
    for first in range(0, cells, planes):
        # Without a name, which would keep one part while the next is made.
        add_cells_(x[0], F.linear(features[0, first : first + planes], *context), stride, first, dropped)


def enlarge(x: Tensor, projection: nn.Linear, stride: Sizes, dropped: int) -> Tensor:
    """(1, t, h, w, C) -> (1, t*p1 - dropped, h*p2, w*p3, C'): channel ((c*p1 + i)*p2 + j)*p3 + k of the projection goes
    to offset (i, j, k) of its cell."""
    p1, p2, p3 = stride
    grown = projection(x).unflatten(4, (-1, p1, p2, p3))
    grown = grown.permute(0, 1, 5, 2, 6, 3, 7, 4)[0]
    return grown.flatten(4, 5).flatten(2, 3).flatten(0, 1)[None, dropped:]


def run_blocks(
    x: Tensor,
    blocks: Sequence[BlockWeights],
    kernel_size: Sizes,
    work: Workspace,
    on_work: Callable[[float], None],
) -> None:
    """The blocks of a stage, one after the other, on x in place. on_work: called after each half of a block with its
    multiply-adds."""
    tokens, channels = x.shape[1:4].numel(), x.shape[4]
    for weights in blocks:
        attend_(x, weights, kernel_size, work)
        on_work(attention_work(tokens, channels, kernel_size))
        feed_forward_(x, weights, work)
        on_work(feed_forward_work(tokens, channels))


def attention_work(tokens: int, channels: int, kernel_size: Sizes) -> float:
    """Multiply-adds of attend_: queries, keys, values and the projection behind, then scores and their sums."""
    return tokens * channels * (4.0 * channels + 2.0 * kernel_size[0] * kernel_size[1] * kernel_size[2])


def feed_forward_work(tokens: int, channels: int) -> float:
    """Multiply-adds of feed_forward_."""
    return tokens * channels * 3.0 * MLP_GROWTH * channels
