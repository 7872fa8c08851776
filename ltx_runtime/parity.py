"""Are two renders the same? Numbers, the place of a difference, and one plain verdict.

Four parts, each usable alone:

- `compare` puts two tensors side by side, in chunks, where they are; `frame_range` and `waveform_range` say whether a
  picture or a sound is fit to prove anything.
- `digest` is an exact fingerprint made on the device, so that the arms of a long run need not all be kept.
- `first_differing_stage` walks two ordered lists of named stages and gives the first that differs.
- `judge` combines arms, cases (seeds, prompts) and replays into one `Verdict`.

What counts as equal. `bit_exact` means: same shape, same dtype, every bit the same, every value finite. NaN or Inf
anywhere is never equal, not even to itself. 0.0 and -0.0 are the same number with different bits: they have no
difference (as in torch.equal), but the two tensors are then not bit-exact, and `signed_zeros` counts the places.

Source: design.md section 6, "Parity rule"; issue B points 5-9.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .errors import RequestError

FRAME_AXES = ("frame", "y", "x", "channel")
WAVEFORM_AXES = ("batch", "channel", "sample")
VIDEO_LATENT_AXES = ("batch", "channel", "frame", "y", "x")
AUDIO_LATENT_AXES = ("batch", "channel", "frame", "mel")

EQUAL = "equal"
WITHIN_TOLERANCE = "within tolerance"
DIFFERENT = "different"
NOT_TESTED = "not tested"
_WORST_FIRST = (DIFFERENT, NOT_TESTED, WITHIN_TOLERANCE, EQUAL)
# What a person sees and hears. A tolerance above 0 is meant for these; other stages have other scales.
OUTPUTS = ("frames", "waveform")

# Ends the name of a case that renders the second of two prompts.
SECOND_PROMPT = ", second prompt"

SATURATED_LIMIT = 0.05
# One level of an 8-bit picture. Less than this from pixel to pixel, or from frame to frame, is nothing to look at.
VISIBLE_STEP = 1.0 / 255.0
SILENCE = 1e-4
# Elements compared at once. Where values differ, a float64 copy and a few masks of a chunk are alive: about 20 MB.
CHUNK_ELEMENTS = 1024 * 1024
# A digest passes over its int64 chunk nine times: on a CPU the chunk should stay in the cache (twice as fast).
CPU_DIGEST_ELEMENTS = 256 * 1024
# Samples to a group of a waveform's maxima: 0.1 s at 48 kHz.
WAVEFORM_GROUP = 4800


@dataclass(frozen=True)
class Location:
    """One element: its index, one number an axis, and what the axes are called."""

    axes: tuple[str, ...]
    index: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{axis} {i}" for axis, i in zip(self.axes, self.index))

    def as_dict(self) -> dict[str, int]:
        return dict(zip(self.axes, self.index))


@dataclass(frozen=True)
class Comparison:
    """Two tensors, side by side.

    name: what was compared ("frames", "waveform", "latent", "step 3", ...).
    shape: of the first. note: why nothing could be measured ("shapes differ: ..."), else empty.
    max_abs, mean_abs: largest and mean |a - b| over the finite pairs; None when it could not be measured.
    differing, total: elements whose values differ (a value that is not finite differs), and all elements (of the
    larger one, where shapes differ).
    signed_zeros: elements that differ only in the sign of zero.
    nonfinite_a, nonfinite_b: NaN and Inf elements.
    first: the earliest differing element (earliest frame or sample, then in memory order). largest: that of max_abs.
    group_axis, group_size, group_max: largest difference per group along one axis (per frame; per 4800 samples), Inf
    for a group with a value that is not finite.
    """

    name: str
    shape: tuple[int, ...]
    total: int
    bit_exact: bool
    max_abs: float | None = 0.0
    mean_abs: float | None = 0.0
    differing: int = 0
    signed_zeros: int = 0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    first: Location | None = None
    largest: Location | None = None
    group_axis: str = ""
    group_size: int = 1
    group_max: tuple[float, ...] = ()
    note: str = ""

    @property
    def finite(self) -> bool:
        return not (self.nonfinite_a or self.nonfinite_b)

    def status(self, tolerance: float = 0.0) -> str:
        """EQUAL, WITHIN_TOLERANCE, DIFFERENT, or NOT_TESTED for two empty tensors."""
        if self.bit_exact:
            return EQUAL
        if not self.total:
            return NOT_TESTED
        if self.finite and self.max_abs is not None and self.max_abs <= tolerance:
            return WITHIN_TOLERANCE
        return DIFFERENT

    def words(self) -> str:
        """One clause that says what was found, with its numbers."""
        if self.note:
            return self.note
        if self.bit_exact:
            return f"all {self.total:,} values equal bit for bit"
        parts = []
        if not self.finite:
            parts.append(f"not finite ({self.nonfinite_a:,} values of the first, {self.nonfinite_b:,} of the second)")
        if self.differing:
            largest = f", largest {self.max_abs:.3g} at {self.largest}" if self.max_abs else ""
            mean = f", mean {self.mean_abs:.3g}" if self.max_abs and self.mean_abs is not None else ""
            first = f", first at {self.first}" if self.first != self.largest or not largest else ""
            parts.append(f"{self.differing:,} of {self.total:,} values differ{largest}{mean}{first}")
        if self.signed_zeros:
            parts.append(f"{self.signed_zeros:,} zeros differ in their sign")
        return "; ".join(parts) or "same values, different bits"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, which has no Inf: None stands for it."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "total": self.total,
            "bit_exact": self.bit_exact,
            "max_abs": self.max_abs,
            "mean_abs": self.mean_abs,
            "differing": self.differing,
            "signed_zeros": self.signed_zeros,
            "nonfinite": [self.nonfinite_a, self.nonfinite_b],
            "first": self.first.as_dict() if self.first else None,
            "largest": self.largest.as_dict() if self.largest else None,
            "group_axis": self.group_axis,
            "group_size": self.group_size,
            "group_max": [gap if math.isfinite(gap) else None for gap in self.group_max],
            "note": self.note,
        }


def compare(
    a: Tensor,
    b: Tensor,
    *,
    name: str,
    axes: Sequence[str] | None = None,
    group_axis: int = 0,
    group_size: int = 1,
) -> Comparison:
    """Compare two tensors of any one shape, dtype and device, in chunks along group_axis.

    Needs about 20 MB beside them (four times a single frame, where that is more), on the device of `a`. Waits for the
    device.
    axes: a name for each axis; "axis 0", "axis 1", ... when None.
    Different shapes give a Comparison with a note and no numbers; different dtypes are compared by value and are not
    bit-exact.
    """
    axes = tuple(axes) if axes is not None else tuple(f"axis {i}" for i in range(a.dim()))
    if a.shape != b.shape:
        note = f"shapes differ: {_shape_words(a)} and {_shape_words(b)}"
        return _unmeasured(name, note, tuple(a.shape), max(a.numel(), b.numel()))
    if a.numel() == 0:
        return _unmeasured(name, "nothing to compare: the tensors are empty", tuple(a.shape))
    if a.dim() == 0:
        a, b, axes = a.reshape(1), b.reshape(1), ("element",)
    if len(axes) != a.dim():
        raise ValueError(f"{name}: {len(axes)} axis names for {_shape_words(a)}")

    same_dtype = a.dtype == b.dtype
    length = a.shape[group_axis]
    per_index = a.numel() // length
    step = max(1, CHUNK_ELEMENTS // (per_index * group_size)) * group_size
    found = _Found()
    group_max: list[float] = []
    for start in range(0, length, step):
        size = min(step, length - start)
        x = computable(a.narrow(group_axis, start, size))
        y = b.narrow(group_axis, start, size).to(x.device)
        if same_dtype and torch.equal(_bits(x), _bits(y)) and bool(torch.isfinite(x).all()):
            group_max.extend([0.0] * -(-size // group_size))
            continue
        found.bits_differ = True
        row_max = _compare_chunk(x.movedim(group_axis, 0), y.movedim(group_axis, 0), start, found)
        group_max.extend(max(row_max[i : i + group_size]) for i in range(0, size, group_size))

    def place(index: tuple[int, ...] | None) -> Location | None:
        if index is None:
            return None
        rest = list(index[1:])
        rest.insert(group_axis, index[0])
        return Location(axes, tuple(rest))

    return Comparison(
        name=name,
        shape=tuple(a.shape),
        total=a.numel(),
        bit_exact=same_dtype and not found.bits_differ,
        max_abs=found.max_abs,
        mean_abs=found.gap_sum / max(a.numel() - found.unmeasured, 1),
        differing=found.differing,
        signed_zeros=found.signed_zeros,
        nonfinite_a=found.nonfinite_a,
        nonfinite_b=found.nonfinite_b,
        first=place(found.first),
        largest=place(found.largest) or place(found.first),
        group_axis=axes[group_axis],
        group_size=group_size,
        group_max=tuple(group_max),
        note="" if same_dtype or found.differing else f"same values, but {a.dtype} and {b.dtype}",
    )


def _unmeasured(name: str, note: str, shape: tuple[int, ...] = (), total: int = 0) -> Comparison:
    return Comparison(name, shape, total, bit_exact=False, max_abs=None, mean_abs=None, note=note)


@dataclass
class _Found:
    """What the chunks seen so far hold. Indices have the group axis first."""

    bits_differ: bool = False
    max_abs: float = 0.0
    gap_sum: float = 0.0
    unmeasured: int = 0
    differing: int = 0
    signed_zeros: int = 0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    first: tuple[int, ...] | None = None
    largest: tuple[int, ...] | None = None


def _compare_chunk(x: Tensor, y: Tensor, start: int, found: _Found) -> list[float]:
    """Add one chunk, whose first axis begins at index `start`, to `found`; return the largest difference per index."""
    finite_x, finite_y = torch.isfinite(x), torch.isfinite(y)
    found.nonfinite_a += int((~finite_x).sum())
    found.nonfinite_b += int((~finite_y).sum())
    finite = finite_x & finite_y
    differs = (x != y) | ~finite
    if x.dtype == y.dtype:
        found.signed_zeros += int(((_bits(x) != _bits(y)) & ~differs).sum())
    differing = int(differs.sum())
    # float64, so that the difference of two float32 values is exact and can't overflow.
    gap = x.to(torch.float64, copy=True).sub_(y).abs_().masked_fill_(~finite, 0.0)
    if differing:
        found.differing += differing
        found.gap_sum += float(gap.sum())
        found.unmeasured += int((~finite).sum())
        if found.first is None:
            found.first = _unravel(int(differs.to(torch.uint8).argmax()), x.shape, start)
        largest = float(gap.max())
        if largest > found.max_abs:
            found.max_abs = largest
            found.largest = _unravel(int(gap.argmax()), x.shape, start)
    return gap.masked_fill_(~finite, math.inf).reshape(gap.shape[0], -1).amax(1).tolist()


def _unravel(flat: int, shape: Sequence[int], start: int) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, i = divmod(flat, size)
        index.append(i)
    index[-1] += start
    return tuple(reversed(index))


def _bits(tensor: Tensor) -> Tensor:
    """The same memory read as integers of the same width, so that == compares bits."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])


