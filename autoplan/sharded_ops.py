"""Operators that tensor parallelism cannot run as they are: local forms with the right gradients.

Each is a callable with the signature of the operator it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = [
    "QueryHeadAttention",
    "RowAddmm",
    "RowLinear",
    "ShardedRandom",
    "VocabularyCrossEntropy",
    "VocabularyEmbedding",
]


class _AddedElsewhere(torch.autograd.Function):
    """Give a bias its gradient on a rank that does not add it."""

    @staticmethod
    def forward(ctx: Any, addend: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.bias_shape = bias.shape
        return addend

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        wanted = gradients[0].sum_to_size(ctx.bias_shape) if ctx.needs_input_grad[1] else None
        return gradients[0], wanted


@dataclass(frozen=True, slots=True)
class RowLinear:
    """`linear` with a sliced contraction: rank 0 adds the bias, every rank gets its gradient."""

    rank: int

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "row_linear"

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return this rank's addend of `x @ weight.T + bias`."""
        if bias is None or self.rank == 0:
            return F.linear(x, weight, bias)
        product = F.linear(x, weight)
        return _AddedElsewhere.apply(product, bias)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class RowAddmm:
    """`addmm` with a sliced contraction: rank 0 adds the bias, every rank gets its gradient."""

    rank: int

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "row_addmm"

    def __call__(self, bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend of `bias + x @ weight`."""
        if self.rank == 0:
            return torch.addmm(bias, x, weight)
        product = torch.mm(x, weight)
        return _AddedElsewhere.apply(product, bias)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class QueryHeadAttention:
    """Attention of this rank's query heads with the key-value heads that they read.

    Keys and values come whole: there are fewer of their heads than ranks, or the slices of query
    heads do not end where a group ends. Their gradients are addends.
    """

    target: Callable[..., torch.Tensor]
    rank: int
    degree: int

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "query_head_attention"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the result of the local heads."""
        count = query.shape[-3]
        group = count * self.degree // key.shape[-3]
        first = self.rank * count
        if count % group == 0 or group % count == 0:
            start, length = first // group, max(1, count // group)
            key, value = (x.narrow(-3, start, length) for x in (key, value))
        else:
            heads = torch.arange(first, first + count, device=key.device) // group
            key, value = (x.index_select(-3, heads) for x in (key, value))
        return self.target(query, key, value, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class ShardedRandom:
    """A random op on a slice: other numbers on each rank, the same again under recomputation.

    All ranks draw one seed from the CPU generator, which they share, so their states stay equal;
    the op itself runs with the seed and the rank, and leaves the state of its device alone.
    """

    target: Callable[..., Any]
    rank: int

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        name = getattr(self.target, "__name__", str(self.target)).partition(".")[0]
        return f"sharded_{name}"

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the op's result on this rank's slice."""
        draw = torch.randint(2**53, (), dtype=torch.int64, device="cpu")
        # A dry run on fake tensors has no numbers, and needs none.
        seed = 0 if hasattr(draw, "fake_mode") else int(draw)
        is_cuda = x.device.type == "cuda"
        generator = (
            torch.cuda.default_generators[x.get_device()] if is_cuda else torch.default_generator
        )
        state = generator.get_state()
        # The odd constant (2**64 / golden ratio) keeps neighbouring seeds and ranks apart.
        generator.manual_seed((seed + (self.rank + 1) * 0x9E3779B97F4A7C15) % 2**63)
        try:
            return self.target(x, *args, **kwargs)
        finally:
            generator.set_state(state)


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    """`embedding` with the rows of its table sliced; the weight's gradient is sliced too."""

    rank: int

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "vocabulary_embedding"

    def __call__(
        self, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int = -1, *_: Any
    ) -> torch.Tensor:
        """Return this rank's addend: the rows it has, zeros for the others."""
        rows = weight.shape[0]
        local = ids - self.rank * rows
        is_here = (local >= 0) & (local < rows)
        padding = padding_idx - self.rank * rows
        found = torch.ops.aten.embedding.default(
            weight,
            torch.where(is_here, local, 0),
            padding if padding_idx >= 0 and 0 <= padding < rows else -1,
        )
        return found * is_here.unsqueeze(-1)  # type: ignore[no-any-return]


_REDUCTIONS = ("none", "mean", "sum")


@dataclass(frozen=True, slots=True)
class VocabularyCrossEntropy:
    """`cross_entropy_loss` of logits sliced along the classes; the loss is whole on every rank.

    Attributes:
        rank: of this process among those that have a slice.
        group: these processes.
        dtype: of the loss on one device; autocast casts the logits to it there too.
    """

    rank: int
    group: dist.ProcessGroup | None
    dtype: torch.dtype | None = None

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "vocabulary_cross_entropy"

    def __call__(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> torch.Tensor:
        """Return the loss; three all_reduces of one number per row make it."""
        assert weight is None
        assert label_smoothing == 0.0
        logits = logits if self.dtype is None else logits.to(self.dtype)
        is_used = target != ignore_index
        rows: torch.Tensor = _CrossEntropyRows.apply(  # type: ignore[no-untyped-call]
            logits, target, is_used, self.rank, self.group
        )
        name = _REDUCTIONS[reduction]
        if name == "none":
            return rows
        return rows.sum() / is_used.sum() if name == "mean" else rows.sum()


class _CrossEntropyRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        is_used: torch.Tensor,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        classes = logits.shape[1]
        wide = logits.float() if logits.element_size() < 4 else logits
        largest = wide.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = wide - largest.unsqueeze(1)
        local = target - rank * classes
        is_here = (local >= 0) & (local < classes) & is_used
        row = torch.where(is_here, local, 0).unsqueeze(1)
        wanted = shifted.gather(1, row).squeeze(1) * is_here
        dist.all_reduce(wanted, group=group)
        exponential = shifted.exp_()
        total = exponential.sum(1)
        dist.all_reduce(total, group=group)
        probability = exponential.div_(total.unsqueeze(1)).to(logits.dtype)
        ctx.save_for_backward(probability, row, is_here, is_used)
        return ((total.log() - wanted) * is_used).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probability, row, is_here, is_used = ctx.saved_tensors
        hot = is_here.unsqueeze(1).to(probability.dtype)
        gradient = probability.scatter_add(1, row, -hot)
        return gradient.mul_((gradients[0] * is_used).unsqueeze(1)), None, None, None, None
