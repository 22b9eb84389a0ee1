"""Whole tensors from distributed ones, and how often an element of one is stored."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

__all__ = ["full_tensor", "replication"]


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Return the whole tensor; every rank of its mesh must call this."""
    return cast(torch.Tensor, tensor.full_tensor())


def replication(tensor: torch.Tensor, copies: int) -> int:
    """Return how many ranks of a stage hold each element of `tensor`.

    Args:
        tensor: a rank's parameter or gradient.
        copies: ranks of the stage, dp * tp.
    """
    if not isinstance(tensor, DTensor):
        return copies
    shards = 1
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            shards *= tensor.device_mesh.size(dim)
    return copies // shards