def computable(tensor: Tensor) -> Tensor:
    """The tensor where float64 exists: on its own device, or on the CPU (Apple's MPS has none)."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _shape_words(tensor: Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape)


def compare_frames(a: Tensor, b: Tensor, name: str = "frames") -> Comparison:
    """Two IMAGE tensors (N, H, W, C); group_max is per frame."""
    return compare(a, b, name=name, axes=FRAME_AXES if a.dim() == 4 else None)


def compare_waveforms(a: Tensor, b: Tensor, name: str = "waveform") -> Comparison:
    """Two waveforms (B, C, T); group_max is per 4800 samples, 0.1 s at 48 kHz."""
    if a.dim() != 3:
        return compare(a, b, name=name)
    return compare(a, b, name=name, axes=WAVEFORM_AXES, group_axis=2, group_size=WAVEFORM_GROUP)


def compare_latents(a: Tensor, b: Tensor, name: str = "latent") -> Comparison:
    """Two video latents or unclamped clips (B, C, F, H, W), or audio latents (B, C, T, mel); group_max is per frame."""
    axes = {5: VIDEO_LATENT_AXES, 4: AUDIO_LATENT_AXES}.get(a.dim())
    return compare(a, b, name=name, axes=axes, group_axis=2 if axes else 0)


@dataclass(frozen=True)
class RangeStats:
    """Whether an output can prove anything.

    minimum, maximum: of all values, None when some are not finite.
    saturated_share: share of values at exactly 0 or 1 (sound: at or beyond -1 or 1). frames: 1 for sound.
    flat_frames: frames without visible content (sound: 1 when silent).
    alike_frames: frames that don't visibly differ from the frame before; 0 for a single frame and for sound.
    degenerate: why equality of such an output would prove nothing, or empty.
    """

    name: str
    minimum: float | None = None
    maximum: float | None = None
    saturated_share: float = 0.0
    frames: int = 1
    flat_frames: int = 0
    alike_frames: int = 0
    nonfinite: int = 0
    degenerate: str = ""

    def words(self) -> str:
        if self.minimum is None:
            return self.degenerate
        return (
            f"{self.name} {self.minimum:.3g} to {self.maximum:.3g}, "
            f"{_percent(self.saturated_share)} at the ends of the range"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def frame_range(frames: Tensor, name: str = "frames") -> RangeStats:
    """Range statistics of an IMAGE (N, H, W, C) in [0, 1], in chunks, where it is.

    Degenerate: a value that is not finite; no frame with visible content (no channel spans one 8-bit level); more than
    5 % of values at exactly 0 or 1; no frame that differs from the one before by one 8-bit level anywhere (asked only
    of two frames or more: a single frame has nothing to differ from).
    """
    count, pixels = frames.shape[0], frames[0].numel() if frames.shape[0] else 0
    if not pixels:
        return RangeStats(name, frames=count, degenerate=f"{name} empty: {_shape_words(frames)}")
    step = max(1, CHUNK_ELEMENTS // pixels)
    saturated = nonfinite = flat = alike = 0
    low, high = math.inf, -math.inf
    for start in range(0, count, step):
        chunk = computable(frames[start : start + step])
        nonfinite += int((~torch.isfinite(chunk)).sum())
        saturated += int(((chunk == 0) | (chunk == 1)).sum())
        lows, highs = chunk.amin((1, 2)), chunk.amax((1, 2))
        low, high = min(low, float(lows.min())), max(high, float(highs.max()))
        flat += int(((highs - lows).amax(1) < VISIBLE_STEP).sum())
        before = computable(frames[max(start - 1, 0) : start + chunk.shape[0] - 1])
        after = chunk[chunk.shape[0] - before.shape[0] :]
        if before.shape[0]:
            alike += int(((after - before).abs_().reshape(before.shape[0], -1).amax(1) < VISIBLE_STEP).sum())
    share = saturated / (count * pixels)
    if nonfinite:
        reason = f"{name} not finite: {nonfinite:,} values are NaN or Inf"
    elif flat == count:
        reason = f"{name} flat: no frame has visible content"
    elif share > SATURATED_LIMIT:
        reason = f"{name} saturated: {_percent(share)} of values at exactly 0 or 1 (limit {SATURATED_LIMIT:.0%})"
    elif count > 1 and alike == count - 1:
        reason = f"{name} alike: no frame visibly differs from the one before"
    else:
        reason = ""
    return RangeStats(
        name,
        minimum=None if nonfinite else low,
        maximum=None if nonfinite else high,
        saturated_share=share,
        frames=count,
        flat_frames=flat,
        alike_frames=alike,
        nonfinite=nonfinite,
        degenerate=reason,
    )


def waveform_range(waveform: Tensor, name: str = "waveform") -> RangeStats:
    """Range statistics of a waveform (B, C, T) in [-1, 1]. Degenerate: not finite, silent, or over 5 % clipped."""
    if not waveform.numel():
        return RangeStats(name, degenerate=f"{name} empty: {_shape_words(waveform)}")
    nonfinite = int((~torch.isfinite(waveform)).sum())
    if nonfinite:
        reason = f"{name} not finite: {nonfinite:,} values are NaN or Inf"
        return RangeStats(name, nonfinite=nonfinite, degenerate=reason)
    low, high = float(waveform.min()), float(waveform.max())
    share = int((waveform.abs() >= 1).sum()) / waveform.numel()
    silent = high - low < SILENCE
    if silent:
        reason = f"{name} silent"
    elif share > SATURATED_LIMIT:
        reason = f"{name} clipped: {_percent(share)} of samples at -1 or 1 (limit {SATURATED_LIMIT:.0%})"
    else:
        reason = ""
    return RangeStats(name, low, high, share, flat_frames=int(silent), degenerate=reason)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


@dataclass(frozen=True)
class Digest:
    """An exact fingerprint of a tensor's dtype, shape and bits; equal on every device.

    Any single changed element changes `value` for certain, any other change but for a chance of about 2**-64. It
    guards against accidents, not against an attacker. nonfinite: NaN and Inf elements, which never count as equal.
    """

    dtype: str
    shape: tuple[int, ...]
    value: int
    nonfinite: int

    def __str__(self) -> str:
        return f"{self.value & _MASK64:016x}"


@dataclass(frozen=True)
class PendingDigest:
    """A digest whose numbers are still on the device: int64 (2,), value and count of non-finite elements."""

    dtype: str
    shape: tuple[int, ...]
    numbers: Tensor

    def read(self) -> Digest:
        """Waits for the device."""
        value, nonfinite = self.numbers.tolist()
        return Digest(self.dtype, self.shape, value, nonfinite)


def start_digest(tensor: Tensor) -> PendingDigest:
    """Queue a digest on the tensor's device: no copy of the tensor and no wait, so it may stand between two steps.

    Each element's bits and its position make one 64-bit number, a bijective mixer (splitmix64's finaliser) scatters
    it, and the sum modulo 2**64 is the digest. Integer addition commutes, so the order of a parallel reduction
    doesn't matter.
    """
    if tensor.device.type == "mps":
        tensor = tensor.cpu()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    nonfinite = torch.zeros((), dtype=torch.int64, device=tensor.device)
    position = 0
    step = CPU_DIGEST_ELEMENTS if tensor.device.type == "cpu" else CHUNK_ELEMENTS
    for part in _flat_parts(tensor.detach(), step):
        nonfinite += (~torch.isfinite(part)).sum()
        words = _bits(part) if part.element_size() <= 4 else part.view(torch.int32)
        mixed = torch.arange(position, position + words.numel(), device=tensor.device)
        mixed.bitwise_left_shift_(32).bitwise_or_(words.to(torch.int64).bitwise_and_(0xFFFFFFFF))
        mixed.bitwise_xor_(_shift_right(mixed, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
        mixed.bitwise_xor_(_shift_right(mixed, 27)).mul_(_signed(0x94D049BB133111EB))
        mixed.bitwise_xor_(_shift_right(mixed, 31))
        total += mixed.sum()
        position += words.numel()
    return PendingDigest(str(tensor.dtype), tuple(tensor.shape), torch.stack((total, nonfinite)))


def digest(tensor: Tensor) -> Digest:
    """`start_digest`, waited for."""
    return start_digest(tensor).read()


_MASK64 = 0xFFFFFFFFFFFFFFFF


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64; torch's own fills with the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _flat_parts(tensor: Tensor, step: int) -> Iterator[Tensor]:
    """The elements in row-major order whatever the strides, as contiguous pieces of at most `step` elements."""
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(step)
    elif tensor.numel() <= step:
        yield tensor.reshape(-1)
    else:
        for part in tensor:
            yield from _flat_parts(part, step)


def compare_digests(a: Digest, b: Digest, *, name: str) -> Comparison:
    """Equal or not; a difference has no size and no place."""
    total = math.prod(a.shape)
    common = {"name": name, "shape": a.shape, "total": total, "nonfinite_a": a.nonfinite, "nonfinite_b": b.nonfinite}
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        note = f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    elif a.nonfinite or b.nonfinite:
        note = f"not finite ({a.nonfinite:,} values of the first, {b.nonfinite:,} of the second)"
    elif a.value != b.value:
        note = f"digests differ ({a} and {b}); the values were not kept"
    else:
        return Comparison(bit_exact=True, **common)
    return Comparison(bit_exact=False, max_abs=None, mean_abs=None, note=note, **common)


StageValue = Tensor | Digest | PendingDigest


def first_differing_stage(
    a: Sequence[tuple[str, StageValue]], b: Sequence[tuple[str, StageValue]]
) -> Comparison | None:
    """The first stage in which two arms differ, or None.

    a, b: (name, tensor or digest) in the order of the render, for example context, step 1, ..., latent, unclamped
    frames, frames, waveform. A stage that only one arm has counts as the first difference.
    """
    for (name_a, value_a), (name_b, value_b) in zip(a, b):
        if name_a != name_b:
            note = f"the arms went different ways: {name_a!r} in the first, {name_b!r} in the second"
            return _unmeasured(name_a, note)
        if isinstance(value_a, Tensor) and isinstance(value_b, Tensor):
            result = _compare_stage(name_a, value_a, value_b)
        else:
            result = compare_digests(_as_digest(value_a), _as_digest(value_b), name=name_a)
        if not result.bit_exact:
            return result
    if len(a) != len(b):
        longer, which = (a, "first") if len(a) > len(b) else (b, "second")
        name = longer[min(len(a), len(b))][0]
        return _unmeasured(name, f"only the {which} arm has the stage {name!r}")
    return None


def _compare_stage(name: str, a: Tensor, b: Tensor) -> Comparison:
    if name == "frames":
        return compare_frames(a, b, name)
    if name == "waveform":
        return compare_waveforms(a, b, name)
    return compare_latents(a, b, name)


def _as_digest(value: StageValue) -> Digest:
    if isinstance(value, Tensor):
        return digest(value)
    return value.read() if isinstance(value, PendingDigest) else value


@dataclass(frozen=True)
class Trial:
    """One render of an arm, compared with its counterpart.

    case: what both renders were asked for ("seed 7"). replay: 1 for the first render of this case.
    ranges: of the outputs of both renders. first_stage: the earliest stage in which they differ, if any. stage_note:
    how that was found, when it took more than the comparisons.
    """

    case: str
    comparisons: tuple[Comparison, ...]
    ranges: tuple[RangeStats, ...] = ()
    replay: int = 1
    first_stage: Comparison | None = None
    stage_note: str = ""

    def judged(self, tolerance: float) -> tuple[Comparison, ...]:
        """All comparisons; above tolerance 0 only those of what is seen and heard, if there are any."""
        outputs = tuple(c for c in self.comparisons if c.name in OUTPUTS)
        return outputs if tolerance and outputs else self.comparisons

    def status(self, tolerance: float) -> str:
        """The worst status of those judged; EQUAL only when the others are bit-exact too."""
        found = {c.status(tolerance) for c in self.judged(tolerance)}
        if not all(c.bit_exact for c in self.comparisons):
            found.add(WITHIN_TOLERANCE)
        return next(status for status in _WORST_FIRST if status in found)

    def worst(self, tolerance: float) -> Comparison:
        """The comparison that a person should look at first: outputs before other stages, larger before smaller."""
        judged = self.judged(tolerance)
        candidates = self.comparisons if all(c.bit_exact for c in judged) else judged
        return max(candidates, key=lambda c: (not c.bit_exact, c.name in OUTPUTS, *_badness(c, tolerance)))


@dataclass(frozen=True)
class Arm:
    """All renders of one way of rendering, against another way.

    name, against: as in "graphed" against "eager". trials: those that ran.
    not_run: why it did not run, or did not really run the way its name says ("no CUDA", "capture failed: ..."),
    else empty.
    """

    name: str
    against: str
    trials: tuple[Trial, ...] = ()
    not_run: str = ""

    def __post_init__(self) -> None:
        if not self.trials and not self.not_run:
            raise ValueError(f"arm {self.name!r} has neither a trial nor a reason why it did not run")
        for trial in self.trials:
            if not trial.comparisons:
                raise ValueError(f"arm {self.name!r}, {trial.case}: a trial without a comparison")


@dataclass(frozen=True)
class Verdict:
    """status: EQUAL, WITHIN_TOLERANCE, DIFFERENT or NOT_TESTED. words: one plain sentence, which begins with the
    status. bit_exact: True only for EQUAL. numbers: plain values for JSON (`judge` names them)."""

    status: str
    words: str
    bit_exact: bool
    numbers: Mapping[str, Any] = field(default_factory=dict)


def check_tolerance(tolerance: float) -> None:
    """Raises RequestError for NaN, Inf and numbers below 0."""
    if not 0 <= tolerance < math.inf:
        raise RequestError(f"tolerance={tolerance}: it must be 0 (every bit equal) or a positive number.")


def judge(
    question: Arm,
    controls: Sequence[Arm] = (),
    *,
    tolerance: float = 0.0,
    outputs: Mapping[str, Digest] | None = None,
) -> Verdict:
    """One verdict over the arm in question and its controls (an arm that must come out equal, like "eager repeated").

    tolerance: largest allowed absolute difference of frames and waveform.
    outputs: per case, a digest of one arm's frames; different cases must differ, else the render ignores its seed.

    A difference anywhere wins, a difference found in a control too. Next comes "not tested": an arm that did not run,
    a degenerate output, cases that give the same frames, nothing to compare. "equal" asks for every bit of every
    comparison. Raises RequestError for a tolerance that is none.
    numbers: tolerance, max_abs (of the outputs), first_stage (a comparison, and how it was found), worst (arm, case,
    replay, and the comparison), ranges, alike_cases, arms (name, against, status, words, cases, replays), comparisons.
    """
    check_tolerance(tolerance)
    arms = (question, *controls)
    results = [_judge_arm(arm, tolerance) for arm in arms]
    alike = _alike_cases(outputs or {})
    statuses = {result.status for result in results} | ({NOT_TESTED} if alike else set())
    status = next(status for status in _WORST_FIRST if status in statuses)

    clauses = []
    if results[0].status == status:
        clauses.append(f"{status}: {results[0].words}")
    elif alike and status == NOT_TESTED:
        clauses.append(f"{status}: {alike}")
        clauses.append(f"{question.name}: {results[0].short}")
    else:
        clauses.append(f"{status}: see the controls")
        clauses.append(f"{question.name}: {results[0].short}")
    if alike and clauses[0] != f"{status}: {alike}":
        clauses.append(alike)
    clauses.extend(f"{arm.name}: {result.short}" for arm, result in zip(controls, results[1:]))
    return Verdict(status, "; ".join(clauses), status == EQUAL, _numbers(arms, results, tolerance, alike))


@dataclass(frozen=True)
class _ArmResult:
    """words: the whole finding. short: the same behind the arm's name, without repeating a plain status."""

    status: str
    words: str
    short: str
    worst: tuple[Trial, Comparison] | None


