"""Which stretches of alike blocks are worth handing over in another way than the stage's.

Alike blocks of a stage that follow each other may leave the way in which activations cross stages,
stay in another one, and come back (`autoplan.search.detours`). With M[i,j](p) the least of time +
p memory of a block that activations enter in way i and leave in way j, memory at a price p, no row
of blocks costs less per block than the least mean of a cycle of ways

    least(p) = min( M[i,i], (M[i,j] + M[j,i]) / 2, (M[i,j] + M[j,k] + M[k,i]) / 3 )

Where one way in which stages hand over too has M[i,i](p) <= least(p) + tolerance least(0) for every
price, by duality no mix of ways is faster under any limit of memory by more than that, and none
is posed. All M follow from one pass over the steps of an elimination in which all ways are free
(`autoplan.search.fixing`), so nothing else is solved where ways need no mixing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from autoplan.block_choice import ChoiceModel, Decision
from autoplan.graph import Trace
from autoplan.search.fixing import least_sums
from autoplan.search.frontier import Eliminations, fastest_choice
from autoplan.tensor_layout import Border

__all__ = [
    "STAGE_WAYS",
    "DetourDecisions",
    "gaining_ways",
    "hands_to_alike",
    "worthwhile_detours",
]

STAGE_WAYS: tuple[Border, ...] = ("whole", "tokens")
"""Ways in which activations cross the borders of stages."""

_TOLERANCE = 0.001
_PRICES = 2.0 ** np.arange(-6, 10)  # of the block's time for all its memory


@dataclass(frozen=True, slots=True, kw_only=True)
class DetourDecisions:
    """Decisions of the block that leaves the usual way, of those in between, and of the last."""

    first: tuple[Decision, ...]
    inner: tuple[Decision, ...]
    last: tuple[Decision, ...]


def hands_to_alike(trace: Trace, block: int) -> bool:
    """Return whether calls of a class in a row hand one activation on, and to nobody else.

    False where no two do.
    """
    own = trace.blocks[block]
    entering = [place for place, value in enumerate(own.inputs) if value.is_activation]
    if len(entering) != 1 or len(own.outputs) != 1 or not own.inputs[entering[0]].needs_grad:
        return False
    readers: dict[str, int] = {}
    for call in trace.calls:
        for name in set(call.args):
            readers[name] = readers.get(name, 0) + 1
    found = False
    for before, after in zip(trace.calls, trace.calls[1:], strict=False):
        if before.block == after.block == block:
            handed = before.outs[0]
            if after.args[entering[0]] != handed or readers[handed] != 1:
                return False
            found = True
    return found


def worthwhile_detours(
    models: Sequence[ChoiceModel], eliminations: Eliminations
) -> Mapping[Border, tuple[Border, ...]]:
    """Return per way of stages the other ways that a stretch of blocks may gain by.

    Args:
        models: the problems of a class with one activation in and one out, whose decisions go into
            one mix (without recomputation, with).
        eliminations: steps by structure.
    """
    ways = models[0].ways
    if len(ways) == 1 or not all(eliminations.posed(model.problem) for model in models):
        return {}
    prices = _prices(models[0], eliminations)
    costs = np.min([_border_costs(model, eliminations, prices) for model in models], axis=0)
    return gaining_ways(ways, costs)


def gaining_ways(
    ways: Sequence[Border], costs: NDArray[np.float64]
) -> Mapping[Border, tuple[Border, ...]]:
    """Return what `worthwhile_detours` does, by [way in, way out, price] costs, no price first."""
    spare = _TOLERANCE * _least_mean(costs)[0]
    bases = [way for way in STAGE_WAYS if way in ways]
    by_way = {way: costs[ways.index(way), ways.index(way)] for way in ways}
    if any((by_way[way] <= _least_mean(costs) + spare).all() for way in bases):
        return {}
    found = {}
    for base in bases:
        own = []
        for way in ways:
            i, j = ways.index(base), ways.index(way)
            other = np.minimum(costs[j, j], (costs[i, j] + costs[j, i]) / 2)
            if way != base and (other < by_way[base] - spare).any():
                own.append(way)
        if own:
            found[base] = tuple(own)
    return found


def _prices(model: ChoiceModel, eliminations: Eliminations) -> NDArray[np.float64]:
    """Return prices of memory in ticks per byte, none first."""
    fixed = model.fixed["whole", "whole"]
    fastest = fastest_choice(
        model.problem, time_limit_s=0.0, eliminations=eliminations, fixed=fixed
    )
    rate = max(fastest.time, 1) / max(fastest.memory * model.unit, 1)
    return np.array([0.0, *(rate * _PRICES)])


def _border_costs(
    model: ChoiceModel, eliminations: Eliminations, prices: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [way in, way out, price] the least of time + price memory, the input's included."""
    posed = eliminations.posed(model.problem)
    assert posed is not None, "the block is narrow"
    steps, costs = posed
    weights = costs.time[:, None] + costs.memory[:, None] * (model.unit * prices)[None, :]
    entering = next(v for v in model.block.inputs if v.is_activation)
    sums = least_sums(model.problem, steps, weights, model.index[entering.name], len(model.names))
    picks = [pick.axis for pick in model.picks[entering.name]]
    places = [picks.index(placement) for placement in model.entering[entering.name]]
    degree = model.timer.degree
    held = [
        entering.nbytes // (1 if placement == "R" else degree)
        for placement in model.entering[entering.name]
    ]
    return np.asarray(sums[places] + np.array(held)[:, None, None] * prices)


def _least_mean(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return per price the least mean over all cycles of ways."""
    means = []
    for length in range(1, len(costs) + 1):
        for cycle in permutations(range(len(costs)), length):
            around = zip(cycle, (*cycle[1:], cycle[0]), strict=True)
            means.append(sum(costs[i, j] for i, j in around) / length)
    return np.asarray(np.min(means, axis=0))
