"""Random weights that behave: tiny checkpoints in the published layout, and full-size modules filled on the device.

`python3 -m ltx_runtime.tiny DIR` writes one file of each kind and two prompts under the published names. They have
every structure of LTX-2.5 at small widths, so that the whole way from a file to a decoded video with sound runs in
seconds on a CPU. Picture and sound mean nothing, but they are neither flat nor clipped, and every input changes them.
"""
from __future__ import annotations

import argparse
import json
import math
import os
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from .audio_vae.config import AudioVAEConfig, GeneratorConfig
from .audio_vae.filters import kaiser_sinc_kernel
from .audio_vae.front_end import slaney_filterbank
from .audio_vae.network import AudioVAENetwork
from .conditioning_file import save_conditioning
from .config import (
    ConnectorConfig,
    ConvVAEConfig,
    DiffusionVAEConfig,
    DurationHeadConfig,
    TransformerConfig,
    UpsamplerConfig,
    VideoEncoderConfig,
)
from .duration import DurationNetwork
from .published import (
    AUDIO_VAE_FILE,
    CONV_VAE_FILE,
    DIFFUSION_VAE_FILE,
    DURATION_HEAD_FILE,
    LORA_FILE,
    SPATIAL_UPSCALER_FILE,
    TEMPORAL_UPSCALER_FILE,
    TRANSFORMER_FILE,
)
from .resident_weights import build_on_meta
from .transformer.model import LTXTransformer
from .upsampler import UpsamplerNetwork
from .video_vae.conv_vae import ConvVideoEncoder, ConvVideoVAE
from .video_vae.diffusion_vae import DiffusionVideoVAE

POSITIVE_FILE = "tiny-conditioning-positive.safetensors"
NEGATIVE_FILE = "tiny-conditioning-negative.safetensors"

TRANSFORMER_PREFIX = "model.diffusion_model."
FLAVOURS = ("2.5", "2.3")
LORA_FORMS = ("official", "community", "kohya")

# Normalised channels reach the last layer of a video decoder. Pixels so get a deviation of 0.4: 1 % lie outside [-1, 1]
# and are clipped. The conv decoder has a SiLU between, after which a standard normal has a root mean square of 0.6.
_PIXEL_GAIN = 0.4
_SILU_GAIN = 0.6
# The vocoder adds its branches, 18 in a row, to a stream that nothing normalises. Measured at tiny and at full width:
# with these gains the sound has a deviation near 0.3, and under 1 % of its samples are clipped.
_BRANCH_GAIN = 0.3
_WAVEFORM_GAIN = 0.07


