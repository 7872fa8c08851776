"""Whole denoising loops through `sample`, float32 (transformer.md sections 12, 13 and 14)."""

import dataclasses
import json

import torch
from safetensors.torch import load_file, safe_open

from ltx_runtime.conditioning import append_keyframe, audio_state, replace_frame, text_to_video_state
from ltx_runtime.guidance import Guidance, GuidanceSpec, passes_needed
from ltx_runtime.noise import ReferenceNoise
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, sample
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape

PENDING: dict[str, str] = {}
TOLERANCE = 3e-5
RES2S_TOLERANCE = 1e-4


def cases(path):
    return ["distilled", "dev", "res2s"]


def check(path, case):
    golden = load_file(path)
    with safe_open(path, "pt") as file:
        settings, weights = json.loads(file.metadata()["case"]), file.metadata()["weights"]
    model = load_transformer(path.parent / weights, device="cpu", dtype=torch.float32)
    if case != "distilled":
        options = {"sampler": "euler", "seed": 1} if case == "dev" else {"sampler": "res_2s", "seed": 2}
        for batching in ("batched", "sequential"):
            yield from _guided(model, golden, settings, case, batching, **options)
        return
    contexts = golden["in.context.vp"], golden["in.context.ap"]
    # One generator serves both stages, as in the reference pipeline.
    noise = ReferenceNoise(settings["pipeline_seed"], model.device, torch.float32)
    yield from _stage(model, golden, settings, "stage1", contexts, noise)
    yield from _stage(model, golden, settings, "stage2", contexts, noise)


def _guided(model, golden, settings, case, batching, *, sampler, seed):
    """A guided loop of one stage; every model call's inputs are compared."""
    final = golden[f"{case}.video.final"], golden[f"{case}.audio.final"]
    video = text_to_video_state(VideoLatentShape(*final[0].shape), settings["fps"])
    specs = [_spec(settings["guider_v"]), _spec(settings["guider_a"])]
    if case == "res2s":
        video = replace_frame(video, 0, golden["in.first_frame_latent"], settings["strength"])
        # Not in the metadata: this loop was recorded without STG, as the HQ pipeline runs.
        specs = [dataclasses.replace(spec, stg_scale=0.0) for spec in specs]
    request = SampleRequest(
        video=video,
        audio=audio_state(AudioLatentShape(*final[1].shape)),
        text=_text(golden, "p"),
        negative=_text(golden, "n"),
        sigmas=golden[f"{case}.sigmas"],
        seed=settings["pipeline_seed"] + seed,
        sampler=sampler,
        noise_convention="reference",
        guidance=Guidance(*specs, batching),
    )
    tolerance = RES2S_TOLERANCE if case == "res2s" else TOLERANCE
    calls = []
    hook = model.module.register_forward_pre_hook(lambda module, args: calls.append(args[:2]))
    result = sample(model, request, cuda_graph="off")
    hook.remove()
    recorded = sum(name.startswith(f"{case}.call") and name.endswith("video_in") for name in golden)
    # One after the other, the passes of a step get the same inputs.
    passes = 1 if batching == "batched" else len(passes_needed(specs))
    yield f"{batching} calls", abs(len(calls) - passes * recorded), 0
    for index in range(recorded):
        for name, tokens in zip(("video", "audio"), calls[index * passes], strict=True):
            difference = (tokens[:1] - golden[f"{case}.call{index}.{name}_in"]).abs().max().item()
            yield f"{batching} call {index} {name}", difference, tolerance
    for name, latent, target in zip(("video", "audio"), (result.video, result.audio), final, strict=True):
        yield f"{batching} {name}", (latent - target).abs().max().item(), tolerance


def _spec(guider):
    settings = dict(guider)
    return GuidanceSpec(rescale=settings.pop("rescale_scale"), stg_blocks=tuple(settings.pop("stg_blocks")), **settings)


def _text(golden, sign):
    return TextFeatures(torch.cat([golden[f"in.context.{stream}{sign}"] for stream in "va"], dim=-1), processed=True)


def _stage(model, golden, settings, stage, contexts, noise):
    first = stage == "stage1"
    fps = settings["fps"]
    final = golden[f"{stage}.video.final"], golden[f"{stage}.audio.final"]
    video = text_to_video_state(
        VideoLatentShape(*final[0].shape), fps, latent=None if first else golden["in.upscaled_latent"]
    )
    image = golden["in.first_frame_latent" if first else "in.first_frame_latent_hi"]
    video = replace_frame(video, 0, image, settings["strength"])
    if first:
        video = append_keyframe(video, settings["kf"], golden["in.keyframe_latent"], fps, settings["kf_strength"])
    audio = audio_state(AudioLatentShape(*final[1].shape), latent=None if first else golden["stage1.audio.final"])
    yield f"{stage} positions", (video.positions - golden[f"{stage}.video.positions"]).abs().max().item(), 0.0

    denoised = []
    result = sample(
        model,
        SampleRequest(
            video=video,
            audio=audio,
            text=TextFeatures(torch.cat(contexts, dim=-1), processed=True),
            sigmas=golden[f"{stage}.sigmas"],
            seed=settings["pipeline_seed"],
            sampler="euler_ancestral" if first else "euler",
            noise_convention="reference",
        ),
        cuda_graph="off",
        noise_source=noise,
        on_preview=lambda index, total, x0: denoised.append(x0),
    )
    for index, x0 in enumerate(denoised):
        tokens = x0.flatten(2).transpose(1, 2)
        target = golden[f"{stage}.call{index}.video_x0"][:, : tokens.shape[1]]
        yield f"{stage} x0 {index}", (tokens - target).abs().max().item(), TOLERANCE
    if first:
        appended = golden[f"{stage}.video.final_tokens"][:, video.shape.tokens :]
        difference = result.appended.flatten(2).transpose(1, 2) - appended
        yield f"{stage} keyframe of strength {settings['kf_strength']}", difference.abs().max().item(), TOLERANCE
    yield f"{stage} video", (result.video - final[0]).abs().max().item(), TOLERANCE
    yield f"{stage} audio", (result.audio - final[1]).abs().max().item(), TOLERANCE
