"""The benchmark of executed plans: its grid, its statistics, and one plan executed."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan import codec
from autoplan.profiles import load_profile
from benchmarks.executed_plans import (
    Case,
    Measured,
    cases,
    execute,
    make_plan,
    predicted_again,
    rank_correlation,
    report,
    rows_of,
    summary,
)
from tests.distributed import run_workers

CASE = Case(
    model="cnn",
    world_size=2,
    options={
        "dp": 1, "tp": 1, "pp": 2, "zero_stage": 0, "microbatch_size": 1, "recompute": "none",
    },
)  # fmt: skip


def test_the_grid_has_every_dimension_and_no_case_twice() -> None:
    listed = cases()
    assert len({case.name for case in listed}) == len(listed) >= 40
    for model in ("gpt", "cnn"):
        own = [case for case in listed if case.model == model]
        assert {case.world_size for case in own} == {1, 2, 4}
        assert {case.options["zero_stage"] for case in own} == {0, 1, 2, 3}
        assert {case.options["recompute"] for case in own} == {"none", "full"}
        assert {case.options["pp"] for case in own} == {1, 2, 4}
    assert {case.options["tp"] for case in listed if case.model == "gpt"} == {1, 2, 4}
    assert CASE in listed


def test_rank_correlation_is_that_of_spearman() -> None:
    # By hand: ranks 1 2 3 4 5 against 2 1 4 3 5, 1 - 6 * 4 / (5 * 24).
    assert rank_correlation([1, 2, 3, 4, 5], [20, 10, 40, 30, 50]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2], [3, 3, 9]) == pytest.approx(1.0)


@given(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=9, unique=True))
def test_rank_correlation_depends_on_the_order_only(values: list[float]) -> None:
    shuffled = random.Random(0).sample(values, len(values))
    plain = rank_correlation(values, shuffled)
    assert rank_correlation([v**3 for v in values], shuffled) == pytest.approx(plain)
    assert rank_correlation([-v for v in values], shuffled) == pytest.approx(-plain)


def _execute(rank: int, text: str) -> Measured:
    from autoplan.plan import Plan

    (measured,) = execute([Plan.from_json(text)])
    return measured


def test_an_executed_plan_gives_its_row() -> None:
    plan = make_plan(CASE, load_profile("cpu"))
    ranks = run_workers(_execute, 2, plan.to_json())
    (row,) = rows_of([CASE], {CASE.name: plan}, {CASE.name: ranks}, 0.5, 2)
    assert row.simulated_s == plan.timeline().on_cores_s(2)
    assert row.clock_s == max(r.step_time_s for r in ranks) > 0
    assert row.measured_s == max(r.step_yardsticks for r in ranks) * 0.5
    for predicted, measured in zip(row.predicted_bytes, row.measured_bytes, strict=True):
        assert predicted == pytest.approx(measured, rel=0.02)
    numbers = summary([row])["all"]
    assert numbers["plans"] == 1
    assert numbers["time_rank_correlation"] is None
    assert numbers["memory_worst_under"] <= 0
    assert CASE.name in report([row])


def test_a_kept_run_is_predicted_again_from_its_profile() -> None:
    used = load_profile("cpu")
    plan = make_plan(CASE, used)
    peaks = plan.predicted.peak_memory_bytes
    measured = [Measured(step_time_s=1.0, step_yardsticks=1.0, peak_bytes=b) for b in peaks]
    rows = rows_of([CASE], {CASE.name: plan}, {CASE.name: measured}, 0.5, 1)
    document = {
        "num_cores": 1,
        "profile": codec.encode(used),
        "rows": [codec.encode(replace(rows[0], predicted_s=0.0, simulated_s=0.0))],
    }
    assert predicted_again(json.loads(json.dumps(document))) == rows
