"""The video VAE: conv decoder and encoder, exact temporal streaming, frames out."""
from .conv_vae import ConvVideoVAE
from .decode import VideoVAE, load_video_vae
from .plan import DecodePlan

__all__ = ["ConvVideoVAE", "DecodePlan", "VideoVAE", "load_video_vae"]
