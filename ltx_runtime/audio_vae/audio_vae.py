"""The audio VAE of one file: latents in, sound out, and back.

Reading order: `AudioVAE.decode`, `_run`. The networks are in network.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import CheckpointHeader, Progress, planned_bytes, read_header, require_component
from ..errors import NonFiniteError, RequestError, ShapeError
from ..residency import ResidentModule
from ..timing import Timeline
from .config import STEREO, AudioVAEConfig
from .network import AudioVAENetwork, Stages
from .resample import Resampler

DECODE_PHASE = "decode.audio"
ENCODE_PHASE = "encode.audio"
_PREFIXES = ("audio_vae.", "vocoder.")
# Values alive at once for one value of the largest activation: in the vocoder an AMP block's input, sum and branch, and
# in its activation the padded and doubled signal with the sine of it; in the mel VAE a block's input, branch, the padded
# copy and cuDNN's own of both.
_VOCODER_VALUES = 14
_MEL_VAE_VALUES = 8


def load_audio_vae(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> AudioVAE:
    """Open an audio VAE file (or a 2.3 checkpoint that holds one) and place its weights on the device.

    dtype: of the mel VAE's weights and activations, None as in the file; the vocoder is float32 always.
    on_progress(done_bytes, total_bytes). Raises CheckpointError, also for the audio VAE of LTX-2.0.
    """
    vae = AudioVAE(read_header(path), device=device, dtype=dtype)
    vae.ensure_resident(timeline, on_progress)
    return vae


class AudioVAE(ResidentModule):
    """Decoder, vocoder and encoder of one file. module is an AudioVAENetwork."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        """Checks the header; the weights are read by ensure_resident, at the latest in decode or encode."""
        require_component(header, "audio_vae")
        self.config = AudioVAEConfig.from_header(header)
        prefix_map = {prefix: prefix for prefix in _PREFIXES}
        super().__init__(header, lambda: AudioVAENetwork(self.config), prefix_map, device=device, dtype=dtype)

    @property
    def sample_rate(self) -> int:
        """Hz of the decoded sound: 48000."""
        return self.config.output_sample_rate

    @property
    def weights_bytes(self) -> int:
        mel_vae, vocoder = ({prefix: prefix} for prefix in _PREFIXES)
        return planned_bytes(self.header, mel_vae, self.dtype) + planned_bytes(self.header, vocoder, torch.float32)

    def _fill(self, module: AudioVAENetwork, timeline: Timeline | None, on_progress: Progress | None) -> None:
        super()._fill(module, timeline, on_progress)
        module.prepare()

    def decode_bytes(self, latent_shape: Sequence[int]) -> int:
        """Estimate of the device memory that decoding a latent of this shape takes beside the weights."""
        batch, _, frames, _ = self._check_latent(latent_shape)
        mel_frames = self.config.mel_frames(frames)
        stages = []
        for generator, inputs in (
            (self.config.vocoder, mel_frames),
            (self.config.extension, mel_frames * self.config.vocoder.rate // self.config.extension_hop_length),
        ):
            channels, length = generator.initial_channels, inputs
            for rate in generator.upsample_rates:
                channels, length = channels // 2, length * rate
                stages.append(channels * length)
        return batch * max(max(stages) * 4 * _VOCODER_VALUES, self._mel_vae_bytes(mel_frames))

    def encode_bytes(self, latent_frames: int, batch: int = 1) -> int:
        """The same for encoding sound of so many latent frames."""
        return batch * self._mel_vae_bytes(self.config.factor * latent_frames)

    def _mel_vae_bytes(self, mel_frames: int) -> int:
        values = (
            mel_frames * self.config.mel_bins * self.config.base_channels * max(self.config.channel_multipliers[:2])
        )
        return values * 4 * _MEL_VAE_VALUES

    def decode(
        self,
        latent: Tensor,
        *,
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """Decode to a waveform (B, 2, 480 (4T - 3)) float32 in [-1, 1] at `sample_rate`, on the device.

        latent: (B, C, T, bins) float, normalised, on any device. The sound is 30 ms shorter than T / 25 seconds.
        The same latent gives the same bits every time.
        check_cancelled: called before every stage; whatever it raises ends the decode and leaves the VAE usable.
        Raises ShapeError before any work, CheckpointError, and NonFiniteError naming the stage.
        Source: audio.md sections 2-5.
        """
        return self.decode_raw(latent, timeline=timeline, check_cancelled=check_cancelled).clamp(-1, 1)

    def decode_raw(
        self,
        latent: Tensor,
        *,
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """As decode, but not clamped: what the networks give."""
        self._check_latent(latent.shape)
        timeline = timeline or Timeline(None, device=self.device)
        self.ensure_resident(timeline)
        with torch.inference_mode():
            latent = latent.to(self.device)
            _refuse_non_finite(DECODE_PHASE, latent, "latent")
            return _run(DECODE_PHASE, self.module.decode_stages(), latent, timeline, check_cancelled)

    def encode(
        self,
        waveform: Tensor,
        sample_rate: int,
        *,
        latent_frames: int | None = None,
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """Encode sound to normalised latents (B, C, T, bins) float32 on the device.

        waveform: (B, channels, N) float in [-1, 1] on any device, mono or stereo; mono is heard on both sides.
        sample_rate: of the waveform in Hz, any whole number; it is resampled to the encoder's 16 kHz.
        latent_frames: T. None takes the sound's own length: 25 a second and one more, since the first window is centred
        on the start (0.4 s give 11). With a number, longer sound is cut and shorter sound followed by silence.
        check_cancelled: see decode. Raises ShapeError, RequestError, CheckpointError and NonFiniteError as decode does.
        Source: audio.md section 3.
        """
        self._check_sound(waveform, sample_rate)
        if latent_frames is not None and latent_frames < 1:
            raise ShapeError(f"latent_frames={latent_frames}, expected at least 1.")
        timeline = timeline or Timeline(None, device=self.device)
        self.ensure_resident(timeline)
        with torch.inference_mode():
            waveform = waveform.to(self.device, torch.float32)
            _refuse_non_finite(ENCODE_PHASE, waveform, "sound")
            if latent_frames is not None:
                # The last latent frame hears no sample after its own 40 ms, so the cut changes nothing of it.
                seconds = Fraction(latent_frames * self.config.hop_length * self.config.factor, self.config.sample_rate)
                wanted = math.ceil(seconds * int(sample_rate))
                waveform = F.pad(waveform, (0, wanted - waveform.shape[2]))
            waveform = waveform.expand(-1, STEREO, -1)
            resampler = Resampler(int(sample_rate), self.config.sample_rate, self.device)
            latent = _run(ENCODE_PHASE, self.module.encode_stages(resampler), waveform, timeline, check_cancelled)
        return latent[:, :, :latent_frames].clone()

    def _check_latent(self, latent_shape: Sequence[int]) -> tuple[int, ...]:
        sizes = tuple(latent_shape)
        channels, bins = self.config.latent_channels, self.config.latent_bins
        if len(sizes) != 4 or sizes[1] != channels or sizes[3] != bins:
            what = "This is video; connect the audio latent." if len(sizes) == 5 else "Connect an LTX audio latent."
            raise ShapeError(
                f"this latent has shape {sizes}, the LTX audio VAE takes (batch, {channels}, length, {bins}). {what}"
            )
        if 0 in sizes:
            raise ShapeError(f"this latent is empty: {sizes}.")
        return sizes

    def _check_sound(self, waveform: Tensor, sample_rate: int) -> None:
        sizes = tuple(waveform.shape)
        if len(sizes) != 3:
            raise ShapeError(f"this sound has shape {sizes}, expected (batch, channels, samples).")
        if sizes[1] not in (1, STEREO):
            raise ShapeError(f"this sound has {sizes[1]} channels, the LTX audio VAE takes 1 or 2. Mix it down first.")
        if 0 in sizes:
            raise ShapeError(f"this sound is empty: {sizes}.")
        if not waveform.is_floating_point():
            raise RequestError(f"this sound holds {waveform.dtype} samples, expected float in [-1, 1].")
        if sample_rate != int(sample_rate) or sample_rate < 1:
            raise RequestError(f"this sound has sample_rate {sample_rate}, expected whole Hz such as 48000.")


def _run(
    phase: str,
    stages: Stages,
    x: Tensor,
    timeline: Timeline,
    check_cancelled: Callable[[], None] | None,
) -> Tensor:
    """Run stages one by one, each as a phase of its own, and look at what they gave when all are done."""
    finite = []
    for name, stage in stages:
        if check_cancelled is not None:
            check_cancelled()
        with timeline.phase(phase, stage=name):
            x = stage(x)
            finite.append(torch.isfinite(x).all())
    for (name, _), good in zip(stages, torch.stack(finite).tolist()):
        if not good:
            raise NonFiniteError(
                phase,
                f"NaN or Inf after the {name}. Its input is finite, so it overflowed: its file is damaged, or the input "
                "is far out of range.",
            )
    return x


def _refuse_non_finite(phase: str, x: Tensor, words: str) -> None:
    bad = x.numel() - int(torch.isfinite(x).sum())
    if bad:
        raise NonFiniteError(
            phase, f"{bad} of {x.numel()} values of the {words} are NaN or Inf, so what made the {words} failed."
        )
