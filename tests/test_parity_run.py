"""Verdicts over finished clips, and both arms run here on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ltx_runtime import tiny
from ltx_runtime.audio_vae import load_audio_vae
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.errors import RequestError
from ltx_runtime.parity import DIFFERENT, EQUAL, NOT_TESTED
from ltx_runtime.parity_run import judge_clips, run_parity
from ltx_runtime.report_text import as_text, json_report
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures, sample
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import load_video_vae

GRAPHED = {"requested": "on", "mode": "graph", "decision": "on"}
OFF = {"requested": "off", "mode": "eager", "decision": "off: eager"}
FELL_BACK = {"requested": "on", "mode": "eager", "decision": "eager: no CUDA", "fallback": "no CUDA"}
PARTLY = {"requested": "on", "mode": "graph", "decision": "eager: out of memory", "fallback": "out of memory"}
NOT_WORTH_IT = {"requested": "auto", "mode": "eager", "decision": "auto: 90 % busy, not captured"}


def clip(seed: int = 0) -> torch.Tensor:
    return torch.rand(3, 8, 8, 3, generator=torch.Generator().manual_seed(seed))


def changed(frames: torch.Tensor, by: float) -> torch.Tensor:
    frames = frames.clone()
    frames[1, 2, 3, 0] += by
    return frames


@pytest.mark.parametrize(
    "graphs, names",
    [
        ((OFF, GRAPHED), ("eager", "graphed")),
        ((GRAPHED, OFF), ("graphed", "eager")),
        ((None, None), ("render A", "render B")),
        ((OFF, OFF), ("eager A", "eager B")),
    ],
)
def test_equal_clips(graphs, names):
    outcome = judge_clips((clip(), clip()), None, graphs, tolerance=0.0)
    assert outcome.verdict.status == EQUAL and outcome.verdict.bit_exact
    assert outcome.names == names
    if GRAPHED in graphs:
        assert "graphed equals eager" in outcome.verdict.words


@pytest.mark.parametrize(
    "graph, reason", [(FELL_BACK, "no CUDA"), (NOT_WORTH_IT, "90 % busy"), (PARTLY, "out of memory")]
)
def test_a_render_that_ran_eager_is_no_graphed_arm(graph, reason):
    outcome = judge_clips((clip(), clip()), None, (OFF, graph), tolerance=0.0)
    assert outcome.verdict.status == NOT_TESTED and not outcome.verdict.bit_exact
    assert reason in outcome.verdict.words and outcome.verdict.words.endswith("eager repeated: equal")


def test_a_difference_is_found_whatever_ran():
    pair = (clip(), changed(clip(), 0.01))
    for graphs in ((OFF, GRAPHED), (OFF, FELL_BACK), (None, None)):
        assert judge_clips(pair, None, graphs, tolerance=0.0).verdict.status == DIFFERENT


def test_an_arm_that_fell_back_is_the_eager_one_beside_a_graphed_one():
    outcome = judge_clips((clip(), clip()), None, (FELL_BACK, GRAPHED), (SEVEN, SEVEN), tolerance=0.0)
    assert outcome.names == ("eager", "graphed") and "graphed equals eager" in outcome.verdict.words


def test_arms_on_auto_that_differ_in_nothing_are_a_repeated_eager_render():
    graphs = (NOT_WORTH_IT, NOT_WORTH_IT)
    outcome = judge_clips((clip(), clip()), None, graphs, (SEVEN, SEVEN), tolerance=0.0)
    assert outcome.verdict.status == NOT_TESTED and outcome.names == ("eager", "eager repeated")


SEVEN, ELEVEN = {"seed": 7, "steps": 8, "sigmas": [1.0, 0.0]}, {"seed": 11, "steps": 8, "sigmas": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("settings", "graphs", "names"),
    [
        ((SEVEN, ELEVEN), (OFF, OFF), ("seed 7", "seed 11")),
        ((SEVEN, ELEVEN | {"steps": 9}), (OFF, OFF), ("eager A", "eager B")),
        ((SEVEN, SEVEN | {"sigmas": [1.0, 0.5, 0.0]}), (OFF, OFF), ("eager A", "eager B")),
        ((SEVEN, ELEVEN), (OFF, GRAPHED), ("eager", "graphed")),
        ((SEVEN, ELEVEN), (NOT_WORTH_IT, NOT_WORTH_IT), ("seed 7", "seed 11")),
        ((SEVEN, ELEVEN), (FELL_BACK, FELL_BACK), ("seed 7", "seed 11")),
        ((SEVEN, ELEVEN), (OFF, PARTLY), ("eager", "partly graphed")),
        ((SEVEN, SEVEN), (OFF, OFF), ("eager A", "eager B")),
        ((SEVEN, {}), (OFF, None), ("eager A", "render B")),
    ],
    ids=["one setting", "two settings", "a list", "also graphed", "auto", "fallback", "partly", "the same", "unknown"],
)
def test_arms_of_any_kind_are_named_by_what_differs(settings, graphs, names):
    outcome = judge_clips((clip(), changed(clip(), 0.25)), None, graphs, settings, tolerance=0.0)
    assert outcome.names == names and outcome.verdict.status == DIFFERENT
    assert outcome.verdict.words.startswith(f"different: {names[1]} differs from {names[0]} in frames: 1 of 576 values")
    asked = "settings that differ: " in outcome.verdict.words
    assert asked == (settings[0] != settings[1] and bool(settings[1]))
    if names == ("seed 7", "seed 11"):
        assert outcome.verdict.words.endswith("; settings that differ: seed 7 and 11")


DECODES = ({"decode_cuda_graph": "off"}, {"decode_cuda_graph": "on"})


@pytest.mark.parametrize(
    "graphs, decodes, reason",
    [
        ((OFF, OFF), (OFF, FELL_BACK), "no CUDA"),
        ((None, None), (OFF, NOT_WORTH_IT), "90 % busy"),
        ((OFF, FELL_BACK), (OFF, FELL_BACK), "no CUDA"),
        ((OFF, FELL_BACK), (OFF, GRAPHED), "no CUDA"),
        ((OFF, GRAPHED), (OFF, PARTLY), "out of memory"),
        # one render decoded twice
        ((NOT_WORTH_IT, NOT_WORTH_IT), (OFF, FELL_BACK), "no CUDA"),
    ],
)
def test_a_decode_that_ran_eager_is_no_recorded_one(graphs, decodes, reason):
    outcome = judge_clips((clip(), clip()), None, graphs, DECODES, decode_graphs=decodes, tolerance=0.0)
    assert outcome.verdict.status == NOT_TESTED and not outcome.verdict.bit_exact
    assert reason in outcome.verdict.words and "eager repeated: equal" in outcome.verdict.words


@pytest.mark.parametrize("graphs", [(OFF, OFF), (NOT_WORTH_IT, NOT_WORTH_IT), (GRAPHED, GRAPHED), (OFF, GRAPHED)])
def test_a_decode_by_recordings_is_judged_against_an_eager_one(graphs):
    outcome = judge_clips((clip(), clip()), None, graphs, DECODES, decode_graphs=(OFF, GRAPHED), tolerance=0.0)
    assert outcome.verdict.status == EQUAL


def test_decodes_on_auto_leave_the_question_to_the_sampler():
    decodes = ({"decode_cuda_graph": "auto"},) * 2
    for ran, status in ((GRAPHED, EQUAL), (FELL_BACK, NOT_TESTED)):
        outcome = judge_clips(
            (clip(), clip()), None, (OFF, ran), decodes, decode_graphs=(NOT_WORTH_IT, NOT_WORTH_IT), tolerance=0.0
        )
        assert outcome.verdict.status == status


def test_equal_pictures_of_different_seeds_are_equal_and_the_verdict_says_what_was_asked():
    outcome = judge_clips((clip(), clip()), None, (OFF, OFF), (SEVEN, ELEVEN), tolerance=0.0)
    assert outcome.verdict.status == EQUAL and outcome.verdict.words.endswith("settings that differ: seed 7 and 11")


def test_clips_without_frames_are_not_tested():
    none = torch.zeros(0, 8, 8, 3)
    outcome = judge_clips((none, none), None, (OFF, GRAPHED), tolerance=0.0)
    assert outcome.verdict.words == "not tested: frames empty: 0x8x8x3"
    assert outcome.verdict.numbers["first_stage"] is None
    assert "compared: 1 x frames; 1 empty:" in as_text(json_report(outcome.verdict, {}))
    assert judge_clips((none, clip()), None, (OFF, GRAPHED), tolerance=0.0).verdict.status == DIFFERENT


def test_a_tolerance_that_is_none_is_refused_before_a_render(models, request_):
    with pytest.raises(RequestError, match="tolerance=nan"):
        run_parity(*models, request_, replays=1, seeds=1, tolerance=float("nan"), timelines=None)


def test_sound_is_judged_with_its_sample_rate():
    wave = torch.rand(1, 2, 9600, generator=torch.Generator().manual_seed(1)) - 0.5
    clips = (clip(), clip())
    assert judge_clips(clips, ((wave, 48000), (wave, 48000)), (None, None), tolerance=0.0).verdict.status == EQUAL
    verdict = judge_clips(clips, ((wave, 48000), (wave, 44100)), (None, None), tolerance=0.0).verdict
    assert verdict.status == DIFFERENT and "44100" in verdict.words


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    return tiny.write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def models(tiny_files):
    return load_transformer(tiny_files["transformer"], device="cpu"), load_video_vae(
        tiny_files["video_vae"], device="cpu"
    )


@pytest.fixture
def request_(tiny_files):
    features, _ = load_conditioning(tiny_files["positive"])[0]
    return SampleRequest(
        video=text_to_video_state(VideoLatentShape(1, 128, 2, 1, 2), 24.0),
        audio=audio_state(AudioLatentShape(1, 8, 9, 16)),
        text=TextFeatures(features, processed=False),
        sigmas=torch.tensor([1.0, 0.5, 0.0]),
        seed=7,
        sampler="euler_ancestral",
    )


def test_without_cuda_eager_is_repeated_and_nothing_passes(models, request_):
    timelines = {}

    def new_timeline(arm):
        timelines[arm] = Timeline(None)
        return timelines[arm]

    progress = []
    outcome = run_parity(
        *models,
        request_,
        replays=3,
        seeds=2,
        tolerance=0.0,
        timelines=new_timeline,
        on_progress=lambda *p: progress.append(p),
    )
    assert outcome.verdict.words == "not tested: the model is on cpu, not on CUDA; eager repeated: equal" or (
        not torch.cuda.is_available() and outcome.verdict.words == "not tested: no CUDA; eager repeated: equal"
    )
    assert outcome.names == ("eager", "eager repeated") and outcome.frames.bit_exact
    compared = {c["name"] for c in outcome.verdict.numbers["comparisons"]}
    assert compared == {"latent", "audio latent", "unclamped frames", "frames"}
    assert {c["case"] for c in outcome.verdict.numbers["comparisons"]} == {"seed 7", "seed 8"}
    assert list(timelines) == ["eager", "eager repeated"]
    for timeline in timelines.values():
        phases = timeline.summary()["phases"]
        assert phases["sample.step"]["count"] == 4 and phases["decode.video.chunk"]["count"] == 2
    assert all(done <= total for done, total in progress)


def test_sound_is_decoded_and_judged_when_its_vae_is_there(models, tiny_files, request_):
    audio_vae = load_audio_vae(tiny_files["audio_vae"], device="cpu")
    eager = Timeline(None)
    outcome = run_parity(
        *models,
        request_,
        replays=1,
        seeds=1,
        tolerance=0.0,
        timelines=lambda arm: eager if arm == "eager" else Timeline(None),
        audio_vae=audio_vae,
    )
    compared = [c["name"] for c in outcome.verdict.numbers["comparisons"]]
    assert compared == ["latent", "audio latent", "unclamped frames", "frames", "unclamped waveform", "waveform"]
    assert outcome.waveform.shape == (1, 2, 480 * (4 * 9 - 3)) and outcome.waveform.bit_exact
    assert {r["name"] for r in outcome.verdict.numbers["ranges"]} == {"frames", "waveform"}
    assert eager.summary()["phases"]["decode.audio"]["count"] > 0


def test_an_audio_vae_without_sound_is_refused(models, tiny_files, request_):
    with pytest.raises(RequestError, match="holds no sound"):
        run_parity(
            *models,
            dataclasses.replace(request_, audio=None),
            replays=1,
            seeds=1,
            tolerance=0.0,
            timelines=lambda arm: Timeline(None),
            audio_vae=load_audio_vae(tiny_files["audio_vae"], device="cpu"),
        )


def test_residency_on_the_cpu_is_not_measured_and_says_so(models, request_):
    outcome = run_parity(
        *models,
        request_,
        replays=1,
        seeds=1,
        tolerance=0.0,
        timelines=lambda arm: Timeline(None),
        measure_residency=True,
    )
    assert outcome.activities["eager"].words == "resident: not measured, the model is on cpu"
    assert set(outcome.activities) == {"eager", "eager repeated"}


def test_the_hosts_refusal_is_the_reason(models, request_):
    outcome = run_parity(
        *models,
        request_,
        replays=1,
        seeds=1,
        tolerance=0.0,
        timelines=lambda arm: Timeline(None),
        without_graphs="graphs forbidden",
    )
    assert outcome.verdict.words == "not tested: graphs forbidden; eager repeated: equal"


def test_a_sampler_that_the_host_forbids_graphs_is_no_graphed_arm(models, request_):
    off, refused = (
        sample(models[0], request_, cuda_graph=mode, graphs_refused="graphs forbidden").graph
        for mode in ("off", "auto")
    )
    assert off["requested"] == "off" and "fallback" not in off
    assert (refused["requested"], refused["mode"], refused["fallback"]) == ("auto", "eager", "graphs forbidden")
    verdict = judge_clips((clip(), clip()), None, (off, refused), tolerance=0.0).verdict
    assert verdict.words == "not tested: graphs forbidden; eager repeated: equal" and not verdict.bit_exact


def test_sound_alone_is_refused(models, request_):
    with pytest.raises(RequestError, match="video part"):
        run_parity(
            *models,
            dataclasses.replace(request_, video=None),
            replays=1,
            seeds=1,
            tolerance=0.0,
            timelines=lambda arm: Timeline(None),
        )
