"""A fast mix of options for one stage, and a bound, by prices: what often spares CP-SAT.

A stage of many alike blocks is a multiple-choice knapsack. For every level w of working memory the
options that need more are left out, and what they hold must fit in `room - w`. The relaxation to
fractions of blocks gives a bound: every run starts at the option that holds least, and the moves
along the lower hull of its (held, time) points are made in the order of ticks saved per unit. Whole
blocks give a solution, improved by the best single changes that fit. Where the limit of `once`
strikes, ticks of `once` get a price p that is bisected:

    time >= relaxed (time + p once) - p most_once        for every p >= 0

What lies little above the bound is enumerated (enumeration.py), then what lies twice as far above
it, until there is something.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autoplan.search.enumeration import SLACK, best_within
from autoplan.search.problem import BlockOption, Run

__all__ = ["Mix", "mix_options"]

_PRICE_STEPS = 16

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Blocks per run and option, empty if none were found; their ticks, and a bound of any's."""

    counts: tuple[tuple[int, ...], ...]
    time: int
    once: int
    bound: int


class _Point(NamedTuple):
    """An option as a knapsack sees it."""

    option: int
    held: int
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Relaxed:
    """The relaxation at a level of working memory: its cost, and the moves that lead there.

    Attributes:
        room: units left for what is held.
        moves: (ticks per unit, run, point before, point after), best first.
        rate: ticks per unit of the move at which the room ends; 0 if it does not.
    """

    level: int
    room: int
    cost: float
    moves: list[tuple[float, int, _Point, _Point]]
    rate: float


@dataclass(slots=True, kw_only=True)
class _Table:
    """The runs of a stage, with their options as knapsacks see them at levels and prices.

    Attributes:
        levels: of working memory, the least at which all runs have an option first.
        numbers: of each run, held, time and once of its options at each level, [level, option];
            infinite time where an option needs more.
        rates: the last that a relaxation at each level had.
        points: cache of `at`.
    """

    runs: Sequence[Run]
    live: int
    levels: list[int] = field(init=False)
    numbers: list[tuple[Floats, Floats, Floats]] = field(init=False)
    rates: Floats = field(init=False)
    points: dict[tuple[int, int, float], tuple[list[_Point], list[_Point]]] = field(init=False)

    def __post_init__(self) -> None:
        least = max(min(option.working for option in run.options) for run in self.runs)
        levels = {option.working for run in self.runs for option in run.options}
        self.levels = sorted(level for level in levels if level >= least)
        self.points, self.rates, self.numbers = {}, np.full(len(self.levels), np.nan), []
        for run in self.runs:
            rows = [(o.static + self.live * o.kept, _time(o), o.once) for o in run.options]
            held, time, once = np.array(rows, dtype=np.float64).T
            working = np.array([option.working for option in run.options])
            is_over = working > np.array(self.levels)[:, None]
            self.numbers.append((held, np.where(is_over, np.inf, time), once))

    def at(self, index: int, level: int, price: float) -> tuple[list[_Point], list[_Point]]:
        """Return the options of a run that need no more than a level, and their lower hull."""
        key = (index, level, price)
        if key not in self.points:
            points = [
                _Point(
                    number,
                    option.static + self.live * option.kept,
                    _time(option) + price * option.once,
                )
                for number, option in enumerate(self.runs[index].options)
                if option.working <= level
            ]
            self.points[key] = (points, _hull(points))
        return self.points[key]

    def moves(self, level: int, price: float) -> list[tuple[float, int, _Point, _Point]]:
        """Return what `_Relaxed.moves` says, of all runs."""
        hulls = (self.at(index, level, price)[1] for index in range(len(self.runs)))
        found = (
            ((b.cost - a.cost) / (b.held - a.held), index, a, b)
            for index, hull in enumerate(hulls)
            for a, b in pairwise(hull)
        )
        return sorted(found, key=lambda move: (move[0], move[1], move[2].held))

    def least(self, level: int, price: float) -> tuple[int, float]:
        """Return what all blocks hold and cost where each holds least."""
        first = [self.at(index, level, price)[1][0] for index in range(len(self.runs))]
        held = sum(run.count * point.held for run, point in zip(self.runs, first, strict=True))
        cost = sum(run.count * point.cost for run, point in zip(self.runs, first, strict=True))
        return held, cost

    def least_costs(self, room: int, price: float) -> Floats:
        """Return what no relaxation of a level is below, by the rates that it had before."""
        rooms = room - np.array(self.levels)
        costs = -self.rates * rooms
        for run, (held, time, once) in zip(self.runs, self.numbers, strict=True):
            costs += run.count * (time + price * once + self.rates[:, None] * held).min(axis=1)
        return np.where(np.isnan(self.rates), -np.inf, costs - np.abs(costs) * SLACK)

    def relaxed(self, room: int, price: float) -> Iterator[_Relaxed]:
        """Yield the relaxation at every level at which something fits, cheapest first."""
        least = self.least_costs(room, price).tolist()
        waiting: list[tuple[float, int, int, _Relaxed | None]] = [
            (cost, 0, number, None) for number, cost in enumerate(least)
        ]
        heapify(waiting)
        while waiting:
            _, _, number, found = heappop(waiting)
            if found is not None:
                yield found
                continue
            level = self.levels[number]
            found = _relaxed(self, room - level, level, price)
            if found is not None:
                self.rates[number] = found.rate
                heappush(waiting, (found.cost, 1, number, found))


