"""What the page on traps says holds them is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "design" / "emission-traps.md").read_text()


def _names(path: Path) -> set[str]:
    """Return the functions and classes of a file, methods left out."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, kinds)}


def test_every_trap_names_a_rule_and_a_test_that_exist() -> None:
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 30
    for row in rows:
        held = row.rsplit("|", 2)[1]
        rules = re.findall(r"`(\w+)\.(\w+)`", held)
        tests = re.findall(r"`(\w+)::(\w+)`", held)
        assert rules, row
        assert tests, row
        for module, name in rules:
            assert name in _names(ROOT / "autoplan" / f"{module}.py"), f"{module}.{name}"
        for file, name in tests:
            assert name in _names(files[file]), f"{file}::{name}"
