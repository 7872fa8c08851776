"""Bad input through a real ComfyUI: refused by name, before any work where that is possible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import prompts
import pytest
import torch
from PIL import Image
from prompts import node
from safetensors import safe_open
from safetensors.torch import save_file
from server import ComfyServer, PromptRefused

from ltx_runtime.conditioning_file import save_conditioning
from ltx_runtime.published import AUDIO_VAE_FILE, CONV_VAE_FILE, SPATIAL_UPSCALER_FILE, TRANSFORMER_FILE
from ltx_runtime.tiny import write_tiny_checkpoints, write_tiny_transformer

GOLDENS = Path(__file__).parents[1] / "goldens"


def sampled(**latent_or_sampler) -> dict:
    """A render with changed sampler inputs."""
    prompt = prompts.render()
    prompt["sampler"]["inputs"].update(latent_or_sampler)
    return prompt


def refusal(client, prompt) -> str:
    """What ComfyUI answers to a prompt that must not be queued."""
    with pytest.raises(PromptRefused) as refused:
        client.run(prompt)
    return refused.value.details()


def failure(client, prompt, at: str = "sampler") -> str:
    """The message of the node that must fail."""
    run = client.run(prompt)
    assert run.outcome == "execution_error"
    assert run.data("execution_error")[0]["node_id"] == at
    return run.error


# Refused when queued


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"length": 10}, ("length=10", "9", "17")),
        ({"length": 120}, ("length=120", "113", "121")),
        ({"width": 100}, ("width=100", "96", "128")),
        ({"height": 720}, ("height=720", "704", "736")),
    ],
)
def test_size_off_the_grid(client, size, words):
    prompt = prompts.render()
    prompt["latent"]["inputs"].update(size)
    text = refusal(client, prompt)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("class_type", "inputs", "words"),
    [
        ("LTXGraphEmptyLatent", {"width": 3_200_000}, "width=3200000: it must lie between 32 and 16384"),
        ("LTXGraphEmptyLatent", {"length": 8_000_000_001}, "length=8000000001: it must lie between 1 and 16384"),
        ("LTXGraphVideoEncode", {"width": 65536, "height": 64}, "width=65536: it must lie between 0 and 16384"),
        ("LTXGraphTemporalRegion", {"start_time": -1.0}, "start_time=-1.0: it must lie between 0.0 and 1000.0"),
    ],
)
def test_numbers_beyond_their_limits(client, class_type, inputs, words):
    """ComfyUI does not hold inputs to their limits that a node validates itself: terabytes would be asked for."""
    given = {
        "LTXGraphEmptyLatent": prompts.render()["latent"]["inputs"],
        "LTXGraphVideoEncode": {
            "video_vae": ["video_vae", 0], "pixels": ["decode", 0], "temporal_size": 0, "tile_size": 0, "overlap": 0,
        },
        "LTXGraphTemporalRegion": {
            "latent": ["latent", 0], "start_time": 0.0, "end_time": 1.0, "regenerate": "video", "frame_rate": 24.0,
        },
    }[class_type]
    prompt = prompts.render()
    prompt["asked"] = node(class_type, **given | inputs)
    prompt["show"] = node("PreviewAny", source=["asked", 0])
    assert words in refusal(client, prompt)


def test_words_where_a_number_belongs(client):
    prompt = prompts.render()
    prompt["latent"]["inputs"]["length"] = "nine"
    assert "invalid_input_type" in refusal(client, prompt)


@pytest.mark.parametrize(
    ("name", "source"),
    [("model", "LTX Graph Model Loader"), ("positive", "an encoded prompt"), ("latent_image", "an LTX latent")],
)
def test_a_switch_that_hands_on_nothing(client, name, source):
    prompt = sampled(**{name: ["nothing", 0]})
    prompt["nothing"] = node("LTXTestNothing")
    text = failure(client, prompt)
    assert text.startswith(f"{name}: ") and "nothing" in text and source in text


def test_a_switch_that_hands_on_nothing_to_optional_inputs(client, frames_of):
    """As if they were not connected."""
    plain = frames_of(client.run(prompts.render()))
    optional = ("negative", "noise", "sigmas", "sampler", "guidance", "report")
    prompt = sampled(**{name: ["nothing", 0] for name in optional})
    prompt["nothing"] = node("LTXTestNothing")
    prompt["model"]["inputs"]["lora"] = ["nothing", 0]
    assert np.array_equal(frames_of(client.run(prompt)), plain)


@pytest.mark.parametrize("blocks", ["-1", "one", "\N{SUPERSCRIPT TWO}"])
def test_stg_blocks_that_are_no_numbers(client, blocks):
    prompt = sampled(guidance=["guidance", 0])
    streams = {f"{stream}_{part}": value for stream in ("video", "audio")
               for part, value in {"cfg": 1.0, "stg": 1.0, "modality": 1.0, "rescale": 0.0, "skip_step": 0}.items()}
    prompt["guidance"] = node("LTXGraphGuidance", preset="custom", **streams, stg_blocks=blocks, passes="auto")
    assert "write block numbers" in refusal(client, prompt)


def test_size_off_the_grid_by_a_link(client):
    """A linked value is known only when the node runs: the same words then."""
    prompt = prompts.render()
    prompt["length"] = node("PrimitiveInt", value=10)
    prompt["latent"]["inputs"]["length"] = ["length", 0]
    text = failure(client, prompt, at="latent")
    assert "length=10" in text and "17" in text


@pytest.fixture
def model_file(base):
    """A function that puts a file into a model folder for one test."""
    made = []

    def place(folder: str, name: str, content: bytes | None = None, copy_of=None):
        path = base / "models" / folder / name
        made.append(path)
        if copy_of is not None:
            shutil.copy(copy_of, path)
        else:
            path.write_bytes(content)
        return name

    yield place
    for path in made:
        path.unlink()


def test_a_vae_picked_as_the_transformer(client, base, model_file):
    name = model_file("diffusion_models", "mistaken.safetensors", copy_of=base / "models/vae" / CONV_VAE_FILE)
    prompt = prompts.render()
    prompt["model"]["inputs"]["unet_name"] = name
    text = refusal(client, prompt)
    assert name in text and "video VAE" in text


def test_a_transformer_picked_as_the_vae(client, base, model_file):
    name = model_file("vae", "mistaken.safetensors", copy_of=base / "models/diffusion_models" / TRANSFORMER_FILE)
    prompt = prompts.render()
    prompt["video_vae"]["inputs"]["vae_name"] = name
    text = refusal(client, prompt)
    assert name in text and "transformer" in text


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42018190584\n", "LFS"),
        (b"<!DOCTYPE html><html><title>Access denied</title></html>", "web page"),
        (b"\x80\x02}q\x00.", "pickle"),
    ],
)
def test_files_that_are_no_checkpoint(client, model_file, content, word):
    prompt = prompts.render()
    prompt["model"]["inputs"]["unet_name"] = model_file("diffusion_models", "download.safetensors", content)
    text = refusal(client, prompt)
    assert "download.safetensors" in text and word.lower() in text.lower(), text


def test_a_truncated_file(client, base, model_file):
    whole = (base / "models/diffusion_models" / TRANSFORMER_FILE).read_bytes()
    prompt = prompts.render()
    prompt["model"]["inputs"]["unet_name"] = model_file(
        "diffusion_models", "half.safetensors", whole[: len(whole) // 2]
    )
    text = refusal(client, prompt)
    assert "half.safetensors" in text and "truncated" in text, text


def test_a_file_that_is_not_there(client):
    prompt = prompts.render()
    prompt["model"]["inputs"]["unet_name"] = "absent.safetensors"
    text = refusal(client, prompt)
    assert "absent.safetensors" in text and "models/diffusion_models" in text


def test_conditioning_outside_its_folders(client):
    prompt = prompts.render()
    prompt["positive"]["inputs"]["conditioning_name"] = "../user/default/comfy.settings.json"
    assert "not a plain file name" in refusal(client, prompt)


def test_a_name_to_save_under_is_refused_before_the_prompt_is_encoded(client):
    prompt = {
        "positive": prompts.render()["positive"],
        "save": node("LTXGraphSaveConditioning", conditioning=["positive", 0], filename_prefix="folder/name"),
    }
    assert "not a plain file name" in refusal(client, prompt)


def test_a_conditioning_that_no_file_holds_leaves_none(client, base):
    prompt = {
        "positive": prompts.render()["positive"],
        "junk": node("LTXTestConditioningJunk", conditioning=["positive", 0], key="junk"),
        "save": node("LTXGraphSaveConditioning", conditioning=["junk", 0], filename_prefix="unfit"),
    }
    assert "'junk' of type list" in failure(client, prompt, at="save")
    assert not list((base / "output" / "ltxgraph" / "conditioning").glob("unfit*"))


# Refused when run, before the weights are read


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("image latent", ("latent_image", "(1, 4, 2, 2)", "128")),
        ("foreign channels", ("latent_image", "(1, 16, 2, 2, 2)", "128")),
        ("unequal batch", ("latent_image", "batch 2", "1")),
        ("one part", ("latent_image", "1 part")),
        ("NaN", ("video latent", "NaN")),
        ("nothing", ("latent_image", "samples")),
    ],
)
def test_latents_that_are_none_of_ltx(client, kind, words):
    prompt = prompts.render()
    prompt["latent"] = node("LTXTestLatent", kind=kind)
    text = failure(client, prompt)
    assert all(word in text for word in words), text


def stays(base, node_id: str) -> int:
    """How often the node has been in any render's log."""
    logs = (base / "output" / "ltxgraph").glob("*.jsonl")
    return sum(log.read_text(encoding="utf-8").count(f'"name": "{node_id}"') for log in logs)


