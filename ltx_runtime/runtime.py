"""Handles on models: weights that can be evicted and read again, and what is kept for them between renders."""
from __future__ import annotations

from pathlib import Path

import torch

from .checkpoint import CheckpointHeader, read_header
from .config import TransformerConfig
from .cuda_graph import GraphCache
from .residency import ResidentModule
from .transformer.model import LTXTransformer


class TransformerModel(ResidentModule):
    """The denoiser of one file, with its recordings. Evicting drops recordings first, then weights."""

    def __init__(self, header: CheckpointHeader, *, device: torch.device | str, dtype: torch.dtype | None = None):
        self.config = TransformerConfig.from_header(header)
        prefix_map = {"": header.prefixes["transformer"]}
        super().__init__(header, lambda: LTXTransformer(self.config), prefix_map, device=device, dtype=dtype)
        self.graphs = GraphCache(self.device)

    def evict(self) -> None:
        self.graphs.close()
        super().evict()


def load_transformer(
    path: str | Path, *, device: torch.device | str, dtype: torch.dtype | None = None, timeline=None, on_progress=None
) -> TransformerModel:
    """Open a transformer file and place its weights on the device.

    dtype None keeps the file's dtypes. on_progress(done_bytes, total_bytes). Raises CheckpointError.
    """
    model = TransformerModel(read_header(path), device=device, dtype=dtype)
    model.ensure_resident(timeline, on_progress)
    return model
