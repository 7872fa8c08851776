"""Two pictures that a person can read at a glance: where two clips differ, and where a render's time went.

Both come as float32 IMAGE tensors (1, H, 1600, 3) in [0, 1] on the CPU. They are drawn with Pillow's own font, from
plain values: tensors, a Comparison, a Verdict, and the events of the phase log.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from .intervals import Interval, gaps, length, phase_interval, union
from .parity import (
    CHUNK_ELEMENTS,
    DIFFERENT,
    EQUAL,
    NOT_TESTED,
    VISIBLE_STEP,
    WITHIN_TOLERANCE,
    Comparison,
    Verdict,
    compare_frames,
)
from .seams import SeamFindings
from .timing import SEGMENT, summarize
from .video_vae.tiling import Range

# Left, top, right, bottom in pixels; red, green, blue of 255.
Box = tuple[float, float, float, float]
Colour = tuple[int, int, int]
# Of one phase: its GPU-busy share or None, and whether that was measured on this very event.
Share = tuple[float | None, bool]

WIDTH = 1600
TIMELINE_HEIGHT = 700

WHITE = (255, 255, 255)
PAPER = (250, 250, 248)
INK = (28, 32, 38)
FAINT = (120, 126, 134)
GRID = (224, 226, 228)
PANEL = (236, 238, 240)
GREEN = (34, 139, 84)
AMBER = (201, 128, 10)
RED = (200, 46, 46)
NOT_FINITE = (255, 0, 255)
OVERLAP = (0, 168, 204)
STATUS_COLOURS = {EQUAL: GREEN, WITHIN_TOLERANCE: AMBER, NOT_TESTED: AMBER, DIFFERENT: RED}
# Colours of the difference, none to largest: dark, violet, red, yellow, white.
HEAT = ((0, 0, 0), (74, 12, 107), (187, 55, 84), (249, 142, 9), (255, 255, 220))

# By phase name or its first part.
PHASE_COLOURS = {
    "load": (120, 134, 156),
    "prepare": (86, 160, 168),
    "sample.step": (58, 110, 196),
    "sample.replay": (34, 139, 84),
    "sample.measure": (214, 170, 28),
    "sample.warmup": (238, 150, 66),
    "sample.capture": (208, 52, 44),
    "encode": (160, 110, 180),
    "decode": (132, 84, 176),
    "upscale": (200, 90, 150),
    "transfer": (140, 108, 84),
}
UNACCOUNTED = (235, 200, 196)
GPU_COLOUR = (52, 170, 96)
GPU_INFERRED = (166, 214, 184)


def difference_picture(
    a: Tensor,
    b: Tensor | None,
    verdict: Verdict,
    *,
    comparison: Comparison | None = None,
    waveform: Comparison | None = None,
    seams: SeamFindings | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Tensor:
    """Contact sheet of two clips: verdict, the worst frame of both, their difference, and its size over time.

    a, b: (N, H, W, C) float, any device, C of 1, 3 or 4. b may be None: an arm that did not run.
    comparison: of exactly these frames; made here when None. waveform: adds a strip for the sound. seams: marks where
    tiles overlap, at the edges of the difference and of its strip.
    Differences are drawn from black to white, white being the largest one (its value is written beside); a pixel
    that differs stays visible when the picture is made smaller. Equal clips say so in the place of the difference.
    Returns (1, H, 1600, 3); H follows the clips' proportions and what there is to show.
    """
    if b is not None and comparison is None:
        comparison = compare_frames(a, b)
    comparable = comparison is not None and a.shape == b.shape and comparison.total > 0
    frame = comparison.largest.index[0] if comparable and comparison.largest else a.shape[0] // 2

    margin, gutter = 28, 16
    panel_width = (WIDTH - 2 * margin - 3 * gutter) // 4
    panel_height = max(120, min(round(panel_width * a.shape[1] / max(a.shape[2], 1)), 560))
    strips = [c for c in (comparison if comparable else None, waveform) if c is not None and c.group_max]
    sheet = _Sheet(2000)
    top = _banner(sheet, verdict, margin)

    drawn = comparable and comparison.differing > 0
    titles = [f"frame {frame}: {name}" for name in names]
    titles += ["difference in this frame", "largest over all frames"] if drawn else ["difference"]
    lefts = [margin + i * (panel_width + gutter) for i in range(4)]
    for left, title in zip(lefts, titles):
        sheet.text((left, top), title, 20, INK, panel_width)
    top += 32
    boxes = [(left, top, left + panel_width, top + panel_height) for left in lefts]
    _paste(sheet, boxes[0], a, frame)
    if b is None:
        sheet.note(boxes[1], [f"{names[1]} did not run"], AMBER)
    else:
        _paste(sheet, boxes[1], b, min(frame, b.shape[0] - 1))
    if drawn:
        for box, gap in zip(boxes[2:], _gap_maps(a, b, frame)):
            _paste_heat(sheet, box, gap, comparison.max_abs)
        _ring(sheet, boxes[2], a, comparison)
        if seams is not None:
            for box in boxes[2:]:
                _mark_overlaps(sheet, _fitted(a.shape[2], a.shape[1], box), a, seams)
        _heat_scale(sheet, (boxes[2][0], top + panel_height + 14, boxes[3][2]), comparison)
        top += 54
        if seams is not None:
            top += _seam_words(sheet, (margin, top + panel_height + 22, WIDTH - margin), seams)
    else:
        sheet.note((*boxes[2][:2], *boxes[3][2:]), *_no_difference(b, comparison, comparable))
    top += panel_height + 28
    for strip in strips:
        tall = 150 if any(strip.group_max) else 70
        marked = seams.shared[0] if seams is not None and strip is comparison else ()
        _strip(sheet, (margin, top, WIDTH - margin, top + tall), strip, marked)
        top += tall + 50
    return sheet.tensor(top)


def timeline_picture(events: Iterable[Mapping], *, title: str = "") -> Tensor:
    """Where a render's time went: one row a phase, one bar each time it ran, a band of GPU-busy, captures marked.

    events: of the phase log (`Timeline.events`, or the parsed lines of its file). title: what was rendered, in words.
    Time between the nodes' stays is cut out, and a load that would dwarf the render is drawn shorter; both are hatched,
    with their length below. Returns (1, 700, 1600, 3).
    """
    events = sorted(events, key=lambda event: event["t_ms"])
    ends = [event for event in events if event["event"] == "end" and event["phase"] != SEGMENT]
    ends.sort(key=phase_interval)
    sheet = _Sheet(TIMELINE_HEIGHT)
    summary = summarize(events)
    busy = [_gpu_share(event, ends) for event in ends]
    _timeline_heading(sheet, summary, title, ends, busy)
    if not ends:
        sheet.note((28, 110, WIDTH - 28, TIMELINE_HEIGHT - 28), ["no phase has ended yet"], FAINT)
        return sheet.tensor(TIMELINE_HEIGHT)

    stays = [(s["t_ms"], s["t_ms"] + s["wall_ms"]) for s in summary["segments"]]
    covered = [phase_interval(event) for event in ends]
    loads = [phase_interval(event) for event in ends if event["phase"].startswith("load.")]
    others = [phase_interval(event) for event in ends if not event["phase"].startswith("load.")]
    # On a fast CPU all phases of a small test can be shorter than the log's resolution.
    live = union([*stays, *covered]) or [(events[0]["t_ms"], events[0]["t_ms"] + 1e-3)]
    axis = _Axis(live, _uncovered(loads, others), left=250, right=WIDTH - 210)
    lanes = [*(["nodes"] if stays else []), "GPU busy", *dict.fromkeys(event["phase"] for event in ends), "unaccounted"]
    top, bottom = 136, TIMELINE_HEIGHT - 90
    lane_height = min((bottom - top) / len(lanes), 72.0)
    tops = {lane: top + i * lane_height for i, lane in enumerate(lanes)}
    bottom = top + len(lanes) * lane_height

    axis.draw(sheet, top, bottom)
    for lane in lanes:
        y = tops[lane]
        sheet.text((28, y + lane_height / 2), lane, _size(lane_height), INK, 214, anchor="lm")
        sheet.draw.line((28, y + lane_height, WIDTH - 28, y + lane_height), fill=GRID)
    _node_lane(sheet, axis, summary["segments"], tops.get("nodes", top), lane_height)
    _gpu_lane(sheet, axis, ends, busy, tops["GPU busy"], lane_height)
    for event in ends:
        _phase_bar(sheet, axis, event, tops[event["phase"]], lane_height)
    _unaccounted_lane(sheet, axis, _uncovered(stays, covered), tops["unaccounted"], lane_height)
    _lane_totals(sheet, summary, tops, lane_height)
    for event in ends:
        start, end = phase_interval(event)
        if "error" in event["attrs"]:
            _mark(sheet, axis.x(end), top, bottom, f"{event['phase']} failed: {event['attrs']['error']}")
        elif event["phase"] == "sample.capture":
            _mark(sheet, axis.x(start), top, bottom, "captured")
    _timeline_legend(sheet, set(lanes), busy, bool(axis.hatched))
    return sheet.tensor(TIMELINE_HEIGHT)


class _Sheet:
    """A Pillow image with text that is cut to its place."""

    def __init__(self, height: int):
        self.image = Image.new("RGB", (WIDTH, height), PAPER)
        self.draw = ImageDraw.Draw(self.image)

    def text(
        self, at: tuple[float, float], text: str, size: int, colour: Colour, width: float, anchor: str = "la"
    ) -> None:
        font = _font(size)
        if font.getlength(text) > width:
            while text and font.getlength(text + "...") > width:
                text = text[:-1]
            text += "..."
        self.draw.text(at, text, font=font, fill=colour, anchor=anchor)

    def paragraph(
        self, at: tuple[float, float], text: str, size: int, colour: Colour, width: float, max_lines: int
    ) -> float:
        """Text in lines of `width`; returns the height that it took."""
        font, lines, line = _font(size), [], ""
        for word in text.split():
            if line and font.getlength(f"{line} {word}") > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
        if len(lines) > max_lines:
            lines = [*lines[: max_lines - 1], " ".join(lines[max_lines - 1 :])]
        for i, line in enumerate(lines):
            self.text((at[0], at[1] + i * size * 1.3), line, size, colour, width)
        return len(lines) * size * 1.3

    def note(self, box: Box, lines: Sequence[str], colour: Colour) -> None:
        """A panel that holds words in its middle, the first line large."""
        self.draw.rectangle(box, fill=PANEL, outline=colour, width=2)
        x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2 - 15 * (len(lines) - 1)
        for line, size, ink in zip(lines, (34, 20, 20), (colour, INK, INK)):
            self.text((x, y), line, size, ink, box[2] - box[0] - 12, anchor="mm")
            y += 36 if size == 34 else 28

    def tensor(self, height: int) -> Tensor:
        pixels = np.asarray(self.image.crop((0, 0, WIDTH, height)), dtype=np.float32)
        return torch.from_numpy(pixels / 255.0).unsqueeze(0)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _size(lane_height: float) -> int:
    return int(min(max(lane_height * 0.42, 11), 18))


def _picture(frame: Tensor) -> Image.Image:
    """(H, W, C) in [0, 1] as an RGB image; what is not finite becomes magenta."""
    frame = frame.detach().float().cpu()[..., :3]
    if frame.shape[-1] == 1:
        frame = frame.expand(*frame.shape[:2], 3)
    finite = torch.isfinite(frame).all(-1, keepdim=True)
    levels = (torch.where(finite, frame, 0.0).clamp(0, 1) * 255).round()
    levels = torch.where(finite, levels, torch.tensor(NOT_FINITE, dtype=levels.dtype))
    return Image.fromarray(levels.to(torch.uint8).numpy())


def _banner(sheet: _Sheet, verdict: Verdict, margin: int) -> int:
    """The verdict; returns where the next thing may begin."""
    colour = STATUS_COLOURS[verdict.status]
    font = _font(40)
    word = verdict.status.upper()
    badge = font.getlength(word) + 40
    sheet.draw.rounded_rectangle((margin, 22, margin + badge, 82), 10, fill=colour)
    sheet.draw.text((margin + badge / 2, 52), word, font=font, fill=WHITE, anchor="mm")
    left = margin + badge + 24
    detail = verdict.words.removeprefix(f"{verdict.status}: ")
    used = sheet.paragraph((left, 24), detail, 22, INK, WIDTH - margin - left, 4)
    return int(max(82, 24 + used)) + 24


def _paste(sheet: _Sheet, box: Box, frames: Tensor, frame: int) -> None:
    sheet.draw.rectangle(box, fill=PANEL)
    if not frames.numel():
        sheet.note(box, ["no frames"], AMBER)
        return
    picture = _picture(frames[frame])
    place = _fitted(picture.width, picture.height, box)
    size = (place[2] - place[0], place[3] - place[1])
    enlarged = size[0] > picture.width
    picture = picture.resize(size, Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS)
    sheet.image.paste(picture, place[:2])


def _fitted(width: int, height: int, box: Box) -> tuple[int, int, int, int]:
    """The largest place of this aspect in the middle of the box."""
    scale = min((box[2] - box[0]) / width, (box[3] - box[1]) / height)
    w, h = max(1, int(width * scale)), max(1, int(height * scale))
    left, top = (box[0] + box[2] - w) // 2, (box[1] + box[3] - h) // 2
    return left, top, left + w, top + h


def _no_difference(b: Tensor | None, comparison: Comparison | None, comparable: bool) -> tuple[list[str], Colour]:
    """What stands in the place of the difference when there is none to draw: lines, colour."""
    if b is None:
        return ["nothing to compare"], AMBER
    if not comparable:
        return ["can't be compared", comparison.words()], RED if comparison.total else AMBER
    if comparison.bit_exact:
        return ["NO DIFFERENCE", comparison.words(), f"in {comparison.shape[0]} frames"], GREEN
    return ["no difference in value", comparison.words()], AMBER


def _gap_maps(a: Tensor, b: Tensor, frame: int) -> tuple[Tensor, Tensor]:
    """|a - b| (H, W), largest over channels: of one frame, and the largest over all frames. Inf where not finite."""
    ever = torch.zeros(a.shape[1:3], dtype=torch.float32, device=a.device)
    step = max(1, CHUNK_ELEMENTS // a[0].numel())
    for start in range(0, a.shape[0], step):
        gap = _gap(a[start : start + step], b[start : start + step])
        ever = torch.maximum(ever, gap.amax(0))
    return _gap(a[frame : frame + 1], b[frame : frame + 1])[0].cpu(), ever.cpu()


def _gap(a: Tensor, b: Tensor) -> Tensor:
    gap = (a.float() - b.to(a.device).float()).abs().amax(-1)
    return torch.nan_to_num(gap, nan=math.inf)


def _paste_heat(sheet: _Sheet, box: Box, gap: Tensor, largest: float) -> None:
    sheet.draw.rectangle(box, fill=PANEL)
    left, top, right, bottom = _fitted(gap.shape[1], gap.shape[0], box)
    width, height = right - left, bottom - top
    if width < gap.shape[1] or height < gap.shape[0]:
        # The largest, not the mean: one differing pixel must not drown.
        size = (min(height, gap.shape[0]), min(width, gap.shape[1]))
        gap = torch.nn.functional.adaptive_max_pool2d(gap[None], size)[0]
    heat = Image.fromarray(_heat(gap, largest)).resize((width, height), Image.Resampling.NEAREST)
    sheet.image.paste(heat, (left, top))


def _heat(gap: Tensor, largest: float) -> np.ndarray:
    """(H, W) differences to (H, W, 3) uint8 colours; Inf is magenta."""
    levels = gap.double().numpy()
    broken = ~np.isfinite(levels)
    share = np.where(broken, 0.0, levels) / (largest or 1.0)
    # Anything above nothing starts well off black, so that a small difference beside a large one is still seen.
    share = np.where(share > 0, 0.15 + 0.85 * np.clip(share, 0, 1), 0.0)
    stops = np.linspace(0, 1, len(HEAT))
    colours = np.stack([np.interp(share, stops, [c[i] for c in HEAT]) for i in range(3)], -1)
    colours[broken] = NOT_FINITE
    return colours.round().astype(np.uint8)


def _ring(sheet: _Sheet, box: Box, a: Tensor, comparison: Comparison) -> None:
    """A ring around the largest difference."""
    _, y, x, _ = comparison.largest.index
    left, top, right, bottom = _fitted(a.shape[2], a.shape[1], box)
    cx = left + (x + 0.5) * (right - left) / a.shape[2]
    cy = top + (y + 0.5) * (bottom - top) / a.shape[1]
    sheet.draw.ellipse((cx - 13, cy - 13, cx + 13, cy + 13), outline=(0, 220, 255), width=3)


def _mark_overlaps(sheet: _Sheet, place: tuple[int, int, int, int], a: Tensor, seams: SeamFindings) -> None:
    """Bars outside the picture's edges beside rows and columns in which tiles overlap, and dots along their borders."""
    left, top, right, bottom = place
    across, down = (right - left) / a.shape[2], (bottom - top) / a.shape[1]
    for first, last in seams.shared[2]:
        x0, x1 = left + first * across, left + last * across
        for y in (top - 7, bottom + 3):
            sheet.draw.rectangle((x0, y, x1 - 1, y + 4), fill=OVERLAP)
        for x in (x0, x1 - 1):
            for y in range(top, bottom, 6):
                sheet.draw.line((x, y, x, y + 1), fill=OVERLAP)
    for first, last in seams.shared[1]:
        y0, y1 = top + first * down, top + last * down
        for x in (left - 7, right + 3):
            sheet.draw.rectangle((x, y0, x + 4, y1 - 1), fill=OVERLAP)
        for y in (y0, y1 - 1):
            for x in range(left, right, 6):
                sheet.draw.line((x, y, x + 1, y), fill=OVERLAP)


