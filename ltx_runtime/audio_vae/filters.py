"""Low-pass filters, and changing a signal's rate with them by ordinary depthwise convolutions.

A transposed depthwise convolution would do for going up, but cuDNN's kernels for it add with atomics: not reproducible
run to run, and slow (h200_baseline.md section 3). Each of the `rate` output phases is a plain convolution of its own.

Source: audio.md sections 3-5.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Hann-windowed sinc: zero crossings on each side, and cutoff as a share of the Nyquist frequency.
SINC_WIDTH = 6
SINC_ROLLOFF = 0.99


def hann_sinc(t: Tensor) -> Tensor:
    """sinc(t) under a Hann window that ends at |t| = 6. t in units of the cutoff's zero crossings."""
    return torch.sinc(t) * torch.cos(t.clamp(-SINC_WIDTH, SINC_WIDTH) * (math.pi / SINC_WIDTH / 2)).square()


def hann_sinc_kernel(ratio: int) -> Tensor:
    """Kernel for `ratio` times as many samples: (2 * ratio * ceil(6 / 0.99) + 1,) float64, its sum near 1."""
    half = math.ceil(SINC_WIDTH / SINC_ROLLOFF)
    n = torch.arange(2 * half * ratio + 1, dtype=torch.float64)
    return hann_sinc((n / ratio - half) * SINC_ROLLOFF) * (SINC_ROLLOFF / ratio)


def kaiser_sinc_kernel(taps: int, cutoff: float, half_width: float) -> Tensor:
    """Kaiser-windowed sinc of sum 1: (taps,) float64, taps even.

    cutoff and half_width (of the transition) as shares of the sampling rate. Files hold the filters of the anti-aliased
    activations; this is how they are made.
    """
    attenuation = 2.285 * (taps // 2 - 1) * math.pi * 4 * half_width + 7.95
    if attenuation > 50:
        beta = 0.1102 * (attenuation - 8.7)
    else:
        beta = 0.5842 * max(attenuation - 21, 0) ** 0.4 + 0.07886 * max(attenuation - 21, 0)
    t = torch.arange(taps, dtype=torch.float64) - taps / 2 + 0.5
    kernel = torch.kaiser_window(taps, periodic=False, beta=beta, dtype=torch.float64) * torch.sinc(2 * cutoff * t)
    return kernel / kernel.sum()


class Upsampling:
    """Makes `rate` samples of one with a symmetric kernel; at the ends the first and last sample go on.

    Sample j is sum over n of kernel[j + offset - rate * n] * x[n]. Made once, when the kernel is known.
    """

    def __init__(self, kernel: Tensor, rate: int, offset: int, channels: int) -> None:
        """kernel: (taps,) float32 on the device of the work, gain included; channels of the signal."""
        taps = kernel.shape[0]
        first = -((taps - 1 - offset) // rate)  # n - j // rate of the earliest and the latest sample that j sees
        last = (rate - 1 + offset) // rate
        count = last - first + 1
        lead = offset + rate - taps - rate * first
        rows = F.pad(kernel.flip(0), (lead, count * rate - taps - lead)).view(count, rate).T.flip(0)
        self.rate = rate
        self.channels = channels
        self._padding = (-first, last)
        self._weight = rows.repeat(channels, 1).unsqueeze(1)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, channels, N) to (B, channels, rate * N)."""
        x = F.pad(x, self._padding, mode="replicate")
        phases = F.conv1d(x, self._weight, groups=self.channels).unflatten(1, (self.channels, self.rate))
        return phases.transpose(2, 3).flatten(2)


class Downsampling:
    """Keeps every `rate`-th sample of a filtered signal; at the ends the first and last sample go on."""

    def __init__(self, kernel: Tensor, rate: int, channels: int) -> None:
        """As Upsampling."""
        taps = kernel.shape[0]
        self.rate = rate
        self.channels = channels
        self._padding = ((taps - 1) // 2, taps // 2)
        self._weight = kernel.repeat(channels, 1).unsqueeze(1)

    def __call__(self, x: Tensor) -> Tensor:
        """(B, channels, N) to (B, channels, N / rate)."""
        x = F.pad(x, self._padding, mode="replicate")
        return F.conv1d(x, self._weight, stride=self.rate, groups=self.channels)
