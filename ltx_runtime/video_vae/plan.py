"""How to cut a decode so that it fits: the whole clip, or an exact stream of chunks.

Source: video_vae.md section 5 (sizes, limits).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import ConvVAEConfig
from ..shapes import SPACE_FACTOR, TIME_FACTOR
from .conv_vae import PIXEL_CHANNELS, decoder_block_specs
from .host_frames import in_words

# 32-bit indices inside cuDNN and in many kernels.
MAX_ELEMENTS = 2**31 - 1
# On top of the tensors counted below: small buffers, the allocator's rounding, pieces waiting between layers.
_MARGIN = 1.1


@dataclass(frozen=True)
class DecodePlan:
    """One plan gives the same bits every time; two plans agree up to rounding.

    chunk_frames: latent frames a chunk; at least those of the clip means that the clip runs whole.
    peak_bytes: estimated device memory beyond the weights.
    reason: what is done and why, in words, for the log and the report.
    """

    chunk_frames: int
    peak_bytes: int
    reason: str


def plan_decode(
    config: ConvVAEConfig,
    latent_shape: Sequence[int],
    *,
    item_bytes: int,
    free_bytes: int | None,
    temporal_size: int = 0,
) -> DecodePlan:
    """Choose the largest chunk that fits.

    latent_shape: (B, C, F, H, W); clips of a batch are decoded one after the other, so B does not matter.
    item_bytes: bytes of one element of the activations.
    free_bytes: device memory that the decode may use, None where nothing tells it.
    temporal_size: pixel frames a chunk as the user set them, 0 = planned; honoured where it fits, else reduced, which
        the reason then says.
    """
    _, _, frames, height, width = latent_shape

    def need(chunk: int) -> _Footprint:
        return _footprint(config, frames, height, width, chunk, item_bytes)

    def fits(chunk: int) -> bool:
        footprint = need(chunk)
        return footprint.elements <= MAX_ELEMENTS and (free_bytes is None or footprint.peak_bytes <= free_bytes)

    asked = min(frames, max(1, temporal_size // TIME_FACTOR)) if temporal_size else frames
    chunk = next((size for size in range(asked, 1, -1) if fits(size)), 1)

    picture = f"{width * SPACE_FACTOR}x{height * SPACE_FACTOR}"
    free = "" if free_bytes is None else f", {in_words(free_bytes)} are free"
    footprint = need(chunk)
    if chunk == frames:
        how = f"whole clip: {(frames - 1) * TIME_FACTOR + 1} frames of {picture}"
    else:
        how = f"exact stream: {chunk * TIME_FACTOR} frames of {picture} a chunk"
        how += f" (temporal_size {temporal_size})" if temporal_size else ""
    reason = f"{how}, about {in_words(footprint.peak_bytes)}{free}"
    if chunk < asked:
        what = "the whole clip" if asked == frames else f"{asked * TIME_FACTOR} frames a chunk as asked"
        larger = need(asked)
        if larger.elements > MAX_ELEMENTS:
            reason += f"; {what} would hold a tensor of {larger.elements:.3g} elements, the limit is {MAX_ELEMENTS:.3g}"
        else:
            reason += f"; {what} would take {in_words(larger.peak_bytes)}"
    if not fits(chunk):
        reason += "; no chunk is smaller, so this may run out of memory: use a smaller picture"
    return DecodePlan(chunk, footprint.peak_bytes, reason)


def smaller_plan(
    config: ConvVAEConfig, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int
) -> DecodePlan | None:
    """Half of a plan that ran out of memory, or None when there is nothing smaller."""
    _, _, frames, height, width = latent_shape
    chunk = min(failed.chunk_frames, frames) // 2
    if not chunk:
        return None
    footprint = _footprint(config, frames, height, width, chunk, item_bytes)
    reason = (
        f"exact stream: {chunk * TIME_FACTOR} frames a chunk, about {in_words(footprint.peak_bytes)}; "
        f"out of memory before with: {failed.reason}"
    )
    return DecodePlan(chunk, footprint.peak_bytes, reason)


@dataclass(frozen=True)
class _Footprint:
    """elements: of the largest tensor. peak_bytes: device memory beyond the weights."""

    elements: int
    peak_bytes: int


def _footprint(
    config: ConvVAEConfig, clip_frames: int, height: int, width: int, chunk: int, item_bytes: int
) -> _Footprint:
    """Walk the decoder and count, in elements, what is alive at once."""
    chunk = min(chunk, clip_frames)
    streaming = chunk < clip_frames
    cells = height * width  # of one frame on the current grid
    rate = 1
    alive: list[int] = []
    largest = 0
    remembered = 0

    def frames() -> int:
        """Frames of a chunk on the current grid; the first of a whole clip stands for rate of a steady chunk."""
        return rate * chunk if streaming else rate * (chunk - 1) + 1

    def conv(in_channels: int, out_channels: int) -> int:
        """Input window and output, each twice: cuDNN works on channels-last copies of both."""
        nonlocal largest
        window = in_channels * (frames() + 2) * cells
        out = out_channels * frames() * cells
        largest = max(largest, window, out)
        return 2 * (window + out)

    specs = decoder_block_specs(config)
    alive.append(conv(config.latent_channels, specs[0].in_channels))
    for spec in specs:
        frame = spec.in_channels * cells
        if spec.num_res_blocks:
            alive.append(frames() * frame + conv(spec.in_channels, spec.in_channels))
            remembered += spec.num_res_blocks * 6 * frame  # two frames for each conv and for the skip
        else:
            growth = spec.stride[0] * spec.stride[1] * spec.stride[2]
            alive.append(frames() * frame + conv(spec.in_channels, spec.out_channels * growth))
            remembered += 2 * frame
            rate *= spec.stride[0]
            cells *= spec.stride[1] * spec.stride[2]
    pixels = PIXEL_CHANNELS * config.patch_size**2 * frames() * cells
    alive.append(conv(specs[-1].out_channels, PIXEL_CHANNELS * config.patch_size**2) + pixels)

    float32_frames = 4 * pixels
    peak_bytes = max(max(alive) * item_bytes, pixels * item_bytes + float32_frames)
    if streaming:
        # The chunk before is still on its way to the host.
        peak_bytes += (remembered + pixels) * item_bytes + float32_frames
    return _Footprint(largest, int(peak_bytes * _MARGIN))
