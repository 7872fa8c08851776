"""The vocoder's Triton kernels in Triton's interpreter against the plain modules, on odd lengths and widths.

A process of its own, see triton_interpreter.py. The interpreter's matrix product can't do bf16: the parts are
float16 here, 11 bits each, and the packed weights too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from triton_interpreter import check_cases, let_the_interpreter_count, needs_triton

ROUNDING = 4e-6  # of the largest value
SNAKES = [
    # batch, length, channels, positions a segment
    (2, 37, 24, 4),
    (1, 1, 12, 4),
    (1, 3, 16, 8),
    (2, 70, 5, 16),
]
CONVS = [
    # batch, length, channels in, out, taps, dilation, residual
    (2, 37, 24, 24, 7, 3, True),
    (1, 1, 16, 20, 11, 5, False),
    (1, 150, 64, 130, 3, 1, True),
    (1, 20, 96, 2, 7, 1, False),
    (2, 20, 80, 18, 7, 1, False),
    (1, 9, 6, 5, 3, 1, True),
    (1, 40, 48, 48, 3, 5, True),
]
TRANSPOSED = [(1, 7, 16, 8, 11, 5), (2, 5, 8, 6, 4, 2), (1, 1, 8, 4, 12, 6)]  # batch, length, in, out, taps, stride
SINES = [(10.0, 5e-7), (1e4, 1e-6), (1e5, 2e-6)]  # largest argument, tolerance


@needs_triton
def test_the_kernels_compute_what_the_modules_do():
    check_cases(__file__, len(SNAKES) + len(CONVS) + len(TRANSPOSED) + len(SINES) + 5)


def main() -> None:
    """Print name, worst error and tolerance of every case."""
    let_the_interpreter_count()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in SNAKES:
            print(f"snake {case}", snake_error(*case), ROUNDING)
        for case in CONVS:
            print(f"conv {case}", conv_error(*case), ROUNDING)
        for case in TRANSPOSED:
            print(f"transposed {case}", transposed_error(*case), ROUNDING)
        for largest, tolerance in SINES:
            print(f"sine up to {largest}", sine_error(largest), tolerance)
        for count in (1, 3):
            print(f"mean of {count}", mean_error(count), ROUNDING)
        for name, error in vocoder_errors():
            print(name, error, ROUNDING)


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected.double()).abs().max() / expected.abs().max()).item()


def empty_parts(*shape: int) -> torch.Tensor:
    return torch.full((3, *shape), float("nan"), dtype=torch.float16)


def random_activation(channels: int):
    from ltx_runtime.audio_vae.vocoder import AntiAliasedSnake

    activation = AntiAliasedSnake(channels)
    for parameter in activation.parameters():
        parameter.normal_()
    activation.prepare()
    return activation


def snake_error(batch: int, length: int, channels: int, positions: int) -> float:
    from ltx_runtime.audio_vae.vocoder_kernels import SnakeTile, snake

    activation = random_activation(channels)
    x = 3 * torch.randn(batch, channels, length)
    parts = empty_parts(batch, length, channels)
    frequency, gain = (values.flatten() for values in activation.act.coefficients())
    up, down = 2 * activation.upsample.filter.flatten(), activation.downsample.lowpass.filter.flatten()
    tile = SnakeTile(segments=4, positions=positions, channels=16)
    snake(x.transpose(1, 2).contiguous(), up, down, frequency, gain, parts, tile)
    return relative(parts.float().sum(0).transpose(1, 2), activation(x))


def conv_error(batch, length, channels, columns, taps, dilation, adds) -> float:
    from ltx_runtime.audio_vae import vocoder_kernels as kernels

    x, bias = torch.randn(batch, channels, length), torch.randn(columns)
    weight = torch.randn(columns, channels, taps).half()
    parts = empty_parts(batch, length, channels)
    kernels.mean([x.transpose(1, 2).contiguous()], parts)
    out = torch.randn(batch, length, columns)
    padding = taps // 2 * dilation
    expected = F.conv1d(x.double(), weight.double(), bias.double(), dilation=dilation, padding=padding).transpose(1, 2)
    expected += out if adds else 0
    geometry = {"taps": taps, "dilation": dilation, "padding": padding}
    packed = kernels.pack(weight, torch.float16)
    kernels.conv(parts, packed, bias, out, residual=out if adds else None, **geometry)
    return relative(out, expected)


def transposed_error(batch, length, channels, columns, taps, stride) -> float:
    from ltx_runtime.audio_vae import vocoder_kernels as kernels
    from ltx_runtime.audio_vae.fused_vocoder import _Conv

    up = torch.nn.ConvTranspose1d(channels, columns, taps, stride, padding=(taps - stride) // 2)
    up.weight.copy_(up.weight.half())
    x = torch.randn(batch, channels, length)
    parts = empty_parts(batch, length, channels)
    kernels.mean([x.transpose(1, 2).contiguous()], parts)
    conv = _Conv.of_transposed(up, torch.float16)
    out = torch.empty(batch, length, conv.columns)
    conv(parts, out)
    return relative(out.view(batch, stride * length, columns).transpose(1, 2), up(x))


def sine_error(largest: float) -> float:
    import triton
    import triton.language as tl

    global _sin_squared  # where the interpreter looks
    from ltx_runtime.audio_vae.vocoder_kernels import _sin_squared

    @triton.jit
    def squares(z_ptr, out_ptr, COUNT: tl.constexpr):
        index = tl.arange(0, COUNT)
        tl.store(out_ptr + index, _sin_squared(tl.load(z_ptr + index)))

    z = largest * (2 * torch.rand(1 << 14) - 1)
    out = torch.empty_like(z)
    squares[(1,)](z, out, COUNT=z.numel())
    return (out.double() - z.double().sin().square()).abs().max().item()


def mean_error(count: int) -> float:
    from ltx_runtime.audio_vae.vocoder_kernels import mean

    signals = [torch.randn(1, 33, 7) for _ in range(count)]
    expected = sum(signals) / count
    out, parts = torch.empty(1, 33, 7), empty_parts(1, 33, 7)
    mean(signals, out)
    mean(signals, parts)
    errors = torch.tensor([relative(out, expected), relative(parts.float().sum(0), expected)])
    return errors.max().item()  # Python's max would drop a NaN


def vocoder_errors():
    """(name, error) of both halves of a whole vocoder, its workspace full of NaN."""
    from ltx_runtime.audio_vae import AudioVAENetwork, vocoder_kernels
    from ltx_runtime.audio_vae.fused_vocoder import FusedVocoder, Workspace
    from ltx_runtime.resident_weights import build_on_meta
    from ltx_runtime.tiny import fill_random, tiny_audio_vae_config

    config = tiny_audio_vae_config()
    # A step of a segment costs the interpreter a hundred calls of NumPy.
    vocoder_kernels.SNAKE = vocoder_kernels.SnakeTile(segments=16, positions=4, channels=16)

    def small(channels: int, rates: tuple[int, ...], kernels: tuple[int, ...]):
        return replace(
            config.vocoder,
            initial_channels=channels,
            upsample_rates=rates,
            upsample_kernel_sizes=kernels,
            resblock_kernel_sizes=(3, 7, 5),
            resblock_dilations=((1,), (3,), (1,)),
        )

    config = replace(
        config,
        vocoder=small(16, (5,), (11,)),
        extension=small(8, (15,), (17,)),
        extension_hop_length=5,
        extension_n_fft=24,
        mel_bins=8,
        extension_mel_bins=8,
    )
    network = build_on_meta(lambda: AudioVAENetwork(config))
    fill_random(network, device="cpu")
    network.prepare(plain=True)
    vocoder = network.vocoder
    fused = FusedVocoder(vocoder, torch.float16)
    workspace = Workspace.make(config, 2, 3, torch.device("cpu"), torch.float16)
    for memory in (workspace.parts, *workspace.signals):
        memory.fill_(float("nan"))
    mel = 2 * torch.randn(2, 2, 3, 8) - 4
    waveform = vocoder.waveform(mel)
    yield "waveform", relative(fused.waveform(mel, workspace), waveform)
    yield "extension", relative(fused.extend(waveform, workspace), vocoder.extend(waveform))
    held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors_of(vars(fused))}
    yield "bytes of weights", abs(fused.num_bytes - sum(held.values()))


def tensors_of(tree: object) -> Iterator[torch.Tensor]:
    """All that own objects and containers hold, but for modules' and for the upsampling of the 16 kHz signal."""
    from ltx_runtime.audio_vae.filters import Upsampling

    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (torch.nn.Module, Upsampling)):
        return
    elif isinstance(tree, (list, tuple, dict)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(item)
    elif hasattr(tree, "__dict__"):
        yield from tensors_of(vars(tree))


if __name__ == "__main__":
    main()
