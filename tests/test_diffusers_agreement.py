"""diffusers 0.42.1 on the same weights and inputs, in float32: whole renders, single models, guidance and schedules.

Errors are the largest difference over the largest magnitude of diffusers' result. Worst measured, and allowed:

    one forward of the denoiser or connectors         1.3e-6   1e-5
    whole loops, 8 + 3 steps                          1.1e-6   2e-5
    guided loops, whose scales multiply the error     5.0e-5   2e-4
    pictures, latents of the VAEs and upsamplers      4.6e-6   5e-5
    mel, sound                                        4.2e-6   1e-4
    guidance, schedules                               1.2e-7   1e-6

Where diffusers does something else than Lightricks' reference, it runs on inputs that undo it (`corrected`), and a
test named test_diffusers_deviates_... pins by how much it is off without. What it lacks is in ABSENT. When either test
fails after an update of diffusers, the gap has closed and a comparison can take its place.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import diffusers
import diffusers_models as models
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTX2ConditionPipeline,
    LTX2InContextPipeline,
    LTX2Pipeline,
    LTXEulerAncestralRFScheduler,
)
from diffusers.guiders import LTX2Guidance
from diffusers.guiders.adaptive_projected_guidance import normalized_guidance
from diffusers.guiders.classifier_free_zero_star_guidance import cfg_zero_star_scale
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_ltx2_lora_to_diffusers
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline
from diffusers.pipelines.ltx2.pipeline_ltx2 import calculate_shift
from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
from diffusers.pipelines.ltx2.pipeline_ltx2_ic_lora import LTX2ReferenceCondition
from golden_kinds.transformer_weights import golden_transformer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention import flex_attention

from ltx_runtime.audio_vae import load_audio_vae
from ltx_runtime.checkpoint import load_weights, read_header
from ltx_runtime.conditioning import (
    TokenState,
    append_keyframe,
    append_reference,
    append_slots,
    audio_state,
    freeze,
    replace_frame,
    text_to_video_state,
)
from ltx_runtime.config import DiffusionVAEConfig
from ltx_runtime.duration import duration_frames, load_duration_head
from ltx_runtime.guidance import Guidance, GuidanceSpec, GuidanceTerms, apg_delta, cfg_star_delta, guide
from ltx_runtime.lora import LoraSpec
from ltx_runtime.noise import ANCESTRAL_SEED_OFFSET, ReferenceNoise
from ltx_runtime.resident_weights import build_on_meta
from ltx_runtime.runtime import TransformerModel, load_transformer
from ltx_runtime.sampler import SampleRequest, SampleResult, TextFeatures, sample
from ltx_runtime.schedules import dev_sigmas, distilled_sigmas, distilled_stage2_sigmas
from ltx_runtime.shapes import AudioLatentShape, VideoLatentShape, audio_latent_frames
from ltx_runtime.tiny import write_tiny_checkpoints
from ltx_runtime.upsampler import load_upsampler
from ltx_runtime.video_vae import DecodeNoise, DiffusionVideoVAE, load_video_encoder, load_video_vae
from ltx_runtime.video_vae.diffusion_grid import ClipNoise, DecodeGrid

FORWARD, LOOP, GUIDED, PICTURE, SOUND = 1e-5, 2e-5, 2e-4, 5e-5, 1e-4
FLOAT32 = {"device": "cpu", "dtype": torch.float32}
GOLDENS = Path(__file__).parent / "goldens"
FLAVOURS = ("av25", "av23", "kvcache")
FPS = 24.0
SEED = 77
# As their conversion of LTX-2.x sets the scheduler.
DEV_SCHEDULE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}
PROMPT_TOKENS, NEGATIVE_TOKENS = 11, 6
FRAMES, SIDE = 17, 64  # of the whole renders: pixel frames, pixels of a first stage's side

# What diffusers does not have, as a pattern over its sources; checked, so that a new version can't bring it unseen.
ABSENT = {
    "res_2s and its SDE noise": r"res_?2s",
    "guidance skip steps": r"skip_step",
    "retake: a temporal region of a given clip": r"temporal_region|retake",
    "waveform to log-mel, before the audio encoder": r"torchaudio|melscale|slaney",
    "int8 ConvRot weights": r"convrot",
}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def worst(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    # Not Python's max, which drops a NaN.
    return torch.tensor([relative_error(ours[name], theirs[name]) for name in ours]).max().item()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _around(monkeypatch) -> Iterator[None]:
    # Without it the neighbourhood attention is traced first, for 8 s.
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.inference_mode(), torch.random.fork_rng():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    return write_tiny_checkpoints(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def corrected(transformer: nn.Module) -> Iterator[list[float]]:
    """Undo two deviations of diffusers' denoiser; yields the timesteps it is called at.

    The first latent frame gets its keyframe marker, and the scale and shift of the audio-video attention come from the
    own tokens' levels instead of the other stream's sigma (use_cross_timestep=True, which the gates need).
    """
    levels: dict[str, Tensor] = {}
    calls: list[float] = []

    def before(_module, args, kwargs):
        tokens = kwargs["hidden_states"]
        video, audio = kwargs["timestep"], kwargs.get("audio_timestep")
        levels["video"] = video.flatten()
        levels["audio"] = levels["video"] if audio is None else audio.flatten()
        calls.append(video.max().item())
        marker = tokens.new_zeros(*tokens.shape[:2], 1)
        marker[:, : kwargs["height"] * kwargs["width"]] = 1
        return args, {"video_keyframes_mask": marker, **kwargs}

    def own_level(stream: str):
        return lambda _module, args: (levels[stream], *args[1:])

    hooks = [
        transformer.register_forward_pre_hook(before, with_kwargs=True),
        transformer.av_cross_attn_video_scale_shift.register_forward_pre_hook(own_level("video")),
        transformer.av_cross_attn_audio_scale_shift.register_forward_pre_hook(own_level("audio")),
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# --- the denoiser ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pass:
    """One forward of both denoisers of a golden file. sigma: (B,) by stream."""

    flavour: str
    video: TokenState
    audio: TokenState
    sigma: dict[str, Tensor]

    @property
    def batch(self) -> int:
        return self.video.shape.batch

    def tokens(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Video and audio tokens, video and audio contexts."""
        shapes = ((self.video.tokens, 16), (self.audio.tokens, 16), (9, 64), (9, 32))
        return tuple(random(self.batch, *shape, seed=seed) for seed, shape in enumerate(shapes, 1))

    def ours(self, perturbations: Tensor | None = None, *, video_only: bool = False) -> dict[str, Tensor]:
        model = golden_transformer(GOLDENS / f"transformer_w_{self.flavour}.safetensors")
        video, audio, video_context, audio_context = self.tokens()
        own_sigmas = any(bool((sigma != sigma[0]).any()) for sigma in self.sigma.values())
        sigmas = [sigma if own_sigmas else sigma[:1] for sigma in self.sigma.values()]
        if perturbations is not None:
            perturbations = perturbations[..., None].expand(-1, -1, self.batch)
        constants = model.prepare(
            video=self.video,
            audio=None if video_only else self.audio,
            video_context=video_context,
            audio_context=None if video_only else audio_context,
            perturbations=perturbations,
            per_sample_sigma=own_sigmas,
        )
        velocities = model(video, None if video_only else audio, constants, model.modulation(constants, *sigmas))
        return {name: v for name, v in zip(("video", "audio"), velocities) if v is not None}

    def theirs(self, model: nn.Module, **options) -> dict[str, Tensor]:
        video, audio, video_context, audio_context = self.tokens()
        levels = {name: 1000 * sigma for name, sigma in self.sigma.items()}
        shape = self.video.shape
        if self.video.tokens > shape.tokens:
            # Only a pipeline of theirs knows where appended tokens are, see loop_with_given_frames.
            options |= {"video_coords": self.video.positions, "video_keyframes_mask": self.video.keyframe_marker}
        velocities = model(
            hidden_states=video,
            audio_hidden_states=audio,
            encoder_hidden_states=video_context,
            audio_encoder_hidden_states=audio_context,
            timestep=self.video.denoise_mask[..., 0] * levels["video"][:, None],
            audio_timestep=self.audio.denoise_mask[..., 0] * levels["audio"][:, None],
            sigma=levels["video"],
            audio_sigma=levels["audio"],
            num_frames=shape.frames,
            height=shape.height,
            width=shape.width,
            fps=FPS,
            audio_num_frames=self.audio.shape.frames,
            use_cross_timestep=True,
            return_dict=False,
            **options,
        )
        return dict(zip(("video", "audio"), velocities))


