"""The layers of the conv video VAE: temporal convolution, ResBlock, up- and downsampling.

All tensors are (B, C, F, H, W). Layers take (x, memory, last), see streaming.py. What comes out of a convolution gets
its bias and its residual where it is read, see conv_pointwise.py.
Source: video_vae.md sections 2-5.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import conv_pointwise
from .cells import Stride
from .conv_pointwise import Frames, Unfinished, completed
from .streaming import ClipMemory

KERNEL = 3
PADDING = (0, 1, 1)


class TemporalConv(nn.Module):
    """3x3x3 convolution: zeros around each frame, repeated edge frames in time.

    causal: two copies of the first frame in front; else one in front and one of the last behind.
    activated: PixelNorm and SiLU come before it.
    In a stream it remembers its last two (padded) input frames; a non-causal one answers one frame late.
    """

    def __init__(self, in_channels: int, out_channels: int, *, causal: bool, activated: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, KERNEL, padding=PADDING)
        self.causal = causal
        self.activated = activated

    def window(self, x: Frames, memory: ClipMemory, last: bool, *, keep: bool = False) -> Tensor:
        """The frames to convolve: what is remembered or repeated at the clip's edges, around the activated x. The
        activation is written into its place, so padding costs no pass of its own.

        keep: x, if it is unfinished, is needed afterwards.
        """
        batch, channels, frames, height, width = x.shape
        remembered = memory.recall(self)
        if remembered is None and not frames:
            return completed(x)  # the layers before are still filling
        lead = KERNEL - 1 if self.causal or remembered is not None else 1
        trail = 1 if last and not self.causal else 0
        window = conv_pointwise.empty(self.conv.weight, (batch, channels, lead + frames + trail, height, width))
        if frames:
            body = window.narrow(2, lead, frames)
            if isinstance(x, Unfinished):
                x.write(body, activate=self.activated, keep=keep)
            elif self.activated:
                conv_pointwise.finish(x, out=body, activate=True, keep=False)
            else:
                body.copy_(x)
        window[:, :, :lead] = window[:, :, lead : lead + 1] if remembered is None else remembered
        if trail:
            window[:, :, -1] = window[:, :, -2]
        if not last:
            memory.keep(self, window[:, :, 1 - KERNEL :])
        return window

    def convolve(self, window: Tensor) -> Tensor:
        """(B, C, n, H, W) -> (B, C', n-2, H, W), or no frames where n is below 3. Without the bias."""
        batch, _, frames, height, width = window.shape
        if frames < KERNEL:
            return conv_pointwise.empty(window, (batch, self.conv.out_channels, 0, height, width))
        out = F.conv3d(window, self.conv.weight, padding=PADDING)
        # As it comes, but from a convolution that is not cuDNN's.
        return out.contiguous(memory_format=conv_pointwise.memory_format(out.device, out.dtype))

    def forward(self, x: Frames, memory: ClipMemory, last: bool) -> Unfinished:
        return Unfinished(self.convolve(self.window(x, memory, last)), 0, self.conv.bias)


class ResBlock(nn.Module):
    """x + conv2(silu(pn(conv1(silu(pn(x)))))). In a stream x waits until its frames have come through both convs."""

    def __init__(self, channels: int, *, causal: bool) -> None:
        super().__init__()
        self.conv1 = TemporalConv(channels, channels, causal=causal, activated=True)
        self.conv2 = TemporalConv(channels, channels, causal=causal, activated=True)

    def forward(self, x: Frames, memory: ClipMemory, last: bool) -> Unfinished:
        hidden = Unfinished(self.conv1.convolve(self.conv1.window(x, memory, last, keep=True)), 0, self.conv1.conv.bias)
        out = self.conv2.convolve(self.conv2.window(hidden, memory, last))
        x = completed(x)

        late = memory.recall(self)
        ready = 0 if late is None else min(late.shape[2], out.shape[2])
        bias = self.conv2.conv.bias
        if ready:
            conv_pointwise.finish(out[:, :, :ready], bias, late[:, :, :ready])
        if not last:
            rest = x[:, :, out.shape[2] - ready :]
            waits = late is not None and late.shape[2] > ready
            memory.keep(self, torch.cat([late[:, :, ready:], rest], dim=2) if waits else rest)
        return Unfinished(out, ready, bias, x[:, :, : out.shape[2] - ready])


class Upsample(nn.Module):
    """Convolution, then channels to a finer grid. A doubled time axis loses its first frame, once a clip: F -> 2F-1."""

    def __init__(self, in_channels: int, out_channels: int, stride: Stride, *, causal: bool) -> None:
        super().__init__()
        self.conv = TemporalConv(in_channels, out_channels * stride[0] * stride[1] * stride[2], causal=causal)
        self.stride = stride

    def forward(self, x: Frames, memory: ClipMemory, last: bool) -> Tensor:
        raw = self.conv.convolve(self.conv.window(x, memory, last))
        skip = 1 if self.stride[0] == 2 and raw.shape[2] and memory.is_first_time(self) else 0
        return conv_pointwise.depth_to_space(raw, self.conv.conv.bias, self.stride, skip)


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

    def forward(self, x: Frames, memory: ClipMemory, last: bool) -> Tensor:
        if self.stride[0] == 2:
            x = self._pairs(completed(x), memory, last)
        raw = self.conv.convolve(self.conv.window(x, memory, last, keep=True))
        return conv_pointwise.add_space_to_depth(raw, self.conv.conv.bias, completed(x), self.stride)

    def _pairs(self, x: Tensor, memory: ClipMemory, last: bool) -> Tensor:
        waiting = memory.recall(self)
        if waiting is None:
            waiting = x[:, :, :1]
        if waiting.shape[2]:
            x = torch.cat([waiting, x], dim=2)
        even = x.shape[2] // 2 * 2
        if not last:
            memory.keep(self, x[:, :, even:])
        return x[:, :, :even]
