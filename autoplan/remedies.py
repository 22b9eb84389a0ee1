"""Why nothing fits: need, capacity, the category that dominates, and the smallest changes found.

Every remedy names a change under which a complete plan was priced by the exact memory model and
fits; `optimize` falls back to that plan, so what is printed here can be followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autoplan.bounds import most_bytes, static_need, unrunnable_reason
from autoplan.cluster import Cluster
from autoplan.conventions import Convention
from autoplan.costs import Pricer
from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.frontiers import Decision
from autoplan.limits import constraint_texts, kept_constraints
from autoplan.memory import StageMemory
from autoplan.profiles.catalog import list_profiles, load_profile
from autoplan.search_options import alike, block_option
from autoplan.settings import OFFLOADS, Setting
from autoplan.stage_bytes import rank_memory
from autoplan.stage_ends import even_stage_ends, is_runnable
from autoplan.units import format_bytes, format_bytes_up

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Least", "find_remedies", "infeasible_error", "least_memory"]

_FACTORS = (2, 4, 8, 16)
_MAX_GPUS_PER_NODE = 8
_DEVICES, _HOST = "devices", "host"  # constraints that nobody has to state


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The decided plan of least memory that was found.

    Attributes:
        setting, ends, decisions: the plan.
        stage: memory of the stage that is fullest for its device.
        capacity_bytes: of that device.
    """

    setting: Setting
    ends: tuple[int, ...]
    decisions: tuple[Decision, ...]
    stage: StageMemory
    capacity_bytes: int

    @property
    def excess_bytes(self) -> int:
        """Return the bytes by which the device is too small."""
        return self.stage.peak - self.capacity_bytes

    @property
    def need_bytes(self) -> int:
        """Return the bytes that a device must have."""
        return self.stage.peak


def least_memory(planner: Planner) -> Least:
    """Return the plan whose fullest stage needs least among those that save memory.

    Tried are the settings with the smallest micro-batch and with most or no sharding of states,
    every block at its leanest decision, and cuts that are moved towards the fullest stage.
    """
    best = _least_within(planner, is_any_enough=False)
    assert best is not None, "settings() is never empty"
    return best


def _least_within(planner: Planner, *, is_any_enough: bool) -> Least | None:
    """Return the plan of least memory; if any is enough, the first that fits.

    None: no setting could fit, since parameters and optimizer states alone do not.
    """
    every = planner.settings()
    runnable = [s for s in every if unrunnable_reason(planner, s) is None]
    settings = runnable or every
    # Stages beside a rank's first only add to what it holds.
    settings = [s for s in settings if s.virtual_stages == 1] or settings
    smallest = min(s.microbatch_size for s in settings)
    best: Least | None = None
    stages = (0, 3) if "zero_stage" not in planner.pins else (0, 1, 2, 3)
    for setting in settings:
        if setting.microbatch_size != smallest or setting.zero_stage not in stages:
            continue
        if runnable:
            excess = static_need(planner, setting) - most_bytes(planner, setting)
            if (is_any_enough and excess > 0) or (best is not None and excess > best.excess_bytes):
                continue
        found = _least_of(planner, setting)
        if best is None or found.excess_bytes < best.excess_bytes:
            best = found
        if is_any_enough and best.excess_bytes <= 0:
            break
    return best


def _least_of(planner: Planner, setting: Setting) -> Least:
    pricer = planner.pricer(setting.microbatch_size)
    ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
    found = []
    for convention in pricer.conventions(setting.tp):
        decisions = _leanest(pricer, setting, convention)
        found.append(
            [_stage_of(pricer, setting, ends, decisions, rank) for rank in range(setting.pp)]
        )
    stages = min(found, key=lambda stages: max(stage.excess_bytes for stage in stages))
    if setting.virtual_stages == 1:
        stages = _levelled(pricer, setting, stages)
    return max(stages, key=lambda stage: stage.excess_bytes)


def _levelled(pricer: Pricer, setting: Setting, stages: list[Least]) -> list[Least]:
    """Return the stages after the fullest gave blocks to its neighbours while that helps."""
    decisions = stages[0].decisions
    for _ in range(len(decisions)):
        excess = [stage.excess_bytes for stage in stages]
        fullest, ends = excess.index(max(excess)), stages[0].ends
        ways = []
        for cut, step in ((fullest - 1, 1), (fullest, -1)):
            if not 0 <= cut < len(ends) - 1:
                continue
            moved = (*ends[:cut], ends[cut] + step, *ends[cut + 1 :])
            is_cut = all(start < end for start, end in pairwise((0, *moved)))
            if is_cut and is_runnable(pricer.trace, moved):
                own = [replace(stage, ends=moved) for stage in stages]
                for rank in (cut, cut + 1):
                    own[rank] = _stage_of(pricer, setting, moved, decisions, rank)
                ways.append(own)
        best = min(ways, key=lambda own: max(s.excess_bytes for s in own), default=stages)
        if max(stage.excess_bytes for stage in best) >= max(excess):
            break
        stages = best
    return stages


