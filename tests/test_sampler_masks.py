"""What is given: masks and guides in both conventions, dropped cells, slots, frozen sound, retake, second stage."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_sampling import (
    FPS,
    SIGMAS,
    audio_shape,
    key,
    naive_loop,
    prepared,
    random,
    sampled,
    tiny_model,
    tiny_request,
    video_shape,
)

from ltx_runtime import sampler
from ltx_runtime.comfyui_conditioning import (
    audio_state_from_comfyui,
    downsample_guide_mask,
    resize_mask,
    video_state_from_comfyui,
)
from ltx_runtime.conditioning import (
    append_clip,
    append_keyframe,
    append_reference,
    append_reference_audio,
    append_slots,
    audio_state,
    freeze,
    replace_frame,
    temporal_region,
    text_to_video_state,
)
from ltx_runtime.errors import RequestError, ShapeError
from ltx_runtime.guidance import Guidance, GuidanceSpec
from ltx_runtime.noise import ComfyNoise, ReferenceNoise
from ltx_runtime.patchify import patchify_audio, patchify_video
from ltx_runtime.schedules import resolve_schedule
from ltx_runtime.shapes import VideoLatentShape
from ltx_runtime.transformer import model as transformer_model

CONVENTIONS = ("reference", "comfyui")
TOLERANCE = 2e-5


@pytest.fixture
def image():
    return random(1, 16, 1, 2, 2, seed=11)


@pytest.fixture
def clip():
    return random(*video_shape().as_tuple(), seed=12)


@pytest.fixture
def sound():
    return random(*audio_shape().as_tuple(), seed=13)


def plain_video(latent=None):
    return text_to_video_state(video_shape(), FPS, latent)


def masked(state, *values):
    """The state with these mask values on its first tokens."""
    mask = state.denoise_mask.clone()
    mask[:, : len(values), 0] = torch.tensor(values)
    return dataclasses.replace(state, denoise_mask=mask)


# --- the loop under masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler_name", ["euler", "euler_ancestral"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_masked_loop_is_the_naive_loop(convention, sampler_name, image, sound):
    """Fractions of a mask, a keyframe, kept sound, and guidance, together."""
    video = append_keyframe(replace_frame(plain_video(), 0, image, 0.7), 9, image * 0.5, FPS, 0.8)
    request = tiny_request(
        video=video,
        audio=masked(audio_state(audio_shape(), sound), 0.0, 0.0, 0.4),
        noise_convention=convention,
        sampler=sampler_name,
        guidance=Guidance(GuidanceSpec(3.0, rescale=0.5), GuidanceSpec(2.0, skip_step=1)),
    )
    source = (ReferenceNoise if convention == "reference" else ComfyNoise)(
        3, torch.device("cpu"), *[torch.float32] * (convention == "reference")
    )
    streams = ("video", "audio")
    start = {}
    for name, drawn in zip(streams, source.initial(request.video, request.audio)):
        state = request.states[name]
        start[name] = drawn if convention == "comfyui" else torch.lerp(state.clean, drawn, state.denoise_mask)
    noise = [dict(zip(streams, source.step(request.video, request.audio))) for _ in range(3)]
    expected = naive_loop(request, start, [*noise, None])
    result = sampled(request)
    assert (patchify_video(result.video) - expected["video"][:, :12]).abs().max() <= TOLERANCE
    assert (patchify_audio(result.audio) - expected["audio"]).abs().max() <= TOLERANCE
    assert (patchify_video(result.appended) - expected["video"][:, 12:]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_schedule_that_ends_above_zero(convention):
    """ComfyUI divides the noisy end by 1 - sigma; the reference hands it on as it is."""
    request = tiny_request(noise_convention=convention, sigmas=torch.tensor([1.0, 0.9, 0.4]))
    dtypes = [torch.float32] * (convention == "reference")
    source = {"reference": ReferenceNoise, "comfyui": ComfyNoise}[convention](3, torch.device("cpu"), *dtypes)
    expected = naive_loop(request, dict(zip(("video", "audio"), source.initial(request.video, request.audio))))
    scale = 0.6 if convention == "comfyui" else 1.0
    result = sampled(request)
    assert (patchify_video(result.video) - expected["video"] / scale).abs().max() <= TOLERANCE
    assert (patchify_audio(result.audio) - expected["audio"] / scale).abs().max() <= TOLERANCE
    assert any("end at 0.4" in note for note in result.notes)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_reference_voice_is_heard_and_is_not_in_the_result(convention, sound):
    """Against the naive loop; the same noise for the sound that is generated; each voice another result."""
    features = patchify_audio(sound).shape[2]
    voice = random(1, 4, features, seed=21)
    plain = audio_state_from_comfyui(sound)
    audio = audio_state_from_comfyui(sound, reference=voice)
    request = tiny_request(audio=audio, noise_convention=convention, sampler="euler_ancestral")
    dtypes = [torch.float32] * (convention == "reference")
    source = {"reference": ReferenceNoise, "comfyui": ComfyNoise}[convention](3, torch.device("cpu"), *dtypes)
    drawn = source.initial(request.video, audio)
    start = {"video": drawn[0], "audio": drawn[1]}
    if convention == "reference":
        start = {k: torch.lerp(request.states[k].clean, v, request.states[k].denoise_mask) for k, v in start.items()}
    else:
        without = ComfyNoise(3, torch.device("cpu")).initial(request.video, plain)
        assert torch.equal(drawn[0], without[0]) and torch.equal(drawn[1][:, : plain.tokens], without[1])
        assert not bool(drawn[1][:, plain.tokens :].any())
    noise = [dict(zip(("video", "audio"), source.step(request.video, audio))) for _ in range(3)]
    expected = naive_loop(request, start, [*noise, None])
    result = sampled(request)
    assert result.audio.shape == sound.shape
    assert (patchify_audio(result.audio) - expected["audio"][:, : plain.tokens]).abs().max() <= TOLERANCE
    other = audio_state_from_comfyui(sound, reference=voice + 1)
    for state in (plain, other):
        assert (sampled(dataclasses.replace(request, audio=state)).audio - result.audio).abs().max() > 0.01


def test_a_reference_voice_ends_one_latent_frame_before_the_clip(sound):
    features = patchify_audio(sound).shape[2]
    batch = append_reference_audio(audio_state(audio_shape(), sound), torch.ones(1, 2, features))
    expected = torch.tensor([[-0.09, -0.08], [-0.08, -0.04]])
    assert torch.allclose(batch.positions[0, 0, -2:], expected, atol=1e-6)
    assert not bool(batch.denoise_mask[:, -2:].any())
    for shape in ((1, 2, features + 1), (3, 2, features), (1, 0, features), (2, features)):
        with pytest.raises(ShapeError, match="ref_audio"):
            append_reference_audio(audio_state(audio_shape(), sound), torch.ones(shape))
    broken = append_reference_audio(audio_state(audio_shape(), sound), torch.full((1, 2, features), float("nan")))
    with pytest.raises(RequestError, match="audio latent holds NaN"):
        sampled(tiny_request(audio=broken))


@pytest.mark.parametrize("sampler_name", ["euler", "euler_ancestral", "res_2s"])
def test_kept_tokens_come_back_as_they_were_given(sampler_name, image):
    video = replace_frame(plain_video(), 1, image)
    kept = sampled(tiny_request(video=video, sampler=sampler_name)).video[:, :, 1:2]
    assert torch.equal(kept, image)
    # ComfyUI walks from noise to what is given: equal but for the rounding of its last step.
    kept = sampled(tiny_request(video=video, sampler=sampler_name, noise_convention="comfyui")).video[:, :, 1:2]
    assert (kept - image).abs().max() <= 1e-6


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_what_is_given_changes_what_is_generated(convention, image):
    plain = sampled(tiny_request(noise_convention=convention)).video
    given = sampled(tiny_request(video=replace_frame(plain_video(), 0, image), noise_convention=convention)).video
    guided = append_keyframe(plain_video(), 9, image, FPS)
    guided = sampled(tiny_request(video=guided, noise_convention=convention)).video
    assert (given[:, :, 1:] - plain[:, :, 1:]).abs().max() > 0.01
    assert (guided - plain).abs().max() > 0.01


# --- keys -----------------------------------------------------------------------------------------------------------


def test_text_image_text_to_video_are_two_kinds_of_steps(image):
    """Case A3: a mask is an input, the number of its distinct values a part of the key."""

    def first_key(video):
        return key(prepared(tiny_request(video=video)), 0)

    text = first_key(plain_video())
    image_at_once = first_key(replace_frame(plain_video(), 0, image))
    assert first_key(plain_video()) == text != image_at_once
    assert first_key(replace_frame(plain_video(), 0, image * 2, 0.6)) == image_at_once
    assert first_key(replace_frame(plain_video(), 2, image, 0.3)) == image_at_once
    assert first_key(masked(replace_frame(plain_video(), 0, image), 0.5)) != image_at_once


def test_values_that_differ_by_rounding_are_one_level():
    mask = torch.tensor([0.3, 0.30000004, 0.29999998, 1.0, 1.0, 0.3])
    constants = prepared(tiny_request(video=masked(plain_video(), *mask.tolist()))).constants[0].forwards[0]
    assert constants.video.mask_values.tolist() == pytest.approx([0.3, 1.0])


# --- ComfyUI's forms and the runtime's are one thing ----------------------------------------------------------------


def guide_positions(frame, frames=1, causal=True, height=2, width=2, grid=1):
    """Pixel intervals such as LTXVAddGuide writes them."""
    t, y, x = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    starts = torch.stack((t * 8, y * 32, x * 32)).flatten(1)
    ends = starts + torch.tensor([[8], [32], [32]])
    intervals = torch.stack((starts, ends), dim=-1)[None]
    if causal:
        intervals[:, 0] = (intervals[:, 0] - 7).clamp(min=0)
    intervals[:, 0] += frame
    intervals[:, 1:, :, 1] += 32 * (grid - 1)
    return intervals


@pytest.mark.parametrize("frame_rate", [12.0, 24.0, 120.0])
def test_guides_lie_in_seconds_of_the_clips_own_frame_rate(image, frame_rate):
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), image), dim=2)
    theirs = video_state_from_comfyui(latent, frame_rate, keyframe_idxs=guide_positions(9))
    ours = append_keyframe(text_to_video_state(video_shape(), frame_rate), 9, image, frame_rate)
    assert torch.allclose(theirs.positions, ours.positions)


def assert_same_render(ours, theirs, **changes):
    for convention in CONVENTIONS:
        a, b = (sampled(tiny_request(video=video, noise_convention=convention, **changes)) for video in (ours, theirs))
        assert torch.equal(a.audio, b.audio), convention
        for x, y in ((a.video, b.video), (a.appended, b.appended)):
            assert (x is None and y is None) or (x - y).abs().max() <= 1e-6, convention


def test_a_first_frame_image_in_both_forms(image):
    latent = torch.zeros(video_shape().as_tuple())
    latent[:, :, :1] = image
    mask = torch.ones(1, 1, 3, 1, 1)
    mask[:, :, 0] = 0.3
    theirs = video_state_from_comfyui(latent, FPS, noise_mask=mask)
    ours = replace_frame(plain_video(), 0, image, 0.7)
    a, b = (sampled(tiny_request(video=video, noise_convention="comfyui")) for video in (ours, theirs))
    assert (a.video - b.video).abs().max() <= 1e-6


@pytest.mark.parametrize(("frame", "strength"), [(0, 1.0), (9, 1.0), (16, 0.6)])
def test_a_keyframe_in_both_forms(frame, strength, image):
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), image), dim=2)
    mask = torch.ones(1, 1, 4, 1, 1)
    mask[:, :, 3] = 1 - strength
    theirs = video_state_from_comfyui(latent, FPS, noise_mask=mask, keyframe_idxs=guide_positions(frame))
    ours = append_keyframe(plain_video(), frame, image, FPS, strength)
    for tensor in ("clean", "positions", "keyframe_marker", "denoise_mask"):
        torch.testing.assert_close(getattr(theirs, tensor), getattr(ours, tensor), rtol=0, atol=1e-6)
    assert theirs.latent_shape == ours.latent_shape
    if strength == 1:
        assert_same_render(ours, theirs)


def test_a_clip_in_both_forms(clip):
    given = clip[:, :, :2]
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), given), dim=2)
    mask = torch.ones(1, 1, 5, 1, 1)
    mask[:, :, 3:] = 0
    positions = guide_positions(1, 2, causal=False)
    assert_same_render(
        append_clip(plain_video(), 1, given, FPS),
        video_state_from_comfyui(latent, FPS, noise_mask=mask, keyframe_idxs=positions),
    )


def test_a_reference_on_a_coarser_grid_leaves_holes_in_comfyuis_latent():
    """LTXVAddGuide with an IC-LoRA's downscale factor: cells between are filled and dropped by a mask below 0."""
    small = random(1, 16, 3, 1, 1, seed=14)
    dilated, mask = torch.zeros(video_shape().as_tuple()), torch.full((1, 1, 3, 2, 2), -2.0)
    dilated[..., ::2, ::2], mask[..., ::2, ::2] = small, 0
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), dilated), dim=2)
    mask = torch.cat((torch.ones(1, 1, 3, 2, 2), mask), dim=2)
    theirs = video_state_from_comfyui(latent, FPS, noise_mask=mask, keyframe_idxs=guide_positions(0, 3, grid=2))
    ours = append_reference(plain_video(), small, FPS, spatial_ratio=2)
    assert theirs.tokens == ours.tokens == 12 + 3 and torch.equal(theirs.cells, ours.cells)
    torch.testing.assert_close(theirs.positions, ours.positions, rtol=0, atol=1e-6)
    assert_same_render(ours, theirs)
    appended = sampled(tiny_request(video=theirs)).appended
    assert torch.equal(appended[..., ::2, ::2], small) and bool((appended[..., 1::2, :] == 0).all())


