"""Graphs that write to what enters them, in stages of a pipeline and in modules that FSDP wraps.

A value that enters a stage, or a wrapped module, comes out of a function of its own, whose result
autograd lets nobody write to. What a wrapped module returned must not be written to either: FSDP
gathers parameters for the backward by a hook on it, and a write to a view drops the hook without a
word. There a graph writes to copies of its inputs; what it wrote is among its outputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoplan.op_facts import written_values
from autoplan.plan import Plan
from autoplan.program import BlockGraph, Op, Ref

__all__ = ["with_own_inputs"]


def with_own_inputs(plan: Plan, graph: BlockGraph) -> BlockGraph:
    """Return a graph that the plan can run: as it is, or writing to copies of its inputs."""
    is_wrapped = plan.zero_stage > 0 or plan.mixed_precision != "none"
    written = written_values(graph.ops) & set(graph.inputs)
    if not written or not (is_wrapped or plan.mesh.pp > 1):
        return graph
    copies = {name: f"{name}_own" for name in graph.inputs if name in written}

    def own(name: str) -> str:
        return copies.get(name, name)

    made = [_clone(graph, name, copy) for name, copy in copies.items()]
    ops = [op.reading(own) for op in graph.ops]
    return replace(graph, ops=(*made, *ops), outputs=tuple(map(own, graph.outputs)))


def _clone(graph: BlockGraph, name: str, copy: str) -> Op:
    return Op(
        name=copy,
        target=torch.ops.aten.clone.default,
        args=(Ref(name),),
        kwargs={},
        fqn="",
        line="",
        meta=graph.meta(name),
    )
