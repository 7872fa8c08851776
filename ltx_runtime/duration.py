"""The duration head: how long a clip the prompt asks for, in seconds and in frames.

Source: upsampler_and_duration.md section 2.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import CheckpointHeader, Progress, read_header
from .config import DurationHeadConfig
from .errors import NonFiniteError, RequestError, ShapeError
from .resident_weights import ResidentModule
from .shapes import TIME_FACTOR, longest_clip
from .timing import Timeline

if TYPE_CHECKING:
    from .runtime import TransformerModel
    from .sampler import TextFeatures

PHASE = "prepare.connectors"
DEFAULT_MIN_SECONDS = 1.0
DEFAULT_MAX_SECONDS = 20.0
# A fixed fact of the trained head: no tensor shows it and the metadata does not name it.
_HEADS = 4


class CrossAttention(nn.Module):
    """Attention of queries to tokens; the q, k and v projections are stacked in one tensor, as in torch's module."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """queries: (B, Q, D), tokens: (B, T, D). Returns (B, Q, D)."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, weight, bias).unflatten(2, (_HEADS, -1)).transpose(1, 2)
            for x, weight, bias in zip((queries, tokens, tokens), weights, biases)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class AttentionPooler(nn.Module):
    """Learned queries that look at all tokens: (B, T, D) to (B, Q, D)."""

    def __init__(self, width: int, num_queries: int) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.empty(num_queries, width))
        self.cross_attn = CrossAttention(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.cross_attn(self.query_tokens.expand(tokens.shape[0], -1, -1), tokens)


class DurationNetwork(nn.Module):
    """Text contexts of one or both streams to seconds."""

    def __init__(self, config: DurationHeadConfig) -> None:
        super().__init__()
        self.video_input_proj = nn.Linear(config.video_width, config.width)
        self.audio_input_proj = nn.Linear(config.audio_width, config.width)
        self.video_modality_emb = nn.Parameter(torch.empty(config.width))
        self.audio_modality_emb = nn.Parameter(torch.empty(config.width))
        self.attention_pooler = AttentionPooler(config.width, config.num_queries)
        self.mlp_hidden = nn.Linear(config.num_queries * config.width, config.hidden_width)
        self.mlp_out = nn.Linear(config.hidden_width, 1)

    def forward(self, video_context: Tensor | None, audio_context: Tensor | None) -> Tensor:
        """(B, T, video width) and (B, T', audio width), at least one, in the weights' dtype. Returns (B,)."""
        tokens = []
        if video_context is not None:
            tokens.append(self.video_input_proj(video_context) + self.video_modality_emb)
        if audio_context is not None:
            tokens.append(self.audio_input_proj(audio_context) + self.audio_modality_emb)
        pooled = self.attention_pooler(torch.cat(tokens, dim=1))
        hidden = F.gelu(self.mlp_hidden(pooled.flatten(1)), approximate="tanh")
        return self.mlp_out(hidden).squeeze(1).exp()


def load_duration_head(
    path: str | Path,
    *,
    device: torch.device | str,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> DurationHead:
    """Open the file of a duration head and place its weights on the device. Raises CheckpointError."""
    head = DurationHead(read_header(path), device=device)
    head.ensure_resident(timeline, on_progress)
    return head


class DurationHead(ResidentModule):
    """The duration head of one file, in float32: it is small, and rounding could flip the number of frames."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str):
        """Checks the header; the weights are read by ensure_resident, at the latest in seconds."""
        self.config = DurationHeadConfig.from_header(header)
        prefix_map = {"": header.prefixes["duration_head"] + "duration_head."}
        super().__init__(
            header, lambda: DurationNetwork(self.config), prefix_map, device=device, dtype=torch.float32
        )

    def seconds(self, video_context: Tensor | None, audio_context: Tensor | None) -> Tensor:
        """The length that each prompt of a batch asks for: (B,) float32 on the device.

        The contexts are the outputs of the text connectors, (B, T, width) float; every token counts. Either may be
        None, not both. Raises ShapeError for other widths, RequestError without any context.
        """
        if video_context is None and audio_context is None:
            raise RequestError("the duration head needs a text context, for video or for sound; it got none.")
        wanted = (("video", video_context, self.config.video_width), ("audio", audio_context, self.config.audio_width))
        for stream, context, width in wanted:
            if context is not None and (context.ndim != 3 or context.shape[2] != width):
                raise ShapeError(
                    f"{self.header.path.name} takes {stream} contexts of shape (batch, tokens, {width}), this one has "
                    f"shape {tuple(context.shape)}. Use the duration head that belongs to this transformer."
                )
        self.ensure_resident()
        with torch.inference_mode():
            contexts = (None if c is None else c.to(self.device, torch.float32) for c in (video_context, audio_context))
            return self.module(*contexts)


def predict_seconds(
    model: TransformerModel, head: DurationHead, text: TextFeatures, *, timeline: Timeline | None = None
) -> float:
    """The length that one prompt asks for, not limited. The transformer's weights must be resident: it holds the
    connectors.

    The value decides the shapes of a render, so the host has to wait for it here.
    Raises RequestError for several prompts, ShapeError, NonFiniteError.
    """
    if text.features.shape[0] != 1:
        raise RequestError(f"{text.features.shape[0]} prompts at once; the duration of one clip needs one.")
    timeline = timeline or Timeline(None, device=model.device)
    head.ensure_resident(timeline)
    with torch.inference_mode(), timeline.phase(PHASE, head=head.header.path.name):
        if text.processed:
            widths = [model.config.context_width, model.config.audio_context_width]
            contexts = text.features.to(model.device).split(widths, dim=-1)
        else:
            contexts, _ = model.connect_text(text.features)
        seconds = head.seconds(*contexts).item()
    if not 0 < seconds < float("inf"):
        raise NonFiniteError(PHASE, f"the duration head answers {seconds} seconds; encode the prompt again.")
    return seconds


def check_limits(frame_rate: float, *, min_seconds: float, max_seconds: float) -> None:
    """Raise RequestError for limits or a frame rate out of order: before the transformer is read for a prediction."""
    if not (frame_rate > 0 and 0 < min_seconds <= max_seconds):
        raise RequestError(
            f"frame_rate={frame_rate}, min_seconds={min_seconds}, max_seconds={max_seconds}: all must be positive, and "
            "max_seconds not below min_seconds."
        )


def duration_frames(
    seconds: float,
    frame_rate: float,
    *,
    min_seconds: float = DEFAULT_MIN_SECONDS,
    max_seconds: float = DEFAULT_MAX_SECONDS,
) -> int:
    """Frames of a clip of about this length, on the 8k+1 grid: the grid point below, within the limits.

    Where the limits leave no grid point between them, the first one above min_seconds is taken; the reference would
    answer max_seconds then, off the grid. Raises RequestError as check_limits does.
    """
    check_limits(frame_rate, min_seconds=min_seconds, max_seconds=max_seconds)
    lowest, highest = round(min_seconds * frame_rate), round(max_seconds * frame_rate)
    frames = longest_clip(max(1, min(max(round(seconds * frame_rate), lowest), highest)))
    return frames if frames >= lowest else frames + TIME_FACTOR
