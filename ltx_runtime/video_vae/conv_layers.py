"""The layers of the conv video VAE: temporal convolution, ResBlock, up- and downsampling, and the cell rearrangements.

All tensors are (B, C, F, H, W). Layers take (x, memory, last), see streaming.py.
Source: video_vae.md sections 2-5.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .streaming import ClipMemory

PIXEL_NORM_EPS = 1e-8
KERNEL = 3

Stride = tuple[int, int, int]


def pixel_norm(x: Tensor, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean over channels of x^2 + 1e-8), reduced and scaled in float32.

    out: where to write, of x's shape and dtype and of any strides; a new tensor without it.
    """
    # Two passes over x: the dtype argument reduces bf16 in float32 without a float32 copy, and mul promotes in its
    # kernel.
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().div_(x.shape[1]).add_(PIXEL_NORM_EPS).rsqrt_()
    return torch.mul(x, scale, out=torch.empty_like(x) if out is None else out)


def depth_to_space(x: Tensor, stride: Stride) -> Tensor:
    """(B, C*p1*p2*p3, F, H, W) -> (B, C, F*p1, H*p2, W*p3). Channel ((c*p1 + i)*p2 + j)*p3 + k goes to offset (i, j, k)
    of its cell."""
    p1, p2, p3 = stride
    batch, channels, frames, height, width = x.shape
    channels //= p1 * p2 * p3
    x = x.unflatten(1, (channels, p1, p2, p3)).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(batch, channels, frames * p1, height * p2, width * p3)


def space_to_depth(x: Tensor, stride: Stride) -> Tensor:
    """The inverse of depth_to_space."""
    p1, p2, p3 = stride
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames // p1, p1, height // p2, p2, width // p3, p3)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(batch, channels * p1 * p2 * p3, frames // p1, height // p2, width // p3)


def unpatchify(x: Tensor, patch: int) -> Tensor:
    """(B, 3*p*p, F, H, W) -> pixels (B, 3, F, H*p, W*p). Channel (c*p + column)*p + row: unlike depth_to_space, the row
    offset is the fastest."""
    batch, channels, frames, height, width = x.shape
    channels //= patch**2
    x = x.unflatten(1, (channels, patch, patch)).permute(0, 1, 4, 5, 3, 6, 2)
    return x.reshape(batch, channels, frames, height * patch, width * patch)


def patchify(x: Tensor, patch: int) -> Tensor:
    """The inverse of unpatchify."""
    batch, channels, frames, height, width = x.shape
    x = x.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    x = x.permute(0, 1, 6, 4, 2, 3, 5)
    return x.reshape(batch, channels * patch**2, frames, height // patch, width // patch)


class TemporalConv(nn.Module):
    """3x3x3 convolution: zeros around each frame, repeated edge frames in time.

    causal: two copies of the first frame in front; else one in front and one of the last behind.
    activated: PixelNorm and SiLU come before it.
    In a stream it remembers its last two (padded) input frames; a non-causal one answers one frame late.
    """

    def __init__(self, in_channels: int, out_channels: int, *, causal: bool, activated: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, KERNEL, padding=(0, 1, 1))
        self.causal = causal
        self.activated = activated

    def window(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        """The frames to convolve: what is remembered or repeated at the clip's edges, around the activated x. The
        activation is written into its place, so padding costs no pass of its own."""
        batch, channels, frames, height, width = x.shape
        remembered = memory.recall(self)
        if remembered is None and not frames:
            return x  # the layers before are still filling
        lead = KERNEL - 1 if self.causal or remembered is not None else 1
        trail = 1 if last and not self.causal else 0
        window = x.new_empty(batch, channels, lead + frames + trail, height, width)
        if frames:
            body = window.narrow(2, lead, frames)
            if self.activated:
                pixel_norm(x, out=body)
                F.silu(body, inplace=True)
            else:
                body.copy_(x)
        window[:, :, :lead] = window[:, :, lead : lead + 1] if remembered is None else remembered
        if trail:
            window[:, :, -1] = window[:, :, -2]
        if not last:
            memory.keep(self, window[:, :, 1 - KERNEL :])
        return window

    def convolve(self, window: Tensor) -> Tensor:
        """(B, C, n, H, W) -> (B, C', n-2, H, W), or no frames where n is below 3."""
        if window.shape[2] < KERNEL:
            batch, _, _, height, width = window.shape
            return window.new_empty(batch, self.conv.out_channels, 0, height, width)
        return self.conv(window)

    def forward(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        return self.convolve(self.window(x, memory, last))


class ResBlock(nn.Module):
    """x + conv2(silu(pn(conv1(silu(pn(x)))))). In a stream x waits until its frames have come through both convs."""

    def __init__(self, channels: int, *, causal: bool) -> None:
        super().__init__()
        self.conv1 = TemporalConv(channels, channels, causal=causal, activated=True)
        self.conv2 = TemporalConv(channels, channels, causal=causal, activated=True)

    def forward(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        hidden = self.conv1(x, memory, last)
        window = self.conv2.window(hidden, memory, last)
        del hidden  # the window holds all that conv2 needs: one activation less at the peak
        out = self.conv2.convolve(window)

        late = memory.recall(self)
        ready = 0 if late is None else min(late.shape[2], out.shape[2])
        if ready:
            out[:, :, :ready] += late[:, :, :ready]
        out[:, :, ready:] += x[:, :, : out.shape[2] - ready]
        if not last:
            rest = x[:, :, out.shape[2] - ready :]
            memory.keep(self, rest if late is None else torch.cat([late[:, :, ready:], rest], dim=2))
        return out


class Upsample(nn.Module):
    """Convolution, then channels to a finer grid. A doubled time axis loses its first frame, once a clip: F -> 2F-1."""

    def __init__(self, in_channels: int, out_channels: int, stride: Stride, *, causal: bool) -> None:
        super().__init__()
        self.conv = TemporalConv(in_channels, out_channels * stride[0] * stride[1] * stride[2], causal=causal)
        self.stride = stride

    def forward(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        x = depth_to_space(self.conv(x, memory, last), self.stride)
        if self.stride[0] == 2 and x.shape[2] and memory.is_first_time(self):
            x = x[:, :, 1:]
        return x


class Downsample(nn.Module):
    """Convolution and grid to channels, plus the input's own cells averaged down to the same width.

    A halved time axis is made even by a copy of the first frame: F -> (F+1)/2. In a stream an odd frame waits for its
    pair.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: Stride) -> None:
        super().__init__()
        self.conv = TemporalConv(in_channels, out_channels // (stride[0] * stride[1] * stride[2]), causal=True)
        self.out_channels = out_channels
        self.stride = stride

    def forward(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        if self.stride[0] == 2:
            x = self._pairs(x, memory, last)
        main = space_to_depth(self.conv(x, memory, last), self.stride)
        skip = space_to_depth(x, self.stride)
        return main.add_(skip.unflatten(1, (self.out_channels, -1)).mean(dim=2))

    def _pairs(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        waiting = memory.recall(self)
        if waiting is None:
            waiting = x[:, :, :1]
        x = torch.cat([waiting, x], dim=2)
        even = x.shape[2] // 2 * 2
        if not last:
            memory.keep(self, x[:, :, even:])
        return x[:, :, :even]
