"""Audio VAE: the file's names, lengths, reproducible decodes, encodes of any sound, filters, and everything it refuses.

Agreement with the reference is in golden_kinds/audio_vae.py.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.signal
import torch
import torch.nn.functional as F
from cancelling import Cancelled, cancel_at
from model_files import published_file, rewritten, structure
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ltx_runtime.audio_vae import AudioVAE, AudioVAEConfig, AudioVAENetwork, audio_vae, load_audio_vae
from ltx_runtime.audio_vae.filters import Downsampling, Upsampling, hann_sinc
from ltx_runtime.audio_vae.network import exact_convolutions, run_stages
from ltx_runtime.audio_vae.resample import Resampler
from ltx_runtime.checkpoint import read_header
from ltx_runtime.cuda_graph import GraphCache
from ltx_runtime.errors import (
    CaptureError,
    CheckpointError,
    NonFiniteError,
    RequestError,
    RestartRequiredError,
    ShapeError,
)
from ltx_runtime.parity import waveform_range
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.shapes import audio_latent_frames
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import tiny_audio_vae_config, write_tiny_audio_vae

HERE = Path(__file__).parent
CPU = torch.device("cpu")
# Two float32 runs differ by this much when the convolutions sum in another order; waveforms reach 1.
ROUNDING = 1e-5


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory) -> Path:
    return write_tiny_audio_vae(tmp_path_factory.mktemp("audio") / "ltx-2.5-audio-vae-bf16.safetensors")


@pytest.fixture(scope="module")
def vae(tiny_file) -> AudioVAE:
    return load_audio_vae(tiny_file, device="cpu", dtype=torch.float32)


def random_latent(frames: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 8, frames, 16, generator=torch.Generator().manual_seed(seed))


def tone(hz: float, sample_rate: int, seconds: float, channels: int = 2) -> torch.Tensor:
    time = torch.arange(round(seconds * sample_rate), dtype=torch.float64) / sample_rate
    return (0.5 * torch.sin(2 * math.pi * hz * time)).float().expand(1, channels, -1)


def published_json() -> dict:
    return json.loads((HERE / "configs" / "audio_vae.json").read_text())


# --- names and loading ----------------------------------------------------------------------------------------------


def test_the_published_file_is_accepted_without_reading_it(tmp_path):
    header = read_header(published_file(tmp_path / "a.safetensors", "audio_vae"))
    assert header.component == "audio_vae"
    handle = AudioVAE(header, device="cpu")
    entries = json.loads((HERE / "manifests" / "audio_vae.json").read_text())
    manifest = {name: (dtype, tuple(shape)) for name, (dtype, shape) in entries.items()}
    assert structure(build_on_meta(lambda: AudioVAENetwork(handle.config))) == manifest
    sizes = {name: math.prod(shape) for name, (_, shape) in manifest.items()}
    vocoder = sum(size for name, size in sizes.items() if name.startswith("vocoder."))
    assert sum(sizes.values()) == 182_333_434
    # bfloat16, but for the vocoder
    assert handle.weights_bytes == 2 * (sum(sizes.values()) - vocoder) + 4 * vocoder


def test_a_file_without_metadata_is_taken_as_the_published_one(tmp_path):
    header = read_header(published_file(tmp_path / "a.safetensors", "audio_vae"))
    bare = replace(header, config={}, metadata={})
    assert AudioVAEConfig.from_header(bare) == replace(AudioVAEConfig.from_header(header), model_version=None)


def test_the_tiny_file_has_every_name_and_key_of_the_published_one(tiny_file):
    header = read_header(tiny_file)
    assert header.tensors.keys() == json.loads((HERE / "manifests" / "audio_vae.json").read_text()).keys()
    assert {spec.dtype for spec in header.tensors.values()} == {"BF16"}

    def keys(config):
        return {name: keys(value) for name, value in config.items()} if isinstance(config, dict) else None

    assert keys(header.config) == keys(published_json())
    assert AudioVAEConfig.from_header(header) == tiny_audio_vae_config()


def test_the_vocoder_is_float32_and_the_mel_vae_as_in_the_file(tiny_file, vae):
    loaded = load_audio_vae(tiny_file, device="cpu")
    assert {p.dtype for p in loaded.module.vocoder.parameters()} == {torch.float32}
    assert {p.dtype for p in loaded.module.audio_vae.parameters()} == {torch.bfloat16}
    assert loaded.weights_bytes == sum(p.numel() * p.element_size() for p in loaded.module.parameters())
    latent = random_latent(4)
    exact, rounded = (v.module.audio_vae.decode(latent) for v in (vae, loaded))
    assert rounded.dtype == torch.float32
    # The reference's own bf16 run: relative rms 1.2e-2 (audio.md section 6).
    assert ((rounded - exact).square().mean() / exact.square().mean()).sqrt() < 2.5e-2


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_weights_packed_for_the_kernels_count_as_they_lie(tiny_file, monkeypatch, dtype):
    """ComfyUI makes room for the load, and counts afterwards what evicting would give back."""

    class Packed:
        num_bytes = 1000

        def __init__(self, vocoder):
            assert not any(p.is_meta for p in vocoder.parameters())

    monkeypatch.setattr("ltx_runtime.audio_vae.network.refusal", lambda device, vocoder: None)
    monkeypatch.setattr("ltx_runtime.audio_vae.network.FusedVocoder", Packed)
    handle = AudioVAE(read_header(tiny_file), device="cpu", dtype=dtype)
    before = handle.weights_bytes
    handle.ensure_resident()
    mel_vae, stft = (
        sum(p.nbytes for p in part.parameters()) for part in (handle.module.audio_vae, handle.module.vocoder.mel_stft)
    )
    assert handle.weights_bytes == mel_vae + stft + Packed.num_bytes
    read = 2 if dtype is None else 4  # bytes of a value
    assert before == mel_vae + (read + 2) * sum(p.numel() for p in handle.module.vocoder.parameters())
    handle.evict()
    assert handle.weights_bytes == before


def test_a_checkpoint_of_everything_decodes_to_the_same_bits(tiny_file, vae, tmp_path):
    others = {
        "model.diffusion_model.patchify_proj.weight": torch.zeros(4, 4),
        "model.diffusion_model.transformer_blocks.0.attn1.to_q.weight": torch.zeros(4, 4),
        "vae.decoder.up_blocks.0.conv.weight": torch.zeros(4),
    }
    path = rewritten(tiny_file, tmp_path / "monolith.safetensors", tensors=lambda tensors: tensors.update(others))
    assert "audio_vae" in read_header(path).components and len(read_header(path).components) == 3
    loaded = load_audio_vae(path, device="cpu", dtype=torch.float32)
    assert torch.equal(loaded.decode(random_latent(2)), vae.decode(random_latent(2)))


def test_evicted_weights_come_back_at_the_next_use(tiny_file, vae):
    loaded = load_audio_vae(tiny_file, device="cpu", dtype=torch.float32)
    loaded.evict()
    assert not loaded.resident
    with torch.inference_mode():  # as in a node
        waveform = loaded.decode(random_latent(2))
    assert torch.equal(waveform, vae.decode(random_latent(2)))


# --- lengths --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frames", [1, 2, 3, 9])
def test_decoded_length(vae, frames):
    waveform = vae.decode(random_latent(frames))
    assert waveform.shape == (1, 2, 480 * max(4 * frames - 3, 1))
    assert waveform.dtype == torch.float32 and vae.sample_rate == 48000


def test_sound_is_at_most_50_ms_from_its_video():
    config = AudioVAEConfig.from_json(published_json())
    for rate in (8, 12, 23.976, 24, 25, 29.97, 30, 48, 50, 60):
        for frames in range(9, 1000, 8):
            samples = config.num_samples(audio_latent_frames(frames, rate))
            assert abs(samples / config.output_sample_rate - frames / rate) <= 0.05 + 1e-9, (frames, rate)


def test_stages_are_device_work_on_shapes_alone():
    """On the meta device nothing can be read: no value reaches the host, and no branch depends on one."""
    config = AudioVAEConfig.from_json(published_json())
    network = build_on_meta(lambda: AudioVAENetwork(config))
    with torch.device("meta"), torch.inference_mode():
        network.prepare()
        waveform = run_stages(network.decode_stages(), torch.empty(1, 8, 126, 16))
        assert waveform.shape == (1, 2, 240480)
        resampler = Resampler(44100, 16000, torch.device("meta"))
        latent = run_stages(network.encode_stages(resampler), torch.empty(2, 2, 220500))
        assert latent.shape == (2, 8, 126, 16)


# --- decode ---------------------------------------------------------------------------------------------------------


def test_the_same_latent_gives_the_same_bits(vae):
    latent = random_latent(3)
    assert torch.equal(vae.decode_raw(latent), vae.decode_raw(latent))


def test_sound_of_a_batch_is_that_of_each_alone(vae):
    latent = random_latent(3, batch=2)
    both = vae.decode(latent)
    for item in range(2):
        assert (both[item] - vae.decode(latent[item : item + 1])[0]).abs().max() < ROUNDING


def test_decode_clamps_what_decode_raw_gives():
    loud = load_audio_vae(HERE / "goldens" / "audio_vae_tiny.safetensors", device="cpu")
    latent = torch.randn(1, 2, 7, 16, generator=torch.Generator().manual_seed(0))
    raw = loud.decode_raw(latent)
    assert raw.abs().max() > 1
    assert torch.equal(loud.decode(latent), raw.clamp(-1, 1))


def test_tiny_sound_can_be_judged(vae):
    """Neither silent nor clipped (design.md section 6), and every latent changes it to the end of its time."""
    latent = random_latent(9)
    waveform = vae.decode(latent)
    stats = waveform_range(waveform)
    assert not stats.degenerate and stats.saturated_share < 0.01
    assert 0.1 < waveform.std() < 0.5
    for frame in (0, 4, 8):
        changed = latent.clone()
        changed[:, :, frame] = random_latent(9, seed=1)[:, :, frame]
        difference = (vae.decode(changed) - waveform).abs()
        sample = 1920 * frame if frame < 8 else waveform.shape[2] - 480
        assert difference[..., sample : sample + 480].mean() > 1e-3


def test_convolution_switches_are_set_inside_and_put_back_after():
    cudnn = torch.backends.cudnn
    before = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
    cudnn.benchmark = True
    try:
        with pytest.raises(KeyboardInterrupt), exact_convolutions():
            assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
            assert cudnn.conv.fp32_precision == "ieee" if hasattr(cudnn, "conv") else not cudnn.allow_tf32
            raise KeyboardInterrupt
        assert (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32) == (True, *before[1:])
    finally:
        cudnn.benchmark = before[0]


# --- encode ---------------------------------------------------------------------------------------------------------


def test_decoded_sound_encodes_to_as_many_frames(vae):
    latent = random_latent(5)
    again = vae.encode(vae.decode(latent), vae.sample_rate)
    assert again.shape == latent.shape and again.dtype == torch.float32
    other = vae.encode(vae.decode(random_latent(5, seed=1)), vae.sample_rate)
    assert (again - other).abs().mean() > 1e-2


def test_mono_is_heard_on_both_sides(vae):
    sound = tone(440, 16000, 0.2)
    assert torch.equal(vae.encode(sound[:, :1], 16000), vae.encode(sound, 16000))


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000, 96000])
def test_the_sampling_rate_of_a_sound_does_not_matter(vae, rate):
    expected = vae.encode(tone(440, 16000, 0.4), 16000)
    latent = vae.encode(tone(440, rate, 0.4), rate)
    assert latent.shape == expected.shape
    # At the ends the resampler's kernel reaches into silence.
    middle = slice(3, -2)
    assert (latent - expected)[:, :, middle].abs().max() < 0.1
    assert (latent - vae.encode(tone(880, rate, 0.4), rate))[:, :, middle].abs().max() > 1


@pytest.mark.parametrize("samples", [1, 100, 512, 513, 6400])
def test_silence_and_the_shortest_sounds(vae, samples):
    latent = vae.encode(torch.zeros(1, 1, samples), 16000)
    windows = 1 + max(samples, 513) // 160
    assert latent.shape == (1, 8, math.ceil(math.ceil(windows / 2) / 2), 16)
    assert torch.isfinite(latent).all()


@pytest.mark.parametrize("rate", [16000, 44100])
@pytest.mark.parametrize("frames", [1, 4, 9])
def test_longer_sound_is_cut_and_shorter_followed_by_silence(vae, rate, frames):
    sound = tone(440, rate, 0.25)  # 7 latent frames
    whole = vae.encode(sound, rate)
    latent = vae.encode(sound, rate, latent_frames=frames)
    assert latent.shape == (1, 8, frames, 16)
    if frames < whole.shape[2]:
        assert (latent - whole[:, :, :frames]).abs().max() < ROUNDING, "the cut changed what was kept"
    else:
        padded = F.pad(sound, (0, rate))
        assert (latent - vae.encode(padded, rate)[:, :, :frames]).abs().max() < ROUNDING


# --- filters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, new", [(48000, 16000), (44100, 16000), (22050, 16000), (8000, 16000), (47952, 16000), (7, 5)]
)
def test_resampling_is_polyphase_filtering_with_the_windowed_sinc(old, new):
    sound = torch.rand(1, 2, 3001, generator=torch.Generator().manual_seed(0)) * 2 - 1
    divisor = math.gcd(old, new)
    up, down = new // divisor, old // divisor
    cutoff = 0.99 * min(up, down) / down
    half = math.ceil(6 / cutoff) * up
    kernel = hann_sinc(torch.arange(-half, half + 1, dtype=torch.float64) / up * cutoff) * cutoff
    expected = scipy.signal.resample_poly(sound.double().numpy(), up, down, axis=2, window=kernel.numpy() / up)
    resampler = Resampler(old, new, CPU)
    resampled = resampler(sound)
    assert resampled.shape[2] == resampler.num_samples(3001) == expected.shape[2]
    assert np.abs(resampled.numpy() - expected).max() < 1e-6


def test_resampling_in_pieces_equals_resampling_whole(monkeypatch):
    sound = torch.rand(1, 1, 2000, generator=torch.Generator().manual_seed(0))
    resampler = Resampler(44100, 16000, CPU)
    whole = resampler(sound)
    monkeypatch.setattr("ltx_runtime.audio_vae.resample._CHUNK_SAMPLES", 100)
    assert torch.equal(resampler(sound), whole)


def test_resampling_keeps_what_fits_and_drops_what_would_fold_back():
    middle = slice(500, -500)
    kept = Resampler(44100, 16000, CPU)(tone(3000, 44100, 0.5))
    assert (kept - tone(3000, 16000, 0.5))[..., middle].abs().max() < 5e-3
    # 45 dB down: the edge of a kernel of 6 zero crossings is 2 kHz wide.
    assert Resampler(44100, 16000, CPU)(tone(10000, 44100, 0.5))[..., middle].abs().max() < 5e-3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("taps, rate, offset", [(12, 2, 5), (43, 3, 21), (7, 5, 4), (4, 2, 0)])
def test_upsampling_is_the_transposed_convolution(channels, taps, rate, offset):
    generator = torch.Generator().manual_seed(taps)
    kernel, x = torch.randn(taps, generator=generator), torch.randn(2, channels, 17, generator=generator)
    pad = taps  # more than any output sample sees
    whole = F.conv_transpose1d(
        F.pad(x, (pad, pad), mode="replicate"), kernel.expand(channels, 1, -1), stride=rate, groups=channels
    )
    expected = whole[..., offset + rate * pad :][..., : rate * 17]
    assert (Upsampling(kernel, rate, offset, channels)(x) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("channels", [1, 3])
def test_downsampling_is_the_strided_convolution(channels):
    generator = torch.Generator().manual_seed(0)
    kernel, x = torch.randn(12, generator=generator), torch.randn(2, channels, 20, generator=generator)
    padded = torch.cat([x[..., :1].expand(-1, -1, 5), x, x[..., -1:].expand(-1, -1, 6)], dim=2)
    expected = (padded.unfold(2, 12, 2) * kernel).sum(dim=3)
    assert (Downsampling(kernel, 2, channels)(x) - expected).abs().max() < 1e-5


# --- log and cancel -------------------------------------------------------------------------------------------------


def test_every_stage_is_a_phase(vae):
    timeline = Timeline(None)
    vae.encode(vae.decode(random_latent(2), timeline=timeline), 48000, timeline=timeline)
    ends = [(event["phase"], event["attrs"]["stage"]) for event in timeline.events if event["event"] == "end"]
    assert ends == [
        ("decode.audio", "mel decoder"),
        ("decode.audio", "vocoder"),
        ("decode.audio", "bandwidth extension"),
        ("encode.audio", "resample"),
        ("encode.audio", "log-mel"),
        ("encode.audio", "mel encoder"),
    ]


def test_cancel_stops_between_stages_and_leaves_the_vae_usable(vae):
    latent, timeline = random_latent(2), Timeline(None)
    expected = vae.decode(latent)
    with pytest.raises(Cancelled):
        vae.decode(latent, timeline=timeline, check_cancelled=cancel_at(2))
    assert [event["attrs"]["stage"] for event in timeline.events if event["event"] == "end"] == ["mel decoder"]
    timeline.child()  # raises if a phase were still open
    assert torch.equal(vae.decode(latent), expected)


# --- graphs ---------------------------------------------------------------------------------------------------------


class FakeRecording:
    """Replays by calling. Like a graph's, its outputs are one buffer."""

    def __init__(self, fn, constants, inputs):
        self.fn, self.constants, self.inputs = fn, constants, inputs
        self.outputs = fn(constants, inputs)
        self.device_bytes = 0

    def load(self, constants, inputs):
        assert constants is None
        self.inputs = inputs

    def replay(self):
        fresh = self.fn(self.constants, self.inputs)
        self.outputs.waveform.copy_(fresh.waveform)
        self.outputs.finite.copy_(fresh.finite)
        return self.outputs

    def forget_constants(self):
        pass

    def close(self):
        self.outputs = None


