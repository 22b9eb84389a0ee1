"""Training programs as people write them on torch alone, to hold emitted ones against.

    DDP          DistributedDataParallel
    FSDP2        fully_shard of every block and of the model
    FSDP2 x TP   column- and row-parallel products in every block, then fully_shard
    1F1B         PipelineStage with Schedule1F1B, the model cut in the middle

Each returns a step: from this rank's batch to the mean loss of all ranks, optimizer included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from examples.gpt import GPT, Attention, loss_fn

__all__ = ["PROGRAMS", "Batch", "Step", "make_optimizer"]

Batch = Mapping[str, torch.Tensor]
Step = Callable[[Batch], torch.Tensor]


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of every program."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def _mean(loss: torch.Tensor) -> torch.Tensor:
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def _plain_step(model: nn.Module) -> Step:
    optimizer = make_optimizer(model.parameters())

    def step(batch: Batch) -> torch.Tensor:
        loss = loss_fn(model(batch["input_ids"]), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        mean = _mean(loss)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


def ddp(model: GPT) -> Step:
    """Return a step under DistributedDataParallel."""
    return _plain_step(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _shard(model: GPT, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def fsdp2(model: GPT) -> Step:
    """Return a step under FSDP2: every block is a unit, what is left is one with the model."""
    _shard(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return _plain_step(model)


class _LocalAttention(Attention):
    """Attention over the heads of this tensor-parallel rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        shape = (rows, tokens, -1, width // self.num_heads)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        merged: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, tokens, -1))
        return merged


def fsdp2_tp(model: GPT) -> Step:
    """Return a step under FSDP2 over pairs of tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    columns = dict.fromkeys(("attention.q", "attention.k", "attention.v", "up"), ColwiseParallel())
    rows = dict.fromkeys(("attention.out", "down"), RowwiseParallel())
    for block in model.blocks:
        block.attention.__class__ = _LocalAttention
        parallelize_module(block, mesh["tp"], {**columns, **rows})
    _shard(model, mesh["dp"])
    return _plain_step(model)


class _Half(nn.Module):
    """One of two stages of a GPT."""

    def __init__(self, model: GPT, stage: int) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.blocks = model.blocks[:middle] if stage == 0 else model.blocks[middle:]
        self.stage = stage
        if stage == 0:
            self.tokens, self.positions = model.tokens, model.positions
        else:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stage == 0:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.stage == 0 else self.head(self.norm(x))


def one_f_one_b(model: GPT, *, num_microbatches: int = 4) -> Step:
    """Return a step of a pipeline of two stages."""
    rank = dist.get_rank()
    half = _Half(model, rank)
    stage = PipelineStage(half, rank, 2, torch.device("cpu"))

    def mean_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return loss_fn(logits, {"input_ids": ids})

    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=mean_loss)
    optimizer = make_optimizer(half.parameters())

    def step(batch: Batch) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        ids = batch["input_ids"]
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(mean)
        optimizer.step()
        optimizer.zero_grad()
        return mean

    return step


PROGRAMS: Mapping[str, Callable[[GPT], Step]] = {
    "DDP": ddp,
    "FSDP2": fsdp2,
    "FSDP2 x TP": fsdp2_tp,
    "1F1B": one_f_one_b,
}
