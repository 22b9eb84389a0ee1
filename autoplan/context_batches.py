"""A rank's part of every sequence of a batch, and which models may be run on one."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from autoplan.expert_parallel import STACKED
from autoplan.graph import OpTrace, Trace

__all__ = ["check_context", "token_slices"]

_MASKED = 3  # inputs of attention without a mask


def token_slices(batch: Any, degree: int, batch_dim: Any = 0) -> Any:
    """Return a batch with as many tokens of each sequence as one of `degree` ranks has.

    Positions lie along the first dimension that is not the batch: 1 where `batch_dim` is 0. Tensors
    without that dimension stay as they are.

    Raises:
        ValueError: `degree` does not divide the tokens, or tensors have unlike numbers of them.
    """
    if batch_dim not in (0, 1):
        raise ValueError(
            f"context_parallel={degree} with batch_dim={batch_dim!r}: it needs a batch along "
            "dimension 0 or 1, and positions along the other"
        )
    dim = 1 - batch_dim
    leaves, spec = pytree.tree_flatten(batch)
    lengths = {leaf.shape[dim] for leaf in leaves if _has_tokens(leaf)}
    if len(lengths) != 1:
        found = ", ".join(map(str, sorted(lengths))) or "none"
        raise ValueError(
            f"context_parallel={degree} divides the positions of a batch: its tensors must have "
            f"the same number of them along dimension {dim}, got {found}"
        )
    (tokens,) = lengths
    if tokens % degree:
        raise ValueError(
            f"context_parallel={degree} must divide the {tokens} tokens of a sequence, and twice "
            "that under a causal mask"
        )
    own = [leaf.narrow(dim, 0, tokens // degree) if _has_tokens(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(own, spec)


def _has_tokens(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1


def check_context(trace: Trace, degree: int) -> None:
    """Check that a model may be run on parts of sequences: only attention mixes positions.

    Args:
        trace: of the part that one rank has.
        degree: ranks over which sequences lie.

    Raises:
        ValueError: names the op that mixes them, or says which lengths would do.
    """
    count = 0
    for block in trace.blocks:
        for op in block.ops:
            if op.kind == "attention" and op.attention is not None:
                count += 1
                _check_attention(op, degree)
            elif _mixes(op):
                raise ValueError(
                    f"context_parallel={degree}: {op.target} ({op.name} of {block.name}) mixes "
                    "positions, which only fused attention may: use "
                    "scaled_dot_product_attention, or tensor parallelism"
                )
    if count == 0:
        raise ValueError(
            f"context_parallel={degree}: the model has no scaled_dot_product_attention, whose keys "
            "could be exchanged"
        )


def _check_attention(op: OpTrace, degree: int) -> None:
    assert op.attention is not None, "an attention op carries its sizes"
    _, _, seq_q, seq_k, _, is_causal = op.attention
    if len(op.inputs) > _MASKED:
        raise ValueError(
            f"context_parallel={degree}: attention {op.name} has a mask as a tensor; only none "
            "and is_causal=True are priced"
        )
    if seq_q != seq_k:
        raise ValueError(
            f"context_parallel={degree}: attention {op.name} has {seq_q} queries and {seq_k} keys "
            "on a rank; only self-attention is priced"
        )
    if is_causal and seq_q % 2:
        raise ValueError(
            f"context_parallel={degree}: {degree * seq_q} tokens under a causal mask must divide "
            f"into {2 * degree} chunks, two for each rank"
        )


def _mixes(op: OpTrace) -> bool:
    """Return whether an op reads positions together: it cannot run on slices of them.

    Sums to a scalar, as a loss is, are sums over ranks too; and each rank sends its own rows to
    experts.
    """
    if _is_routing(op):
        return False
    dimensions = op.dimensions
    tensors = (*dimensions.inputs, dimensions.output)
    if any(labels.count("sequence") > 1 for labels in tensors):
        return True
    reads = any("sequence" in label.split("*") for ls in dimensions.inputs for label in ls)
    is_sliced = any(option.axis == "sequence" for option in dimensions.slices)
    is_scalar = bool(op.dtype) and not op.shape
    return reads and not is_sliced and not is_scalar


def _is_routing(op: OpTrace) -> bool:
    """Return whether an op sorts or counts the experts that rows chose, or multiplies such rows.

    Its positions are of pairs of a row and an expert. What is sorted and counted has no gradient.
    """
    pairs = [
        label.split("*")
        for labels in op.dimensions.inputs
        for label in labels
        if "sequence" in label.split("*")
    ]
    are_chosen = bool(pairs) and all("experts" in kinds for kinds in pairs)
    return are_chosen and (op.target in STACKED or not op.needs_grad)
