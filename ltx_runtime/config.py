"""Frozen configs of the models, read from a checkpoint's own config and checked against its tensors.

A size comes from the config, a structural flag from the tensors: re-quantised files may claim tensors that they lack
(transformer.md sections 2 and 18.16, video_vae.md sections 1 and 8). A known key with a value that this runtime does
not implement is refused; an unknown key is ignored.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .errors import CheckpointError
from .shapes import SPACE_FACTOR, TIME_FACTOR

if TYPE_CHECKING:
    from .checkpoint import CheckpointHeader

Shapes = Mapping[str, tuple[int, ...]]

# Published keys that change the arithmetic and have one implementation here.
_TRANSFORMER_FIXED: Mapping[str, Any] = {
    "_class_name": "AVTransformer3DModel",
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "attention_type": "default",
    "double_self_attention": False,
    "norm_elementwise_affine": False,
    "num_vector_embeds": None,
    "only_cross_attention": False,
    "upcast_attention": False,
    "qk_norm": "rms_norm",
    "standardization_norm": "rms_norm",
    "positional_embedding_type": "rope",
    "causal_temporal_positioning": True,
    "use_middle_indices_grid": True,
    "use_audio_video_cross_attention": True,
    "share_ff": False,
    "av_cross_ada_norm": True,
    "cross_attention_adaln": True,
    "connector_norm_output": True,
    "caption_proj_before_connector": True,
    "rope_type": "split",
    "frequencies_precision": "float64",
}

_TRANSFORMER_SIZES = (
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "audio_num_attention_heads",
    "audio_attention_head_dim",
    "cross_attention_dim",
    "audio_cross_attention_dim",
)
# Settings that no tensor shows. Code defaults differ from every published value (the a2v timestep scale defaults to 1,
# transformer.md section 18.7), so a config without one of them is refused instead of guessed.
_TRANSFORMER_REQUIRED = (
    *_TRANSFORMER_SIZES,
    "positional_embedding_theta",
    "positional_embedding_max_pos",
    "audio_positional_embedding_max_pos",
    "timestep_scale_multiplier",
    "av_ca_timestep_scale_multiplier",
    "rope_type",
    "frequencies_precision",
)

# What a file without metadata is taken to mean beyond its shapes: the values of every published 2.3 and 2.5 file
# (transformer.md section 16.4).
_TRANSFORMER_PUBLISHED: Mapping[str, Any] = {
    "norm_eps": 1e-6,
    "positional_embedding_theta": 10000.0,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "audio_positional_embedding_max_pos": [20],
    "timestep_scale_multiplier": 1000,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "connector_positional_embedding_max_pos": [4096],
    "rope_type": "split",
    "frequencies_precision": "float64",
}

_VAE_FIXED: Mapping[str, Any] = {
    "_class_name": "CausalVideoAutoencoder",
    "dims": 3,
    "in_channels": 3,
    "out_channels": 3,
    "scaling_factor": 1.0,
    "norm_layer": "pixel_norm",
    "use_quant_conv": False,
    "timestep_conditioning": False,
    "normalize_latent_channels": False,
    "spatial_padding_mode": "zeros",
}
# Defaults of these give silent garbage (video_vae.md section 8.6).
_VAE_REQUIRED = ("latent_channels", "encoder_blocks", "decoder_blocks", "patch_size", "spatial_padding_mode")
_DECODER_KINDS = ("res_x", "compress_space", "compress_time", "compress_all")
_ENCODER_KINDS = ("res_x", "compress_space_res", "compress_time_res", "compress_all_res")
_DIFFUSION_ENCODER_FIXED: Mapping[str, Any] = {
    "dims": 3,
    "in_channels": 3,
    "norm_layer": "pixel_norm",
    "spatial_padding_mode": "zeros",
}
_DIFFUSION_ENCODER_REQUIRED = ("blocks", "out_channels", "patch_size", "spatial_padding_mode")
_DIFFUSION_FIXED: Mapping[str, Any] = {"_class_name": "CausalDiffusionVAE", "dims": 3}
_DIFFUSION_DECODER_FIXED: Mapping[str, Any] = {
    "_class_name": "NADiffusionDecoder",
    "out_channels": 3,
    "spatial_padding_mode": "zeros",
    "resampler_kind": "linear",
}
# Code defaults of some implementations differ from the published values (video_vae.md section 6).
_DIFFUSION_DECODER_REQUIRED = (
    "in_channels",
    "patch_size",
    "head_dim",
    "stage_channels",
    "stage_depths",
    "stage_kernels",
    "stage5_kernel",
    "upsamples",
    "timestep_scale_multiplier",
    "default_num_inference_steps",
)
# Beyond the shapes, for a file without metadata: the values of the published file.
_PUBLISHED_DIFFUSION_DECODER: Mapping[str, Any] = {
    "patch_size": 4,
    "stage_kernels": ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11)),
    "stage5_kernel": (11, 11, 11),
    "upsamples": (((1, 2, 2), 2), ((2, 1, 1), 2), ((2, 2, 2), 1), ((2, 2, 2), 2)),
    "timestep_scale_multiplier": 1000.0,
    "default_num_inference_steps": 1,
}
_DIFFUSION_STAGES = 5
_UPSAMPLER_FIXED: Mapping[str, Any] = {"_class_name": "LatentUpsampler", "dims": 3}
_PUBLISHED_ENCODER_BLOCKS = (
    ("res_x", {"num_layers": 4}),
    ("compress_space_res", {"multiplier": 2}),
    ("res_x", {"num_layers": 6}),
    ("compress_time_res", {"multiplier": 2}),
    ("res_x", {"num_layers": 4}),
    ("compress_all_res", {"multiplier": 2}),
    ("res_x", {"num_layers": 2}),
    ("compress_all_res", {"multiplier": 1}),
    ("res_x", {"num_layers": 2}),
)
_PUBLISHED_DECODER_BLOCKS = (
    ("res_x", {"num_layers": 4}),
    ("compress_space", {"multiplier": 2}),
    ("res_x", {"num_layers": 6}),
    ("compress_time", {"multiplier": 2}),
    ("res_x", {"num_layers": 4}),
    ("compress_all", {"multiplier": 1}),
    ("res_x", {"num_layers": 2}),
    ("compress_all", {"multiplier": 2}),
    ("res_x", {"num_layers": 2}),
)


@dataclass(frozen=True)
class ConnectorConfig:
    """One text connector (transformer.md section 7). width = heads * head_dim; max_pos has one entry (token index)."""

    num_layers: int
    heads: int
    head_dim: int
    max_pos: tuple[float, ...]
    num_registers: int
    gated: bool
    ff_bias: bool

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class TransformerConfig:
    """The audio-video denoiser (transformer.md section 2).

    video_max_pos: seconds, pixels, pixels; audio_max_pos: seconds. context_width and audio_context_width are the widths
    of the text contexts; the second is also the inner width of the attention between audio and video.
    """

    num_layers: int
    video_heads: int
    video_head_dim: int
    audio_heads: int
    audio_head_dim: int
    in_channels: int
    out_channels: int
    audio_in_channels: int
    audio_out_channels: int
    context_width: int
    audio_context_width: int
    norm_eps: float
    rope_theta: float
    video_max_pos: tuple[float, ...]
    audio_max_pos: tuple[float, ...]
    timestep_scale: float
    av_ca_timestep_scale: float
    gated_attention: bool
    prompt_adaln: bool
    ff_bias: bool
    audio_ff_bias: bool
    keyframe_embedding: bool
    video_connector: ConnectorConfig | None
    audio_connector: ConnectorConfig | None
    model_version: str

    @property
    def video_width(self) -> int:
        return self.video_heads * self.video_head_dim

    @property
    def audio_width(self) -> int:
        return self.audio_heads * self.audio_head_dim

    @property
    def generation(self) -> tuple[int, int]:
        """(2, 5) for model_version 2.5.0. Decides the default sampler of stage 1 (transformer.md section 12.3)."""
        return generation(self.model_version)

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> TransformerConfig:
        """Read the config of the transformer in a checkpoint.

        Raises CheckpointError for a value that this runtime does not implement and for a config that lacks a setting
        which no tensor shows. A file without any config gets sizes from its tensors and the published constants.
        """
        return cls.from_shapes(
            header.config,
            header.shapes("transformer"),
            model_version=header.metadata.get("model_version"),
            source=header.path.name,
        )

    @classmethod
    def from_shapes(
        cls, config: Mapping[str, Any], shapes: Shapes, *, model_version: str | None = None, source: str = "config"
    ) -> TransformerConfig:
        """The same from plain values.

        config: the file's parsed JSON, nested under "transformer" or flat.
        shapes: tensor names without prefix -> sizes. source names the file in errors.
        """
        _refuse_other_table_rows(shapes, source)
        settings = _section(config, "transformer", "num_layers")
        if settings is None:
            settings = {**_TRANSFORMER_PUBLISHED, **_transformer_sizes(shapes, source)}
        else:
            require_keys(settings, _TRANSFORMER_REQUIRED, source, "transformer")
        refuse_other_values(settings, _TRANSFORMER_FIXED, source, "transformer")
        require_sizes(settings, _TRANSFORMER_SIZES, source)
        if model_version is None:
            # 2.5 dropped the video feed-forward bias; nothing else in a bare file tells the two apart.
            model_version = "2.3.0" if "transformer_blocks.0.ff.net.0.proj.bias" in shapes else "2.5.0"
        generation(model_version, source)
        in_channels = settings.get("in_channels", _size(shapes, "patchify_proj.weight", 1, source))
        return cls(
            num_layers=settings["num_layers"],
            video_heads=settings["num_attention_heads"],
            video_head_dim=settings["attention_head_dim"],
            audio_heads=settings["audio_num_attention_heads"],
            audio_head_dim=settings["audio_attention_head_dim"],
            in_channels=in_channels,
            out_channels=settings.get("out_channels", in_channels),
            audio_in_channels=_size(shapes, "audio_patchify_proj.weight", 1, source),
            audio_out_channels=_size(shapes, "audio_proj_out.weight", 0, source),
            context_width=settings["cross_attention_dim"],
            audio_context_width=settings["audio_cross_attention_dim"],
            norm_eps=float(settings.get("norm_eps", _TRANSFORMER_PUBLISHED["norm_eps"])),
            rope_theta=float(settings["positional_embedding_theta"]),
            video_max_pos=_max_pos(settings, "positional_embedding_max_pos", 3, source),
            audio_max_pos=_max_pos(settings, "audio_positional_embedding_max_pos", 1, source),
            timestep_scale=float(settings["timestep_scale_multiplier"]),
            av_ca_timestep_scale=float(settings["av_ca_timestep_scale_multiplier"]),
            gated_attention="transformer_blocks.0.attn1.to_gate_logits.weight" in shapes,
            prompt_adaln="prompt_adaln_single.linear.weight" in shapes,
            ff_bias="transformer_blocks.0.ff.net.0.proj.bias" in shapes,
            audio_ff_bias="transformer_blocks.0.audio_ff.net.0.proj.bias" in shapes,
            keyframe_embedding="keyframes_abs_pos_embedding" in shapes,
            video_connector=_connector(settings, shapes, "video_embeddings_connector", "connector", source),
            audio_connector=_connector(settings, shapes, "audio_embeddings_connector", "audio_connector", source),
            model_version=model_version,
        )


@dataclass(frozen=True)
class ConvVAEConfig:
    """The convolutional video VAE (video_vae.md sections 2-4).

    encoder_blocks and decoder_blocks are (kind, options) pairs as in the file, both in encoder order: the decoder walks
    its list backwards. Kinds: res_x with num_layers; compress_{space,time,all} (decoder), or the same with _res
    appended (encoder), with multiplier. model_version is None when the file does not say.
    """

    latent_channels: int
    encoder_base_channels: int
    decoder_base_channels: int
    patch_size: int
    encoder_blocks: tuple[tuple[str, Mapping[str, int]], ...]
    decoder_blocks: tuple[tuple[str, Mapping[str, int]], ...]
    causal_decoder: bool
    model_version: str | None

    @property
    def encoder(self) -> VideoEncoderConfig:
        return VideoEncoderConfig(
            self.latent_channels, self.encoder_base_channels, self.patch_size, self.encoder_blocks
        )

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> ConvVAEConfig:
        """Read the config of the conv video VAE in a checkpoint.

        Raises CheckpointError as TransformerConfig.from_header does. A file without any config gets the published block
        lists, and widths from its tensors.
        """
        return cls.from_shapes(
            header.config,
            header.shapes("video_vae_conv"),
            model_version=header.metadata.get("model_version"),
            source=header.path.name,
        )

    @classmethod
    def from_shapes(
        cls, config: Mapping[str, Any], shapes: Shapes, *, model_version: str | None = None, source: str = "config"
    ) -> ConvVAEConfig:
        """The same from plain values, see TransformerConfig.from_shapes; the config's section is "vae"."""
        settings = _section(config, "vae", "decoder_blocks")
        if settings is None:
            settings = {
                "latent_channels": _size(shapes, "decoder.conv_in.conv.weight", 1, source),
                "encoder_base_channels": _size(shapes, "encoder.conv_in.conv.weight", 0, source),
                "decoder_base_channels": _size(shapes, "decoder.conv_out.conv.weight", 1, source),
                "encoder_blocks": _PUBLISHED_ENCODER_BLOCKS,
                "decoder_blocks": _PUBLISHED_DECODER_BLOCKS,
                "patch_size": 4,
                "spatial_padding_mode": "zeros",
            }
        require_keys(settings, _VAE_REQUIRED, source, "vae")
        refuse_other_values(settings, _VAE_FIXED, source, "vae")
        require_sizes(settings, ("latent_channels", "patch_size"), source)
        return cls(
            latent_channels=settings["latent_channels"],
            encoder_base_channels=settings.get("encoder_base_channels", 128),
            decoder_base_channels=settings.get("decoder_base_channels", 128),
            patch_size=settings["patch_size"],
            encoder_blocks=_blocks(settings, "encoder_blocks", _ENCODER_KINDS, source),
            decoder_blocks=_blocks(settings, "decoder_blocks", _DECODER_KINDS, source),
            causal_decoder=bool(settings.get("causal_decoder", False)),
            model_version=model_version,
        )


