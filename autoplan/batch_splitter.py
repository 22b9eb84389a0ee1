"""Cut batches: the global batch into the shares of ranks, a share into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.program import TensorMeta

__all__ = ["BatchSplitter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplitter:
    """Cuts a rank's batch into micro-batches, and the global batch into ranks' shares.

    Attributes:
        keys: readable paths of the tensor leaves.
        metas: of those leaves, for one micro-batch.
        batch_dims: per tensor leaf its batch dimension, None for one without a batch.
        wanted: positions of the leaves that the stages of this rank read.
        rows: per micro-batch.
        num_microbatches: per step and rank.
        dp: data-parallel degree.
        dp_rank: of this process.
        device: where the stage computes.
    """

    keys: tuple[str, ...]
    metas: tuple[TensorMeta, ...]
    batch_dims: tuple[int | None, ...]
    wanted: tuple[int, ...]
    rows: int
    num_microbatches: int
    dp: int
    dp_rank: int
    device: torch.device

    def leaves(self, batch: Any) -> list[torch.Tensor]:
        """Return the tensor leaves of this rank's batch.

        Raises:
            ValueError: the batch has other leaves, of other dtypes or numbers of dimensions, or
                another number of rows.
        """
        return self._leaves(batch, self.rows * self.num_microbatches, "this rank's batch")

    def microbatches(self, leaves: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
        """Return per micro-batch the leaves that this rank reads."""
        moved = [leaves[i].to(self.device) for i in self.wanted]
        return [
            tuple(
                _rows(leaf, self.batch_dims[i], index * self.rows, self.rows)
                for i, leaf in zip(self.wanted, moved, strict=True)
            )
            for index in range(self.num_microbatches)
        ]

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the leaves of a micro-batch."""
        return tuple(tuple(meta.shape) for meta in self.metas)

    def form_of(self, leaves: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the leaves of a micro-batch of this rank's batch."""
        return tuple(
            tuple(self.rows if d == dim else size for d, size in enumerate(leaf.shape))
            for dim, leaf in zip(self.batch_dims, leaves, strict=True)
        )

    def share(self, global_batch: Any) -> Any:
        """Return the rows of the global batch that belong to this rank."""
        per_rank = self.rows * self.num_microbatches
        self._leaves(global_batch, per_rank * self.dp, "the global batch")
        dims = iter(self.batch_dims)

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return _rows(leaf, next(dims), self.dp_rank * per_rank, per_rank)

        return pytree.tree_map(cut, global_batch)

    def _leaves(self, batch: Any, rows: int, what: str) -> list[torch.Tensor]:
        leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
        if len(leaves) != len(self.keys):
            raise ValueError(
                f"{what} has {len(leaves)} tensors, the plan was made for {len(self.keys)}: "
                f"{', '.join(self.keys)}"
            )
        for key, meta, dim, leaf in zip(
            self.keys, self.metas, self.batch_dims, leaves, strict=True
        ):
            if leaf.dtype != meta.dtype or leaf.dim() != len(meta.shape):
                raise ValueError(
                    f"{what} has {leaf.dtype} of {leaf.dim()} dimensions in {key}, the plan was "
                    f"made for {meta.dtype} of {len(meta.shape)}: convert it, or plan again with "
                    "such a batch"
                )
            if dim is None:
                continue
            got = leaf.shape[dim]
            if got != rows:
                parts = f"{self.num_microbatches} micro-batches of {self.rows} rows"
                if rows > self.rows * self.num_microbatches:
                    parts += f" on each of {self.dp} ranks"
                where = f"{key}, dimension {dim}" if dim else key
                raise ValueError(
                    f"{what} has {got} rows in {where}, it must have {rows} ({parts}): pass "
                    "train_step what shard_batch(global_batch) returns"
                )
        return leaves


def _rows(leaf: torch.Tensor, dim: int | None, start: int, count: int) -> torch.Tensor:
    """Return rows of a leaf, contiguous as at capture; the leaf itself where it has no batch."""
    return leaf if dim is None else leaf.narrow(dim, start, count).contiguous()
