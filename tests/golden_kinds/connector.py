"""The text connectors (transformer.md section 7)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from golden_kinds import compare, metadata
from golden_kinds.transformer_weights import golden_transformer

PENDING: dict[str, str] = {}
TOLERANCE = 1e-5


def cases(path: Path) -> list[str]:
    return ["left padded", "unpadded"]


def check(path: Path, case: str):
    golden = load_file(path)
    model = golden_transformer(path.parent / metadata(path)["weights"])
    features = torch.cat((golden["in.video.features"], golden["in.audio.features"]), dim=2)
    mask = golden["in.mask"]
    batch, length, _ = features.shape
    if case == "left padded":
        seen = {}
        hooks = []
        for name, connector in (
            ("video", model.video_embeddings_connector),
            ("audio", model.audio_embeddings_connector),
        ):
            blocks = connector.transformer_1d_blocks
            hooks.append(
                blocks[0].register_forward_pre_hook(_keep(seen, f"{name}.after_registers", lambda args, _: args[0]))
            )
            for i, block in enumerate(blocks):
                hooks.append(block.register_forward_hook(_keep(seen, f"{name}.block{i}", lambda args, out: out)))
        hooks.append(
            model.video_embeddings_connector.transformer_1d_blocks[0].register_forward_pre_hook(
                lambda module, args: seen.update({"video.rope_cos": args[1].cos, "video.rope_sin": args[1].sin})
            )
        )
        contexts = model.connect_text(features, mask, length=length)
        for hook in hooks:
            hook.remove()
        for name, tensor in seen.items():
            tensor = tensor.transpose(1, 2) if "rope" in name else tensor
            yield compare(f"mid.{name}", tensor, golden[f"mid.{name}"], TOLERANCE)
        for name, context in zip(("video", "audio"), contexts, strict=True):
            yield compare(f"out.{name}.context", context, golden[f"out.{name}.context"], TOLERANCE)
    else:
        for sample in range(batch):
            alone = features[sample : sample + 1, mask[sample] != 0]
            for name, context in zip(("video", "audio"), model.connect_text(alone, length=length), strict=True):
                expected = golden[f"out.{name}.context"][sample : sample + 1]
                yield compare(f"out.{name}.context[{sample}]", context, expected, TOLERANCE)


def _keep(seen, name, pick):
    def hook(module, args, out=None):
        seen[name] = pick(args, out)

    return hook
