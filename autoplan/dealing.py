"""Several stages a rank, decided stage by stage: what a rank holds counted instant by instant.

What the solver decides of ranks' shares says neither which stage of a rank a block comes to lie in
nor how many micro-batches that one keeps. Here both count. The memory of a rank is that of an
answer that was walked exactly, and what it holds more or less at the instants of its action list:

    held = base + static + max over actions of (sum_c alive[c] kept[c] + working of what runs)

where `base` makes up for the rest. It is found anew with every answer, until what was decided fits
and no rank leaves room that would make a step shorter. See search/deals.py for what is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoplan.answer_prices import answer_stages, answer_step_s, rank_excess
from autoplan.interleaving import stage_ends
from autoplan.memory import stage_actions
from autoplan.search.deals import Deal, DealtStage, deal_rank, grown_ways
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import SettingProblem
from autoplan.settings import Setting
from autoplan.units import TICK_S

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["DealtPlan", "dealt_plan"]

Floats = NDArray[np.float64]
Instants = tuple[tuple[int, tuple[int, ...]], ...]
"""The stage of a rank that runs, and how many micro-batches each of its stages keeps."""

_MOST_ROUNDS = 8
_TRUSTING_ROUNDS = 3  # after which what ranks hold beside counts with the most that was seen
_PATIENCE = 2  # rounds without a better answer
_SLOWER = (0.02, 0.1)  # of the paces: ways that are slower by more are left out, at first
_UNITS = 2**20  # of memory, of a device
_SPARE = 2e-4  # of a device: room that is not worth another round
_CLOSE = 3e-4  # of a step, which a better deal is not worth a search for


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtPlan:
    """Ticks that no answer is below, and the best that is known to fit, with its seconds a step."""

    bound: int
    best: tuple[float, PipelineSolution] | None


@dataclass(slots=True, kw_only=True)
class _Rank:
    """A rank whose stages are decided.

    Attributes:
        stages: in their order.
        held: of each stage, [instant, way], memory units.
        times: of each stage, ticks of its ways, borders included.
        base: memory units beside, by the last answer that was walked.
        least_base: by the answer by which it is least.
    """

    stages: list[DealtStage]
    held: list[Floats]
    times: list[Floats]
    base: float = 0.0
    least_base: float = float("inf")

    def peak(self, ways: Sequence[int]) -> float:
        """Return memory units of the fullest instant, without the base."""
        total = sum(own[:, way] for own, way in zip(self.held, ways, strict=True))
        return float(np.max(total))

    def paces(self, ways: Sequence[int]) -> Floats:
        """Return the ticks of its stages."""
        return np.array([own[way] for own, way in zip(self.times, ways, strict=True)])


@lru_cache(maxsize=256)
def instants(setting: Setting, rank: int) -> Instants:
    """Return the actions of a rank at which no other of the same stage keeps as much of all."""
    alive, found = [0] * setting.virtual_stages, set()
    for kind, _, part in stage_actions(setting, rank):
        alive[part] += kind == "F"
        found.add((part, tuple(alive)))
        alive[part] -= kind in ("B", "W")
    kept: list[tuple[int, tuple[int, ...]]] = []
    for part in range(setting.virtual_stages):
        own = np.array(sorted(counts for stage, counts in found if stage == part))
        no_more = (own[:, None] <= own[None, :]).all(axis=2)  # [own, other]
        kept += [(part, tuple(counts)) for counts in own[no_more.sum(axis=1) == 1].tolist()]
    return tuple(kept)


def dealt_plan(
    planner: Planner, setting: Setting, asked: SettingProblem, cutoff: int | None
) -> DealtPlan:
    """Return the best answer that is found, and a bound of all.

    Args:
        planner: of the problem.
        setting: with several stages a rank.
        asked: its problem.
        cutoff: ticks; only answers below it are wanted.
    """
    for slower in _SLOWER:
        deal = _Deal(planner, setting, asked, slower, cutoff)
        found = deal.run()
        if found.best is not None or deal.is_cut:
            break
    return found


class _Deal:
    """The ranks of a setting, decided and walked in turns."""

    def __init__(
        self,
        planner: Planner,
        setting: Setting,
        asked: SettingProblem,
        slower: float,
        cutoff: int | None,
    ) -> None:
        self.planner, self.setting, self.asked = planner, setting, asked
        pp, v = setting.pp, setting.virtual_stages
        alike = planner.alike_run(setting.microbatch_size)
        start = self.start = PipelineSolution(
            status="feasible",
            ends=stage_ends(alike, asked.counts),
            options=(0,) * alike.num_calls,
            objective=0,
            bound=0,
        )
        self.weight = setting.num_microbatches * v
        borders = [s.border_s / TICK_S for s in answer_stages(planner, setting, asked, start)]
        blocks = self._blocks(v)
        fastest = [
            sum(int(b[0].min()) for b in own) + border
            for own, border in zip(blocks, borders, strict=True)
        ]
        self.floors = np.array([max(fastest[first : first + pp]) for first in range(0, pp * v, pp)])
        totals = [sum(fastest[rank::pp]) for rank in range(pp)]
        self.others = sum(totals) - max(totals)
        self.least_once = [
            sum(float(block[1].min()) for own in blocks[rank::pp] for block in own)
            for rank in range(pp)
        ]
        self.extra = slower * float(self.floors.sum())
        self.cutoff, self.is_cut = cutoff, False
        if cutoff is not None:
            left = (cutoff * v - self.ticks(max(self.least_once))) / self.weight
            self.is_cut = left <= self.extra
            self.extra = min(self.extra, max(left, 0.0))
        known: dict[tuple[object, ...], DealtStage] = {}
        self.ranks = []
        for rank in range(pp):
            stages, times, held = [], [], []
            own = instants(setting, rank)
            for chunk in range(v):
                stage = chunk * pp + rank
                floor = float(self.floors[chunk]) - borders[stage]
                key = (*map(id, blocks[stage]), floor)
                if key not in known:
                    known[key] = grown_ways(blocks[stage], floor, floor + self.extra, self.weight)
                stages.append(known[key])
                times.append(np.asarray(known[key].time + borders[stage], dtype=np.float64))
                held.append(_held(known[key], chunk, own))
            self.ranks.append(_Rank(stages=stages, held=held, times=times))
        self.best: tuple[float, PipelineSolution] | None = None
        self.known: dict[tuple[int, float], Deal | None] = {}
        self.known_relaxed: dict[tuple[int, float], Deal | None] = {}

    def _blocks(self, v: int) -> list[list[NDArray[np.int64]]]:
        """Return of every block of every stage time, once, kept, static, working by option."""
        numbers = {
            id(own): np.array(
                [[o.forward + o.backward, o.once, o.kept * v, o.static, o.working] for o in own],
                dtype=np.int64,
            ).T
            for own in {id(own): own for own in self.asked.options}.values()
        }
        calls = [numbers[id(own)] for own in self.asked.options]
        return [calls[a:b] for a, b in pairwise((0, *self.start.ends))]

    def run(self) -> DealtPlan:
        """Return the best answer that fits."""
        if self.extra > 0:
            self.calibrate([[int(np.argmin(own)) for own in rank.times] for rank in self.ranks])
            waited = 0
            for number in range(_MOST_ROUNDS):
                if self.cutoff is not None and self.bound() >= self.cutoff:
                    break
                before = float("inf") if self.best is None else self.best[0]
                ways = self.decided()
                if ways is None or not self.walk(ways, is_cautious=number >= _TRUSTING_ROUNDS):
                    break
                is_better = self.best is not None and self.best[0] < before * (1 - _CLOSE)
                waited = 0 if is_better or self.best is None else waited + 1
                if waited >= _PATIENCE:
                    break
        return DealtPlan(bound=self.bound(), best=self.best)

    def ticks(self, more: float) -> float:
        """Return ticks of v steps at the fastest paces, and more."""
        return self.weight * float(self.floors.sum()) + self.others + more

    def calibrate(self, ways: Sequence[Sequence[int]]) -> None:
        """Find what ranks hold beside from some of them; between these it changes evenly."""
        solution, last = self.solution(ways), self.setting.pp - 1
        walked = sorted({0, min(1, last), max(0, last - 1), last})
        bases = [self.base(solution, number, ways[number])[0] for number in walked]
        for number, rank in enumerate(self.ranks):
            rank.base = rank.least_base = float(np.interp(number, walked, bases))

    def base(
        self, solution: PipelineSolution, number: int, ways: Sequence[int]
    ) -> tuple[float, int]:
        """Return what a rank of an answer holds beside, in units, and by how much it is over."""
        unit = self.planner.pricer(self.setting.microbatch_size).memory_unit
        excess = rank_excess(self.planner, self.setting, self.asked, solution, number)
        return excess / unit - self.ranks[number].peak(ways), excess

    def walk(self, ways: Sequence[Sequence[int]], *, is_cautious: bool) -> bool:
        """Walk the ranks of an answer; return whether to decide again is of use.

        `is_cautious`: while nothing fits, ranks count with the most that they held beside so far.
        """
        is_cautious &= self.best is None
        solution = self.solution(ways)
        is_over = is_spare = False
        for number, (rank, own) in enumerate(zip(self.ranks, ways, strict=True)):
            base, excess = self.base(solution, number, own)
            is_slowed = bool((rank.paces(own) > self.floors + 1).any())
            is_spare |= is_slowed and rank.base - base > _SPARE * _UNITS
            rank.base = max(rank.base, base) if is_cautious else base
            rank.least_base = min(rank.least_base, base)
            is_over |= excess > 0
        if is_over:
            return True
        step_s = answer_step_s(self.planner, self.setting, self.asked, solution)
        if self.best is None or step_s < self.best[0]:
            self.best = (step_s, solution)
        return is_spare

    def solution(self, ways: Sequence[Sequence[int]]) -> PipelineSolution:
        """Return the answer whose stages run in these ways."""
        options: list[int] = []
        for chunk in range(self.setting.virtual_stages):
            for rank, own in zip(self.ranks, ways, strict=True):
                options += rank.stages[chunk].options[own[chunk]]
        return replace(self.start, options=tuple(options))

    def costs(self, rank: _Rank, paces: Floats, *, is_bound: bool = False) -> list[Floats]:
        """Return the ticks by which ways of a rank make v steps longer, beyond paces.

        `is_bound`: at the least, whatever ways may have been left out.
        """
        return [
            self.weight * np.maximum(0.0, time - pace)
            + (stage.least[0] if is_bound and not stage.is_once_known else stage.once)
            for time, pace, stage in zip(rank.times, paces, rank.stages, strict=True)
        ]

    def decided(self) -> list[Sequence[int]] | None:
        """Return a way for each stage, the rank that lacks most first; None if none is known."""
        alone = []
        for number, rank in enumerate(self.ranks):
            found = self.alone(number, rank.base)
            if found is None:
                return None
            alone.append(found)
        paces = self.floors.copy()
        for number in sorted(range(len(alone)), key=lambda n: -alone[n].cost):
            rank = self.ranks[number]
            if (rank.paces(alone[number].ways) > paces).any():
                found = self.deal(self.costs(rank, paces), rank.held, rank.base)
                if found is None:
                    return None
                paces = np.maximum(paces, rank.paces(found.ways))
        decided = [self.within(rank, paces, 0.0) for rank in self.ranks]
        if any(own is None for own in decided):
            return None
        once = [
            sum(float(stage.once[way]) for stage, way in zip(rank.stages, own or (), strict=True))
            for rank, own in zip(self.ranks, decided, strict=True)
        ]
        last = once.index(max(once))
        decided[last] = self.within(self.ranks[last], paces, 1.0) or decided[last]
        return [own for own in decided if own is not None]

    def alone(self, number: int, base: float) -> Deal | None:
        """Return how a rank that holds so much beside is decided for itself."""
        if (number, base) not in self.known:
            rank = self.ranks[number]
            costs = self.costs(rank, self.floors, is_bound=True)
            self.known[number, base] = self.deal(costs, rank.held, base)
        return self.known[number, base]

    def deal(self, costs: Sequence[Floats], held: Sequence[Floats], base: float) -> Deal | None:
        """Return how stages of a rank that holds so much beside are decided."""
        return deal_rank(costs, held, -base, close=_CLOSE * self.ticks(0.0))

    def relaxed(self, number: int, base: float) -> Deal | None:
        """Return `alone`, of stages with ways that are not known as if they had the best of all."""
        rank = self.ranks[number]
        if all(stage.is_all for stage in rank.stages):
            return self.alone(number, base)
        if (number, base) in self.known_relaxed:
            return self.known_relaxed[number, base]
        own = instants(self.setting, number)
        stages = [s.relaxed(pace) for s, pace in zip(rank.stages, self.floors, strict=True)]
        held = [_held(stage, chunk, own) for chunk, stage in enumerate(stages)]
        costs = [
            cost if stage.is_all else fresh.once.astype(np.float64)
            for cost, stage, fresh in zip(
                self.costs(rank, self.floors, is_bound=True), rank.stages, stages, strict=True
            )
        ]
        found = self.known_relaxed[number, base] = self.deal(costs, held, base)
        return found

    def within(self, rank: _Rank, paces: Floats, share: float) -> tuple[int, ...] | None:
        """Return the fastest ways of a rank within paces, with a share of what is paid once."""
        costs = [
            np.where(time <= pace + 0.5, time + share * stage.once, np.inf)
            for time, pace, stage in zip(rank.times, paces, rank.stages, strict=True)
        ]
        found = self.deal(costs, rank.held, rank.base)
        return None if found is None else found.ways

    def bound(self) -> int:
        """Return ticks that no answer is below, as far as the walked ones tell what ranks hold."""
        least = max(self.least_once)
        for number, (rank, once) in enumerate(zip(self.ranks, self.least_once, strict=True)):
            most = self.weight * self.extra + once
            if rank.least_base < np.inf:
                found = self.relaxed(number, rank.least_base)
                least = max(least, most if found is None else min(found.bound, most))
        return int(self.ticks(least) / self.setting.virtual_stages * (1 - 1e-9))


def _held(stage: DealtStage, chunk: int, own: Instants) -> Floats:
    """Return memory units of the ways of a stage at each instant of its rank."""
    alive = np.array([counts[chunk] for _, counts in own])[:, None]
    runs = np.array([part == chunk for part, _ in own])[:, None]
    held = stage.static + alive * stage.kept + runs * stage.working
    return np.asarray(held, dtype=np.float64)
