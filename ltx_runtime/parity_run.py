"""From renders to a verdict: two finished clips (`judge_clips`), or both arms run here (`run_parity`): eager and
graphed, several seeds and replays, judged on latents, unclamped decoder output, frames and waveform.

Reading order: `judge_clips`; `run_parity`, `_Arms`, `_judged`. The comparing itself is in parity.py.

Source: design.md section 6, "Parity rule".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .audio_vae import AudioVAE
from .cuda_graph import GRAPH_NOTE, unavailable_reason
from .errors import CaptureError, RequestError, RestartRequiredError
from .gpu_activity import measure_gpu_busy
from .loop_activity import LoopActivity, measure_loop_activity, plain_activity
from .parity import (
    SECOND_PROMPT,
    Arm,
    Comparison,
    RangeStats,
    Trial,
    Verdict,
    check_tolerance,
    compare_frames,
    compare_latents,
    compare_waveforms,
    digest,
    first_differing_stage,
    frame_range,
    judge,
    waveform_range,
)
from .request import TextFeatures
from .runtime import TransformerModel
from .sampler import SampleRequest, SampleResult, fix_batching, sample
from .seams import SeamFindings, compare_at_seams
from .stages import trace_stages
from .timing import Timeline
from .video_vae import DecodePlan, VideoVAE
from .video_vae.host_frames import to_frames
from .video_vae.tiling import TileOverlaps

EAGER, GRAPHED, REPEATED = "eager", "graphed", "eager repeated"
PARTLY_GRAPHED = "partly graphed"
_LAST_SEED = 2**64 - 1
# The setting of a render that asks for CUDA graphs of its video decode.
DECODE_GRAPH = "decode_cuda_graph"
_LATENTS = ("latent", "audio latent")
_LONGEST_NAME = 48


@dataclass(frozen=True)
class ParityOutcome:
    """One verdict and the pair of clips to show for it: the worst one, where there were several.

    names: what the two clips are. frames: the comparison of the two, waveform: that of their sound. seams:
    differences at the seams of tiles, where the clips were decoded with different ones. clips: (N, H, W, 3)
    float, on the host. graphs: what each arm says about its CUDA graphs. activities: what the profiler saw of each arm,
    where that was asked for. decodes: what was said in each arm about the CUDA graphs of its decodes.
    """

    verdict: Verdict
    names: tuple[str, str]
    clips: tuple[Tensor, Tensor]
    frames: Comparison
    waveform: Comparison | None = None
    seams: SeamFindings | None = None
    graphs: Mapping[str, dict | None] = field(default_factory=dict)
    activities: Mapping[str, LoopActivity] = field(default_factory=dict)
    decodes: Mapping[str, Sequence[str]] = field(default_factory=dict)


def judge_clips(
    clips: tuple[Tensor, Tensor],
    sounds: tuple[tuple[Tensor, int], tuple[Tensor, int]] | None,
    graphs: tuple[dict | None, dict | None],
    settings: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    tiles: tuple[TileOverlaps | None, TileOverlaps | None] = (None, None),
    *,
    decode_graphs: tuple[dict | None, dict | None] = (None, None),
    tolerance: float,
) -> ParityOutcome:
    """Judge two finished renders, of whatever two kinds: eager and graphed, two seeds, two settings, tiled and untiled.

    clips: IMAGE tensors (N, H, W, C). sounds: (waveform (B, C, T), sample rate) of both. graphs: what their samplers
    said about CUDA graphs (`SampleResult.graph`), None where nobody knows.
    settings: what each was made with, by name; empty where nobody knows. What differs in them is said in the verdict,
    and names the arms where it is one plain value.
    tiles: of the decode of each; None without tiles. Where they differ, the verdict says whether the pictures differ at
    the seams.
    decode_graphs: as graphs, of the video decodes.
    Where nothing else differs, the graphs are in question, those of the decodes where they were asked for differently:
    without a wholly graphed and an eager arm, and with one that was asked to use a graph, the verdict is "not tested",
    and the comparison a repeated eager render.
    Raises RequestError for a tolerance that is none.
    """
    comparisons = [compare_frames(*clips)]
    ranges = [frame_range(clip) for clip in clips]
    if sounds is not None:
        comparisons.append(_compare_sounds(*sounds))
        ranges += [waveform_range(waveform) for waveform, _ in sounds]
    first_stage = next((c for c in comparisons if c.total and not c.bit_exact), None)
    trial = Trial("render", tuple(comparisons), tuple(ranges), first_stage=first_stage)
    ran = tuple(map(_how_it_ran, graphs))
    changed = _changed(*settings)
    names = _names(ran, changed)
    fallback = "" if changed.keys() - {DECODE_GRAPH} else _untested(graphs, decode_graphs, DECODE_GRAPH in changed)
    if fallback:
        names = (EAGER, REPEATED)
        verdict = judge(Arm(GRAPHED, EAGER, not_run=fallback), [Arm(REPEATED, EAGER, (trial,))], tolerance=tolerance)
    else:
        # The arm in question is the graphed or the tiled one, whichever socket it came in by.
        first = ran[0] == GRAPHED != ran[1] or (ran[0] == ran[1] and tiles[0] is not None and tiles[1] is None)
        against, name = names[::-1] if first else names
        verdict = judge(Arm(name, against, (trial,)), tolerance=tolerance)
    words, numbers = [verdict.words], dict(verdict.numbers)
    seams = None
    if tiles[0] != tiles[1]:
        seams = compare_at_seams(*clips, [layout for layout in tiles if layout is not None])
        if seams is None:
            words.append("where tiles overlap is not known: these are not the pictures as they were decoded")
        else:
            words.append(seams.words())
            numbers["seams"] = seams.as_dict()
    if changed:
        pairs = ", ".join(f"{key} {_short(a)} and {_short(b)}" for key, (a, b) in changed.items())
        words.append(f"settings that differ: {pairs}")
    verdict = dataclasses.replace(verdict, words="; ".join(words), numbers=numbers)
    return ParityOutcome(
        verdict,
        names,
        clips,
        comparisons[0],
        comparisons[1] if sounds else None,
        seams,
        dict(zip(names, graphs)),
    )


def _untested(
    graphs: tuple[dict | None, dict | None], decode_graphs: tuple[dict | None, dict | None], of_decodes: bool
) -> str:
    """Why graphs that are in question were not tested; empty where they were. of_decodes: those of the decodes are, and
    those of the samplers only where these too were asked for differently."""
    requested = [None if graph is None else graph["requested"] for graph in graphs]
    in_question = [decode_graphs] if of_decodes else []
    if not of_decodes or requested[0] != requested[1]:
        in_question.append(graphs)
    untested = (pair for pair in in_question if set(map(_how_it_ran, pair)) != {EAGER, GRAPHED})
    return next((why for pair in untested for why in map(_why_not_graphed, pair) if why), "")


def _changed(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs in two renders' settings, of those that both have; the parts of a setting one by one."""
    pairs = {}
    for key in (key for key in a if key in b):
        parts = _parts(key, a[key]), _parts(key, b[key])
        absent = 0.0 if key == "loras" else None
        for name in dict.fromkeys([*parts[0], *parts[1]]):
            pairs[name] = tuple(side.get(name, absent) for side in parts)
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _parts(key: str, value: Any) -> dict[str, Any]:
    """A setting as one value or several, by name: strengths of LoRAs by file, what is inside a mapping by its path."""
    if key == "loras":
        strengths: dict[str, float] = {}
        for lora in value:  # one file twice adds up
            name = f"LoRA {lora['file'].removesuffix('.safetensors')}"
            strengths[name] = strengths.get(name, 0.0) + lora["strength"]
        return strengths
    if isinstance(value, Mapping):
        return {name: part for inner in value for name, part in _parts(f"{key} {inner}", value[inner]).items()}
    return {key: value}


