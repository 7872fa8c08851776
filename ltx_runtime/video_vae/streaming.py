"""Exact temporal streaming: a clip goes through a stack of layers in chunks and comes out as if it had gone whole.

Every layer takes (x, memory, last). x holds the next frames of the clip, `last` says that no more will come, and memory
holds what the layers still need of earlier frames. A whole clip is the stream of one chunk: first and last at once, and
nothing is remembered. So there is one code path, and no state on the modules.

Source: video_vae.md section 5.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, nn

from .conv_pointwise import Frames, completed


class ClipMemory:
    """What the layers remember of one clip. Make a new one for every clip.

    Frames of the shape of those before are kept in the same buffer, so that in the steady state of a stream (equal
    chunks, none of them first or last) every address is fixed and a chunk can be captured as a graph.
    """

    def __init__(self) -> None:
        self._frames: dict[nn.Module, Tensor] = {}
        self._started: set[nn.Module] = set()

    def recall(self, layer: nn.Module) -> Tensor | None:
        """The frames (B, C, n, H, W) that layer kept, or None at the start of the clip."""
        return self._frames.get(layer)

    def keep(self, layer: nn.Module, frames: Tensor) -> None:
        """Copy frames (B, C, n, H, W) for layer's next chunk. A view instead would keep the whole chunk alive."""
        kept = self._frames.get(layer)
        if kept is not None and kept.shape == frames.shape:
            kept.copy_(frames)
        else:
            self._frames[layer] = frames.clone()

    def is_first_time(self, layer: nn.Module) -> bool:
        """True once a clip and layer."""
        first = layer not in self._started
        self._started.add(layer)
        return first


def run_in_chunks(
    layers: Sequence[tuple[nn.Module, int]], pieces: Iterable[tuple[Tensor, bool]], chunk_frames: int
) -> Iterator[Tensor]:
    """Send a clip through layers and yield the output frames in order, in pieces of any length above zero.

    layers: (layer, rate), rate = frames at the layer's input for one latent frame.
    pieces: the clip at the first layer's input, (frames (B, C, n, H, W), whether they are its last), in order. A piece
    is asked for when all output of those before it is out.
    chunk_frames: latent frames a chunk; no layer gets more than rate * chunk_frames frames at once. With chunk_frames
    no smaller than the clip and one piece, every layer runs once and one piece comes out.

    Depth first: a chunk goes as far as it can before the next one starts. The decoder looks 13.5 latent frames ahead,
    so the end of a clip leaves the layers in a burst; splitting before every layer, not only at the input, keeps the
    burst at chunk size too.
    """
    memory = ClipMemory()
    for x, ends in pieces:
        waiting: list[tuple[int, Frames, bool]] = [(0, x, ends)]
        del x
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