def mix_options(
    runs: Sequence[Run],
    live: int,
    room: int,
    most_once: int,
    grain: int = 1,
    *,
    is_thorough: bool = False,
) -> Mix:
    """Return a mix within `room` units and `most_once` ticks of once, and a bound of its time.

    Where `once` does not strike and the enumeration is small, the time is the bound, but for less
    than a multiple of `grain`.

    Args:
        runs, live, room, most_once, grain: as in `stage.solve_stage`.
        is_thorough: enumerate where `once` strikes too, and some mixes where there are many.

    Returns:
        The mix; without counts if none was found, which proves nothing. The bound holds for every
        mix within the limits.
    """
    table = _Table(runs=runs, live=live)
    found = _priced_mix(table, room, 0.0, most_once)
    if not found.counts:
        return found
    if found.once <= most_once:
        return _proven_mix(table, room, most_once, grain, found, 0.0, is_thorough)
    best, bound, low, high = None, found.bound, 0.0, _first_price(runs)
    best_price = 0.0
    for _ in range(_PRICE_STEPS):
        price = high if best is None else (low + high) / 2
        tried = _priced_mix(table, room, price, most_once)
        if tried.bound > bound:
            bound, best_price = tried.bound, price
        if tried.once > most_once:
            low, high = price, max(high, price * (2 if best is None else 1))
            continue
        high = price
        if best is None or tried.time < best.time:
            best = tried
    if best is None:
        return Mix(counts=(), time=0, once=0, bound=bound)
    best = replace(best, bound=bound)
    if not is_thorough:
        return best
    return _proven_mix(table, room, most_once, grain, best, best_price, is_thorough)


def _first_price(runs: Sequence[Run]) -> float:
    """Return ticks of time per tick of once under which the two weigh about the same."""
    time = max(o.forward + o.backward for run in runs for o in run.options)
    once = max(o.once for run in runs for o in run.options)
    return max(time, 1) / max(once, 1)


def _priced_mix(table: _Table, room: int, price: float, most_once: int) -> Mix:
    """Return the best mix over all levels of working memory, with `once` at a price."""
    best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
    bound = 0.0
    for relaxed in table.relaxed(room, price):
        if best is None:
            bound = relaxed.cost
        elif relaxed.cost >= best[0]:
            break
        counts, cost = _whole_mix(table, price, relaxed)
        if best is None or cost < best[0]:
            best = (cost, counts)
    if best is None:
        return Mix(counts=(), time=0, once=0, bound=0)
    return _mix_of(table.runs, best[1], bound - price * most_once - abs(bound) * SLACK)


