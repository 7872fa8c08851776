"""LTX-2.5 on the device, without ComfyUI: load, sample, decode, and a log of where the time went."""
from .conditioning import audio_state, text_to_video_state
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
from .timing import Timeline
from .upsampler import LatentUpsampler, load_upsampler
from .video_vae import VideoEncoder, VideoVAE, load_video_encoder, load_video_vae
from .warm_up import warm_up

__all__ = [
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
    "VideoVAE",
    "audio_state",
    "duration_frames",
    "load_duration_head",
    "load_transformer",
    "load_upsampler",
    "load_video_encoder",
    "load_video_vae",
    "predict_seconds",
    "sample",
    "text_to_video_state",
    "warm_up",
]
