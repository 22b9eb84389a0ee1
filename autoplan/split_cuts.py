"""Cuts of a pipeline whose backwards are split, in the order of what they take by the lists."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.search.pipeline import cuts_below
from autoplan.search.problem import PipelineProblem
from autoplan.setting_problem import SettingProblem
from autoplan.settings import Setting
from autoplan.split_steps import saved_by_block, steps_with_split
from autoplan.units import TICK_S

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["cuts_by_lists"]

_MOST_CUTS = 20_000

Floats = NDArray[np.float64]


def cuts_by_lists(
    planner: Planner,
    setting: Setting,
    asked: SettingProblem,
    problem: PipelineProblem,
    limit: int,
) -> list[tuple[float, tuple[int, ...]]] | None:
    """Return all cuts that may take no more than a limit, fastest first, each with its ticks.

    Args:
        planner: of the problem.
        setting: of one stage a rank.
        asked: its problem, of blocks with one option each.
        problem: the same with the capacities that count.
        limit: ticks of a step.

    Returns:
        None if there are too many to look at.
    """
    found = cuts_below(problem, limit, _MOST_CUTS)
    if not found:
        return None if found is None else []
    ends = np.array(found)
    starts = np.concatenate([np.zeros((len(found), 1), dtype=ends.dtype), ends[:, :-1]], axis=1)
    forward, inputs, weights, once, saved = _numbers(planner, setting, asked)

    def sums(values: Sequence[float]) -> Floats:
        prefix = np.array([0.0, *accumulate(values)])
        return np.asarray(prefix[ends] - prefix[starts])

    crossing = np.array([0, *problem.crossing, 0] if problem.crossing else [0] * (ends.max() + 1))
    border = np.array(problem.boundary) + crossing[starts] + crossing[ends]
    parts = (sums(forward) + border / 2, sums(inputs) + border / 2, sums(weights))
    stages = parts[0] + parts[1] + parts[2]
    whole = stages.sum(axis=1) + (setting.num_microbatches - 1) * stages.max(axis=1)
    steps = steps_with_split(whole, setting, *parts, np.full(len(found), sum(saved)))
    ticks = steps + sums(once).max(axis=1)
    order = np.argsort(ticks, kind="stable")
    return [(float(ticks[index]), found[index]) for index in order]


def _numbers(
    planner: Planner, setting: Setting, asked: SettingProblem
) -> tuple[list[float], list[float], list[float], list[float], list[float]]:
    """Return ticks per call: forward, backward to the inputs, to the parameters, once, saved."""
    pricer = planner.pricer(setting.microbatch_size)
    rows = []
    for call, decisions, options in zip(
        pricer.trace.calls, asked.per_call, asked.options, strict=True
    ):
        work = pricer.base(call.block, decisions[0], setting.tp)
        later = pricer.deferred_s(work, setting) / TICK_S
        option = options[0]
        now = option.backward - later
        saved = saved_by_block(option.forward, now, later)
        rows.append((float(option.forward), now, later, float(option.once), saved))
    columns = zip(*rows, strict=True)
    return tuple(map(list, columns))  # type: ignore[return-value]