@dataclass(frozen=True)
class VideoEncoderConfig:
    """The encoder, one network in the files of both video VAEs (video_vae.md sections 1 and 4). blocks: see
    ConvVAEConfig."""

    latent_channels: int
    base_channels: int
    patch_size: int
    blocks: tuple[tuple[str, Mapping[str, int]], ...]

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> VideoEncoderConfig:
        """Read the encoder's config from the file of a conv or a diffusion video VAE.

        Raises CheckpointError as ConvVAEConfig.from_header does, and for a file that is no video VAE.
        """
        if "video_vae_diffusion" not in header.prefixes:
            return ConvVAEConfig.from_header(header).encoder
        shapes, source = header.shapes("video_vae_diffusion"), header.path.name
        settings = (_section(header.config, "vae", "encoder") or {}).get("encoder")
        if settings is None:
            settings = {
                "blocks": _PUBLISHED_ENCODER_BLOCKS,
                "out_channels": _size(shapes, "encoder.conv_out.conv.weight", 0, source) - 1,
                "patch_size": 4,
                "base_channels": _size(shapes, "encoder.conv_in.conv.weight", 0, source),
                "spatial_padding_mode": "zeros",
            }
        require_keys(settings, _DIFFUSION_ENCODER_REQUIRED, source, "vae.encoder")
        refuse_other_values(settings, _DIFFUSION_ENCODER_FIXED, source, "vae.encoder")
        require_sizes(settings, ("out_channels", "patch_size"), source)
        return cls(
            latent_channels=settings["out_channels"],
            base_channels=settings.get("base_channels", 128),
            patch_size=settings["patch_size"],
            blocks=_blocks(settings, "blocks", _ENCODER_KINDS, source),
        )


