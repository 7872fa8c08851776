"""Files: named as what they are, refused in words, and read bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from cancelling import Cancelled, cancel_after
from safetensors.torch import load_file, save_file
from torch import nn

from ltx_runtime import checkpoint
from ltx_runtime.checkpoint import load_weights, match_tensors, planned_bytes, read_header, require_component
from ltx_runtime.errors import CheckpointError
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.timing import Timeline

ROOT = Path(__file__).parent.parent
GOLDENS = Path(__file__).parent / "goldens"
TRANSFORMER = GOLDENS / "transformer_w_av25.safetensors"


def raw_file(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file written by hand, so that any part of it can be wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


class Tree(nn.Module):
    """Parameters under any dotted names."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for name, shape in shapes.items():
            owner = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(leaf, nn.Parameter(torch.empty(shape), requires_grad=False))


def module_of(path: Path, prefix: str = "") -> nn.Module:
    """A meta module with exactly the tensors of a file."""
    tensors = read_header(path).tensors
    shapes = {name[len(prefix) :]: spec.shape for name, spec in tensors.items() if name.startswith(prefix)}
    return build_on_meta(lambda: Tree(shapes))


def weights_file(path: Path, metadata: dict[str, str] | None = None, **extra: torch.Tensor) -> Path:
    tensors = {
        "a.weight": torch.arange(12, dtype=torch.bfloat16).view(3, 4),
        "a.scalar": torch.tensor(2.5),
        "b.none": torch.empty(0, 7),
        "b.table": torch.arange(5, dtype=torch.float32),
    }
    save_file(tensors | extra, path, metadata=metadata)
    return path


# --- what a file is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, component",
    [
        ("transformer_w_av25", "transformer"),
        ("video_vae_conv_tiny", "video_vae_conv"),
        ("video_vae_diffusion_tiny", "video_vae_diffusion"),
        ("audio_vae_tiny", "audio_vae"),
        ("latent_upsampler_spatial_x2_tiny", "latent_upsampler"),
        ("latent_upsampler_temporal_x2_tiny", "latent_upsampler"),
        ("duration_head_tiny", "duration_head"),
        ("transformer_lora", "lora"),
        ("transformer_eps", "unknown"),
    ],
)
def test_component_is_read_from_the_tensors(file, component):
    assert read_header(GOLDENS / f"{file}.safetensors").component == component


def test_text_encoder_is_recognised(tmp_path):
    path = tmp_path / "gemma.safetensors"
    save_file({"model.embed_tokens.weight": torch.zeros(4, 2)}, path)
    assert read_header(path).component == "text_encoder"


def test_monolith_holds_several_components(tmp_path):
    tensors = load_file(GOLDENS / "transformer_w_av23.safetensors")
    vae = load_file(GOLDENS / "video_vae_conv_tiny.safetensors")
    tensors |= {f"vae.{name}": tensor for name, tensor in vae.items()}
    path = tmp_path / "ltx-2.3.safetensors"
    save_file(tensors, path)
    header = read_header(path)
    assert header.prefixes == {"transformer": "model.diffusion_model.", "video_vae_conv": "vae."}
    assert "decoder.conv_in.conv.weight" in header.shapes("video_vae_conv")
    require_component(header, "transformer")
    require_component(header, "video_vae_conv")


@pytest.mark.parametrize(
    "file, wanted, words",
    [
        ("video_vae_conv_tiny", "transformer", ("is the conv video VAE, not the LTX transformer", "diffusion_models")),
        ("transformer_w_av25", "video_vae_conv", ("is the LTX transformer", "video-vae-conv-bf16", "models/vae")),
        ("transformer_w_av25", "text_encoder", ("is the LTX transformer, not the text encoder",)),
        ("transformer_lora", "transformer", ("is a LoRA",)),
        ("transformer_eps", "transformer", ("a file of another kind", "first tensor is")),
    ],
)
def test_wrong_file_is_named_as_what_it_is(file, wanted, words):
    with pytest.raises(CheckpointError) as caught:
        require_component(read_header(GOLDENS / f"{file}.safetensors"), wanted)
    for part in (f"{file}.safetensors", *words):
        assert part in str(caught.value)


# --- files that are no checkpoints ----------------------------------------------------------------------------------

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 42018190584\n"


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "is empty"),
        (b"\0\0\0", "starts with zeros"),
        (bytes(4096), "starts with zeros"),
        (LFS_POINTER, "Git LFS pointer, not the file itself. Run `git lfs pull`, or download the file of 42018190584"),
        (b"<!DOCTYPE html><html><body>Access denied</body></html>", "is a web page"),
        (b"\n <?xml version='1.0'?><Error/>", "is a web page"),
        (b'{"error": "Invalid credentials in Authorization header"}', "is a JSON text"),
        (b"GGUF\x03\0\0\0\x7b\x11" + bytes(64), "is a GGUF file"),
        (b"PK\x03\x04" + bytes(64), "is a Python pickle"),
        (pickle.dumps({"state_dict": {}}, protocol=2), "is a Python pickle"),
        (b"\x93NUMPY\x01\0" + bytes(64), "is not a safetensors file"),
        (b"\x10", "is not a safetensors file"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path, content, words):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        read_header(path)
    assert words in str(caught.value)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(tmp_path / "nothing.safetensors")
    with pytest.raises(CheckpointError):
        read_header(tmp_path)


