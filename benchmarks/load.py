"""From the file to the device: our loader against safetensors.torch.load_file in the same run, GB/s and host memory.

    python3 dev.py bench load [--gb 8] [--repeats 5] [--dir FOLDER] [--json FILE] [--tiny]

The file is made here: the published transformer's tensors by name, type and shape, with as few blocks as --gb allows,
filled with random bytes. Warm runs find it in the page cache. Cold ones drop it from there first where the system
allows that, and then measure the disk of this machine; they mean nothing elsewhere.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from _models import finish, markdown, parse, parser_of, spread
from full_size import ROOT
from safetensors.torch import load_file

from ltx_runtime.checkpoint import read_header
from ltx_runtime.runtime import TransformerModel
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_transformer

PREFIX = "model.diffusion_model."
_ITEM_BYTES = {"BF16": 2, "F32": 4}
_RANDOM_BYTES = 64 << 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the file; 5.7 is the least, 42 the whole model")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to make the file; a folder on the disk that is to be measured")
    arguments = parse(parser, repeats=2)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        path = Path(folder) / "ltx-2.5-slice-bf16.safetensors"
        if arguments.tiny:
            write_tiny_transformer(path)
        else:
            write_slice(path, blocks=blocks_within(arguments.gb * 1e9))
        rows = measure(path, device, arguments.repeats)
    finish("load", arguments, device, table(rows), rows, file_bytes=rows[0]["file_bytes"])


def published() -> tuple[dict, dict]:
    """Tensor name -> (dtype, shape), and the config, of the published transformer."""
    manifest = json.loads((ROOT / "tests" / "manifests" / "transformer-22b.json").read_text())
    config = json.loads((ROOT / "tests" / "configs" / "transformer-22b.json").read_text())["metadata"]["config"]
    return manifest, config


def blocks_within(num_bytes: float) -> int:
    """How many transformer blocks a file of this size has room for, at least one."""
    manifest, config = published()
    sizes = {name: math.prod(shape) * _ITEM_BYTES[dtype] for name, (dtype, shape) in manifest.items()}
    block = sum(size for name, size in sizes.items() if _block_of(name) == 0)
    rest = sum(size for name, size in sizes.items() if _block_of(name) is None)
    return min(max(1, int((num_bytes - rest) // block)), config["transformer"]["num_layers"])


def _block_of(name: str) -> int | None:
    start = f"{PREFIX}transformer_blocks."
    return int(name.removeprefix(start).split(".")[0]) if name.startswith(start) else None


def write_slice(path: Path, *, blocks: int, fill: bool = True) -> None:
    """A transformer file with the first `blocks` blocks of the published one. fill False leaves a hole instead of
    bytes."""
    manifest, config = published()
    config = {**config, "transformer": {**config["transformer"], "num_layers": blocks}}
    header: dict = {"__metadata__": {"config": json.dumps(config), "model_version": "2.5.0"}}
    end = 0
    for name, (dtype, shape) in manifest.items():
        block = _block_of(name)
        if block is None or block < blocks:
            start, end = end, end + math.prod(shape) * _ITEM_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = os.urandom(_RANDOM_BYTES)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if fill:
            for start in range(0, end, len(random)):
                file.write(random[: min(len(random), end - start)])
            file.flush()
            os.fsync(file.fileno())
        else:
            file.truncate(8 + len(text) + end)


class Ours:
    """The transformer's own way: ResidentModule, straight onto the device. `load` gives the seconds of reading and
    placing; what it takes beside them goes into building the module, which the other loader does not do."""

    name = "LTX Graph loader"

    def __init__(self, path: Path, device: torch.device):
        self._model = TransformerModel(read_header(path), device=device)

    def load(self) -> float:
        timeline = Timeline(None, device=self._model.device)
        self._model.ensure_resident(timeline)
        phases = timeline.summary()["phases"]
        return (phases["load.read"]["wall_ms"] + phases["load.place"]["wall_ms"]) / 1e3

    def tensors(self) -> dict[str, torch.Tensor]:
        return {PREFIX + name: tensor for name, tensor in self._model.module.state_dict().items()}

    def drop(self) -> None:
        self._model.evict()


class Safetensors:
    name = "safetensors.torch.load_file"

    def __init__(self, path: Path, device: torch.device):
        self._path, self._device = path, device
        self._loaded: dict[str, torch.Tensor] = {}

    def load(self) -> float:
        started = time.perf_counter()
        self._loaded = load_file(self._path, device=str(self._device))
        return time.perf_counter() - started

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._loaded

    def drop(self) -> None:
        self._loaded = {}


def measure(path: Path, device: torch.device, repeats: int) -> list[dict]:
    methods = [Ours(path, device), Safetensors(path, device)]
    file_bytes = path.stat().st_size
    for method in methods:
        method.load()  # first use of the device and its buffers, and the file into the page cache
    same = equal(methods[0].tensors(), methods[1].tensors())
    if not same:
        raise SystemExit("the two loaders disagree about a tensor")
    for method in methods:
        drop(method, device)
    rows = []
    for state in ("warm", "cold"):
        if state == "cold" and not can_go_cold():
            continue
        runs: dict[str, list[tuple[float, float, dict | None]]] = {method.name: [] for method in methods}
        for index in range(repeats):
            # In turns, and each first half of the time: what the machine does beside us hits both alike.
            for method in methods if index % 2 == 0 else methods[::-1]:
                if state == "cold":
                    forget(path)
                runs[method.name].append(timed(method, device))
                drop(method, device)
        for name, measured in runs.items():
            seconds, reading = (spread([run[index] for run in measured]) for index in (0, 1))
            peaks = [peak for *_, peak in measured if peak is not None]
            rows.append(
                {
                    "method": name,
                    "state": state,
                    "file_bytes": file_bytes,
                    "seconds": seconds,
                    "reading_seconds": reading,
                    "gb_per_s": file_bytes / 1e9 / reading["median"],
                    "host_peak_bytes": {key: max(peak[key] for peak in peaks) for key in peaks[0]} if peaks else None,
                    "equal": same,
                }
            )
    return rows


def timed(method, device: torch.device) -> tuple[float, float, dict | None]:
    """Seconds of everything, of them reading and placing, and what the host's memory grew by."""
    with HostPeak() as peak:
        started = time.perf_counter()
        reading = method.load()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started, reading, peak.growth()


