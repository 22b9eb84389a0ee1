"""What a written training script runs: stages as plain data, built over the user's model.

`autoplan.script_writer` copies this and what it needs into the script; nothing here plans or
captures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.batch_splitter import BatchSplitter
from autoplan.calls import BoundCall, install
from autoplan.device_meshes import axis_of, make_device_mesh, sharding_mesh
from autoplan.graph import Placement
from autoplan.meshes import AxisOrder
from autoplan.microbatches import PipelinePart, pipeline_runner
from autoplan.program import TensorMeta
from autoplan.recompute import KeepPlan
from autoplan.runtime import ParallelModule
from autoplan.sharders import shard
from autoplan.stage_parts import StagePart, StepForm, root_function
from autoplan.stages import RootContents, StageRoot, build_root, find_state
from autoplan.step_buffers import StepBuffers
from autoplan.step_means import Denominator, StepMeans, StepValue
from autoplan.tensor_parallel import distribute, slice_whole
from autoplan.ties import make_ties

__all__ = ["CallSpec", "Degrees", "ScriptPlan", "StageSpec", "build_stage", "make_mesh"]


_TIMEOUT_S = 600.0  # of a message between stages


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """Degrees of data, tensor and pipeline parallelism, and how ranks are numbered over them."""

    dp: int
    tp: int
    pp: int
    dp_replicate: int = 1
    axis_order: AxisOrder = "tp-dp-pp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPlan:
    """The decisions that hold for all stages.

    Attributes:
        mesh, zero_stage, schedule, num_microbatches, microbatch_size, mixed_precision: as planned.
        autocast: dtype of the autocast around the step, or None.
        offload: as planned.
        input_keys: paths of the tensors of a batch.
        input_metas: of these, for one micro-batch.
        batch_dims: their batch dimensions.
        aliases: name of each parameter -> first name of the same one.
        stored: placement over tp of each parameter that is not whole, by first name.
        shared: parameters with copies on several ranks of the pipeline, and these.
    """

    mesh: Degrees
    zero_stage: int
    schedule: Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"]
    num_microbatches: int
    microbatch_size: int
    mixed_precision: str
    autocast: torch.dtype | None
    offload: Literal["none", "optimizer"]
    input_keys: tuple[str, ...]
    input_metas: tuple[TensorMeta, ...]
    batch_dims: tuple[int | None, ...]
    aliases: Mapping[str, str]
    stored: Mapping[str, str]
    shared: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call of a block.

    Attributes:
        fqn: of its module; empty for what stands between blocks.
        run: `run(states, [region,] *inputs)`.
        states: FQNs of the states.
        slices: per state, the placement in which it is read if it is stored whole; else empty.
        mode, keep, cloned, changed: what is recomputed; see `BoundCall`.
        shared: positions of the states whose gradients may lie where others lie.
    """

    fqn: str
    run: Callable[..., Any]
    states: tuple[str, ...]
    slices: tuple[str, ...] = ()
    mode: Literal["none", "full", "selective"] = "none"
    keep: KeepPlan | None = None
    cloned: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """One pipeline stage.

    Attributes:
        run: `run(call, side, *activations, *batch) -> outputs`.
        calls: by index.
        contents: what of the model it holds.
        side: buffers that masks and positions are made from.
        constants: tensors likewise.
        batch: positions of the tensors of a batch that it reads.
        inputs, outputs: what crosses its borders.
        computes_loss: whether it is the last stage.
        changed: buffers that its forward changes.
        denominators: of means over the step, with `read(side, *batch)` and their values.
    """

    run: Callable[..., Any]
    calls: Mapping[int, CallSpec]
    contents: RootContents
    side: tuple[str, ...] = ()
    constants: tuple[torch.Tensor, ...] = ()
    batch: tuple[int, ...] = ()
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    computes_loss: bool = False
    changed: tuple[str, ...] = ()
    denominators: tuple[Denominator, ...] = ()
    read: Callable[..., Any] | None = None
    values: Mapping[tuple[int, str], StepValue] = field(default_factory=dict)


def make_mesh(plan: ScriptPlan, device: torch.device) -> DeviceMesh:
    """Return the mesh (pp, dp, tp) of all processes.

    Raises:
        ValueError: another number of processes runs.
    """
    need = plan.mesh.dp * plan.mesh.tp * plan.mesh.pp
    if dist.get_world_size() != need:
        raise ValueError(
            f"{dist.get_world_size()} processes run, the plan is for {need}: start this script "
            f"with torchrun --nproc-per-node {need}, or that many over all nodes"
        )
    return make_device_mesh(plan.mesh, plan.mesh.dp_replicate, device.type)


