"""Brute-force references for small problems: every combination is priced, the best is kept.

For tests only: the cost grows as the product of all options.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from autoplan.search.detours import hands_over
from autoplan.search.evaluate import (
    block_options,
    choice_cost,
    pipeline_objective,
    stage_costs,
)
from autoplan.search.listing import all_ends
from autoplan.search.problem import ChoiceProblem, PipelineProblem

__all__ = ["all_choices", "best_choice", "best_pipeline", "pareto_choices"]


def all_choices(problem: ChoiceProblem) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (time, memory, options) of every combination that goes together."""
    for options in product(*(range(len(choices)) for choices in problem.ops)):
        cost = choice_cost(problem, options)
        if cost is not None:
            yield (*cost, options)


def best_choice(problem: ChoiceProblem, memory_limit: int | None) -> tuple[int, int] | None:
    """Return the least (time, memory) within the limit, or None if nothing fits."""
    fitting = (
        (time, memory)
        for time, memory, _ in all_choices(problem)
        if memory_limit is None or memory <= memory_limit
    )
    return min(fitting, default=None)


def pareto_choices(problem: ChoiceProblem) -> tuple[tuple[int, int], ...]:
    """Return the (time, memory) that nothing dominates, by descending memory."""
    points: list[tuple[int, int]] = []
    for time, memory, _ in sorted(all_choices(problem)):
        if not points or memory < points[-1][1]:
            points.append((time, memory))
    return tuple(points)


def best_pipeline(problem: PipelineProblem) -> int | None:
    """Return the least objective over all cuts and options, or None if nothing fits."""
    best: int | None = None
    choices = [range(len(options)) for options in block_options(problem)]
    for ends in all_ends(problem):
        for options in product(*choices):
            if not hands_over(problem, ends, options):
                continue
            costs = stage_costs(problem, ends, options)
            if any(cost.memory > room for cost, room in zip(costs, problem.capacity, strict=True)):
                continue
            objective = pipeline_objective(problem, costs)
            if best is None or objective < best:
                best = objective
    return best
