"""Budgets of wall time, under a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoplan.profiles import measure_host, measure_links, measure_op_classes, measure_ops
from autoplan.profiles.budgets import Budget, Deadline
from autoplan.profiles.measure import measure_device
from autoplan.profiles.measure_groups import collective_rows, common_deadline
from autoplan.profiles.measure_links import MeasuredGroup, measure_groups
from autoplan.profiles.tables import CollectiveTable
from autoplan.profiles.timing import Stopwatch
from tests.distributed import run_workers


@dataclass
class FakeClock:
    """A clock that stands still until somebody takes time."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s

    def take(self, seconds: float) -> None:
        self.now_s += seconds


def measured(deadline: Deadline, clock: FakeClock, costs: list[float], least: int = 1) -> list[int]:
    """Measure points that take so many seconds; return which were reached."""
    reached = []
    for index in deadline.points(range(len(costs)), least=least):
        clock.take(costs[index])
        reached.append(index)
    return reached


@given(costs=st.lists(st.floats(0.0, 5.0), min_size=1, max_size=12), seconds=st.floats(0.0, 20.0))
def test_points_of_equal_cost_end_in_time(costs: list[float], seconds: float) -> None:
    clock = FakeClock()
    dearest_first = sorted(costs, reverse=True)
    deadline = Deadline(ends_s=clock() + seconds, clock=clock)
    reached = measured(deadline, clock, dearest_first)
    assert reached == list(range(len(reached)))
    assert reached
    if len(reached) > 1:
        assert clock() <= deadline.ends_s
    if len(reached) < len(costs):  # one more like the longest would have ended late
        assert clock() + dearest_first[0] > deadline.ends_s


def test_the_least_is_measured_however_late_it_is() -> None:
    clock = FakeClock()
    deadline = Deadline(ends_s=clock() - 1.0, clock=clock)
    assert measured(deadline, clock, [9.0, 9.0, 9.0], least=2) == [0, 1]
    assert deadline.left_s == 0.0


@given(shares=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8), use=st.floats(0.0, 1.0))
def test_parts_that_end_in_time_end_with_the_budget(shares: list[float], use: float) -> None:
    clock = FakeClock()
    budget = Budget(seconds=60.0, shares=sum(shares), clock=clock)
    for share in shares:
        part = budget.part(share)
        assert part.ends_s <= 160.0 + 1e-6
        clock.take(use * part.left_s)
    assert part.ends_s == pytest.approx(160.0)  # what is left over is the last one's
    assert 0.0 <= budget.spent <= 1.0 + 1e-9


def test_what_one_part_took_too_much_is_missing_to_the_others() -> None:
    clock = FakeClock()
    budget = Budget(seconds=60.0, shares=3.0, clock=clock)
    assert budget.part(1.0).left_s == pytest.approx(20.0)
    clock.take(50.0)
    assert budget.part(1.0).left_s == pytest.approx(5.0)
    clock.take(50.0)
    assert budget.part(1.0).left_s == 0.0


@pytest.mark.parametrize("each_s", [0.02, 1.0])
@pytest.mark.parametrize("start_up_s", [6.0, 25.0])
def test_a_profile_takes_its_budget_also_where_everything_is_slow(
    monkeypatch: pytest.MonkeyPatch, each_s: float, start_up_s: float
) -> None:
    clock = FakeClock()
    started: list[int] = []

    def timed(self: Stopwatch, run: Callable[[], object], *, calls: int = 1) -> float:
        clock.take(each_s)
        return 1e-3

    def least(run: Callable[[], object], device: Any, **options: Any) -> float:
        clock.take(each_s)
        return 1e-3 * (1 + len(started))

    def group(degree: int, *, budget_s: float, backend: str) -> MeasuredGroup:
        started.append(degree)
        clock.take(max(start_up_s, budget_s))
        curve = CollectiveTable(
            collective="all_reduce", degree=degree, origin="collectives", rows=((4096, 1e-4),)
        )
        return MeasuredGroup(curves=(curve,), least_s=start_up_s)

    monkeypatch.setattr(Stopwatch, "median_s", timed)
    for module in (measure_ops, measure_op_classes):
        monkeypatch.setattr(module, "rotating", lambda *made: lambda: None)
    monkeypatch.setattr(measure_host, "least_s", least)
    monkeypatch.setattr(measure_links, "measure_group", group)
    profile = measure_device("cpu", budget_s=90.0, clock=clock)
    assert clock() - 100.0 <= 90.0
    assert started[0] == 2
    assert profile.intra is not None
    assert {table.dtype for table in profile.gemm} == {"float32", "bfloat16"}


def test_groups_that_would_end_late_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    told: list[str] = []

    def group(degree: int, *, budget_s: float, backend: str) -> MeasuredGroup:
        clock.take(20.0)
        return MeasuredGroup(curves=(), least_s=20.0)

    monkeypatch.setattr(measure_links, "measure_group", group)
    deadline = Deadline(ends_s=clock() + 30.0, clock=clock)
    assert len(measure_groups([2, 4, 8], deadline=deadline, progress=told.append)) == 1
    assert told[-1] == "collectives of 4 processes left out: no time to start them"


def _rows_of_two_deadlines(
    rank: int,
) -> tuple[dict[str, int], dict[str, int], float]:
    cpu = torch.device("cpu")
    # The ranks' own ends differ: the latest counts, on all.
    late = common_deadline(1e12 * rank, None, cpu)
    early = common_deadline(0.0, None, cpu)
    full = collective_rows(None, cpu, deadline=late, sizes=(2**12, 2**13, 2**10))
    few = collective_rows(None, cpu, deadline=early, sizes=(2**12, 2**13, 2**10))
    count = {name: len(rows) for name, rows in full.items()}
    return count, {name: len(rows) for name, rows in few.items()}, late.ends_s


def test_ranks_stop_together() -> None:
    found = run_workers(_rows_of_two_deadlines, 2)
    assert found[0] == found[1]
    full, few, ends_s = found[0]
    assert full["all_reduce"] == full["all_gather"] == full["send"] == 3
    assert few == {"all_reduce": 2}
    assert ends_s == 1e12
