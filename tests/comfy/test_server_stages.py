"""Upscaling between stages, encoding images, and the duration head, through a real ComfyUI beside its native twins."""
from __future__ import annotations

import json

import numpy as np
import prompts
import pytest
from PIL import Image
from prompts import FRAMES, HEIGHT, WIDTH, node
from server import PromptRefused, last_log

from ltx_runtime.published import CONV_VAE_FILE, DURATION_HEAD_FILE, SPATIAL_UPSCALER_FILE, TEMPORAL_UPSCALER_FILE

# One bf16 run against one in float32, both decoded by the same decoder: 8-bit levels, on average.
BF16_LEVELS = 3.0


def upscaling(file: str) -> dict:
    """The first stage, upscaled and decoded; nodes after the decoder are the test's own."""
    prompt = prompts.render()
    prompt["upscaler"] = node("LTXGraphUpscalerLoader", model_name=file)
    prompt["upscale"] = node(
        "LTXGraphLatentUpscale", samples=["sampler", 0], upscale_model=["upscaler", 0], video_vae=["video_vae", 0],
        report=["sampler", 1],
    )
    prompt["decode"]["inputs"] |= {"samples": ["upscale", 0], "report": ["upscale", 1]}
    return prompt


def encoding(**inputs) -> dict:
    """An image of the input folder, encoded and decoded again."""
    return {
        "video_vae": node("LTXGraphVideoVAELoader", vae_name=CONV_VAE_FILE),
        "image": node("LoadImage", image="gradient.png"),
        "encode": node("LTXGraphVideoEncode", **{
            "video_vae": ["video_vae", 0], "pixels": ["image", 0], "width": 0, "height": 0, "temporal_size": 0,
            "tile_size": 0, "overlap": 0, **inputs,
        }),
        "decode": node("LTXGraphVideoDecode", video_vae=["video_vae", 0], samples=["encode", 0], temporal_size=0,
                       report=["encode", 1]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="encoded"),
    }


@pytest.fixture(scope="module", autouse=True)
def image(base) -> np.ndarray:
    """A picture with a different gradient in every channel."""
    rows, columns = np.mgrid[0:HEIGHT, 0:WIDTH]
    pixels = np.stack([rows * 2, columns * 2, (rows + columns) % 256], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(base / "input" / "gradient.png")
    return pixels


def shown(run, name: str):
    return run.outputs[name]["text"][0]


# --- upscale --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file, shape", [
    (SPATIAL_UPSCALER_FILE, (FRAMES, 2 * HEIGHT, 2 * WIDTH, 3)),
    (TEMPORAL_UPSCALER_FILE, (2 * FRAMES - 1, HEIGHT, WIDTH, 3)),
])
def test_upscale_doubles_and_stays_in_the_render(client, base, frames_of, file, shape):
    frames = frames_of(client.run(upscaling(file)))
    assert frames.shape == shape
    assert ((frames == 0) | (frames == 255)).mean() < 0.05
    events = last_log(base)
    assert len({event["render"] for event in events}) == 1
    order = list(dict.fromkeys(event["phase"] for event in events if event["event"] == "end"))
    assert order.index("sample.step") < order.index("upscale") < order.index("decode.video.chunk")


def test_upscale_agrees_with_the_native_node(client, frames_of):
    prompt = upscaling(SPATIAL_UPSCALER_FILE)
    prompt["latent"]["inputs"]["with_audio"] = False
    ours = frames_of(client.run(prompt))
    prompt["native_vae"] = node("VAELoader", vae_name=CONV_VAE_FILE)
    prompt["upscaler"] = node("LatentUpscaleModelLoader", model_name=SPATIAL_UPSCALER_FILE)
    prompt["upscale"] = node(
        "LTXVLatentUpsampler", samples=["sampler", 0], upscale_model=["upscaler", 0], vae=["native_vae", 0]
    )
    prompt["decode"]["inputs"]["report"] = ["sampler", 1]
    native = frames_of(client.run(prompt))
    assert np.abs(ours.astype(int) - native).mean() < BF16_LEVELS


def test_a_second_stage_takes_the_upscaled_video_and_the_sound_of_the_first(client, base, frames_of):
    prompt = upscaling(SPATIAL_UPSCALER_FILE)
    prompt["stage_2"] = node("LTXGraphSampler", **{
        **prompt["sampler"]["inputs"], "latent_image": ["upscale", 0], "schedule": "distilled stage 2", "seed": 42,
        "report": ["upscale", 1],
    })
    prompt["decode"]["inputs"] |= {"samples": ["stage_2", 0], "report": ["stage_2", 1]}
    assert frames_of(client.run(prompt)).shape == (FRAMES, 2 * HEIGHT, 2 * WIDTH, 3)
    steps = [e["attrs"] for e in last_log(base) if e["event"] == "end" and e["phase"] == "sample.step"]
    assert len(steps) == 8 + 3


def test_a_noise_mask_of_the_video_is_dropped_in_words(client, base, frames_of):
    prompt = encoding()
    prompt["mask"] = node("SolidMask", value=1.0, width=WIDTH, height=HEIGHT)
    prompt["masked"] = node("SetLatentNoiseMask", samples=["encode", 0], mask=["mask", 0])
    prompt["upscaler"] = node("LTXGraphUpscalerLoader", model_name=SPATIAL_UPSCALER_FILE)
    prompt["upscale"] = node(
        "LTXGraphLatentUpscale", samples=["masked", 0], upscale_model=["upscaler", 0], video_vae=["video_vae", 0],
        report=["encode", 1],
    )
    prompt["decode"]["inputs"] |= {"samples": ["upscale", 0], "report": ["upscale", 1]}
    assert frames_of(client.run(prompt)).shape == (1, 2 * HEIGHT, 2 * WIDTH, 3)
    assert any("noise mask of the video is dropped" in e.get("message", "") for e in last_log(base))