def _judge_arm(arm: Arm, tolerance: float) -> _ArmResult:
    pairs = [(trial, trial.worst(tolerance)) for trial in arm.trials]
    worst = max(pairs, key=lambda p: _badness(p[1], tolerance), default=None)
    statuses = {trial.status(tolerance) for trial in arm.trials}
    tally = _tally(arm.trials)
    if DIFFERENT in statuses:
        trial, comparison = worst
        words = f"{arm.name} differs from {arm.against} in {comparison.name}{_of(trial, arm)}: {comparison.words()}"
        found = _first_stage(arm.trials)
        if found is not None:
            note = f" ({found.stage_note})" if found.stage_note else ""
            words += f"; first differing stage: {found.first_stage.name}{note}"
        return _ArmResult(DIFFERENT, words, f"{DIFFERENT} ({comparison.name}: {comparison.words()})", worst)
    reason = arm.not_run or next((r.degenerate for t in arm.trials for r in t.ranges if r.degenerate), "")
    if not reason and NOT_TESTED in statuses:
        empty = next(c for t in arm.trials for c in t.judged(tolerance) if c.status(tolerance) == NOT_TESTED)
        reason = f"{empty.name}: {empty.words()}"
    if reason:
        return _ArmResult(NOT_TESTED, reason, f"{NOT_TESTED} ({reason})", worst)
    outputs = _and(dict.fromkeys(c.name for trial in arm.trials for c in trial.comparisons))
    ranges = "; ".join(r.words() for r in _widest(arm.trials))
    ranges = f" ({ranges})" if ranges else ""
    if WITHIN_TOLERANCE in statuses:
        comparison = worst[1]
        found = f"{comparison.name}: {comparison.words()}"
        words = f"{arm.name} is within {tolerance:g} of {arm.against} on {outputs}{tally}: {found}{ranges}"
        return _ArmResult(WITHIN_TOLERANCE, words, f"{WITHIN_TOLERANCE} ({comparison.words()})", worst)
    words = f"{arm.name} equals {arm.against} bit for bit on {outputs}{tally}{ranges}"
    return _ArmResult(EQUAL, words, EQUAL, worst)


