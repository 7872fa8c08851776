"""The video VAE: both decoders and the encoder, plans that make them fit, frames out and in."""
from .conv_vae import ConvVideoEncoder, ConvVideoVAE
from .decode import VideoVAE, load_video_vae
from .diffusion_grid import DecodeNoise
from .diffusion_vae import DiffusionVideoVAE
from .encode import VideoEncoder, load_video_encoder
from .plan import AskedSizes, DecodePlan, EncodePlan
from .statistics import PerChannelStatistics
from .tiling import TileOverlaps, Tiling

__all__ = [
    "AskedSizes",
    "ConvVideoEncoder",
    "ConvVideoVAE",
    "DecodeNoise",
    "DecodePlan",
    "DiffusionVideoVAE",
    "EncodePlan",
    "PerChannelStatistics",
    "TileOverlaps",
    "Tiling",
    "VideoEncoder",
    "VideoVAE",
    "load_video_encoder",
    "load_video_vae",
]