def text_to_video(flavour: str, batch: int = 1) -> Pass:
    video = text_to_video_state(VideoLatentShape(batch, 16, 3, 2, 4), FPS)
    sigma = torch.full((batch,), 0.7)
    return Pass(flavour, video, audio_state(AudioLatentShape(batch, 4, 7, 4)), {"video": sigma, "audio": sigma})


def given_frame(strength: float) -> Pass:
    start = text_to_video("av25")
    video = replace_frame(start.video, 0, random(1, 16, 1, 2, 4, seed=5), strength)
    return replace(start, video=video)


def frozen_audio() -> Pass:
    start = text_to_video("av25")
    return replace(start, audio=freeze(start.audio), sigma={**start.sigma, "audio": torch.zeros(1)})


def slots() -> Pass:
    start = text_to_video("av25")
    return replace(start, video=append_slots(start.video, (5, 12), FPS))


def own_sigmas() -> Pass:
    return replace(text_to_video("av25", 2), sigma={"video": torch.tensor([0.9, 0.4]), "audio": torch.tensor([0.6, 1])})


PASSES: dict[str, Callable[[], Pass]] = {
    **{name: lambda name=name: text_to_video(name) for name in FLAVOURS},
    "batch of 2": lambda: text_to_video("av25", 2),
    "own sigma each": own_sigmas,
    "given first frame": lambda: given_frame(1.0),
    "half given first frame": lambda: given_frame(0.5),
    "given sound": frozen_audio,
    "keyframe slots": slots,
}


@pytest.fixture(scope="module")
def denoisers() -> dict[str, nn.Module]:
    return {name: models.transformer(GOLDENS / f"transformer_w_{name}.safetensors") for name in FLAVOURS}


