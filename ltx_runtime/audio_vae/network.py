"""The audio VAE as one module, with the parameter names of the published file, and its stages in order.

Every stage is pure device work on static shapes: no host sync and no random numbers, so that the whole chain can be
recorded as one CUDA graph. And it gives the same bits run to run, graphed or not, whatever the host has set for cuDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .config import AudioVAEConfig
from .front_end import MelFrontEnd
from .fused_vocoder import FusedVocoder, Workspace, refusal
from .mel_vae import MelVAE
from .resample import Resampler
from .vocoder import Vocoder

Stages = tuple[tuple[str, Callable[[Tensor], Tensor]], ...]


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """cuDNN's deterministic kernels, chosen without timing them, float32 not rounded to TF32.

    cuDNN otherwise picks kernels for transposed convolutions that add with atomics: eager runs of the reference's
    vocoder differ by up to 0.04 (h200_baseline.md section 3). And it rounds the operands of float32 convolutions to
    TF32 by default, 10 bits of mantissa where the vocoder wants 23 (audio.md section 6).
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
        self._fused: FusedVocoder | None = None
        self.plain_reason = ""

    def prepare(self, *, plain: bool = False) -> None:
        """Compute all that depends on weights and config alone, and pick what runs the vocoder.

        On Triton's kernels the generators' weights are packed for them, and leave the modules for the meta device. Else
        they are widened to float32 once (in the reference, autocast does it again at every call), and `plain_reason`
        says why. plain: use no kernels where they could run.
        """
        device = self.vocoder.mel_stft.mel_basis.device
        self.front_end = MelFrontEnd(self._config, device)
        self.plain_reason = "asked for" if plain else refusal(device, self.vocoder) or ""
        if self.plain_reason:
            self.vocoder.float()
            self.vocoder.prepare()
            return
        self.vocoder.mel_stft.float()
        self._fused = FusedVocoder(self.vocoder)
        for generator in (self.vocoder.vocoder, self.vocoder.bwe_generator):
            generator.to("meta")

    @property
    def backend(self) -> str:
        """What runs the vocoder: "triton" or "torch"."""
        return "torch" if self._fused is None else "triton"

    @property
    def weights_bytes(self) -> int:
        """Device memory of the weights, as they lie after `prepare`."""
        placed = sum(p.nbytes for p in self.parameters() if not p.is_meta)
        return placed + (0 if self._fused is None else self._fused.num_bytes)

    def workspace(self, batch: int, latent_frames: int) -> Workspace | None:
        """Memory for decode_stages, for latents up to this size; None where the vocoder needs none."""
        if self._fused is None:
            return None
        device = self.vocoder.mel_stft.mel_basis.device
        return Workspace.make(self._config, batch, self._config.mel_frames(latent_frames), device)

    def decode_stages(self, workspace: Workspace | None = None) -> Stages:
        """(name, function) in order: each takes what the one before gives. The first takes normalised latents
        (B, C, T, bins), the last gives a waveform (B, 2, 480 (4T - 3)) float32 at 48 kHz, not clamped.

        workspace: from `workspace`, where that gives one. Signals overwrite one another in it, so one decode at a time.
        """
        waveform, extend = self.vocoder.waveform, self.vocoder.extend
        if self._fused is not None:
            waveform = partial(self._fused.waveform, workspace=workspace)
            extend = partial(self._fused.extend, workspace=workspace)
        return (
            ("mel decoder", _exact(self.audio_vae.decode)),
            ("vocoder", _exact(waveform)),
            ("bandwidth extension", _exact(extend)),
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
