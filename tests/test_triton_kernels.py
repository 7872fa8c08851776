"""The video VAEs' Triton kernels in Triton's interpreter against the plain paths. A process of its own, see
triton_interpreter.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from test_neighbourhood_attention import definition, random_qkv
from triton_interpreter import check_cases, needs_triton

HERE = Path(__file__).parent
ATTENTION = [
    # grid, window, heads, head_dim, batch, tile, keys a step
    ((5, 4, 9), (3, 3, 5), 1, 16, 1, (4, 4, 8), 32),
    ((3, 5, 5), (3, 5, 5), 2, 16, 2, (4, 4, 4), 32),
    ((5, 5, 3), (2, 4, 3), 1, 24, 1, (4, 4, 2), 16),
    ((4, 4, 4), (3, 1, 3), 1, 64, 1, (4, 4, 8), 64),
]
CONV = [
    # (clips, frames, height, width), channels, dtype; odd sizes, one frame, one cell, rows that do not fill a program
    ((1, 1, 1, 1), (4, 640), torch.float32),
    ((2, 2, 3, 5), (24, 128), torch.float32),
    ((1, 2, 9, 4), (24, 128), torch.float16),
    ((1, 3, 3, 5), (64, 640), torch.bfloat16),
]
STRIDES = [(2, 2, 2), (2, 1, 1), (1, 2, 2)]
POINTWISE = [(16, torch.float32), (24, torch.float16), (64, torch.bfloat16)]  # head_dim, dtype


@needs_triton
def test_the_kernels_compute_what_the_plain_paths_do():
    cases = len(CONV) * (5 * 2 + 16 + 2)
    check_cases(__file__, len(ATTENTION) + 4 * len(POINTWISE) + cases + 4)


def main() -> None:
    """Print name, worst error and tolerance of every case."""
    torch.set_num_threads(1)
    for index, case in enumerate(ATTENTION):
        print(f"attention {index}", attention_error(*case, in_place=not index), 4e-3)
    for head_dim, dtype in POINTWISE:
        tolerance = 8 * torch.finfo(dtype).eps
        print("split_norm_rope", split_norm_rope_error(head_dim, dtype), tolerance)
        print("silu_mul", silu_mul_error(dtype), tolerance)
        print("rms_norm", rms_norm_error(head_dim, dtype), tolerance)
        print("add_cells", add_cells_error(head_dim, dtype), tolerance)
    for shape, widths, dtype in CONV:
        for name, error in conv_errors(shape, widths, dtype):
            # The plain path rounds up to four times, the sums reach 6.
            print(name, error, 16 * torch.finfo(dtype).eps)
    for name, error in conv_network_errors():
        print(name, error, 3e-5)


def attention_error(grid, window, heads, head_dim, batch, tile, block_keys, *, in_place) -> float:
    from ltx_runtime.video_vae.neighbourhood_kernel import KernelShape, attend

    q, k, v = random_qkv(grid, heads, head_dim, torch.float16, batch=batch)
    exact = definition(q, k, v, window)
    out = q if in_place else torch.full_like(q, float("nan"))
    attend(q, k, v, window, out, KernelShape(tile=tile, block_keys=block_keys))
    return (out.double() - exact).abs().max().item()


def split_norm_rope_error(head_dim, dtype) -> float:
    from ltx_runtime.video_vae import pointwise, pointwise_kernels
    from ltx_runtime.video_vae.rotary import RotaryTables

    count, first, heads = 40, 13, 2
    tables = RotaryTables.of((3, 4, 5), head_dim, torch.device("cpu"))
    generator = torch.Generator().manual_seed(head_dim)
    qkv = torch.randn(count, 3 * heads * head_dim, generator=generator).to(dtype)
    weights = [torch.randn(head_dim, generator=generator) for _ in range(2)]
    results = []
    for module in (pointwise, pointwise_kernels):
        q = torch.zeros(count, 4, head_dim, dtype=dtype)  # two heads of four are written
        k, v = (torch.zeros(count, heads, head_dim, dtype=dtype) for _ in range(2))
        module.split_norm_rope(qkv, *weights, tables, first, q[:, 1:3], k, v)
        results.append((q, k, v))
    return worst_of((a.double() - b.double()).abs().max() for a, b in zip(*results, strict=True))


def rms_norm_error(channels, dtype) -> float:
    from ltx_runtime.video_vae import pointwise, pointwise_kernels

    generator = torch.Generator().manual_seed(channels)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((301, channels), (channels,)))
    x *= 10.0 ** torch.linspace(-5, 2, 301)[:, None].to(dtype)  # eps counts in the first rows
    plain, fused = (torch.full_like(x, float("nan")) for _ in range(2))
    pointwise.rms_norm(x, weight, plain)
    pointwise_kernels.rms_norm(x, weight, fused)
    return relative_error(plain, fused)


def worst_of(errors) -> float:
    """NaN where one of them is, which Python's max would drop."""
    return torch.tensor(list(errors)).max().item()


def relative_error(a, b) -> float:
    return ((a.double() - b.double()).abs() / (1 + a.double().abs())).max().item()


def add_cells_error(channels, dtype) -> float:
    """All planes of cells, from the first with a frame less to the last with frames that are not there, in parts."""
    from ltx_runtime.video_vae import pointwise, pointwise_kernels

    generator = torch.Generator().manual_seed(channels)
    errors = []
    for (p1, p2, p3), dropped, frames in (((2, 2, 2), 1, 7), ((2, 2, 2), 0, 9), ((1, 2, 1), 0, 4), ((3, 1, 2), 2, 5)):
        rows, columns, planes = 3, 5, 6
        x = torch.randn(frames, rows * p2, columns * p3, channels, generator=generator).to(dtype)
        grown = torch.randn(planes, rows, columns, p1 * p2 * p3 * channels, generator=generator).to(dtype)
        plain, fused = x.clone(), x.clone()
        for first in (0, 2, 4):
            for module, target in ((pointwise.add_cells_, plain), (pointwise_kernels.add_cells, fused)):
                module(target, grown[first : first + 2], (p1, p2, p3), first, dropped)
        assert not torch.equal(plain[-1], x[-1])
        errors.append(relative_error(plain, fused))
    return worst_of(errors)


