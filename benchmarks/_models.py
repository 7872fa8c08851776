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
from full_size import (
    FRAME_RATE,
    FRAMES,
    SIZES,
    RandomAudioVAE,
    RandomDiffusionVAE,
    RandomTransformer,
    RandomUpsampler,
    RandomVideoEncoder,
    RandomVideoVAE,
    environment,
)

from ltx_runtime.audio_vae import load_audio_vae
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.resident_weights import ResidentModule
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.schedules import distilled_sigmas
from ltx_runtime.shapes import TIME_FACTOR, AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.tiny import write_tiny_checkpoints
from ltx_runtime.upsampler import load_upsampler
from ltx_runtime.video_vae import AskedSizes, DecodePlan, VideoVAE, load_video_encoder, load_video_vae

TINY = {"S0": (64, 64, 17), "S1": (96, 64, 17), "S2": (128, 64, 17)}
# Full size, how a tiny file is opened, and its name in write_tiny_checkpoints.
MODELS = {
    "transformer": (RandomTransformer, load_transformer, "transformer"),
    "conv": (RandomVideoVAE, load_video_vae, "video_vae"),
    "diffusion": (RandomDiffusionVAE, load_video_vae, "diffusion_video_vae"),
    "audio": (RandomAudioVAE, load_audio_vae, "audio_vae"),
    "encoder": (RandomVideoEncoder, load_video_encoder, "video_vae"),
    "upsampler": (RandomUpsampler, load_upsampler, "spatial_upscaler"),
}


def parser_of(doc: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--tiny", action="store_true", help="tiny weights and clips: runs anywhere, its figures mean nothing"
    )
    parser.add_argument("--json", help="write the full numbers here")
    return parser


def parse(parser: argparse.ArgumentParser, **on_cpu) -> argparse.Namespace:
    """The arguments. on_cpu: what those are on the CPU that the command line leaves out. A run there only shows that
    the benchmark works: less than a minute on two cores."""
    if parser.parse_args().tiny and not torch.cuda.is_available():
        parser.set_defaults(**on_cpu)
    return parser.parse_args()


@dataclass(frozen=True)
class Models:
    transformer: TransformerModel
    vae: VideoVAE
    device: torch.device


def device_of(tiny: bool) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if not tiny:
        raise SystemExit("full size needs CUDA; --tiny runs on the CPU.")
    return torch.device("cpu")


def open_each(names: Sequence[str], tiny: bool) -> dict[str, ResidentModule]:
    """Those of MODELS, resident. Full size needs CUDA."""
    device = device_of(tiny)
    if not tiny:
        models = {name: MODELS[name][0](device) for name in names}
        for model in models.values():
            model.ensure_resident()
        return models
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)  # weights that were evicted are read again
    files = write_tiny_checkpoints(Path(folder.name))
    return {name: load(files[file], device=device) for name, (_, load, file) in MODELS.items() if name in names}


def open_models(tiny: bool) -> Models:
    """The transformer and the conv video VAE, see open_each."""
    opened = open_each(("transformer", "conv"), tiny)
    return Models(opened["transformer"], opened["conv"], device_of(tiny))


def clip_sizes(names: Sequence[str], tiny: bool) -> dict[str, tuple[int, int, int]]:
    """name -> width, height, frames of clips that every benchmark calls so."""
    return {name: TINY[name] if tiny else (*SIZES[name], FRAMES) for name in names}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
