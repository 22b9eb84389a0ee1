"""Find the fastest plan of a planning problem; under torchrun once, for every rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.alone import alone_notes
from autoplan.bounds import unrunnable_reason
from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.collecting import without_what_stays
from autoplan.dry_run_result import LayoutNumerics
from autoplan.errors import AutoplanError, InfeasibleError, SearchLimitError
from autoplan.leanest import least_memory
from autoplan.limits import constraint_texts, make_limits
from autoplan.plan import Plan, SearchRecord, Simpler
from autoplan.planner import Planner, make_planner
from autoplan.reasons import Question
from autoplan.remedies import infeasible_error
from autoplan.search.forks import Beside
from autoplan.search.mesh import MeshResult, Progress
from autoplan.simple import Strategy, simple_strategies
from autoplan.tracer import recent_program
from autoplan.tracing_ahead import trace_ahead
from autoplan.training_job import TrainingJob
from autoplan.units import TICK_S, format_seconds

__all__ = ["find_plan", "on_rank_zero", "optimize"]

_BROADCAST_TIMEOUT_S = 1800.0


def optimize(
    model: nn.Module,
    cluster: Cluster | str,
    batch: Any = None,
    *,
    batch_dim: Any = 0,
    global_batch_size: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "AdamW",
    loss_fn: LossFn | None = None,
    mixed_precision: str = "auto",
    autocast: torch.dtype | None = None,
    name: str | None = None,
    time_limit_s: float = 120.0,
    progress: Callable[[Progress], None] | None = None,
    compare: bool = True,
    offload: Sequence[str] | str = (),
    within: Mapping[str, Sequence[int]] | None = None,
    forbid: Mapping[str, Any] | None = None,
    workers: int | None = None,
    **pins: Any,
) -> Plan:
    """Return the fastest plan that fits, with its proof.

    Args:
        model: any module, on any device, `meta` too; it is left as it is.
        cluster: the devices, or text such as `4x8:a100_sxm_80gb`.
        batch: example input; may be left out where the model can say what its inputs are.
        batch_dim: where the batch lies in it; see `autoplan.capturer.capture`.
        global_batch_size: rows of a step over all devices; default: the rows of `batch`.
        optimizer: class or name.
        loss_fn: see `autoplan.capturer.capture`.
        mixed_precision: `auto`: a bfloat16 model on GPUs has float32 master parameters; `none`: its
            own dtype throughout; `bfloat16`.
        autocast: `torch.bfloat16`: forward and recomputation run under `torch.autocast` to it, and
            time and memory are those; parameters stay in their own dtype.
        name: of the model in reports.
        time_limit_s: after it, the best plan so far is returned with its gap.
        progress: called as the search goes on.
        compare: price simpler strategies beside the plan.
        offload: what a plan may keep in host memory, where nothing else fits or it is faster:
            `optimizer`, for shards of parameters, gradients and optimizer state; `activations`, for
            what autograd saves in a block.
        within: bounds of settings, both ends allowed: `{"tp": (1, 4)}`.
        forbid: values that settings may not have: `{"tp": [8], "schedule": "zero_bubble"}`.
        workers: processes that trace and search at once; None: one per core, 1: this one alone. The
            plan does not depend on it. Where processes cannot be forked, it is 1.
        **pins: fixed settings: dp, tp, pp, zero_stage, microbatch_size, num_microbatches,
            dp_replicate, axis_order, recompute, schedule, virtual_stages.

    Raises:
        InfeasibleError: nothing fits; says the need, the capacity, the category and a remedy.
        SearchLimitError: the time limit came before any plan.
        TraceError, ValueError: the model or a setting is wrong.
    """
    job = TrainingJob(
        model,
        cluster,
        batch,
        batch_dim=batch_dim,
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        loss_fn=loss_fn,
        mixed_precision=mixed_precision,
        autocast=autocast,
        name=name,
        offload=offload,
    )
    planner = make_planner(job, pins=pins, limits=make_limits(within, forbid), workers=workers)
    return on_rank_zero(
        lambda: find_plan(planner, time_limit_s, progress, compare),
        attached=(planner.traces.batch, loss_fn),
    )


def on_rank_zero(search: Callable[[], Plan], *, attached: Any) -> Plan:
    """Return what `search` gives; under torchrun only rank 0 searches and the others receive it.

    Raises:
        AutoplanError: on every rank, what rank 0 raised.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return search()
    from autoplan.processes import ensure_process_group

    if not dist.is_initialized():
        ensure_process_group(None, _BROADCAST_TIMEOUT_S)
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [search().to_json(), None]
        except (AutoplanError, ValueError) as error:
            answer = [None, error]
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return replace(Plan.from_json(answer[0]), attached=attached)