class FakeCache(GraphCache):
    """Records on the CPU, or fails to."""

    error: CaptureError | None = None

    def capture(self, key, fn, constants, inputs, phase):
        with phase("sample.capture"):
            if self.error is not None:
                raise self.error
            self.counters.captures += 1
            self._steps[key] = FakeRecording(fn, constants, inputs)
            return self._steps[key], self._steps[key].outputs


def test_packing_the_weights_is_inside_a_phase(tiny_file, monkeypatch):
    timeline, seen = Timeline(None), []
    real = AudioVAENetwork.prepare

    def prepare(network):
        last = [event for event in timeline.events if event["event"] in ("begin", "end")][-1]
        seen.append((last["phase"], last["event"]))
        real(network)

    monkeypatch.setattr(AudioVAENetwork, "prepare", prepare)
    load_audio_vae(tiny_file, device="cpu", timeline=timeline)
    assert seen == [("load.place", "begin")]


@pytest.fixture
def recorded(tiny_file, monkeypatch) -> AudioVAE:
    """A VAE of its own that thinks it could capture."""
    monkeypatch.setattr(audio_vae, "unavailable_reason", lambda device: None)
    vae = load_audio_vae(tiny_file, device="cpu", dtype=torch.float32)
    vae.graphs = FakeCache(CPU)
    return vae


