"""Text connectors: from a prompt's features to the context that the blocks attend to. Run once per prompt.

Source: transformer.md section 7.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ConnectorConfig
from .attention import Attention
from .feed_forward import FeedForward
from .rope import RopeTable, rope_table


class _ConnectorBlock(nn.Module):
    def __init__(self, config: ConnectorConfig, eps: float):
        super().__init__()
        self.eps = eps
        width = config.width
        self.attn1 = Attention(width, width, config.heads, config.head_dim, gated=config.gated, eps=eps)
        self.ff = FeedForward(width, config.ff_bias)

    def forward(self, x: Tensor, rope: RopeTable, qk_eps: float | None) -> Tensor:
        x = x + self.attn1(_rms(x, self.eps), rope=rope, qk_eps=qk_eps)
        return x + self.ff(_rms(x, self.eps))


class Connector(nn.Module):
    """One modality's connector. Registers fill the sequence behind the prompt and count as real tokens afterwards."""

    def __init__(self, config: ConnectorConfig, eps: float, rope_theta: float):
        super().__init__()
        self.config = config
        self.eps = eps
        self.rope_theta = rope_theta
        self.learnable_registers = nn.Parameter(torch.empty(config.num_registers, config.width))
        self.transformer_1d_blocks = nn.ModuleList(_ConnectorBlock(config, eps) for _ in range(config.num_layers))

    def forward(self, features: Tensor, lengths: Tensor, length: int, qk_eps: float | None = None) -> Tensor:
        """features: (B, n, width), sample i's valid tokens first; lengths: (B,) int64, valid tokens of each.

        Returns the context (B, length, width) in the weight dtype.
        """
        x = self.fill_with_registers(features, lengths, length)
        index = torch.arange(length, dtype=torch.float32, device=x.device)
        rope = rope_table(
            index[None, None],
            self.config.max_pos,
            width=self.config.width,
            heads=self.config.heads,
            theta=self.rope_theta,
            dtype=x.dtype,
        )
        for block in self.transformer_1d_blocks:
            x = block(x, rope, qk_eps)
        return _rms(x, self.eps)

    def fill_with_registers(self, features: Tensor, lengths: Tensor, length: int) -> Tensor:
        """Position j from lengths[i] on holds register j mod num_registers, whatever the length."""
        registers = self.learnable_registers
        position = torch.arange(length, device=features.device)
        x = registers[position % registers.shape[0]].expand(features.shape[0], -1, -1).clone()
        head = min(features.shape[1], length)
        valid = (position[:head] < lengths[:, None]).unsqueeze(-1)
        x[:, :head] = torch.where(valid, features[:, :head].to(x.dtype), x[:, :head])
        return x


def _rms(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, eps)
