"""Comparison, range, digest, first differing stage, and the verdict that a person reads."""

from __future__ import annotations

import json
import math

import pytest
import torch

from ltx_runtime import parity
from ltx_runtime.errors import RequestError
from ltx_runtime.parity import (
    Arm,
    Trial,
    compare,
    compare_digests,
    compare_frames,
    compare_latents,
    compare_waveforms,
    digest,
    first_differing_stage,
    frame_range,
    judge,
    waveform_range,
)


@pytest.fixture(params=[None, 50], ids=["one chunk", "tiny chunks"])
def chunks(request, monkeypatch):
    """Every comparison must give the same answer however the tensors are cut."""
    if request.param:
        monkeypatch.setattr(parity, "CHUNK_ELEMENTS", request.param)
        monkeypatch.setattr(parity, "CPU_DIGEST_ELEMENTS", request.param)


def clip(frames: int = 5, seed: int = 0) -> torch.Tensor:
    """(frames, 6, 8, 3) in (0.05, 0.95), every frame different."""
    return 0.05 + 0.9 * torch.rand(frames, 6, 8, 3, generator=torch.Generator().manual_seed(seed))


def brute_force(a: torch.Tensor, b: torch.Tensor) -> dict:
    """The same numbers by a plain loop in memory order."""
    differing, largest, first, place, per_frame = 0, 0.0, None, None, [0.0] * a.shape[0]
    for index in torch.cartesian_prod(*(torch.arange(n) for n in a.shape)).tolist():
        gap = abs(float(a[tuple(index)]) - float(b[tuple(index)]))
        if gap:
            differing += 1
            first = first or tuple(index)
            per_frame[index[0]] = max(per_frame[index[0]], gap)
            if gap > largest:
                largest, place = gap, tuple(index)
    return {"differing": differing, "largest": largest, "first": first, "place": place, "per_frame": per_frame}


# ---------------------------------------------------------------------------------------------------------- comparison


def test_numbers_and_places_agree_with_a_plain_loop(chunks):
    a = clip()
    b = a.clone()
    b[1, 2, 3, 1] += 0.01
    b[3, 5, 7, 2] -= 0.25
    b[3, 0, 0, 0] += 1e-7
    expected = brute_force(a, b)
    found = compare_frames(a, b)
    assert not found.bit_exact
    assert (found.differing, found.total) == (expected["differing"], a.numel()) and expected["differing"] == 3
    assert found.max_abs == expected["largest"]
    assert found.first.index == expected["first"] == (1, 2, 3, 1)
    assert found.largest.index == expected["place"] == (3, 5, 7, 2)
    assert list(found.group_max) == expected["per_frame"]
    assert str(found.largest) == "frame 3, y 5, x 7, channel 2"


def test_equal_tensors_are_bit_exact(chunks):
    found = compare_frames(clip(), clip())
    assert found.bit_exact and found.max_abs == 0.0 and found.differing == 0 and found.first is None
    assert found.group_max == (0.0,) * 5


def test_the_last_bit_is_seen(chunks):
    a = clip()
    b = a.clone()
    b[4, 5, 7, 2] = torch.nextafter(b[4, 5, 7, 2], torch.tensor(2.0))
    found = compare_frames(a, b)
    assert found.differing == 1 and 0 < found.max_abs < 1e-7 and found.status() == "different"


def test_the_smallest_difference_of_large_values_is_exact():
    a, b = torch.tensor([3e38]), torch.tensor([-3e38])
    assert compare(a, b, name="latent").max_abs == float(a.double() - b.double())
    subnormal = torch.tensor([1e-45])
    assert compare(subnormal, torch.zeros(1), name="latent").max_abs == float(subnormal)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_finite_is_never_equal_not_even_to_itself(chunks, value):
    a = clip()
    a[2, 1, 1, 0] = value
    found = compare_frames(a, a.clone())
    assert not found.bit_exact and (found.nonfinite_a, found.nonfinite_b, found.differing) == (1, 1, 1)
    assert found.first.index == (2, 1, 1, 0) and found.max_abs == 0.0
    assert found.status(tolerance=1.0) == "different" and "not finite" in found.words()


