"""Tensor-parallel layouts for hand-written plans: Megatron's choice, and random ones."""

from __future__ import annotations

from autoplan.plan import Layout
from autoplan.program import Program
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
        layouts[graph.name] = Layout(block=graph.name, degree=degree, axes=axes, parameters=stored)
    return layouts
