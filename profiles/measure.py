"""Measure the device that is here, and write its profile.

Medians after a warm-up, in float32 and bfloat16. On a CPU every process of a plan computes with one
thread, so one thread is what is measured; what several processes on fewer cores cost one another is
not in these numbers.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.profiles.budgets import Budget, Clock
from autoplan.profiles.catalog import load_profile, save_profile
from autoplan.profiles.device import DeviceProfile
from autoplan.profiles.grids import TABLE_DTYPES
from autoplan.profiles.here import describe, driver_of, find_device, profile_name
from autoplan.profiles.measure_host import host_seconds
from autoplan.profiles.measure_links import MeasuredGroup, link_of, measure_groups
from autoplan.profiles.measure_numbers import measure_extras, measure_tensor_core_peaks
from autoplan.profiles.measure_op_classes import measure_classes
from autoplan.profiles.measure_ops import (
    measure_attention,
    measure_gemm,
    measure_launch_s,
    measure_memory,
    measure_optimizer_bytes_per_s,
    measure_peak,
)
from autoplan.profiles.origin import Origin
from autoplan.profiles.tables import AttentionTable, GemmTable, OpClassTable
from autoplan.units import GIB

__all__ = ["measure_device", "measured_origin", "profile_command"]

Progress = Callable[[str, float], None]

PEAK_DTYPES = ("float64", "float16")  # one product each: CPUs have no tensor cores to tabulate
PROCESSES_PER_HOST = 4  # that a CPU profile shares the host's memory between
DISTRIBUTED_RESERVE_BYTES = int(1.45 * GIB)  # torch.distributed on CUDA: devices.csv, measured

# Shares of the budget: products, attention and classes once per dtype, the rest once.
GEMM_SHARE, ATTENTION_SHARE, CLASS_SHARE = 0.16, 0.07, 0.07
LAUNCH_SHARE, MEMORY_SHARE, OPTIMIZER_SHARE, EXTRAS_SHARE, HOST_SHARE = 0.02, 0.08, 0.03, 0.06, 0.02
PEAK_SHARE = 0.01  # of one product; the tensor cores' count as one
COPY_SHARE = 0.02  # from the device to the host
LINK_SHARE = 0.7  # mostly spent on starting processes
DEVICE_SHARES = (
    len(TABLE_DTYPES) * (GEMM_SHARE + ATTENTION_SHARE + CLASS_SHARE)
    + (LAUNCH_SHARE + MEMORY_SHARE + OPTIMIZER_SHARE + EXTRAS_SHARE + HOST_SHARE + COPY_SHARE)
    + PEAK_SHARE * (len(PEAK_DTYPES) + 1)
)


def profile_command(
    gpu: str,
    out: Path | None = None,
    *,
    budget_s: float = 20.0,
    with_links: bool = True,
    gemm_shapes: Sequence[tuple[int, int, int]] = (),
    progress: Progress | None = None,
) -> Path:
    """Measure a device and write its profile; return the path of the file.

    Where the file has a profile that this device and this torch measured, what is in it stays and
    the budget goes to what is missing. Under `stoppable` Ctrl-C ends it early, with what there is.

    Args:
        gpu: `cpu`, `cuda` (whatever is there), or a name of the catalog that must be there.
        out: file to write; None: `NAME.json` in the current folder.
        budget_s: seconds to spend, above 0, the start of processes for the links included.
        with_links: also measure collectives between processes of this machine.
        gemm_shapes: (m, n, k) to measure before the grid, for example those of a model.
        progress: called with a message and the fraction done.

    Raises:
        ProfileError: if the device is not there; says which are.
        OSError: if the file cannot be written; its folder is made before anything is measured.
    """
    path = out or Path(f"{profile_name(find_device(gpu), gpu)}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    profile = measure_device(
        gpu,
        budget_s=budget_s,
        with_links=with_links,
        gemm_shapes=gemm_shapes,
        known=load_profile(path) if path.exists() else None,
        progress=progress,
    )
    save_profile(profile, path)
    return path


def measure_device(
    name: str = "cpu",
    *,
    budget_s: float = 20.0,
    num_threads: int = 1,
    with_links: bool = True,
    gemm_shapes: Sequence[tuple[int, int, int]] = (),
    known: DeviceProfile | None = None,
    progress: Progress | None = None,
    clock: Clock = time.monotonic,
) -> DeviceProfile:
    """Return the measured profile of a device of this machine.

    The budget is wall time. What cannot be cut short comes first (processes for collectives, single
    numbers), so that the tables, which can, take what is left; of each at least one point.

    Args:
        name: `cpu`, `cuda` (whatever is there), or a name of the catalog that must be there.
        budget_s: seconds to spend, above 0, the start of processes for the links included.
        num_threads: threads of each process on a CPU.
        with_links: also measure collectives of 2 and 4 processes (one per GPU on CUDA).
        gemm_shapes: (m, n, k) to measure before the grid, for example those of a model.
        known: an earlier profile; what this device and this torch measured of it stays.
        progress: called with a message and the fraction done.
        clock: of the budget.

    Raises:
        ProfileError: if the device is not there; says which are.
        ValueError: if `budget_s` or `num_threads` is not above 0.
    """
    if budget_s <= 0 or num_threads < 1:
        raise ValueError(
            f"budget_s and num_threads must be above 0, got {budget_s} and {num_threads}"
        )
    shares = DEVICE_SHARES + LINK_SHARE * with_links
    budget = Budget(seconds=budget_s, shares=shares, clock=clock)  # importing torch is part of it
    import torch

    device = find_device(name)
    session = _Session(
        device=device,
        budget=budget,
        num_threads=num_threads,
        progress=progress or (lambda message, fraction: None),
        known=known if known is not None and _is_ours(known, device, num_threads) else None,
    )
    groups = _measured_groups(session) if with_links else ()
    threads_before = torch.get_num_threads()
    random_before = torch.get_rng_state()
    torch.set_num_threads(num_threads)
    try:
        profile = _measure_profile(session, name, gemm_shapes)
    finally:
        torch.set_num_threads(threads_before)
        torch.set_rng_state(random_before)
    if with_links:
        profile = _with_links(session, profile, groups)
    session.tell("done", 1.0)
    return profile


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One measuring: the device, the time that is left, and who is told."""

    device: Any
    budget: Budget
    num_threads: int
    progress: Progress
    known: DeviceProfile | None

    def tell(self, message: str, fraction: float | None = None) -> None:
        self.progress(message, min(0.99, self.budget.spent) if fraction is None else fraction)

    def slice_s(self, share: float, num_points: int = 1) -> float:
        """Return the seconds of each point of a part that has always as many."""
        return self.budget.part(share).slice_s(num_points)