def _seam_words(sheet: _Sheet, box: tuple[float, float, float], seams: SeamFindings) -> int:
    """What was found at the seams, behind the colour of their marks; box: left, top, right. Returns the height."""
    left, top, right = box
    sheet.draw.rectangle((left, top + 2, left + 22, top + 18), fill=OVERLAP)
    words = "tiles overlap"
    sheet.text((left + 32, top), words, 18, INK, 300)
    left += 32 + _font(18).getlength(words) + 28
    colour = {True: RED, False: AMBER, None: FAINT}[seams.at_seams]
    return int(sheet.paragraph((left, top), seams.words(), 18, colour, right - left, 2)) + 14


def _heat_scale(sheet: _Sheet, box: tuple[float, float, float], comparison: Comparison) -> None:
    """The colours of the difference with their values, and how much differs; box: left, top, right."""
    left, top, right = box
    largest = comparison.max_abs
    ramp = torch.linspace(0, 1, 240)[None].expand(18, -1)
    sheet.image.paste(Image.fromarray(_heat(ramp, 1.0)), (left + 24, top))
    sheet.text((left, top + 9), "0", 18, INK, 24, anchor="lm")
    sheet.text((left + 274, top + 9), f"{largest:.3g}", 18, INK, 120, anchor="lm")
    if largest:
        words = f"= {largest / VISIBLE_STEP:.3g} of 255 levels; drawn x {1 / largest:,.4g}"
        sheet.text(
            (left + 274 + _font(18).getlength(f"{largest:.3g} "), top + 9), words, 18, FAINT, right - left - 360, "lm"
        )
    at = f"ring: {comparison.largest}"
    extra = (
        f"; {comparison.nonfinite_a + comparison.nonfinite_b:,} not finite (magenta)" if not comparison.finite else ""
    )
    sheet.text(
        (left, top + 24),
        f"{comparison.differing:,} of {comparison.total:,} values differ; {at}{extra}",
        18,
        INK,
        right - left,
    )