def _stage_of(
    pricer: Pricer,
    setting: Setting,
    ends: tuple[int, ...],
    decisions: tuple[Decision, ...],
    rank: int,
) -> Least:
    """Return a plan with one of its stages."""
    spans = [range(start, end) for start, end in pairwise((0, *ends))]
    own = pricer.on_stage(setting, rank)
    return Least(
        setting=setting,
        ends=ends,
        decisions=decisions,
        stage=rank_memory(own, setting, rank, spans, decisions),
        capacity_bytes=own.cluster.total_bytes,
    )


def _leanest(pricer: Pricer, setting: Setting, convention: Convention) -> tuple[Decision, ...]:
    """Return per call the decision with which all calls together need least.

    What calls keep adds up, what they work with does not: for every amount of working memory that
    some decision has, each call takes the decision that keeps least within it.
    """
    live = setting.live()[0]
    kinds = alike(pricer, setting)
    choices = {
        index: [
            (live * option.kept + option.static, option.working, decision)
            for decision in pricer.decisions(
                pricer.trace.calls[calls[0]].block, setting.tp, convention
            )
            for option in (block_option(pricer, calls[0], decision, setting, live),)
        ]
        for index, calls in enumerate(kinds)
    }
    best: tuple[int, list[Decision]] | None = None
    for most in sorted({working for found in choices.values() for _, working, _ in found}):
        within = [[c for c in found if c[1] <= most] for found in choices.values()]
        if not all(within):
            continue
        chosen = [min(found, key=lambda c: c[:2]) for found in within]
        need = most + sum(len(k) * c[0] for k, c in zip(kinds, chosen, strict=True))
        if best is None or need < best[0]:
            best = need, [decision for _, _, decision in chosen]
    assert best is not None, "the largest working memory lets every decision in"
    pairs = zip(kinds, best[1], strict=True)
    by_call = {call: decision for calls, decision in pairs for call in calls}
    return tuple(by_call[call] for call in range(len(pricer.trace.calls)))


def infeasible_error(planner: Planner, least: Least) -> InfeasibleError:
    """Return the error of a problem whose plan of least memory does not fit."""
    category, amount = max(least.stage.by_category.items(), key=lambda item: item[1])
    need = least.need_bytes
    found = find_remedies(planner, need)
    lines = [
        f"no plan fits: the leanest one found ({least.setting}) needs {format_bytes_up(need)} a "
        f"device (at {least.stage.instant}), but {planner.cluster} has "
        f"{format_bytes(least.capacity_bytes)} ({format_bytes(least.excess_bytes)} too little); "
        f"the largest part is {category} with {format_bytes(amount)}",
        *conflict_lines(planner),
        *(f"remedy: {remedy}" for remedy in found),
    ]
    return InfeasibleError(
        "\n".join(lines),
        need_bytes=need,
        capacity_bytes=least.capacity_bytes,
        category=category,
        remedies=found,
    )


def conflict_lines(planner: Planner) -> list[str]:
    """Return which constraints conflict with the memory of a device, in words.

    They are the user's, the number of devices and, on GPUs, that nothing lies in host memory. The
    set is irreducible: each was kept because without it, and with the others, a plan fits. Without
    a number of devices there are as many as remedies try at most.
    """
    texts = constraint_texts(planner.pins, planner.limits)
    texts[_DEVICES] = f"{planner.cluster.world_size} devices"
    if _may_offload(planner):
        texts[_HOST] = "nothing in host memory"
    kept = list(texts)
    for name in texts:
        fewer = [other for other in kept if other != name]
        if not _fits_under(planner, fewer):
            kept = fewer
    if not kept:
        return []
    memory = f"{format_bytes(planner.cluster.total_bytes)} a device"
    *others, last = (memory, *(texts[name] for name in kept))
    return [
        f"conflict: {', '.join(others)} and {last} do not go together; without any one of them a "
        "plan fits"
    ]


def _fits_under(planner: Planner, names: Collection[str]) -> bool:
    """Return whether the plan of least memory fits under those constraints alone."""
    most = None if _DEVICES in names else list(_larger(planner.cluster))[-1]
    offload = () if _HOST in names or not _may_offload(planner) else OFFLOADS
    return _fits(planner, constraints=names, cluster=most, offload=offload)


