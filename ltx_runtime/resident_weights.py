"""Weights that come and go: a module that a host may evict when memory is short, and read again at the next use."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from .checkpoint import CheckpointHeader, Progress, load_weights, match_tensors, planned_bytes
from .config import published_dtype

if TYPE_CHECKING:
    from .timing import Timeline


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a module without memory for its weights: every parameter on the meta device in the published dtype."""
    with torch.device("meta"):
        module = build()
    for module_name, owner in module.named_modules():
        for leaf, parameter in owner._parameters.items():
            if parameter is not None:
                dtype = published_dtype(f"{module_name}.{leaf}")
                owner._parameters[leaf] = nn.Parameter(parameter.to(dtype), requires_grad=False)
    return module.eval()


class ResidentModule:
    """A module read from one file, whose weights are on the device or nowhere.

    Nothing but this object may hold the module between renders, or evicting frees nothing.

    header: of a file that holds the module. prefix_map and dtype: see load_weights. build: makes the module; it runs
    where tensors are on the meta device.
    Raises CheckpointError, before any weight is read, when the file's tensors don't fit the module or are quantised.
    """

    def __init__(
        self,
        header: CheckpointHeader,
        build: Callable[[], nn.Module],
        prefix_map: Mapping[str, str],
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
    ):
        self._blank: nn.Module | None = build_on_meta(build)
        match_tensors(self._blank, header, prefix_map)
        self.header = header
        self.device = torch.device(device)
        self.dtype = dtype
        self.module: nn.Module | None = None
        self.generation = 0
        self._build = build
        self._prefix_map = dict(prefix_map)

    @property
    def resident(self) -> bool:
        return self.module is not None

    @property
    def weights_bytes(self) -> int:
        """Device memory that the weights take now when they are resident; before, what reading them will take at
        most."""
        return self._load_bytes

    @cached_property
    def _load_bytes(self) -> int:
        return planned_bytes(self.header, self._prefix_map, self.dtype)

    def ensure_resident(self, timeline: Timeline | None = None, on_progress: Progress | None = None) -> bool:
        """Read the weights unless they are resident; True if they had to be read.

        Phases load.read and load.place go to timeline; on_progress(done_bytes, total_bytes). Every load grows
        generation: what was derived from earlier weights (graphs, caches) is stale.
        Raises CheckpointError when the file changed since its header was read.
        """
        if self.module is not None:
            return False
        # Built anew after an eviction or a failed load: whatever a model derived from its weights and kept goes with
        # the old one.
        module = build_on_meta(self._build) if self._blank is None else self._blank
        self._blank = None
        self._fill(module, timeline, on_progress)
        self.module = module
        self.generation += 1
        return True

    def _fill(self, module: nn.Module, timeline: Timeline | None, on_progress: Progress | None) -> None:
        load_weights(
            module,
            self.header,
            self._prefix_map,
            device=self.device,
            dtype=self.dtype,
            on_progress=on_progress,
            timeline=timeline,
        )

    def evict(self) -> None:
        """Drop the weights; the next ensure_resident reads them again. Harmless when they are not resident."""
        self.module = None
