"""What the decisions for one program of a model are for another one of it: stages and axes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from autoplan.errors import EmitError
from autoplan.graph import ShardOption
from autoplan.program import BlockGraph, Program
from autoplan.sharding import chosen_options, shard_options
from autoplan.stages import StageSlice

__all__ = ["alike_axes", "assign_calls"]


def assign_calls(
    program: Program, trained: Program, stages: Sequence[StageSlice]
) -> list[list[int]]:
    """Return the calls of a new program for each stage of a trained one.

    Raises:
        EmitError: no stage from there on holds the states of a call, or a stage has no call.
    """
    held = [
        {trained.aliases.get(fqn, fqn) for i in stage.calls for fqn in trained.calls[i].states}
        | set(stage.side_states.values())
        for stage in stages
    ]
    cuts: list[list[int]] = [[] for _ in stages]
    here = 0
    for index, call in enumerate(program.calls):
        needed = {program.aliases.get(fqn, fqn) for fqn in call.states}
        found = next((s for s in range(here, len(stages)) if needed <= held[s]), None)
        if found is None:
            raise EmitError(
                f"{call.fqn or program.graphs[call.graph].name} runs after stage {here} in "
                f"evaluation, and no later stage holds {', '.join(sorted(needed - held[here]))}: "
                "evaluate a module whose forward runs its blocks in the order of training"
            )
        here = found
        cuts[found].append(index)
    for stage, calls in enumerate(cuts):
        if not calls:
            raise EmitError(
                f"stage {stage} has nothing to run in evaluation: plan with a smaller pp, or "
                "evaluate the loss with eval_step"
            )
    return cuts


def alike_axes(
    trained: BlockGraph,
    axes: Mapping[str, str],
    graph: BlockGraph,
    options: Mapping[str, tuple[ShardOption, ...]],
) -> dict[str, str]:
    """Return axes of a graph by which its ops take the slices that equal ops of another take.

    Ops are matched in order, by operator and module; what has no match runs whole.
    """
    chosen = chosen_options(trained, shard_options(trained), axes)
    before = [(op.target_name, op.fqn) for op in trained.ops]
    now = [(op.target_name, op.fqn) for op in graph.ops]
    matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
    found = {}
    for match in matcher.get_matching_blocks():
        for offset in range(match.size):
            wanted = chosen[trained.ops[match.a + offset].name]
            name = graph.ops[match.b + offset].name
            for option in options[name]:
                is_alike = (option.inputs, option.output) == (wanted.inputs, wanted.output)
                if is_alike and option.axis != "whole":
                    found[name] = option.axis
                    break
    return found