@pytest.mark.parametrize("name", PASSES)
def test_denoiser(name, denoisers):
    case = PASSES[name]()
    model = denoisers[case.flavour]
    with corrected(model):
        assert worst(case.ours(), case.theirs(model)) < FORWARD


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_denoiser_with_perturbed_self_attention(flavour, denoisers):
    case, model = text_to_video(flavour), denoisers[flavour]
    perturbations = torch.ones(4, model.config.num_layers)
    perturbations[:2, 1] = 0
    with corrected(model):
        theirs = case.theirs(model, spatio_temporal_guidance_blocks=[1])
        assert worst(case.ours(perturbations), theirs) < FORWARD
        assert worst(case.ours(), theirs) > 0.01


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_denoiser_with_streams_apart(flavour, denoisers):
    """The pass of modality guidance. A video without sound is the same to the video."""
    case, model = text_to_video(flavour), denoisers[flavour]
    perturbations = torch.ones(4, model.config.num_layers)
    perturbations[2:] = 0
    with corrected(model):
        theirs = case.theirs(model, isolate_modalities=True)
        assert worst(case.ours(perturbations), theirs) < FORWARD
        assert worst(case.ours(video_only=True), {"video": theirs["video"]}) < FORWARD


def test_denoiser_with_attention_masked_out(denoisers):
    case, model = text_to_video("av25"), denoisers["av25"]
    strength = (random(1, 24, 24, seed=6) > 0.5).float()
    strength.diagonal(dim1=1, dim2=2).fill_(1)
    masked = replace(case, video=replace(case.video, attention_strength=strength))
    with corrected(model):
        theirs = case.theirs(model, video_self_attention_mask=strength)
        assert worst(masked.ours(), theirs) < FORWARD
        assert worst(case.ours(), theirs) > 0.01


def test_the_denoiser_comparison_sees_a_change_of_any_tensor(denoisers):
    """Of one value in each tensor outside the blocks, and in each weight and table of the last block."""
    case, model = text_to_video("av25"), denoisers["av25"]
    ours = case.ours()
    unseen = []
    with corrected(model):
        for name, tensor in model.state_dict().items():
            block = re.match(r"transformer_blocks\.(\d+)\.", name)
            if block and (block[1] != "2" or name.endswith(".bias")):
                continue
            with one_value_changed(tensor):
                if not worst(ours, case.theirs(model)) > FORWARD:
                    unseen.append(name)
        assert worst(ours, case.theirs(model)) < FORWARD
    assert not unseen


@contextlib.contextmanager
def one_value_changed(tensor: Tensor) -> Iterator[None]:
    values = tensor.view(-1)
    at = values.numel() // 2
    before = values[at].clone()
    values[at] += 1
    try:
        yield
    finally:
        values[at] = before


def test_diffusers_deviates_without_marker_and_own_levels(denoisers):
    """transformer.md sections 18.4 and 18.5."""
    model = denoisers["av25"]
    plain, given = text_to_video("av25"), given_frame(1.0)
    marker = plain.video.keyframe_marker
    assert worst(plain.ours(), plain.theirs(model)) == pytest.approx(0.32, rel=0.1)
    assert worst(plain.ours(), plain.theirs(model, video_keyframes_mask=marker)) < FORWARD
    assert worst(given.ours(), given.theirs(model, video_keyframes_mask=marker)) == pytest.approx(0.25, rel=0.5)


def test_diffusers_deviates_for_fractional_attention_strength(denoisers):
    """Ours is the reference's ln(strength); theirs -10000 (1 - strength), which masks whatever is not 1."""
    case, model = text_to_video("av25"), denoisers["av25"]
    half = torch.full((1, 24, 24), 0.5)
    half.diagonal(dim1=1, dim2=2).fill_(1)
    masked = replace(case, video=replace(case.video, attention_strength=half))
    none = replace(case, video=replace(case.video, attention_strength=(half == 1).float()))
    with corrected(model):
        theirs = case.theirs(model, video_self_attention_mask=half)
    assert worst(none.ours(), theirs) < FORWARD
    assert worst(masked.ours(), theirs) > 0.01


# --- prompts --------------------------------------------------------------------------------------------------------


def prompt(tokens: int, length: int = 1024) -> Tensor:
    """Hidden states of a text encoder that has 36 in all layers together, padded on the left."""
    return random(1, length, 36, seed=tokens)


def prompt_mask(tokens: int, length: int = 1024) -> Tensor:
    mask = torch.zeros(1, length, dtype=torch.int64)
    mask[:, -tokens:] = 1
    return mask


