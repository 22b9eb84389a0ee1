"""Price a fully given configuration, whether or not it would be chosen or fits."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.configurations import (
    RecomputeRule,
    check_choices,
    check_experts,
    experts_of,
    placed,
    recompute_rules,
    ruled_decisions,
    setting_of,
    stage_ends_of,
    with_recompute,
)
from autoplan.context_batches import check_context, token_slices
from autoplan.engines import AUTOPLAN, Engine, engine_named
from autoplan.errors import PlanError
from autoplan.expert_parallel import divided
from autoplan.graph import Trace
from autoplan.meshes import AxisOrder
from autoplan.plan import Plan, SearchRecord
from autoplan.plan_prices import PlanPrice, plan_price
from autoplan.planner import Planner, make_planner
from autoplan.replay import Reserved
from autoplan.reserved import reserved_memory
from autoplan.schedules import unrunnable_split
from autoplan.shared_writes import lost_under
from autoplan.simple import simple_decisions
from autoplan.stage_ends import is_runnable
from autoplan.training_job import TrainingJob
from autoplan.units import format_bytes

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The price of a configuration.

    Attributes:
        step_time_s: predicted seconds of one optimizer step.
        peak_memory_bytes: per stage.
        memory_by_category: per stage, at the instant of its peak.
        time_by_category: seconds of a step by category.
        capacity_bytes: what a device may use.
        fits: every stage is within it; where an allocator was asked for, also what it wastes.
        reserved_memory_bytes: per stage, what the caching allocator of torch holds at most for the
            tensors, context and communicators excluded; None where no allocator was asked for.
        context_parallel: ranks over which every sequence lies.
        written: the plan, or None where autoplan prices the configuration but does not emit it.
    """

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    memory_by_category: tuple[dict[str, int], ...]
    time_by_category: dict[str, float]
    capacity_bytes: int
    fits: bool
    written: Plan | None
    reserved_memory_bytes: tuple[int, ...] | None = None
    context_parallel: int = 1

    @property
    def plan(self) -> Plan:
        """Return the configuration as a plan with status `priced`; it can be saved and run.

        Raises:
            PlanError: autoplan prices this configuration but does not emit it.
        """
        if self.written is None:
            raise PlanError(
                "this configuration is priced only, it has no plan that could be run: leave out "
                "engine, tensor_layout, expert_parallel, context_parallel, product_dtype, "
                "is_compiled, traces, recompute='attention' and zero_bubble with FSDP or "
                "recompute, and give every stage a block with parameters"
            )
        return self.written

    @property
    def margin_bytes(self) -> int:
        """Return the bytes left on the fullest device; negative: what is too much."""
        return self.capacity_bytes - max(self.peak_memory_bytes)

    def __str__(self) -> str:
        word = "fits" if self.fits else "does not fit"
        context = f" with context_parallel={self.context_parallel}"
        return (
            f"{word}{context * (self.context_parallel > 1)}: {self.step_time_s:.4g} s a step, peak "
            f"{format_bytes(max(self.peak_memory_bytes))} of {format_bytes(self.capacity_bytes)} "
            f"({format_bytes(self.margin_bytes)} left)"
        )