def _first_stage(trials: Sequence[Trial]) -> Trial | None:
    """The trial that tells best where a difference begins: one whose stages were looked into, else the first."""
    staged = [trial for trial in trials if trial.first_stage is not None]
    return next((trial for trial in staged if trial.stage_note), staged[0] if staged else None)


def _badness(comparison: Comparison, tolerance: float) -> tuple:
    return (
        comparison.status(tolerance) == DIFFERENT,
        not comparison.bit_exact,
        math.inf if comparison.max_abs is None else comparison.max_abs,
    )


def _widest(trials: Sequence[Trial]) -> list[RangeStats]:
    """One RangeStats an output, over all trials: lowest minimum, highest maximum, highest share."""
    merged: dict[str, RangeStats] = {}
    for stats in (r for trial in trials for r in trial.ranges):
        old = merged.get(stats.name)
        if old is None or stats.minimum is None or old.minimum is None:
            merged[stats.name] = old if old is not None and old.minimum is None else stats
            continue
        merged[stats.name] = replace(
            old,
            minimum=min(old.minimum, stats.minimum),
            maximum=max(old.maximum, stats.maximum),
            saturated_share=max(old.saturated_share, stats.saturated_share),
            frames=max(old.frames, stats.frames),
            flat_frames=max(old.flat_frames, stats.flat_frames),
            alike_frames=max(old.alike_frames, stats.alike_frames),
            degenerate=old.degenerate or stats.degenerate,
        )
    return list(merged.values())


