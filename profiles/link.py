"""Links between ranks, and the equation of each collective with its source.

`nbytes` is the whole buffer: the gathered size of an all_gather, the unreduced size of a
reduce_scatter, the tensor of an all_reduce, what one rank holds before an all_to_all, the message
of a send. A group of one rank costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from autoplan.errors import ProfileError
from autoplan.profiles.origin import (
    SCHEMA_VERSION,
    Origin,
    check_origins,
    check_positive,
    check_schema_version,
)
from autoplan.profiles.tables import Collective, CollectiveTable, TimeCurve

__all__ = [
    "LinkProfile",
    "all_gather_time_s",
    "all_reduce_time_s",
    "all_to_all_time_s",
    "broadcast_time_s",
    "reduce_scatter_time_s",
    "send_time_s",
]

Level = Literal["intra", "inter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProfile:
    """What connects the ranks of a group.

    Attributes:
        name: for messages and reports.
        level: `intra` a node or `inter` nodes.
        latency_s: seconds of one hop between neighbours.
        setup_s: seconds that each call costs before its first byte moves.
        bytes_per_s: what one rank can send while it receives as much (bus bandwidth, one
            direction).
        ring_bytes_per_s: bus bandwidth of a ring when several ranks of a node share their network
            ports; None where it equals `bytes_per_s`.
        tree_latency_s: seconds from the root of a tree over the group to its last leaf; None:
            `latency_s` for each level of a binary tree.
        ranks_per_node: of a group over several nodes, how many of its ranks are in each.
        ring_limit_bytes_per_s: what no ring over nodes exceeds, however many ports it has: the
            bandwidth inside a node; None: nothing.
        node_rings: measured bus bandwidths of rings that all devices of so many nodes take part in,
            rows of (nodes, bytes_per_s): ports of a node are not as fast together as one by
            itself, and slower in larger clusters. Empty: they add up.
        interference: by how much kernels and collectives of this link that run at once slow each
            other; None: not measured.
        curves: measured times; they win over the equations for their collective and group size.
        origins: the sources by id.
        origin_by_field: for every number above, the id of its origin.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    level: Level
    latency_s: float
    bytes_per_s: float
    setup_s: float = 0.0
    ring_bytes_per_s: float | None = None
    tree_latency_s: float | None = None
    ranks_per_node: int = 1
    ring_limit_bytes_per_s: float | None = None
    node_rings: tuple[tuple[int, float], ...] = ()
    interference: float | None = None
    curves: tuple[CollectiveTable, ...] = ()
    origins: Mapping[str, Origin] = field(default_factory=dict)
    origin_by_field: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_schema_version(self.schema_version)
        check_positive("bytes_per_s", self.bytes_per_s)
        if self.ring_bytes_per_s is not None:
            check_positive("ring_bytes_per_s", self.ring_bytes_per_s)
        if self.interference is not None and not self.interference >= 1:
            raise ValueError(f"interference: must be at least 1, got {self.interference!r}")
        times = {"latency_s": self.latency_s, "setup_s": self.setup_s}
        times |= {} if self.tree_latency_s is None else {"tree_latency_s": self.tree_latency_s}
        for name, value in times.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be finite and at least 0, got {value!r}")
        fields = ["latency_s", "bytes_per_s", "setup_s"]
        fields += ["ring_bytes_per_s"] if self.ring_bytes_per_s is not None else []
        fields += ["interference"] if self.interference is not None else []
        fields += ["node_rings"] if self.node_rings else []
        for row in self.node_rings:
            for value in row:
                check_positive("node_rings", value)
        check_origins(
            self.origins, self.origin_by_field, fields, (curve.origin for curve in self.curves)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.level, self.latency_s, self.bytes_per_s, self.ranks_per_node))

    @classmethod
    def from_numbers(
        cls,
        *,
        name: str,
        level: Level,
        latency_s: float,
        bytes_per_s: float,
        source: str,
        setup_s: float = 0.0,
    ) -> LinkProfile:
        """Return a link without curves, all of whose numbers are assumed from one source."""
        fields = ("latency_s", "bytes_per_s", "setup_s")
        return cls(
            name=name,
            level=level,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            setup_s=setup_s,
            origins={"given": Origin(kind="assumed", text=source)},
            origin_by_field=dict.fromkeys(fields, "given"),
        )

    @property
    def bus_bytes_per_s(self) -> float:
        """Bandwidth that a ring over this link reaches per rank, bytes per second."""
        return self.ring_bytes_per_s or self.bytes_per_s

    def node_ring_bytes_per_s(self, num_nodes: int) -> float | None:
        """Return the bus bandwidth of a ring that all devices of so many nodes take part in.

        Between measured numbers of nodes it is a power of them, outside it stays as it is at the
        nearest one; None: nothing was measured.
        """
        if not self.node_rings:
            return None
        nodes, rates = zip(*sorted(self.node_rings), strict=True)
        rate = np.interp(math.log(num_nodes), np.log(nodes), np.log(rates))
        return math.exp(float(rate))

    def collective_time_s(self, collective: Collective, nbytes: float, degree: int) -> float:
        """Return the seconds of one collective.

        A measured curve of this collective and degree is read as it is. Else the time is the
        larger of the equation and the nearest curve carried to this degree, so that what makes
        middle sizes slow in the measured group is not forgotten in others.

        Args:
            collective: which one.
            nbytes: the whole buffer, as in the module's docstring, at least 0.
            degree: ranks in the group, at least 1; 1 costs nothing.

        Raises:
            ProfileError: if the collective is unknown.
            ValueError: if `degree` < 1 or `nbytes` < 0.
        """
        if collective not in _EQUATIONS:
            raise ProfileError(
                f"unknown collective {collective!r}: allowed are {', '.join(_EQUATIONS)}"
            )
        if degree < 1 or nbytes < 0:
            raise ValueError(
                f"degree must be at least 1 and nbytes at least 0, got {degree} and {nbytes}"
            )
        if degree == 1 or nbytes == 0:
            return 0.0
        return _collective_time_s(self, collective, nbytes, degree)

    def scaled(self, *, bandwidth: float = 1.0) -> LinkProfile:
        """Return the same link with `bandwidth` times its bytes per second (for what-if and laws).

        Curves are divided by the factor; a faster one stops at the setup time. Rings over nodes
        are as much faster.
        """
        check_positive("bandwidth", bandwidth)
        curves = tuple(
            replace(
                curve,
                rows=tuple(
                    (nbytes, min(time_s, max(self.setup_s, time_s / bandwidth)))
                    if bandwidth >= 1
                    else (nbytes, time_s / bandwidth)
                    for nbytes, time_s in curve.rows
                ),
            )
            for curve in self.curves
        )
        ring = self.ring_bytes_per_s
        return replace(
            self,
            bytes_per_s=self.bytes_per_s * bandwidth,
            ring_bytes_per_s=None if ring is None else ring * bandwidth,
            node_rings=tuple((nodes, rate * bandwidth) for nodes, rate in self.node_rings),
            curves=curves,
        )


