"""The audio VAE as one module, with the parameter names of the published file, and its stages in order.

Every stage is pure device work on static shapes: no host sync and no random numbers, so that the whole chain can be
recorded as one CUDA graph. And it gives the same bits run to run, graphed or not, whatever the host has set for cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .config import AudioVAEConfig
from .front_end import MelFrontEnd
from .mel_vae import MelVAE
from .resample import Resampler
from .vocoder import Vocoder

Stages = tuple[tuple[str, Callable[[Tensor], Tensor]], ...]


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """cuDNN's deterministic kernels, chosen without timing them, float32 not rounded to TF32.

    cuDNN otherwise picks kernels for transposed convolutions that add with atomics: eager runs of the reference's
    vocoder differ by up to 0.04 (h200_baseline.md section 3). And it rounds the operands of float32 convolutions to TF32
    by default, 10 bits of mantissa where the vocoder wants 23 (audio.md section 6).
    """
    cudnn = torch.backends.cudnn
    # From torch 2.9 on; there the old switch raises in a process that has used the new one.
    tf32 = (cudnn.conv, "fp32_precision", "ieee") if hasattr(cudnn, "conv") else (cudnn, "allow_tf32", False)
    switches = ((cudnn, "benchmark", False), (cudnn, "deterministic", True), tf32)
    before = [getattr(owner, name) for owner, name, _ in switches]
    try:
        for owner, name, value in switches:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(switches, before):
            setattr(owner, name, value)


class AudioVAENetwork(nn.Module):
    """Mel VAE and vocoder. Build it on the meta device, place the weights, then call `prepare`.

    The mel VAE computes in its weights' dtype, the vocoder in float32.
    """

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        self.audio_vae = MelVAE(config)
        self.vocoder = Vocoder(config)
        self._config = config

    def prepare(self) -> None:
        """Widen the vocoder's weights to float32, and compute all that depends on weights and config alone."""
        # Widened once: in the reference, autocast does it again at every call.
        self.vocoder.float()
        self.vocoder.prepare()
        self.front_end = MelFrontEnd(self._config, self.vocoder.mel_stft.mel_basis.device)

    def decode_stages(self) -> Stages:
        """(name, function) in order: each takes what the one before gives. The first takes normalised latents
        (B, C, T, bins), the last gives a waveform (B, 2, 480 (4T - 3)) float32 at 48 kHz, not clamped."""
        return (
            ("mel decoder", _exact(self.audio_vae.decode)),
            ("vocoder", _exact(self.vocoder.waveform)),
            ("bandwidth extension", _exact(self.vocoder.extend)),
        )

    def encode_stages(self, resampler: Resampler) -> Stages:
        """As decode_stages: from a waveform (B, 2, N) float32 at the resampler's old rate to normalised latents
        (B, C, T, bins) float32."""
        return (
            ("resample", resampler),
            ("log-mel", _exact(self.front_end)),
            ("mel encoder", _exact(self.audio_vae.encode)),
        )


def run_stages(stages: Stages, x: Tensor) -> Tensor:
    for _, stage in stages:
        x = stage(x)
    return x


def _exact(stage: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with exact_convolutions():
            return stage(x)

    return run
