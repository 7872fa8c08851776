"""Conv video VAE: decodes and encodes, whole and streamed, and block by block (video_vae.md sections 2-5)."""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open

from golden_kinds import compare, metadata, metadata_json
from ltx_runtime.video_vae import (
    ConvVideoVAE,
    DecodePlan,
    EncodePlan,
    Tiling,
    VideoEncoder,
    VideoVAE,
    load_video_encoder,
    load_video_vae,
)
from ltx_runtime.video_vae.cells import patchify, unpatchify
from ltx_runtime.video_vae.conv_pointwise import completed, pixel_norm
from ltx_runtime.video_vae.conv_vae import layers_of
from ltx_runtime.video_vae.streaming import ClipMemory

PENDING: dict[str, str] = {}
TOLERANCE = 1e-4
# Entries of the metadata that describe the file and are no cases.
_NOT_CASES = ("bf16_guidance", "workspace_path_vs_plain_max_abs")


def cases(path: Path) -> list[str]:
    return [name for name in metadata_json(path, "cases") if name not in _NOT_CASES]


def check(path: Path, case: str):
    with safe_open(path, "pt") as file:
        golden = {n.removeprefix(f"{case}."): file.get_tensor(n) for n in file.keys() if n.startswith(f"{case}.")}
    if case == "unit.pixel_norm":
        yield compare("out", pixel_norm(golden["in"]), golden["out"], TOLERANCE)
        return
    weights = path.parent / metadata(path)["weights"]
    with torch.inference_mode():
        if case.startswith("dec_"):
            yield from _check_decode(_decoder(weights).module, golden)
            return
        tiling = metadata_json(path, "cases")[case].get("tiling", {})
        if case.startswith("tiled_"):
            yield from _check_tiled_decode(_decoder(weights), golden, tiling)
        else:
            yield from _check_encode(_encoder(weights), golden, tiling)


@lru_cache(maxsize=1)
def _decoder(weights: Path) -> VideoVAE:
    return load_video_vae(weights, device="cpu", dtype=torch.float32)


@lru_cache(maxsize=1)
def _encoder(weights: Path) -> VideoEncoder:
    return load_video_encoder(weights, device="cpu", dtype=torch.float32)


def _check_decode(vae: ConvVideoVAE, golden):
    latent = golden["latent"]
    for chunk in range(latent.shape[2], 0, -1):
        pixels = torch.cat(list(vae.decode(latent, chunk)), dim=2)
        yield compare(f"out, {chunk} latent frames a chunk", pixels, golden["out"], TOLERANCE)
    if "inter.denorm" in golden:
        x = vae.per_channel_statistics.denormalize(latent)
        yield compare("denorm", x, golden["inter.denorm"], TOLERANCE)
        memory = ClipMemory()
        x = vae.decoder.conv_in(x, memory, True)
        yield compare("conv_in", completed(x), golden["inter.conv_in"], TOLERANCE)
        for index, block in enumerate(vae.decoder.up_blocks):
            for layer in layers_of(block):
                x = layer(x, memory, True)
            yield compare(f"up_blocks.{index}", completed(x), golden[f"inter.up_blocks.{index}"], TOLERANCE)
        x = unpatchify(completed(vae.decoder.conv_out(x, memory, True)), vae.decoder.patch_size)
        yield compare("conv_out", x, golden["out"], TOLERANCE)


def _check_tiled_decode(vae: VideoVAE, golden, tiling):
    axes = [(tiling[axis], scale) for axis, scale in (("frames", 8), ("height", 32), ("width", 32))]
    tiles = Tiling(
        tuple(axis["tile_size"] // scale for axis, scale in axes),
        tuple(axis["overlap"] // scale for axis, scale in axes),
    )
    frames = golden["latent"].shape[2]
    for chunk in (frames, 1):
        pixels = vae.decode_raw(golden["latent"], plan=DecodePlan(chunk, 0, "golden", tiles))
        yield compare(f"out, {chunk} latent frames a chunk", pixels, golden["out"], TOLERANCE)


def _check_encode(encoder: VideoEncoder, golden, tiling):
    video = golden["video_u8"]
    frames = video[0].permute(1, 2, 3, 0) / 255
    tile, overlap = (tiling["width"][key] // 32 for key in ("tile_size", "overlap")) if tiling else (0, 0)
    for chunk in range(golden["latent"].shape[2], 0, -1):
        latent = encoder.encode(frames, plan=EncodePlan(chunk, tile, overlap, 0, "golden"))
        yield compare(f"latent, {chunk} latent frames a chunk", latent, golden["latent"], TOLERANCE)
    if "inter.conv_in" in golden:
        network = encoder.module.encoder
        memory = ClipMemory()
        x = network.conv_in(patchify(video / 127.5 - 1, network.patch_size), memory, True)
        yield compare("conv_in", completed(x), golden["inter.conv_in"], TOLERANCE)
        for index, block in enumerate(network.down_blocks):
            for layer in layers_of(block):
                x = layer(x, memory, True)
            yield compare(f"down_blocks.{index}", completed(x), golden[f"inter.down_blocks.{index}"], TOLERANCE)
        yield compare("conv_out", completed(network.conv_out(x, memory, True)), golden["inter.conv_out"], TOLERANCE)
