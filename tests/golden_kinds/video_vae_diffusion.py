"""Diffusion video VAE: decodes whole and tiled, more steps, single blocks, units, its encoder (video_vae.md 6)."""
from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from golden_kinds import Result, compare, metadata, metadata_json
from ltx_runtime.checkpoint import load_weights, read_header
from ltx_runtime.config import DiffusionVAEConfig
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.video_vae import EncodePlan, load_video_encoder
from ltx_runtime.video_vae.diffusion_grid import (
    ClipNoise,
    DecodeGrid,
    DecodeNoise,
    smallest_latent,
    smallest_overlap,
    smallest_tile,
)
from ltx_runtime.video_vae.diffusion_layers import Workspace, attend_, enlarge, feed_forward_
from ltx_runtime.video_vae.diffusion_vae import DiffusionVideoVAE
from ltx_runtime.video_vae.pointwise import split_norm_rope
from ltx_runtime.video_vae.tiling import Tiling

PENDING: dict[str, str] = {}
TOLERANCE = 1e-4
CPU = torch.device("cpu")
# Tensors of the file that its list of cases does not name.
_DETERMINISTIC_BLOCK = "block.det_stages.3.0"


def cases(path: Path) -> list[str]:
    return [*metadata_json(path, "cases"), _DETERMINISTIC_BLOCK]


def check(path: Path, case: str):
    with safe_open(path, "pt") as file:
        golden = {n.removeprefix(f"{case}."): file.get_tensor(n) for n in file.keys() if n.startswith(f"{case}.")}
    described = metadata_json(path, "cases").get(case, {})
    weights = path.parent / metadata(path)["weights"]
    with torch.inference_mode():
        if case == "geometry":
            yield from _check_geometry(weights, described)
        elif case == "enc":
            yield from _check_encode(weights, golden)
        elif case == "unit.rms_norm":
            yield compare("out", _vae(weights).decoder.norm_out(golden["in"]), golden["out"], TOLERANCE)
        elif case == _DETERMINISTIC_BLOCK:
            yield from _check_deterministic_block(_vae(weights), golden)
        elif case == "block.diff_blocks.1":
            with safe_open(path, "pt") as file:
                golden["modulation"] = file.get_tensor("block.modulation_t0.5")
            yield from _check_diffusion_block(_vae(weights), golden, described["t"])
        else:
            yield from _check_decode(weights, golden, described)


@lru_cache(maxsize=3)
def _vae(weights: Path, num_steps: int = 1, prediction: str = "x0") -> DiffusionVideoVAE:
    header = read_header(weights)
    config = replace(DiffusionVAEConfig.from_header(header), num_steps=num_steps, prediction=prediction)
    vae = build_on_meta(lambda: DiffusionVideoVAE(config))
    parts = ("decoder.", "per_channel_statistics.")
    load_weights(vae, header, {part: part for part in parts}, device=CPU, dtype=torch.float32)
    return vae


def _check_geometry(weights: Path, described):
    config = DiffusionVAEConfig.from_header(read_header(weights))
    yield _equal("smallest latent", smallest_latent(config), described["stage_min_latent_thw"])
    yield _equal("smallest tile", smallest_tile(config), described["tile_min_stage4_thw"])
    time, height, _ = smallest_overlap(config)
    yield _equal("overlap in frames and pixels", (2 * time, 8 * height), described["recommended_overlap_frames_px"])
    grid = DecodeGrid.of(config, (3, 3, 3))
    ghost_frames = grid.padding[-1]
    yield _equal("ghost frames", ghost_frames, described["trailing_ghost_latent_frames"])


def _equal(name: str, actual, expected) -> Result:
    return compare(name, torch.tensor(actual), torch.tensor(expected), 0.0)


def _check_decode(weights: Path, golden: dict[str, Tensor], described):
    override = described.get("override", {})
    vae = _vae(weights, override.get("default_num_inference_steps", 1), override.get("model_output_type", "x0"))
    latent = golden["latent"]
    grid = DecodeGrid.of(vae.decoder.config, latent.shape[2:])
    seeded = DecodeNoise(described["noise_seed"], per_tile=True)
    tiling = _tiling(described["tiling"]) if "tiling" in described else None

    def noise() -> ClipNoise:
        return ClipNoise(seeded, 0, grid, device=CPU, dtype=torch.float32)

    pixels = torch.cat(list(vae.decode(latent, noise(), tiling=tiling)), dim=2)
    stored = described.get("out_frames_stored", slice(None))
    yield compare("out", pixels[:, :, stored], golden["out"], TOLERANCE)
    yield _equal("shape", tuple(pixels.shape), described["out"])
    if "tiles" in described:
        yield from _check_tiles(grid, tiling, described)
    if "inter.conv_in" in golden:
        drawn = noise().part(slice(0, grid.frames), slice(0, grid.height), slice(0, grid.width))
        yield from _check_stages(vae, latent, drawn, grid, golden, described["inter_subsample_thw"])