def silu_mul_error(dtype) -> float:
    from ltx_runtime.video_vae import pointwise, pointwise_kernels

    generator = torch.Generator().manual_seed(1)
    gate, up = (torch.randn(33, 70, generator=generator).to(dtype) for _ in range(2))
    fused = gate.clone()
    pointwise_kernels.silu_mul(fused, up)
    return (pointwise.silu_mul_(gate, up).double() - fused.double()).abs().max().item()


@contextmanager
def fused_on_the_cpu() -> Iterator[None]:
    """conv_pointwise sends CPU tensors of any dtype to the kernels, and a kernel that fails raises."""
    from ltx_runtime.video_vae import conv_pointwise

    asked, tried = conv_pointwise.triton_refusal, conv_pointwise.try_triton
    conv_pointwise.triton_refusal = lambda device, dtype, owner: None
    conv_pointwise.try_triton = lambda launch, *_: launch() is None
    try:
        yield
    finally:
        conv_pointwise.triton_refusal, conv_pointwise.try_triton = asked, tried


def conv_errors(shape, widths, dtype) -> Iterator[tuple[str, float]]:
    """Fused against plain. Activations are some frames of more, as in a window, with a number in between that must not
    be touched."""
    from ltx_runtime.video_vae import conv_pointwise

    clips, frames, height, width = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def activations(channels, frames=frames, height=height, width=width):
        x = torch.randn(clips, frames + 2, height, width, channels, generator=generator)
        x[:, 1, -1, -1] *= 1e-4  # so small that PixelNorm's epsilon shows
        return x.to(dtype).movedim(-1, 1)[:, :, 1:-1]

    def bias(channels):
        return torch.randn(channels, generator=generator).to(dtype)

    def error(run, *tensors) -> float:
        """The worst over the result, or where there is none, over what run was given and all around it."""
        results = []
        for mode in (nullcontext, fused_on_the_cpu):
            given = [x if x is None or x.ndim < 5 else x._base.clone().movedim(-1, 1)[:, :, 1:-1] for x in tensors]
            with mode():
                result = run(*given)
            changed = [x._base for x in given if x is not None and x.ndim == 5]
            results.append(changed if result is None else [result])
        differences = [(a.double() - b.double()).abs().max() for a, b in zip(*results, strict=True)]
        return torch.stack(differences).max().item()

    def finish(keep, activate):
        """Without keep x may be overwritten, so its copy is."""

        def run(x, b, residual, out):
            conv_pointwise.finish(x if keep else x.clone(), b, residual, keep=keep, out=out, activate=activate)

        return run

    for channels in widths:
        x, residual, out = (activations(channels) for _ in range(3))
        b = bias(channels)
        yield f"activate {channels}", error(finish(False, True), x, b, None, out)
        yield f"activate {channels} without bias", error(finish(False, True), x, None, None, out)
        yield f"add {channels}", error(finish(True, False), x, b, residual, None)
        yield f"add and activate {channels}", error(finish(True, True), x, b, residual, out)
        yield f"sum {channels}", error(finish(False, False), x, b, residual, out)
    x = activations(48)
    yield "add without residual", error(finish(True, False), x, bias(48), None, None)
    yield "unpatchify", error(lambda x: conv_pointwise.unpatchify(x, 4), x)
    for stride in STRIDES:
        growth = stride[0] * stride[1] * stride[2]
        for channels in (3, 128):
            x, b = activations(channels * growth), bias(channels * growth)
            for skip in range(stride[0]):
                name = f"depth_to_space {stride} {channels} {skip}"
                yield name, error(lambda x, b, s=skip, by=stride: conv_pointwise.depth_to_space(x, b, by, s), x, b)
        grid = [size * step for size, step in zip((frames, height, width), stride)]
        for channels, group in ((5, 1), (64, growth)):
            given = activations(channels, *grid), bias(channels), activations(channels * group, *grid)
            name = f"add_space_to_depth {stride} {channels} {group}"
            yield name, error(lambda *given, by=stride: conv_pointwise.add_space_to_depth(*given, by), *given)


def conv_network_errors() -> Iterator[tuple[str, float]]:
    """The tiny VAE with every pass fused against the plain one, whole and streamed."""
    from ltx_runtime.video_vae import DecodePlan, EncodePlan, load_video_encoder, load_video_vae

    tiny = HERE / "goldens" / "video_vae_conv_tiny.safetensors"
    vae, encoder = (load(tiny, device="cpu", dtype=torch.float32) for load in (load_video_vae, load_video_encoder))
    latent = torch.randn(2, 4, 3, 1, 2, generator=torch.Generator().manual_seed(0))
    images = torch.rand(17, 32, 64, 3, generator=torch.Generator().manual_seed(0))
    for name, run in (
        ("decode", lambda chunk: vae.decode_raw(latent, plan=DecodePlan(chunk, 0, "set by a test"))),
        ("encode", lambda chunk: encoder.encode(images, plan=EncodePlan(chunk, 0, 0, 0, "set by a test"))),
    ):
        plain = run(3)
        for chunk in (3, 1):
            with fused_on_the_cpu():
                fused = run(chunk)
            yield f"{name} in chunks of {chunk}", (fused - plain).abs().max().item()


if __name__ == "__main__":
    main()
