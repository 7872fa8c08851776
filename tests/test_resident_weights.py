"""Weights that come and go."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_after

from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import TransformerConfig
from ltx_runtime.errors import CheckpointError
from ltx_runtime.resident_weights import ResidentModule
from ltx_runtime.timing import Timeline
from ltx_runtime.transformer import LTXTransformer

SOURCE = Path(__file__).parent / "goldens" / "transformer_w_av25.safetensors"


@pytest.fixture
def path(tmp_path) -> Path:
    return Path(shutil.copy(SOURCE, tmp_path / SOURCE.name))


def resident(path: Path, dtype: torch.dtype | None = None) -> ResidentModule:
    header = read_header(path)
    config = TransformerConfig.from_header(header)
    prefix_map = {"": header.prefixes["transformer"]}
    return ResidentModule(header, lambda: LTXTransformer(config), prefix_map, device="cpu", dtype=dtype)


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_size_is_known_before_and_right_after_loading(path, dtype):
    handle = resident(path, dtype)
    assert not handle.resident and handle.module is None and handle.generation == 0
    announced = handle.weights_bytes
    assert handle.ensure_resident()
    assert announced == sum(parameter.nbytes for parameter in handle.module.parameters())
    assert not any(parameter.requires_grad for parameter in handle.module.parameters())


def test_evicted_weights_are_freed_and_read_again_as_a_new_generation(path):
    handle = resident(path)
    assert handle.ensure_resident() and not handle.ensure_resident()
    assert handle.generation == 1
    before = {name: tensor.clone() for name, tensor in handle.module.state_dict().items()}
    weights = weakref.ref(handle.module.patchify_proj.weight)
    handle.evict()
    handle.evict()
    gc.collect()
    assert weights() is None and not handle.resident
    assert handle.ensure_resident()
    assert handle.generation == 2
    after = handle.module.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_file_that_changed_is_refused_until_it_is_opened_anew(path):
    handle = resident(path)
    handle.ensure_resident()
    handle.evict()
    os.utime(path, ns=(0, handle.header.mtime_ns + 1_000_000_000))
    with pytest.raises(CheckpointError, match="changed on disk since it was opened; queue the prompt again"):
        handle.ensure_resident()
    assert not handle.resident and handle.generation == 1
    assert resident(path).ensure_resident()


def test_a_stopped_load_can_be_repeated(path):
    handle = resident(path)
    with pytest.raises(Cancelled):
        handle.ensure_resident(on_progress=cancel_after(0))
    assert not handle.resident and handle.generation == 0
    assert handle.ensure_resident()


def test_a_load_that_fails_late_keeps_no_weights(path, monkeypatch):
    handle = resident(path)
    fill, weights = handle._fill, []

    def fail(module, timeline, on_progress):
        fill(module, timeline, on_progress)
        weights.append(weakref.ref(module.patchify_proj.weight))
        raise torch.OutOfMemoryError("no room for what is derived from them")

    monkeypatch.setattr(handle, "_fill", fail)
    with pytest.raises(torch.OutOfMemoryError):
        handle.ensure_resident()
    gc.collect()
    assert weights[0]() is None and not handle.resident
    monkeypatch.undo()
    assert handle.ensure_resident() and handle.generation == 1


def test_loading_is_logged_once(path):
    timeline = Timeline(None, device="cpu")
    handle = resident(path)
    handle.ensure_resident(timeline)
    handle.ensure_resident(timeline)
    ends = [event["phase"] for event in timeline.events if event["event"] == "end"]
    assert ends == ["load.read", "load.place"]


def test_a_file_that_does_not_fit_is_refused_before_reading(path):
    header = read_header(path)
    config = TransformerConfig.from_header(header)
    with pytest.raises(CheckpointError, match="missing"):
        ResidentModule(header, lambda: LTXTransformer(config), {"": "other."}, device="cpu")
