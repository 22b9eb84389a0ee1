"""Simulate the step of a plan: its timeline, and the bytes of each rank over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from autoplan.errors import PlanError
from autoplan.memory import MemorySample, memory_samples
from autoplan.optimizers import Optimizer
from autoplan.plan import Plan
from autoplan.schedules import Action, ActionLists, schedule_actions
from autoplan.settings import Setting
from autoplan.simulator import simulate_actions
from autoplan.stage_costs import PlanCosts
from autoplan.stage_walk import PartBytes
from autoplan.timeline import Interval, Timeline, step_function

__all__ = ["simulate"]


def simulate(plan: Plan, *, schedule: str | None = None, with_memory: bool = True) -> Timeline:
    """Return the predicted timeline of one step of a plan; no device, no model, no torch.

    Args:
        plan: with the costs that planning wrote into it.
        schedule: another schedule over the same stages, as a what-if: gpipe, 1f1b, interleaved,
            zero_bubble. None: the plan's own.
        with_memory: also follow each rank's bytes. A split backward counts what it keeps until its
            weight gradients are made, which is an upper estimate.

    Raises:
        PlanError: the plan has no costs.
        ValueError: the schedule is unknown or cannot run these stages.
    """
    costs = plan.costs
    if costs is None:
        raise PlanError(
            "the plan carries no costs to simulate with: make it again with autoplan.optimize or "
            "autoplan.estimate, which write them into it"
        )
    name = plan.schedule if schedule is None else schedule
    num_chunks = len(costs.stages) // plan.mesh.pp
    actions = schedule_actions(name, plan.mesh.pp, plan.num_microbatches, num_chunks)
    titles = {s.index: tuple(b.fqn or b.block for b in s.blocks) for s in plan.stages}
    found = simulate_actions(costs, actions, zero_stage=plan.zero_stage, titles=titles)
    memory = _memory(plan, costs, name, actions, found) if with_memory else ()
    return Timeline(
        intervals=found.intervals,
        num_ranks=found.num_ranks,
        step_time_s=found.step_time_s,
        memory=memory,
        title=f"{plan.model}, {plan.mesh}, ZeRO stage {plan.zero_stage}, schedule {name}",
    )


def _memory(
    plan: Plan, costs: PlanCosts, schedule: str, actions: ActionLists, timeline: Timeline
) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return per rank the bytes over time: the sum over its stages, and the reserve."""
    intervals: dict[tuple[str, int], list[Interval]] = {}
    for interval in timeline.intervals:
        if interval.action:
            intervals.setdefault((interval.action, interval.block), []).append(interval)
    ends = [0.0] * timeline.num_ranks
    for interval in timeline.intervals:
        if interval.kind not in ("ties", "optimizer"):
            ends[interval.rank] = max(ends[interval.rank], interval.end_s)
    curves = []
    for rank, own in enumerate(actions):
        stages = sorted({a.stage for a in own})
        samples = _samples(plan, costs, schedule, rank, stages, own)
        firsts = dict(zip(stages, _firsts(costs, stages), strict=True))
        changes = _changes(_placed(samples, own, firsts, intervals, ends[rank]))
        curves.append(_summed(changes, costs.reserve_bytes))
    return tuple(curves)


def _firsts(costs: PlanCosts, stages: Sequence[int]) -> list[int]:
    """Return for each stage of a rank the number of the rank's blocks before it."""
    return list(accumulate((len(costs.stages[s].blocks) for s in stages[:-1]), initial=0))


def _samples(
    plan: Plan,
    costs: PlanCosts,
    schedule: str,
    rank: int,
    stages: Sequence[int],
    actions: Sequence[Action],
) -> tuple[MemorySample, ...]:
    own = [costs.stages[s] for s in stages]
    return memory_samples(
        [costs.blocks[name].bytes for stage in own for name in stage.blocks],
        Setting(
            dp=plan.mesh.dp,
            tp=plan.mesh.tp,
            pp=plan.mesh.pp,
            dp_replicate=plan.mesh.dp_replicate,
            axis_order=plan.mesh.axis_order,
            zero_stage=plan.zero_stage,
            microbatch_size=plan.microbatch_size,
            num_microbatches=plan.num_microbatches,
            schedule=schedule,  # type: ignore[arg-type]
            virtual_stages=len(stages),
            offload=plan.offload,
        ),
        Optimizer(
            name=plan.optimizer,
            state_bytes_per_byte=costs.state_bytes_per_byte,
            traffic_bytes_per_byte=0.0,
            is_foreach=costs.is_foreach,
        ),
        [(a.kind, stages.index(a.stage)) for a in actions],
        stage=rank,
        is_mixed=plan.mixed_precision != "none",
        is_gloo=not costs.overlaps,
        input_bytes=own[0].input_bytes,
        parts=[
            PartBytes(
                num_blocks=len(stage.blocks),
                side=stage.side_bytes,
                entering=stage.entering_bytes,
                leaving=stage.leaving_bytes,
                handed=stage.handed_bytes,
                returning=stage.returning_bytes,
                backward=stage.backward,
            )
            for stage in own
        ],
    )


def _placed(
    samples: Sequence[MemorySample],
    actions: Sequence[Action],
    firsts: Mapping[int, int],
    intervals: dict[tuple[str, int], list[Interval]],
    end_s: float,
) -> list[tuple[float, int]]:
    """Return the samples of a rank with the seconds from which each holds."""
    placed: list[tuple[float, int]] = []
    after_s = 0.0
    for sample in samples:
        if sample.action == len(actions):
            placed.append((end_s, sample.nbytes))
        elif sample.block is None:
            placed.append((after_s, sample.nbytes))
        else:
            action = actions[sample.action]
            run = intervals[str(action), sample.block - firsts[action.stage]]
            placed.append((run[0].start_s, sample.nbytes))
            after_s = run[-1].end_s
    return placed


def _changes(placed: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return (seconds, change in bytes) of a rank that starts with its first sample's bytes."""
    curve = step_function([(0.0, placed[0][1]), *placed])
    before = 0
    changes = []
    for seconds, nbytes in curve:
        changes.append((seconds, nbytes - before))
        before = nbytes
    return changes


def _summed(changes: Sequence[tuple[float, int]], start: int) -> tuple[tuple[float, int], ...]:
    """Return the running sum of changes in order of time, one value an instant."""
    by_time: dict[float, int] = {}
    for seconds, change in changes:
        by_time[seconds] = by_time.get(seconds, 0) + change
    total, curve = start, []
    for seconds in sorted(by_time):
        total += by_time[seconds]
        curve.append((seconds, total))
    return tuple(curve)
