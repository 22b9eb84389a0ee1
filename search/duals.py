"""Prices of a rank's instants, and the ways to run its stages that they lead to.

    maximise over prices y >= 0:   sum_c min_w (cost[c, w] + sum_k y[k] held[k, c, w]) - room sum y

bounds the cost of all ways that keep to the room at every instant k (the Lagrangian dual of a
multiple-choice knapsack with several capacities; Held, Wolfe and Crowder 1974). One instant often
binds alone, so the best price of one comes first. From there prices follow the subgradient, held -
room of the cheapest ways, with steps as long as Polyak's. Ways on the path that do not fit are
mended one stage at a time, and the best that fit are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Duals"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_MOST_BINDING = 2  # instants whose prices alone are tried first
_HALVINGS = 24
_LARGEST = 2.0**60  # of a price
_STEPS = 100
_EXCHANGES = 20
_MOST_EXCHANGED = 100  # ways at one stage, on either side
_PATIENCE = 8  # steps without a better bound, after which they get half as long
_MENDED_EVERY = 33
_SMALLEST = 1e-3  # of the first step length
_NEARBY = (1.0, 0.97, 1.03, 1.2)  # of the best prices, whose ways are mended
_CLOSE = 1e-7  # of the bound: nothing is left to find
_FIRST_ABOVE = 0.05  # of the bound: how far above it a cost may lie while none is known


class Duals:
    """The dual of one rank's problem; see `autoplan.search.deals.deal_rank`.

    Attributes:
        best: the cheapest ways that were found to fit, None before there are any.
        best_cost: of these; infinite before there are any.
    """

    def __init__(self, costs: Sequence[Floats], held: Sequence[Floats], room: float) -> None:
        width = max(map(len, costs))
        pads = [(0, width - len(c)) for c in costs]
        self.cost = np.array(
            [np.pad(c, pad, constant_values=np.inf) for c, pad in zip(costs, pads, strict=True)]
        )  # [stage, way]
        self.held = np.array(
            [np.pad(own, ((0, 0), pad)).T for own, pad in zip(held, pads, strict=True)]
        )  # [stage, way, instant]
        self.room = room
        self.stages = np.arange(len(costs))
        self.best: tuple[int, ...] | None = None
        self.best_cost = float("inf")

    def best_prices(self, close: float = 0.0) -> tuple[Floats, float]:
        """Return the prices of the largest bound that is found, [instant], and the bound.

        `close`: of a cost, by which the best that fits may lie above the bound at the end.
        """
        prices, bound = self._single_price()
        self._exchange()
        if self.best_cost - bound <= close:
            return prices, bound
        best = prices
        length, waited = 1.0, 0
        for step in range(_STEPS):
            priced = self.cost + self.held @ prices
            ways = priced.argmin(axis=1)
            value = float(priced[self.stages, ways].sum() - self.room * prices.sum())
            over = self.held[self.stages, ways].sum(axis=0) - self.room
            if value > bound + _CLOSE * abs(value):
                best, bound, waited = prices, value, 0
            else:
                waited += 1
            if (over <= 0).all():
                self._take(ways)
            elif step % _MENDED_EVERY == 0:
                self._mend(ways)
            if waited > _PATIENCE:
                length, waited, prices = length / 2, 0, best
                continue
            moved = np.where((prices <= 0) & (over < 0), 0.0, over)
            norm = float(moved @ moved)
            above = self._above(bound) - value
            if norm == 0 or length < _SMALLEST or self.best_cost - bound <= abs(bound) * _CLOSE:
                break
            prices = np.maximum(0.0, prices + length * above / norm * moved)
        for factor in _NEARBY:
            self._mend((self.cost + factor * (self.held @ best)).argmin(axis=1))
        self._exchange()
        return best, bound

    def _exchange(self) -> None:
        """Change the best ways at two stages at once while that makes them cheaper and fits."""
        for _ in range(_EXCHANGES):
            if self.best is None:
                return
            ways = np.array(self.best)
            used = self.held[self.stages, ways].sum(axis=0)
            more = self.cost - self.cost[self.stages, ways][:, None]
            freed = self.held[self.stages, ways][:, None] - self.held
            cheaper = _some(more < 0, more)
            freeing = _some((freed > 0).any(axis=2) & (more > 0), more)
            gains = more[cheaper][:, None] + more[freeing]
            apart = cheaper[0][:, None] != freeing[0]
            then = used - (freed[cheaper][:, None] + freed[freeing])
            fits = (then <= self.room).all(axis=2) & apart & (gains < 0)
            if not fits.any():
                return
            one, other = np.unravel_index(np.where(fits, gains, 0.0).argmin(), gains.shape)
            for stage, way in ((cheaper, one), (freeing, other)):
                ways[stage[0][way]] = stage[1][way]
            self._take(ways)

    def _single_price(self) -> tuple[Floats, float]:
        """Return the best prices of which one is not zero, of an instant that binds; the bound."""
        at_first = self.held[self.stages, self.cost.argmin(axis=1)].sum(axis=0)
        best, bound = np.zeros(self.held.shape[2]), -np.inf
        for instant in np.argsort(-at_first)[:_MOST_BINDING].tolist():
            own = self.held[:, :, instant]
            value, price = self._best_price(own)
            if value > bound:
                best, bound = np.zeros(self.held.shape[2]), value
                best[instant] = price
        return best, bound

    def _best_price(self, own: Floats) -> tuple[float, float]:
        """Return the largest bound by a price of one instant, and the price, by bisection."""

        def at(price: float) -> tuple[float, bool]:
            priced = self.cost + price * own
            ways = priced.argmin(axis=1)
            total = float(priced[self.stages, ways].sum()) - price * self.room
            return total, float(own[self.stages, ways].sum()) > self.room

        low, high = 0.0, 1.0
        while at(high)[1] and high < _LARGEST:
            low, high = high, 4 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle)[1] else (low, middle)
        self._mend((self.cost + high * own).argmin(axis=1))
        return max((at(low)[0], low), (at(high)[0], high))

    def _above(self, bound: float) -> float:
        """Return a cost that steps aim at."""
        if np.isfinite(self.best_cost):
            return self.best_cost
        return bound + max(1.0, _FIRST_ABOVE * abs(bound))

    def _take(self, ways: Ints) -> None:
        cost = float(self.cost[self.stages, ways].sum())
        if cost < self.best_cost:
            self.best, self.best_cost = tuple(ways.tolist()), cost

    def _mend(self, ways: Ints) -> None:
        """Change ways one stage at a time until they fit, then while that makes them cheaper."""
        ways = ways.copy()
        used = self.held[self.stages, ways].sum(axis=0)
        for _ in range(4 * len(ways)):
            more = self.cost - self.cost[self.stages, ways][:, None]
            then = used + self.held - self.held[self.stages, ways][:, None]
            over = np.maximum(0.0, then - self.room).sum(axis=2)
            now = float(np.maximum(0.0, used - self.room).sum())
            if now == 0:
                gain = np.where(over == 0, -more, -np.inf)
            else:
                less = now - over
                with np.errstate(invalid="ignore"):
                    gain = np.where(
                        (less > 0) & np.isfinite(more), less / np.maximum(more, 1.0), -np.inf
                    )
            place = int(gain.argmax())
            if not gain.flat[place] > 0:
                break
            stage, way = divmod(place, self.cost.shape[1])
            used = used + self.held[stage, way] - self.held[stage, ways[stage]]
            ways[stage] = way
        if (used <= self.room).all():
            self._take(ways)


def _some(is_meant: NDArray[np.bool_], more: Floats) -> tuple[Ints, Ints]:
    """Return the stages and ways that are meant, as many as are compared, the cheapest of them."""
    stages, ways = np.nonzero(is_meant & np.isfinite(more))
    order = np.argsort(more[stages, ways], kind="stable")[:_MOST_EXCHANGED]
    return stages[order], ways[order]
