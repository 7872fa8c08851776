"""LoRA adapters: files checked against a transformer, fused into its resident weights, and taken out bit for bit.

Fusing is the reference's: delta = (B * scale) A for the first adapter, further ones accumulated into it, then
weight + delta, all rounded to the weight's dtype; scale = strength, times alpha / rank where a file has alphas
(transformer.md section 15). It happens in place: parameters keep their memory.

Subtracting a delta does not give rounded weights back, so `FusedWeights` takes base values from a copy:

* On the device, made while fusing, when it takes at most half of the memory that is free then. For the distilled
  adapter (1,660 Linears) that is 38 GB, and 20 ms to make or to put back at an H200's 4.3 TB/s. Beside 42 GB of weights
  it fits on a card of 141 GB; an adapter of attention alone fits on 96. It is the first thing to go when the memory is
  wanted (`drop_copies`).
* Else out of the checkpoint: only what an adapter touched is read, at the speed of a load. The system's page cache is
  the copy in host memory then, and one that it can drop. A pageable copy of our own would cost 38 GB for ever and go
  back at 7.2 GB/s (h200_baseline.md), so there is none.

Either way the adapter itself (8.9 GB) is read at every change: factors are not kept.
"""
from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .checkpoint import (
    CheckpointHeader,
    Progress,
    TensorSpec,
    list_problems,
    read_header,
    read_tensors,
    require_component,
)
from .config import same_generation
from .errors import CheckpointError, RequestError
from .memory import device_free_bytes

# What is read at once and then fused or put back: bounds the memory that a change takes beside the weights.
GROUP_BYTES = 512 << 20

# Trainers store the transformer under these names; Lightricks under diffusion_model.
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
# kohya's trainers write the module path with "_" for "."; which "_" were dots only the transformer tells.
_FLAT_PREFIX = "lora_unet_"
_TENSOR = re.compile(r"(?P<module>.+)\.(?:(?P<down>lora_A|lora_down)\.weight|(?P<up>lora_B|lora_up)\.weight|alpha)")
_FLOAT_DTYPES = ("F32", "F16", "BF16", "F64")


@dataclass(frozen=True)
class LoraState:
    """What decides the result of one link of a chain."""

    path: str
    file_bytes: int
    mtime_ns: int
    strength: float


@dataclass(frozen=True)
class LoraSpec:
    """One link of a chain: an adapter file at a strength. Strength 0 is the same as none."""

    path: str | os.PathLike[str]
    strength: float

    @property
    def name(self) -> str:
        return Path(self.path).name

    def state(self) -> LoraState:
        """Raises CheckpointError when there is no file."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise CheckpointError(f"{self.path}: can't be opened: {error.strerror}. Pick another LoRA.") from error
        return LoraState(os.fspath(self.path), status.st_size, status.st_mtime_ns, self.strength)


@dataclass(frozen=True)
class LoraPair:
    """Where one Linear's factors lie in a file: A (rank, in), B (out, rank), alpha a scalar or absent."""

    down: TensorSpec
    up: TensorSpec
    alpha: TensorSpec | None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.down.num_bytes + self.up.num_bytes


@dataclass(frozen=True)
class LoraFile:
    """A file's pairs by module name, without prefix (flat names keep theirs), and what its metadata says.

    reference_downscale_factor, reference_temporal_scale_factor: how much smaller and sparser than the target an
    IC-LoRA's reference video is (transformer.md section 11); 1 for other adapters. model_version: of the model that it
    was trained for, None when the file does not say.
    """

    header: CheckpointHeader
    pairs: dict[str, LoraPair]
    model_version: str | None
    reference_downscale_factor: int
    reference_temporal_scale_factor: int

    @property
    def name(self) -> str:
        return self.header.path.name


@dataclass(frozen=True)
class Adapter:
    """A file at a strength, fitted to a transformer: pairs and scales by the transformer's module names."""

    spec: LoraSpec
    file: LoraFile
    pairs: dict[str, LoraPair]
    scales: dict[str, float]

    def read(self, modules: Iterable[str], device: torch.device, on_progress: Progress) -> dict[str, _Factors]:
        """The factors of those of the modules that this adapter has."""
        wanted = {}
        mine = [module for module in modules if module in self.pairs]
        for module in mine:
            wanted[f"{module} A"], wanted[f"{module} B"] = self.pairs[module].down, self.pairs[module].up
        tensors = read_tensors(self.file.header, wanted, device, on_progress=on_progress) if wanted else {}
        return {m: _Factors(tensors[f"{m} A"], tensors[f"{m} B"], self.scales[m]) for m in mine}