def drop(method, device: torch.device) -> None:
    method.drop()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Every bit; random bytes hold NaN, so values can't be compared."""
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor.view(torch.uint8), theirs[name].view(torch.uint8))
        for name, tensor in ours.items()
    )


def can_go_cold() -> bool:
    return hasattr(os, "posix_fadvise")


def forget(path: Path) -> None:
    """Drop the file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# Our names for the lines of /proc/self/status.
_FIELDS_OF_STATUS = {"rss": "VmRSS", "anonymous": "RssAnon", "from_files": "RssFile"}


class HostPeak:
    """Largest growth of this process's memory meanwhile: rss, of it anonymous and mapped from files. Linux only, else
    None."""

    def __enter__(self) -> HostPeak:
        self._start = self._now()
        self._peak = dict(self._start or {})
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self._start:
            self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        if self._start:
            self._thread.join()

    def growth(self) -> dict | None:
        return {name: self._peak[name] - self._start[name] for name in self._start} if self._start else None

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            now = self._now()
            self._peak = {name: max(self._peak[name], now[name]) for name in now}

    def _now(self) -> dict[str, int] | None:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return None
        values = dict(line.split(":", 1) for line in lines if ":" in line)
        return {name: int(values[field].split()[0]) * 1024 for name, field in _FIELDS_OF_STATUS.items()}


def table(rows: list[dict]) -> str:
    head = [
        "loader",
        "page cache",
        "seconds (min-max)",
        "of them reading and placing",
        "GB/s of that",
        "host memory peak MiB: all, anonymous, from files",
    ]
    lines = []
    for row in rows:
        seconds, peak = row["seconds"], row["host_peak_bytes"]
        host = "-" if peak is None else ", ".join(f"{value / 2**20:.0f}" for value in peak.values())
        lines.append(
            [
                row["method"],
                row["state"],
                f"{seconds['median']:.3f} ({seconds['min']:.3f}-{seconds['max']:.3f})",
                f"{row['reading_seconds']['median']:.3f}",
                f"{row['gb_per_s']:.2f}",
                host,
            ]
        )
    return f"{rows[0]['file_bytes'] / 1e9:.2f} GB, every bit equal: {rows[0]['equal']}\n\n{markdown(head, lines)}"


if __name__ == "__main__":
    main()
