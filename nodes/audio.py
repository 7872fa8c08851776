"""Sound: the audio VAE's loader, LATENT to AUDIO, and AUDIO to LATENT."""

from __future__ import annotations

from numbers import Real
from typing import Any

from comfy_api.latest import io
from torch import Tensor

from ..ltx_runtime import published
from ..ltx_runtime.audio_vae import AudioVAE as AudioVAEModel
from ..ltx_runtime.checkpoint import read_header
from ..ltx_runtime.errors import RequestError, ShapeError
from ..ltx_runtime.shapes import AUDIO_LATENTS_PER_SECOND, VideoLatentShape, audio_latent_frames
from . import host, live
from .checks import check_socket
from .decode import video_part
from .latents import check_generations, made_by, read_latent
from .load import ModelFiles
from .sample import cuda_graphs_refused, report_input, report_output

AudioVAE = io.Custom("LTXGRAPH_AUDIO_VAE")

_FILES = ModelFiles(("vae", "checkpoints"), published.AUDIO_VAE_FILE, ("audio_vae",))


class LTXGraphAudioVAELoader(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphAudioVAELoader",
            display_name="LTX Graph Audio VAE Loader",
            category="LTXGraph",
            description="Opens an LTX-2.5 or 2.3 audio VAE with its vocoder for LTX Graph Audio Decode and Encode.",
            search_aliases=["LTX 2.5", "LTXV", "load VAE", "VAELoader", "LTXVAudioVAELoader", "vocoder"],
            inputs=[
                io.Combo.Input(
                    "vae_name",
                    options=_FILES.names(),
                    display_name="audio VAE",
                    tooltip="An audio VAE file from models/vae (or a 2.3 checkpoint from models/checkpoints).",
                ),
            ],
            outputs=[AudioVAE.Output(display_name="audio_vae", tooltip="For LTX Graph Audio Decode and Audio Encode.")],
        )

    @classmethod
    def validate_inputs(cls, vae_name: str | None = None) -> bool | str:
        return _FILES.verdict(vae_name)

    @classmethod
    def fingerprint_inputs(cls, vae_name: str | None = None):
        return _FILES.state(vae_name)

    @classmethod
    def execute(cls, vae_name: str) -> io.NodeOutput:
        path = _FILES.checked(vae_name)
        return io.NodeOutput(host.DeviceModel(AudioVAEModel(read_header(path), device=host.vae_device()), path.name))


class LTXGraphAudioDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphAudioDecode",
            display_name="LTX Graph Audio Decode",
            category="LTXGraph",
            description="Decodes an LTX audio latent to 48 kHz stereo on the device. The same latent gives the same "
            "samples every time.",
            search_aliases=["LTX 2.5", "VAEDecodeAudio", "LTXVAudioVAEDecode", "sound"],
            inputs=[
                AudioVAE.Input("audio_vae", tooltip="From LTX Graph Audio VAE Loader."),
                io.Latent.Input("samples", tooltip="An audio latent, or video with audio: its sound is decoded."),
                report_input(),
            ],
            outputs=[io.Audio.Output(display_name="audio", tooltip="48 kHz stereo."), report_output()],
        )

    @classmethod
    def execute(cls, audio_vae: host.DeviceModel, samples, report=None) -> io.NodeOutput:
        latent = audio_part(samples, "samples")
        check_generations(audio_vae, latent=read_latent(samples, "samples"))
        vae: AudioVAEModel = audio_vae.model
        activation_bytes = vae.decode_bytes(latent.shape)
        with host.stay(report, "LTXGraphAudioDecode", [audio_vae]) as timeline:
            host.make_resident([audio_vae], timeline, activation_bytes)
            waveform = vae.decode(
                latent,
                graphs_refused=cuda_graphs_refused(),
                timeline=timeline,
                check_cancelled=host.cancel_check(),
            )
            with timeline.phase("transfer.to_host"):
                waveform = host.to_intermediate(waveform)
        report = host.extend(report, timeline, settings={"audio_vae": audio_vae.name})
        audio = {"waveform": waveform, "sample_rate": vae.sample_rate}
        return io.NodeOutput(audio, report, ui=live.shown({"": report}))


class LTXGraphAudioEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXGraphAudioEncode",
            display_name="LTX Graph Audio Encode",
            category="LTXGraph",
            description="Encodes sound of any sampling rate, mono or stereo, to an LTX audio latent on the device.",
            search_aliases=["LTX 2.5", "VAEEncodeAudio", "LTXVAudioVAEEncode", "audio to video"],
            inputs=[
                AudioVAE.Input("audio_vae", tooltip="From LTX Graph Audio VAE Loader."),
                io.Audio.Input("audio", tooltip="The sound: mono or stereo, any sampling rate and length."),
                io.Int.Input(
                    "length",
                    default=0,
                    min=0,
                    max=16384,
                    tooltip="Frames of the video that the sound goes with: longer sound is cut, shorter sound followed "
                    "by silence. 0 = as long as the sound is.",
                ),
                io.Float.Input(
                    "frame_rate",
                    default=24.0,
                    min=1.0,
                    max=1000.0,
                    step=0.01,
                    tooltip="Frames a second of that video; not used without a length.",
                ),
                io.Latent.Input(
                    "video_latent",
                    optional=True,
                    tooltip="The video that the sound goes with, empty or encoded: sets the length and wins over "
                    "`length`.",
                ),
                report_input(),
            ],
            outputs=[
                io.Latent.Output(display_name="latent", tooltip="The sound's latent, 25 frames a second."),
                report_output(),
            ],
        )

    @classmethod
    def execute(
        cls,
        audio_vae: host.DeviceModel,
        audio,
        length: int = 0,
        frame_rate: float = 24.0,
        video_latent=None,
        report=None,
    ) -> io.NodeOutput:
        check_socket(audio_vae, host.DeviceModel, "audio_vae", "LTX Graph Audio VAE Loader")
        waveform, sample_rate = read_audio(audio, "audio")
        if video_latent is not None:
            length = VideoLatentShape(*video_part(video_latent, "video_latent").shape).num_frames
        vae: AudioVAEModel = audio_vae.model
        vae.check_sound(waveform, sample_rate)
        seconds = waveform.shape[-1] / sample_rate
        latent_frames = _latent_frames(length, frame_rate)
        notes = _notes(seconds, latent_frames, sample_rate, vae.config.sample_rate)
        expected_frames = latent_frames or int(seconds * AUDIO_LATENTS_PER_SECOND) + 1
        with host.stay(report, "LTXGraphAudioEncode", [audio_vae]) as timeline:
            for note in notes:
                timeline.note("encode.audio", note)
            host.make_resident([audio_vae], timeline, vae.encode_bytes(expected_frames, waveform.shape[0]))
            latent = vae.encode(
                waveform,
                sample_rate,
                latent_frames=latent_frames,
                timeline=timeline,
                check_cancelled=host.cancel_check(),
            )
            with timeline.phase("transfer.to_host"):
                latent = host.to_intermediate(latent)
        settings = {"audio_vae": audio_vae.name, "encoded_audio_latent": list(latent.shape)}
        report = host.extend(report, timeline, settings=settings, notes=notes)
        encoded = made_by({"samples": latent, "type": "audio"}, audio_vae)
        return io.NodeOutput(encoded, report, ui=live.shown({"": report}))


def audio_part(samples, name: str) -> Tensor:
    """The audio tensor of a LATENT. Raises RequestError for one that holds video alone."""
    audio = read_latent(samples, name).audio
    if audio is None:
        raise RequestError(
            f"{name}: this latent holds video and no sound. Connect an audio latent or video with audio."
        )
    return audio


def read_audio(audio: Any, name: str) -> tuple[Tensor, int]:
    """(waveform (B, C, N) float, sample rate in Hz) of an AUDIO. Raises RequestError and ShapeError for what is
    none."""
    if audio is None:
        raise RequestError(f"{name}: no sound came. The video that it was taken from may have none.")
    if not isinstance(audio, dict) or not isinstance(audio.get("waveform"), Tensor) or "sample_rate" not in audio:
        raise RequestError(f"{name}: this AUDIO has no waveform or no sample_rate. Connect Load Audio or its like.")
    rate = audio["sample_rate"]
    if not isinstance(rate, Real) or rate < 1 or rate != int(rate):
        raise RequestError(f"{name}: this AUDIO has sample_rate {rate!r}, expected a whole number of Hz such as 48000.")
    waveform = audio["waveform"]
    if waveform.ndim != 3:
        raise ShapeError(
            f"{name}: a waveform of shape {tuple(waveform.shape)}, expected (batch, channels, samples). Connect Load "
            f"Audio or its like."
        )
    if not waveform.is_floating_point():
        raise RequestError(
            f"{name}: a waveform of {waveform.dtype}, expected float in [-1, 1]. Connect Load Audio or its like."
        )
    return waveform, int(rate)


def _latent_frames(length: int, frame_rate: float) -> int | None:
    """Audio latent frames of a video, or None for the sound's own length."""
    if not length:
        return None
    frames = audio_latent_frames(length, frame_rate)
    if frames < 1:
        raise ShapeError(
            f"{length} frames at {frame_rate} frames a second hold no audio latent frame (25 a second). "
            "Make the clip longer."
        )
    return frames


def _notes(seconds: float, latent_frames: int | None, sample_rate: int, encoder_rate: int) -> list[str]:
    """What happens to the sound before it is encoded, for the report."""
    notes = []
    if sample_rate != encoder_rate:
        notes.append(f"the sound is resampled from {sample_rate} to {encoder_rate} Hz")
    if latent_frames is not None:
        wanted = latent_frames / AUDIO_LATENTS_PER_SECOND
        if seconds > wanted:
            notes.append(f"the sound lasts {seconds:.2f} s, the clip {wanted:.2f} s: its end is left out")
        elif seconds < wanted:
            notes.append(f"the sound lasts {seconds:.2f} s, the clip {wanted:.2f} s: silence follows it")
    return notes
