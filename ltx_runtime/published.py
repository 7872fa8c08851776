"""File names under which Lightricks publishes LTX-2.5 (Hugging Face, Lightricks/LTX-2.5): what users are told to load,
and what tiny files stand in for."""

TRANSFORMER_FILE = "ltx-2.5-22b-distilled-transformer-bf16.safetensors"
DEV_TRANSFORMER_FILE = "ltx-2.5-22b-dev-transformer-bf16.safetensors"
LORA_FILE = "ltx-2.5-22b-distilled-lora-450-bf16.safetensors"
TEXT_ENCODER_FILE = "gemma4-12b-with-proj-ltx-2.5-bf16.safetensors"
CONV_VAE_FILE = "ltx-2.5-video-vae-conv-bf16.safetensors"
DIFFUSION_VAE_FILE = "ltx-2.5-video-vae-bf16.safetensors"
AUDIO_VAE_FILE = "ltx-2.5-audio-vae-bf16.safetensors"
SPATIAL_UPSCALER_FILE = "ltx-2.5-latent-spatial-upscaler-x2-bf16-1.0.safetensors"
TEMPORAL_UPSCALER_FILE = "ltx-2.5-latent-temporal-upscaler-x2-bf16-1.0.safetensors"
DURATION_HEAD_FILE = "ltx-2.5-duration-head-bf16.safetensors"
