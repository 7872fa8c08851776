"""From a request to final latents: validate, prepare what is constant, denoise.

Reading order: `sample`, `denoise`, `prepare`. What is asked for is in request.py, one step in steps.py, guidance in
guidance.py, eager or replayed execution in step_runner.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .conditioning import TokenState
from .errors import RequestError
from .guidance import Guidance, GuidanceSpec, GuidanceTerms, forward_passes, passes_needed, resolve_guidance
from .memory import device_free_bytes, in_words, sampling_bytes
from .noise import SDE_MIDDLE_SEED, SDE_STEP_SEED, ComfyNoise, Pair, ReferenceNoise, SdeNoise
from .patchify import unpatchify_audio, unpatchify_video
from .request import SampleRequest, TextFeatures, check_request
from .runtime import TransformerModel
from .schedules import SamplerStep, check_sigmas, sampler_steps
from .shapes import VideoLatentShape
from .step_runner import CUDA_GRAPH_MODES, ON_CAPTURE_FAILURE, StepRunner, check_graphs_allowed
from .steps import Blend, StepConstants, StepInputs, StreamInputs, StreamRule, step_coefficients
from .timing import Phase, Timeline
from .transformer.inputs import ForwardConstants, StepModulation
from .transformer.residual import TRITON_OWNER
from .triton_use import note_first_use

__all__ = ["SampleRequest", "SampleResult", "TextFeatures", "denoise", "fix_batching", "prepare", "sample"]

_NOTHING: Pair = (None, None)
# Of all steps together; one level and one stream pair at 22B take 8 MB a step.
_MODULATION_BYTES = 2 << 30


@dataclass
class SampleResult:
    """video: (B, 128, F, H, W), audio: (B, 8, T, 16), float32 on the model's device, None for an absent stream.
    appended: (B, 128, frames, H, W), the appended latent frames (keyframe slots are read back from here), None without.
    graph: what the graph policy decided and did, with its numbers. notes: what else a report should say."""

    video: Tensor | None
    audio: Tensor | None
    graph: dict = field(default_factory=dict)
    appended: Tensor | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """All that the loop reads, on the device. start: noisy tokens of both streams. The lists have one entry a step;
    steps of one kind share their constants."""

    start: Pair
    constants: list[StepConstants]
    coefficients: list[Tensor]
    modulation: Sequence[StepModulation | None]
    mid_modulation: Sequence[StepModulation | None]
    noise: list[Pair]
    mid_noise: list[Pair]
    notes: tuple[str, ...]

    def inputs(self, index: int, x: Pair, guided: Pair = _NOTHING) -> StepInputs:
        """Inputs of step `index`. x, guided: tokens and guided x0 (video, audio) that the step before left."""
        constants = self.constants[index]
        video, audio = (
            None if rule is None else StreamInputs(tokens, noise, mid_noise, last if rule.reuses else None)
            for rule, tokens, noise, mid_noise, last in zip(
                (constants.video, constants.audio), x, self.noise[index], self.mid_noise[index], guided
            )
        )
        return StepInputs(video, audio, self.modulation[index], self.coefficients[index], self.mid_modulation[index])


def sample(
    model: TransformerModel,
    request: SampleRequest,
    *,
    cuda_graph: str = "auto",
    on_capture_failure: str = "eager",
    graphs_refused: str = "",
    noise_source: ReferenceNoise | None = None,
    timeline: Timeline | None = None,
    check_cancelled: Callable[[], None] | None = None,
    on_step: Callable[[int, int], None] | None = None,
    on_preview: Callable[[int, int, Tensor], None] | None = None,
) -> SampleResult:
    """Denoise a request.

    cuda_graph: "auto", "on", "off". on_capture_failure: "eager" (go on, the reason in the result) or "error" (raise).
    graphs_refused: why the host forbids CUDA graphs, empty when it doesn't: a fallback like any other.
    noise_source: continue a reference render's generators (second stage) instead of seeding new ones. check_cancelled:
    called before every step; whatever it raises ends the render and leaves the model usable. on_step(done, total):
    after the host saw a step end. on_preview(index, total, denoised): right after a step was issued, with its x0 as (B,
    C, F, H, W) on the device (video, else audio); copying it to the host waits for that step. Raises RequestError or
    ShapeError before any weight is read, CaptureError too where no graph is possible at all; NonFiniteError naming the
    phase.
    """
    for name, value, allowed in (
        ("cuda_graph", cuda_graph, CUDA_GRAPH_MODES),
        ("on_capture_failure", on_capture_failure, ON_CAPTURE_FAILURE),
    ):
        if value not in allowed:
            raise RequestError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    timeline = timeline or Timeline(None, device=model.device)
    sigmas = check_sigmas(request.sigmas)
    check_request(request, model.config)
    check_graphs_allowed(
        model.device, cuda_graph=cuda_graph, on_capture_failure=on_capture_failure, refused=graphs_refused
    )
    model.ensure_resident(timeline)
    with torch.inference_mode():
        prepared = prepare(model, request, timeline, noise_source)
        total = len(prepared.constants)
        with StepRunner(
            model,
            prepared.constants,
            total,
            timeline,
            cuda_graph=cuda_graph,
            on_capture_failure=on_capture_failure,
            on_finished=lambda index: on_step(index + 1, total) if on_step else None,
            refused=graphs_refused,
        ) as runner:
            video, audio = denoise(prepared, request, runner, check_cancelled or (lambda: None), on_preview)
        scale = 1.0
        if request.noise_convention == "comfyui" and sigmas[-1] > 0:
            scale = 1 - sigmas[-1].item()  # ComfyUI divides the noisy end state of an unfinished schedule
        return SampleResult(
            None if video is None else _to_latent(request.video, video) / scale,
            None if audio is None else _to_latent(request.audio, audio) / scale,
            runner.account,
            None if video is None else _appended_frames(request.video, video, scale),
            prepared.notes,
        )


def denoise(prepared: Prepared, request: SampleRequest, runner: StepRunner, check_cancelled, on_preview) -> Pair:
    """The denoising loop: final tokens of both streams."""
    total = len(prepared.constants)
    x, guided = prepared.start, _NOTHING
    for index in range(total):
        check_cancelled()
        outputs = runner.run(index, prepared.inputs(index, x, guided))
        streams = (outputs.video, outputs.audio)
        x = tuple(None if stream is None else stream.x for stream in streams)
        guided = tuple(None if stream is None else stream.guided for stream in streams)
        if on_preview is not None:
            state, shown = (request.video, outputs.video) if outputs.video else (request.audio, outputs.audio)
            on_preview(index, total, _to_latent(state, shown.denoised))
    return x


def prepare(
    model: TransformerModel, request: SampleRequest, timeline: Timeline, noise_source: ReferenceNoise | None = None
) -> Prepared:
    """Everything constant in the loop, or known before it: contexts, positions, RoPE, AdaLN rows, noise of all steps.
    The weights must be resident."""
    sigmas = check_sigmas(request.sigmas)
    device, transformer = model.device, model.module
    streams = list(request.states)
    guidance, notes = resolve_guidance(
        request.guidance or Guidance(),
        streams=streams,
        layers=model.config.num_layers,
        file_name=model.header.path.name,
    )
    specs = {name: getattr(guidance, name) for name in streams}
    passes = passes_needed(list(specs.values()))
    with timeline.phase("prepare.connectors") as phase:
        noise_source = noise_source or _noise_source(model, request)
        contexts, negative = _contexts(model, request, phase, uses_negative="uncond" in passes)
    with timeline.phase("prepare.constants", steps=len(sigmas) - 1):
        video, audio = (None if state is None else state.to(device) for state in (request.video, request.audio))
        forward = transformer.prepare(
            video=video,
            audio=audio,
            video_context=contexts[0],
            audio_context=contexts[1],
            compatibility=request.compatibility,
        )
        if forward.fused:
            note_first_use(TRITON_OWNER, timeline, "prepare.constants")
        else:
            notes += _why_plain(device, transformer.fused_refusal())
        batched = True
        if len(passes) > 1:
            batched, words = _choose_batching(model, request, guidance.batching, len(passes), contexts, negative)
            notes.append(words)
        plan = sampler_steps(request.sampler, sigmas)
        kinds = _Kinds(forward, request, (video, audio), specs, negative, batched, model.config.num_layers)
        constants = [kinds.constants(index, step) for index, step in enumerate(plan)]
        coefficients = [
            step_coefficients(step.sampler, step.sigma, step.sigma_next, eta=request.eta, s_noise=request.s_noise).to(
                device
            )
            for step in plan
        ]
        frozen = {name: state.frozen for name, state in request.states.items()}
        modulation = _modulation(model, constants, [step.sigma for step in plan], frozen)
        mid_modulation = _modulation(model, constants, [step.sigma_mid for step in plan], frozen)
        start = tuple(
            None if state is None else _start_tokens(state, noise, sigmas[0].to(device), request.noise_convention)
            for state, noise in zip((video, audio), noise_source.initial(video, audio))
        )
        noise, mid_noise = _step_noise(plan, noise_source, video, audio, device)
    if sigmas[-1] > 0:
        notes.append(f"the sigmas end at {float(sigmas[-1]):g}, not at 0: the result still holds noise")
    for note in notes:
        timeline.note("prepare.constants", note)
    return Prepared(start, constants, coefficients, modulation, mid_modulation, noise, mid_noise, tuple(notes))


def _why_plain(device: torch.device, refusal: str | None) -> list[str]:
    """What a user is told whose device could do better. A CPU has nothing but plain torch."""
    return [] if device.type == "cpu" else [f"the denoiser runs on plain torch, which is slower: Triton: {refusal}"]


def _contexts(
    model: TransformerModel, request: SampleRequest, phase: Phase, *, uses_negative: bool
) -> tuple[Pair, Pair]:
    """Contexts (video, audio) of the prompt, and of the negative prompt for every sample in the activation dtype."""

    def of(text: TextFeatures, name: str) -> Pair:
        if text.processed:
            phase.attrs[name] = "given"
            features = text.features.to(model.device, non_blocking=True)
            return features.split([model.config.context_width, model.config.audio_context_width], dim=-1)
        contexts, known = model.connect_text(text.features, request.compatibility)
        phase.attrs[name] = "reused" if known else "made"
        return contexts

    prompt = of(request.text, "prompt")
    if not uses_negative:
        return prompt, _NOTHING
    negative = of(request.negative, "negative")
    return prompt, tuple(c.to(model.module.dtype).expand(request.batch, -1, -1).contiguous() for c in negative)


def fix_batching(model: TransformerModel, request: SampleRequest) -> SampleRequest:
    """The request with guidance batching "auto" decided, so that several renders of it run the same kernels. The
    weights must be resident."""
    if request.guidance is None or request.guidance.batching != "auto":
        return request
    batching = "batched" if _fits_as_batch(model, request)[0] else "sequential"
    return dataclasses.replace(request, guidance=dataclasses.replace(request.guidance, batching=batching))


def _fits_as_batch(model: TransformerModel, request: SampleRequest) -> tuple[bool, str]:
    need = sampling_bytes(model.config, request, item_bytes=model.module.dtype.itemsize, recorded=False)
    free = device_free_bytes(model.device)
    words = f"a batch needs about {in_words(need)}" + ("" if free is None else f", {in_words(free)} are free")
    return free is None or need <= free, words


def _choose_batching(
    model: TransformerModel, request: SampleRequest, batching: str, passes: int, contexts: Pair, negative: Pair
) -> tuple[bool, str]:
    """Whether the passes of a step run as one batch, and the sentence about it."""
    if negative[0] is not None and negative[0].shape[1] != contexts[0].shape[1]:
        batched = False
        words = f"the two prompts have contexts of different length, {contexts[0].shape[1]} and {negative[0].shape[1]}"
    elif batching != "auto":
        batched, words = batching == "batched", "as asked"
    else:
        batched, words = _fits_as_batch(model, request)
    return batched, f"guidance: {passes} passes a step, {'as one batch' if batched else 'one after the other'}: {words}"


class _Kinds:
    """The constants of a render's steps: steps that run the same passes by the same rule share one object."""

    def __init__(
        self,
        forward: ForwardConstants,
        request: SampleRequest,
        states: tuple[TokenState | None, TokenState | None],
        specs: dict[str, GuidanceSpec],
        negative: Pair,
        batched: bool,
        layers: int,
    ):
        self._forward = forward
        self._specs = specs
        self._passes = {"negative": negative, "batch": request.batch, "layers": layers, "batched": batched}
        self._blends = {
            name: _blend(state, request.noise_convention)
            for name, state in zip(("video", "audio"), states)
            if state is not None
        }
        self._device = next(state for state in states if state is not None).clean.device
        self._known: dict[tuple, StepConstants] = {}

    def constants(self, index: int, step: SamplerStep) -> StepConstants:
        # The x0 that ends res_2s is no step that guidance could skip.
        reused = tuple(name for name, spec in self._specs.items() if spec.skips(index) and step.sampler != "x0")
        kind = (step.sampler, reused)
        if kind not in self._known:
            self._known[kind] = self._build(*kind)
        return self._known[kind]

    def _build(self, sampler: str, reused: tuple[str, ...]) -> StepConstants:
        predicted = {name: spec for name, spec in self._specs.items() if name not in reused}
        passes = passes_needed(list(predicted.values()))
        rules = {
            name: StreamRule(
                guidance=GuidanceTerms.of(spec, self._device) if name in predicted else None,
                blend=self._blends[name],
                remembers=spec.skip_step > 0,
                reuses=name in reused,
            )
            for name, spec in self._specs.items()
        }
        forwards = forward_passes(self._forward, passes, predicted, **self._passes) if passes else ()
        return StepConstants(forwards, passes, rules.get("video"), rules.get("audio"), sampler)


