"""The random state of the ranks of a plan in a checkpoint.

    random.mesh        degrees of the plan that saved
    random.seed        what other meshes seed from
    random.rank<N>     generators of rank N: of the CPU, and of its accelerator

A plan of the same degrees goes on with the state of every rank, so that dropout draws what it would
have drawn. Under other degrees no rank has an equal: all are seeded anew from one number that
follows from the saved state, alike over tensor-parallel ranks. Only torch's default generators are
saved; those of Python and NumPy, and the position in the data, are the caller's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autoplan.plan import Mesh
from autoplan.processes import seed_rank

__all__ = ["random_keys", "restore_random_state", "saved_random_state"]

_MESH, _SEED = "random.mesh", "random.seed"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _own_key() -> str:
    return f"random.rank{_rank()}"


def saved_random_state(mesh: Mesh, device: torch.device) -> dict[str, Any]:
    """Return what this rank adds to a checkpoint; all ranks call it.

    Args:
        mesh: of the plan.
        device: where this rank computes.
    """
    own: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        own[device.type] = torch.get_device_module(device).get_rng_state(device)
    digest = hashlib.sha256(own[device.type].numpy().tobytes()).digest()
    seeds = [int.from_bytes(digest[:7], "big")]
    if dist.is_initialized():
        dist.broadcast_object_list(seeds, src=0)
    return {_MESH: str(mesh), _SEED: seeds[0], _own_key(): own}


def random_keys(known: Mapping[str, Any]) -> list[str]:
    """Return the keys of a checkpoint that this rank reads; none of one without random state."""
    return [key for key in (_MESH, _SEED, _own_key()) if key in known]


def restore_random_state(state: Mapping[str, Any], mesh: Mesh, device: torch.device) -> None:
    """Set the generators of this rank from the values of `random_keys`."""
    if _MESH not in state:
        return
    own = state.get(_own_key())
    if state[_MESH] != str(mesh) or own is None or device.type not in own:
        seed_rank(mesh, int(state[_SEED]))
        return
    torch.set_rng_state(own["cpu"])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(own[device.type], device)