@dataclass(frozen=True)
class DiffusionVAEConfig:
    """The diffusion decoder of the video VAE (video_vae.md section 6).

    stage_*: one entry for each of the five stages; kernels are windows along (T, H, W). upsamples: (stride, divisor of
    the channels) behind each of the first four. prediction: what the network predicts, "x0" or "v". time_width: of the
    embedded timestep. gated: the file holds gates of the diffusion blocks (other exports; the published one does not).
    """

    latent_channels: int
    patch_size: int
    head_dim: int
    stage_channels: tuple[int, ...]
    stage_depths: tuple[int, ...]
    stage_kernels: tuple[tuple[int, int, int], ...]
    upsamples: tuple[tuple[tuple[int, int, int], int], ...]
    timestep_scale: float
    num_steps: int
    prediction: str
    time_width: int
    gated: bool
    model_version: str | None

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> DiffusionVAEConfig:
        """Read the decoder's config from the file of a diffusion video VAE.

        Raises CheckpointError as TransformerConfig.from_header does, and for stages that don't lead from latents to
        frames. A file without any config gets sizes from its tensors and the published constants.
        """
        return cls.from_shapes(
            header.config,
            header.shapes("video_vae_diffusion"),
            model_version=header.metadata.get("model_version"),
            source=header.path.name,
        )

    @classmethod
    def from_shapes(
        cls, config: Mapping[str, Any], shapes: Shapes, *, model_version: str | None = None, source: str = "config"
    ) -> DiffusionVAEConfig:
        """The same from plain values, see TransformerConfig.from_shapes; the config's section is "vae"."""
        vae = _section(config, "vae", "decoder")
        if vae is None:
            vae = {"decoder": _diffusion_sizes(shapes, source), "model_output_type": "x0"}
        require_keys(vae, ("decoder", "model_output_type"), source, "vae")
        refuse_other_values(vae, _DIFFUSION_FIXED, source, "vae")
        settings, prediction = vae["decoder"], vae["model_output_type"]
        if prediction not in ("x0", "v"):
            raise CheckpointError(f"{source}: config model_output_type is {prediction!r}, implemented are x0 and v.")
        require_keys(settings, _DIFFUSION_DECODER_REQUIRED, source, "vae.decoder")
        refuse_other_values(settings, _DIFFUSION_DECODER_FIXED, source, "vae.decoder")
        require_sizes(settings, ("in_channels", "patch_size", "head_dim", "default_num_inference_steps"), source)
        for key in ("stage_channels", "stage_depths", "stage_kernels", "upsamples"):
            if not isinstance(settings[key], (list, tuple)):
                raise CheckpointError(f"{source}: config {key} is {settings[key]!r}, expected a list.")
        upsamples = [_upsample(entry, source) for entry in settings["upsamples"]]
        # The list's own fifth entry is not used.
        kernels = (*settings["stage_kernels"][: _DIFFUSION_STAGES - 1], settings["stage5_kernel"])
        described = cls(
            latent_channels=settings["in_channels"],
            patch_size=settings["patch_size"],
            head_dim=settings["head_dim"],
            stage_channels=_positive(settings["stage_channels"], "stage_channels", source),
            stage_depths=_positive(settings["stage_depths"], "stage_depths", source),
            stage_kernels=tuple(_positive(kernel, "stage_kernels", source, count=3) for kernel in kernels),
            upsamples=tuple(upsamples),
            timestep_scale=float(settings["timestep_scale_multiplier"]),
            num_steps=settings["default_num_inference_steps"],
            prediction=prediction,
            time_width=_size(shapes, "decoder.t_embedder.mlp.2.weight", 0, source),
            gated="decoder.diff_blocks.0.gate_msa" in shapes,
            model_version=model_version,
        )
        _check_diffusion_stages(described, source)
        return described