def stages_of(vae: AudioVAE, latent: torch.Tensor, **settings) -> list[str]:
    timeline = Timeline(None)
    vae.decode(latent, timeline=timeline, **settings)
    return [event["attrs"]["stage"] for event in timeline.events if event["event"] == "end"]


def test_auto_records_a_length_that_comes_back(recorded):
    eager = ["mel decoder", "vocoder", "bandwidth extension"]
    assert stages_of(recorded, random_latent(2)) == eager
    assert stages_of(recorded, random_latent(1)) == eager
    assert stages_of(recorded, random_latent(2, seed=1)) == ["capture"]
    assert stages_of(recorded, random_latent(2, seed=2)) == ["replay"]
    assert stages_of(recorded, random_latent(2, seed=2), cuda_graph="off") == eager
    assert stages_of(recorded, random_latent(2), graphs_refused="the host says no") == eager
    recorded.evict()
    assert len(recorded.graphs) == 0
    recorded.ensure_resident()
    assert stages_of(recorded, random_latent(2)) == eager, "a VAE that leaves with every render records in none"
    assert recorded.graphs.counters.captures == 1


def test_auto_leaves_long_sound_eager(recorded, monkeypatch):
    monkeypatch.setattr(audio_vae, "_AUTO_LATENT_FRAMES", 3)
    for shape in ({"frames": 4}, {"frames": 2, "batch": 2}):
        for _ in range(2):
            assert "capture" not in stages_of(recorded, random_latent(**shape))
    assert stages_of(recorded, random_latent(4), cuda_graph="on") == ["capture"]