def estimate(
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
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int = 0,
    microbatch_size: int = 1,
    recompute: str | RecomputeRule | Sequence[str] = "none",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    dp_replicate: int = 1,
    axis_order: AxisOrder = "tp-dp-pp",
    stage_ends: Sequence[int] | Literal["blocks"] | None = None,
    tensor_layout: str = "fastest",
    sequence_parallel: bool = False,
    expert_parallel: int = 1,
    expert_tensor_parallel: int | None = None,
    engine: str | Engine = "autoplan",
    product_dtype: str | None = None,
    is_compiled: bool = False,
    attention_kernel: str = "",
    offload: Literal["none", "optimizer"] = "none",
    context_parallel: int = 1,
    allocator: Literal["segments", "expandable"] | None = None,
    traces: MutableMapping[int, Trace] | None = None,
) -> Estimate:
    """Return what a given configuration takes and needs.

    Args:
        model, cluster, batch, batch_dim, global_batch_size, optimizer, loss_fn, mixed_precision,
            autocast, name: as in `autoplan.optimize`.
        dp, tp, pp: degrees; dp defaults to what the cluster leaves.
        zero_stage: 0 to 3; without data parallelism nothing is sharded.
        microbatch_size: rows.
        recompute: `none`; `full` for every block; `attention`: its core alone runs again; a
            function that says for a block what it keeps; or several of these words, which the
            repeated blocks take in turn, as `("full", "none")` for every second block.
        schedule: `1f1b`, `gpipe`, `interleaved` or `zero_bubble`, where pp > 1.
        virtual_stages: stages of each rank; above 1 makes `1f1b` interleaved.
        dp_replicate, axis_order: replicas of what ZeRO shards, and how ranks are numbered; see
            `autoplan.plan.Mesh`.
        stage_ends: per stage, pp * virtual_stages of them, the index after its last block of the
            chain; `blocks`: repeated blocks
            in equal numbers, what comes before on the first stage and after on the last; default:
            equal counts of everything.
        tensor_layout: `fastest`: placements of a search; `megatron`: columns, then rows.
        sequence_parallel: activations between products are slices of tokens (layout `megatron`).
        expert_parallel: ranks of a stage that hold different experts of the model, which is given
            whole: parameters of three dimensions that products read with a matrix per expert. Rows
            are exchanged before and after experts; routing counts as balanced. For the
            engines of Megatron-LM and ZeRO 0 or 1; see `autoplan.expert_parallel`.
        expert_tensor_parallel: ranks that share the matrices of an expert, 1 or tp; None: tp.
        engine: the software that trains: a name in `autoplan.engines.ENGINES`, or an `Engine`.
        product_dtype: `float8`: linear layers of blocks multiply in it; None: the model's dtype.
        is_compiled: memory-bound ops of a block that hand their results on run as one kernel.
        attention_kernel: implementation of fused attention as the profile's tables name it, such as
            `flash1`; empty: the profile's default.
        offload: `optimizer`: shards of parameters, gradients and optimizer state lie in host
            memory; with zero_stage=3 only.
        context_parallel: ranks over which every sequence lies, next to those of tp: the devices are
            dp * tp * pp * context_parallel, and ZeRO shards over, and gradients are summed over,
            dp * context_parallel ranks. It divides the tokens along the dimension of the batch
            after `batch_dim`, twice under a causal mask; only attention may mix them. The
            exchange of keys is the engine's (`autoplan.context_parallel`). No search chooses it.
        allocator: also predict what torch's caching allocator reserves: with `segments` of fixed
            size (its default), or `expandable` ones (`expandable_segments:True`).
        traces: filled with the traces by micro-batch size; give the same mapping again for the
            same model, batch and context_parallel to save the tracing.

    Raises:
        ValueError: a number is impossible; says which would do.
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
        offload=() if offload == "none" else offload,
    )
    if context_parallel > 1:
        job = replace(job, batch=_own_tokens(job, context_parallel, axis_order))
    planner = make_planner(job, pins={"microbatch_size": microbatch_size})
    check_choices(recompute, zero_stage, tensor_layout, sequence_parallel, product_dtype, tp)
    if allocator not in (None, "segments", "expandable"):
        raise ValueError(f"allocator={allocator!r}; allowed are segments, expandable and None")
    _set_engine(planner, engine_named(engine), zero_stage)
    planner.workload = replace(
        planner.workload,
        product_dtype=product_dtype,
        is_compiled=is_compiled,
        attention_kernel=attention_kernel,
        context_parallel=context_parallel,
    )
    if traces is not None:
        planner.traces.captured = traces
    setting = setting_of(
        planner.cluster.world_size,
        planner.workload.global_batch_size,
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=zero_stage,
        microbatch_size=microbatch_size,
        schedule=schedule,
        virtual_stages=virtual_stages,
        is_own=not planner.workload.engine.has_gradient_buffer,
        offload=offload,
        context=context_parallel,
    )
    setting = placed(setting, dp_replicate, axis_order)
    experts = experts_of(
        expert_parallel,
        expert_tensor_parallel,
        setting,
        planner.workload.engine,
        is_sequence_parallel=sequence_parallel,
        context=context_parallel,
    )
    planner.workload = replace(planner.workload, experts=experts)
    clusters = [planner.cluster.on_stage(setting, stage) for stage in range(pp)]
    totals = tuple(cluster.total_bytes for cluster in clusters)
    whole = planner.trace(microbatch_size)
    if context_parallel > 1:
        check_context(whole, context_parallel)
    trace = divided(whole, experts, tp)
    ends = stage_ends_of(trace, stage_ends, pp, virtual_stages)
    is_ruled = tensor_layout == "megatron" and tp > 1
    if is_ruled:
        decisions = ruled_decisions(trace, setting, sequence_parallel)
        if experts.degree > 1:
            check_experts(trace, decisions, experts)
    else:
        decisions = simple_decisions(planner, setting, "none")
    rules = recompute_rules(trace, recompute)
    decisions = [
        with_recompute(trace.blocks[call.block], decision, rule)
        for call, decision, rule in zip(trace.calls, decisions, rules, strict=True)
    ]
    is_mixed = planner.workload.mixed_precision != "none"
    unrunnable = unrunnable_split(
        setting.schedule,
        setting.zero_stage,
        is_mixed=is_mixed,
        recomputes=any(d.recompute.mode != "none" for d in decisions),
    )
    modes = {call: decision.recompute.mode for call, decision in enumerate(decisions)}
    lost = lost_under(trace.lost_writes, modes, pp=pp, zero_stage=zero_stage, is_mixed=is_mixed)
    is_emitted = (
        planner.workload.engine == AUTOPLAN
        and unrunnable is None
        and not any(lost)
        and not is_ruled
        and "attention" not in rules
        and product_dtype is None
        and not is_compiled
        and context_parallel == 1
        and (pp == 1 or is_runnable(trace, ends))
    )
    pricer = planner.pricer(microbatch_size).of(trace)
    reserved: tuple[Reserved, ...] = ()
    if allocator is not None:
        reserved = reserved_memory(
            pricer, setting, ends, decisions, is_expandable=allocator == "expandable"
        )
    if not is_emitted or traces is not None:
        price = plan_price(pricer, setting, ends, decisions)
        return _priced(price, totals, reserved, context_parallel)
    record = SearchRecord(status="priced", objective_s=0.0, bound_s=0.0, gap=0.0, wall_time_s=0.0)
    plan = planner.write(setting, ends, decisions, record)
    predicted = plan.predicted
    return Estimate(
        step_time_s=predicted.step_time_s,
        peak_memory_bytes=predicted.peak_memory_bytes,
        memory_by_category=predicted.memory_by_category,
        time_by_category=predicted.time_by_category,
        capacity_bytes=predicted.capacity_bytes,
        fits=_fits(predicted.peak_memory_bytes, totals) and all(s.fits for s in reserved),
        written=plan,
        reserved_memory_bytes=tuple(stage.reserved for stage in reserved) or None,
    )


def _own_tokens(job: TrainingJob, context_parallel: int, axis_order: AxisOrder) -> Any:
    """Return a batch with the tokens that one rank of context parallelism has."""
    if axis_order != "tp-dp-pp":
        raise ValueError(
            f"context_parallel={context_parallel} with axis_order={axis_order!r}: its ranks lie "
            "next to those of tp and count as data-parallel ones: use 'tp-dp-pp'"
        )
    return token_slices(job.example(), context_parallel, job.batch_dim)


def _set_engine(planner: Planner, engine: Engine, zero_stage: int) -> None:
    if engine.has_gradient_buffer and zero_stage > 1:
        raise ValueError(
            f"engine {engine.name} holds whole gradients, so zero_stage={zero_stage} is not "
            "possible with it: use 0 or 1"
        )
    workload = replace(planner.workload, engine=engine)
    if engine.is_foreach is not None:
        optimizer = replace(workload.optimizer, is_foreach=engine.is_foreach)
        workload = replace(workload, optimizer=optimizer)
    planner.workload = workload


def _fits(peaks: Sequence[int], totals: Sequence[int]) -> bool:
    return all(peak <= total for peak, total in zip(peaks, totals, strict=True))


def _priced(
    price: PlanPrice, totals: tuple[int, ...], reserved: tuple[Reserved, ...], context_parallel: int
) -> Estimate:
    peaks = tuple(stage.peak for stage in price.memory)
    return Estimate(
        step_time_s=price.step_time_s,
        peak_memory_bytes=peaks,
        memory_by_category=tuple(stage.by_category for stage in price.memory),
        time_by_category=price.time_by_category,
        capacity_bytes=min(totals),
        fits=_fits(peaks, totals) and all(stage.fits for stage in reserved),
        written=None,
        reserved_memory_bytes=tuple(stage.reserved for stage in reserved) or None,
        context_parallel=context_parallel,
    )
