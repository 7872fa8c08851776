"""The video encoder of one file: frames in, latents out.

Reading order: `VideoEncoder.encode`, `_Attempt`. The network is in conv_vae.py, the cut comes from plan.py.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint import CheckpointHeader, Progress, read_header, require_component
from ..config import VideoEncoderConfig
from ..errors import NonFiniteError, RequestError, ShapeError
from ..memory import device_free_bytes, is_out_of_memory
from ..resident_weights import ResidentModule
from ..shapes import SPACE_FACTOR, TIME_FACTOR, VideoLatentShape, check_pixel_size, longest_clip
from ..timing import Phase, Timeline
from ..triton_use import note_first_use
from .conv_pointwise import is_fused
from .conv_vae import ConvVideoEncoder
from .frame_upload import FrameUpload
from .in_flight import PhasesInFlight
from .plan import EncodePlan, plan_encode, smaller_encode_plan
from .statistics import PREFIX as STATISTICS
from .tiling import Tile, split_axis

PHASE = "encode.video.chunk"


def load_video_encoder(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> VideoEncoder:
    """Open the file of a video VAE, conv or diffusion, and place its encoder on the device.

    dtype None keeps the file's dtypes; it is also the dtype of the activations. on_progress(done_bytes, total_bytes).
    Raises CheckpointError, also for a VAE of the 2.0 generation.
    """
    encoder = VideoEncoder(read_header(path), device=device, dtype=dtype)
    encoder.ensure_resident(timeline, on_progress)
    return encoder


class VideoEncoder(ResidentModule):
    """The encoder of one video VAE file. Both kinds of file hold the same one."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        """Checks the header; the weights are read by ensure_resident, at the latest in encode."""
        if "video_vae_diffusion" not in header.prefixes:
            require_component(header, "video_vae_conv")
        kind = "video_vae_diffusion" if "video_vae_diffusion" in header.prefixes else "video_vae_conv"
        self._prefix = header.prefixes[kind]
        self.config = VideoEncoderConfig.from_header(header)
        prefix_map = {part: self._prefix + part for part in ("encoder.", STATISTICS)}
        super().__init__(header, lambda: ConvVideoEncoder(self.config), prefix_map, device=device, dtype=dtype)
        weight = header.tensors[f"{self._prefix}encoder.conv_in.conv.weight"]
        self._activation_dtype = dtype or weight.torch_dtype

    def latent_shape(self, frames: Tensor, size: tuple[int, int] | None = None) -> VideoLatentShape:
        """Of the latent that encode makes out of these frames; see there. Reads neither weights nor device.

        Raises ShapeError, naming the nearest legal sizes, when width or height is no multiple of 32, and for what is no
        IMAGE; RequestError for images of integers.
        """
        _check_frames(frames)
        num_frames = longest_clip(frames.shape[0])
        width, height = size or (frames.shape[2], frames.shape[1])
        check_pixel_size(width, height, num_frames)
        return VideoLatentShape(
            1,
            self.config.latent_channels,
            (num_frames - 1) // TIME_FACTOR + 1,
            height // SPACE_FACTOR,
            width // SPACE_FACTOR,
        )

    def plan(
        self,
        latent_shape: VideoLatentShape,
        free_bytes: int | None = None,
        *,
        temporal_size: int = 0,
        tile_size: int = 0,
        overlap: int = 0,
    ) -> EncodePlan:
        """How frames would be encoded now to a latent of this shape.

        free_bytes: device memory to stay within; None asks the device. The sizes: see plan_encode.
        """
        if free_bytes is None:
            free_bytes = device_free_bytes(self.device)
            if free_bytes is not None and not self.resident:
                free_bytes = max(0, free_bytes - self.weights_bytes)
        return plan_encode(
            self.config,
            latent_shape.as_tuple(),
            **self._activations(),
            free_bytes=free_bytes,
            temporal_size=temporal_size,
            tile_size=tile_size,
            overlap=overlap,
        )

    def _activations(self) -> dict[str, int | bool]:
        """What plans ask of them."""
        dtype = self._activation_dtype
        return {"item_bytes": dtype.itemsize, "fused": is_fused(self.device, dtype)}

    def encode(
        self,
        frames: Tensor,
        *,
        size: tuple[int, int] | None = None,
        plan: EncodePlan | None = None,
        temporal_size: int = 0,
        tile_size: int = 0,
        overlap: int = 0,
        timeline: Timeline | None = None,
        check_cancelled: Callable[[], None] | None = None,
        on_chunk: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Encode one clip, in ComfyUI's IMAGE layout.

        frames: (N, H, W, 3) float in [0, 1] on any device; of four channels the last, alpha, is left out, and so are
        the frames beyond the last 8k+1. size: (width, height) to crop around the centre and resample to; None takes the
        frames as they are.
        Returns (1, C, (N-1)//8 + 1, H/32, W/32) float32, normalised, on the device.
        plan: run exactly this plan; without one it is planned now (the sizes: see plan_encode), and planned smaller
        when the device runs out of memory all the same. A chunk is brought over while the one before is computed.
        check_cancelled: called before every chunk; whatever it raises ends the encode and leaves the encoder usable.
        on_chunk(done, total): frames that are encoded, once for each tile.
        Raises ShapeError and RequestError before any work, CheckpointError, and NonFiniteError naming the frames.
        Source: video_vae.md sections 4 and 5.
        """
        shape = self.latent_shape(frames, size)
        frames = frames[: shape.num_frames]
        timeline = timeline or Timeline(None, device=self.device)
        self.ensure_resident(timeline)
        with torch.inference_mode():
            may_shrink = plan is None
            plan = plan or self.plan(shape, temporal_size=temporal_size, tile_size=tile_size, overlap=overlap)
            if is_fused(self.device, self.module.dtype):
                note_first_use("video encoder", timeline, PHASE)
            while True:
                timeline.note(PHASE, plan.reason, chunk_latent_frames=plan.chunk_frames, peak_bytes=plan.peak_bytes)
                try:
                    upload = FrameUpload(frames, shape, self.device, self.module.dtype)
                    attempt = _Attempt(self.module, upload, shape, plan, timeline, check_cancelled, on_chunk)
                    return attempt.latent()
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    smaller = smaller_encode_plan(self.config, shape.as_tuple(), plan, **self._activations())
                    if not may_shrink or smaller is None:
                        raise
                    plan = smaller
                # The next attempt starts outside the except clause: the exception keeps the failed run's memory.


