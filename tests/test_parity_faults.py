"""What the parity run finds when a replay is wrong. The faults are put in by a runner that plays the graphed arm on the
CPU: it runs every step eager, says that it replayed, and spoils what it is told to."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ltx_runtime import parity_run, sampler, stages, tiny
from ltx_runtime.conditioning import audio_state, text_to_video_state
from ltx_runtime.conditioning_file import load_conditioning
from ltx_runtime.cuda_graph import note_graphs
from ltx_runtime.errors import CaptureError, RestartRequiredError
from ltx_runtime.parity import DIFFERENT, EQUAL, WITHIN_TOLERANCE, first_differing_stage
from ltx_runtime.parity_run import run_parity
from ltx_runtime.report_text import as_text, json_report
from ltx_runtime.runtime import load_transformer
from ltx_runtime.sampler import SampleRequest, TextFeatures
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape
from ltx_runtime.stages import trace_stages
from ltx_runtime.step_runner import StepRunner
from ltx_runtime.timing import Timeline
from ltx_runtime.video_vae import load_video_vae

SEEDS, REPLAYS, STEPS = 2, 3, 3


@pytest.fixture(scope="module")
def tiny_files(tmp_path_factory):
    return tiny.write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def models(tiny_files):
    transformer = load_transformer(tiny_files["transformer"], device="cpu")
    return transformer, load_video_vae(tiny_files["video_vae"], device="cpu")


@pytest.fixture(scope="module")
def request_(tiny_files):
    features, _ = load_conditioning(tiny_files["positive"])[0]
    return SampleRequest(
        video=text_to_video_state(VideoLatentShape(1, 128, 2, 1, 2), 24.0),
        audio=audio_state(AudioLatentShape(1, 8, 9, 16)),
        text=TextFeatures(features, processed=False),
        sigmas=torch.tensor([1.0, 0.75, 0.5, 0.0]),
        seed=7,
        sampler="euler_ancestral",
    )


@pytest.fixture
def graphed_arm(monkeypatch):
    """Makes the graphed arm run here. Returns a list of faults: functions of (graphed render counted from 1, step
    counted from 1, outputs) that may write into the outputs."""
    faults, renders = [], []

    class PlayedRunner(StepRunner):
        def __init__(self, *arguments, cuda_graph, **settings):
            super().__init__(*arguments, cuda_graph="off", **settings)
            self.graphed = cuda_graph == "on"
            if self.graphed:
                renders.append(self)

        def run(self, index, inputs):
            outputs = super().run(index, inputs)
            for fault in faults if self.graphed else ():
                fault(len(renders), index + 1, outputs)
            return outputs

        def __exit__(self, *error):
            super().__exit__(*error)
            if self.graphed:
                self.account |= {"requested": "on", "mode": "graph", "decision": "played by a test"}

    monkeypatch.setattr(sampler, "StepRunner", PlayedRunner)
    monkeypatch.setattr(stages, "StepRunner", PlayedRunner)
    monkeypatch.setattr(parity_run, "unavailable_reason", lambda device: None)
    return faults


def run(models, request_, **settings):
    settings = {"replays": REPLAYS, "seeds": SEEDS, "tolerance": 0.0} | settings
    return run_parity(*models, request_, timelines=lambda arm: Timeline(None), **settings)


def test_without_a_fault_the_arms_are_equal_and_every_replay_was_compared(models, request_, graphed_arm):
    verdict = run(models, request_).verdict
    assert verdict.status == EQUAL and verdict.bit_exact and "2 seeds x 3 replays" in verdict.words
    assert verdict.numbers["first_stage"] is None


def test_one_element_of_replay_two_is_found_with_its_place(models, request_, graphed_arm):
    def spoil(render, step, outputs):
        if render == SEEDS + 1 and step == STEPS:  # the second replay of the first seed
            outputs.video.x[0, 3, 17] += 0.01

    graphed_arm.append(spoil)
    outcome = run(models, request_)
    verdict = outcome.verdict
    assert verdict.status == DIFFERENT and not verdict.bit_exact
    assert "(seed 7, replay 2)" in verdict.words
    latents = [c for c in verdict.numbers["comparisons"] if c["name"] == "latent" and not c["bit_exact"]]
    assert [(c["arm"], c["case"], c["replay"], c["differing"]) for c in latents] == [("graphed", "seed 7", 2, 1)]
    # Token 3 of a 1 x 2 picture is frame 1, y 0, x 1; feature 17 is channel 17.
    assert latents[0]["first"] == {"batch": 0, "channel": 17, "frame": 1, "y": 0, "x": 1}
    assert latents[0]["max_abs"] == pytest.approx(0.01, rel=1e-3)
    assert latents[0]["group_max"][0] == 0 and latents[0]["group_max"][1] > 0
    assert "; eager repeated: equal; in the graphed arm decodes ran eager" in verdict.words
    # The fault came once, so the rerun could not show it, and the verdict says so.
    assert "first differing stage: latent (the step is not known, a rerun of both came out equal)" in verdict.words
    text = as_text(json_report(verdict, {}))
    assert "graphed, seed 7, replay 2, latent: 1 of 512 values, in 1 of 2 frames; largest 0.01 at batch 0" in text
    assert "compared: 7 x latent, 7 x audio latent, 7 x unclamped frames, 7 x frames; " in text


def test_a_fault_that_stays_is_found_at_its_step_and_stream(models, request_, graphed_arm):
    def spoil(render, step, outputs):
        if step == 2:
            outputs.audio.x[0, 3, 40] *= 1.5

    graphed_arm.append(spoil)
    verdict = run(models, request_, replays=1).verdict
    assert verdict.status == DIFFERENT
    assert "first differing stage: step 2 audio latent (found in a rerun of both)" in verdict.words
    stage = verdict.numbers["first_stage"]
    assert stage["name"] == "step 2 audio latent" and stage["how"] == "found in a rerun of both"


def test_a_recording_that_can_not_be_run_again_is_said(models, request_, graphed_arm, monkeypatch):
    graphed_arm.append(lambda render, step, outputs: outputs.video.x[0, 0, 0].add_(1) if step == 1 else None)

    def refuse(model, request, *, cuda_graph, check_cancelled):
        raise CaptureError("no CUDA graph: out of memory")

    monkeypatch.setattr(parity_run, "trace_stages", refuse)
    verdict = run(models, request_, replays=1, seeds=1).verdict
    words = "the step is not known, the graphed render could not be run again: no CUDA graph: out of memory"
    assert words in verdict.words


@pytest.mark.parametrize("name", ["trace_stages", "measure_loop_activity"])
def test_a_process_that_can_not_go_on_gives_no_verdict(models, request_, graphed_arm, monkeypatch, name):
    graphed_arm.append(lambda render, step, outputs: outputs.video.x[0, 0, 0].add_(1) if step == 1 else None)

    def broken(*_, **__):
        raise RestartRequiredError("restart ComfyUI")

    monkeypatch.setattr(parity_run, name, broken)
    with pytest.raises(RestartRequiredError):
        run(models, request_, replays=1, seeds=1, measure_residency=True)


def test_a_decoder_that_differs_is_found_without_a_rerun(models, request_, graphed_arm, monkeypatch):
    _transformer, vae = models
    real, calls = vae.decode_raw, []

    def spoiled(latent, **settings):
        clip = real(latent, **settings)
        calls.append(latent)
        if len(calls) == 2:
            clip[0, 1, 2, 3, 4] += 0.5
        return clip

    monkeypatch.setattr(vae, "decode_raw", spoiled)
    monkeypatch.setattr(parity_run, "trace_stages", lambda *_, **__: pytest.fail("the latents are equal"))
    verdict = run(models, request_, replays=1, seeds=1).verdict
    assert verdict.status == DIFFERENT and "first differing stage: unclamped frames" in verdict.words


def test_the_graphed_arm_alone_is_decoded_by_graphs(models, request_, graphed_arm, monkeypatch):
    _transformer, vae = models
    real, modes = vae.decode_raw, []

    def seen(latent, *, cuda_graph, timeline, **settings):
        modes.append(cuda_graph)
        clip = real(latent, cuda_graph="off", timeline=timeline, **settings)
        note_graphs(timeline, "decode.video.chunk", cuda_graph, eager=cuda_graph == "off")
        timeline.note("decode.video.chunk", "something else")
        return clip

    monkeypatch.setattr(vae, "decode_raw", seen)
    outcome = run(models, request_, replays=2, seeds=1)
    assert modes == ["off", "on", "on", "off"]
    noted = {arm: [f"decode.video.chunk: CUDA graph: {how}"] for arm, how in (("eager", "off"), ("graphed", "on"))}
    assert outcome.decodes == noted | {"eager repeated": noted["eager"]}
    assert outcome.verdict.status == EQUAL and "decodes ran eager" not in outcome.verdict.words


def test_a_verdict_does_not_pass_eager_decodes_off_as_graphed(models, request_, graphed_arm):
    verdict = run(models, request_, replays=1, seeds=1).verdict
    assert verdict.status == EQUAL and verdict.words.startswith("equal: graphed equals eager bit for bit on ")
    assert verdict.words.endswith(
        "; in the graphed arm decodes ran eager, in whole or in part: decode.video.chunk: CUDA graph: eager, no CUDA"
    )


def test_a_small_fault_is_within_a_tolerance_and_never_bit_exact(models, request_, graphed_arm):
    def nudge(render, step, outputs):
        if step == STEPS:
            outputs.video.x[0, 0, 0] += 1e-6

    graphed_arm.append(nudge)
    verdict = run(models, request_, replays=1, tolerance=0.01).verdict
    assert verdict.status == WITHIN_TOLERANCE and not verdict.bit_exact
    assert run(models, request_, replays=1, tolerance=0.0).verdict.status == DIFFERENT


def test_a_second_prompt_takes_turns_and_is_told_apart(models, request_, graphed_arm):
    other = TextFeatures(request_.text.features.flip(1) * 1.5, processed=False)
    outcome = run(models, request_, replays=1, seeds=3, other_text=other)
    cases = list(dict.fromkeys(c["case"] for c in outcome.verdict.numbers["comparisons"]))
    assert cases == ["seed 7", "seed 8, second prompt", "seed 9"]
    assert outcome.verdict.status == EQUAL and "3 seeds and 2 prompts x 1 replay" in outcome.verdict.words
    direct = sampler.sample(models[0], dataclasses.replace(request_, seed=8, text=other), cuda_graph="off")
    plain = sampler.sample(models[0], dataclasses.replace(request_, seed=8), cuda_graph="off")
    assert not torch.equal(direct.video, plain.video), "the second prompt must make a difference at all"


def test_a_prompt_that_stuck_in_the_recording_is_found(models, request_, graphed_arm, monkeypatch):
    """A graphed arm that renders the first prompt whatever it is asked for: only another prompt can show it."""
    real = parity_run.sample

    def stuck(model, request, *, cuda_graph, **settings):
        if cuda_graph == "on":
            request = dataclasses.replace(request, text=request_.text)
        return real(model, request, cuda_graph=cuda_graph, **settings)

    monkeypatch.setattr(parity_run, "sample", stuck)
    other = TextFeatures(request_.text.features.flip(1) * 1.5, processed=False)
    assert run(models, request_, replays=1).verdict.status == EQUAL
    verdict = run(models, request_, replays=1, other_text=other).verdict
    assert verdict.status == DIFFERENT and "(seed 8, second prompt, replay 1)" in verdict.words


def test_stages_follow_the_render(models, request_):
    traced = trace_stages(models[0], request_, cuda_graph="off")
    names = [name for name, _ in traced]
    assert names[0].startswith("context (") and names.index("start latent") > 1
    steps = [f"step {step} {stream}" for step in (1, 2, 3) for stream in ("latent", "audio latent")]
    assert names[-8:] == ["start latent", "start audio latent", *steps]
    assert first_differing_stage(traced, trace_stages(models[0], request_, cuda_graph="off")) is None


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"seed": 8}, "start latent"),
        ({"sigmas": torch.tensor([1.0, 0.75, 0.4, 0.0])}, "step 2 latent"),
        ({"video": text_to_video_state(VideoLatentShape(1, 128, 2, 1, 2), 25.0)}, "constant (forwards.0.video.rope"),
        ({"text": TextFeatures(torch.ones(1, 11, 192), processed=False)}, "context (forwards.0.video.context)"),
    ],
    ids=["seed", "sigmas", "frame rate", "prompt"],
)
def test_two_settings_part_where_they_must(models, request_, change, stage):
    traced = [trace_stages(models[0], r, cuda_graph="off") for r in (request_, dataclasses.replace(request_, **change))]
    assert first_differing_stage(*traced).name.startswith(stage)


def test_the_json_report_carries_the_stage(models, request_, graphed_arm):
    graphed_arm.append(lambda render, step, outputs: outputs.video.x[0, 0, 0].add_(1) if step == 1 else None)
    report = json_report(run(models, request_, replays=1, seeds=1).verdict, {})
    assert report["verdict"]["numbers"]["first_stage"]["name"] == "step 1 latent"
