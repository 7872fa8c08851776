"""The denoiser's fused passes in Triton's interpreter: the kernel against float64, and whole forward passes against the
goldens that the plain path is held to. A process of its own, see triton_interpreter.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch
import torch.nn.functional as F
from golden_kinds import metadata, worst_error
from golden_kinds.forward import TOLERANCE, load_case
from golden_kinds.transformer_weights import golden_transformer
from triton_interpreter import check_cases, let_the_interpreter_count, needs_triton

HERE = Path(__file__).parent
EPS = 1e-6
# batch, tokens, width: a width that is no power of two, one that no vector load divides, one token
SHAPES = [(1, 1, 64), (2, 5, 96), (2, 3, 33)]
# levels of the tables, rows of the index (None: a level a sample)
LEVELS = [(1, None), ("batch", None), (2, 1), (3, "batch")]
# The interpreter cuts a bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16]
TILES = [1, 3]  # tokens a program
GOLDENS = sorted((HERE / "goldens").glob("transformer_fwd_*.safetensors"))
FORWARDS = [(path, "reference") for path in GOLDENS] + [(path, "comfyui") for path in GOLDENS if "stg" in path.stem]


@needs_triton
def test_the_fused_passes_compute_what_the_plain_ones_do():
    check_cases(__file__, len(SHAPES) * len(LEVELS) * len(DTYPES) * len(TILES) + len(DTYPES) + len(FORWARDS))


def main() -> None:
    """Print name, worst error and tolerance of every case."""
    let_the_interpreter_count()
    torch.set_num_threads(1)
    # On a CPU the operator computes GELU by erf.
    torch._addmm_activation = lambda bias, x, weight, use_gelu: F.gelu(torch.addmm(bias, x, weight), approximate="tanh")
    for shape, levels, dtype, tile in itertools.product(SHAPES, LEVELS, DTYPES, TILES):
        print(f"passes {shape} {levels} {dtype} {tile}", passes_error(shape, levels, dtype, tile), 0.51)
    for dtype in DTYPES:
        print(f"context {dtype}", context_error(dtype), 0.51)
    for path, compatibility in FORWARDS:
        forward, model = load_case(path), golden_transformer(path.parent / metadata(path)["weights"])
        constants, modulation, plain = forward.run(model, compatibility=compatibility)
        assert not constants.fused
        tokens = (forward.golden.get(f"in.{stream}.latent") for stream in plain)
        fused = model(*tokens, dataclasses.replace(constants, fused=True), modulation)
        errors = [worst_error(a, b) for a, b in zip(fused, plain.values()) if b is not None]
        print(f"{path.stem} {compatibility}", max(errors), TOLERANCE)


def passes_error(shape, levels, dtype, tile) -> float:
    """Worst error of a stream's way through three passes, in roundings of its dtype."""
    from ltx_runtime.transformer import residual_kernels
    from ltx_runtime.transformer.residual import ResidualStream

    residual_kernels.TOKENS = tile
    batch, tokens, width = shape
    rows, index_rows = (batch if value == "batch" else value for value in levels)
    generator = torch.Generator().manual_seed(tokens + width)

    def values(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    index = None if index_rows is None else torch.randint(rows, (index_rows, tokens), generator=generator)
    x = values(*shape) * 10.0 ** torch.linspace(-4, 1, tokens)[:, None]  # eps counts in the first tokens
    x = x.to(dtype)
    tables = [values(rows, width) for _ in range(7)]
    sample_gate, out, second, third = values(batch, width), *(values(*shape) for _ in range(3))
    stream = ResidualStream(x.clone(), index, EPS, fused=True)
    exact = Exact(x, index, dtype)
    errors = []

    def normed(*modulations, norm="rms"):
        for got, expected in zip(stream.normed(*modulations, norm=norm), exact.normed(modulations, norm)):
            assert got.dtype == dtype
            errors.append(roundings(got, expected))

    normed(tables[:2])
    for added, gate, per_sample in ((out, tables[2], False), (second, sample_gate, True)):
        stream.add(added.clone(), gate, per_sample=per_sample)
        exact.add(added, gate, per_sample)
        normed(tables[3:5], tables[5:7])
    errors.append(roundings(stream.tokens(), exact.x))
    # What is pending is added alone before the next, and by the last norm.
    for added in (third, out):
        stream.add(added, tables[2])
        exact.add(added, tables[2], False)
    normed(tables[:2], norm="layer")
    return max(errors)


class Exact:
    """The same in float64, rounded where the stream is stored."""

    def __init__(self, x, index, dtype):
        self.x, self._index, self._dtype = x, index, dtype

    def _rows(self, table, per_sample=False):
        table = table.double()
        return table[:, None] if per_sample or self._index is None else table[self._index]

    def add(self, out, gate, per_sample):
        self.x = (self.x.double() + out.double() * self._rows(gate, per_sample)).to(self._dtype)

    def normed(self, modulations, norm):
        x = self.x.double()
        if norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return [x * self._rows(scale) + self._rows(shift) for scale, shift in modulations]


def context_error(dtype) -> float:
    from ltx_runtime.transformer.residual import ResidualStream

    generator = torch.Generator().manual_seed(3)
    context, scale, shift = (torch.randn(2, n, 48, generator=generator).to(dtype) for n in (5, 1, 1))
    stream, errors = ResidualStream(context, None, EPS, fused=True), []
    for samples in (1, 2):
        rows = scale[:samples, 0], shift[:samples, 0]
        expected = context.double() * rows[0].double()[:, None] + rows[1].double()[:, None]
        errors.append(roundings(stream.modulated_context(context, *rows), expected))
    return max(errors)


def roundings(got, exact) -> float:
    """Worst distance in units of the last place: half of one is a single rounding. Float32 is computed in float32, its
    roundings before the last count too."""
    eps = torch.finfo(got.dtype).eps
    room = 64 if got.dtype == torch.float32 else 1
    return ((got.double() - exact.double()).abs() / (eps * room * exact.double().abs().clamp_min(0.1))).max().item()


if __name__ == "__main__":
    main()
