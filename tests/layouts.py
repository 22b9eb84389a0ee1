"""Tensor-parallel layouts for hand-written plans: Megatron's choice, and random ones."""

from __future__ import annotations

from collections import Counter

from autoplan.plan import Layout
from autoplan.program import BlockGraph, Program
from autoplan.sharding import layout_parameters, shard_options
from tests.test_lowering import _random_axes, megatron_axes

__all__ = ["megatron", "scattered"]


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
        axes = _random_axes(graph, options, degree, seed)
        stored = layout_parameters(graph, options, axes)
        stored |= dict.fromkeys(_shared(program, graph), "R")
        layouts[graph.name] = Layout(block=graph.name, degree=degree, axes=axes, parameters=stored)
    return layouts


def _shared(program: Program, graph: BlockGraph) -> list[str]:
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
