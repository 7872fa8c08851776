"""Configs: sizes from the file's config, structure from its tensors, and no silent guess."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import ConvVAEConfig, DiffusionVAEConfig, TransformerConfig
from ltx_runtime.errors import CheckpointError

TESTS = Path(__file__).parent
GOLDENS = TESTS / "goldens"


def published(name: str) -> tuple[dict, dict[str, tuple[int, ...]]]:
    """(config, shapes without prefix) of a published file."""
    config = json.loads((TESTS / "configs" / f"{name}.json").read_text())
    manifest = json.loads((TESTS / "manifests" / f"{name}.json").read_text())
    shapes = {tensor.removeprefix("model.diffusion_model."): tuple(shape) for tensor, (_, shape) in manifest.items()}
    return config.get("metadata", {}).get("config", config), shapes


@pytest.fixture
def transformer() -> tuple[dict, dict]:
    return published("transformer-22b")


@pytest.fixture
def vae() -> tuple[dict, dict]:
    return published("video_vae_conv")


def test_published_transformer(transformer):
    config = TransformerConfig.from_shapes(*transformer, model_version="2.5.0")
    assert (config.num_layers, config.video_width, config.audio_width) == (48, 4096, 2048)
    assert (config.in_channels, config.out_channels, config.audio_in_channels, config.audio_out_channels) == (128,) * 4
    assert (config.context_width, config.audio_context_width) == (4096, 2048)
    assert (config.video_max_pos, config.audio_max_pos) == ((20, 2048, 2048), (20,))
    assert (config.timestep_scale, config.av_ca_timestep_scale) == (1000, 1000)
    assert config.gated_attention and config.prompt_adaln and config.keyframe_embedding and config.audio_ff_bias
    assert not config.ff_bias
    for connector, width in ((config.video_connector, 4096), (config.audio_connector, 2048)):
        assert (connector.num_layers, connector.width, connector.num_registers) == (8, width, 128)
        assert connector.gated and connector.ff_bias and connector.max_pos == (4096,)
    assert config.generation == (2, 5)


def test_published_vae(vae):
    config = ConvVAEConfig.from_shapes(*vae)
    assert (config.latent_channels, config.patch_size) == (128, 4)
    assert (config.encoder_base_channels, config.decoder_base_channels) == (128, 128)
    assert config.decoder_blocks[1] == ("compress_space", {"multiplier": 2})
    assert config.encoder_blocks[7] == ("compress_all_res", {"multiplier": 1})
    assert not config.causal_decoder


def test_shapes_alone_give_the_published_configs(transformer, vae):
    """A re-saved file often lost its metadata."""
    assert TransformerConfig.from_shapes({}, transformer[1]) == TransformerConfig.from_shapes(
        *transformer, model_version="2.5.0"
    )
    assert ConvVAEConfig.from_shapes({}, vae[1]) == ConvVAEConfig.from_shapes(*vae)


def test_flat_config_equals_nested(transformer, vae):
    config, shapes = transformer
    assert TransformerConfig.from_shapes(config["transformer"], shapes) == TransformerConfig.from_shapes(config, shapes)
    config, shapes = vae
    assert ConvVAEConfig.from_shapes(config["vae"], shapes) == ConvVAEConfig.from_shapes(config, shapes)


@pytest.mark.parametrize(
    "file, flags",
    [
        # ff_bias, audio_ff_bias, keyframe_embedding, prompt_adaln, connectors
        ("transformer_w_av25", (False, True, True, True, True)),
        ("transformer_w_av23", (True, True, False, True, False)),
        ("transformer_w_kvcache", (False, False, False, False, False)),
    ],
)
def test_flags_of_golden_files(file, flags):
    config = TransformerConfig.from_header(read_header(GOLDENS / f"{file}.safetensors"))
    connectors = config.video_connector is not None and config.audio_connector is not None
    assert (
        config.ff_bias, config.audio_ff_bias, config.keyframe_embedding, config.prompt_adaln, connectors
    ) == flags  # fmt: skip


def test_tensors_win_over_flags(tmp_path):
    """A re-quantised file may claim the marker and lack it (transformer.md section 18.16)."""
    source = GOLDENS / "transformer_w_av25.safetensors"
    tensors = load_file(source)
    del tensors["model.diffusion_model.keyframes_abs_pos_embedding"]
    metadata = read_header(source).metadata
    assert json.loads(metadata["config"])["transformer"]["use_keyframes_abs_pos_embedding"] is True
    save_file(tensors, tmp_path / "lacks.safetensors", metadata=metadata)
    assert not TransformerConfig.from_header(read_header(tmp_path / "lacks.safetensors")).keyframe_embedding


def test_generation_of_a_bare_file_shows_in_its_biases(transformer):
    _, shapes = transformer
    bare_23 = {**shapes, "transformer_blocks.0.ff.net.0.proj.bias": (16384,)}
    assert TransformerConfig.from_shapes({}, bare_23).generation == (2, 3)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rope_type", "interleaved"),
        ("frequencies_precision", "float32"),
        ("cross_attention_adaln", False),
        ("use_middle_indices_grid", False),
        ("causal_temporal_positioning", False),
        ("share_ff", True),
        ("activation_fn", "geglu"),
        ("caption_proj_before_connector", False),
        ("_class_name", "Transformer3DModel"),
    ],
)
def test_unknown_values_of_known_transformer_keys_are_refused(transformer, key, value):
    config, shapes = transformer
    config["transformer"][key] = value
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{key}={value!r}"):
        TransformerConfig.from_shapes(config, shapes, source="x.safetensors")


@pytest.mark.parametrize(
    "key, value",
    [
        ("timestep_conditioning", True),
        ("spatial_padding_mode", "reflect"),
        ("norm_layer", "group_norm"),
        ("use_quant_conv", True),
        ("_class_name", "AutoencoderKL"),
    ],
)
def test_unknown_values_of_known_vae_keys_are_refused(vae, key, value):
    config, shapes = vae
    config["vae"][key] = value
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{key}={value!r}"):
        ConvVAEConfig.from_shapes(config, shapes, source="x.safetensors")


def test_unknown_keys_are_ignored(transformer, vae):
    for (config, shapes), section, kind in (
        (transformer, "transformer", TransformerConfig),
        (vae, "vae", ConvVAEConfig),
    ):
        more = copy.deepcopy(config)
        more[section]["added_in_2_6"] = 7
        assert kind.from_shapes(more, shapes) == kind.from_shapes(config, shapes)


@pytest.mark.parametrize("key", ["av_ca_timestep_scale_multiplier", "rope_type", "positional_embedding_max_pos"])
def test_a_setting_that_no_tensor_shows_is_not_guessed(transformer, key):
    config, shapes = transformer
    del config["transformer"][key]
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        TransformerConfig.from_shapes(config, shapes)


@pytest.mark.parametrize("key", ["decoder_blocks", "spatial_padding_mode"])
def test_vae_settings_with_harmful_defaults_are_required(vae, key):
    config, shapes = vae
    del config["vae"][key]
    # Without decoder_blocks the section is still there, so nothing is inferred.
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        ConvVAEConfig.from_shapes(config, shapes)


def test_six_table_rows_are_another_generation(transformer):
    config, shapes = transformer
    shapes["transformer_blocks.0.scale_shift_table"] = (6, 4096)
    with pytest.raises(CheckpointError, match=r"has 6 rows, LTX-2\.3 and 2\.5 have 9"):
        TransformerConfig.from_shapes(config, shapes)


@pytest.mark.parametrize(
    "block",
    [
        ["attn_res_x", {"num_layers": 1}],
        ["compress_all", {"multiplier": 2, "residual": True}],
        ["res_x", {"num_layers": 2, "inject_noise": True}],
        ["res_x", {}],
    ],
)
def test_unknown_decoder_blocks_are_refused(vae, block):
    config, shapes = vae
    config["vae"]["decoder_blocks"][0] = block
    with pytest.raises(CheckpointError, match=f"decoder_blocks holds {block[0]!r}"):
        ConvVAEConfig.from_shapes(config, shapes)


@pytest.mark.parametrize("key, value", [("num_layers", "48"), ("num_attention_heads", 0), ("attention_head_dim", 1.5)])
def test_sizes_must_be_sizes(transformer, key, value):
    config, shapes = transformer
    config["transformer"][key] = value
    with pytest.raises(CheckpointError, match=f"config {key} is {value!r}, expected a positive integer"):
        TransformerConfig.from_shapes(config, shapes)


def test_a_wrong_model_version_and_a_wrong_axis_count(transformer):
    config, shapes = transformer
    with pytest.raises(CheckpointError, match="model_version is 'new'"):
        TransformerConfig.from_shapes(config, shapes, model_version="new")
    config["transformer"]["positional_embedding_max_pos"] = [20]
    with pytest.raises(CheckpointError, match=r"positional_embedding_max_pos is \[20\], expected 3"):
        TransformerConfig.from_shapes(config, shapes)


# --- the diffusion decoder ------------------------------------------------------------------------------------------


@pytest.fixture
def diffusion() -> tuple[dict, dict]:
    return published("video_vae_diffusion")


def test_published_diffusion_decoder(diffusion):
    config = DiffusionVAEConfig.from_shapes(*diffusion, model_version="2.5.0")
    assert (config.latent_channels, config.patch_size, config.head_dim, config.time_width) == (128, 4, 64, 384)
    assert config.stage_channels == (2048, 1024, 512, 512, 256) and config.stage_depths == (4, 6, 4, 2, 8)
    assert config.stage_kernels == ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5), (11, 11, 11))
    assert config.upsamples[0] == ((1, 2, 2), 2) and config.upsamples[2] == ((2, 2, 2), 1)
    assert (config.timestep_scale, config.num_steps, config.prediction, config.gated) == (1000, 1, "x0", False)


def test_shapes_alone_give_the_published_diffusion_decoder(diffusion):
    assert DiffusionVAEConfig.from_shapes({}, diffusion[1]) == DiffusionVAEConfig.from_shapes(*diffusion)


def test_the_window_of_stage_5_is_the_one_that_counts(diffusion):
    config, shapes = diffusion
    config["vae"]["decoder"]["stage_kernels"][4] = [3, 3, 3]
    assert DiffusionVAEConfig.from_shapes(config, shapes).stage_kernels[4] == (11, 11, 11)


def test_gates_show_in_the_tensors(diffusion):
    config, shapes = diffusion
    assert DiffusionVAEConfig.from_shapes(config, shapes | {"decoder.diff_blocks.0.gate_msa": (256,)}).gated


@pytest.mark.parametrize("key, value", [
    ("spatial_padding_mode", "reflect"),
    ("resampler_kind", "conv"),
    ("out_channels", 4),
    ("_class_name", "Decoder"),
])
def test_unknown_values_of_known_diffusion_keys_are_refused(diffusion, key, value):
    config, shapes = diffusion
    config["vae"]["decoder"][key] = value
    with pytest.raises(CheckpointError, match=f"x.safetensors.*{key}={value!r}"):
        DiffusionVAEConfig.from_shapes(config, shapes, source="x.safetensors")


def test_an_unknown_prediction_is_refused(diffusion):
    config, shapes = diffusion
    config["vae"]["model_output_type"] = "eps"
    with pytest.raises(CheckpointError, match="model_output_type is 'eps', implemented are x0 and v"):
        DiffusionVAEConfig.from_shapes(config, shapes)


@pytest.mark.parametrize("key", ["stage5_kernel", "timestep_scale_multiplier", "default_num_inference_steps"])
def test_diffusion_settings_that_no_tensor_shows_are_required(diffusion, key):
    config, shapes = diffusion
    del config["vae"]["decoder"][key]
    with pytest.raises(CheckpointError, match=f"lacks {key}"):
        DiffusionVAEConfig.from_shapes(config, shapes)


@pytest.mark.parametrize("key, value, words", [
    (
        "stage_channels", [2048, 1024, 512, 256, 256],
        "stage 3 has 512 channels .* hands on 1/1 of them, stage 4 has 256",
    ),
    ("stage_depths", [4, 6, 4, 2], "stage_depths holds .*expected 5 positive integers"),
    ("stage_kernels", [[3, 7], [3, 7, 7], [3, 5, 5], [3, 5, 5]], "stage_kernels holds .*expected 3 positive integers"),
    ("stage_kernels", [[3, 7, 7]], "has 2 windows and 4 upsamples, expected 5 and 4"),
    ("upsamples", [[[2, 2, 2], 2]], "has 5 windows and 1 upsamples"),
    ("upsamples", [7], "upsamples holds 7"),
    ("upsamples", [[[1, 2, 2], 2], [[1] * 3, 2], [[2] * 3, 1], [[2] * 3, 2]], r"enlarge a latent by \(4, 8, 8\)"),
    ("head_dim", 7, "head_dim is 7"),
    ("head_dim", 0, "expected a positive integer"),
    ("upsamples", 3, "upsamples is 3, expected a list"),
])
def test_stages_that_do_not_fit_are_refused(diffusion, key, value, words):
    config, shapes = diffusion
    config["vae"]["decoder"][key] = value
    with pytest.raises(CheckpointError, match=words):
        DiffusionVAEConfig.from_shapes(config, shapes)