def test_zeros_of_different_sign_are_the_same_number_but_not_the_same_bits(chunks):
    a, b = clip(), clip()
    a[0, 0, 0, 0], b[0, 0, 0, 0] = 0.0, -0.0
    assert torch.equal(a, b)
    found = compare_frames(a, b)
    assert found.signed_zeros == 1 and found.differing == 0 and found.max_abs == 0.0
    assert not found.bit_exact and found.status() == "within tolerance" and "sign" in found.words()


def test_shapes_that_differ_are_a_difference_and_not_an_exception():
    found = compare_frames(clip(5), clip(4))
    assert found.status(1.0) == "different" and found.max_abs is None
    assert found.words() == "shapes differ: 5x6x8x3 and 4x6x8x3"


def test_same_values_in_two_dtypes_are_not_bit_exact():
    a = torch.full((2, 2, 2, 3), 0.5)
    found = compare_frames(a, a.to(torch.bfloat16))
    assert found.status() == "within tolerance" and "bfloat16" in found.words()


def test_empty_tensors_are_neither_equal_nor_different():
    none = torch.zeros(0, 2, 2, 3)
    found = compare_frames(none, none)
    assert not found.bit_exact and found.status() == found.status(1.0) == "not tested"
    assert compare_frames(none, clip()).status() == compare_frames(clip(), none).status() == "different"


def test_an_empty_stage_is_not_tested_and_named():
    nothing = compare(torch.zeros(0), torch.zeros(0), name="waveform")
    verdict = judge(Arm("graphed", "eager", (Trial("seed 1", (compare_frames(clip(), clip()), nothing)),)))
    assert verdict.words == "not tested: waveform: nothing to compare: the tensors are empty"


def test_waveform_groups_are_tenths_of_a_second_and_first_means_earliest(chunks):
    a = torch.rand(2, 2, 4800 * 2 + 100, generator=torch.Generator().manual_seed(1))
    b = a.clone()
    b[0, 0, 9650] += 0.5
    b[1, 1, 5000] += 0.25
    found = compare_waveforms(a, b)
    assert found.group_max == pytest.approx((0.0, 0.25, 0.5), abs=1e-6)
    assert found.first.as_dict() == {"batch": 1, "channel": 1, "sample": 5000}
    assert found.largest.as_dict() == {"batch": 0, "channel": 0, "sample": 9650}