def build_stage(
    plan: ScriptPlan,
    stages: Sequence[StageSpec],
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
) -> ParallelModule:
    """Return this rank's stages of `model`, which is taken over."""
    rank, pp = mesh.get_local_rank("pp"), plan.mesh.pp
    own = range(rank, len(stages), pp)
    ties = make_ties(plan.shared, plan.mesh, rank)
    wanted = sorted({i for index in own for i in stages[index].batch})
    parts = [_part(plan, stages[index], model, mesh, device, wanted) for index in own]
    holder: list[ParallelModule] = []
    run_step: Callable[[int], list[torch.Tensor]]
    if pp == 1:
        run_step = lambda count: holder[0].run_microbatches(count)  # noqa: E731
    else:
        is_mixed = plan.mixed_precision == "bfloat16"
        run_step = pipeline_runner(
            [
                PipelinePart(
                    root=part.root,
                    index=index,
                    inputs=stages[index].inputs,
                    outputs=stages[index].outputs,
                    before_backward=part.sharder.before_backward,
                )
                for index, part in zip(own, parts, strict=True)
            ],
            num_stages=len(stages),
            schedule=plan.schedule,
            num_microbatches=plan.num_microbatches,
            is_hidden=plan.zero_stage >= 2
            and (plan.mesh.dp > 1 or is_mixed or plan.offload != "none"),
            device=device,
            group=mesh.get_group("pp"),
            timeout_s=_TIMEOUT_S,
        )
    splitter = BatchSplitter(
        keys=plan.input_keys,
        metas=plan.input_metas,
        batch_dims=plan.batch_dims,
        wanted=tuple(wanted),
        rows=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        dp=plan.mesh.dp,
        dp_rank=axis_of(mesh, "dp").get_local_rank(),
        device=device,
    )
    module = ParallelModule(
        plan=plan,
        form=StepForm(parts=tuple(parts), splitter=splitter, run_step=run_step),
        mesh=mesh,
        ties=ties,
        aliases=plan.aliases,
        sources=(),
        computes_loss=any(stages[index].computes_loss for index in own),
    )
    holder.append(module)
    return module


def _part(
    plan: ScriptPlan,
    stage: StageSpec,
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    wanted: Sequence[int],
) -> StagePart:
    """Return a stage of this rank, which reads some of the `wanted` leaves of a batch."""
    root = build_root(model, stage.contents, device)
    group = axis_of(mesh, "dp").get_group()
    means = StepMeans(stage.denominators, _side_reader(stage, root), group, stage.values)
    stored = {name: Placement.parse(text) for name, text in plan.stored.items()}
    if plan.mesh.tp > 1:
        distribute(root, stored, plan.aliases, mesh["tp"])
    buffers = StepBuffers.of(root, stage.changed, group)
    function = _function(plan, stage, root, buffers, mesh)
    sharder = shard(
        root,
        [root.get_submodule(fqn) for fqn in stage.contents.modules],
        states=[fqn for spec in stage.calls.values() for fqn in spec.states],
        zero_stage=plan.zero_stage,
        mesh=sharding_mesh(mesh, plan.mesh.dp_replicate),
        is_mixed=plan.mixed_precision == "bfloat16",
        is_pipeline=plan.mesh.pp > 1,
        offload=plan.offload,
    )
    return StagePart(
        root=root,
        sharder=sharder,
        buffers=buffers,
        means=means,
        wanted=tuple(wanted.index(i) for i in stage.batch),
        function=function,
    )


def _side_values(stage: StageSpec, root: StageRoot) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return what reads the buffers and constants of a stage's side ops."""
    holders = [find_state(root, fqn) for fqn in stage.side]
    return lambda: (*(holder[key] for holder, key in holders), *stage.constants)


def _side_reader(
    stage: StageSpec, root: StageRoot
) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    side = _side_values(stage, root)

    def read(batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        assert stage.read is not None, "denominators have a reader"
        values: Sequence[torch.Tensor] = stage.read(side(), *batch)
        return values

    return read


def _function(
    plan: ScriptPlan, stage: StageSpec, root: StageRoot, buffers: StepBuffers, mesh: DeviceMesh
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Bind the calls of a stage to its modules, and return what the root runs."""
    calls = {i: _bind(spec, root, mesh, plan.autocast) for i, spec in stage.calls.items()}
    modules = {
        i: install(root.get_submodule(spec.fqn), i, calls[i])
        for i, spec in stage.calls.items()
        if spec.fqn
    }
    assert stage.run is not None, "a stage has what it runs"
    return root_function(
        stage.run,
        _side_values(stage, root),
        calls,
        modules,
        buffers,
        outputs=stage.outputs,
        loss_share=plan.num_microbatches if stage.computes_loss else None,
        is_split=plan.schedule == "zero_bubble",
    )


def _bind(
    spec: CallSpec, root: StageRoot, mesh: DeviceMesh, autocast: torch.dtype | None
) -> BoundCall:
    rank, degree = mesh.get_local_rank("tp"), mesh["tp"].size()
    localise = [
        functools.partial(slice_whole, placement=Placement.parse(text), rank=rank, degree=degree)
        if text
        else None
        for text in spec.slices or ("",) * len(spec.states)
    ]
    holders = [find_state(root, fqn) for fqn in spec.states]
    return BoundCall(
        spec.run,
        holders,
        localise,
        mode=spec.mode,
        keep=spec.keep,
        cloned=spec.cloned,
        changed=spec.changed,
        is_scalar=[holder[key].dim() == 0 for holder, key in holders],
        is_shared=[place in spec.shared for place in range(len(holders))],
        autocast=autocast,
        device_type=mesh.device_type,
    )
