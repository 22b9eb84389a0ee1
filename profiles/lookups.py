"""Look-ups in the tables of a device profile: a time, and how it was found.

Inside a table rates are interpolated in log space; outside, the nearest rate holds under a roofline
(Williams, Waterman and Patterson 2009); a dtype without a table borrows the efficiency of one that
has. No kernel is faster than its launch.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from autoplan.errors import ProfileError
from autoplan.profiles.tables import (
    ATTENTION_DIRECTIONS,
    GEMM_DIRECTIONS,
    AttentionDirection,
    AttentionTable,
    GemmDirection,
    GemmTable,
    How,
    Lookup,
    RatePoints,
    TimeCurve,
)

if TYPE_CHECKING:
    from autoplan.profiles.device import DeviceProfile

__all__ = [
    "ITEM_BYTES",
    "attention_time_s",
    "check_sizes",
    "class_points",
    "gemm_time_s",
    "grouped_time_s",
    "memory_time_s",
]

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "tf32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
}

UNMEASURED_EFFICIENCY = 0.5  # of peak, where no table of any dtype exists; pessimistic on purpose
BACKWARD_FLOPS_RATIO = 2.5  # five products for two, flash attention backward: Dao 2023, section 4.1


def check_sizes(**sizes: float) -> None:
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name} must be at least 0, got {size}")


def _check_known(
    profile: DeviceProfile, dtype: str, direction: str, directions: tuple[str, ...]
) -> None:
    if dtype not in profile.peak_flops_per_s:
        raise ProfileError(
            f"profile {profile.name} has no dtype {dtype!r}: it has "
            f"{', '.join(profile.peak_flops_per_s)}; choose one or profile the device again"
        )
    if direction not in directions:
        raise ProfileError(f"unknown direction {direction!r}: allowed are {', '.join(directions)}")


@lru_cache(maxsize=65536)
def gemm_time_s(
    profile: DeviceProfile,
    m: int,
    n: int,
    k: int,
    batch: int,
    dtype: str,
    direction: GemmDirection,
) -> Lookup:
    _check_known(profile, dtype, direction, GEMM_DIRECTIONS)
    check_sizes(m=m, n=n, k=k, batch=batch)
    flops = 2.0 * batch * m * n * k
    if flops == 0:
        return Lookup(time_s=0.0, how="measured")
    nbytes = float(batch * (m * k + k * n + m * n) * ITEM_BYTES[dtype])
    points, ratio = _rate_points(profile, "gemm", dtype, direction, None)
    return _compute_time(profile, points, ratio, (batch * m, n, k), flops, nbytes, dtype)


@lru_cache(maxsize=65536)
def grouped_time_s(
    profile: DeviceProfile,
    m: int,
    n: int,
    k: int,
    groups: int,
    dtype: str,
    direction: GemmDirection,
) -> Lookup:
    rows = [
        row
        for table in profile.grouped
        if (table.dtype, table.direction) == (dtype, direction)
        for row in table.rows
    ]
    flops = 2.0 * groups * m * n * k
    if not rows or flops == 0:
        return gemm_time_s(profile, m, n, k, groups, dtype, direction)
    check_sizes(m=m, n=n, k=k, groups=groups)
    nbytes = float(groups * (m * k + k * n + m * n) * ITEM_BYTES[dtype])
    return _compute_time(profile, RatePoints(rows), 1.0, (m, n, k), flops, nbytes, dtype)


@lru_cache(maxsize=65536)
def attention_time_s(
    profile: DeviceProfile,
    batch: int,
    heads: int,
    seq_q: int,
    seq_k: int,
    head_dim: int,
    causal: bool,
    dtype: str,
    direction: AttentionDirection,
    flops: float | None,
    kernel: str,
) -> Lookup:
    _check_known(profile, dtype, direction, ATTENTION_DIRECTIONS)
    check_sizes(batch=batch, heads=heads, seq_q=seq_q, seq_k=seq_k, head_dim=head_dim)
    if flops is None:
        flops = 4.0 * batch * heads * seq_q * seq_k * head_dim
        flops *= BACKWARD_FLOPS_RATIO if direction == "backward" else 1.0
    if flops == 0:
        return Lookup(time_s=0.0, how="measured")
    # Queries and outputs, keys and values once; their gradients too in backward.
    nbytes = 2.0 * batch * heads * (seq_q + seq_k) * head_dim * ITEM_BYTES[dtype]
    nbytes *= 2.0 if direction == "backward" else 1.0
    seq = max(1, round(math.sqrt(seq_q * seq_k)))
    points, ratio = _rate_points(profile, "attention", dtype, direction, causal, kernel)
    work = flops / 2 if causal else flops
    return _compute_time(
        profile, points, ratio, (seq, head_dim, batch * heads), work, nbytes, dtype
    )


def _compute_time(
    profile: DeviceProfile,
    points: RatePoints | None,
    dtype_ratio: float,
    shape: tuple[int, int, int],
    flops: float,
    nbytes: float,
    dtype: str,
) -> Lookup:
    """Return the roofline max(flops / rate, nbytes / bandwidth, launch) at the rate of a shape."""
    rate = profile.peak_flops_per_s[dtype] * UNMEASURED_EFFICIENCY
    how: How = "roofline"
    bytes_per_s = _stream_bytes_per_s(profile)
    if points is not None:
        found, found_how = points.rate(*shape)
        rate, how = found * dtype_ratio, found_how if dtype_ratio == 1.0 else "roofline"
        if how in ("measured", "interpolated"):
            # The rows already contain what memory costs; only physics bounds them.
            bytes_per_s = profile.memory_bandwidth_bytes_per_s
    times = [flops / rate, profile.launch_overhead_s]
    if how != "measured":
        times.append(nbytes / bytes_per_s)
    return Lookup(time_s=max(times), how=how)


@lru_cache(maxsize=65536)
def memory_time_s(profile: DeviceProfile, nbytes: float, kernel: str) -> Lookup:
    check_sizes(nbytes=nbytes)
    if nbytes == 0:
        return Lookup(time_s=0.0, how="measured")
    curve = _memory_curve(profile, kernel) or _memory_curve(profile, "")
    how: How = "roofline"
    if curve is None:
        time_s = nbytes / _stream_bytes_per_s(profile)
    else:
        time_s, how = curve.time_s(nbytes)
    return Lookup(time_s=max(time_s, profile.launch_overhead_s), how=how)


@lru_cache(maxsize=1024)
def class_points(
    profile: DeviceProfile, op_class: str, dtype: str, direction: str
) -> RatePoints | None:
    wanted = (op_class, dtype, direction)
    rows = [
        (count, width, 1, rate)
        for table in profile.op_classes
        if (table.op_class, table.dtype, table.direction) == wanted
        for count, width, rate in table.rows
    ]
    return RatePoints(rows) if rows else None


@lru_cache(maxsize=1024)
def _memory_curve(profile: DeviceProfile, kernel: str) -> TimeCurve | None:
    tables = [table for table in profile.memory_bound if table.kernel == kernel]
    rows = [(nbytes, nbytes / rate) for table in tables for nbytes, rate in table.rows]
    return TimeCurve(rows) if rows else None


@lru_cache(maxsize=1024)
def _stream_bytes_per_s(profile: DeviceProfile) -> float:
    """Return the bandwidth that the largest measured memory-bound kernel reaches."""
    curve = _memory_curve(profile, "")
    if curve is None:
        return profile.memory_bandwidth_bytes_per_s * UNMEASURED_EFFICIENCY
    nbytes, time_s = curve.last
    return nbytes / time_s


@lru_cache(maxsize=4096)
def _rate_points(
    profile: DeviceProfile,
    kind: str,
    dtype: str,
    direction: str,
    causal: bool | None,
    kernel: str = "",
) -> tuple[RatePoints | None, float]:
    """Return the table of a dtype, or that of the dtype nearest in peak, and the ratio of peaks."""
    tables: tuple[GemmTable | AttentionTable, ...] = (
        profile.gemm if kind == "gemm" else profile.attention
    )
    rows_by_dtype: dict[str, list[tuple[int, int, int, float]]] = {}
    kernels = [getattr(table, "kernel", "") for table in tables]
    wanted = kernel if kernel in kernels else next(iter(kernels), "")
    for table, own in zip(tables, kernels, strict=True):
        if own != wanted:
            continue
        if table.direction == direction and getattr(table, "causal", None) == causal:
            rows_by_dtype.setdefault(table.dtype, []).extend(table.rows)
    if not rows_by_dtype:
        return None, 1.0
    peaks = profile.peak_flops_per_s
    nearest = min(
        rows_by_dtype, key=lambda d: (d != dtype, abs(math.log(peaks[d] / peaks[dtype])), d)
    )
    ratio = 1.0 if nearest == dtype else peaks[dtype] / peaks[nearest]
    return RatePoints(rows_by_dtype[nearest]), ratio
