"""Model files made out of others, for what a loader must accept or refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


def rewritten(
    source: Path,
    path: Path,
    *,
    prefix: str = "",
    tensors: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    config: Callable[[dict], Any] = lambda config: None,
) -> Path:
    """A copy of source under path, its tensors and the config in its metadata changed in place by these functions, its
    names then prefixed."""
    with safe_open(source, "pt") as file:
        metadata = file.metadata()
    settings, loaded = json.loads(metadata["config"]), load_file(source)
    config(settings)
    tensors(loaded)
    metadata["config"] = json.dumps(settings)
    save_file({prefix + name: tensor for name, tensor in loaded.items()}, path, metadata)
    return path
