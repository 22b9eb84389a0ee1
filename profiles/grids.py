"""Which points of its tables are measured on a device, the most informative first.

Whatever the time allows is a prefix of these orders: a small budget gives a sparse table whose
points are spread over the whole range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeVar

from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.tables import OP_CLASSES

__all__ = [
    "TABLE_DTYPES",
    "attention_grid",
    "class_grid",
    "gemm_grid",
    "informative_first",
    "measured_points",
]

Sizes = TypeVar("Sizes", bound=tuple[int, ...])

TABLE_DTYPES = ("float32", "bfloat16")
CPU_GEMM_SIZES = ((16, 64, 256, 1024), (32, 128, 512), (32, 128, 512))
CUDA_GEMM_SIZES = (
    (256, 1024, 4096, 16384),
    (512, 1024, 2048, 4096, 8192, 16384),
    (512, 1024, 2048, 4096, 8192, 16384),
)
CPU_ATTENTION_SIZES = ((32, 64, 128, 256, 512), (16, 64), (2, 16))
CUDA_ATTENTION_SIZES = ((512, 1024, 2048, 4096, 8192, 16384), (64, 128), (8, 32, 128))

MAX_ATTENTION_ROWS = 2**19  # seq * batch * heads: stays below the memory of small GPUs
CPU_CLASS_SIZES = ((32, 512, 4096), (64, 1024))
CUDA_CLASS_SIZES = ((1024, 8192, 65536), (1024, 4096, 16384))
MOST_NUMBERS = 2**28  # of one input


def gemm_grid(kind: str) -> list[tuple[int, int, int]]:
    """Return the (m, n, k) that are measured on a kind of device, `cpu` or `cuda`, in order."""
    sizes = CUDA_GEMM_SIZES if kind == "cuda" else CPU_GEMM_SIZES
    return informative_first(list(itertools.product(*sizes)))


def attention_grid(kind: str) -> list[tuple[int, int, int]]:
    """Return likewise the (length, head dimension, batch times heads) of attention."""
    sizes = CUDA_ATTENTION_SIZES if kind == "cuda" else CPU_ATTENTION_SIZES
    points = itertools.product(*sizes)
    return informative_first([p for p in points if p[0] * p[2] <= MAX_ATTENTION_ROWS])


def class_grid(
    kind: str, sizes: tuple[Sequence[int], Sequence[int]] | None = None
) -> list[tuple[tuple[int, int], str]]:
    """Return the (rows, width) and class that are measured on `cpu` or `cuda`, in order."""
    sizes = sizes or (CUDA_CLASS_SIZES if kind == "cuda" else CPU_CLASS_SIZES)
    points = [p for p in itertools.product(*sizes) if math.prod(p) <= MOST_NUMBERS]
    return list(itertools.product(informative_first(points), OP_CLASSES))


def measured_points(profile: DeviceProfile, kind: str) -> tuple[int, int]:
    """Return how many points of the grids of a kind of device are in a profile, and of how many.

    Args:
        profile: measured here.
        kind: `cpu` or `cuda`.
    """
    there: set[tuple[str, str, tuple[int, ...]]] = {
        *(("gemm", table.dtype, row[:3]) for table in profile.gemm for row in table.rows),
        *(("attention", table.dtype, row[:3]) for table in profile.attention for row in table.rows),
        *(
            (table.op_class, table.dtype, row[:2])
            for table in profile.op_classes
            for row in table.rows
        ),
    }
    grids: list[tuple[str, tuple[int, ...]]] = [
        *(("gemm", point) for point in gemm_grid(kind)),
        *(("attention", point) for point in attention_grid(kind)),
        *((name, point) for point, name in class_grid(kind)),
    ]
    wanted = {(table, dtype, point) for dtype in TABLE_DTYPES for table, point in grids}
    return len(wanted & there), len(wanted)


def informative_first(points: Sequence[Sizes]) -> list[Sizes]:
    """Return sizes ordered so that those left out are near to one of those before.

    The first is the middle one, of several the largest, since large ones weigh most in a step. Each
    further one is the farthest from all before it: the greedy 2-approximation of the k-center
    problem (Gonzalez 1985). The distance is the largest ratio of two sizes, since rates are
    interpolated between logarithms of sizes.

    Args:
        points: distinct, of as many positive numbers each.
    """
    logs = {point: tuple(map(math.log2, point)) for point in points}

    def apart(one: Sizes, other: Sizes) -> tuple[float, float]:
        ratios = [abs(a - b) for a, b in zip(logs[one], logs[other], strict=True)]
        return max(ratios), sum(ratios)

    left = list(points)
    ordered: list[Sizes] = []
    nearest: dict[Sizes, tuple[float, float]] = {}
    while left:
        if ordered:
            nearest = {p: min(nearest.get(p, (math.inf, 0.0)), apart(p, ordered[-1])) for p in left}
            found = max(left, key=lambda point: nearest[point])
        else:
            found = min(
                left, key=lambda p: (max(apart(p, other)[0] for other in left), -sum(logs[p]))
            )
        ordered.append(found)
        left.remove(found)
    return ordered
