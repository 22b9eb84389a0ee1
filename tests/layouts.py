"""Tensor-parallel layouts for hand-written plans: Megatron's choice, and random ones."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from autoplan.graph import Placement, ShardOption
from autoplan.plan import Layout
from autoplan.program import BlockGraph, Program
from autoplan.sharding import layout_parameters, shard_options, transition

__all__ = [
    "agreeing_axes",
    "megatron",
    "megatron_axes",
    "prefer_axes",
    "random_axes",
    "scattered",
    "shared_states",
    "sliced_ties",
]

_TRIES = 20

Options = Mapping[str, tuple[ShardOption, ...]]


def megatron(program: Program, degree: int) -> dict[str, Layout]:
    """Return column- and row-parallel layouts of every block, glue whole."""
    layouts = {}
    for graph in program.graphs:
        if not graph.is_glue:
            options = shard_options(graph)
            axes = megatron_axes(graph, options)
            stored = layout_parameters(graph, options, axes)
            layouts[graph.name] = Layout(
                block=graph.name, degree=degree, axes=axes, parameters=stored
            )
    return layouts


def scattered(program: Program, degree: int, seed: int) -> dict[str, Layout]:
    """Return random legal layouts of every block and of glue."""
    layouts = {}
    for graph in program.graphs:
        options = shard_options(graph)
        axes = random_axes(graph, options, degree, seed)
        stored = layout_parameters(graph, options, axes)
        stored |= dict.fromkeys(shared_states(program, graph), "R")
        layouts[graph.name] = Layout(block=graph.name, degree=degree, axes=axes, parameters=stored)
    return layouts


def shared_states(program: Program, graph: BlockGraph) -> list[str]:
    """Return the states of a graph that are one parameter with a state of another call."""
    calls = program.calls
    uses = Counter(f for call in calls for f in {program.aliases.get(s, s) for s in call.states})
    return [
        state.fqn
        for call in calls
        if program.graphs[call.graph] is graph
        for state, fqn in zip(graph.states, call.states, strict=True)
        if uses[program.aliases.get(fqn, fqn)] > 1
    ]


def agreeing_axes(program: Program, degree: int, seed: int) -> dict[str, dict[str, str]]:
    """Return axes of the graphs that share parameters, by which all read these in the same slices.

    By name of the graph, random otherwise; empty where no dimension will do.
    """
    chance = random.Random(seed)
    for dim in chance.sample((0, 1), 2):
        found = {}
        for graph in program.graphs:
            shared = set(shared_states(program, graph))
            names = {state.name for state in graph.states if state.fqn in shared}
            if names:
                found[graph.name] = _reading(graph, names, f"S({dim})", degree, seed)
        if all(axes is not None for axes in found.values()):
            return {name: axes for name, axes in found.items() if axes is not None}
    return {}


def sliced_ties(program: Program, degree: int, seed: int = 0) -> dict[str, Layout]:
    """Return layouts of the graphs that share parameters, which lie in slices."""
    layouts = {}
    for graph in program.graphs:
        axes = agreeing_axes(program, degree, seed).get(graph.name)
        if axes is not None:
            stored = layout_parameters(graph, shard_options(graph), axes)
            layouts[graph.name] = Layout(
                block=graph.name, degree=degree, axes=axes, parameters=stored
            )
    return layouts


def _reading(
    graph: BlockGraph, names: set[str], text: str, degree: int, seed: int
) -> dict[str, str] | None:
    """Return random axes by which all ops read some states in one placement; None: not found."""
    own = shard_options(graph)
    options = {
        op.name: tuple(
            option
            for option in own[op.name]
            if all(p == text for n, p in zip(op.inputs(), option.inputs, strict=True) if n in names)
        )
        for op in graph.ops
    }
    for attempt in range(_TRIES):
        try:
            return random_axes(graph, options, degree, seed + attempt)
        except LookupError:
            continue
    return None


def random_axes(graph: BlockGraph, options: Options, degree: int, seed: int) -> dict[str, str]:
    """Return any choice that is valid; views and sliced inputs tempt it to stay sliced."""
    draw = random.Random(seed)
    produced: dict[str, Placement] = {}
    axes: dict[str, str] = {}

    def is_valid(inputs: Sequence[str], option: ShardOption) -> bool:
        if option.is_split and option.size % degree:
            return False
        needs = zip(inputs, option.inputs, strict=True)
        whole = Placement(kind="replicate")
        return all(transition(produced.get(v, whole), Placement.parse(text)) for v, text in needs)

    for op in graph.ops:
        valid = [o for o in options[op.name] if is_valid(op.inputs(), o)]
        if not valid:
            raise LookupError(f"{graph.name}: no option of {op.name} is possible")
        option = draw.choice(valid[1:] if len(valid) > 1 and draw.random() < 0.8 else valid)
        axes[op.name] = option.axis
        produced[op.name] = Placement.parse(option.output)
    return axes


def _prefer(graph: BlockGraph, options: Options, preferred: Sequence[str]) -> dict[str, str]:
    """Return for every op the first of the preferred axes that it has."""
    axes = {}
    for op in graph.ops:
        have = {option.axis for option in options[op.name]}
        found = [axis for axis in preferred if axis in have]
        if found:
            axes[op.name] = found[0]
    return axes


def megatron_axes(graph: BlockGraph, options: Options) -> dict[str, str]:
    """Return column and row parallel products: heads in attention, the inner width in the MLP."""
    inner = {
        option.axis
        for op in graph.ops
        for option in options[op.name]
        if option.gemm_dim == "n" and option.axis not in ("features", "heads")
        if any(o.axis == option.axis and o.gemm_dim == "k" for s in options.values() for o in s)
    }
    return _prefer(graph, options, ["heads", *sorted(inner)])


def prefer_axes(graph: BlockGraph, options: Options, degree: int) -> dict[str, str]:
    """Return Megatron's axes where the degree divides them and the placements can be made."""
    wanted = megatron_axes(graph, options)
    produced: dict[str, Placement] = {}
    axes: dict[str, str] = {}
    whole = Placement(kind="replicate")
    for op in graph.ops:
        axis = wanted.get(op.name, "whole")
        option = next(o for o in options[op.name] if o.axis == axis)
        needs = zip(op.inputs(), option.inputs, strict=True)
        is_possible = not (option.is_split and option.size % degree) and all(
            transition(produced.get(v, whole), Placement.parse(text)) for v, text in needs
        )
        if is_possible and axis != "whole":
            axes[op.name] = axis
        else:
            option = options[op.name][0]
        produced[op.name] = Placement.parse(option.output)
    return axes