def _strip(sheet: _Sheet, box: Box, comparison: Comparison, marked: Sequence[Range] = ()) -> None:
    """Largest difference per group (frame, or tenth of a second) as bars from left to right. marked: groups."""
    left, top, right, bottom = box
    groups = comparison.group_max
    unit = comparison.group_axis if comparison.group_size == 1 else f"{comparison.group_size} {comparison.group_axis}s"
    differing = sum(gap > 0 for gap in groups)
    largest = max((gap for gap in groups if math.isfinite(gap)), default=0.0)
    title = f"{comparison.name}: largest difference per {unit}"
    found = f"{differing} of {len(groups)} differ" if differing else "0 everywhere"
    found += f", largest {largest:.3g}" if largest else ""
    found += ", not finite in places (magenta)" if not comparison.finite else ""
    sheet.text((left, top), title, 20, INK, 700)
    sheet.text((right, top), found, 20, RED if differing else GREEN, 800, anchor="ra")
    top += 30
    sheet.draw.rectangle((left, top, right, bottom), fill=PANEL)
    step = (right - left) / len(groups)
    for i, gap in enumerate(groups):
        x0 = left + i * step
        x1 = max(x0 + 1, x0 + step - (2 if step > 6 else 0))
        if not math.isfinite(gap):
            sheet.draw.rectangle((x0, top, x1, bottom), fill=NOT_FINITE)
        elif gap > 0:
            # At least 6 pixels: a tiny difference beside a large one must be seen.
            tall = max(6.0, (bottom - top - 6) * gap / largest)
            sheet.draw.rectangle((x0, bottom - tall, x1, bottom), fill=RED)
        else:
            sheet.draw.rectangle((x0, bottom - 3, x1, bottom), fill=GREEN)
    for first, last in marked:
        sheet.draw.rectangle((left + first * step, top - 5, left + last * step - 2, top - 1), fill=OVERLAP)
    every = _nice(len(groups) / 12, whole=True)
    for i in range(0, len(groups), int(every)):
        sheet.text((left + (i + 0.5) * step, bottom + 4), str(i), 16, FAINT, 80, anchor="ma")


