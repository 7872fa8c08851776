"""LATENT sockets: the empty latent, and what the sampler and decoder read out of one."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io

from ..ltx_runtime.comfyui_conditioning import resize_mask
from ..ltx_runtime.config import same_generation
from ..ltx_runtime.errors import RequestError, ShapeError
from ..ltx_runtime.shapes import (
    AUDIO_CHANNELS,
    AUDIO_MEL_BINS,
    SPACE_FACTOR,
    TIME_FACTOR,
    VIDEO_CHANNELS,
    AudioLatentShape,
    VideoLatentShape,
    audio_latent_frames,
    check_pixel_size,
)
from . import host
from .checks import check_socket, known_number, out_of_range

# (file name, its LTX version) in a LATENT that one of our nodes made.
_MADE_BY = "ltxgraph_made_by"


class LTXGraphEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphEmptyLatent",
            display_name="LTX Graph Empty Latent",
            category="LTXGraph",
            description="An empty LTX latent, video alone or video with sound. Needs no VAE.",
            search_aliases=["LTX 2.5", "EmptyLTXVLatentVideo", "LTXVEmptyLatentAudio"],
            inputs=[
                io.Int.Input(
                    "width", default=768, min=SPACE_FACTOR, max=16384, step=SPACE_FACTOR, tooltip="A multiple of 32."
                ),
                io.Int.Input(
                    "height", default=512, min=SPACE_FACTOR, max=16384, step=SPACE_FACTOR, tooltip="A multiple of 32."
                ),
                io.Int.Input(
                    "length", default=121, min=1, max=16384, step=TIME_FACTOR, tooltip="Frames: 1, 9, 17 ... 121 ..."
                ),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Clips rendered together."),
                io.Float.Input(
                    "frame_rate",
                    default=24.0,
                    min=1.0,
                    max=1000.0,
                    step=0.01,
                    tooltip="Frames a second. Sets the length of the sound; the picture takes it from the "
                    "conditioning.",
                ),
                io.Boolean.Input("with_audio", default=True, tooltip="Off: a plain video latent."),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="All zeros, for the sampler or given frames.")],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, length: int | None = None
    ) -> bool | str:
        # What is not known yet counts as right here; execute asks again.
        width, height, length = map(known_number, (width, height, length))
        refusal = out_of_range(cls, width=width, height=height, length=length)
        if refusal:
            return refusal
        size = [SPACE_FACTOR if side is None else side for side in (width, height)]
        try:
            _check_size(*size, 1 if length is None else length)
        except ShapeError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls, width: int, height: int, length: int, batch_size: int, frame_rate: float, with_audio: bool
    ) -> io.NodeOutput:
        _check_size(width, height, length)
        shape = VideoLatentShape.from_pixels(width, height, length, batch_size)
        samples = host.to_intermediate(torch.zeros(shape.as_tuple()))
        if with_audio:
            frames = audio_latent_frames(length, frame_rate)
            if frames < 1:
                raise ShapeError(
                    f"{length} frames at {frame_rate} frames a second hold no audio latent frame (25 a second). "
                    f"Make the clip longer, or switch with_audio off."
                )
            audio = host.to_intermediate(torch.zeros(batch_size, AUDIO_CHANNELS, frames, AUDIO_MEL_BINS))
            samples = host.nested(samples, audio)
        # The keys of the native empty latents: core nodes that resize a latent read the ratio.
        return io.NodeOutput({"samples": samples, "downscale_ratio_spacial": SPACE_FACTOR})


def _check_size(width: int, height: int, length: int) -> None:
    check_pixel_size(width, height, length, frames_name="length")


@dataclass(frozen=True)
class LatentParts:
    """A LATENT taken apart. video: (B, 128, F, H, W) or None; audio: (B, 8, T, 16) or None; at least one is there."""

    video: torch.Tensor | None
    audio: torch.Tensor | None
    source: dict[str, Any]

    @property
    def batch(self) -> int:
        return (self.video if self.video is not None else self.audio).shape[0]

    @property
    def video_shape(self) -> VideoLatentShape | None:
        return None if self.video is None else VideoLatentShape(*self.video.shape)

    @property
    def audio_shape(self) -> AudioLatentShape | None:
        return None if self.audio is None else AudioLatentShape(*self.audio.shape)

    def joined(self, video: torch.Tensor | None, audio: torch.Tensor | None) -> Any:
        """Two parts as the kind of `samples` that came in: plain video, plain audio, or nested."""
        if video is not None and audio is not None:
            return host.nested(video, audio)
        return audio if video is None else video

    def replaced(self, video: torch.Tensor | None, audio: torch.Tensor | None) -> dict[str, Any]:
        """A new LATENT dict with new samples; other keys are kept, but for those that the native sampler drops."""
        dropped = ("downscale_ratio_spacial", "downscale_ratio_temporal")
        return {k: v for k, v in self.source.items() if k not in dropped} | {"samples": self.joined(video, audio)}


def read_latent(latent: Any, name: str) -> LatentParts:
    """Take a LATENT apart. name: the input it came in by, for messages.

    Raises RequestError without `samples`, ShapeError for shapes that LTX doesn't have.
    """
    samples = latent.get("samples") if isinstance(latent, dict) else None
    if samples is None:
        keys = ", ".join(map(str, latent)) if isinstance(latent, dict) and latent else "nothing"
        raise RequestError(f"{name}: this LATENT has no 'samples' (it holds {keys}). Connect an LTX latent.")
    if getattr(samples, "is_nested", False):
        tensors = list(samples.unbind())
        if len(tensors) != 2:
            raise ShapeError(
                f"{name}: a nested latent of {len(tensors)} parts; an LTX latent has two, video and audio."
            )
        video, audio = _check_video(tensors[0], name), _check_audio(tensors[1], name)
        if video.shape[0] != audio.shape[0]:
            raise ShapeError(
                f"{name}: the video part has batch {video.shape[0]}, the audio part {audio.shape[0]}. Make both the "
                f"same."
            )
        return LatentParts(video, audio, latent)
    # LTXVSeparateAVLatent leaves `type: audio` on the video part too.
    if (latent.get("type") == "audio" and samples.ndim != 5) or _looks_like_audio(samples):
        return LatentParts(None, _check_audio(samples, name), latent)
    return LatentParts(_check_video(samples, name), None, latent)


def made_by(latent: dict[str, Any], model: host.DeviceModel) -> dict[str, Any]:
    """The LATENT with a mark of the file whose latent space it belongs to. Native nodes that copy a LATENT keep it."""
    version = _version(model)
    return latent if version is None else latent | {_MADE_BY: (model.name, version)}


def check_generations(*models: host.DeviceModel, latent: LatentParts | None = None) -> None:
    """Raise RequestError, naming both files, when they are of two generations of LTX; one that names none fits all.

    latent: what one of our nodes made is as the file that made it.
    """
    for model in models:
        check_socket(model, host.DeviceModel, "model, VAE or upscaler", "an LTX Graph loader")
    found = [(model.name, _version(model)) for model in models]
    if latent is not None and latent.source.get(_MADE_BY):
        found.insert(0, latent.source[_MADE_BY])
    known = [(name, version) for name, version in found if version is not None]
    for name, version in known[1:]:
        first, first_version = known[0]
        if not same_generation(version, first_version):
            raise RequestError(
                f"{first} is of LTX {first_version}, {name} of LTX {version}. Two generations don't go together: "
                f"choose the files of one."
            )


def _version(model: host.DeviceModel) -> str | None:
    return getattr(model.model.config, "model_version", None)


def _looks_like_audio(samples: torch.Tensor) -> bool:
    return samples.ndim == 4 and samples.shape[1] == AUDIO_CHANNELS and samples.shape[3] == AUDIO_MEL_BINS


def _check_video(video: torch.Tensor, name: str) -> torch.Tensor:
    shape = tuple(video.shape)
    if video.ndim != 5 or shape[1] != VIDEO_CHANNELS or 0 in shape:
        hint = "it looks like an image latent" if video.ndim == 4 else "it belongs to another model"
        raise ShapeError(
            f"{name}: a video latent of shape {shape}, expected (batch, {VIDEO_CHANNELS}, frames, height/32, "
            f"width/32): {hint}. Use LTX Graph Empty Latent or EmptyLTXVLatentVideo."
        )
    return video


def _check_audio(audio: torch.Tensor, name: str) -> torch.Tensor:
    shape = tuple(audio.shape)
    if audio.ndim != 4 or not _looks_like_audio(audio) or 0 in shape:
        raise ShapeError(
            f"{name}: an audio latent of shape {shape}, expected (batch, {AUDIO_CHANNELS}, length, {AUDIO_MEL_BINS}). "
            f"Use LTX Graph Empty Latent with audio or LTXVEmptyLatentAudio."
        )
    return audio


def noise_masks(parts: LatentParts) -> dict[str, torch.Tensor]:
    """The noise mask of each part that is there, by name, as new float32 tensors: 1 = generate.

    (B, 1, F, 1 or H, 1 or W) of video, (B, 1, T, 1 or mel) of sound. A part without one is generated in full.
    """
    mask = parts.source.get("noise_mask")
    given = mask.unbind() if getattr(mask, "is_nested", False) else (mask,)
    masks = {}
    for name, tensor, shape in (("video", parts.video, parts.video_shape), ("audio", parts.audio, parts.audio_shape)):
        if tensor is None:
            continue
        # A plain mask of video with audio belongs to the video, as native nodes read it.
        own = given[-1] if len(given) == 2 and name == "audio" else given[0]
        if own is None or (name == "audio" and len(given) == 1 and parts.video is not None):
            masks[name] = tensor.new_ones(tensor.shape[0], 1, tensor.shape[2], *[1] * (tensor.ndim - 3))
        else:
            masks[name] = resize_mask(own, shape).to(tensor.device)
    return masks
