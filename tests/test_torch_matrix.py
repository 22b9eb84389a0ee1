"""The matrix of torch versions reads what pytest prints."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.torch_matrix import found_at, outcome_of, run_version


def test_failures_and_errors_are_counted_and_the_first_is_named() -> None:
    printed = "..F\nFAILED tests/a.py::test_b - ValueError: x\nERROR tests/c.py\n"
    printed += "1 failed, 2 passed, 1 error in 3.00s\n"
    assert outcome_of(printed) == ("2", "2", "tests/a.py::test_b - ValueError: x")
    assert outcome_of("....\n4 passed in 1.00s\n") == ("4", "0", "")
    assert outcome_of(f"{printed}4 passed in 1.00s\n") == (
        "6",
        "2",
        "tests/a.py::test_b - ValueError: x",
    )
    assert outcome_of("no tests ran in 0.01s\n") == ("0", "0", "")


def test_a_python_or_a_folder_of_packages_is_used_as_it_is(tmp_path: Path) -> None:
    assert found_at(Path(sys.executable))[0] == sys.executable
    python, environment = found_at(tmp_path)
    assert python == sys.executable
    assert environment["PYTHONPATH"].startswith(str(tmp_path))
    with pytest.raises(SystemExit, match="is not there"):
        found_at(tmp_path / "none")


def test_another_version_than_the_wanted_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('__version__ = "1.0+cpu"')
    row = run_version("2.0", tmp_path, (), tmp_path)
    assert row == ("2.0", "-", "-", f"{tmp_path} has 1.0+cpu")