@dataclass(frozen=True)
class UpsamplerConfig:
    """A latent upsampler (upsampler_and_duration.md section 1). spatial: doubles height and width, else the frames."""

    in_channels: int
    mid_channels: int
    num_blocks: int
    spatial: bool

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> UpsamplerConfig:
        """Read the config in an upsampler's file. Raises CheckpointError as TransformerConfig.from_header does."""
        return cls.from_shapes(header.config, header.shapes("latent_upsampler"), source=header.path.name)

    @classmethod
    def from_shapes(cls, config: Mapping[str, Any], shapes: Shapes, *, source: str = "config") -> UpsamplerConfig:
        """The same from plain values. config: the upsampler's own; {} where the file has none, the tensors show all."""
        refuse_other_values(config, _UPSAMPLER_FIXED, source, "upsampler")
        spatial = len(shapes["upsampler.0.weight"]) == 4
        described = (
            bool(config.get("spatial_upsample", spatial)),
            bool(config.get("temporal_upsample", not spatial)),
        )
        scale = config.get("spatial_scale", 2.0)
        # The temporal file's own rational_resampler and spatial_scale have no effect.
        if described != (spatial, not spatial) or (spatial and (scale != 2 or config.get("rational_resampler"))):
            raise CheckpointError(
                f"{source}: its config describes an upscaler of another kind (spatial_upsample={described[0]}, "
                f"temporal_upsample={described[1]}, spatial_scale={scale}, "
                f"rational_resampler={bool(config.get('rational_resampler'))}); this runtime has spatial x2 and "
                "temporal x2. Use an LTX-2.5 upscaler as published."
            )
        sizes = {
            "in_channels": _size(shapes, "initial_conv.weight", 1, source),
            "mid_channels": _size(shapes, "initial_conv.weight", 0, source),
            "num_blocks_per_stage": _count_blocks(shapes, "res_blocks"),
        } | dict(config)
        require_sizes(sizes, ("in_channels", "mid_channels", "num_blocks_per_stage"), source)
        return cls(sizes["in_channels"], sizes["mid_channels"], sizes["num_blocks_per_stage"], spatial)


