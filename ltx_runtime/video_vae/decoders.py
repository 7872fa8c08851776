"""The two decoders behind VideoVAE, under one surface: config, network, plans, and pixels piece by piece.

Source: video_vae.md section 1 (which file holds which).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ..checkpoint import CheckpointHeader
from ..config import ConvVAEConfig, DiffusionVAEConfig
from . import conv_pointwise, pointwise
from .conv_pointwise import is_fused
from .conv_vae import ConvVideoVAE
from .diffusion_grid import ClipNoise, DecodeGrid, DecodeNoise
from .diffusion_plan import exact_diffusion_bytes, plan_diffusion_decode, smaller_diffusion_plan
from .diffusion_vae import DiffusionVideoVAE
from .neighbourhood_attention import attention_backend
from .plan import AskedSizes, DecodePlan, exact_decode_bytes, plan_decode, smaller_decode_plan
from .recording import PieceRecorder
from .statistics import PREFIX as STATISTICS
from .tiling import Span, TileOverlaps, Tiling, blend, latent_spans


class Decoding(Protocol):
    """What VideoVAE asks of a decoder.

    component: as in CheckpointHeader.components. first_weight: name of a weight that has the activations' dtype.
    triton_owner: see triton_use.py.
    """

    component: str
    triton_owner: str
    first_weight: str
    config: ConvVAEConfig | DiffusionVAEConfig

    def build(self) -> nn.Module:
        """The network, where tensors are on the meta device."""

    def parts(self, header: CheckpointHeader) -> Sequence[str]:
        """Starts of the names, without the file's prefix, that belong to the network."""

    def plan(
        self, latent_shape: Sequence[int], *, item_bytes: int, free_bytes: int | None, asked: AskedSizes
    ) -> DecodePlan: ...

    def exact_bytes(self, latent_shape: Sequence[int], *, item_bytes: int, asked: AskedSizes) -> int:
        """See plan.exact_decode_bytes."""

    def smaller(self, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int) -> DecodePlan | None:
        """What to try after a plan that ran out of memory."""

    def overlaps(self, latent_shape: Sequence[int], tiling: Tiling) -> TileOverlaps:
        """Where the tiles of a latent of this shape overlap in its frames."""

    def backend(self, device: torch.device, dtype: torch.dtype) -> str:
        """Words about a choice of kernels that a user should know of, or none."""

    def check_noise(self, noise: DecodeNoise, latent_shape: Sequence[int]) -> None:
        """Raises RequestError for noise that does not fit a latent of this shape."""

    def pieces(
        self,
        module: nn.Module,
        latent: Tensor,
        item: int,
        plan: DecodePlan,
        noise: DecodeNoise,
        on_share: Callable[[float], None],
        recorder: PieceRecorder | None,
    ) -> Iterator[Tensor]:
        """Pixels (1, 3, n, 32H, 32W) of clip `item` of latents (B, C, F, H, W), in the activation dtype, unclamped, in
        order: 8(F-1)+1 frames. No host sync but in on_share, which is called where a piece takes long to make, with the
        share of the clip's work that is issued; what it raises ends the decode. recorder: has pieces run by recordings;
        None runs all of it eager."""


class ConvDecoding:
    """See conv_vae.py."""

    component = "video_vae_conv"
    triton_owner = conv_pointwise.TRITON_OWNER
    first_weight = "decoder.conv_in.conv.weight"

    def __init__(self, header: CheckpointHeader, device: torch.device, dtype: torch.dtype | None) -> None:
        self.config = ConvVAEConfig.from_header(header)
        self._device = device
        self._dtype = dtype
        self._weight = header.tensors[header.prefixes[self.component] + self.first_weight]

    @property
    def _fused(self) -> bool:
        return is_fused(self._device, self._dtype or self._weight.torch_dtype)

    def build(self) -> nn.Module:
        return ConvVideoVAE(self.config)

    def parts(self, header: CheckpointHeader) -> Sequence[str]:
        return ("decoder.", STATISTICS)

    def plan(
        self, latent_shape: Sequence[int], *, item_bytes: int, free_bytes: int | None, asked: AskedSizes
    ) -> DecodePlan:
        return plan_decode(
            self.config,
            latent_shape,
            item_bytes=item_bytes,
            fused=self._fused,
            free_bytes=free_bytes,
            asked=asked,
        )

    def exact_bytes(self, latent_shape: Sequence[int], *, item_bytes: int, asked: AskedSizes) -> int:
        return exact_decode_bytes(
            self.config, latent_shape, item_bytes=item_bytes, fused=self._fused, asked=asked
        )

    def smaller(self, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int) -> DecodePlan | None:
        return smaller_decode_plan(self.config, latent_shape, failed, item_bytes=item_bytes, fused=self._fused)

    def overlaps(self, latent_shape: Sequence[int], tiling: Tiling) -> TileOverlaps:
        spans = latent_spans(latent_shape[2:], tiling)
        return TileOverlaps.of(spans, [slice(0, axis[-1].last) for axis in spans])

    def backend(self, device: torch.device, dtype: torch.dtype) -> str:
        return ""

    def check_noise(self, noise: DecodeNoise, latent_shape: Sequence[int]) -> None:
        """It takes none."""

    def pieces(
        self,
        module: ConvVideoVAE,
        latent: Tensor,
        item: int,
        plan: DecodePlan,
        noise: DecodeNoise,
        on_share: Callable[[float], None],
        recorder: PieceRecorder | None,
    ) -> Iterator[Tensor]:
        clip = latent[item : item + 1]
        if plan.tiling is None:
            yield from module.decode(clip, plan.chunk_frames, recorder)
            return

        spans = latent_spans(clip.shape[2:], plan.tiling)
        count = math.prod(len(axis) for axis in spans)
        issued = 0

        def decode_tile(time: Span, row: Span, column: Span) -> Iterator[Tensor]:
            nonlocal issued
            tile = clip[:, :, time.cells, row.cells, column.cells]
            yield from module.decode(tile, plan.chunk_frames, recorder)
            issued += 1
            on_share(issued / count)

        # Not a loop, as in DiffusionVideoVAE.decode.
        yield from map(lambda piece: piece.to(module.dtype), blend(*spans, decode_tile, clip.device))


