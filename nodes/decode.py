"""LTX Graph Video Decode: LATENT to IMAGE."""
from __future__ import annotations

from comfy_api.latest import io
from torch import Tensor

from ..ltx_runtime.errors import RequestError
from . import host, live
from .latents import check_generations, read_latent
from .load import VideoVAE
from .sample import Report


class LTXGraphVideoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphVideoDecode",
            display_name="LTX Graph Video Decode",
            category="LTXGraph",
            description="Decodes an LTX video latent on the device: the whole clip when it fits, else an exact stream of chunks.",
            search_aliases=["LTX 2.5", "VAEDecode", "VAEDecodeTiled"],
            inputs=[
                VideoVAE.Input("video_vae", tooltip="From LTX Graph Video VAE Loader."),
                io.Latent.Input("samples", tooltip="A video latent, or one with audio: its video part is decoded."),
                io.Int.Input(
                    "temporal_size",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    advanced=True,
                    tooltip="Frames decoded at once; 0 = planned by free memory. The picture is the same either way.",
                ),
                Report.Input("report", optional=True, tooltip="From the sampler of this render; none starts a new log."),
            ],
            outputs=[io.Image.Output(display_name="images"), Report.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, video_vae: host.DeviceModel, samples, temporal_size: int = 0, report=None) -> io.NodeOutput:
        latent = video_part(samples, "samples")
        check_generations(video_vae, latent=read_latent(samples, "samples"))
        vae = video_vae.model
        # The smallest plan is asked for: a stream gives the same picture, so no other model is evicted for a larger one.
        smallest = vae.plan(latent.shape, free_bytes=0)
        with host.stay(report, "LTXGraphVideoDecode", [video_vae]) as timeline:
            host.make_resident([video_vae], timeline, smallest.peak_bytes)
            frames = vae.decode(
                latent,
                temporal_size=temporal_size,
                timeline=timeline,
                check_cancelled=host.cancel_check(),
                on_chunk=host.step_progress(),
            )
            images = host.to_intermediate(frames)
        report = host.extend(report, timeline, settings={"video_vae": video_vae.name})
        return io.NodeOutput(images, report, ui=live.shown({"": report}))


def video_part(samples, name: str) -> Tensor:
    """The video tensor of a LATENT. Raises RequestError for one that holds sound alone."""
    video = read_latent(samples, name).video
    if video is None:
        raise RequestError(f"{name}: this latent holds sound and no video. Connect the latent of a video or of video with audio.")
    return video
