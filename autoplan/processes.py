"""The process group of a plan: making it, agreeing on errors, seeding, and leaving it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from autoplan.errors import EmitError
from autoplan.plan import Mesh

__all__ = ["agree", "ensure_process_group", "exit_worker", "seed_ranks"]

_SEED_STRIDE = 1_000_003


def ensure_process_group(device: torch.device | str | None, timeout_s: float) -> torch.device:
    """Return the device to run on; makes the process group if there is none.

    With torchrun's environment the group has its processes, otherwise this one process.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", local % torch.cuda.device_count())
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if not dist.is_initialized():
        timeout = timedelta(seconds=timeout_s)
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        assert dist.group.WORLD is not None, "initialised without a group"
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
    torch.manual_seed(seeds[0] + _SEED_STRIDE * (dist.get_rank() // mesh.tp))


def exit_worker(status: int = 0) -> None:
    """Leave a worker process: wait for the others, drop the group, and end without clean-up.

    Interpreter shutdown with gloo threads alive aborts now and then, hence `os._exit`.
    """
    if dist.is_initialized():
        if status == 0:
            dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
