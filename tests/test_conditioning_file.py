"""CONDITIONING through a file: exact, or refused by name."""

from __future__ import annotations

import math
import os

import pytest
import torch
from safetensors.torch import save_file

from ltx_runtime.conditioning_file import load_conditioning, save_conditioning
from ltx_runtime.errors import CheckpointError, RequestError


def same(left, right) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    return type(left) is type(right) and left == right


@pytest.mark.skipif(os.name == "nt", reason="Windows has no mode bits")
def test_others_may_read_the_file(tmp_path):
    save_conditioning(tmp_path / "p.safetensors", [(torch.zeros(1, 2, 3), {})])
    (tmp_path / "plain").touch()
    assert (tmp_path / "p.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_round_trip_keeps_every_bit_and_type(tmp_path):
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 3, 6, generator=generator)
    entries = [
        (
            torch.randn(2, 6, 5, generator=generator).transpose(1, 2),
            {
                "unprocessed_ltxav_embeds": True,
                "pooled_output": None,
                "frame_rate": 29.97,
                "strength": 1e-320,
                "index": 3,
                "prompt": 'a "quoted" prompt, ümlaut',
                "attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1]]),
                "keyframe_idxs": torch.zeros(1, 3, 0, 2),
                "scalar": torch.tensor(7, dtype=torch.int64),
                "half.precision": torch.randn(4, generator=generator).to(torch.bfloat16),
                "shared": shared,
            },
        ),
        (shared, {}),
    ]
    path = tmp_path / "new folder" / "prompt.safetensors"
    save_conditioning(path, entries)
    loaded = load_conditioning(path)
    assert len(loaded) == len(entries)
    for (cond, values), (loaded_cond, loaded_values) in zip(entries, loaded, strict=True):
        assert same(cond, loaded_cond)
        assert values.keys() == loaded_values.keys()
        assert all(same(values[key], loaded_values[key]) for key in values)
    assert [file.name for file in path.parent.iterdir()] == ["prompt.safetensors"]


def test_non_finite_numbers_survive(tmp_path):
    path = tmp_path / "p.safetensors"
    save_conditioning(path, [(torch.full((1, 1, 1), math.nan), {"inf": math.inf, "nan": math.nan})])
    (cond, values), = load_conditioning(path)
    assert cond.isnan().all() and values["inf"] == math.inf and math.isnan(values["nan"])


@pytest.mark.parametrize(
    "key, value",
    [
        ("hooks", object()),
        ("guide_attention_entries", [{"strength": 1.0}]),
        ("ref_audio", {"tokens": torch.zeros(1)}),
        ("cond", torch.zeros(1)),
    ],
)
def test_other_values_are_refused_by_key_and_leave_no_file(tmp_path, key, value):
    path = tmp_path / "p.safetensors"
    with pytest.raises(RequestError, match=key):
        save_conditioning(path, [(torch.zeros(1, 2, 3), {key: value})])
    assert not path.exists()


def test_nothing_and_wrong_tensors_are_refused(tmp_path):
    path = tmp_path / "p.safetensors"
    with pytest.raises(RequestError, match="empty"):
        save_conditioning(path, [])
    with pytest.raises(RequestError, match=r"entry 0 is \(2, 3\)"):
        save_conditioning(path, [(torch.zeros(2, 3), {})])


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "p.safetensors"
    save_conditioning(path, [(torch.ones(1, 1, 1), {})])
    with pytest.raises(RequestError):
        save_conditioning(path, [(torch.zeros(1, 1, 1), {"hooks": object()})])
    assert load_conditioning(path)[0][0].item() == 1


def test_other_files_are_refused_by_name(tmp_path):
    path = tmp_path / "p.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, path)
    with pytest.raises(CheckpointError, match="is the text encoder, not a saved conditioning"):
        load_conditioning(path)


@pytest.mark.parametrize(
    "metadata, words",
    [
        ({"format_version": "2", "entries": "[{}]"}, "format version 2"),
        ({"format_version": "1", "entries": "["}, "list of entries is damaged"),
        ({"format_version": "1"}, "list of entries is damaged"),
        ({"format_version": "1", "entries": "[{}, {}]"}, "entry 1 has no tensor"),
        ({"format_version": "1", "entries": "[]"}, "belong to none"),
    ],
)
def test_damaged_files_are_refused(tmp_path, metadata, words):
    path = tmp_path / "p.safetensors"
    save_file({"entry.0.cond": torch.zeros(1, 1, 1)}, path, metadata={"format": "ltxgraph.conditioning", **metadata})
    with pytest.raises(CheckpointError, match=words):
        load_conditioning(path)
