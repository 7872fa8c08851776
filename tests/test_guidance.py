"""Guided loops against the loop written out naively: passes, skipped steps, kinds of steps and what is refused or
noted."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_sampling import LAYERS, key, naive_loop, prepared, random, sampled, text, tiny_model, tiny_request

from ltx_runtime import sampler
from ltx_runtime.errors import RequestError
from ltx_runtime.guidance import PRESETS, Guidance, GuidanceSpec, resolve_guidance
from ltx_runtime.memory import sampling_bytes
from ltx_runtime.patchify import patchify_audio, patchify_video
from ltx_runtime.steps import denoise_step
from ltx_runtime.tensor_tree import map_tensors
from ltx_runtime.transformer import LTXTransformer

TOLERANCE = 2e-5
STG = {"stg_scale": 1.0, "stg_blocks": (1,)}
SPECS = {
    "cfg": (GuidanceSpec(3.0), GuidanceSpec(5.0)),
    "cfg of the video alone": (GuidanceSpec(3.0), GuidanceSpec()),
    "stg of the audio alone": (GuidanceSpec(), GuidanceSpec(**STG)),
    "stg in other blocks": (
        GuidanceSpec(stg_scale=0.5, stg_blocks=(0, 2)),
        GuidanceSpec(stg_scale=2.0, stg_blocks=(1,)),
    ),
    "modality": (GuidanceSpec(modality_scale=3.0), GuidanceSpec()),
    "all, rescaled": (
        GuidanceSpec(3.0, modality_scale=3.0, rescale=0.7, **STG),
        GuidanceSpec(7.0, modality_scale=2.0, rescale=1.0, **STG),
    ),
    "video skips": (GuidanceSpec(3.0, skip_step=1), GuidanceSpec(2.0)),
    "both skip together": (GuidanceSpec(3.0, skip_step=1), GuidanceSpec(2.0, skip_step=1)),
    "both skip apart": (GuidanceSpec(3.0, skip_step=1, **STG), GuidanceSpec(2.0, rescale=0.5, skip_step=2)),
    "skips without guidance": (GuidanceSpec(), GuidanceSpec(skip_step=1)),
}


def calls_of(request):
    """(video tokens, audio tokens) shapes of every model call of a render, and its result."""
    calls = []
    hook = tiny_model().module.register_forward_pre_hook(
        lambda module, args: calls.append(tuple(None if t is None else tuple(t.shape) for t in args[:2]))
    )
    try:
        return calls, sampled(request)
    finally:
        hook.remove()


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batching", ["batched", "sequential"])
@pytest.mark.parametrize("name", SPECS)
def test_a_guided_loop_is_the_naive_loop(name, batching):
    request = tiny_request(guidance=Guidance(*SPECS[name], batching))
    start = dict(zip(("video", "audio"), prepared(request).start))
    expected = naive_loop(request, start)
    result = sampled(request)
    assert (patchify_video(result.video) - expected["video"]).abs().max() <= TOLERANCE
    assert (patchify_audio(result.audio) - expected["audio"]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("batching", ["batched", "sequential"])
def test_a_batch_with_prompts_of_its_own_and_a_skipped_stream(batching):
    """Per-sample text and noise meet pass batching: samples stay with their prompt in every pass."""
    width = text(0).features.shape[2]
    guidance = Guidance(GuidanceSpec(3.0, skip_step=1, **STG), GuidanceSpec(2.0, modality_scale=2.0), batching)
    request = tiny_request(
        batch=2,
        text=dataclasses.replace(text(0), features=random(2, 5, width, seed=8)),
        negative=dataclasses.replace(text(0), features=random(2, 5, width, seed=9)),
        guidance=guidance,
    )
    expected = naive_loop(request, dict(zip(("video", "audio"), prepared(request).start)))
    result = sampled(request)
    assert (patchify_video(result.video) - expected["video"]).abs().max() <= TOLERANCE
    assert (patchify_audio(result.audio) - expected["audio"]).abs().max() <= TOLERANCE
    assert not torch.equal(result.video[0], result.video[1])


def test_neutral_guidance_is_one_pass_and_the_same_bits():
    plain, neutral = sampled(tiny_request()), sampled(tiny_request(guidance=PRESETS["distilled"]))
    assert torch.equal(plain.video, neutral.video) and torch.equal(plain.audio, neutral.audio)
    assert len(calls_of(tiny_request(guidance=Guidance()))[0]) == 4


@pytest.mark.parametrize(("preset", "passes"), [("distilled", 1), ("dev", 4), ("dev HQ", 3)])
def test_presets_run_the_passes_they_need(preset, passes):
    guidance = PRESETS[preset]
    # The dev preset perturbs block 28, which this tiny model lacks.
    specs = {
        name: dataclasses.replace(spec, stg_blocks=(1,)) if (spec := getattr(guidance, name)).stg_blocks else spec
        for name in ("video", "audio")
    }
    batched, _ = calls_of(tiny_request(guidance=dataclasses.replace(guidance, **specs, batching="batched")))
    assert batched == [((passes, 12, 16), (passes, 7, 16))] * 4
    alone, _ = calls_of(tiny_request(guidance=dataclasses.replace(guidance, **specs, batching="sequential")))
    assert alone == [((1, 12, 16), (1, 7, 16))] * 4 * passes


def test_a_step_in_which_both_streams_are_reused_runs_no_forward():
    guidance = Guidance(GuidanceSpec(skip_step=1), GuidanceSpec(skip_step=1))
    assert len(calls_of(tiny_request(guidance=guidance))[0]) == 2


def test_the_prediction_that_ends_res_2s_is_never_skipped():
    guidance = Guidance(GuidanceSpec(skip_step=2), GuidanceSpec(skip_step=2))
    request = tiny_request(guidance=guidance, sampler="res_2s", sigmas=torch.tensor([1.0, 0.5, 0.0]))
    # Two calls in the first step, none in the second, one at the end, whose index a skip of 2 would pass over.
    assert len(calls_of(request)[0]) == 2 + 0 + 1


def test_a_render_of_one_stream_is_guided_without_the_other():
    guidance = Guidance(GuidanceSpec(3.0, modality_scale=3.0, **STG), GuidanceSpec(7.0))
    request = tiny_request(audio=None, guidance=guidance)
    calls, result = calls_of(
        dataclasses.replace(request, guidance=dataclasses.replace(guidance, batching="sequential"))
    )
    assert len(calls) == 4 * 3 and any("no other stream" in note for note in result.notes)
    off = dataclasses.replace(guidance, video=dataclasses.replace(guidance.video, modality_scale=1.0))
    expected = naive_loop(dataclasses.replace(request, guidance=off), {"video": prepared(request).start[0]})
    assert (patchify_video(result.video) - expected["video"]).abs().max() <= TOLERANCE


# --- kinds of steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kinds"), [("cfg", 1), ("video skips", 2), ("both skip together", 2), ("both skip apart", 4)]
)
def test_each_structure_of_a_step_is_one_key(name, kinds):
    steps = prepared(tiny_request(guidance=Guidance(*SPECS[name], "batched")))
    keys = [key(steps, index) for index in range(4)]
    assert len(set(keys)) == len({id(constants) for constants in steps.constants}) == kinds
    for index, constants in enumerate(steps.constants):
        same = [other is constants for other in steps.constants]
        assert same == [keys[index] == other for other in keys]


def test_scales_and_prompts_are_inputs_and_passes_are_the_key():
    def first_key(spec, **changes):
        return key(prepared(tiny_request(guidance=Guidance(spec, spec, "batched"), **changes)), 0)

    base = first_key(GuidanceSpec(3.0, rescale=0.7, **STG))
    assert first_key(GuidanceSpec(4.5, rescale=0.2, stg_scale=2.0, stg_blocks=(1,)), negative=text(9)) == base
    for other in (
        GuidanceSpec(3.0, rescale=0.7, stg_scale=1.0, stg_blocks=(2,)),
        GuidanceSpec(3.0, **STG),
        GuidanceSpec(3.0, rescale=0.7),
        GuidanceSpec(3.0, rescale=0.7, modality_scale=2.0, **STG),
    ):
        assert first_key(other) != base
    one_by_one = Guidance(*[GuidanceSpec(3.0, rescale=0.7, **STG)] * 2, "sequential")
    assert key(prepared(tiny_request(guidance=one_by_one)), 0) != base


@pytest.mark.parametrize(("sampler_name", "batching"), [("euler_ancestral", "batched"), ("res_2s", "sequential")])
def test_no_kind_of_step_reads_data_on_the_host(sampler_name, batching):
    """On the meta device every read of a value raises: a step that passes there branches on no tensor."""
    guidance = Guidance(*SPECS["both skip together"], batching)
    steps = prepared(tiny_request(guidance=guidance, sampler=sampler_name, sigmas=torch.tensor([1.0, 0.5, 0.0])))
    with torch.device("meta"):
        empty = LTXTransformer(tiny_model().config)

    def on_meta(tree):
        return map_tensors(lambda name, tensor: tensor.to("meta"), tree)

    for index, constants in enumerate(steps.constants):
        inputs = steps.inputs(index, steps.start, steps.start)
        outputs = denoise_step(empty, on_meta(constants), on_meta(inputs))
        assert outputs.video.x.shape == steps.start[0].shape and outputs.audio.x.shape == steps.start[1].shape


def test_a_step_changes_none_of_its_inputs():
    steps = prepared(tiny_request(guidance=Guidance(*SPECS["all, rescaled"], "batched"), sampler="res_2s"))
    inputs = steps.inputs(0, steps.start)
    with torch.inference_mode():
        first = denoise_step(tiny_model().module, steps.constants[0], inputs)
        second = denoise_step(tiny_model().module, steps.constants[0], inputs)
    assert torch.equal(first.video.x, second.video.x) and torch.equal(first.audio.x, second.audio.x)


# --- batching -------------------------------------------------------------------------------------------------------


def test_auto_batches_when_it_fits_and_says_so(monkeypatch):
    request = tiny_request(guidance=Guidance(GuidanceSpec(3.0), GuidanceSpec(3.0)))
    calls, result = calls_of(request)
    assert len(calls) == 4 and any(
        "2 passes a step, as one batch: a batch needs about" in note for note in result.notes
    )
    monkeypatch.setattr(sampler, "device_free_bytes", lambda device: 1000)
    calls, result = calls_of(request)
    assert len(calls) == 8 and any("one after the other" in note and "are free" in note for note in result.notes)
    assert sampler.fix_batching(tiny_model(), request).guidance.batching == "sequential"


def test_the_memory_estimate_counts_the_passes_of_a_batch():
    def estimate(batching):
        request = tiny_request(guidance=Guidance(*SPECS["all, rescaled"], batching))
        return sampling_bytes(tiny_model().config, request, item_bytes=4, recorded=False)

    assert estimate("auto") == estimate("batched") == 4 * estimate("sequential")


def test_prompts_of_different_length_are_never_batched():
    guidance = Guidance(GuidanceSpec(3.0), GuidanceSpec(3.0), "batched")
    request = tiny_request(guidance=guidance, negative=text(2, tokens=8))
    calls, result = calls_of(request)
    assert len(calls) == 8 and any("different length, 5 and 8" in note for note in result.notes)
    expected = naive_loop(request, dict(zip(("video", "audio"), prepared(request).start)))
    assert (patchify_video(result.video) - expected["video"]).abs().max() <= TOLERANCE


# --- what is noted and refused --------------------------------------------------------------------------------------


OFF = GuidanceSpec()


def resolved(video=OFF, audio=OFF, streams=("video", "audio"), name="dev.safetensors"):
    return resolve_guidance(Guidance(video, audio), streams=streams, layers=LAYERS, file_name=name)


def test_guidance_of_a_distilled_file_is_allowed_with_a_note():
    _, notes = resolved(GuidanceSpec(3.0), name="ltx-2.5-22b-distilled-transformer-bf16.safetensors")
    assert "distilled" in notes[0]
    assert resolved(name="ltx-2.5-22b-distilled-transformer-bf16.safetensors")[1] == []


def test_stg_blocks_that_the_model_lacks_are_left_out_with_a_note():
    guidance, notes = resolved(GuidanceSpec(stg_scale=1.0, stg_blocks=(1, 28)))
    assert guidance.video.stg_blocks == (1,) and "block 28 is left out" in notes[0]
    guidance, notes = resolved(GuidanceSpec(stg_scale=1.0, stg_blocks=(28,)))
    assert guidance.video.stg_scale == 0 and "STG is off" in notes[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (GuidanceSpec(float("nan")), "cfg_scale=nan must be a finite number"),
        (GuidanceSpec(modality_scale=float("inf")), "modality_scale=inf must be a finite number"),
        (GuidanceSpec(rescale=1.5), "rescale=1.5 must lie between 0 and 1"),
        (GuidanceSpec(skip_step=-1), "skip_step=-1 must be 0 or more"),
        (GuidanceSpec(stg_scale=1.0), "stg_scale=1.0 needs stg_blocks"),
        (GuidanceSpec(stg_scale=1.0, stg_blocks=(-1,)), "must be 0 or more"),
    ],
)
def test_settings_without_meaning_are_refused_by_name(spec, words):
    with pytest.raises(RequestError, match=f"video guidance: .*{words}"):
        resolved(spec)
    with pytest.raises(RequestError, match="audio guidance"):
        resolved(audio=spec)


def test_cfg_without_a_negative_prompt_is_refused_before_any_work():
    with pytest.raises(RequestError, match=r"audio guidance: cfg_scale=7\.0 needs a negative prompt"):
        sampled(tiny_request(negative=None, guidance=Guidance(GuidanceSpec(), GuidanceSpec(7.0))))
    sampled(tiny_request(negative=None, guidance=Guidance(GuidanceSpec(**STG), GuidanceSpec())))


def test_an_unknown_batching_is_refused():
    with pytest.raises(RequestError, match="batching='maybe'"):
        sampled(tiny_request(guidance=Guidance(batching="maybe")))