def test_slots_are_generated_and_read_back(image):
    ours = append_slots(append_keyframe(plain_video(), 16, image, FPS), (5, 11), FPS)
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), image, torch.zeros(1, 16, 2, 2, 2)), dim=2)
    mask = torch.ones(1, 1, 6, 1, 1)
    mask[:, :, 3] = 0
    positions = torch.cat([guide_positions(frame) for frame in (16, 5, 11)], dim=2)
    slots = {"first_latent_frame": 4, "num_keyframes": 2, "tokens_per_frame": 4}
    theirs = video_state_from_comfyui(latent, FPS, noise_mask=mask, keyframe_idxs=positions, generated_keyframes=slots)
    assert torch.equal(theirs.keyframe_marker, ours.keyframe_marker)
    assert ours.keyframe_marker.flatten().tolist() == [1] * 4 + [0] * 8 + [0] * 4 + [1] * 8
    assert_same_render(ours, theirs)
    appended = sampled(tiny_request(video=ours)).appended
    assert appended.shape == (1, 16, 3, 2, 2) and torch.equal(appended[:, :, :1], image)
    assert (appended[:, :, 1] - appended[:, :, 2]).abs().max() > 0.01


def test_attention_to_guides_by_parts_is_the_dense_bias(image):
    """One guide: ComfyUI's strengths and the reference's matrix say the same."""
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), image), dim=2)
    mask = torch.ones(1, 1, 4, 1, 1)
    mask[:, :, 3] = 0
    entries = [{"pre_filter_count": 4, "strength": 0.35, "pixel_mask": None, "latent_shape": [1, 2, 2]}]
    theirs = video_state_from_comfyui(
        latent, FPS, noise_mask=mask, keyframe_idxs=guide_positions(9), guide_attention_entries=entries
    )
    assert theirs.guide_strength.tolist() == pytest.approx([0.35] * 4)
    assert_same_render(append_keyframe(plain_video(), 9, image, FPS, attention_strength=0.35), theirs)
    full = video_state_from_comfyui(latent, FPS, noise_mask=mask, keyframe_idxs=guide_positions(9))
    assert (sampled(tiny_request(video=theirs)).video - sampled(tiny_request(video=full)).video).abs().max() > 1e-3
    # Both passes of a batch of two see the bias.
    guidance = Guidance(GuidanceSpec(3.0), GuidanceSpec(3.0), "batched")
    one_by_one = dataclasses.replace(guidance, batching="sequential")
    a, b = (sampled(tiny_request(video=theirs, guidance=g)).video for g in (guidance, one_by_one))
    assert (a - b).abs().max() <= TOLERANCE


