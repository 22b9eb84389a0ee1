"""The planner on random chains: what it finds is sound, and obeys the laws of optimisation."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autoplan import codec
from autoplan.errors import InfeasibleError
from autoplan.optimizing import find_plan
from autoplan.plan import Plan
from autoplan.settings import Setting
from autoplan.simple import simple_strategies
from autoplan.verifier import verify_plan
from tests.exhaustive_plans import fastest_step_s
from tests.strategies import PlanningProblem, planning_problems, settings_values

LAWS = settings(
    derandomize=True,
    deadline=None,
    max_examples=4,
    phases=(Phase.explicit, Phase.generate),  # every example is a search: shrinking takes minutes
)
MANY = settings(LAWS, max_examples=10)

# A cover of a frontier may lose this much, and another device may be given another one. Of 51
# random problems none missed a law by more than rounding.
SAMPLING = 1.005

# Each block takes a whole number of nanoseconds, and blocks of tiny problems take few.
ROUNDING = 1.002


def planned(problem: PlanningProblem, **pins: int | str) -> Plan | None:
    """Return the plan of a problem, or None where nothing fits."""
    try:
        return find_plan(problem.planner(**pins), time_limit_s=60.0)
    except InfeasibleError:
        return None


def step_s(problem: PlanningProblem, **pins: int | str) -> float:
    """Return the predicted step time of the plan of a problem; infinite where nothing fits."""
    plan = planned(problem, **pins)
    return math.inf if plan is None else plan.predicted.step_time_s


@MANY
@given(problem=planning_problems())
def test_plans_obey_every_rule_and_are_never_slower_than_a_simple_strategy_that_fits(
    problem: PlanningProblem,
) -> None:
    plan = planned(problem)
    world = problem.cluster.world_size
    fitting = [
        s.row.step_time_s
        for s in simple_strategies(problem.planner())
        if s.row.fits and s.setting.world_size == world
    ]
    assert plan is not None or fitting == []
    if plan is not None:
        assert plan.predicted.step_time_s <= min(fitting, default=math.inf) * (1 + 1e-9)
        trace = problem.planner().traces.exact(plan.microbatch_size)
        assert verify_plan(plan, trace, problem.cluster) == ()
        assert plan.search.objective_s == plan.predicted.step_time_s
        assert 0 <= plan.search.bound_s <= plan.search.objective_s
        assert (plan.search.gap == 0) or plan.search.status == "feasible"


@LAWS
@given(problem=planning_problems(), factor=st.sampled_from((1.1, 1.5, 4.0)))
def test_more_memory_never_makes_the_plan_slower(problem: PlanningProblem, factor: float) -> None:
    more = int(problem.cluster.total_bytes * factor)
    larger = replace(problem, cluster=problem.cluster.with_memory(more))
    assert step_s(larger) <= step_s(problem) * SAMPLING


@LAWS
@given(problem=planning_problems(), factor=st.sampled_from((1.5, 4.0)))
def test_faster_arithmetic_and_memory_never_make_the_plan_slower(
    problem: PlanningProblem, factor: float
) -> None:
    device = problem.cluster.device.scaled(flops=factor, bandwidth=factor)
    faster = replace(problem, cluster=replace(problem.cluster, device=device))
    assert step_s(faster) <= step_s(problem) * SAMPLING


@LAWS
@given(problem=planning_problems(), factor=st.sampled_from((1.5, 4.0)))
def test_faster_links_never_make_the_plan_slower(problem: PlanningProblem, factor: float) -> None:
    cluster = problem.cluster
    quicker = replace(
        cluster,
        intra=cluster.intra.scaled(bandwidth=factor),
        inter=cluster.inter.scaled(bandwidth=factor),
    )
    faster = replace(problem, cluster=quicker)
    assert step_s(faster) <= step_s(problem) * SAMPLING


@LAWS
@given(problem=planning_problems(), data=st.data())
def test_pinning_never_makes_the_plan_faster_and_is_obeyed(
    problem: PlanningProblem, data: st.DataObject
) -> None:
    setting = data.draw(st.sampled_from(problem.planner().settings()))
    name = data.draw(st.sampled_from(("dp", "tp", "pp", "zero_stage", "microbatch_size")))
    plan = planned(problem, **{name: getattr(setting, name)})
    assume(plan is not None)
    assert plan is not None
    owner = plan if hasattr(plan, name) else plan.mesh
    assert getattr(owner, name) == getattr(setting, name)
    assert step_s(problem) <= plan.predicted.step_time_s * SAMPLING


@LAWS
@given(problem=planning_problems(max_devices=2), mode=st.sampled_from(("none", "full")))
def test_pinned_recompute_is_obeyed_by_every_block_that_can(
    problem: PlanningProblem, mode: str
) -> None:
    plan = planned(problem, recompute=mode)
    if plan is not None:
        modes = {plan.recompute[b.recompute].mode for s in plan.stages for b in s.blocks if b.fqn}
        assert modes == {mode}


@LAWS
@given(problem=planning_problems())
def test_same_problem_gives_the_same_plan(problem: PlanningProblem) -> None:
    first, second = planned(problem), planned(problem)
    if first is None or second is None:
        assert first is second
        return
    timeless = replace(first.search, wall_time_s=second.search.wall_time_s)
    assert replace(first, search=timeless) == second


@settings(LAWS, max_examples=12)
@given(problem=planning_problems(max_devices=2))
def test_plan_is_as_fast_as_exhaustive_search_finds(
    problem: PlanningProblem,
) -> None:
    body = replace(problem.chain.bodies[0], count=1)
    problem = replace(problem, chain=replace(problem.chain, bodies=(body,)))
    planner = problem.planner()
    assume(exhaustive_size(problem) <= 2000)
    best = fastest_step_s(planner)
    plan = planned(problem)
    if best is not None:  # else a simple strategy outside of the space may fit
        assert plan is not None
        assert plan.predicted.step_time_s <= best * ROUNDING
        assert plan.search.bound_s <= best * ROUNDING


def exhaustive_size(problem: PlanningProblem) -> int:
    """Return how many plans `fastest_step_s` prices."""
    planner = problem.planner()
    total = 0
    for setting in planner.settings():
        pricer = planner.pricer(setting.microbatch_size)
        calls = pricer.trace.calls
        choices = sum(
            math.prod(len(pricer.decisions(c.block, setting.tp, convention)) for c in calls)
            for convention in pricer.conventions(setting.tp)
        )
        total += choices * math.comb(len(calls) - 1, setting.pp - 1)
    return total


@settings(LAWS, max_examples=50)
@given(setting=settings_values())
def test_setting_round_trips_through_json(setting: Setting) -> None:
    assert codec.loads(Setting, codec.dumps(setting)) == setting
