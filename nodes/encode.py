"""LTX Graph Video Encode: IMAGE to LATENT."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..ltx_runtime.errors import RequestError, ShapeError
from ..ltx_runtime.shapes import SPACE_FACTOR, TIME_FACTOR, check_pixel_size
from ..ltx_runtime.timing import Timeline
from ..ltx_runtime.video_vae import VideoEncoder
from . import host, live
from .checks import check_socket, known_number, out_of_range
from .latents import made_by
from .load import VideoVAE, VideoVAEDevice
from .sample import report_input, report_output

_LARGEST_SIDE = 16384


class LTXGraphVideoEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphVideoEncode",
            display_name="LTX Graph Video Encode",
            category="LTXGraph",
            description="Encodes images or a video to an LTX latent on the device: the whole clip, or an exact stream "
            "of chunks.",
            search_aliases=["LTX 2.5", "VAEEncode", "VAEEncodeTiled", "image to video"],
            inputs=[
                VideoVAE.Input("video_vae", tooltip="From LTX Graph Video VAE Loader."),
                io.Image.Input(
                    "pixels", tooltip="One image, or the frames of one video: 1, 9, 17 ..., the rest is left out."
                ),
                _side("width"),
                _side("height"),
                io.Int.Input(
                    "temporal_size",
                    default=0,
                    min=0,
                    max=16384,
                    step=TIME_FACTOR,
                    advanced=True,
                    tooltip="Frames encoded at once; 0 = planned by free memory. The latent is the same either way.",
                ),
                io.Int.Input(
                    "tile_size",
                    default=0,
                    min=0,
                    max=_LARGEST_SIDE,
                    step=SPACE_FACTOR,
                    advanced=True,
                    tooltip="Pixels a tile; 0 = the whole picture, and tiles only where it does not fit. They change "
                    "the latent.",
                ),
                io.Int.Input(
                    "overlap",
                    default=0,
                    min=0,
                    max=_LARGEST_SIDE,
                    step=SPACE_FACTOR,
                    advanced=True,
                    tooltip="Pixels that neighbouring tiles share; 0 = a quarter of a tile.",
                ),
                report_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The video's latent, without sound."),
                report_output(),
            ],
        )

    @classmethod
    def validate_inputs(cls, width: int | None = None, height: int | None = None) -> bool | str:
        # What is not known yet is asked about again in execute.
        width, height = map(known_number, (width, height))
        refusal = out_of_range(cls, width=width, height=height)
        if refusal or width is None or height is None:
            return refusal or True
        try:
            _asked_size(width, height)
        except (RequestError, ShapeError) as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        video_vae: VideoVAEDevice,
        pixels,
        width: int = 0,
        height: int = 0,
        temporal_size: int = 0,
        tile_size: int = 0,
        overlap: int = 0,
        report=None,
    ) -> io.NodeOutput:
        encoded = encode_images(
            video_vae,
            pixels,
            _asked_size(width, height),
            node="LTXGraphVideoEncode",
            report=report,
            temporal_size=temporal_size,
            tile_size=tile_size,
            overlap=overlap,
        )
        report = host.extend(report, encoded.timeline, settings=encoded.settings, notes=encoded.notes)
        latent = made_by({"samples": encoded.latent}, video_vae)
        return io.NodeOutput(latent, report, ui=live.shown({"": report}))


@dataclass(frozen=True)
class EncodedImages:
    """latent: (B, 128, F, H, W) float32 where ComfyUI passes values. settings, notes: for the report."""

    latent: Tensor
    timeline: Timeline
    settings: dict[str, Any]
    notes: list[str]


def encode_images(
    video_vae: VideoVAEDevice,
    pixels: Tensor,
    size: tuple[int, int] | None,
    *,
    node: str,
    report: host.RenderReport | None,
    notes: Sequence[str] = (),
    temporal_size: int = 0,
    tile_size: int = 0,
    overlap: int = 0,
) -> EncodedImages:
    """Encode an IMAGE on the device, as a stay of `node` in the report's render.

    size: (width, height) to crop and resize to, None = as the images are. notes: said before those of the encoding.
    Raises ShapeError for images off the grid, and all that VideoEncoder.encode raises.
    """
    check_socket(video_vae, VideoVAEDevice, "video_vae", "LTX Graph Video VAE Loader")
    check_socket(pixels, Tensor, "images", "Load Image or its like")
    device_model = video_vae.encoder
    encoder: VideoEncoder = device_model.model
    shape = encoder.latent_shape(pixels, size)
    # The smallest stream is asked for: it gives the same latent, so no other model is evicted for a larger one.
    smallest = encoder.plan(shape, free_bytes=0, temporal_size=TIME_FACTOR, tile_size=tile_size or _LARGEST_SIDE)
    notes = [*notes, *_notes(pixels, shape.num_frames, size)]
    with host.stay(report, node, [device_model]) as timeline:
        for note in notes:
            timeline.note("encode.video.chunk", note)
        host.make_resident([device_model], timeline, smallest.peak_bytes)
        latent = encoder.encode(
            pixels,
            size=size,
            temporal_size=temporal_size,
            tile_size=tile_size,
            overlap=overlap,
            timeline=timeline,
            check_cancelled=host.cancel_check(),
            on_chunk=host.step_progress(),
        )
        with timeline.phase("transfer.to_host"):
            latent = host.to_intermediate(latent)
    settings = {"video_vae": video_vae.name, "encoded_video_latent": list(latent.shape)}
    return EncodedImages(latent, timeline, settings, notes)


def _side(name: str) -> io.Input:
    return io.Int.Input(
        name,
        default=0,
        min=0,
        max=_LARGEST_SIDE,
        step=SPACE_FACTOR,
        tooltip="0 = as the images are. Set width and height to crop the images around their centre and resize them.",
    )


def _asked_size(width: int, height: int) -> tuple[int, int] | None:
    """(width, height) to resize to, or None. Raises RequestError when one alone is set, ShapeError off the grid."""
    if not width and not height:
        return None
    if not width or not height:
        raise RequestError(f"width={width}, height={height}: set both to resize the images, or neither.")
    check_pixel_size(width, height, 1)
    return width, height


def _notes(pixels: Tensor, num_frames: int, size: tuple[int, int] | None) -> list[str]:
    """What happens to the images before they are encoded, for the report."""
    frames, height, width, channels = pixels.shape
    notes = []
    if frames != num_frames:
        left_out = frames - num_frames
        notes.append(f"{frames} frames came: the last {left_out} are left out, {num_frames} are encoded (8k+1)")
    if channels == 4:
        notes.append("the alpha channel is left out")
    if size and size != (width, height):
        notes.append(f"{width}x{height} images are cropped around the centre and resized to {size[0]}x{size[1]}")
    return notes
