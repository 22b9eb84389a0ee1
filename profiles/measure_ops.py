"""Measure matrix products, attention, memory-bound kernels and the optimizer on one device.

Each function measures in the order of its grid and stops at its deadline: a small budget gives a
sparse table, never an empty one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autoplan.profiles.budgets import Deadline
from autoplan.profiles.grids import attention_grid, gemm_grid
from autoplan.profiles.rotation import rotating
from autoplan.profiles.tables import (
    ATTENTION_DIRECTIONS,
    GEMM_DIRECTIONS,
    AttentionDirection,
    AttentionTable,
    GemmDirection,
    GemmTable,
    MemoryTable,
)
from autoplan.profiles.timing import Stopwatch

__all__ = [
    "ADAMW_BYTES_PER_PARAMETER",
    "measure_attention",
    "measure_gemm",
    "measure_launch_s",
    "measure_memory",
    "measure_optimizer_bytes_per_s",
    "measure_peak",
]

Progress = Callable[[str], None]
Row = tuple[int, int, int, float]

ADAMW_BYTES_PER_PARAMETER = 28  # float32: read p, g, m, v and write p, m, v


def measure_gemm(
    device: Any,
    dtype: str,
    *,
    deadline: Deadline,
    slice_s: float,
    origin: str,
    shapes: Sequence[tuple[int, int, int]] = (),
    known: Sequence[GemmTable] = (),
    progress: Progress = lambda message: None,
) -> tuple[GemmTable, ...]:
    """Return GEMM tables of each direction.

    Args:
        device: a `torch.device`.
        dtype: name such as `float32`.
        deadline: when to stop.
        slice_s: seconds for one point.
        origin: id of the origin of the rows.
        shapes: (m, n, k) to measure before the grid.
        known: tables whose points are not measured again, and stay.
        progress: told about each shape.
    """
    import torch

    watch = Stopwatch(device=device, slice_s=slice_s)
    grid = [*shapes, *gemm_grid(device.type)]
    rows: dict[GemmDirection, dict[tuple[int, int, int], float]] = {}
    for table in known:
        if table.dtype == dtype:
            rows[table.direction] = {(m, n, k): rate for m, n, k, rate in table.rows}
    grid = [point for point in grid if point not in rows.get("wgrad", {})]
    for m, n, k in deadline.points(grid):
        progress(f"{dtype} gemm {m} x {n} x {k}")
        for direction in GEMM_DIRECTIONS:
            run = _products(torch, device, getattr(torch, dtype), direction, m, n, k)
            rate = 2.0 * m * n * k / watch.median_s(run)
            rows.setdefault(direction, {})[m, n, k] = _rounded(rate)
    return tuple(
        GemmTable(
            dtype=dtype,
            direction=direction,
            origin=origin,
            rows=tuple((*shape, rate) for shape, rate in sorted(found.items())),
        )
        for direction, found in rows.items()
    )


def _product(
    torch: Any, device: Any, dtype: Any, direction: GemmDirection, m: int, n: int, k: int
) -> Callable[[], object]:
    """Return a product in the memory layout that autograd of a linear layer gives."""
    left = torch.randn((k, m) if direction == "wgrad" else (m, k), device=device).to(dtype)
    right = torch.randn((n, k) if direction == "forward" else (k, n), device=device).to(dtype)
    left = left.t() if direction == "wgrad" else left
    right = right.t() if direction == "forward" else right
    out = torch.empty((m, n), device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


def _products(
    torch: Any, device: Any, dtype: Any, direction: GemmDirection, m: int, n: int, k: int
) -> Callable[[], object]:
    """Return products of one shape that rotate through more operands than the cache holds."""
    nbytes = (m * k + k * n + m * n) * dtype.itemsize
    return rotating(
        device,
        nbytes,
        lambda: _product(torch, device, dtype, direction, m, n, k),
        lambda run: run(),
    )


def measure_peak(device: Any, dtype: str, *, size: int, slice_s: float) -> float:
    """Return the FLOP/s of one square product, for dtypes that get no table."""
    import torch

    run = _product(torch, device, getattr(torch, dtype), "dgrad", size, size, size)
    return _rounded(2.0 * size**3 / Stopwatch(device=device, slice_s=slice_s).median_s(run))


def measure_attention(
    device: Any,
    dtype: str,
    *,
    deadline: Deadline,
    slice_s: float,
    origin: str,
    known: Sequence[AttentionTable] = (),
    progress: Progress = lambda message: None,
) -> tuple[AttentionTable, ...]:
    """Return attention tables of each direction and mask; arguments as `measure_gemm`."""
    import torch

    watch = Stopwatch(device=device, slice_s=slice_s)
    rows: dict[tuple[AttentionDirection, bool], list[Row]] = {}
    for table in known:
        if table.dtype == dtype:
            rows[table.direction, table.causal] = list(table.rows)
    there = {row[:3] for row in rows.get(("backward", True), ())}
    grid = [point for point in attention_grid(device.type) if point not in there]
    for seq, head_dim, groups in deadline.points(grid):
        progress(f"{dtype} attention of {groups} heads, {seq} x {head_dim}")
        for is_causal in (False, True):
            runs = _attention_runs(
                torch, device, getattr(torch, dtype), (1, groups, seq, head_dim), is_causal
            )
            flops = 4.0 * groups * seq * seq * head_dim / (2 if is_causal else 1)
            for direction, run in zip(ATTENTION_DIRECTIONS, runs, strict=True):
                work = flops * (2.5 if direction == "backward" else 1.0)
                row = (seq, head_dim, groups, _rounded(work / watch.median_s(run)))
                rows.setdefault((direction, is_causal), []).append(row)
    return tuple(
        AttentionTable(
            dtype=dtype,
            direction=direction,
            causal=is_causal,
            origin=origin,
            rows=tuple(sorted(found)),
        )
        for (direction, is_causal), found in rows.items()
    )


def _attention_runs(
    torch: Any, device: Any, dtype: Any, shape: tuple[int, ...], is_causal: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return attention forward and backward on rotating inputs."""
    attend = torch.nn.functional.scaled_dot_product_attention

    def make() -> tuple[Any, Any, Any]:
        tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in "qkv"]
        out = attend(*tensors, is_causal=is_causal)
        return tensors, out, torch.randn_like(out)

    nbytes = 4 * math.prod(shape) * dtype.itemsize
    return (
        rotating(device, nbytes, make, lambda made: attend(*made[0], is_causal=is_causal)),
        rotating(
            device,
            nbytes,
            make,
            lambda made: torch.autograd.grad(made[1], made[0], made[2], retain_graph=True),
        ),
    )