def test_latents_are_grouped_by_frame_whatever_the_strides(chunks):
    a = torch.randn(2, 4, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    b = a.permute(4, 2, 0, 3, 1).contiguous().permute(2, 4, 1, 3, 0)
    assert compare_latents(a, b).bit_exact
    b[1, 2, 1, 4, 5] += 1
    found = compare_latents(a, b)
    assert found.group_axis == "frame" and [gap > 0 for gap in found.group_max] == [False, True, False]
    assert found.first.as_dict() == {"batch": 1, "channel": 2, "frame": 1, "y": 4, "x": 5}


# --------------------------------------------------------------------------------------------------------------- range


def test_a_good_clip_has_no_complaint(chunks):
    stats = frame_range(clip())
    assert stats.degenerate == "" and (stats.flat_frames, stats.alike_frames, stats.nonfinite) == (0, 0, 0)
    assert stats.minimum == float(clip().min()) and stats.maximum == float(clip().max())


@pytest.mark.parametrize("share, degenerate", [(0.04, False), (0.06, True)])
def test_saturation_is_judged_at_five_percent(chunks, share, degenerate):
    frames = clip()
    count = round(share * frames.numel())
    frames.view(-1)[:count] = torch.arange(count).remainder(2).float()
    stats = frame_range(frames)
    assert stats.saturated_share == count / frames.numel()
    assert ("saturated" in stats.degenerate) is degenerate


def test_values_near_the_ends_are_not_saturated():
    assert frame_range(clip().clamp(1e-6, 1 - 1e-6)).saturated_share == 0


def test_a_picture_of_one_colour_per_frame_is_flat_even_when_channels_and_frames_differ(chunks):
    colours = clip(5)[:, :1, :1, :]
    assert "flat" in frame_range(colours.expand(5, 6, 8, 3)).degenerate


def test_frames_alike_need_two_frames(chunks):
    still = clip(1)
    assert frame_range(still).degenerate == ""
    stats = frame_range(still.expand(5, -1, -1, -1) + torch.linspace(0, 1e-3, 5)[:, None, None, None])
    assert stats.alike_frames == 4 and "alike" in stats.degenerate


def test_one_moving_frame_is_enough_to_not_be_alike(chunks):
    frames = clip(1).repeat(5, 1, 1, 1)
    frames[3] = clip(1, seed=9)[0]
    stats = frame_range(frames)
    assert stats.alike_frames == 2 and stats.degenerate == ""


def test_a_frame_with_nan_is_not_finite(chunks):
    frames = clip()
    frames[2, 0, 0, 0] = math.nan
    stats = frame_range(frames)
    assert stats.nonfinite == 1 and stats.minimum is None and "not finite" in stats.degenerate


def test_waveforms():
    tone = 0.5 * torch.sin(torch.arange(9600) / 10).view(1, 1, -1)
    assert waveform_range(tone).degenerate == ""
    assert "silent" in waveform_range(torch.zeros(1, 2, 100)).degenerate
    assert "clipped" in waveform_range((4 * tone).clamp(-1, 1)).degenerate
    assert "not finite" in waveform_range(tone / 0).degenerate
    assert "empty" in waveform_range(torch.zeros(1, 2, 0)).degenerate


# -------------------------------------------------------------------------------------------------------------- digest


def splitmix(position: int, word: int) -> int:
    """Reference finaliser in plain integers (Steele, Lea, Flood 2014)."""
    x = position << 32 | word
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & parity._MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & parity._MASK64
    return x ^ x >> 31


def test_a_digest_is_the_sum_of_mixed_words(chunks):
    values = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    words = values.view(torch.int32).view(-1).tolist()
    expected = sum(splitmix(i, word & 0xFFFFFFFF) for i, word in enumerate(words)) & parity._MASK64
    assert digest(values).value & parity._MASK64 == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_every_element_and_its_place_count(chunks, dtype):
    values = torch.arange(120).remainder(7).reshape(4, 30).to(dtype)
    seen = {digest(values)}
    for i in range(4):
        changed = values.clone()
        changed[i, 7 * i] = 1 if changed[i, 7 * i] == 0 else 0
        seen.add(digest(changed))
    seen.add(digest(values.flip(0)))
    seen.add(digest(values.reshape(30, 4)))
    assert len(seen) == 7


def test_a_digest_does_not_depend_on_strides(chunks):
    values = torch.randn(5, 6, 8, 3, generator=torch.Generator().manual_seed(1))
    assert digest(values.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)) == digest(values)


def test_digests_tell_zeros_apart_and_never_equal_nan():
    assert not compare_digests(digest(torch.tensor([0.0])), digest(torch.tensor([-0.0])), name="latent").bit_exact
    nan = digest(torch.tensor([1.0, math.nan]))
    assert nan.nonfinite == 1 and not compare_digests(nan, nan, name="latent").bit_exact


# --------------------------------------------------------------------------------------------------------------- stages


def stages(**changes):
    values = {name: clip(3, seed=i) for i, name in enumerate(("context", "step 1", "step 2", "latent", "frames"))}
    return [(name, changes.get(name.replace(" ", "_"), value)) for name, value in values.items()]


