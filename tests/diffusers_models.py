"""Models of diffusers 0.42.1 that hold the weights of our files, in float32 on the CPU: an oracle written by others.

The package's own single-file converters rename what they know, which is LTX-2.0; RENAMES below has the rest. Every
load is strict. Where diffusers needs a setting that no file of ours names, the builder says which and why.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    LTX2VideoDiffusionDecoderModel,
    LTX2VideoTransformer3DModel,
)
from diffusers.loaders.single_file_utils import (
    convert_ltx2_audio_vae_to_diffusers,
    convert_ltx2_transformer_to_diffusers,
    convert_ltx2_vae_to_diffusers,
)
from diffusers.pipelines.ltx2 import (
    LTX2DurationHead,
    LTX2LatentUpsamplerModel,
    LTX2TextConnectors,
    LTX2VocoderWithBWE,
)
from safetensors.torch import load_file
from torch import Tensor, nn

from ltx_runtime.audio_vae import AudioVAEConfig
from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import (
    ConvVAEConfig,
    DiffusionVAEConfig,
    DurationHeadConfig,
    TransformerConfig,
    UpsamplerConfig,
)

Model = TypeVar("Model", bound=nn.Module)

# Regular expressions over our names and what takes their place, in order; after the package's converter, if it has one.
RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "transformer": ((r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln."),),
    "connectors": (
        (r"_embeddings_connector\.", "_connector."),
        (r"transformer_1d_blocks", "transformer_blocks"),
        (r"([qk])_norm", r"norm_\1"),
    ),
    "video_vae": ((r"^up_blocks\.7\.", "up_blocks.3.upsamplers.0."), (r"^up_blocks\.8\.", "up_blocks.3.")),
    "vocoder": (
        (r"resblocks", "resnets"),
        (r"\bups\.", "upsamplers."),
        (r"conv_pre", "conv_in"),
        (r"conv_post", "conv_out"),
        (r"act_post", "act_out"),
        (r"downsample\.lowpass", "downsample"),
    ),
    "duration_head": ((r"cross_attn\.out_proj", "to_out"), (r"cross_attn\.", "")),
    "diffusion_decoder": (
        (r"attn\.proj", "attn.to_out.0"),
        (r"attn\.([qk])_norm", r"attn.norm_\1"),
        (r"attn\.qkv", "attn.qkv_proj"),
        (r"t_embedder\.mlp\.0", "t_embedder.timestep_embedder.linear_1"),
        (r"t_embedder\.mlp\.2", "t_embedder.timestep_embedder.linear_2"),
    ),
}
# One tensor of ours that diffusers keeps as three.
STACKED = {"in_proj_": ("to_q.", "to_k.", "to_v."), "qkv_proj.": ("to_q.", "to_k.", "to_v.")}

_DOWNSAMPLE = {
    "compress_space_res": "spatial",
    "compress_time_res": "temporal",
    "compress_all_res": "spatiotemporal",
}
_UPSAMPLE = {"compress_space": "spatial", "compress_time": "temporal", "compress_all": "spatiotemporal"}


def tensors_of(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file under a prefix, named without it, in float32."""
    return {
        name.removeprefix(prefix): tensor.float() for name, tensor in load_file(path).items() if name.startswith(prefix)
    }