@dataclass(frozen=True)
class DurationHeadConfig:
    """The duration head (upsampler_and_duration.md section 2). width: of its attention, of 4 heads in the trained head.

    Published metadata does not hold these sizes, so all come from the tensors.
    """

    video_width: int
    audio_width: int
    width: int
    num_queries: int
    hidden_width: int

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> DurationHeadConfig:
        """Raises CheckpointError when the file holds no duration head or lacks a tensor that shows a size."""
        shapes, source = header.shapes("duration_head"), header.path.name
        name = "duration_head."
        return cls(
            video_width=_size(shapes, f"{name}video_input_proj.weight", 1, source),
            audio_width=_size(shapes, f"{name}audio_input_proj.weight", 1, source),
            width=_size(shapes, f"{name}attention_pooler.query_tokens", 1, source),
            num_queries=_size(shapes, f"{name}attention_pooler.query_tokens", 0, source),
            hidden_width=_size(shapes, f"{name}mlp_hidden.weight", 0, source),
        )


def published_dtype(tensor_name: str) -> torch.dtype:
    """The dtype in which published files hold a tensor: float32 modulation tables of the transformer, bfloat16 for all
    else (transformer.md section 1). A file may differ; the loader honours the file."""
    is_table = "scale_shift_table" in tensor_name and "diff_blocks" not in tensor_name
    return torch.float32 if is_table else torch.bfloat16


