"""Check problems, and price a given answer by the definitions alone, without a solver.

Every answer of a solver is priced again here before it is returned, and the exhaustive references
use the same functions, so that the definition of each problem stands in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import (
    SLOWNESS_UNIT,
    BlockOption,
    ChoiceProblem,
    Link,
    PipelineProblem,
)

_Number = TypeVar("_Number", int, "NDArray[np.int64]")

__all__ = [
    "StageCost",
    "block_options",
    "choice_cost",
    "cut_positions",
    "is_anchored",
    "option_numbers",
    "pipeline_objective",
    "plain_options",
    "rounded_up",
    "stage_costs",
    "verify_choice_problem",
    "verify_pipeline_problem",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What one stage of an answer costs.

    Attributes:
        time: ticks per micro-batch, the stage's borders included.
        once: ticks per step.
        memory: units that the stage needs, fixed included.
    """

    time: int
    once: int
    memory: int


def choice_cost(problem: ChoiceProblem, options: Sequence[int]) -> tuple[int, int] | None:
    """Return (time, memory) of one option per op, or None if the options do not go together."""
    chosen = [choices[index] for choices, index in zip(problem.ops, options, strict=True)]
    if any(option.forbidden for option in chosen):
        return None
    time = sum(option.time for option in chosen)
    memory = sum(option.memory for option in chosen)
    for link in problem.links:
        row = link.transitions[chosen[link.producer].produces]
        for state in {consumer.requires[options[consumer.op]] for consumer in link.consumers}:
            cost = row[state]
            if cost is None:
                return None
            time += cost[0]
            memory += cost[1]
    return time, memory


def block_options(problem: PipelineProblem) -> tuple[tuple[BlockOption, ...], ...]:
    """Return the options of every block of the chain."""
    return tuple(run.options for run in problem.runs for _ in range(run.count))


def cut_positions(problem: PipelineProblem) -> tuple[int, ...]:
    """Return the positions (index of the first block after the cut) where a stage may end."""
    allowed = problem.cut_allowed or (True,) * (problem.num_blocks - 1)
    kept_whole = [(min(group), max(group)) for group in problem.together if group]
    return tuple(
        position
        for position, is_allowed in enumerate(allowed, start=1)
        if is_allowed and not any(first < position <= last for first, last in kept_whole)
    )


def is_anchored(problem: PipelineProblem, start: int, end: int) -> bool:
    """Return whether blocks start..end-1 have one among them that can make a stage."""
    return any(problem.anchors[start:end]) if problem.anchors else True


def plain_options(problem: PipelineProblem) -> tuple[tuple[BlockOption, ...], ...]:
    """Return the options of every block that make no detour."""
    return tuple(run.options[: run.num_plain] for run in problem.runs for _ in range(run.count))


def stage_costs(
    problem: PipelineProblem, ends: Sequence[int], options: Sequence[int]
) -> tuple[StageCost, ...]:
    """Return the cost of every stage of an answer."""
    blocks = [
        choices[index] for choices, index in zip(block_options(problem), options, strict=True)
    ]
    costs = []
    for stage, (start, end) in enumerate(pairwise((0, *ends))):
        own = blocks[start:end]
        held = sum(block.static + problem.live[stage] * block.kept for block in own)
        costs.append(
            StageCost(
                time=problem.on_stage(
                    rounded_up(sum(b.forward + b.backward for b in own), problem.grain), stage
                )
                + problem.border(stage, start, end),
                once=rounded_up(sum(block.once for block in own), problem.once_grain),
                memory=held
                + max((block.working for block in own), default=0)
                + problem.fixed[stage],
            )
        )
    return tuple(costs)