def test_an_attention_mask_weighs_tokens_by_area_and_causal_time():
    """Worked by hand: the first pixel frame is the first latent frame, then groups; areas are averaged."""
    mask = torch.zeros(1, 1, 5, 2, 4)
    mask[..., 0, :, :2] = 1  # frame 0: left half
    mask[..., 1, :, :] = 0.5  # frames 1, 2 average to 0.25
    mask[..., 3, 0, 2:] = 1  # frames 3, 4: a quarter of the right cell, half the time
    weights = downsample_guide_mask(mask, (3, 1, 2))
    assert weights.tolist() == pytest.approx([1, 0, 0.25, 0.25, 0, 0.25])
    assert downsample_guide_mask(mask[:, :, :1], (3, 1, 2)).tolist() == [1, 0] * 3
    assert downsample_guide_mask(mask[:, :, :2], (3, 1, 1)).tolist() == [0.5, 0.5, 0.5]
    assert downsample_guide_mask(mask, (1, 1, 1)).tolist() == [0.5]


def test_masks_are_read_as_core_reads_them():
    """Case E6: masks of 2, 3, 4 and 5 dimensions, smaller and larger, with fewer samples than the latent."""
    shape = dataclasses.replace(video_shape(), batch=3)
    ramp = torch.linspace(0, 1, 4).reshape(1, 4).expand(4, 4)
    for mask in (ramp, ramp[None], ramp[None, None], ramp[None, None, None]):
        resized = resize_mask(mask, shape)
        assert resized.shape == (3, 1, 3, 2, 2)
        assert torch.allclose(resized[..., 0], torch.tensor(1 / 6)) and torch.allclose(
            resized[..., 1], torch.tensor(5 / 6)
        )
    two = resize_mask(torch.stack((torch.zeros(1, 3, 2, 2), torch.ones(1, 3, 2, 2))), shape)
    assert two[:, 0, 0, 0, 0].tolist() == [0, 1, 0]
    assert torch.equal(resize_mask(torch.ones(1, 1, 7, 1), audio_shape()), torch.ones(1, 1, 7, 4))
    with pytest.raises(ShapeError, match="video noise mask of shape"):
        resize_mask(torch.ones(5), shape)
    with pytest.raises(ShapeError, match="audio noise mask of shape"):
        resize_mask(torch.ones(5), audio_shape())
    with pytest.raises(RequestError, match="mask holds NaN"):
        resize_mask(torch.full((4, 4), float("nan")), shape)
    for mask, words in ((torch.ones(0, 1, 3, 2, 2), r"of shape \(0, 1, 3, 2, 2\)"), ("all", "that is a str")):
        with pytest.raises(ShapeError, match=words):
            resize_mask(mask, shape)
    with pytest.raises(RequestError, match="differs between latent channels"):
        resize_mask(torch.rand(1, 2, 3, 2, 2), shape)
    with pytest.raises(RequestError, match="differs between mel bins"):
        audio_state_from_comfyui(torch.zeros(audio_shape().as_tuple()), torch.rand(1, 1, 7, 4))