@dataclass(frozen=True)
class _Factors:
    down: Tensor
    up: Tensor
    scale: float


# --- files ----------------------------------------------------------------------------------------------------------


def read_lora(path: str | os.PathLike[str]) -> LoraFile:
    """Read a LoRA file's header and check all that can be told without the model; the data is not touched.

    Raises CheckpointError as read_header does, for a file of another kind, and, all reported together, for tensors of
    other adapter kinds (DoRA, LoHa, weight differences ...), a factor without its partner, factors that don't fit each
    other, a module that is there twice.
    """
    header = read_header(path)
    require_component(header, "lora")
    parts: dict[str, dict[str, TensorSpec]] = {}
    unknown, twice = [], []
    for name, spec in header.tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or spec.dtype not in _FLOAT_DTYPES:
            unknown.append(f"{name} ({spec.dtype} {list(spec.shape)})")
            continue
        part = "down" if found["down"] else "up" if found["up"] else "alpha"
        if parts.setdefault(_without_prefix(found["module"]), {}).setdefault(part, spec) is not spec:
            twice.append(name)
    pairs, alone, misshapen = {}, [], []
    for module, found in parts.items():
        if "down" not in found or "up" not in found:
            alone.append(f"{module} has only {' and '.join(_PART_WORDS[part] for part in found)}")
            continue
        pair = LoraPair(found["down"], found["up"], found.get("alpha"))
        if not _fit_each_other(pair):
            misshapen.append(f"{module}: {_sizes(pair)}")
        pairs[module] = pair
    problems = {
        "not understood": unknown,
        "without partner": alone,
        "misshapen": misshapen,
        "twice in the file": twice,
    }
    if any(problems.values()):
        counts, lines = list_problems(problems)
        first = f"{header.path.name} is not a LoRA that can be fused: {counts}."
        remedy = "Use a plain LoRA (lora_A/lora_B or lora_down/lora_up, alpha or not), or download the file again."
        raise CheckpointError("\n".join((f"{first} {remedy}", *lines)))
    return LoraFile(
        header=header,
        pairs=pairs,
        model_version=header.metadata.get("model_version"),
        reference_downscale_factor=_factor(header, "reference_downscale_factor"),
        reference_temporal_scale_factor=_factor(header, "reference_temporal_scale_factor"),
    )


_PART_WORDS = {"down": "lora_A (down)", "up": "lora_B (up)", "alpha": "alpha"}


def _without_prefix(module: str) -> str:
    return next((module[len(prefix):] for prefix in _PREFIXES if module.startswith(prefix)), module)


def _fit_each_other(pair: LoraPair) -> bool:
    down, up = pair.down.shape, pair.up.shape
    factors_fit = len(down) == len(up) == 2 and down[0] == up[1] > 0
    return factors_fit and (pair.alpha is None or pair.alpha.num_elements == 1)


def _sizes(pair: LoraPair) -> str:
    alpha = "" if pair.alpha is None or pair.alpha.num_elements == 1 else f", alpha {list(pair.alpha.shape)}"
    return f"A {list(pair.down.shape)}, B {list(pair.up.shape)}{alpha}"


def _factor(header: CheckpointHeader, key: str) -> int:
    """A whole number >= 1 out of the metadata, 1 when absent. Some trainers put words of their own before the key."""
    text = next((value for name, value in header.metadata.items() if name.endswith(key)), "1")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 1 or value != int(value):
        raise CheckpointError(f"{header.path.name}: its {key} is {text!r}, expected a whole number from 1 on.")
    return int(value)


# --- against a transformer ------------------------------------------------------------------------------------------


def linear_specs(header: CheckpointHeader) -> dict[str, TensorSpec]:
    """Module name -> place of its weight, for every Linear of a transformer file, in file order."""
    prefix, suffix = header.prefixes["transformer"], ".weight"
    linears = {
        name[len(prefix): -len(suffix)]: spec
        for name, spec in header.tensors.items()
        if name.startswith(prefix) and name.endswith(suffix) and len(spec.shape) == 2
    }
    return dict(sorted(linears.items(), key=lambda item: item[1].start))


