"""The video VAE: conv decoder and encoder, exact temporal streaming, frames out and in."""
from .conv_vae import ConvVideoEncoder, ConvVideoVAE
from .decode import VideoVAE, load_video_vae
from .encode import VideoEncoder, load_video_encoder
from .plan import DecodePlan, EncodePlan
from .statistics import PerChannelStatistics

__all__ = [
    "ConvVideoEncoder",
    "ConvVideoVAE",
    "DecodePlan",
    "EncodePlan",
    "PerChannelStatistics",
    "VideoEncoder",
    "VideoVAE",
    "load_video_encoder",
    "load_video_vae",
]