class _MadeInTheLoop(Sequence[StepModulation]):
    """AdaLN rows made at each step's start, on the device, where the rows of all steps would take too much memory."""

    def __init__(self, make: Callable[[int], StepModulation | None], steps: int):
        self._make = make
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> StepModulation | None:
        return self._make(index)


def _modulation(
    model: TransformerModel, constants: list[StepConstants], sigmas: list[Tensor | None], frozen: dict[str, bool]
) -> Sequence[StepModulation | None]:
    """AdaLN rows of one model call in every step; None where a step has no such call. A stream that is given as a whole
    is at sigma 0."""
    on_device = torch.tensor([0.0 if sigma is None else float(sigma) for sigma in sigmas], device=model.device)
    # Steps that make the same model call, by that call.
    together: dict[int, list[int]] = {}
    for index, (sigma, step) in enumerate(zip(sigmas, constants)):
        if sigma is not None and step.forwards:
            together.setdefault(id(step.forwards[0]), []).append(index)

    def make(indices: list[int]) -> list[StepModulation]:
        own = torch.stack([on_device[index] for index in indices]).unsqueeze(1)
        video, audio = (torch.zeros_like(own) if frozen.get(name) else own for name in ("video", "audio"))
        return model.module.modulations(constants[indices[0]].forwards[0], video, audio)

    groups = list(together.values())
    steps_bytes = (len(g) * model.module.modulation_bytes(constants[g[0]].forwards[0]) for g in groups)
    if sum(steps_bytes) > _MODULATION_BYTES:
        called = {index for group in groups for index in group}
        return _MadeInTheLoop(lambda index: make([index])[0] if index in called else None, len(sigmas))
    rows: list[StepModulation | None] = [None] * len(sigmas)
    for group in groups:
        for index, modulation in zip(group, make(group)):
            rows[index] = modulation
    return rows


