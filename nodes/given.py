"""What of a clip is given and what is generated: images as its first frames, a stretch of time anew."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..ltx_runtime.conditioning import TokenState, audio_state, temporal_region, text_to_video_state
from ..ltx_runtime.errors import RequestError
from ..ltx_runtime.shapes import SPACE_FACTOR, TIME_FACTOR
from . import host, live
from .checks import check_socket, known_number, out_of_range
from .encode import encode_images
from .latents import LatentParts, check_generations, made_by, noise_masks, read_latent
from .load import VideoVAE, VideoVAEDevice
from .sample import report_input, report_output

_REGENERATED = {"video and audio": ("video", "audio"), "video": ("video",), "audio": ("audio",)}


class LTXGraphImageToVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphImageToVideo",
            display_name="LTX Graph Image To Video",
            category="LTXGraph",
            description="Gives a clip its first frames: an image, or the frames of a video to go on from. They are "
            "encoded on the device at the latent's size.",
            search_aliases=["LTX 2.5", "LTXVImgToVideo", "LTXVImgToVideoInplace", "I2V", "first frame", "start image"],
            inputs=[
                VideoVAE.Input("video_vae", tooltip="From LTX Graph Video VAE Loader."),
                io.Image.Input(
                    "image",
                    tooltip="One image of any size, or the first frames of the clip: 1, 9, 17 ... Cropped around the "
                    "centre and resized.",
                ),
                io.Latent.Input("latent", tooltip="Video, or video with audio: empty, or upscaled for a second stage."),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="1 = these frames stay as they are, less = the model may change them.",
                ),
                report_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="With the given frames in it, and their mask."),
                report_output(),
            ],
        )

    @classmethod
    def execute(cls, video_vae: VideoVAEDevice, image: Tensor, latent, strength: float, report=None) -> io.NodeOutput:
        parts = read_latent(latent, "latent")
        if parts.video is None:
            raise RequestError("latent: this latent holds sound and no video. Connect the latent of a video.")
        check_generations(video_vae, latent=parts)
        check_socket(image, Tensor, "image", "Load Image or its like")
        _, _, frames, height, width = parts.video.shape
        longest = (frames - 1) * TIME_FACTOR + 1
        notes = []
        if image.shape[0] > longest:
            notes.append(f"{image.shape[0]} frames came: the clip has {longest}, the rest is left out")
            image = image[:longest]
        encoded = encode_images(
            video_vae,
            image,
            (width * SPACE_FACTOR, height * SPACE_FACTOR),
            node="LTXGraphImageToVideo",
            report=report,
            notes=notes,
        )
        given = encoded.latent.shape[2]
        video = parts.video.clone()
        video[:, :, :given] = encoded.latent.to(video)
        masks = noise_masks(parts)
        masks["video"][:, :, :given] = 1 - strength
        settings = {"given_frames": (given - 1) * TIME_FACTOR + 1, "given_strength": strength}
        report = host.extend(report, encoded.timeline, settings=encoded.settings | settings, notes=encoded.notes)
        given_latent = made_by(with_masks(parts, video, masks), video_vae)
        return io.NodeOutput(given_latent, report, ui=live.shown({"": report}))


class LTXGraphTemporalRegion(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphTemporalRegion",
            display_name="LTX Graph Temporal Region",
            category="LTXGraph",
            description="Has a stretch of a clip generated anew, in picture, sound or both, and keeps the rest: for a "
            "retake, or for a video to a given sound.",
            search_aliases=["LTX 2.5", "retake", "inpaint", "SetLatentNoiseMask", "audio to video", "extend"],
            inputs=[
                io.Latent.Input("latent", tooltip="An encoded clip: video, sound, or both."),
                _seconds("start_time", "Where generating starts, in seconds."),
                _seconds("end_time", "Where it ends, in seconds; 0 = at the end of the clip."),
                io.Combo.Input(
                    "regenerate",
                    options=list(_REGENERATED),
                    default="video and audio",
                    tooltip="The other one is kept from start to end.",
                ),
                io.Float.Input(
                    "frame_rate", default=24.0, min=1.0, max=1000.0, step=0.01, tooltip="Frames a second of the video."
                ),
            ],
            outputs=[io.Latent.Output(display_name="latent", tooltip="The clip, with the region as its noise mask.")],
        )

    @classmethod
    def validate_inputs(cls, start_time: float | None = None, end_time: float | None = None) -> bool | str:
        # What is not known yet is asked about again in execute.
        start_time, end_time = map(known_number, (start_time, end_time))
        refusal = out_of_range(cls, start_time=start_time, end_time=end_time)
        if refusal or start_time is None or not end_time or start_time < end_time:
            return refusal or True
        return _wrong_order(start_time, end_time)

    @classmethod
    def execute(cls, latent, start_time: float, end_time: float, regenerate: str, frame_rate: float) -> io.NodeOutput:
        if end_time and start_time >= end_time:
            raise RequestError(_wrong_order(start_time, end_time))
        parts = read_latent(latent, "latent")
        states: dict[str, TokenState] = {}
        if parts.video is not None:
            states["video"] = text_to_video_state(parts.video_shape, frame_rate, parts.video)
        if parts.audio is not None:
            states["audio"] = audio_state(parts.audio_shape, parts.audio)
        wanted = _REGENERATED[regenerate]
        if not set(wanted) & set(states):
            raise RequestError(f"regenerate={regenerate!r}, but this latent holds {' and '.join(states)} only.")
        masks = noise_masks(parts)
        for name, state in states.items():
            masks[name] *= _region_mask(state, start_time, end_time or float("inf")) if name in wanted else 0
        return io.NodeOutput(with_masks(parts, parts.video, masks))


def _seconds(name: str, tooltip: str) -> io.Input:
    return io.Float.Input(name, default=0.0, min=0.0, max=1000.0, step=0.01, tooltip=tooltip)


def _wrong_order(start_time: float, end_time: float) -> str:
    return f"start_time={start_time:g}, end_time={end_time:g}: a region ends after it starts (0 = at the clip's end)."


def _region_mask(state: TokenState, start: float, end: float) -> Tensor:
    """1 in the latent frames that lie in the region, (B, 1, F, 1, 1) of video, (B, 1, T, 1) of sound.

    Raises RequestError when there are none.
    """
    shape = state.shape
    of_tokens = temporal_region(state, start, end).denoise_mask
    of_frames = of_tokens[:, :: shape.tokens // shape.frames, 0]  # the tokens of a frame have one interval
    return of_frames.reshape(shape.batch, 1, shape.frames, *[1] * (len(shape.as_tuple()) - 3))


def with_masks(parts: LatentParts, video: Tensor | None, masks: dict[str, Tensor]) -> dict[str, Any]:
    """A new LATENT of the same kind with this video and these noise masks; its other keys are kept."""
    mask = host.nested(masks["video"], masks["audio"]) if len(masks) == 2 else next(iter(masks.values()))
    return parts.source | {"samples": parts.joined(video, parts.audio), "noise_mask": mask}