def _how_it_ran(graph: dict | None) -> str:
    """EAGER, GRAPHED, PARTLY_GRAPHED, or empty where nobody knows."""
    if graph is None:
        return ""
    if graph["mode"] != "graph":
        return EAGER
    return PARTLY_GRAPHED if graph.get("fallback") else GRAPHED


def _why_not_graphed(graph: dict | None) -> str:
    """Why a render that might have used a graph did not, or not for all steps; empty otherwise."""
    if graph is None or graph["requested"] == "off" or _how_it_ran(graph) == GRAPHED:
        return ""
    return graph.get("fallback") or graph["decision"]


def _names(ran: tuple[str, str], changed: Mapping[str, tuple]) -> tuple[str, str]:
    """What to call the two: by how they ran, else by the one setting in which they differ, else by letters."""
    if all(ran) and ran[0] != ran[1]:
        return ran
    if len(changed) == 1:
        ((key, pair),) = changed.items()
        words = tuple(f"{key} {value}".removesuffix(".safetensors") for value in pair)
        if all(isinstance(value, (bool, int, float, str)) for value in pair) and max(map(len, words)) <= _LONGEST_NAME:
            return words
    return tuple(f"{name or 'render'} {letter}" for name, letter in zip(ran, "AB"))


def _short(value: Any) -> str:
    words = "none" if value is None else str(value)
    return words if len(words) <= _LONGEST_NAME else f"{words[: _LONGEST_NAME - 3]}..."


