"""Frozen config of the audio VAE, read from a checkpoint's own config.

Rules as in ltx_runtime/config.py: a known key with a value that this runtime does not implement is refused, an unknown
key is ignored. Every tensor's size follows from the config, so the strict loader finds a config that does not belong to
its file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config import refuse_other_values, require_keys, require_sizes
from ..errors import CheckpointError
from ..published import AUDIO_VAE_FILE

if TYPE_CHECKING:
    from ..checkpoint import CheckpointHeader

STEREO = 2

_MEL_VAE_FIXED: Mapping[str, Any] = {
    "double_z": True,
    "in_channels": STEREO,
    "out_ch": STEREO,
    "downsample_time": False,
    "attn_resolutions": [],
    "mid_block_add_attention": False,
    "norm_type": "pixel",
    "causality_axis": "height",
}
_MEL_VAE_REQUIRED = ("z_channels", "ch", "ch_mult", "num_res_blocks", "mel_bins", "norm_type", "causality_axis")
_GENERATOR_FIXED: Mapping[str, Any] = {
    "resblock": "AMP1",
    "stereo": True,
    "activation": "snakebeta",
    "use_tanh_at_final": False,
    "use_bias_at_final": False,
}
_GENERATOR_REQUIRED = (
    "upsample_initial_channel",
    "upsample_rates",
    "upsample_kernel_sizes",
    "resblock_kernel_sizes",
    "resblock_dilation_sizes",
    "resblock",
    "activation",
)
_EXTENSION_FIXED: Mapping[str, Any] = {**_GENERATOR_FIXED, "apply_final_activation": False}
_EXTENSION_SIZES = ("hop_length", "n_fft", "num_mels", "input_sampling_rate", "output_sampling_rate")

_PUBLISHED_RESBLOCKS = {"resblock_kernel_sizes": [3, 7, 11], "resblock_dilation_sizes": [[1, 3, 5]] * 3}
# What a file without metadata is taken to be: the values of the published 2.3 and 2.5 files (audio.md).
_PUBLISHED: Mapping[str, Any] = {
    "audio_vae": {
        "model": {
            "params": {
                "ddconfig": {
                    "z_channels": 8,
                    "ch": 128,
                    "ch_mult": [1, 2, 4],
                    "num_res_blocks": 2,
                    "mel_bins": 64,
                    "norm_type": "pixel",
                    "causality_axis": "height",
                },
                "sampling_rate": 16000,
            }
        },
        "preprocessing": {
            "stft": {"filter_length": 1024, "hop_length": 160, "win_length": 1024},
            "mel": {"n_mel_channels": 64, "mel_fmin": 0, "mel_fmax": 8000},
        },
    },
    "vocoder": {
        "vocoder": {
            "upsample_initial_channel": 1536,
            "upsample_rates": [5, 2, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 4, 4, 4, 4, 4],
            "resblock": "AMP1",
            "activation": "snakebeta",
            **_PUBLISHED_RESBLOCKS,
        },
        "bwe": {
            "upsample_initial_channel": 512,
            "upsample_rates": [6, 5, 2, 2, 2],
            "upsample_kernel_sizes": [12, 11, 4, 4, 4],
            "resblock": "AMP1",
            "activation": "snakebeta",
            **_PUBLISHED_RESBLOCKS,
            "hop_length": 80,
            "n_fft": 512,
            "win_size": 512,
            "num_mels": 64,
            "input_sampling_rate": 16000,
            "output_sampling_rate": 48000,
        },
    },
}


@dataclass(frozen=True)
class GeneratorConfig:
    """One BigVGAN-v2 generator (audio.md section 4). Every stage halves the channels."""

    initial_channels: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]

    @property
    def rate(self) -> int:
        """Samples for one mel frame."""
        return math.prod(self.upsample_rates)


@dataclass(frozen=True)
class AudioVAEConfig:
    """Mel VAE, its front end, vocoder and bandwidth extension (audio.md).

    sample_rate: Hz of the encoder's input and of the vocoder's output; output_sample_rate: Hz of the decoded sound.
    hop_length, n_fft, min_hz, max_hz: of the encoder's mel front end; extension_*: of the mel that the bandwidth
    extension takes of the vocoder's output. model_version is None when the file does not say.
    """

    latent_channels: int
    base_channels: int
    channel_multipliers: tuple[int, ...]
    num_res_blocks: int
    mel_bins: int
    sample_rate: int
    hop_length: int
    n_fft: int
    min_hz: float
    max_hz: float
    vocoder: GeneratorConfig
    extension: GeneratorConfig
    extension_hop_length: int
    extension_n_fft: int
    extension_mel_bins: int
    output_sample_rate: int
    model_version: str | None

    @property
    def factor(self) -> int:
        """Mel frames for one latent frame, and mel bins for one latent bin."""
        return 2 ** (len(self.channel_multipliers) - 1)

    @property
    def latent_bins(self) -> int:
        return self.mel_bins // self.factor

    @property
    def extension_ratio(self) -> int:
        """Output samples for one sample of the vocoder."""
        return self.output_sample_rate // self.sample_rate

    def mel_frames(self, latent_frames: int) -> int:
        """Decoded mel frames: 4T - 3."""
        return self.factor * (latent_frames - 1) + 1

    def num_samples(self, latent_frames: int) -> int:
        """Decoded samples a channel: 480 (4T - 3)."""
        return self.mel_frames(latent_frames) * self.vocoder.rate * self.extension_ratio

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> AudioVAEConfig:
        """Read the config of the audio VAE in a checkpoint; a file without any config is taken as the published one.

        Raises CheckpointError for a value that this runtime does not implement, for a config that lacks a setting which
        no tensor shows, and for a vocoder without bandwidth extension (LTX-2.0).
        """
        return cls.from_json(
            header.config or _PUBLISHED, model_version=header.metadata.get("model_version"), source=header.path.name
        )

    @classmethod
    def from_json(
        cls, config: Mapping[str, Any], *, model_version: str | None = None, source: str = "config"
    ) -> AudioVAEConfig:
        """The same from the file's parsed JSON. source names the file in errors."""
        params = _section(config, source, "audio_vae", "model", "params")
        mel_vae = _section(params, source, "ddconfig")
        preprocessing = _section(config, source, "audio_vae", "preprocessing")
        stft, mel = _section(preprocessing, source, "stft"), _section(preprocessing, source, "mel")
        if "bwe" not in _section(config, source, "vocoder"):
            raise CheckpointError(
                f"{source}: its vocoder config has no bwe section (bandwidth extension), which LTX-2.3 and 2.5 have. "
                f"This is the audio VAE of LTX-2.0; use {AUDIO_VAE_FILE}."
            )
        base, extension = _section(config, source, "vocoder", "vocoder"), _section(config, source, "vocoder", "bwe")

        require_keys(mel_vae, _MEL_VAE_REQUIRED, source, "audio_vae")
        refuse_other_values(mel_vae, _MEL_VAE_FIXED, source, "audio_vae")
        require_sizes(mel_vae, ("z_channels", "ch", "num_res_blocks", "mel_bins"), source)
        require_keys(params, ("sampling_rate",), source, "audio_vae")
        require_keys(stft, ("filter_length", "hop_length"), source, "audio_vae.preprocessing.stft")
        refuse_other_values(stft, {"win_length": stft["filter_length"]}, source, "audio_vae.preprocessing.stft")
        require_sizes(stft, ("filter_length", "hop_length"), source)
        require_keys(mel, ("mel_fmin", "mel_fmax"), source, "audio_vae.preprocessing.mel")
        refuse_other_values(mel, {"n_mel_channels": mel_vae["mel_bins"]}, source, "audio_vae.preprocessing.mel")
        require_keys(extension, _EXTENSION_SIZES, source, "vocoder.bwe")
        refuse_other_values(extension, {**_EXTENSION_FIXED, "win_size": extension["n_fft"]}, source, "vocoder.bwe")
        require_sizes(extension, _EXTENSION_SIZES, source)
        refuse_other_values(base, _GENERATOR_FIXED, source, "vocoder.vocoder")

        found = cls(
            latent_channels=mel_vae["z_channels"],
            base_channels=mel_vae["ch"],
            channel_multipliers=_sizes(mel_vae, "ch_mult", source),
            num_res_blocks=mel_vae["num_res_blocks"],
            mel_bins=mel_vae["mel_bins"],
            sample_rate=params["sampling_rate"],
            hop_length=stft["hop_length"],
            n_fft=stft["filter_length"],
            min_hz=float(mel["mel_fmin"]),
            max_hz=float(mel["mel_fmax"]),
            vocoder=_generator(base, source, "vocoder.vocoder"),
            extension=_generator(extension, source, "vocoder.bwe"),
            extension_hop_length=extension["hop_length"],
            extension_n_fft=extension["n_fft"],
            extension_mel_bins=extension["num_mels"],
            output_sample_rate=extension["output_sampling_rate"],
            model_version=model_version,
        )
        _check_rates(found, extension["input_sampling_rate"], source)
        return found


