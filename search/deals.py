"""Stages that run at the same time, their ranks' memory counted instant by instant.

All ranks run their c-th stages together, so a step goes by the slowest of each:

    minimise   weight sum_c max(floor[c], time[c, w[c]]) + sum_c once[c, w[c]]
    subject to sum_c held[k, c, w[c]] <= room        for every instant k of the rank

over a way w[c] to run each of its stages. `floor` is what other ranks need at the least, so the
least of one rank alone bounds them all. Prices of the instants (search/duals.py) give a bound and,
mended, ways that fit. Where these are not close, ways are followed stage by stage while

    cost + price held + sum over later stages of min_w (cost + price held)[w] - price room <= wanted

and while every instant keeps to its room with later stages at their least. `wanted` grows from the
bound by the prices to what is known, until there is something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoplan.search.duals import Duals

__all__ = ["Deal", "DealtStage", "deal_rank", "grown_ways", "undominated"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MAX_LABELS = 3000
_MAX_GROWN = 20_000  # labels that are compared with each other
_MOST_STEPS = 24
_MOST_COMPARED = 64  # labels that others are compared with
_SLACK = 1e-9
_ROUNDING = 1e-3  # ticks
_FIRST_STEP = 2e-3  # above the bound of a rank's cost, of it; each step is longer than the last
_STEP_GROWTH = 3.0
_MAX_WAYS = 256
_MOST_BOTH = 2000  # ways of which both ticks are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtStage:
    """The ways to run one stage of a rank.

    Attributes:
        time: ticks of a micro-batch, by way.
        once: ticks of a step.
        kept: memory units of a micro-batch that is alive.
        static: memory units that are there all the time.
        working: memory units more while the stage runs.
        options: of its blocks.
        is_all: every other way costs no less than one of these and needs no less memory.
        is_once_known: the same holds where `once` counts; else ways may be left out that have less.
        least: once, kept, static and working, of which no way has less.
    """

    time: Ints
    once: Ints
    kept: Ints
    static: Ints
    working: Ints
    options: Sequence[tuple[int, ...]]
    is_all: bool
    is_once_known: bool
    least: tuple[int, int, int, int]

    def relaxed(self, floor: float) -> DealtStage:
        """Return one way that no way beats, where not all are known; else the stage itself."""
        if self.is_all:
            return self
        once, kept, static, working = (np.array([number]) for number in self.least)
        return DealtStage(
            time=np.array([int(floor)]),
            once=once,
            kept=kept,
            static=static,
            working=working,
            options=[()],
            is_all=True,
            is_once_known=True,
            least=self.least,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """A way for each stage of a rank, empty if none was found; what it costs, and a bound."""

    ways: tuple[int, ...]
    cost: float
    bound: float


def deal_rank(
    costs: Sequence[Floats], held: Sequence[Floats], room: float, *, close: float = 0.0
) -> Deal | None:
    """Return the cheapest ways of a rank's stages, or None if nothing is found that fits.

    Args:
        costs: of each way of each stage; infinite where it may not be taken.
        held: of each stage, [instant, way].
        room: memory units at every instant.
        close: of a cost, by which it may lie above the bound without a search for a better one.
    """
    first = [int(np.lexsort((own.max(axis=0), c))[0]) for c, own in zip(costs, held, strict=True)]
    least = np.array([own.min(axis=1) for own in _allowed(costs, held)])  # [stage, instant]
    if not np.isfinite(least).all() or (least.sum(axis=0) > room).any():
        return None
    at_first = np.sum([own[:, way] for own, way in zip(held, first, strict=True)], axis=0)
    cost = float(sum(c[way] for c, way in zip(costs, first, strict=True)))
    if (at_first <= room).all():
        return Deal(ways=tuple(first), cost=cost, bound=cost)
    duals = Duals(costs, held, room)
    prices, bound = duals.best_prices(close)
    known, limit = duals.best, duals.best_cost
    step = max(1.0, _FIRST_STEP * abs(bound))
    for _ in range(_MOST_STEPS):
        if limit - bound <= close:
            break
        wanted = min(bound + step, limit)
        ways, is_proof = _ways_within(
            costs, held, room, (prices, bound), least, wanted, needs_proof=known is not None
        )
        if ways is not None:
            cost = float(sum(c[way] for c, way in zip(costs, ways, strict=True)))
            if cost < limit:
                known, limit = ways, cost
            if is_proof:
                bound = max(bound, limit)
            break
        if is_proof:
            bound = max(bound, wanted)
        elif known is not None:
            break
        step *= _STEP_GROWTH
    return None if known is None else Deal(ways=known, cost=limit, bound=min(bound, limit))


def _allowed(costs: Sequence[Floats], held: Sequence[Floats]) -> list[Floats]:
    return [np.where(np.isfinite(c), own, np.inf) for c, own in zip(costs, held, strict=True)]


def _ways_within(
    costs: Sequence[Floats],
    held: Sequence[Floats],
    room: float,
    priced: tuple[Floats, float],
    least: Floats,
    wanted: float,
    *,
    needs_proof: bool,
) -> tuple[tuple[int, ...] | None, bool]:
    """Return the cheapest ways of a cost up to `wanted`, None if there are none; and if proven.

    Args:
        costs, held, room: as in `deal_rank`.
        priced: a price a unit of each instant, and the bound by these.
        least: of each stage, units of each instant that no way has less of.
        wanted: a cost.
        needs_proof: end where there are too many to compare; else follow the most promising.
    """
    prices, bound = priced
    promises = [c + prices @ own for c, own in zip(costs, held, strict=True)]
    after = least.sum(axis=0)
    cheapest = sum(float(own.min()) for own in costs)
    limit = wanted + abs(wanted) * _SLACK
    cost, used, promise = np.zeros(1), np.zeros((held[0].shape[0], 1)), np.array([bound])
    history: list[tuple[Ints, Ints]] = []
    is_proof = True
    for stage, (own_costs, own_held) in enumerate(zip(costs, held, strict=True)):
        after = after - least[stage]
        cheapest -= float(own_costs.min())
        own_promises = promises[stage] - promises[stage].min()
        grown = (cost[:, None] + own_costs).ravel()
        promised = (promise[:, None] + own_promises).ravel()
        kept = np.nonzero((promised <= limit) & (grown + cheapest <= limit))[0]
        if len(kept) > _MAX_GROWN:
            if needs_proof:
                return None, False
            is_proof = False
            kept = kept[np.argpartition(promised[kept], _MAX_GROWN)[:_MAX_GROWN]]
        parents, ways = kept // len(own_costs), kept % len(own_costs)
        total = used[:, parents] + own_held[:, ways]
        fits = (total + after[:, None] <= room).all(axis=0)
        kept, parents, ways, total = kept[fits], parents[fits], ways[fits], total[:, fits]
        if len(kept) > 1:
            chosen = _useful(grown[kept], total)
            if len(chosen) > _MAX_LABELS:
                if needs_proof:
                    return None, False
                is_proof = False
                best = np.argsort(promised[kept][chosen], kind="stable")
                chosen = chosen[best[: _MAX_LABELS // 3]]
            kept, parents, ways = kept[chosen], parents[chosen], ways[chosen]
            total = total[:, chosen]
        if not len(kept):
            return None, is_proof
        cost, used, promise = grown[kept], total, promised[kept]
        history.append((parents, ways))
    label = int(cost.argmin())
    found = []
    for parents, ways in reversed(history):
        found.append(int(ways[label]))
        label = int(parents[label])
    return tuple(reversed(found)), is_proof


def _useful(cost: Floats, held: Floats) -> Ints:
    """Return the places of labels that none of the cheapest few beats."""
    found: list[int] = []
    left = np.lexsort((held.max(axis=0), cost))
    while len(left) and len(found) < _MOST_COMPARED:
        found.append(int(left[0]))
        left = left[(held[:, left] < held[:, left[0], None]).any(axis=0)]
    return np.array([*found, *left], dtype=np.int64)


def undominated(numbers: Ints) -> Ints:
    """Return the columns that no other is below in one number and above in none; of equals one."""
    found: list[int] = []
    left = np.lexsort(numbers[::-1])
    while len(left):
        found.append(int(left[0]))
        left = left[(numbers[:, left] < numbers[:, left[0], None]).any(axis=0)]
    return np.array(found, dtype=np.int64)


def grown_ways(blocks: Sequence[Ints], floor: float, most_time: float, weight: int) -> DealtStage:
    """Return the ways to run blocks one after the other as a stage that may be of use.

    A way is left out where another costs no more and needs no more memory, but for what is there
    all the time, in which options hardly differ. Where some ways take more than the floor and some
    do not, and there are many, what is paid once is not looked at.

    Args:
        blocks: of each block, [number, option]: time, once, kept, static, working.
        floor: ticks that the stage may take for nothing.
        most_time: ticks; slower ways are left out.
        weight: ticks of a step for one of the stage's, beyond the floor.
    """
    numbers = np.zeros((5, 1), dtype=np.int64)
    options: list[tuple[int, ...]] = [()]
    fastest, slowest = ([int(end(block[0])) for block in blocks] for end in (np.min, np.max))
    is_always_over = sum(fastest) >= floor - _ROUNDING
    is_never_over = sum(slowest) <= floor
    is_all = is_once_known = True
    for index, block in enumerate(blocks):
        size, own = numbers.shape[1], block.shape[1]
        before, new = np.repeat(numbers, own, axis=1), np.tile(block, size)
        grown = before + new
        grown[4] = np.maximum(before[4] - new[2], new[4])
        fits = np.nonzero(grown[0] + sum(fastest[index + 1 :]) <= most_time)[0]
        price = [weight * grown[0] + grown[1]]
        if not is_always_over:
            price = [grown[1]] if is_never_over else [grown[0], grown[1]]
            if len(price) == 2 and grown.shape[1] > _MOST_BOTH:
                price, is_once_known = price[:1], False
        kept = fits[undominated(np.stack([*price, grown[2], grown[4]])[:, fits])]
        if len(kept) > _MAX_WAYS:
            is_all = False
            kept = kept[np.linspace(0, len(kept) - 1, _MAX_WAYS).astype(np.int64)]
        numbers = grown[:, kept]
        options = [(*options[k // own], k % own) for k in kept.tolist()]
    time, once, kept_units, static, working = numbers
    least = np.sum([block.min(axis=1) for block in blocks], axis=0)
    return DealtStage(
        time=time,
        once=once,
        kept=kept_units,
        static=static,
        working=working,
        options=options,
        is_all=is_all,
        is_once_known=is_once_known,
        least=(int(least[1]), int(least[2]), int(least[3]), int(blocks[-1][4].min())),
    )
