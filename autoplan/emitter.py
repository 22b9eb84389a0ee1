"""Turn a plan into a running parallel module: plan, model -> this rank's stage.

The executor runs the captured graphs. A stage is a slice of the chain of calls over the user's own
submodules; tensor parallelism lowers the graphs, recompute marks run them as regions, FSDP2 wraps
the block modules, and torch's pipeline schedules drive the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan import compat
from autoplan.capturer import meta_copy
from autoplan.device_meshes import axis_of, make_device_mesh
from autoplan.errors import EmitError, PlanError
from autoplan.plan import Plan
from autoplan.processes import agree, ensure_process_group, seed_ranks
from autoplan.program import Program
from autoplan.rank_emission import RankEmission
from autoplan.recapture import captured_for, with_true_metas
from autoplan.runtime import ParallelModule
from autoplan.sharders import store_in_float32
from autoplan.stage_check import check_schedule

__all__ = ["emit_stage", "parallelize"]


def parallelize(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    device: torch.device | str | None = None,
    timeout_s: float = 120.0,
    compile: str | None = None,
) -> ParallelModule:
    """Return this rank's part of `model` under `plan`; every rank of the plan calls it.

    The process group is made from torchrun's environment where there is none. The model is taken
    over: its submodules move into the result, so drop your own reference to it.

    Args:
        plan: what to run; `plan.mesh.world_size` processes.
        model: the model that was planned, with the same weights on every rank.
        batch: an example batch, as it was given to the planner; only its form matters.
        loss_fn: as it was given to the planner.
        device: where to run; None takes this process's GPU, or the CPU where there is none.
        timeout_s: how long a collective may wait before it raises.
        compile: backend of `torch.compile` for the blocks, `inductor` or `aot_eager`; None does not
            compile. Blocks that keep results of chosen ops, and what stands between blocks, are not
            compiled.

    Raises:
        ValueError: another backend.
        PlanError: the plan belongs to another model or world size. It is raised on every rank.
        EmitError: the plan cannot be run with this model or this torch.
    """
    _check_compile(plan, compile)
    place = ensure_process_group(device, timeout_s)
    _check_world(plan)
    program, problem = _recapture(plan, model, batch, loss_fn)
    agree(problem)
    assert program is not None, "no program without a problem"
    skeleton = meta_copy(model)
    module = emit_stage(
        plan,
        program,
        model,
        place,
        timeout_s,
        skeleton=skeleton,
        loss_fn=loss_fn,
        compiler=compile,
    )
    seed_ranks(plan.mesh)
    return module


def emit_stage(
    plan: Plan,
    program: Program,
    model: nn.Module,
    device: torch.device,
    timeout_s: float,
    *,
    skeleton: nn.Module | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    compiler: str | None = None,
) -> ParallelModule:
    """Return this rank's part of a captured model; the process group has the plan's size.

    `skeleton` is the model without weights, which is traced for evaluation and other batch shapes.
    """
    if plan.mixed_precision != "none":
        store_in_float32(model)
    program = with_true_metas(program, device)
    mesh = _mesh(plan, device, timeout_s)
    emission = RankEmission(
        plan, program, model, device, mesh, timeout_s, skeleton, loss_fn, compiler
    )
    return emission.build()


_COMPILERS = ("inductor", "aot_eager")


def _check_compile(plan: Plan, compiler: str | None) -> None:
    if compiler is None:
        return
    if compiler not in _COMPILERS:
        raise ValueError(
            f"compile={compiler!r}; allowed are {', '.join(_COMPILERS)}: other backends, such as "
            "eager, do not restore random state where dropout is recomputed"
        )


def _check_world(plan: Plan) -> None:
    got = dist.get_world_size() if dist.is_initialized() else 1
    need = plan.mesh.world_size
    if got != need:
        raise PlanError(
            f"the plan is for {need} processes ({plan.mesh}) and {got} are running: start it with "
            f"torchrun --nproc-per-node {need}, or plan again for {got}"
        )
    check_schedule(plan)


def _recapture(
    plan: Plan, model: nn.Module, batch: Any, loss_fn: Callable[..., torch.Tensor] | None
) -> tuple[Program | None, Exception | None]:
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    if on_meta:
        return None, EmitError(
            f"{on_meta[0]} is on the meta device: give the model its weights before running a plan"
        )
    try:
        return captured_for(plan, model, batch, loss_fn), None
    except Exception as error:  # handed to `agree`, which raises it on every rank
        return None, error


def _mesh(plan: Plan, device: torch.device, timeout_s: float) -> DeviceMesh | None:
    if not dist.is_initialized():
        return None
    mesh = make_device_mesh(plan.mesh, plan.mesh.dp_replicate, device.type)
    split = ("dp_replicate", "dp_shard") if plan.mesh.dp_replicate > 1 else ()
    for name in ("pp", "dp", "tp", *split):
        compat.set_timeout(axis_of(mesh, name).get_group(), timeout_s)
    return mesh
