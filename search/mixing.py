"""A fast mix of options for one stage, and a bound, by prices: what often spares CP-SAT.

A stage of many alike blocks is a multiple-choice knapsack. For every level w of working memory the
options that need more are left out, and what they hold must fit in `room - w`. The relaxation to
fractions of blocks gives a bound: every run starts at the option that holds least, and the moves
along the lower hull of its (held, time) points are made in the order of ticks saved per unit. Whole
blocks give a solution, improved by the best single changes that fit. Where the limit of `once`
strikes, ticks of `once` get a price p that is bisected:

    time >= relaxed (time + p once) - p most_once        for every p >= 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoplan.search.problem import Run

__all__ = ["Mix", "mix_options"]

_PRICE_STEPS = 16
_SLACK = 1e-9  # of a bound in floating point, relative to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Blocks per run and option, empty if none were found; their ticks, and a bound of any's."""

    counts: tuple[tuple[int, ...], ...]
    time: int
    once: int
    bound: int


@dataclass(frozen=True, slots=True)
class _Point:
    """An option as a knapsack sees it."""

    option: int
    held: int
    cost: float


def mix_options(runs: Sequence[Run], live: int, room: int, most_once: int) -> Mix:
    """Return a mix within `room` units and `most_once` ticks of once, and a bound of its time.

    Returns:
        The mix; without counts if none was found, which proves nothing. The bound holds for every
        mix within the limits.
    """
    found = _priced_mix(runs, live, room, 0.0, most_once)
    if not found.counts or found.once <= most_once:
        return found
    best, bound, low, high = None, found.bound, 0.0, _first_price(runs)
    for _ in range(_PRICE_STEPS):
        price = high if best is None else (low + high) / 2
        tried = _priced_mix(runs, live, room, price, most_once)
        bound = max(bound, tried.bound)
        if tried.once > most_once:
            low, high = price, max(high, price * (2 if best is None else 1))
            continue
        high = price
        if best is None or tried.time < best.time:
            best = tried
    if best is None:
        return Mix(counts=(), time=0, once=0, bound=bound)
    return Mix(counts=best.counts, time=best.time, once=best.once, bound=bound)


def _first_price(runs: Sequence[Run]) -> float:
    """Return ticks of time per tick of once under which the two weigh about the same."""
    time = max(o.forward + o.backward for run in runs for o in run.options)
    once = max(o.once for run in runs for o in run.options)
    return max(time, 1) / max(once, 1)


def _priced_mix(
    runs: Sequence[Run], live: int, room: int, price: float, most_once: int
) -> Mix:
    """Return the best mix over all levels of working memory, with `once` at a price."""
    least = max(min(option.working for option in run.options) for run in runs)
    levels = {option.working for run in runs for option in run.options if option.working >= least}
    best: tuple[float, tuple[tuple[int, ...], ...]] | None = None
    bound: float | None = None
    for level in sorted(levels):
        found = _mix_at(runs, live, room - level, level, price)
        if found is None:
            break
        relaxed, counts, cost = found
        bound = relaxed if bound is None else min(bound, relaxed)
        if best is None or cost < best[0]:
            best = (cost, counts)
    if best is None or bound is None:
        return Mix(counts=(), time=0, once=0, bound=0)
    options = [
        (option, n)
        for run, own in zip(runs, best[1], strict=True)
        for option, n in zip(run.options, own, strict=True)
    ]
    floor = bound - price * most_once
    return Mix(
        counts=best[1],
        time=sum((option.forward + option.backward) * n for option, n in options),
        once=sum(option.once * n for option, n in options),
        bound=max(0, int(floor - abs(bound) * _SLACK) if price else round(floor)),
    )


def _mix_at(
    runs: Sequence[Run], live: int, room: int, level: int, price: float
) -> tuple[float, tuple[tuple[int, ...], ...], float] | None:
    """Return the relaxed cost, counts, and their cost; None if nothing holds so little."""
    points = [
        [
            _Point(
                index,
                option.static + live * option.kept,
                option.forward + option.backward + price * option.once,
            )
            for index, option in enumerate(run.options)
            if option.working <= level
        ]
        for run in runs
    ]
    hulls = [_hull(own) for own in points]
    left = room - sum(run.count * hull[0].held for run, hull in zip(runs, hulls, strict=True))
    if left < 0:
        return None
    counts = [{hull[0]: run.count} for run, hull in zip(runs, hulls, strict=True)]
    relaxed = sum(run.count * hull[0].cost for run, hull in zip(runs, hulls, strict=True))
    moves = sorted(
        (-(a.cost - b.cost) / (b.held - a.held), index, place, a, b)
        for index, hull in enumerate(hulls)
        for place, (a, b) in enumerate(zip(hull, hull[1:], strict=False))
    )
    is_open = True
    for rate, index, _, before, after in moves:
        step = after.held - before.held
        wanted = counts[index].get(before, 0)
        whole = min(wanted, left // step)
        if is_open:
            relaxed += rate * (wanted * step if whole == wanted else left)
            is_open = whole == wanted
        if whole:
            left -= whole * step
            counts[index][before] -= whole
            counts[index][after] = counts[index].get(after, 0) + whole
    _improve(points, counts, left)
    cost = sum(point.cost * n for own in counts for point, n in own.items())
    chosen = tuple(
        tuple(
            sum(n for point, n in own.items() if point.option == option)
            for option in range(len(run.options))
        )
        for run, own in zip(runs, counts, strict=True)
    )
    return relaxed, chosen, cost


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
                    if saved > 0 and after.held - before.held <= left:
                        if best is None or saved > best[0]:
                            best = (saved, index, before, after)
        if best is None:
            return
        _, index, before, after = best
        left -= after.held - before.held
        counts[index][before] -= 1
        counts[index][after] = counts[index].get(after, 0) + 1