def _gpu_share(event: Mapping, ends: Sequence[Mapping]) -> Share:
    """GPU-busy share of this phase.

    Measuring stretches the wall of the step that is measured, so its GPU time stands against the wall of the eager
    step timed before it (`eager_wall_ms`); eager steps, which do the same work, take their share from there.
    """
    eager = event["phase"] == "sample.step"
    if not (eager or event["phase"] == "sample.measure") or (eager and event["gpu_busy"]):
        return event["gpu_busy"], True
    for e in ends:
        if e["phase"] == "sample.measure" and e["gpu_ms"] is not None and e["attrs"].get("eager_wall_ms"):
            return min(e["gpu_ms"] / e["attrs"]["eager_wall_ms"], 1.0), False
    return None, False


def _timeline_heading(
    sheet: _Sheet, summary: Mapping, title: str, ends: Sequence[Mapping], busy: Sequence[Share]
) -> None:
    sheet.text((28, 18), title or f"render {summary['render'] or ''}", 26, INK, WIDTH - 56)
    parts = [f"wall {_time(summary['wall_ms'])}"]
    if summary["coverage"] is not None:
        parts.append(f"unaccounted {_time(summary['unaccounted_ms'])} ({1 - summary['coverage']:.1%})")
    for name, words in (("sample.step", "an eager step"), ("sample.replay", "a replay")):
        shares = [share for event, (share, _) in zip(ends, busy) if event["phase"] == name and share is not None]
        if shares:
            parts.append(f"GPU busy {sum(shares) / len(shares):.0%} in {words}")
    if not any("GPU" in part for part in parts):
        parts.append("GPU busy not measured")
    if summary["mem_peak_bytes"] is not None:
        parts.append(f"peak {summary['mem_peak_bytes'] / 2**30:.1f} GiB")
    if summary["outside_ms"] > 0:
        parts.append(f"elsewhere {_time(summary['outside_ms'])}, not counted")
    sheet.text((28, 56), "   |   ".join(parts), 20, FAINT, WIDTH - 56)


