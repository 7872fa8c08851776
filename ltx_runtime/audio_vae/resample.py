"""Another sampling rate, by a Hann-windowed sinc: any whole number of Hz to any other.

Source: audio.md section 3, encoder front end (the reference uses torchaudio's defaults).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .filters import SINC_ROLLOFF, SINC_WIDTH, hann_sinc

# Output samples computed at once: with the 38 taps of 48 to 16 kHz, 40 MB a channel.
_CHUNK_SAMPLES = 1 << 18


class Resampler:
    """Resamples from one rate to another. Its table of kernels is made once, on the device; calls never wait.

    An output sample lies between two input samples at one of new / gcd(old, new) places; each has its own kernel.
    Silence goes on at both ends.
    """

    def __init__(self, old_rate: int, new_rate: int, device: torch.device) -> None:
        divisor = math.gcd(old_rate, new_rate)
        self._old, self._new = old_rate // divisor, new_rate // divisor
        # In input samples: the cutoff's zero crossings a sample, and half the kernel's length.
        cutoff = SINC_ROLLOFF * min(self._old, self._new) / self._old
        self._half = math.ceil(SINC_WIDTH / cutoff)
        between = torch.arange(self._new, dtype=torch.float64).unsqueeze(1) / self._new
        taps = torch.arange(1 - self._half, self._half + 1, dtype=torch.float64)
        self._kernels = (hann_sinc((taps - between) * cutoff) * cutoff).to(device, torch.float32)

    def num_samples(self, count: int) -> int:
        """How many samples come out for count samples."""
        return -(-count * self._new // self._old)

    def __call__(self, waveform: Tensor) -> Tensor:
        """(B, C, N) float32 to (B, C, num_samples(N)) float32."""
        if self._old == self._new:
            return waveform
        count = self.num_samples(waveform.shape[2])
        windows = F.pad(waveform, (self._half - 1, self._half)).unfold(2, 2 * self._half, 1)
        pieces = []
        for start in range(0, count, _CHUNK_SAMPLES):
            place = torch.arange(start, min(start + _CHUNK_SAMPLES, count), device=waveform.device) * self._old
            left, between = place // self._new, place % self._new
            pieces.append((windows[:, :, left] * self._kernels[between]).sum(dim=3))
        return torch.cat(pieces, dim=2)
