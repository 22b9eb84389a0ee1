"""A block that writes to its input is run, or refused where the write would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.errors import PlanError
from autoplan.plan import Recompute
from autoplan.program import Program
from autoplan.written_inputs import check_writes
from benchmarks.equality_draws import program_of
from benchmarks.equality_families import FAMILIES
from tests.plans import hand_plan


class _Block(nn.Module):
    """Writes to its input, and returns it with another view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x *= 2
        y = self.mix(x)
        return y, y.view(-1, 2, 2)


class _Net(nn.Module):
    def __init__(self, reads_view: bool) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(_Block() for _ in range(3))
        self.reads_view = reads_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, view = self.blocks[0](self.stem(x))
        x, _ = self.blocks[1](x)
        if self.reads_view:
            x = x + view.flatten(1)
        x, _ = self.blocks[2](x)
        return x.square().mean()


def program_with(reads_view: bool) -> Program:
    return capture(_Net(reads_view), torch.randn(2, 4), lambda out: out)


def test_a_view_of_what_another_block_writes_to_is_refused_by_name() -> None:
    program = program_with(True)
    told: list[dict[str, Any]] = [{"pp": 2, "num_microbatches": 2}, {"dp": 2, "zero_stage": 1}]
    told += [{"recompute": Recompute(mode="full")}]
    for options in told:
        plan = hand_plan(program, "Net", **options)
        with pytest.raises(PlanError, match=r"blocks\.1 writes to its input.* reads another view"):
            check_writes(plan, program)


def test_writes_that_are_seen_are_run() -> None:
    check_writes(hand_plan(program_with(True), "Net", dp=2), program_with(True))  # nothing copied
    program = program_with(False)
    check_writes(hand_plan(program, "Net", pp=2, num_microbatches=2), program)
    for family in FAMILIES:
        program = program_of(family, 1)
        check_writes(hand_plan(program, family, dp=2, zero_stage=3), program)
