"""Where the random numbers of a render come from: two conventions, both drawn before the loop, outside any capture.

Source: transformer.md sections 12.4 and 12.5 (reference), comfyui.md section 2.4 (ComfyUI).
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.nn.functional as F

from .conditioning import TokenState
from .errors import RequestError
from .patchify import patchify_audio, patchify_video

# The reference's ancestral loop seeds a second generator with this offset.
ANCESTRAL_SEED_OFFSET = 10000
# The reference's res_2s draws from generators with these seeds, whatever the render's own.
SDE_STEP_SEED, SDE_MIDDLE_SEED = -1, 9999

_SEEDS = 2**64  # torch takes no larger seed: derived ones start over

Pair = tuple[torch.Tensor | None, torch.Tensor | None]
NOISE_CONVENTIONS = ("comfyui", "reference")


def check_noise(latent: torch.Tensor | None, state: TokenState, name: str) -> None:
    """Raise RequestError unless noise in latent layout has the shape of this state's latent, appended frames
    included."""
    expected = state.latent_shape.as_tuple()
    shape = None if latent is None else tuple(latent.shape)
    if shape != expected:
        raise RequestError(
            f"the noise for {name} has shape {shape}, the {name} latent is {expected}. "
            f"Connect a noise made for this latent, or none."
        )


class ReferenceNoise:
    """Token layout (B, N, C), appended tokens included, in the latent dtype, from generators on the compute device.

    One object serves all stages of a render: the reference hands the same generator from stage to stage.
    """

    def __init__(self, seed: int, device: torch.device, dtype: torch.dtype):
        self.latent_dtype = dtype
        self._initial = torch.Generator(device).manual_seed(seed)
        self._ancestral_seed = (seed + ANCESTRAL_SEED_OFFSET) % _SEEDS

    def initial(self, video: TokenState | None, audio: TokenState | None) -> Pair:
        """Start noise, video drawn before audio."""
        return self._draw(self._initial, video), self._draw(self._initial, audio)

    def step(self, video: TokenState | None, audio: TokenState | None) -> Pair:
        """Noise of one ancestral step, video drawn before audio."""
        return self._draw(self._ancestral, video), self._draw(self._ancestral, audio)

    @functools.cached_property
    def _ancestral(self) -> torch.Generator:
        return torch.Generator(self._initial.device).manual_seed(self._ancestral_seed)

    def _draw(self, generator: torch.Generator, state: TokenState | None) -> torch.Tensor | None:
        if state is None:
            return None
        return torch.randn(state.initial.shape, generator=generator, device=generator.device, dtype=self.latent_dtype)


class SdeNoise:
    """Noise of res_2s: float64, token layout, standardised over the whole tensor and then per sample. Video before
    audio."""

    def __init__(self, seed: int, device: torch.device):
        self._generator = torch.Generator(device).manual_seed(seed)

    def step(self, video: TokenState | None, audio: TokenState | None) -> Pair:
        return self._draw(video), self._draw(audio)

    def _draw(self, state: TokenState | None) -> torch.Tensor | None:
        if state is None:
            return None
        device = self._generator.device
        drawn = torch.randn(state.initial.shape, generator=self._generator, device=device, dtype=torch.float64)
        drawn = (drawn - drawn.mean()) / drawn.std()
        axes = (-2, -1)
        return (drawn - drawn.mean(axes, keepdim=True)) / drawn.std(axes, keepdim=True)


class ComfyNoise:
    """Bit-equal to ComfyUI's: start noise float32 on the CPU, latent layout, video then audio from one generator seeded
    `seed`; ancestral noise one draw a step over the packed (video, audio) latent, on the latent's device, seeded `seed`
    (`seed + 1` on the CPU). Appended tokens are latent frames behind the target's, and get the noise of their cells;
    those outside the latent get none.

    start: noise that a NOISE socket made, (video (B,C,F,H,W) or None, audio (B,C,T,mel) or None), instead of the draw.
    """

    latent_dtype = torch.float32

    def __init__(self, seed: int, device: torch.device, start: Pair | None = None):
        self._seed = seed
        self._device = device
        self._start = start
        self._drawing: Future[list[torch.Tensor | None]] | None = None

    def draw_ahead(self, video: TokenState | None, audio: TokenState | None) -> None:
        """Draw the start noise in a thread meanwhile: the CPU takes 10 ms for a million values, which is as long as all
        the rest that is prepared takes a GPU's host. The states only give shapes, those that `initial` gets."""
        if self._start is not None:
            return
        thread = ThreadPoolExecutor(1, "ltxgraph-noise")
        self._drawing = thread.submit(self._draw, video, audio)
        thread.shutdown(wait=False)

    def initial(self, video: TokenState | None, audio: TokenState | None) -> Pair:
        if self._start is not None:
            drawn = self._start
        elif self._drawing is not None:
            drawn = self._drawing.result()
        else:
            drawn = self._draw(video, audio)
        return self._tokens(drawn, (video, audio))

    def _draw(self, video: TokenState | None, audio: TokenState | None) -> list[torch.Tensor | None]:
        generator = torch.Generator("cpu").manual_seed(self._seed)
        shapes = [None if state is None else state.latent_shape.as_tuple() for state in (video, audio)]
        return [None if shape is None else torch.randn(shape, generator=generator) for shape in shapes]

    def step(self, video: TokenState | None, audio: TokenState | None) -> Pair:
        states = (video, audio)
        shapes = [None if s is None else s.latent_shape.as_tuple() for s in states]
        batch = next(shape[0] for shape in shapes if shape is not None)
        sizes = [0 if shape is None else torch.Size(shape).numel() // batch for shape in shapes]
        packed = torch.randn((batch, 1, sum(sizes)), generator=self._ancestral, device=self._device)
        parts = packed.split(sizes, dim=-1)
        return self._tokens(
            [None if shape is None else part.reshape(shape) for part, shape in zip(parts, shapes)], states
        )

    @functools.cached_property
    def _ancestral(self) -> torch.Generator:
        seed = self._seed + (1 if self._device.type == "cpu" else 0)
        return torch.Generator(self._device).manual_seed(seed % _SEEDS)

    def _tokens(self, latents, states) -> Pair:
        patchify = (patchify_video, patchify_audio)
        tokens = []
        for name, latent, state, to_tokens in zip(("video", "audio"), latents, states, patchify):
            if state is None:
                tokens.append(None)
                continue
            check_noise(latent, state, name)
            drawn = to_tokens(latent.to(self._device, torch.float32))
            if state.cells is not None:
                drawn = drawn[:, state.cells]
            if state.outside_latent:
                drawn = F.pad(drawn, (0, 0, 0, state.outside_latent))
            tokens.append(drawn.contiguous())
        return tokens[0], tokens[1]
