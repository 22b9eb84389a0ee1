"""What a user can tell of an operator that autoplan does not know.

    @autoplan.register_op("mylib::mix", backward_flops=..., saved=..., shardings=...)
    def mix_flops(x, weight):
        return 2 * x.numel() * weight.shape[0]

Without it an unknown operator counts no FLOPs, is priced by the bytes that it reads and writes
(forward; backward twice that where its gradient does not run on fake tensors), keeps what its own
autograd formula saves, and runs whole on every rank. The notes of the trace name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoplan.graph import Placement

__all__ = ["CustomOp", "ShardRule", "custom_op", "register_op"]

Law = Callable[..., int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRule:
    """One legal way to run an operator on slices.

    Attributes:
        inputs: placement of each tensor argument, in order, as text: `R`, `R*`, `P` or `S(dim)`.
        output: of the result. `P` where each rank then holds an addend.
    """

    inputs: tuple[str, ...]
    output: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomOp:
    """What was told of an operator; see `register_op`."""

    flops: Law
    backward_flops: Law | None
    saved: Callable[..., Iterable[torch.Tensor | int]] | None
    shardings: tuple[ShardRule, ...]


_registered: dict[str, CustomOp] = {}


def register_op(
    target: str,
    *,
    backward_flops: Law | None = None,
    saved: Callable[..., Iterable[torch.Tensor | int]] | None = None,
    shardings: Sequence[tuple[Sequence[str], str]] = (),
) -> Callable[[Law], Law]:
    """Tell what an operator costs; decorates the law of its forward FLOPs.

    Args:
        target: `namespace::name` of the operator, as in `torch.library`.
        backward_flops: law of the backward; None takes twice the forward.
        saved: law of what autograd keeps: called with the arguments and the result, it returns
            tensors among them, or byte counts of what is made inside; None takes what the
            operator's autograd formula saves on fake tensors.
        shardings: legal slices besides running whole: pairs of the placements of the tensor
            arguments and that of the result, such as `(("S(0)", "R*"), "S(0)")`. `R*` is whole
            with a gradient that is an addend, which a shared weight has.

    Laws get the arguments as the operator does, with fake tensors.

    Raises:
        ValueError: the name or a placement is malformed.
    """
    if target.count("::") != 1:
        raise ValueError(f"{target!r} is no operator name: write namespace::name")
    rules = tuple(ShardRule(inputs=tuple(inputs), output=output) for inputs, output in shardings)
    for rule in rules:
        for text in (*rule.inputs, rule.output):
            Placement.parse(text)

    def register(flops: Law) -> Law:
        _registered[target] = CustomOp(
            flops=flops, backward_flops=backward_flops, saved=saved, shardings=rules
        )
        return flops

    return register


def custom_op(target: Any) -> CustomOp | None:
    """Return what was told of an operator, or None."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return _registered.get(target._schema.name)
