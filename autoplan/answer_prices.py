"""Exact prices of a setting's answers, of which most stages and ranks are like those of others.

Answers that are looked at one after the other differ on few ranks, so the seconds of a stage and
the memory of a rank are found once for each choice of its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from autoplan.plan_prices import StageSeconds, stage_seconds, step_seconds
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import SettingProblem
from autoplan.settings import Setting
from autoplan.stage_bytes import rank_memory

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["answer_stages", "answer_step_s", "rank_excess"]


def answer_step_s(
    planner: Planner, setting: Setting, asked: SettingProblem, solution: PipelineSolution
) -> float:
    """Return the seconds of a step of an answer, as `plan_price` does."""
    return step_seconds(answer_stages(planner, setting, asked, solution), setting)


def answer_stages(
    planner: Planner, setting: Setting, asked: SettingProblem, solution: PipelineSolution
) -> list[StageSeconds]:
    """Return the seconds of each stage of an answer."""
    pricer, spans = planner.pricer(setting.microbatch_size), _spans(solution.ends)
    chosen = asked.chosen(solution.options)
    stages = []
    for stage, calls in enumerate(spans):
        key = (stage, solution.ends, solution.options[calls.start : calls.stop])
        if key not in asked.stage_s:
            asked.stage_s[key] = stage_seconds(pricer, setting, stage, spans, chosen)
        stages.append(asked.stage_s[key])
    return stages


def rank_excess(
    planner: Planner,
    setting: Setting,
    asked: SettingProblem,
    solution: PipelineSolution,
    rank: int,
) -> int:
    """Return by how many bytes a rank of an answer exceeds its memory; below 0 where it fits."""
    spans = _spans(solution.ends)
    own = tuple(solution.options[c] for calls in spans[rank :: setting.pp] for c in calls)
    key = (rank, solution.ends, own)
    if key not in asked.excess:
        device = planner.pricer(setting.microbatch_size).on_stage(setting, rank)
        memory = rank_memory(device, setting, rank, spans, asked.chosen(solution.options))
        asked.excess[key] = memory.peak - planner.cluster.on_stage(setting, rank).total_bytes
    return asked.excess[key]


def _spans(ends: Sequence[int]) -> list[range]:
    return [range(start, end) for start, end in pairwise((0, *ends))]
