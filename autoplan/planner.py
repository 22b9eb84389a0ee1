"""A planning problem with its caches, and the search over its settings.

    model, batch -> traces (one per micro-batch size) -> settings -> search -> Plan

Level 3 walks the settings best-first; each is bounded from below by its FLOPs, then by its fastest
blocks (`autoplan.bounds`), and solved by the pipeline search of level 2 over the frontiers of
level 1 (`autoplan.setting_solver`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoplan.autocast import check_autocast, choose_precision, dtype_of
from autoplan.batches import batch_rows
from autoplan.bounds import (
    LeastCalls,
    blocks_bound,
    frontiers_bound,
    ops_bound,
    static_reason,
)
from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.compat import has_autograd_threads
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.deferral import splits
from autoplan.errors import TraceError
from autoplan.exporter import import_export
from autoplan.frontiers import Decision, Frontiers
from autoplan.graph import ParameterTrace, Trace
from autoplan.interleaving import Alike, alike_run
from autoplan.limits import Limits, constraint_texts
from autoplan.offload import check_offload
from autoplan.optimizers import Optimizer
from autoplan.plan import Plan, SearchRecord, Simpler
from autoplan.plan_prices import plan_lookups, plan_price
from autoplan.plan_writer import write_plan
from autoplan.program_pickles import packed, unpacked
from autoplan.scaling import interpolate
from autoplan.search.candidates import Candidate
from autoplan.search.forks import Beside, usable_cores
from autoplan.search.mesh import MeshResult, Progress, search_settings
from autoplan.search.problem import PipelineSolution
from autoplan.setting_problem import pipeline_problem, variants
from autoplan.setting_rules import broken_rules
from autoplan.setting_solver import Posed, relaxation_bound, solve_setting
from autoplan.settings import (
    NO_LIMITS,
    Setting,
    Workload,
    check_pins,
    settings_of,
)
from autoplan.stage_ends import most_stages
from autoplan.tracer import recent_program, remember, trace
from autoplan.walked_plans import memory_refinement

__all__ = ["Planner", "make_planner"]

_TRACED_ROWS = (2, 4)
_FRONTIER_ROWS = (1, 4)
_WORTH_A_PROCESS_S = 0.2
_WORTH_A_PROCESS_MODULES = 50  # smaller models take less than starting one
_MOST_WORKERS = 8


@dataclass(slots=True)
class Planner:
    """Everything of one planning problem: model, batch, cluster, workload, and caches.

    Attributes:
        model: on any device, `meta` too.
        batch: example input, see `autoplan.capturer.capture`.
        loss_fn: likewise.
        batch_dim: likewise.
        cluster: the devices.
        workload: batch size, optimizer, precision.
        pins: settings that are fixed.
        limits: settings that are bounded or forbidden.
        even_cuts: give every stage the same number of blocks, to compare with what is usual.
        name: of the model, for reports.
        frontiers: solves the problems of block classes.
        trace_time_s: seconds spent in capture.
        ops_bounds: cache of `autoplan.bounds.ops_bound`.
        unusable: options that no plan may use: block class, op, axis.
        workers: processes that trace and search; None: as many as there are cores. Plans do not
            depend on it.
        posed: cache of `autoplan.setting_solver`.
        least, borders_s, state_bytes, strided: caches of `autoplan.bounds` and `held`.
        fewest_rows: of a micro-batch that the model can run on; found with the smallest trace.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    cluster: Cluster
    workload: Workload
    pins: Mapping[str, Any]
    name: str
    batch_dim: Any = 0
    limits: Limits = NO_LIMITS
    even_cuts: bool = False
    frontiers: Frontiers = field(default_factory=Frontiers)
    trace_time_s: float = 0.0
    _traces: dict[int, Trace] = field(default_factory=dict)
    _exact: MutableMapping[int, Trace] = field(default_factory=dict)
    _pricers: dict[int, Pricer] = field(default_factory=dict)
    _alike: dict[int, Alike] = field(default_factory=dict)
    ops_bounds: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    unusable: frozenset[tuple[str, str, str]] = frozenset()
    workers: int | None = None
    _elsewhere: dict[int, bytes | None] = field(default_factory=dict)
    _usable: dict[int, Trace] = field(default_factory=dict)
    posed: dict[tuple[Setting, Convention, bool, bool], Posed] = field(default_factory=dict)
    least: dict[tuple[Setting, Convention], LeastCalls] = field(default_factory=dict)
    borders_s: dict[tuple[object, ...], list[float]] = field(default_factory=dict)
    state_bytes: int | None = None
    strided: list[ParameterTrace] | None = None
    fewest_rows: int = 1

    def trace(self, microbatch_size: int) -> Trace:
        """Return the trace for a micro-batch size; others follow from those of 2 and 4 rows."""
        if microbatch_size not in self._traces:
            found = None
            if self._follows(microbatch_size):
                low, high = (self.exact_trace(rows) for rows in _TRACED_ROWS)
                found = interpolate(low, high, microbatch_size)
            self._traces[microbatch_size] = found or self.exact_trace(microbatch_size)
        return self._traces[microbatch_size]

    def _follows(self, microbatch_size: int) -> bool:
        """Return whether a size is above those traced, or between two that others need too."""
        is_between = microbatch_size == 3 and self._most_rows() > microbatch_size
        return microbatch_size > _TRACED_ROWS[1] or is_between

    def _most_rows(self) -> int:
        """Return the most rows that a micro-batch may have."""
        if "microbatch_size" in self.pins:
            return int(self.pins["microbatch_size"])
        return self.workload.global_batch_size // int(self.pins.get("dp", 1))

    def exact_trace(self, microbatch_size: int) -> Trace:
        """Return the trace of the program captured at a micro-batch size; each is made once."""
        if microbatch_size not in self._usable:
            found = self._captured(microbatch_size)
            self._usable[microbatch_size] = found.without(self.unusable)
        return self._usable[microbatch_size]

    def _captured(self, microbatch_size: int) -> Trace:
        if microbatch_size not in self._exact:
            start = time.perf_counter()
            self._exact[microbatch_size] = self._capture(microbatch_size)
            self.trace_time_s += time.perf_counter() - start
        return self._exact[microbatch_size]

    def _capture(self, microbatch_size: int) -> Trace:
        return trace(
            self.model,
            self.batch,
            self.loss_fn,
            microbatch_size=microbatch_size,
            batch_dim=self.batch_dim,
            autocast=dtype_of(self.workload.autocast),
            backend="cpu" if self.cluster.is_cpu else "cuda",
        )

    def trace_ahead(self) -> None:
        """Trace the sizes that settings need, the larger ones in a process beside this one.

        Which settings there are follows from the smallest trace. The process starts before that is
        there, so what it finds may not be needed. This one prepares the search while it waits.
        """
        beside = self._traced_beside()
        try:
            settings = self.settings()
            sizes = {setting.microbatch_size for setting in settings}
            if not beside and has_autograd_threads():
                # A process that is forked for the search could not trace what is missing.
                for size in sorted(sizes):
                    self.trace(size)
            if not beside or max(sizes) == 1:
                return
            self._look_ahead(settings, lambda: all(one.is_done() for one in beside))
            begun = time.perf_counter()
            for one in beside:
                for rows, (found, program) in one.result().items():
                    self._exact[rows] = found
                    self._elsewhere[rows] = program
            self.trace_time_s += time.perf_counter() - begun
        finally:
            for one in beside:
                one.end()

    def _traced_beside(self) -> list[Beside[dict[int, tuple[Trace, bytes | None]]]]:
        """Start to trace larger sizes in processes of their own, where it is worth it."""
        most = self._most_rows()
        missing = [rows for rows in _TRACED_ROWS if rows <= most and rows not in self._exact]
        is_large = sum(1 for _ in self.model.modules()) > _WORTH_A_PROCESS_MODULES
        if not missing or not is_large or "microbatch_size" in self.pins or self.num_workers() == 1:
            return []
        if has_autograd_threads():
            return []
        import_export()
        count = min(self.num_workers() - 1, len(missing))
        shares = [missing[index::count] for index in range(count)]
        return [
            Beside(lambda share=share: {rows: self._to_send(rows) for rows in share})  # type: ignore[misc]
            for share in shares
        ]

    def _to_send(self, microbatch_size: int) -> tuple[Trace, bytes | None]:
        """Return a trace and its program in the form in which another process can read it."""
        found = self._capture(microbatch_size)
        program = recent_program(found.fingerprint)
        return found, packed(program) if program is not None else None

    def _take_program(self, microbatch_size: int) -> None:
        """Have the program of a size at hand, by which the layouts of a plan are checked."""
        if microbatch_size not in self._elsewhere:
            return
        sent = self._elsewhere.pop(microbatch_size)
        program = unpacked(sent, self._exact[microbatch_size].fingerprint)
        if program is not None:
            remember(program)
        else:
            self._capture(microbatch_size)

    def _look_ahead(self, settings: Sequence[Setting], is_over: Callable[[], bool]) -> None:
        """Bound settings of what is traced, as the search will, until something is over."""
        ready = [setting for setting in settings if setting.microbatch_size in self._exact]
        for bound in (ops_bound, blocks_bound, frontiers_bound):
            for setting in sorted(ready, key=lambda one: ops_bound(self, one)):
                if is_over():
                    return
                if static_reason(self, setting) is None:
                    bound(self, setting)

    def wants_processes(self) -> bool:
        """Return whether there are several, and the model takes so long that they are worth it."""
        return self.num_workers() > 1 and self.trace_time_s > _WORTH_A_PROCESS_S

    def num_workers(self) -> int:
        """Return how many processes may work at once."""
        return min(usable_cores(), self.workers or _MOST_WORKERS)

    def share_traces(self, traces: MutableMapping[int, Trace]) -> None:
        """Take traces of the same model and batch from a mapping, and add to it."""
        self._exact = traces

    def pricer(self, microbatch_size: int) -> Pricer:
        """Return the pricer for a micro-batch size.

        Frontiers are solved for micro-batches of 1 and of 4 rows; larger ones price the decisions
        of the latter, smaller ones of the former. Where the model cannot run on so few rows, a
        size has its own.
        """
        if microbatch_size not in self._pricers:
            reference = None
            if (rows := _reference_rows(microbatch_size)) != microbatch_size:
                with contextlib.suppress(TraceError):
                    reference = self.pricer(rows)
            self._pricers[microbatch_size] = Pricer(
                trace=self.trace(microbatch_size),
                cluster=self.cluster,
                workload=self.workload,
                recompute=self.pins.get("recompute"),
                reference=reference,
                frontiers=self.frontiers,
            )
        return self._pricers[microbatch_size]

    def use_decisions(self, reference: Pricer) -> None:
        """Take the decisions of another problem's pricer for micro-batches of one size.

        What they hold is shared too, so that the seconds of blocks are those of the other cluster.
        """
        self._pricers[reference.trace.microbatch_size] = reference.only_for_memory(
            self.cluster, self.workload, self.pins.get("recompute")
        )

    def alike_run(self, microbatch_size: int) -> Alike:
        """Return the run of alike blocks that ranks of several stages are dealt."""
        if microbatch_size not in self._alike:
            self._alike[microbatch_size] = alike_run(self.trace(microbatch_size))
        return self._alike[microbatch_size]

    def without(self, options: Collection[tuple[str, str, str]]) -> Planner:
        """Return the same problem without some options: block class, op, axis."""
        unusable = self.unusable | set(options)
        return self.unpriced(unusable=unusable, _usable={}, _traces={})

    def unpriced(self, **changes: Any) -> Planner:
        """Return the same problem with changes, without anything that was priced."""
        other = replace(self, **changes)
        other.forget_prices()
        return other

    def forget_prices(self) -> None:
        """Drop what depends on pins and cluster; traces stay."""
        self._pricers = {}
        self.ops_bounds = {}
        self.posed = {}
        self.least = {}
        self.borders_s = {}
        self.state_bytes = None
        self.strided = None

    def settings(self) -> list[Setting]:
        """Return every setting of the space under the pins.

        Raises:
            ValueError: the pins or the batch leave none; says which numbers would do.
        """
        trace = self.smallest_trace()
        num_blocks = most_stages(trace)
        found = list(
            settings_of(
                self.cluster,
                self.workload,
                num_blocks,
                self.pins,
                limits=self.limits,
                num_alike=len(alike_run(trace).calls),
                can_split=splits(trace),
            )
        )
        if not found:
            raise ValueError(self._why_no_setting(num_blocks))
        return found

    def smallest_trace(self) -> Trace:
        """Return the trace of the smallest micro-batch size: the pinned one, or what limits allow.

        A model that cannot run on one row, as batch norm over vectors cannot, gets two at least.

        Raises:
            TraceError: the model cannot be captured.
        """
        size = self._fewest_rows()
        try:
            return self.trace(size)
        except TraceError:
            if size > 1 or "microbatch_size" in self.pins or self._most_rows() < 2:
                raise
            with contextlib.suppress(TraceError):
                found = self.trace(2)
                most = self.limits.within.get("microbatch_size", (1, self._most_rows()))[1]
                within = {**self.limits.within, "microbatch_size": (2, max(2, most))}
                self.limits = replace(self.limits, within=within)
                self.fewest_rows = 2
                return found
            raise

    def _fewest_rows(self) -> int:
        """Return the fewest rows that a micro-batch may have."""
        low, _ = self.limits.within.get("microbatch_size", (1, 1))
        return int(self.pins.get("microbatch_size", low))

    def _why_no_setting(self, num_blocks: int) -> str:
        world, batch = self.cluster.world_size, self.workload.global_batch_size
        degrees = [d for d in range(1, world + 1) if world % d == 0 and batch % d == 0]
        given = constraint_texts(self.pins, self.limits).values()
        pins = ", ".join(given) or "no pins"
        can_split = splits(self.smallest_trace())
        rules = broken_rules(
            self.cluster, self.workload, num_blocks, self.pins, can_split=can_split
        )
        return (
            f"no setting is possible for {world} devices, global batch {batch} and {pins}: "
            f"dp * tp * pp must be {world}, and dp * num_microbatches * microbatch_size must be "
            f"{batch} (dp may be {', '.join(map(str, degrees))}), with num_microbatches >= pp "
            f"under 1f1b and zero_bubble, and pp <= {num_blocks} blocks with parameters; "
            "zero_stage above 0 needs dp above 1" + "".join(f"; {rule}" for rule in rules)
        )

    def search(
        self,
        *,
        time_limit_s: float,
        progress: Callable[[Progress], None] | None = None,
        cutoff: int | None = None,
    ) -> tuple[MeshResult, dict[str, Setting]]:
        """Return the result of the search over all settings, and the settings by name.

        `cutoff`: ticks; only plans below it are wanted.
        """
        settings = {str(s): s for s in self.settings()}
        candidates = [
            Candidate(
                name=name,
                key=setting.simplicity,
                lower_bound=0 if reason else ops_bound(self, setting),
                infeasible=reason,
                refinements=(
                    lambda s=setting: blocks_bound(self, s),  # type: ignore[misc]
                    lambda s=setting: frontiers_bound(self, s),  # type: ignore[misc]
                    lambda s=setting: memory_refinement(self, s),  # type: ignore[misc]
                    lambda s=setting: relaxation_bound(self, s, is_quick=True),  # type: ignore[misc]
                    lambda s=setting: relaxation_bound(self, s),  # type: ignore[misc]
                ),
                group=(setting.tp, _reference_rows(setting.microbatch_size)),
                decode=lambda solution, s=setting: self._decided(s, solution),  # type: ignore[misc]
                solve=lambda cutoff, limit, s=setting: solve_setting(self, s, cutoff, limit),  # type: ignore[misc]
            )
            for name, setting in settings.items()
            for reason in (static_reason(self, setting),)
        ]
        result = search_settings(
            candidates,
            time_limit_s=time_limit_s,
            progress=progress,
            workers=self.num_workers(),
            cutoff=cutoff,
        )
        return result, settings

    def _decided(
        self, setting: Setting, solution: PipelineSolution
    ) -> tuple[tuple[int, ...], list[Decision]]:
        """Return stage ends and one decision per call of a solution."""
        pricer = self.pricer(setting.microbatch_size)
        convention, is_lean = variants(pricer, setting)[solution.variant]
        asked = pipeline_problem(self, setting, convention, is_lean=is_lean)
        return solution.ends, asked.chosen(solution.options)

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
        if setting.tp > 1:
            self._take_program(setting.microbatch_size)
        pricer = self.pricer(setting.microbatch_size).of(exact)
        price = plan_price(pricer, setting, ends, decisions)
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
            lookups=plan_lookups(pricer, setting, ends, decisions),
        )
        return replace(plan, attached=(self.batch, self.loss_fn))


