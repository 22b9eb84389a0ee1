"""The simpler strategies that people try first, priced by the same model as the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.frontiers import Decision
from autoplan.limits import Limits
from autoplan.plan import Recompute, Simpler
from autoplan.plan_prices import plan_price
from autoplan.settings import Setting, settings_of
from autoplan.stage_ends import even_stage_ends, most_stages

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Strategy", "simple_decisions", "simple_strategies"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A simpler strategy, decided and priced."""

    row: Simpler
    setting: Setting
    ends: tuple[int, ...]
    decisions: tuple[Decision, ...]

    def obeys(self, pins: Mapping[str, Any], limits: Limits) -> bool:
        """Return whether the strategy keeps to the pinned and limited settings."""
        own = {k: getattr(self.setting, k) for k in pins if k != "recompute"}
        modes = {d.recompute.mode for d in self.decisions}
        wanted = pins.get("recompute")
        is_mode = wanted is None or modes == {wanted}
        is_pinned = all(pins[key] == value for key, value in own.items())
        return is_mode and is_pinned and limits.allows_setting(self.setting)


def simple_decisions(
    planner: Planner, setting: Setting, recompute: str, *, lean: bool = False
) -> list[Decision]:
    """Return one decision per call: the fastest placements, and one recompute mode for all blocks.

    Glue (embedding, head, loss) is never recomputed by these. With `lean` the placements are those
    that shard most. Shared parameters lie as it takes least time, all blocks together.
    """
    pricer = planner.pricer(setting.microbatch_size)
    conventions = pricer.conventions(setting.tp)
    found = [
        _plain_decisions(pricer, setting.tp, convention, lean)
        for convention in conventions
        if not convention.is_sequence_parallel
    ]
    fastest = found[0]
    if len(found) > 1:
        fastest = min(found, key=lambda plain: _seconds(pricer, setting.tp, plain))
    chosen = []
    for call, decision in zip(pricer.trace.calls, fastest, strict=True):
        is_kept = pricer.trace.blocks[call.block].is_glue or pricer.loses_writes(call.block)
        mode = "none" if is_kept or recompute == "none" else "full"
        chosen.append(replace(decision, recompute=Recompute(mode=mode)))  # type: ignore[arg-type]
    return chosen


def _plain_decisions(pricer: Pricer, tp: int, convention: Convention, lean: bool) -> list[Decision]:
    return [
        pricer.plain_decision(call.block, tp, convention, lean=lean) for call in pricer.trace.calls
    ]


def _seconds(pricer: Pricer, tp: int, decisions: Sequence[Decision]) -> float:
    """Return seconds of all blocks, once through, by themselves."""
    total = 0.0
    for call, decision in zip(pricer.trace.calls, decisions, strict=True):
        work = pricer.base(call.block, decision, tp)
        total += work.forward_s + work.backward_s + work.summed_s
    return total


def simple_strategies(planner: Planner) -> tuple[Strategy, ...]:
    """Return DDP, ZeRO-1 to 3, tensor, pipeline and recompute alone, and even 3-D mixes."""
    world = planner.cluster.world_size
    node = min(world, planner.cluster.gpus_per_node)
    wanted: list[tuple[str, dict[str, int], str, int]] = [
        ("one device", {"dp": 1, "tp": 1, "pp": 1}, "none", 1),
        ("one device, recompute all", {"dp": 1, "tp": 1, "pp": 1}, "full", 1),
    ]
    if world > 1:
        for zero, label in ((0, "DDP"), (1, "ZeRO-1"), (2, "ZeRO-2"), (3, "ZeRO-3")):
            wanted.append((label, {"dp": world, "zero_stage": zero}, "none", world))
        wanted.append(("ZeRO-3, recompute all", {"dp": world, "zero_stage": 3}, "full", world))
        wanted.append(("tensor parallel", {"tp": world}, "none", world))
        wanted.append(("pipeline, even cuts", {"pp": world}, "none", world))
    if world > node > 1:
        mixed = {"tp": node, "zero_stage": 1}
        wanted.append((f"tp {node} and ZeRO-1, recompute all", {**mixed, "pp": 1}, "full", world))
        for pp in (2, 4, 8):
            if world % (node * pp) == 0 and world // (node * pp) >= 1:
                label = f"tp {node}, pp {pp}, even cuts, recompute all"
                wanted.append((label, {**mixed, "pp": pp}, "full", world))
    found = [_best(planner, *item) for item in wanted]
    if planner.workload.offload:
        pins = {"dp": world, "zero_stage": 3}
        for recompute, label in (("none", ""), ("full", ", recompute all")):
            label = f"ZeRO-3, states on the host{label}"
            found.append(_best(planner, label, pins, recompute, world, is_offloaded=True))
    return tuple(s for s in found if s is not None)


def _best(
    planner: Planner,
    name: str,
    pins: dict[str, int],
    recompute: str,
    devices: int,
    *,
    is_offloaded: bool = False,
) -> Strategy | None:
    """Return the strategy at the micro-batch size that suits it best, or None where none can be."""
    num_blocks = most_stages(planner.smallest_trace())
    fixed: dict[str, Any] = {
        k: planner.pins[k] for k in ("microbatch_size", "num_microbatches") if k in planner.pins
    }
    found = []
    options = settings_of(
        planner.cluster, planner.workload, num_blocks, {**pins, **fixed}, devices=devices
    )
    can_run = [s for s in options if s.microbatch_size >= planner.fewest_rows]
    for setting in _few([s for s in can_run if (s.offload != "none") == is_offloaded]):
        strategy = price_strategy(planner, name, setting, recompute)
        found.append(strategy)
    if not found:
        return None
    return min(
        found,
        key=lambda s: (
            not s.row.fits,
            s.row.step_time_s if s.row.fits else s.row.peak_memory_bytes,
        ),
    )


def _few(settings: Sequence[Setting]) -> list[Setting]:
    """Return at most the settings with micro-batches up to 4 rows, or the smallest there is."""
    small = [s for s in settings if s.microbatch_size <= 4]
    return small or sorted(settings, key=lambda s: s.microbatch_size)[:1]


def price_strategy(planner: Planner, name: str, setting: Setting, recompute: str) -> Strategy:
    """Return a strategy priced exactly."""
    pricer = planner.pricer(setting.microbatch_size)
    ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
    decisions = simple_decisions(planner, setting, recompute, lean=setting.tp > 1)
    price = plan_price(pricer, setting, ends, decisions)
    row = Simpler(
        name=name,
        fits=all(
            memory.peak <= pricer.on_stage(setting, stage).cluster.total_bytes
            for stage, memory in enumerate(price.memory)
        ),
        peak_memory_bytes=price.peak_memory_bytes,
        step_time_s=price.step_time_s,
        note=f"micro-batches of {setting.microbatch_size}",
    )
    return Strategy(row=row, setting=setting, ends=ends, decisions=tuple(decisions))
