"""Emitted modules equal the single-device model: loss and every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from autoplan.plan import Recompute
from autoplan.program import Program
from tests.distributed import run_workers
from tests.layouts import megatron, scattered
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


def test_pipelines_equal_the_model() -> None:
    cases = [
        case("gpt_tied", pp=2, num_microbatches=2),
        case("gpt", pp=2, num_microbatches=4, first_calls=[2], schedule="gpipe"),
        case("llama", pp=2, num_microbatches=4, first_calls=[4]),
        case("gpt2", pp=2, num_microbatches=4, recompute=selective),
    ]
    check(cases, 2)


def test_pipelines_under_every_zero_stage_equal_the_model() -> None:
    cases = [
        case("gpt_tied", pp=2, dp=2, zero_stage=zero, num_microbatches=3, recompute=selective)
        for zero in range(4)
    ]
    cases += [case("gpt2", pp=4, num_microbatches=4)]
    check(cases, 4)


def test_tensor_parallel_layouts_equal_the_model() -> None:
    cases = [
        case(model, tp=2, num_microbatches=2, layouts=megatron, recompute=recompute)
        for model, recompute in (
            ("gpt_tied", None),
            ("gpt_split", selective),
            ("llama", selective),
            ("gpt2", full),
        )
    ]
    cases += [
        case("gpt_tied", tp=2, layouts=functools.partial(scattered, seed=seed), recompute=selective)
        for seed in range(2)
    ]
    check(cases, 2)


def test_tensor_parallel_under_every_zero_stage_equals_the_model() -> None:
    cases = [
        case("gpt_tied", tp=2, dp=2, zero_stage=zero, num_microbatches=2, layouts=megatron)
        for zero in range(4)
    ]
    check([*cases, case("gpt2", tp=2, dp=2, zero_stage=3, layouts=megatron)], 4)


def test_three_dimensions_equal_the_model() -> None:
    plan = {"pp": 2, "dp": 2, "tp": 2, "num_microbatches": 2, "layouts": megatron}
    check([case("gpt_tied", zero_stage=z, recompute=selective, **plan) for z in (1, 3)], 8)
