"""Fixtures of the tests against a real ComfyUI: one checkout, one server for most of them."""
from __future__ import annotations

from pathlib import Path

import pytest

import dev


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """The ComfyUI under test: COMFYUI_DIR, else the pinned one that dev.py unpacked."""
    folder = dev.comfyui_dir()
    if not (folder / "main.py").is_file():
        pytest.fail(f"no ComfyUI in {folder}: run python3 dev.py test once, or set COMFYUI_DIR")
    return folder


@pytest.fixture(scope="session")
def comfyui_overlay() -> Path:
    return dev.overlay_dir()
