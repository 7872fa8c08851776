"""Golden kinds of which nothing is built yet: kind -> why. A kind leaves this table for a module of its own."""

KINDS = {
    "audio_vae": "no audio VAE yet",
    "video_vae_diffusion": "no diffusion video decoder yet",
    "latent_upsampler_spatial_x2": "no latent upsampler yet",
    "latent_upsampler_temporal_x2": "no latent upsampler yet",
    "duration_head": "no duration head yet",
    "quant": "no quantised weights yet",
    "lora": "no LoRA yet",
    "guidance": "no guidance yet",
}