def _reference_rows(microbatch_size: int) -> int:
    """Return the rows whose frontiers a micro-batch size uses."""
    return max((rows for rows in _FRONTIER_ROWS if rows <= microbatch_size), default=1)


def make_planner(
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
    offload: Sequence[str] | str = (),
    pins: Mapping[str, Any] | None = None,
    limits: Limits = NO_LIMITS,
    workers: int | None = None,
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
    rows = global_batch_size if global_batch_size is not None else batch_rows(batch, batch_dim)
    if rows < 1:
        raise ValueError(f"global_batch_size is {rows}; it must be at least 1")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1, or None for every core")
    optimizer_name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    is_gpu = not cluster.is_cpu
    precision = choose_precision(model, "none" if autocast else mixed_precision, is_gpu)
    width = 1 if precision == "none" else 2  # master parameters are float32
    item_bytes = max((p.element_size() for p in model.parameters() if p.requires_grad), default=4)
    workload = Workload(
        global_batch_size=rows,
        optimizer=Optimizer.named(optimizer_name, is_foreach=is_gpu, item_bytes=width * item_bytes),
        mixed_precision=precision,
        autocast=check_autocast(model, autocast, mixed_precision),
        parameter_bytes_per_traced_byte=width,
        offload=check_offload(offload, cluster),
    )
    return Planner(
        model=model,
        batch=batch,
        loss_fn=loss_fn,
        cluster=cluster,
        workload=workload,
        pins=pins,
        limits=limits,
        workers=workers,
        name=name or type(model).__name__,
        batch_dim=batch_dim,
    )
