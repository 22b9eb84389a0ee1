"""The plan of least memory of a planning problem, by the exact memory model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from autoplan.bounds import most_bytes, static_need, unrunnable_reason
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.memory import StageMemory
from autoplan.search_options import alike, block_option
from autoplan.settings import Setting
from autoplan.stage_bytes import rank_memory
from autoplan.stage_ends import even_stage_ends, is_runnable

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Least", "least_memory", "least_within"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The decided plan of least memory that was found.

    Attributes:
        setting, ends, decisions: the plan.
        stage: memory of the stage that is fullest for its device.
        capacity_bytes: of that device.
    """

    setting: Setting
    ends: tuple[int, ...]
    decisions: tuple[Decision, ...]
    stage: StageMemory
    capacity_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Return the bytes by which the device is too small."""
        return self.stage.peak - self.capacity_bytes

    @property
    def need_bytes(self) -> int:
        """Return the bytes that a device must have."""
        return self.stage.peak


def least_memory(planner: Planner) -> Least:
    """Return the plan whose fullest stage needs least among those that save memory.

    Tried are the settings with the smallest micro-batch and with most or no sharding of states,
    every block at its leanest decision, and cuts that are moved towards the fullest stage.
    """
    best = least_within(planner, is_any_enough=False)
    assert best is not None, "settings() is never empty"
    return best


def least_within(planner: Planner, *, is_any_enough: bool) -> Least | None:
    """Return the plan of least memory; if any is enough, the first that fits.

    None: no setting could fit, since parameters and optimizer states alone do not.
    """
    every = planner.settings()
    runnable = [s for s in every if unrunnable_reason(planner, s) is None]
    settings = runnable or every
    # Stages beside a rank's first only add to what it holds.
    settings = [s for s in settings if s.virtual_stages == 1] or settings
    settings = _of_unlike_memory(planner, settings)
    smallest = min(s.microbatch_size for s in settings)
    best: Least | None = None
    stages = (0, 3) if "zero_stage" not in planner.pins else (0, 1, 2, 3)
    for setting in settings:
        if setting.microbatch_size != smallest or setting.zero_stage not in stages:
            continue
        if runnable:
            excess = static_need(planner, setting) - most_bytes(planner, setting)
            if (is_any_enough and excess > 0) or (best is not None and excess > best.excess_bytes):
                continue
        found = _least_of(planner, setting)
        if best is None or found.excess_bytes < best.excess_bytes:
            best = found
        if is_any_enough and best.excess_bytes <= 0:
            break
    return best


def _of_unlike_memory(planner: Planner, settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings without those that are not leaner than an earlier one.

    Replicas shard less, split backwards keep more. Where ranks lie matters to unlike devices only.
    """
    if planner.cluster.slower:
        return list(settings)
    found: dict[tuple[object, ...], Setting] = {}
    for s in settings:
        degrees = (s.dp, s.tp, s.pp, s.num_microbatches, s.virtual_stages)
        found.setdefault((degrees, s.zero_stage, s.offload), s)
    return list(found.values())


def _least_of(planner: Planner, setting: Setting) -> Least:
    pricer = planner.pricer(setting.microbatch_size)
    ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
    found = []
    for convention in pricer.conventions(setting.tp):
        decisions = _leanest(pricer, setting, convention)
        found.append(
            [_stage_of(pricer, setting, ends, decisions, rank) for rank in range(setting.pp)]
        )
    stages = min(found, key=lambda stages: max(stage.excess_bytes for stage in stages))
    if setting.virtual_stages == 1:
        stages = _levelled(pricer, setting, stages)
    return max(stages, key=lambda stage: stage.excess_bytes)


def _levelled(pricer: Pricer, setting: Setting, stages: list[Least]) -> list[Least]:
    """Return the stages after the fullest gave blocks to its neighbours while that helps."""
    decisions = stages[0].decisions
    for _ in range(len(decisions)):
        excess = [stage.excess_bytes for stage in stages]
        fullest, ends = excess.index(max(excess)), stages[0].ends
        ways = []
        for cut, step in ((fullest - 1, 1), (fullest, -1)):
            if not 0 <= cut < len(ends) - 1:
                continue
            moved = (*ends[:cut], ends[cut] + step, *ends[cut + 1 :])
            is_cut = all(start < end for start, end in pairwise((0, *moved)))
            if is_cut and is_runnable(pricer.trace, moved):
                own = [replace(stage, ends=moved) for stage in stages]
                for rank in (cut, cut + 1):
                    own[rank] = _stage_of(pricer, setting, moved, decisions, rank)
                ways.append(own)
        best = min(ways, key=lambda own: max(s.excess_bytes for s in own), default=stages)
        if max(stage.excess_bytes for stage in best) >= max(excess):
            break
        stages = best
    return stages


def _stage_of(
    pricer: Pricer,
    setting: Setting,
    ends: tuple[int, ...],
    decisions: tuple[Decision, ...],
    rank: int,
) -> Least:
    """Return a plan with one of its stages."""
    spans = [range(start, end) for start, end in pairwise((0, *ends))]
    own = pricer.on_stage(setting, rank)
    return Least(
        setting=setting,
        ends=ends,
        decisions=decisions,
        stage=rank_memory(own, setting, rank, spans, decisions),
        capacity_bytes=own.cluster.total_bytes,
    )


def _leanest(pricer: Pricer, setting: Setting, convention: Convention) -> tuple[Decision, ...]:
    """Return per call the decision with which all calls together need least.

    What calls keep adds up, what they work with does not: for every amount of working memory that
    some decision has, each call takes the decision that keeps least within it.
    """
    live = setting.live()[0]
    kinds = alike(pricer, setting)
    choices = {
        index: [
            (live * option.kept + option.static, option.working, decision)
            for decision in pricer.decisions(
                pricer.trace.calls[calls[0]].block, setting.tp, convention
            )
            for option in (block_option(pricer, calls[0], decision, setting, live),)
        ]
        for index, calls in enumerate(kinds)
    }
    best: tuple[int, list[Decision]] | None = None
    for most in sorted({working for found in choices.values() for _, working, _ in found}):
        within = [[c for c in found if c[1] <= most] for found in choices.values()]
        if not all(within):
            continue
        chosen = [min(found, key=lambda c: c[:2]) for found in within]
        need = most + sum(len(k) * c[0] for k, c in zip(kinds, chosen, strict=True))
        if best is None or need < best[0]:
            best = need, [decision for _, _, decision in chosen]
    assert best is not None, "the largest working memory lets every decision in"
    pairs = zip(kinds, best[1], strict=True)
    by_call = {call: decision for calls, decision in pairs for call in calls}
    return tuple(by_call[call] for call in range(len(pricer.trace.calls)))
