"""Pieces of a decode as CUDA graphs: which of them are recorded, which replayed, and what is said about it.

A piece is what a decoder computes between two looks at the host: a clip that runs whole, a chunk of a stream, a tile.
As a function from tensors to tensors it is recorded at its first use ("on"), or at its third when the second showed
that the host is the limit ("auto"): the first builds kernels and fills caches, so its times say nothing.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..cuda_graph import GraphCache, GraphedStep, GraphKey
from ..errors import CaptureError, RestartRequiredError
from ..graph_policy import Decision, IssueMeasurement, decide_piece
from ..memory import in_words
from ..timing import Timeline

if TYPE_CHECKING:
    from .plan import DecodePlan

Outputs = TypeVar("Outputs")

# Of a shape that was seen once.
_SEEN = "seen"


@dataclass(frozen=True)
class _Keyed:
    """What a recording is found by. kernels: what runs the piece, in words."""

    inputs: Any
    kernels: str


@dataclass
class _Timed:
    """An eager piece that is being timed."""

    started: torch.cuda.Event
    ended: torch.cuda.Event | None = None
    issue_ms: float = 0.0

    def measurement(self) -> IssueMeasurement | None:
        """None while the device works on it."""
        if self.ended is None or not self.ended.query():
            return None
        return IssueMeasurement(self.issue_ms, self.started.elapsed_time(self.ended))


class PieceRecorder:
    """Runs the pieces of one decode, in one plan, eager or by recordings. Ask `recorded` about every piece; where that
    gives None, run it eager in `eager`. `finish` after the last one.

    graphs: of the VAE. mode: "auto" or "on". generation: of the weights. kernels: what runs the decoder, in words.
    free_bytes(): device memory that is really free, None where nobody tells. phase: how the names of the phases begin
    in which recordings are made.
    """

    def __init__(
        self,
        graphs: GraphCache,
        mode: str,
        plan: DecodePlan,
        *,
        generation: int,
        kernels: str,
        free_bytes: Callable[[], int | None],
        timeline: Timeline,
        phase: str,
    ) -> None:
        self._graphs = graphs
        self._auto = mode == "auto"
        self._plan = plan
        self._generation = generation
        self._kernels = kernels
        self._free_bytes = free_bytes
        self._timeline = timeline
        self._phase = phase
        self._key: GraphKey | None = None
        self._learnt: Any = None  # about the piece of _key, once it is over
        self._refused = ""
        self._not_timed_ms = 0.0
        self._used: list[GraphedStep] = []
        self._ran = {"recorded": 0, "replayed": 0, "eager": 0}
        self._reasons: dict[str, None] = {}

    def recorded(self, inputs: Any, piece: Callable[[None, Any], Outputs]) -> Outputs | None:
        """What piece(None, inputs) gives, by its recording, made now where it is time for it. None: run it eager.

        inputs, outputs: nested frozen dataclasses and tuples of tensors and plain values; piece does not write into its
        inputs and depends on nothing else that may change. The outputs are the recording's own: valid until the next
        call. Raises RestartRequiredError.
        """
        self._settle()
        key = self._key = GraphKey.of(_Keyed(inputs, self._kernels), weight_generation=self._generation)
        if key in self._graphs:
            recording = self._graphs.find(key)
            recording.load(None, _Keyed(inputs, self._kernels))
            self._count("replayed", recording)
            return recording.replay()
        if self._is_time(key) and self._may_record(key):
            return self._record(key, inputs, piece)
        return None

    def eager(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        """The piece last asked about, as it runs by itself."""
        self._ran["eager"] += 1
        if not self._auto:
            return pieces
        known = self._graphs.measurement(self._key)
        if known is None:
            self._learnt = _SEEN
            self._say("this shape is new: its second use is timed")
        elif known is _SEEN:
            self._say("timed for its next use")
            return self._timed(pieces)
        return pieces

    def not_timed(self, call: Callable[[float], None]) -> Callable[[float], None]:
        """call, which waits for the device, and which therefore is no part of issuing a piece."""

        def called(share: float) -> None:
            begun = time.perf_counter()
            try:
                call(share)
            finally:
                self._not_timed_ms += _ms_since(begun)

        return called

    @property
    def ran_eager(self) -> bool:
        """Whether any piece did."""
        return self._ran["eager"] > 0

    def finish(self) -> str:
        """The decode is over: what there is to say, in words."""
        self._settle()
        words = "; ".join(self._reasons)
        if not self._used:
            return f"eager, {words}"
        counts = ", ".join(f"{count} {how}" for how, count in self._ran.items() if count)
        held = f"recordings hold {in_words(self._graphs.device_bytes)}"
        return "; ".join([f"{counts} of {sum(self._ran.values())} pieces", held, *self._reasons])

    def _timed(self, pieces: Iterator[Tensor]) -> Iterator[Tensor]:
        device = self._graphs.device
        timed = self._learnt = _Timed(_recorded_event(device))
        while True:
            begun, beside = time.perf_counter(), self._not_timed_ms
            piece = next(pieces, None)
            if piece is None:
                return
            timed.ended = _recorded_event(device)
            timed.issue_ms += _ms_since(begun) - (self._not_timed_ms - beside)
            yield piece
            del piece  # room for the next

    def _settle(self) -> None:
        """Keep what was learnt of the piece before, which is over."""
        learnt, self._learnt = self._learnt, None
        if learnt is not None:
            self._graphs.remember(self._key, learnt)

    def _is_time(self, key: GraphKey) -> bool:
        if not self._auto:
            return True
        known = self._graphs.measurement(key)
        if isinstance(known, _Timed):
            measurement = known.measurement()
            if measurement is None:
                self._say("the device still works on the piece that is timed")
                return False
            known = decide_piece(measurement)
            self._graphs.remember(key, known)
        if not isinstance(known, Decision):
            return False
        self._say(known.words)
        return known.capture

    def _may_record(self, key: GraphKey) -> bool:
        if not self._refused:
            self._refused = self._graphs.refusal(key) or self._no_room()
        if self._refused:
            self._say(self._refused)
        return not self._refused

    def _no_room(self) -> str:
        """Why there is no memory for one more recording, or nothing. Those of other decodes make way."""
        another = self._plan.recording_bytes
        held = sum(recording.device_bytes for recording in self._used)
        if self._used and held + another > self._graphs.max_bytes:
            return (
                f"not recorded: the recordings of this decode hold {in_words(held)}, of the "
                f"{in_words(self._graphs.max_bytes)} that all may take"
            )
        wanted = self._plan.peak_bytes + another
        while True:
            free = self._free_bytes()
            if free is None or wanted <= free:
                return ""
            if not self._graphs.evict_oldest(self._used):
                return (
                    f"not recorded: a recording takes about {in_words(another)} beside the "
                    f"{in_words(wanted - another)} of the decode, and {in_words(free)} are free"
                )

    def _record(self, key: GraphKey, inputs: Any, piece: Callable[[None, Any], Outputs]) -> Outputs | None:
        self._graphs.find(key)  # counts the miss
        try:
            recording, outputs = self._graphs.capture(
                key,
                lambda constants, keyed: piece(constants, keyed.inputs),
                None,
                _Keyed(inputs, self._kernels),
                lambda name: self._timeline.phase(name.replace("sample", self._phase)),
                keep=self._used,
            )
        except RestartRequiredError:
            raise
        except CaptureError as error:
            # Not tried again in this decode: it would fail at every piece.
            self._refused = str(error)
            self._say(self._refused)
            return None
        # Once it had to go, the shape must come back as if it were new: others may take its memory in every render.
        self._graphs.remember(key, None)
        self._count("recorded", recording)
        return outputs

    def _count(self, how: str, recording: GraphedStep) -> None:
        self._ran[how] += 1
        if all(recording is not used for used in self._used):
            self._used.append(recording)

    def _say(self, words: str) -> None:
        self._reasons[words] = None


def _ms_since(begun: float) -> float:
    return (time.perf_counter() - begun) * 1e3


def _recorded_event(device: torch.device) -> torch.cuda.Event:
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))