@contextlib.contextmanager
def projections(connectors: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Text features as our runtime takes them: what diffusers' feature projections give in the last call."""
    found: dict[str, Tensor] = {}
    layers = (connectors.video_text_proj_in, connectors.audio_text_proj_in)
    hooks = [
        layer.register_forward_hook(lambda _module, _args, out, name=name: found.update({name: out}))
        for name, layer in zip(("video", "audio"), layers)
    ]
    try:
        yield lambda: torch.cat([found["video"], found["audio"]], dim=-1)
    finally:
        for hook in hooks:
            hook.remove()


# --- whole renders --------------------------------------------------------------------------------------------------


class Studio:
    """diffusers' parts of one set of tiny files, and ours beside them."""

    def __init__(self, files: Mapping[str, Path]):
        self.parts = {
            "vae": models.video_vae(files["video_vae"]),
            "audio_vae": models.audio_vae(files["audio_vae"]),
            "connectors": models.connectors(files["transformer"]),
            "transformer": models.transformer(files["transformer"]),
            "vocoder": models.vocoder(files["audio_vae"]),
            "text_encoder": None,
            "tokenizer": None,
        }
        self.upsampler = models.upsampler(files["spatial_upscaler"])
        self.model: TransformerModel = load_transformer(files["transformer"], **FLOAT32)
        self.video_vae = load_video_vae(files["video_vae"], **FLOAT32)
        self.audio_vae = load_audio_vae(files["audio_vae"], **FLOAT32)
        self.our_upsampler = load_upsampler(files["spatial_upscaler"], **FLOAT32)
        self.statistics = self.video_vae.statistics()

    def run(self, pipeline_class: type, scheduler, **settings) -> tuple[tuple[Tensor, Tensor], Tensor, list[float]]:
        """A pipeline's (video, audio), the text features of its prompts, and the timesteps of its model calls."""
        pipeline = pipeline_class(scheduler=scheduler, **self.parts)
        pipeline.set_progress_bar_config(disable=True)
        with corrected(self.parts["transformer"]) as calls, projections(self.parts["connectors"]) as features:
            result = pipeline(
                **{
                    "prompt_embeds": prompt(PROMPT_TOKENS),
                    "prompt_attention_mask": prompt_mask(PROMPT_TOKENS),
                    "num_frames": FRAMES,
                    "frame_rate": FPS,
                    "return_dict": False,
                    **WITHOUT_GUIDANCE,
                    **settings,
                }
            )
        return result, features(), calls

    def audio_latent(self, audio: Tensor) -> Tensor:
        """Their audio latents are not normalised."""
        vae = self.parts["audio_vae"]
        flat = audio.transpose(1, 2).flatten(2)
        return ((flat - vae.latents_mean) / vae.latents_std).unflatten(2, audio.shape[1::2]).transpose(1, 2)


WITHOUT_GUIDANCE = {
    "guidance_scale": 1.0,
    "stg_scale": 0.0,
    "modality_scale": 1.0,
    "guidance_rescale": 0.0,
    "audio_guidance_scale": 1.0,
    "audio_stg_scale": 0.0,
    "audio_modality_scale": 1.0,
    "audio_guidance_rescale": 0.0,
}
CELLS = SIDE // 32
AUDIO_FRAMES = audio_latent_frames(FRAMES, FPS)
VIDEO_SHAPE = VideoLatentShape(1, 128, (FRAMES - 1) // 8 + 1, CELLS, CELLS)
AUDIO_SHAPE = AudioLatentShape(1, 8, AUDIO_FRAMES, 16)


def from_noise() -> dict:
    """Settings with which a pipeline draws its start noise as the reference does: in token layout, video first."""
    return {
        "latents": torch.zeros(VIDEO_SHAPE.as_tuple()),
        "audio_latents": torch.zeros(AUDIO_SHAPE.as_tuple()),
        "noise_scale": 1.0,
        "generator": torch.Generator().manual_seed(SEED),
        "height": SIDE,
        "width": SIDE,
    }


@pytest.fixture(scope="module")
def studio(files) -> Studio:
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)
        return Studio(files)


def test_a_whole_distilled_render(studio):
    """From one seed: 8 ancestral steps, spatial upscale, 3 Euler steps, picture and sound."""
    settings = from_noise()
    # The scheduler draws from torch's global generator.
    torch.manual_seed(SEED + ANCESTRAL_SEED_OFFSET)
    (video, audio), features, calls = studio.run(
        LTX2Pipeline,
        LTXEulerAncestralRFScheduler(),
        sigmas=distilled_sigmas().tolist(),
        output_type="latent",
        **settings,
    )
    # Their loop has one more call than steps; its result is dropped.
    assert calls == pytest.approx((1000 * distilled_sigmas()).tolist())
    upscale = LTX2LatentUpsamplePipeline(vae=studio.parts["vae"], latent_upsampler=studio.upsampler)
    upscaled = upscale(latents=video, height=SIDE, width=SIDE, output_type="latent", return_dict=False)[0]
    sigmas = distilled_stage2_sigmas()
    (pixels, waveform), _, _ = studio.run(
        LTX2Pipeline,
        FlowMatchEulerDiscreteScheduler(),
        sigmas=sigmas[:-1].tolist(),
        output_type="pt",
        **{
            **settings,
            "latents": upscaled,
            "audio_latents": audio,
            "noise_scale": sigmas[0].item(),
            "height": 2 * SIDE,
            "width": 2 * SIDE,
        },
    )

    noise = ReferenceNoise(SEED, studio.model.device, torch.float32)
    request = SampleRequest(
        video=text_to_video_state(VIDEO_SHAPE, FPS),
        audio=audio_state(AUDIO_SHAPE),
        text=TextFeatures(features[:, -PROMPT_TOKENS:], processed=False),
        sigmas=distilled_sigmas(),
        seed=SEED,
        sampler="euler_ancestral",
        noise_convention="reference",
    )
    first = sample(studio.model, request, noise_source=noise)
    assert_latents_agree(studio, first, video, audio)
    latent = studio.our_upsampler.upscale(first.video, studio.statistics)
    assert relative_error(studio.statistics.denormalize(latent), upscaled) < LOOP
    second = sample(
        studio.model,
        replace(
            request,
            video=text_to_video_state(VideoLatentShape(*latent.shape), FPS, latent),
            audio=audio_state(AUDIO_SHAPE, first.audio),
            sigmas=sigmas,
            sampler="euler",
        ),
        noise_source=noise,
    )
    ours = studio.video_vae.decode_raw(second.video).transpose(1, 2)
    assert relative_error((ours / 2 + 0.5).clamp(0, 1), pixels) < PICTURE
    assert relative_error(studio.audio_vae.decode(second.audio), waveform) < SOUND


def assert_latents_agree(
    studio: Studio, ours: SampleResult, video: Tensor, audio: Tensor, tolerance: float = LOOP
) -> None:
    assert relative_error(studio.statistics.denormalize(ours.video), video) < tolerance
    assert relative_error(ours.audio, studio.audio_latent(audio)) < tolerance


@pytest.mark.parametrize("parts", ["cfg", "stg", "modality", "all with rescale"])
def test_a_guided_loop(parts, studio):
    """The dev model's guidance over steps of its schedule, both streams with scales of their own.

    diffusers shifts the schedule by this clip's tokens; the reference's one- and two-stage pipelines by 4096 always.
    """
    on = {part: parts in (part, "all with rescale") for part in ("cfg", "stg", "modality")}
    rescales = (0.7, 0.4) if parts == "all with rescale" else (0.0, 0.0)
    specs = [
        GuidanceSpec(
            cfg_scale=cfg if on["cfg"] else 1.0,
            stg_scale=stg if on["stg"] else 0.0,
            modality_scale=modality if on["modality"] else 1.0,
            rescale=rescale,
            stg_blocks=(1,) if on["stg"] else (),
        )
        for (cfg, stg, modality), rescale in zip(((3.0, 1.0, 3.0), (7.0, 1.5, 2.0)), rescales)
    ]
    steps = 4
    guided = {}
    for prefix, spec in zip(("", "audio_"), specs):
        guided |= {
            f"{prefix}guidance_scale": spec.cfg_scale,
            f"{prefix}stg_scale": spec.stg_scale,
            f"{prefix}modality_scale": spec.modality_scale,
            f"{prefix}guidance_rescale": spec.rescale,
        }
    negative = {"negative_prompt_embeds": prompt(NEGATIVE_TOKENS)} if on["cfg"] else {}
    if on["cfg"]:
        negative["negative_prompt_attention_mask"] = prompt_mask(NEGATIVE_TOKENS)
    (video, audio), features, _ = studio.run(
        LTX2Pipeline,
        FlowMatchEulerDiscreteScheduler(**DEV_SCHEDULE),
        num_inference_steps=steps,
        spatio_temporal_guidance_blocks=[1] if on["stg"] else None,
        output_type="latent",
        **guided,
        **negative,
        **from_noise(),
    )
    ours = sample(
        studio.model,
        SampleRequest(
            video=text_to_video_state(VIDEO_SHAPE, FPS),
            audio=audio_state(AUDIO_SHAPE),
            text=TextFeatures(features[-1:, -PROMPT_TOKENS:], processed=False),
            negative=TextFeatures(features[:1, -NEGATIVE_TOKENS:], processed=False) if on["cfg"] else None,
            sigmas=dev_sigmas(steps, tokens=VIDEO_SHAPE.tokens),
            seed=SEED,
            noise_convention="reference",
            guidance=Guidance(*specs),
        ),
    )
    assert_latents_agree(studio, ours, video, audio, GUIDED)


def loop_with_given_frames(
    studio: Studio,
    monkeypatch,
    *,
    strength: float = 1.0,
    ancestral: bool = False,
    reference_attention: float | None = None,
) -> tuple[SampleResult, Tensor, Tensor]:
    """First and last frame given, one in place and one as a keyframe behind the video's tokens: our result, their
    latents. reference_attention: with a reference video of half the size (IC-LoRA), that attends and is attended to so
    much. Their VAE is told what the frames encode to; test_model has the encoder."""
    latents = [random(1, 128, 1, CELLS, CELLS, seed=seed) for seed in (20, 21)]
    last = VIDEO_SHAPE.frames - 1
    state = replace_frame(text_to_video_state(VIDEO_SHAPE, FPS), 0, latents[0], strength)
    state = append_keyframe(state, 8 * (last - 1) + 1, latents[1], FPS, strength)
    image = torch.zeros(1, 3, SIDE, SIDE)
    settings = from_noise()
    settings.pop("latents")
    settings["conditions"] = [LTX2VideoCondition(image, index, strength, crf=0) for index in (0, last)]
    pipeline_class = LTX2ConditionPipeline
    if reference_attention is not None:
        latents.append(random(1, 128, VIDEO_SHAPE.frames, CELLS // 2, CELLS // 2, seed=22))
        # Their 1 is no mask, as our None; our 1 would keep keyframe and reference apart.
        attention = None if reference_attention == 1 else reference_attention
        state = append_reference(state, latents[2], FPS, spatial_ratio=2, attention_strength=attention)
        pipeline_class = LTX2InContextPipeline
        settings["reference_conditions"] = [LTX2ReferenceCondition(torch.zeros(FRAMES, 3, SIDE, SIDE))]
        settings["reference_downscale_factor"] = 2
        settings["conditioning_attention_strength"] = reference_attention
    pending = [studio.statistics.denormalize(latent) for latent in latents]
    monkeypatch.setattr(studio.parts["vae"], "encode", lambda pixels: SimpleNamespace(latents=pending.pop(0)))
    torch.manual_seed(SEED + ANCESTRAL_SEED_OFFSET)
    sigmas = distilled_sigmas()
    (video, audio), features, _ = studio.run(
        pipeline_class,
        LTXEulerAncestralRFScheduler() if ancestral else FlowMatchEulerDiscreteScheduler(),
        sigmas=(sigmas if ancestral else sigmas[:-1]).tolist(),
        output_type="latent",
        **settings,
    )
    assert not pending
    ours = sample(
        studio.model,
        SampleRequest(
            video=state,
            audio=audio_state(AUDIO_SHAPE),
            text=TextFeatures(features[:, -PROMPT_TOKENS:], processed=False),
            sigmas=sigmas,
            seed=SEED,
            sampler="euler_ancestral" if ancestral else "euler",
            noise_convention="reference",
        ),
    )
    return ours, video, audio


def test_a_loop_with_given_frames(studio, monkeypatch):
    assert_latents_agree(studio, *loop_with_given_frames(studio, monkeypatch))


@pytest.mark.parametrize("attention", [1.0, 0.0])
def test_a_loop_with_a_reference_video(attention, studio, monkeypatch):
    """Between 0 and 1 the two masks mean different things, see the deviation above."""
    found = loop_with_given_frames(studio, monkeypatch, reference_attention=attention)
    assert_latents_agree(studio, *found)


def test_diffusers_deviates_for_frames_given_in_part(studio, monkeypatch):
    """The reference takes x0 of a token at its own level, strength x sigma; theirs at sigma."""
    ours, video, _ = loop_with_given_frames(studio, monkeypatch, strength=0.5)
    assert relative_error(studio.statistics.denormalize(ours.video), video) > 0.05


def test_diffusers_deviates_for_given_frames_with_ancestral_steps(studio, monkeypatch):
    """Their scheduler adds noise to given tokens too; the reference sets them back after every step."""
    ours, video, _ = loop_with_given_frames(studio, monkeypatch, ancestral=True)
    assert relative_error(studio.statistics.denormalize(ours.video), video) > 0.05


def test_a_lora(studio, files):
    """Fused into the same tensors, by the package's map of LoRA names; PEFT, which its loader needs, is not here."""
    strength = 0.7
    pairs = _convert_non_diffusers_ltx2_lora_to_diffusers(load_file(files["lora"]))
    model = models.transformer(files["transformer"])
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = {name.removeprefix("transformer.").rsplit(".lora_", 1)[0] for name in pairs}
    assert len(modules) == len(pairs) / 2 > 60
    for module in modules:
        down, up = (pairs[f"transformer.{module}.lora_{half}.weight"].float() for half in "AB")
        model.get_submodule(module).weight += strength * up @ down
    adapted = load_transformer(files["transformer"], **FLOAT32)
    adapted.set_loras([LoraSpec(files["lora"], strength)])
    fused = models.transformer_tensors(adapted.module.state_dict())
    for name, tensor in model.state_dict().items():
        assert relative_error(fused[name], tensor) < 1e-6, name
        touched = name.removesuffix(".weight") in modules
        assert (relative_error(tensor, base[name]) > 0.01) == touched, name


# --- single models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twin:
    """One model in both packages on the same input. run: their results by name."""

    theirs: nn.Module
    run: Callable[[], dict[str, Tensor]]
    ours: dict[str, Tensor]
    tolerance: float


def per_channel(values: Tensor) -> Tensor:
    return values.view(1, -1, 1, 1, 1)


def text_connectors() -> Twin:
    path = GOLDENS / "transformer_w_av25.safetensors"
    model, mask = models.connectors(path), prompt_mask(PROMPT_TOKENS, 128)

    def run() -> dict[str, Tensor]:
        return dict(zip(("video", "audio"), model(prompt(PROMPT_TOKENS, 128), mask)))

    with projections(model) as features:
        run()
    contexts = golden_transformer(path).connect_text(features(), mask, length=128)
    return Twin(model, run, dict(zip(("video", "audio"), contexts)), FORWARD)


def conv_decoder() -> Twin:
    path = GOLDENS / "video_vae_conv_tiny.safetensors"
    vae, latent = models.video_vae(path), random(2, 4, 3, 2, 3)
    given = latent * per_channel(vae.latents_std) + per_channel(vae.latents_mean)
    ours = load_video_vae(path, **FLOAT32).decode_raw(latent)
    return Twin(vae.decoder, lambda: {"pixels": vae.decode(given).sample}, {"pixels": ours}, PICTURE)


def conv_encoder() -> Twin:
    path = GOLDENS / "video_vae_conv_tiny.safetensors"
    vae, frames = models.video_vae(path), random(17, 64, 96, 3).sigmoid()

    def run() -> dict[str, Tensor]:
        means = vae.encode((2 * frames - 1).permute(3, 0, 1, 2)[None]).latent_dist.mode()
        return {"latent": (means - per_channel(vae.latents_mean)) / per_channel(vae.latents_std)}

    return Twin(vae.encoder, run, {"latent": load_video_encoder(path, **FLOAT32).encode(frames)}, PICTURE)


def diffusion_decoder(latent_frames: int = 3) -> Twin:
    """With windows that fit into 1 x 2 latents: diffusers' attention over all pairs of cells takes seconds."""
    header = read_header(GOLDENS / "video_vae_diffusion_tiny.safetensors")
    kernels = ((3, 1, 1), (3, 1, 3), (3, 1, 3), (3, 3, 5), (5, 7, 5))
    config = replace(DiffusionVAEConfig.from_header(header), stage_kernels=kernels)
    theirs, latent = models.diffusion_decoder(header.path, config), random(1, 4, latent_frames, 1, 2)
    given = latent * per_channel(theirs.latents_std) + per_channel(theirs.latents_mean)

    def run() -> dict[str, Tensor]:
        return {"pixels": theirs.decode(given, generator=torch.Generator().manual_seed(SEED)).sample}

    vae = build_on_meta(lambda: DiffusionVideoVAE(config))
    load_weights(vae, header, {part: part for part in ("decoder.", "per_channel_statistics.")}, **FLOAT32)
    grid = DecodeGrid.of(config, latent.shape[2:])
    noise = ClipNoise(DecodeNoise(SEED), 0, grid, **FLOAT32)
    ours = torch.cat(list(vae.decode(latent, noise)), dim=2)
    return Twin(theirs.decoder, run, {"pixels": ours}, PICTURE)


def audio_decoder() -> Twin:
    path = GOLDENS / "audio_vae_tiny.safetensors"
    vae, latent = models.audio_vae(path), random(1, 2, 7, 16)
    given = latent.transpose(1, 2).flatten(2) * vae.latents_std + vae.latents_mean
    given = given.unflatten(2, (-1, 16)).transpose(1, 2)
    ours = load_audio_vae(path, **FLOAT32).module.audio_vae.decode(latent)
    return Twin(vae.decoder, lambda: {"mel": vae.decode(given).sample}, {"mel": ours}, SOUND)


def audio_encoder() -> Twin:
    """From the log-mel on, which diffusers does not make."""
    path = GOLDENS / "audio_vae_tiny.safetensors"
    vae, ours = models.audio_vae(path), load_audio_vae(path, **FLOAT32)
    waveform = random(1, 2, 16000).tanh()
    mel = ours.module.front_end(waveform)

    def run() -> dict[str, Tensor]:
        means = vae.encode(mel).latent_dist.mode().transpose(1, 2).flatten(2)
        return {"latent": ((means - vae.latents_mean) / vae.latents_std).unflatten(2, (-1, 16)).transpose(1, 2)}

    return Twin(vae.encoder, run, {"latent": ours.encode(waveform, 16000)}, SOUND)


def vocoder(*, base_clamps: bool = True) -> Twin:
    path = GOLDENS / "audio_vae_tiny.safetensors"
    model, ours = models.vocoder(path, base_clamps=base_clamps), load_audio_vae(path, **FLOAT32)
    latent = random(1, 2, 7, 16)
    mel = ours.module.audio_vae.decode(latent)
    return Twin(model, lambda: {"waveform": model(mel)}, {"waveform": ours.decode(latent)}, SOUND)


def upsampler(kind: str) -> Twin:
    path = GOLDENS / f"latent_upsampler_{kind}_x2_tiny.safetensors"
    model, latent = models.upsampler(path), random(2, 4, 3, 2, 3)
    ours = load_upsampler(path, **FLOAT32).module(latent)
    return Twin(model, lambda: {"latent": model(latent)}, {"latent": ours}, PICTURE)


def duration_head() -> Twin:
    path = GOLDENS / "duration_head_tiny.safetensors"
    model, head = models.duration_head(path), load_duration_head(path, device="cpu")
    video, audio = random(1, 9, 24), random(1, 5, 16, seed=1)
    inputs = {"both": (video, audio), "video": (video, None), "audio": (None, audio)}
    ours = {name: head.seconds(*tokens) for name, tokens in inputs.items()}
    return Twin(model, lambda: {name: model(*tokens) for name, tokens in inputs.items()}, ours, FORWARD)


TWINS: dict[str, Callable[[], Twin]] = {
    "connectors": text_connectors,
    "conv decoder": conv_decoder,
    "conv encoder": conv_encoder,
    "diffusion decoder": diffusion_decoder,
    "audio decoder": audio_decoder,
    "audio encoder": audio_encoder,
    "vocoder": vocoder,
    "spatial upsampler": lambda: upsampler("spatial"),
    "temporal upsampler": lambda: upsampler("temporal"),
    "duration head": duration_head,
}


@pytest.mark.parametrize("name", TWINS)
def test_model(name):
    """Agreement, and that one changed weight ends it: in each of five tensors, spread over the model."""
    twin = TWINS[name]()
    assert worst(twin.ours, twin.run()) < twin.tolerance
    weights = list(twin.theirs.named_parameters())
    for changed, tensor in weights[:: math.ceil(len(weights) / 5)]:
        with one_value_changed(tensor):
            assert worst(twin.ours, twin.run()) > twin.tolerance, changed


def test_diffusers_deviates_without_the_clamp_of_the_base_vocoder():
    """audio.md section 7.1: their conversion of 2.5 builds it without."""
    twin = vocoder(base_clamps=False)
    assert worst(twin.ours, twin.run()) > 0.05


def test_diffusers_deviates_where_windows_do_not_fit():
    """video_vae.md section 8.1: the reference pads a latent of fewer than 3 frames, and so do we. diffusers takes 2 as
    they are, which gives another picture, and raises for 1 x 1 latents."""
    twin = diffusion_decoder(latent_frames=2)
    assert worst(twin.ours, twin.run()) > 0.1
    path = GOLDENS / "video_vae_diffusion_tiny.safetensors"
    latent = random(1, 4, 1, 1, 1)
    assert load_video_vae(path, **FLOAT32).decode_raw(latent).shape == (1, 3, 1, 32, 32)
    with pytest.raises(ValueError, match="kernel"):
        models.diffusion_decoder(path, DiffusionVAEConfig.from_header(read_header(path))).decode(latent)


# --- guidance, schedules, lengths -----------------------------------------------------------------------------------


SPEC = GuidanceSpec(cfg_scale=3.0, stg_scale=1.5, modality_scale=2.0, rescale=0.7, stg_blocks=(1,))


def guided(batch: int) -> tuple[Tensor, Tensor]:
    """Ours and theirs, from the same four predictions."""
    predictions = {name: random(batch, 9, 16, seed=seed) for seed, name in enumerate(("cond", "uncond", "ptb", "mod"))}
    guider = LTX2Guidance(
        guidance_scale=SPEC.cfg_scale,
        stg_scale=SPEC.stg_scale,
        modality_scale=SPEC.modality_scale,
        guidance_rescale=SPEC.rescale,
    )
    ours = guide(predictions, GuidanceTerms.of(SPEC, torch.device("cpu")))
    return ours, guider.forward(*predictions.values()).pred


def test_guidance():
    assert relative_error(*guided(batch=1)) < 1e-6


def test_diffusers_deviates_in_the_rescale_of_a_batch():
    """The reference's spread is that of the whole batch; theirs is each sample's own."""
    assert relative_error(*guided(batch=2)) > 1e-3


def test_optional_guiders():
    cond, uncond = random(2, 4, 5, 6), random(2, 4, 5, 6, seed=1)
    alpha = cfg_zero_star_scale(cond.flatten(1), uncond.flatten(1)).view(-1, 1, 1, 1)
    assert relative_error(cfg_star_delta(cond, uncond, 4.0), 3.0 * (cond - alpha * uncond)) < 1e-6
    for eta, threshold in ((0.0, 0.0), (0.5, 2.0), (1.0, 100.0)):
        pushed = normalized_guidance(
            cond, uncond, 3.0, eta=eta, norm_threshold=threshold, use_original_formulation=True
        )
        ours = cond + apg_delta(cond, uncond, 4.0, eta=eta, norm_threshold=threshold)
        assert relative_error(ours, pushed) < 1e-6


def their_schedule(steps: int, tokens: int) -> Tensor:
    scheduler = FlowMatchEulerDiscreteScheduler(**DEV_SCHEDULE)
    sigmas = [1 - i / steps for i in range(steps)]
    scheduler.set_timesteps(sigmas=sigmas, mu=calculate_shift(tokens, 1024, 4096, 0.95, 2.05))
    return scheduler.sigmas


@pytest.mark.parametrize("tokens", [12, 1536, 4096])
@pytest.mark.parametrize("steps", [2, 8, 30])
def test_dev_schedule(steps, tokens):
    assert relative_error(dev_sigmas(steps, tokens=tokens), their_schedule(steps, tokens)) < 1e-6


def test_diffusers_deviates_in_long_and_in_single_step_schedules():
    """They take 1 - sigma in float32, where it cancels for many tokens and is 0 for one step; ours is in float64."""
    assert relative_error(dev_sigmas(30, tokens=32640), their_schedule(30, 32640)) == pytest.approx(4e-4, rel=0.5)
    assert not their_schedule(1, 4096).isfinite().all()
    assert dev_sigmas(1, tokens=4096).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("frame_rate", [24.0, 25.0, 60.0])
def test_frames_of_a_duration(frame_rate):
    head = models.duration_head(GOLDENS / "duration_head_tiny.safetensors")
    for bias in torch.linspace(-2, 4, 25):
        head.mlp_out.weight.zero_()
        head.mlp_out.bias.fill_(bias)
        theirs = head.predict_num_frames(random(1, 9, 24), frame_rate=frame_rate, temporal_compression_ratio=8)
        assert duration_frames(math.exp(bias), frame_rate) == theirs


# --- what is not there ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", ABSENT)
def test_diffusers_still_lacks(feature):
    package = Path(inspect.getfile(diffusers)).parent
    sources = [
        *package.glob("pipelines/ltx2/*.py"),
        *package.glob("modular_pipelines/ltx2/*.py"),
        *package.glob("models/**/*ltx2*.py"),
        *package.glob("schedulers/*ltx*.py"),
        *package.glob("guiders/*ltx*.py"),
    ]
    assert len(sources) > 20
    pattern = re.compile(ABSENT[feature], re.IGNORECASE)
    found = [path.name for path in sources if pattern.search(path.read_text(encoding="utf-8"))]
    assert not found, f"diffusers has {feature} now ({', '.join(found)}): compare it and take it out of ABSENT"