def test_on_records_at_once_and_a_result_outlives_the_next_replay(recorded, vae):
    latents = [random_latent(2, seed=seed) for seed in range(3)]
    waveforms = [recorded.decode(latent, cuda_graph="on") for latent in latents]
    assert recorded.graphs.counters.captures == 1
    for waveform, latent in zip(waveforms, latents, strict=True):
        assert torch.equal(waveform, vae.decode(latent, cuda_graph="off"))


def test_weights_that_were_read_again_are_recorded_again(recorded):
    recorded.decode(random_latent(1), cuda_graph="on")
    recorded.evict()
    recorded.decode(random_latent(1), cuda_graph="on")
    assert recorded.graphs.counters.captures == 2


def test_a_failed_capture_is_noted_and_decodes_eager(recorded, vae):
    recorded.graphs.error = CaptureError("not captured: no memory")
    timeline = Timeline(None)
    latent = random_latent(2)
    eager = vae.decode(latent, cuda_graph="off")
    assert torch.equal(recorded.decode(latent, cuda_graph="on", timeline=timeline), eager)
    notes = [event["message"] for event in timeline.events if event["event"] == "note"]
    assert notes == ["CUDA graph: eager, not captured: no memory"]
    recorded.graphs.error = RestartRequiredError("restart ComfyUI")
    with pytest.raises(RestartRequiredError):
        recorded.decode(latent, cuda_graph="on")


