"""docs/cases.md names tests that exist, and every case of its groups."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", TABLE)))


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[f"{file}::{test}" for file, test in NAMED])
def test_a_named_test_exists(file, test):
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_has_its_line():
    listed = re.findall(r"^\| ([ABCH]\d) ", TABLE, re.MULTILINE)
    wanted = [f"{group}{n}" for group, count in (("A", 7), ("B", 9), ("C", 4), ("H", 6)) for n in range(1, count + 1)]
    assert listed == wanted
    for line in TABLE.splitlines():
        assert not re.match(r"\| [ABCH]\d ", line) or len(line.split("|")[2].strip()) > 10
