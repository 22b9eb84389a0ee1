"""Which part of a whole tensor a rank holds: contiguous chunks with their offsets.

A parameter is sliced over tp first and over dp within that. A tp slice may be several pieces (fused
projections), which no DTensor of a checkpoint can tell: here each piece is a chunk of its own.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoplan import compat

__all__ = ["Chunk", "Chunked", "chunked", "gathered"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous part of a whole tensor, and this rank's memory of it.

    Attributes:
        offsets: of its first element in the whole tensor.
        local: a view of the rank's own tensor.
    """

    offsets: tuple[int, ...]
    local: torch.Tensor


@dataclass(frozen=True, slots=True)
class Chunked:
    """What a rank holds of a tensor of shape `shape`."""

    shape: torch.Size
    chunks: tuple[Chunk, ...]

    def without_dimension(self) -> Chunked:
        """Return what a rank holds of a tensor of one element as that of a scalar."""
        chunks = tuple(Chunk((), chunk.local.view(())) for chunk in self.chunks)
        return Chunked(torch.Size(()), chunks)


_Interval = tuple[int, int]  # start and length


def chunked(tensor: torch.Tensor) -> Chunked:
    """Return the chunks that this rank holds of a tensor or DTensor.

    Raises:
        ValueError: the local tensor is not what the placements say.
    """
    if not isinstance(tensor, DTensor):
        local = tensor.detach()
        return Chunked(tensor.shape, (Chunk((0,) * tensor.dim(), local),))
    intervals: list[list[_Interval]] = [[(0, size)] for size in tensor.shape]
    mesh, names = tensor.device_mesh, _axis_names(tensor)
    order = sorted(range(len(names)), key=lambda i: names[i] != "tp")
    for axis in order:
        placement = tensor.placements[axis]
        if placement.is_replicate():
            continue
        dim = compat.sliced_dim(placement)
        outer = compat.pieces_of(placement) if names[axis] == "tp" else 1
        size, rank = mesh.size(axis), mesh.get_local_rank(axis)
        intervals[dim] = _sliced(intervals[dim], outer, size, rank)
    local = tensor.to_local().detach()
    lengths = [sum(length for _, length in runs) for runs in intervals]
    if local.numel() and list(local.shape) != lengths:
        raise ValueError(
            f"a tensor of shape {tuple(tensor.shape)} placed as {tensor.placements} has local "
            f"shape {tuple(local.shape)}, not {tuple(lengths)}"
        )
    return Chunked(tensor.shape, _product(intervals, local) if local.numel() else ())


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a DTensor, the same on every rank of its mesh; all of them call it.

    `DTensor.full_tensor` puts slices of several pieces back in a wrong order where FSDP slices the
    same dimension, and raises on torch 2.11. These are gathered here: every rank writes its chunks
    into zeros, and the axes that slice sum them. What is no DTensor is whole already.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(
        name == "tp" and compat.pieces_of(placement) > 1
        for name, placement in zip(_axis_names(tensor), tensor.placements, strict=True)
    ):
        return tensor.full_tensor()
    local = tensor.to_local().detach()
    whole = torch.zeros(tensor.shape, dtype=local.dtype, device=local.device)
    for chunk in chunked(tensor).chunks:
        place = tuple(
            slice(start, start + size)
            for start, size in zip(chunk.offsets, chunk.local.shape, strict=True)
        )
        whole[place] = chunk.local
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(whole, group=tensor.device_mesh.get_group(axis))
    return whole


def _axis_names(tensor: DTensor) -> tuple[str, ...]:
    return tensor.device_mesh.mesh_dim_names or ("dp",)


def _sliced(runs: list[_Interval], outer: int, degree: int, rank: int) -> list[_Interval]:
    """Return the intervals of one rank: of each of `outer` equal parts its share, as torch cuts."""
    total = sum(length for _, length in runs)
    part = total // outer
    step = -(-part // degree)
    low, high = min(rank * step, part), min((rank + 1) * step, part)
    found: list[_Interval] = []
    for index in range(outer):
        found += _within(runs, index * part + low, index * part + high)
    return found


def _within(runs: list[_Interval], low: int, high: int) -> list[_Interval]:
    """Return the intervals that lie at positions `low` to `high` of the joined intervals."""
    found = []
    position = 0
    for start, length in runs:
        first, last = max(low, position), min(high, position + length)
        if first < last:
            found.append((start + first - position, last - first))
        position += length
    return found


def _product(intervals: list[list[_Interval]], local: torch.Tensor) -> tuple[Chunk, ...]:
    chunks = []
    placed = []
    for runs in intervals:
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        placed.append(
            [(start, length, at) for (start, length), at in zip(runs, starts, strict=False)]
        )
    for combination in itertools.product(*placed):
        view = local
        for dim, (_, length, at) in enumerate(combination):
            view = view.narrow(dim, at, length)
        chunks.append(Chunk(tuple(start for start, _, _ in combination), view))
    return tuple(chunks)