def renamed(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        for pattern, replacement in RENAMES[part]:
            name = re.sub(pattern, replacement, name)
        stacked = next((key for key in STACKED if key in name), None)
        if stacked is None:
            found[name] = tensor
        else:
            for target, piece in zip(STACKED[stacked], tensor.chunk(3), strict=True):
                found[name.replace(stacked, target)] = piece
    return found


def _filled(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    model.load_state_dict(tensors, strict=True)
    return model.eval().requires_grad_(False)


def _with_statistics(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    """Latent statistics by assignment: AutoencoderKLLTX2Audio sizes its buffers by base_channels, ours is any width."""
    model.latents_mean = tensors["per_channel_statistics.mean-of-means"]
    model.latents_std = tensors["per_channel_statistics.std-of-means"]
    return model


def transformer(path: Path) -> LTX2VideoTransformer3DModel:
    """The denoiser of a transformer file, with the attention processor that can be perturbed (STG)."""
    header = read_header(path)
    config = TransformerConfig.from_header(header)
    model = LTX2VideoTransformer3DModel(
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_attention_heads=config.video_heads,
        attention_head_dim=config.video_head_dim,
        cross_attention_dim=config.context_width,
        pos_embed_max_pos=int(config.video_max_pos[0]),
        base_height=int(config.video_max_pos[1]),
        base_width=int(config.video_max_pos[2]),
        gated_attn=config.gated_attention,
        cross_attn_mod=True,
        audio_in_channels=config.audio_in_channels,
        audio_out_channels=config.audio_out_channels,
        audio_num_attention_heads=config.audio_heads,
        audio_attention_head_dim=config.audio_head_dim,
        audio_cross_attention_dim=config.audio_context_width,
        audio_pos_embed_max_pos=int(config.audio_max_pos[0]),
        audio_gated_attn=config.gated_attention,
        audio_cross_attn_mod=True,
        num_layers=config.num_layers,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        timestep_scale_multiplier=int(config.timestep_scale),
        cross_attn_timestep_scale_multiplier=int(config.av_ca_timestep_scale),
        rope_type="split",
        use_prompt_embeddings=False,
        perturbed_attn=True,
        ff_bias=config.ff_bias,
        audio_ff_bias=config.audio_ff_bias,
        use_prompt_adaln_single=config.prompt_adaln,
        use_keyframes_abs_pos_embedding=config.keyframe_embedding,
    )
    return _filled(model, transformer_tensors(tensors_of(path, header.prefixes["transformer"])))


def transformer_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our transformer's tensors under diffusers' names, without the connectors'."""
    ours = {name: tensor for name, tensor in tensors.items() if "_embeddings_connector." not in name}
    return renamed(convert_ltx2_transformer_to_diffusers(ours), "transformer")


def connectors(path: Path) -> LTX2TextConnectors:
    """The connectors of a transformer file. The feature projections before them belong to the text encoder, which is
    none of ours: here they are small and random, from torch's global generator."""
    header = read_header(path)
    config = TransformerConfig.from_header(header)
    video, audio = config.video_connector, config.audio_connector
    model = LTX2TextConnectors(
        caption_channels=12,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=video.heads,
        video_connector_attention_head_dim=video.head_dim,
        video_connector_num_layers=video.num_layers,
        video_connector_num_learnable_registers=video.num_registers,
        video_gated_attn=video.gated,
        audio_connector_num_attention_heads=audio.heads,
        audio_connector_attention_head_dim=audio.head_dim,
        audio_connector_num_layers=audio.num_layers,
        audio_connector_num_learnable_registers=audio.num_registers,
        audio_gated_attn=audio.gated,
        connector_rope_base_seq_len=int(video.max_pos[0]),
        rope_theta=config.rope_theta,
        rope_type="split",
        per_modality_projections=True,
        video_hidden_dim=config.context_width,
        audio_hidden_dim=config.audio_context_width,
        proj_bias=True,
    )
    tensors = tensors_of(path, header.prefixes["transformer"])
    ours = renamed({name: tensor for name, tensor in tensors.items() if "_embeddings_connector." in name}, "connectors")
    projections = {name: tensor for name, tensor in model.state_dict().items() if "_text_proj_in." in name}
    return _filled(model, ours | projections)


def video_vae(path: Path) -> AutoencoderKLLTX2Video:
    """The conv video VAE of a file.

    diffusers has one number for the encoder's base width and the latent channels. Where a file of ours has two, the
    encoder here is an empty one that nothing should call.
    """
    config = ConvVAEConfig.from_header(read_header(path))
    encodes = config.encoder_base_channels == config.latent_channels
    width, widths, layers = config.encoder_base_channels, [], []
    for kind, options in config.encoder_blocks:
        if kind == "res_x":
            layers.append(options["num_layers"])
        else:
            width *= options["multiplier"]
            widths.append(width)
    decoder = config.decoder_blocks  # from the pixels to the latent, as diffusers has its own
    factors = [options.get("multiplier", 1) for kind, options in decoder if kind != "res_x"]
    decoder_widths, width = [], config.decoder_base_channels
    for factor in factors:
        width *= factor
        decoder_widths.append(width)
    model = AutoencoderKLLTX2Video(
        latent_channels=config.latent_channels,
        block_out_channels=widths if encodes else (config.latent_channels,) * len(widths),
        layers_per_block=layers if encodes else (0,) * len(layers),
        downsample_type=[_DOWNSAMPLE[kind] for kind, _ in config.encoder_blocks if kind != "res_x"],
        decoder_block_out_channels=decoder_widths,
        decoder_layers_per_block=[options["num_layers"] for kind, options in decoder if kind == "res_x"],
        decoder_spatio_temporal_scaling=(True,) * len(factors),
        decoder_inject_noise=(False,) * (len(factors) + 1),
        upsample_type=[_UPSAMPLE[kind] for kind, _ in reversed(decoder) if kind != "res_x"],
        upsample_residual=(False,) * len(factors),
        upsample_factor=factors,
        patch_size=config.patch_size,
        decoder_causal=config.causal_decoder,
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    tensors = tensors_of(path)
    for part in ("encoder.", "decoder.") if encodes else ("decoder.",):
        ours = {name: tensor for name, tensor in tensors.items() if name.startswith(part)}
        converted = {name.removeprefix(part): t for name, t in convert_ltx2_vae_to_diffusers(ours).items()}
        _filled(getattr(model, part[:-1]), renamed(converted, "video_vae"))
    return _with_statistics(model.eval().requires_grad_(False), tensors)


def audio_vae(path: Path) -> AutoencoderKLLTX2Audio:
    config = AudioVAEConfig.from_header(read_header(path))
    model = AutoencoderKLLTX2Audio(
        base_channels=config.base_channels,
        ch_mult=config.channel_multipliers,
        num_res_blocks=config.num_res_blocks,
        latent_channels=config.latent_channels,
        sample_rate=config.sample_rate,
        mel_hop_length=config.hop_length,
        mel_bins=config.mel_bins,
    )
    tensors = tensors_of(path, "audio_vae.")
    ours = {name: tensor for name, tensor in tensors.items() if not name.startswith("per_channel_statistics.")}
    for part in ("encoder.", "decoder."):
        converted = convert_ltx2_audio_vae_to_diffusers({n: t for n, t in ours.items() if n.startswith(part)})
        _filled(getattr(model, part[:-1]), {name.removeprefix(part): t for name, t in converted.items()})
    return _with_statistics(model.eval().requires_grad_(False), tensors)


def vocoder(path: Path, *, base_clamps: bool = True) -> LTX2VocoderWithBWE:
    """base_clamps False is what diffusers' own conversion of 2.5 builds, see DEVIATIONS in the test."""
    config = AudioVAEConfig.from_header(read_header(path))
    base, extension = config.vocoder, config.extension
    model = LTX2VocoderWithBWE(
        in_channels=2 * config.mel_bins,
        hidden_channels=base.initial_channels,
        upsample_kernel_sizes=base.upsample_kernel_sizes,
        upsample_factors=base.upsample_rates,
        resnet_kernel_sizes=base.resblock_kernel_sizes,
        resnet_dilations=base.resblock_dilations,
        final_act_fn="clamp" if base_clamps else None,
        bwe_in_channels=2 * config.extension_mel_bins,
        bwe_hidden_channels=extension.initial_channels,
        bwe_upsample_kernel_sizes=extension.upsample_kernel_sizes,
        bwe_upsample_factors=extension.upsample_rates,
        bwe_resnet_kernel_sizes=extension.resblock_kernel_sizes,
        bwe_resnet_dilations=extension.resblock_dilations,
        filter_length=config.extension_n_fft,
        hop_length=config.extension_hop_length,
        window_length=config.extension_n_fft,
        num_mel_channels=config.extension_mel_bins,
        input_sampling_rate=config.sample_rate,
        output_sampling_rate=config.output_sample_rate,
    )
    return _filled(model, renamed(tensors_of(path, "vocoder."), "vocoder"))


def upsampler(path: Path) -> LTX2LatentUpsamplerModel:
    config = UpsamplerConfig.from_header(read_header(path))
    model = LTX2LatentUpsamplerModel(
        in_channels=config.in_channels,
        mid_channels=config.mid_channels,
        num_blocks_per_stage=config.num_blocks,
        spatial_upsample=config.spatial,
        temporal_upsample=not config.spatial,
        use_rational_resampler=False,
    )
    return _filled(model, tensors_of(path))


def duration_head(path: Path) -> LTX2DurationHead:
    config = DurationHeadConfig.from_header(read_header(path))
    model = LTX2DurationHead(
        video_cross_attention_dim=config.video_width,
        audio_cross_attention_dim=config.audio_width,
        pooler_hidden_dim=config.width,
        num_queries=config.num_queries,
        mlp_hidden_dim=config.hidden_width,
    )
    return _filled(model, renamed(tensors_of(path, "duration_head."), "duration_head"))


def diffusion_decoder(path: Path, config: DiffusionVAEConfig) -> LTX2VideoDiffusionDecoderModel:
    """config: the file's, or one with other windows or steps, which show in no tensor."""
    model = LTX2VideoDiffusionDecoderModel(
        latent_channels=config.latent_channels,
        patch_size=config.patch_size,
        decoder_head_dim=config.head_dim,
        decoder_stage_channels=config.stage_channels,
        decoder_stage_depths=config.stage_depths,
        decoder_stage_kernels=config.stage_kernels[:-1],
        decoder_upsample_strides=[stride for stride, _ in config.upsamples],
        decoder_upsample_channel_reductions=[reduction for _, reduction in config.upsamples],
        decoder_stage5_kernel=config.stage_kernels[-1],
        decoder_t_emb_dim=config.time_width,
        decoder_timestep_scale_multiplier=config.timestep_scale,
        decoder_model_output_type=config.prediction,
        decoder_num_inference_steps=config.num_steps,
    )
    tensors = tensors_of(path)
    ours = renamed(tensors_of(path, "decoder."), "diffusion_decoder")
    ours.pop("type_emb", None)
    _filled(model.decoder, ours)
    return _with_statistics(model.eval().requires_grad_(False), tensors)
