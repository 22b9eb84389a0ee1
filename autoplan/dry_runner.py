"""Run a rank of a plan in one process that sends nothing, and measure its memory.

The tensors are fake: they have shapes, dtypes and sizes, and no memory, so a rank of a model of any
size runs in a small process. What is counted is what the CPU path allocates; the kernels' own
workspaces, the allocator and the communicators are not in it, nor is the plan's reserve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan import compat
from autoplan.batches import BatchDims, microbatch_like
from autoplan.dry_run_result import DryRun
from autoplan.emitter import emit_stage
from autoplan.meshes import stage_of_rank, stride_of
from autoplan.meter import StorageMeter
from autoplan.models import LoadedModel
from autoplan.opaque import empty_copy
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.recapture import captured_for
from autoplan.runtime import ParallelModule
from autoplan.training import make_optimizer

__all__ = ["dry_run", "representative_ranks"]

_TIMEOUT_S = 60.0


def representative_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the first rank of every stage."""
    return tuple(stage * stride_of("pp", plan.mesh) for stage in range(plan.mesh.pp))


def dry_run(plan: Plan, loaded: LoadedModel, ranks: Sequence[int]) -> tuple[DryRun, ...]:
    """Run a step of each rank, one after the other.

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
        stage = stage_of_rank(rank, plan.mesh)
        with compat.fake_processes(world_size, rank):
            measured = _measure(plan, program, loaded)
        predicted = plan.predicted.tensor_peak_bytes(stage)
        found.append(
            DryRun(rank=rank, stage=stage, measured_bytes=measured, predicted_bytes=predicted)
        )
    return tuple(found)


def _measure(plan: Plan, program: Program, loaded: LoadedModel) -> int:
    """Return the peak of a step on this rank of the fake group, with the optimizer's state."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = empty_copy(loaded.model, "cpu")
    short = _shortened(plan)
    # Outside of the mode, which would make meshes of fake numbers; fake parameters stay fake.
    module = emit_stage(short, program, model, torch.device("cpu"), _TIMEOUT_S)
    del model
    optimizer = make_optimizer(plan.optimizer, module.parameters())
    dims = BatchDims(program.batch_dims)
    rows = plan.microbatch_size * plan.num_microbatches
    with mode:
        _make_states(module, optimizer)
        share = microbatch_like(loaded.batch, rows, dims)
        share = pytree.tree_map(_on_cpu, share)
        batch = _first_rows(share, short.microbatch_size * short.num_microbatches, dims)
        with StorageMeter() as meter:
            meter.baseline(module, optimizer, tensors=_tensors(share))
            module.train_step(batch)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return meter.peak_bytes


def _shortened(plan: Plan) -> Plan:
    """Return a plan of fewer micro-batches with the same peaks.

    Without a pipeline the second micro-batch, which adds to gradients, is like all later ones;
    1F1B repeats itself once every stage has warmed up. GPipe holds all micro-batches at once.
    """
    most = {"none": 2, "1f1b": plan.mesh.pp + 2}.get(plan.schedule, plan.num_microbatches)
    count = min(plan.num_microbatches, most)
    rows = plan.mesh.dp * count * plan.microbatch_size
    return replace(plan, num_microbatches=count, global_batch_size=rows)


def _make_states(module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, by a step with empty gradients."""
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _first_rows(batch: Any, rows: int, dims: BatchDims) -> Any:
    told = iter(dims)

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or (dim := next(told)) is None:
            return leaf
        return leaf.narrow(dim, 0, rows)

    return pytree.tree_map(cut, batch)


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")
