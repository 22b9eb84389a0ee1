"""The benchmarks of tracing run, and their claims hold on small examples."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.trace_coverage import measure, table
from benchmarks.trace_scaling import depth_ratio


@pytest.mark.parametrize("name", ["gpt2", "resnet", "convnext"])
def test_an_architecture_traces_exactly(name: str) -> None:
    row = measure(name)
    assert row.traced
    assert row.parameters_equal
    assert row.kept_bytes_error == row.forward_flops_error == row.backward_flops_error == 0
    assert f"| {name} | yes |" in table([row])


def test_depth_costs_little() -> None:
    """The benchmark asks for 1.3; a test shares its machine."""
    assert depth_ratio(repeats=3) < 1.6
