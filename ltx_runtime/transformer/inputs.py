"""What a forward pass takes beside tokens: constants of the loop, and the modulation of one step.

Both are frozen dataclasses of tensors and plain values, so that tensor_tree walks them: tensors become a captured
step's static buffers, plain values its key. Python in the forward branches on these plain values only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .rope import RopeTable

# Order of the published keep mask's rows (transformer.md section 19).
PERTURBATION_KINDS = ("video_self", "audio_self", "a2v", "v2a")


@dataclass(frozen=True)
class GuideBias:
    """Self attention bias of a stream whose last G tokens are guides, in two parts: as one tensor it would be N x N.

    Floats in the activation dtype. The target sees a guide token by its strength, and it sees the target by the same.
    """

    keys: Tensor  # (1, 1, 1, N), for every query of the target
    queries: Tensor  # (1, 1, G, N), for the guides' queries


@dataclass(frozen=True)
class StreamConstants:
    """One stream's inputs that stay the same through a stage. Floats in the activation dtype unless said."""

    context: Tensor | None  # (B, S, context width); None only for a disabled stream
    rope: RopeTable
    cross_rope: RopeTable | None  # of the time axis; None when the other stream is absent
    keyframe_marker: Tensor | None  # (B or 1, N, 1)
    attention_bias: Tensor | GuideBias | None  # (B or 1, 1, N, N), added to self attention scores
    mask_values: Tensor  # (M,) float32, distinct denoise mask values
    timestep_index: Tensor | None  # (B or 1, N) int64 into the U noise levels; None: all tokens of a sample share one
    max_mask: Tensor | None  # (B or 1,) float32, largest mask value; ComfyUI compatibility only
    enabled: bool  # False: feeds the other stream but is not updated (section 8.2)


def perturbation_mode(keep: Sequence[float]) -> str:
    """How one operation in one block treats the samples of a batch: "keep" all, "skip" all, or "mix"."""
    if all(value == 1 for value in keep):
        return "keep"
    return "skip" if all(value == 0 for value in keep) else "mix"


@dataclass(frozen=True)
class ForwardConstants:
    """Everything of a forward pass that does not change between the steps of a stage."""

    video: StreamConstants | None
    audio: StreamConstants | None
    perturbation_modes: tuple[tuple[str, ...], ...] | None  # [kind][layer]: "keep", "skip" (all samples) or "mix"
    perturbation_keep: Tensor | None  # (kinds, layers, B, 1, 1, 1), 1 = keep; only when some mode is "mix"
    num_sigmas: int  # a step takes this many: 1, or B (the U noise levels are then laid out per sample, U = B * M)
    compatibility: str  # "reference" or "comfyui" (transformer.md sections 18.1 to 18.3)
    fused: bool  # whether Triton kernels stand between the matrix products (residual.py)

    def perturbation(self, kind: str, layer: int) -> tuple[bool, Tensor | None]:
        """(skip for all samples, keep factors (B, 1, 1, 1) or None) of one operation in one block."""
        if self.perturbation_modes is None:
            return False, None
        row = PERTURBATION_KINDS.index(kind)
        mode = self.perturbation_modes[row][layer]
        return mode == "skip", self.perturbation_keep[row, layer] if mode == "mix" else None


@dataclass(frozen=True)
class StreamModulation:
    """Modulation rows of one stream in one step, for all blocks, block tables included, in the activation dtype.

    L blocks; U distinct noise levels; S = 1, or B with a sigma per sample. Scales are stored as 1 + scale.
    With many levels (a soft mask) rows for all blocks would fill the device: blocks and cross then hold what the blocks
    share, L = 1 and scales as they are, and each block adds its own table.
    """

    blocks: Tensor  # (L, 9, U, width): shift, scale, gate of self attention, feed-forward, text attention's queries
    prompt: Tensor  # (L, 2, S, context width): shift, scale of the text context
    cross: Tensor | None  # (L, 4, U, width): scale, shift in a2v; scale, shift in v2a
    cross_gate: Tensor | None  # (L, S, width): gate of the direction that updates this stream
    output: Tensor  # (2, U, width): shift, scale
    block_tables: Tensor | None = None  # (blocks, 9, 1, width), only with many levels
    cross_tables: Tensor | None = None  # (blocks, 4, 1, width), only with many levels

    def block_rows(self, layer: int, first: int) -> Tensor:
        """(3, U, width): the shift, scale and gate that begin at row `first` of this block."""
        return _rows(self.blocks, self.block_tables, layer, slice(first, first + 3), scale=1)

    def cross_rows(self, layer: int, first: int) -> Tensor:
        """(2, U, width): the scale and shift that begin at row `first` of this block."""
        return _rows(self.cross, self.cross_tables, layer, slice(first, first + 2), scale=0)


def _rows(rows: Tensor, tables: Tensor | None, layer: int, part: slice, scale: int) -> Tensor:
    if tables is None:
        return rows[layer, part]
    own = rows[0, part] + tables[layer, part]
    own[scale].add_(1)
    return own


@dataclass(frozen=True)
class StepModulation:
    """Every AdaLN output of one denoising step. Depends on sigma and the distinct mask values only."""

    video: StreamModulation | None
    audio: StreamModulation | None