def fit_loras(chain: Sequence[LoraSpec], transformer: CheckpointHeader) -> tuple[Adapter, ...]:
    """Check a chain against a transformer's header, and read its alphas. No weight is read.

    Raises CheckpointError that names every problem of every file: what read_lora refuses, modules that the transformer
    does not have, pairs of another shape, alphas that are not finite. RequestError for a strength that is not finite.
    """
    linears = linear_specs(transformer)
    adapters, problems = [], []
    for spec in chain:
        if not math.isfinite(spec.strength):
            raise RequestError(f"{spec.name}: strength is {spec.strength}, expected a finite number.")
        try:
            adapters.append(_fit(spec, read_lora(spec.path), linears, transformer))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError("\n".join(dict.fromkeys(problems)))
    return tuple(adapters)


def generation_notes(adapters: Sequence[Adapter], model_version: str) -> tuple[str, ...]:
    """A sentence for every adapter that fits but was trained for another generation than model_version's."""
    return tuple(
        f"{adapter.file.name} was trained for LTX {adapter.file.model_version}, the model is {model_version}: "
        "it fits, but is not meant for it"
        for adapter in adapters
        if adapter.file.model_version and not same_generation(adapter.file.model_version, model_version)
    )


def _fit(spec: LoraSpec, file: LoraFile, linears: Mapping[str, TensorSpec], transformer: CheckpointHeader) -> Adapter:
    flat_names = {_FLAT_PREFIX + module.replace(".", "_"): module for module in linears}
    pairs: dict[str, LoraPair] = {}
    unknown, misshapen, twice = [], [], []
    for written, pair in file.pairs.items():
        module = flat_names.get(written, written)
        if module not in linears:
            unknown.append(written)
        elif module in pairs:
            twice.append(module)
        else:
            out_features, in_features = linears[module].shape
            if (pair.up.shape[0], pair.down.shape[1]) != (out_features, in_features):
                misshapen.append(f"{module}: {_sizes(pair)}, its weight is {[out_features, in_features]}")
            pairs[module] = pair
    problems = {"unknown": unknown, "misshapen": misshapen, "twice in the file": twice}
    if any(problems.values()):
        counts, lines = list_problems(problems)
        made_for = f" It says it was trained for LTX {file.model_version}." if file.model_version else ""
        remedy = "Pick a LoRA of this model, or the transformer that it was trained for."
        first = f"{file.name} does not fit {transformer.path.name}: {counts} of {len(file.pairs)} modules."
        first += f"{made_for} {remedy}"
        raise CheckpointError("\n".join((first, *lines)))
    return Adapter(spec, file, pairs, _scales(spec, file, pairs))


def _scales(spec: LoraSpec, file: LoraFile, pairs: Mapping[str, LoraPair]) -> dict[str, float]:
    wanted = {module: pair.alpha for module, pair in pairs.items() if pair.alpha is not None}
    tensors = read_tensors(file.header, wanted, torch.device("cpu")) if wanted else {}
    alphas = {module: tensor.item() for module, tensor in tensors.items()}
    wrong = [f"{module}: {alpha}" for module, alpha in alphas.items() if not math.isfinite(alpha)]
    if wrong:
        counts, lines = list_problems({"alpha not finite": wrong})
        raise CheckpointError("\n".join((f"{file.name} is damaged: {counts}. Download it again.", *lines)))
    return {m: spec.strength * (alphas[m] / pair.rank if m in alphas else 1.0) for m, pair in pairs.items()}


# --- arithmetic -----------------------------------------------------------------------------------------------------


def lora_delta(factors: Sequence[tuple[Tensor, Tensor, float]], dtype: torch.dtype) -> Tensor:
    """What adapters add to one weight, (out, in) in dtype. factors: (A (rank, in), B (out, rank), scale) per adapter.

    The first product is (B * scale) A; later ones are accumulated as delta + scale * (B A). The two round differently,
    and the order is the reference's (transformer.md section 15).
    """
    delta = None
    for down, up, scale in factors:
        down, up = down.to(dtype), up.to(dtype)
        delta = (up * scale) @ down if delta is None else delta.addmm_(up, down, alpha=scale)
    return delta


