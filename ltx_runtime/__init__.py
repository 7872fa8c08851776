"""LTX-2.5 on the device, without ComfyUI: load, sample, decode, and a log of where the time went."""
from .conditioning import audio_state, text_to_video_state
from .errors import CaptureError, CheckpointError, LTXError, NonFiniteError, RequestError, RestartRequiredError, ShapeError
from .lora import LoraSpec
from .runtime import TransformerModel, load_transformer
from .sampler import SampleRequest, SampleResult, TextFeatures, sample
from .timing import Timeline
from .video_vae import VideoVAE, load_video_vae
from .warm_up import warm_up

__all__ = [
    "CaptureError",
    "CheckpointError",
    "LTXError",
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
    "VideoVAE",
    "audio_state",
    "load_transformer",
    "load_video_vae",
    "sample",
    "text_to_video_state",
    "warm_up",
]