def random_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random values, on the generator's device, at the scale of the tensor's role in a trained model.

    Matrices and kernels keep the variance of their input (deviation 1 / sqrt(fan-in)), so activations stay near 1
    through any number of layers. q and k norm weights near 2, and learned queries of 4, give attention scores a
    deviation of 4: a query picks few keys, and a prompt of ten tokens shows among a thousand registers. Modulation
    tables let every branch add about a third of the stream; registers are as large as prompt tokens, latent deviations
    and gains of norms near 1; biases and embeddings are small, but that of the duration head, which asks for about
    three seconds.
    """
    if name.endswith((".filter", "_basis")):
        return _vocoder_constant(name, shape).to(generator.device, dtype)
    mean, deviation = 0.0, 0.1
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        mean = 2.0
    elif name.endswith("std-of-means") or (name.endswith(".weight") and len(shape) == 1):
        mean = 1.0
    elif name.endswith("mlp_out.bias"):
        mean = math.log(3)
    elif "scale_shift_table" in name:
        deviation = 0.3
    elif name.endswith("learnable_registers"):
        deviation = 1.0
    elif name.endswith("query_tokens"):
        deviation = 4.0
    elif name.endswith("weight"):
        deviation = 1.0 / math.sqrt(math.prod(shape[1:]))
        if name.endswith("decoder.conv_out.conv.weight"):
            deviation *= _PIXEL_GAIN / _SILU_GAIN
        elif name.endswith("decoder.conv_out.weight"):
            deviation *= _PIXEL_GAIN
        elif ".ups." in name:
            deviation = 1.0 / math.sqrt(2 * shape[0])  # transposed; an output sample sees two input samples
        elif ".convs2." in name:
            deviation *= _BRANCH_GAIN
        elif name.endswith("conv_post.weight"):
            deviation *= _WAVEFORM_GAIN
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(mean, deviation, generator=generator)


def _vocoder_constant(name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the vocoder that is not trained but follows from its size, in float64 (audio.md sections 4 and 5)."""
    if name.endswith(".filter"):
        return kaiser_sinc_kernel(shape[-1], 0.25, 0.3).view(shape)
    if name.endswith("mel_basis"):
        return slaney_filterbank(2 * (shape[1] - 1), shape[0], 0.0, 8000.0, 16000).T.contiguous()
    n_fft = shape[-1]
    time, frequency = (torch.arange(count, dtype=torch.float64) for count in (n_fft, n_fft // 2 + 1))
    angle = frequency.unsqueeze(1) * time * (2 * math.pi / n_fft)
    window = torch.hann_window(n_fft, dtype=torch.float64)
    return (torch.cat([angle.cos(), -angle.sin()]) * window).view(shape)


def fill_random(module: nn.Module, *, device: torch.device | str, seed: int = 0) -> int:
    """Give a module that build_on_meta made random weights on the device, in the dtypes it was built with.

    A tensor depends on its name and the seed only. Returns the bytes placed.
    """
    generator = torch.Generator(device)
    placed = 0
    for module_name, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{leaf}"
            # One 32-bit number: the CPU generator ignores the upper bits of a seed.
            generator.manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            tensor = random_tensor(name, tuple(parameter.shape), parameter.dtype, generator)
            owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            placed += tensor.numel() * tensor.element_size()
    return placed


def tiny_transformer_config(flavour: str = "2.5") -> TransformerConfig:
    """Small widths, real latent channels. "2.3" has feed-forward biases and no keyframe embedding."""
    if flavour not in FLAVOURS:
        raise ValueError(f"flavour={flavour!r}, expected one of {', '.join(FLAVOURS)}")
    connector = ConnectorConfig(
        num_layers=1, heads=4, head_dim=32, max_pos=(4096.0,), num_registers=128, gated=True, ff_bias=True
    )
    return TransformerConfig(
        num_layers=2,
        video_heads=4,
        video_head_dim=32,
        audio_heads=4,
        audio_head_dim=16,
        in_channels=128,
        out_channels=128,
        audio_in_channels=128,
        audio_out_channels=128,
        context_width=128,
        audio_context_width=64,
        norm_eps=1e-6,
        rope_theta=10000.0,
        video_max_pos=(20.0, 2048.0, 2048.0),
        audio_max_pos=(20.0,),
        timestep_scale=1000.0,
        av_ca_timestep_scale=1000.0,
        gated_attention=True,
        prompt_adaln=True,
        ff_bias=flavour == "2.3",
        audio_ff_bias=True,
        keyframe_embedding=flavour == "2.5",
        video_connector=connector,
        audio_connector=replace(connector, head_dim=16),
        model_version=f"{flavour}.0",
    )


def tiny_video_vae_config() -> ConvVAEConfig:
    """The published block lists on few channels."""
    kinds = (("res_x", 4), ("space", 2), ("res_x", 6), ("time", 2), ("res_x", 4), ("all", 2), ("res_x", 2), ("all", 1),
             ("res_x", 2))
    decoder_multipliers = iter((2, 2, 1, 2))
    encoder_blocks: list[tuple[str, Mapping[str, int]]] = []
    decoder_blocks: list[tuple[str, Mapping[str, int]]] = []
    for kind, number in kinds:
        if kind == "res_x":
            encoder_blocks.append((kind, {"num_layers": number}))
            decoder_blocks.append((kind, {"num_layers": number}))
        else:
            encoder_blocks.append((f"compress_{kind}_res", {"multiplier": number}))
            decoder_blocks.append((f"compress_{kind}", {"multiplier": next(decoder_multipliers)}))
    return ConvVAEConfig(
        latent_channels=128,
        encoder_base_channels=4,
        decoder_base_channels=4,
        patch_size=4,
        encoder_blocks=tuple(encoder_blocks),
        decoder_blocks=tuple(decoder_blocks),
        causal_decoder=False,
        model_version="2.5.0",
    )


def tiny_diffusion_vae_config() -> DiffusionVAEConfig:
    """Five stages at small widths and windows that differ along the axes; the last with two heads and two blocks."""
    return DiffusionVAEConfig(
        latent_channels=128,
        patch_size=4,
        head_dim=16,
        stage_channels=(64, 64, 64, 64, 32),
        stage_depths=(1, 1, 1, 1, 2),
        stage_kernels=((3, 3, 3), (3, 3, 3), (3, 3, 5), (3, 5, 3), (5, 5, 5)),
        upsamples=(((1, 2, 2), 1), ((2, 1, 1), 1), ((2, 2, 2), 1), ((2, 2, 2), 2)),
        timestep_scale=1000.0,
        num_steps=1,
        prediction="x0",
        time_width=32,
        gated=False,
        model_version="2.5.0",
    )


def tiny_upsampler_config(*, spatial: bool) -> UpsamplerConfig:
    """One block before and one behind; GroupNorm wants 32 channels at least."""
    return UpsamplerConfig(in_channels=128, mid_channels=32, num_blocks=1, spatial=spatial)


def tiny_duration_head_config() -> DurationHeadConfig:
    """Fits the contexts of the tiny transformer."""
    transformer = tiny_transformer_config()
    return DurationHeadConfig(
        video_width=transformer.context_width,
        audio_width=transformer.audio_context_width,
        width=32,
        num_queries=1,
        hidden_width=32,
    )


def tiny_audio_vae_config() -> AudioVAEConfig:
    """The published levels, rates and kernels on few channels: lengths and sampling rates are the real ones."""
    blocks: dict[str, Any] = {"resblock_kernel_sizes": (3, 7, 11), "resblock_dilations": ((1, 3, 5),) * 3}
    return AudioVAEConfig(
        latent_channels=8,
        base_channels=4,
        channel_multipliers=(1, 2, 4),
        num_res_blocks=2,
        mel_bins=64,
        sample_rate=16000,
        hop_length=160,
        n_fft=1024,
        min_hz=0.0,
        max_hz=8000.0,
        vocoder=GeneratorConfig(64, (5, 2, 2, 2, 2, 2), (11, 4, 4, 4, 4, 4), **blocks),
        extension=GeneratorConfig(32, (6, 5, 2, 2, 2), (12, 11, 4, 4, 4), **blocks),
        extension_hop_length=80,
        extension_n_fft=512,
        extension_mel_bins=64,
        output_sample_rate=48000,
        model_version="2.5.0",
    )


def write_tiny_transformer(path: str | os.PathLike[str], *, seed: int = 0, flavour: str = "2.5") -> Path:
    """Write a transformer with its connectors in the published layout (transformer.md sections 1 and 3)."""
    config = tiny_transformer_config(flavour)
    tensors = _random_weights(LTXTransformer, config, TRANSFORMER_PREFIX, seed)
    return _write(path, tensors, {"transformer": _transformer_settings(config)}, config.model_version)


def write_tiny_video_vae(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write a conv video VAE, encoder and decoder, in the published layout (video_vae.md section 1)."""
    config = tiny_video_vae_config()
    tensors = _vae_weights(config, "", seed)
    return _write(path, tensors, {"vae": _vae_settings(config)}, config.model_version)


def write_tiny_diffusion_vae(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write a diffusion video VAE, encoder and decoder, in the published layout (video_vae.md section 1)."""
    config, encoder = tiny_diffusion_vae_config(), tiny_video_vae_config().encoder
    tensors = _random_weights(DiffusionVideoVAE, config, "", seed)
    tensors |= _random_weights(ConvVideoEncoder, encoder, "", seed)
    return _write(path, tensors, {"vae": _diffusion_vae_settings(config, encoder)}, "2.5.0")


def write_tiny_upsampler(path: str | os.PathLike[str], *, spatial: bool, seed: int = 0) -> Path:
    """Write a latent upsampler in the published layout (upsampler_and_duration.md section 1)."""
    config = tiny_upsampler_config(spatial=spatial)
    tensors = _random_weights(UpsamplerNetwork, config, "", seed)
    settings = {
        "_class_name": "LatentUpsampler",
        "in_channels": config.in_channels,
        "mid_channels": config.mid_channels,
        "num_blocks_per_stage": config.num_blocks,
        "dims": 3,
        "spatial_upsample": spatial,
        "temporal_upsample": not spatial,
        "spatial_scale": 2.0,
        "rational_resampler": not spatial,
    }
    return _write(path, tensors, settings, "2.5.0")


def write_tiny_duration_head(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write a duration head in the published layout (upsampler_and_duration.md section 2). Its sizes show in the
    tensors alone, as in the published file."""
    tensors = _random_weights(DurationNetwork, tiny_duration_head_config(), "duration_head.", seed)
    return _write(path, tensors, {}, "2.5.0")


def write_tiny_audio_vae(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write an audio VAE, encoder, decoder and vocoder, in the published layout (audio.md section 1)."""
    config = tiny_audio_vae_config()
    return _write(path, _random_weights(AudioVAENetwork, config, "", seed), _audio_settings(config), "2.5.0")


def write_tiny_monolith(path: str | os.PathLike[str], *, seed: int = 0) -> Path:
    """Write transformer and conv video VAE into one file, as LTX-2.3 is published."""
    transformer, vae = tiny_transformer_config("2.3"), tiny_video_vae_config()
    tensors = _random_weights(LTXTransformer, transformer, TRANSFORMER_PREFIX, seed)
    tensors |= _vae_weights(vae, "vae.", seed)
    settings = {"transformer": _transformer_settings(transformer), "vae": _vae_settings(vae)}
    return _write(path, tensors, settings, transformer.model_version)


def write_tiny_lora(
    path: str | os.PathLike[str], *, seed: int = 0, form: str = "official", flavour: str = "2.5"
) -> Path:
    """Write an adapter of the tiny transformer that changes it by about half of its weights.

    form: "official" is laid out as the distilled adapter (transformer.md section 15): every Linear but those of the
    connectors, rank min(4, in, out), no alphas. "community" and "kohya" are what other trainers write: the
    attentions, lora_down and lora_up with an alpha, under transformer. or with "_" for "." in the module's path.
    """
    if form not in LORA_FORMS:
        raise ValueError(f"form={form!r}, expected one of {', '.join(LORA_FORMS)}")
    config = tiny_transformer_config(flavour)
    linears = {
        name: module
        for name, module in build_on_meta(lambda: LTXTransformer(config)).named_modules()
        if isinstance(module, nn.Linear)
        and "embeddings_connector" not in name
        and (form == "official" or "attn" in name)
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, linear in linears.items():
        rank = min(4, linear.in_features, linear.out_features)
        down = torch.randn(rank, linear.in_features, generator=generator) / math.sqrt(linear.in_features)
        up = torch.randn(linear.out_features, rank, generator=generator) / math.sqrt(4 * rank)
        if form == "official":
            tensors[f"diffusion_model.{name}.lora_A.weight"] = down.bfloat16()
            tensors[f"diffusion_model.{name}.lora_B.weight"] = up.bfloat16()
            continue
        written = f"transformer.{name}" if form == "community" else f"lora_unet_{name.replace('.', '_')}"
        tensors[f"{written}.lora_down.weight"] = down.bfloat16()
        tensors[f"{written}.lora_up.weight"] = up.bfloat16()
        tensors[f"{written}.alpha"] = torch.tensor(rank / 2)
    Path(path).write_bytes(save(tensors, {"model_version": config.model_version}))
    return Path(path)


def write_tiny_conditioning(path: str | os.PathLike[str], *, num_tokens: int, seed: int = 0) -> Path:
    """Write one prompt as the native text encoder of LTX-2.5 leaves it: real tokens only, connectors not run."""
    config = tiny_transformer_config()
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(1, num_tokens, config.context_width + config.audio_context_width, generator=generator)
    save_conditioning(path, [(features, {"pooled_output": None, "unprocessed_ltxav_embeds": True})])
    return Path(path)


def write_tiny_checkpoints(directory: str | os.PathLike[str], *, seed: int = 0) -> dict[str, Path]:
    """Write a whole set under the published names: transformer, video_vae, audio_vae ... -> path."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    return {
        "transformer": write_tiny_transformer(directory / TRANSFORMER_FILE, seed=seed),
        "video_vae": write_tiny_video_vae(directory / CONV_VAE_FILE, seed=seed),
        "diffusion_video_vae": write_tiny_diffusion_vae(directory / DIFFUSION_VAE_FILE, seed=seed),
        "audio_vae": write_tiny_audio_vae(directory / AUDIO_VAE_FILE, seed=seed),
        "spatial_upscaler": write_tiny_upsampler(directory / SPATIAL_UPSCALER_FILE, spatial=True, seed=seed),
        "temporal_upscaler": write_tiny_upsampler(directory / TEMPORAL_UPSCALER_FILE, spatial=False, seed=seed),
        "duration_head": write_tiny_duration_head(directory / DURATION_HEAD_FILE, seed=seed),
        "lora": write_tiny_lora(directory / LORA_FILE, seed=seed),
        "positive": write_tiny_conditioning(directory / POSITIVE_FILE, num_tokens=11, seed=seed),
        "negative": write_tiny_conditioning(directory / NEGATIVE_FILE, num_tokens=7, seed=seed + 1),
    }


def _vae_weights(config: ConvVAEConfig, prefix: str, seed: int) -> dict[str, Tensor]:
    decoder = _random_weights(ConvVideoVAE, config, prefix, seed)
    return decoder | _random_weights(ConvVideoEncoder, config.encoder, prefix, seed)


def _random_weights(build: Any, config: Any, prefix: str, seed: int) -> dict[str, Tensor]:
    module = build_on_meta(lambda: build(config))
    fill_random(module, device="cpu", seed=seed)
    return {prefix + name: tensor for name, tensor in module.state_dict().items()}


def _write(
    path: str | os.PathLike[str], tensors: dict[str, Tensor], config: dict[str, Any], model_version: str
) -> Path:
    metadata = {"config": json.dumps(config), "model_version": model_version}
    if "transformer" in config and model_version == "2.5.0":
        gemma = {"ltx_version": model_version, "gemma_version": "gemma4-12b-ltx-v1"}
        metadata["gemma_source_checkpoint"] = json.dumps(gemma)
    Path(path).write_bytes(save(tensors, metadata))  # what save_file writes, only its owner may read
    return Path(path)


def _transformer_settings(config: TransformerConfig) -> dict[str, Any]:
    """The config as published files spell it, all keys of transformer-22b.json."""
    video, audio = config.video_connector, config.audio_connector
    settings: dict[str, Any] = {
        "_class_name": "AVTransformer3DModel",
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "attention_head_dim": config.video_head_dim,
        "attention_type": "default",
        "caption_channels": 3840,
        "cross_attention_dim": config.context_width,
        "double_self_attention": False,
        "dropout": 0.0,
        "in_channels": config.in_channels,
        "norm_elementwise_affine": False,
        "norm_eps": config.norm_eps,
        "norm_num_groups": 32,
        "num_attention_heads": config.video_heads,
        "num_embeds_ada_norm": 1000,
        "num_layers": config.num_layers,
        "num_vector_embeds": None,
        "only_cross_attention": False,
        "cross_attention_norm": True,
        "out_channels": config.out_channels,
        "upcast_attention": False,
        "use_linear_projection": False,
        "qk_norm": "rms_norm",
        "standardization_norm": "rms_norm",
        "positional_embedding_type": "rope",
        "positional_embedding_theta": config.rope_theta,
        "positional_embedding_max_pos": [int(entry) for entry in config.video_max_pos],
        "timestep_scale_multiplier": int(config.timestep_scale),
        "av_ca_timestep_scale_multiplier": config.av_ca_timestep_scale,
        "causal_temporal_positioning": True,
        "audio_num_attention_heads": config.audio_heads,
        "audio_attention_head_dim": config.audio_head_dim,
        "use_audio_video_cross_attention": True,
        "share_ff": False,
        "audio_out_channels": config.audio_out_channels,
        "audio_cross_attention_dim": config.audio_context_width,
        "audio_positional_embedding_max_pos": [int(entry) for entry in config.audio_max_pos],
        "av_cross_ada_norm": True,
        "use_embeddings_connector": True,
        "connector_attention_head_dim": video.head_dim,
        "connector_num_attention_heads": video.heads,
        "connector_num_layers": video.num_layers,
        "connector_positional_embedding_max_pos": [int(entry) for entry in video.max_pos],
        "connector_num_learnable_registers": video.num_registers,
        "connector_norm_output": True,
        "use_middle_indices_grid": True,
        "apply_gated_attention": config.gated_attention,
        "connector_apply_gated_attention": video.gated,
        "caption_projection_first_linear": False,
        "caption_projection_second_linear": False,
        "caption_proj_input_norm": False,
        "connector_learnable_registers_std": 1,
        "caption_proj_before_connector": True,
        "audio_connector_attention_head_dim": audio.head_dim,
        "audio_connector_num_attention_heads": audio.heads,
        "cross_attention_adaln": True,
        "rope_type": "split",
        "frequencies_precision": "float64",
        "text_encoder_norm_type": "PER_TOKEN_RMS",
    }
    # Keys that 2.5 added.
    if not config.ff_bias:
        settings["ff_bias"] = False
    if config.keyframe_embedding:
        settings["use_keyframes_abs_pos_embedding"] = True
    return settings


def _vae_settings(config: ConvVAEConfig) -> dict[str, Any]:
    """The config as published files spell it, all keys of video_vae_conv.json."""
    return {
        "_class_name": "CausalVideoAutoencoder",
        "dims": 3,
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": config.latent_channels,
        "encoder_blocks": config.encoder_blocks,
        "decoder_blocks": config.decoder_blocks,
        "scaling_factor": 1.0,
        "norm_layer": "pixel_norm",
        "patch_size": config.patch_size,
        "latent_log_var": "uniform",
        "use_quant_conv": False,
        "causal_decoder": config.causal_decoder,
        "timestep_conditioning": False,
        "normalize_latent_channels": False,
        "encoder_base_channels": config.encoder_base_channels,
        "decoder_base_channels": config.decoder_base_channels,
        "spatial_padding_mode": "zeros",
    }


def _diffusion_vae_settings(config: DiffusionVAEConfig, encoder: VideoEncoderConfig) -> dict[str, Any]:
    """The config as published files spell it, all keys of video_vae_diffusion.json."""
    return {
        "_class_name": "CausalDiffusionVAE",
        "dims": 3,
        "model_output_type": config.prediction,
        "encoder": {
            "_class_name": "Encoder",
            "dims": 3,
            "in_channels": 3,
            "out_channels": encoder.latent_channels,
            "blocks": encoder.blocks,
            "patch_size": encoder.patch_size,
            "latent_log_var": "constant",
            "latent_log_var_value": -7.824046010856292,
            "norm_layer": "pixel_norm",
            "base_channels": encoder.base_channels,
            "spatial_padding_mode": "zeros",
        },
        "decoder": {
            "_class_name": "NADiffusionDecoder",
            "in_channels": config.latent_channels,
            "out_channels": 3,
            "patch_size": config.patch_size,
            "head_dim": config.head_dim,
            "stage_channels": config.stage_channels,
            "stage_depths": config.stage_depths,
            "stage_kernels": config.stage_kernels,
            "upsamples": config.upsamples,
            "spatial_padding_mode": "zeros",
            "resampler_kind": "linear",
            "stage5_kernel": config.stage_kernels[-1],
            "timestep_scale_multiplier": config.timestep_scale,
            "default_num_inference_steps": config.num_steps,
        },
    }


def _audio_settings(config: AudioVAEConfig) -> dict[str, Any]:
    """The config as published files spell it, all keys of audio_vae.json."""
    mel_vae = {
        "double_z": True,
        "mel_bins": config.mel_bins,
        "z_channels": config.latent_channels,
        "resolution": 256,
        "downsample_time": False,
        "in_channels": 2,
        "out_ch": 2,
        "ch": config.base_channels,
        "ch_mult": config.channel_multipliers,
        "num_res_blocks": config.num_res_blocks,
        "attn_resolutions": [],
        "dropout": 0.0,
        "mid_block_add_attention": False,
        "norm_type": "pixel",
        "causality_axis": "height",
    }
    preprocessing = {
        "audio": {
            "sampling_rate": config.sample_rate,
            "max_wav_value": 32768.0,
            "duration": 5.12,
            "stereo": True,
            "causal_padding": 3,
        },
        "stft": {
            "filter_length": config.n_fft,
            "hop_length": config.hop_length,
            "win_length": config.n_fft,
            "causal": True,
        },
        "mel": {"n_mel_channels": config.mel_bins, "mel_fmin": int(config.min_hz), "mel_fmax": int(config.max_hz)},
    }
    extension = {
        **_generator_settings(config.extension),
        "apply_final_activation": False,
        "input_sampling_rate": config.sample_rate,
        "output_sampling_rate": config.output_sample_rate,
        "hop_length": config.extension_hop_length,
        "n_fft": config.extension_n_fft,
        "win_size": config.extension_n_fft,
        "num_mels": config.extension_mel_bins,
    }
    return {
        "audio_vae": {
            "model": {"params": {"ddconfig": mel_vae, "sampling_rate": config.sample_rate}},
            "preprocessing": preprocessing,
        },
        "vocoder": {"vocoder": _generator_settings(config.vocoder), "bwe": extension},
    }


def _generator_settings(config: GeneratorConfig) -> dict[str, Any]:
    return {
        "upsample_initial_channel": config.initial_channels,
        "resblock": "AMP1",
        "upsample_rates": config.upsample_rates,
        "resblock_kernel_sizes": config.resblock_kernel_sizes,
        "upsample_kernel_sizes": config.upsample_kernel_sizes,
        "resblock_dilation_sizes": config.resblock_dilations,
        "stereo": True,
        "use_tanh_at_final": False,
        "activation": "snakebeta",
        "use_bias_at_final": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python3 -m ltx_runtime.tiny", description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path, help="folder for the files, made when missing")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other weights (default 0)")
    arguments = parser.parse_args()
    for path in write_tiny_checkpoints(arguments.directory, seed=arguments.seed).values():
        print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
