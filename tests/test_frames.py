"""What Python frames and reentrant checkpoints of other software hold, against the meter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoplan.engines import ENGINES
from autoplan.frames import with_attention_held
from autoplan.liveness import block_memory
from autoplan.local import localize
from autoplan.local_blocks import LocalBlock
from autoplan.meter import StorageMeter
from autoplan.plan import Recompute
from autoplan.tracer import trace
from tests.distributed import run_workers

ROWS, LENGTH, WIDTH = 2, 64, 32
FULL = Recompute(mode="full")
ACTIVATION_BYTES = ROWS * LENGTH * WIDTH * 4


class Attention(nn.Module):
    """Attention in one method, as Megatron-LM of 2021 has it: `scores` stay until it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mixed(x).split(WIDTH, -1)
        scores = torch.matmul(query, key.transpose(-1, -2))
        probs = scores.softmax(-1)
        context = torch.matmul(probs, value)
        out: torch.Tensor = self.dense(context)
        return out


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.relu(self.up(x)))
        return out


def local_block(kind: type[nn.Module]) -> LocalBlock:
    batch = torch.randn(ROWS, LENGTH, WIDTH)
    model = nn.Sequential(*(kind() for _ in range(3)))
    traced = trace(model, batch, lambda out: out.square().mean())
    # The first call's input gets no gradient; the others' do.
    block = traced.blocks[traced.calls[-2].block]
    return localize(block, {}, 1)


def _forward_peak(rank: int) -> int:
    module, x = Attention(), torch.randn(ROWS, LENGTH, WIDTH)
    with StorageMeter() as meter, torch.no_grad():
        before = meter.baseline(module, tensors=[x])
        module(x)
        return meter.peak_bytes - before


def test_attention_in_one_method_holds_its_values_until_it_returns() -> None:
    local = local_block(Attention)
    held = with_attention_held(local)
    assert [op.name for op in held.ops] == [op.name for op in local.ops]
    (measured,) = run_workers(_forward_peak, 1)
    assert block_memory(held, FULL).forward_peak == pytest.approx(measured, abs=1024)
    assert block_memory(local, FULL).forward_peak < measured - ACTIVATION_BYTES


def test_a_block_without_attention_has_no_scores() -> None:
    local = local_block(Residual)
    assert with_attention_held(local) == local


class _Seed(torch.autograd.Function):
    """Makes a whole gradient of what it reads."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.shape = output.shape
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        return torch.ones(ctx.shape)


def _backward_peak(rank: int) -> int:
    module = Residual()
    # The gradient of the input is none of the block's: it would be made of the one that comes.
    x = torch.randn(ROWS, LENGTH, WIDTH).requires_grad_()
    with StorageMeter() as meter:
        before = meter.baseline(module, tensors=[x])
        loss = _Seed.apply(checkpoint(module, x, use_reentrant=True))  # type: ignore[no-untyped-call]
        meter.reset_peak()
        loss.backward()
        return meter.peak_bytes - before


def test_a_reentrant_checkpoint_holds_its_outputs_and_their_gradients() -> None:
    local = local_block(Residual)
    again = replace(local, is_reentrant=True)
    peaks = [block_memory(one, FULL).backward_peak for one in (local, again)]
    (measured,) = run_workers(_backward_peak, 1)
    assert peaks[1] == pytest.approx(measured + ACTIVATION_BYTES, abs=1024)  # the input, kept
    assert peaks[0] == peaks[1] - ACTIVATION_BYTES  # the sum, which nothing saves


def test_megatron_reenters_and_its_first_versions_hold_scores() -> None:
    assert {n for n, e in ENGINES.items() if e.holds_attention} == {
        "megatron-fp16",
        "megatron-deepspeed",
    }
    assert all(e.reenters == e.has_gradient_buffer for e in ENGINES.values())
