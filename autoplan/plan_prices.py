"""The exact price of a decided plan: seconds of its pipeline and bytes of each rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoplan.border_seconds import actions_s, sent_s
from autoplan.costs import Pricer
from autoplan.deferral import stage_backward
from autoplan.frontiers import Decision
from autoplan.memory import StageMemory
from autoplan.settings import Setting
from autoplan.split_steps import saved_by_block, steps_with_split
from autoplan.stage_bytes import rank_memory
from autoplan.step_costs import pipeline_step_s

__all__ = [
    "PlanPrice",
    "StageSeconds",
    "plan_lookups",
    "plan_price",
    "stage_seconds",
    "step_seconds",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPrice:
    """A fully decided plan: its step time, and time and memory of each rank of the pipeline."""

    step_time_s: float
    stage_time_s: tuple[float, ...]
    time_by_category: dict[str, float]
    memory: tuple[StageMemory, ...]

    @property
    def peak_memory_bytes(self) -> int:
        """Return the largest peak over stages."""
        return max(stage.peak for stage in self.memory)


def plan_price(
    pricer: Pricer, setting: Setting, ends: Sequence[int], decisions: Sequence[Decision]
) -> PlanPrice:
    """Return the exact price of a decided plan.

    Args:
        setting: degrees and sizes.
        ends: per stage the index after its last call; stage s is on rank s % pp.
        decisions: one per call.

    Returns:
        Step time: that of the pipeline and the slowest once-a-step part.
    """
    spans = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]
    memories = []
    stages = [stage_seconds(pricer, setting, s, spans, decisions) for s in range(len(spans))]
    rank_s, once = _rank_seconds(stages, setting)
    totals: dict[str, float] = dict.fromkeys(
        ("compute", "recompute", "tensor_parallel", "zero", "optimizer", "pipeline"), 0.0
    )
    m = setting.num_microbatches
    slowest: tuple[float, dict[str, float]] = (-1.0, {})
    for rank, seconds in enumerate(rank_s):
        device = pricer.on_stage(setting, rank)
        own = range(rank, len(spans), setting.pp)
        if seconds > slowest[0]:
            prices = [device.price(c, decisions[c], setting) for s in own for c in spans[s]]
            by_category = _summed(p.by_category for p in prices)
            border_s = sum(stages[stage].border_s for stage in own)
            slowest = (seconds, {**by_category, "pipeline": border_s})
        memories.append(rank_memory(device, setting, rank, spans, decisions))
    pipeline_s = _pipeline_s(rank_s, stages, setting)
    step = pipeline_s + max(once)
    for name, seconds in slowest[1].items():
        totals[name] = totals.get(name, 0.0) + m * seconds
    totals["pipeline"] += pipeline_s - m * max(rank_s)
    index = once.index(max(once))
    last = pricer.on_stage(setting, index)
    parts = _summed(
        last.price(c, decisions[c], setting).once_by_category
        for s in range(index, len(spans), setting.pp)
        for c in spans[s]
    )
    for name, seconds in parts.items():
        totals[name] += seconds
    return PlanPrice(
        step_time_s=step,
        stage_time_s=tuple(rank_s),
        time_by_category=totals,
        memory=tuple(memories),
    )


def plan_lookups(
    pricer: Pricer, setting: Setting, ends: Sequence[int], decisions: Sequence[Decision]
) -> dict[str, int]:
    """Return how the times of the kernels of one micro-batch were found, and of how many each.

    Every call of every op counts, forward and backward by their kernels; an op that was measured
    itself counts once for each. Views, collectives and what is recomputed are left out.
    """
    counts: Counter[str] = Counter()
    stages = zip((0, *ends), ends, strict=False)
    calls = ((stage, call) for stage, (a, b) in enumerate(stages) for call in range(a, b))
    found: dict[tuple[object, ...], Counter[str]] = {}
    for stage, call in calls:
        own = pricer.on_stage(setting, stage % setting.pp)
        block, decision = pricer.trace.calls[call].block, decisions[call]
        key = (own.cluster.device.name, block, decision.key)
        if key not in found:
            found[key] = own.lookups(block, decision, setting.tp)
        counts += found[key]
    return dict(sorted(counts.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one micro-batch on a stage, and of what it does once a step.

    Attributes:
        forward_s, backward_s: of its blocks.
        once_s: of its blocks, once a step.
        border_s: of transfers and of the host at its borders.
        weights_s: of the backward, what a split leaves for later.
        saved_s: sum over its blocks of `split_steps.saved_by_block`.
    """

    forward_s: float
    backward_s: float
    once_s: float
    border_s: float
    weights_s: float
    saved_s: float

    @property
    def total_s(self) -> float:
        """Return forward, backward and borders."""
        return self.forward_s + self.backward_s + self.border_s


