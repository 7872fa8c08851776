"""The tokens of one stream before denoising, and what conditions them: given frames, slots, references, regions.

Appended tokens always stand after the target's own, so a result is the first shape.tokens tokens.

Source: transformer.md section 11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .errors import RequestError, ShapeError
from .patchify import audio_positions, frame_positions, patchify_audio, patchify_video, video_positions
from .shapes import AUDIO_LATENTS_PER_SECOND, AudioLatentShape, VideoLatentShape
from .tensor_tree import map_tensors


@dataclass(frozen=True)
class TokenState:
    """One stream's tokens before denoising. N = target tokens + appended tokens; all tensors on one device.

    A stage starts from x = lerp(clean, lerp(initial, noise, noise_scale), denoise_mask); every step blends its x0 with
    clean by denoise_mask.
    """

    initial: Tensor  # (B, N, C) float32
    clean: Tensor  # (B, N, C) float32, what tokens with denoise_mask 0 are kept at
    denoise_mask: Tensor  # (B, N, 1) float32, 1 = generate, 0 = keep
    positions: Tensor  # (B, axes, N, 2) float32 intervals, see patchify.py
    keyframe_marker: Tensor | None  # (B, N, 1) float32, 1 on single-frame tokens to be generated; video only
    attention_strength: Tensor | None  # (B, N, N) float32 in [0, 1], None = all 1; video only
    shape: VideoLatentShape | AudioLatentShape  # of the target
    # The last G tokens are guides as ComfyUI emits them: (G,) float32, what the target attends to them by, and they to
    # it.
    guide_strength: Tensor | None = None
    # Appended tokens as ComfyUI lays them out: latent frames behind the target's, on its grid. None: they don't fit on
    # it.
    appended_frames: int | None = 0
    # (N,) int64, each token's cell on that longer grid. None: all cells, in order.
    cells: Tensor | None = None
    # How many appended tokens, at the end, ComfyUI's latent does not hold (a reference voice): no noise is drawn for
    # them.
    outside_latent: int = 0

    @property
    def tokens(self) -> int:
        return self.initial.shape[1]

    @property
    def latent_shape(self) -> VideoLatentShape | AudioLatentShape:
        """Shape of the latent with the appended frames behind the target's. Raises RequestError when they don't fit."""
        if self.appended_frames is None:
            raise RequestError(
                "the video has appended tokens that don't lie on the target's grid (a reference video on a grid of its "
                "own, at no whole ratio), so they have no noise in ComfyUI's layout. Use noise_convention 'reference'."
            )
        return dataclasses.replace(self.shape, frames=self.shape.frames + self.appended_frames)

    @property
    def frozen(self) -> bool:
        """True when nothing is generated: the stream is given, at noise level 0 (given sound of audio-to-video)."""
        return bool((self.denoise_mask == 0).all())

    def to(self, device: torch.device | str) -> TokenState:
        """The same state on another device; what was one tensor stays one."""
        moved: dict[int, Tensor] = {}

        def move(name: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(device)
            return moved[id(tensor)]

        return map_tensors(move, self)


def text_to_video_state(
    shape: VideoLatentShape,
    frame_rate: float,
    latent: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> TokenState:
    """A video to be generated in full, from nothing or from a latent (stage 2: noise is mixed into it).

    latent: (B, C, F, H, W), any float dtype. Raises ShapeError when it does not have this shape.
    """
    tokens = _target_tokens(shape, latent, patchify_video, device)
    positions = video_positions(shape.frames, shape.height, shape.width, frame_rate, device=tokens.device)
    marker = tokens.new_zeros(shape.batch, shape.tokens, 1)
    # The first latent frame decodes to one pixel frame, as a slot does: marked in ordinary generation too.
    marker[:, : shape.height * shape.width] = 1
    return TokenState(
        initial=tokens,
        clean=tokens,
        denoise_mask=tokens.new_ones(shape.batch, shape.tokens, 1),
        positions=positions.expand(shape.batch, -1, -1, -1),
        keyframe_marker=marker,
        attention_strength=None,
        shape=shape,
    )


def audio_state(
    shape: AudioLatentShape, latent: Tensor | None = None, *, device: torch.device | str | None = None
) -> TokenState:
    """Sound to be generated in full, from nothing or a latent (B, C, T, mel). Raises ShapeError on another shape."""
    tokens = _target_tokens(shape, latent, patchify_audio, device)
    return TokenState(
        initial=tokens,
        clean=tokens,
        denoise_mask=tokens.new_ones(shape.batch, shape.tokens, 1),
        positions=audio_positions(shape.frames, device=tokens.device).expand(shape.batch, -1, -1, -1),
        keyframe_marker=None,
        attention_strength=None,
        shape=shape,
    )


def freeze(state: TokenState) -> TokenState:
    """The whole stream is given: it conditions the other one and stays as it is (audio-to-video)."""
    return dataclasses.replace(state, denoise_mask=torch.zeros_like(state.denoise_mask))


def replace_frame(state: TokenState, index: int, latent: Tensor, strength: float = 1.0) -> TokenState:
    """Give latent frame `index` of the target: no new tokens (first-frame image: index 0).

    latent: (B, C, 1, H, W). strength 1 keeps it, 0 generates freely. Raises ShapeError when the frame does not fit.
    """
    _check_given(state, latent)
    shape = state.shape
    given = _grid_tokens(state, latent)
    per_frame = shape.height * shape.width
    if not 0 <= index < shape.frames or given.shape[1] != per_frame:
        raise ShapeError(
            f"a given latent frame of shape {tuple(latent.shape)} at latent frame {index} does not fit the target "
            f"{shape.as_tuple()}. Encode one image at the target's size."
        )
    at = slice(index * per_frame, (index + 1) * per_frame)
    clean, mask = state.clean.clone(), state.denoise_mask.clone()
    clean[:, at] = given
    mask[:, at] = 1 - strength
    return dataclasses.replace(state, clean=clean, denoise_mask=mask)


def append_keyframe(
    state: TokenState,
    frame: int,
    latent: Tensor,
    frame_rate: float,
    strength: float = 1.0,
    attention_strength: float | None = None,
) -> TokenState:
    """Append a given single frame that the video should show at pixel frame `frame`.

    latent: (B, C, 1, H, W), one encoded image.
    """
    _check_given(state, latent)
    if latent.shape[2] != 1:
        raise ShapeError(
            f"a keyframe latent has shape {tuple(latent.shape)}, expected (B, C, 1, H, W). "
            "Use append_clip for more frames."
        )
    positions = frame_positions(latent.shape[3], latent.shape[4], frame, frame_rate, state.positions.device)
    return _append(state, latent, positions, 1 - strength, attention_strength=attention_strength)


def append_clip(
    state: TokenState,
    frame: int,
    latent: Tensor,
    frame_rate: float,
    strength: float = 1.0,
    attention_strength: float | None = None,
) -> TokenState:
    """Append a given clip of several pixel frames that begins at pixel frame `frame`.

    latent: (B, C, F, H, W). Its first cell is causal only when it begins the video.
    """
    _check_given(state, latent)
    positions = video_positions(*latent.shape[2:], frame_rate, start_frame=frame, device=state.positions.device)
    return _append(state, latent, positions, 1 - strength, attention_strength=attention_strength)


def append_slots(state: TokenState, frames: Sequence[int], frame_rate: float) -> TokenState:
    """Append slots: single pixel frames to be generated beside the video, read back after denoising.

    frames: pixel frames, rising. Slot i holds the H*W tokens from shape.tokens + (earlier appended) + i*H*W on.
    """
    if any(later <= earlier for earlier, later in pairwise(frames)):
        raise RequestError(f"keyframe slots {list(frames)} must be rising pixel frames.")
    shape = state.shape
    empty = state.initial.new_zeros(1, shape.channels, 1, shape.height, shape.width)
    for frame in frames:
        positions = frame_positions(shape.height, shape.width, frame, frame_rate, state.positions.device)
        state = _append(state, empty, positions, 1.0, marker=1.0)
    return state


def evenly_spaced_slots(count: int, num_frames: int) -> tuple[int, ...]:
    """Pixel frames of `count` slots spread between (not on) the first and last frame; halves round to even."""
    return tuple(round(i * (num_frames - 1) / (count + 1)) for i in range(1, count + 1))


def append_reference(
    state: TokenState,
    latent: Tensor,
    frame_rate: float,
    strength: float = 1.0,
    spatial_ratio: int = 1,
    temporal_ratio: int = 1,
    attention_strength: float | None = None,
) -> TokenState:
    """Append a reference video (IC-LoRA) that lies over the whole target.

    latent: (B, C, F, H, W) on its own grid, spatial_ratio times smaller and temporal_ratio times sparser than the
    target's.
    """
    _check_given(state, latent)
    positions = video_positions(*latent.shape[2:], frame_rate, device=state.positions.device)
    time, space = positions[:, :1] * temporal_ratio, positions[:, 1:] * spatial_ratio
    if temporal_ratio != 1:
        time = (time - (temporal_ratio - 1) / frame_rate).clamp_(min=0)
    positions = torch.cat((time, space), dim=1)
    return _append(state, latent, positions, 1 - strength, attention_strength=attention_strength)


def append_reference_audio(state: TokenState, tokens: Tensor) -> TokenState:
    """Append the sound of a voice that the sound to be generated should have (ID-LoRA). It is given, and ends one
    latent frame before the clip begins, so that its times are negative.

    tokens: (B or 1, T, C * mel), any float dtype, as patchify_audio makes them. Raises ShapeError when they don't fit.
    Source: what ComfyUI 0.30 to 0.33 do with `ref_audio`; the reference pipelines have no such thing.
    """
    batch, _, features = state.clean.shape
    if tokens.ndim != 3 or tokens.shape[0] not in (1, batch) or tokens.shape[1] < 1 or tokens.shape[2] != features:
        raise ShapeError(
            f"the reference sound (ref_audio) has shape {tuple(tokens.shape)}, expected ({batch} or 1, tokens, "
            f"{features}). Encode it with the audio VAE of this model."
        )
    clean = tokens.to(state.clean.device, torch.float32).expand(batch, -1, -1)
    positions = audio_positions(tokens.shape[1], device=state.positions.device)
    positions = positions - (float(positions.max()) + 1 / AUDIO_LATENTS_PER_SECOND)
    mask = state.denoise_mask.new_zeros(batch, tokens.shape[1], 1)
    return dataclasses.replace(
        state,
        initial=torch.cat((state.initial, clean), dim=1),
        clean=torch.cat((state.clean, clean), dim=1),
        denoise_mask=torch.cat((state.denoise_mask, mask), dim=1),
        positions=torch.cat((state.positions, positions.expand(batch, -1, -1, -1)), dim=2),
        outside_latent=tokens.shape[1],
    )


def temporal_region(state: TokenState, start: float, end: float) -> TokenState:
    """Generate only tokens whose time interval overlaps (start, end) seconds; keep the rest at clean (retake).

    Applies to every token present, appended ones included: set the region before appending. Raises RequestError for a
    region that holds no token.
    """
    time = state.positions[:, 0]
    inside = (time[..., 1] > start) & (time[..., 0] < end)
    if not bool(inside.any()):
        raise RequestError(
            f"the region from {start} to {end} s holds nothing of this clip, which lasts {float(time.max()):.2f} s."
        )
    return dataclasses.replace(state, denoise_mask=inside.to(torch.float32).unsqueeze(-1))


def _target_tokens(shape, latent: Tensor | None, patchify, device) -> Tensor:
    if latent is None:
        latent = torch.zeros(shape.as_tuple(), dtype=torch.float32, device=device)
    elif tuple(latent.shape) != shape.as_tuple():
        raise ShapeError(f"latent has shape {tuple(latent.shape)}, the target's is {shape.as_tuple()}.")
    return patchify(latent.to(device=device, dtype=torch.float32))


def _check_given(state: TokenState, latent: Tensor) -> None:
    batch, channels = state.shape.batch, state.shape.channels
    if latent.ndim != 5 or latent.shape[0] not in (1, batch) or latent.shape[1] != channels:
        raise ShapeError(
            f"conditioning latent has shape {tuple(latent.shape)}, expected ({batch} or 1, {channels}, F, H, W)."
        )


def _grid_tokens(state: TokenState, latent: Tensor) -> Tensor:
    """A given latent as float32 tokens on the state's device, one batch entry repeated for all samples."""
    tokens = patchify_video(latent.to(device=state.clean.device, dtype=torch.float32))
    return tokens.expand(state.shape.batch, -1, -1)


