"""Audio VAE: mel decode and encode, vocoder, bandwidth extension, front end, filters (audio.md)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from golden_kinds import Result, compare, metadata, metadata_json
from ltx_runtime.audio_vae import AudioVAE, load_audio_vae
from ltx_runtime.audio_vae.filters import hann_sinc_kernel, kaiser_sinc_kernel
from ltx_runtime.audio_vae.front_end import slaney_filterbank
from ltx_runtime.audio_vae.mel_vae import pixel_norm
from ltx_runtime.audio_vae.network import run_stages
from ltx_runtime.audio_vae.resample import Resampler
from ltx_runtime.audio_vae.vocoder import SnakeBeta
from ltx_runtime.shapes import audio_latent_frames

PENDING: dict[str, str] = {}
TOLERANCE = 1e-4
# Filters and resampled samples are rounded once, at values below 1; the front end's golden is a library of its own.
FILTER_TOLERANCE = 1e-6


def cases(path: Path) -> list[str]:
    return list(metadata_json(path, "cases"))


def check(path: Path, case: str):
    golden = {
        name.removeprefix(f"{case}."): tensor
        for name, tensor in load_file(path).items()
        if name == case or name.startswith(f"{case}.")
    }
    described = metadata_json(path, "cases")[case]
    vae = _vae(path.parent / metadata(path)["weights"])
    with torch.inference_mode():
        if case.startswith("adec_"):
            yield from _check_decode(vae, golden)
        elif case.startswith("aenc_"):
            yield from _check_encode(vae, golden, described["sampling_rate"])
        elif case == "audio_latent_frames_table":
            wrong = sum(audio_latent_frames(frames, rate) != expected for frames, rate, expected in described)
            yield Result(f"{len(described)} lengths", wrong, 0)
        elif case == "resampler_filter":
            yield compare("ratio 3", hann_sinc_kernel(3)[None, None], golden[case], FILTER_TOLERANCE)
        elif case == "kaiser_filter_12_fp32":
            yield compare("12 taps", kaiser_sinc_kernel(12, 0.25, 0.3)[None, None], golden[case], FILTER_TOLERANCE)
            stored = vae.module.vocoder.vocoder.act_post.upsample.filter
            yield compare("as stored", golden[case].bfloat16().float(), stored, 0)
        elif case == "encoder_mel_filterbank":
            filterbank = slaney_filterbank(1024, 64, 0.0, 8000.0, 16000)
            yield compare("slaney", filterbank, golden[case], FILTER_TOLERANCE)
        elif case == "unit.pixel_norm":
            yield compare("out", pixel_norm(golden["in"]), golden["out"], TOLERANCE)
        elif case == "unit.snake_beta":
            snake = SnakeBeta(golden["alpha"].shape[0])
            snake.load_state_dict({"alpha": golden["alpha"], "beta": golden["beta"]})
            snake.prepare()
            # Where beta lets 1e-9 show, outputs reach 1e8.
            scale = golden["out"].abs().clamp(min=1)
            yield compare("out / scale", snake(golden["in"]) / scale, golden["out"] / scale, TOLERANCE)
        else:
            raise AssertionError(f"case {case} is unknown")


@lru_cache(maxsize=1)
def _vae(weights: Path) -> AudioVAE:
    return load_audio_vae(weights, device="cpu", dtype=torch.float32)


def _check_decode(vae: AudioVAE, golden):
    latent = golden["latent"]
    yield compare("wave", vae.decode(latent), golden["wave"], TOLERANCE)
    network = vae.module
    yield compare("mel", network.audio_vae.decode(latent), golden["mel"], TOLERANCE)
    wanted = {name.removeprefix("inter."): tensor for name, tensor in golden.items() if name.startswith("inter.")}
    if not wanted:
        return
    decoder, vocoder = network.audio_vae.decoder, network.vocoder
    watched = {
        "conv_in": decoder.conv_in,
        "mid": decoder.mid,
        "up2_upsample": decoder.up[2].upsample,
        "up1_block0": decoder.up[1].block[0],
        "up1_upsample": decoder.up[1].upsample,
        "conv_out": decoder.conv_out,
        "v_conv_pre": vocoder.vocoder.conv_pre,
        "v_ups0": vocoder.vocoder.ups[0],
        "v_res0_act0": vocoder.vocoder.resblocks[0].acts1[0],
        "v_res0": vocoder.vocoder.resblocks[0],
        "v_wave16k": vocoder.vocoder,
        "bwe_logmel": vocoder.mel_stft,
        "bwe_residual": vocoder.bwe_generator,
    }
    found = {"denorm": network.audio_vae.per_channel_statistics.denormalize(latent)}
    hooks = [
        # Cloned: sums go on in place.
        module.register_forward_hook(lambda module, args, out, name=name: found.update({name: out.clone()}))
        for name, module in watched.items()
    ]
    run_stages(network.decode_stages(), latent)
    for hook in hooks:
        hook.remove()
    found["v_wave16k"].clamp_(-1, 1)
    found["bwe_skip"] = vocoder.skip(found["v_wave16k"])
    for name, expected in wanted.items():
        yield compare(name, found[name], expected, TOLERANCE)


def _check_encode(vae: AudioVAE, golden, sample_rate: int):
    waveform = golden["wave_i16"] / 32768
    yield compare("latent", vae.encode(waveform, sample_rate), golden["latent"], TOLERANCE)
    resampled = Resampler(sample_rate, vae.config.sample_rate, torch.device("cpu"))(waveform)
    if "wave_16k" in golden:
        yield compare("wave_16k", resampled, golden["wave_16k"], FILTER_TOLERANCE)
    yield compare("logmel", vae.module.front_end(resampled), golden["logmel"], TOLERANCE)