class _Attempt:
    """One run of an encode under one plan."""

    def __init__(
        self,
        module: ConvVideoEncoder,
        upload: FrameUpload,
        shape: VideoLatentShape,
        plan: EncodePlan,
        timeline: Timeline,
        check_cancelled: Callable[[], None] | None,
        on_chunk: Callable[[int, int], None] | None,
    ) -> None:
        self._module = module
        self._upload = upload
        self._shape = shape
        self._plan = plan
        self._check_cancelled = check_cancelled
        self._on_chunk = on_chunk
        self._in_flight = PhasesInFlight(timeline, PHASE)
        self._tiles = [
            (rows, columns)
            for rows in split_axis(shape.height, plan.tile, plan.overlap)
            for columns in split_axis(shape.width, plan.tile, plan.overlap)
        ]
        self._frames_done = 0
        self._ranges: list[tuple[str, Tensor]] = []

    def latent(self) -> Tensor:
        with self._in_flight:
            if len(self._tiles) == 1:
                latent = self._encode(*self._tiles[0])
            else:
                latent = self._blended()
        self._ranges.append(("", torch.stack(torch.aminmax(latent))))
        _check_finite(self._ranges)
        return latent

    def _blended(self) -> Tensor:
        """Every tile by its ramps. These sum to one, but where a short last tile has overlapping ones."""
        latent = weight = None
        for rows, columns in self._tiles:
            part = self._encode(rows, columns)
            if latent is None:
                latent = part.new_zeros(self._shape.as_tuple())
                weight = part.new_zeros(self._shape.height, self._shape.width)
            mask = (rows.ramp()[:, None] * columns.ramp()).to(part.device)
            place = (..., rows.cells(), columns.cells())
            latent[place] += part.mul_(mask)
            weight[place] += mask
        return latent.div_(weight)

    def _encode(self, rows: Tile, columns: Tile) -> Tensor:
        return torch.cat(list(self._module.encode(self._pieces(rows, columns), self._plan.chunk_frames)), dim=2)

    def _pieces(self, rows: Tile, columns: Tile) -> Iterator[tuple[Tensor, bool]]:
        """The chunks of a tile, each fetched while the one before is computed. No host sync but for that one's end."""
        behind = None
        bounds = _chunk_bounds(self._shape.num_frames, self._plan.chunk_frames)
        for index, (start, stop) in enumerate(bounds):
            if self._check_cancelled is not None:
                self._check_cancelled()
            phase = self._in_flight.begin(
                chunk=index, frame=start, frames=stop - start, row=rows.start, column=columns.start
            )
            pixels = self._upload.pixels(start, stop, rows.pixels(), columns.pixels())
            place = f"frames {start} to {stop - 1} of the images"
            self._ranges.append((place, torch.stack(torch.aminmax(pixels)).float()))
            if behind is not None:
                self._end(*behind)
            yield pixels, index == len(bounds) - 1
            del pixels
            phase.issued()
            behind = phase, stop - start
        self._end(*behind)

    def _end(self, phase: Phase, num_frames: int) -> None:
        self._in_flight.end(phase)
        self._frames_done += num_frames
        if self._on_chunk is not None:
            self._on_chunk(self._frames_done, len(self._tiles) * self._shape.num_frames)


def _chunk_bounds(num_frames: int, chunk_frames: int) -> list[tuple[int, int]]:
    """(start, stop) in pixel frames. The first chunk ends where its last latent frame does, so that no layer has to
    hold an odd frame back and all chunks between first and last are alike."""
    step = chunk_frames * TIME_FACTOR
    edges = [0, *range(step - TIME_FACTOR + 1, num_frames, step), num_frames]
    return list(pairwise(edges))


def _check_frames(frames: Tensor) -> None:
    shape = tuple(frames.shape)
    if frames.ndim != 4 or 0 in shape:
        raise ShapeError(f"images of shape {shape}, expected (frames, height, width, 3). Connect an IMAGE of one clip.")
    if shape[3] not in (3, 4):
        raise ShapeError(f"images of {shape[3]} channels, expected 3 (RGB), or 4 with alpha, which is left out.")
    if not frames.is_floating_point():
        raise RequestError(f"images of dtype {frames.dtype}, expected floating point in [0, 1]: divide bytes by 255.")


def _check_finite(ranges: list[tuple[str, Tensor]]) -> None:
    """One read for all chunks, after they are done."""
    finite = torch.stack([values for _, values in ranges]).isfinite().all(dim=1).tolist()
    bad = [place for (place, _), good in zip(ranges, finite) if not good]
    if bad and bad[0]:
        raise NonFiniteError(PHASE, f"NaN or Inf in {bad[0]}, so what made the images failed.")
    if bad:
        raise NonFiniteError(
            PHASE,
            "the latent is NaN or Inf though the images are finite, so the encoder overflowed: its file is damaged, or "
            "the images are far out of [0, 1].",
        )
