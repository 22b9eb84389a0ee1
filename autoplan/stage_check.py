"""What no pipeline can run: refused by name, on every rank, before the first collective."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from itertools import combinations

from autoplan.errors import PlanError
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.schedules import MULTI_STAGE, schedule_actions, unrunnable_split
from autoplan.shared_writes import changed_parameter_text, changed_states
from autoplan.stages import StageSlice
from autoplan.written_inputs import check_writes

__all__ = ["are_separate", "check_schedule", "check_stages"]


def are_separate(read: Sequence[Set[str]], pp: int) -> bool:
    """Return whether every stage reads a parameter, and no two stages of a rank the same one.

    Args:
        read: of each stage, the first names of the parameters that it reads.
        pp: ranks, which the stages are dealt to in turn.
    """
    ranks = [read[rank::pp] for rank in range(pp)]
    return all(read) and all(a.isdisjoint(b) for own in ranks for a, b in combinations(own, 2))


def check_schedule(plan: Plan) -> None:
    """Refuse a schedule that cannot run the plan's stages and micro-batches.

    Raises:
        PlanError: says which numbers would do.
    """
    pp, m = plan.mesh.pp, plan.num_microbatches
    if len(plan.stages) % pp or (plan.num_chunks > 1 and plan.schedule not in MULTI_STAGE):
        raise PlanError(
            f"{len(plan.stages)} stages over pp={pp} ranks under schedule {plan.schedule}: use one "
            f"stage a rank, or {' or '.join(MULTI_STAGE)} with the same number on every rank"
        )
    if plan.schedule == "1f1b" and m < pp:
        raise PlanError(
            f"1f1b needs at least as many micro-batches as stages, {pp}, and the plan has {m}: "
            "raise num_microbatches or use gpipe"
        )
    unrunnable = unrunnable_split(
        plan.schedule,
        plan.zero_stage,
        is_mixed=plan.mixed_precision != "none",
        recomputes=plan.recomputes,
    )
    if unrunnable is not None:
        raise PlanError(unrunnable)
    try:
        schedule_actions(plan.schedule, pp, m, plan.num_chunks)
    except ValueError as error:
        raise PlanError(str(error)) from None


def check_stages(
    plan: Plan, program: Program, stages: Sequence[StageSlice], parameters: Collection[str]
) -> None:
    """Refuse cuts that cannot run.

    Args:
        plan: what is to run.
        program: of the model.
        stages: its slices.
        parameters: the model's names of parameters, shared ones under every name.

    Raises:
        PlanError: a stage has no parameters, several stages use a buffer that the forward changes,
            a parameter that the forward changes is sliced, two stages of one rank share a
            parameter, or a write to an input would be lost.
    """
    check_writes(plan, program)
    owners: dict[str, list[int]] = {}
    for stage in stages:
        states = {fqn for i in stage.calls for fqn in program.calls[i].states}
        own = states.intersection(parameters)
        if len(stages) > 1 and not own:
            names = ", ".join(program.graphs[program.calls[i].graph].name for i in stage.calls)
            raise PlanError(
                f"stage {stage.index} ({names}) has no parameter, so no optimizer can be made on "
                "its ranks: move a border, or lower pp"
            )
        for first in {program.aliases[fqn] for fqn in own}:
            owners.setdefault(first, []).append(stage.index)
    stage_of = {call: stage.index for stage in stages for call in stage.calls}
    is_stored_otherwise = plan.mesh.tp > 1 or plan.zero_stage > 0 or plan.mixed_precision != "none"
    for state in changed_states(program):
        if state.fqn in parameters and is_stored_otherwise:
            raise PlanError(changed_parameter_text(state.fqn))
        used_on = sorted({stage_of[call] for call in state.calls})
        if len(used_on) > 1:
            raise PlanError(
                f"the forward changes {state.fqn}, which stages {used_on} use, and their copies "
                "would differ: put the blocks that use it on one stage"
            )
    for fqn, where in owners.items():
        if len({stage % plan.mesh.pp for stage in where}) < len(where):
            raise PlanError(
                f"{fqn} is read by stages {where}, two of which are on one of the {plan.mesh.pp} "
                "ranks of the pipeline, which would hold two copies: give each rank one stage, or "
                "put the blocks that read it on one stage or on stages of different ranks"
            )
