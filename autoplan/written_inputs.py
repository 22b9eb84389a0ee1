"""Graphs that write to what enters them, in stages of a pipeline and in modules that FSDP wraps.

A value that enters a stage, or a wrapped module, comes out of a function of its own, whose result
autograd lets nobody write to. What a wrapped module returned must not be written to either: FSDP
gathers parameters for the backward by a hook on it, and a write to a view drops the hook without a
word. There a graph writes to copies of its inputs; what it wrote is among its outputs. Another view
of the same memory, which a call before handed out too, would not show it: such plans are refused.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autoplan.errors import PlanError
from autoplan.graph import LostWrite
from autoplan.op_facts import written_values
from autoplan.plan import Plan
from autoplan.program import BlockGraph, Op, Program, Ref
from autoplan.shared_writes import lost_under, lost_writes, why_copied

__all__ = ["check_writes", "with_own_inputs"]


def check_writes(plan: Plan, program: Program) -> None:
    """Refuse a plan that would copy what a call writes to while another view of it is read.

    Raises:
        PlanError: names both calls.
    """
    modes = {
        block.call: plan.recompute[block.recompute].mode
        for stage in plan.stages
        for block in stage.blocks
    }
    is_mixed = plan.mixed_precision != "none"
    for lost, reason in lost_under(
        lost_writes(program), modes, pp=plan.mesh.pp, zero_stage=plan.zero_stage, is_mixed=is_mixed
    ):
        raise PlanError(
            f"{_name(program, lost.writer)} writes to its input, {_missed(program, lost)}: with "
            f"{reason} the first writes to a copy, which does not show there. Write out of place "
            "(x = x + y instead of x += y), or use zero_stage=0 and pp=1 without mixed precision "
            "or recomputation"
        )


def _missed(program: Program, lost: LostWrite) -> str:
    if lost.reader is None:
        return f"which is {lost.value}"
    name = _name(program, lost.reader)
    return f"and {name} reads another view of the same memory, {lost.value}"


def _name(program: Program, index: int) -> str:
    call = program.calls[index]
    return call.fqn or f"the code between blocks ({program.graphs[call.graph].name})"


def with_own_inputs(plan: Plan, graph: BlockGraph) -> BlockGraph:
    """Return a graph that the plan can run: as it is, or writing to copies of its inputs."""
    written = written_values(graph.ops) & set(graph.inputs)
    is_mixed = plan.mixed_precision != "none"
    reason = why_copied("none", pp=plan.mesh.pp, zero_stage=plan.zero_stage, is_mixed=is_mixed)
    if not written or not reason:
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
