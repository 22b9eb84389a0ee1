"""The matrix of torch versions reads what pytest prints."""

from __future__ import annotations

from benchmarks.torch_matrix import outcome_of


def test_failures_and_errors_are_counted_and_the_first_is_named() -> None:
    printed = "..F\nFAILED tests/a.py::test_b - ValueError: x\nERROR tests/c.py\n"
    printed += "1 failed, 2 passed, 1 error in 3.00s\n"
    assert outcome_of(printed) == ("2", "2", "tests/a.py::test_b - ValueError: x")
    assert outcome_of("....\n4 passed in 1.00s\n") == ("4", "0", "")
    assert outcome_of("no tests ran in 0.01s\n") == ("0", "0", "")
