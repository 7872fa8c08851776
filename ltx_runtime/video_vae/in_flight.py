"""Phases of chunks that overlap: one is issued while the one before it is still being computed."""
from __future__ import annotations

from ..timing import Phase, Timeline


class PhasesInFlight:
    """Open phases of one name: the one being issued and the one behind it. An exception ends them all."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name
        self._open: list[Phase] = []

    def __enter__(self) -> PhasesInFlight:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for phase in self._open:
            self._timeline.end(phase, error=error)

    def begin(self, **attrs: int) -> Phase:
        phase = self._timeline.begin(self._name, **attrs)
        self._open.append(phase)
        return phase

    def end(self, phase: Phase) -> None:
        """Waits for the chunk."""
        self._open.remove(phase)
        self._timeline.end(phase)
