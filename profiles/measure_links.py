"""Measure collectives between processes: torchrun is started with `main` as its worker."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoplan.errors import ProfileError
from autoplan.profiles.tables import COLLECTIVES, Collective, CollectiveTable

__all__ = ["measure_collectives"]

SIZES_BYTES = (2**12, 2**16, 2**19, 2**22, 2**24, 2**26)
START_UP_S = 180.0  # torchrun, importing torch in every process, rendezvous; on a busy machine
WARM_UP_CALLS = 5
MIN_REPEATS, MAX_REPEATS = 3, 21
SMALL_BYTES, SMALL_CALLS = 2**20, 5  # small calls in a row: ranks leave a barrier at other times


def measure_collectives(
    degree: int, *, budget_s: float, backend: str = "gloo", origin: str = "collectives"
) -> tuple[CollectiveTable, ...]:
    """Return measured curves of every collective that the backend has, for one group size.

    Sends are measured between two processes only.

    Args:
        degree: processes to start on this machine, at least 2.
        budget_s: seconds for measuring; starting up comes on top.
        backend: `gloo`, or `nccl` with one GPU per process.
        origin: id of the origin of the rows.

    Raises:
        ProfileError: if the processes fail or do not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(degree), "-m", "autoplan.profiles.measure_links"]
        command += ["--out", str(out), "--backend", backend, "--budget-s", str(budget_s)]
        _run(command, START_UP_S + 3 * budget_s)
        rows = json.loads(out.read_text(encoding="utf-8"))
    return tuple(
        CollectiveTable(
            collective=collective,
            degree=degree,
            origin=origin,
            rows=tuple((int(nbytes), float(time_s)) for nbytes, time_s in rows[collective]),
        )
        for collective in COLLECTIVES
        if rows.get(collective)
    )


def _run(command: list[str], timeout_s: float) -> None:
    """Run torchrun in its own process group; kill the group when it takes too long."""
    import autoplan

    root = str(Path(autoplan.__path__[0]).parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise ProfileError(
            f"measuring collectives did not end in {timeout_s:.0f} s: are other jobs running?"
        ) from None
    if process.returncode != 0:
        raise ProfileError(f"measuring collectives failed:\n{output[-2000:]}")


def main(arguments: list[str] | None = None) -> None:
    """Measure as one rank of a torchrun job; rank 0 writes `--out`."""
    parser = argparse.ArgumentParser(description="worker of measure_collectives")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--budget-s", type=float, default=5.0)
    options = parser.parse_args(arguments)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    rows: dict[str, list[tuple[int, float]]] = {}
    slice_s = options.budget_s / (len(COLLECTIVES) * len(SIZES_BYTES))
    collectives = [c for c in COLLECTIVES if c != "send" or dist.get_world_size() == 2]
    for collective in collectives:
        for nbytes in SIZES_BYTES:
            time_s = _measure(collective, nbytes, device, slice_s)
            if time_s is not None:
                rows.setdefault(collective, []).append((nbytes, time_s))
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # interpreters that tear down gloo threads sometimes hang


def _measure(collective: Collective, nbytes: int, device: Any, slice_s: float) -> float | None:
    """Return the seconds of one call, the slowest rank's median; None if the backend lacks it."""
    import torch
    import torch.distributed as dist

    run = _call(collective, nbytes, device)
    try:
        for _ in range(WARM_UP_CALLS):
            run()
    except (RuntimeError, NotImplementedError):
        return None  # the same on every rank: the backend refuses before it communicates
    _synchronize(device)
    calls = SMALL_CALLS if nbytes < SMALL_BYTES else 1
    once = torch.tensor(_once_s(run, device, calls), device=device)
    dist.all_reduce(once, op=dist.ReduceOp.MAX)
    repeats = min(MAX_REPEATS, max(MIN_REPEATS, int(slice_s / max(float(once), 1e-6))))
    median = statistics.median(_once_s(run, device, calls) for _ in range(repeats))
    slowest = torch.tensor(median, device=device, dtype=torch.float32)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    ways = 2 if collective == "send" else 1  # there and back
    return float(f"{max(float(slowest) / ways, 1e-9):.4g}")


def _call(collective: Collective, nbytes: int, device: Any) -> Callable[[], object]:
    """Return the collective on a whole buffer of `nbytes`; a send goes there and back."""
    import torch
    import torch.distributed as dist

    degree, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.ones(nbytes // 4 // degree * degree, device=device)
    shard = torch.ones(whole.numel() // degree, device=device)
    other = torch.empty_like(whole)
    if collective == "all_reduce":
        return lambda: dist.all_reduce(whole)
    if collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, shard)
    if collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, whole)
    if collective == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole)
    message = torch.ones(nbytes // 4, device=device)
    if rank == 0:
        return lambda: (dist.send(message, 1), dist.recv(message, 1))
    return lambda: (dist.recv(message, 0), dist.send(message, 0))


def _once_s(run: Callable[[], object], device: Any, calls: int) -> float:
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - begin) / calls


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