class _Axis:
    """Time to pixels. Stretches in which we did not have the machine, and long loads, are drawn shorter than true."""

    def __init__(self, live: Sequence[Interval], loads: Sequence[Interval], left: float, right: float):
        self.left, self.right = left, right
        self.start, self.end = live[0][0], live[-1][1]
        # (start, end, pixels, words) of what is not drawn to scale. A gap below 2 % costs no more room than a cut.
        cuts = [(start, end) for start, end in gaps(live) if end - start > 0.02 * length(live)]
        cut = min(34.0, 0.15 * (right - left) / max(len(cuts), 1))
        self.hatched = [(start, end, cut, f"{_time(end - start)} cut") for start, end in cuts]
        rest = length(live) - length(loads)
        if rest and length(loads) > 0.25 * rest:
            pixels = 0.15 * (right - left) / length(loads)
            self.hatched += [
                (start, end, max((end - start) * pixels, 2), f"{_time(end - start)} load") for start, end in loads
            ]
        self.hatched.sort()
        shown = self.end - self.start - sum(end - start for start, end, _, _ in self.hatched)
        self.scale = (right - left - sum(pixels for _, _, pixels, _ in self.hatched)) / shown

    def x(self, t_ms: float) -> float:
        x = self.left + (t_ms - self.start) * self.scale
        for start, end, pixels, _ in self.hatched:
            inside = min(max(t_ms, start), end) - start
            x += inside * (pixels / (end - start) - self.scale)
        return min(max(x, self.left), self.right)

    def span(self, start: float, end: float, least: float = 2.0) -> tuple[float, float]:
        """Pixels of a stretch, at least `least` wide."""
        x0, x1 = self.x(start), self.x(end)
        return (x0, x1) if x1 - x0 >= least else (min(x0, self.right - least), min(x0, self.right - least) + least)

    def draw(self, sheet: _Sheet, top: float, bottom: float) -> None:
        every = _nice((self.right - self.left) / self.scale / 9)
        last = -math.inf
        for i in range(math.ceil(self.start / every), math.floor(self.end / every) + 1):
            t = i * every
            if any(start <= t < end for start, end, _, _ in self.hatched):
                continue
            x = self.x(t)
            sheet.draw.line((x, top, x, bottom), fill=GRID)
            if x - last > 70:
                sheet.text((x, bottom + 6), _tick(t, every), 16, FAINT, 120, anchor="ma")
                last = x
        last = -math.inf
        for start, _, pixels, words in self.hatched:
            x = self.x(start)
            _hatch(sheet, (x, top, x + pixels, bottom))
            if x + pixels / 2 - last > 90:
                sheet.text((x + pixels / 2, bottom + 26), words, 16, FAINT, 120, anchor="ma")
                last = x + pixels / 2