def test_the_first_differing_stage_is_named():
    step, frames = clip(3, seed=2), clip(3, seed=4)
    step[1, 2, 3, 0] += 1e-3
    frames += 1e-3
    found = first_differing_stage(stages(), stages(step_2=step, frames=frames))
    assert found.name == "step 2" and found.max_abs == pytest.approx(1e-3, rel=1e-3)
    assert first_differing_stage(stages(), stages()) is None


def test_stages_may_be_digests_on_either_side():
    step = clip(3, seed=2) + 1e-3
    digested = [(name, parity.start_digest(value)) for name, value in stages(step_2=step)]
    found = first_differing_stage(stages(), digested)
    assert found.name == "step 2" and found.max_abs is None and "digests differ" in found.words()
    assert first_differing_stage(stages(step_2=step), digested) is None


def test_a_stage_that_only_one_arm_has_is_a_difference():
    assert "only the first arm" in first_differing_stage(stages(), stages()[:3]).words()
    assert "different ways" in first_differing_stage(stages(), stages()[1:]).words()


# -------------------------------------------------------------------------------------------------------------- verdict


def trial(a=None, b=None, case="seed 1", replay=1, **extra) -> Trial:
    a = clip() if a is None else a
    b = a.clone() if b is None else b
    return Trial(case, (compare_frames(a, b),), (frame_range(a), frame_range(b)), replay, **extra)


def corrupted(amount=1e-3) -> torch.Tensor:
    frames = clip()
    frames[3, 2, 1, 0] += amount
    return frames


REPEATED = Arm("eager repeated", "eager", (trial(), trial(case="seed 2")))
NO_CUDA = Arm("graphed", "eager", not_run="no CUDA")


def test_without_cuda_the_words_are_those_of_the_design():
    verdict = judge(NO_CUDA, [REPEATED])
    assert verdict.words == "not tested: no CUDA; eager repeated: equal"
    assert verdict.status == "not tested" and verdict.bit_exact is False


def test_equal_says_how_much_was_compared_and_in_which_range():
    arm = Arm("graphed", "eager", tuple(trial(case=f"seed {s}", replay=r) for r in (1, 2, 3) for s in (7, 8)))
    verdict = judge(arm, [REPEATED])
    assert verdict.status == "equal" and verdict.bit_exact
    assert verdict.words.startswith(
        "equal: graphed equals eager bit for bit on frames, 2 seeds x 3 replays (frames 0.05"
    )
    assert verdict.words.endswith("0 % at the ends of the range); eager repeated: equal")


def test_one_element_corrupted_on_replay_two_is_caught():
    trials = [trial(case=f"seed {s}", replay=r) for r in (1, 2, 3) for s in (7, 8)]
    trials[3] = trial(b=corrupted(), case="seed 8", replay=2)
    verdict = judge(Arm("graphed", "eager", tuple(trials)), [REPEATED])
    assert verdict.status == "different" and not verdict.bit_exact
    assert "frames (seed 8, replay 2): 1 of 720 values differ" in verdict.words
    assert "frame 3, y 2, x 1, channel 0" in verdict.words
    worst = verdict.numbers["worst"]
    assert (worst["arm"], worst["case"], worst["replay"]) == ("graphed", "seed 8", 2)


def test_a_tolerance_is_said_and_does_not_make_it_bit_exact():
    arm = Arm("B", "A", (trial(b=corrupted(1e-3)),))
    assert judge(arm, tolerance=1e-4).status == "different"
    verdict = judge(arm, tolerance=2e-3)
    assert verdict.status == "within tolerance" and not verdict.bit_exact and "within 0.002 of A" in verdict.words


def test_a_tolerance_is_about_outputs_and_exactness_about_every_stage():
    latent = compare_latents(torch.zeros(1, 1, 2, 2, 2), torch.ones(1, 1, 2, 2, 2))
    arm = Arm("B", "A", (Trial("seed 1", (compare_frames(clip(), clip()), latent), (frame_range(clip()),)),))
    assert judge(arm, tolerance=0.01).status == "within tolerance"
    exact = judge(arm)
    assert exact.status == "different" and "in latent" in exact.words


