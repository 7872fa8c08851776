"""Safetensors checkpoints: what a file is, and its weights straight onto the device.

The header is read and checked without touching the data. Weights are then read in file order, in large pieces that
several threads fill together, into two pinned buffers: while one is copied to the device the other is filled. A 42 GB
file so needs 2 * STAGING_BYTES of host memory.
"""
from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from . import published
from .errors import CheckpointError

if TYPE_CHECKING:
    from .timing import Timeline

Progress = Callable[[int, int], None]

STAGING_BYTES = 128 << 20
# One thread copies about 4.6 GB/s out of a warm page cache, a twelfth of what pinned memory feeds a GPU
# (h200_baseline.md section 4).
READ_THREADS = 4
_MIN_BYTES_PER_READ = 8 << 20
# Below this a gap between two wanted tensors is cheaper to read than to start a new piece.
_MAX_GAP_BYTES = 1 << 20

# The limit of the safetensors library. The 4349 tensors of the 22B transformer take 0.7 MB.
_MAX_HEADER_BYTES = 100_000_000
_MAX_REPORT_LINES = 20

_FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}

_LORA_ENDINGS = (".lora_A.weight", ".lora_B.weight", ".lora_down.weight", ".lora_up.weight")

CONDITIONING_FORMAT = "ltxgraph.conditioning"


@dataclass(frozen=True)
class _Kind:
    """What users are told about a component: words, the published file that holds it, and its models/ folder."""

    words: str
    file: str
    folder: str


_KINDS = {
    "transformer": _Kind("the LTX transformer", published.TRANSFORMER_FILE, "diffusion_models"),
    "video_vae_conv": _Kind("the conv video VAE", published.CONV_VAE_FILE, "vae"),
    "video_vae_diffusion": _Kind("the diffusion video VAE", published.DIFFUSION_VAE_FILE, "vae"),
    "audio_vae": _Kind("the audio VAE", published.AUDIO_VAE_FILE, "vae"),
    "text_encoder": _Kind("the text encoder", published.TEXT_ENCODER_FILE, "text_encoders"),
    "latent_upsampler": _Kind("a latent upscaler", published.SPATIAL_UPSCALER_FILE, "latent_upscale_models"),
    "duration_head": _Kind("the duration head", published.DURATION_HEAD_FILE, "model_patches"),
    "lora": _Kind("a LoRA", published.LORA_FILE, "loras"),
    "conditioning": _Kind("a saved conditioning", "", ""),
}


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file. dtype is the safetensors name (BF16, F32 ...), start and end are absolute file offsets."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of a tensor of floats that is not quantised; KeyError for another."""
        return _FLOAT_DTYPES[self.dtype]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class CheckpointHeader:
    """A file's header, checked, with the size and time of the file it was read from.

    config: the parsed JSON of metadata["config"], {} when the file has none.
    prefixes: component -> prefix of its tensor names; a 2.3-style monolith holds several components.
    """

    path: Path
    file_bytes: int
    mtime_ns: int
    metadata: dict[str, str]
    config: dict[str, Any]
    tensors: dict[str, TensorSpec]
    prefixes: dict[str, str] = field(default_factory=dict)

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(self.prefixes)

    @property
    def component(self) -> str:
        """The first of components, or "unknown"."""
        return next(iter(self.prefixes), "unknown")

    def shapes(self, component: str) -> dict[str, tuple[int, ...]]:
        """Tensor name without the component's prefix -> shape. Raises CheckpointError as require_component does."""
        require_component(self, component)
        prefix = self.prefixes[component]
        return {name[len(prefix):]: spec.shape for name, spec in self.tensors.items() if name.startswith(prefix)}


