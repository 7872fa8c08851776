"""What the benchmarks share: full-size random models on CUDA, or the tiny checkpoints anywhere (--tiny), requests,
output."""

from __future__ import annotations

import argparse
import atexit
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from full_size import RandomTransformer, RandomVideoVAE, environment

from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.schedules import distilled_sigmas
from ltx_runtime.shapes import TIME_FACTOR, AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.tiny import write_tiny_checkpoints
from ltx_runtime.video_vae import AskedSizes, DecodePlan, VideoVAE, load_video_vae

FRAME_RATE = 24.0


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="tiny weights and clips: runs anywhere, its figures mean nothing"
    )
    parser.add_argument("--json", help="write the full numbers here")
    return parser


@dataclass(frozen=True)
class Models:
    transformer: TransformerModel
    vae: VideoVAE
    device: torch.device


def open_models(tiny: bool) -> Models:
    """Both models, resident. Full size needs CUDA."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if tiny:
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)  # weights that were evicted are read again
        files = write_tiny_checkpoints(Path(folder.name))
        return Models(
            load_transformer(files["transformer"], device=device),
            load_video_vae(files["video_vae"], device=device),
            device,
        )
    if device.type != "cuda":
        raise SystemExit("full-size models need CUDA; --tiny runs on the CPU.")
    models = Models(RandomTransformer(device), RandomVideoVAE(device), device)
    models.transformer.ensure_resident()
    models.vae.ensure_resident()
    return models


def clip_request(
    model: TransformerModel,
    size: tuple[int, int, int],
    *,
    steps: int = 8,
    seed: int = 1,
    prompt: int = 1,
    prompt_tokens: int = 200,
    frame_rate: float = FRAME_RATE,
    audio: bool = True,
    sampler: str = "euler_ancestral",
) -> SampleRequest:
    """A text-to-video request. size: width, height, frames. steps: the last ones of the distilled schedule."""
    width, height, frames = size
    features = model.config.context_width + model.config.audio_context_width
    return SampleRequest(
        video=text_to_video_state(VideoLatentShape.from_pixels(width, height, frames), frame_rate),
        audio=audio_state(AudioLatentShape(1, 8, audio_latent_frames(frames, frame_rate), 16)) if audio else None,
        text=TextFeatures(
            torch.randn(1, prompt_tokens, features, generator=torch.Generator().manual_seed(prompt)), processed=False
        ),
        sigmas=distilled_sigmas()[-steps - 1 :],
        seed=seed,
        sampler=sampler,
    )


def plan_of_chunk(vae: VideoVAE, latent_shape: tuple[int, ...], chunk: int) -> DecodePlan:
    """The decode plan of this many latent frames a chunk, 0 = the whole clip, with its own estimate of memory."""
    sizes = AskedSizes(temporal_size=TIME_FACTOR * (chunk or latent_shape[2]))
    return vae.plan(latent_shape, free_bytes=1 << 50, sizes=sizes)


def size_name(size: tuple[int, int, int]) -> str:
    return "x".join(map(str, size))


def measured_on(device: torch.device, tiny: bool) -> dict:
    """Where a figure was measured."""
    if device.type == "cuda":
        found = environment()
    else:
        found = {
            "device": platform.processor() or "cpu",
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    return found | ({"weights": "tiny"} if tiny else {})


def spread(values: Sequence[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def finish(name: str, arguments, device: torch.device, table: str, rows: list[dict], **more) -> None:
    """Print the table, then everything as one JSON line, which is the last."""
    result = {"benchmark": name, "environment": measured_on(device, arguments.tiny), "rows": rows, **more}
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    print(table)
    print(json.dumps(result))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])
