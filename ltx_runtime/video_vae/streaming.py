"""Exact temporal streaming: a clip goes through a stack of layers in chunks and comes out as if it had gone whole.

Every layer takes (x, memory, last). x holds the next frames of the clip, `last` says that no more will come, and memory
holds what the layers still need of earlier frames. A whole clip is the stream of one chunk: first and last at once, and
nothing is remembered. So there is one code path, and no state on the modules.

Source: video_vae.md section 5.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .conv_pointwise import Frames, completed, memory_format

if TYPE_CHECKING:
    from .recording import PieceRecorder


@dataclass(frozen=True)
class MemoryState:
    """What ClipMemory holds, of every module in order: the frames that it kept, and whether it has started."""

    frames: tuple[Tensor | None, ...] = ()
    started: tuple[bool, ...] = ()


class ClipMemory:
    """What the layers remember of one clip. Make a new one for every clip."""

    def __init__(self) -> None:
        self._frames: dict[nn.Module, Tensor] = {}
        self._started: set[nn.Module] = set()

    @classmethod
    def of(cls, modules: Sequence[nn.Module], state: MemoryState) -> ClipMemory:
        memory = cls()
        memory._frames = {module: kept for module, kept in zip(modules, state.frames) if kept is not None}
        memory._started = {module for module, started in zip(modules, state.started) if started}
        return memory

    def state(self, modules: Sequence[nn.Module]) -> MemoryState:
        frames = tuple(self._frames.get(module) for module in modules)
        return MemoryState(frames, tuple(module in self._started for module in modules))

    def recall(self, layer: nn.Module) -> Tensor | None:
        """The frames (B, C, n, H, W) that layer kept, or None at the start of the clip."""
        return self._frames.get(layer)

    def keep(self, layer: nn.Module, frames: Tensor) -> None:
        """Copy frames (B, C, n, H, W) for layer's next chunk, and leave what it kept before as it is. A view instead
        would keep the whole chunk alive."""
        # A format of its own: the strides of what they are cut out of depend on the chunk's length.
        self._frames[layer] = frames.clone(memory_format=memory_format(frames.device, frames.dtype))

    def is_first_time(self, layer: nn.Module) -> bool:
        """True once a clip and layer."""
        first = layer not in self._started
        self._started.add(layer)
        return first


def in_chunks(x: Tensor, chunk_frames: int) -> Iterator[tuple[Tensor, bool]]:
    """(frames, whether they are the last) of a clip (B, C, F, H, W), for run_in_chunks."""
    parts = x.split(chunk_frames, dim=2)
    for index, part in enumerate(parts, 1):
        # Laid out alike whatever clip it was cut out of.
        yield part.contiguous(), index == len(parts)


Layers = Sequence[tuple[nn.Module, int]]


def run_in_chunks(
    layers: Layers,
    pieces: Iterable[tuple[Tensor, bool]],
    chunk_frames: int,
    recorder: PieceRecorder | None = None,
) -> Iterator[Tensor]:
    """Send a clip through layers and yield the output frames in order, in pieces of any length above zero.

    layers: (layer, rate), rate = frames at the layer's input for one latent frame.
    pieces: the clip at the first layer's input, (frames (B, C, n, H, W), whether they are its last), in order. A piece
    is asked for when all output of those before it is out.
    chunk_frames: latent frames a chunk; no layer gets more than rate * chunk_frames frames at once. With chunk_frames
    no smaller than the clip and one piece, every layer runs once and one piece comes out.
    recorder: has what becomes of each piece run by a recording where there is one, but for those that fill a stream:
    each of them finds the layers in another state, and so is run once a clip. None runs all of it eager.

    Depth first: a chunk goes as far as it can before the next one starts. The decoder looks 13.5 latent frames ahead,
    so the end of a clip leaves the layers in a burst; splitting before every layer, not only at the input, keeps the
    burst at chunk size too.
    """
    memory = ClipMemory()
    modules = [module for layer, _ in layers for module in layer.modules()]

    def advance(_: None, turn: _Turn) -> _Turned:
        before = ClipMemory.of(modules, turn.memory)
        out = tuple(_advance(layers, before, [(0, turn.frames, turn.last)], turn.chunk_frames))
        return _Turned(out, MemoryState() if turn.last else before.state(modules))

    for x, last in pieces:
        turned = None
        recordable = recorder is not None and (last or memory.recall(layers[-1][0]) is not None)
        if recordable:
            turned = recorder.recorded(_Turn(x, last, memory.state(modules), chunk_frames), advance)
        if turned is not None:
            memory = ClipMemory.of(modules, turned.memory)
            # Copies: these are the recording's own.
            yield from map(torch.clone, turned.pieces)
            continue
        waiting: list[tuple[int, Frames, bool]] = [(0, x, last)]
        del x
        out = _advance(layers, memory, waiting, chunk_frames)
        yield from recorder.eager(out) if recordable else out


@dataclass(frozen=True)
class _Turn:
    """All that the next frames of a clip meet."""

    frames: Tensor
    last: bool
    memory: MemoryState
    chunk_frames: int


@dataclass(frozen=True)
class _Turned:
    """What became of them: output frames, in pieces, and what the layers remember then."""

    pieces: tuple[Tensor, ...]
    memory: MemoryState


def _advance(
    layers: Layers, memory: ClipMemory, waiting: list[tuple[int, Frames, bool]], chunk_frames: int
) -> Iterator[Tensor]:
    """Send what waits, (number of the next layer, frames, whether they are the last), as far as it can go. Empties
    waiting, so that frames that nobody else holds live no longer than they are needed."""
    while waiting:
        depth, frames, last = waiting.pop()
        if depth == len(layers):
            yield completed(frames)
            continue
        layer, rate = layers[depth]
        limit = rate * chunk_frames
        if frames.shape[2] > limit:
            frames = completed(frames)
            # A copy: a view would keep the part that goes on now alive, through all the layers behind.
            waiting.append((depth, frames[:, :, limit:].clone(), last))
            frames, last = frames[:, :, :limit], False
        frames = layer(frames, memory, last)
        # An empty piece goes on only as the sign that the clip is over.
        if frames.shape[2] or (last and depth + 1 < len(layers)):
            waiting.append((depth + 1, frames, last))
