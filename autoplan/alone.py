"""Whether the devices of one type of a mixed cluster would be faster without the others.

A plan uses all devices that it is given. Of nodes of several types the best by themselves may need
less time than all together: a small model, or few rows. Their search is run only where the bound of
every op at its fastest does not say already that they are slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from autoplan.bounds import ops_bound, static_reason
from autoplan.cluster import Cluster
from autoplan.units import TICK_S, format_seconds, to_ticks

if TYPE_CHECKING:
    from autoplan.planner import Planner

__all__ = ["alone_notes"]


def alone_notes(planner: Planner, step_time_s: float, time_limit_s: float) -> tuple[str, ...]:
    """Return in words which type of devices alone would take least, and less than a plan on all.

    Args:
        planner: the problem.
        step_time_s: of the plan.
        time_limit_s: of the search for each type.
    """
    found = [
        (seconds, cluster)
        for cluster in _by_type(planner.cluster)
        for seconds in (_seconds_on(planner, cluster, step_time_s, time_limit_s),)
        if seconds is not None and seconds < step_time_s
    ]
    return tuple(
        f"{cluster} alone would take {format_seconds(seconds)} a step, less than all "
        f"{planner.cluster.world_size} devices together: plan for these alone"
        for seconds, cluster in sorted(found, key=lambda one: one[0])[:1]
    )


def _by_type(cluster: Cluster) -> Iterator[Cluster]:
    """Yield the nodes of each type of device as a cluster of their own, with their own network."""
    groups = cluster.groups if cluster.slower else ()
    is_of_profiles = any(cluster.inter == group.device.inter for group in groups)
    for index, group in enumerate(groups):
        own = group.device.inter if is_of_profiles else None
        inter = own or cluster.inter
        yield replace(cluster.of_type(index), num_nodes=group.num_nodes, inter=inter)


def _seconds_on(
    planner: Planner, cluster: Cluster, step_time_s: float, time_limit_s: float
) -> float | None:
    """Return the seconds of a step on other devices; None where it cannot be, or is no faster."""
    other = planner.unpriced(cluster=cluster)
    try:
        settings = other.settings()
    except ValueError:  # the pins or the batch do not suit so many devices
        return None
    may_win = (
        ops_bound(other, setting) * TICK_S < step_time_s
        for setting in settings
        if static_reason(other, setting) is None
    )
    if not any(may_win):
        return None
    result, _ = other.search(time_limit_s=time_limit_s, cutoff=to_ticks(step_time_s))
    return None if result.objective is None else result.objective * TICK_S
