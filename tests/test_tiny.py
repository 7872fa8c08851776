"""Tiny checkpoints: the published layout at small widths, and renders that a parity verdict can judge."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.config import (
    ConvVAEConfig,
    DiffusionVAEConfig,
    DurationHeadConfig,
    TransformerConfig,
    UpsamplerConfig,
)
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, sample
from ltx_runtime.schedules import distilled_sigmas
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.tiny import (
    fill_random,
    tiny_diffusion_vae_config,
    tiny_duration_head_config,
    tiny_transformer_config,
    tiny_upsampler_config,
    tiny_video_vae_config,
    write_tiny_checkpoints,
    write_tiny_monolith,
    write_tiny_transformer,
)
from ltx_runtime.transformer import LTXTransformer
from ltx_runtime.video_vae import load_video_vae

TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, Path]:
    return write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))


def structure(names) -> set[str]:
    """Names with layer numbers taken out."""
    return {re.sub(r"\.\d+\.", ".#.", name) for name in names}


def published_manifest(name: str) -> dict:
    return json.loads((TESTS / "manifests" / f"{name}.json").read_text())


def test_transformer_has_every_name_dtype_and_key_of_the_published_file(paths):
    header = read_header(paths["transformer"])
    manifest = published_manifest("transformer-22b")
    assert structure(header.tensors) == structure(manifest)
    for name, spec in header.tensors.items():
        assert spec.dtype == manifest[name][0]
        assert len(spec.shape) == len(manifest[name][1])
    published = json.loads((TESTS / "configs" / "transformer-22b.json").read_text())["metadata"]
    assert header.config["transformer"].keys() == published["config"]["transformer"].keys()
    assert header.metadata.keys() == published.keys()
    assert header.metadata["model_version"] == "2.5.0"
    assert TransformerConfig.from_header(header) == tiny_transformer_config()


def test_vae_has_every_name_of_the_published_file(paths):
    header = read_header(paths["video_vae"])
    manifest = published_manifest("video_vae_conv")
    assert header.tensors.keys() == manifest.keys()
    assert {spec.dtype for spec in header.tensors.values()} == {"BF16"}
    published = json.loads((TESTS / "configs" / "video_vae_conv.json").read_text())["vae"]
    ours = header.config["vae"]
    assert ours.keys() == published.keys()
    widths = ("encoder_base_channels", "decoder_base_channels")
    assert {key: value for key, value in ours.items() if key not in widths} == {
        key: value for key, value in published.items() if key not in widths
    }
    assert ConvVAEConfig.from_header(header) == tiny_video_vae_config()


def test_diffusion_vae_has_every_name_and_key_of_the_published_file(paths):
    header = read_header(paths["diffusion_video_vae"])
    manifest = published_manifest("video_vae_diffusion")
    assert structure(structure(header.tensors)) == structure(structure(manifest))  # blocks are numbered in stages
    assert all(len(spec.shape) == len(manifest[name][1]) for name, spec in header.tensors.items() if name in manifest)
    assert {spec.dtype for spec in header.tensors.values()} == {"BF16"}
    published = json.loads((TESTS / "configs" / "video_vae_diffusion.json").read_text())["vae"]
    ours = header.config["vae"]
    assert ours.keys() == published.keys()
    assert all(ours[part].keys() == published[part].keys() for part in ("encoder", "decoder"))
    assert ours["encoder"]["blocks"] == published["encoder"]["blocks"]
    assert DiffusionVAEConfig.from_header(header) == tiny_diffusion_vae_config()


def test_upscalers_have_every_name_and_key_of_the_published_files(paths):
    for part, name in (
        ("spatial_upscaler", "latent_upsampler_spatial_x2"),
        ("temporal_upscaler", "latent_upsampler_temporal_x2"),
    ):
        header = read_header(paths[part])
        manifest = published_manifest(name)
        assert structure(header.tensors) == structure(manifest)
        assert all(len(spec.shape) == len(manifest[tensor][1]) for tensor, spec in header.tensors.items())
        assert {spec.dtype for spec in header.tensors.values()} == {"BF16"}
        published = json.loads((TESTS / "configs" / f"{name}.json").read_text())
        sizes = ("mid_channels", "num_blocks_per_stage")
        assert {k: v for k, v in header.config.items() if k not in sizes} == {
            k: v for k, v in published.items() if k not in sizes
        }
        assert UpsamplerConfig.from_header(header) == tiny_upsampler_config(spatial=part == "spatial_upscaler")


def test_duration_head_has_every_name_of_the_published_file(paths):
    header = read_header(paths["duration_head"])
    assert header.tensors.keys() == published_manifest("duration_head").keys()
    assert {spec.dtype for spec in header.tensors.values()} == {"BF16"}
    assert DurationHeadConfig.from_header(header) == tiny_duration_head_config()


def test_conditioning_is_what_the_native_encoder_gives(paths):
    for name in ("positive", "negative"):
        (features, values), = load_conditioning(paths[name])
        assert features.dtype == torch.float32 and features.shape[::2] == (1, 128 + 64)
        assert values["unprocessed_ltxav_embeds"] is True


def test_the_command_writes_the_same_small_files_again(paths, tmp_path):
    subprocess.run([sys.executable, "-m", "ltx_runtime.tiny", str(tmp_path)], cwd=TESTS.parent, check=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(path.name for path in paths.values())
    for path in paths.values():
        ours, theirs = read_header(path), read_header(tmp_path / path.name)
        assert ours.metadata == theirs.metadata
        tensors, others = load_file(path), load_file(tmp_path / path.name)
        assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert sum(path.stat().st_size for path in paths.values()) < 12e6


def test_another_seed_gives_other_weights(paths, tmp_path):
    other = write_tiny_transformer(tmp_path / "t.safetensors", seed=1)
    a, b = (load_transformer(path, device="cpu").module.state_dict() for path in (paths["transformer"], other))
    assert all(not torch.equal(a[name], b[name]) for name in a)


def test_2_3_flavour_and_monolith(tmp_path):
    flavoured = read_header(write_tiny_transformer(tmp_path / "t.safetensors", flavour="2.3"))
    config = TransformerConfig.from_header(flavoured)
    assert config.ff_bias and not config.keyframe_embedding and config.generation == (2, 3)
    monolith = write_tiny_monolith(tmp_path / "m.safetensors")
    assert set(read_header(monolith).components) == {"transformer", "video_vae_conv"}
    whole, part = (load_transformer(path, device="cpu").module.state_dict() for path in (monolith, flavoured.path))
    assert whole.keys() == part.keys() and all(torch.equal(whole[name], part[name]) for name in whole)
    assert load_video_vae(monolith, device="cpu").resident


def test_activations_keep_their_size_through_48_layers():
    """The rule serves the full-size random weights too, so depth must not blow up or drown the stream."""
    config = replace(tiny_transformer_config(), num_layers=48)
    model = build_on_meta(lambda: LTXTransformer(config))
    fill_random(model, device="cpu", seed=3)
    shape = VideoLatentShape(1, 128, 2, 2, 3)
    generator = torch.Generator().manual_seed(0)
    video = text_to_video_state(shape, 24.0, torch.randn(shape.as_tuple(), generator=generator))
    audio = audio_state(AudioLatentShape(1, 8, 5, 16))
    contexts = [torch.randn(1, 20, width, generator=generator) for width in (128, 64)]
    constants = model.prepare(video=video, audio=audio, video_context=contexts[0], audio_context=contexts[1])
    modulation = model.modulation(constants, torch.tensor(0.7))
    with torch.inference_mode():
        outputs = model(video.initial.bfloat16(), audio.initial.bfloat16(), constants, modulation)
    for velocity in outputs:
        assert 0.3 < velocity.float().std() < 3


@pytest.fixture(scope="module")
def frames(paths) -> dict[str, torch.Tensor]:
    """Distilled renders: the same twice over, another prompt, another seed."""
    model = load_transformer(paths["transformer"], device="cpu", dtype=torch.float32)
    vae = load_video_vae(paths["video_vae"], device="cpu", dtype=torch.float32)

    def render(prompt: str, seed: int) -> torch.Tensor:
        (features, _), = load_conditioning(paths[prompt])
        request = SampleRequest(
            video=text_to_video_state(VideoLatentShape.from_pixels(96, 64, 9), 24.0),
            audio=audio_state(AudioLatentShape(1, 8, audio_latent_frames(9, 24.0), 16)),
            text=TextFeatures(features, processed=False),
            sigmas=distilled_sigmas(),
            seed=seed,
            sampler="euler_ancestral",
        )
        return vae.decode(sample(model, request).video)

    return {
        "first": render("positive", 1),
        "again": render("positive", 1),
        "prompt": render("negative", 1),
        "seed": render("positive", 2),
    }


def test_a_distilled_render_can_be_judged(frames):
    """Neither flat, nor clipped, nor all frames alike (design.md section 6)."""
    clip = frames["first"]
    assert clip.shape == (9, 64, 96, 3)
    assert ((clip <= 0) | (clip >= 1)).float().mean() < 0.05
    assert 0.1 < clip.std() < 0.3
    assert (clip[1:] - clip[:-1]).abs().mean(dim=(1, 2, 3)).min() > 0.02


def test_every_input_changes_the_picture(frames):
    assert torch.equal(frames["first"], frames["again"])
    # On average over the picture by more than an 8-bit level, so that a saved video shows it.
    assert (frames["first"] - frames["prompt"]).abs().mean() > 1 / 255
    assert (frames["first"] - frames["seed"]).abs().mean() > 1 / 255
