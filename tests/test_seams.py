"""Where tiles of a decode overlap, and whether two clips differ there or elsewhere."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ltx_runtime import seams
from ltx_runtime.checkpoint import read_header
from ltx_runtime.config import DiffusionVAEConfig
from ltx_runtime.parity import DIFFERENT, EQUAL, WITHIN_TOLERANCE
from ltx_runtime.parity_run import judge_clips
from ltx_runtime.pictures import OVERLAP, difference_picture
from ltx_runtime.seams import compare_at_seams
from ltx_runtime.tiny import write_tiny_diffusion_vae
from ltx_runtime.video_vae import TileOverlaps, Tiling
from ltx_runtime.video_vae.diffusion_grid import DecodeGrid
from ltx_runtime.video_vae.tiling import blend, completed, latent_spans

LAYOUT = TileOverlaps((6, 16, 24), (2, 1, 2), (((2, 4),), (), ((10, 14),)))
CLIP = (6, 16, 24, 3)


@pytest.fixture(scope="module")
def diffusion_grid(tmp_path_factory) -> DecodeGrid:
    header = read_header(write_tiny_diffusion_vae(tmp_path_factory.mktemp("tiny") / "vae.safetensors"))
    return DecodeGrid.of(DiffusionVAEConfig.from_header(header), (3, 1, 4))


def blended(spans) -> torch.Tensor:
    """(frames, rows, columns): True where the blend itself mixes tiles, found as the variance of their numbers."""
    numbers: dict[tuple, int] = {}

    def mean(power: int) -> torch.Tensor:
        def decode(time, row, column):
            number = numbers.setdefault((time.stop, row.stop, column.stop), len(numbers))
            size = (time.last - time.first, row.last - row.first, column.last - column.first)
            yield torch.full((1, 3, *size), float(number**power))

        return torch.cat(list(blend(*spans, decode, torch.device("cpu"))), dim=2)[0, 0]

    variance = mean(2) - mean(1) ** 2
    assert len(numbers) == len(spans[0]) * len(spans[1]) * len(spans[2]) > 1
    return variance > 0.01


def masks(layout: TileOverlaps) -> torch.Tensor:
    """True where the layout says that tiles overlap."""
    on_axis = [torch.zeros(size, dtype=torch.bool) for size in layout.size]
    for mask, ranges in zip(on_axis, layout.shared, strict=True):
        for first, last in ranges:
            mask[first:last] = True
    return on_axis[0][:, None, None] | on_axis[1][:, None] | on_axis[2]


@pytest.mark.parametrize(
    "tiling", [Tiling((2, 2, 3), (1, 1, 1)), Tiling((0, 3, 4), (0, 1, 2)), Tiling((3, 0, 0), (1, 0, 0))]
)
def test_overlaps_of_the_conv_decoder_are_where_tiles_are_blended(tiling):
    spans = latent_spans((5, 5, 7), tiling)
    layout = TileOverlaps.of(spans, [slice(0, axis[-1].last) for axis in spans])
    assert layout.size == (33, 160, 224)
    assert torch.equal(blended(spans), masks(layout))


@pytest.mark.parametrize(("cells", "size", "overlap"), [(11, 6, 4), (9, 6, 2), (8, 3, 2), (5, 9, 1), (7, 2, 3)])
def test_the_weights_of_all_tiles_add_up_to_one(cells, size, overlap):
    """Also where a short tile's two ramps meet, or more than two tiles overlap."""
    _, rows, _ = latent_spans((1, cells, 1), Tiling((0, size, 0), (0, overlap, 0)))
    total = torch.zeros(32 * cells)
    for span in completed(rows):
        total[span.positions] += span.weights
    assert torch.allclose(total, torch.ones(32 * cells))


def test_overlaps_of_the_diffusion_decoder_are_cut_to_the_content(diffusion_grid):
    grid = diffusion_grid
    spans = grid.spans(Tiling((7, 8, 10), (4, 4, 4)))
    content = [slice(0, grid.content_frames), *grid.content]
    layout = TileOverlaps.of(spans, content)
    assert grid.height > 32, "this latent is to be padded"
    assert layout.size == (17, 32, 128) and layout.tiles == tuple(map(len, spans))
    assert torch.equal(blended(spans)[tuple(content)], masks(layout))


def test_words_name_count_and_what_is_shared():
    assert LAYOUT.words() == "4 tiles sharing 2 frames, 4 px"
    assert TileOverlaps((6, 16, 24), (1, 2, 1), ((), ((4, 9),), ())).words() == "2 tiles sharing 5 px"


