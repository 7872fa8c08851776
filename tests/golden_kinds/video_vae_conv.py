"""Conv video VAE: decodes and encodes, whole and streamed, and block by block (video_vae.md sections 2-5)."""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open

from golden_kinds import compare, metadata, metadata_json
from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import ConvVAEConfig
from ltx_runtime.residency import ResidentModule
from ltx_runtime.video_vae import ConvVideoVAE
from ltx_runtime.video_vae.conv_layers import patchify, pixel_norm, unpatchify
from ltx_runtime.video_vae.conv_vae import layers_of
from ltx_runtime.video_vae.streaming import ClipMemory

PENDING = {
    "tiled_*": "no spatial tiling and no overlap tiling yet",
    "enc_tiled_*": "no tiled encode yet",
}
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
    vae = _vae(path.parent / metadata(path)["weights"])
    with torch.inference_mode():
        yield from (_check_decode if case.startswith("dec_") else _check_encode)(vae, golden)


@lru_cache(maxsize=1)
def _vae(weights: Path) -> ConvVideoVAE:
    """The whole file, encoder included, in float32."""
    header = read_header(weights)
    config = ConvVAEConfig.from_header(header)
    handle = ResidentModule(
        header, lambda: ConvVideoVAE(config, with_encoder=True), {"": ""}, device="cpu", dtype=torch.float32
    )
    handle.ensure_resident()
    return handle.module


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
        yield compare("conv_in", x, golden["inter.conv_in"], TOLERANCE)
        for index, block in enumerate(vae.decoder.up_blocks):
            for layer in layers_of(block):
                x = layer(x, memory, True)
            yield compare(f"up_blocks.{index}", x, golden[f"inter.up_blocks.{index}"], TOLERANCE)
        x = unpatchify(vae.decoder.conv_out(x, memory, True), vae.decoder.patch_size)
        yield compare("conv_out", x, golden["out"], TOLERANCE)


def _check_encode(vae: ConvVideoVAE, golden):
    pixels = golden["video_u8"] / 127.5 - 1
    for chunk in range(golden["latent"].shape[2], 0, -1):
        latent = vae.encode(pixels, chunk)
        yield compare(f"latent, {chunk} latent frames a chunk", latent, golden["latent"], TOLERANCE)
    if "inter.conv_in" in golden:
        memory = ClipMemory()
        x = vae.encoder.conv_in(patchify(pixels, vae.encoder.patch_size), memory, True)
        yield compare("conv_in", x, golden["inter.conv_in"], TOLERANCE)
        for index, block in enumerate(vae.encoder.down_blocks):
            for layer in layers_of(block):
                x = layer(x, memory, True)
            yield compare(f"down_blocks.{index}", x, golden[f"inter.down_blocks.{index}"], TOLERANCE)
        yield compare("conv_out", vae.encoder.conv_out(x, memory, True), golden["inter.conv_out"], TOLERANCE)
