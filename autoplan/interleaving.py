"""Several stages a rank: how many blocks each stage has, and which of its rank's it gets.

All ranks run their c-th stages at the same time, so one that has a block more than the others makes
them all wait. So stages have equal numbers of the longest run of alike blocks, as near as can be;
the first stage fewer by what comes before the run, the last by what comes after (`even_counts`).
The search decides about each rank's blocks as a whole; alike blocks can change places, so they are
then dealt to the rank's stages such that slow ones lie where other ranks have slow ones (`dealt`).
Stages of unequal numbers of blocks beyond that are not in the space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from autoplan.graph import Trace
from autoplan.search.paces import PacedRank, paced_options
from autoplan.search.problem import BlockOption, PipelineProblem, PipelineSolution
from autoplan.settings import Setting
from autoplan.stage_ends import holders
from autoplan.step_costs import pipeline_step_s

__all__ = [
    "Alike",
    "Counts",
    "alike_run",
    "dealt",
    "even_counts",
    "lightened",
    "paced",
    "rank_ends",
    "stage_counts",
    "stage_ends",
]

_WORKING_LIMITS = 2  # of what blocks may work in, tried beside what they do

Counts = tuple[tuple[int, ...], ...]
"""Alike blocks per rank and stage of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """The longest run of alike blocks of a chain.

    Attributes:
        calls: of the run; empty where these blocks may not lie apart.
        num_calls: of the chain.
        least: blocks that the first and the last stage need: 0 where what comes before or after the
            run has parameters and is a stage without.
    """

    calls: range
    num_calls: int
    least: tuple[int, int]


def alike_run(trace: Trace) -> Alike:
    """Return the longest run of alike blocks with parameters of their own.

    Empty where the blocks of the run share parameters, or share some with another call that could
    come to lie on the same rank.
    """
    own = holders(trace)
    run = _longest_run(trace)
    if not _are_apart(trace, run):
        run = range(0)
    least = (int(not any(own[: run.start])), int(not any(own[run.stop :])))
    return Alike(calls=run, num_calls=len(trace.calls), least=least)


def _longest_run(trace: Trace) -> range:
    """Return the calls of the longest run of one block."""
    best = range(0)
    start = 0
    for call in range(1, len(trace.calls) + 1):
        is_end = call == len(trace.calls) or trace.calls[call].block != trace.calls[start].block
        if is_end:
            if call - start > len(best):
                best = range(start, call)
            start = call
    return best


def _are_apart(trace: Trace, run: range) -> bool:
    """Return whether each call of a run has parameters, and no other call of the chain has them."""
    canonical = trace.first_names()
    seen: set[str] = set()
    for call in run:
        own = {canonical.get(fqn, fqn) for fqn in trace.calls[call].states}
        if own & seen:
            return False
        seen |= own
    outside = (c for i, c in enumerate(trace.calls) if i not in run)
    if any(canonical.get(fqn, fqn) in seen for c in outside for fqn in c.states):
        return False
    block = trace.blocks[trace.calls[run[0]].block]
    return any(state.is_parameter for state in block.states)


def stage_counts(alike: Alike, times: Sequence[float], pp: int, num_chunks: int) -> Counts:
    """Return how many alike blocks each stage has, given the time of every call.

    Raises:
        ValueError: there are fewer alike blocks than stages that need one.
    """
    run = alike.calls
    block = max(sum(times[run.start : run.stop]) / max(len(run), 1), 1e-12)
    return even_counts(
        len(run),
        pp,
        num_chunks,
        before=sum(times[: run.start]) / block,
        after=sum(times[run.stop :]) / block,
        least=alike.least,
    )


