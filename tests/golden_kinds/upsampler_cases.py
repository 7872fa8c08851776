"""What the two upsampler kinds share: whole upscales through the public call, the bare network, and its stages."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from golden_kinds import compare, metadata, metadata_json
from ltx_runtime.upsampler import LatentUpsampler, load_upsampler
from ltx_runtime.video_vae import PerChannelStatistics

TOLERANCE = 1e-4


def cases(path: Path) -> list[str]:
    return list(metadata_json(path, "cases"))


def check(path: Path, case: str):
    tensors = load_file(path)
    golden = {name.removeprefix(f"{case}."): tensor for name, tensor in tensors.items() if name.startswith(f"{case}.")}
    upsampler = _upsampler(path.parent / metadata(path)["weights"])
    with torch.inference_mode():
        if case == "unit.group_norm":
            yield compare("out", upsampler.module.initial_norm(golden["in"]), golden["out"], TOLERANCE)
            return
        latent = golden["latent"]
        yield compare("out_raw", upsampler.module(latent), golden["out_raw"], TOLERANCE)
        result = upsampler.upscale(latent, _statistics(tensors))
        yield compare("out_normalized", result, golden["out_normalized"], TOLERANCE)
        if "inter.initial_conv" in golden:
            for name, tensor in _stages(upsampler.module, latent).items():
                yield compare(name, tensor, golden[f"inter.{name}"], TOLERANCE)


@lru_cache(maxsize=2)
def _upsampler(weights: Path) -> LatentUpsampler:
    return load_upsampler(weights, device="cpu", dtype=torch.float32)


def _statistics(tensors: dict[str, Tensor]) -> PerChannelStatistics:
    prefix = "per_channel_statistics."
    values = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    statistics = PerChannelStatistics(len(values["mean-of-means"]))
    statistics.load_state_dict(values)
    return statistics


def _stages(network: nn.Module, latent: Tensor) -> dict[str, Tensor]:
    """The stages as the golden file has them: it norms without activation, and frames it before they are unfolded."""
    seen: dict[str, Tensor] = {}
    named = {
        "initial_conv": network.initial_conv,
        "initial_norm": network.initial_norm,
        "res_blocks.last": network.res_blocks[-1],
        "upsampler": network.upsampler,
        "post.last": network.post_upsample_res_blocks[-1],
    }
    # Cloned: the activation that follows a norm works in place.
    hooks = [
        module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.clone()}))
        for name, module in named.items()
    ]
    network(latent)
    for hook in hooks:
        hook.remove()
    if network.spatial:
        seen["upsampler"] = F.pixel_shuffle(seen["upsampler"], 2)
    else:
        out = seen["upsampler"].unflatten(1, (-1, 2))
        seen["upsampler"] = out.permute(0, 1, 3, 2, 4, 5).flatten(2, 3)
    return seen
