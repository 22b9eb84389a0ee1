"""Emitted modules equal the single-device model: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest

from autoplan.plan import Recompute
from autoplan.program import Program
from tests.distributed import run_workers
from tests.numerics import Case, check_cases


def full(program: Program) -> Recompute:
    """Return the mark that keeps nothing."""
    return Recompute(mode="full")


def selective(program: Program) -> Recompute:
    """Return marks on attention and the first linear of the block."""
    block = next(graph for graph in program.graphs if not graph.is_glue)
    names = [op.name for op in block.ops]
    kept = [n for n in names if "scaled_dot_product" in n]
    kept += [n for n in names if "linear" in n or "addmm" in n][:1]
    return Recompute(mode="selective", keep=tuple(kept))


def check(cases: list[Case], world_size: int) -> None:
    """Run cases on forked workers and fail with what does not agree."""
    for problems in run_workers(check_cases, world_size, tuple(cases), timeout_s=100):
        assert problems == []


def case(model: str, **plan: Any) -> Case:
    """Return a case by its plan's arguments."""
    return Case(model=model, plan=plan)


@pytest.mark.parametrize("recompute", [None, full, selective])
def test_one_device_equals_the_model(recompute: Any) -> None:
    plan = {} if recompute is None else {"recompute": recompute}
    models = ("gpt", "gpt_tied", "llama", "gpt2")
    check([case(m, num_microbatches=2, **plan) for m in models], 1)


def test_every_zero_stage_equals_the_model() -> None:
    cases = [
        case(model, dp=2, zero_stage=zero, num_microbatches=m)
        for zero in range(4)
        for model, m in (("gpt_tied", 1), ("gpt", 2), ("llama", 2), ("gpt2", 2))
    ]
    check(cases, 2)


def test_recompute_under_zero_equals_the_model() -> None:
    cases = [
        case(model, dp=2, zero_stage=zero, num_microbatches=2, recompute=recompute)
        for zero in (0, 3)
        for recompute in (full, selective)
        for model in ("gpt", "llama")
    ]
    check(cases, 2)
