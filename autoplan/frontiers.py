"""Level 1: the ways to run a block class that are worth considering.

For a class and a tensor-parallel degree this poses the choice problems of `autoplan.block_choice`
(one without a recompute region, one with) to the search, and reads back decisions: an axis for
every op, and what to keep. Every decision is afterwards priced exactly by `autoplan.call_prices`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoplan.block_choice import ChoiceModel, Decision
from autoplan.detours import worthwhile_detours
from autoplan.graph import BlockTrace
from autoplan.plan import Recompute
from autoplan.search.choice import minimize_memory, solve_choice
from autoplan.search.fixing import with_fixed
from autoplan.search.frontier import (
    Eliminations,
    choice_frontier,
    fastest_choice,
    frontier_cover,
    whole_frontier,
)
from autoplan.search.problem import ChoiceSolution
from autoplan.tensor_layout import WHOLE_BORDERS, Border, Borders
from autoplan.times import Timer
from autoplan.units import TICK_S

__all__ = ["Decision", "Frontiers", "block_decisions", "fastest_ops_s", "plain_decision"]

_POINTS = 12
_TOLERANCE = 0.005
_TIME_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Frontiers:
    """Solves the problems of block classes, and keeps what problems have in common.

    Attributes:
        points: of a class too wide for elimination, most points of each of its two frontiers.
        tolerance: share of its time by which a decision may be replaced by a slower one that takes
            no more memory; None: take `points` of every class.
        time_limit_s: of CP-SAT, where a class is too wide for elimination, per frontier.
        eliminations: steps by structure.
    """

    points: int = _POINTS
    tolerance: float | None = _TOLERANCE
    time_limit_s: float = _TIME_LIMIT_S
    eliminations: Eliminations = field(default_factory=Eliminations)
    _models: dict[tuple[object, ...], ChoiceModel] = field(default_factory=dict)

    def decisions(
        self,
        block: BlockTrace,
        timer: Timer,
        *,
        whole: frozenset[str] = frozenset(),
        recompute: str | None = None,
        borders: Borders = WHOLE_BORDERS,
        slices: Sequence[tuple[str, str]] = (),
        offloads: bool = False,
    ) -> tuple[Decision, ...]:
        """Return the decisions on the frontier of time and memory of a class, fastest first.

        Args:
            block: the class.
            timer: prices ops at the tensor-parallel degree in question.
            whole: states that must be stored whole.
            slices: (state, placement) of states that must be stored in that placement.
            offloads: saved activations may wait in host memory.
            recompute: pins the mode: `none`, `full` or `selective`; None allows all. A class that
                has no decision of the pinned mode (nothing is saved, or nothing may be kept)
                recomputes nothing.
            borders: how activations enter and leave.
        """
        decisions: list[Decision] = []
        for region in (False, True):
            if (recompute == "none" and region) or (
                recompute in ("full", "selective") and not region
            ):
                continue
            if region and not any(op.saved for op in block.ops):
                continue
            decisions += self._sample(self._model(block, timer, whole, region, slices), borders)
        if recompute in (None, "full") and any(d.recompute.mode == "selective" for d in decisions):
            leanest = [d for d in decisions if d.recompute.mode != "none"][-1]
            decisions.append(replace(leanest, recompute=Recompute(mode="full")))
        if offloads and recompute is None and any(op.saved for op in block.ops):
            plain = [d for d in decisions if d.recompute.mode == "none"]
            decisions += [replace(d, recompute=Recompute(mode="offload")) for d in plain]
        unique = {d.key: d for d in decisions if recompute in (None, d.recompute.mode)}
        if not unique and recompute != "none":
            return self.decisions(
                block,
                timer,
                whole=whole,
                recompute="none",
                borders=borders,
                slices=slices,
            )
        return tuple(unique.values())

    def _model(
        self,
        block: BlockTrace,
        timer: Timer,
        whole: frozenset[str],
        region: bool,
        slices: Sequence[tuple[str, str]],
    ) -> ChoiceModel:
        """Return a problem, posed once whatever the borders."""
        key = (id(block), id(timer), whole, region, tuple(slices))
        if key not in self._models:
            self._models[key] = ChoiceModel(block, timer, whole, region, slices=slices)
        return self._models[key]

    def _sample(self, model: ChoiceModel, borders: Borders) -> list[Decision]:
        fixed = model.fixed[model.nearest(borders)]
        if self.tolerance is None:
            found = choice_frontier(
                model.problem,
                points=self.points if model.region or model.timer.degree > 1 else 1,
                time_limit_s=self.time_limit_s,
                eliminations=self.eliminations,
                fixed=fixed,
            )
        else:
            found = frontier_cover(
                model.problem,
                tolerance=self.tolerance,
                points=self.points,
                time_limit_s=self.time_limit_s,
                eliminations=self.eliminations,
                fixed=fixed,
            )
        return [model.read(s, borders) for s in found if s.status in ("optimal", "feasible")]

    def detours(
        self,
        block: BlockTrace,
        timer: Timer,
        *,
        whole: frozenset[str] = frozenset(),
        recompute: str | None = None,
        slices: Sequence[tuple[str, str]] = (),
    ) -> Mapping[Border, tuple[Border, ...]]:
        """Return `worthwhile_detours` of a class; arguments as in `decisions`."""
        regions = [recompute in ("full", "selective")] if recompute is not None else [False, True]
        can_redo = any(op.saved for op in block.ops)
        models = [
            self._model(block, timer, whole, region, slices)
            for region in dict.fromkeys(region and can_redo for region in regions)
        ]
        return worthwhile_detours(models, self.eliminations)

    def plain(
        self,
        block: BlockTrace,
        timer: Timer,
        *,
        whole: frozenset[str] = frozenset(),
        lean: bool = False,
        borders: Borders = WHOLE_BORDERS,
        slices: Sequence[tuple[str, str]] = (),
    ) -> Decision:
        """Return the fastest decision of a class that recomputes nothing.

        With `lean`, the fastest among those that save most of the memory that sharding can save:
        within a quarter of the way from the leanest to the fastest.
        """
        model, fastest = self._fastest(block, timer, whole, borders=borders, slices=slices)
        if not lean or timer.degree == 1:
            return model.read(fastest, borders)
        fixed = model.fixed[model.nearest(borders)]
        every = whole_frontier(model.problem, eliminations=self.eliminations, fixed=fixed)
        if every is None:
            problem = with_fixed(model.problem, fixed)
            leanest = minimize_memory(problem, time_limit_s=self.time_limit_s)
            limit = _lean_limit(fastest.memory, leanest.memory)
            found = solve_choice(problem, limit, time_limit_s=self.time_limit_s)
            return model.read(found, borders)
        limit = _lean_limit(fastest.memory, every[-1].memory)
        return model.read(next(point for point in every if point.memory <= limit), borders)

    def _fastest(
        self,
        block: BlockTrace,
        timer: Timer,
        whole: frozenset[str],
        *,
        borders: Borders,
        slices: Sequence[tuple[str, str]],
    ) -> tuple[ChoiceModel, ChoiceSolution]:
        """Return the problem of a class without recomputation, and its fastest choice."""
        model = self._model(block, timer, whole, False, slices)
        fastest = fastest_choice(
            model.problem,
            time_limit_s=self.time_limit_s,
            eliminations=self.eliminations,
            fixed=model.fixed[model.nearest(borders)],
        )
        return model, fastest

    def fastest_s(
        self,
        block: BlockTrace,
        timer: Timer,
        *,
        whole: frozenset[str] = frozenset(),
        borders: Borders = WHOLE_BORDERS,
        slices: Sequence[tuple[str, str]] = (),
    ) -> float:
        """Return seconds below which no decision of the class is, collectives included.

        Nothing that recomputes is faster than the same without. Infinite where there is none.
        """
        model, fastest = self._fastest(block, timer, whole, borders=borders, slices=slices)
        problem = model.problem
        if fastest.status == "infeasible":
            return math.inf
        # Every cost was rounded up to a tick; the price of a decision rounds its sum once.
        rounded = len(problem.ops) + sum(
            sum(cost is not None for row in link.transitions for cost in row)
            for link in problem.links
        )
        return max(0.0, (fastest.bound - rounded) * TICK_S)


def _lean_limit(fastest: int, leanest: int) -> int:
    return leanest + max(0, fastest - leanest) // 4


def block_decisions(
    block: BlockTrace,
    timer: Timer,
    *,
    whole: frozenset[str] = frozenset(),
    points: int = _POINTS,
    recompute: str | None = None,
) -> tuple[Decision, ...]:
    """Return a sample of the decisions of one class; see `Frontiers.decisions`."""
    return Frontiers(points=points, tolerance=None).decisions(
        block, timer, whole=whole, recompute=recompute
    )


def plain_decision(
    block: BlockTrace, timer: Timer, *, whole: frozenset[str] = frozenset(), lean: bool = False
) -> Decision:
    """Return the fastest decision of one class that recomputes nothing; see `Frontiers.plain`."""
    return Frontiers().plain(block, timer, whole=whole, lean=lean)


def fastest_ops_s(block: BlockTrace, timer: Timer) -> float:
    """Return seconds below which no decision of the class is: each op at its fastest.

    Drops collectives and every constraint between ops: a bound of the frontier without a solve.
    """
    degree = timer.degree
    total = 0.0
    for op in block.ops:
        legal = [
            o
            for o in op.options
            if o.axis in ("whole", "partial") or (degree > 1 and o.size % degree == 0)
        ]
        total += min((timer.traced_time(op, o).total_s for o in legal), default=0.0)
    return total
