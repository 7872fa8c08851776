"""How to cut a conv decode or an encode so that it fits: the whole clip, an exact stream of chunks, in the end tiles.

Source: video_vae.md section 5 (sizes, limits). The diffusion decoder's plans are in diffusion_plan.py.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..config import ConvVAEConfig, VideoEncoderConfig
from ..memory import in_words
from ..shapes import SPACE_FACTOR, TIME_FACTOR
from .conv_vae import PIXEL_CHANNELS, decoder_block_specs, encoder_block_specs
from .host_frames import frames_bytes
from .tiling import Tiling

# 32-bit indices inside cuDNN and in many kernels.
MAX_ELEMENTS = 2**31 - 1
# A chunk that keeps an H200 busy has at least so many latent cells, or the coarse layers leave a part of it idle (768
# cells: 13 % slower than the whole clip), and at least so many latent frames, or what is remembered weighs too much (2
# frames: 6 % slower, 4: 2 to 3 %). A larger one takes more memory, and its frames start later on their way to the host.
FULL_CHUNK_CELLS = 3072
FULL_CHUNK_FRAMES = 4
# The conv decoder looks 13.5 latent frames ahead, and gives as many more than it gets at the end of a clip.
_LOOKS_AHEAD = 14
# On top of the tensors counted below: small buffers, the allocator's rounding, pieces waiting between layers.
_MARGIN = 1.1
# A recording has a pool of its own, in segments of up to 20 MiB (cudaMallocAsync: 32), and blocks of many sizes leave
# gaps in it: of what is alive at once inside, margins included, pools held 1.16 to 1.34 times as much under the native
# allocator, and 1.01 to 1.14 under cudaMallocAsync (H200, whole clips from 256x256x9 to 768x512x121).
_POOL_GAPS = 1.4
_POOL_SEGMENT = 32 << 20
# Tiles are not equal to the whole picture, the less so the smaller they are.
_SMALLEST_TILE = 8
# The reference refuses less (64 pixels).
_SMALLEST_OVERLAP = 2


@dataclass(frozen=True)
class DecodePlan:
    """One plan gives the same bits every time; two without tiles agree up to rounding, tiles change the picture.

    chunk_frames: latent frames a chunk; at least those of the clip means that the clip runs whole.
    peak_bytes: estimated device memory beyond the weights, of an eager decode.
    recording_bytes: what the recording of a piece of it (recording.py) would hold beside that, and keep. Plans are made
        without it, so that they are the same with and without recordings, and so is the picture.
    reason: what is done and why, in words, for the log and the report.
    tiling: overlapping tiles, in latent cells (conv decoder) or cells of stage 4 (diffusion decoder); None = no tiles.
    head_groups: of the diffusion decoder, see diffusion_layers.Workspace.
    """

    chunk_frames: int
    peak_bytes: int
    reason: str
    tiling: Tiling | None = None
    head_groups: int = 1
    recording_bytes: int = 0


@dataclass(frozen=True)
class AskedSizes:
    """What a user set for a decode, in pixels and frames; 0 = planned.

    Conv decoder: temporal_size alone is the chunk of an exact stream; with temporal_overlap, overlapping tiles in time.
    """

    tile_size: int = 0
    overlap: int = 0
    temporal_size: int = 0
    temporal_overlap: int = 0


PLANNED = AskedSizes()


@dataclass(frozen=True)
class EncodePlan:
    """As DecodePlan, but that tiles change the result.

    tile: latent cells (32 pixels) a side, 0 = the whole picture. overlap: latent cells that neighbouring tiles share.
    """

    chunk_frames: int
    tile: int
    overlap: int
    peak_bytes: int
    reason: str


def plan_decode(
    config: ConvVAEConfig,
    latent_shape: Sequence[int],
    *,
    item_bytes: int,
    fused: bool,
    free_bytes: int | None,
    asked: AskedSizes = PLANNED,
) -> DecodePlan:
    """Choose the chunk that keeps the GPU busy, or the largest that fits; where the smallest does not, the largest
    tile.

    latent_shape: (B, C, F, H, W); clips of a batch are decoded one after the other, so B does not matter.
    item_bytes: bytes of one element of the activations. fused: whether conv_pointwise.py has kernels for them.
    free_bytes: device memory that the decode may use, None where nothing tells it.
    asked: a chunk size is honoured where it fits, else reduced, which the reason then says; tiles always.
    """
    _, _, frames, height, width = latent_shape
    time = _time_tiles(frames, asked)
    chunked = time[0] + 1 if time else frames  # a later tile begins one latent frame earlier
    temporal_size = 0 if time else asked.temporal_size

    def need(tile: int) -> Callable[[int], _Footprint]:
        rows, columns = _tile_sides(tile, height, width)
        blended = _blend_bytes(chunked, height, width) if tile or time else 0
        return lambda chunk: _decoder_footprint(config, chunked, rows, columns, chunk, item_bytes, fused).plus(blended)

    def choose(tile: int) -> tuple[int, str, bool]:
        return _choose_chunk(need(tile), chunked, _in_pixels(width, height), free_bytes, temporal_size)

    tile, chunk, reason = _largest_that_fits(choose, height, width, asked.tile_size)
    overlap = asked.overlap // SPACE_FACTOR
    return _decode_plan((height, width), tile, overlap, time, chunk, need(tile)(chunk), reason)


def exact_decode_bytes(
    config: ConvVAEConfig, latent_shape: Sequence[int], *, item_bytes: int, fused: bool, asked: AskedSizes = PLANNED
) -> int:
    """Device memory that the smallest plan takes which gives the picture of the untiled decode, or of the tiles that
    were asked for: what is worth having room made for."""
    _, _, frames, height, width = latent_shape
    if asked.tile_size or asked.temporal_overlap:
        plan = plan_decode(config, latent_shape, item_bytes=item_bytes, fused=fused, free_bytes=0, asked=asked)
        return plan.peak_bytes
    return min(
        _decoder_footprint(config, frames, height, width, chunk, item_bytes, fused).peak_bytes for chunk in (1, frames)
    )


def _time_tiles(frames: int, asked: AskedSizes) -> tuple[int, int] | None:
    """(size, overlap) of asked tiles in time, in latent frames, or None when there are none."""
    if not asked.temporal_overlap or not asked.temporal_size or asked.temporal_size >= frames * TIME_FACTOR:
        return None
    overlap = max(1, asked.temporal_overlap // TIME_FACTOR)
    return max(asked.temporal_size // TIME_FACTOR, 2, overlap + 1), overlap


def _decode_plan(
    cells: tuple[int, int],
    tile: int,
    overlap: int,
    time: tuple[int, int] | None,
    chunk: int,
    footprint: _Footprint,
    reason: str,
) -> DecodePlan:
    """tile, overlap: latent cells, 0 = none and planned. time: see _time_tiles."""
    sizes = {"peak_bytes": footprint.peak_bytes, "recording_bytes": footprint.recording_bytes}
    if not tile and time is None:
        return DecodePlan(chunk, reason=reason, **sizes)
    overlap = min(overlap or max(_SMALLEST_OVERLAP, tile // 4), tile - 1) if tile else 0
    words = []
    if time is not None:
        words.append(f"{time[0] * TIME_FACTOR} frames that share {time[1] * TIME_FACTOR}")
    if tile:
        words.append(f"{tile * SPACE_FACTOR} pixels that share {overlap * SPACE_FACTOR}")
    tiling = Tiling(
        (time[0] if time else 0, *(tile if tile < size else 0 for size in cells)),
        (time[1] if time else 0, overlap, overlap),
    )
    return DecodePlan(chunk, reason=f"tiles of {' and of '.join(words)}, each as {reason}", tiling=tiling, **sizes)


def _largest_that_fits(
    choose: Callable[[int], tuple[int, str, bool]], height: int, width: int, tile_size: int
) -> tuple[int, int, str]:
    """(tile in latent cells or 0, chunk, reason). tile_size: pixels as the user set them, 0 = planned: no tiles unless
    they are needed. choose: of a tile, see _choose_chunk."""
    tile = 0 if not tile_size or tile_size >= max(height, width) * SPACE_FACTOR else max(2, tile_size // SPACE_FACTOR)
    chunk, reason, fits = choose(tile)
    if not fits and not tile_size:
        for tile in range(max(height, width) - 1, _SMALLEST_TILE - 1, -1):
            chunk, reason, fits = choose(tile)
            if fits:
                break
        if tile:
            reason += "; the smallest chunk of the whole picture would not fit"
    if not fits:
        reason += "; nothing is smaller, so this may run out of memory: use a smaller picture"
    return tile, chunk, reason


def plan_encode(
    config: VideoEncoderConfig,
    latent_shape: Sequence[int],
    *,
    item_bytes: int,
    fused: bool,
    free_bytes: int | None,
    temporal_size: int = 0,
    tile_size: int = 0,
    overlap: int = 0,
) -> EncodePlan:
    """As plan_decode.

    latent_shape: (B, C, F, H, W) of the result. item_bytes, fused, free_bytes, temporal_size: see plan_decode.
    tile_size, overlap: pixels as the user set them, 0 = planned: no tiles unless they are needed, and a quarter of a
        tile as overlap.
    """
    _, _, frames, height, width = latent_shape
    picture = _in_pixels(width, height)

    def choose(tile: int) -> tuple[int, str, bool]:
        return _choose_chunk(need(tile), frames, picture, free_bytes, temporal_size)

    def need(tile: int) -> Callable[[int], _Footprint]:
        rows, columns = _tile_sides(tile, height, width)
        return lambda chunk: _encoder_footprint(config, frames, rows, columns, chunk, item_bytes, fused)

    tile, chunk, reason = _largest_that_fits(choose, height, width, tile_size)
    return _encode_plan(tile, overlap // SPACE_FACTOR, chunk, need(tile)(chunk).peak_bytes, reason)


def smaller_decode_plan(
    config: ConvVAEConfig, latent_shape: Sequence[int], failed: DecodePlan, *, item_bytes: int, fused: bool
) -> DecodePlan | None:
    """Half of a plan that ran out of memory, or None when there is nothing smaller: first of its chunk, then of its
    tiles, as often as it takes to need less memory: tiles need the float32 sum of them beside."""
    _, _, frames, height, width = latent_shape
    size, shared = (failed.tiling.size, failed.tiling.overlap) if failed.tiling else ((0, 0, 0), (0, 0, 0))
    time = (size[0], shared[0]) if size[0] else None
    clip = min(frames, size[0] + 1) if time else frames
    chunk, tile = min(failed.chunk_frames, clip), max(size[1:])
    while True:
        if chunk > 1:
            chunk //= 2
        else:
            tile = (tile or max(height, width)) // 2
            if tile < _SMALLEST_TILE:
                return None
        rows, columns = _tile_sides(tile, height, width)
        blended = _blend_bytes(clip, height, width) if tile or time else 0
        footprint = _decoder_footprint(config, clip, rows, columns, chunk, item_bytes, fused).plus(blended)
        if footprint.peak_bytes < failed.peak_bytes:
            break
    reason = _after_failure(chunk, footprint, failed.reason)
    overlap = min(shared[1], tile // 2)
    return _decode_plan((height, width), tile, overlap, time, chunk, footprint, reason)


def smaller_encode_plan(
    config: VideoEncoderConfig, latent_shape: Sequence[int], failed: EncodePlan, *, item_bytes: int, fused: bool
) -> EncodePlan | None:
    """As smaller_decode_plan; once chunks are as short as they get, tiles of half the size."""
    _, _, frames, height, width = latent_shape
    chunk, tile = min(failed.chunk_frames, frames) // 2, failed.tile
    if not chunk:
        chunk, tile = 1, (tile or max(height, width)) // 2
        if tile < _SMALLEST_TILE:
            return None
    rows, columns = _tile_sides(tile, height, width)
    footprint = _encoder_footprint(config, frames, rows, columns, chunk, item_bytes, fused)
    overlap = min(failed.overlap, tile // 2)
    return _encode_plan(tile, overlap, chunk, footprint.peak_bytes, _after_failure(chunk, footprint, failed.reason))


def _encode_plan(tile: int, overlap: int, chunk: int, peak_bytes: int, reason: str) -> EncodePlan:
    """tile, overlap: latent cells, 0 = none and planned."""
    if not tile:
        return EncodePlan(chunk, 0, 0, peak_bytes, reason)
    overlap = overlap or max(_SMALLEST_OVERLAP, tile // 4)
    words = f"tiles of {tile * SPACE_FACTOR} pixels that share {overlap * SPACE_FACTOR}, each as "
    return EncodePlan(chunk, tile, overlap, peak_bytes, words + reason)


def _tile_sides(tile: int, height: int, width: int) -> tuple[int, int]:
    """(height, width) in latent cells of what is computed at once. tile: 0 = no tiles."""
    return (min(tile, height), min(tile, width)) if tile else (height, width)


def _in_pixels(width: int, height: int) -> str:
    return f"{width * SPACE_FACTOR}x{height * SPACE_FACTOR}"


def _choose_chunk(
    need: Callable[[int], _Footprint], frames: int, picture: str, free_bytes: int | None, temporal_size: int
) -> tuple[int, str, bool]:
    """(latent frames a chunk, what that is and why in words, whether it fits)."""

    def fits(chunk: int) -> bool:
        footprint = need(chunk)
        return footprint.elements <= MAX_ELEMENTS and (free_bytes is None or footprint.peak_bytes <= free_bytes)

    if temporal_size:
        wanted = min(frames, max(1, temporal_size // TIME_FACTOR))
    else:
        full = max(FULL_CHUNK_FRAMES, -(-FULL_CHUNK_CELLS // need(1).cells))
        wanted = -(-frames // -(-frames // full))  # as few chunks as full ones, all of them alike
    chunk = next((size for size in range(wanted, 1, -1) if fits(size)), 1)

    free = "" if free_bytes is None else f", {in_words(free_bytes)} are free"
    if chunk == frames:
        how = f"whole clip: {(frames - 1) * TIME_FACTOR + 1} frames of {picture}"
    else:
        how = f"exact stream: {chunk * TIME_FACTOR} frames of {picture} a chunk"
        if temporal_size:
            how += f" (temporal_size {temporal_size})"
        elif chunk == wanted:
            how += ", which keep the GPU busy"
    reason = f"{how}, about {in_words(need(chunk).peak_bytes)}{free}"
    if chunk < wanted:
        what = "the whole clip" if wanted == frames else f"{wanted * TIME_FACTOR} frames a chunk"
        what += " as asked" if temporal_size and wanted < frames else ""
        larger = need(wanted)
        if larger.elements > MAX_ELEMENTS:
            reason += f"; {what} would hold a tensor of {larger.elements:.3g} elements, the limit is {MAX_ELEMENTS:.3g}"
        else:
            reason += f"; {what} would take {in_words(larger.peak_bytes)}"
    return chunk, reason, fits(chunk)


def _after_failure(chunk: int, footprint: _Footprint, failed: str) -> str:
    return (
        f"exact stream: {chunk * TIME_FACTOR} frames a chunk, about {in_words(footprint.peak_bytes)}; "
        f"out of memory before with: {failed}"
    )


@dataclass(frozen=True)
class _Footprint:
    """Of one chunk. cells: latent cells. elements: of the largest tensor. peak_bytes: device memory beyond the
    weights. recording_bytes: see DecodePlan."""

    cells: int
    elements: int
    peak_bytes: int
    recording_bytes: int = 0

    def plus(self, num_bytes: int) -> _Footprint:
        return replace(self, peak_bytes=self.peak_bytes + num_bytes)


def _blend_bytes(frames: int, height: int, width: int) -> int:
    """Of the float32 sum of the tiles of so many latent frames."""
    return frames_bytes(TIME_FACTOR * (frames - 1) + 1, height * SPACE_FACTOR, width * SPACE_FACTOR)


def bytes_of_recording(buffers: float, inside: float) -> int:
    """What a recording holds. buffers: bytes of its inputs and results. inside: the most bytes that are alive at once
    of what is made in it."""
    return int(buffers + _POOL_GAPS * inside) + _POOL_SEGMENT


class _Tally:
    """Counts, in elements, the largest tensor, the most that is alive at once, and what streaming layers remember."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused
        self.largest = 0
        self.alive = 0
        self.remembered = 0

    def conv(self, in_channels: int, out_channels: int, frames: int, cells: int, beside: int) -> None:
        """Of the input window and the output, and then of the output and what is made out of it. beside: what else
        lives. In the layout of the plain path cuDNN works on channels-last copies of the first two."""
        window = in_channels * (frames + 2) * cells
        out = out_channels * frames * cells
        self.largest = max(self.largest, window, out)
        copies = 1 if self.fused else 2
        self.alive = max(self.alive, copies * (window + out) + beside, 2 * out + beside)


