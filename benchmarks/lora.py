"""What a change of LoRA costs in seconds and bytes read: the distilled adapter's layout fused, rescaled, taken out.

    python3 dev.py bench lora [--gb 8] [--repeats 5] [--dir FOLDER] [--json FILE] [--tiny]

Files are made here with random bytes: the published transformer with as few blocks as --gb allows (42 = the whole
model), and an adapter of all its Linears but the connectors', rank min(450, in, out). Both are in the page cache when a
run is timed.
"""
from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _models import finish, markdown, parse, parser_of, spread
from load import blocks_within, write_slice

from ltx_runtime.checkpoint import read_header
from ltx_runtime.lora import LoraSpec, linear_specs
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.timing import Timeline
from ltx_runtime.tiny import write_tiny_lora, write_tiny_transformer

_RANDOM_BYTES = 64 << 20


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the transformer: 5.7 the least, 42 all of it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to make the files")
    arguments = parse(parser, repeats=1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        transformer, adapter = Path(folder) / "transformer.safetensors", Path(folder) / "adapter.safetensors"
        if arguments.tiny:
            write_tiny_transformer(transformer)
            write_tiny_lora(adapter)
        else:
            write_slice(transformer, blocks=blocks_within(arguments.gb * 1e9))
            write_adapter(adapter, transformer)
        sizes = {"transformer_bytes": transformer.stat().st_size, "adapter_bytes": adapter.stat().st_size}
        rows = measure(transformer, adapter, device, arguments.repeats)
    finish("lora", arguments, device, table(rows, **sizes), rows, **sizes)


def write_adapter(path: Path, transformer: Path) -> None:
    """An adapter laid out as the distilled one (transformer.md section 15), of random bytes."""
    header: dict = {"__metadata__": {"model_version": "2.5.0"}}
    end = 0
    for module, spec in linear_specs(read_header(transformer)).items():
        if "embeddings_connector" in module:
            continue
        rank = min(450, *spec.shape)
        for part, shape in (("lora_A", (rank, spec.shape[1])), ("lora_B", (spec.shape[0], rank))):
            start, end = end, end + 2 * shape[0] * shape[1]
            name = f"diffusion_model.{module}.{part}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    random = os.urandom(_RANDOM_BYTES)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, end, len(random)):
            file.write(random[: min(len(random), end - start)])


def measure(transformer: Path, adapter: Path, device: torch.device, repeats: int) -> list[dict]:
    model = load_transformer(transformer, device=device)
    base = {name: tensor.to("cpu", copy=True) for name, tensor in model.module.state_dict().items()}

    def change(*strengths: float, copies: bool) -> Callable[[], dict]:
        def run() -> dict:
            if not copies:
                model.drop_lora_copies()
            timeline = Timeline(None, device=device)
            model.set_loras([LoraSpec(adapter, strength) for strength in strengths], timeline)
            return [event["attrs"] for event in timeline.events if event["event"] == "end"][-1]

        return run

    # In this order, each from the state that the one before leaves.
    actions = {
        "fuse into the base": change(1.0, copies=True),
        "other strength": change(0.5, copies=True),
        "take out": change(copies=True),
        "fuse again": change(1.0, copies=True),
        "other strength, no copies": change(0.5, copies=False),
        "take out, no copies": change(copies=False),
    }
    taken: dict[str, list[float]] = {name: [] for name in actions}
    did: dict[str, dict] = {}
    equal = True
    for index in range(repeats + 1):
        for name, run in actions.items():
            started = time.perf_counter()
            did[name] = run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if index:  # the first round meets cold kernels and buffers
                taken[name].append(time.perf_counter() - started)
            if name.startswith("take out"):
                equal &= same_bits(model, base)
    return [
        {
            "action": name,
            "seconds": spread(taken[name]),
            "read_bytes": did[name]["adapter_bytes"] + did[name]["base_bytes"],
            "copies_bytes": did[name]["copies_bytes"],
            "base_equal": equal,
        }
        for name in actions
    ]


def same_bits(model: TransformerModel, base: dict[str, torch.Tensor]) -> bool:
    """Random bytes hold NaN, so values can't be compared."""
    return all(
        torch.equal(tensor.cpu().view(torch.uint8), base[name].view(torch.uint8))
        for name, tensor in model.module.state_dict().items()
    )


def table(rows: Sequence[dict], *, transformer_bytes: int, adapter_bytes: int) -> str:
    lines = [
        [
            row["action"],
            f"{row['seconds']['median']:.3f} ({row['seconds']['min']:.3f}-{row['seconds']['max']:.3f})",
            f"{row['read_bytes'] / 1e9:.2f}",
            f"{row['copies_bytes'] / 1e9:.2f}",
        ]
        for row in rows
    ]
    head = f"transformer {transformer_bytes / 1e9:.2f} GB, adapter {adapter_bytes / 1e9:.2f} GB, "
    head += f"base bit for bit: {rows[0]['base_equal']}"
    return f"{head}\n\n{markdown(['change', 'seconds (min-max)', 'GB read', 'GB of copies after'], lines)}"


if __name__ == "__main__":
    main()
