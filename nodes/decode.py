"""LTX Graph Video Decode: LATENT to IMAGE."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..ltx_runtime.cuda_graph import GRAPH_NOTE, unavailable_reason
from ..ltx_runtime.errors import RequestError
from ..ltx_runtime.parity_run import DECODE_GRAPH
from ..ltx_runtime.shapes import TIME_FACTOR
from ..ltx_runtime.step_runner import CUDA_GRAPH_MODES
from ..ltx_runtime.video_vae import AskedSizes, DecodeNoise, DecodePlan, TileOverlaps
from ..ltx_runtime.video_vae.decode import PHASE
from . import host, live
from .latents import check_generations, read_latent
from .load import VideoVAE
from .sample import cuda_graphs_refused, report_input, report_output


class LTXGraphVideoDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphVideoDecode",
            display_name="LTX Graph Video Decode",
            category="LTXGraph",
            description="Decodes an LTX video latent on the device: the whole clip, an exact stream of chunks, or "
            "tiles; the log says which and why.",
            search_aliases=["LTX 2.5", "VAEDecode", "VAEDecodeTiled"],
            inputs=[
                VideoVAE.Input("video_vae", tooltip="From LTX Graph Video VAE Loader."),
                io.Latent.Input("samples", tooltip="A video latent, or one with audio: its video part is decoded."),
                _size(
                    "temporal_size",
                    8,
                    "Frames decoded at once; 0 = planned by free memory. With the conv VAE the picture is the same "
                    "either way; with the diffusion VAE they are tiles that overlap.",
                    optional=False,
                ),
                report_input(),
                _size(
                    "temporal_overlap",
                    8,
                    "Frames that tiles share; 0 = as many as the decoder needs. With the conv VAE it makes tiles out "
                    "of temporal_size, which else is streamed exactly.",
                ),
                _size("tile_size", 32, "Pixels a tile; 0 = planned: no tiles unless the picture does not fit."),
                _size("overlap", 32, "Pixels that tiles share; 0 = planned."),
                io.Int.Input(
                    "decoder_seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    optional=True,
                    advanced=True,
                    tooltip="Of the noise that the diffusion VAE starts from; ComfyUI always takes 0. The conv VAE "
                    "takes none.",
                ),
                # Last, since saved workflows give values by their position.
                io.Combo.Input(
                    "cuda_graph",
                    options=list(CUDA_GRAPH_MODES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="auto: record a shape that comes back where the host is slower than the device (small "
                    "previews, single frames, busy hosts), and say the times. on: record every piece at its first use; "
                    "costs memory. The picture is the same bit for bit.",
                ),
            ],
            outputs=[
                io.Image.Output(display_name="images", tooltip="Frames in [0, 1], on the host."),
                report_output(),
            ],
        )

    @classmethod
    def execute(
        cls,
        video_vae: host.DeviceModel,
        samples,
        temporal_size: int = 0,
        report=None,
        temporal_overlap: int = 0,
        tile_size: int = 0,
        overlap: int = 0,
        decoder_seed: int = 0,
        cuda_graph: str = "auto",
    ) -> io.NodeOutput:
        latent = video_part(samples, "samples")
        check_generations(video_vae, latent=read_latent(samples, "samples"))
        vae = video_vae.model
        sizes = AskedSizes(tile_size, overlap, temporal_size, temporal_overlap)
        # No other model is evicted for more than the picture asks for: what is exact and smaller will do.
        refused = cuda_graphs_refused()
        wanted = vae.exact_bytes(latent.shape, sizes=sizes, recorded=cuda_graph == "on" and not refused)
        with host.stay(report, "LTXGraphVideoDecode", [video_vae]) as timeline:
            before = len(timeline.events)
            host.make_resident([video_vae], timeline, wanted)
            ran: list[DecodePlan] = []
            frames = vae.decode(
                latent,
                sizes=sizes,
                noise=DecodeNoise(seed=decoder_seed),
                cuda_graph=cuda_graph,
                graphs_refused=refused,
                timeline=timeline,
                free_bytes=host.free_bytes(vae.device),
                check_cancelled=host.cancel_check(),
                on_plan=ran.append,
                on_progress=host.step_progress(),
            )
            images = host.to_intermediate(frames)
        notes = [e for e in timeline.events[before:] if e["event"] == "note" and e["phase"] == PHASE]
        plans = [note["message"] for note in notes]
        tiles = vae.overlaps(latent.shape, ran[-1])
        settings = {
            "video_vae": video_vae.name,
            "decode": _how(ran[-1], latent.shape[2], tiles),
            DECODE_GRAPH: cuda_graph,
        }
        if vae.takes_noise:
            settings["decoder_seed"] = decoder_seed
        report = dataclasses.replace(
            host.extend(report, timeline, settings=settings, notes=plans),
            tiles=tiles,
            decode_graph=_graph_account(cuda_graph, notes, refused or unavailable_reason(vae.device) or ""),
        )
        return io.NodeOutput(images, report, ui=live.shown({"": report}))


def _graph_account(asked: str, notes: Sequence[dict[str, Any]], unavailable: str) -> dict[str, Any]:
    """What became of the CUDA graphs of a decode, as SampleResult.graph tells it of a sampler. notes: of the decode.
    unavailable: why there can be none, empty where there can."""
    if asked == "off":
        return {"requested": asked, "mode": "eager", "decision": "off: eager"}
    if unavailable:
        return {"requested": asked, "mode": "eager", "decision": f"eager, {unavailable}"}
    eager = [note["message"] for note in notes if note["message"].startswith(GRAPH_NOTE) and note["attrs"]["eager"]]
    # That a part of it was replayed is not known: it is no wholly graphed decode.
    return {"requested": asked, "mode": "graph", "decision": asked, "fallback": "; ".join(eager)}


def _how(plan: DecodePlan, latent_frames: int, tiles: TileOverlaps | None) -> str:
    if tiles is not None:
        return tiles.words()
    if plan.chunk_frames < latent_frames:
        return f"stream of {plan.chunk_frames * TIME_FACTOR} frames a chunk"
    return "whole clip"


def _size(name: str, step: int, tooltip: str, *, optional: bool = True) -> io.Input:
    """An advanced size in pixels or frames, 0 = planned."""
    return io.Int.Input(
        name, default=0, min=0, max=16384, step=step, optional=optional, advanced=True, tooltip=tooltip
    )


def video_part(samples, name: str) -> Tensor:
    """The video tensor of a LATENT. Raises RequestError for one that holds sound alone."""
    video = read_latent(samples, name).video
    if video is None:
        raise RequestError(
            f"{name}: this latent holds sound and no video. Connect the latent of a video or of video with audio."
        )
    return video
