"""Price a fully given configuration, whether or not it would be chosen or fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.capturer import LossFn
from autoplan.cluster import Cluster
from autoplan.plan import Plan, SearchRecord
from autoplan.planner import make_planner
from autoplan.settings import Setting
from autoplan.simple import even_ends, simple_decisions
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
        fits: every stage is within it.
        plan: the configuration as a plan with status `priced`; it can be saved and run.
    """

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    memory_by_category: tuple[dict[str, int], ...]
    time_by_category: dict[str, float]
    capacity_bytes: int
    fits: bool
    plan: Plan

    @property
    def margin_bytes(self) -> int:
        """Return the bytes left on the fullest device; negative: what is too much."""
        return self.capacity_bytes - max(self.peak_memory_bytes)

    def __str__(self) -> str:
        word = "fits" if self.fits else "does not fit"
        return (
            f"{word}: {self.step_time_s:.4g} s a step, peak "
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
    optimizer: Any = "AdamW",
    loss_fn: LossFn | None = None,
    mixed_precision: str = "auto",
    autocast: torch.dtype | None = None,
    name: str | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int = 0,
    microbatch_size: int = 1,
    recompute: str = "none",
    schedule: str = "1f1b",
    stage_ends: Sequence[int] | None = None,
) -> Estimate:
    """Return what a given configuration takes and needs.

    Args:
        model, cluster, batch, batch_dim, global_batch_size, optimizer, loss_fn, mixed_precision,
            autocast, name: as in `autoplan.optimize`.
        dp, tp, pp: degrees; dp defaults to what the cluster leaves.
        zero_stage: 0 to 3; without data parallelism nothing is sharded.
        microbatch_size: rows.
        recompute: `none`, or `full` for every block.
        schedule: `1f1b` or `gpipe`, where pp > 1.
        stage_ends: per stage the index after its last block of the chain; default: equal counts.

    Raises:
        ValueError: a number is impossible; says which would do.
    """
    planner = make_planner(
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
        pins={"microbatch_size": microbatch_size},
    )
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute={recompute!r}; estimate takes none or full")
    if zero_stage not in (0, 1, 2, 3):
        raise ValueError(f"zero_stage={zero_stage}; allowed are 0, 1, 2, 3")
    setting = _setting(
        planner.cluster.world_size,
        planner.workload.global_batch_size,
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=zero_stage,
        microbatch_size=microbatch_size,
        schedule=schedule,
    )
    num_calls = len(planner.trace(microbatch_size).calls)
    if pp > num_calls:
        raise ValueError(f"pp={pp} stages for a chain of {num_calls} blocks: lower pp")
    ends = tuple(stage_ends) if stage_ends is not None else even_ends(num_calls, pp)
    is_rising = all(a < b for a, b in zip((0, *ends), ends, strict=False))
    if len(ends) != pp or ends[-1] != num_calls or not is_rising:
        raise ValueError(
            f"stage_ends {ends}: needs {pp} rising numbers above 0, the last {num_calls} (blocks)"
        )
    decisions = simple_decisions(planner, setting, recompute)
    record = SearchRecord(status="priced", objective_s=0.0, bound_s=0.0, gap=0.0, wall_time_s=0.0)
    plan = planner.write(setting, ends, decisions, record)
    predicted = plan.predicted
    return Estimate(
        step_time_s=predicted.step_time_s,
        peak_memory_bytes=predicted.peak_memory_bytes,
        memory_by_category=predicted.memory_by_category,
        time_by_category=predicted.time_by_category,
        capacity_bytes=predicted.capacity_bytes,
        fits=max(predicted.peak_memory_bytes) <= predicted.capacity_bytes,
        plan=plan,
    )


def _setting(
    world: int,
    batch: int,
    *,
    dp: int | None,
    tp: int,
    pp: int,
    zero_stage: int,
    microbatch_size: int,
    schedule: str,
) -> Setting:
    for label, value in (("tp", tp), ("pp", pp), ("microbatch_size", microbatch_size)):
        if value < 1:
            raise ValueError(f"{label}={value}: must be at least 1")
    dp = dp if dp is not None else world // (tp * pp)
    if dp < 1 or dp * tp * pp != world:
        raise ValueError(f"dp={dp} * tp={tp} * pp={pp} is not the {world} devices of the cluster")
    if batch % (dp * microbatch_size):
        raise ValueError(
            f"global batch {batch} does not divide into dp={dp} times micro-batches of "
            f"{microbatch_size}: use a multiple of {dp * microbatch_size}"
        )
    m = batch // (dp * microbatch_size)
    if schedule not in ("1f1b", "gpipe"):
        raise ValueError(f"schedule={schedule!r}; allowed are 1f1b and gpipe")
    if pp > 1 and schedule == "1f1b" and m < pp:
        raise ValueError(
            f"1F1B with pp={pp} needs at least {pp} micro-batches, the batch gives {m}: lower "
            "microbatch_size or pp, or use schedule='gpipe'"
        )
    return Setting(
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=zero_stage if dp > 1 else 0,
        microbatch_size=microbatch_size,
        num_microbatches=m,
        schedule="none" if pp == 1 else schedule,  # type: ignore[arg-type]
    )