def _append(
    state: TokenState,
    latent: Tensor,
    positions: Tensor,
    denoise: float,
    *,
    marker: float = 0.0,
    attention_strength: float | None = None,
) -> TokenState:
    clean = _grid_tokens(state, latent)
    batch, new, _ = clean.shape
    fill = state.denoise_mask.new_full
    appended_frames, cells = _extend_grid(state, *latent.shape[2:])
    return dataclasses.replace(
        state,
        initial=torch.cat((state.initial, torch.zeros_like(clean)), dim=1),
        clean=torch.cat((state.clean, clean), dim=1),
        denoise_mask=torch.cat((state.denoise_mask, fill((batch, new, 1), denoise)), dim=1),
        positions=torch.cat((state.positions, positions.expand(batch, -1, -1, -1)), dim=2),
        keyframe_marker=torch.cat((state.keyframe_marker, fill((batch, new, 1), marker)), dim=1),
        attention_strength=_extend_strength(state, new, attention_strength),
        appended_frames=appended_frames,
        cells=cells,
    )


def _extend_grid(state: TokenState, frames: int, height: int, width: int) -> tuple[int | None, Tensor | None]:
    """appended_frames and cells after appending a latent. A smaller grid takes every n-th cell, as ComfyUI dilates
    it."""
    shape = state.shape
    if state.appended_frames is None or shape.height % height or shape.width % width:
        return None, None
    appended = state.appended_frames + frames
    if (height, width) == (shape.height, shape.width) and state.cells is None:
        return appended, None
    device = state.clean.device
    before = torch.arange(state.tokens, device=device) if state.cells is None else state.cells
    first = state.latent_shape.tokens
    new = torch.arange(first, first + frames * shape.height * shape.width, device=device)
    new = new.unflatten(0, (frames, shape.height, shape.width))
    return appended, torch.cat((before, new[:, :: shape.height // height, :: shape.width // width].flatten()))


def _extend_strength(state: TokenState, new: int, strength: float | None) -> Tensor | None:
    """New tokens see the target (and it them) by strength, each other fully, earlier appended tokens not at all."""
    old = state.attention_strength
    if strength is None and old is None:
        return None
    present, target, batch = state.tokens, state.shape.tokens, state.shape.batch
    extended = state.clean.new_ones(batch, present + new, present + new)
    if old is not None:
        extended[:, :present, :present] = old
    strength = 1.0 if strength is None else strength
    extended[:, present:, :present] = 0
    extended[:, :present, present:] = 0
    extended[:, present:, :target] = strength
    extended[:, :target, present:] = strength
    return extended