def read_header(path: str | os.PathLike[str]) -> CheckpointHeader:
    """Read and check a safetensors header; the data is not touched.

    Raises CheckpointError, naming what the file is and what to do, for a missing or empty file, a Git LFS pointer, a
    web page, a pickle or zip, GGUF, a truncated or overlong file, and a header that is damaged or absurd.
    """
    path = Path(path)
    with _open(path) as file:
        status = os.fstat(file.fileno())
        start = _read_exactly(file, 8, path) if status.st_size >= 8 else file.read(8)
        header_bytes = _header_length(path, start, file, status.st_size)
        text = _read_exactly(file, header_bytes, path)
    raw = _parse_json_object(text, path)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path.name}: its __metadata__ is not a map of strings. {_DAMAGED}")
    tensors = {name: _tensor_spec(name, entry, 8 + header_bytes, path) for name, entry in raw.items()}
    _check_layout(path, tensors, 8 + header_bytes, status.st_size)
    config = _parse_config(metadata, path)
    return CheckpointHeader(
        path=path,
        file_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        metadata=metadata,
        config=config,
        tensors=tensors,
        prefixes=_identify(tensors, metadata),
    )


def require_component(header: CheckpointHeader, *wanted: str) -> str:
    """The first of the wanted components that the file holds. Raises CheckpointError when it holds none; the message
    says what the file is instead."""
    for component in wanted:
        if component in header.prefixes:
            return component
    kinds = [_KINDS[component] for component in wanted]
    found = " and ".join(_KINDS[component].words for component in header.components)
    if not found:
        found = f"a file of another kind (its first tensor is {next(iter(header.tensors), 'missing')})"
    files = " or ".join(kind.file for kind in kinds if kind.file)
    remedy = f"Pick {files} from models/{kinds[0].folder}." if files else "Pick another file."
    words = " or ".join(kind.words for kind in kinds)
    raise CheckpointError(f"{header.path.name} is {found}, not {words}. {remedy}")


def planned_bytes(
    header: CheckpointHeader, prefix_map: Mapping[str, str], dtype: torch.dtype | None = None
) -> int:
    """Bytes that load_weights will place on the device for the same arguments."""
    total = 0
    for name, spec in header.tensors.items():
        if name.startswith(tuple(prefix_map.values())):
            total += spec.num_elements * dtype.itemsize if dtype else spec.num_bytes
    return total


def load_weights(
    module: nn.Module,
    header: CheckpointHeader,
    prefix_map: Mapping[str, str],
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
    timeline: Timeline | None = None,
) -> int:
    """Fill a module that was built on the meta device, strictly; return the bytes placed.

    prefix_map: start of a name in the module -> start of that name in the file, the longest match wins; {"": "vae."}
    maps all. Every tensor of the module must be in the file, and every tensor of the file under the given prefixes in
    the module, with equal shapes. Parameters keep the file's dtypes, or all become dtype.
    on_progress(done_bytes, total_bytes) counts bytes of the file; what it raises stops the load.

    Raises CheckpointError when tensors are missing, unexpected or misshapen (all reported together), when the weights
    are quantised, and when the file changed since the header was read. On any error the module is left as it was.
    """
    device = torch.device(device)
    wanted = match_tensors(module, header, prefix_map)
    phase = timeline.phase if timeline is not None else _no_phase
    total = sum(spec.num_bytes for spec in wanted.values())
    with phase("load.read", file=header.path.name, bytes=total, tensors=len(wanted)):
        tensors = read_tensors(header, wanted, device, dtype=dtype, on_progress=on_progress)
    placed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    with phase("load.place", bytes=placed, device=str(device)):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        _place(module, tensors)
    return placed


_DAMAGED = "The file is damaged; download it again."


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    return None