# --- many levels ----------------------------------------------------------------------------------------------------


def soft_mask_request(**changes):
    video = dataclasses.replace(plain_video(), denoise_mask=torch.linspace(0.1, 1, 12).reshape(1, 12, 1))
    audio = audio_state(audio_shape())
    audio = dataclasses.replace(audio, denoise_mask=torch.linspace(0, 0.9, 7).reshape(1, 7, 1))
    return tiny_request(video=video, audio=audio, **changes)


def test_rows_block_by_block_are_the_rows_of_all_blocks(monkeypatch):
    expected = sampled(soft_mask_request())
    monkeypatch.setattr(transformer_model, "MANY_LEVELS", 8)
    modulation = prepared(soft_mask_request()).modulation[0]
    assert modulation.video.blocks.shape[:3] == (1, 9, 12) and modulation.audio.blocks.shape[:3] == (3, 9, 7)
    result = sampled(soft_mask_request())
    assert torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)


def test_rows_made_in_the_loop_are_the_rows_made_before_it(monkeypatch):
    expected = sampled(soft_mask_request(sampler="res_2s"))
    monkeypatch.setattr(sampler, "_MODULATION_BYTES", 0)
    assert not isinstance(prepared(soft_mask_request()).modulation, list)
    result = sampled(soft_mask_request(sampler="res_2s"))
    assert torch.equal(result.video, expected.video) and torch.equal(result.audio, expected.audio)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("what", ["video latent", "audio latent", "conditioning"])
