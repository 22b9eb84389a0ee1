"""Run a block graph op by op: the meaning of a graph, for tests and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoplan.program import BlockGraph, map_refs

__all__ = ["run_graph"]


def run_graph(
    graph: BlockGraph, inputs: Sequence[Any], states: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the graph's outputs.

    Args:
        graph: to run.
        inputs: bound to `graph.inputs` in order.
        states: parameters and buffers by FQN, as in `graph.states`.
    """
    values = dict(zip(graph.inputs, inputs, strict=True))
    values |= {state.name: states[state.fqn] for state in graph.states}
    for op in graph.ops:
        args = map_refs(op.args, values.__getitem__)
        kwargs = map_refs(dict(op.kwargs), values.__getitem__)
        values[op.name] = op.target(*args, **kwargs)
    return tuple(values[name] for name in graph.outputs)
