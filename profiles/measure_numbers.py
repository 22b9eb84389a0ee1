"""Measure single numbers of a device: optimizer steps, host copies, memory of one op, context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from autoplan.profiles.budgets import Deadline
from autoplan.profiles.measure_ops import measure_peak
from autoplan.profiles.timing import Stopwatch

__all__ = ["measure_extras", "measure_tensor_core_peaks"]

Progress = Callable[[str], None]

CPU_NUMBERS, CUDA_NUMBERS = 2**20, 2**26  # parameters of an optimizer step
CPU_COPY_BYTES, CUDA_COPY_BYTES = 2**24, 2**28
GEMM_SIZE = 1024


def measure_extras(
    device: Any,
    *,
    deadline: Deadline,
    slice_s: float,
    progress: Progress = lambda message: None,
) -> dict[str, float]:
    """Return numbers by name; a short budget gives fewer of them, and at least one.

    `optimizer.KIND.HOW.parameters_per_s` for AdamW and SGD with momentum, looped, foreach and fused
    over float32; `host_copy.MEMORY.WAY.bytes_per_s` of pageable and, on CUDA, pinned memory; the
    bytes that a context takes, and on CUDA what one product allocates at its peak and what is then
    reserved.

    Args:
        device: a `torch.device`.
        deadline: when to stop.
        slice_s: seconds for one number.
        progress: told about each.
    """
    watch = Stopwatch(device=device, slice_s=slice_s)
    found: dict[str, float] = {}
    for name, measure in deadline.points(list(_points(device, watch))):
        progress(name)
        found[name] = float(f"{measure():.4g}")
    return found


def _points(device: Any, watch: Stopwatch) -> Iterator[tuple[str, Callable[[], float]]]:
    is_cuda = device.type == "cuda"
    yield "context_bytes", lambda: _context_bytes(device)
    for kind in ("adamw", "sgd"):
        for how in ("foreach", "fused", "looped"):
            yield (
                f"optimizer.{kind}.{how}.parameters_per_s",
                lambda kind=kind, how=how: _optimizer_rate(device, watch, kind, how),  # type: ignore[misc]
            )
    for pinned in (False, True) if is_cuda else (False,):
        memory = "pinned" if pinned else "pageable"
        for way in ("to_device", "to_host"):
            yield (
                f"host_copy.{memory}.{way}.bytes_per_s",
                lambda p=pinned, w=way: _copy_rate(device, watch, w, pinned=p),  # type: ignore[misc]
            )
    if is_cuda:
        yield "gemm_1024.peak_bytes", lambda: _gemm_bytes(device, "allocated")
        yield "gemm_1024.reserved_bytes", lambda: _gemm_bytes(device, "reserved")


def _context_bytes(device: Any) -> float:
    """Return what a process holds before a model comes: of the device, or resident on a CPU."""
    if device.type == "cuda":
        import torch

        torch.ones(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return float(max(1, total - free - torch.cuda.memory_reserved(device)))
    resident = Path("/proc/self/statm")
    if resident.exists():
        pages = int(resident.read_text(encoding="ascii").split()[1])
        return float(pages * os.sysconf("SC_PAGE_SIZE"))
    import resource

    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _optimizer_rate(device: Any, watch: Stopwatch, kind: str, how: str) -> float:
    import torch

    total = CUDA_NUMBERS if device.type == "cuda" else CPU_NUMBERS
    parameters = [torch.nn.Parameter(torch.ones(total // 8, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    options: dict[str, Any] = {"foreach": how == "foreach", "fused": how == "fused"}
    optimizer: Any
    if kind == "adamw":
        optimizer = torch.optim.AdamW(parameters, **options)
    else:
        optimizer = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options)
    return total / watch.median_s(optimizer.step)


def _copy_rate(device: Any, watch: Stopwatch, way: str, *, pinned: bool) -> float:
    import torch

    nbytes = CUDA_COPY_BYTES if device.type == "cuda" else CPU_COPY_BYTES
    host = torch.ones(nbytes // 4, pin_memory=pinned)
    there = torch.empty(nbytes // 4, device=device)
    target, source = (there, host) if way == "to_device" else (host, there)
    return nbytes / watch.median_s(lambda: target.copy_(source, non_blocking=pinned))


def _gemm_bytes(device: Any, which: str) -> float:
    """Return what a product of 1024 x 1024 numbers adds at its peak, or what is then reserved."""
    import torch

    torch.cuda.empty_cache()
    left, right = (torch.ones(GEMM_SIZE, GEMM_SIZE, device=device) for _ in "ab")
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    product = left @ right
    torch.cuda.synchronize(device)
    if which == "reserved":
        return float(torch.cuda.memory_reserved(device))
    del product
    return float(max(1, torch.cuda.max_memory_allocated(device) - before))


def measure_tensor_core_peaks(device: Any, *, slice_s: float) -> dict[str, float]:
    """Return FLOP/s of one large product in tf32 and float8, where the device has them.

    tf32 needs compute capability 8.0, float8 8.9; a CPU has neither.
    """
    if device.type != "cuda":
        return {}
    import torch

    found: dict[str, float] = {}
    capability = torch.cuda.get_device_capability(device)
    if capability >= (8, 0):
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            found["tf32"] = measure_peak(device, "float32", size=8192, slice_s=slice_s)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
    if capability >= (8, 9):
        size = 8192
        left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in "ab")
        one = torch.ones((), device=device)
        time_s = Stopwatch(device=device, slice_s=slice_s).median_s(
            lambda: torch._scaled_mm(
                left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        )
        found["float8"] = float(f"{2.0 * size**3 / time_s:.4g}")
    return found
