"""Why nothing fits: need, capacity, the category that dominates, and the smallest changes found.

Every remedy names a change under which a complete plan was priced by the exact memory model and
fits; `optimize` falls back to that plan, so what is printed here can be followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from autoplan.bounds import layout_reason, least_state_bytes
from autoplan.cluster import Cluster
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """The decided plan of least memory that was found, and its fullest stage."""

    setting: Setting
    ends: tuple[int, ...]
    decisions: tuple[Decision, ...]
    stage: StageMemory

    @property
    def need_bytes(self) -> int:
        """Return the bytes that a device must have."""
        return self.stage.peak


def least_memory(planner: Planner) -> Least:
    """Return the plan whose fullest stage needs least among those that save memory.

    Tried are the settings with the smallest micro-batch and with most or no sharding of states,
    every block at its leanest decision, and cuts that are moved away from the fullest stage; those
    first whose parameters and optimizer states alone take least, and none that these rule out.
    """
    least = _least_memory(planner, 0)
    assert least is not None, "settings() is never empty"
    return least


def _least_memory(planner: Planner, enough: int) -> Least | None:
    """Return the plan of least memory, or the first within `enough` bytes.

    None where the states alone take more than that under every setting; 0 bytes: any is wanted.
    """
    every = planner.settings()
    settings = [s for s in every if layout_reason(planner, s) is None] or every
    # Stages beside a rank's first only add to what it holds.
    settings = [s for s in settings if s.virtual_stages == 1] or settings
    smallest = min(s.microbatch_size for s in settings)
    zero_stages = (0, 3) if "zero_stage" not in planner.pins else (0, 1, 2, 3)
    tried = [s for s in settings if s.microbatch_size == smallest and s.zero_stage in zero_stages]
    best: Least | None = None
    for setting in sorted(tried, key=lambda s: least_state_bytes(planner, s)):
        states = least_state_bytes(planner, setting)
        if (enough and states > enough) or (best is not None and states >= best.need_bytes):
            break
        found = _least_of(planner, setting)
        if best is None or found.need_bytes < best.need_bytes:
            best = found
        if best.need_bytes <= enough:
            break
    return best


def _least_of(planner: Planner, setting: Setting) -> Least:
    pricer = planner.pricer(setting.microbatch_size)
    calls = range(len(pricer.trace.calls))
    ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
    best: _Walked | None = None
    for is_sliced in pricer.borders(setting.tp):
        decisions = _leanest(pricer, setting, is_sliced)
        walked = _Walked(pricer=pricer, setting=setting, decisions=decisions, ends=ends)
        if best is None or walked.need < best.need:
            best = walked
    assert best is not None, "activations cross borders in one way at least"
    for _ in calls:
        moved = [
            best.cut_at(ends)
            for ends in _moved(best.ends, best.fullest)
            if setting.pp == 1 or is_runnable(pricer.trace, ends)
        ]
        better = min(moved, key=lambda walked: walked.need, default=best)
        if better.need >= best.need:
            break
        best = better
    return Least(
        setting=setting,
        ends=best.ends,
        decisions=best.decisions,
        stage=best.memory(best.fullest),
    )


@dataclass(slots=True, kw_only=True)
class _Walked:
    """The memory of decided cuts; a stage is walked once for each range of calls that it has."""

    pricer: Pricer
    setting: Setting
    decisions: tuple[Decision, ...]
    ends: tuple[int, ...]
    known: dict[tuple[object, ...], StageMemory] = field(default_factory=dict)

    def memory(self, rank: int) -> StageMemory:
        """Return the memory of a rank."""
        spans = [range(a, b) for a, b in pairwise((0, *self.ends))]
        key = (rank, *spans[rank :: self.setting.pp])
        if key not in self.known:
            device = self.pricer.on_stage(self.setting, rank)
            self.known[key] = rank_memory(device, self.setting, rank, spans, self.decisions)
        return self.known[key]

    @property
    def fullest(self) -> int:
        """Return the rank that needs most."""
        return max(range(self.setting.pp), key=lambda rank: self.memory(rank).peak)

    @property
    def need(self) -> int:
        """Return the bytes that a device must have."""
        return self.memory(self.fullest).peak

    def cut_at(self, ends: tuple[int, ...]) -> _Walked:
        """Return the same decisions in other stages."""
        return replace(self, ends=ends)


def _moved(ends: tuple[int, ...], stage: int) -> Iterator[tuple[int, ...]]:
    """Yield the stage ends that take a block off a stage's start or end."""
    for cut, step in ((stage - 1, 1), (stage, -1)):
        if 0 <= cut < len(ends) - 1:
            moved = (*ends[:cut], ends[cut] + step, *ends[cut + 1 :])
            if all(a < b for a, b in pairwise((0, *moved))):
                yield moved


def _leanest(pricer: Pricer, setting: Setting, is_sliced: bool) -> tuple[Decision, ...]:
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
                pricer.trace.calls[calls[0]].block, setting.tp, is_sequence_parallel=is_sliced
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
    capacity = planner.cluster.total_bytes
    category, amount = max(least.stage.by_category.items(), key=lambda item: item[1])
    need = least.need_bytes
    found = find_remedies(planner, need)
    lines = [
        f"no plan fits: the leanest one found ({least.setting}) needs {format_bytes_up(need)} a "
        f"device (at {least.stage.instant}), but {planner.cluster} has {format_bytes(capacity)} "
        f"({format_bytes(need - capacity)} too little); the largest part is {category} with "
        f"{format_bytes(amount)}",
        *conflict_lines(planner),
        *(f"remedy: {remedy}" for remedy in found),
    ]
    return InfeasibleError(
        "\n".join(lines),
        need_bytes=need,
        capacity_bytes=capacity,
        category=category,
        remedies=found,
    )


def conflict_lines(planner: Planner) -> list[str]:
    """Return which of the user's constraints conflict with the memory, in words.

    The set is irreducible: each was kept because without it, and with the others, a plan fits.
    """
    texts = constraint_texts(planner.pins, planner.limits)
    kept = list(texts)
    for name in texts:
        fewer = [other for other in kept if other != name]
        if not _fits(planner, constraints=fewer):
            kept = fewer
    if not kept:
        return []
    memory = f"{format_bytes(planner.cluster.total_bytes)} a device"
    wanted = " and ".join((memory, *(texts[name] for name in kept)))
    return [f"conflict: {wanted} do not go together; without any one of them a plan fits"]


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
    if planner.workload.offload or planner.cluster.is_cpu:
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
    for device in sorted(profiles, key=lambda p: (p.memory_bytes, p.name)):
        if device.memory_bytes > cluster.total_bytes and device.name != cluster.device.name:
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
        if cluster.gpus_per_node == planner.cluster.gpus_per_node:
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
    capacity = changed.cluster.total_bytes
    try:
        found = _least_memory(changed, capacity)
        return found is not None and found.need_bytes <= capacity
    except (AutoplanError, ValueError):
        return False