def _section(config: Mapping[str, Any], source: str, *names: str) -> Mapping[str, Any]:
    for depth, name in enumerate(names, start=1):
        config = config.get(name)
        if not isinstance(config, Mapping):
            raise CheckpointError(
                f"{source}: the config in its metadata has no section {'.'.join(names[:depth])}, which the audio VAE "
                f"needs. Use {AUDIO_VAE_FILE} as published."
            )
    return config


def _generator(settings: Mapping[str, Any], source: str, section: str) -> GeneratorConfig:
    require_keys(settings, _GENERATOR_REQUIRED, source, section)
    require_sizes(settings, ("upsample_initial_channel",), source)
    rates, kernels = _sizes(settings, "upsample_rates", source), _sizes(settings, "upsample_kernel_sizes", source)
    blocks = _sizes(settings, "resblock_kernel_sizes", source)
    dilations = tuple(
        _sizes({"resblock_dilation_sizes": row}, "resblock_dilation_sizes", source)
        for row in settings["resblock_dilation_sizes"]
    )
    # Else a stage is not exactly `rate` times as long as its input, or a block not as long as its own.
    fits = len(rates) == len(kernels) and all(k >= r and (k - r) % 2 == 0 for r, k in zip(rates, kernels))
    if not fits or len(blocks) != len(dilations) or not all(size % 2 for size in blocks):
        raise CheckpointError(
            f"{source}: {section} has upsample_rates {rates} with upsample_kernel_sizes {kernels}, and "
            f"resblock_kernel_sizes {blocks} with {len(dilations)} rows of dilations; expected kernels that exceed "
            "their rates by an even number, and odd block kernels with a row each. Use the published file."
        )
    return GeneratorConfig(settings["upsample_initial_channel"], rates, kernels, blocks, dilations)


