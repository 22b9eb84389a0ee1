"""The reference of the planner: every setting, cut and decision of a tiny problem, priced."""

from __future__ import annotations

from itertools import combinations, product

from autoplan.plan_prices import plan_price
from autoplan.planner import Planner
from autoplan.setting_problem import usable_decisions
from autoplan.settings import Setting

__all__ = ["fastest_of_setting", "fastest_step_s"]


def fastest_step_s(planner: Planner) -> float | None:
    """Return the seconds of the fastest plan that fits exactly, over all settings; None if none."""
    found = [fastest_of_setting(planner, setting) for setting in planner.settings()]
    return min((seconds for seconds in found if seconds is not None), default=None)


def fastest_of_setting(planner: Planner, setting: Setting) -> float | None:
    """Return the seconds of the fastest cuts and decisions of one setting that fit; None if none.

    Blocks decide among the decisions of the planner's frontiers.
    """
    pricer = planner.pricer(setting.microbatch_size)
    calls = pricer.trace.calls
    combinations_of_decisions = [
        decisions
        for convention in pricer.conventions(setting.tp)
        for decisions in product(
            *(usable_decisions(pricer, call.block, setting, convention) for call in calls)
        )
    ]
    best: float | None = None
    for cuts in combinations(range(1, len(calls)), setting.pp - 1):
        for decisions in combinations_of_decisions:
            price = plan_price(pricer, setting, (*cuts, len(calls)), decisions)
            fits = price.peak_memory_bytes <= planner.cluster.total_bytes
            if fits and (best is None or price.step_time_s < best):
                best = price.step_time_s
    return best
