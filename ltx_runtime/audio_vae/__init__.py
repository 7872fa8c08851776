"""The audio VAE: mel VAE, vocoder and bandwidth extension; latents to 48 kHz stereo sound and back."""

from .audio_vae import AudioVAE, load_audio_vae
from .config import AudioVAEConfig
from .network import AudioVAENetwork

__all__ = ["AudioVAE", "AudioVAEConfig", "AudioVAENetwork", "load_audio_vae"]