@pytest.mark.parametrize("kind, words", [("audio", "holds sound and no video"), ("NaN", "latent is NaN or Inf")])
def test_latents_that_cannot_be_upscaled(client, kind, words):
    prompt = upscaling(SPATIAL_UPSCALER_FILE)
    prompt["foreign"] = node("LTXTestLatent", kind=kind)
    prompt["upscale"]["inputs"]["samples"] = ["foreign", 0]
    run = client.run(prompt)
    assert run.outcome == "execution_error" and words in run.error


# --- encode ---------------------------------------------------------------------------------------------------------


def test_an_image_is_encoded_as_the_native_node_does(client, base, frames_of):
    ours = frames_of(client.run(encoding()))
    assert ours.shape == (1, HEIGHT, WIDTH, 3)
    phases = {event["phase"] for event in last_log(base)}
    assert {"encode.video.chunk", "decode.video.chunk", "transfer.to_host"} <= phases
    prompt = encoding()
    prompt["native_vae"] = node("VAELoader", vae_name=CONV_VAE_FILE)
    prompt["encode"] = node("VAEEncode", pixels=["image", 0], vae=["native_vae", 0])
    del prompt["decode"]["inputs"]["report"]
    native = frames_of(client.run(prompt))
    assert np.abs(ours.astype(int) - native).mean() < BF16_LEVELS


def test_a_clip_is_cut_to_the_grid_and_resized_when_told(client, base, frames_of):
    prompt = encoding(width=64, height=64)
    prompt["repeat"] = node("RepeatImageBatch", image=["image", 0], amount=12)
    prompt["encode"]["inputs"]["pixels"] = ["repeat", 0]
    assert frames_of(client.run(prompt)).shape == (9, 64, 64, 3)
    said = [event.get("message", "") for event in last_log(base)]
    assert "12 frames came: the last 3 are left out, 9 are encoded (8k+1)" in said
    assert f"{WIDTH}x{HEIGHT} images are cropped around the centre and resized to 64x64" in said


def test_images_off_the_grid_are_refused_with_the_nearest_sizes(client, base):
    Image.new("RGB", (100, 64)).save(base / "input" / "odd.png")
    prompt = encoding()
    prompt["image"]["inputs"]["image"] = "odd.png"
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "width=100" in run.error and "96 or 128" in run.error


def test_half_a_size_is_refused_before_anything_runs(client):
    with pytest.raises(PromptRefused) as refused:
        client.run(encoding(width=64))
    assert "set both" in refused.value.details()


def test_free_drops_the_encoder_too(client, base, frames_of):
    before = frames_of(client.run(encoding()))
    client.free()
    assert np.array_equal(frames_of(client.run(encoding())), before)
    loads = [e for e in last_log(base) if e["phase"] == "load.read" and e["event"] == "end"]
    assert len(loads) == 2, "encoder and decoder were read again"


# --- duration -------------------------------------------------------------------------------------------------------


def test_the_prompts_duration_sets_the_length(client, base, frames_of):
    prompt = prompts.render()
    prompt["duration"] = node(
        "LTXGraphDuration", model=["model", 0], positive=["positive", 0], duration_head=DURATION_HEAD_FILE,
        frame_rate=24.0, min_seconds=0.3, max_seconds=0.7,
    )
    prompt["latent"]["inputs"]["length"] = ["duration", 1]
    prompt["sampler"]["inputs"]["report"] = ["duration", 2]
    prompt["seconds"] = node("PreviewAny", source=["duration", 0])
    run = client.run(prompt)
    assert frames_of(run).shape == (17, HEIGHT, WIDTH, 3)
    assert float(shown(run, "seconds")) > 0.7, "what the head says, without limits"
    assert any("the prompt asks for" in event.get("message", "") for event in last_log(base))


def test_limits_of_the_duration_in_the_wrong_order_are_refused_before_the_model_is_read(client):
    client.free()
    prompt = prompts.render()
    prompt["duration"] = node(
        "LTXGraphDuration", model=["model", 0], positive=["positive", 0], duration_head=DURATION_HEAD_FILE,
        frame_rate=24.0, min_seconds=20.0, max_seconds=1.0,
    )
    prompt["latent"]["inputs"]["length"] = ["duration", 1]
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "max_seconds not below min_seconds" in run.error
    resident = client.run({"resident": node("LTXTestResident", call=0)})
    assert json.loads(resident.outputs["resident"]["text"][0]) == []


def test_another_file_as_the_duration_head_is_refused(client, base):
    wrong = base / "models" / "model_patches" / "wrong.safetensors"
    wrong.write_bytes((base / "models" / "vae" / CONV_VAE_FILE).read_bytes())
    prompt = prompts.render()
    prompt["duration"] = node(
        "LTXGraphDuration", model=["model", 0], positive=["positive", 0], duration_head=wrong.name, frame_rate=24.0,
        min_seconds=1.0, max_seconds=20.0,
    )
    prompt["latent"]["inputs"]["length"] = ["duration", 1]
    try:
        with pytest.raises(PromptRefused) as refused:
            client.run(prompt)
    finally:
        wrong.unlink()
    assert "not the duration head" in refused.value.details()