def test_a_replay_can_be_cancelled_and_names_the_stage_that_overflows(recorded):
    latent = random_latent(1)
    recorded.decode(latent, cuda_graph="on")
    with pytest.raises(Cancelled):
        recorded.decode(latent, cuda_graph="on", check_cancelled=cancel_at(1))
    parameter = recorded.module.get_parameter("vocoder.bwe_generator.conv_post.weight")
    with torch.inference_mode():
        parameter.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="after the bandwidth extension"):
        recorded.decode(latent, cuda_graph="on")


def test_without_cuda_a_graph_is_answered_with_the_reason(vae):
    timeline = Timeline(None)
    vae.decode(random_latent(1), cuda_graph="on", timeline=timeline)
    (note,) = [event["message"] for event in timeline.events if event["event"] == "note"]
    assert note.startswith("CUDA graph: eager, ") and ("no CUDA" in note or "not on CUDA" in note)
    with pytest.raises(RequestError, match="cuda_graph='always' is not one of auto, on, off"):
        vae.decode(random_latent(1), cuda_graph="always")


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, words",
    [
        ((1, 128, 2, 8, 8), "This is video; connect the audio latent"),
        ((1, 8, 5, 32), r"takes \(batch, 8, length, 16\)"),
        ((1, 4, 5, 16), r"takes \(batch, 8, length, 16\)"),
        ((1, 8, 0, 16), "empty"),
    ],
)
def test_latents_of_another_kind_are_refused(vae, shape, words):
    with pytest.raises(ShapeError, match=words):
        vae.decode(torch.zeros(shape))
    with pytest.raises(ShapeError, match=words):
        vae.decode_bytes(shape)


