"""Tables of measured speeds, and how a value between their rows is read.

Rates are interpolated in log space: the four nearest rows, weighted by the inverse square of their
distance in the logarithms of the shape (Shepard 1968). Left-one-out on the published A100 and B200
GEMM shapes this was as good as kriging and better than a single nearest row. Times over a size are
interpolated linearly in log-log, after the rows were made monotone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autoplan.profiles.origin import check_positive

__all__ = [
    "ATTENTION_DIRECTIONS",
    "COLLECTIVES",
    "GEMM_DIRECTIONS",
    "OP_CLASSES",
    "AttentionDirection",
    "AttentionTable",
    "Collective",
    "CollectiveTable",
    "GemmDirection",
    "GemmTable",
    "How",
    "Lookup",
    "MemoryTable",
    "OpClassTable",
    "RatePoints",
    "TimeCurve",
]

GemmDirection = Literal["forward", "dgrad", "wgrad"]
AttentionDirection = Literal["forward", "backward"]
Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
How = Literal["measured", "interpolated", "extrapolated", "roofline"]

GEMM_DIRECTIONS: tuple[GemmDirection, ...] = ("forward", "dgrad", "wgrad")
ATTENTION_DIRECTIONS: tuple[AttentionDirection, ...] = ("forward", "backward")
COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send",
)

OP_CLASSES = (
    "layer_norm",
    "rms_norm",
    "batch_norm",
    "group_norm",
    "softmax",
    "cross_entropy",
    "embedding",
    "dropout",
    "gelu",
    "silu",
    "relu",
    "mul",
)

NUM_NEIGHBORS = 4  # rows; chosen by leave-one-out on the published GEMM tables
DISTANCE_POWER = 2  # Shepard's exponent; 1, 2 and 3 differ by less than 0.3 % there


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """A time and how it was found.

    Attributes:
        time_s: seconds, above 0 for real work.
        how: `measured` (this row is in the table), `interpolated` (inside it), `extrapolated`
            (outside: the nearest efficiency under a roofline) or `roofline` (no table for it).
    """

    time_s: float
    how: How


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTable:
    """Speeds of `(m, k) @ (k, n)` for one dtype and direction; rows are (m, n, k, flops_per_s)."""

    dtype: str
    direction: GemmDirection
    origin: str
    rows: tuple[tuple[int, int, int, float], ...]

    def __post_init__(self) -> None:
        _check_rows("gemm", self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable:
    """Speeds of fused attention; rows are (seq, head_dim, batch * heads, flops_per_s).

    FLOPs count what is computed: 4 * batch * heads * seq**2 * head_dim forward, halved if causal,
    and 2.5 times that backward (Dao 2023, section 4.1). `kernel` names the implementation; the
    profile's first table says which one is meant where nobody asks for another.
    """

    dtype: str
    direction: AttentionDirection
    causal: bool
    origin: str
    rows: tuple[tuple[int, int, int, float], ...]
    kernel: str = ""

    def __post_init__(self) -> None:
        _check_rows("attention", self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Speeds of memory-bound kernels; rows are (bytes read and written, bytes_per_s).

    `kernel` is empty for elementwise kernels, else the operator, with `_backward` for its backward:
    reductions reach less of the bandwidth.
    """

    origin: str
    rows: tuple[tuple[int, float], ...]
    kernel: str = ""

    def __post_init__(self) -> None:
        _check_rows("memory_bound", self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpClassTable:
    """Speeds of one class of ops that are no products; rows are (rows, width, numbers_per_s).

    The numbers of the input count: `rows * width`; of an embedding those of the result.
    """

    op_class: str
    dtype: str
    direction: AttentionDirection
    origin: str
    rows: tuple[tuple[int, int, float], ...]

    def __post_init__(self) -> None:
        _check_rows("op_classes", self.rows)
        if self.op_class not in OP_CLASSES:
            raise ValueError(
                f"op_class: {self.op_class!r} is unknown; allowed are {', '.join(OP_CLASSES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTable:
    """Times of one collective on one group size; rows are (nbytes, time_s), nbytes as in `link`.

    Attributes:
        collective, degree: which, and over how many ranks.
        origin: id of its source.
        rows: (nbytes, time_s).
        ranks_per_node: between nodes, how many ranks of the group are in each; 1 inside a node.
    """

    collective: Collective
    degree: int
    origin: str
    rows: tuple[tuple[int, float], ...]
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        _check_rows("curves", self.rows)
        if self.degree < 2:
            raise ValueError(f"degree: a collective needs at least 2 ranks, got {self.degree}")
        if not 1 <= self.ranks_per_node <= self.degree:
            raise ValueError(
                f"ranks_per_node: must be 1 to degree {self.degree}, got {self.ranks_per_node}"
            )


def _check_rows(name: str, rows: Sequence[Sequence[float]]) -> None:
    if not rows:
        raise ValueError(f"rows: a {name} table needs at least one row")
    for index, row in enumerate(rows):
        for value in row:
            check_positive(f"rows[{index}]", value)


class RatePoints:
    """Rates (work per second) at points of positive coordinates, read by log-space distance."""

    __slots__ = ("_columns", "_exact", "_high", "_low", "_rates")

    def __init__(self, rows: Sequence[tuple[int, int, int, float]]) -> None:
        """Index rows of three coordinates and a rate; the last of equal coordinates wins."""
        self._exact = {row[:3]: row[3] for row in rows}
        points = np.array(list(self._exact), dtype=np.float64)
        self._columns: list[NDArray[np.float64]] = [c.copy() for c in np.log(points).T]
        self._rates: NDArray[np.float64] = np.log(np.array(list(self._exact.values())))
        self._low, self._high = points.min(axis=0).tolist(), points.max(axis=0).tolist()

    def rate(self, a: int, b: int, c: int) -> tuple[float, How]:
        """Return the rate at a point and how it was found; never `roofline`."""
        query = (a, b, c)
        found = self._exact.get(query)
        if found is not None:
            return found, "measured"
        bounds = zip(self._low, query, self._high, strict=True)
        is_inside = all(low <= value <= high for low, value, high in bounds)
        first, second, third = (
            column - math.log(value) for column, value in zip(self._columns, query, strict=True)
        )
        squares = first * first + second * second + third * third
        if len(squares) > NUM_NEIGHBORS:
            near = squares.argpartition(NUM_NEIGHBORS)[:NUM_NEIGHBORS]
            squares, rates = squares[near], self._rates[near]
        else:
            rates = self._rates
        weights = squares ** (-DISTANCE_POWER / 2)
        rate = math.exp(float(weights.dot(rates)) / float(weights.sum()))
        return rate, "interpolated" if is_inside else "extrapolated"


class TimeCurve:
    """Time over bytes, monotone: more bytes are never faster."""

    __slots__ = ("_exact", "_log_nbytes", "_log_times", "first", "last")

    def __init__(self, rows: Sequence[tuple[int, float]]) -> None:
        """Index rows of (nbytes, time_s); a row slower than a larger one is lowered to it."""
        times = dict(sorted(rows))
        lowered = np.minimum.accumulate(np.array(list(times.values()))[::-1])[::-1]
        self._exact = dict(zip(times, map(float, lowered), strict=True))
        self._log_nbytes = np.log(np.array(list(times), dtype=np.float64))
        self._log_times = np.log(lowered)
        sizes = list(times)
        self.first = (sizes[0], float(lowered[0]))
        self.last = (sizes[-1], float(lowered[-1]))

    def time_s(self, nbytes: float) -> tuple[float, How]:
        """Return seconds and how they were found.

        Below the table the time of its smallest row (latency), above it the largest row's rate.
        """
        found = self._exact.get(int(nbytes)) if nbytes == int(nbytes) else None
        if found is not None:
            return found, "measured"
        if nbytes < self.first[0]:
            return self.first[1], "extrapolated"
        if nbytes > self.last[0]:
            return self.last[1] * (nbytes / self.last[0]), "extrapolated"
        log_time = np.interp(math.log(nbytes), self._log_nbytes, self._log_times)
        return math.exp(float(log_time)), "interpolated"
