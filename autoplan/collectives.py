"""Changes of placement as differentiable functions over a tensor-parallel group.

A slice S(dim, outer) of a dimension `[outer, axis, inner]` is what remains of the axis in the
middle, so a rank holds `outer` separate pieces. Stacking the slices of all ranks in a new leading
dimension (`spread`) and putting them back (`join`) is all that the collectives need to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autoplan.graph import Placement
from autoplan.redistribution import transition

__all__ = ["Redistribute", "join", "join_slices", "local_shape", "local_slice", "spread"]

Local = Callable[[torch.Tensor], torch.Tensor]

# torch 2.13 renames both and warns about the old names; 2.11 has only those.
_all_gather_into: Callable[..., Any] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)
_reduce_scatter_into: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def local_shape(shape: Sequence[int], placement: Placement, degree: int) -> tuple[int, ...]:
    """Return the shape that one rank holds of a tensor of `shape`."""
    if placement.kind != "shard":
        return tuple(shape)
    return tuple(n // degree if d == placement.dim else n for d, n in enumerate(shape))


def spread(tensor: torch.Tensor, placement: Placement, degree: int) -> torch.Tensor:
    """Return the slices of all ranks, stacked in a new dimension 0: a view where possible."""
    dim, outer = placement.dim, placement.outer
    apart = torch.unflatten(tensor, dim, (outer, degree, -1)).movedim(dim + 1, 0)
    return apart.flatten(dim + 1, dim + 2)


def join(stacked: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Return the whole tensor of slices stacked in dimension 0; undoes `spread`."""
    dim, outer = placement.dim, placement.outer
    apart = torch.unflatten(stacked, dim + 1, (outer, -1)).movedim(0, dim + 1)
    return apart.flatten(dim, dim + 2)


def local_slice(tensor: torch.Tensor, placement: Placement, rank: int, degree: int) -> torch.Tensor:
    """Return what `rank` holds of a whole tensor, contiguous; the tensor itself unless sliced."""
    if placement.kind != "shard":
        return tensor
    dim, outer = placement.dim, placement.outer
    if outer == 1:
        size = tensor.shape[dim] // degree
        return tensor.narrow(dim, rank * size, size).contiguous()
    apart = torch.unflatten(tensor, dim, (outer, degree, -1)).select(dim + 1, rank)
    return apart.flatten(dim, dim + 1).contiguous()


def join_slices(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """Return the whole tensor of every rank's part; undoes `local_slice`."""
    if placement.kind != "shard":
        return parts[0]
    return join(torch.stack(list(parts)), placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute:
    """One change of placement over a group, differentiable; maps over a tuple of tensors.

    Attributes:
        produced: placement that comes in.
        required: placement that goes out.
        rank: of this process in the group.
        degree: size of the group.
        group: process group; None is the default one.
    """

    produced: Placement
    required: Placement
    rank: int
    degree: int
    group: dist.ProcessGroup | None = None

    @property
    def __name__(self) -> str:
        """Return a readable name: `P_to_R`, `S2_3_to_Rstar`."""
        return f"{placement_word(self.produced)}_to_{placement_word(self.required)}"

    def __call__(self, value: Any) -> Any:
        """Return `value` in the required placement."""
        if isinstance(value, (tuple, list)):
            return tuple(self(item) for item in value)
        names = transition(self.produced, self.required)
        assert names is not None, self.__name__
        forward = self._local(names[0], self.produced, self.required)
        backward = self._local(names[1], self.required, self.produced)
        return _Redistributed.apply(value, forward, backward)  # type: ignore[no-untyped-call]

    def recall(self, value: Any, result: Any) -> Any:
        """Return `result`, which an earlier call made of `value`, as this call's: nothing is sent.

        The gradient flows to `value` as from a call.
        """
        if isinstance(value, (tuple, list)):
            return tuple(self.recall(v, r) for v, r in zip(value, result, strict=True))
        names = transition(self.produced, self.required)
        assert names is not None, self.__name__
        backward = self._local(names[1], self.required, self.produced)
        stored = result.detach()
        return _Redistributed.apply(value, lambda _: stored, backward)  # type: ignore[no-untyped-call]

    def _local(self, name: str, source: Placement, target: Placement) -> Local:
        """Return the function on local tensors; `source` and `target` as its direction sees them.

        The gradient of addends is whole, the gradient of R* is addends, and the others are alike.
        """
        if name == "":
            return _same
        if name == "all_reduce":
            return self._all_reduce
        if name == "slice":
            return lambda x: local_slice(x, target, self.rank, self.degree)
        if name == "all_gather":
            return lambda x: join(self._all_gather(x), source)
        if name == "reduce_scatter":
            return lambda x: self._reduce_scatter(spread(x, target, self.degree))
        assert name == "all_to_all", name
        return lambda x: join(self._all_to_all(spread(x, target, self.degree)), source)

    def _all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        # A copy: the addends may be kept for a recomputation, a gradient may have other readers.
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def _all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.degree * x.shape[0], *x.shape[1:]))
        _all_gather_into(out, x.contiguous(), group=self.group)
        return torch.unflatten(out, 0, (self.degree, -1))

    def _reduce_scatter(self, stacked: torch.Tensor) -> torch.Tensor:
        out = stacked.new_empty(stacked.shape[1:])
        _reduce_scatter_into(out, stacked.contiguous().flatten(0, 1), group=self.group)
        return out

    def _all_to_all(self, stacked: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(stacked, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, stacked.contiguous(), group=self.group)
        return out


def placement_word(placement: Placement) -> str:
    """Return the placement as part of an identifier: R, Rstar, P, S2, S2_3."""
    text = str(placement).replace("*", "star").replace(",", "_")
    return text.replace("(", "").replace(")", "")


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class _Redistributed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Local, backward: Local) -> torch.Tensor:
        ctx.backward_function = backward
        made = forward(x)
        # Torch 2.11 compiles what a collective wrote as having no gradient, but not a view of it.
        return made.view_as(made) if torch.compiler.is_compiling() else made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backward_function(gradients[0]), None, None