def _is_ours(profile: DeviceProfile, device: Any, num_threads: int) -> bool:
    """Return whether the tables of a profile were measured on this device with this torch."""
    import torch

    origin = profile.origins.get("measured")
    here = (describe(device, num_threads), torch.__version__)
    return origin is not None and (origin.device, origin.torch_version) == here


def _measure_profile(
    session: _Session, name: str, gemm_shapes: Sequence[tuple[int, int, int]]
) -> DeviceProfile:
    device = session.device
    memory_bytes, reserve_bytes = _memory(device)
    is_cuda = device.type == "cuda"
    session.tell("launch overhead")
    launch_s = measure_launch_s(device, slice_s=session.slice_s(LAUNCH_SHARE))
    session.tell("optimizer")
    optimizer = measure_optimizer_bytes_per_s(
        device,
        slice_s=session.slice_s(OPTIMIZER_SHARE),
        num_parameters=2**26 if is_cuda else 2**21,
    )
    session.tell("the host")
    host = host_seconds(device, slice_s=session.slice_s(HOST_SHARE, 5))
    single_peaks = _single_peaks(session)
    copy_s = session.slice_s(COPY_SHARE)
    host_link = _host_link_bytes_per_s(session, copy_s) if is_cuda else None
    session.tell("memory bandwidth")
    part = session.budget.part(MEMORY_SHARE)
    memory = measure_memory(device, deadline=part, slice_s=part.slice_s(8), origin="measured")
    part = session.budget.part(EXTRAS_SHARE)
    extras = measure_extras(device, deadline=part, slice_s=part.slice_s(12), progress=session.tell)
    gemm: list[GemmTable] = []
    attention: list[AttentionTable] = []
    classes: list[OpClassTable] = []
    known = session.known
    for dtype in TABLE_DTYPES:
        part = session.budget.part(GEMM_SHARE)
        gemm += measure_gemm(
            device,
            dtype,
            deadline=part,
            slice_s=part.slice_s(150),
            origin="measured",
            shapes=gemm_shapes,
            known=known.gemm if known else (),
            progress=session.tell,
        )
        part = session.budget.part(ATTENTION_SHARE)
        attention += measure_attention(
            device,
            dtype,
            deadline=part,
            slice_s=part.slice_s(100),
            origin="measured",
            known=known.attention if known else (),
            progress=session.tell,
        )
        part = session.budget.part(CLASS_SHARE)
        classes += measure_classes(
            device,
            dtype,
            deadline=part,
            slice_s=part.slice_s(150),
            origin="measured",
            known=known.op_classes if known else (),
            progress=session.tell,
        )
    earlier = known.measurements if known else {}
    extras = {**{k: v for k, v in earlier.items() if not k.startswith("host.")}, **extras}
    host = {**{k: v for k, v in earlier.items() if k.startswith("host.")}, **host}
    bandwidth = max(rate for table in memory for _, rate in table.rows)
    largest_copy = max(memory[0].rows)[1]
    peaks = {**_table_peaks(gemm), **single_peaks}
    fields = {f"peak_flops_per_s.{dtype}": "peak" for dtype in peaks}
    return DeviceProfile(
        name=profile_name(device, name),
        description=describe(session.device, session.num_threads),
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        peak_flops_per_s=peaks,
        memory_bandwidth_bytes_per_s=bandwidth,
        launch_overhead_s=launch_s,
        host_link_bytes_per_s=largest_copy if host_link is None else host_link,
        optimizer_bytes_per_s=optimizer,
        gemm=tuple(gemm),
        attention=tuple(attention),
        memory_bound=memory,
        op_classes=tuple(classes),
        measurements={**extras, **host},
        origins=_origins(session),
        origin_by_field={
            **fields,
            **{f"measurements.{name}": "extras" for name in extras},
            **{f"measurements.{name}": "host" for name in host},
            "memory_bytes": "memory",
            "reserve_bytes": "reserve",
            "memory_bandwidth_bytes_per_s": "bandwidth",
            "launch_overhead_s": "measured",
            "host_link_bytes_per_s": "host_link",
            "optimizer_bytes_per_s": "optimizer",
        },
    )