@pytest.mark.parametrize(
    "frames, word",
    [
        (torch.full((4, 6, 8, 3), 0.5), "flat"),
        (clip().round(), "saturated"),
        (clip(1).repeat(4, 1, 1, 1), "alike"),
    ],
)
def test_a_degenerate_picture_is_not_tested_and_never_equal(frames, word):
    verdict = judge(Arm("graphed", "eager", (trial(frames),)))
    assert verdict.status == "not tested" and word in verdict.words and not verdict.bit_exact


def test_a_difference_in_a_degenerate_picture_is_a_difference():
    frames = torch.full((4, 6, 8, 3), 0.5)
    other = frames.clone()
    other[0, 0, 0, 0] = 0.6
    assert judge(Arm("graphed", "eager", (trial(frames, other),))).status == "different"


def test_seeds_that_give_the_same_frames_are_not_tested():
    arm = Arm("graphed", "eager", (trial(case="seed 1"), trial(case="seed 2")))
    same = {"seed 1": digest(clip()), "seed 2": digest(clip())}
    verdict = judge(arm, outputs=same)
    assert verdict.words == "not tested: seed 1 and seed 2 give identical frames; graphed: equal"
    verdict = judge(NO_CUDA, [REPEATED], outputs=same)
    assert verdict.words == "not tested: no CUDA; seed 1 and seed 2 give identical frames; eager repeated: equal"
    assert judge(arm, outputs={"seed 1": digest(clip()), "seed 2": digest(clip(seed=2))}).status == "equal"


def test_eager_that_does_not_repeat_itself_is_a_difference():
    verdict = judge(NO_CUDA, [Arm("eager repeated", "eager", (trial(b=corrupted()),))])
    assert verdict.status == "different"
    assert (
        "graphed: not tested (no CUDA)" in verdict.words and "eager repeated: different (frames: 1 of" in verdict.words
    )


def test_an_arm_that_fell_back_is_not_tested_although_its_frames_are_equal():
    arm = Arm("graphed", "eager", (trial(),), not_run="capture failed: an .item() waits for the host")
    assert judge(arm).status == "not tested"


def test_the_waveform_is_judged_with_the_frames():
    sound = torch.rand(1, 2, 5000, generator=torch.Generator().manual_seed(1)) - 0.5
    other = sound.clone()
    other[0, 1, 4000] += 0.1
    good, bad = (
        Trial(
            "seed 1",
            (compare_frames(clip(), clip()), compare_waveforms(sound, b)),
            (frame_range(clip()), waveform_range(b)),
        )
        for b in (sound, other)
    )
    assert "on frames and waveform" in judge(Arm("graphed", "eager", (good,))).words
    verdict = judge(Arm("graphed", "eager", (good, bad)))
    assert verdict.status == "different" and "in waveform" in verdict.words


def test_the_first_differing_stage_is_in_words_and_numbers():
    stage = first_differing_stage(stages(), stages(step_2=clip(3, seed=7)))
    verdict = judge(Arm("graphed", "eager", (trial(b=corrupted(), first_stage=stage),)))
    assert verdict.words.endswith("first differing stage: step 2")
    assert verdict.numbers["first_stage"]["name"] == "step 2"


def test_numbers_are_plain_json_even_with_nan():
    broken = clip()
    broken[0, 0, 0, 0] = math.nan
    verdict = judge(Arm("graphed", "eager", (trial(broken), trial(clip(5), clip(4)))), [REPEATED])
    assert json.loads(json.dumps(verdict.numbers, allow_nan=False)) == verdict.numbers
    assert verdict.status == "different"


def test_misuse_is_refused():
    with pytest.raises(ValueError, match="neither a trial nor a reason"):
        Arm("graphed", "eager")


@pytest.mark.parametrize("tolerance", [-1.0, math.nan, math.inf])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(RequestError, match=f"tolerance={tolerance}: it must be 0"):
        judge(NO_CUDA, [REPEATED], tolerance=tolerance)