def test_sound_of_six_channels_is_refused_before_a_stay_begins(client, base):
    before = stays(base, "LTXGraphAudioEncode")
    prompt = {
        "sound": node("LTXTestJunk", kind="surround"),
        "vae": node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE),
        "encode": node("LTXGraphAudioEncode", audio_vae=["vae", 0], audio=["sound", 0], length=0, frame_rate=24.0),
        "show": node("PreviewAny", source=["encode", 1]),
    }
    assert "6 channels" in failure(client, prompt, at="encode")
    assert stays(base, "LTXGraphAudioEncode") == before


def test_a_vae_of_another_width_is_refused_before_the_upscaler_is_read(client, base):
    before = stays(base, "LTXGraphLatentUpscale")
    shutil.copy(GOLDENS / "video_vae_conv_tiny.safetensors", base / "models" / "vae" / "narrow.safetensors")
    prompt = {
        "latent": node("LTXTestLatent", kind="NaN"),
        "vae": node("LTXGraphVideoVAELoader", vae_name="narrow.safetensors"),
        "upscaler": node("LTXGraphUpscalerLoader", model_name=SPATIAL_UPSCALER_FILE),
        "upscale": node(
            "LTXGraphLatentUpscale", samples=["latent", 0], upscale_model=["upscaler", 0], video_vae=["vae", 0]
        ),
        "show": node("PreviewAny", source=["upscale", 1]),
    }
    assert "statistics have 4 channels, the latent has 128" in failure(client, prompt, at="upscale")
    assert stays(base, "LTXGraphLatentUpscale") == before