def _mix_of(runs: Sequence[Run], counts: tuple[tuple[int, ...], ...], bound: float) -> Mix:
    options = [
        (option, n)
        for run, own in zip(runs, counts, strict=True)
        for option, n in zip(run.options, own, strict=True)
        if n
    ]
    return Mix(
        counts=counts,
        time=sum((option.forward + option.backward) * n for option, n in options),
        once=sum(option.once * n for option, n in options),
        bound=max(0, -int(-bound // 1)),
    )


def _relaxed(table: _Table, room: int, level: int, price: float) -> _Relaxed | None:
    """Return the relaxation at a level, or None if nothing holds so little."""
    held, cost = table.least(level, price)
    left = room - held
    if left < 0:
        return None
    moves = table.moves(level, price)
    rate = 0.0
    for rate_of_move, index, before, after in moves:
        wanted = table.runs[index].count * (after.held - before.held)
        cost += rate_of_move * min(wanted, left)
        if wanted > left:
            rate = -rate_of_move
            break
        left -= wanted
    return _Relaxed(level=level, room=room, cost=cost, moves=moves, rate=rate)


def _whole_mix(
    table: _Table, price: float, relaxed: _Relaxed
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """Return counts of whole blocks near a relaxation, and their cost."""
    runs = table.runs
    tables = [table.at(index, relaxed.level, price) for index in range(len(runs))]
    counts = [{hull[0]: run.count} for run, (_, hull) in zip(runs, tables, strict=True)]
    left = relaxed.room - table.least(relaxed.level, price)[0]
    for _, index, before, after in relaxed.moves:
        step = after.held - before.held
        whole = min(counts[index].get(before, 0), left // step)
        if whole:
            left -= whole * step
            counts[index][before] -= whole
            counts[index][after] = counts[index].get(after, 0) + whole
    _improve([points for points, _ in tables], counts, left)
    cost = sum(point.cost * n for own in counts for point, n in own.items())
    return tuple(_per_option(run, own) for run, own in zip(runs, counts, strict=True)), cost


def _per_option(run: Run, counts: dict[_Point, int]) -> tuple[int, ...]:
    chosen = [0] * len(run.options)
    for point, n in counts.items():
        chosen[point.option] += n
    return tuple(chosen)


def _proven_mix(
    table: _Table,
    room: int,
    most_once: int,
    grain: int,
    found: Mix,
    price: float,
    is_thorough: bool,
) -> Mix:
    """Return the best mix, proven; one that is not if the enumeration is too large.

    Args:
        found: a mix within the limits, with a bound of all.
        price: of `once`, with which the relaxation is near that bound.
        is_thorough: follow some mixes where there are too many.
        others: as in `mix_options`.
    """
    most = found.time + abs(found.time) * SLACK + price * most_once
    levels = list(takewhile(lambda level: level.cost <= most, table.relaxed(room, price)))
    step, bound = grain, found.bound
    while -(-bound // grain) < -(-found.time // grain):
        wanted = min(-(-bound // grain) * grain + step - grain, found.time - 1)
        bound_after, is_proof = wanted + 1, True
        for relaxed in levels:
            counts, are_all = _best_within(table, relaxed, price, most_once, wanted, is_thorough)
            is_proof &= are_all
            if counts:
                found = _mix_of(table.runs, counts, bound)
                wanted = found.time - 1
        if not is_proof:
            break
        bound, step = min(bound_after, found.time), 2 * step
    return replace(found, bound=bound)


def _best_within(
    table: _Table,
    relaxed: _Relaxed,
    price: float,
    most_once: int,
    wanted: int,
    is_thorough: bool,
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Return counts of a time up to `wanted`, () if there are none, and whether that is proven."""
    if relaxed.cost - price * most_once > wanted + abs(wanted) * SLACK:
        return (), True
    runs = table.runs
    tables = [table.at(index, relaxed.level, price)[0] for index in range(len(runs))]
    found = best_within(
        [run.count for run in runs],
        [_numbers(run, points) for run, points in zip(runs, tables, strict=True)],
        (relaxed.room, wanted, most_once),
        (relaxed.rate, price),
        is_thorough=is_thorough,
    )
    counts = [[0] * len(run.options) for run in runs if found.counts]
    for own, points, chosen in zip(counts, tables, found.counts, strict=False):
        for point, n in zip(points, chosen, strict=True):
            own[point.option] = n
    return tuple(tuple(own) for own in counts), found.is_proof


def _numbers(run: Run, points: Sequence[_Point]) -> NDArray[np.int64]:
    """Return held, time and once of options, one column each."""
    options = [(run.options[point.option], point.held) for point in points]
    return np.array(
        [
            [held for _, held in options],
            [option.forward + option.backward for option, _ in options],
            [option.once for option, _ in options],
        ],
        dtype=np.int64,
    )


def _hull(points: Sequence[_Point]) -> list[_Point]:
    """Return the lower convex hull, from the point that holds least to the cheapest."""
    hull: list[_Point] = []
    for point in sorted(points, key=lambda p: (p.held, p.cost, p.option)):
        if hull and point.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _is_above(first: _Point, middle: _Point, last: _Point) -> bool:
    """Return whether the middle point is on or above the line between the others."""
    return (first.cost - middle.cost) * (last.held - middle.held) <= (middle.cost - last.cost) * (
        middle.held - first.held
    )


def _improve(
    points: Sequence[Sequence[_Point]], counts: Sequence[dict[_Point, int]], left: int
) -> None:
    """Change one block at a time to what saves most within `left`, until nothing does."""
    while True:
        best: tuple[float, int, _Point, _Point] | None = None
        for index, own in enumerate(counts):
            for before in [point for point, n in own.items() if n]:
                for after in points[index]:
                    saved = before.cost - after.cost
                    fits = after.held - before.held <= left
                    if saved > 0 and fits and (best is None or saved > best[0]):
                        best = (saved, index, before, after)
        if best is None:
            return
        _, index, before, after = best
        left -= after.held - before.held
        counts[index][before] -= 1
        counts[index][after] = counts[index].get(after, 0) + 1


def _time(option: BlockOption) -> int:
    return option.forward + option.backward