@pytest.mark.parametrize(
    "sound, rate, error, words",
    [
        (torch.zeros(2, 100), 16000, ShapeError, r"\(batch, channels, samples\)"),
        (torch.zeros(1, 6, 100), 16000, ShapeError, "has 6 channels.* Mix it down"),
        (torch.zeros(1, 2, 0), 16000, ShapeError, "empty"),
        (torch.zeros(1, 2, 100, dtype=torch.int16), 16000, RequestError, "int16"),
        (torch.zeros(1, 2, 100), 0, RequestError, "sample_rate 0"),
        (torch.zeros(1, 2, 100), 44100.5, RequestError, "sample_rate 44100.5"),
    ],
)
def test_sounds_that_can_not_be_encoded_are_refused(vae, sound, rate, error, words):
    with pytest.raises(error, match=words):
        vae.encode(sound, rate)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_refused(vae, bad):
    latent, sound = random_latent(2), torch.zeros(1, 2, 1000)
    latent[0, 0, 1, 0] = sound[0, 1, 7] = bad
    with pytest.raises(NonFiniteError, match="1 of 256 values of the latent are NaN or Inf") as error:
        vae.decode(latent)
    assert error.value.phase == "decode.audio"
    with pytest.raises(NonFiniteError, match="1 of 2000 values of the sound are NaN or Inf") as error:
        vae.encode(sound, 16000)
    assert error.value.phase == "encode.audio"


