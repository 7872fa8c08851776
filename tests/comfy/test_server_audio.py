"""Sound through a real ComfyUI: decoded beside the picture, saved, read back, encoded; bad input in words."""

from __future__ import annotations

import io
import wave

import av
import numpy as np
import prompts
import pytest
from prompts import FRAMES, node
from server import PromptRefused, last_log

from ltx_runtime.published import AUDIO_VAE_FILE, CONV_VAE_FILE

FRAME_RATE = 24.0
LATENT_FRAMES = 9  # round(9 / 24 * 25)
FILE_RATE = 44100


def with_sound() -> dict:
    """Text to video and sound, the sound saved; one report through sampler and both decoders."""
    prompt = prompts.render()
    prompt["audio_vae"] = node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE)
    prompt["sound"] = node(
        "LTXGraphAudioDecode", audio_vae=["audio_vae", 0], samples=["sampler", 0], report=["decode", 1]
    )
    prompt["save_sound"] = node("SaveAudio", audio=["sound", 0], filename_prefix="sound")
    return prompt


def reencoded(file: str, **inputs) -> dict:
    """A sound file of the input folder, encoded and decoded again."""
    return {
        "audio_vae": node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE),
        "load": node("LoadAudio", audio=file),
        "encode": node(
            "LTXGraphAudioEncode",
            **{"audio_vae": ["audio_vae", 0], "audio": ["load", 0], "length": 0, "frame_rate": FRAME_RATE, **inputs},
        ),
        "sound": node("LTXGraphAudioDecode", audio_vae=["audio_vae", 0], samples=["encode", 0], report=["encode", 1]),
        "save_sound": node("SaveAudio", audio=["sound", 0], filename_prefix="reencoded"),
    }


def read_back(client, run) -> tuple[int, np.ndarray]:
    """(sampling rate, samples (channels, N) in [-1, 1]) of the sound that a run saved, as a decoder sees it."""
    assert run.outcome == "execution_success", run.error
    (file,) = run.outputs["save_sound"]["audio"]
    with av.open(io.BytesIO(client.view(file))) as container:
        stream = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(stream)]
        samples = np.concatenate([frame.reshape(-1, stream.channels).T for frame in frames], axis=1)
        return stream.rate, samples / np.iinfo(samples.dtype).max


@pytest.fixture(scope="module")
def mono_file(base) -> str:
    """0.2 s of a tone, mono, 44.1 kHz."""
    time = np.arange(FILE_RATE // 5) / FILE_RATE
    samples = (0.5 * 32767 * np.sin(2 * np.pi * 440 * time)).astype("<i2")
    with wave.open(str(base / "input" / "tone.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(FILE_RATE)
        file.writeframes(samples.tobytes())
    return "tone.wav"


def test_sound_is_decoded_beside_the_picture_and_read_back(client):
    rate, samples = read_back(client, client.run(with_sound()))
    assert rate == 48000
    assert samples.shape == (2, 480 * (4 * LATENT_FRAMES - 3))
    assert abs(samples.shape[1] / rate - FRAMES / FRAME_RATE) <= 0.05
    assert 0.05 < samples.std() < 0.9


def test_a_mono_file_is_encoded_and_decoded(client, mono_file):
    _, samples = read_back(client, client.run(reencoded(mono_file)))
    assert samples.shape == (2, 480 * (4 * 6 - 3))  # 0.2 s give 5 latent frames and one more


@pytest.mark.parametrize("length, frames, words", [(33, 34, "silence follows it"), (3, 3, "its end is left out")])
def test_a_sound_is_fitted_to_its_video(client, base, mono_file, length, frames, words):
    _, samples = read_back(client, client.run(reencoded(mono_file, length=length)))
    assert samples.shape == (2, 480 * (4 * frames - 3))
    notes = [event["message"] for event in last_log(base) if event["event"] == "note"]
    assert any(words in note for note in notes) and any("from 44100 to 16000 Hz" in note for note in notes)


def test_a_latent_without_sound_is_refused_in_words(client):
    prompt = with_sound()
    prompt["latent"]["inputs"]["with_audio"] = False
    run = client.run(prompt)
    assert run.data("execution_error")[0]["node_id"] == "sound"
    assert "holds video and no sound" in run.error


def test_another_file_is_named_before_anything_runs(client):
    prompt = with_sound()
    prompt["audio_vae"]["inputs"]["vae_name"] = CONV_VAE_FILE
    with pytest.raises(PromptRefused) as refusal:
        client.run(prompt)
    assert f"is the conv video VAE, not the audio VAE. Pick {AUDIO_VAE_FILE} from models/vae" in refusal.value.details()
