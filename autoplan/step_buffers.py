"""Buffers that a forward changes (running statistics) are changed once a step.

Each micro-batch starts from what a buffer held when the step began. At the end of the step the
buffer takes the mean of what the micro-batches left, over all data-parallel ranks: for running
statistics one update with the mean statistics. Buffers that are not floating-point (counters) take
what the first micro-batch left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.program import Program
from autoplan.shared_writes import changed_states
from autoplan.stages import StageSlice, find_state

__all__ = ["StepBuffers", "changed_by"]


def changed_by(program: Program, stage: StageSlice) -> tuple[str, ...]:
    """Return the FQNs of the states that the forward of a stage writes to, each once."""
    own = set(stage.calls)
    return tuple(one.fqn for one in changed_states(program) if own.intersection(one.calls))


@dataclass(slots=True)
class StepBuffers:
    """The changed buffers of a stage over one step.

    The tensor of a buffer is replaced for every micro-batch rather than written to: a backward that
    is still to come may have saved it.

    Attributes:
        holders: of each buffer: the dictionary that holds it, and its key.
        group: data-parallel ranks; None where there is one.
    """

    holders: Sequence[tuple[dict[str, Any], str]]
    group: dist.ProcessGroup | None
    _own: list[torch.Tensor] = field(default_factory=list)
    _sums: list[torch.Tensor] = field(default_factory=list)
    _count: int = 0

    @classmethod
    def of(
        cls, root: nn.Module, fqns: Sequence[str], group: dist.ProcessGroup | None
    ) -> StepBuffers:
        """Return the buffers `fqns` of a stage's root."""
        return cls([find_state(root, fqn) for fqn in fqns], group)

    def begin(self) -> None:
        """Note what the buffers hold as the step begins."""
        self._own = [holder[key] for holder, key in self.holders]
        self._sums, self._count = [], 0

    @torch.no_grad()
    def enter(self) -> None:
        """Give a micro-batch's forward the buffers of the step's begin."""
        for (holder, key), own in zip(self.holders, self._own, strict=False):
            holder[key] = own.clone()

    @torch.no_grad()
    def leave(self) -> None:
        """Take what the forward left."""
        if not self._own:
            return
        left = [holder[key] for holder, key in self.holders]
        if not self._sums:
            self._sums = [x.clone() for x in left]
        else:
            for total, x in zip(self._sums, left, strict=True):
                if total.is_floating_point():
                    total += x
        self._count += 1

    @torch.no_grad()
    def end(self) -> None:
        """Give the buffers their values for the next step."""
        for (holder, key), own, total in zip(self.holders, self._own, self._sums, strict=True):
            if total.is_floating_point():
                if self.group is not None:
                    dist.all_reduce(total, group=self.group)
                total /= self._count * (self.group.size() if self.group is not None else 1)
            own.copy_(total)
            holder[key] = own
        self._own, self._sums = [], []
