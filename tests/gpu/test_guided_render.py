"""Guided, masked and res_2s renders on the GPU: graphed equals eager bit for bit, each kind of step one recording."""

import dataclasses

import pytest
import torch
from rendering import tiny_request

from ltx_runtime import sampler
from ltx_runtime.comfyui_conditioning import video_state_from_comfyui
from ltx_runtime.conditioning import append_keyframe, freeze, replace_frame, temporal_region
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.loop_activity import measure_loop_activity
from ltx_runtime.sampler import TextFeatures, sample
from ltx_runtime.schedules import template_stage2_sigmas
from ltx_runtime.transformer import model as transformer_model
from ltx_runtime.warm_up import warm_up

FPS = 24.0
ALL = GuidanceSpec(3.0, stg_scale=1.0, modality_scale=3.0, rescale=0.7, stg_blocks=(1,))
SKIPPING = dataclasses.replace(ALL, skip_step=1)


def request_of(**changes):
    base = tiny_request()
    noise = torch.randn(base.text.features.shape, generator=torch.Generator().manual_seed(9))
    return dataclasses.replace(base, **{"negative": TextFeatures(noise, processed=False)} | changes)


def image(request, seed=11):
    shape = request.video.shape
    size = (1, shape.channels, 1, shape.height, shape.width)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def video_of(kind):
    """The tiny request's video with something given."""
    request = request_of()
    video, given = request.video, image(request)
    if kind == "image":
        return replace_frame(video, 0, given)
    if kind == "fraction":
        return append_keyframe(replace_frame(video, 0, given, 0.7), 9, given, FPS, 0.4)
    if kind == "strength":
        return append_keyframe(video, 9, given, FPS, attention_strength=0.35)
    if kind == "region":
        return temporal_region(video, 0.2, 0.6)
    shape = video.shape
    if kind == "soft":
        values = torch.linspace(0.05, 1, shape.tokens).reshape(1, -1, 1)
        return dataclasses.replace(video, denoise_mask=values)
    assert kind == "guide"
    latent = torch.zeros(shape.as_tuple())
    rows, columns = torch.meshgrid(torch.arange(shape.height), torch.arange(shape.width), indexing="ij")
    starts = torch.stack((torch.full_like(rows, 9), rows * 32, columns * 32)).flatten(1)
    intervals = torch.stack((starts, starts + torch.tensor([[1], [32], [32]])), dim=-1)[None]
    mask = torch.ones(1, 1, shape.frames + 1, 1, 1)
    mask[:, :, -1] = 0.3
    entry = {"pre_filter_count": rows.numel(), "strength": 0.7, "pixel_mask": None, "latent_shape": [1, *rows.shape]}
    return video_state_from_comfyui(
        torch.cat((latent, given), dim=2),
        FPS,
        noise_mask=mask,
        keyframe_idxs=intervals,
        guide_attention_entries=[entry],
    )


def latents(result):
    return [part for part in (result.video, result.audio, result.appended) if part is not None]


def assert_graphed_is_eager(model, request, replays=3):
    """Eager against graphed renders with two seeds in turns."""
    requests = [request, dataclasses.replace(request, seed=request.seed + 1)]
    eager = [sample(model, each, cuda_graph="off") for each in requests]
    assert not torch.equal(eager[0].video, eager[1].video)
    for _ in range(replays):
        for each, expected in zip(requests, eager, strict=True):
            graphed = sample(model, each, cuda_graph="on")
            assert graphed.graph["mode"] == "graph", graphed.graph["decision"]
            assert set(graphed.graph["steps"]) <= {"capture", "replay"}
            for ours, theirs in zip(latents(graphed), latents(expected), strict=True):
                assert torch.equal(ours, theirs)
    return model.graphs.counters


@pytest.mark.parametrize("batching", ["batched", "sequential"])
@pytest.mark.parametrize(
    ("video", "audio", "kinds"),
    [(GuidanceSpec(3.0), GuidanceSpec(5.0), 1), (ALL, ALL, 1), (SKIPPING, ALL, 2), (SKIPPING, SKIPPING, 2)],
    ids=["cfg", "all", "video skips", "both skip"],
)
def test_guided_renders(model, video, audio, kinds, batching):
    counters = assert_graphed_is_eager(model, request_of(guidance=Guidance(video, audio, batching)))
    assert counters.captures == kinds and counters.evictions == 0


def test_another_scale_replays_and_another_pass_records(model):
    for scale in (3.0, 4.0, 3.0):
        request = request_of(guidance=Guidance(GuidanceSpec(scale), GuidanceSpec(scale), "batched"))
        eager, graphed = (sample(model, request, cuda_graph=mode) for mode in ("off", "on"))
        assert torch.equal(eager.video, graphed.video) and torch.equal(eager.audio, graphed.audio)
    assert (model.graphs.counters.captures, model.graphs.counters.hits) == (1, 2)
    sample(model, request_of(guidance=Guidance(ALL, GuidanceSpec(), "batched")), cuda_graph="on")
    assert model.graphs.counters.captures == 2


