"""Run a function on several gloo processes, forked from the test process.

Forking after torch is imported starts four ranks in a tenth of a second. The parent must not run a
backward before (its autograd threads do not survive a fork). A failing rank ends the launch: the
error names the rank that failed first, not the peers whose connections it broke.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

__all__ = ["run_workers"]


def run_workers(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120
) -> list[Any]:
    """Return `[function(rank, *args) for rank]`, each run in a process of one gloo group.

    Args:
        function: runs with the default process group initialised; its result must pickle.
        world_size: number of processes.
        args: passed to every rank; shared by fork, so they need not pickle.
        timeout_s: hard limit of the launch; processes are killed at it.

    Raises:
        AssertionError: a rank failed (with its traceback), or the time is over.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
            _worker,
            args=(function, world_size, folder, timeout_s, args),
            nprocs=world_size,
            join=False,
            start_method="fork",
        )
        try:
            _wait(context.processes, Path(folder), timeout_s)
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world_size)]


def _worker(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    folder: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    code = 0
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        result = function(rank, *args)
        _write(Path(folder) / f"result{rank}", pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        code = 1
        stamp = time.monotonic_ns()
        _write(Path(folder) / f"error.{stamp}.{rank}", traceback.format_exc().encode())
    finally:
        # Interpreter shutdown with live gloo threads aborts now and then.
        os._exit(code)


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, so that the parent never reads half of it."""
    partial = path.with_name(f"partial.{path.name}")
    partial.write_bytes(data)
    partial.rename(path)


def _wait(processes: list[Any], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes):
        if _has_failed(processes):
            break
        if time.monotonic() > deadline:
            alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise AssertionError(f"ranks {alive} still run after {timeout_s} s")
        time.sleep(0.01)
    if _has_failed(processes):
        errors = sorted(folder.glob("error.*"), key=lambda path: int(path.name.split(".")[1]))
        if not errors:
            codes = [process.exitcode for process in processes]
            raise AssertionError(f"a rank died without a traceback; exit codes {codes}")
        rank = errors[0].name.split(".")[2]
        raise AssertionError(f"rank {rank} failed first:\n{errors[0].read_text()}")


def _has_failed(processes: list[Any]) -> bool:
    return any(process.exitcode not in (None, 0) for process in processes)