def _section(config: Mapping[str, Any], name: str, flat_mark: str) -> Mapping[str, Any] | None:
    """The named section of a config, or the config itself when it is flat, or None."""
    section = config.get(name)
    if isinstance(section, Mapping):
        return section
    return config if flat_mark in config else None


def require_keys(settings: Mapping[str, Any], keys: tuple[str, ...], source: str, section: str) -> None:
    missing = [key for key in keys if key not in settings]
    if missing:
        raise CheckpointError(
            f"{source}: the {section} config in its metadata lacks {', '.join(missing)}, which no tensor shows. "
            "Use the published file, or one that kept its config."
        )


def require_sizes(settings: Mapping[str, Any], keys: tuple[str, ...], source: str) -> None:
    for key in keys:
        if not isinstance(settings[key], int) or settings[key] < 1:
            raise CheckpointError(f"{source}: config {key} is {settings[key]!r}, expected a positive integer.")


def refuse_other_values(settings: Mapping[str, Any], fixed: Mapping[str, Any], source: str, section: str) -> None:
    wrong = [
        f"{key}={settings[key]!r} (need {value!r})" for key, value in fixed.items() if settings.get(key, value) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{source}: its {section} config asks for what this runtime does not implement: {'; '.join(wrong)}. "
            "Use an LTX-2.3 or 2.5 file as published."
        )


