"""The plan of least memory of a planning problem, by the exact memory model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from autoplan.bounds import held_excess, unrunnable_reason
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.held import mean_room, static_need
from autoplan.memory import StageMemory
from autoplan.search_options import alike, call_bytes
from autoplan.settings import Setting
from autoplan.stage_borders import crossing_places
from autoplan.stage_bytes import rank_memory
from autoplan.stage_ends import even_stage_ends, is_runnable

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Least", "least_memory", "least_of", "least_within"]


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


def least_within(
    planner: Planner, *, is_any_enough: bool, settings: Sequence[Setting] | None = None
) -> Least | None:
    """Return the plan of least memory; if any is enough, the first that fits.

    Args:
        planner: the problem.
        is_any_enough: settings that cannot fit are left out.
        settings: of the problem, where they are at hand.

    Returns:
        The plan. None: no setting could fit, since parameters and optimizer states alone do not.
    """
    every = planner.settings() if settings is None else settings
    wanted = (0, 3) if "zero_stage" not in planner.pins else (0, 1, 2, 3)
    # Stages beside a rank's first only add to what it holds.
    own = [s for s in every if s.virtual_stages == 1] or every
    smallest = min(s.microbatch_size for s in own)
    own = [s for s in own if s.microbatch_size == smallest and s.zero_stage in wanted]
    runnable = [s for s in own if unrunnable_reason(planner, s) is None]
    best: Least | None = None
    for setting in _most_promising_first(planner, _of_unlike_memory(planner, runnable or own)):
        if runnable:
            most = 0 if is_any_enough else (math.inf if best is None else best.excess_bytes)
            # The cheap bound first: the other one needs the decisions of the blocks.
            if static_need(planner, setting) - mean_room(planner.cluster, setting) > most:
                continue
            if most < math.inf and held_excess(planner, setting) > most:
                continue
        found = least_of(planner, setting)
        if best is None or found.excess_bytes < best.excess_bytes:
            best = found
        if is_any_enough and best.excess_bytes <= 0:
            break
    return best


def _of_unlike_memory(planner: Planner, settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings without those that are not leaner than an earlier one.

    Replicas shard less, split backwards keep more. Where ranks lie matters to unlike devices only.
    """
    found: dict[tuple[object, ...], Setting] = {}
    for s in settings:
        degrees = (s.dp, s.tp, s.pp, s.num_microbatches, s.virtual_stages)
        order = s.axis_order if planner.cluster.slower else ""
        found.setdefault((degrees, s.zero_stage, s.offload, order), s)
    return list(found.values())


def _most_promising_first(planner: Planner, settings: Sequence[Setting]) -> list[Setting]:
    """Return settings in an order in which lean ones, and cheap ones to look at, come early."""
    return sorted(settings, key=lambda s: (static_need(planner, s), -s.tp, s.pp))


def least_of(planner: Planner, setting: Setting) -> Least:
    """Return the plan of least memory of one setting."""
    pricer = planner.pricer(setting.microbatch_size)
    ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
    found = []
    for convention in pricer.conventions(setting.tp):
        ranks = _Ranks(pricer, setting, _leanest(pricer, setting, convention))
        found.append((max(ranks.at(ends), key=_excess), ranks))
    fullest, ranks = min(found, key=lambda one: _excess(one[0]))
    if setting.virtual_stages > 1:
        return fullest
    return _levelled(ranks, ends)


def _excess(stage: Least) -> int:
    return stage.excess_bytes


def _levelled(ranks: _Ranks, ends: tuple[int, ...]) -> Least:
    """Return the fullest stage after the fullest gave blocks to its neighbours while that helps."""
    stages = ranks.at(ends)
    for _ in ranks.decisions:
        excess = [stage.excess_bytes for stage in stages]
        fullest = excess.index(max(excess))
        ways = []
        for cut, step in ((fullest - 1, 1), (fullest, -1)):
            if not 0 <= cut < len(ends) - 1:
                continue
            moved = (*ends[:cut], ends[cut] + step, *ends[cut + 1 :])
            is_cut = all(start < end for start, end in pairwise((0, *moved)))
            if is_cut and is_runnable(ranks.pricer.trace, moved):
                ways.append((ranks.at(moved), moved))
        best, moved = min(ways, key=lambda way: max(map(_excess, way[0])), default=(stages, ends))
        if max(map(_excess, best)) >= max(excess):
            break
        stages, ends = best, moved
    return max(stages, key=_excess)


@dataclass(slots=True)
class _Ranks:
    """The ranks of a pipeline whose blocks are decided, each walked once for what it holds.

    Of ranks with the same blocks on the same devices the first keeps the most micro-batches, so the
    others count as much as it without a walk of their own.
    """

    pricer: Pricer
    setting: Setting
    decisions: tuple[Decision, ...]
    _known: dict[tuple[int, int, int], Least] = field(default_factory=dict)
    _kinds: tuple[object, ...] = ()

    def at(self, ends: tuple[int, ...]) -> list[Least]:
        """Return what every rank holds at most with these ends of the stages."""
        pricer, setting = self.pricer, self.setting
        if setting.virtual_stages > 1:
            ranks = range(setting.pp)
            return [_stage_of(pricer, setting, ends, self.decisions, rank) for rank in ranks]
        found: list[Least] = []
        first: dict[tuple[object, ...], Least] = {}
        for rank, (start, end) in enumerate(pairwise((0, *ends))):
            alike = self._alike(rank, start, end)
            if alike not in first:
                place = (rank, start, end)
                if place not in self._known:
                    self._known[place] = _stage_of(pricer, setting, ends, self.decisions, rank)
                first[alike] = replace(self._known[place], ends=ends)
            found.append(first[alike])
        return found

    def _alike(self, rank: int, start: int, end: int) -> tuple[object, ...]:
        """Return what ranks have in common of which only the first is walked."""
        trace = self.pricer.trace
        if not self._kinds:
            side = dict(trace.side)
            self._kinds = tuple(
                (
                    call.block,
                    index if self.pricer.layouts.whole_states(call.block) else -1,
                    tuple(argument for argument in call.args if argument in side),
                    decision.key,
                )
                for index, (call, decision) in enumerate(
                    zip(trace.calls, self.decisions, strict=True)
                )
            )
        own = self.pricer.on_stage(self.setting, rank).cluster
        place = rank if self.setting.schedule == "zero_bubble" else -1
        borders = crossing_places(trace, range(start, end))
        return place, own, borders, self._kinds[start:end]


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
    choices = {}
    for index, calls in enumerate(kinds):
        block = pricer.trace.calls[calls[0]].block
        decisions = pricer.decisions(block, setting.tp, convention)
        held = call_bytes(pricer, calls[0], decisions, setting, live)
        most_held = (live * held.kept + held.static).tolist()
        choices[index] = list(zip(most_held, held.working.tolist(), decisions, strict=True))
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
