"""Given frames and regions through a real ComfyUI: what Image To Video and Temporal Region put into a latent."""

from __future__ import annotations

import json

import numpy as np
import prompts
import pytest
from PIL import Image
from prompts import FRAMES, HEIGHT, WIDTH, node
from server import PromptRefused

from ltx_runtime.published import AUDIO_VAE_FILE, CONV_VAE_FILE, SPATIAL_UPSCALER_FILE

# One bf16 encoder against one in float32, both decoded by the same decoder: 8-bit levels, on average.
BF16_LEVELS = 3.0


def described(client, prompt: dict, source: str) -> dict:
    """The latent that node `source` gives, as the test pack describes it."""
    prompt["describe"] = node("LTXTestDescribe", latent=[source, 0])
    prompt["show"] = node("PreviewAny", source=["describe", 0])
    run = client.run(prompt)
    assert run.outcome == "execution_success", run.error
    return json.loads(run.outputs["show"]["text"][0])


def image_to_video(**inputs) -> dict:
    """An image given to an empty clip with sound."""
    return {
        "video_vae": node("LTXGraphVideoVAELoader", vae_name=CONV_VAE_FILE),
        "image": node("LoadImage", image="given.png"),
        "latent": prompts.render()["latent"],
        "given": node(
            "LTXGraphImageToVideo",
            **{
                "video_vae": ["video_vae", 0],
                "image": ["image", 0],
                "latent": ["latent", 0],
                "strength": 0.75,
                **inputs,
            },
        ),
    }


def region(regenerate: str = "video and audio", start: float = 0.0, end: float = 0.0, frames: int = 33) -> dict:
    latent = prompts.render()["latent"]
    latent["inputs"]["length"] = frames
    return {
        "latent": latent,
        "region": node(
            "LTXGraphTemporalRegion",
            latent=["latent", 0],
            start_time=start,
            end_time=end,
            regenerate=regenerate,
            frame_rate=24.0,
        ),
    }