def all_reduce_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds of an all_reduce: the better of a ring and a double binary tree.

    Ring: 2 (d - 1) latency + 2 (d - 1) / d * nbytes / bandwidth (Thakur, Rabenseifner and Gropp
    2005). Tree: 2 ceil(log2 d) latency + 2 nbytes / bandwidth, at full bandwidth because each rank
    is a leaf in one of two trees (Sanders, Speck and Traeff 2009; NCCL since 2.4). Over nodes the
    tree is binary between them and a chain inside each, `tree_latency_s` (NCCL, `trees.cc`). Small
    messages and large groups take the tree, large messages the ring.
    """
    moved_s = 2 * nbytes / link.bus_bytes_per_s
    ring_s = 2 * (degree - 1) * link.latency_s + moved_s * (degree - 1) / degree
    depth_s = link.tree_latency_s
    if depth_s is None:
        depth_s = math.ceil(math.log2(degree)) * link.latency_s
    tree_s = 2 * depth_s + moved_s
    return link.setup_s + min(ring_s, tree_s)


def all_gather_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds of a ring all_gather to `nbytes` gathered bytes.

    (d - 1) * (latency + nbytes / d / bandwidth) (Thakur, Rabenseifner and Gropp 2005).
    """
    step_s = link.latency_s + nbytes / degree / link.bus_bytes_per_s
    return link.setup_s + (degree - 1) * step_s


