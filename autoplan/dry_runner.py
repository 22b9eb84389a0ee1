"""Run a rank of a plan in one process that sends nothing, and measure its memory.

The tensors are fake: they have shapes, dtypes and sizes, and no memory, so a rank of a model of any
size runs in a small process. What is counted is what the CPU path allocates; the kernels' own
workspaces, the allocator and the communicators are not in it, nor is the plan's reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan import compat
from autoplan.batches import BatchDims, microbatch_like
from autoplan.dry_run_result import DryRun
from autoplan.emitter import captured_for, emit_stage
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel
from autoplan.opaque import empty_copy
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.training import make_optimizer

__all__ = ["dry_run", "representative_ranks"]

_STEPS = 2
_TIMEOUT_S = 60.0


def representative_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of every stage."""
    return tuple(stage * plan.mesh.dp * plan.mesh.tp for stage in range(plan.mesh.pp))


def dry_run(plan: Plan, loaded: LoadedModel, ranks: Sequence[int]) -> tuple[DryRun, ...]:
    """Run two steps of each rank, one after the other.

    Args:
        plan: what to run; it may be for thousands of processes.
        loaded: the model that was planned, on any device, `meta` too; it is left as it is.
        ranks: of the plan.

    Raises:
        PlanError: the plan is of another model.
        ValueError: there is no such rank.
    """
    world_size = plan.mesh.world_size
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank}: the plan has ranks 0 to {world_size - 1}")
    program = captured_for(plan, loaded.model, loaded.batch, loaded.loss_fn)
    found = []
    for rank in ranks:
        stage = rank // (plan.mesh.dp * plan.mesh.tp)
        with compat.fake_processes(world_size, rank):
            measured = _measure(plan, program, loaded)
        parts = plan.predicted.memory_by_category[stage]
        predicted = plan.predicted.peak_memory_bytes[stage] - parts.get("reserve", 0)
        if plan.predicted.host_bytes:  # a dry run has one memory for both
            predicted += plan.predicted.host_bytes[stage]
        found.append(
            DryRun(rank=rank, stage=stage, measured_bytes=measured, predicted_bytes=predicted)
        )
    return tuple(found)


def _measure(plan: Plan, program: Program, loaded: LoadedModel) -> int:
    """Return the peak of two steps on this rank of the fake group."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = empty_copy(loaded.model, "cpu")
    # Outside of the mode, which would make meshes of fake numbers; fake parameters stay fake.
    module = emit_stage(plan, program, model, torch.device("cpu"), _TIMEOUT_S)
    del model
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    dims = program.batch_dims
    with mode:
        batch = microbatch_like(loaded.batch, plan.global_batch_size, BatchDims(dims))
        batch = pytree.tree_map(_on_cpu, batch)
        with StorageMeter() as meter:
            meter.baseline(module, optimizer)
            for _ in range(_STEPS):
                module.train_step(module.shard_batch(batch))
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    return meter.peak_bytes


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