def _single_peaks(session: _Session) -> dict[str, float]:
    """Return the rates of dtypes that have no table, of one product each."""
    peaks: dict[str, float] = {}
    size = 4096 if session.device.type == "cuda" else 256
    for dtype in PEAK_DTYPES:
        session.tell(f"peak of {dtype}")
        slice_s = session.slice_s(PEAK_SHARE)
        peaks[dtype] = measure_peak(session.device, dtype, size=size, slice_s=slice_s)
    slice_s = session.slice_s(PEAK_SHARE)
    return peaks | measure_tensor_core_peaks(session.device, slice_s=slice_s)


def _table_peaks(gemm: Sequence[GemmTable]) -> dict[str, float]:
    """Return the highest rate seen of each dtype that has a table."""
    peaks: dict[str, float] = {}
    for table in gemm:
        best = max(rate for *_, rate in table.rows)
        peaks[table.dtype] = max(best, peaks.get(table.dtype, 0.0))
    return peaks


def _host_link_bytes_per_s(session: _Session, slice_s: float) -> float:
    import torch

    from autoplan.profiles.timing import Stopwatch

    source = torch.ones(2**26, device=session.device)
    target = torch.empty(2**26, pin_memory=True)
    watch = Stopwatch(device=session.device, slice_s=slice_s)
    time_s = watch.median_s(lambda: target.copy_(source, non_blocking=True))
    return float(f"{2**28 / time_s:.4g}")