def test_values_that_are_not_finite_are_refused_before_sampling(what, value):
    def broken(tensor):
        tensor = tensor.clone()
        tensor[0, -1, 1] = value
        return tensor

    request = tiny_request()
    name = what.split()[0]
    if name in request.states:
        state = request.states[name]
        request = dataclasses.replace(request, **{name: dataclasses.replace(state, initial=broken(state.initial))})
    else:
        request = tiny_request(text=dataclasses.replace(request.text, features=broken(request.text.features)))
    with pytest.raises(RequestError, match=f"the {what} holds NaN or Inf"):
        sampled(request)


def test_what_is_one_tensor_goes_to_the_device_once():
    state = plain_video()
    assert state.initial is state.clean
    moved = state.to("meta")
    assert moved.initial.is_meta and moved.initial is moved.clean and moved.positions.shape == state.positions.shape


# --- frozen streams, retake, second stage ---------------------------------------------------------------------------


@pytest.mark.parametrize("sampler_name", ["euler", "euler_ancestral", "res_2s"])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_given_sound_stays_and_is_heard(convention, sampler_name, sound):
    """Audio-to-video: the sound is at noise level 0 from the first step on, and the video follows it."""
    audio = freeze(audio_state(audio_shape(), sound))
    assert audio.frozen
    request = tiny_request(audio=audio, noise_convention=convention, sampler=sampler_name)
    result = sampled(request)
    assert (result.audio - sound).abs().max() <= (0 if convention == "reference" else 1e-6)
    silent = dataclasses.replace(request, audio=freeze(audio_state(audio_shape(), sound * 0)))
    assert (sampled(silent).video - result.video).abs().max() > 1e-3