def _tiling(described) -> Tiling:
    """Cells of stage 4: 2 frames, 8 pixels."""
    axes = [(described[axis], scale) for axis, scale in (("frames", 2), ("height", 8), ("width", 8))]
    return Tiling(
        tuple(axis["tile_size"] // scale for axis, scale in axes),
        tuple(axis["overlap"] // scale for axis, scale in axes),
    )


def _check_tiles(grid: DecodeGrid, tiling: Tiling, described):
    times, rows, columns = grid.spans(tiling)
    tiles = [(time, row, column) for time in times for row in rows for column in columns]
    yield _equal("tiles", len(tiles), len(described["tiles"]))
    for index, (tile, expected) in enumerate(zip(tiles, described["tiles"], strict=True)):
        for axis, span, cells, pixels, mask in zip(
            ("time", "height", "width"), tile, expected["stage4_in"], expected["pixel_out"], expected["masks"]
        ):
            if cells[0] is not None:
                found = (span.start, span.stop, span.first, span.last)
                yield _equal(f"tile {index}, {axis}", found, (*cells, *pixels))
                yield compare(f"tile {index}, mask of {axis}", span.weights, torch.tensor(mask), 1e-6)


def _ignored(work: float) -> None:
    """Nobody watches."""


def _check_stages(vae: DiffusionVideoVAE, latent: Tensor, noise: Tensor, grid: DecodeGrid, golden, subsampled):
    decoder = vae.decoder

    def sub(name: str, x: Tensor) -> Result:
        key = next(key for key in subsampled if f"{name}.sub" in key.split("/") or name in key.split("/"))
        t, h, w = subsampled[key]
        return compare(name, x[:, ::t, ::h, ::w], golden[f"inter.{name}.sub"], TOLERANCE)

    embedder = decoder.t_embedder(decoder.config.timestep_scale)
    yield compare("t_emb", embedder[None], golden["inter.t_emb"], TOLERANCE)
    yield compare("modulation", decoder.modulation(1.0)[None], golden["inter.modulation"], TOLERANCE)
    padded = torch.nn.functional.pad(latent, grid.padding, mode="replicate")
    x = decoder.conv_in(vae.per_channel_statistics.denormalize(padded).movedim(1, -1).contiguous())
    yield compare("conv_in", x, golden["inter.conv_in"], TOLERANCE)
    for stage, (stride, _) in enumerate(decoder.config.upsamples):
        decoder.run_stage(stage, x, _ignored)
        features = x
        x = enlarge(x, decoder.upsamples[stage].proj, stride, dropped=stride[0] - 1)
        yield sub(f"upsamples.{stage}", x)
    x = decoder.embed_noise(noise)
    yield sub("conv_in_x_t", x)
    work = Workspace(tuple(x.shape[1:4]), x.shape[4], decoder.config.head_dim, 1, x)
    decoder.run_diffusion_blocks(x, features, 1.0, starts=True, head_groups=1, work=work, on_work=_ignored)
    yield sub("after_blocks", x)
    yield sub("norm_out", decoder.norm_out(x))


def _check_deterministic_block(vae: DiffusionVideoVAE, golden: dict[str, Tensor]):
    decoder, x = vae.decoder, golden["in"].clone()
    block = decoder.det_stages[3][0]
    weights = block.weights()
    work = Workspace(tuple(x.shape[1:4]), x.shape[4], decoder.config.head_dim, 1, x)
    q, k, v = (torch.empty_like(golden["k_roped"]).flatten(0, 3) for _ in range(3))
    qkv = block.attn.qkv(block.norm1(x)).flatten(0, 3)
    split_norm_rope(qkv, weights.q_norm, weights.k_norm, work.rotary, 0, q, k, v)
    yield compare("q_roped_scaled", q.view_as(golden["k_roped"]), golden["q_roped_scaled"], TOLERANCE)
    yield compare("k_roped", k.view_as(golden["k_roped"]), golden["k_roped"], TOLERANCE)
    attend_(x, weights, decoder.config.stage_kernels[3], work)
    feed_forward_(x, weights, work)
    yield compare("out", x, golden["out"], TOLERANCE)


def _check_diffusion_block(vae: DiffusionVideoVAE, golden: dict[str, Tensor], time: float):
    decoder = vae.decoder
    yield compare("modulation", decoder.modulation(time)[None], golden["modulation"], TOLERANCE)
    # The context comes at full resolution here; the merged projection from stage 4 is judged by the decodes.
    block = decoder.diff_blocks[1]
    x = golden["x"] + block.context_proj(golden["context"])
    work = Workspace(tuple(x.shape[1:4]), x.shape[4], decoder.config.head_dim, 1, x)
    weights = decoder.block_weights(time, 1)[1]
    attend_(x, weights, decoder.config.stage_kernels[4], work)
    feed_forward_(x, weights, work)
    yield compare("out", x, golden["out"], TOLERANCE)


def _check_encode(weights: Path, golden: dict[str, Tensor]):
    encoder = load_video_encoder(weights, device=CPU, dtype=torch.float32)
    frames = golden["video_u8"][0].permute(1, 2, 3, 0) / 255
    latent = encoder.encode(frames, plan=EncodePlan(golden["latent"].shape[2], 0, 0, 0, "golden"))
    yield compare("latent", latent, golden["latent"], TOLERANCE)