def test_truncated_file_says_how_much_is_there(tmp_path):
    path = tmp_path / "cut.safetensors"
    whole = TRANSFORMER.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"truncated: {len(whole) // 2} of {len(whole)} bytes .*50.0%"):
        read_header(path)
    path.write_bytes(whole[:500])
    with pytest.raises(CheckpointError, match="truncated: 500 bytes"):
        read_header(path)


ONE = {"t": entry("F32", [2], 0, 8)}


@pytest.mark.parametrize(
    "header, data, length, words",
    [
        (b"{" + b" " * 100, b"", 1 << 40, "header of 1099511627776 bytes"),
        (b"{broken", b"", None, "not valid JSON"),
        (b"{" * 60_000, b"", None, "not valid JSON"),
        (b'{"t": 1, "t": 2}', b"", None, "a name appears twice"),
        (ONE, bytes(9), None, "1 bytes longer than its header says"),
        (ONE, bytes(4), None, "truncated"),
        ({"t": entry("F32", [3], 0, 8)}, bytes(8), None, "t is F32 [3] but takes 8 bytes"),
        ({"t": entry("F32", [2], 8, 0)}, bytes(8), None, "t is F32"),
        ({"t": entry("F32", [2], -8, 0)}, bytes(8), None, "entry of t is malformed"),
        ({"t": {"dtype": "F32", "shape": [2]}}, bytes(8), None, "entry of t is malformed"),
        ({"t": [1]}, bytes(8), None, "entry of t is malformed"),
        ({"t": entry("F32", [2], 0, 8), "u": entry("F32", [2], 4, 12)}, bytes(12), None, "u overlaps t"),
        ({"t": entry("F32", [2], 1 << 60, (1 << 60) + 8)}, bytes(8), None, "truncated"),
        ({"__metadata__": {"config": {}}, **ONE}, bytes(8), None, "not a map of strings"),
        ({"__metadata__": {"config": "{"}, **ONE}, bytes(8), None, "config metadata is not valid JSON"),
        ({"__metadata__": {"config": "[]"}, **ONE}, bytes(8), None, "config metadata is not a JSON object"),
    ],
)
def test_absurd_headers_are_refused(tmp_path, header, data, length, words):
    path = raw_file(tmp_path / "bad.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=r"bad\.safetensors") as caught:
        read_header(path)
    assert words in str(caught.value)


# --- reading weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["transformer_w_av25", "transformer_w_av23", "transformer_w_kvcache"])
def test_weights_equal_the_file_bit_for_bit(file):
    path = GOLDENS / f"{file}.safetensors"
    prefix = "model.diffusion_model."
    module = module_of(path, prefix)
    header = read_header(path)
    placed = load_weights(module, header, {"": prefix}, device="cpu")
    loaded, expected = module.state_dict(), load_file(path)
    assert len(loaded) == len(expected)
    for name, tensor in loaded.items():
        assert tensor.dtype == expected[prefix + name].dtype
        assert torch.equal(tensor, expected[prefix + name])
    assert placed == planned_bytes(header, {"": prefix}) == sum(t.nbytes for t in expected.values())


def test_one_dtype_for_all(tmp_path):
    path = weights_file(tmp_path / "w.safetensors")
    module = module_of(path)
    header = read_header(path)
    placed = load_weights(module, header, {"": ""}, device="cpu", dtype=torch.float32)
    assert {tensor.dtype for tensor in module.state_dict().values()} == {torch.float32}
    assert placed == planned_bytes(header, {"": ""}, torch.float32) == 4 * (12 + 1 + 0 + 5)


@pytest.mark.parametrize("file, piece_bytes", [("small", 1), ("small", 7), ("small", 24), ("golden", 1000)])
def test_staged_reads_give_the_same_bits(tmp_path, monkeypatch, file, piece_bytes):
    """The way to a CUDA device: tensors split over pieces, pieces shared by tensors, empty and 0-dim tensors."""
    path = weights_file(tmp_path / "w.safetensors") if file == "small" else TRANSFORMER
    monkeypatch.setattr(checkpoint, "STAGING_BYTES", piece_bytes)
    header = read_header(path)
    read, counted = {}, 0
    with closing(checkpoint._Reader(header)) as reader:
        for count, completed in checkpoint._read_through_staging(reader, header.tensors, torch.device("cpu")):
            read |= dict(completed)
            counted += count
    expected = {name: tensor for name, tensor in load_file(path).items() if tensor.numel()}
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert counted == sum(tensor.nbytes for tensor in expected.values())


def test_pieces_are_large_sequential_and_leave_other_components_out():
    """A monolith interleaves: what is not wanted is skipped when it is large, read over when it is small."""
    gap = checkpoint._MAX_GAP_BYTES
    spec = checkpoint.TensorSpec
    wanted = {
        "second": spec("F32", (25,), 100, 200),
        "first": spec("F32", (25,), 0, 100),
        "near": spec("F32", (25,), 200 + gap, 300 + gap),
        "far": spec("F32", (250,), 301 + 2 * gap, 1301 + 2 * gap),
    }
    pieces = checkpoint._plan_pieces(wanted, 10 * gap)
    assert [(piece.start, piece.end) for piece in pieces] == [(0, 300 + gap), (301 + 2 * gap, 1301 + 2 * gap)]
    assert [part[0] for part in pieces[0].parts] == ["first", "second", "near"]
    split = checkpoint._plan_pieces({"far": wanted["far"]}, 400)
    assert [piece.end - piece.start for piece in split] == [400, 400, 200]


def test_every_mismatch_is_reported_at_once_and_in_few_lines(tmp_path):
    path = weights_file(tmp_path / "w.safetensors", **{f"extra.{i}": torch.zeros(1) for i in range(100)})
    module = build_on_meta(lambda: Tree({"a.weight": (3, 5), "a.scalar": (), "b.none": (0, 7), "c.lost": (2,)}))
    with pytest.raises(CheckpointError) as caught:
        load_weights(module, read_header(path), {"": ""}, device="cpu")
    text = str(caught.value)
    assert "1 missing, 1 misshapen, 101 unexpected tensors" in text
    assert "missing: c.lost" in text
    assert "a.weight is (3, 4), expected (3, 5)" in text
    assert "unexpected: b.table" in text
    assert len(text.splitlines()) <= 22
    assert all(parameter.is_meta for parameter in module.parameters())


def test_a_missing_statistic_fails_at_load(tmp_path):
    whole = GOLDENS / "video_vae_conv_tiny.safetensors"
    tensors = load_file(whole)
    del tensors["per_channel_statistics.std-of-means"]
    path = tmp_path / "vae.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"missing: per_channel_statistics\.std-of-means"):
        match_tensors(module_of(whole), read_header(path), {"": ""})


def test_only_tensors_under_the_given_prefixes_count(tmp_path):
    path = weights_file(tmp_path / "w.safetensors")
    module = build_on_meta(lambda: Tree({"inner.weight": (3, 4), "inner.scalar": ()}))
    load_weights(module, read_header(path), {"inner.": "a."}, device="cpu")
    assert module.inner.scalar.item() == 2.5


def test_buffers_are_filled_and_a_forgotten_one_is_an_error(tmp_path):
    path = weights_file(tmp_path / "w.safetensors")

    def with_buffer(persistent: bool) -> nn.Module:
        module = Tree({"weight": (3, 4)})
        module.register_buffer("scalar", torch.empty(()), persistent=True)
        module.register_buffer("computed", torch.empty(3), persistent=persistent)
        return module

    module = build_on_meta(lambda: with_buffer(persistent=False))
    with pytest.raises(RuntimeError, match="computed"):
        load_weights(module, read_header(path), {"": "a."}, device="cpu")
    module = build_on_meta(lambda: with_buffer(persistent=False))
    del module.computed
    load_weights(module, read_header(path), {"": "a."}, device="cpu")
    assert module.scalar.item() == 2.5


def test_progress_counts_file_bytes_and_may_stop_the_load():
    prefix = "model.diffusion_model."
    header = read_header(TRANSFORMER)
    seen = []
    load_weights(
        module_of(TRANSFORMER, prefix), header, {"": prefix}, device="cpu", on_progress=lambda *args: seen.append(args)
    )
    total = sum(spec.num_bytes for spec in header.tensors.values())
    done = [bytes_done for bytes_done, _ in seen]
    assert {bytes_total for _, bytes_total in seen} == {total}
    assert done[0] == 0 and done[-1] == total and done == sorted(done)

    module = module_of(TRANSFORMER, prefix)
    with pytest.raises(Cancelled):
        load_weights(module, header, {"": prefix}, device="cpu", on_progress=cancel_after(0.5))
    assert all(parameter.is_meta for parameter in module.parameters())


def test_load_phases_are_logged(tmp_path):
    path = weights_file(tmp_path / "w.safetensors")
    timeline = Timeline(None, device="cpu")
    load_weights(module_of(path), read_header(path), {"": ""}, device="cpu", timeline=timeline)
    ends = {event["phase"]: event for event in timeline.events if event["event"] == "end"}
    assert ends["load.read"]["attrs"]["bytes"] == 24 + 4 + 20
    assert ends["load.place"]["attrs"]["bytes"] == 24 + 4 + 20


@pytest.mark.parametrize("change", ["longer", "touched", "replaced", "gone"])
def test_a_file_that_changed_since_its_header_was_read_is_refused(tmp_path, change):
    path = weights_file(tmp_path / "w.safetensors")
    header, module = read_header(path), module_of(path)
    if change == "longer":
        with path.open("ab") as file:
            file.write(b"x")
        os.utime(path, ns=(header.mtime_ns, header.mtime_ns))
    elif change == "touched":
        os.utime(path, ns=(header.mtime_ns, header.mtime_ns + 1_000_000_000))
    elif change == "replaced":
        other = weights_file(tmp_path / "other.safetensors")
        os.utime(other, ns=(header.mtime_ns, header.mtime_ns + 1_000_000_000))
        os.replace(other, path)
    else:
        path.unlink()
    words = "no such file" if change == "gone" else "changed on disk since it was opened; queue the prompt again"
    with pytest.raises(CheckpointError, match=words):
        load_weights(module, header, {"": ""}, device="cpu")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = weights_file(tmp_path / "w.safetensors")
    header, module = read_header(path), module_of(path)

    def touch(done: int, total: int) -> None:
        if done:  # before that the file is not open yet
            os.utime(path, ns=(header.mtime_ns, header.mtime_ns + 1_000_000_000))

    with pytest.raises(CheckpointError, match="changed on disk"):
        load_weights(module, header, {"": ""}, device="cpu", on_progress=touch)
    assert module.a.weight.is_meta


# --- quantised files ------------------------------------------------------------------------------------------------


def comfy_quant(settings: dict) -> torch.Tensor:
    return torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    "extra, words",
    [
        (
            {
                "weight": torch.zeros(4, 4, dtype=torch.int8),
                "comfy_quant": comfy_quant({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}),
            },
            "int8-convrot",
        ),
        (
            {
                "weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn),
                "comfy_quant": comfy_quant({"format": "float8_e4m3fn"}),
            },
            "float8_e4m3fn",
        ),
        ({"weight": torch.zeros(4, 2, dtype=torch.uint8), "weight_scale_2": torch.tensor(1.0)}, "nvfp4"),
        ({"weight": torch.zeros(4, 4, dtype=torch.float8_e4m3fn), "weight_scale": torch.tensor(1.0)}, r"fp8 \(e4m3\)"),
        ({"weight": torch.zeros(4, 4, dtype=torch.int8)}, "int8"),
    ],
)
@pytest.mark.parametrize("name, twin", [("distilled", "distilled-transformer-bf16"), ("dev", "dev-transformer-bf16")])
def test_quantised_files_are_refused_by_the_format_s_name(tmp_path, extra, words, name, twin):
    tensors = load_file(TRANSFORMER)
    linear = "model.diffusion_model.transformer_blocks.0.attn1.to_q"
    tensors |= {f"{linear}.{key}": tensor for key, tensor in extra.items()}
    path = tmp_path / f"ltx-2.5-22b-{name}-transformer-quantised.safetensors"
    save_file(tensors, path)
    prefix = "model.diffusion_model."
    with pytest.raises(CheckpointError, match=f"weights are {words}, which is not supported yet.*{twin}"):
        match_tensors(module_of(TRANSFORMER, prefix), read_header(path), {"": prefix})


# --- the size of the real file --------------------------------------------------------------------------------------


def test_the_host_holds_no_second_copy(tmp_path):
    """Reading 1.5 GB for a device takes the two staging buffers and no more."""
    pytest.importorskip("resource")
    count, size = 6, 256 << 20
    path = tmp_path / "big.safetensors"
    raw_file(path, {f"t{i}": entry("U8", [size], i * size, (i + 1) * size) for i in range(count)})
    os.truncate(path, path.stat().st_size + count * size)
    script = """
import resource, sys, torch
from contextlib import closing
from dataclasses import replace
from ltx_runtime import checkpoint
header = checkpoint.read_header(sys.argv[1])
wanted = {name: replace(spec, dtype="BF16", shape=(spec.num_bytes // 2,)) for name, spec in header.tensors.items()}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with closing(checkpoint._Reader(header)) as reader:
    done = sum(n for n, _ in checkpoint._read_through_staging(reader, wanted, torch.device("meta")))
unit = 1 if sys.platform == "darwin" else 1024
print(done, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit)
"""
    output = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    done, grown = map(int, output.split())
    assert done == count * size
    assert grown < 2 * checkpoint.STAGING_BYTES + (64 << 20)
