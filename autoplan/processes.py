"""The process group of a plan: making it, agreeing on errors, seeding, and leaving it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from autoplan import compat
from autoplan.errors import EmitError
from autoplan.launcher import ERROR_FOLDER
from autoplan.plan import Mesh

__all__ = ["agree", "ensure_process_group", "exit_worker", "run_worker", "seed_rank", "seed_ranks"]

_SEED_STRIDE = 1_000_003
_made_here: list[dist.ProcessGroup] = []


def ensure_process_group(device: torch.device | str | None, timeout_s: float) -> torch.device:
    """Return the device to run on; makes the process group if there is none.

    A collective of a group that is made here waits `timeout_s` at most. With torchrun's environment
    the group has its processes, otherwise this one process.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", local % torch.cuda.device_count())
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if dist.is_initialized():
        world = dist.group.WORLD
        if world is not None and world in _made_here:  # with another time, for a search perhaps
            compat.set_timeout(world, timeout_s)
    else:
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        assert dist.group.WORLD is not None, "a process group was made"
        _made_here[:] = [dist.group.WORLD]
    return place


def agree(problem: Exception | None) -> None:
    """Raise on every rank if any rank has a problem: its own, or the first other rank's.

    Raises:
        EmitError: another rank failed; its message says which and why.
    """
    texts: list[str | None] = [None] * dist.get_world_size()
    own = f"{type(problem).__name__}: {problem}" if problem is not None else None
    dist.all_gather_object(texts, own)
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text is not None:
            raise EmitError(f"rank {rank} cannot run the plan: {text}")


def seed_ranks(mesh: Mesh) -> None:
    """Seed this process: alike over tensor-parallel ranks, differently over the others.

    The seeds follow from rank 0's `torch.initial_seed()`.
    """
    seeds: list[int] = [torch.initial_seed() % 2**62]
    dist.broadcast_object_list(seeds, src=0)
    seed_rank(mesh, seeds[0])


def seed_rank(mesh: Mesh, seed: int) -> None:
    """Seed this process from a seed of the plan; see `seed_ranks`."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(seed + _SEED_STRIDE * (rank // mesh.tp))


def run_worker(main: Callable[[], None]) -> NoReturn:
    """Run `main` as a worker of `launch`, and end the process.

    An error is written where `launch` looks for it, printed, and ends the process at once: peers
    that wait for this rank then fail too, or are killed by the launcher.
    """
    try:
        main()
    except BaseException:
        text = traceback.format_exc()
        folder = os.environ.get(ERROR_FOLDER)
        if folder is not None:
            rank = os.environ.get("RANK", "0")
            (Path(folder) / f"error.{time.time_ns()}.{rank}").write_text(text)
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(1)
    exit_worker()


def exit_worker() -> NoReturn:
    """Leave a worker process: wait for the others, drop the group, and end without clean-up.

    Interpreter shutdown with gloo threads alive aborts now and then, hence `os._exit`.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