def reduce_scatter_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds of a ring reduce_scatter of `nbytes` unreduced bytes.

    The ring all_gather backwards (Thakur, Rabenseifner and Gropp 2005); adding is not counted.
    """
    return all_gather_time_s(nbytes, degree, link)


def all_to_all_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds of a pairwise all_to_all of the `nbytes` that each rank holds.

    (d - 1) * (latency + nbytes / d / bandwidth) (Thakur, Rabenseifner and Gropp 2005, long
    messages). Each rank sends over its own port, so `ring_bytes_per_s` does not help.
    """
    step_s = link.latency_s + nbytes / degree / link.bytes_per_s
    return link.setup_s + (degree - 1) * step_s


def broadcast_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds in which one rank sends `nbytes` to all others of its group.

    A chain along the ring: (d - 1) latency + nbytes / bandwidth, as pieces follow each other
    (Chan et al. 2007, Collective communication: theory, practice, and experience, section 4).
    """
    if degree == 1 or nbytes == 0:
        return 0.0
    return link.setup_s + (degree - 1) * link.latency_s + nbytes / link.bus_bytes_per_s


def send_time_s(nbytes: float, degree: int, link: LinkProfile) -> float:
    """Return the seconds of one message: latency + nbytes / bandwidth (Hockney 1994)."""
    return link.setup_s + link.latency_s + nbytes / link.bytes_per_s


_EQUATIONS = {
    "all_reduce": all_reduce_time_s,
    "all_gather": all_gather_time_s,
    "reduce_scatter": reduce_scatter_time_s,
    "all_to_all": all_to_all_time_s,
    "send": send_time_s,
}
assert set(_EQUATIONS) == set(get_args(Collective))

# Half of a ring all_reduce is a reduce_scatter, the other half an all_gather.
_HALF_OF_ALL_REDUCE = ("all_gather", "reduce_scatter")


@lru_cache(maxsize=65536)
def _collective_time_s(
    link: LinkProfile, collective: Collective, nbytes: float, degree: int
) -> float:
    group = 2 if collective == "send" else degree
    ports = 1 if collective == "send" else link.ranks_per_node
    exact = _curves(link).get((collective, group, ports))
    if exact is not None:
        return exact.time_s(nbytes)[0]
    equation_s = _EQUATIONS[collective](nbytes, degree, link)
    carried_s = _carried_time_s(link, collective, nbytes, degree)
    return max(equation_s, carried_s)


@lru_cache(maxsize=1024)
def _curves(link: LinkProfile) -> dict[tuple[str, int, int], TimeCurve]:
    return {(c.collective, c.degree, c.ranks_per_node): TimeCurve(c.rows) for c in link.curves}


def _carried_time_s(link: LinkProfile, collective: Collective, nbytes: float, degree: int) -> float:
    """Return the nearest measured curve carried to another group; 0 if there is none.

    Bytes scale with (d - 1) / d and against the ports that a ring has, and what a larger group has
    more of hops is added. All terms grow with the bytes, so the result does.
    """
    curves = _curves(link)
    source, share = collective, 1.0
    groups = [(d, n) for c, d, n in curves if c == collective]
    if not groups and collective in _HALF_OF_ALL_REDUCE:
        source, share = "all_reduce", 0.5
        groups = [(d, n) for c, d, n in curves if c == "all_reduce"]
    if not groups:
        return 0.0

    def distance(group: tuple[int, int]) -> tuple[float, float, int]:
        ports = abs(math.log(group[1] / link.ranks_per_node))
        return ports, abs(math.log(group[0] / degree)), group[0]

    nearest, ports = min(groups, key=distance)
    is_ring = collective not in ("send", "all_to_all")
    per_port = _ports(link, ports) / _ports(link, link.ranks_per_node) if is_ring else 1.0
    curve_s = curves[source, nearest, ports].time_s(nbytes * per_port)[0] * share
    bytes_ratio = ((degree - 1) / degree) / ((nearest - 1) / nearest)
    more_hops = (
        max(0, degree - nearest)
        if collective != "all_reduce"
        else (2 * max(0, math.ceil(math.log2(degree)) - math.ceil(math.log2(nearest))))
    )
    return curve_s * bytes_ratio + more_hops * link.latency_s


def _ports(link: LinkProfile, ranks: int) -> float:
    """Return how many times one port's bandwidth a ring has over so many ranks of a node."""
    limit = link.ring_limit_bytes_per_s
    return ranks if limit is None else min(ranks, max(1.0, limit / link.bytes_per_s))
