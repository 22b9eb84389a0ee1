"""Losses that are means over a number which differs between micro-batches: valid tokens, weights.

A mean of means weighs a token by how few valid ones share its micro-batch. The loss of one device
is `sum(numerators) / sum(denominators)`, so each micro-batch divides by the mean denominator of the
step, over micro-batches and data-parallel ranks. Denominators follow from the batch alone, so they
are known before the first forward:

    cross_entropy, nll_loss with reduction "mean"   the targets that are not `ignore_index`
    scalar / scalar of the batch                    the divisor, such as `mask.sum()`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from autoplan.axis_labels import arguments, op_name
from autoplan.program import BlockGraph, Op, Program, Ref

__all__ = ["Denominator", "StepMeans", "StepValue", "find_denominators"]

_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_MEAN = 1  # values of `at::Reduction`
_SUM = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominator:
    """What one op of one call divides by.

    Attributes:
        call: index in the program.
        op: name in the call's graph.
        value: program value that it follows from; it depends on the batch and on buffers only.
        ignore_index: targets that do not count; None where the value is the divisor itself.
    """

    call: int
    op: str
    value: str
    ignore_index: int | None

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the denominator of one micro-batch."""
        if self.ignore_index is None:
            return value.double()
        return (value != self.ignore_index).sum().double()


def find_denominators(program: Program, calls: Sequence[int]) -> tuple[Denominator, ...]:
    """Return the denominators of some calls of a program."""
    known = {*program.inputs, *(op.name for op in program.side_ops)}
    found = []
    for index in calls:
        call = program.calls[index]
        graph = program.graphs[call.graph]
        outside = dict(zip(graph.inputs, call.args, strict=True))
        for op in graph.ops:
            read = _denominator(op, graph)
            if read is not None and outside.get(read[0]) in known:
                value = outside[read[0]]
                one = Denominator(call=index, op=op.name, value=value, ignore_index=read[1])
                found.append(one)
    return tuple(found)


def _denominator(op: Op, graph: BlockGraph) -> tuple[str, int | None] | None:
    """Return the value that an op's denominator follows from, and the index that is ignored."""
    if op.meta is None or op.meta.shape or not isinstance(op.target, torch._ops.OpOverload):
        return None
    name = op_name(op)
    if name in _LOSSES:
        a = arguments(op)
        target = a["target"]
        if not isinstance(target, Ref) or a["weight"] is not None or a["reduction"] != _MEAN:
            return None
        meta = graph.meta(target.name)
        is_class = meta is not None and not meta.dtype.is_floating_point
        return (target.name, a["ignore_index"]) if is_class else None
    if name == "div" and len(op.args) == 2 and not op.kwargs:
        divisor = op.args[1]
        meta = graph.meta(divisor.name) if isinstance(divisor, Ref) else None
        if meta is not None and not meta.shape:
            return divisor.name, None
    return None


@dataclass(slots=True)
class StepValue:
    """The mean denominator of the step that runs."""

    tensor: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _MeanLoss:
    """A loss that is divided by the mean number of valid targets of the step's micro-batches."""

    target: Callable[..., torch.Tensor]
    value: StepValue

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        target = self.target
        if isinstance(target, torch._ops.OpOverload):
            return f"step_mean_{target._schema.name.partition('::')[2]}"
        return f"step_mean_{target.__name__}"

    def __call__(self, logits: torch.Tensor, target: torch.Tensor, *others: Any) -> torch.Tensor:
        """Return this micro-batch's share of the mean."""
        assert self.value.tensor is not None, "a loss outside a step"
        weight, _, *rest = others
        total = self.target(logits, target, weight, _SUM, *rest)
        return total / self.value.tensor.to(total.dtype)


@dataclass(frozen=True, slots=True)
class _MeanDivision:
    """A division by the mean divisor of the step's micro-batches."""

    value: StepValue

    @property
    def __name__(self) -> str:
        """Return a readable name."""
        return "divide_by_step_mean"

    def __call__(self, numerator: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """Return this micro-batch's share."""
        assert self.value.tensor is not None, "a loss outside a step"
        return numerator / self.value.tensor.to(numerator.dtype)


@dataclass(slots=True)
class StepMeans:
    """The denominators of a stage over one step.

    Attributes:
        found: the denominators on this stage.
        read: returns the values of the denominators for the batch inputs of a micro-batch.
        group: data-parallel ranks; None where there is one.
        values: per call and op, its value in the step that runs.
    """

    found: Sequence[Denominator]
    read: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    group: dist.ProcessGroup | None
    values: Mapping[tuple[int, str], StepValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.values:
            self.values = {(one.call, one.op): StepValue() for one in self.found}

    def bind(self, program: Program, call: int, graph: BlockGraph) -> BlockGraph:
        """Return the (lowered) graph of a call with its means taken over the step."""
        wanted = {op: value for (index, op), value in self.values.items() if index == call}
        if not wanted:
            return graph
        original = {op.name: op for op in program.graphs[program.calls[call].graph].ops}
        ops = tuple(
            _bound(op, original[op.name], wanted[op.name]) if op.name in wanted else op
            for op in graph.ops
        )
        return replace(graph, ops=ops)

    @torch.no_grad()
    def begin(self, microbatches: Sequence[Sequence[torch.Tensor]]) -> None:
        """Count what the step's micro-batches divide by."""
        if not self.found:
            return
        rows = [
            torch.stack([one.of(v) for one, v in zip(self.found, self.read(batch), strict=True)])
            for batch in microbatches
        ]
        mean = torch.stack(rows).mean(0)
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(mean, group=self.group)
            mean /= self.group.size()
        for one, value in zip(self.found, mean, strict=True):
            self.values[one.call, one.op].tensor = value


def _bound(op: Op, original: Op, value: StepValue) -> Op:
    if op_name(original) == "div":
        return replace(op, target=_MeanDivision(value))
    a = arguments(original)
    rest = (a["label_smoothing"],) if "label_smoothing" in a else ()
    args = (*op.args[:2], None, a["reduction"], a["ignore_index"], *rest)
    return replace(op, target=_MeanLoss(op.target, value), args=args, kwargs={})