def _frames(rate: int, chunk: int, clip_frames: int) -> int:
    """Frames of a chunk on a grid of rate frames a latent frame; the first of a clip stands for rate of the others."""
    return rate * chunk if chunk < clip_frames else rate * (clip_frames - 1) + 1


def _decoder_footprint(
    config: ConvVAEConfig, clip_frames: int, height: int, width: int, chunk: int, item_bytes: int, fused: bool
) -> _Footprint:
    chunk = min(chunk, clip_frames)
    tally = _Tally(fused)
    cells = height * width  # of one frame, on the current grid
    rate = 1
    specs = decoder_block_specs(config)
    tally.conv(config.latent_channels, specs[0].in_channels, _frames(rate, chunk, clip_frames), cells, beside=0)
    for spec in specs:
        frames, frame = _frames(rate, chunk, clip_frames), spec.in_channels * cells
        if spec.num_res_blocks:
            tally.conv(spec.in_channels, spec.in_channels, frames, cells, beside=frames * frame)
            tally.remembered += spec.num_res_blocks * 6 * frame  # two frames for each conv and for the skip
        else:
            growth = spec.stride[0] * spec.stride[1] * spec.stride[2]
            tally.conv(spec.in_channels, spec.out_channels * growth, frames, cells, beside=frames * frame)
            tally.remembered += 2 * frame
            rate *= spec.stride[0]
            cells *= spec.stride[1] * spec.stride[2]
    frames = _frames(rate, chunk, clip_frames)
    out_channels = PIXEL_CHANNELS * config.patch_size**2
    pixels = out_channels * frames * cells
    # Beside conv_out the layer's input or, later, the pixels.
    tally.conv(specs[-1].out_channels, out_channels, frames, cells, beside=specs[-1].out_channels * frames * cells)

    # The result, and the buffer into which that is copied.
    out_frames = _frames(rate, min(chunk + _LOOKS_AHEAD, clip_frames), clip_frames)
    buffers = out_channels * out_frames * cells
    inside = tally.alive + buffers
    float32_frames = 4 * pixels
    peak_bytes = max(tally.alive * item_bytes, pixels * item_bytes + float32_frames)
    if chunk < clip_frames:
        # The chunk before is still on its way to the host.
        peak_bytes += (tally.remembered + pixels) * item_bytes + float32_frames
        # As it comes in, is made anew, and goes out.
        buffers += 2 * tally.remembered
        inside += tally.remembered
    recording_bytes = bytes_of_recording(*(_MARGIN * item_bytes * values for values in (buffers, inside)))
    return _Footprint(chunk * height * width, tally.largest, int(peak_bytes * _MARGIN), recording_bytes)


