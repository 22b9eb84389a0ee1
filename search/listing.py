"""All answers of a small pipeline problem, whatever they hold, in the order of their objective.

For chains so short that every way to cut them and to choose an option for each block can be listed:
a caller who knows better than sums what a stage holds takes the first answer that fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from autoplan.search.detours import hands_over
from autoplan.search.evaluate import block_options, cut_positions, is_anchored, rounded_up
from autoplan.search.problem import SLOWNESS_UNIT, PipelineProblem

__all__ = ["all_ends", "answers_below", "num_answers"]

_Ints = NDArray[np.int64]


def num_answers(problem: PipelineProblem) -> int:
    """Return how many ways there are at most to cut a chain and to choose its options."""
    cuts = math.comb(len(cut_positions(problem)), problem.num_stages - 1)
    return cuts * math.prod(len(own) for own in block_options(problem))


def all_ends(problem: PipelineProblem) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of stage ends that the cuts, `min_blocks` and `anchors` allow."""
    last = problem.num_blocks
    for cuts in combinations(cut_positions(problem), problem.num_stages - 1):
        ends = (*cuts, last)
        stages = list(pairwise((0, *ends)))
        if all(end - start >= problem.min_blocks for start, end in stages) and all(
            is_anchored(problem, start, end) for start, end in stages
        ):
            yield ends


def answers_below(
    problem: PipelineProblem, limit: int | None
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (objective, ends, options) of every answer below a limit, the least objective first.

    Capacities are not looked at. Of equal answers comes first what is cut earlier, then what has
    options of smaller index.

    Args:
        problem: of few answers, see `num_answers`.
        limit: ticks; None: all answers.
    """
    choices = block_options(problem)
    picked = _picked([len(options) for options in choices])
    time, once = (
        _prefix_sums([np.array(numbers)[index] for numbers, index in zip(own, picked, strict=True)])
        for own in (
            [[o.forward + o.backward for o in options] for options in choices],
            [[o.once for o in options] for options in choices],
        )
    )
    every = list(all_ends(problem))
    found = [_objectives(problem, ends, time, once) for ends in every]
    places = [
        np.nonzero(own < limit)[0] if limit is not None else np.arange(len(own)) for own in found
    ]
    cut = np.repeat(np.arange(len(every)), [len(own) for own in places])
    if not len(cut):
        return
    place = np.concatenate(places)
    objective = np.concatenate([own[kept] for own, kept in zip(found, places, strict=True)])
    for index in np.argsort(objective, kind="stable").tolist():
        ends, options = every[cut[index]], tuple(picked[:, place[index]].tolist())
        if hands_over(problem, ends, options):
            yield int(objective[index]), ends, options


def _picked(sizes: Sequence[int]) -> _Ints:
    """Return [block, choice] every choice of an option for each block, the last ones change first.

    There are few choices, but blocks of one option may be more than arrays have dimensions.
    """
    free = [block for block, size in enumerate(sizes) if size > 1]
    picked = np.zeros((len(sizes), math.prod(sizes)), dtype=np.int64)
    if free:
        picked[free] = np.indices([sizes[block] for block in free]).reshape(len(free), -1)
    return picked


def _prefix_sums(by_block: list[_Ints]) -> _Ints:
    """Return [position, choice] sums over the blocks before a position."""
    sums = np.cumsum(np.stack(by_block), axis=0, dtype=np.int64)
    return np.concatenate([np.zeros((1, sums.shape[1]), dtype=np.int64), sums])


def _objectives(problem: PipelineProblem, ends: tuple[int, ...], time: _Ints, once: _Ints) -> _Ints:
    """Return the objective of every choice of options under one way to cut."""
    stages, latest = [], []
    for stage, (start, end) in enumerate(pairwise((0, *ends))):
        own = rounded_up(time[end] - time[start], problem.grain)
        if problem.slowness:
            own = -(-own * problem.slowness[stage] // SLOWNESS_UNIT)
        stages.append(own + problem.border(stage, start, end))
        latest.append(rounded_up(once[end] - once[start], problem.once_grain))
    slowest, last = np.max(stages, axis=0), np.max(latest, axis=0)
    weight = problem.num_microbatches - 1
    total = np.sum(stages, axis=0) + weight * slowest + last + problem.constant
    return np.asarray(total, dtype=np.int64)