def measure_memory(
    device: Any, *, deadline: Deadline, slice_s: float, origin: str
) -> tuple[MemoryTable, ...]:
    """Return the speeds of copies from 64 KiB to 64 MiB (CUDA: to 1 GiB) read and written."""
    import torch

    watch = Stopwatch(device=device, slice_s=slice_s)
    rows: list[tuple[int, float]] = []
    largest = 29 if device.type == "cuda" else 25
    sizes = [2**exponent for exponent in range(15, largest + 1, 2)]
    for size in deadline.points(sizes[::-1]):
        copies = rotating(
            device,
            2 * size,
            lambda n=size // 4: (torch.empty(n, device=device), torch.ones(n, device=device)),  # type: ignore[misc]
            lambda pair: pair[0].copy_(pair[1]),
        )
        time_s = watch.median_s(copies)
        rows.append((2 * size, _rounded(2 * size / time_s)))
    return (MemoryTable(origin=origin, rows=tuple(sorted(rows))),)


def measure_launch_s(device: Any, *, slice_s: float) -> float:
    """Return the seconds of an elementwise kernel on eight numbers: dispatch and launch."""
    import torch

    left = torch.ones(8, device=device)
    watch = Stopwatch(device=device, slice_s=slice_s)
    return float(f"{watch.median_s(lambda: torch.add(left, left), calls=200):.4g}")


def measure_optimizer_bytes_per_s(device: Any, *, slice_s: float, num_parameters: int) -> float:
    """Return the bytes per second of AdamW with foreach on float32 parameters.

    Counted are 28 bytes a parameter, `ADAMW_BYTES_PER_PARAMETER`.
    """
    import torch

    parameters = [
        torch.nn.Parameter(torch.ones(num_parameters // 4, device=device)) for _ in "abcd"
    ]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    time_s = Stopwatch(device=device, slice_s=slice_s).median_s(optimizer.step)
    return _rounded(4 * (num_parameters // 4) * ADAMW_BYTES_PER_PARAMETER / time_s)


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
