"""Plans side by side: what each decides, and what it is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoplan.plan import Plan
from autoplan.report import table
from autoplan.units import format_bytes, format_seconds

__all__ = ["side_by_side"]


def side_by_side(plans: Mapping[str, Plan]) -> str:
    """Return plans as a table, one column each; all times and bytes are predictions.

    Args:
        plans: by the name that heads its column.

    Raises:
        ValueError: there is none.
    """
    if not plans:
        raise ValueError("no plan to compare: name at least one file")
    rows = [("", *plans)]
    listed = list(plans.values())
    for title, fact in _FACTS.items():
        rows.append((title, *map(fact, listed)))
    first = listed[0].predicted.step_time_s
    rows.append(
        ("of the first's step time", *(f"{p.predicted.step_time_s / first:.3f}" for p in listed))
    )
    rows += _parts("time: {}", [p.predicted.time_by_category for p in listed], format_seconds)
    rows += _parts("peak: {}", [_fullest(p) for p in listed], format_bytes)
    return table(rows)


def _recompute(plan: Plan) -> str:
    """Return how many blocks recompute in which way."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        for block in stage.blocks:
            mode = plan.recompute[block.recompute].mode
            counts[mode] = counts.get(mode, 0) + bool(block.fqn)
    return ", ".join(f"{count} {mode}" for mode, count in counts.items() if count)


def _fullest(plan: Plan) -> Mapping[str, int]:
    """Return bytes by category on the rank of the pipeline with the highest peak."""
    peaks = plan.predicted.peak_memory_bytes
    return plan.predicted.memory_by_category[peaks.index(max(peaks))]


def _parts(
    title: str, parts: Sequence[Mapping[str, Any]], text: Callable[[Any], str]
) -> list[tuple[str, ...]]:
    found: dict[str, None] = {}
    for own in parts:
        found |= dict.fromkeys(key for key, number in own.items() if number)
    return [
        (title.format(name), *(text(own[name]) if own.get(name) else "-" for own in parts))
        for name in found
    ]


def _proof(plan: Plan) -> str:
    return plan.search.status + (f", gap {plan.search.gap:.2%}" if plan.search.gap else "")


_FACTS: Mapping[str, Callable[[Plan], str]] = {
    "model": lambda p: p.model,
    "cluster": lambda p: p.provenance.get("cluster", "unknown"),
    "profile": lambda p: p.provenance.get("profile", "unknown"),
    "mesh": lambda p: str(p.mesh),
    "ZeRO stage": lambda p: str(p.zero_stage),
    "schedule": lambda p: p.schedule,
    "micro-batches": lambda p: f"{p.num_microbatches} of {p.microbatch_size}",
    "blocks recomputed": _recompute,
    "search": _proof,
    "peak": lambda p: format_bytes(max(p.predicted.peak_memory_bytes)),
    "of": lambda p: format_bytes(p.predicted.capacity_bytes),
    "rows a second": lambda p: f"{p.global_batch_size / p.predicted.step_time_s:.4g}",
    "step time": lambda p: format_seconds(p.predicted.step_time_s),
}
