"""The golden table and the pending line behind the test results."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest

from golden_kinds import Result


@dataclass
class GoldenReport:
    """Filled case by case. rows: (file, case) -> its results; pending: names of cases that are not built yet."""

    rows: dict[tuple[str, str], list[Result]] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)

    def table(self) -> list[str]:
        """One line a case. The comparison that uses most of its tolerance stands for all of them."""
        lines = [f"{'file':46} {'case':26} {'worst error':>11} {'tolerance':>9}  at (of n)"] if self.rows else []
        for (file, case), results in self.rows.items():
            worst = max(results, key=_share_of_tolerance)
            lines.append(
                f"{file:46} {case:26} {worst.worst_error:11.2e} {worst.tolerance:9.1e}  {worst.name} ({len(results)})"
            )
        return lines

    def pending_line(self) -> str:
        return f"pending: {len(self.pending)} cases: {', '.join(self.pending)}"


GOLDEN_REPORT = pytest.StashKey[GoldenReport]()


def _share_of_tolerance(result: Result) -> float:
    if math.isnan(result.worst_error):
        return math.inf
    if result.tolerance:
        return result.worst_error / result.tolerance
    return math.inf if result.worst_error else 0.0