@without_what_stays()
def find_plan(
    planner: Planner,
    time_limit_s: float = 120.0,
    progress: Callable[[Progress], None] | None = None,
    compare: bool = True,
) -> Plan:
    """Return the fastest plan of a planning problem; arguments and errors as in `optimize`.

    Every layout of a plan is run in this process beside its whole block. A plan with one that
    computes something else is not returned: the search goes again without the options that are to
    blame, each an op of a class of blocks sliced along an axis.
    """
    notes: list[str] = []
    while True:
        plan = _fastest(planner, time_limit_s, progress, compare)
        checked = _checked_layouts(plan)
        wrong = [one for one in checked if one.is_wrong]
        if not wrong:
            return replace(plan, notes=(*plan.notes, *notes, *_unchecked(checked)))
        blamed = {(one.block, op, axis) for one in wrong for op, axis in one.blamed}
        assert not blamed <= planner.traces.unusable, (
            f"layouts are wrong without an option: {wrong}"
        )
        notes += [_left_out(one) for one in wrong]
        planner = planner.without(blamed)


def _checked_layouts(plan: Plan) -> tuple[LayoutNumerics, ...]:
    """Return how the layouts of a plan compare, where its program is at hand."""
    program = recent_program(plan.fingerprint) if plan.mesh.tp > 1 else None
    if program is None:
        return ()
    from autoplan.layout_numerics import check_plan_layouts

    return check_plan_layouts(plan, program)


def _left_out(wrong: LayoutNumerics) -> str:
    ops = ", ".join(f"{op} along {axis}" for op, axis in wrong.blamed[:3])
    more = f" and {len(wrong.blamed) - 3} more" if len(wrong.blamed) > 3 else ""
    return (
        f"{wrong.block} is not sliced in {ops}{more}: over tp={wrong.degree} it would not compute "
        f"the same ({wrong.reason})"
    )


def _unchecked(checked: Sequence[LayoutNumerics]) -> list[str]:
    """Return what a reader must know of layouts that were not run, or not all of them."""
    return [
        f"layout {one.layout} of {one.block}, checked {one.form}: {one.reason}"
        for one in checked
        if one.reason
    ]


def _fastest(
    planner: Planner,
    time_limit_s: float,
    progress: Callable[[Progress], None] | None,
    compare: bool,
) -> Plan:
    """Return the fastest plan by the model of costs.

    The candidates are what the search found, the fastest simple strategy that fits on all devices,
    and, where neither is there, the plan of least memory. Each is priced exactly.
    """
    trace_ahead(planner)

    def compared() -> tuple[Strategy, ...]:
        return simple_strategies(planner) if compare else ()

    beside = Beside(compared) if compare and planner.wants_processes() else None
    try:
        result, settings = planner.search(time_limit_s=time_limit_s, progress=progress)
        simpler = compared() if beside is None else beside.result()
    finally:
        if beside is not None:
            beside.end()
    rows = tuple(s.row for s in simpler)
    record = _record(planner, result)
    best: Plan | None = None
    if result.best_name is not None:
        setting = settings[result.best_name]
        ends, decisions = result.decoded
        best = planner.write(setting, ends, decisions, record, rows)
    rivals = [s for s in simpler if s.row.fits and s.obeys(planner.pins, planner.limits)]
    rival = _fastest_rival(planner, rivals)
    if rival is not None and (best is None or _is_slower(best, rival)):
        best = planner.write(rival.setting, rival.ends, rival.decisions, record, rows)
    if best is None:
        best = _last_resort(planner, result, record, rows)
    told = _with_gap(best, rivals, planner.cluster.world_size)
    if compare and planner.cluster.slower:
        notes = alone_notes(planner, told.predicted.step_time_s, time_limit_s)
        told = replace(told, notes=(*told.notes, *notes))
    return replace(told, question=Question.of(planner))


