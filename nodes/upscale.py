"""LTX Graph Latent Upscale: a video latent to one of twice the size or twice the frames, between two stages."""
from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io

from ..ltx_runtime import published
from ..ltx_runtime.checkpoint import read_header
from ..ltx_runtime.upsampler import LatentUpsampler
from . import host, live
from .decode import video_part
from .latents import LatentParts, check_generations, read_latent
from .load import ModelFiles, VideoVAE
from .sample import report_input, report_output

Upscaler = io.Custom("LTXGRAPH_UPSCALER")

_FILES = ModelFiles(("latent_upscale_models",), published.SPATIAL_UPSCALER_FILE, ("latent_upsampler",))


class LTXGraphUpscalerLoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphUpscalerLoader",
            display_name="LTX Graph Upscaler Loader",
            category="LTXGraph",
            description="Opens an LTX latent upscaler, spatial x2 or temporal x2, for LTX Graph Latent Upscale.",
            search_aliases=["LTX 2.5", "LTXV", "LatentUpscaleModelLoader"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=_FILES.names(),
                    display_name="upscaler",
                    tooltip="A latent upscaler from models/latent_upscale_models.",
                ),
            ],
            outputs=[Upscaler.Output(display_name="upscaler", tooltip="For LTX Graph Latent Upscale.")],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None = None) -> bool | str:
        return _FILES.verdict(model_name)

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None = None):
        return _FILES.state(model_name)

    @classmethod
    def execute(cls, model_name: str) -> io.NodeOutput:
        path = _FILES.checked(model_name)
        return io.NodeOutput(host.DeviceModel(LatentUpsampler(read_header(path), device=host.vae_device()), path.name))


class LTXGraphLatentUpscale(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphLatentUpscale",
            display_name="LTX Graph Latent Upscale",
            category="LTXGraph",
            description="Doubles the size of a video latent, or its frames, on the device. Sound in it is passed on.",
            search_aliases=["LTX 2.5", "LTXVLatentUpsampler", "two stages"],
            inputs=[
                io.Latent.Input(
                    "samples", tooltip="A denoised video latent, or one with audio: its video part is upscaled."
                ),
                Upscaler.Input("upscale_model", tooltip="From LTX Graph Upscaler Loader."),
                VideoVAE.Input(
                    "video_vae", tooltip="From LTX Graph Video VAE Loader. Its latent statistics are used, no weights."
                ),
                report_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="Twice the size or the frames, for the next stage."),
                report_output(),
            ],
        )

    @classmethod
    def execute(
        cls, samples, upscale_model: host.DeviceModel, video_vae: host.DeviceModel, report=None
    ) -> io.NodeOutput:
        video = video_part(samples, "samples")
        check_generations(upscale_model, video_vae, latent=read_latent(samples, "samples"))
        upscaler: LatentUpsampler = upscale_model.model
        upscaler.check(video.shape, video_vae.model.config.latent_channels)
        activation_bytes = upscaler.activation_bytes(video.shape)
        with host.stay(report, "LTXGraphLatentUpscale", [upscale_model]) as timeline:
            host.make_resident([upscale_model], timeline, activation_bytes)
            video = upscaler.upscale(
                video,
                video_vae.model.statistics().to(upscaler.device),
                timeline=timeline,
                check_cancelled=host.cancel_check(),
            )
            with timeline.phase("transfer.to_host"):
                video = host.to_intermediate(video)
            result, notes = _upscaled(read_latent(samples, "samples"), video, upscaler)
            for note in notes:
                timeline.note("upscale", note)
        settings = {"upscaler": upscale_model.name, "upscaled_video_latent": list(video.shape)}
        report = host.extend(report, timeline, settings=settings, notes=notes)
        return io.NodeOutput(result, report, ui=live.shown({"": report}))


def _upscaled(latent: LatentParts, video: torch.Tensor, upscaler: LatentUpsampler) -> tuple[dict[str, Any], list[str]]:
    """(the new LATENT, what the report should say).

    The video's noise mask goes, as in the native node: it belongs to the old grid. The sound's mask stays.
    """
    result = latent.replaced(video, latent.audio)
    notes = []
    mask = result.pop("noise_mask", None)
    if mask is not None:
        notes.append("the noise mask of the video is dropped: it belongs to the latent before upscaling")
    if getattr(mask, "is_nested", False) and latent.audio is not None:
        audio_mask = mask.unbind()[1]
        video_mask = torch.ones(video.shape[0], 1, video.shape[2], 1, 1, dtype=audio_mask.dtype)
        result["noise_mask"] = host.nested(video_mask.to(audio_mask.device), audio_mask)
    if not upscaler.config.spatial:
        notes.append("temporal x2: the frame rate doubles for the same length")
    return result, notes
