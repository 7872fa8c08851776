"""Whole denoising loops through `sample`, float32 (transformer.md sections 12 and 14)."""
import json

import torch
from safetensors.torch import load_file, safe_open

from ltx_runtime.conditioning import append_keyframe, audio_state, replace_frame, text_to_video_state
from ltx_runtime.noise import ReferenceNoise
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, sample
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape

PENDING = {
    "dev": "guided loops come with guidance (issue C)",
    "res2s": "res_2s comes with the HQ pipeline (issue C)",
}
TOLERANCE = 3e-5


def cases(path):
    return ["distilled", "dev", "res2s"]


def check(path, case):
    golden = load_file(path)
    with safe_open(path, "pt") as file:
        settings, weights = json.loads(file.metadata()["case"]), file.metadata()["weights"]
    model = load_transformer(path.parent / weights, device="cpu", dtype=torch.float32)
    contexts = golden["in.context.vp"], golden["in.context.ap"]
    # One generator serves both stages, as in the reference pipeline.
    noise = ReferenceNoise(settings["pipeline_seed"], model.device, torch.float32)
    yield from _stage(model, golden, settings, "stage1", contexts, noise)
    yield from _stage(model, golden, settings, "stage2", contexts, noise)


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
    yield f"{stage} video", (result.video - final[0]).abs().max().item(), TOLERANCE
    yield f"{stage} audio", (result.audio - final[1]).abs().max().item(), TOLERANCE
