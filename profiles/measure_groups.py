"""Measure as one rank of a process group: collectives over sizes, and what runs beside them.

Every function is called by all ranks alike. Ranks of several groups of one kind (one per node, say)
measure at the same time, as they would train.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from autoplan.profiles.budgets import Deadline
from autoplan.profiles.tables import COLLECTIVES, Collective

__all__ = ["SIZES_BYTES", "collective_rows", "common_deadline", "interference_ratio"]

SIZES_BYTES = (2**12, 2**22, 2**19, 2**24, 2**16, 2**26)  # the most informative first
LEAST_POINTS = 2  # one small and one large all_reduce: a latency and a bandwidth
WARM_UP_CALLS = 5
MIN_REPEATS, MAX_REPEATS = 3, 21
SMALL_BYTES, SMALL_CALLS = 2**20, 5  # small calls in a row: ranks leave a barrier at other times
OVERLAP_BYTES, OVERLAP_REPEATS = 2**24, 7
PRODUCT_SIZE = {"cpu": 256, "cuda": 4096}


def common_deadline(ends_s: float, group: Any, device: Any) -> Deadline:
    """Return a deadline that all ranks of a group reach at once: its clock is the latest of theirs.

    Every rank must ask for the time equally often.

    Args:
        ends_s: by `time.time()`; the latest of the ranks' counts.
        group: process group of this rank; None: all ranks.
        device: where its collectives run.
    """
    import torch
    import torch.distributed as dist

    def latest_s(own_s: float) -> float:
        value = torch.tensor(own_s, device=device, dtype=torch.float64)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
        return float(value)

    return Deadline(ends_s=latest_s(ends_s), clock=lambda: latest_s(time.time()))


def collective_rows(
    group: Any,
    device: Any,
    *,
    deadline: Deadline,
    sizes: Sequence[int] = SIZES_BYTES,
    collectives: Sequence[Collective] = COLLECTIVES,
) -> dict[str, list[tuple[int, float]]]:
    """Return (bytes, seconds) of the collectives that the backend has; sends between two ranks.

    Args:
        group: process group of this rank; None: all ranks.
        device: where the buffers are.
        deadline: `common_deadline` of the group; two sizes of the first collective are measured in
            any case.
        sizes: bytes of the whole buffers, the most informative first.
        collectives: which ones, the most informative first.
    """
    import torch.distributed as dist

    wanted = [c for c in collectives if c != "send" or dist.get_world_size(group) == 2]
    first = [(wanted[0], nbytes) for nbytes in sizes[:LEAST_POINTS]]
    others = [(c, nbytes) for nbytes in sizes for c in wanted if (c, nbytes) not in first]
    slice_s = deadline.slice_s(len(first) + len(others))
    rows: dict[str, list[tuple[int, float]]] = {}
    for collective, nbytes in deadline.points([*first, *others], least=len(first)):
        time_s = _measure(collective, nbytes, group, device, slice_s)
        if time_s is not None:
            rows.setdefault(collective, []).append((nbytes, time_s))
    return {collective: sorted(found) for collective, found in rows.items()}


def interference_ratio(group: Any, device: Any) -> float:
    """Return by how much products and an all_reduce that run at once slow each other, 1 to 2.

    With t the longer and s the shorter of the two alone and b both together: 1 + (b - t) / s, the
    factor on each while they overlap (Miao et al. 2022, Galvatron, section 4.1); at 2 they might as
    well run one after the other.
    """
    import torch
    import torch.distributed as dist

    buffer = torch.ones(OVERLAP_BYTES // 4, device=device)
    size = PRODUCT_SIZE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left = torch.ones(size, size, device=device, dtype=dtype)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(left, left)

    def reduce() -> Any:
        return dist.all_reduce(buffer, group=group, async_op=True)

    def together(count: int) -> None:
        work = reduce()
        products(count)
        work.wait()

    reduce_s = _slowest(lambda: reduce().wait(), group, device)
    one_s = _slowest(lambda: products(1), group, device)
    count = max(1, round(reduce_s / one_s))
    alone_s = _slowest(lambda: products(count), group, device)
    both_s = _slowest(lambda: together(count), group, device)
    longer, shorter = max(reduce_s, alone_s), min(reduce_s, alone_s)
    return float(f"{min(2.0, max(1.0, 1 + (both_s - longer) / shorter)):.4g}")


def _slowest(run: Callable[[], object], group: Any, device: Any) -> float:
    """Return the least seconds of some repeats, of the slowest rank."""
    import torch
    import torch.distributed as dist

    run()
    least = min(_once_s(run, group, device, 1) for _ in range(OVERLAP_REPEATS))
    slowest = torch.tensor(least, device=device, dtype=torch.float32)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return float(slowest)


def _measure(
    collective: Collective, nbytes: int, group: Any, device: Any, slice_s: float
) -> float | None:
    """Return the seconds of one call, the slowest rank's median; None if the backend lacks it."""
    import torch
    import torch.distributed as dist

    run = _call(collective, nbytes, group, device)
    try:
        for _ in range(WARM_UP_CALLS):
            run()
    except (RuntimeError, NotImplementedError):
        return None  # the same on every rank: the backend refuses before it communicates
    _synchronize(device)
    calls = SMALL_CALLS if nbytes < SMALL_BYTES else 1
    once = torch.tensor(_once_s(run, group, device, calls), device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX, group=group)
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(slice_s / max(float(once), 1e-6))))
    median = statistics.median(_once_s(run, group, device, calls) for _ in range(repeats))
    slowest = torch.tensor(median, device=device, dtype=torch.float32)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    ways = 2 if collective == "send" else 1  # there and back
    return float(f"{max(float(slowest) / ways, 1e-9):.4g}")


def _call(collective: Collective, nbytes: int, group: Any, device: Any) -> Callable[[], object]:
    """Return the collective on a whole buffer of `nbytes`; a send goes there and back."""
    import torch
    import torch.distributed as dist

    degree, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.ones(nbytes // 4 // degree * degree, device=device)
    shard = torch.ones(whole.numel() // degree, device=device)
    other = torch.empty_like(whole)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, shard, group=group)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group)
    if collective == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    message = torch.ones(nbytes // 4, device=device)
    peer = dist.get_process_group_ranks(group or dist.group.WORLD)[1 - rank]
    if rank == 0:
        return lambda: (dist.send(message, peer, group), dist.recv(message, peer, group))
    return lambda: (dist.recv(message, peer, group), dist.send(message, peer, group))


def _once_s(run: Callable[[], object], group: Any, device: Any, calls: int) -> float:
    import torch.distributed as dist

    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - begin) / calls


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
