"""What stands between the convolutions of the conv video VAE: fused on a GPU that Triton knows, else plain torch.

Convolutions are called without their bias (PyTorch adds it in a pass of its own). It is added here, and a ResBlock's
residual too, by the pass that prepares the next convolution: `Unfinished` is what waits for it. The fused passes want
the channels of a position side by side in memory, and so does cuDNN, which otherwise copies what it reads and writes:
`memory_format` is the one place that decides the layout.

A fused pass computes in float32 and rounds once, where the plain path rounds after every operation.

Source: video_vae.md sections 2-4.
"""
from __future__ import annotations

import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from ..triton_use import triton_refusal, try_triton
from . import cells
from .cells import Stride

PIXEL_NORM_EPS = 1e-8
TRITON_OWNER = "conv video VAE"


def is_fused(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether activations of this kind go through the kernels."""
    return triton_refusal(device, dtype, TRITON_OWNER) is None


def memory_format(device: torch.device, dtype: torch.dtype) -> torch.memory_format:
    """Of the activations and the weights of the convolutions."""
    return torch.channels_last_3d if is_fused(device, dtype) else torch.contiguous_format


def empty(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A tensor (B, C, F, H, W) of like's dtype and device in the layout of the activations."""
    layout = memory_format(like.device, like.dtype)
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


def pixel_norm(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean over channels of x^2 + 1e-8), reduced and scaled in float32.

    out: where to write, of x's shape and dtype and of any strides; a new tensor without it.
    """
    # Two passes over x: the dtype argument reduces bf16 in float32 without a float32 copy, and mul promotes in its
    # kernel.
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[1]).add_(PIXEL_NORM_EPS).rsqrt_()
    return torch.mul(x, scale, out=torch.empty_like(x) if out is None else out)


def finish(
    x: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    keep: bool = True,
    out: Tensor | None = None,
    activate: bool = False,
) -> None:
    """y = x + bias + residual, written over x where keep says so (else x may hold anything afterwards), and to out: as
    silu(pixel_norm(y)) where activate says so.

    x, residual, out: (B, C, F, H, W), or some frames of more. bias: (C,), of the convolution that made x.
    """
    others = [tensor for tensor in (residual, out) if tensor is not None]
    if _fusable(x, *others) and _fused("finish", x, bias, residual, keep, out, activate):
        return
    if bias is not None:
        x += _per_channel(bias)
    if residual is not None:
        x += residual
    if activate:
        pixel_norm(x, out=out)
        F.silu(out, inplace=True)
    elif out is not None:
        out.copy_(x)


class Unfinished:
    """Frames (B, C, F, H, W) that came out of a convolution and wait for the pass that reads them anyway: from frame
    `complete` on, the convolution's bias and a residual are still to be added."""

    def __init__(self, x: Tensor, complete: int, bias: Tensor, residual: Tensor | None = None) -> None:
        """residual: as many frames as are not complete. x is changed and given up by the methods."""
        self.shape = x.shape
        self._x: Tensor | None = x
        self._complete = complete
        self._bias = bias
        self._residual = residual

    def completed(self) -> Tensor:
        """The frames with everything added, in their own memory."""
        if self._complete < self.shape[2]:
            finish(self._x[:, :, self._complete :], self._bias, self._residual)
            self._complete, self._residual = self.shape[2], None
        return self._x

    def write(self, out: Tensor, *, activate: bool, keep: bool) -> None:
        """Write them to out, activated if so; without keep they are gone afterwards, and their memory free."""
        done, x = self._complete, self._x
        if done:
            finish(x[:, :, :done], keep=False, out=out[:, :, :done], activate=activate)
        if done < self.shape[2]:
            rest = (x[:, :, done:], self._bias, self._residual)
            finish(*rest, keep=keep, out=out[:, :, done:], activate=activate)
        self._complete, self._residual = self.shape[2], None
        self._x = x if keep else None


Frames = Tensor | Unfinished


def completed(x: Frames) -> Tensor:
    return x.completed() if isinstance(x, Unfinished) else x


def depth_to_space(x: Tensor, bias: Tensor, stride: Stride, skip: int) -> Tensor:
    """cells.depth_to_space(x + bias) without its first `skip` frames. Without Triton x is overwritten."""
    batch, channels, frames, height, width = x.shape
    p1, p2, p3 = stride
    if _fusable(x):
        out = empty(x, (batch, channels // (p1 * p2 * p3), frames * p1 - skip, height * p2, width * p3))
        if _fused("depth_to_space", x, bias, stride, skip, out):
            return out
    x += _per_channel(bias)
    return cells.depth_to_space(x, stride)[:, :, skip:]


def add_space_to_depth(main: Tensor, bias: Tensor, skip: Tensor, stride: Stride) -> Tensor:
    """space_to_depth(main + bias) + the groups' means of space_to_depth(skip): as many consecutive channels a group as
    make both equally wide. main, skip: (B, C, F, H, W), C of each its own. Without Triton main is overwritten."""
    batch, channels, frames, height, width = main.shape
    p1, p2, p3 = stride
    width_out = channels * p1 * p2 * p3
    if _fusable(main, skip):
        out = empty(main, (batch, width_out, frames // p1, height // p2, width // p3))
        if _fused("add_space_to_depth", main, bias, skip, stride, out):
            return out
    main += _per_channel(bias)
    means = cells.space_to_depth(skip, stride).unflatten(1, (width_out, -1)).mean(dim=2)
    return cells.space_to_depth(main, stride).add_(means)


def unpatchify(x: Tensor, patch: int) -> Tensor:
    """cells.unpatchify, into a contiguous (B, 3, F, H*p, W*p)."""
    batch, channels, frames, height, width = x.shape
    if _fusable(x):
        out = x.new_empty(batch, channels // patch**2, frames, height * patch, width * patch)
        if _fused("unpatchify", x, patch, out):
            return out
    return cells.unpatchify(x, patch)


def _fusable(x: Tensor, *others: Tensor) -> bool:
    """Whether there is anything to do and Triton may do it. Raises ValueError for activations in another layout."""
    if not x.numel() or not is_fused(x.device, x.dtype):
        return False
    for tensor in (x, *others):
        if not tensor[0].permute(1, 2, 3, 0).is_contiguous():
            raise ValueError(
                f"strides {tensor.stride()} of shape {tuple(tensor.shape)}: expected the channels of a position side "
                "by side, and no gaps between the positions of a clip"
            )
    return True


def _fused(kernel: str, x: Tensor, *args: object) -> bool:
    """Run one of conv_kernels on x; False, from then on for all of them, where it can't be built."""
    launch = getattr(importlib.import_module(".conv_kernels", __package__), kernel)
    return try_triton(lambda: launch(x, *args), TRITON_OWNER, kernel, x.device)


def _per_channel(bias: Tensor) -> Tensor:
    return bias.view(-1, 1, 1, 1)