def stage_seconds(
    pricer: Pricer,
    setting: Setting,
    stage: int,
    spans: Sequence[range],
    decisions: Sequence[Decision],
) -> StageSeconds:
    """Return the seconds of a stage; `spans` are the calls of every stage, `decisions` of each."""
    device, calls = pricer.on_stage(setting, stage % setting.pp), spans[stage]
    prices = [device.price(c, decisions[c], setting) for c in calls]
    weights = [0.0] * len(calls)
    if setting.schedule == "zero_bubble" and stage_backward(pricer.trace, calls) != "whole":
        blocks = (device.base(pricer.trace.calls[c].block, decisions[c], setting.tp) for c in calls)
        weights = [device.deferred_s(block, setting) for block in blocks]
    return StageSeconds(
        forward_s=sum(p.forward_s for p in prices),
        backward_s=sum(p.backward_s for p in prices),
        once_s=sum(p.once_s for p in prices),
        border_s=_stage_transfer_s(pricer, setting, stage, spans, decisions),
        weights_s=sum(weights),
        saved_s=sum(
            saved_by_block(p.forward_s, p.backward_s - w, w)
            for p, w in zip(prices, weights, strict=True)
        ),
    )


def step_seconds(stages: Sequence[StageSeconds], setting: Setting) -> float:
    """Return the seconds of a step: that of the pipeline and the slowest once-a-step part."""
    rank_s, once = _rank_seconds(stages, setting)
    return _pipeline_s(rank_s, stages, setting) + max(once)


def _rank_seconds(
    stages: Sequence[StageSeconds], setting: Setting
) -> tuple[list[float], list[float]]:
    """Return the seconds of each rank: of a micro-batch, and once a step."""
    ranks = [stages[rank :: setting.pp] for rank in range(setting.pp)]
    once = [sum(stage.once_s for stage in own) for own in ranks]
    return [sum(stage.total_s for stage in own) for own in ranks], once


def _pipeline_s(rank_s: Sequence[float], stages: Sequence[StageSeconds], setting: Setting) -> float:
    """Return the seconds of all forwards and backwards; borders are half of either."""
    by_stage = [stage.total_s for stage in stages] if setting.virtual_stages > 1 else ()
    whole_s = pipeline_step_s(rank_s, setting, by_stage)
    if setting.schedule != "zero_bubble":
        return whole_s
    return float(
        steps_with_split(
            whole_s,
            setting,
            [stage.forward_s + stage.border_s / 2 for stage in stages],
            [stage.backward_s + stage.border_s / 2 - stage.weights_s for stage in stages],
            [stage.weights_s for stage in stages],
            sum(stage.saved_s for stage in stages),
        )
    )


def _stage_transfer_s(
    pricer: Pricer,
    setting: Setting,
    stage: int,
    spans: Sequence[range],
    decisions: Sequence[Decision],
) -> float:
    """Return seconds of one micro-batch at the borders of a stage: transfers and the host."""
    is_sliced = decisions[spans[stage][0]].is_sequence_parallel
    seconds = 0.0
    if stage > 0:
        seconds += sent_s(pricer, setting, spans[stage][0], stage - 1, is_sliced)
    if stage < len(spans) - 1:
        seconds += sent_s(pricer, setting, spans[stage + 1][0], stage, is_sliced)
    return seconds + actions_s(pricer, setting)


def _summed(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