@pytest.fixture(scope="module", autouse=True)
def image(base) -> None:
    """A picture of another size and shape than the clip, with alpha."""
    rows, columns = np.mgrid[0:150, 0:200]
    pixels = np.stack([rows, columns, rows // 2, np.full_like(rows, 200)], axis=2).astype(np.uint8)
    Image.fromarray(pixels, "RGBA").save(base / "input" / "given.png")


def test_an_image_of_any_size_becomes_the_first_frame(client):
    found = described(client, image_to_video(), "given")
    assert found["shapes"] == [[1, 128, 2, HEIGHT // 32, WIDTH // 32], [1, 8, 9, 16]]
    assert found["masks"] == [[0.25, 1.0], [1.0] * 9], "one image is one latent frame; the sound is generated in full"


def test_it_is_what_the_native_node_gives(client, frames_of):
    prompt = image_to_video()
    prompt["latent"]["inputs"]["with_audio"] = False
    prompt["decode"] = node("LTXGraphVideoDecode", video_vae=["video_vae", 0], samples=["given", 0], temporal_size=0)
    prompt["save"] = node("SaveImage", images=["decode", 0], filename_prefix="given")
    ours = frames_of(client.run(prompt))
    prompt["native_vae"] = node("VAELoader", vae_name=CONV_VAE_FILE)
    prompt["given"] = node(
        "LTXVImgToVideoInplace",
        vae=["native_vae", 0],
        image=["image", 0],
        latent=["latent", 0],
        strength=0.75,
        bypass=False,
    )
    native = frames_of(client.run(prompt))
    assert ours.shape == native.shape == (FRAMES, HEIGHT, WIDTH, 3)
    assert np.abs(ours.astype(int) - native).mean() < BF16_LEVELS
    assert described(client, prompt, "given")["masks"] == [[0.25, 1.0]]


def test_more_frames_than_the_clip_are_left_out(client):
    prompt = image_to_video(image=["frames", 0])
    prompt["frames"] = node("RepeatImageBatch", image=["image", 0], amount=20)
    assert described(client, prompt, "given")["masks"][0] == [0.25, 0.25]


def test_sound_alone_has_no_frames_to_give(client):
    prompt = image_to_video()
    prompt["latent"] = node("LTXTestLatent", kind="audio")
    prompt["sink"] = node("LTXTestDescribe", latent=["given", 0])
    prompt["show"] = node("PreviewAny", source=["sink", 0])
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "sound and no video" in run.error


# 33 frames: latent frames of 1, 8, 8, 8, 8 frames. 0.4 to 0.7 s are frames 9.6 to 16.8.
@pytest.mark.parametrize(
    "regenerate, picture",
    [
        ("video and audio", [0, 0, 1, 0, 0]),
        ("video", [0, 0, 1, 0, 0]),
        ("audio", [0, 0, 0, 0, 0]),
    ],
)
def test_a_region_is_generated_and_the_rest_kept(client, regenerate, picture):
    found = described(client, region(regenerate, 0.4, 0.65), "region")
    assert found["masks"][0] == picture
    sound = found["masks"][1]
    if regenerate == "video":
        assert set(sound) == {0.0}
    else:
        times = [i for i, value in enumerate(sound) if value]
        assert times == list(range(times[0], times[-1] + 1)) and 10 <= times[0] <= times[-1] <= 17


def test_no_end_is_the_end_and_a_second_region_narrows_the_first(client):
    prompt = region("video", 0.4)
    prompt["second"] = prompt["region"] | {
        "inputs": prompt["region"]["inputs"]
        | {
            "latent": ["region", 0],
            "start_time": 0.0,
            "end_time": 0.7,
            "regenerate": "video and audio",
        }
    }
    found = described(client, prompt, "second")
    assert found["masks"][0] == [0, 0, 1, 0, 0] and set(found["masks"][1]) == {0.0}


def test_a_plain_mask_of_a_clip_with_sound_is_the_pictures(client):
    """As core's sampler reads it."""
    prompt = region("video and audio", 0.0)
    prompt["mask"] = node("SolidMask", value=0.25, width=64, height=64)
    prompt["masked"] = node("SetLatentNoiseMask", samples=prompt["region"]["inputs"]["latent"], mask=["mask", 0])
    prompt["region"]["inputs"]["latent"] = ["masked", 0]
    found = described(client, prompt, "region")
    assert set(found["masks"][0]) == {0.25} and set(found["masks"][1]) == {1.0}


def test_the_sampler_drops_the_keys_that_cores_drops_and_keeps_the_others(client):
    prompt = prompts.render()
    assert "downscale_ratio_spacial" in described(client, prompt, "latent")["keys"]
    prompt["sampler"]["inputs"]["latent_image"] = ["region", 0]
    prompt["region"] = node(
        "LTXGraphTemporalRegion",
        latent=["latent", 0], start_time=0.0, end_time=0.0, regenerate="video", frame_rate=24.0,
    )
    assert described(client, prompt, "sampler")["keys"] == ["ltxgraph_made_by", "noise_mask", "samples"]


def clip_with_sound() -> dict:
    """The clip of input/, encoded: latent frames of 1, 8 and 8 frames, and its sound."""
    return {
        "model": prompts.render()["model"],
        "positive": prompts.render()["positive"],
        "video_vae": node("LTXGraphVideoVAELoader", vae_name=CONV_VAE_FILE),
        "audio_vae": node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE),
        "clip": node("LoadVideo", file="clip.mp4"),
        "parts": node("GetVideoComponents", video=["clip", 0]),
        "picture": node(
            "LTXGraphVideoEncode",
            video_vae=["video_vae", 0],
            pixels=["parts", 0],
            width=64,
            height=64,
            temporal_size=0,
            tile_size=0,
            overlap=0,
        ),
        "sound": node(
            "LTXGraphAudioEncode",
            audio_vae=["audio_vae", 0],
            audio=["parts", 1],
            video_latent=["picture", 0],
            length=0,
            frame_rate=24.0,
        ),
        "joined": node("LTXVConcatAVLatent", video_latent=["picture", 0], audio_latent=["sound", 0]),
    }


def rendered(prompt: dict, latent: str) -> dict:
    return prompt | {
        "sampler": prompts.render()["sampler"]
        | {
            "inputs": prompts.render()["sampler"]["inputs"]
            | {
                "latent_image": [latent, 0],
            }
        }
    }


def changed(before: list[float], after: list[float]) -> list[int]:
    return [int(abs(a - b) > 1e-6) for a, b in zip(before, after, strict=True)]


def test_a_retake_changes_its_seconds_and_nothing_else(client):
    prompt = clip_with_sound() | {"region": region("video and audio", 0.4, 0.6)["region"]}
    prompt["region"]["inputs"]["latent"] = ["joined", 0]
    before = described(client, prompt, "region")
    assert before["shapes"] == [[1, 128, 3, 2, 2], [1, 8, 18, 16]], "the sound is as long as the video's 17 frames"
    after = described(client, rendered(prompt, "region"), "sampler")
    assert changed(before["means"][0], after["means"][0]) == before["masks"][0] == [0, 0, 1]
    assert changed(before["means"][1], after["means"][1]) == before["masks"][1]


def test_given_sound_stays_through_both_stages(client):
    prompt = clip_with_sound() | {"region": region("video")["region"]}
    prompt["region"]["inputs"]["latent"] = ["joined", 0]
    before = described(client, prompt, "region")
    prompt = rendered(prompt, "region")
    prompt["upscaler"] = node("LTXGraphUpscalerLoader", model_name=SPATIAL_UPSCALER_FILE)
    prompt["upscale"] = node(
        "LTXGraphLatentUpscale", samples=["sampler", 0], upscale_model=["upscaler", 0], video_vae=["video_vae", 0]
    )
    after = described(client, prompt, "upscale")
    assert after["shapes"] == [[1, 128, 3, 4, 4], [1, 8, 18, 16]]
    assert after["masks"] == [[1.0] * 3, [0.0] * 18], "stage 2 generates the whole picture and keeps the sound"
    assert changed(before["means"][1], after["means"][1]) == [0] * 18


def test_a_region_outside_the_clip_and_one_that_ends_before_it_starts(client):
    prompt = region(start=5.0)
    prompt["sink"] = node("LTXTestDescribe", latent=["region", 0])
    prompt["show"] = node("PreviewAny", source=["sink", 0])
    run = client.run(prompt)
    assert run.outcome == "execution_error" and "holds nothing of this clip" in run.error
    prompt["region"]["inputs"] |= {"start_time": 1.0, "end_time": 0.5}
    with pytest.raises(PromptRefused) as refused:
        client.run(prompt)
    assert "a region ends after it starts" in refused.value.details()