def test_a_frozen_stream_is_at_sigma_zero(sound):
    """Golden frozen_audio shows what that means; here: that the loop asks for it, in both directions."""
    frozen = tiny_request(audio=freeze(audio_state(audio_shape(), sound)))
    partly = tiny_request(audio=masked(audio_state(audio_shape(), sound), *[0.0] * 6))
    (forward,), modulation = prepared(frozen).constants[0].forwards, prepared(frozen).modulation
    at_zero = tiny_model().module.modulation(forward, torch.tensor(1.0), torch.tensor(0.0))
    assert torch.equal(modulation[0].audio.prompt, at_zero.audio.prompt)
    assert torch.equal(modulation[0].video.cross_gate, at_zero.video.cross_gate)
    # A partly kept stream keeps its sigma.
    assert not torch.equal(prepared(partly).modulation[0].audio.prompt, at_zero.audio.prompt)
    picture = random(*video_shape().as_tuple(), seed=15)
    heard = tiny_request(video=freeze(plain_video(picture)))
    assert torch.equal(sampled(heard).video, picture)


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_retake_generates_its_region_only(convention, clip, sound):
    """17 frames at 24 fps: the region covers the second latent frame and the sound of the same time."""
    video = temporal_region(plain_video(clip), 0.1, 0.3)
    audio = temporal_region(audio_state(audio_shape(), sound), 0.1, 0.3)
    result = sampled(tiny_request(video=video, audio=audio, noise_convention=convention))
    kept = video.denoise_mask.reshape(3, 4)[:, 0] == 0
    assert kept.tolist() == [True, False, True]
    tolerance = 0 if convention == "reference" else 1e-6
    assert (result.video - clip)[:, :, kept].abs().max() <= tolerance
    assert (result.video - clip)[:, :, ~kept].abs().max() > 0.1
    heard = audio.denoise_mask.flatten() == 0
    assert 0 < heard.sum() < 7 and (result.audio - sound)[:, :, heard].abs().max() <= tolerance
    with pytest.raises(RequestError, match=r"the region from 3 to 4 s holds nothing of this clip, which lasts 0\.71 s"):
        temporal_region(plain_video(clip), 3, 4)


