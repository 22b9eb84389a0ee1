"""Several stages a rank: which blocks can be dealt out, and how a rank's share becomes stages.

The search cuts the chain into ranks, not into stages: each rank gets some of the longest run of
alike blocks, the first also what comes before the run and the last what comes after. A rank's
blocks are then dealt to its stages, so that these take as nearly the same time as can be and mix
the options of the rank's blocks evenly. Alike blocks can change places, so a rank's share, which
the chain interleaves with those of the others, is a set of blocks and no range. That is the space:
stages of a rank that are unequal on purpose are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from autoplan.graph import Trace
from autoplan.search.evaluate import block_options
from autoplan.search.problem import PipelineProblem, PipelineSolution
from autoplan.stage_ends import even_ends, holders

__all__ = ["alike_run", "dealt", "even_rank_ends", "most_chunks", "rank_cuts"]


def alike_run(trace: Trace) -> range:
    """Return the calls of the longest run of alike blocks with parameters of their own.

    Empty where the blocks of the run share parameters, or share some with another call that could
    come to lie on the same rank.
    """
    best = range(0)
    start = 0
    for call in range(1, len(trace.calls) + 1):
        is_end = call == len(trace.calls) or trace.calls[call].block != trace.calls[start].block
        if is_end:
            if call - start > len(best):
                best = range(start, call)
            start = call
    canonical = {fqn: group[0] for group in trace.shared for fqn in group}
    seen: set[str] = set()
    for call in best:
        own = {canonical.get(fqn, fqn) for fqn in trace.calls[call].states}
        if own & seen:
            return range(0)
        seen |= own
    outside = (c for i, c in enumerate(trace.calls) if i not in best)
    if any(canonical.get(fqn, fqn) in seen for c in outside for fqn in c.states):
        return range(0)
    block = trace.blocks[trace.calls[best[0]].block]
    return best if any(state.is_parameter for state in block.states) else range(0)


def most_chunks(trace: Trace, pp: int) -> int:
    """Return the most stages that each of `pp` ranks can have, each with an alike block."""
    return len(alike_run(trace)) // pp


def rank_cuts(trace: Trace, pp: int, num_chunks: int) -> tuple[bool, ...]:
    """Return the positions between calls where a rank's share may end."""
    run = alike_run(trace)
    may_start, may_end = _are_stages(trace, run)
    least = run.start + num_chunks - may_start
    most = run.stop - num_chunks + may_end
    return tuple(least <= position <= most for position in range(1, len(trace.calls)))


def _are_stages(trace: Trace, run: range) -> tuple[bool, bool]:
    """Return whether what comes before and what comes after a run can be a stage by itself."""
    own = holders(trace)
    return any(own[: run.start]), any(own[run.stop :])


def even_rank_ends(trace: Trace, pp: int) -> tuple[int, ...]:
    """Return ends of ranks' shares with equal numbers of alike blocks."""
    run = alike_run(trace)
    return (*(run.start + end for end in even_ends(len(run), pp)[:-1]), len(trace.calls))


def dealt(
    trace: Trace, problem: PipelineProblem, solution: PipelineSolution, num_chunks: int
) -> PipelineSolution:
    """Return a solution by ranks as one by stages, with `num_chunks` of them a rank."""
    run = alike_run(trace)
    chosen = [
        choices[index]
        for choices, index in zip(block_options(problem), solution.options, strict=True)
    ]
    times = [option.forward + option.backward for option in chosen]
    pp = problem.num_stages
    may_start, may_end = _are_stages(trace, run)
    shares: list[list[list[int]]] = []
    for rank, (start, end) in enumerate(pairwise((0, *solution.ends))):
        own = sorted(solution.options[c] for c in range(start, end) if c in run)
        spent = [0] * num_chunks
        spent[0] += sum(times[: run.start]) if rank == 0 else 0
        spent[-1] += sum(times[run.stop :]) if rank == pp - 1 else 0
        mean = sum(times[c] for c in range(start, end) if c in run) // max(len(own), 1)
        least = [1] * num_chunks
        least[0] -= rank == 0 and may_start
        least[-1] -= rank == pp - 1 and may_end
        shares.append(_deal(own, spent, least, mean))
    options = list(solution.options[: run.start])
    ends = []
    for chunk in range(num_chunks):
        for share in shares:
            options += share[chunk]
            ends.append(len(options))
    options += solution.options[run.stop :]
    ends[-1] = len(options)
    return replace(solution, ends=tuple(ends), options=tuple(options))


def _deal(
    options: Sequence[int], spent: Sequence[int], least: Sequence[int], mean: int
) -> list[list[int]]:
    """Return the options of each stage of a rank: its least number of blocks, then by time."""
    load = [first + mean * count for first, count in zip(spent, least, strict=True)]
    counts = list(least)
    for _ in range(len(options) - sum(counts)):
        lightest = min(range(len(load)), key=lambda i: (load[i], i))
        load[lightest] += mean
        counts[lightest] += 1
    dealt: list[list[int]] = [[] for _ in spent]
    for option in options:
        # The stage that is furthest from what it is to have: options are spread evenly.
        open_stages = [i for i, count in enumerate(counts) if count > len(dealt[i])]
        place = max(open_stages, key=lambda i: ((counts[i] - len(dealt[i])) / counts[i], -i))
        dealt[place].append(option)
    return [sorted(own) for own in dealt]