def _noise_source(model: TransformerModel, request: SampleRequest) -> ReferenceNoise | ComfyNoise:
    if request.noise_convention == "reference":
        return ReferenceNoise(request.seed, model.device, model.module.dtype)
    source = ComfyNoise(request.seed, model.device, request.noise)
    source.draw_ahead(request.video, request.audio)
    return source


def _step_noise(
    plan: list[SamplerStep],
    source: ReferenceNoise | ComfyNoise,
    video: TokenState | None,
    audio: TokenState | None,
    device,
) -> tuple[list[Pair], list[Pair]]:
    """Noise of every step, and of the middle of every res_2s step. The last ancestral step to sigma 0 draws none: its
    noise is zero."""
    noise, mid_noise = [], []
    at_steps, at_middles = SdeNoise(SDE_STEP_SEED, device), SdeNoise(SDE_MIDDLE_SEED, device)
    for step in plan:
        drawn, mid = _NOTHING, _NOTHING
        if step.sampler == "res_2s":
            drawn, mid = at_steps.step(video, audio), at_middles.step(video, audio)
        elif step.sampler == "euler_ancestral" and step.sigma_next > 0:
            drawn = source.step(video, audio)
        elif step.sampler == "euler_ancestral":
            drawn = tuple(
                None if s is None else torch.zeros_like(s.initial, dtype=source.latent_dtype) for s in (video, audio)
            )
        noise.append(drawn)
        mid_noise.append(mid)
    return noise, mid_noise