@pytest.mark.parametrize("sampler_name", ["euler", "euler_ancestral"])
@pytest.mark.parametrize(("schedule", "first"), [("distilled stage 2", 0.909375), ("template stage 2", 0.85)])
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_a_second_stage_starts_from_the_first(convention, schedule, first, sampler_name, clip, sound):
    sigmas, words = resolve_schedule(schedule, 3, "")
    assert float(sigmas[0]) == pytest.approx(first) and len(sigmas) == 4 and "3 steps" in words
    request = tiny_request(
        video=plain_video(clip),
        audio=audio_state(audio_shape(), sound),
        sigmas=sigmas,
        sampler=sampler_name,
        noise_convention=convention,
    )
    start = prepared(request).start[0]
    source = ReferenceNoise if convention == "reference" else ComfyNoise
    drawn = source(3, torch.device("cpu"), *[torch.float32] * (convention == "reference")).initial(
        request.video, request.audio
    )[0]
    torch.testing.assert_close(start, (1 - sigmas[0]) * patchify_video(clip) + sigmas[0] * drawn, rtol=0, atol=1e-6)
    result = sampled(request)
    assert result.video.shape == clip.shape and bool(result.video.isfinite().all()) and not result.notes


# --- bad input ------------------------------------------------------------------------------------------------------


def test_nothing_to_generate_is_refused(clip, sound):
    with pytest.raises(RequestError, match="nothing is to be generated"):
        sampled(tiny_request(video=freeze(plain_video(clip)), audio=freeze(audio_state(audio_shape(), sound))))


@pytest.mark.parametrize(
    ("value", "words"), [(1.5, "runs from 1 to 1.5"), (-0.5, "runs from -0.5 to 1"), (float("nan"), "mask holds NaN")]
)
def test_mask_values_outside_their_range_are_refused(value, words):
    with pytest.raises(RequestError, match=f"the video mask {words}" if "runs" in words else words):
        sampled(tiny_request(video=masked(plain_video(), value)))


def test_guides_outside_the_clip_are_refused(image):
    """17 frames are 0 to 16."""
    for frame in (17, 40):
        with pytest.raises(RequestError, match=r"is outside the clip, which lasts 0\.708 s"):
            sampled(tiny_request(video=append_keyframe(plain_video(), frame, image, FPS)))
    with pytest.raises(RequestError, match="is outside the clip"):
        sampled(tiny_request(video=append_slots(plain_video(), (4, 17), FPS)))
    latent = torch.cat((torch.zeros(video_shape().as_tuple()), image), dim=2)
    with pytest.raises(RequestError, match="is outside the clip"):
        sampled(tiny_request(video=video_state_from_comfyui(latent, FPS, keyframe_idxs=guide_positions(-9))))
    sampled(tiny_request(video=append_keyframe(plain_video(), 16, image, FPS)))