def _no_phase(name: str, **attrs: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _open(path: Path) -> BinaryIO:
    """Open unbuffered, so that large reads go straight into the caller's memory."""
    try:
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file. Check the name and the models folder.") from None
    except OSError as error:
        reason = "it is a folder" if path.is_dir() else error.strerror or str(error)
        raise CheckpointError(f"{path}: can't be opened: {reason}.") from error


def _read_exactly(file: BinaryIO, count: int, path: Path) -> bytes:
    data = bytearray(count)
    _fill(file, memoryview(data), path)
    return bytes(data)


def _fill(file: BinaryIO, view: memoryview, path: Path) -> None:
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            raise CheckpointError(f"{path.name}: the file ended {len(view) - done} bytes early. {_DAMAGED}")
        done += got


# --- the header -----------------------------------------------------------------------------------------------------


def _header_length(path: Path, start: bytes, file: BinaryIO, file_bytes: int) -> int:
    """The header's length in bytes, from the first 8; refuses what is not a safetensors file."""
    head = start + file.read(504)
    file.seek(8)
    other = _name_other_format(head)
    if other:
        raise CheckpointError(f"{path.name} {other}")
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if length < 2 or head[8:9] not in (b"{", b""):
        raise CheckpointError(
            f"{path.name} is not a safetensors file ({file_bytes} bytes starting with {head[:8]!r}). Download it again."
        )
    if length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path.name}: claims a header of {length} bytes, the format's limit is {_MAX_HEADER_BYTES}. {_DAMAGED}"
        )
    if 8 + length > file_bytes:
        raise CheckpointError(
            f"{path.name} is truncated: {file_bytes} bytes, and its header alone takes {8 + length}. Download it again."
        )
    return length


def _name_other_format(head: bytes) -> str | None:
    """Words for a well-known file that is not safetensors, from its first bytes."""
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not head:
        return "is empty. Download it again."
    if head.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d+)", head, re.MULTILINE)
        real = f" of {int(size[1])} bytes" if size else ""
        return f"is a Git LFS pointer, not the file itself. Run `git lfs pull`, or download the file{real} directly."
    if head.startswith(b"GGUF"):
        return f"is a GGUF file. GGUF is not supported yet; use the bf16 file {_KINDS['transformer'].file}."
    if head.startswith(b"PK\x03\x04") or re.match(rb"\x80[\x02-\x05]", head):
        return "is a Python pickle (.pt, .ckpt), which can run code when opened. Use the .safetensors file."
    # A safetensors header may be 60 ("<") or 123 ("{") bytes long, but then zeros follow.
    if text[:1] in (b"<", b"{") and b"\0" not in head[:8]:
        kind = "a web page" if text[:1] == b"<" else "a JSON text"
        return (
            f"is {kind}, not weights. LTX-2.5 is a gated download: accept the licence, log in, and download the file "
            "again."
        )
    if not head.strip(b"\0"):
        return "starts with zeros, an unfinished download. Download it again."
    return None


def _parse_json_object(text: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            raise ValueError("a name appears twice")
        return entries

    try:
        parsed = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its header is not valid JSON ({error}). {_DAMAGED}") from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name}: its header is not a JSON object. {_DAMAGED}")
    return parsed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor_spec(name: str, entry: Any, data_start: int, path: Path) -> TensorSpec:
    try:
        dtype, shape, (start, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or not isinstance(shape, list) or not all(map(_is_count, (*shape, start, end))):
            raise ValueError
        spec = TensorSpec(dtype, tuple(shape), data_start + start, data_start + end)
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(f"{path.name}: the header's entry of {name} is malformed. {_DAMAGED}") from None
    item_bytes = _ITEM_BYTES.get(dtype)
    if spec.num_bytes < 0 or (item_bytes and spec.num_bytes != spec.num_elements * item_bytes):
        raise CheckpointError(
            f"{path.name}: {name} is {dtype} {list(shape)} but takes {spec.num_bytes} bytes in the file. {_DAMAGED}"
        )
    return spec


def _check_layout(path: Path, tensors: Mapping[str, TensorSpec], data_start: int, file_bytes: int) -> None:
    """Tensors must not overlap and must end exactly where the file does."""
    end, previous = data_start, ""
    for name, spec in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if spec.start < end:
            raise CheckpointError(f"{path.name}: {name} overlaps {previous} in the file. {_DAMAGED}")
        end, previous = spec.end, name
    if file_bytes < end:
        raise CheckpointError(
            f"{path.name} is truncated: {file_bytes} of {end} bytes are there ({file_bytes / end:.1%}). "
            "Download it again."
        )
    if file_bytes > end:
        raise CheckpointError(f"{path.name} is {file_bytes - end} bytes longer than its header says. {_DAMAGED}")


def _parse_config(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    if "config" not in metadata:
        return {}
    try:
        config = json.loads(metadata["config"])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name}: its config metadata is not valid JSON ({error}). {_DAMAGED}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path.name}: its config metadata is not a JSON object. {_DAMAGED}")
    return config


