"""LTX-2.5 on the device, without ComfyUI: load, sample, decode, and a log of where the time went."""
from .audio_vae import AudioVAE, load_audio_vae
from .conditioning import audio_state, text_to_video_state
from .conditioning_file import load_conditioning, save_conditioning
from .duration import DurationHead, duration_frames, load_duration_head, predict_seconds
from .errors import (
    CaptureError,
    CheckpointError,
    LTXError,
    NonFiniteError,
    RequestError,
    RestartRequiredError,
    ShapeError,
)
from .guidance import Guidance, GuidanceSpec
from .lora import LoraSpec
from .runtime import TransformerModel, load_transformer
from .sampler import SampleRequest, SampleResult, TextFeatures, sample
from .schedules import distilled_sigmas
from .shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames
from .timing import Timeline
from .upsampler import LatentUpsampler, load_upsampler
from .video_vae import VideoEncoder, VideoVAE, load_video_encoder, load_video_vae
from .warm_up import warm_up

__all__ = [
    "AudioLatentShape",
    "AudioVAE",
    "CaptureError",
    "CheckpointError",
    "DurationHead",
    "Guidance",
    "GuidanceSpec",
    "LTXError",
    "LatentUpsampler",
    "LoraSpec",
    "NonFiniteError",
    "RequestError",
    "RestartRequiredError",
    "SampleRequest",
    "SampleResult",
    "ShapeError",
    "TextFeatures",
    "Timeline",
    "TransformerModel",
    "VideoEncoder",
    "VideoLatentShape",
    "VideoVAE",
    "audio_latent_frames",
    "audio_state",
    "distilled_sigmas",
    "duration_frames",
    "load_audio_vae",
    "load_conditioning",
    "load_duration_head",
    "load_transformer",
    "load_upsampler",
    "load_video_encoder",
    "load_video_vae",
    "predict_seconds",
    "sample",
    "save_conditioning",
    "text_to_video_state",
    "warm_up",
]