@lru_cache(maxsize=4096)
def even_counts(
    num_blocks: int,
    pp: int,
    num_chunks: int,
    *,
    before: float = 0.0,
    after: float = 0.0,
    least: tuple[int, int] = (1, 1),
) -> Counts:
    """Return blocks per rank and stage such that the slowest c-th stages take the least together.

    With K blocks a rank at most, a c-th stage has K / v, rounded up in the last stages of a rank
    and down in the others. Where that is more than there are, the first and the last stage have
    fewer, up to the time that they take besides; then one stage each of the first ranks, which keep
    the most micro-batches.

    Args:
        num_blocks: alike ones.
        pp, num_chunks: ranks, and stages of each.
        before, after: time of what the first stage has before its blocks and the last after its
            own, in blocks.
        least: blocks of the first stage and of the last.

    Raises:
        ValueError: there are too few blocks for one a stage.
    """
    offs = range(math.ceil(before) + 1), range(math.ceil(after) + 1)
    start = max(num_chunks, -(-num_blocks // pp))
    ways = sorted(
        (most + max(0.0, before - off) + max(0.0, after - off_last), off + off_last, off, most)
        for most in range(start, start + len(offs[0]) + len(offs[1]) - 1)
        for off in offs[0]
        for off_last in offs[1]
    )
    for _, both, off, most in ways:
        counts = _thin_counts(num_blocks, pp, num_chunks, most, (off, both - off), least)
        if counts is not None:
            return counts
    raise ValueError(f"{num_blocks} alike blocks for {pp} ranks of {num_chunks} stages")


def _thin_counts(
    num_blocks: int,
    pp: int,
    num_chunks: int,
    most: int,
    offs: tuple[int, int],
    least: tuple[int, int],
) -> Counts | None:
    """Return counts of at most `most` blocks a rank, less at both ends; None if they do not add up.

    Args:
        offs: blocks that the first and the last stage have less than others.
        others: as in `even_counts`.
    """
    low, more = divmod(most, num_chunks)
    widths = [low + (chunk >= num_chunks - more) for chunk in range(num_chunks)]
    spare = pp * most - num_blocks - sum(offs)
    if spare < 0 or widths[0] - offs[0] < least[0] or widths[-1] - offs[1] < least[1]:
        return None
    counts = [list(widths) for _ in range(pp)]
    counts[0][0] -= offs[0]
    counts[-1][-1] -= offs[1]
    return tuple(map(tuple, counts)) if _thin(counts, spare) else None


def _thin(counts: list[list[int]], spare: int) -> bool:
    """Take blocks off, one a rank from the first on and again; return whether so many could be."""
    while spare:
        taken = 0
        for own in counts:
            widest = max(range(len(own)), key=lambda chunk: own[chunk])
            if taken < spare and own[widest] > 1:
                own[widest] -= 1
                taken += 1
        if not taken:
            return False
        spare -= taken
    return True


def rank_ends(alike: Alike, counts: Counts) -> tuple[int, ...]:
    """Return ends of the ranks' shares in the chain, as if each rank's blocks lay together."""
    ends = [alike.calls.start + blocks for blocks in accumulate(map(sum, counts))]
    return (*ends[:-1], alike.num_calls)


def stage_ends(alike: Alike, counts: Counts) -> tuple[int, ...]:
    """Return ends of the stages in the chain, the first stages of all ranks first."""
    rounds = (blocks for of_round in zip(*counts, strict=True) for blocks in of_round)
    ends = [alike.calls.start + blocks for blocks in accumulate(rounds)]
    return (*ends[:-1], alike.num_calls)


def dealt(
    alike: Alike,
    per_call: Sequence[Sequence[BlockOption]],
    solution: PipelineSolution,
    counts: Counts,
) -> PipelineSolution:
    """Return a solution by ranks as one by stages.

    Args:
        alike: the blocks that are dealt.
        per_call: the options of each call.
        solution: ends of the ranks' shares, and an option per call.
        counts: alike blocks of each stage.
    """
    run = alike.calls
    shares = _shares(alike, per_call, solution, counts)
    return _by_stage(run, solution, _deal(shares))


def paced(
    alike: Alike,
    per_call: Sequence[Sequence[BlockOption]],
    problem: PipelineProblem,
    solution: PipelineSolution,
    counts: Counts,
    alive: Sequence[tuple[float, ...]],
    *,
    is_thorough: bool = False,
) -> PipelineSolution | None:
    """Return a solution by stages under common paces that is no dearer once a step, or None.

    Calls beside the alike blocks stay as they are, and blocks work in no more than in the solution.
    Thoroughly, also in more, which lets leaner options in, and in less, which leaves ranks room:
    the fastest rounds count.

    Args:
        alike: the blocks whose options are chosen anew.
        per_call: the options of each call.
        problem: by ranks, whose memory is kept to.
        solution: of it.
        counts: alike blocks of each stage.
        alive: micro-batches that each stage of a rank keeps.
        is_thorough: try other limits of what blocks work in.
    """
    run, options = alike.calls, per_call[alike.calls.start]
    chosen = [own[index] for own, index in zip(per_call, solution.options, strict=True)]
    least = max((chosen[c].working for c in range(len(chosen)) if c not in run), default=0)
    levels = sorted({max(least, option.working) for option in options})
    steps = np.linspace(0, len(levels) - 1, min(len(levels), _WORKING_LIMITS)).round()
    limits = {max(option.working for option in chosen)}
    if is_thorough:
        limits |= {levels[int(step)] for step in steps}
    found = (
        _paced_within(alike, per_call, problem, solution, counts, alive, limit)
        for limit in sorted(limits)
    )
    fitting = [own for own in found if own is not None]
    return min(fitting, key=lambda own: _rounds(per_call, own, len(counts)), default=None)


def _rounds(per_call: Sequence[Sequence[BlockOption]], solution: PipelineSolution, pp: int) -> int:
    """Return the ticks of all rounds, each as long as its slowest stage."""
    times = [
        own[index].forward + own[index].backward
        for own, index in zip(per_call, solution.options, strict=True)
    ]
    stages = [sum(times[start:end]) for start, end in pairwise((0, *solution.ends))]
    return sum(max(stages[first : first + pp]) for first in range(0, len(stages), pp))


def _paced_within(
    alike: Alike,
    per_call: Sequence[Sequence[BlockOption]],
    problem: PipelineProblem,
    solution: PipelineSolution,
    counts: Counts,
    alive: Sequence[tuple[float, ...]],
    working: int,
) -> PipelineSolution | None:
    """Return what `paced` does, of blocks that work in no more than `working`."""
    run, options = alike.calls, per_call[alike.calls.start]
    chosen = [own[index] for own, index in zip(per_call, solution.options, strict=True)]
    once = max(chosen[c].once for c in run)
    usable = [
        i for i, option in enumerate(options) if option.once <= once and option.working <= working
    ]
    if not usable:
        return None
    ranks = []
    shares = _shares(alike, per_call, solution, counts)
    for rank, (start, end) in enumerate(pairwise((0, *solution.ends))):
        live = problem.live[rank]
        beside = [chosen[c] for c in range(start, end) if c not in run]
        held = sum(option.static + live * option.kept for option in beside)
        room = problem.capacity[rank] - problem.fixed[rank] - held - working
        load = tuple(shares[rank].load)
        ranks.append(PacedRank(sizes=counts[rank], load=load, live=alive[rank], room=room))
    found = paced_options(options, usable, ranks)
    return None if found is None else _by_stage(run, solution, found)


def lightened(
    alike: Alike,
    per_call: Sequence[Sequence[BlockOption]],
    solution: PipelineSolution,
    setting: Setting,
) -> PipelineSolution:
    """Return a solution whose calls beside the alike blocks make a step shortest, one by one.

    In the share of its rank such a call seems to wait with the rank's other stages, while in a
    round only the stages of its own turn do. What the calls hold is not looked at.

    Args:
        alike: the blocks that stay as they are.
        per_call: the options of each call.
        solution: by stages.
        setting: with several stages a rank.
    """
    chosen = list(solution.options)
    stage_of = [s for s, (a, b) in enumerate(pairwise((0, *solution.ends))) for _ in range(a, b)]
    seconds = [0.0] * len(solution.ends)
    once = [0.0] * setting.pp

    def add(call: int, index: int, sign: int) -> None:
        option, stage = per_call[call][index], stage_of[call]
        seconds[stage] += sign * (option.forward + option.backward)
        once[stage % setting.pp] += sign * option.once / setting.virtual_stages

    for call, index in enumerate(chosen):
        add(call, index, 1)
    for call in (c for c in range(len(chosen)) if c not in alike.calls):
        steps = []
        add(call, chosen[call], -1)
        for index in range(len(per_call[call])):
            add(call, index, 1)
            ranks = [sum(seconds[rank :: setting.pp]) for rank in range(setting.pp)]
            steps.append((pipeline_step_s(ranks, setting, seconds) + max(once), index))
            add(call, index, -1)
        chosen[call] = min(steps, key=lambda own: (own[0], own[1] != chosen[call]))[1]
        add(call, chosen[call], 1)
    return replace(solution, options=tuple(chosen))


def _shares(
    alike: Alike,
    per_call: Sequence[Sequence[BlockOption]],
    solution: PipelineSolution,
    counts: Counts,
) -> list[_Share]:
    run = alike.calls
    chosen = [own[index] for own, index in zip(per_call, solution.options, strict=True)]
    times = [option.forward + option.backward for option in chosen]
    shares = []
    for rank, (start, end) in enumerate(pairwise((0, *solution.ends))):
        own = [(times[c], solution.options[c]) for c in range(start, end) if c in run]
        load = [0] * len(counts[rank])
        load[0] += sum(times[: run.start]) * (rank == 0)
        load[-1] += sum(times[run.stop :]) * (rank == len(counts) - 1)
        blocks = tuple(sorted(own, reverse=True))
        shares.append(_Share(blocks=blocks, load=load, sizes=counts[rank]))
    return shares


def _by_stage(
    run: range, solution: PipelineSolution, stages: Sequence[Sequence[Sequence[int]]]
) -> PipelineSolution:
    """Return a solution whose stages have these options, given per rank and stage of it."""
    options = list(solution.options[: run.start])
    ends = []
    for chunk in range(len(stages[0])):
        for own_stages in stages:
            options += own_stages[chunk]
            ends.append(len(options))
    options += solution.options[run.stop :]
    ends[-1] = len(options)
    return replace(solution, ends=tuple(ends), options=tuple(options))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a rank deals to its stages.

    Attributes:
        blocks: (ticks, option) of each alike block, slowest first.
        load: ticks that each stage has besides.
        sizes: blocks that each stage gets.
    """

    blocks: tuple[tuple[int, int], ...]
    load: list[int]
    sizes: Sequence[int]

    @property
    def total(self) -> int:
        """Return the ticks of the rank."""
        return sum(time for time, _ in self.blocks) + sum(self.load)


def _deal(shares: Sequence[_Share]) -> list[list[list[int]]]:
    """Return the options of each stage of each rank.

    The slowest rank is dealt evenly; every other fills the room that leaves.
    """
    slowest = max(shares, key=lambda share: share.total)
    mean = sum(time for time, _ in slowest.blocks) / max(len(slowest.blocks), 1)
    widths = [max(own) for own in zip(*(share.sizes for share in shares), strict=True)]
    pace = [mean * width for width in widths]
    dealt: list[list[list[int]]] = [[] for _ in shares]
    for number, rank in enumerate(sorted(range(len(shares)), key=lambda r: -shares[r].total)):
        dealt[rank], load = _fill(shares[rank], pace)
        pace = [float(own) for own in load] if number == 0 else list(map(max, pace, load))
    return dealt


def _fill(share: _Share, pace: Sequence[float]) -> tuple[list[list[int]], list[int]]:
    """Return the options of each stage of a rank, and its ticks.

    The next slowest block goes where most room is left for each block that is still to come.
    """
    load, left = list(share.load), list(share.sizes)
    stages: list[list[int]] = [[] for _ in load]
    for time, option in share.blocks:
        places = [chunk for chunk, size in enumerate(left) if size]
        place = max(places, key=lambda i: ((pace[i] - load[i]) / left[i], -i))
        stages[place].append(option)
        load[place] += time
        left[place] -= 1
    return [sorted(own) for own in stages], load
