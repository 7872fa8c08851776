"""Guidance, noise masks and guides through a real ComfyUI: honoured, reported, refused by name."""

from __future__ import annotations

import json

import numpy as np
import prompts
import pytest
from prompts import node

from ltx_runtime.published import CONV_VAE_FILE

GUIDANCE = {
    "preset": "custom",
    "passes": "auto",
    "stg_blocks": "0",
    **{f"{stream}_{name}": 1.0 for stream in ("video", "audio") for name in ("cfg", "modality")},
    **{f"{stream}_{name}": 0.0 for stream in ("video", "audio") for name in ("stg", "rescale")},
    "video_skip_step": 0,
    "audio_skip_step": 0,
}


def guided(**changes) -> dict:
    """Two steps of the dev schedule with guidance; the positive prompt stands for the negative one."""
    prompt = prompts.render()
    prompt["guidance"] = node("LTXGraphGuidance", **GUIDANCE | changes)
    prompt["sampler"]["inputs"] |= {"guidance": ["guidance", 0], "schedule": "dev", "steps": 2, "sampler_name": "euler"}
    return prompt


def masked(value: float, **sampler) -> dict:
    prompt = prompts.render()
    prompt["latent"]["inputs"]["with_audio"] = False
    prompt["mask"] = node("SolidMask", value=value, width=64, height=64)
    prompt["masked"] = node("SetLatentNoiseMask", samples=["latent", 0], mask=["mask", 0])
    prompt["sampler"]["inputs"] |= {"latent_image": ["masked", 0], **sampler}
    return prompt