def _cases_and_replays(trials: Sequence[Trial]) -> tuple[int, int]:
    cases = {trial.case for trial in trials}
    return len(cases), max((sum(t.case == case for t in trials) for case in cases), default=0)


def _tally(trials: Sequence[Trial]) -> str:
    cases, replays = _cases_and_replays(trials)
    if cases * replays <= 1:
        return ""
    noun = "seed" if all(trial.case.startswith("seed ") for trial in trials) else "case"
    prompts = " and 2 prompts" if any(trial.case.endswith(SECOND_PROMPT) for trial in trials) else ""
    return f", {_count(cases, noun)}{prompts} x {_count(replays, 'replay')}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _of(trial: Trial, arm: Arm) -> str:
    return f" ({trial.case}, replay {trial.replay})" if len(arm.trials) > 1 else ""


def _and(names: Sequence[str] | Mapping[str, Any]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _alike_cases(outputs: Mapping[str, Digest]) -> str:
    seen: dict[Digest, str] = {}
    for case, value in outputs.items():
        if value in seen:
            return f"{seen[value]} and {case} give identical frames"
        seen[value] = case
    return ""


def _numbers(arms: Sequence[Arm], results: Sequence[_ArmResult], tolerance: float, alike: str) -> dict[str, Any]:
    comparisons = [
        {"arm": arm.name, "case": trial.case, "replay": trial.replay, **c.as_dict()}
        for arm in arms
        for trial in arm.trials
        for c in trial.comparisons
    ]
    worst = None
    candidates = [(arm, *result.worst) for arm, result in zip(arms, results) if result.worst]
    if candidates:
        arm, trial, comparison = max(candidates, key=lambda c: _badness(c[2], tolerance))
        worst = {"arm": arm.name, "case": trial.case, "replay": trial.replay, **comparison.as_dict()}
    measured = [c["max_abs"] for c in comparisons if c["name"] in OUTPUTS] or [c["max_abs"] for c in comparisons]
    found = _first_stage([trial for arm in arms for trial in arm.trials])
    return {
        "tolerance": tolerance,
        "max_abs": None if not measured or None in measured else max(measured),
        "first_stage": found.first_stage.as_dict() | {"how": found.stage_note} if found else None,
        "worst": worst,
        "ranges": [stats.as_dict() for stats in _widest([trial for arm in arms for trial in arm.trials])],
        "alike_cases": alike,
        "arms": [
            {
                "name": arm.name,
                "against": arm.against,
                "status": result.status,
                "words": result.words,
                **dict(zip(("cases", "replays"), _cases_and_replays(arm.trials))),
            }
            for arm, result in zip(arms, results)
        ],
        "comparisons": comparisons,
    }
