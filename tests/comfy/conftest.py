"""Fixtures of the tests against a real ComfyUI: one checkout, one server for most of them."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from input_files import write_input_files
from PIL import Image
from server import ComfyClient, ComfyServer, Run, install_pack, install_test_pack, install_tiny, make_base

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


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """A base directory with the pack as published, the tiny files under their published names, input files, and the
    test nodes."""
    folder = make_base(tmp_path_factory.mktemp("base"))
    install_pack(folder)
    install_tiny(folder)
    write_input_files(folder / "input")
    install_test_pack(folder)
    return folder


@pytest.fixture(scope="session")
def server(base, comfyui, comfyui_overlay):
    with ComfyServer(base, comfyui, overlay=comfyui_overlay) as running:
        yield running


@pytest.fixture
def client(server) -> ComfyClient:
    return server.client()


@pytest.fixture(scope="session")
def frames_of(server):
    """A function from a successful run to the frames that one of its nodes saved, (N, H, W, 3) uint8."""

    def frames_of(run: Run, node: str = "save") -> np.ndarray:
        assert run.outcome == "execution_success", run.error
        files = run.outputs[node]["images"]
        return np.stack([np.asarray(Image.open(io.BytesIO(server.client().view(file)))) for file in files])

    return frames_of
