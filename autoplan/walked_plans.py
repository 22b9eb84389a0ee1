"""Settings with so few plans that the fastest is found by the exact walk, without linear memory.

The plans of a setting under a convention are listed in the order of their linear time, and their
stages are walked (`autoplan.memory`) until one fits. So what is found is the fastest plan of the
setting, and where the list ends is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from autoplan.bounds import memory_bound
from autoplan.plan_prices import plan_price
from autoplan.search.candidates import Refinement
from autoplan.search.listing import answers_below, num_answers
from autoplan.search.pipeline import relaxed_bound
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import (
    SettingProblem,
    nothing_below,
    usable_decisions,
    with_detours,
)
from autoplan.settings import Setting
from autoplan.stage_bytes import rank_memory
from autoplan.units import to_ticks

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["fastest_walked", "has_few_plans", "memory_refinement", "time_bound"]

_MOST_PLANS = 20_000  # of a setting under a convention
_MOST_WALKS = 2_000  # of stages of one rank, each some tenth of a millisecond


def has_few_plans(planner: Planner, setting: Setting) -> bool:
    """Return whether the plans of a setting can be listed, under each convention."""
    pricer = planner.pricer(setting.microbatch_size)
    calls = pricer.trace.calls
    cuts = math.comb(len(calls) - 1, setting.pp - 1)
    if setting.virtual_stages > 1 or cuts > _MOST_PLANS:
        return False
    for convention in pricer.conventions(setting.tp):
        plain = {
            call.block: usable_decisions(pricer, call.block, setting, convention) for call in calls
        }
        if cuts * math.prod(len(plain[call.block]) for call in calls) > _MOST_PLANS:
            return False
        every = {
            block: with_detours(pricer, block, setting, convention, own)[0]
            for block, own in plain.items()
        }
        if cuts * math.prod(len(every[call.block]) for call in calls) > _MOST_PLANS:
            return False
    return True


def memory_refinement(planner: Planner, setting: Setting) -> Refinement:
    """Return `memory_bound`, which counts by the linear memory, where that is what decides."""
    return Refinement() if has_few_plans(planner, setting) else memory_bound(planner, setting)


def time_bound(asked: SettingProblem) -> int | None:
    """Return ticks below which no plan is, whatever it holds; None: the rules leave none."""
    problem = asked.problem
    most = sum(
        run.count * max(o.static + max(problem.live) * o.kept + o.working for o in run.options)
        for run in problem.runs
    )
    roomy = (most + max(problem.fixed),) * problem.num_stages
    return relaxed_bound(replace(problem, capacity=roomy))


def fastest_walked(
    planner: Planner, setting: Setting, asked: SettingProblem, cutoff: int | None
) -> PipelineSolution | None:
    """Return the fastest plan that fits, proven; None if too much had to be walked.

    Args:
        planner, setting, asked: the problem of a setting, of few plans.
        cutoff: ticks; only what is below counts.
    """
    assert num_answers(asked.problem) <= _MOST_PLANS, "the plans of the setting are too many"
    walks = _Walks(planner=planner, setting=setting, asked=asked)
    best: PipelineSolution | None = None
    below = cutoff
    for ticks, ends, options in answers_below(asked.problem, cutoff):
        if below is not None and ticks >= below:
            break
        fits = walks.fits(ends, options)
        if fits is None:
            return None
        if not fits:
            continue
        if setting.schedule == "zero_bubble":
            ticks = max(ticks, walks.ticks(ends, options))
            if below is not None and ticks >= below:
                continue
        below = ticks
        best = PipelineSolution(
            status="optimal",
            ends=ends,
            options=options,
            objective=ticks,
            bound=ticks,
            is_final=True,
        )
    return best or nothing_below(cutoff)


@dataclass(slots=True, kw_only=True)
class _Walks:
    """Stages of a setting that were walked, and whether each fits."""

    planner: Planner
    setting: Setting
    asked: SettingProblem
    known: dict[tuple[int, int, int, tuple[int, ...]], bool] = field(default_factory=dict)

    def fits(self, ends: Sequence[int], options: Sequence[int]) -> bool | None:
        """Return whether every stage fits; None if too many have been walked."""
        for rank, (start, end) in enumerate(pairwise((0, *ends))):
            key = (rank, start, end, tuple(options[start:end]))
            if key not in self.known:
                if len(self.known) >= _MOST_WALKS:
                    return None
                self.known[key] = self._walked(rank, ends, options)
            if not self.known[key]:
                return False
        return True

    def _walked(self, rank: int, ends: Sequence[int], options: Sequence[int]) -> bool:
        chosen = self.asked.chosen(options)
        spans = [range(start, end) for start, end in pairwise((0, *ends))]
        device = self.planner.pricer(self.setting.microbatch_size).on_stage(self.setting, rank)
        memory = rank_memory(device, self.setting, rank, spans, chosen)
        return memory.peak <= device.cluster.total_bytes

    def ticks(self, ends: Sequence[int], options: Sequence[int]) -> int:
        """Return the ticks of a step by the lists of its schedule."""
        chosen = self.asked.chosen(options)
        pricer = self.planner.pricer(self.setting.microbatch_size)
        return to_ticks(plan_price(pricer, self.setting, ends, chosen).step_time_s)
