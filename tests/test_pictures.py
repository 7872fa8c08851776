"""The pictures are read back pixel by pixel: their colours carry the findings."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ltx_runtime import pictures
from ltx_runtime.parity import Arm, Trial, compare_frames, compare_waveforms, frame_range, judge
from ltx_runtime.pictures import PHASE_COLOURS, difference_picture, timeline_picture
from ltx_runtime.timing import Timeline


def clip(frames=5, height=64, width=96) -> torch.Tensor:
    return 0.05 + 0.9 * torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(0))


def verdict_of(a, b):
    return judge(Arm("B", "A", (Trial("seed 1", (compare_frames(a, b),), (frame_range(a),)),)))


def picture_of(a, b, **options) -> np.ndarray:
    return levels(difference_picture(a, b, verdict_of(a, b), **options))


def levels(image: torch.Tensor) -> np.ndarray:
    """IMAGE to (H, W, 3) uint8, after checking that it is an IMAGE."""
    assert image.dtype == torch.float32 and image.dim() == 4 and image.shape[0] == 1 and image.shape[3] == 3
    assert float(image.min()) >= 0 and float(image.max()) <= 1
    return (image[0] * 255).round().to(torch.uint8).numpy()


def where(picture: np.ndarray, colour) -> np.ndarray:
    """(H, W) mask of the pixels of exactly this colour."""
    return (picture == np.array(colour, dtype=np.uint8)).all(-1)


def heat_box(picture: np.ndarray) -> tuple[int, int, int, int]:
    """top, left, bottom, right of the two difference panels: the rows and columns that are mostly black there."""
    black = where(picture, (0, 0, 0))
    rows = np.where(black.sum(1) > 100)[0]
    columns = np.where(black[rows].sum(0) > 0.5 * len(rows))[0]
    return rows.min(), columns.min(), rows.max() + 1, columns.max() + 1


# ---------------------------------------------------------------------------------------------------------- difference


def test_equal_clips_are_green_and_have_nothing_red():
    picture = picture_of(clip(), clip())
    assert where(picture, pictures.GREEN).sum() > 5000 and not where(picture, pictures.RED).any()


def test_one_differing_pixel_of_a_large_frame_stays_visible_and_is_ringed():
    a = clip(2, 768, 1024)
    b = a.clone()
    b[1, 700, 1000, 2] += 1e-4
    picture = picture_of(a, b)
    top, left, bottom, right = heat_box(picture)
    panels = picture[top:bottom, left:right]
    assert where(panels, pictures.HEAT[-1]).sum() == 2, "the pixel in this frame's panel and in the one over all frames"
    y, x = np.argwhere(where(panels, (0, 220, 255))).mean(0)
    panel_width = (right - left - 16) / 2
    assert x == pytest.approx(1000.5 / 1024 * panel_width, abs=3)
    assert y == pytest.approx(700.5 / 768 * (bottom - top), abs=3)


def test_a_small_difference_beside_a_large_one_is_not_black():
    a = clip(3)
    b = a.clone()
    b[2, 5, 5, 0] += 0.5
    b[2, 40, 60, 0] += 1e-6
    picture = picture_of(a, b)
    top, left, bottom, right = heat_box(picture)
    panels = picture[top:bottom, left:right]
    width = (right - left - 16) / 2
    pixel = panels[round((40.5 / 64) * (bottom - top)), round((60.5 / 96) * width)]
    assert pixel.sum() > 20


def test_the_strip_shows_which_frames_differ():
    a = clip(5)
    b = a.clone()
    b[3] += 0.001
    picture = picture_of(a, b)
    strip = where(picture[-170:], pictures.RED).any(0)
    columns = np.where(strip)[0]
    inner = (28, 1600 - 28)
    frame_width = (inner[1] - inner[0]) / 5
    assert columns.min() == pytest.approx(inner[0] + 3 * frame_width, abs=2)
    assert columns.max() == pytest.approx(inner[0] + 4 * frame_width, abs=3)


def test_values_that_are_not_finite_are_magenta():
    a = clip()
    b = a.clone()
    b[1, 10, 10, 0] = math.nan
    assert where(picture_of(a, b), pictures.NOT_FINITE).sum() > 100
    assert not where(picture_of(a, a), pictures.NOT_FINITE).any()


def test_a_waveform_adds_a_strip():
    sound = torch.zeros(1, 2, 9600)
    other = sound.clone()
    other[0, 0, 9000] = 0.5
    with_sound = picture_of(clip(), clip(), waveform=compare_waveforms(sound, other))
    assert with_sound.shape[0] > picture_of(clip(), clip()).shape[0]
    assert where(with_sound, pictures.RED).any()


@pytest.mark.parametrize("shape", [(1, 64, 96), (9, 256, 32), (2, 16, 512)])
def test_any_clip_shape_can_be_drawn(shape):
    a = clip(*shape)
    assert picture_of(a, a.flip(1)).shape[1] == 1600


def test_shapes_that_differ_and_an_arm_that_did_not_run_can_be_drawn():
    verdict = judge(Arm("graphed", "eager", not_run="no CUDA"))
    image = levels(difference_picture(clip(), None, verdict, names=("eager", "graphed")))
    assert where(image, pictures.AMBER).sum() > 5000 and not where(image, pictures.GREEN).any()
    assert where(picture_of(clip(5), clip(4)), pictures.RED).sum() > 5000


# ------------------------------------------------------------------------------------------------------------- timeline


def phase(phase_name, start, wall, gpu=None, **attrs) -> list[dict]:
    """The begin and end lines of a phase, with the fields that design.md section 5 names."""
    begin = {"render": "r", "t_ms": start, "phase": phase_name, "event": "begin", "attrs": attrs}
    end = begin | {
        "event": "end",
        "t_ms": start + wall,
        "wall_ms": wall,
        "gpu_ms": gpu,
        "gpu_busy": gpu / wall if gpu else None,
    }
    return [
        begin,
        end
        | {
            "gpu_method": "cupti" if gpu else None,
            "stream_ms": None,
            "cpu_ms": wall,
            "mem_peak_bytes": None,
            "nvml": None,
        },
    ]


def render(steps=4, step_ms=100.0) -> list[dict]:
    events = phase("segment", 0, 50 + steps * step_ms + 40, name="LTXGraphSampler")
    events += phase("prepare.constants", 0, 50)
    for i in range(steps):
        events += phase("sample.step", 50 + i * step_ms, step_ms, step=i)
    return events + phase("transfer.to_host", 50 + steps * step_ms, 40)


def bars(picture: np.ndarray, name: str) -> list[tuple[int, int]]:
    """(first, last) column of each bar of a phase, read off the row with most of its colour above the legend."""
    mask = where(picture[:-60], PHASE_COLOURS[name])
    # Digits stand in the middle of a bar: its upper edge is whole.
    row = mask[np.where(mask.any(1))[0][0] + 2]
    edges = np.diff(np.concatenate(([0], row.astype(int), [0])))
    return list(zip(np.where(edges == 1)[0], np.where(edges == -1)[0] - 1))


def test_every_step_has_its_bar_and_bars_are_to_scale():
    picture = levels(timeline_picture(render(4)))
    assert picture.shape == (700, 1600, 3)
    steps = bars(picture, "sample.step")
    assert len(steps) == 4
    widths = [end - start for start, end in steps]
    assert max(widths) - min(widths) <= 1
    ((start, end),) = [(s, e) for s, e in bars(picture, "prepare")]
    assert (end - start + 3) / (widths[0] + 3) == pytest.approx(0.5, abs=0.02)
    assert end < steps[0][0]


def test_a_capture_is_marked_through_all_lanes_and_replays_have_their_own_colour():
    assert not where(levels(timeline_picture(render())), pictures.RED).any()
    events = render(2) + phase("sample.capture", 300, 200, step=2) + phase("sample.replay", 500, 60, 57.0, step=3)
    picture = levels(timeline_picture(events))
    assert len(bars(picture, "sample.capture")) == len(bars(picture, "sample.replay")) == 1
    column = bars(picture, "sample.capture")[0][0]
    assert where(picture[:, column - 1 : column + 2], pictures.RED).any(1).sum() > 150


def gpu_height(picture: np.ndarray, colour, columns) -> int:
    return int(where(picture[:-60, columns[0] + 3 : columns[1] - 3], colour).any(1).sum())


def test_the_gpu_band_is_as_high_as_the_gpu_was_busy():
    events = (
        render(1) + phase("sample.replay", 190, 100, 100.0, step=1) + phase("sample.replay", 290, 100, 50.0, step=2)
    )
    picture = levels(timeline_picture(events))
    full, half = (gpu_height(picture, pictures.GPU_COLOUR, columns) for columns in bars(picture, "sample.replay"))
    assert full > 20 and half / full == pytest.approx(0.5, abs=0.05)
    assert gpu_height(picture, pictures.GPU_COLOUR, bars(picture, "sample.step")[0]) == 0


def test_eager_steps_take_their_share_from_the_measured_step_whose_own_wall_is_stretched():
    events = render(2, 100.0) + phase("sample.measure", 300, 400, 80.0, step=2, eager_wall_ms=100.0)
    events += phase("sample.replay", 700, 100, 100.0, step=3)
    picture = levels(timeline_picture(events))
    whole = gpu_height(picture, pictures.GPU_COLOUR, bars(picture, "sample.replay")[0])
    for name in ("sample.step", "sample.measure"):
        inferred = gpu_height(picture, pictures.GPU_INFERRED, bars(picture, name)[0])
        assert inferred / whole == pytest.approx(0.8, abs=0.05)


def test_time_of_other_nodes_is_cut_out_and_a_long_load_does_not_dwarf_the_render():
    alone = bars(levels(timeline_picture(render())), "sample.step")[0]
    later = phase("segment", 100_000, 60, name="LTXGraphVideoDecode") + phase(
        "decode.video.chunk", 100_000, 60, chunk=0
    )
    far = bars(levels(timeline_picture(render() + later)), "sample.step")[0]
    loaded = bars(levels(timeline_picture(phase("load.read", -40_000, 40_000) + render())), "sample.step")[0]
    for bar in (far, loaded):
        assert bar[1] - bar[0] > 0.7 * (alone[1] - alone[0])


def test_many_stays_and_stays_without_length_can_be_drawn():
    events = [e for i in range(200) for e in phase("sample.step", 1000 * i, 10, step=0)]
    drawn = bars(levels(timeline_picture(events)), "sample.step")
    assert drawn[0][0] == 250 and 1380 < drawn[-1][1] <= 1390
    assert levels(timeline_picture(phase("sample.step", 5, 0.0, step=0))).shape == (700, 1600, 3)


def test_unaccounted_time_is_drawn_where_it_is():
    gapless = levels(timeline_picture(render()))[:-60]
    assert not where(gapless, pictures.UNACCOUNTED).any()
    events = [e for e in render() if e["attrs"].get("step") != 2]
    picture = levels(timeline_picture(events))
    before, after = bars(picture, "sample.step")[1], bars(picture, "sample.step")[2]
    columns = np.where(where(picture[:-60], pictures.UNACCOUNTED).any(0))[0]
    assert before[1] < columns.min() < before[1] + 8 and columns.max() == pytest.approx(after[0], abs=2)


def test_a_thousand_short_gaps_are_as_faint_as_they_are_together():
    """1 % between the steps, each gap far below a pixel."""
    events = phase("segment", 0, 1000 * 50, name="LTXGraphSampler")
    events += [e for i in range(1000) for e in phase("sample.step", 50 * i, 49.5, step=i)]
    picture = levels(timeline_picture(events))[:-60]
    assert not where(picture, pictures.UNACCOUNTED).any()
    longer = levels(timeline_picture(events + phase("segment", 50_000, 5000, name="LTXGraphVideoDecode")))[:-60]
    columns = np.where(where(longer, pictures.UNACCOUNTED).any(0))[0]
    assert len(columns) == pytest.approx((1390 - 250) / 11, abs=3)


def test_a_failed_phase_is_marked():
    events = render(2) + phase("sample.step", 300, 30, step=2, error="RuntimeError")
    assert where(levels(timeline_picture(events)), pictures.RED).any()


def test_a_real_timeline_can_be_drawn_while_it_runs():
    timeline = Timeline(None)
    assert levels(timeline_picture(timeline.events)).shape == (700, 1600, 3)
    with timeline.segment("LTXGraphSampler"):
        for step in range(3):
            with timeline.phase("sample.step", step=step):
                sum(range(20_000))
        running = levels(timeline_picture(timeline.events, title="running"))
    assert len(bars(running, "sample.step")) == 3
