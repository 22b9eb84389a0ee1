"""Settings that are bounded, forbidden or in conflict, and why a plan has not others."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from autoplan.cluster import Cluster
from autoplan.errors import InfeasibleError
from autoplan.limits import make_limits
from autoplan.optimizing import find_plan, optimize
from autoplan.plan import Plan
from autoplan.planner import Planner
from autoplan.planning_commands import parse_limits
from tests.models_for_tests import LinearChain, mean_square
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

BODY = BodySpec(count=3, hidden=64, has_norm=True, has_view=True)
CHAIN = ChainSpec(width=16, vocabulary=32, bodies=(BODY,))


def cluster_of(text: str, memory: int | str) -> Cluster:
    return Cluster.parse(text).with_memory(memory, reserve_bytes=0)


def planner(memory: str = "64KiB", **options: Any) -> Planner:
    limits = make_limits(options.pop("within", None), options.pop("forbid", None))
    made = planner_of(CHAIN, cluster_of("1x4:v100", memory), workload_of(8), options)
    made.limits = limits
    return made


@pytest.fixture(scope="module")
def made_by() -> Planner:
    """Keep the planner: its model must live for the plan's question to be solved again."""
    return planner()


@pytest.fixture(scope="module")
def plan(made_by: Planner) -> Plan:
    return find_plan(made_by)


def test_bounds_and_forbidden_values_are_obeyed_and_recorded() -> None:
    free = planner("1MiB")
    tp = find_plan(free).mesh.tp
    limited = planner("1MiB", within={"pp": (2, 4)}, forbid={"tp": [tp], "zero_stage": 3})
    settings = limited.settings()
    assert settings
    assert all(2 <= s.pp <= 4 and s.tp != tp and s.zero_stage != 3 for s in settings)
    found = find_plan(limited)
    assert (found.mesh.pp >= 2, found.mesh.tp != tp) == (True, True)
    assert found.search.constraints == ("pp within 2..4", f"tp not {tp}", "zero_stage not 3")
    assert Plan.from_json(found.to_json()).search.constraints == found.search.constraints
    assert f"under pp within 2..4, tp not {tp}, zero_stage not 3" in found.report()


@pytest.mark.parametrize(
    ("within", "forbid", "message"),
    [
        ({"tp": (4, 1)}, None, "give the least and the largest value"),
        ({"width": (1, 2)}, None, "cannot bound 'width'; allowed are dp, tp"),
        (None, {"recompute": ["full"]}, "cannot forbid 'recompute'"),
        (None, {"tp": ["8"]}, "give whole numbers"),
        (None, {"schedule": "zb"}, "give one or more of gpipe, 1f1b, interleaved, zero_bubble"),
    ],
)
def test_wrong_limits_say_what_is_allowed(within: Any, forbid: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        optimize(LinearChain(), "1x2:v100", None, loss_fn=mean_square, within=within, forbid=forbid)


def test_limits_of_the_command_line_are_those_of_the_function() -> None:
    assert parse_limits(["tp=1..4"], ["pp=2,4", "pp=8"]) == ({"tp": (1, 4)}, {"pp": (2, 4, 8)})
    assert parse_limits([], ["schedule=gpipe,zero_bubble"]) == (
        {},
        {"schedule": ("gpipe", "zero_bubble")},
    )
    with pytest.raises(ValueError, match=r"as in tp=1\.\.4"):
        parse_limits(["tp=4"], [])
    with pytest.raises(ValueError, match="as in tp=8"):
        parse_limits([], ["tp"])


def test_limits_that_leave_no_setting_say_which() -> None:
    with pytest.raises(ValueError, match="tp not 1 or 2 or 4"):
        planner(forbid={"tp": (1, 2, 4)}).settings()


def test_the_plan_has_its_own_settings(plan: Plan) -> None:
    answer = plan.why_not(tp=plan.mesh.tp, pp=plan.mesh.pp)
    assert (answer.kind, answer.step_time_s) == ("chosen", plan.predicted.step_time_s)


def test_settings_that_break_a_rule_name_it(plan: Plan) -> None:
    answer = plan.why_not(tp=3)
    assert answer.kind == "rule"
    assert "dp * tp * pp must be the 4 devices, tp=3 is 3" in str(answer)


def test_settings_against_a_pin_or_a_limit_name_it() -> None:
    owner = planner("1MiB", tp=1, forbid={"pp": 4})
    found = find_plan(owner)
    assert "you pinned tp=1" in str(found.why_not(tp=2))
    assert "you allowed only pp not 4" in str(found.why_not(pp=4))


def test_slower_settings_say_by_how_much_and_hold_the_plan(made_by: Planner, plan: Plan) -> None:
    other = next(
        s
        for s in made_by.settings()
        if (s.dp, s.tp, s.pp) != (plan.mesh.dp, plan.mesh.tp, plan.mesh.pp)
    )
    answer = plan.why_not(dp=other.dp, tp=other.tp, pp=other.pp)
    assert answer.kind in ("time", "memory")
    if answer.plan is not None and answer.step_time_s is not None:
        assert (answer.plan.mesh.tp, answer.plan.mesh.pp) == (other.tp, other.pp)
        assert answer.step_time_s >= plan.predicted.step_time_s
        slower = answer.step_time_s / plan.predicted.step_time_s - 1
        assert f"{slower:.2%} slower" in answer.text or slower == 0


def test_settings_that_do_not_fit_say_by_how_many_bytes(made_by: Planner, plan: Plan) -> None:
    answer = plan.why_not(dp=4, zero_stage=0, microbatch_size=2, recompute="none")
    assert answer.kind == "memory"
    assert answer.excess_bytes > 0
    assert "too much; the largest part is" in answer.text


def test_a_loaded_or_copied_plan_answers_from_its_record(plan: Plan) -> None:
    for other in (Plan.from_json(plan.to_json()), copy.deepcopy(plan)):
        assert other.why_not(tp=3).kind == "rule"
        degree = 2 if plan.mesh.tp == 4 else 4
        answer = other.why_not(tp=degree)
        name = re.search(rf"dp=\d tp={degree} pp=\d zero=\d mbs=\d+ m=\d+", answer.text)
        assert name is not None
        assert name.group() in plan.search.outcomes
        assert other.why_not(recompute="full").kind == "unknown"


def test_no_setting_is_no_question(plan: Plan) -> None:
    with pytest.raises(ValueError, match="name a setting"):
        plan.why_not()


def test_conflicts_are_irreducible_and_name_only_what_stands_in_the_way() -> None:
    free = find_plan(planner("50KiB"))
    assert free.predicted.capacity_bytes == 50 * 1024
    with pytest.raises(InfeasibleError) as caught:
        find_plan(planner("50KiB", dp=4, zero_stage=0, microbatch_size=1))
    line = next(x for x in str(caught.value).splitlines() if x.startswith("conflict: "))
    assert "50.00 KiB a device" in line
    named = {name for name in ("dp=4", "zero_stage=0", "microbatch_size=1") if name in line}
    assert named
    assert "microbatch_size=1" not in named, "one row is the smallest there is"