def _measured_groups(session: _Session) -> tuple[MeasuredGroup, ...]:
    import torch

    is_cuda = session.device.type == "cuda"
    num_gpus = torch.cuda.device_count() if is_cuda else PROCESSES_PER_HOST
    return measure_groups(
        [degree for degree in (2, 4, 8) if degree <= num_gpus],
        deadline=session.budget.part(LINK_SHARE),
        backend="nccl" if is_cuda else "gloo",
        progress=session.tell,
    )


def _with_links(
    session: _Session, profile: DeviceProfile, groups: Sequence[MeasuredGroup]
) -> DeviceProfile:
    """Return a profile with what groups of processes take."""
    if not groups:
        return profile if session.known is None else replace(profile, intra=session.known.intra)
    backend = "nccl" if session.device.type == "cuda" else "gloo"
    intra = link_of(
        [curve for group in groups for curve in group.curves],
        name=f"{profile.name} {backend}",
        level="intra",
        measured=profile.origins["measured"],
        interference=groups[-1].interference,
    )
    return replace(profile, intra=intra).with_measurements(groups[0].host, "host")


def _memory(device: Any) -> tuple[int, int]:
    """Return the memory of a device and what is taken before a model comes, bytes."""
    import torch

    if device.type == "cuda":
        torch.ones(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        context = total - free - torch.cuda.memory_reserved(device)
        return total, max(0, context) + DISTRIBUTED_RESERVE_BYTES
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page // PROCESSES_PER_HOST
    resident = Path("/proc/self/statm")
    if resident.exists():
        used = int(resident.read_text(encoding="ascii").split()[1]) * page
    else:
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return total, min(used, total // 2)


def measured_origin(device: Any, num_threads: int = 1) -> Origin:
    """Return the origin of what is measured here today."""
    import torch

    return Origin(
        kind="measured",
        text="median after warm-up, autoplan.profiles.measure",
        device=describe(device, num_threads),
        driver=driver_of(device),
        torch_version=torch.__version__,
        date=datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
    )


def _origins(session: _Session) -> dict[str, Origin]:
    is_cuda = session.device.type == "cuda"
    measured = measured_origin(session.device, session.num_threads)
    context = "context of this process"
    notes = {
        "peak": "highest rate of any product measured; float64 and float16 from one product each",
        "bandwidth": "highest rate of any copy measured, bytes read and written",
        "optimizer": "AdamW with foreach, 28 bytes per float32 parameter",
        "extras": "one number each, autoplan.profiles.measure_numbers",
        "host": "least of repeats, ops of no size, autoplan.profiles.measure_host",
        "memory": "as the driver reports it",
        "reserve": f"{context}, plus 1.45 GiB for torch.distributed (published for 2 A100)",
        "host_link": "copy to pinned memory",
    }
    if not is_cuda:
        notes["memory"] = f"physical memory divided by {PROCESSES_PER_HOST} processes"
        notes["reserve"] = "resident memory of a process that has imported torch"
        notes["host_link"] = "largest copy within memory, bytes read and written"
    return {
        "measured": measured,
        **{key: replace(measured, text=text) for key, text in notes.items()},
    }