def _refuse_other_table_rows(shapes: Shapes, source: str) -> None:
    """9 modulation rows a block mark 2.3 and 2.5; 6 rows mark 2.0, whose text attention is not modulated."""
    name = "transformer_blocks.0.scale_shift_table"
    rows = _size(shapes, name, 0, source)
    if rows != 9:
        raise CheckpointError(
            f"{source}: {name} has {rows} rows, LTX-2.3 and 2.5 have 9. This is another generation of the model; "
            "use an LTX-2.3 or 2.5 transformer file."
        )


def _size(shapes: Shapes, name: str, axis: int, source: str) -> int:
    if name not in shapes or axis >= len(shapes[name]):
        raise CheckpointError(f"{source}: tensor {name} is missing or misshapen, so the model's sizes can't be told.")
    return shapes[name][axis]


def _transformer_sizes(shapes: Shapes, source: str) -> dict[str, Any]:
    """Sizes of a transformer without config, under the names of the config."""

    def heads_and_dim(attention: str) -> tuple[int, int]:
        heads = _size(shapes, f"{attention}.to_gate_logits.weight", 0, source)
        return heads, _size(shapes, f"{attention}.to_q.weight", 0, source) // heads

    sizes: dict[str, Any] = {
        "num_layers": _count_blocks(shapes, "transformer_blocks"),
        "out_channels": _size(shapes, "proj_out.weight", 0, source),
        "cross_attention_dim": _size(shapes, "transformer_blocks.0.attn2.to_k.weight", 1, source),
        "audio_cross_attention_dim": _size(shapes, "transformer_blocks.0.audio_attn2.to_k.weight", 1, source),
    }
    layers = {"": "transformer_blocks.0.attn1", "audio_": "transformer_blocks.0.audio_attn1"}
    for stream, connector in (("video", "connector_"), ("audio", "audio_connector_")):
        attention = f"{stream}_embeddings_connector.transformer_1d_blocks.0.attn1"
        if f"{attention}.to_q.weight" in shapes:
            layers[connector] = attention
    for prefix, attention in layers.items():
        sizes[f"{prefix}num_attention_heads"], sizes[f"{prefix}attention_head_dim"] = heads_and_dim(attention)
    return sizes


def _diffusion_sizes(shapes: Shapes, source: str) -> dict[str, Any]:
    """Settings of a diffusion decoder without config: what the tensors show, and the published rest."""
    stages = [f"decoder.det_stages.{index}" for index in range(_DIFFUSION_STAGES - 1)] + ["decoder.diff_blocks"]
    firsts = [f"{stage}.0" for stage in stages]
    return {
        **_PUBLISHED_DIFFUSION_DECODER,
        "in_channels": _size(shapes, "decoder.conv_in.weight", 1, source),
        "head_dim": _size(shapes, f"{firsts[-1]}.attn.q_norm.weight", 0, source),
        "stage_channels": [_size(shapes, f"{first}.norm1.weight", 0, source) for first in firsts],
        "stage_depths": [_count_blocks(shapes, stage) for stage in stages],
    }


def _positive(value: Any, key: str, source: str, *, count: int = _DIFFUSION_STAGES) -> tuple[int, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) != count
        or not all(isinstance(number, int) and number > 0 for number in value)
    ):
        raise CheckpointError(f"{source}: config {key} holds {value!r}, expected {count} positive integers.")
    return tuple(value)


def _upsample(entry: Any, source: str) -> tuple[tuple[int, int, int], int]:
    if not isinstance(entry, (list, tuple)) or len(entry) != 2:
        raise CheckpointError(
            f"{source}: config upsamples holds {entry!r}, expected (stride, divisor of the channels)."
        )
    return _positive(entry[0], "upsamples", source, count=3), _positive([entry[1]], "upsamples", source, count=1)[0]


