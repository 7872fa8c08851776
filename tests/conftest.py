"""The golden option, and the golden table behind the test results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from golden_kinds.report import GOLDEN_REPORT, GoldenReport


def pytest_addoption(parser):
    parser.addoption(
        "--goldens",
        type=Path,
        default=Path(__file__).parent / "goldens",
        metavar="DIR",
        help="folder of golden files (default: tests/goldens)",
    )


def pytest_configure(config):
    # Tiny tensors on few cores: torch's threads cost more than they bring.
    torch.set_num_threads(1)
    config.stash[GOLDEN_REPORT] = GoldenReport()


def pytest_terminal_summary(terminalreporter, config):
    lines = config.stash[GOLDEN_REPORT].table()
    if lines:
        terminalreporter.section("goldens")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Name pending cases in the very last line: pytest's own count of passed tests must not be the final word."""
    result = yield
    report = session.config.stash[GOLDEN_REPORT]
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if report.pending and reporter:
        reporter.write_line(report.pending_line())
    return result