def _fastest_rival(planner: Planner, rivals: Sequence[Strategy]) -> Strategy | None:
    """Return the fastest simple strategy on all devices that can be run, if there is one."""
    world = planner.cluster.world_size
    return min(
        (
            rival
            for rival in rivals
            if rival.setting.world_size == world
            and unrunnable_reason(planner, rival.setting) is None
        ),
        key=lambda rival: rival.row.step_time_s,
        default=None,
    )


def _is_slower(plan: Plan, rival: Strategy) -> bool:
    """Return whether a plan takes longer than a strategy, by more than rounding."""
    return plan.predicted.step_time_s * (1 - 1e-9) > rival.row.step_time_s


def _last_resort(
    planner: Planner, result: MeshResult, record: SearchRecord, rows: tuple[Simpler, ...]
) -> Plan:
    """Return the plan of least memory, where the search, whose memory is coarser, found none.

    Raises:
        InfeasibleError: even that one does not fit.
        SearchLimitError: the search was not finished, and it does not fit.
    """
    least = least_memory(planner)
    unrunnable = unrunnable_reason(planner, least.setting)
    if unrunnable is not None:
        raise InfeasibleError(
            f"no setting can be run: {unrunnable}; pin another tp or zero_stage=0"
        )
    if least.excess_bytes <= 0:
        return planner.write(least.setting, least.ends, least.decisions, record, rows)
    if result.status == "infeasible":
        raise infeasible_error(planner, least)
    raise SearchLimitError(
        f"the search ended after {result.wall_time_s:.1f} s without a plan: raise time_limit_s "
        "or pin a setting (tp, pp, microbatch_size)"
    )


def _with_gap(plan: Plan, rivals: Sequence[Strategy], world: int) -> Plan:
    """Return the plan with the objective that it has exactly, and a note if fewer devices win."""
    objective = plan.predicted.step_time_s
    bound = min(plan.search.bound_s, objective)
    is_proven = plan.search.status == "optimal" and bound > 0
    gap = 0.0 if is_proven else (objective - bound) / objective
    search = replace(plan.search, objective_s=objective, bound_s=bound, gap=gap)
    notes = plan.notes
    fewer = [s for s in rivals if s.setting.world_size < world]
    best = min(fewer, key=lambda s: s.row.step_time_s, default=None)
    if best is not None and best.row.step_time_s < objective:
        notes += (
            f"{best.row.name} alone would take {format_seconds(best.row.step_time_s)} a step, less "
            f"than all {world} devices together: the model is small for this cluster",
        )
    return replace(plan, search=search, notes=notes)


def _record(planner: Planner, result: MeshResult) -> SearchRecord:
    """Return the record of a search; the objective becomes the plan's own in `_with_gap`."""
    objective = (result.objective or 0) * TICK_S
    kinds = ("best", "slower", "cut", "infeasible", "unexplored")
    return SearchRecord(
        status="optimal" if result.status == "optimal" else "feasible",
        objective_s=objective,
        bound_s=result.bound * TICK_S,
        gap=result.gap or 0.0,
        wall_time_s=result.wall_time_s,
        settings={kind: result.count(kind) for kind in kinds},  # type: ignore[arg-type]
        outcomes={o.name: f"{o.kind}: {o.reason}" for o in result.outcomes},
        constraints=tuple(constraint_texts(planner.pins, planner.limits).values()),
    )