def last_notes(base) -> str:
    newest = max((base / "output" / "ltxgraph").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    events = [json.loads(line) for line in newest.read_text(encoding="utf-8").splitlines()]
    return "\n".join(str(event) for event in events if event["event"] == "note")


def failure(client, prompt) -> str:
    run = client.run(prompt)
    assert run.outcome == "execution_error", "it must fail"
    return run.error


@pytest.mark.parametrize(
    ("length", "latent_rate", "words"),
    [(9, 24.0, None), (25, 24.0, None), (121, 24.0, "the sound lasts 5.04 s, the video 4.84 s at 25 frames a second")],
)
def test_sound_of_another_length_than_the_video_is_reported(client, base, length, latent_rate, words):
    """The conditioning names no frame rate, so the video has 25 frames a second; one latent frame of sound is no
    difference."""
    prompt = prompts.render()
    prompt["latent"]["inputs"] |= {"length": length, "frame_rate": latent_rate, "width": 32, "height": 32}
    prompt["sampler"]["inputs"] |= {"schedule": "dev", "steps": 1}
    assert client.run(prompt).outcome == "execution_success"
    notes = last_notes(base)
    assert (words in notes) if words else ("the sound lasts" not in notes)


def test_guidance_changes_the_frames_and_is_reported(client, base, frames_of):
    plain = frames_of(client.run(guided()))
    stg = frames_of(client.run(guided(video_stg=2.0, video_rescale=0.5)))
    assert stg.shape == plain.shape and not np.array_equal(stg, plain)
    notes = last_notes(base)
    assert "2 passes a step" in notes and "distilled model is made to run without" in notes


@pytest.mark.parametrize("preset", ["distilled", "dev", "dev HQ"])
def test_presets_run_on_any_model(client, base, frames_of, preset):
    """The tiny transformer lacks block 28: the report says that STG is off."""
    prompt = guided(preset=preset)
    sampler_name = "res_2s" if "HQ" in preset else "euler"
    prompt["sampler"]["inputs"] |= {"negative": ["positive", 0], "sampler_name": sampler_name}
    assert frames_of(client.run(prompt)).std() > 0
    assert ("STG is off" in last_notes(base)) == (preset == "dev")


def test_cfg_without_a_negative_prompt_is_refused(client):
    assert "cfg_scale=3.0 needs a negative prompt" in failure(client, guided(video_cfg=3.0))


def test_a_mask_is_honoured(client, frames_of):
    free, half = frames_of(client.run(masked(1.0))), frames_of(client.run(masked(0.5)))
    assert half.shape == free.shape and not np.array_equal(half, free)
    assert "nothing is to be generated" in failure(client, masked(0.0))


@pytest.mark.parametrize(
    ("negative", "words"), [("other rate", "frame_rate=12, positive has 24"), ("no guides", "not those of positive")]
)
def test_a_negative_prompt_of_another_clip_is_refused(client, negative, words):
    prompt = guided(video_cfg=3.0)
    prompt["latent"]["inputs"]["with_audio"] = False
    for name, rate in (("rate", 24.0), ("other rate", 12.0)):
        prompt[name] = node("LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=rate)
    prompt["native_vae"] = node("VAELoader", vae_name=CONV_VAE_FILE)
    prompt["image"] = node("LoadImage", image="first_frame.png")
    prompt["guide"] = node(
        "LTXVAddGuide", positive=["rate", 0], negative=["rate", 1], vae=["native_vae", 0], latent=["latent", 0],
        image=["image", 0], frame_idx=0, strength=1.0,
    )
    source = {"other rate": ["other rate", 1], "no guides": ["rate", 1]}[negative]
    prompt["sampler"]["inputs"] |= {"positive": ["guide", 0], "negative": source, "latent_image": ["guide", 2]}
    assert words in failure(client, prompt)


def test_guides_of_another_latent_are_refused(client):
    prompt = prompts.render()
    prompt["keyed"] = node("LTXTestConditioningKey", conditioning=["positive", 0], key="keyframe_idxs", value=1.0)
    prompt["sampler"]["inputs"]["positive"] = ["keyed", 0]
    assert "positive: keyframe_idxs is a float" in failure(client, prompt)


def with_voice(**changes) -> dict:
    prompt = prompts.render()
    prompt["voice"] = node("LTXTestVoice", conditioning=["positive", 0], tokens=5, seed=1)
    prompt["sampler"]["inputs"] |= {"positive": ["voice", 0], **changes}
    return prompt


def test_a_reference_voice_is_honoured_and_reported(client, base, frames_of):
    plain, voice = frames_of(client.run(prompts.render())), frames_of(client.run(with_voice()))
    assert voice.shape == plain.shape and not np.array_equal(voice, plain)
    notes = last_notes(base)
    assert "a reference voice of 5 tokens" in notes and "identity guidance of LTXVReferenceAudio" in notes


def test_a_reference_voice_that_can_not_be_heard_is_refused(client):
    silent = with_voice()
    silent["latent"]["inputs"]["with_audio"] = False
    assert "latent_image holds no sound" in failure(client, silent)
    other = with_voice(negative=["other voice", 0], guidance=["guidance", 0])
    other["other voice"] = node("LTXTestVoice", conditioning=["positive", 0], tokens=5, seed=2)
    other["guidance"] = node("LTXGraphGuidance", **GUIDANCE | {"video_cfg": 2.0})
    assert "negative: its reference voice (ref_audio) is not that of positive" in failure(client, other)
    other["sampler"]["inputs"]["negative"] = ["positive", 0]
    assert "negative: its reference voice (ref_audio) is not that of positive" in failure(client, other)
    junk = with_voice()
    junk["voice"] = node("LTXTestConditioningKey", conditioning=["positive", 0], key="ref_audio", value=1.0)
    assert "positive: ref_audio is a float" in failure(client, junk)


def with_slots(*, marked: bool, **changes) -> dict:
    prompt = prompts.render()
    prompt["latent"]["inputs"]["with_audio"] = False
    prompt["slots"] = node(
        "LTXTestSlots", conditioning=["positive", 0], latent=["latent", 0], frames="3,6", marked=marked
    )
    prompt["sampler"]["inputs"] |= {"positive": ["slots", 0], "latent_image": ["slots", 2], **changes}
    prompt["crop"] = node("LTXVCropGuides", positive=["slots", 0], negative=["slots", 1], latent=["sampler", 0])
    prompt["decode"]["inputs"]["samples"] = ["crop", 2]
    return prompt


def test_generated_keyframes_are_marked_and_cropped(client, frames_of):
    """The tiny model of 2.5 has the learned marker of a keyframe: without the key the slots are other tokens."""
    marked, plain = (frames_of(client.run(with_slots(marked=marked))) for marked in (True, False))
    assert marked.shape == plain.shape == (prompts.FRAMES, prompts.HEIGHT, prompts.WIDTH, 3)
    assert not np.array_equal(marked, plain)
    guidance = {"guidance": ["guidance", 0], "negative": ["slots", 1]}
    prompt = with_slots(marked=True, **guidance)
    prompt["guidance"] = node("LTXGraphGuidance", **GUIDANCE | {"video_cfg": 2.0})
    assert "negative: its generated_keyframes are not those of positive" in failure(client, prompt)
