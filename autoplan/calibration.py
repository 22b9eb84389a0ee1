"""Capacities that make up for what the linear memory of a setting counts too high."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from autoplan.interleaving import dealt
from autoplan.search.evaluate import plain_options, stage_costs
from autoplan.search.problem import BlockOption, PipelineSolution
from autoplan.setting_problem import SettingProblem, even_ends_of, stage_clusters
from autoplan.settings import Setting
from autoplan.stage_bytes import rank_memory

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["calibrated_capacity"]


def calibrated_capacity(
    planner: Planner, setting: Setting, asked: SettingProblem, *, at_leanest: bool = False
) -> tuple[int, ...]:
    """Return capacities, in memory units, that make the linear memory exact at the fastest options.

    Or, where asked, at the leanest, of which it may count more too high. What it counts too high
    grows with what blocks keep, and hardly any more once that makes the peak. So these capacities
    leave no plan out that fits, as far as that holds; one that does not fit is found by the walk.
    Measured on even cuts, on some stages of a long pipeline; one where the linear memory is too low
    keeps its capacity.
    """
    pricer, problem = planner.pricer(setting.microbatch_size), asked.problem
    ends = even_ends_of(planner, setting, asked.counts)
    live = (a for a, own in zip(problem.live, _spans(ends), strict=True) for _ in own)
    options = tuple(
        (_leanest if at_leanest else _fastest)(own, alive)
        for own, alive in zip(plain_options(problem), live, strict=True)
    )
    linear = [cost.memory for cost in stage_costs(problem, ends, options)]
    solution = PipelineSolution(status="feasible", ends=ends, options=options, objective=0, bound=0)
    if setting.virtual_stages > 1:
        solution = dealt(
            planner.alike_run(setting.microbatch_size), asked.options, solution, asked.counts
        )
    chosen = asked.chosen(solution.options)
    spans = _spans(solution.ends)
    walked = _walked_ranks(setting.pp)
    excess = []
    for rank in walked:
        device = pricer.on_stage(setting, rank)
        exact = rank_memory(device, setting, rank, spans, chosen).peak
        reserved = stage_clusters(planner.cluster, setting)[rank].reserved_bytes
        excess.append(linear[rank] - -(-(exact - reserved) // pricer.memory_unit))
    between = np.interp(range(setting.pp), walked, excess)
    return tuple(
        capacity + max(0, int(more))
        for capacity, more in zip(problem.capacity, between, strict=True)
    )


def _fastest(options: Sequence[BlockOption], alive: int) -> int:
    return min(range(len(options)), key=lambda i: options[i].forward + options[i].backward)


def _leanest(options: Sequence[BlockOption], alive: int) -> int:
    def held(index: int) -> int:
        own = options[index]
        return own.static + alive * own.kept + own.working

    return min(range(len(options)), key=held)


def _spans(ends: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise((0, *ends))]


def _walked_ranks(pp: int) -> list[int]:
    """Return the ranks whose memory is walked; between them what differs changes evenly."""
    return sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})
