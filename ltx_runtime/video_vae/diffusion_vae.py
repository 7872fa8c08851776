"""The network of the diffusion video decoder, with the parameter names of the published file.

Reading order: `DiffusionDecoder.trunk`, `render`, `run_diffusion_blocks`. Latents go through three stages on ever finer
grids, once for the whole clip. The fourth and the fifth, which starts from noise and is given the fourth as its
context, take the whole grid or a tile of it.

Source: video_vae.md section 6.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import DiffusionVAEConfig
from .cells import patchify, unpatchify
from .conv_vae import PIXEL_CHANNELS
from .diffusion_grid import ClipNoise, DecodeGrid
from .diffusion_layers import (
    MODULATION_ROWS,
    BlockWeights,
    DiffusionBlock,
    NeighbourhoodBlock,
    Workspace,
    add_context_,
    attention_work,
    enlarge,
    feed_forward_work,
    run_blocks,
)
from .pointwise import EPS
from .statistics import PerChannelStatistics
from .tiling import Span, Tiling, blend

if TYPE_CHECKING:
    from .recording import PieceRecorder

OnWork = Callable[[float], None]

TIME_FREQUENCIES = 128
# Frames that leave the decoder at once; the last layers are cheap, and their output as float32 is not small.
PIECE_FRAMES = 16


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(2 * TIME_FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, timestep: float) -> Tensor:
        """(width,) float32."""
        first, _, last = self.mlp
        exponents = torch.arange(TIME_FREQUENCIES, dtype=torch.float32, device=first.weight.device) / TIME_FREQUENCIES
        angles = timestep * torch.exp(-math.log(10000.0) * exponents)
        embedded = torch.cat((angles.cos(), angles.sin()))
        hidden = F.silu(F.linear(embedded, first.weight.float(), first.bias.float()))
        return F.linear(hidden, last.weight.float(), last.bias.float())


class SharedAdaLN(nn.Module):
    def __init__(self, time_width: int, channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(time_width, MODULATION_ROWS * channels)

    def forward(self, embedded: Tensor) -> Tensor:
        """(time_width,) -> (7 * C,) float32."""
        return F.linear(F.silu(embedded), self.proj.weight.float(), self.proj.bias.float())


class Upsample(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.proj = nn.Linear(in_channels, out_channels)


class DiffusionDecoder(nn.Module):
    """Latents and noise to pixels."""

    def __init__(self, config: DiffusionVAEConfig) -> None:
        super().__init__()
        widths, head_dim = config.stage_channels, config.head_dim
        patch = PIXEL_CHANNELS * config.patch_size**2
        self.config = config
        self.conv_in = nn.Linear(config.latent_channels, widths[0])
        self.det_stages = nn.ModuleList(
            nn.ModuleList(NeighbourhoodBlock(width, head_dim) for _ in range(depth))
            for width, depth in zip(widths[:-1], config.stage_depths)
        )
        self.upsamples = nn.ModuleList(
            Upsample(width, math.prod(stride) * following)
            for width, following, (stride, _) in zip(widths, widths[1:], config.upsamples)
        )
        self.conv_in_x_t = nn.Linear(patch, widths[-1])
        self.diff_blocks = nn.ModuleList(
            DiffusionBlock(widths[-1], head_dim, gated=config.gated) for _ in range(config.stage_depths[-1])
        )
        self.norm_out = nn.RMSNorm(widths[-1], eps=EPS)
        self.conv_out = nn.Linear(widths[-1], patch)
        self.t_embedder = TimestepEmbedder(config.time_width)
        self.shared_adaln = SharedAdaLN(config.time_width, widths[-1])
        # In the file; only the decode of keyframes beside a clip adds it (section 6.8).
        self.type_emb = nn.Parameter(torch.empty(config.latent_channels))
        # From noise to the pixels; as floats, since a CUDA graph can't read them from a tensor.
        self.times = [*torch.linspace(1, 1 / config.num_steps, config.num_steps, device="cpu").tolist(), 0.0]
        self._folded: dict[tuple[float, int], tuple[BlockWeights, ...]] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.conv_in.weight.dtype

    def modulation(self, time: float) -> Tensor:
        """(7 * C,) float32, what the timestep adds to every block's table."""
        return self.shared_adaln(self.t_embedder(self.config.timestep_scale * time))

    def block_weights(self, time: float, head_groups: int) -> tuple[BlockWeights, ...]:
        """Of the diffusion blocks at one timestep, folded at the first use and kept as long as the weights."""
        key = (time, head_groups)
        if key not in self._folded:
            modulation = self.modulation(time).view(MODULATION_ROWS, -1)
            upsample = self.upsamples[-1].proj
            self._folded[key] = tuple(block.weights(modulation, upsample, head_groups) for block in self.diff_blocks)
        return self._folded[key]

    def trunk(self, latent: Tensor, on_work: OnWork) -> Tensor:
        """Denormalised latents (1, T, H, W, C) in the weights' dtype, with ghost frames, to the input of stage 4.

        on_work: called after each half of a block with the multiply-adds that are issued since the last call.
        """
        x = self.conv_in(latent)
        for stage in range(len(self.det_stages) - 1):
            self.run_stage(stage, x, on_work)
            stride = self.config.upsamples[stage][0]
            x = enlarge(x, self.upsamples[stage].proj, stride, dropped=stride[0] - 1)
        return x

    def run_stage(self, stage: int, x: Tensor, on_work: OnWork) -> None:
        """The blocks of det_stages[stage] on x, in place."""
        work = Workspace(tuple(x.shape[1:4]), x.shape[4], self.config.head_dim, 1, x)
        blocks = [block.weights() for block in self.det_stages[stage]]
        run_blocks(x, blocks, self.config.stage_kernels[stage], work, on_work)

    def render(
        self, features: Tensor, noise: Tensor, *, starts: bool, head_groups: int, on_work: OnWork
    ) -> Iterator[Tensor]:
        """Stages 4 and 5, and the denoising loop.

        features: (1, t, h, w, C4), a tile of the trunk's result; changed in place.
        noise: (1, 3, F, Hpx, Wpx) in the weights' dtype. Frames of the t cells beyond F are not made.
        starts: the tile holds the clip's first cell, which has one frame less. head_groups: see Workspace.
        on_work: see trunk.
        Yields pixels (1, 3, n, Hpx, Wpx), unclamped, frame after frame.
        """
        self.run_stage(len(self.det_stages) - 1, features, on_work)
        patch = self.config.patch_size
        grid = (noise.shape[2], noise.shape[3] // patch, noise.shape[4] // patch)
        work = Workspace(grid, self.config.stage_channels[-1], self.config.head_dim, head_groups, features)
        x_t = noise
        for time, following in pairwise(self.times):
            x = self.embed_noise(x_t)
            self.run_diffusion_blocks(
                x, features, time, starts=starts, head_groups=head_groups, work=work, on_work=on_work
            )
            prediction = self.to_pixels(x)
            if not following and self.config.prediction == "x0":
                yield from prediction  # the step would lead exactly there
                return
            x_t = self._advance(x_t, list(prediction), time, following)
        yield from x_t.split(PIECE_FRAMES, dim=2)

    def _advance(self, x_t: Tensor, prediction: list[Tensor], time: float, following: float) -> Tensor:
        """One Euler step from time to following, in float32, stored in x_t's dtype."""
        advanced = []
        for x, predicted in zip(x_t.split(PIECE_FRAMES, dim=2), prediction):
            x, predicted = x.float(), predicted.float()
            velocity = (x - predicted) / time if self.config.prediction == "x0" else predicted
            advanced.append((x - (time - following) * velocity).to(x_t.dtype))
        return torch.cat(advanced, dim=2)

    def embed_noise(self, x_t: Tensor) -> Tensor:
        """Pixels (1, 3, F, Hpx, Wpx) to the tokens of stage 5 (1, F, h, w, C)."""
        patch = self.config.patch_size
        _, _, frames, height, width = x_t.shape
        x = x_t.new_empty(1, frames, height // patch, width // patch, self.config.stage_channels[-1])
        for tokens, pixels in zip(x.split(PIECE_FRAMES, dim=1), x_t.split(PIECE_FRAMES, dim=2)):
            tokens.copy_(self.conv_in_x_t(patchify(pixels, patch).movedim(1, -1)))
        return x

    def run_diffusion_blocks(
        self,
        x: Tensor,
        context: Tensor,
        time: float,
        *,
        starts: bool,
        head_groups: int,
        work: Workspace,
        on_work: OnWork,
    ) -> None:
        """On the tokens of stage 5 in place. context: the result of stage 4. time: 1 for noise, falling to 0."""
        stride = self.config.upsamples[-1][0]
        for weights in self.block_weights(time, head_groups):
            add_context_(x, context, weights.context, stride, dropped=stride[0] - 1 if starts else 0)
            run_blocks(x, [weights], self.config.stage_kernels[-1], work, on_work)

    def to_pixels(self, x: Tensor) -> Iterator[Tensor]:
        """Tokens (1, F, h, w, C) to pixels (1, 3, n, Hpx, Wpx), frame after frame."""
        for tokens in x.split(PIECE_FRAMES, dim=1):
            patches = self.conv_out(self.norm_out(tokens))
            yield unpatchify(patches.movedim(-1, 1), self.config.patch_size)


class DiffusionVideoVAE(nn.Module):
    """Decoder and latent statistics. Build it on the meta device; the loader places the weights."""

    def __init__(self, config: DiffusionVAEConfig) -> None:
        super().__init__()
        self.decoder = DiffusionDecoder(config)
        self.per_channel_statistics = PerChannelStatistics(config.latent_channels)

    @property
    def dtype(self) -> torch.dtype:
        """The activation dtype: that of the weights."""
        return self.decoder.dtype

    def decode(
        self,
        latent: Tensor,
        noise: ClipNoise,
        *,
        tiling: Tiling | None = None,
        head_groups: int = 1,
        on_share: Callable[[float], None] = lambda share: None,
        recorder: PieceRecorder | None = None,
    ) -> Iterator[Tensor]:
        """Normalised latents (1, C, F, H, W) on the weights' device to pixels (1, 3, n, 32H, 32W), unclamped, in the
        weights' dtype: 8(F-1)+1 frames, piece after piece.

        tiling: in cells of stage 4, None = the clip as a whole. head_groups: see Workspace. on_share: called whenever
        more work is issued, with the share of all of it; what it raises ends the decode. recorder: has the clip, or
        each of its tiles, run by a recording where there is one; None runs all of it eager.
        """
        decoder, grid = self.decoder, DecodeGrid.of(self.decoder.config, latent.shape[2:])
        spans = grid.spans(tiling or Tiling((0, 0, 0), (0, 0, 0)))
        trunk_work = _trunk_work(decoder.config, grid)
        on_work = _in_shares(
            trunk_work + sum(_tile_work(decoder.config, grid, *tile) for tile in product(*spans)), on_share
        )
        for time in decoder.times[:-1]:
            decoder.block_weights(time, head_groups)
        x = self.per_channel_statistics.denormalize(F.pad(latent.float(), grid.padding, mode="replicate"))
        x = x.to(self.dtype).movedim(1, -1).contiguous()
        if tiling is None:
            whole = noise.part(slice(0, grid.frames), slice(0, grid.height), slice(0, grid.width))
            work = trunk_work + _tile_work(decoder.config, grid, *(axis[0] for axis in spans))
            pieces = _run(decoder, _Clip(x, whole, head_groups), work, on_work, recorder)
        else:
            features = decoder.trunk(x, on_work)

            def decode_tile(time: Span, row: Span, column: Span) -> Iterator[Tensor]:
                cells = slice(time.start, time.stop + grid.ghosts_of(time))
                # Cloned: stage 4 works in place, and neighbours take the same cells again.
                part = features[:, cells, row.cells, column.cells].clone(memory_format=torch.contiguous_format)
                # Laid out alike whatever canvas it was cut out of.
                drawn = noise.part(time.positions, row.positions, column.positions).contiguous()
                work = _tile_work(decoder.config, grid, time, row, column)
                return _run(decoder, _Tile(part, drawn, time.start == 0, head_groups), work, on_work, recorder)

            pieces = blend(*spans, decode_tile, latent.device)
        frame = 0

        def content(piece: Tensor) -> Tensor:
            nonlocal frame
            frame += piece.shape[2]
            return grid.cropped(piece, frame - piece.shape[2]).to(self.dtype)

        # Not a loop: its variable would keep a piece alive while the next one is computed.
        yield from filter(lambda pixels: pixels.shape[2], map(content, pieces))


@dataclass(frozen=True)
class _Clip:
    """A clip as a whole. latent: for DiffusionDecoder.trunk; noise: for render."""

    latent: Tensor
    noise: Tensor
    head_groups: int

    def pixels(self, decoder: DiffusionDecoder, on_work: OnWork) -> Iterator[Tensor]:
        features = decoder.trunk(self.latent, on_work)
        yield from decoder.render(
            features, self.noise, starts=True, head_groups=self.head_groups, on_work=on_work
        )

    def untouched(self) -> _Clip:
        """With copies of what `pixels` writes into."""
        return self


@dataclass(frozen=True)
class _Tile:
    """A part of one, see DiffusionDecoder.render."""

    features: Tensor
    noise: Tensor
    starts: bool
    head_groups: int

    def pixels(self, decoder: DiffusionDecoder, on_work: OnWork) -> Iterator[Tensor]:
        return decoder.render(
            self.features, self.noise, starts=self.starts, head_groups=self.head_groups, on_work=on_work
        )

    def untouched(self) -> _Tile:
        """See _Clip."""
        return replace(self, features=self.features.clone())


def _run(
    decoder: DiffusionDecoder, piece: _Clip | _Tile, work: float, on_work: OnWork, recorder: PieceRecorder | None
) -> Iterator[Tensor]:
    """The pixels of a piece. work: multiply-adds of all of it; a recording tells of them at once, when it is issued."""

    def record(_: None, given: _Clip | _Tile) -> tuple[Tensor, ...]:
        return tuple(given.untouched().pixels(decoder, lambda work: None))

    pixels = None if recorder is None else recorder.recorded(piece, record)
    if pixels is not None:
        on_work(work)
        # Copies: these are the recording's own.
        yield from map(torch.clone, pixels)
        return
    eager = piece.pixels(decoder, on_work)
    yield from eager if recorder is None else recorder.eager(eager)


def _in_shares(total: float, on_share: Callable[[float], None]) -> OnWork:
    done = 0.0

    def on_work(work: float) -> None:
        nonlocal done
        done += work
        on_share(min(1.0, done / total))

    return on_work


def _trunk_work(config: DiffusionVAEConfig, grid: DecodeGrid) -> float:
    """Multiply-adds of the blocks of stages 1 to 3."""
    return sum(_stage_work(config, stage, math.prod(sizes)) for stage, sizes in enumerate(grid.stages))


def _tile_work(config: DiffusionVAEConfig, grid: DecodeGrid, time: Span, row: Span, column: Span) -> float:
    """Of the other blocks, for a tile."""
    last = len(config.stage_channels) - 1
    cells = (row.stop - row.start) * (column.stop - column.start)
    pixels = math.prod(span.last - span.first for span in (time, row, column))
    return _stage_work(
        config, last - 1, (time.stop - time.start + grid.ghosts_of(time)) * cells
    ) + config.num_steps * _stage_work(config, last, pixels // config.patch_size**2)


def _stage_work(config: DiffusionVAEConfig, stage: int, tokens: int) -> float:
    channels, kernel = config.stage_channels[stage], config.stage_kernels[stage]
    return config.stage_depths[stage] * (attention_work(tokens, channels, kernel) + feed_forward_work(tokens, channels))
