"""Each benchmark runs with tiny weights and ends in one JSON line; the file for the load benchmark is a model's."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ltx_runtime.checkpoint import read_header
from ltx_runtime.runtime import TransformerModel

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"


def run(name: str, *arguments: str) -> tuple[str, dict]:
    """(what it printed before, the JSON of its last line)."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--tiny", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *table, last = done.stdout.splitlines()
    result = json.loads(last)
    assert result["benchmark"] == name and result["environment"]["weights"] == "tiny"
    return "\n".join(table), result


def test_scaling():
    table, result = run("scaling")
    rows = {row["phase"]: row for row in result["rows"] if row["mode"] == "off"}
    assert {"prepare", "sample.step", "decode.video.chunk", "transfer.to_host", "unaccounted"} <= set(rows)
    assert len(result["sizes"]) == 6 and all(row["points"] == 6 for row in rows.values())
    assert {row["unit"] for row in rows.values()} == {"tokens", "voxels"}
    for row in rows.values():
        assert row["constant_ms"] >= 0 and row["slope_ms"] >= 0 and f"| {row['phase']} |" in table
        assert all(0 < point["wall_ms"] <= point["render_ms"] * 1.01 for point in row["measured"])
    assert "fixed cost of a render" in table
    # Each size as soon as it is measured, before the table.
    assert table.split("| mode |")[0].count(", wall ms: ") == len(result["renders"])


def test_load():
    table, result = run("load")
    warm = {row["method"]: row for row in result["rows"] if row["state"] == "warm"}
    assert set(warm) == {"LTX Graph loader", "safetensors.torch.load_file"}
    for row in warm.values():
        assert row["equal"] is True and row["gb_per_s"] > 0 and row["seconds"]["runs"] == 2
        assert row["reading_seconds"]["median"] <= row["seconds"]["median"]
    assert "every bit equal: True" in table


def test_decode():
    table, result = run("decode")
    whole, streamed, diffusion, tiled, sound = result["rows"]
    assert whole["ran_as"].startswith("whole clip") and streamed["ran_as"].startswith("exact stream")
    assert whole["max_difference_to_whole"] == 0 and streamed["max_difference_to_whole"] < 1e-5
    assert whole["decode_ms"]["runs"] == 1 and "| S0 64x64x17 | conv | whole |" in table
    assert diffusion["differing_values"] == 0 and "tiles of" in tiled["ran_as"]
    assert 0 < tiled["mean_difference_to_whole"] < tiled["max_difference_to_whole"] < 1
    assert "| S0 64x64x17 | diffusion | tiles |" in table
    assert sound["repeats_bit_for_bit"] is True and "| 26 latent frames |" in table
    assert table.count("| S0 64x64x17 | conv | whole |") == 2  # as soon as it is measured, and at the end


def test_step():
    table, result = run("step")
    (row,) = result["rows"]
    assert row["equal_bit_for_bit"] is True and row["eager_ms"]["runs"] == 2 * 7 and row["clip"] == "64x64x17"
    assert "auto: eager: no CUDA" in table and table.count("| S0 | ") == 2


def test_end_to_end():
    table, result = run("end_to_end")
    (row,) = result["rows"]
    assert row["frames"] == [17, 64, 64, 3] and row["eager"]["phases"]["sample.step"]["count"] == 8
    assert row["verdict"].startswith("not tested: no CUDA") and "| decode.video.chunk | 1 | " in table


def test_two_stage():
    table, result = run("two_stage", "i2v", "--replays", "1")
    (row,) = result["rows"]
    assert row["frames"] == [17, 128, 128, 3] and row["frames_and_waveform_equal"] and row["the_two_requests_differ"]
    assert row["eager"]["phases"]["sample.step"]["count"] == 8 + 3 and "| encode.video.chunk | 2 |" in table
    assert result["captures"] == 0


def test_neighbourhood_attention():
    table, result = run("neighbourhood_attention")
    assert [row["name"] for row in result["rows"]] == ["plain torch"] and result["grid"] == [5, 8, 12]
    assert len(result["checks"]) == 3 and all(check["error"] < 2e-2 for check in result["checks"])
    assert "plain torch " in table


