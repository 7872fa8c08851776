"""The tiny golden transformers, loaded by our own loader."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from ltx_runtime.checkpoint import load_weights, read_header
from ltx_runtime.config import TransformerConfig
from ltx_runtime.transformer import LTXTransformer


@cache
def golden_transformer(path: Path, dtype: torch.dtype | None = torch.float32) -> LTXTransformer:
    """dtype None keeps the file's: bf16 with float32 tables. Goldens are float32 unless named bf16."""
    header = read_header(path)
    with torch.device("meta"):
        model = LTXTransformer(TransformerConfig.from_header(header))
    load_weights(model, header, {"": "model.diffusion_model."}, device="cpu", dtype=dtype)
    return model
