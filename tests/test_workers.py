"""The same input gives the same plan, whatever the number of processes that look for it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings

from autoplan import planner as planner_module
from autoplan import tracer, tracing_ahead
from autoplan.errors import InfeasibleError
from autoplan.graph import Trace
from autoplan.model_traces import ModelTraces
from autoplan.optimizing import find_plan, optimize
from autoplan.plan import Plan
from autoplan.planner import Planner, make_planner
from autoplan.search import mesh
from autoplan.tracer import recent_program
from autoplan.training_job import TrainingJob
from tests.models_for_tests import TinyGPT, mean_square
from tests.strategies import PlanningProblem, planning_problems
from tests.test_planner import LAWS

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs fork")


@pytest.fixture(autouse=True, scope="module")
def at_once() -> Iterator[None]:
    """Let workers start at once, on a machine with one core too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "_ALONE_S", -1.0)
        patch.setattr(planner_module, "_WORTH_A_PROCESS_S", -1.0)
        patch.setattr(tracing_ahead, "_WORTH_A_PROCESS_MODULES", 0)
        patch.setattr(planner_module, "usable_cores", lambda: 4)
        yield


def timeless(plan: Plan) -> Plan:
    return replace(plan, search=replace(plan.search, wall_time_s=0.0), question=None)


def tiny_job() -> TrainingJob:
    """Return a model that is small enough to be planned several times."""
    return TrainingJob(
        TinyGPT(depth=1),
        "1x2:a100_sxm_40gb",
        torch.randint(0, 50, (2, 16)),
        loss_fn=mean_square,
        global_batch_size=8,
    )


def planned(planner: Planner, workers: int) -> Plan | None:
    planner.workers = workers
    try:
        return timeless(find_plan(planner))
    except InfeasibleError:
        return None


@settings(LAWS, max_examples=3)
@given(problem=planning_problems())
def test_any_number_of_workers_finds_the_same_plan(problem: PlanningProblem) -> None:
    alone = planned(problem.planner(), 1)
    assert planned(problem.planner(), 3) == alone


@pytest.mark.parametrize("pins", [{}, {"tp": 2, "microbatch_size": 4}, {"dp": 2}, {"tp": 2}])
def test_traces_of_other_processes_give_the_same_plan(pins: dict[str, int]) -> None:
    def made(workers: int) -> Plan:
        return find_plan(
            make_planner(
                tiny_job(),
                pins=pins,
                workers=workers,
            )
        )

    plans = [made(workers) for workers in (1, 2)]
    assert timeless(plans[1]) == timeless(plans[0])
    assert not any("not checked" in note for note in plans[1].notes)


def test_a_size_that_was_traced_elsewhere_is_not_captured_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its program, by which layouts are checked, comes with its trace."""
    planner = make_planner(
        tiny_job(),
        pins={"tp": 2, "num_microbatches": 4},
        workers=2,
    )
    here: list[int] = []
    capture = ModelTraces.capture

    def counted(self: ModelTraces, microbatch_size: int) -> Trace:
        here.append(microbatch_size)
        return capture(self, microbatch_size)

    monkeypatch.setattr(ModelTraces, "capture", counted)
    monkeypatch.setattr(tracer, "_RECENT", {})
    plan = find_plan(planner)
    assert plan.microbatch_size == 2
    assert here == [1]
    program = recent_program(plan.fingerprint)
    assert program is not None
    assert program.microbatch_size == 2


def test_workers_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="workers is 0; it must be at least 1"):
        optimize(TinyGPT(), "1x2:a100_sxm_40gb", torch.zeros(2, 16, dtype=torch.int64), workers=0)


def test_a_process_with_threads_of_autograd_traces_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of it would stand still in its first backward, which a trace runs."""
    planner = make_planner(
        tiny_job(),
        workers=2,
    )
    monkeypatch.setattr(tracing_ahead, "has_autograd_threads", lambda: True)
    monkeypatch.setattr(tracing_ahead, "Beside", None)  # calling it fails
    tracing_ahead.trace_ahead(planner)
    traced = set(planner.traces.captured)
    assert {min(s.microbatch_size, 4) for s in planner.settings()} <= traced
    for size in {setting.microbatch_size for setting in planner.settings()}:
        planner.trace(size)
    assert set(planner.traces.captured) == traced  # nothing is left to a process of the search