# --- what a file is -------------------------------------------------------------------------------------------------


def _identify(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> dict[str, str]:
    """Component -> prefix, from tensor names; metadata can't be trusted to be there."""
    if metadata.get("format") == CONDITIONING_FORMAT:
        return {"conditioning": ""}
    names = tensors.keys()
    if any(name.endswith(_LORA_ENDINGS) for name in names):
        return {"lora": ""}
    found = {}
    for prefix in ("model.diffusion_model.", "diffusion_model.", ""):
        if f"{prefix}transformer_blocks.0.attn1.to_q.weight" in names and f"{prefix}patchify_proj.weight" in names:
            found["transformer"] = prefix
            break
    for prefix in ("", "vae."):
        if f"{prefix}decoder.conv_in_x_t.weight" in names:
            found["video_vae_diffusion"] = prefix
        elif any(name.startswith(f"{prefix}decoder.up_blocks.") for name in names):
            found["video_vae_conv"] = prefix
    if any(name.startswith("audio_vae.decoder.") for name in names):
        found["audio_vae"] = ""
    if any(name.startswith("duration_head.") for name in names):
        found["duration_head"] = ""
    if "initial_conv.weight" in names and "upsampler.0.weight" in names:
        found["latent_upsampler"] = ""
    if any(name.endswith("embed_tokens.weight") for name in names):
        found["text_encoder"] = ""
    return found


def _quantised_format(header: CheckpointHeader, specs: Mapping[str, TensorSpec]) -> str | None:
    """The name of the quantisation of these tensors, or None for plain float weights."""
    described = next((spec for name, spec in specs.items() if name.endswith(".comfy_quant")), None)
    if described is not None:
        return _comfy_quant_format(header, described)
    if any(name.endswith(".weight_scale_2") for name in specs):
        return "nvfp4"
    for spec in specs.values():
        if spec.dtype in _FLOAT_DTYPES:
            continue
        names = {"I8": "int8", "F8_E4M3": "fp8 (e4m3)", "F8_E5M2": "fp8 (e5m2)", "U8": "packed 4-bit or 8-bit"}
        return names.get(spec.dtype, f"stored as {spec.dtype}")
    return None


def _comfy_quant_format(header: CheckpointHeader, spec: TensorSpec) -> str:
    """The format that a comfy_quant tensor (a short JSON text as bytes) names."""
    with _open(header.path) as file:
        file.seek(spec.start)
        text = _read_exactly(file, min(spec.num_bytes, 4096), header.path)
    try:
        settings = json.loads(text)
        name = str(settings["format"])
    except (ValueError, KeyError, TypeError):
        return "comfy_quant"
    return "int8-convrot" if settings.get("convrot") else name


def _bf16_twin(header: CheckpointHeader) -> str:
    """The published bf16 file of the same component."""
    if header.component == "transformer" and "dev" in header.path.name.lower():
        return published.DEV_TRANSFORMER_FILE
    return _KINDS[header.component].file if header.prefixes else ""


# --- the weights ----------------------------------------------------------------------------------------------------


def match_tensors(
    module: nn.Module, header: CheckpointHeader, prefix_map: Mapping[str, str]
) -> dict[str, TensorSpec]:
    """Module tensor name -> its place in the file. Reads no weights, so a loader can refuse a file at once.

    Raises CheckpointError as load_weights does for quantised weights and for tensors that don't fit.
    """
    prefixes = tuple(prefix_map.values())
    in_file = {name: spec for name, spec in header.tensors.items() if name.startswith(prefixes)}
    quantised = _quantised_format(header, in_file)
    if quantised:
        raise CheckpointError(
            f"{header.path.name}: its weights are {quantised}, which is not supported yet. "
            f"Use the bf16 file {_bf16_twin(header)}."
        )
    wanted, missing, misshapen = {}, [], []
    for name, tensor in module.state_dict(keep_vars=True).items():
        start = max((start for start in prefix_map if name.startswith(start)), key=len, default=None)
        source = name if start is None else prefix_map[start] + name[len(start):]
        spec = in_file.pop(source, None)
        if spec is None:
            missing.append(source)
        elif spec.shape != tuple(tensor.shape):
            misshapen.append(f"{source} is {spec.shape}, expected {tuple(tensor.shape)}")
        else:
            wanted[name] = spec
    problems = {"missing": missing, "misshapen": misshapen, "unexpected": sorted(in_file)}
    if any(problems.values()):
        raise CheckpointError(_mismatch_report(header, problems))
    return wanted


def _mismatch_report(header: CheckpointHeader, problems: Mapping[str, list[str]]) -> str:
    counts, lines = list_problems(problems)
    what = f"{header.path.name} does not fit the model that its config describes: {counts} tensors."
    return "\n".join((f"{what} {_remedy(header)}", *lines))


def list_problems(problems: Mapping[str, list[str]]) -> tuple[str, list[str]]:
    """Kind of problem -> the tensors that have it, as ("2 missing, 1 misshapen", lines that name them, 20 at most)."""
    found = {words: names for words, names in problems.items() if names}
    counts = ", ".join(f"{len(names)} {words}" for words, names in found.items())
    share = _MAX_REPORT_LINES // len(found)
    lines = [f"  {words}: {name}" for words, names in found.items() for name in names[:share]]
    hidden = sum(map(len, found.values())) - len(lines)
    if hidden:
        lines.append(f"  and {hidden} more")
    return counts, lines


def _remedy(header: CheckpointHeader) -> str:
    file = _bf16_twin(header)
    return f"Use {file} as published, or download the file again." if file else "Download the file again."


@dataclass
class _Piece:
    """One read: the file range [start, end), and the parts of tensors in it: (name, offset in tensor, offset in piece,
    bytes)."""

    start: int
    end: int
    parts: list[tuple[str, int, int, int]]


def _plan_pieces(wanted: Mapping[str, TensorSpec], piece_bytes: int) -> list[_Piece]:
    """Cut the wanted tensors, in file order, into reads of at most piece_bytes; neighbours share a read and a large
    tensor spans several."""
    pieces: list[_Piece] = []
    for name, spec in sorted(wanted.items(), key=lambda item: item[1].start):
        done = 0
        while done < spec.num_bytes:
            start = spec.start + done
            last = pieces[-1] if pieces else None
            if last is None or start - last.end > _MAX_GAP_BYTES or start - last.start >= piece_bytes:
                last = _Piece(start, start, [])
                pieces.append(last)
            offset = start - last.start
            count = min(spec.num_bytes - done, piece_bytes - offset)
            last.parts.append((name, done, offset, count))
            last.end = start + count
            done += count
    return pieces


class _Reader:
    """Fills buffers from a file with several threads, each with its own handle and its own part of the range.

    Raises CheckpointError when the file is not, or at the end no longer, the one that the header was read from.
    """

    def __init__(self, header: CheckpointHeader):
        self._header = header
        with ExitStack() as stack:
            self._files = [stack.enter_context(_open(header.path)) for _ in range(READ_THREADS)]
            self.check_unchanged()
            self._pool = stack.enter_context(ThreadPoolExecutor(READ_THREADS, thread_name_prefix="ltx-read"))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def check_unchanged(self) -> None:
        for file in self._files:
            status = os.fstat(file.fileno())
            if (status.st_size, status.st_mtime_ns) != (self._header.file_bytes, self._header.mtime_ns):
                raise CheckpointError(
                    f"{self._header.path.name} changed on disk since it was opened; queue the prompt again so that the "
                    "loader node reads it anew."
                )

    def read(self, start: int, view: memoryview) -> None:
        """Fill view with the file's bytes from start on."""
        share = max(-(-len(view) // READ_THREADS), _MIN_BYTES_PER_READ)
        jobs = [
            self._pool.submit(self._read_part, file, start + offset, view[offset : offset + share])
            for file, offset in zip(self._files, range(0, len(view), share))
        ]
        for job in jobs:
            job.result()

    def _read_part(self, file: BinaryIO, start: int, view: memoryview) -> None:
        file.seek(start)
        _fill(file, view, self._header.path)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def read_tensors(
    header: CheckpointHeader,
    wanted: Mapping[str, TensorSpec],
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    on_progress: Progress | None = None,
) -> dict[str, Tensor]:
    """Read the wanted tensors of a file onto the device, in their own dtypes or all in dtype.

    wanted: name in the result -> its place in the file, of a float dtype. On CUDA the copies may still be under way on
    the current stream. Raises CheckpointError when the file changed since the header was read.
    """
    on_progress = on_progress or _no_progress
    total = sum(spec.num_bytes for spec in wanted.values())
    on_progress(0, total)
    place = _read_to_host if device.type == "cpu" else _read_through_staging
    tensors: dict[str, Tensor] = {}
    done = 0
    with closing(_Reader(header)) as reader:
        for piece_bytes, completed in place(reader, wanted, device):
            for name, tensor in completed:
                tensors[name] = tensor if dtype is None else tensor.to(dtype)
            done += piece_bytes
            on_progress(done, total)
        reader.check_unchanged()
    for name, spec in wanted.items():
        if not spec.num_bytes:
            tensors[name] = torch.empty(spec.shape, dtype=dtype or spec.torch_dtype, device=device)
    return tensors


def _read_to_host(
    reader: _Reader, wanted: Mapping[str, TensorSpec], device: torch.device
) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """Read each tensor into its own memory. Yields (bytes, [(name, tensor)])."""
    for name, spec in sorted(wanted.items(), key=lambda item: item[1].start):
        if spec.num_bytes:
            tensor = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
            reader.read(spec.start, memoryview(_as_bytes(tensor).numpy()))
            yield spec.num_bytes, [(name, tensor)]


def _read_through_staging(
    reader: _Reader, wanted: Mapping[str, TensorSpec], device: torch.device
) -> Iterator[tuple[int, list[tuple[str, Tensor]]]]:
    """Read pieces into two staging buffers in turn and copy them out: while the device copies one, the other is filled.
    Yields (bytes, the tensors completed by this piece)."""
    cuda = device.type == "cuda"
    pieces = _plan_pieces(wanted, STAGING_BYTES)
    if not pieces:
        return
    size = max(piece.end - piece.start for piece in pieces)
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(min(2, len(pieces)))]
    copied = [torch.cuda.Event() if cuda else None for _ in buffers]
    unfinished: dict[str, Tensor] = {}
    for index, piece in enumerate(pieces):
        slot = index % len(buffers)
        buffer, event = buffers[slot], copied[slot]
        if event is not None and index >= len(buffers):
            event.synchronize()
        reader.read(piece.start, memoryview(buffer.numpy())[: piece.end - piece.start])
        completed = []
        for name, tensor_offset, buffer_offset, count in piece.parts:
            spec = wanted[name]
            if tensor_offset == 0:
                unfinished[name] = torch.empty(spec.shape, dtype=spec.torch_dtype, device=device)
            target = _as_bytes(unfinished[name])[tensor_offset : tensor_offset + count]
            target.copy_(buffer[buffer_offset : buffer_offset + count], non_blocking=cuda)
            if tensor_offset + count == spec.num_bytes:
                completed.append((name, unfinished.pop(name)))
        if event is not None:
            event.record(torch.cuda.current_stream(device))
        yield sum(count for _, _, _, count in piece.parts), completed


def _place(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put loaded tensors in the place of the module's meta tensors."""
    for name, tensor in tensors.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name)
        if leaf in owner._parameters:
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        else:
            owner.register_buffer(leaf, tensor)
    stranded = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if stranded:
        raise RuntimeError(f"{type(module).__name__} has buffers that no file fills: {', '.join(stranded)}")