@pytest.mark.parametrize(
    "weight, stage",
    [
        ("audio_vae.decoder.conv_out.conv.bias", "mel decoder"),
        ("vocoder.vocoder.conv_post.weight", "vocoder"),
        ("vocoder.bwe_generator.conv_post.weight", "bandwidth extension"),
    ],
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_sound_that_is_not_finite_names_the_stage(vae, weight, stage, bad):
    """Also where the clamp would hide it."""
    parameter = vae.module.get_parameter(weight)
    before = parameter.clone()
    try:
        parameter.fill_(bad)
        with pytest.raises(NonFiniteError, match=f"NaN or Inf after the {stage}") as error:
            vae.decode(random_latent(1))
    finally:
        parameter.copy_(before)
    assert error.value.phase == "decode.audio"


def _set(path: str, value):
    def change(config):
        *sections, key = path.split(".")
        for section in sections:
            config = config[section]
        if value is None:
            del config[key]
        else:
            config[key] = value

    return change


DDCONFIG = "audio_vae.model.params.ddconfig"


@pytest.mark.parametrize(
    "change, words",
    [
        (_set(f"{DDCONFIG}.norm_type", "group"), "norm_type='group' .need 'pixel'"),
        (_set(f"{DDCONFIG}.causality_axis", "width"), "causality_axis"),
        (_set(f"{DDCONFIG}.mid_block_add_attention", True), "mid_block_add_attention"),
        (_set(f"{DDCONFIG}.causality_axis", None), "lacks causality_axis"),
        (_set(f"{DDCONFIG}.ch", 0), "ch is 0"),
        (_set("audio_vae.preprocessing", None), "no section audio_vae.preprocessing"),
        (_set("audio_vae.preprocessing.stft.win_length", 512), "win_length=512"),
        (_set("vocoder.vocoder.use_tanh_at_final", True), "use_tanh_at_final"),
        (_set("vocoder.vocoder.upsample_rates", None), "lacks upsample_rates"),
        (_set("vocoder.vocoder.upsample_kernel_sizes", [10, 4, 4, 4, 4, 4]), "exceed their rates by an even number"),
        (_set("vocoder.bwe", None), "no bwe section .*LTX-2.0"),
        (_set("vocoder.bwe.input_sampling_rate", 24000), "24000 is not the vocoder's 16000"),
        (_set("vocoder.bwe.hop_length", 40), "makes 240 samples of 40"),
        (_set("vocoder.bwe.win_size", 256), "win_size=256"),
    ],
)
def test_configs_that_are_not_implemented_are_refused(change, words):
    config = copy.deepcopy(published_json())
    change(config)
    with pytest.raises(CheckpointError, match=words):
        AudioVAEConfig.from_json(config, source="a file")


def test_another_file_is_named():
    with pytest.raises(CheckpointError, match=r"is the conv video VAE, not the audio VAE.*models/vae"):
        load_audio_vae(HERE / "goldens" / "video_vae_conv_tiny.safetensors", device="cpu")


def test_missing_tensors_are_reported_before_anything_is_read(tiny_file, tmp_path):
    tensors = load_file(tiny_file)
    del tensors["audio_vae.per_channel_statistics.std-of-means"]
    with safe_open(tiny_file, "pt") as file:
        save_file(tensors, tmp_path / "a.safetensors", file.metadata())
    with pytest.raises(CheckpointError, match=r"missing: audio_vae\.per_channel_statistics\.std-of-means"):
        AudioVAE(read_header(tmp_path / "a.safetensors"), device="cpu")