def _hatch(sheet: _Sheet, box: Box) -> None:
    left, top, right, bottom = box
    sheet.draw.rectangle(box, fill=PANEL)
    for y in np.arange(top + 8, bottom, 12):
        sheet.draw.line((left + 2, y, right - 2, y - 7), fill=(206, 208, 212))


def _mark(sheet: _Sheet, x: float, top: float, bottom: float, words: str) -> None:
    """A dashed line through all lanes with a word on top."""
    for y in range(int(top) - 6, int(bottom), 10):
        sheet.draw.line((x, y, x, y + 5), fill=RED, width=2)
    sheet.draw.polygon(((x - 7, top - 20), (x + 7, top - 20), (x, top - 8)), fill=RED)
    room = WIDTH - 28 - x
    at_left = room < _font(18).getlength(words) + 14
    sheet.text((x - 14 if at_left else x + 14, top - 16), words, 18, RED, 600, anchor="rm" if at_left else "lm")


def _node_lane(sheet: _Sheet, axis: _Axis, segments: Sequence[Mapping], top: float, height: float) -> None:
    for segment in segments:
        x0, x1 = axis.span(segment["t_ms"], segment["t_ms"] + segment["wall_ms"])
        sheet.draw.rectangle((x0, top + 5, x1, top + height - 5), fill=(214, 220, 230), outline=(160, 170, 186))
        if x1 - x0 > 60:
            sheet.text(((x0 + x1) / 2, top + height / 2), segment["name"], _size(height), INK, x1 - x0 - 8, anchor="mm")


