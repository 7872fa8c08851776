"""Triton kernels without a GPU: its interpreter runs them in numpy, program by program. It has to be switched on before
triton is imported, hence in a process of its own: a test file runs itself as a script. The interpreter's matrix product
can't do bf16.
"""
from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def check_cases(script: str, count: int) -> None:
    """Run a test file as a script, which prints name, worst error and tolerance of `count` cases, a line each."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(script).parents[1])}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    cases = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(cases) == count, done.stdout
    bad = [name for name, error, tolerance in cases if not float(error) <= float(tolerance)]
    assert not bad, done.stdout


def let_the_interpreter_count() -> None:
    """Triton 3.6 turns a loop's bound into a number by a conversion that NumPy 2.4 refuses."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
