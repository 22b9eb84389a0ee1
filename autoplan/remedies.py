"""Why nothing fits: need, capacity, the category that dominates, and the smallest changes found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan.frontiers import Decision
from autoplan.memory import StageMemory
from autoplan.search.mesh import MeshResult
from autoplan.settings import Setting
from autoplan.simple import even_ends
from autoplan.units import format_bytes

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Least", "explain_infeasible", "least_memory"]

_MORE_DEVICES = (2, 4, 8)


class Least:
    """The least memory found over settings, with the setting and the stage that needs it."""

    def __init__(self, setting: Setting, stage: StageMemory) -> None:
        self.setting = setting
        self.stage = stage


def least_memory(planner: Planner) -> Least:
    """Return the setting whose fullest stage needs least, at the least of its frontiers.

    Only the extremes that save memory are tried: each setting with the smallest micro-batch, with
    every block at its leanest decision and even cuts.
    """
    settings = planner.settings()
    smallest = min(s.microbatch_size for s in settings)
    best: Least | None = None
    for setting in settings:
        if setting.microbatch_size != smallest or setting.zero_stage not in (0, 3):
            continue
        pricer = planner.pricer(setting.microbatch_size)
        decisions = [_leanest(planner, call, setting) for call in range(len(pricer.trace.calls))]
        ends = even_ends(len(decisions), setting.pp)
        price = pricer.plan_price(setting, ends, decisions)
        fullest = max(price.memory, key=lambda stage: stage.peak)
        if best is None or fullest.peak < best.stage.peak:
            best = Least(setting, fullest)
    assert best is not None, "settings() is never empty"
    return best


def _leanest(planner: Planner, call: int, setting: Setting) -> Decision:
    pricer = planner.pricer(setting.microbatch_size)
    decisions = pricer.decisions(pricer.trace.calls[call].block, setting.tp)
    return min(
        decisions,
        key=lambda d: sum(
            getattr(pricer.option(call, d, setting, 1), name)
            for name in ("kept", "static", "working")
        ),
    )


def explain_infeasible(planner: Planner, result: MeshResult) -> str:
    """Return the message of an `InfeasibleError`: need, capacity, category, and a remedy found."""
    least = least_memory(planner)
    capacity = planner.cluster.total_bytes
    category, amount = max(least.stage.by_category.items(), key=lambda item: item[1])
    need = least.stage.peak
    lines = [
        f"no plan fits: the leanest setting tried ({least.setting}) needs {format_bytes(need)} on "
        f"a device at the {least.stage.instant}, but {planner.cluster} leaves "
        f"{format_bytes(capacity)} ({format_bytes(need - capacity)} too little); the largest part "
        f"is {category} with {format_bytes(amount)}",
    ]
    lines += [f"remedy: {remedy}" for remedy in _remedies(planner, need)]
    return "\n".join(lines)


def _remedies(planner: Planner, need: int) -> list[str]:
    """Return changes that were each planned for and fit, the smallest of their kind."""
    found = [f"device memory of about {format_bytes(need * 1.02)} (same devices, leanest setting)"]
    if planner.pins:
        free = _variant(planner, pins={})
        if _fits(free):
            pins = ", ".join(f"{k}={v}" for k, v in planner.pins.items())
            found.append(f"unpin {pins}: a plan then fits on the same devices")
    for factor in _MORE_DEVICES:
        cluster = replace(planner.cluster, num_nodes=planner.cluster.num_nodes * factor)
        if planner.workload.global_batch_size % factor and not planner.pins:
            continue
        try:
            fits = _fits(_variant(planner, cluster=cluster))
        except ValueError:
            continue
        if fits:
            found.append(f"{cluster.world_size} devices ({cluster}): a plan then fits")
            break
    return found


def _fits(planner: Planner) -> bool:
    return least_memory(planner).stage.peak <= planner.cluster.total_bytes


def _variant(planner: Planner, **changes: object) -> Planner:
    return replace(planner, _pricers={}, _ops_bounds={}, **changes)  # type: ignore[arg-type]