def rounded_up(number: _Number, grain: int) -> _Number:
    """Return the least multiple of `grain` that is not below a number, or an array of them."""
    return -(-number // grain) * grain


def pipeline_objective(problem: PipelineProblem, costs: Sequence[StageCost]) -> int:
    """Return the objective in ticks of stages with these costs."""
    return (
        sum(cost.time for cost in costs)
        + (problem.num_microbatches - 1) * max(cost.time for cost in costs)
        + max(cost.once for cost in costs)
        + problem.constant
    )


def verify_choice_problem(problem: ChoiceProblem) -> None:
    """Refuse a malformed problem.

    Rules: (1) every op has an option; (2) times and memories are at least 0; (3) a link runs from
    an op to later ops; (4) a consumer requires one state per option; (5) states index transitions.

    Raises:
        ValueError: naming the op or the link that breaks a rule.
    """
    for index, choices in enumerate(problem.ops):
        if not choices:
            raise ValueError(f"op {index} has no option: give it at least one")
        if any(min(option.time, option.memory, option.produces) < 0 for option in choices):
            raise ValueError(f"op {index} has a negative time, memory or state: use at least 0")
    for index, link in enumerate(problem.links):
        _verify_link(problem, index, link)


def _verify_link(problem: ChoiceProblem, index: int, link: Link) -> None:
    """Refuse a malformed link; see `verify_choice_problem`."""
    if not 0 <= link.producer < len(problem.ops):
        raise ValueError(f"link {index} has producer {link.producer}: there is no such op")
    num_states = len(link.transitions)
    produced = max(option.produces for option in problem.ops[link.producer])
    if produced >= num_states:
        raise ValueError(f"link {index} lacks the transitions from state {produced}")
    for consumer in link.consumers:
        if not link.producer < consumer.op < len(problem.ops):
            raise ValueError(f"link {index} has consumer {consumer.op}: not a later op")
        if len(consumer.requires) != len(problem.ops[consumer.op]):
            raise ValueError(
                f"link {index} gives {len(consumer.requires)} required states to op "
                f"{consumer.op}, which has {len(problem.ops[consumer.op])} options"
            )
        width = min(len(row) for row in link.transitions)
        if not all(0 <= state < width for state in consumer.requires):
            raise ValueError(f"link {index} lacks the transitions to a state of op {consumer.op}")
    if any(cost is not None and min(cost) < 0 for row in link.transitions for cost in row):
        raise ValueError(f"link {index} has a negative transition cost: use at least 0")


def verify_pipeline_problem(problem: PipelineProblem) -> None:
    """Refuse a malformed problem.

    Rules: (1) every run has a block and an option; (2) times and memories are at least 0; (3) the
    tuples per stage are equally long; (4) `cut_allowed` is empty or has one entry per position;
    (5) `together` names blocks that exist; (6) `num_microbatches`, `min_blocks` and the grains are
    at least 1; (7) `anchors` is empty or has one entry per block, the same within a run; (8)
    `slowness` is empty or has one entry per stage, none below 1; (9) `crossing` is empty or has one
    entry per position, none negative; (10) after the plain options of a run, of which there is one,
    come those of its detours, each of which has one that leaves and one that comes back.

    Raises:
        ValueError: naming the rule's subject, what was got and what is allowed.
    """
    for index, run in enumerate(problem.runs):
        if run.count < 1 or not run.options:
            raise ValueError(f"run {index} needs at least one block and one option")
        if any(min(option_numbers(option)) < 0 for option in run.options):
            raise ValueError(f"run {index} has an option with a negative number: use at least 0")
        ranges = [r for d in run.detours for r in (d.first, d.inner, d.last)]
        placed = [*range(run.num_plain), *(option for own in ranges for option in own)]
        are_there = run.num_plain and all(d.first and d.last for d in run.detours)
        if not are_there or placed != list(range(len(run.options))):
            raise ValueError(f"run {index} has detours {run.detours}: give them its last options")
    if not problem.runs:
        raise ValueError("the pipeline has no runs: give it at least one block")
    lengths = {len(problem.live), len(problem.capacity), len(problem.fixed), len(problem.boundary)}
    if len(lengths) != 1 or not problem.live:
        raise ValueError(
            f"live, capacity, fixed and boundary have lengths {sorted(lengths)}: "
            "give each one entry per stage"
        )
    if problem.num_microbatches < 1:
        raise ValueError(f"num_microbatches is {problem.num_microbatches}: use at least 1")
    if min(problem.grain, problem.once_grain) < 1:
        raise ValueError(
            f"grain is {problem.grain} and once_grain {problem.once_grain}: use at least 1"
        )
    if problem.min_blocks < 1:
        raise ValueError(f"min_blocks is {problem.min_blocks}: use at least 1")
    if problem.cut_allowed and len(problem.cut_allowed) != problem.num_blocks - 1:
        raise ValueError(
            f"cut_allowed has {len(problem.cut_allowed)} entries for {problem.num_blocks} blocks: "
            f"give it {problem.num_blocks - 1}, or none to allow every cut"
        )
    if (
        len(problem.crossing) not in (0, problem.num_blocks - 1)
        or min(problem.crossing, default=0) < 0
    ):
        raise ValueError(
            f"crossing is {problem.crossing}: give it one number of at least 0 per position, "
            f"{problem.num_blocks - 1} of them, or none"
        )
    if problem.anchors and len(problem.anchors) != problem.num_blocks:
        raise ValueError(
            f"anchors has {len(problem.anchors)} entries for {problem.num_blocks} blocks: give it "
            "one per block, or none"
        )
    is_per_stage = len(problem.slowness) in (0, problem.num_stages)
    if not is_per_stage or any(s < SLOWNESS_UNIT for s in problem.slowness):
        raise ValueError(
            f"slowness is {problem.slowness}: give it one number of at least {SLOWNESS_UNIT} per "
            f"stage, {problem.num_stages} of them, or none"
        )
    first = 0
    for index, run in enumerate(problem.runs):
        if len(set(problem.anchors[first : first + run.count])) > 1:
            raise ValueError(f"run {index} has blocks with and without anchors: make it two runs")
        first += run.count
    for group in problem.together:
        if any(not 0 <= block < problem.num_blocks for block in group):
            raise ValueError(f"together names {group}: blocks are 0..{problem.num_blocks - 1}")


def option_numbers(option: BlockOption) -> tuple[int, int, int, int, int, int]:
    """Return the six numbers of an option, each of which is better when smaller."""
    return (
        option.forward,
        option.backward,
        option.once,
        option.kept,
        option.static,
        option.working,
    )
