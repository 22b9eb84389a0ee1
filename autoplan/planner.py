"""A planning problem with its caches, and the search over its settings.

    model, batch -> traces (one per micro-batch size) -> settings -> search -> Plan

Level 3 walks the settings best-first; each is bounded from below by its FLOPs, then by its fastest
blocks (`autoplan.bounds`), and solved by the pipeline search of level 2 over the frontiers of
level 1 (`autoplan.setting_solver`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.autocast import dtype_of
from autoplan.bounds import (
    LeastCalls,
    blocks_bound,
    frontiers_bound,
    ops_bound,
    static_reason,
)
from autoplan.cluster import Cluster
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.deferral import splits
from autoplan.errors import TraceError
from autoplan.frontiers import Decision, Frontiers
from autoplan.graph import ParameterTrace, Trace
from autoplan.interleaving import Alike, alike_run
from autoplan.limits import Limits, constraint_texts
from autoplan.model_traces import ModelTraces
from autoplan.plan import Plan, SearchRecord, Simpler
from autoplan.plan_prices import plan_lookups, plan_price
from autoplan.plan_writer import write_plan
from autoplan.search.candidates import Candidate
from autoplan.search.forks import usable_cores
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
from autoplan.training_job import TrainingJob
from autoplan.walked_plans import memory_refinement

__all__ = ["Planner", "make_planner"]

_FRONTIER_ROWS = (1, 4)
_WORTH_A_PROCESS_S = 0.2
_MOST_WORKERS = 8


@dataclass(slots=True)
class Planner:
    """Everything of one planning problem: model, batch, cluster, workload, and caches.

    Attributes:
        traces: of the model and its batch.
        cluster: the devices.
        workload: batch size, optimizer, precision.
        pins: settings that are fixed.
        limits: settings that are bounded or forbidden.
        even_cuts: give every stage the same number of blocks, to compare with what is usual.
        name: of the model, for reports.
        frontiers: solves the problems of block classes.
        ops_bounds: cache of `autoplan.bounds.ops_bound`.
        workers: processes that trace and search; None: as many as there are cores. Plans do not
            depend on it.
        posed: cache of `autoplan.setting_solver`.
        least, borders_s, state_bytes, strided: caches of `autoplan.bounds` and `held`.
        fewest_rows: of a micro-batch that the model can run on; found with the smallest trace.
    """

    traces: ModelTraces
    cluster: Cluster
    workload: Workload
    pins: Mapping[str, Any]
    name: str
    limits: Limits = NO_LIMITS
    even_cuts: bool = False
    frontiers: Frontiers = field(default_factory=Frontiers)
    _pricers: dict[int, Pricer] = field(default_factory=dict)
    _alike: dict[int, Alike] = field(default_factory=dict)
    ops_bounds: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    workers: int | None = None
    posed: dict[tuple[Setting, Convention, bool, bool], Posed] = field(default_factory=dict)
    least: dict[tuple[Setting, Convention], LeastCalls] = field(default_factory=dict)
    borders_s: dict[tuple[object, ...], list[float]] = field(default_factory=dict)
    state_bytes: int | None = None
    strided: list[ParameterTrace] | None = None
    fewest_rows: int = 1

    def trace(self, microbatch_size: int) -> Trace:
        """Return the trace for a micro-batch size, as `ModelTraces.of`."""
        return self.traces.of(microbatch_size, self.most_rows())

    def most_rows(self) -> int:
        """Return the most rows that a micro-batch may have."""
        if "microbatch_size" in self.pins:
            return int(self.pins["microbatch_size"])
        return self.workload.global_batch_size // int(self.pins.get("dp", 1))

    def wants_processes(self) -> bool:
        """Return whether there are several, and the model takes so long that they are worth it."""
        return self.num_workers() > 1 and self.traces.trace_time_s > _WORTH_A_PROCESS_S

    def num_workers(self) -> int:
        """Return how many processes may work at once."""
        return min(usable_cores(), self.workers or _MOST_WORKERS)

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
        return self.unpriced(traces=self.traces.without(options))

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
            if size > 1 or "microbatch_size" in self.pins or self.most_rows() < 2:
                raise
            with contextlib.suppress(TraceError):
                found = self.trace(2)
                most = self.limits.within.get("microbatch_size", (1, self.most_rows()))[1]
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
        exact = self.traces.exact(setting.microbatch_size)
        if setting.tp > 1:
            self.traces.recall_program(setting.microbatch_size)
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
        return replace(plan, attached=(self.traces.batch, self.traces.loss_fn))


def _reference_rows(microbatch_size: int) -> int:
    """Return the rows whose frontiers a micro-batch size uses."""
    return max((rows for rows in _FRONTIER_ROWS if rows <= microbatch_size), default=1)


def make_planner(
    job: TrainingJob,
    *,
    pins: Mapping[str, Any] | None = None,
    limits: Limits = NO_LIMITS,
    workers: int | None = None,
) -> Planner:
    """Return the planning problem that `optimize` and `estimate` are asked.

    Args:
        job: what is trained, and where.
        pins: settings that are fixed, as `autoplan.optimize` takes them.
        limits: settings that are bounded or forbidden.
        workers: as in `autoplan.optimize`.

    Raises:
        ValueError: a setting has a wrong name or value.
        TraceError: the model has no batch and none can be made.
    """
    pins = dict(pins or {})
    check_pins(pins)
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it must be at least 1, or None for every core")
    cluster, batch = job.devices(), job.example()
    workload = job.workload(cluster, batch)
    return Planner(
        traces=ModelTraces(
            model=job.model,
            batch=batch,
            loss_fn=job.loss_fn,
            batch_dim=job.batch_dim,
            autocast=dtype_of(workload.autocast),
            backend="cpu" if cluster.is_cpu else "cuda",
        ),
        cluster=cluster,
        workload=workload,
        pins=pins,
        limits=limits,
        workers=workers,
        name=job.name or type(job.model).__name__,
    )