def clip(seed: int = 0, frames: int = CLIP[0]) -> torch.Tensor:
    return torch.rand(frames, *CLIP[1:], generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


def differing(mask: torch.Tensor, by: float, elsewhere: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    frames = clip()
    return frames, frames + torch.where(mask, by, elsewhere)[..., None]


@pytest.mark.parametrize("frames_a_chunk", [6, 4, 1])
def test_means_and_largest_are_those_of_the_definition(monkeypatch, frames_a_chunk):
    a, b = clip(1), clip(2)
    monkeypatch.setattr(seams, "CHUNK_ELEMENTS", frames_a_chunk * a[0].numel())
    found = compare_at_seams(a, b, [LAYOUT])
    mask, gap = masks(LAYOUT), (a.double() - b.double()).abs()
    assert found.seams.share == pytest.approx(mask.double().mean().item())
    assert found.seams.mean_abs == pytest.approx(gap[mask].mean().item(), rel=1e-9)
    assert found.inside.mean_abs == pytest.approx(gap[~mask].mean().item(), rel=1e-9)
    assert found.seams.max_abs == gap[mask].max().item() and found.inside.max_abs == gap[~mask].max().item()
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_difference_at_the_seams_is_told_from_one_everywhere():
    found = compare_at_seams(*differing(masks(LAYOUT), 0.05, 0.01), [LAYOUT])
    assert found.at_seams is True and "the difference sits at the seams: mean 0.05 where tiles overlap" in found.words()
    found = compare_at_seams(*differing(masks(LAYOUT), 0.01, 0.01), [LAYOUT])
    assert found.at_seams is False and found.words().startswith("the difference does not sit at the seams")
    found = compare_at_seams(clip(), clip(), [LAYOUT])
    assert found.at_seams is None and found.worst is None and "no difference" in found.words()


def test_the_worst_overlap_is_named():
    columns = torch.zeros(CLIP[:3], dtype=torch.bool)
    columns[:, :, 10:14] = True
    found = compare_at_seams(*differing(columns, 0.05), [LAYOUT])
    assert found.worst == ("columns", (10, 14)) and found.words().endswith("most in columns 10 to 13")
    found = compare_at_seams(*differing((torch.arange(6) == 3)[:, None, None].expand(CLIP[:3]), 0.05), [LAYOUT])
    assert found.worst == ("frames", (2, 4))
    # Beside a smaller difference everywhere: means of an axis, not sums, are what is compared.
    layout = TileOverlaps((6, 16, 24), (1, 2, 2), ((), ((6, 10),), ((10, 14),)))
    assert compare_at_seams(*differing(columns, 0.05, 0.01), [layout]).worst == ("columns", (10, 14))
    rows = torch.zeros(CLIP[:3], dtype=torch.bool)
    rows[:, 6:10] = True
    assert compare_at_seams(*differing(rows, 0.05, 0.01), [layout]).worst == ("rows", (6, 10))


def test_clips_of_a_batch_have_the_same_seams():
    mask = masks(LAYOUT)
    a = torch.cat((clip(1), clip(2)))
    b = a + torch.where(torch.cat((mask, mask)), 0.05, 0.0)[..., None]
    found = compare_at_seams(a, b, [LAYOUT])
    assert found.inside.max_abs == 0 and found.seams.share == pytest.approx(mask.double().mean().item())


def test_seams_of_both_of_two_tiled_decodes_count():
    other = TileOverlaps((6, 16, 24), (1, 2, 1), ((), ((5, 8),), ()))
    found = compare_at_seams(*differing(masks(LAYOUT) | masks(other), 0.05), [LAYOUT, other])
    assert found.inside.max_abs == 0 and found.at_seams


def test_tiles_that_overlap_everywhere_leave_nothing_to_compare_with():
    layout = TileOverlaps((6, 16, 24), (2, 1, 1), (((0, 6),), (), ()))
    found = compare_at_seams(clip(1), clip(2), [layout])
    assert found.inside is None and found.at_seams is None and "everywhere" in found.words()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_left_out(value):
    a, b = clip(), clip()
    a[0, 0, 0, 0] = value
    assert compare_at_seams(a, b, [LAYOUT]).inside.max_abs == 0


def test_pictures_of_another_size_have_no_known_seams():
    small = clip()[:, :8]
    assert compare_at_seams(small, small, [LAYOUT]) is None
    assert compare_at_seams(clip()[:5], clip()[:5], [LAYOUT]) is None
    other = TileOverlaps((6, 8, 24), (1, 2, 1), ((), ((2, 4),), ()))
    assert compare_at_seams(clip(), clip(), [LAYOUT, other]) is None


WHOLE, TILED = {"seed": 7, "decode": "whole clip"}, {"seed": 7, "decode": LAYOUT.words()}
AUTO = {"requested": "auto", "mode": "eager", "decision": "auto: 90 % busy, not captured"}


@pytest.mark.parametrize("swapped", [False, True])
def test_the_tiled_arm_is_in_question_on_either_socket(swapped):
    sides = [(clip(), WHOLE, None), (clip() + torch.where(masks(LAYOUT), 0.05, 0.0)[..., None], TILED, LAYOUT)]
    clips, settings, tiles = zip(*(reversed(sides) if swapped else sides))
    outcome = judge_clips(clips, None, (AUTO, AUTO), settings, tiles, tolerance=0.0)
    words = outcome.verdict.words
    assert outcome.verdict.status == DIFFERENT and not outcome.verdict.bit_exact
    tiled = "decode 4 tiles sharing 2 frames, 4 px"
    assert words.startswith(f"different: {tiled} differs from decode whole clip in frames: ")
    assert "; the difference sits at the seams: mean 0.05 where tiles overlap" in words
    assert "mean 0.05" in words and outcome.seams.at_seams
    numbers = outcome.verdict.numbers
    assert numbers["seams"]["at_seams"] is True and numbers["seams"]["shared"]["columns"] == [[10, 14]]
    mean = torch.where(masks(LAYOUT), 0.05, 0.0).mean().item()
    assert numbers["comparisons"][0]["mean_abs"] == pytest.approx(mean, rel=1e-5)


def test_within_a_tolerance_is_not_called_equal():
    pair = differing(masks(LAYOUT), 0.05, 0.01)
    within, beyond = (
        judge_clips(pair, None, (AUTO, AUTO), (WHOLE, TILED), (None, LAYOUT), tolerance=tolerance).verdict
        for tolerance in (0.06, 0.04)
    )
    assert within.status == WITHIN_TOLERANCE and not within.bit_exact
    assert "within 0.06 of" in within.words and "bit for bit" not in within.words
    assert beyond.status == DIFFERENT


def test_tiles_that_change_nothing_are_equal_bit_for_bit_at_any_tolerance():
    for tolerance in (0.0, 0.1):
        outcome = judge_clips((clip(), clip()), None, (None, None), (WHOLE, TILED), (None, LAYOUT), tolerance=tolerance)
        assert outcome.verdict.status == EQUAL and "bit for bit" in outcome.verdict.words


def test_scaled_pictures_are_judged_without_seams():
    pair = (clip()[:, :8], clip(1)[:, :8])
    outcome = judge_clips(pair, None, (None, None), (WHOLE, TILED), (None, LAYOUT), tolerance=0.0)
    assert outcome.seams is None and "where tiles overlap is not known" in outcome.verdict.words


def test_the_picture_marks_where_tiles_overlap():
    pair = differing(masks(LAYOUT), 0.05)
    outcome = judge_clips(pair, None, (None, None), (WHOLE, TILED), (None, LAYOUT), tolerance=0.0)

    def marked(**options) -> int:
        picture = difference_picture(*pair, outcome.verdict, comparison=outcome.frames, **options)
        colour = torch.tensor(OVERLAP, dtype=torch.float32) / 255
        return int(((picture[0] - colour).abs().amax(-1) < 1e-3).sum())

    assert marked() == 0
    # Columns 10 to 13 of 24, above and below two panels, 5 pixels thick, beside the strip's and the legend's marks.
    panel = (1600 - 2 * 28 - 3 * 16) // 4
    assert marked(seams=outcome.seams) > 4 * 5 * panel * 4 / 24


@pytest.mark.parametrize(
    ("loras", "names"),
    [
        ((0.5, 1.0), ("LoRA style 0.5", "LoRA style 1.0")),
        ((None, 1.0), ("LoRA style 0.0", "LoRA style 1.0")),
    ],
)
def test_strengths_of_a_lora_name_the_arms(loras, names):
    settings = tuple(
        {"seed": 7, "loras": [] if strength is None else [{"file": "style.safetensors", "strength": strength}]}
        for strength in loras
    )
    outcome = judge_clips((clip(), clip(1)), None, (AUTO, AUTO), settings, tolerance=0.0)
    assert outcome.names == names
    assert outcome.verdict.words.endswith(f"settings that differ: LoRA style {loras[0] or 0.0} and 1.0")


def test_what_differs_inside_a_setting_is_named():
    settings = tuple({"guidance": {"video": {"cfg": cfg, "stg": 1.0}}} for cfg in (3.0, 4.0))
    outcome = judge_clips((clip(), clip(1)), None, (None, None), settings, tolerance=0.0)
    assert outcome.names == ("guidance video cfg 3.0", "guidance video cfg 4.0")
    settings = tuple({"video_vae": f"ltx-2.5-video-vae-{kind}bf16.safetensors"} for kind in ("", "conv-"))
    outcome = judge_clips((clip(), clip(1)), None, (None, None), settings, tolerance=0.0)
    assert outcome.names == ("video_vae ltx-2.5-video-vae-bf16", "video_vae ltx-2.5-video-vae-conv-bf16")