def test_every_benchmark_has_a_test_here():
    """In which the CPU needs no other argument than --tiny."""
    names = {path.stem for path in BENCHMARKS.glob("*.py") if not path.stem.startswith("_")} - {"full_size"}
    assert names and not {name for name in names if f"test_{name}" not in globals()}


def test_decode_by_recordings_says_that_there_is_no_cuda():
    table, result = run("decode", "S0", "--repeats", "1", "--chunks", "0", "--decoder", "conv", "--cuda-graph")
    recorded = result["rows"][0]["recorded"]
    assert recorded["on"] == "eager, no CUDA" and recorded["bit_for_bit"] is True
    assert recorded["recordings"] == recorded["held_bytes"] == 0 < recorded["planned_bytes"]
    assert recorded["first_ms"] is recorded["replayed_ms"] is None
    assert table.count("| eager, no CUDA | - |") == 2


def test_soak():
    table, result = run("soak")
    assert result["wrong"] == 0 and len(result["rows"]) == 7
    assert [row["cancelled"] for row in result["rows"]] == [False] * 6 + [True]
    assert [row["equal"] for row in result["rows"]] == [True] * 6 + [None]
    assert table.startswith("7 renders of ")


def test_lora():
    table, result = run("lora")
    assert [row["action"] for row in result["rows"]][:3] == ["fuse into the base", "other strength", "take out"]
    assert all(row["base_equal"] for row in result["rows"]) and "base bit for bit: True" in table


def test_auto():
    table, result = run("auto")
    (row,) = result["rows"]
    assert row["not_slower"] in (True, False) and row["eager_ms"]["runs"] == row["settled_ms"]["runs"] == 2
    assert row["settled_as"] == ["eager"] and row["measured"] is None and row["within_budget"] is True
    assert "not slower than eager once settled: " in table and "| S0 64x64x17 |" in table


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_auto_judges_medians_against_the_eager_spread_and_costs_against_the_budget(benchmark_module):
    auto = benchmark_module("auto")
    row = {
        "eager_ms": {"median": 1000.0, "min": 980.0, "max": 1040.0},
        "settled_ms": {"median": 1030.0, "min": 990.0, "max": 1100.0},
        "measured": {"wall_ms": 120.0, "gpu_ms": 102.0, "launches": 6000},
        "phases_ms": {"sample.measure": 400.0, "sample.warmup": 220.0, "sample.capture": 500.0},
        "capture": {"graph_bytes": 200, "static_bytes": 100},
    }
    card = 2400
    good = auto.verdict(row, card)
    assert good == {"not_slower": True, "within_budget": True, "over_budget": []}
    assert not auto.verdict(row | {"settled_ms": {"median": 1041.0}}, card)["not_slower"]
    slow = row["phases_ms"]
    assert auto.verdict(row | {"phases_ms": slow | {"sample.measure": 541.0}}, card)["over_budget"] == ["measuring"]
    assert auto.verdict(row | {"phases_ms": slow | {"sample.capture": 841.0}}, card)["over_budget"] == ["capturing"]
    assert auto.verdict(row, card - 8)["over_budget"] == ["memory"]
    tiny = {
        "measured": {"wall_ms": 5.5, "gpu_ms": 0.6, "launches": 280},
        "phases_ms": {"sample.measure": 51.0, "sample.warmup": 6.0, "sample.capture": 81.0},
    }
    assert auto.verdict(row | tiny, card)["within_budget"], "the fixed cost of both (auto_h200_202611.md)"
    nothing = {"measured": None, "capture": None, "phases_ms": dict.fromkeys(slow, 0)}
    assert auto.verdict(row | nothing, None)["within_budget"]


@pytest.fixture
def load_benchmark(benchmark_module):
    return benchmark_module("load")


def test_the_load_benchmarks_file_is_a_transformer_of_fewer_blocks(load_benchmark, tmp_path):
    path = tmp_path / "slice.safetensors"
    load_benchmark.write_slice(path, blocks=1, fill=False)
    model = TransformerModel(read_header(path), device="cpu")
    assert model.config.num_layers == 1 and 5e9 < model.weights_bytes < 6e9
    assert path.stat().st_size == pytest.approx(model.weights_bytes, rel=1e-3)
    path.unlink()  # a hole of 6 GB where the file system has no holes
    assert [load_benchmark.blocks_within(size) for size in (1e9, 8e9, 1e12)] == [1, 4, 48]