class DiffusionDecoding:
    """See diffusion_vae.py."""

    component = "video_vae_diffusion"
    triton_owner = pointwise.TRITON_OWNER
    first_weight = "decoder.conv_in.weight"

    def __init__(self, header: CheckpointHeader) -> None:
        self.config = DiffusionVAEConfig.from_header(header)

    def build(self) -> nn.Module:
        return DiffusionVideoVAE(self.config)

    def parts(self, header: CheckpointHeader) -> Sequence[str]:
        # Other exports hold decoder.coarse_*, which a decode has no use for (video_vae.md section 6.7).
        prefix = f"{header.prefixes[self.component]}decoder."
        starts = {name[len(prefix) :].split(".")[0] for name in header.tensors if name.startswith(prefix)}
        return (*(f"decoder.{start}" for start in sorted(starts) if not start.startswith("coarse_")), STATISTICS)

    def plan(
        self, latent_shape: Sequence[int], *, item_bytes: int, free_bytes: int | None, asked: AskedSizes
    ) -> DecodePlan:
        return plan_diffusion_decode(
            self.config, latent_shape, item_bytes=item_bytes, free_bytes=free_bytes, asked=asked
        )

    def exact_bytes(self, latent_shape: Sequence[int], *, item_bytes: int, asked: AskedSizes) -> int:
        return exact_diffusion_bytes(self.config, latent_shape, item_bytes=item_bytes, asked=asked)

    def smaller(self, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int) -> DecodePlan | None:
        return smaller_diffusion_plan(self.config, latent_shape, failed, item_bytes=item_bytes)

    def overlaps(self, latent_shape: Sequence[int], tiling: Tiling) -> TileOverlaps:
        grid = DecodeGrid.of(self.config, latent_shape[2:])
        return TileOverlaps.of(grid.spans(tiling), [slice(0, grid.content_frames), *grid.content])

    def backend(self, device: torch.device, dtype: torch.dtype) -> str:
        name, why = attention_backend(device, dtype, self.config.head_dim)
        return f"neighbourhood attention by {name}" + (f" ({why})" if why else "")

    def check_noise(self, noise: DecodeNoise, latent_shape: Sequence[int]) -> None:
        noise.check(latent_shape[0], DecodeGrid.of(self.config, latent_shape[2:]))

    def pieces(
        self,
        module: DiffusionVideoVAE,
        latent: Tensor,
        item: int,
        plan: DecodePlan,
        noise: DecodeNoise,
        on_share: Callable[[float], None],
        recorder: PieceRecorder | None,
    ) -> Iterator[Tensor]:
        grid = DecodeGrid.of(self.config, latent.shape[2:])
        if self.config.num_steps > 1:
            # As the reference has it (video_vae.md section 6.9).
            noise = replace(noise, per_tile=False)
        drawn = ClipNoise(noise, item, grid, device=latent.device, dtype=module.dtype)
        return module.decode(
            latent[item : item + 1],
            drawn,
            tiling=plan.tiling,
            head_groups=plan.head_groups,
            on_share=on_share,
            recorder=recorder,
        )


def decoding_of(
    header: CheckpointHeader, component: str, device: torch.device | str, dtype: torch.dtype | None
) -> Decoding:
    """Of a file that holds this component. device, dtype: see VideoVAE. Raises CheckpointError for a config that the
    runtime does not implement."""
    if component == ConvDecoding.component:
        return ConvDecoding(header, torch.device(device), dtype)
    return DiffusionDecoding(header)
