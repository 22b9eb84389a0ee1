"""Steps of an elimination with some options fixed, and costs for all options of two ops at once.

    fix          the steps of the problem in which some ops have one option left
    least_sums   least weighted sums for every pair of options of two ops, for several weights

Options that are fixed take edges away and leave the rest as it is, so problems that differ in what
is fixed share the steps of the one in which all is free. How a block takes over its inputs and
hands on its outputs is such a choice: the steps for all ways are hardly more than those for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autoplan.search.elimination import Elimination
from autoplan.search.problem import ChoiceProblem

__all__ = ["fix", "least_sums", "with_fixed"]


def with_fixed(problem: ChoiceProblem, fixed: Mapping[int, int]) -> ChoiceProblem:
    """Return a problem in which all other options of the fixed ops are forbidden."""
    ops = list(problem.ops)
    for op, chosen in fixed.items():
        ops[op] = tuple(
            replace(option, forbidden=option.forbidden or index != chosen)
            for index, option in enumerate(ops[op])
        )
    return replace(problem, ops=tuple(ops))


def fix(steps: Elimination, fixed: Mapping[int, int]) -> Elimination:
    """Return the steps with one option for each op of `fixed` (op to option), others as they are.

    Rows of costs are the same, so that `Elimination.costs` of either serves both.
    """
    place = np.zeros(1, dtype=np.int64)  # of every key among those left; -1: gone
    count, found = 1, []
    for step in steps.steps:
        stays = place[step.source] >= 0
        if step.op in fixed:
            stays &= step.option == fixed[step.op]
        source = place[step.source[stays]]
        reached, target = np.unique(step.target[stays], return_inverse=True)
        found.append(
            replace(
                step,
                source=source,
                option=step.option[stays],
                target=target,
                row=step.row[stays],
                first=np.searchsorted(source, np.arange(count + 1)),
                num_targets=len(reached),
            )
        )
        place = np.full(step.num_targets, -1, dtype=np.int64)
        place[reached] = np.arange(len(reached))
        count = len(reached)
    return replace(steps, steps=tuple(found))


def least_sums(
    problem: ChoiceProblem,
    steps: Elimination,
    weights: NDArray[np.float64],
    first: int,
    second: int,
) -> NDArray[np.float64]:
    """Return [option of `first`, option of `second`, weight] least sums, infinite for no path.

    Args:
        problem: what to choose.
        steps: its steps, in which both are free.
        weights: [row, weight] weighted cost of every row of `Elimination.costs`.
        first, second: two ops of it.
    """
    sums = np.zeros((1, 1, 1, weights.shape[1]))
    for step in steps.steps:
        total = sums[step.source] + weights[step.row][:, None, None, :]
        for axis, op in ((1, first), (2, second)):
            if step.op == op:
                apart = np.full(
                    [*total.shape[:axis], len(problem.ops[op]), *total.shape[axis + 1 :]],
                    np.inf,
                )
                edges = np.arange(len(total))
                if axis == 1:
                    apart[edges, step.option] = total[:, 0]
                else:
                    apart[edges, :, step.option] = total[:, :, 0]
                total = apart
        order = np.argsort(step.target, kind="stable")
        reached, starts = np.unique(step.target[order], return_index=True)
        sums = np.full((step.num_targets, *total.shape[1:]), np.inf)
        if len(reached):
            sums[reached] = np.minimum.reduceat(total[order], starts, axis=0)
    shape = (len(problem.ops[first]), len(problem.ops[second]), weights.shape[1])
    return np.asarray(sums[0]) if len(sums) else np.full(shape, np.inf)
