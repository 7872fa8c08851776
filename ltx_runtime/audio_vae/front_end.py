"""What the encoder hears: stereo sound at 16 kHz as a log-mel spectrogram.

Source: audio.md section 3, encoder front end.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .config import AudioVAEConfig
from .vocoder import MEL_FLOOR

# The slaney scale: linear up to 1000 Hz at 3 mel for 200 Hz, then 27 mel for each factor of 6.4.
_LINEAR_MEL_PER_HZ = 3 / 200
_BREAK_HZ = 1000.0
_BREAK_MEL = 15.0
_LOG_MEL = 27 / math.log(6.4)


def slaney_filterbank(n_fft: int, bands: int, min_hz: float, max_hz: float, sample_rate: int) -> Tensor:
    """Triangular mel filters of equal area: (n_fft / 2 + 1, bands) float64."""
    points = torch.linspace(_mel(min_hz), _mel(max_hz), bands + 2, dtype=torch.float64)
    hz = torch.where(
        points < _BREAK_MEL, points / _LINEAR_MEL_PER_HZ, _BREAK_HZ * torch.exp((points - _BREAK_MEL) / _LOG_MEL)
    )
    bins = torch.linspace(0, sample_rate / 2, n_fft // 2 + 1, dtype=torch.float64).unsqueeze(1)
    low, centre, high = hz[:-2], hz[1:-1], hz[2:]
    triangles = torch.minimum((bins - low) / (centre - low), (high - bins) / (high - centre)).clamp_(min=0)
    return triangles * (2 / (high - low))


def _mel(hz: float) -> float:
    return hz * _LINEAR_MEL_PER_HZ if hz < _BREAK_HZ else _BREAK_MEL + _LOG_MEL * math.log(hz / _BREAK_HZ)


class MelFrontEnd:
    """Centred, not causal, although the file's config says so. Its constants are made once, on the device."""

    def __init__(self, config: AudioVAEConfig, device: torch.device) -> None:
        filterbank = slaney_filterbank(config.n_fft, config.mel_bins, config.min_hz, config.max_hz, config.sample_rate)
        self._filterbank = filterbank.T.unsqueeze(2).to(device, torch.float32)
        self._window = torch.hann_window(config.n_fft, device=device)
        self._n_fft = config.n_fft
        self._hop_length = config.hop_length

    def __call__(self, waveform: Tensor) -> Tensor:
        """(B, 2, N) float32 at 16 kHz to log-mel (B, 2, 1 + N // hop, mel bins).

        A sound too short for the window's reflection at its ends (32 ms) is first lengthened by silence.
        """
        batch = waveform.shape[0]
        waveform = waveform.flatten(0, 1)
        waveform = F.pad(waveform, (0, max(0, self._n_fft // 2 + 1 - waveform.shape[1])))
        spectrum = torch.stft(
            waveform, self._n_fft, self._hop_length, window=self._window, pad_mode="reflect", return_complex=True
        )
        # As a convolution, because a host may have allowed TF32 for matrix products (network.py).
        mel = F.conv1d(spectrum.abs(), self._filterbank)
        return mel.clamp_(min=MEL_FLOOR).log_().unflatten(0, (batch, -1)).transpose(2, 3)
