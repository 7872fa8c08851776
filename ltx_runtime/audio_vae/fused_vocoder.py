"""The vocoder on Triton kernels: the same sound as vocoder.py's modules give, in a sixth of the time.

The one place that picks: `refusal` says why the kernels can't do it, and then vocoder.py's modules run as they are.
Between two convolutions of an AMP block stand one kernel for the activation, which leaves its result in three bfloat16
parts, and one for the convolution, which multiplies those parts on the tensor cores (vocoder_kernels.py). All of them
write into a workspace, in which signals overwrite one another, and the results of torch's kernels are copied into it.
Source: audio.md sections 4-6.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..triton_use import on_device, triton_refusal, try_triton
from .config import STEREO, AudioVAEConfig, GeneratorConfig
from .vocoder import AMPBlock, AntiAliasedSnake, CausalLogMel, Generator, Vocoder

TRITON_OWNER = "vocoder"
# AMP blocks a stage: their results and what lies between two convolutions are alive at once.
_BLOCKS = 3
_SIGNALS = _BLOCKS + 1


def refusal(device: torch.device, vocoder: Vocoder) -> str | None:
    """Why the kernels can't run this vocoder on this device, or None. Its weights are in their places."""
    if torch.version.hip is not None:
        return "no kernel for ROCm"
    without_triton = triton_refusal(device, torch.bfloat16, TRITON_OWNER)
    if without_triton:
        return f"Triton: {without_triton}"
    if {generator.blocks_per_stage for generator in (vocoder.vocoder, vocoder.bwe_generator)} != {_BLOCKS}:
        return f"its stages have other than {_BLOCKS} AMP blocks"
    if not all(p.dtype == torch.bfloat16 or torch.equal(p, p.bfloat16().to(p.dtype)) for p in vocoder.parameters()):
        return "the weights are not bfloat16, and more bits take more products"
    if not try_triton(lambda: _probe(device), TRITON_OWNER, "snake and conv", device):
        return f"Triton: {triton_refusal(device, torch.bfloat16, TRITON_OWNER)}"
    return None


def _probe(device: torch.device) -> None:
    """Build kernels and run them: Triton needs a C compiler, and a GPU that it knows."""
    kernels, channels = _kernels(), 128
    x = torch.zeros(1, 1, channels, device=device)
    parts = torch.empty(3, 1, 1, channels, dtype=torch.bfloat16, device=device)
    taps, bias = torch.zeros(12, device=device), torch.zeros(channels, device=device)
    kernels.snake(x, taps, taps, bias, bias, parts)
    weight = kernels.pack(torch.zeros(channels, channels, 1, device=device))
    kernels.conv(parts, weight, bias, x, taps=1, dilation=1, padding=0)
    torch.cuda.synchronize(device)


def _kernels():
    return importlib.import_module(".vocoder_kernels", __package__)


