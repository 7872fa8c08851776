"""The temporal latent upsampler (upsampler_and_duration.md section 1)."""

from __future__ import annotations

from golden_kinds.upsampler_cases import cases, check

PENDING: dict[str, str] = {}

__all__ = ["PENDING", "cases", "check"]
