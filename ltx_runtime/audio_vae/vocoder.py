"""The vocoder: stereo log-mel to a 16 kHz waveform, and its bandwidth extension to 48 kHz. All of it in float32.

Two generators of the BigVGAN-v2 kind; the second one hears the first through a mel of its own and adds what 16 kHz
can't hold.
Source: audio.md sections 4 and 5.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import STEREO, AudioVAEConfig, GeneratorConfig
from .filters import Downsampling, Upsampling, hann_sinc_kernel

FILTER_TAPS = 12
MEL_FLOOR = 1e-5
_SNAKE_EPS = 1e-9


class SnakeBeta(nn.Module):
    """v + sin(v * exp(alpha))^2 / (exp(beta) + 1e-9), alpha and beta per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels))
        self.beta = nn.Parameter(torch.empty(channels))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """exp(alpha) and 1 / (exp(beta) + 1e-9): (channels, 1) float32."""
        frequency, gain = self.alpha.float().exp(), (self.beta.float().exp() + _SNAKE_EPS).reciprocal_()
        return frequency.unsqueeze(1), gain.unsqueeze(1)

    def prepare(self) -> None:
        self._frequency, self._gain = self.coefficients()

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, (x * self._frequency).sin_().square_(), self._gain)


class _StoredFilter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.empty(1, 1, FILTER_TAPS))


class _StoredLowpass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lowpass = _StoredFilter()


class AntiAliasedSnake(nn.Module):
    """SnakeBeta at twice the rate, so that the overtones it makes do not fold back. Uses the filters of the file."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.act = SnakeBeta(channels)
        self.upsample = _StoredFilter()
        self.downsample = _StoredLowpass()
        self._channels = channels

    def prepare(self) -> None:
        self.act.prepare()
        up, down = self.upsample.filter.flatten(), self.downsample.lowpass.filter.flatten()
        self._up = Upsampling(2 * up, 2, FILTER_TAPS // 2 - 1, self._channels)
        self._down = Downsampling(down, 2, self._channels)

    def forward(self, x: Tensor) -> Tensor:
        return self._down(self.act(self._up(x)))


class AMPBlock(nn.Module):
    """x += conv2(A2(conv1(A1(x)))), once for each dilation of conv1."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, dilation=d, padding=kernel // 2 * d) for d in dilations
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(channels, channels, kernel, padding=kernel // 2) for _ in dilations)
        self.acts1 = nn.ModuleList(AntiAliasedSnake(channels) for _ in dilations)
        self.acts2 = nn.ModuleList(AntiAliasedSnake(channels) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for conv1, conv2, act1, act2 in zip(self.convs1, self.convs2, self.acts1, self.acts2):
            x = conv2(act2(conv1(act1(x)))).add_(x)
        return x


class Generator(nn.Module):
    """Log-mel (B, in_channels, T) to a stereo waveform (B, 2, rate * T), not clamped."""

    def __init__(self, config: GeneratorConfig, in_channels: int) -> None:
        super().__init__()
        self.conv_pre = nn.Conv1d(in_channels, config.initial_channels, 7, padding=3)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        channels = config.initial_channels
        for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes):
            self.ups.append(nn.ConvTranspose1d(channels, channels // 2, kernel, rate, padding=(kernel - rate) // 2))
            channels //= 2
            for block_kernel, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilations):
                self.resblocks.append(AMPBlock(channels, block_kernel, dilations))
        self.act_post = AntiAliasedSnake(channels)
        self.conv_post = nn.Conv1d(channels, STEREO, 7, padding=3, bias=False)
        self.blocks_per_stage = len(config.resblock_kernel_sizes)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.conv_pre(mel)
        for stage, up in enumerate(self.ups):
            x = up(x)
            first, *others = self.resblocks[stage * self.blocks_per_stage :][: self.blocks_per_stage]
            total = first(x)
            for block in others:
                total += block(x)
            x = total.div_(self.blocks_per_stage)
        return self.conv_post(self.act_post(x))


class _StoredBases(nn.Module):
    """Windowed Fourier bases, real rows above imaginary ones. inverse_basis is in the file and not used."""

    def __init__(self, n_fft: int) -> None:
        super().__init__()
        rows = 2 * (n_fft // 2 + 1)
        self.forward_basis = nn.Parameter(torch.empty(rows, 1, n_fft))
        self.inverse_basis = nn.Parameter(torch.empty(rows, 1, n_fft))


class CausalLogMel(nn.Module):
    """Log-mel (B, C, mel bins, N / hop) of a waveform (B, C, N), N a multiple of hop. No window sees later samples."""

    def __init__(self, n_fft: int, hop_length: int, mel_bins: int) -> None:
        super().__init__()
        self.mel_basis = nn.Parameter(torch.empty(mel_bins, n_fft // 2 + 1))
        self.stft_fn = _StoredBases(n_fft)
        self.hop_length = hop_length
        self._past = n_fft - hop_length

    def forward(self, waveform: Tensor) -> Tensor:
        batch, channels, _ = waveform.shape
        padded = F.pad(waveform.flatten(0, 1).unsqueeze(1), (self._past, 0))
        spectrum = F.conv1d(padded, self.stft_fn.forward_basis, stride=self.hop_length)
        return self.of_spectrum(spectrum).unflatten(0, (batch, channels))

    def of_spectrum(self, spectrum: Tensor) -> Tensor:
        """Log-mel (n, mel bins, frames) of a spectrum (n, rows, frames), real rows above imaginary ones."""
        real, imaginary = spectrum.chunk(2, dim=1)
        magnitude = torch.addcmul(real.square(), imaginary, imaginary).sqrt_()
        # As a convolution, because a host may have allowed TF32 for matrix products (network.py).
        mel = F.conv1d(magnitude, self.mel_basis.unsqueeze(2))
        return mel.clamp_(min=MEL_FLOOR).log_()


class Vocoder(nn.Module):
    """Both generators and the mel between them, under the file's names. Call `prepare` once the weights are there."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        self.vocoder = Generator(config.vocoder, STEREO * config.mel_bins)
        self.bwe_generator = Generator(config.extension, STEREO * config.extension_mel_bins)
        self.mel_stft = CausalLogMel(config.extension_n_fft, config.extension_hop_length, config.extension_mel_bins)
        self._ratio = config.extension_ratio

    def prepare(self) -> None:
        """Compute what depends on the weights alone. They must be float32."""
        for module in self.modules():
            if isinstance(module, AntiAliasedSnake):
                module.prepare()
        self.skip = self.make_skip()

    def make_skip(self) -> Upsampling:
        """What takes a 16 kHz waveform to 48 kHz."""
        kernel = (hann_sinc_kernel(self._ratio) * self._ratio).to(self.mel_stft.mel_basis.device, torch.float32)
        return Upsampling(kernel, self._ratio, kernel.shape[0] // 2, STEREO)

    def waveform(self, mel: Tensor) -> Tensor:
        """Log-mel (B, 2, T, mel bins) to a waveform (B, 2, N) at 16 kHz, not clamped."""
        return self.vocoder(mel.transpose(2, 3).flatten(1, 2))

    def extend(self, waveform: Tensor) -> Tensor:
        """A waveform (B, 2, N) as `waveform` gives it, to (B, 2, 3N) at 48 kHz, not clamped."""
        clamped = waveform.clamp(-1, 1)
        residual = self.bwe_generator(self.mel_stft(clamped).flatten(1, 2))
        return residual.add_(self.skip(clamped))
