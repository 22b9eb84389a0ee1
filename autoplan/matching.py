"""Explain where a plan and a captured program differ first."""

from __future__ import annotations

from autoplan.plan import Plan
from autoplan.program import Program

__all__ = ["explain_mismatch"]

_REMEDY = "plan this model again, or give the model that was planned"


def explain_mismatch(plan: Plan, program: Program, model: str) -> str:
    """Return a message that names the first difference of a plan and a program."""
    planned = [block for stage in plan.stages for block in stage.blocks]
    difference = _first_difference(plan, program, model)
    return (
        f"the plan is for another model ({plan.model}, fingerprint {plan.fingerprint}, "
        f"{len(planned)} calls) than this one ({model}, {program.fingerprint}): "
        f"{difference}; {_REMEDY}"
    )


def _first_difference(plan: Plan, program: Program, model: str) -> str:
    if plan.model != model:
        return f"it was made for {plan.model}, not {model}"
    planned = [block for stage in plan.stages for block in stage.blocks]
    for index, block in enumerate(planned):
        if index >= len(program.calls):
            return f"block {block.fqn or block.block} of the plan is not in the model"
        call = program.calls[index]
        graph = program.graphs[call.graph]
        if block.fqn != call.fqn:
            return f"call {index} is {block.fqn or 'glue'} in the plan and {call.fqn or 'glue'} now"
        if block.block != graph.name:
            return f"{block.fqn or 'glue'} is a {block.block} in the plan and a {graph.name} now"
        ops = {op.name for op in graph.ops}
        missing = [n for n in plan.recompute[block.recompute].keep if n.split("__")[0] not in ops]
        if missing:
            return f"{call.fqn or graph.name} has no op {missing[0]}, which the plan keeps"
        states = {state.fqn for state in graph.states}
        layout = plan.placements.get(block.placements)
        unknown = [fqn for fqn in (layout.parameters if layout else ()) if fqn not in states]
        if unknown:
            return f"{call.fqn or graph.name} has no parameter {unknown[0]}"
    if len(planned) < len(program.calls):
        extra = program.calls[len(planned)]
        return f"block {extra.fqn or 'glue'} of the model is not in the plan"
    return (
        "the blocks have the same names, but a shape, a constant or an op differs "
        "(another batch form, configuration, training mode, or library version)"
    )