def _encoder_footprint(
    config: VideoEncoderConfig, clip_frames: int, height: int, width: int, chunk: int, item_bytes: int, fused: bool
) -> _Footprint:
    chunk = min(chunk, clip_frames)
    tally = _Tally(fused)
    cells = height * width * SPACE_FACTOR**2 // config.patch_size**2
    rate = TIME_FACTOR
    specs = encoder_block_specs(config)
    in_channels = PIXEL_CHANNELS * config.patch_size**2
    frames = _frames(rate, chunk, clip_frames)
    pixels = in_channels * frames * cells
    tally.conv(in_channels, config.base_channels, frames, cells, beside=2 * pixels)
    for spec in specs:
        frames, frame = _frames(rate, chunk, clip_frames), spec.in_channels * cells
        if spec.num_res_blocks:
            tally.conv(spec.in_channels, spec.in_channels, frames, cells, beside=frames * frame)
            tally.remembered += spec.num_res_blocks * 4 * frame  # two frames for each conv
        else:
            # The layer's input, and a copy made even in time.
            beside = frames * frame * (2 if spec.stride[0] == 2 else 1)
            growth = spec.stride[0] * spec.stride[1] * spec.stride[2]
            tally.conv(spec.in_channels, spec.out_channels // growth, frames, cells, beside=beside)
            tally.remembered += 2 * frame
            rate //= spec.stride[0]
            cells //= spec.stride[1] * spec.stride[2]
    # Beside the layers: the pixels of this chunk and, in a stream, of the next, which is on its way from the host.
    peak = tally.alive + pixels
    if chunk < clip_frames:
        peak += tally.remembered + pixels
    return _Footprint(chunk * height * width, tally.largest, int(peak * item_bytes * _MARGIN))
