"""The audio VAE of one file: latents in, sound out, and back.

Reading order: `AudioVAE.decode`, `_run`. The networks are in network.py.

A decode of 5 s is 800 short kernels, and the host is slower than the device at them, so it is recorded as one CUDA
graph when its length comes back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint import CheckpointHeader, Progress, planned_bytes, read_header, require_component
from ..cuda_graph import GraphCache, GraphKey, note_graphs, unavailable_reason
from ..errors import CaptureError, NonFiniteError, RequestError, RestartRequiredError, ShapeError
from ..resident_weights import ResidentModule
from ..step_runner import CUDA_GRAPH_MODES
from ..timing import Timeline
from ..triton_use import note_first_use
from .config import STEREO, AudioVAEConfig
from .fused_vocoder import TRITON_OWNER, Workspace, stage_sizes
from .network import AudioVAENetwork, Stages
from .resample import Resampler

logger = logging.getLogger("ltxgraph")

DECODE_PHASE = "decode.audio"
ENCODE_PHASE = "encode.audio"
_PREFIXES = ("audio_vae.", "vocoder.")
# Values alive at once for one value of the largest activation: in the vocoder an AMP block's input, sum and branch,
# and in its activation the padded and doubled signal with the sine of it; in the mel VAE a block's input, branch, the
# padded copy and cuDNN's own of both.
_VOCODER_VALUES = 14
_MEL_VAE_VALUES = 8
_MAX_GRAPHS = 4
# "auto" records clips up to 20 s: at 5 s an H200 takes 16 ms and its host 20, so beyond this no host is the slower one,
# and a recording would hold 40 MB a second of sound for nothing.
_AUTO_LATENT_FRAMES = 500


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
    """Decoder, vocoder and encoder of one file. module is an AudioVAENetwork. graphs: recorded decodes."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        """Checks the header; the weights are read by ensure_resident, at the latest in decode or encode."""
        require_component(header, "audio_vae")
        self.config = AudioVAEConfig.from_header(header)
        prefix_map = {prefix: prefix for prefix in _PREFIXES}
        super().__init__(header, lambda: AudioVAENetwork(self.config), prefix_map, device=device, dtype=dtype)
        self.graphs = GraphCache(self.device, max_graphs=_MAX_GRAPHS)

    def evict(self) -> None:
        self.graphs.close()
        # Where memory is so short that it leaves with every render, a recording would never be replayed.
        self.graphs.forget_measurements()
        super().evict()

    @property
    def sample_rate(self) -> int:
        """Hz of the decoded sound: 48000."""
        return self.config.output_sample_rate

    @property
    def weights_bytes(self) -> int:
        return self.module.weights_bytes if self.resident else self._load_bytes

    @cached_property
    def _load_bytes(self) -> int:
        mel_vae, vocoder = ({prefix: prefix} for prefix in _PREFIXES)
        dtypes = (self.dtype, torch.float32, torch.bfloat16)
        placed, wide, packed = (planned_bytes(self.header, vocoder, dtype) for dtype in dtypes)
        # The vocoder's in float32, or packed for the kernels beside what was read.
        return planned_bytes(self.header, mel_vae, self.dtype) + max(wide, placed + packed)

    def _fill(self, module: AudioVAENetwork, timeline: Timeline | None, on_progress: Progress | None) -> None:
        super()._fill(module, timeline, on_progress)
        with timeline.phase("load.place") if timeline is not None else nullcontext():
            module.prepare()  # packs weights, and may build kernels

    def decode_bytes(self, latent_shape: Sequence[int]) -> int:
        """Estimate of the device memory that decoding a latent of this shape takes beside the weights."""
        batch, _, frames, _ = self._check_latent(latent_shape)
        config, mel_frames = self.config, self.config.mel_frames(frames)
        sizes = stage_sizes(config.vocoder, mel_frames)
        sizes += stage_sizes(config.extension, mel_frames * config.vocoder.rate // config.extension_hop_length)
        plain = batch * max(channels * length for channels, length in sizes) * 4 * _VOCODER_VALUES
        # On the kernels, the vocoder's memory is there while the mel VAE works.
        return max(plain, batch * self._mel_vae_bytes(mel_frames) + Workspace.num_bytes(config, batch, mel_frames))

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
        cuda_graph: str = "auto",
        graphs_refused: str = "",
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """Decode to a waveform (B, 2, 480 (4T - 3)) float32 in [-1, 1] at `sample_rate`, on the device.

        latent: (B, C, T, bins) float, normalised, on any device. The sound is 30 ms shorter than T / 25 seconds.
        The same latent gives the same bits every time, replayed or not, unless the device once ran short of memory in a
        decode (docs/decisions.md).
        cuda_graph: "off"; "on": the decode is recorded at the first use of a length and replayed after; "auto": at the
        second use, up to 20 s. Where it can't be recorded it runs eager, with a note of the reason in the timeline.
        graphs_refused: why the host forbids CUDA graphs, empty when it doesn't.
        check_cancelled: called before every stage, or before a replay; whatever it raises ends the decode and leaves
        the VAE usable.
        Raises RequestError and ShapeError before any work, CheckpointError, RestartRequiredError when the process can't
        go on, and NonFiniteError naming the stage.
        Source: audio.md sections 2-5.
        """
        raw = self.decode_raw(
            latent,
            cuda_graph=cuda_graph,
            graphs_refused=graphs_refused,
            timeline=timeline,
            check_cancelled=check_cancelled,
        )
        return raw.clamp(-1, 1)

    def decode_raw(
        self,
        latent: Tensor,
        *,
        cuda_graph: str = "auto",
        graphs_refused: str = "",
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
    ) -> Tensor:
        """As decode, but not clamped: what the networks give."""
        if cuda_graph not in CUDA_GRAPH_MODES:
            raise RequestError(f"cuda_graph={cuda_graph!r} is not one of {', '.join(CUDA_GRAPH_MODES)}.")
        batch, _, frames, _ = self._check_latent(latent.shape)
        timeline = timeline or Timeline(None, device=self.device)
        self.ensure_resident(timeline)
        if self.device.type == "cuda" and self.module.plain_reason:
            timeline.note(DECODE_PHASE, f"the vocoder runs on plain torch: {self.module.plain_reason}")
        if self.module.backend == "triton":
            note_first_use(TRITON_OWNER, timeline, DECODE_PHASE)
        with torch.inference_mode():
            latent = latent.to(self.device)
            _refuse_non_finite(DECODE_PHASE, latent, "latent")
            if cuda_graph != "off":
                refused = graphs_refused or unavailable_reason(self.device)
                decoded = None if refused else self._replayed(cuda_graph, latent, timeline, check_cancelled)
                if decoded is not None:
                    return decoded
                if refused and cuda_graph == "on":
                    note_graphs(timeline, DECODE_PHASE, f"eager, {refused}", eager=True)
            workspace = self.module.workspace(batch, frames)
            return _run(DECODE_PHASE, self.module.decode_stages(workspace), latent, timeline, check_cancelled)

    def _replayed(
        self, cuda_graph: str, latent: Tensor, timeline: Timeline, check_cancelled: Callable[[], None] | None
    ) -> Tensor | None:
        """The decode by its recording, made when it is time for it; None: run eager."""
        # Contiguous, so that two latents of a length have one key.
        inputs = _DecodeInputs(latent.contiguous(), self.module.backend)
        key = GraphKey.of(inputs, weight_generation=self.generation)
        if check_cancelled is not None:
            check_cancelled()
        recording = self.graphs.find(key)
        if recording is not None:
            with timeline.phase(DECODE_PHASE, stage="replay"):
                # The workspace is scratch: there is nothing to copy into it.
                recording.load(None, inputs)
                outputs: _Decoded = recording.replay()
        elif cuda_graph == "auto" and latent.shape[0] * latent.shape[2] > _AUTO_LATENT_FRAMES:
            return None
        elif cuda_graph == "on" or self.graphs.measurement(key):
            outputs = self._capture(key, inputs, timeline)
            if outputs is None:
                return None
        else:
            self.graphs.remember(key, True)
            return None
        # Cloned: the next replay writes into the same buffer.
        waveform = outputs.waveform.clone()
        _refuse_overflow(DECODE_PHASE, [name for name, _ in self.module.decode_stages()], outputs.finite)
        return waveform

    def _capture(self, key: GraphKey, inputs: _DecodeInputs, timeline: Timeline) -> _Decoded | None:
        """Record the decode; its outputs, those of the first replay. None: it can't be recorded, a note says why."""
        refused = self.graphs.refusal(key)
        if refused is None:
            batch, _, frames, _ = inputs.latent.shape
            module = self.module

            def forward(workspace: Workspace | None, inputs: _DecodeInputs) -> _Decoded:
                return _Decoded(*_chain(module.decode_stages(workspace), inputs.latent))

            try:
                # The engine makes a workspace like this one for the recording: it takes a copy of the constants.
                recording, outputs = self.graphs.capture(
                    key,
                    forward,
                    module.workspace(batch, frames),
                    inputs,
                    lambda name: timeline.phase(DECODE_PHASE, stage=name.removeprefix("sample.")),
                )
                recording.forget_constants()
                return outputs
            except RestartRequiredError:
                raise
            except CaptureError as error:
                refused = str(error)
        logger.warning("audio decode: eager, %s", refused)
        note_graphs(timeline, DECODE_PHASE, f"eager, {refused}", eager=True)
        return None

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
        self.check_sound(waveform, sample_rate)
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

    def check_sound(self, waveform: Tensor, sample_rate: int) -> None:
        """Raises ShapeError and RequestError for sound that `encode` refuses. Reads no weights."""
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