def _may_offload(planner: Planner) -> bool:
    return not planner.workload.offload and not planner.cluster.is_cpu


def find_remedies(planner: Planner, need: int) -> tuple[str, ...]:
    """Return changes that were each planned for and fit, the smallest of their kind.

    Args:
        planner: a problem that does not fit.
        need: bytes of a device that its plan of least memory takes.
    """
    found = [f"device memory of {format_bytes_up(need)} on the same devices"]
    found += _unpinned(planner)
    found += _offloaded(planner)
    for cluster in _larger(planner.cluster):
        if _fits(planner, cluster=cluster):
            found.append(f"{cluster.world_size} devices ({cluster})")
            break
    for cluster in _other_devices(planner.cluster):
        if _fits(planner, cluster=cluster):
            found.append(f"devices of {format_bytes(cluster.total_bytes)} each ({cluster})")
            break
    return tuple(found)


def _unpinned(planner: Planner) -> list[str]:
    """Return the first single pin that stands in the way, or all of them together."""
    pins = planner.pins
    size = pins.get("microbatch_size", 1)
    for smaller in (s for s in (size // 2, size // 4, 1) if 0 < s < size):
        if _fits(planner, pins={**pins, "microbatch_size": smaller}):
            return [f"microbatch_size={smaller} in place of {size}"]
    for name, value in pins.items():
        if _fits(planner, pins={k: v for k, v in pins.items() if k != name}):
            return [f"without the pin {name}={value}"]
    if len(pins) > 1 and _fits(planner, pins={}):
        return ["without the pins " + ", ".join(f"{k}={v}" for k, v in pins.items())]
    return []


def _offloaded(planner: Planner) -> list[str]:
    """Return the first set of parts that fit when they may lie in host memory."""
    if not _may_offload(planner):
        return []
    for names in (*((name,) for name in OFFLOADS), OFFLOADS):
        if _fits(planner, offload=names):
            text = repr(names[0]) if len(names) == 1 else repr(names)
            return [f"offload={text}: that part in host memory, which is slower"]
    return []


def _larger(cluster: Cluster) -> Iterator[Cluster]:
    """Yield clusters of the same devices and more of them: first fuller nodes, then more nodes."""
    gpus = cluster.gpus_per_node
    while cluster.num_nodes == 1 and 2 * gpus <= _MAX_GPUS_PER_NODE:
        gpus *= 2
        yield replace(cluster, gpus_per_node=gpus)
    for factor in _FACTORS:
        yield replace(cluster, gpus_per_node=gpus, num_nodes=cluster.num_nodes * factor)


def _other_devices(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the same number of larger devices of the catalog; a CPU is not replaced by a GPU."""
    if cluster.is_cpu:
        return
    profiles = [load_profile(name) for name in list_profiles() if not name.startswith("cpu")]
    least = min([cluster.total_bytes, *(group.device.memory_bytes for group in cluster.slower)])
    known = "" if cluster.slower else cluster.device.name
    for device in sorted(profiles, key=lambda p: (p.memory_bytes, p.name)):
        if device.memory_bytes > least and device.name != known:
            yield Cluster.from_device(
                device, num_nodes=cluster.num_nodes, gpus_per_node=cluster.gpus_per_node
            )


def _fits(
    planner: Planner,
    *,
    cluster: Cluster | None = None,
    pins: Mapping[str, Any] | None = None,
    constraints: Collection[str] | None = None,
    offload: tuple[str, ...] = (),
) -> bool:
    """Return whether the plan of least memory of a changed problem fits.

    Of the user's constraints (named as `constraint_texts` does) only those given stay, if any are.
    On other nodes the decisions are those of this cluster: their memory does not depend on it.
    """
    changed = planner.unpriced()
    if pins is not None:
        changed.pins = pins
    if constraints is not None:
        changed.pins, changed.limits = kept_constraints(changed.pins, changed.limits, constraints)
    if offload:
        changed.workload = replace(planner.workload, offload=offload)
    if cluster is not None:
        changed.cluster = cluster
        if cluster.gpus_per_node == planner.cluster.gpus_per_node and not offload:
            changed._pricers = {
                rows: Pricer(
                    trace=pricer.trace,
                    cluster=cluster,
                    workload=pricer.workload,
                    recompute=pricer.recompute,
                    reference=pricer,
                )
                for rows, pricer in planner._pricers.items()
            }
    try:
        least = _least_within(changed, is_any_enough=True)
    except (AutoplanError, ValueError):
        return False
    return least is not None and least.excess_bytes <= 0