def _gpu_lane(
    sheet: _Sheet, axis: _Axis, ends: Sequence[Mapping], busy: Sequence[Share], top: float, height: float
) -> None:
    """Filled from below by the busy share of each stretch, lighter where it comes from the measured step, hatched where
    nobody measured. Neighbours of one phase share a label."""
    low, high = top + height - 4, top + 4
    labels: list[tuple[str, float, float, list[float]]] = []
    for event, (share, own) in sorted(zip(ends, busy), key=lambda pair: pair[1][0] is not None):
        x0, x1 = axis.span(*phase_interval(event))
        sheet.draw.rectangle((x0, high, x1, low), fill=PANEL)
        if share is None:
            for x in np.arange(x0, x1 - 4, 9):
                sheet.draw.line((x, low, x + 4, high), fill=(212, 214, 218))
            continue
        colour = GPU_COLOUR if own else GPU_INFERRED
        sheet.draw.rectangle((x0, low - (low - high) * min(share, 1.0), x1, low), fill=colour)
        if labels and labels[-1][0] == event["phase"] and x0 - labels[-1][2] < 3:
            labels[-1] = (event["phase"], labels[-1][1], x1, [*labels[-1][3], share])
        else:
            labels.append((event["phase"], x0, x1, [share]))
    for _, x0, x1, shares in labels:
        if x1 - x0 > 40:
            words = f"{sum(shares) / len(shares):.0%}"
            sheet.text(((x0 + x1) / 2, (low + high) / 2), words, _size(height), INK, x1 - x0, anchor="mm")


def _unaccounted_lane(sheet: _Sheet, axis: _Axis, free: Sequence[Interval], top: float, height: float) -> None:
    """Each column of pixels as strong as the share of it that no phase covers: a thousand short gaps are no solid
    band."""
    share = np.zeros(WIDTH + 1)
    for start, end in free:
        x0, x1 = axis.x(start), axis.x(end)
        columns = np.arange(int(x0), math.ceil(x1))
        share[columns] += np.minimum(x1, columns + 1) - np.maximum(x0, columns)
    for x in np.flatnonzero(share):
        strength = min(share[x], 1.0)
        colour = tuple(round(p + (u - p) * strength) for p, u in zip(PAPER, UNACCOUNTED))
        sheet.draw.line((x, top + 4, x, top + height - 4), fill=colour)