def _check_diffusion_stages(config: DiffusionVAEConfig, source: str) -> None:
    """Refuse stages of which one does not fit to the next: no tensor's shape shows a wrong stride."""
    if len(config.stage_kernels) != _DIFFUSION_STAGES or len(config.upsamples) != _DIFFUSION_STAGES - 1:
        raise CheckpointError(
            f"{source}: its decoder config has {len(config.stage_kernels)} windows and {len(config.upsamples)} "
            f"upsamples, expected {_DIFFUSION_STAGES} and {_DIFFUSION_STAGES - 1}."
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{source}: config head_dim is {config.head_dim}; rotary positions need an even one.")
    grown = [1, 1, 1]
    for index, (stride, divisor) in enumerate(config.upsamples):
        channels, following = config.stage_channels[index : index + 2]
        if channels != following * divisor or channels % config.head_dim or following % config.head_dim:
            raise CheckpointError(
                f"{source}: stage {index + 1} has {channels} channels in heads of {config.head_dim} and hands on "
                f"1/{divisor} of them, stage {index + 2} has {following}."
            )
        grown = [size * factor for size, factor in zip(grown, stride)]
    pixels = SPACE_FACTOR // config.patch_size
    if grown != [TIME_FACTOR, pixels, pixels] or config.upsamples[-1][0][0] != 2:
        raise CheckpointError(
            f"{source}: its upsamples enlarge a latent by {tuple(grown)} before patches of {config.patch_size} pixels, "
            f"expected {(TIME_FACTOR, pixels, pixels)} and a doubled frame rate at the end."
        )


def _connector(
    settings: Mapping[str, Any], shapes: Shapes, module: str, key: str, source: str
) -> ConnectorConfig | None:
    """The connector under module, or None when the file has none of its tensors (some re-exports split it off)."""
    if f"{module}.learnable_registers" not in shapes:
        return None
    needed = (f"{key}_num_attention_heads", f"{key}_attention_head_dim", "connector_positional_embedding_max_pos")
    require_keys(settings, needed, source, "transformer")
    block = f"{module}.transformer_1d_blocks.0"
    return ConnectorConfig(
        num_layers=_count_blocks(shapes, f"{module}.transformer_1d_blocks"),
        heads=settings[f"{key}_num_attention_heads"],
        head_dim=settings[f"{key}_attention_head_dim"],
        max_pos=_max_pos(settings, "connector_positional_embedding_max_pos", 1, source),
        num_registers=shapes[f"{module}.learnable_registers"][0],
        gated=f"{block}.attn1.to_gate_logits.weight" in shapes,
        ff_bias=f"{block}.ff.net.0.proj.bias" in shapes,
    )


def _count_blocks(shapes: Shapes, module: str) -> int:
    start = f"{module}."
    indices = {name[len(start):].split(".", 1)[0] for name in shapes if name.startswith(start)}
    return 1 + max((int(index) for index in indices if index.isdigit()), default=-1)


def _max_pos(settings: Mapping[str, Any], key: str, axes: int, source: str) -> tuple[float, ...]:
    value = settings[key]
    if not isinstance(value, (list, tuple)) or len(value) != axes:
        raise CheckpointError(f"{source}: config {key} is {value!r}, expected {axes} number(s) in a list.")
    return tuple(float(entry) for entry in value)


def _blocks(
    settings: Mapping[str, Any], key: str, kinds: tuple[str, ...], source: str
) -> tuple[tuple[str, Mapping[str, int]], ...]:
    blocks = []
    for kind, options in settings[key]:
        option = "num_layers" if kind == "res_x" else "multiplier"
        switched_on = [name for name, value in options.items() if name != option and value]
        if kind not in kinds or not isinstance(options.get(option), int) or switched_on:
            raise CheckpointError(
                f"{source}: {key} holds {kind!r} with {options!r}; implemented are {', '.join(kinds)} with an integer "
                "num_layers (res_x) or multiplier (the others) and nothing else switched on."
            )
        blocks.append((kind, {option: options[option]}))
    if not blocks:
        raise CheckpointError(f"{source}: {key} is empty. Use the published file.")
    return tuple(blocks)


def same_generation(model_version: str, other: str) -> bool:
    """Whether two files say the same first two numbers; compared as text, because a LoRA may say anything."""
    return model_version.split(".")[:2] == other.split(".")[:2]


def generation(model_version: str, source: str = "config") -> tuple[int, int]:
    """(2, 5) for 2.5.0. Raises CheckpointError, naming source, for what is no version."""
    found = re.match(r"(\d+)\.(\d+)", model_version)
    if not found:
        raise CheckpointError(f"{source}: model_version is {model_version!r}, expected a number such as 2.5.0.")
    return int(found[1]), int(found[2])