@pytest.mark.parametrize("convention", ["reference", "comfyui"])
@pytest.mark.parametrize("kind", ["image", "fraction", "strength", "region", "soft", "guide"])
def test_renders_with_something_given(model, kind, convention):
    counters = assert_graphed_is_eager(model, request_of(video=video_of(kind), noise_convention=convention), replays=2)
    assert counters.captures == 1


@pytest.mark.parametrize("sampler_name", ["euler", "euler_ancestral", "res_2s"])
def test_every_sampler_under_guidance_and_a_mask(model, sampler_name):
    request = request_of(
        video=video_of("fraction"), sampler=sampler_name, guidance=Guidance(ALL, ALL, "batched"), sigmas=steps_of(4)
    )
    counters = assert_graphed_is_eager(model, request, replays=2)
    assert counters.captures == (2 if sampler_name == "res_2s" else 1)


def steps_of(count):
    return torch.linspace(1, 0, count + 1)


def test_text_image_text_to_video_gives_two_captures_then_hits(model):
    """Case A3, in both stages' sizes of noise."""
    plain, given = request_of(), request_of(video=video_of("image"))
    expected = [sample(model, request, cuda_graph="off") for request in (plain, given)]
    for _ in range(2):
        for request, eager in zip((plain, given, plain), (*expected, expected[0]), strict=True):
            assert torch.equal(sample(model, request, cuda_graph="on").video, eager.video)
    assert (model.graphs.counters.captures, model.graphs.counters.hits) == (2, 4)
    # A stage 2 of the same size replays the same recording.
    stage_2 = request_of(sigmas=template_stage2_sigmas())
    assert torch.equal(sample(model, stage_2, cuda_graph="on").video, sample(model, stage_2, cuda_graph="off").video)
    assert model.graphs.counters.captures == 2


def test_given_sound(model):
    request = request_of()
    sound = torch.randn(request.audio.shape.as_tuple(), generator=torch.Generator().manual_seed(4))
    audio = freeze(dataclasses.replace(request.audio, clean=sound.transpose(1, 2).flatten(2).contiguous()))
    request = dataclasses.replace(request, audio=audio, noise_convention="reference")
    assert_graphed_is_eager(model, request, replays=2)
    kept = sample(model, request, cuda_graph="on").audio
    assert torch.equal(kept, sound.to(kept).bfloat16().float())


def test_rows_block_by_block_and_in_the_loop(model, monkeypatch):
    request = request_of(video=video_of("soft"))
    expected = sample(model, request, cuda_graph="off")
    monkeypatch.setattr(sampler, "_MODULATION_BYTES", 0)
    for levels in (16, 10**6):
        monkeypatch.setattr(transformer_model, "MANY_LEVELS", levels)
        for mode in ("off", "on"):
            result = sample(model, request, cuda_graph=mode)
            assert torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)


def test_attention_to_guides_by_parts_is_the_dense_bias(model):
    """Fused kernels take a mask that repeats along the queries: same numbers as the whole matrix."""
    parts, dense = request_of(video=video_of("guide")), request_of(video=video_of("guide"))
    guides = parts.video.guide_strength
    tokens, targets = parts.video.tokens, parts.video.tokens - guides.numel()
    matrix = torch.ones(1, tokens, tokens)
    matrix[:, :targets, targets:] = guides
    matrix[:, targets:, :targets] = guides[:, None]
    video = dataclasses.replace(dense.video, guide_strength=None, attention_strength=matrix)
    a = sample(model, parts, cuda_graph="off").video
    b = sample(model, dataclasses.replace(dense, video=video), cuda_graph="off").video
    assert (a - b).abs().max() <= 0.05 * a.std()


def test_warm_up_records_every_kind(model):
    request = request_of(guidance=Guidance(SKIPPING, SKIPPING, "batched"))
    account = warm_up(model, request)
    assert account["mode"] == "graph" and model.graphs.counters.captures == 2
    result = sample(model, request, cuda_graph="on")
    assert result.graph["steps"] == ["replay"] * 8 and model.graphs.counters.captures == 2


def test_auto_measures_each_kind_and_changes_no_bit(model):
    request = request_of(guidance=Guidance(SKIPPING, ALL, "sequential"))
    eager = sample(model, request, cuda_graph="off")
    for _ in range(2):
        result = sample(model, request, cuda_graph="auto")
        assert torch.equal(result.video, eager.video) and torch.equal(result.audio, eager.audio)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("kind", ["guided", "soft"])
def test_the_loop_is_resident(model, kind, mode, monkeypatch):
    """Also where AdaLN rows are made at the steps' edges."""
    monkeypatch.setattr(sampler, "_MODULATION_BYTES", 0)
    request = request_of(guidance=Guidance(SKIPPING, ALL, "batched"), sampler="res_2s", sigmas=steps_of(3))
    if kind == "soft":
        request = request_of(video=video_of("soft"))
    sample(model, request, cuda_graph=mode)
    activity = measure_loop_activity(model, request, cuda_graph=mode)
    assert activity.resident, activity.words