def _phase_bar(sheet: _Sheet, axis: _Axis, event: Mapping, top: float, height: float) -> None:
    x0, x1 = axis.span(*phase_interval(event))
    colour = _colour(event["phase"])
    # Neighbouring steps must stay apart.
    sheet.draw.rectangle((x0, top + 4, x1 - (3 if x1 - x0 > 8 else 0), top + height - 4), fill=colour)
    step = event["attrs"].get("step")
    if "error" in event["attrs"]:
        sheet.draw.rectangle((x0, top + 2, x1, top + height - 2), outline=RED, width=3)
    elif step is not None and x1 - x0 > 18:  # counted from 1, as in the progress bar
        sheet.text(((x0 + x1) / 2, top + height / 2), str(step + 1), _size(height), WHITE, x1 - x0, anchor="mm")


def _lane_totals(sheet: _Sheet, summary: Mapping, tops: Mapping[str, float], height: float) -> None:
    right = WIDTH - 28
    wall = summary["wall_ms"] or 1.0
    rows = {name: (phase["wall_ms"], phase["count"]) for name, phase in summary["phases"].items()}
    rows["unaccounted"] = (summary["unaccounted_ms"], 1)
    for lane, (wall_ms, count) in rows.items():
        y = tops[lane] + height / 2
        times = f"{count} x " if count > 1 else ""
        sheet.text((right - 52, y), f"{times}{_time(wall_ms / count)}", _size(height), INK, 130, anchor="rm")
        share = f"{wall_ms / wall:.0%}" if wall_ms >= 0.01 * wall or not wall_ms else "<1%"
        sheet.text((right, y), share, _size(height), FAINT, 50, anchor="rm")


def _timeline_legend(sheet: _Sheet, lanes: set[str], busy: Sequence[Share], hatched: bool) -> None:
    """What the colours mean, of those that are in the picture."""
    x, y = 28.0, TIMELINE_HEIGHT - 24
    named = {"sample.step": "eager step", "sample.replay": "graph replay", "sample.capture": "capture"}
    entries: list[tuple[Colour | None, str]] = [(_colour(phase), named[phase]) for phase in named if phase in lanes]
    if any(share is not None and own for share, own in busy):
        entries.append((GPU_COLOUR, "GPU busy"))
    if any(share is not None and not own for share, own in busy):
        entries.append((GPU_INFERRED, "GPU busy, from the measured step"))
    if any(share is None for share, _ in busy):
        entries.append((None, "GPU not measured"))
    entries.append((UNACCOUNTED, "unaccounted: no phase ran"))
    for colour, words in entries:
        box = (x, y - 8, x + 22, y + 8)
        sheet.draw.rectangle(box, fill=colour or PANEL)
        if colour is None:
            for at in range(2, 20, 6):
                sheet.draw.line((x + at, y + 7, x + at + 3, y - 7), fill=FAINT)
        sheet.text((x + 30, y), words, 16, INK, 260, anchor="lm")
        x += 30 + _font(16).getlength(words) + 26
    if hatched:
        _hatch(sheet, (x, y - 9, x + 22, y + 9))
        sheet.text((x + 30, y), "not to scale", 16, INK, 260, anchor="lm")


def _uncovered(stays: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """The stretches of `stays` that `covered` leaves free."""
    found, taken = [], union(covered)
    for start, end in union(stays):
        edge = start
        for a, b in taken:
            if a > edge and a < end and b > start:
                found.append((edge, a))
            if b > edge and a < end:
                edge = max(edge, b)
        if edge < end:
            found.append((edge, end))
    return found


def _colour(phase: str) -> Colour:
    return PHASE_COLOURS.get(phase) or PHASE_COLOURS.get(phase.split(".", maxsplit=1)[0], FAINT)


def _time(ms: float) -> str:
    if ms >= 60_000:
        return f"{int(ms // 60_000)} min {ms % 60_000 / 1e3:.0f} s"
    if ms >= 1000:
        return f"{ms / 1e3:.2f} s"
    return f"{ms:.0f} ms" if ms >= 100 else f"{ms:.2g} ms" if ms >= 0.01 else "0 ms"


def _tick(ms: float, every: float) -> str:
    if every >= 1000:
        return f"{ms / 1e3:.0f} s"
    return f"{ms / 1e3:.1f} s" if every >= 100 else f"{ms:g} ms"


def _nice(value: float, whole: bool = False) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    value = max(value, 1.0 if whole else 1e-3)
    power = 10.0 ** math.floor(math.log10(value))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= value * 0.999)
