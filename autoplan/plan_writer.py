"""Turn decided cuts and options into a `Plan`: names for layouts and recompute entries, stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.graph import Trace
from autoplan.offload import host_bytes
from autoplan.plan import (
    BlockPlan,
    Layout,
    Mesh,
    Plan,
    Predicted,
    Recompute,
    SearchRecord,
    Simpler,
    StagePlan,
)
from autoplan.plan_prices import PlanPrice
from autoplan.settings import Setting
from autoplan.stage_bytes import stage_blocks
from autoplan.stage_pricing import plan_costs

__all__ = ["write_plan"]

T = TypeVar("T")


def write_plan(
    *,
    trace: Trace,
    pricer: Pricer,
    setting: Setting,
    ends: Sequence[int],
    decisions: Sequence[Decision],
    price: PlanPrice,
    search: SearchRecord,
    simpler: tuple[Simpler, ...],
    model_name: str,
    lookups: dict[str, int],
) -> Plan:
    """Return the plan of one decision per call."""
    names = _Names(trace, pricer, setting)
    stages = []
    starts = [0, *ends[:-1]]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        blocks = tuple(names.block_plan(call, decisions[call]) for call in range(start, end))
        stages.append(StagePlan(index=index, blocks=blocks))
    cluster = pricer.cluster
    return Plan(
        model=model_name,
        fingerprint=trace.fingerprint,
        mesh=Mesh(
            dp=setting.dp,
            tp=setting.tp,
            pp=setting.pp,
            dp_replicate=setting.dp_replicate,
            axis_order=setting.axis_order,
        ),
        zero_stage=setting.zero_stage,
        microbatch_size=setting.microbatch_size,
        num_microbatches=setting.num_microbatches,
        batch_dims=trace.batch_dims,
        global_batch_size=pricer.workload.global_batch_size,
        schedule=setting.schedule,
        mixed_precision=pricer.workload.mixed_precision,
        autocast=pricer.workload.autocast,
        offload=setting.offload,
        optimizer=pricer.workload.optimizer.name,
        stages=tuple(stages),
        recompute=names.recompute,
        placements=names.layouts,
        shared=trace.shared,
        predicted=Predicted(
            step_time_s=price.step_time_s,
            peak_memory_bytes=tuple(m.peak for m in price.memory),
            memory_by_category=tuple(m.by_category for m in price.memory),
            stage_time_s=price.stage_time_s,
            time_by_category=price.time_by_category,
            capacity_bytes=cluster.total_bytes,
            lookups=lookups,
            host_bytes=_host_bytes(pricer, setting, ends, decisions),
        ),
        search=search,
        simpler=simpler,
        provenance={
            "cluster": str(cluster),
            "profile": cluster.device.name,
            "profile_origins": "; ".join(
                f"{key}: {origin.kind}, {origin.text}"
                for key, origin in cluster.device.origins.items()
            ),
            "backend_rules": trace.backend,
            **{f"version_{name}": version for name, version in trace.versions.items()},
            "seed": "0",
        },
        notes=trace.notes,
        costs=plan_costs(pricer, setting, ends, decisions),
    )


def _host_bytes(
    pricer: Pricer, setting: Setting, ends: Sequence[int], decisions: Sequence[Decision]
) -> tuple[int, ...]:
    """Return per rank of the pipeline its shards' bytes in host memory; empty without offload."""
    if setting.offload == "none":
        return ()
    workload = pricer.workload
    stages = [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    blocks = [
        stage_blocks(pricer, calls, [decisions[c] for c in calls], setting) for calls in stages
    ]
    return tuple(
        host_bytes([b.group for own in blocks[rank :: setting.pp] for b in own], setting, workload)
        for rank in range(setting.pp)
    )


class _Names:
    """Gives layouts and recompute entries short names, one per distinct value."""

    def __init__(self, trace: Trace, pricer: Pricer, setting: Setting) -> None:
        self.trace = trace
        self.pricer = pricer
        self.setting = setting
        self.layouts: dict[str, Layout] = {}
        self.recompute: dict[str, Recompute] = {}

    def block_plan(self, call: int, decision: Decision) -> BlockPlan:
        """Return the entry of a call, adding its layout and recompute entry where new."""
        trace_call = self.trace.calls[call]
        block = self.trace.blocks[trace_call.block]
        return BlockPlan(
            call=call,
            fqn=trace_call.fqn,
            block=block.name,
            placements=self._layout_name(trace_call.block, decision),
            recompute=self._recompute_name(block.name, decision.recompute),
        )

    def _layout_name(self, block: int, decision: Decision) -> str:
        name = self.trace.blocks[block].name
        local = self.pricer.base(block, decision, self.setting.tp).local
        states = {s.name: s.fqn for s in self.trace.blocks[block].states}
        entering, leaving = decision.borders
        layout = Layout(
            block=name,
            degree=self.setting.tp,
            axes=dict(decision.axes),
            parameters={states[k]: v for k, v in local.state_placements.items()},
            borders=entering,
            leaving=None if leaving == entering else leaving,
        )
        return _named(self.layouts, f"{name}/tp{self.setting.tp}", layout)

    def _recompute_name(self, block: str, recompute: Recompute) -> str:
        base = recompute.mode if recompute.mode != "selective" else f"{block}/selective"
        return _named(self.recompute, base, recompute)


def _named(table: dict[str, T], base: str, value: T) -> str:
    for name, known in table.items():
        if known == value and name.startswith(base):
            return name
    name = base if base not in table else f"{base}.{sum(n.startswith(base) for n in table)}"
    table[name] = value
    return name
