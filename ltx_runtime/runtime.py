"""Handles on models: weights that can be evicted and read again, and what is kept for them between renders."""
from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import CheckpointHeader, Progress, read_header, read_tensors
from .config import TransformerConfig
from .context_cache import ContextCache
from .cuda_graph import GraphCache
from .errors import RequestError
from .lora import Adapter, FusedWeights, LoraSpec, LoraState, fit_loras, linear_specs
from .memory import device_free_bytes
from .resident_weights import ResidentModule
from .timing import Timeline
from .transformer.model import LTXTransformer

logger = logging.getLogger("ltxgraph")


class TransformerModel(ResidentModule):
    """The denoiser of one file with the LoRAs fused into it, its recordings, and the contexts of the last prompts.
    Evicting drops recordings and contexts first, then weights; the LoRAs come back with the weights."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        self.config = TransformerConfig.from_header(header)
        prefix_map = {"": header.prefixes["transformer"]}
        super().__init__(header, lambda: LTXTransformer(self.config), prefix_map, device=device, dtype=dtype)
        self.graphs = GraphCache(self.device)
        self.contexts = ContextCache()
        self._linears = linear_specs(header)
        self._fused: FusedWeights | None = None
        self._adapters: tuple[Adapter, ...] = ()
        self._chain: tuple[LoraState, ...] = ()

    @property
    def loras(self) -> tuple[LoraSpec, ...]:
        """The LoRAs that act on the weights, in order; those of strength 0 are left out."""
        return tuple(adapter.spec for adapter in self._adapters)

    def set_loras(
        self, chain: Sequence[LoraSpec], timeline: Timeline | None = None, on_progress: Progress | None = None
    ) -> bool:
        """Make chain, in order, the only LoRAs of this model; an empty one restores the base bit for bit.

        Resident weights are changed in place, else the chain is fused when they are read. True if the weights changed
        or will; the same files (path, size, time) at the same strengths do nothing, and strength 0 is as no LoRA. A
        change of resident weights grows generation and drops recordings and contexts.
        Phase load.read goes to timeline; on_progress(done_bytes, total_bytes), and what it raises stops the change.

        Raises CheckpointError or RequestError before anything is changed, see fit_loras. An error in the middle, a
        cancel too, brings the previous chain back; if even that fails, the weights are evicted, and the next use reads
        them with the previous chain.
        """
        states = tuple(spec.state() for spec in chain)
        if states == self._chain:
            return False
        adapters = tuple(a for a in fit_loras(chain, self.header) if a.spec.strength != 0)
        changed = [s for s in states if s.strength != 0] != [s for s in self._chain if s.strength != 0]
        if changed and self._fused is not None:
            self.generation += 1
            self._drop_derived()
            try:
                self._fuse(adapters, timeline, on_progress)
            except BaseException:
                self._bring_back(self._adapters)
                raise
        self._adapters, self._chain = adapters, states
        return changed

    def ensure_resident(self, timeline: Timeline | None = None, on_progress: Progress | None = None) -> bool:
        """See ResidentModule; the LoRAs are fused again, and one whose file changed is a CheckpointError too."""
        if not super().ensure_resident(timeline, on_progress):
            return False
        self._fused = FusedWeights(self.module, self._linears, self._read_linears)
        if self._adapters:
            try:
                self._fuse(self._adapters, timeline, on_progress)
            except BaseException:
                self.evict()
                raise
        return True

    @property
    def lora_copies_bytes(self) -> int:
        """Device memory of the copies of base weights under the LoRAs; drop_lora_copies gives it back."""
        return self._fused.copies_bytes if self._fused is not None else 0

    def leave_free(self, num_bytes: int) -> None:
        """Drop those copies when fewer than num_bytes of device memory are free beside them."""
        if self.lora_copies_bytes and (device_free_bytes(self.device) or 0) < num_bytes:
            self.drop_lora_copies()

    def drop_lora_copies(self) -> None:
        """Without copies the next change of LoRAs reads base weights from the file."""
        if self._fused is not None:
            self._fused.drop_copies()

    @torch.inference_mode()
    def connect_text(self, features: Tensor, compatibility: str = "reference") -> tuple[tuple[Tensor, Tensor], bool]:
        """Contexts (video, audio) of unprocessed features (B, n, width) on any device, see LTXTransformer.connect_text,
        and whether they are those of an earlier call: of the same bits, under the same weights. Not to be changed.

        The weights must be resident. Waits for the device. Raises RequestError when a context is NaN or Inf.
        """
        features = features.to(self.device, non_blocking=True).contiguous()
        known = self.contexts.find(features, compatibility)
        if known is not None:
            return known, True
        contexts = self.module.connect_text(features, compatibility=compatibility)
        # Normed values are far from overflow, so that a sum is finite when they all are.
        sums = torch.stack([context.sum(dtype=torch.float32) for context in contexts])
        if not bool(sums.isfinite().all()):
            raise RequestError("the text conditioning is NaN or Inf after the connectors; encode the prompt again.")
        self.contexts.keep(features, compatibility, contexts)
        return contexts, False

    def evict(self) -> None:
        self._drop_derived()
        self._fused = None
        super().evict()

    def _drop_derived(self) -> None:
        """What was made with the weights as they are."""
        self.graphs.close()
        self.contexts.clear()

    def _fuse(self, adapters: Sequence[Adapter], timeline: Timeline | None, on_progress: Progress | None) -> None:
        timeline = timeline or Timeline(None, device=self.device)
        loras = [{"file": adapter.file.name, "strength": adapter.spec.strength} for adapter in adapters]
        with timeline.phase("load.read", what="LoRA", loras=loras) as phase:
            phase.attrs |= self._fused.replace(adapters, on_progress)

    def _bring_back(self, adapters: Sequence[Adapter]) -> None:
        try:
            self._fuse(adapters, None, None)
        except BaseException as error:  # noqa: BLE001 - no half-changed weights; the caller raises the first error
            logger.warning("the previous LoRAs could not be brought back (%s); the weights are read again", error)
            self.evict()

    def _read_linears(self, modules: Sequence[str], on_progress: Progress) -> dict[str, Tensor]:
        """The base weights of these Linears, as they were loaded."""
        wanted = {module: self._linears[module] for module in modules}
        return read_tensors(self.header, wanted, self.device, dtype=self.dtype, on_progress=on_progress)


def load_transformer(
    path: str | Path, *, device: torch.device | str, dtype: torch.dtype | None = None, timeline=None, on_progress=None
) -> TransformerModel:
    """Open a transformer file and place its weights on the device.

    dtype None keeps the file's dtypes. on_progress(done_bytes, total_bytes). Raises CheckpointError.
    """
    model = TransformerModel(read_header(path), device=device, dtype=dtype)
    model.ensure_resident(timeline, on_progress)
    return model
