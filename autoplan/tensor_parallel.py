"""Tensor parallelism of one stage: local graphs, and parameters as DTensors over the tp mesh.

A parameter is stored as the plan says. Where the plan says nothing it is stored as its block's
graph needs it, or whole where two calls need it in different placements or FSDP could not slice it.
Of a parameter that is stored whole each call takes its slice in the forward; the gradients of such
slices are addends. `autoplan.layout_check` refuses what cannot be stored as planned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autoplan.collectives import local_slice
from autoplan.graph import Placement
from autoplan.layout_check import fsdp_can_slice
from autoplan.lowering import LoweredBlock, dtensor_placement, lower
from autoplan.plan import Layout, Plan
from autoplan.program import BlockGraph, Program
from autoplan.sharding import shard_options
from autoplan.stages import StageSlice
from autoplan.tensor_layout import WHOLE_BORDERS

__all__ = [
    "LocalCall",
    "distribute",
    "lower_calls",
    "lower_stage",
    "slice_whole",
    "slices_read",
    "stored_placements",
    "whole_calls",
]

_WHOLE = Placement(kind="replicate")

Localise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """What this rank runs of a call.

    Attributes:
        graph: local form of the block graph.
        localise: per state of the graph, how its local form is read; None: as it is stored.
    """

    graph: BlockGraph
    localise: tuple[Localise | None, ...]


def whole_calls(program: Program, stage: StageSlice) -> dict[int, LocalCall]:
    """Return the calls of a stage without tensor parallelism."""
    calls = {}
    for index in stage.calls:
        graph = program.graphs[program.calls[index].graph]
        calls[index] = LocalCall(graph=graph, localise=(None,) * len(graph.states))
    return calls


def lower_calls(
    plan: Plan,
    program: Program,
    stage: StageSlice,
    root: nn.Module,
    mesh: DeviceMesh,
    *,
    is_stored: bool = False,
) -> dict[int, LocalCall]:
    """Return the local calls of a stage; its parameters become DTensors, ties stay one object.

    Args:
        plan: its layouts are applied.
        program: the captured model.
        stage: which slice.
        root: of the stage; changed in place.
        mesh: (pp, dp, tp).
        is_stored: the parameters of the root are DTensors already.
    """
    tp = mesh["tp"]
    lowered = lower_stage(plan, program, stage, rank=tp.get_local_rank(), group=tp.get_group())
    stored = stored_placements(plan, program, stage, lowered)
    if not is_stored:
        distribute(root, stored, program.aliases, tp)
    calls = {}
    for index, block in lowered.items():
        localise = tuple(
            None if placement is None else _slicer(placement, tp)
            for placement in slices_read(program, index, block, stored)
        )
        calls[index] = LocalCall(graph=block.graph, localise=localise)
    return calls


def stored_placements(
    plan: Plan, program: Program, stage: StageSlice, lowered: Mapping[int, LoweredBlock]
) -> dict[str, Placement]:
    """Return the placement of every parameter that a stage reads, by first name."""
    dp = plan.mesh.dp // plan.mesh.dp_replicate
    is_fsdp = plan.zero_stage > 0 and dp > 1
    stored = _planned(plan, program, stage)
    shapes = {
        program.aliases.get(fqn, fqn): state.meta.shape
        for index in lowered
        for fqn, state in zip(
            program.calls[index].states,
            program.graphs[program.calls[index].graph].states,
            strict=True,
        )
    }
    for first, wanted in _required(program, lowered).items():
        if first not in stored:
            one = wanted[0] if len(set(wanted)) == 1 else _WHOLE
            can_slice = not is_fsdp or fsdp_can_slice(shapes[first], one, dp)
            stored[first] = one if can_slice else _WHOLE
    return stored


def slices_read(
    program: Program, index: int, block: LoweredBlock, stored: Mapping[str, Placement]
) -> tuple[Placement | None, ...]:
    """Return per state of a call the placement that it reads of a whole one; None: as stored."""
    found: list[Placement | None] = []
    for fqn, required in _placements(program, index, block):
        held = stored.get(program.aliases.get(fqn, fqn))
        is_same = held is None or required is None or held == required
        found.append(None if is_same else required)
    return tuple(found)


def _planned(plan: Plan, program: Program, stage: StageSlice) -> dict[str, Placement]:
    """Return per parameter (first name) the placement in which the plan stores it, if it says."""
    planned = {}
    for block in plan.stages[stage.index].blocks:
        call = program.calls[block.call]
        layout = plan.placements.get(block.placements)
        for state, fqn in zip(program.graphs[call.graph].states, call.states, strict=True):
            if state.is_parameter and layout is not None and state.fqn in layout.parameters:
                first = program.aliases.get(fqn, fqn)
                planned[first] = Placement.parse(layout.parameters[state.fqn])
    return planned


def lower_stage(
    plan: Plan,
    program: Program,
    stage: StageSlice,
    *,
    rank: int,
    group: dist.ProcessGroup | None,
) -> dict[int, LoweredBlock]:
    """Return the local form of every call of a stage on one tensor-parallel rank."""
    cache: dict[tuple[int, str], LoweredBlock] = {}
    lowered = {}
    for block in plan.stages[stage.index].blocks:
        number = program.calls[block.call].graph
        key = (number, block.placements)
        if key not in cache:
            graph = program.graphs[number]
            layout: Layout | None = plan.placements.get(block.placements)
            cache[key] = lower(
                graph,
                shard_options(graph),
                layout.axes if layout is not None else {},
                degree=plan.mesh.tp,
                rank=rank,
                group=group,
                borders=layout.both_borders if layout is not None else WHOLE_BORDERS,
            )
        lowered[block.call] = cache[key]
    return lowered


def _placements(
    program: Program, index: int, block: LoweredBlock
) -> list[tuple[str, Placement | None]]:
    """Return per state of a call its absolute FQN and, for a parameter, its placement."""
    graph = program.graphs[program.calls[index].graph]
    return [
        (fqn, Placement.parse(block.parameters[state.fqn]) if state.is_parameter else None)
        for fqn, state in zip(program.calls[index].states, graph.states, strict=True)
    ]


def _required(program: Program, lowered: Mapping[int, LoweredBlock]) -> dict[str, list[Placement]]:
    """Return per parameter (first name) the placements that calls need it in."""
    required: dict[str, list[Placement]] = {}
    for index, block in lowered.items():
        for fqn, placement in _placements(program, index, block):
            if placement is not None:
                required.setdefault(program.aliases.get(fqn, fqn), []).append(placement)
    return required


def distribute(
    root: nn.Module, stored: Mapping[str, Placement], aliases: Mapping[str, str], tp: DeviceMesh
) -> None:
    """Replace every parameter of the root by a DTensor in its stored placement."""
    names = {id(p): n for n, p in root.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in root.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                name = names[id(parameter)]
                placement = stored.get(aliases.get(name, name), _WHOLE)
                made[id(parameter)] = _distributed(parameter, placement, tp)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[key] = made[id(parameter)]


def _distributed(parameter: nn.Parameter, placement: Placement, tp: DeviceMesh) -> nn.Parameter:
    local = local_slice(parameter.detach(), placement, tp.get_local_rank(), tp.size())
    if local.untyped_storage().nbytes() > local.nbytes:
        local = local.clone()  # a view would keep the whole parameter alive
    tensor = DTensor.from_local(
        local,
        tp,
        [dtensor_placement(placement)],
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


def _slicer(required: Placement, tp: DeviceMesh) -> Localise:
    return functools.partial(
        slice_whole, placement=required, rank=tp.get_local_rank(), degree=tp.size()
    )


def slice_whole(
    parameter: torch.Tensor, *, placement: Placement, rank: int, degree: int
) -> torch.Tensor:
    """Return this rank's slice of a parameter that is stored whole; its gradient is an addend."""
    assert isinstance(parameter, DTensor), "tensor parallel parameters are DTensors"
    if placement.kind != "shard":
        return parameter.to_local(grad_placements=[Replicate()])
    whole = parameter.to_local(grad_placements=[Partial()])
    return local_slice(whole, placement, rank, degree)
