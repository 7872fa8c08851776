"""How much memory tensors hold at the worst moment, counted on the meta device: nothing is computed or allocated."""
from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the storages that were made while it is active. peak_bytes: the most that lived after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        # A number may be that of a storage that died.
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                self._alive.setdefault(reference.cdata, (reference, tensor.untyped_storage().nbytes()))
        self.peak_bytes = max(self.peak_bytes, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result
