"""Why nothing fits: need, capacity, the category that dominates, and the smallest changes found.

Every remedy names a change under which a complete plan was priced by the exact memory model and
fits; `optimize` falls back to that plan, so what is printed here can be followed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoplan.cluster import Cluster
from autoplan.errors import AutoplanError, InfeasibleError
from autoplan.leanest import Least, least_within
from autoplan.limits import Limits, constraint_texts, kept_constraints
from autoplan.profiles.catalog import list_profiles, load_profile
from autoplan.settings import NO_LIMITS, OFFLOADS
from autoplan.units import format_bytes, format_bytes_up

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["Trials", "conflicting", "find_remedies", "infeasible_error"]

_FACTORS = (2, 4, 8, 16)
_MAX_GPUS_PER_NODE = 8
_DEVICES, _HOST = "devices", "host"  # constraints that nobody has to state


@dataclass(slots=True)
class Trials:
    """Problems like one that does not fit, each asked whether its plan of least memory does.

    The memory of a decision depends neither on nodes nor on devices. So all problems of one pinned
    recomputation, with or without activations on the host, price the decisions of one cluster,
    whose nodes are as full as those of any; and what does not fit on some nodes does not fit on as
    many with devices of less memory either.
    """

    planner: Planner
    _bases: dict[tuple[Any, bool], Planner] = field(default_factory=dict)
    _known: dict[tuple[object, ...], bool] = field(default_factory=dict)
    _too_small: dict[tuple[object, ...], int] = field(default_factory=dict)

    def fits(
        self,
        *,
        cluster: Cluster | None = None,
        pins: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        offload: tuple[str, ...] = (),
    ) -> bool:
        """Return whether the plan of least memory of a changed problem fits."""
        planner = self.planner
        changed = planner.unpriced(
            cluster=cluster or planner.cluster,
            pins=planner.pins if pins is None else pins,
            limits=planner.limits if limits is None else limits,
            workload=replace(planner.workload, offload=offload or planner.workload.offload),
        )
        limited = repr((changed.pins, changed.limits))
        key = (changed.cluster, limited, changed.workload.offload)
        if key not in self._known:
            self._known[key] = self._any_fits(changed, (limited, changed.workload.offload))
        return self._known[key]

    def _any_fits(self, changed: Planner, asked: tuple[object, ...]) -> bool:
        """Return whether the leanest fits, unless it does not on like nodes of larger devices."""
        cluster = changed.cluster
        if cluster.slower:
            return self._leanest_fits(changed)
        like = (*asked, cluster.num_nodes, cluster.gpus_per_node, cluster.is_cpu)
        if cluster.capacity_bytes <= self._too_small.get(like, -1):
            return False
        is_fitting = self._leanest_fits(changed)
        if not is_fitting:
            known = self._too_small.get(like, -1)
            self._too_small[like] = max(known, cluster.capacity_bytes)
        return is_fitting

    def _leanest_fits(self, changed: Planner) -> bool:
        try:
            settings = changed.settings()
            smallest = min(setting.microbatch_size for setting in settings)
            reference = self._base(changed).pricer(smallest)
            changed.use_decisions(reference)
            least = least_within(changed, is_any_enough=True, settings=settings)
        except (AutoplanError, ValueError):
            return False
        return least is not None and least.excess_bytes <= 0

    def _base(self, changed: Planner) -> Planner:
        """Return the problem whose decisions a changed one takes."""
        key = _decided_by(changed)
        if key not in self._bases:
            own = self.planner
            *_, largest = own.cluster, *_larger(own.cluster)
            is_own = key == _decided_by(own)
            if is_own and largest.gpus_per_node == own.cluster.gpus_per_node:
                self._bases[key] = own
            else:
                self._bases[key] = changed.unpriced(cluster=largest)
        return self._bases[key]


def _decided_by(planner: Planner) -> tuple[Any, bool]:
    """Return what the decisions of a problem's blocks depend on, beside the model."""
    return planner.pins.get("recompute"), "activations" in planner.workload.offload


def infeasible_error(planner: Planner, least: Least) -> InfeasibleError:
    """Return the error of a problem whose plan of least memory does not fit."""
    category, amount = max(least.stage.by_category.items(), key=lambda item: item[1])
    need = least.need_bytes
    trials = Trials(planner)
    conflict = conflicting(trials)
    found = find_remedies(trials, need, has_any=bool(conflict))
    lines = [
        f"no plan fits: the leanest one found ({least.setting}) needs {format_bytes_up(need)} a "
        f"device (at {least.stage.instant}), but {planner.cluster} has "
        f"{format_bytes(least.capacity_bytes)} ({format_bytes(least.excess_bytes)} too little); "
        f"the largest part is {category} with {format_bytes(amount)}",
        _conflict_line(planner, conflict) + ("" if conflict else _too_long(least, category)),
        *(f"remedy: {remedy}" for remedy in found),
    ]
    return InfeasibleError(
        "\n".join(lines),
        need_bytes=need,
        capacity_bytes=least.capacity_bytes,
        category=category,
        remedies=found,
    )


