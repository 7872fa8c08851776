"""ComfyUI's way to say what is given: noise masks, and guides as extra latent frames with keys in the conditioning.

ComfyUI appends a guide's latent frames to the video latent; `keyframe_idxs` in the conditioning holds the pixel
intervals of their tokens, `guide_attention_entries` what attention to them is worth, `generated_keyframes` which of
them are to be generated, and a mask value below 0 means that a cell is no token (a guide on a coarser grid leaves such
holes). `ref_audio` is the sound of a voice that stands in the conditioning alone.

Source: comfyui.md sections 2.3, 2.4 and 2.5, transformer.md section 11; the behaviour is that of ComfyUI 0.30 to 0.33.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .conditioning import TokenState, append_reference_audio, audio_state, text_to_video_state
from .errors import RequestError, ShapeError
from .patchify import patchify_video
from .shapes import AudioLatentShape, VideoLatentShape


def resize_mask(mask: Tensor, shape: VideoLatentShape | AudioLatentShape) -> Tensor:
    """A noise mask at the size of a latent, as ComfyUI's sampler makes it, on the mask's device.

    mask: video (F, H, W), (B, 1, F, H, W) or anything with H, W last; audio (..., T, mel). Linear interpolation; a mask
    with fewer samples than the latent is repeated. Returns (B, 1, F, H, W) or (B, 1, T, mel) float32. Raises ShapeError
    when the mask can't be read so, RequestError when it differs between channels.
    """
    size = shape.as_tuple()[2:]
    if not isinstance(mask, Tensor) or 0 in mask.shape:
        what = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
        raise ShapeError(f"a noise mask {what}, expected one for a latent of shape {shape.as_tuple()}.")
    mask = mask.to(torch.float32)
    if not bool(mask.isfinite().all()):
        raise RequestError("the noise mask holds NaN or Inf; make a new one.")
    if isinstance(shape, AudioLatentShape):
        if mask.ndim < 2:
            raise ShapeError(
                f"an audio noise mask of shape {tuple(mask.shape)}, expected (batch, 1, length, mel bins)."
            )
        mask = F.interpolate(mask.reshape(-1, 1, *mask.shape[-2:]), size=size, mode="bilinear")
    else:
        if mask.ndim < 2 or mask.ndim > 5:
            raise ShapeError(
                f"a video noise mask of shape {tuple(mask.shape)}, expected (batch, 1, frames, height, width)."
            )
        if mask.ndim < 5:
            mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
        mask = F.interpolate(mask, size=size, mode="trilinear")
    if bool((mask != mask[:, :1]).any()):
        raise RequestError("the noise mask differs between latent channels; a token is kept or generated as a whole.")
    repeats = -(-shape.batch // mask.shape[0])
    return mask[:, :1].repeat(repeats, *[1] * (mask.ndim - 1))[: shape.batch]


def audio_state_from_comfyui(
    latent: Tensor, noise_mask: Tensor | None = None, reference: Tensor | None = None
) -> TokenState:
    """latent: (B, 8, T, 16). noise_mask: 1 = generate, 0 = keep. reference: tokens of `ref_audio`, (B or 1, n, 128).

    Raises RequestError when the mask differs between mel bins, ShapeError for a reference of another width.
    """
    shape = AudioLatentShape(*latent.shape)
    state = audio_state(shape, latent)
    if noise_mask is not None:
        mask = resize_mask(noise_mask, shape)
        if bool((mask != mask[..., :1]).any()):
            raise RequestError(
                "the audio noise mask differs between mel bins; a token of sound is kept or generated as a whole."
            )
        state = dataclasses.replace(state, denoise_mask=mask[:, 0, :, :1].to(latent.device))
    return state if reference is None else append_reference_audio(state, reference)


def video_state_from_comfyui(
    latent: Tensor,
    frame_rate: float,
    *,
    noise_mask: Tensor | None = None,
    keyframe_idxs: Tensor | None = None,
    guide_attention_entries: Sequence[Mapping[str, Any]] | None = None,
    generated_keyframes: Mapping[str, int] | None = None,
) -> TokenState:
    """latent: (B, 128, F, H, W), guides included. The other values are ComfyUI's, see the module's text.

    Raises RequestError when the keys don't belong to this latent (guides were cropped from one of them only).
    """
    batch, channels, frames, height, width = latent.shape
    per_frame = height * width
    if keyframe_idxs is not None and keyframe_idxs.ndim != 4:
        raise RequestError(
            f"keyframe_idxs has shape {tuple(keyframe_idxs.shape)}, expected (batch, 3, guide tokens, 2) as "
            "LTXVAddGuide makes it."
        )
    guide_tokens = 0 if keyframe_idxs is None else keyframe_idxs.shape[2]
    guide_frames = guide_tokens // per_frame
    if guide_frames * per_frame != guide_tokens or guide_frames >= frames:
        raise RequestError(
            f"the conditioning holds {guide_tokens} guide tokens (keyframe_idxs), but the video latent is {frames} "
            f"frames of {height}x{width}. Use the conditioning and the latent that left the same guide node, or "
            f"LTXVCropGuides on both."
        )
    if guide_tokens == 0 and (guide_attention_entries or generated_keyframes):
        raise RequestError("the conditioning names guides or generated keyframes but holds no keyframe_idxs for them.")
    shape = VideoLatentShape(batch, channels, frames - guide_frames, height, width)
    state = text_to_video_state(shape, frame_rate, latent[:, :, : shape.frames])
    device = state.clean.device
    mask = state.denoise_mask.new_ones(batch, frames * per_frame, 1)
    if noise_mask is not None:
        whole = dataclasses.replace(shape, frames=frames)
        mask = patchify_video(resize_mask(noise_mask, whole)).to(device)
    if guide_tokens == 0:
        return dataclasses.replace(state, denoise_mask=mask)

    is_token = _tokens_among_cells(mask, shape.tokens)
    guides = is_token[shape.tokens :]
    marker = torch.cat((state.keyframe_marker, _slot_marker(generated_keyframes, shape, frames).to(device)), dim=1)
    intervals = keyframe_idxs.to(device, torch.float32)[:, :, guides].expand(batch, -1, -1, -1).clone()
    intervals[:, 0] /= frame_rate
    tokens = patchify_video(latent.to(torch.float32))[:, is_token]
    return dataclasses.replace(
        state,
        initial=tokens,
        clean=tokens,
        denoise_mask=mask[:, is_token],
        positions=torch.cat((state.positions, intervals), dim=2),
        keyframe_marker=marker[:, is_token],
        guide_strength=_guide_strength(guide_attention_entries or (), guides.to("cpu")),
        appended_frames=guide_frames,
        cells=None if bool(is_token.all()) else is_token.nonzero().squeeze(1),
    )


def _tokens_among_cells(mask: Tensor, target_tokens: int) -> Tensor:
    """(cells,) bool. mask: (B, cells, 1)."""
    dropped = (mask < 0).squeeze(2)
    if bool((dropped != dropped[:1]).any()):
        raise RequestError("the noise mask drops other guide cells (values below 0) in one sample than in another.")
    if bool(dropped[:, :target_tokens].any()):
        raise RequestError("the noise mask is below 0 within the video itself; only cells of a guide can be dropped.")
    return ~dropped[0]


def _slot_marker(generated: Mapping[str, int] | None, shape: VideoLatentShape, frames: int) -> Tensor:
    """(B, guide cells, 1) float32, 1 on keyframes that are to be generated."""
    per_frame = shape.height * shape.width
    marker = torch.zeros(shape.batch, (frames - shape.frames) * per_frame, 1)
    if generated is None:
        return marker
    first, count = int(generated["first_latent_frame"]), int(generated["num_keyframes"])
    if int(generated["tokens_per_frame"]) != per_frame or first < shape.frames or first + count > frames:
        raise RequestError(
            f"generated_keyframes {dict(generated)} don't fit the video latent: {shape.frames} frames and "
            f"{frames - shape.frames} appended ones of {per_frame} tokens each."
        )
    start = (first - shape.frames) * per_frame
    marker[:, start : start + count * per_frame] = 1
    return marker


def _guide_strength(entries: Sequence[Mapping[str, Any]], is_token: Tensor) -> Tensor | None:
    """(guide tokens,) float32 for the (cells,) that are tokens; None when attention is as it always is.

    Entries stand in the order of the guides. A guide's strength (above 1: amplified) may be weighted by a mask of its
    image.
    """
    if not any(entry["strength"] != 1 or entry.get("pixel_mask") is not None for entry in entries):
        return None
    counts = [int(entry["pre_filter_count"]) for entry in entries]
    if sum(counts) != is_token.numel():
        raise RequestError(
            f"guide_attention_entries count {counts} cells, keyframe_idxs {is_token.numel()}. Use the conditioning "
            f"that left the guide node as it is."
        )
    weights = []
    for entry, kept in zip(entries, is_token.split(counts)):
        tokens = int(kept.sum())
        if entry.get("pixel_mask") is None:
            weights.append(torch.full((tokens,), float(entry["strength"])))
            continue
        weight = downsample_guide_mask(entry["pixel_mask"].to("cpu"), entry["latent_shape"])
        if weight.numel() != tokens:
            raise RequestError(
                f"an attention mask gives {weight.numel()} weights for a guide of {tokens} tokens; its latent shape "
                f"{list(entry['latent_shape'])} belongs to another guide."
            )
        weights.append(weight * float(entry["strength"]))
    strength = torch.cat(weights)
    return None if bool((strength == 1).all()) else strength


def downsample_guide_mask(mask: Tensor, latent_shape: Sequence[int]) -> Tensor:
    """An image mask as one weight a token: area average in space; in time the first frame alone, then equal groups.

    mask: (1, 1, pixel frames, height, width) in [0, 1]. latent_shape: F, H, W of the guide. Returns (F*H*W,) float32.
    """
    frames, height, width = latent_shape
    maps = F.interpolate(mask[0].transpose(0, 1).to(torch.float32), size=(height, width), mode="area")[:, 0]
    first, rest = maps[:1], maps[1:]
    if frames == 1:
        return first.flatten()
    if len(rest) == 0:
        return first.expand(frames, -1, -1).flatten()
    group = len(rest) // (frames - 1)
    if group == 0:
        index = torch.arange(frames - 1) * len(rest) // (frames - 1)
        return torch.cat((first, rest[index])).flatten()
    return torch.cat((first, rest[: group * (frames - 1)].unflatten(0, (frames - 1, group)).mean(dim=1))).flatten()