def test_guides_that_do_not_belong_to_the_latent_are_refused():
    latent = torch.zeros(1, 16, 4, 2, 2)
    positions = guide_positions(9)
    for keys, words in (
        ({"keyframe_idxs": positions[0, 0]}, r"keyframe_idxs has shape \(4, 2\)"),
        ({"keyframe_idxs": positions[:, :, :3]}, "holds 3 guide tokens"),
        ({"keyframe_idxs": torch.cat([positions] * 4, dim=2)}, "LTXVCropGuides on both"),
        ({"generated_keyframes": {"first_latent_frame": 3}}, "no keyframe_idxs"),
        (
            {
                "keyframe_idxs": positions,
                "generated_keyframes": {"first_latent_frame": 2, "num_keyframes": 1, "tokens_per_frame": 4},
            },
            "don't fit the video latent",
        ),
        (
            {"keyframe_idxs": positions, "guide_attention_entries": [entry(3)]},
            r"count \[3\] cells, keyframe_idxs 4",
        ),
        (
            {"keyframe_idxs": positions, "guide_attention_entries": [entry(4, torch.ones(1, 1, 1, 8, 8), [1, 1, 2])]},
            "2 weights for a guide of 4 tokens",
        ),
        ({"keyframe_idxs": positions, "noise_mask": hole(0)}, "below 0 within the video itself"),
    ):
        with pytest.raises(RequestError, match=words):
            video_state_from_comfyui(latent, FPS, **keys)
    assert video_state_from_comfyui(latent, FPS, keyframe_idxs=positions, noise_mask=hole(3)).tokens == 12 + 3


def entry(count, mask=None, latent_shape=(1, 2, 2)):
    return {"pre_filter_count": count, "strength": 0.5, "pixel_mask": mask, "latent_shape": list(latent_shape)}


def hole(frame):
    mask = torch.ones(1, 1, 4, 2, 2)
    mask[:, :, frame, 0, 0] = -1
    return mask


def test_a_reference_that_lies_on_no_part_of_the_grid_needs_the_references_noise():
    odd = append_reference(text_to_video_state(VideoLatentShape(1, 16, 3, 3, 3), FPS), random(1, 16, 3, 2, 2), FPS)
    result = sampled(tiny_request(video=odd))
    assert result.appended is None
    with pytest.raises(RequestError, match="Use noise_convention 'reference'"):
        sampled(tiny_request(video=odd, noise_convention="comfyui"))


def test_start_noise_covers_the_guides(image):
    video = append_keyframe(plain_video(), 9, image, FPS, 0.5)
    sound = torch.zeros(audio_shape().as_tuple())
    with pytest.raises(
        RequestError, match=r"noise for video has shape \(1, 16, 3, 2, 2\), the video latent is \(1, 16, 4"
    ):
        sampled(tiny_request(video=video, noise_convention="comfyui", noise=(torch.zeros(1, 16, 3, 2, 2), sound)))
    sampled(tiny_request(video=video, noise_convention="comfyui", noise=(torch.zeros(1, 16, 4, 2, 2), sound)))


@pytest.mark.parametrize(
    ("sigmas", "words"),
    [
        ([1.0], "give n\\+1 >= 2 values"),
        ([[1.0, 0.0]], "give n\\+1 >= 2 values"),
        ([1.0, 0.5, 0.5, 0.0], "must decrease strictly"),
        ([0.5, 1.0, 0.0], "must decrease strictly"),
        ([1.5, 0.5, 0.0], "must lie in \\[0, 1\\]"),
        ([1.0, float("nan"), 0.0], "must be finite"),
    ],
)
def test_sigmas_that_mean_nothing_are_refused(sigmas, words):
    with pytest.raises(RequestError, match=words):
        sampled(tiny_request(sigmas=torch.tensor(sigmas)))


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_sigmas_that_do_not_end_at_0_are_allowed_with_a_note(convention):
    """ComfyUI's split sigmas: an unfinished schedule, whose end ComfyUI divides by 1 - sigma."""
    unfinished = sampled(tiny_request(sigmas=torch.tensor(SIGMAS[:-1]), noise_convention=convention))
    assert unfinished.notes == ("the sigmas end at 0.4, not at 0: the result still holds noise",)
    assert bool(unfinished.video.isfinite().all())


def test_a_gpu_without_the_kernels_is_told_so(monkeypatch):
    why_plain = sampler._why_plain
    monkeypatch.setattr(sampler, "_why_plain", lambda device, refusal: why_plain(torch.device("cuda"), refusal))
    told = ("the denoiser runs on plain torch, which is slower: Triton: no kernel for cpu",)
    assert sampled(tiny_request()).notes == told
    monkeypatch.undo()
    assert not sampled(tiny_request()).notes