def conflicting(trials: Trials) -> list[str]:
    """Return which constraints conflict with the memory of a device, by name.

    They are the user's, the number of devices and, on GPUs, that nothing lies in host memory. The
    set is irreducible: each was kept because without it, and with the others, a plan fits. Empty:
    nothing fits without any of them either.
    """
    texts = _texts(trials.planner)
    kept = list(texts)
    if not _fits_under(trials, ()):
        return []
    for name in texts:
        fewer = [other for other in kept if other != name]
        if not _fits_under(trials, fewer):
            kept = fewer
    return kept


def _texts(planner: Planner) -> dict[str, str]:
    """Return all constraints in words, those that nobody has to state too."""
    texts = constraint_texts(planner.pins, planner.limits)
    count = planner.cluster.world_size
    texts[_DEVICES] = f"{count} device" + "s" * (count > 1)
    if _may_offload(planner):
        texts[_HOST] = "nothing in host memory"
    return texts


def _conflict_line(planner: Planner, names: Sequence[str]) -> str:
    """Return the conflict in words."""
    texts = _texts(planner)
    memory = f"{format_bytes(planner.cluster.total_bytes)} a device"
    if names:
        *others, last = (memory, *(texts[name] for name in names))
        return (
            f"conflict: {', '.join(others)} and {last} do not go together; without any one of them "
            "a plan fits"
        )
    most = f"{_most_devices(planner.cluster).world_size} devices"
    free = [text for name, text in texts.items() if name not in (_DEVICES, _HOST)]
    changes = [most, *["all that may lie in host memory"] * (_HOST in texts)]
    changes += [f"without {' and '.join(free)}"] * bool(free)
    return f"conflict: {memory} alone, nothing fits with {', '.join(changes)} either"


def _too_long(least: Least, category: str) -> str:
    """Return that rows are too long, where what one of them takes is most of the need."""
    if least.setting.microbatch_size > 1 or category not in ("working", "activations"):
        return ""
    return "; a micro-batch is one row already, so what is left is shorter rows"


def _fits_under(trials: Trials, names: Collection[str]) -> bool:
    """Return whether the plan of least memory fits under those constraints alone.

    Without a number of devices there may be as many as there are, or as remedies try at most: plans
    use all that they are given, so what fits on some need not fit on more.
    """
    planner = trials.planner
    clusters = [planner.cluster]
    if _DEVICES not in names:
        clusters.insert(0, _most_devices(planner.cluster))
    offload = () if _HOST in names or not _may_offload(planner) else OFFLOADS
    pins, limits = kept_constraints(planner.pins, planner.limits, names)
    return any(
        trials.fits(pins=pins, limits=limits, cluster=cluster, offload=offload)
        for cluster in clusters
    )


def _may_offload(planner: Planner) -> bool:
    return not planner.workload.offload and not planner.cluster.is_cpu


def _most_devices(cluster: Cluster) -> Cluster:
    *_, most = _larger(cluster)
    return most


def find_remedies(trials: Trials, need: int, *, has_any: bool = True) -> tuple[str, ...]:
    """Return changes that were each planned for and fit, the smallest of their kind.

    Args:
        trials: of a problem that does not fit.
        need: bytes of a device that its plan of least memory takes.
        has_any: something else than the memory of a device can be changed so that a plan fits.
    """
    planner = trials.planner
    found = [f"device memory of {format_bytes_up(need)} on the same devices"]
    if has_any:
        found += _unpinned(trials)
        found += _offloaded(trials)
        for cluster in _larger(planner.cluster):
            if trials.fits(cluster=cluster):
                found.append(f"{cluster.world_size} devices ({cluster})")
                break
    for cluster in _other_devices(planner.cluster):
        if trials.fits(cluster=cluster):
            found.append(f"devices of {format_bytes(cluster.total_bytes)} each ({cluster})")
            break
    return tuple(found)


def _unpinned(trials: Trials) -> list[str]:
    """Return a smaller micro-batch, every constraint that alone is in the way, or all together."""
    pins, limits = trials.planner.pins, trials.planner.limits
    size = pins.get("microbatch_size", 1)
    for smaller in (s for s in (size // 2, size // 4, 1) if 0 < s < size):
        if trials.fits(pins={**pins, "microbatch_size": smaller}):
            return [f"microbatch_size={smaller} in place of {size}"]
    texts = constraint_texts(pins, limits)
    found = []
    for name, text in texts.items():
        own, left = kept_constraints(pins, limits, [other for other in texts if other != name])
        if trials.fits(pins=own, limits=left):
            found.append(f"without the {'pin' if name.startswith('pin ') else 'limit'} {text}")
    if not found and len(texts) > 1 and trials.fits(pins={}, limits=NO_LIMITS):
        found.append(f"without {', '.join(texts.values())}")
    return found


def _offloaded(trials: Trials) -> list[str]:
    """Return the first set of parts that fit when they may lie in host memory."""
    if not _may_offload(trials.planner):
        return []
    for names in (*((name,) for name in OFFLOADS), OFFLOADS):
        if trials.fits(offload=names):
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
