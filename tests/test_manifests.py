"""The published files at their real size: 42 GB of holes behind a true header."""

from __future__ import annotations

import pytest
from model_files import manifest, published_file, structure

from ltx_runtime.checkpoint import planned_bytes, read_header
from ltx_runtime.config import ConvVAEConfig, DiffusionVAEConfig, TransformerConfig
from ltx_runtime.duration import DurationHead, DurationNetwork
from ltx_runtime.resident_weights import ResidentModule, build_on_meta
from ltx_runtime.transformer import LTXTransformer
from ltx_runtime.upsampler import LatentUpsampler, UpsamplerNetwork
from ltx_runtime.video_vae import ConvVideoEncoder, ConvVideoVAE, DiffusionVideoVAE, VideoEncoder, VideoVAE

PREFIX = "model.diffusion_model."


def test_the_published_transformer_is_accepted_without_reading_it(tmp_path):
    header = read_header(published_file(tmp_path / "t.safetensors", "transformer-22b"))
    assert header.component == "transformer"
    config = TransformerConfig.from_header(header)
    handle = ResidentModule(header, lambda: LTXTransformer(config), {"": PREFIX}, device="cpu")
    # transformer.md section 1: exactly the published data size.
    assert handle.weights_bytes == 42_017_512_960
    assert structure(build_on_meta(lambda: LTXTransformer(config)), PREFIX) == manifest("transformer-22b")


def test_the_published_vae_is_accepted_without_reading_it(tmp_path):
    header = read_header(published_file(tmp_path / "v.safetensors", "video_vae_conv"))
    assert header.component == "video_vae_conv"
    config = ConvVAEConfig.from_header(header)
    assert planned_bytes(header, {"": ""}) == 2 * 726_106_225
    decoder, encoder = VideoVAE(header, device="cpu"), VideoEncoder(header, device="cpu")
    assert decoder.weights_bytes + encoder.weights_bytes == 2 * 726_106_225 + 2 * 2 * 128  # both hold the statistics
    halves = (build_on_meta(lambda: ConvVideoVAE(config)), build_on_meta(lambda: ConvVideoEncoder(config.encoder)))
    assert structure(halves[0]) | structure(halves[1]) == manifest("video_vae_conv")


def test_the_published_diffusion_vae_is_accepted_without_reading_it(tmp_path):
    header = read_header(published_file(tmp_path / "v.safetensors", "video_vae_diffusion"))
    assert header.component == "video_vae_diffusion"
    config = DiffusionVAEConfig.from_header(header)
    decoder, encoder = VideoVAE(header, device="cpu"), VideoEncoder(header, device="cpu")
    # video_vae.md section 1: 736.1 M parameters.
    assert round(planned_bytes(header, {"": ""}) / 2e6, 1) == 736.1
    assert decoder.weights_bytes + encoder.weights_bytes == planned_bytes(header, {"": ""}) + 2 * 2 * 128
    halves = (build_on_meta(lambda: DiffusionVideoVAE(config)), build_on_meta(lambda: ConvVideoEncoder(encoder.config)))
    assert structure(halves[0]) | structure(halves[1]) == manifest("video_vae_diffusion")


@pytest.mark.parametrize("name, spatial, weights_bytes", [
    ("latent_upsampler_spatial_x2", True, 2 * 497_867_904),
    ("latent_upsampler_temporal_x2", False, 2 * 130_968_192),
])
def test_the_published_upsamplers_are_accepted_without_reading_them(tmp_path, name, spatial, weights_bytes):
    header = read_header(published_file(tmp_path / "u.safetensors", name))
    assert header.component == "latent_upsampler"
    upsampler = LatentUpsampler(header, device="cpu")
    assert upsampler.config.spatial is spatial
    assert upsampler.weights_bytes == weights_bytes
    assert structure(build_on_meta(lambda: UpsamplerNetwork(upsampler.config))) == manifest(name)


def test_the_published_duration_head_is_accepted_without_reading_it(tmp_path):
    header = read_header(published_file(tmp_path / "d.safetensors", "duration_head"))
    assert header.component == "duration_head"
    head = DurationHead(header, device="cpu")
    assert head.weights_bytes == 4 * 1_903_361  # float32 of a bf16 file
    assert structure(build_on_meta(lambda: DurationNetwork(head.config)), "duration_head.") == manifest("duration_head")
