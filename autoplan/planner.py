"""Search for the fastest plan that fits, and price given configurations.

    model, batch -> traces (one per micro-batch size) -> settings -> search -> Plan

Level 3 walks the settings best-first; each is bounded from below by its FLOPs, then by its fastest
blocks, and solved by the pipeline search of level 2 over the frontiers of level 1. What wins is
priced again exactly, beside the simpler strategies that people would try.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.batches import batch_rows
from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.costs import TICK_S, Pricer
from autoplan.errors import AutoplanError, InfeasibleError, SearchLimitError
from autoplan.frontiers import Decision, fastest_ops_s
from autoplan.graph import ParameterTrace, Placement, Trace
from autoplan.layout_check import fsdp_can_slice
from autoplan.plan import Plan, SearchRecord, Simpler
from autoplan.plan_writer import write_plan
from autoplan.scaling import interpolate
from autoplan.search.evaluate import block_options, stage_costs
from autoplan.search.mesh import Candidate, MeshResult, Progress, Refinement, search_settings
from autoplan.search.pipeline import solve_pipeline
from autoplan.search.problem import PipelineProblem, PipelineSolution, Run
from autoplan.settings import Optimizer, Setting, Workload, check_pins, settings_of
from autoplan.simple import Strategy, even_ends, simple_strategies
from autoplan.times import Tally
from autoplan.tracer import trace
from autoplan.units import format_bytes, format_seconds

__all__ = ["Planner", "find_plan", "make_planner", "optimize"]

_BROADCAST_TIMEOUT_S = 1800.0
_MAX_REPAIRS = 8
_TRACED_ROWS = (2, 4)
_FRONTIER_ROWS = (1, 4)
_TWO_PIECES = Placement(kind="shard", dim=0, outer=2)


@dataclass(slots=True)
class Planner:
    """Everything of one planning problem: model, batch, cluster, workload, and caches.

    Attributes:
        model: on any device, `meta` too.
        batch: example input, see `autoplan.capturer.capture`.
        loss_fn: likewise.
        cluster: the devices.
        workload: batch size, optimizer, precision.
        pins: settings that are fixed.
        name: of the model, for reports.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    cluster: Cluster
    workload: Workload
    pins: Mapping[str, Any]
    name: str
    tally: Tally = field(default_factory=Tally)
    trace_time_s: float = 0.0
    _traces: dict[int, Trace] = field(default_factory=dict)
    _exact: MutableMapping[int, Trace] = field(default_factory=dict)
    _pricers: dict[int, Pricer] = field(default_factory=dict)
    _ops_bounds: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def trace(self, microbatch_size: int) -> Trace:
        """Return the trace for a micro-batch size; sizes above 4 follow from those of 2 and 4."""
        if microbatch_size not in self._traces:
            found = None
            if microbatch_size > _TRACED_ROWS[1]:
                low, high = (self.exact_trace(rows) for rows in _TRACED_ROWS)
                found = interpolate(low, high, microbatch_size)
            self._traces[microbatch_size] = found or self.exact_trace(microbatch_size)
        return self._traces[microbatch_size]

    def exact_trace(self, microbatch_size: int) -> Trace:
        """Return the trace of the program captured at a micro-batch size; each is made once."""
        if microbatch_size not in self._exact:
            start = time.perf_counter()
            self._exact[microbatch_size] = trace(
                self.model,
                self.batch,
                self.loss_fn,
                microbatch_size=microbatch_size,
                backend="cpu" if self.cluster.device.name.startswith("cpu") else "cuda",
            )
            self.trace_time_s += time.perf_counter() - start
        return self._exact[microbatch_size]

    def share_traces(self, traces: MutableMapping[int, Trace]) -> None:
        """Take traces of the same model and batch from a mapping, and add to it."""
        self._exact = traces

    def pricer(self, microbatch_size: int) -> Pricer:
        """Return the pricer for a micro-batch size.

        Frontiers are solved for micro-batches of 1 and of 4 rows; larger ones price the decisions
        of the latter, smaller ones of the former.
        """
        if microbatch_size not in self._pricers:
            reference = max((r for r in _FRONTIER_ROWS if r <= microbatch_size), default=1)
            self._pricers[microbatch_size] = Pricer(
                trace=self.trace(microbatch_size),
                cluster=self.cluster,
                workload=self.workload,
                recompute=self.pins.get("recompute"),
                reference=self.pricer(reference) if reference != microbatch_size else None,
                tally=self.tally,
            )
        return self._pricers[microbatch_size]

    def settings(self) -> list[Setting]:
        """Return every setting of the space under the pins.

        Raises:
            ValueError: the pins or the batch leave none; says which numbers would do.
        """
        some = self._smallest_trace()
        found = list(settings_of(self.cluster, self.workload, len(some.calls), self.pins))
        if not found:
            raise ValueError(self._why_no_setting(len(some.calls)))
        return found

    def _smallest_trace(self) -> Trace:
        size = self.pins.get("microbatch_size", 1)
        return self.trace(size)

    def _why_no_setting(self, num_blocks: int) -> str:
        world, batch = self.cluster.world_size, self.workload.global_batch_size
        degrees = [d for d in range(1, world + 1) if world % d == 0 and batch % d == 0]
        pins = ", ".join(f"{k}={v}" for k, v in self.pins.items()) or "no pins"
        return (
            f"no setting is possible for {world} devices, global batch {batch} and {pins}: "
            f"dp * tp * pp must be {world}, and dp * num_microbatches * microbatch_size must be "
            f"{batch} (dp may be {', '.join(map(str, degrees))}), with num_microbatches >= pp and "
            f"pp <= {num_blocks} blocks; zero_stage above 0 needs dp above 1"
        )

    def ops_bound(self, setting: Setting) -> int:
        """Return ticks below which no plan of the setting is: every op at its fastest."""
        key = (setting.tp, setting.microbatch_size)
        if key not in self._ops_bounds:
            pricer = self.pricer(setting.microbatch_size)
            timer = pricer.timer(setting.tp)
            by_block = [fastest_ops_s(block, timer) for block in pricer.trace.blocks]
            seconds = [by_block[call.block] for call in pricer.trace.calls]
            self._ops_bounds[key] = (sum(seconds), max(seconds))
        total, slowest = self._ops_bounds[key]
        m = setting.num_microbatches
        return int((total + (m - 1) * max(slowest, total / setting.pp)) / TICK_S * (1 - 1e-9))

    def layout_reason(self, setting: Setting) -> str | None:
        """Return why FSDP cannot slice what tensor parallelism stores under a setting, or None."""
        if setting.tp > 1 and setting.dp > 1 and setting.zero_stage > 0:
            for state in strided_states(self._smallest_trace()):
                if not fsdp_can_slice(state.shape, _TWO_PIECES, setting.dp):
                    return f"FSDP over dp={setting.dp} cannot slice {state.fqn} beside tp"
        return None

    def static_reason(self, setting: Setting) -> str | None:
        """Return why a setting cannot be, whatever is decided about its blocks, or None.

        Parameters and optimizer state must fit, counted in shards that divide by every degree and
        without activations; and the layout must be one that can be run.
        """
        trace = self._smallest_trace()
        unrunnable = self.layout_reason(setting)
        if unrunnable is not None:
            return unrunnable
        ratio = self.workload.parameter_bytes_per_traced_byte
        canonical = {fqn: group[0] for group in trace.shared for fqn in group}
        sizes: dict[str, int] = {}
        for call in trace.calls:
            for state, fqn in zip(trace.blocks[call.block].states, call.states, strict=True):
                factor = 1 + self.workload.optimizer.state_bytes_per_byte * state.is_trained
                sizes[canonical.get(fqn, fqn)] = int(state.nbytes * ratio * factor)
        shards = setting.dp if setting.zero_stage >= 1 else 1
        need = sum(sizes.values()) // (shards * setting.tp * setting.pp)
        if need <= self.cluster.capacity_bytes:
            return None
        return (
            f"parameters and optimizer state alone need {format_bytes(need)} a device, it has "
            f"{format_bytes(self.cluster.capacity_bytes)}"
        )

    def refine(self, setting: Setting) -> Refinement:
        """Return a bound from the fastest way to run each block, or why nothing fits."""
        pricer = self.pricer(setting.microbatch_size)
        total, slowest, once, static = 0, 0, 0, 0
        live = setting.live()[0]
        for call in range(len(pricer.trace.calls)):
            block = pricer.trace.calls[call].block
            decisions = pricer.decisions(block, setting.tp)
            options = [pricer.option(call, d, setting, live) for d in decisions]
            fastest = min(o.forward + o.backward for o in options)
            total += fastest
            slowest = max(slowest, fastest)
            once += min(o.once for o in options)
            static += min(o.static for o in options)
        unit = pricer.memory_unit
        capacity = self.cluster.capacity_bytes // unit
        if static > capacity * setting.pp:
            need = static * unit // setting.pp
            return Refinement(
                infeasible=f"parameters, gradients and optimizer state alone need "
                f"{format_bytes(need)} a device"
            )
        m = setting.num_microbatches
        bound = total + (m - 1) * max(slowest, -(-total // setting.pp)) + -(-once // setting.pp)
        return Refinement(bound=bound)

    def problem(self, setting: Setting) -> tuple[PipelineProblem, list[tuple[Decision, ...]]]:
        """Return the pipeline problem of a setting, and the decisions of each of its calls."""
        pricer = self.pricer(setting.microbatch_size)
        live = setting.live()
        runs: list[Run] = []
        per_call: list[tuple[Decision, ...]] = []
        previous: Any = None
        for call, trace_call in enumerate(pricer.trace.calls):
            decisions = pricer.decisions(trace_call.block, setting.tp)
            per_call.append(decisions)
            is_last = call == len(pricer.trace.calls) - 1
            options = tuple(
                pricer.option(call, d, setting, live[-1] if is_last else live[0]) for d in decisions
            )
            key = (trace_call.block, options)
            if runs and key == previous:
                runs[-1] = replace(runs[-1], count=runs[-1].count + 1)
            else:
                runs.append(Run(count=1, options=options))
            previous = key
        return self._pipeline(setting, pricer, tuple(runs), live), per_call

    def _pipeline(
        self, setting: Setting, pricer: Pricer, runs: tuple[Run, ...], live: tuple[int, ...]
    ) -> PipelineProblem:
        unit = pricer.memory_unit
        num_calls = len(pricer.trace.calls)
        crossing = max(pricer.trace.crossing_bytes, default=0) if setting.pp > 1 else 0
        fastest = [pricer.decisions(c.block, setting.tp)[0] for c in pricer.trace.calls]
        side = pricer.side_bytes(range(num_calls), fastest, setting.tp)
        fixed, boundary = [], []
        for stage in range(setting.pp):
            neighbours = (stage > 0) + (stage < setting.pp - 1)
            transfer = crossing * _transfer_copies(setting, stage, live[stage])
            nbytes = side * live[stage] + pricer.batch_bytes(setting) + transfer
            fixed.append(-(-nbytes // unit))
            seconds = neighbours * self._slowest_cut_s(setting, pricer) if neighbours else 0.0
            boundary.append(-int(-seconds // TICK_S))
        return PipelineProblem(
            runs=runs,
            num_microbatches=setting.num_microbatches,
            live=live,
            capacity=(self.cluster.capacity_bytes // unit,) * setting.pp,
            fixed=tuple(fixed),
            boundary=tuple(boundary),
        )

    def _slowest_cut_s(self, setting: Setting, pricer: Pricer) -> float:
        cuts = range(1, len(pricer.trace.calls))
        return max((pricer.boundary_s(setting, cut) for cut in cuts), default=0.0)

    def solve(self, setting: Setting, cutoff: int | None, time_limit_s: float) -> PipelineSolution:
        """Return the best cuts and options of a setting.

        The linear memory of the problem is an upper estimate almost everywhere. So the stages first
        get as much more as it exceeds the exact model by at the leanest options. Where the exact
        model finds a stage above its capacity, the stage gets that much less and the problem is
        solved again, so that what is returned fits exactly.
        """
        problem, per_call = self.problem(setting)
        capacities = (self._calibrated(setting, problem, per_call), problem.capacity)
        for capacity in dict.fromkeys(capacities):
            start = replace(problem, capacity=capacity)
            solution, is_first = self._repaired(setting, start, per_call, cutoff, time_limit_s)
            if solution.options or is_first:
                break
        return solution

    def _repaired(
        self,
        setting: Setting,
        problem: PipelineProblem,
        per_call: Sequence[Sequence[Decision]],
        cutoff: int | None,
        time_limit_s: float,
    ) -> tuple[PipelineSolution, bool]:
        """Return a solution that fits exactly, or one without options, and if that came at once."""
        pricer = self.pricer(setting.microbatch_size)
        for attempt in range(_MAX_REPAIRS):
            solution = solve_pipeline(problem, cutoff=cutoff, time_limit_s=time_limit_s)
            if not solution.options:
                return solution, attempt == 0
            chosen = [d[o] for d, o in zip(per_call, solution.options, strict=True)]
            price = pricer.plan_price(setting, solution.ends, chosen)
            excess = [m.peak - self.cluster.total_bytes for m in price.memory]
            if max(excess) <= 0:
                return solution, False
            capacity = tuple(
                c - max(0, -(-over // pricer.memory_unit))
                for c, over in zip(problem.capacity, excess, strict=True)
            )
            problem = replace(problem, capacity=capacity)
        none = PipelineSolution(
            status="infeasible", ends=(), options=(), objective=0, bound=cutoff or 0
        )
        return none, False

    def _calibrated(
        self,
        setting: Setting,
        problem: PipelineProblem,
        per_call: Sequence[Sequence[Decision]],
    ) -> tuple[int, ...]:
        """Return capacities that make the linear memory exact at the leanest options.

        Measured on even cuts; a stage where the linear memory is too low keeps its capacity.
        """
        pricer = self.pricer(setting.microbatch_size)
        ends = even_ends(problem.num_blocks, setting.pp)
        leanest = [
            min(range(len(own)), key=lambda i: own[i].static + own[i].kept + own[i].working)
            for own in block_options(problem)
        ]
        linear = [cost.memory for cost in stage_costs(problem, ends, leanest)]
        chosen = [d[o] for d, o in zip(per_call, leanest, strict=True)]
        price = pricer.plan_price(setting, ends, chosen)
        reserve = self.cluster.reserved_bytes
        exact = [-(-(m.peak - reserve) // pricer.memory_unit) for m in price.memory]
        return tuple(
            capacity + max(0, have - need)
            for capacity, have, need in zip(problem.capacity, linear, exact, strict=True)
        )

    def search(
        self,
        *,
        time_limit_s: float,
        progress: Callable[[Progress], None] | None = None,
    ) -> tuple[MeshResult, dict[str, Setting]]:
        """Return the result of the search over all settings, and the settings by name."""
        settings = {str(s): s for s in self.settings()}
        candidates = [
            Candidate(
                name=name,
                key=setting.simplicity,
                lower_bound=0 if reason else self.ops_bound(setting),
                infeasible=reason,
                refine=lambda s=setting: self.refine(s),  # type: ignore[misc]
                solve=lambda cutoff, limit, s=setting: self.solve(s, cutoff, limit),  # type: ignore[misc]
            )
            for name, setting in settings.items()
            for reason in (self.static_reason(setting),)
        ]
        result = search_settings(candidates, time_limit_s=time_limit_s, progress=progress)
        return result, settings

    def decided(
        self, setting: Setting, solution: PipelineSolution
    ) -> tuple[tuple[int, ...], list[Decision]]:
        """Return stage ends and one decision per call of a solution."""
        _, per_call = self.problem(setting)
        chosen = [
            decisions[option] for decisions, option in zip(per_call, solution.options, strict=True)
        ]
        return solution.ends, chosen

    def write(
        self,
        setting: Setting,
        ends: Sequence[int],
        decisions: Sequence[Decision],
        search: SearchRecord,
        simpler: tuple[Simpler, ...] = (),
    ) -> Plan:
        """Return the plan of decided cuts and options, with its exact price."""
        exact = self.exact_trace(setting.microbatch_size)
        pricer = replace_trace(self.pricer(setting.microbatch_size), exact)
        price = pricer.plan_price(setting, ends, decisions)
        plan = write_plan(
            trace=exact,
            pricer=pricer,
            setting=setting,
            ends=ends,
            decisions=decisions,
            price=price,
            search=search,
            simpler=simpler,
            model_name=self.name,
            lookups=dict(self.tally.counts),
        )
        return replace(plan, attached=(self.batch, self.loss_fn))


def _transfer_copies(setting: Setting, stage: int, live: int) -> int:
    """Return how many micro-batches' worth of activations lie at a stage's borders at most.

    Receive buffers that are no kept activations, stage outputs until their backward, and the
    gradient on its way back; see docs/design/memory-of-fsdp.md.
    """
    m = setting.num_microbatches
    entering = (m if setting.schedule == "gpipe" else live) - live + 1 if stage > 0 else 0
    gradients = m if setting.schedule == "gpipe" else min(2, m)
    leaving = gradients + live if stage < setting.pp - 1 else 0
    return entering + leaving


def strided_states(trace: Trace) -> list[ParameterTrace]:
    """Return matrices that some op can slice along dimension 0 in several pieces, once each."""
    found: dict[tuple[str, tuple[int, ...]], ParameterTrace] = {}
    for block in trace.blocks:
        states = {s.name: s for s in block.states if s.is_parameter and len(s.shape) > 1}
        for op in block.ops:
            for option in op.options:
                for name, text in zip(op.inputs, option.inputs, strict=False):
                    placement = Placement.parse(text)
                    if name in states and placement.dim == 0 and placement.outer > 1:
                        found[states[name].fqn, states[name].shape] = states[name]
    return list(found.values())


def replace_trace(pricer: Pricer, exact: Trace) -> Pricer:
    """Return the pricer itself if it prices that trace, else one that does."""
    if pricer.trace is exact:
        return pricer
    return Pricer(
        trace=exact,
        cluster=pricer.cluster,
        workload=pricer.workload,
        recompute=pricer.recompute,
        tally=pricer.tally,
    )


def make_planner(
    model: nn.Module,
    cluster: Cluster | str,
    batch: Any = None,
    *,
    global_batch_size: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "AdamW",
    loss_fn: LossFn | None = None,
    mixed_precision: str = "auto",
    name: str | None = None,
    pins: Mapping[str, Any] | None = None,
) -> Planner:
    """Return the planning problem that `optimize` and `estimate` are asked.

    Raises:
        ValueError: a setting has a wrong name or value.
        TraceError: the model cannot be captured, or has no batch and none can be made.
    """
    pins = dict(pins or {})
    check_pins(pins)
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if batch is None:
        from autoplan.models import example_batch

        batch = example_batch(model)
    rows = global_batch_size if global_batch_size is not None else batch_rows(batch)
    if rows < 1:
        raise ValueError(f"global_batch_size is {rows}; it must be at least 1")
    optimizer_name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    is_gpu = not cluster.device.name.startswith("cpu")
    workload = Workload(
        global_batch_size=rows,
        optimizer=Optimizer.named(optimizer_name, is_foreach=is_gpu),
        mixed_precision=_precision(model, mixed_precision, is_gpu),
        parameter_bytes_per_traced_byte=1,
    )
    if workload.mixed_precision != "none":
        workload = replace(workload, parameter_bytes_per_traced_byte=2)
    return Planner(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        cluster=cluster,
        workload=workload,
        pins=pins,
        name=name or type(model).__name__,
    )


def _precision(model: nn.Module, wanted: str, is_gpu: bool) -> Any:
    """Return the precision: `auto` trains a bfloat16 model with float32 master parameters."""
    if wanted not in ("auto", "none", "bfloat16"):
        raise ValueError(f"mixed_precision={wanted!r}; allowed are auto, none, bfloat16")
    dtypes = {p.dtype for p in model.parameters()}
    if wanted == "auto":
        return "bfloat16" if is_gpu and dtypes == {torch.bfloat16} else "none"
    if wanted == "bfloat16" and dtypes != {torch.bfloat16}:
        raise ValueError(
            "mixed_precision='bfloat16' plans a model built in bfloat16 with float32 master "
            f"parameters; this one has {', '.join(sorted(map(str, dtypes)))}: build it on the meta "
            "device in bfloat16 for planning"
        )
    return wanted


def optimize(
    model: nn.Module,
    cluster: Cluster | str,
    batch: Any = None,
    *,
    global_batch_size: int | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "AdamW",
    loss_fn: LossFn | None = None,
    mixed_precision: str = "auto",
    name: str | None = None,
    time_limit_s: float = 120.0,
    progress: Callable[[Progress], None] | None = None,
    compare: bool = True,
    **pins: Any,
) -> Plan:
    """Return the fastest plan that fits, with its proof.

    Args:
        model: any module, on any device, `meta` too; it is left as it is.
        cluster: the devices, or text such as `4x8:a100_sxm_80gb`.
        batch: example input; may be left out where the model can say what its inputs are.
        global_batch_size: rows of a step over all devices; default: the rows of `batch`.
        optimizer: class or name.
        loss_fn: see `autoplan.capturer.capture`.
        mixed_precision: `auto`: a bfloat16 model on GPUs has float32 master parameters; `none`: its
            own dtype throughout; `bfloat16`.
        name: of the model in reports.
        time_limit_s: after it, the best plan so far is returned with its gap.
        progress: called as the search goes on.
        compare: price simpler strategies beside the plan.
        **pins: fixed settings: dp, tp, pp, zero_stage, microbatch_size, num_microbatches,
            recompute.

    Raises:
        InfeasibleError: nothing fits; says the need, the capacity, the category and a remedy.
        SearchLimitError: the time limit came before any plan.
        TraceError, ValueError: the model or a setting is wrong.
    """
    planner = make_planner(
        model,
        cluster,
        batch,
        global_batch_size=global_batch_size,
        optimizer=optimizer,
        loss_fn=loss_fn,
        mixed_precision=mixed_precision,
        name=name,
        pins=pins,
    )
    return on_rank_zero(
        lambda: find_plan(planner, time_limit_s, progress, compare),
        attached=(planner.batch, loss_fn),
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


def find_plan(
    planner: Planner,
    time_limit_s: float = 120.0,
    progress: Callable[[Progress], None] | None = None,
    compare: bool = True,
) -> Plan:
    """Return the fastest plan of a planning problem; arguments and errors as in `optimize`.

    The candidates are what the search found, the fastest simple strategy that fits on all devices,
    and, where neither is there, the plan of least memory. Each is priced exactly.
    """
    result, settings = planner.search(time_limit_s=time_limit_s, progress=progress)
    simpler = simple_strategies(planner) if compare else ()
    rows = tuple(s.row for s in simpler)
    found: list[Plan] = []
    if result.best_name is not None and result.solution is not None:
        setting = settings[result.best_name]
        ends, decisions = planner.decided(setting, result.solution)
        found.append(planner.write(setting, ends, decisions, _record(result), rows))
    world = planner.cluster.world_size
    rivals = [s for s in simpler if s.row.fits and s.obeys(planner.pins)]
    for rival in sorted(rivals, key=lambda s: s.row.step_time_s):
        if rival.setting.world_size == world and planner.layout_reason(rival.setting) is None:
            found.append(
                planner.write(rival.setting, rival.ends, rival.decisions, _record(result), rows)
            )
            break
    if not found:
        found.append(_last_resort(planner, result, rows))
    best = min(found, key=lambda plan: plan.predicted.step_time_s * (1 - 1e-9 * (plan is found[0])))
    return _with_gap(best, rivals, world)


def _last_resort(planner: Planner, result: MeshResult, rows: tuple[Simpler, ...]) -> Plan:
    """Return the plan of least memory, where the search, whose memory is coarser, found none.

    Raises:
        InfeasibleError: even that one does not fit.
        SearchLimitError: the search was not finished, and it does not fit.
    """
    from autoplan.remedies import infeasible_error, least_memory

    least = least_memory(planner)
    unrunnable = planner.layout_reason(least.setting)
    if unrunnable is not None:
        raise InfeasibleError(
            f"no setting can be run: {unrunnable}; pin another tp or zero_stage=0"
        )
    if least.need_bytes <= planner.cluster.total_bytes:
        record = _record(result)
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


def _record(result: MeshResult) -> SearchRecord:
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
    )
