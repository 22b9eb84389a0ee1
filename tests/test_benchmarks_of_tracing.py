"""The benchmarks of tracing run, and their claims hold on small examples."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

pytest.importorskip("transformers")

from autoplan.tracer import trace
from benchmarks.trace_coverage import measure, table
from benchmarks.trace_scaling import gpt


@pytest.mark.parametrize("name", ["gpt2", "resnet", "convnext"])
def test_an_architecture_traces_exactly(name: str) -> None:
    row = measure(name)
    assert row.traced
    assert row.parameters_equal
    assert row.kept_bytes_error == row.forward_flops_error == row.backward_flops_error == 0
    assert f"| {name} | yes |" in table([row])


def calls_of_a_trace(depth: int) -> int:
    """Return how many functions of Python a trace calls."""
    count = 0

    def counted(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    model, batch = gpt(depth)
    sys.setprofile(counted)
    try:
        trace(model, batch)
    finally:
        sys.setprofile(None)
    return count


def test_depth_costs_little() -> None:
    """Eight times the layers; calls do not depend on the machine, and cheap ones count as much."""
    calls_of_a_trace(2)  # imports, and caches of torch
    assert calls_of_a_trace(96) < 2.5 * calls_of_a_trace(12)