def _start_tokens(state: TokenState, noise: Tensor, sigma: Tensor, convention: str) -> Tensor:
    """Noisy tokens at the first sigma, in the dtype of the noise."""
    if convention == "comfyui":
        # ComfyUI has one latent: what is given stands in it, and noise is mixed into all of it.
        return sigma * noise + (1 - sigma) * state.clean
    noisy = torch.lerp(state.initial, noise.float(), sigma)
    return torch.lerp(state.clean, noisy, state.denoise_mask).to(noise.dtype)


def _blend(state: TokenState, convention: str) -> Blend | None:
    """None when everything is generated: the step then has no mask arithmetic."""
    if bool((state.denoise_mask == 1).all()):
        return None
    return Blend(state.denoise_mask.contiguous(), state.clean.contiguous(), before_model=convention == "comfyui")


def _to_latent(state: TokenState, tokens: Tensor) -> Tensor:
    """Target tokens as a latent, float32. A copy, so that no recording's buffer leaves."""
    unpatchify = unpatchify_video if isinstance(state.shape, VideoLatentShape) else unpatchify_audio
    return unpatchify(tokens[:, : state.shape.tokens], state.shape).float().clone()


def _appended_frames(state: TokenState, tokens: Tensor, scale: float) -> Tensor | None:
    """Appended tokens as latent frames on the target's grid, float32; 0 in cells that hold no token."""
    if not state.appended_frames:
        return None
    shape = state.latent_shape
    cells = tokens.float()
    if state.cells is not None:
        cells = cells.new_zeros(shape.batch, shape.tokens, shape.channels)
        cells[:, state.cells.to(tokens.device)] = tokens.float()
    return unpatchify_video(cells, shape)[:, :, state.shape.frames :] / scale