@dataclass(frozen=True)
class Workspace:
    """Memory of one decode, flat: parts bfloat16, signals float32. What stands in it means nothing between calls."""

    parts: Tensor
    signals: tuple[Tensor, ...]

    @classmethod
    def values(cls, config: AudioVAEConfig, batch: int, mel_frames: int) -> int:
        """Values of the largest signal."""
        base_length = mel_frames * config.vocoder.rate
        frames = base_length // config.extension_hop_length
        spectra = frames * STEREO * 2 * (config.extension_n_fft // 2 + 1)
        signals = [STEREO * mel_frames * config.mel_bins, STEREO * frames * config.extension_mel_bins, spectra]
        for generator, inputs in ((config.vocoder, mel_frames), (config.extension, frames)):
            signals += [channels * length for channels, length in stage_sizes(generator, inputs)]
            signals.append(STEREO * generator.rate * inputs)
        return batch * max(signals)

    @classmethod
    def num_bytes(cls, config: AudioVAEConfig, batch: int, mel_frames: int) -> int:
        return cls.values(config, batch, mel_frames) * (4 * _SIGNALS + 2 * 3)

    @classmethod
    def make(
        cls,
        config: AudioVAEConfig,
        batch: int,
        mel_frames: int,
        device: torch.device,
        parts_dtype: torch.dtype = torch.bfloat16,
    ) -> Workspace:
        values = cls.values(config, batch, mel_frames)
        signals = tuple(torch.empty(values, device=device) for _ in range(_SIGNALS))
        return cls(torch.empty(3 * values, dtype=parts_dtype, device=device), signals)

    def parts_of(self, *shape: int) -> Tensor:
        """(3, *shape) at the start of the parts."""
        return self.parts[: 3 * math.prod(shape)].view(3, *shape)

    def signal(self, index: int, *shape: int) -> Tensor:
        return self.signals[index][: math.prod(shape)].view(shape)


def stage_sizes(config: GeneratorConfig, inputs: int) -> list[tuple[int, int]]:
    """(channels, length) of a generator's first convolution and of every stage, for so many input frames."""
    channels, length = config.initial_channels, inputs
    sizes = [(channels, length)]
    for rate in config.upsample_rates:
        channels, length = channels // 2, length * rate
        sizes.append((channels, length))
    return sizes


class FusedVocoder:
    """Vocoder.waveform and Vocoder.extend in a workspace. Holds the vocoder's weights packed for the kernels, num_bytes
    of them.

    vocoder: its weights on the device; they may be let go afterwards. dtype: of parts and packed weights; the kernels'
    tests take float16, which Triton's interpreter can multiply.
    """

    def __init__(self, vocoder: Vocoder, dtype: torch.dtype = torch.bfloat16) -> None:
        self._base = _Generator(vocoder.vocoder, dtype)
        self._extension = _Generator(vocoder.bwe_generator, dtype)
        self._log_mel = _LogMel(vocoder.mel_stft, dtype)
        self._skip = vocoder.make_skip()
        self.num_bytes = _num_bytes(self._base, self._extension, self._log_mel)

    def waveform(self, mel: Tensor, workspace: Workspace) -> Tensor:
        """Log-mel (B, 2, T, mel bins) to a waveform (B, 2, N) at 16 kHz, not clamped."""
        with on_device(mel.device):
            return self._base(mel.permute(0, 2, 1, 3).flatten(2), workspace)

    def extend(self, waveform: Tensor, workspace: Workspace) -> Tensor:
        """A waveform (B, 2, N) as `waveform` gives it, to (B, 2, 3N) at 48 kHz, not clamped."""
        clamped = waveform.clamp(-1, 1)
        with on_device(clamped.device):
            residual = self._extension(self._log_mel(clamped, workspace), workspace)
        return residual.add_(self._skip(clamped))


def _num_bytes(*parts: _Conv | _Snake | _Block | _Generator | _LogMel) -> int:
    return sum(part.num_bytes for part in parts)


class _Conv:
    """A convolution over signals that lie channels last, their length kept."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, *, dilation: int = 1, padding: int
    ) -> None:
        """weight: (N, C, taps). padding: silence before the signal."""
        self.columns = weight.shape[0]
        self._geometry = {"taps": weight.shape[2], "dilation": dilation, "padding": padding}
        self._weight = _kernels().pack(weight, dtype)
        self._bias = weight.new_zeros(self.columns, dtype=torch.float32) if bias is None else bias.float()
        self.num_bytes = self._weight.nbytes + self._bias.nbytes

    def __call__(self, parts: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        _kernels().conv(parts, self._weight, self._bias, out, residual=residual, **self._geometry)

    @classmethod
    def of(cls, conv: nn.Conv1d, dtype: torch.dtype) -> _Conv:
        return cls(conv.weight, conv.bias, dtype, dilation=conv.dilation[0], padding=conv.padding[0])

    @classmethod
    def of_transposed(cls, conv: nn.ConvTranspose1d, dtype: torch.dtype) -> _Conv:
        """As a convolution that makes the `stride` samples of a place as so many groups of channels.

        Sample j of place q takes x[q - m] with tap j + padding + stride * m, where that is one.
        """
        stride, padding, taps = conv.stride[0], conv.padding[0], conv.kernel_size[0]
        first, last = -((padding + stride - 1) // stride), (taps - 1 - padding) // stride
        count = last - first + 1
        before = -(padding + stride * first)
        by_place = F.pad(conv.weight, (before, stride * count - taps - before)).unflatten(2, (count, stride))
        weight = by_place.flip(2).permute(3, 1, 0, 2).flatten(0, 1)
        return cls(weight, conv.bias.repeat(stride), dtype, padding=last)


class _Snake:
    def __init__(self, activation: AntiAliasedSnake) -> None:
        act = activation.act
        self._up = 2 * activation.upsample.filter.float().flatten()
        self._down = activation.downsample.lowpass.filter.float().flatten()
        self._frequency, self._gain = (values.flatten() for values in act.coefficients())
        self.num_bytes = sum(tensor.nbytes for tensor in (self._up, self._down, self._frequency, self._gain))

    def __call__(self, x: Tensor, parts: Tensor) -> None:
        _kernels().snake(x, self._up, self._down, self._frequency, self._gain, parts)


class _Block:
    """An AMP block."""

    def __init__(self, block: AMPBlock, dtype: torch.dtype) -> None:
        convs = ((_Conv.of(conv, dtype) for conv in group) for group in (block.convs1, block.convs2))
        acts = ((_Snake(act) for act in group) for group in (block.acts1, block.acts2))
        self._steps = list(zip(*convs, *acts))
        self.num_bytes = sum(_num_bytes(*step) for step in self._steps)

    def __call__(self, x: Tensor, hidden: Tensor, parts: Tensor, out: Tensor) -> None:
        """x: (B, L, C). hidden and parts are scratch. out: written; x will do."""
        for conv1, conv2, act1, act2 in self._steps:
            act1(x, parts)
            conv1(parts, hidden)
            act2(hidden, parts)
            conv2(parts, out, residual=x)
            x = out


class _Generator:
    def __init__(self, generator: Generator, dtype: torch.dtype) -> None:
        self._pre = _Conv.of(generator.conv_pre, dtype)
        self._ups = [(up.stride[0], _Conv.of_transposed(up, dtype)) for up in generator.ups]
        blocks = [_Block(block, dtype) for block in generator.resblocks]
        count = generator.blocks_per_stage
        self._stages = [blocks[first : first + count] for first in range(0, len(blocks), count)]
        self._act_post = _Snake(generator.act_post)
        self._post = _Conv.of(generator.conv_post, dtype)
        ups = (up for _, up in self._ups)
        self.num_bytes = _num_bytes(self._pre, *ups, *blocks, self._act_post, self._post)

    def __call__(self, mel: Tensor, workspace: Workspace) -> Tensor:
        """Log-mel (B, T, C) to a stereo waveform (B, 2, rate * T), not clamped."""
        kernels = _kernels()
        batch, length, channels = mel.shape
        source = workspace.signal(0, batch, length, channels).copy_(mel)
        parts = workspace.parts_of(batch, length, channels)
        kernels.mean([source], parts)
        channels = self._pre.columns
        x = workspace.signal(0, batch, length, channels)
        self._pre(parts, x)
        signals = [x]
        for (rate, up), blocks in zip(self._ups, self._stages):
            # The parts of the mean are all that goes on, so every signal is free again.
            parts = workspace.parts_of(batch, length, channels)
            kernels.mean(signals, parts)
            x = workspace.signal(0, batch, length, up.columns)
            up(parts, x)
            length, channels = length * rate, up.columns // rate
            x, hidden, *outs = (workspace.signal(i, batch, length, channels) for i in range(_SIGNALS))
            parts = workspace.parts_of(batch, length, channels)
            # The last block needs no more than the stage's input, and leaves its result there.
            signals = [*outs, x]
            for block, out in zip(blocks, signals):
                block(x, hidden, parts, out)
        x = workspace.signal(1, batch, length, channels)
        kernels.mean(signals, x)
        self._act_post(x, parts)
        waveform = workspace.signal(0, batch, length, STEREO)
        self._post(parts, waveform)
        return waveform.transpose(1, 2).contiguous()


class _LogMel:
    """CausalLogMel, its windows as a convolution over rows of hop_length samples."""

    def __init__(self, log_mel: CausalLogMel, dtype: torch.dtype) -> None:
        self._log_mel = log_mel
        self._hop_length = log_mel.hop_length
        basis = log_mel.stft_fn.forward_basis
        rows = -(-basis.shape[2] // self._hop_length)
        windows = F.pad(basis.squeeze(1), (rows * self._hop_length - basis.shape[2], 0))
        weight = windows.unflatten(1, (rows, self._hop_length)).transpose(1, 2)
        self._stft = _Conv(weight, None, dtype, padding=rows - 1)
        self.num_bytes = self._stft.num_bytes

    def __call__(self, waveform: Tensor, workspace: Workspace) -> Tensor:
        """A waveform (B, C, N) to log-mel (B, frames, C * mel bins)."""
        batch, channels, samples = waveform.shape
        frames = samples // self._hop_length
        rows = workspace.signal(0, batch * channels, frames, self._hop_length)
        rows.copy_(waveform.reshape(rows.shape))
        parts = workspace.parts_of(*rows.shape)
        _kernels().mean([rows], parts)
        spectrum = workspace.signal(1, batch * channels, frames, self._stft.columns)
        self._stft(parts, spectrum)
        mel = self._log_mel.of_spectrum(spectrum.transpose(1, 2))
        return mel.unflatten(0, (batch, channels)).permute(0, 3, 1, 2).flatten(2)
