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
from autoplan.op_facts import storage_owners, written_values
from autoplan.plan import Plan
from autoplan.program import BlockGraph, Op, Program, Ref

__all__ = ["check_writes", "with_own_inputs"]


def check_writes(plan: Plan, program: Program) -> None:
    """Refuse a plan that would copy what a call writes to while another view of it is read.

    Raises:
        PlanError: names both calls.
    """
    reasons = {
        block.call: _why(plan, plan.recompute[block.recompute].mode)
        for stage in plan.stages
        for block in stage.blocks
    }
    memory: dict[str, str] = {}  # the first value of the program in the memory of each
    written: dict[str, int] = {}  # the last call that wrote to a memory
    made: dict[str, int] = {}
    for index, call in enumerate(program.calls):
        graph = program.graphs[call.graph]
        inner = dict(zip(graph.inputs, call.args, strict=True))
        writes = {inner[name] for name in written_values(graph.ops) & set(inner)}
        writes = writes if reasons[index] else set()
        changed = {memory.get(arg, arg) for arg in writes}
        for arg in call.args:
            first = memory.get(arg, arg)
            writer = index if first in changed and arg not in writes else written.get(first)
            if writer is not None and made.get(arg, -1) < writer:
                raise PlanError(
                    f"{_name(program, writer)} writes to its input, and {_name(program, index)} "
                    f"reads another view of the same memory, {arg}: with {reasons[writer]} the "
                    "first writes to a copy, which the view does not show. Write out of place "
                    "there (x = x + y instead of x += y), or use zero_stage=0 and pp=1 without "
                    "mixed precision or recomputation"
                )
        owners = storage_owners(graph.ops)
        firsts: dict[str, str] = {}
        for name, out in zip(graph.outputs, call.outs, strict=True):
            owner = owners.get(name, name)
            source = inner.get(owner)
            firsts.setdefault(owner, out)
            memory[out] = memory.get(source, source) if source is not None else firsts[owner]
            made[out] = index
        written.update(dict.fromkeys(changed, index))


def _name(program: Program, index: int) -> str:
    call = program.calls[index]
    return call.fqn or f"the code between blocks ({program.graphs[call.graph].name})"


def _why(plan: Plan, mode: str) -> str:
    """Return what makes a block write to copies of its inputs; empty where it does not."""
    if plan.mesh.pp > 1:
        return f"pp={plan.mesh.pp}"
    if plan.zero_stage:
        return f"zero_stage={plan.zero_stage}"
    if plan.mixed_precision != "none":
        return "mixed precision"
    return f"recompute={mode}" if mode in ("full", "selective") else ""


def with_own_inputs(plan: Plan, graph: BlockGraph) -> BlockGraph:
    """Return a graph that the plan can run: as it is, or writing to copies of its inputs."""
    written = written_values(graph.ops) & set(graph.inputs)
    if not written or not _why(plan, "none"):
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