def fuse_scaled_fp8(weight: Tensor, scale: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """weight (float8_e4m3fn) * scale (float32 scalar) + delta, quantised again: (weight, scale) with the largest
    magnitude at 448. Source: transformer.md section 15.

    For FusedWeights, once the loader keeps scaled FP8 weights as they are; it refuses such files so far.
    """
    fused = weight.float() * scale + delta
    scale = fused.abs().max() / torch.finfo(weight.dtype).max
    return (fused / scale).to(weight.dtype), scale


# --- resident weights -----------------------------------------------------------------------------------------------


class FusedWeights:
    """The Linears of one resident transformer, and which adapters are in them.

    module: holds base weights when this is made. linears: of its file, see linear_specs. read_base(modules,
    on_progress): base weights by module name, equal to those that the module was loaded with.
    """

    def __init__(
        self,
        module: nn.Module,
        linears: Mapping[str, TensorSpec],
        read_base: Callable[[Sequence[str], Progress], dict[str, Tensor]],
    ):
        self._weights = {name: module.get_submodule(name).weight for name in linears}
        self._file_bytes = {name: spec.num_bytes for name, spec in linears.items()}
        self._read_base = read_base
        # Weights that are not, or after a failure perhaps not, the base's.
        self._changed: set[str] = set()
        self._copies: dict[str, Tensor] = {}

    @property
    def copies_bytes(self) -> int:
        """Device memory of the copies of base weights."""
        return sum(copy.nbytes for copy in self._copies.values())

    def drop_copies(self) -> None:
        """Give the copies' memory up. Harmless at any time: base weights then come out of the file."""
        self._copies = {}

    @torch.inference_mode()
    def replace(self, adapters: Sequence[Adapter], on_progress: Progress | None = None) -> dict[str, int]:
        """Take out what is in the weights and fuse these adapters, none for the base.

        Returns what it did, for the log: linears, bytes read of adapters and of the base, bytes kept as copies.
        Whatever is raised (a read error, what on_progress raises) leaves some weights changed, and this object knows
        which: the next call sets all of them right.
        """
        modules = [name for name in self._weights if any(name in adapter.pairs for adapter in adapters)]
        factor_bytes = {m: sum(a.pairs[m].num_bytes for a in adapters if m in a.pairs) for m in modules}
        reread = [name for name in self._weights if name in self._changed and name not in self._copies]
        base_bytes = sum(self._file_bytes[name] for name in reread)
        progress = _Progress(base_bytes + sum(factor_bytes.values()), on_progress)
        self._restore(reread, progress)
        self._copies = {name: copy for name, copy in self._copies.items() if name in factor_bytes}
        keep = self._copies_fit(modules)
        for group in _groups(modules, factor_bytes):
            factors = [adapter.read(group, self._device, progress.part()) for adapter in adapters]
            for name in group:
                weight = self._weights[name]
                if keep and name not in self._copies:
                    self._copies[name] = weight.clone()
                self._changed.add(name)
                mine = [(f[name].down, f[name].up, f[name].scale) for f in factors if name in f]
                weight.add_(lora_delta(mine, weight.dtype))
        return {
            "linears": len(modules),
            "adapter_bytes": sum(factor_bytes.values()),
            "base_bytes": base_bytes,
            "copies_bytes": self.copies_bytes,
        }

    @property
    def _device(self) -> torch.device:
        return next(iter(self._weights.values())).device

    def _restore(self, reread: Sequence[str], progress: _Progress) -> None:
        for name in self._changed & self._copies.keys():
            self._weights[name].copy_(self._copies[name])
            self._changed.discard(name)
        for group in _groups(reread, self._file_bytes):
            for name, base in self._read_base(group, progress.part()).items():
                self._weights[name].copy_(base)
                self._changed.discard(name)

    def _copies_fit(self, modules: Sequence[str]) -> bool:
        """Whether copies of these weights may stand on the device. On a CPU the file's page cache is in the same memory
        already."""
        if self._device.type == "cpu":
            return False
        free = device_free_bytes(self._device)
        missing = sum(self._weights[name].nbytes for name in modules if name not in self._copies)
        return free is not None and 2 * missing <= free


def _groups(names: Sequence[str], num_bytes: Mapping[str, int]) -> Iterator[list[str]]:
    """Cut names, in order, into groups of at most GROUP_BYTES, one name at least."""
    group: list[str] = []
    total = 0
    for name in names:
        if group and total + num_bytes[name] > GROUP_BYTES:
            yield group
            group, total = [], 0
        group.append(name)
        total += num_bytes[name]
    if group:
        yield group


class _Progress:
    """One count of bytes over many reads."""

    def __init__(self, total: int, on_progress: Progress | None):
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def part(self) -> Progress:
        """A callback for the next read, which starts at its own zero."""
        before = self._done

        def on_progress(done: int, _total: int) -> None:
            self._done = before + done
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)

        return on_progress
