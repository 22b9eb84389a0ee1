"""Measure what the host takes around collectives: hooks of FSDP, steps of a pipeline.

Called by both ranks of a group of two. Like `measure_host`, on tensors so small that their kernels
take no time, by this thread's own clock on a CPU, so that waiting for the peer does not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoplan.profiles.measure_host import least_s

__all__ = ["hook_seconds"]

WIDTH, BLOCKS, MICROBATCHES = 8, 6, 6


def hook_seconds(device: Any, *, slice_s: float) -> dict[str, float]:
    """Return `host.*.seconds` of sharded blocks and of pipeline actions; see `HostSeconds`.

    Args:
        device: a `torch.device`.
        slice_s: seconds for the repeats of one number.
    """
    seconds = {**_sharded(device, slice_s), **_pipelined(device, slice_s)}
    return {f"host.{name}.seconds": max(value, 1e-9) for name, value in seconds.items()}


def _chain(device: Any) -> Any:
    from torch import nn

    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(BLOCKS)))


def _sharded(device: Any, slice_s: float) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    x = torch.ones(2, WIDTH, device=device)

    def seconds(module: Any) -> float:
        return _common_s(device, lambda: module(x).sum().backward(), slice_s)

    plain_s = seconds(_chain(device))
    module = _chain(device)
    for block in module:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    whole_s = seconds(module)
    module.set_reshard_after_forward(False)
    module.set_reshard_after_backward(False)
    reduced_s = seconds(module)
    module.set_requires_gradient_sync(False)
    hooks_s = seconds(module)
    return {
        "sharded_block": (hooks_s - plain_s) / BLOCKS,
        "reduce": (reduced_s - hooks_s) / BLOCKS,
        "gather": (whole_s - reduced_s) / (2 * BLOCKS),
    }


def _pipelined(device: Any, slice_s: float) -> dict[str, float]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    batch = torch.ones(MICROBATCHES, WIDTH, device=device)
    part = batch[:1]
    module = _chain(device)

    def loss(output: Any, target: Any) -> Any:
        return output.sum()

    plain_s = _common_s(device, lambda: loss(module(part), None).backward(), slice_s)
    like = part.to("meta").requires_grad_()
    stage = PipelineStage(module, rank, 2, device, input_args=(like,), output_args=(like,))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss)
    target = batch if rank == 1 else None
    inputs = (batch,) if rank == 0 else ()
    step_s = _common_s(device, lambda: schedule.step(*inputs, target=target), slice_s)
    return {"pipeline_action": (step_s / MICROBATCHES - plain_s) / 2}


def _common_s(device: Any, run: Callable[[], object], slice_s: float) -> float:
    """Return the least seconds on the rank that takes longer; both repeat equally often."""
    import torch
    import torch.distributed as dist

    begin_s = least_s(run, device, repeats=3)
    repeats = torch.tensor(slice_s / max(begin_s, 1e-6), device=device)
    dist.all_reduce(repeats, op=dist.ReduceOp.MIN)
    longest = torch.tensor(least_s(run, device, repeats=3 + int(repeats)), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