@pytest.mark.parametrize("key", ["area", "control", "a_future_key"])
def test_conditioning_keys_are_refused_not_ignored(client, key):
    prompt = sampled(positive=["keyed", 0])
    prompt["keyed"] = node("LTXTestConditioningKey", conditioning=["positive", 0], key=key, value=1.0)
    text = failure(client, prompt)
    assert "positive" in text and key in text


def test_combined_prompts_are_refused(client):
    prompt = sampled(positive=["both", 0])
    prompt["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["positive", 0])
    assert "2 conditioning entries" in failure(client, prompt)


@pytest.mark.parametrize(
    ("features", "word"), [(torch.zeros(1, 5, 100), "192"), (torch.full((1, 5, 192), float("nan")), "NaN")]
)
def test_conditioning_that_does_not_fit(client, base, features, word):
    file = base / "input" / "unfit.safetensors"
    save_conditioning(file, [(features, {"unprocessed_ltxav_embeds": True})])
    prompt = prompts.render()
    prompt["positive"]["inputs"]["conditioning_name"] = file.name
    text = failure(client, prompt)
    file.unlink()
    assert word in text, text


def test_foreign_sampler_is_refused_by_name(client):
    prompt = sampled(sampler=["other", 0])
    prompt["other"] = node("KSamplerSelect", sampler_name="dpmpp_2m")
    assert "dpmpp_2m" in failure(client, prompt)


def test_noise_without_sound_for_a_latent_with_sound(client):
    prompt = sampled(noise=["none", 0])
    prompt["none"] = node("LTXTestVideoNoise")
    text = failure(client, prompt)
    assert "noise" in text and "RandomNoise" in text


@pytest.mark.parametrize(("sigmas", "word"), [
    ("0.5, 1.0, 0.0", "decrease"),
    ("1.0, 0.5, 0.5, 0.0", "decrease"),
    ("1.0", "n+1 >= 2 values"),
    ("2.0, 0.0", "[0, 1]"),
])
def test_sigmas_that_make_no_steps(client, sigmas, word):
    prompt = sampled(sigmas=["sigmas", 0])
    prompt["sigmas"] = node("ManualSigmas", sigmas=sigmas)
    assert word in failure(client, prompt)


def test_sigmas_may_end_above_zero(client, frames_of):
    """A render that another sampler goes on with."""
    prompt = sampled(sigmas=["sigmas", 0])
    prompt["sigmas"] = node("ManualSigmas", sigmas="1.0, 0.9, 0.8")
    assert frames_of(client.run(prompt)).shape == (prompts.FRAMES, prompts.HEIGHT, prompts.WIDTH, 3)


@pytest.mark.parametrize("frames", [9, -50])
def test_guides_outside_the_clip(client, base, frames):
    """The native node keeps them inside; a conditioning that was made for another clip need not."""
    Image.new("RGB", (96, 64), (200, 30, 90)).save(base / "input" / "guide.png")
    prompt = sampled(latent_image=["guide", 2], positive=["shifted", 0])
    prompt["latent"]["inputs"]["with_audio"] = False
    prompt["shifted"] = node("LTXTestShiftGuides", conditioning=["guide", 0], frames=frames)
    prompt["rate"] = node(
        "LTXVConditioning", positive=["positive", 0], negative=["positive", 0], frame_rate=24.0
    )
    prompt["native_vae"] = node("VAELoader", vae_name=CONV_VAE_FILE)
    prompt["image"] = node("LoadImage", image="guide.png")
    prompt["guide"] = node(
        "LTXVAddGuide", positive=["rate", 0], negative=["rate", 1], vae=["native_vae", 0], latent=["latent", 0],
        image=["image", 0], frame_idx=0, strength=1.0,
    )
    assert "outside the clip" in failure(client, prompt)


def test_two_generations_are_refused_by_the_names_of_both(client, base):
    """A transformer of 2.3 with a video VAE, an audio VAE and an upscaler of 2.5, though every shape fits."""
    old = base / "models" / "diffusion_models" / "ltx-2.3-22b-distilled.safetensors"
    write_tiny_transformer(old, flavour="2.3")
    prompt = sampled(schedule="distilled stage 2")
    prompt["model"]["inputs"]["unet_name"] = old.name
    text = failure(client, prompt, at="decode")
    assert f"{old.name} is of LTX 2.3.0, {CONV_VAE_FILE} of LTX 2.5.0" in text
    del prompt["decode"], prompt["save"]
    prompt["audio_vae"] = node("LTXGraphAudioVAELoader", vae_name=AUDIO_VAE_FILE)
    prompt["sound"] = node("LTXGraphAudioDecode", audio_vae=["audio_vae", 0], samples=["sampler", 0])
    prompt["save"] = node("PreviewAudio", audio=["sound", 0])
    assert AUDIO_VAE_FILE in failure(client, prompt, at="sound")
    del prompt["sound"], prompt["audio_vae"]
    prompt["upscaler"] = node("LTXGraphUpscalerLoader", model_name=SPATIAL_UPSCALER_FILE)
    prompt["upscale"] = node(
        "LTXGraphLatentUpscale", samples=["sampler", 0], upscale_model=["upscaler", 0], video_vae=["video_vae", 0]
    )
    prompt["save"] = node("PreviewAny", source=["upscale", 0])
    assert old.name in failure(client, prompt, at="upscale")
    prompt = prompts.parity_run()
    prompt["model"]["inputs"]["unet_name"] = old.name
    prompt["parity"]["inputs"]["schedule"] = "distilled"
    assert old.name in failure(client, prompt, at="parity")
    old.unlink()


def test_the_audio_vae_is_not_there(client):
    prompt = prompts.render()
    prompt["audio_vae"] = node("LTXGraphAudioVAELoader", vae_name="absent-audio-vae.safetensors")
    prompt["sound"] = node("LTXGraphAudioDecode", audio_vae=["audio_vae", 0], samples=["sampler", 0])
    prompt["save_sound"] = node("PreviewAudio", audio=["sound", 0])
    text = refusal(client, prompt)
    assert "absent-audio-vae.safetensors" in text and AUDIO_VAE_FILE in text and "models/vae" in text


def test_sound_alone_can_not_be_decoded_to_pictures(client):
    prompt = prompts.render()
    prompt["latent"] = node("LTXTestLatent", kind="audio")
    assert "samples" in failure(client, prompt, at="decode")


# CUDA graphs on a machine without CUDA


def test_a_server_that_forbids_cuda_graphs_is_obeyed(base, comfyui, comfyui_overlay):
    if "--disable-cuda-graphs" not in (comfyui / "comfy" / "cli_args.py").read_text(encoding="utf-8"):
        pytest.skip("not run: this ComfyUI is older than 0.33 and has no --disable-cuda-graphs")
    with ComfyServer(base, comfyui, overlay=comfyui_overlay, arguments=["--disable-cuda-graphs"]) as running:
        text = failure(running.client(), sampled(cuda_graph="on", on_capture_failure="error"))
    assert "ComfyUI was started with --disable-cuda-graphs" in text


def test_graph_without_cuda_runs_eager_or_raises(client, frames_of):
    eager = frames_of(client.run(sampled(cuda_graph="off")))
    asked = frames_of(client.run(sampled(cuda_graph="on")))
    assert np.array_equal(eager, asked)
    assert "CUDA" in failure(client, sampled(cuda_graph="on", on_capture_failure="error"))


# Files that change or hold NaN


@pytest.fixture
def changing_file(base, tmp_path):
    """The transformer's path, and its original content restored afterwards."""
    path = base / "models" / "diffusion_models" / TRANSFORMER_FILE
    kept = tmp_path / "kept.safetensors"
    shutil.copy2(path, kept)
    yield path
    shutil.copy(kept, path)


def test_a_file_that_changes_between_runs_is_read_again(client, changing_file, tmp_path, frames_of):
    before = frames_of(client.run(prompts.render()))
    original = changing_file.read_bytes()
    changing_file.write_bytes(write_tiny_checkpoints(tmp_path / "other", seed=1)["transformer"].read_bytes())
    changed = client.run(prompts.render())
    assert "model" in changed.executed_nodes
    assert not np.array_equal(frames_of(changed), before)
    changing_file.write_bytes(original)
    assert np.array_equal(frames_of(client.run(prompts.render())), before)


def test_nan_in_the_weights_names_the_phase(client, changing_file, tmp_path):
    with safe_open(changing_file, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    name = next(name for name in tensors if name.endswith("transformer_blocks.1.ff.net.2.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, tmp_path / "nan.safetensors", metadata)
    changing_file.write_bytes((tmp_path / "nan.safetensors").read_bytes())
    text = failure(client, prompts.render())
    assert "sample.step" in text, text


def test_history_keeps_the_error(client):
    run = client.run(sampled(cuda_graph="on", on_capture_failure="error"))
    assert run.history["status"]["status_str"] == "error"
    assert "CUDA" in json.dumps(run.history["status"]["messages"])
