"""The search imports neither torch nor anything of autoplan but its errors and itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autoplan.search

FILES = sorted(Path(autoplan.search.__file__).parent.glob("*.py"))


def imported_modules(source: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_search_never_imports_torch(path: Path) -> None:
    modules = imported_modules(path.read_text())
    assert not any(name.split(".")[0] == "torch" for name in modules)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_search_imports_only_errors_and_itself_of_autoplan(path: Path) -> None:
    own = {name for name in imported_modules(path.read_text()) if name.split(".")[0] == "autoplan"}
    allowed = {"autoplan.errors"}
    assert all(name in allowed or name.startswith("autoplan.search.") for name in own)