def _compare_sounds(a: tuple[Tensor, int], b: tuple[Tensor, int]) -> Comparison:
    if a[1] != b[1]:
        note = f"sample rates differ: {a[1]} and {b[1]} Hz"
        total = max(a[0].numel(), b[0].numel())
        return Comparison("waveform", tuple(a[0].shape), total, False, max_abs=None, mean_abs=None, note=note)
    return compare_waveforms(a[0], b[0])


@dataclass(frozen=True)
class _Case:
    name: str
    request: SampleRequest


@dataclass
class _Render:
    """One render of one arm. replay counts the renders of its case in this arm from 1."""

    arm: str
    case: int
    replay: int
    result: SampleResult


def run_parity(
    model: TransformerModel,
    vae: VideoVAE,
    request: SampleRequest,
    *,
    replays: int,
    seeds: int,
    tolerance: float,
    timelines: Callable[[str], Timeline],
    audio_vae: AudioVAE | None = None,
    other_text: TextFeatures | None = None,
    load: Callable[[Timeline], None] = lambda timeline: None,
    without_graphs: str = "",
    measure_residency: bool = False,
    check_cancelled: Callable[[], None] = lambda: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ParityOutcome:
    """Run both arms and judge them.

    request: needs a video part. Its seed is the first of `seeds` seeds counted upwards; a given start noise is used for
    the first seed only. replays: graphed renders of each seed, in turns, so that every replay finds other inputs than
    the one before. audio_vae: decodes the sound, which is then judged as the frames are; without it only the sound's
    latent is.
    other_text: a second prompt, which every other seed renders. timelines(arm): a new timeline for an arm.
    load(timeline): brings the weights, in the first arm's timeline.
    without_graphs: why the host forbids graphs, empty when it doesn't.
    measure_residency: afterwards run the loop of each arm and one decode once more under the profiler, which then slows
    every launch of the process down; no time in the timelines is touched by it. on_progress(done, total): in steps, the
    decoding of a render counting as one.
    Raises RequestError, and all that `sample` and the decoders raise.
    """
    if request.video is None:
        raise RequestError("latent_image: parity is judged on decoded frames; connect a latent with a video part.")
    if audio_vae is not None and request.audio is None:
        raise RequestError(
            "audio_vae: latent_image holds no sound to decode. Connect video with audio, or no audio VAE."
        )
    if replays < 1 or seeds < 1:
        raise RequestError(f"replays={replays} and seeds={seeds} must both be at least 1.")
    check_tolerance(tolerance)
    cases = _cases(request, seeds, other_text)
    arms = _Arms(model, cases, timelines, check_cancelled, _Counter(on_progress, request, seeds * (replays + 2)))

    with arms.timeline(EAGER).segment("load"):
        load(arms.timeline(EAGER))
        model.ensure_resident(arms.timeline(EAGER))
    # Decided once: a batch of passes and passes one after the other are different kernels.
    arms.cases = _cases(fix_batching(model, request), seeds, other_text)
    eager = arms.render(EAGER, range(seeds), cuda_graph="off")
    refused = without_graphs or unavailable_reason(model.device) or ""
    graphed: list[_Render] = []
    for replay in range(1, replays + 1):
        if refused:
            break
        graphed += arms.render(GRAPHED, range(seeds), cuda_graph="on", replay=replay)
        refused = next((r.result.graph["fallback"] for r in graphed if r.result.graph.get("fallback")), "")
    # With graphs one repeated render shows whether the kernels repeat at all; without, it is all there is to test.
    repeated = arms.render(REPEATED, range(seeds) if refused else [0], cuda_graph="off")

    plan = vae.plan(request.video.shape.as_tuple(), clips_kept=2)
    judged = _judged(arms, vae, audio_vae, plan, eager, graphed, repeated, refused, tolerance)
    graphs = {renders[-1].arm: renders[-1].result.graph for renders in (eager, graphed, repeated) if renders}
    activities = {}
    if measure_residency:
        activities = _activities(arms, vae, plan, eager[0], graphed if not refused else [])
    decodes = {arm: _said_of_decodes(timeline) for arm, timeline in arms.timelines.items()}
    verdict = judged.verdict
    eager_decodes = _said_of_decodes(arms.timelines[GRAPHED], of_eager_ones=True) if graphed else []
    if eager_decodes:
        how = f"in the {GRAPHED} arm decodes ran eager, in whole or in part"
        words = f"{verdict.words}; {how}: {', '.join(eager_decodes)}"
        verdict = dataclasses.replace(verdict, words=words)
    return dataclasses.replace(judged, verdict=verdict, graphs=graphs, activities=activities, decodes=decodes)


def _said_of_decodes(timeline: Timeline, *, of_eager_ones: bool = False) -> list[str]:
    """What was noted about the CUDA graphs of decodes, each thing once. of_eager_ones: only where one ran without, in
    whole or in part."""
    notes = (
        event
        for event in timeline.events
        if event["event"] == "note" and event["phase"].startswith("decode.") and event["message"].startswith(GRAPH_NOTE)
    )
    kept = (note for note in notes if note["attrs"].get("eager") or not of_eager_ones)
    return list(dict.fromkeys(f"{note['phase']}: {note['message']}" for note in kept))


def _activities(
    arms: _Arms, vae: VideoVAE, plan: DecodePlan, eager: _Render, graphed: Sequence[_Render]
) -> dict[str, LoopActivity]:
    """Each arm under the profiler. Last of all, because the profiler slows every launch after it."""
    found = {}
    for arm, cuda_graph in ((EAGER, "off"), (GRAPHED, "on"))[: 2 if graphed else 1]:
        arms.check_cancelled()
        try:
            found[arm] = measure_loop_activity(arms.model, arms.cases[0].request, cuda_graph=cuda_graph)
        except RestartRequiredError:
            raise
        except CaptureError as error:  # the recording had to go meanwhile and could not be made again
            found[arm] = LoopActivity(None, f"resident: not measured, {error}")
        arms.timeline(arm).note("sample.measure", found[arm].words)
    if found[EAGER].loop is not None:
        arms.check_cancelled()
        decode = measure_gpu_busy(
            lambda: vae.decode_raw(eager.result.video, plan=plan, cuda_graph="off"), device=vae.device
        )
        if decode.reason is None:
            found = {
                arm: activity if activity.loop is None else dataclasses.replace(activity, decode=plain_activity(decode))
                for arm, activity in found.items()
            }
    found[REPEATED] = LoopActivity(None, f"resident: not measured, this arm repeats the {EAGER} one")
    return found


class _Counter:
    """Steps and decodes done, of all."""

    def __init__(self, on_progress: Callable[[int, int], None], request: SampleRequest, renders: int):
        self.total = renders * len(request.sigmas)  # n+1 sigmas: n steps and a decode
        self.done = 0
        self._on_progress = on_progress

    def advance(self, *_) -> None:
        self.done = min(self.done + 1, self.total)
        self._on_progress(self.done, self.total)


class _Arms:
    """Renders cases into the timelines of the arms."""

    def __init__(self, model, cases: Sequence[_Case], timelines, check_cancelled, counter: _Counter):
        self.cases = cases
        self.timelines: dict[str, Timeline] = {}
        self.check_cancelled = check_cancelled
        self.counter = counter
        self.model = model
        self._new_timeline = timelines

    def timeline(self, arm: str) -> Timeline:
        if arm not in self.timelines:
            self.timelines[arm] = self._new_timeline(arm)
        return self.timelines[arm]

    def render(self, arm: str, which: Sequence[int], *, cuda_graph: str, replay: int = 1) -> list[_Render]:
        renders = []
        timeline = self.timeline(arm)
        with timeline.segment(arm):
            for case in which:
                self.model.contexts.clear()  # a render that took another's would not be judged, nor timed, as a whole
                result = sample(
                    self.model,
                    self.cases[case].request,
                    cuda_graph=cuda_graph,
                    on_capture_failure="eager",
                    timeline=timeline,
                    check_cancelled=self.check_cancelled,
                    on_step=self.counter.advance,
                )
                renders.append(_Render(arm, case, replay, result))
        return renders


@dataclass(frozen=True)
class _Decoded:
    """All on the device. Sound is None where none was decoded."""

    unclamped: Tensor  # (B, 3, F, Hpx, Wpx)
    frames: Tensor  # (B*F, Hpx, Wpx, 3) float32
    unclamped_sound: Tensor | None  # (B, channels, samples) float32
    waveform: Tensor | None
    ranges: tuple[RangeStats, ...]


def _judged(
    arms: _Arms,
    vae: VideoVAE,
    audio_vae: AudioVAE | None,
    plan: DecodePlan,
    eager: Sequence[_Render],
    graphed: Sequence[_Render],
    repeated: Sequence[_Render],
    refused: str,
    tolerance: float,
) -> ParityOutcome:
    """Decode everything with one plan, seed by seed, so that two decoded clips are alive at a time."""

    def decode(render: _Render) -> _Decoded:
        timeline = arms.timeline(render.arm)
        cuda_graph = "on" if render.arm == GRAPHED else "off"
        with timeline.segment(f"decode {render.arm}"), torch.inference_mode():
            raw = vae.decode_raw(
                render.result.video,
                plan=plan,
                cuda_graph=cuda_graph,
                timeline=timeline,
                check_cancelled=arms.check_cancelled,
            )
            frames = torch.cat([to_frames(clip[None]) for clip in raw])
            ranges = [frame_range(frames)]
            sound = waveform = None
            if audio_vae is not None:
                sound = audio_vae.decode_raw(
                    render.result.audio,
                    cuda_graph=cuda_graph,
                    timeline=timeline,
                    check_cancelled=arms.check_cancelled,
                )
                waveform = sound.clamp(-1, 1)
                ranges.append(waveform_range(waveform))
        arms.counter.advance()
        return _Decoded(raw, frames, sound, waveform, tuple(ranges))

    trials: dict[str, list[Trial]] = {GRAPHED: [], REPEATED: []}
    outputs = {}
    kept: tuple | None = None
    for index, (case, first) in enumerate(zip(arms.cases, eager)):
        a = decode(first)
        outputs[case.name] = digest(a.frames)
        for other in (r for r in (*graphed, *repeated) if r.case == index):
            b = decode(other)
            trial = _compare(case.name, other.replay, first, a, other, b)
            trials[other.arm].append(trial)
            found = {c.name: c for c in trial.comparisons}
            frames, waveform = found["frames"], found.get("waveform")
            largest = max(c.max_abs or 0.0 for c in (frames, waveform) if c is not None)
            exact = frames.bit_exact and (waveform is None or waveform.bit_exact)
            badness = (not exact, largest, other.arm == GRAPHED)
            if kept is None or badness > kept[0]:
                kept = (badness, (EAGER, other.arm), (a.frames.cpu(), b.frames.cpu()), frames, waveform)
            del b  # makes room for the next
        del a

    question = Arm(GRAPHED, EAGER, _with_stages(arms, trials[GRAPHED], "on"), not_run=refused)
    control = Arm(REPEATED, EAGER, _with_stages(arms, trials[REPEATED], "off"))
    verdict = judge(question, [control], tolerance=tolerance, outputs=outputs)
    _, names, clips, frames, waveform = kept
    return ParityOutcome(verdict, names, clips, frames, waveform)


def _with_stages(arms: _Arms, trials: Sequence[Trial], cuda_graph: str) -> tuple[Trial, ...]:
    """The trials; for the first whose latents differ, both renders are run once more with a fingerprint after every
    step, to say where the difference begins. Steps are not kept in the first place: nobody needs them while all is
    equal."""
    trials = list(trials)
    position = next((i for i, t in enumerate(trials) if t.first_stage and t.first_stage.name in _LATENTS), None)
    if position is None:
        return tuple(trials)
    trial = trials[position]
    request = next(case.request for case in arms.cases if case.name == trial.case)
    stage = None
    try:
        traced = [
            trace_stages(arms.model, request, cuda_graph=mode, check_cancelled=arms.check_cancelled)
            for mode in ("off", cuda_graph)
        ]
    except RestartRequiredError:
        raise
    except CaptureError as error:
        note = f"the step is not known, the graphed render could not be run again: {error}"
    else:
        stage = first_differing_stage(*traced)
        note = "found in a rerun of both"
        if stage is None:
            note = "the step is not known, a rerun of both came out equal"
    trials[position] = dataclasses.replace(trial, first_stage=stage or trial.first_stage, stage_note=note)
    return tuple(trials)


def _compare(case: str, replay: int, first: _Render, a: _Decoded, other: _Render, b: _Decoded) -> Trial:
    """Everything that two renders made, in the order of the render."""
    comparisons = [compare_latents(first.result.video, other.result.video)]
    if first.result.audio is not None:
        comparisons.append(compare_latents(first.result.audio, other.result.audio, "audio latent"))
    comparisons.append(compare_latents(a.unclamped, b.unclamped, "unclamped frames"))
    comparisons.append(compare_frames(a.frames, b.frames))
    if a.waveform is not None:
        comparisons.append(compare_waveforms(a.unclamped_sound, b.unclamped_sound, "unclamped waveform"))
        comparisons.append(compare_waveforms(a.waveform, b.waveform))
    first_stage = next((c for c in comparisons if not c.bit_exact), None)
    return Trial(case, tuple(comparisons), (*a.ranges, *b.ranges), replay, first_stage)


def _cases(request: SampleRequest, seeds: int, other_text: TextFeatures | None) -> list[_Case]:
    cases = []
    for offset in range(seeds):
        seed = (request.seed + offset) % (_LAST_SEED + 1)
        changed = dataclasses.replace(request, seed=seed, noise=request.noise if offset == 0 else None)
        name = f"seed {seed}"
        if other_text is not None and offset % 2:
            changed = dataclasses.replace(changed, text=other_text)
            name += SECOND_PROMPT
        cases.append(_Case(name, changed))
    return cases
