"""Every golden file in --goldens DIR against the runtime.

    python3 -m pytest tests/test_goldens.py --goldens DIR

Dispatch is on the metadata's kind, never on file names. An unknown kind fails. What is not built yet is pending by
name.
"""

from __future__ import annotations

import importlib
import importlib.util
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from golden_kinds import Result, metadata
from golden_kinds.pending import KINDS as PENDING_KINDS
from golden_kinds.report import GOLDEN_REPORT

WEIGHTS_KIND = "weights"  # loaded by the cases that name them


def _kind_module(kind: str):
    name = f"golden_kinds.{kind}"
    return importlib.import_module(name) if kind.isidentifier() and importlib.util.find_spec(name) else None


def _golden_cases(folder: Path) -> list:
    """pytest params (path, kind, case). A kind without module has the one case "*"."""
    params = []
    for path in sorted(folder.glob("*.safetensors")):
        kind = metadata(path).get("kind", "")
        if kind == WEIGHTS_KIND:
            continue
        module = _kind_module(kind)
        cases = module.cases(path) if module else ["*"]
        params.extend(pytest.param(path, kind, case, id=f"{path.stem}:{case}") for case in cases)
    return params


def pytest_generate_tests(metafunc):
    if "golden_case" in metafunc.fixturenames:
        params = _golden_cases(metafunc.config.getoption("--goldens"))
        metafunc.parametrize(("golden_path", "golden_kind", "golden_case"), params)


def _pending_reason(kind: str, case: str) -> str | None:
    if kind in PENDING_KINDS:
        return PENDING_KINDS[kind]
    patterns = getattr(_kind_module(kind), "PENDING", {})
    return next((reason for pattern, reason in patterns.items() if fnmatchcase(case, pattern)), None)


def test_golden(golden_path: Path, golden_kind: str, golden_case: str, request):
    report = request.config.stash[GOLDEN_REPORT]
    reason = _pending_reason(golden_kind, golden_case)
    if reason is not None:
        report.pending.append(f"{golden_path.stem}:{golden_case}")
        pytest.skip(f"pending: {reason}")
    module = _kind_module(golden_kind)
    assert module is not None, (
        f"{golden_path.name}: golden kind {golden_kind!r} is unknown. Add tests/golden_kinds/{golden_kind}.py."
    )
    results = [Result(*result) for result in module.check(golden_path, golden_case)]
    assert results, f"{golden_path.name}: case {golden_case} compared nothing"
    report.rows[golden_path.stem, golden_case] = results
    failed = [result for result in results if not result.worst_error <= result.tolerance]
    assert not failed, "\n".join(f"{r.name}: worst error {r.worst_error:.3e} > {r.tolerance:.1e}" for r in failed)


def test_goldens_are_there(request):
    folder = request.config.getoption("--goldens")
    assert any(folder.glob("*.safetensors")), f"no golden files in {folder}"