def _sizes(settings: Mapping[str, Any], key: str, source: str) -> tuple[int, ...]:
    value = settings[key]
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(n, int) and n > 0 for n in value):
        raise CheckpointError(f"{source}: config {key} is {value!r}, expected a list of positive integers.")
    return tuple(value)


def _check_rates(config: AudioVAEConfig, input_rate: int, source: str) -> None:
    """The parts must fit one another in time, or the sound would be too fast, too slow or too short."""
    problems = []
    if input_rate != config.sample_rate:
        problems.append(f"bwe input_sampling_rate {input_rate} is not the vocoder's {config.sample_rate}")
    if config.output_sample_rate % config.sample_rate:
        problems.append(f"{config.output_sample_rate} Hz is no multiple of {config.sample_rate} Hz")
    if config.vocoder.rate % config.extension_hop_length:
        problems.append(
            f"a mel frame has {config.vocoder.rate} samples, no multiple of bwe hop {config.extension_hop_length}"
        )
    if config.extension.rate != config.extension_ratio * config.extension_hop_length:
        problems.append(
            f"bwe makes {config.extension.rate} samples of {config.extension_hop_length}, not {config.extension_ratio} "
            "times as many"
        )
    if config.mel_bins % config.factor:
        problems.append(f"{config.mel_bins} mel bins do not divide by {config.factor}")
    if problems:
        raise CheckpointError(f"{source}: its audio config contradicts itself: {'; '.join(problems)}.")