@dataclass(frozen=True)
class _DecodeInputs:
    """Of a recorded decode. backend: what runs the vocoder."""

    latent: Tensor
    backend: str


@dataclass(frozen=True)
class _Decoded:
    """finite: of every stage, whether all its values are."""

    waveform: Tensor
    finite: Tensor


def _chain(
    stages: Stages, x: Tensor, around: Callable[[str], AbstractContextManager] = nullcontext
) -> tuple[Tensor, Tensor]:
    """Run stages one by one. Returns what the last gave, and for every stage whether all that it gave was finite."""
    finite = []
    for name, stage in stages:
        with around(name):
            x = stage(x)
            finite.append(torch.isfinite(x).all())
    return x, torch.stack(finite)


def _run(
    phase: str,
    stages: Stages,
    x: Tensor,
    timeline: Timeline,
    check_cancelled: Callable[[], None] | None,
) -> Tensor:
    """Run stages one by one, each as a phase of its own, and look at what they gave when all are done."""

    def around(name: str) -> AbstractContextManager:
        if check_cancelled is not None:
            check_cancelled()
        return timeline.phase(phase, stage=name)

    x, finite = _chain(stages, x, around)
    _refuse_overflow(phase, [name for name, _ in stages], finite)
    return x


def _refuse_overflow(phase: str, stages: Sequence[str], finite: Tensor) -> None:
    for name, good in zip(stages, finite.tolist()):
        if not good:
            raise NonFiniteError(
                phase,
                f"NaN or Inf after the {name}. Its input is finite, so it overflowed: its file is damaged, or the "
                "input is far out of range.",
            )


def _refuse_non_finite(phase: str, x: Tensor, words: str) -> None:
    bad = x.numel() - int(torch.isfinite(x).sum())
    if bad:
        raise NonFiniteError(
            phase, f"{bad} of {x.numel()} values of the {words} are NaN or Inf, so what made the {words} failed."
        )
