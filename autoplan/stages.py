"""Cut a program into pipeline stages, and build each as a module with the user's own names.

A stage is a slice of the chain of calls. Its root holds only what the slice reads: block modules
whole, and the parameters and buffers of glue. Side values are rebuilt on every stage from the batch
inputs; only activations cross.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoplan.autocast import in_autocast
from autoplan.errors import EmitError
from autoplan.executor import CompiledFunction, Writer
from autoplan.program import Op, Program, TensorMeta
from autoplan.tensor_layout import Border, leaving_placement

__all__ = [
    "RootContents",
    "StageRoot",
    "StageSlice",
    "build_root",
    "root_contents",
    "side_function",
    "slice_program",
    "stage_function",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSlice:
    """What one stage runs and what crosses its borders.

    Attributes:
        index: of the stage.
        calls: indices of its calls in the program, in order.
        inputs: activations that enter from the stage before.
        outputs: activations that leave to the stage after, or the loss.
        side_ops: side ops that it runs.
        batch_inputs: batch leaves that it reads.
        side_states: buffers that its side ops read: value name -> FQN.
        constants: baked-in tensors that it reads, by name.
    """

    index: int
    calls: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    side_ops: tuple[Op, ...]
    batch_inputs: tuple[str, ...]
    side_states: Mapping[str, str]
    constants: tuple[str, ...]


def slice_program(program: Program, cuts: Sequence[Sequence[int]]) -> tuple[StageSlice, ...]:
    """Return the stages of a program; `cuts` lists the calls of each stage, in order."""
    made_by = {out: i for i, call in enumerate(program.calls) for out in call.outs}
    last_read = {name: i for i, call in enumerate(program.calls) for name in call.args}
    last_read[program.loss] = len(program.calls)
    stages = []
    for index, calls in enumerate(cuts):
        first, last = calls[0], calls[-1]
        entering = [n for n, i in made_by.items() if i < first <= last_read.get(n, -1)]
        leaving = [n for n, i in made_by.items() if i <= last < last_read.get(n, -1)]
        read = {name for i in calls for name in program.calls[i].args}
        side_ops, read = _side_closure(program, read)
        stages.append(
            StageSlice(
                index=index,
                calls=tuple(calls),
                inputs=tuple(entering),
                outputs=tuple(leaving),
                side_ops=side_ops,
                batch_inputs=tuple(n for n in program.inputs if n in read),
                side_states={n: f for n, f in program.side_states.items() if n in read},
                constants=tuple(n for n in program.constants if n in read),
            )
        )
    return tuple(stages)


def _side_closure(program: Program, read: set[str]) -> tuple[tuple[Op, ...], set[str]]:
    needed = set(read)
    ops = []
    for op in reversed(program.side_ops):
        if op.name in needed:
            needed.update(op.inputs())
            ops.append(op)
    return tuple(reversed(ops)), needed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """A line of a stage's function: a side op, or a call of the chain."""

    op: Op | None
    call: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def stage_function(program: Program, stage: StageSlice, device: torch.device) -> CompiledFunction:
    """Return `f(call, side, *activations, *batch) -> outputs`.

    `call(index, *values)` runs a call of the chain; `side` holds buffers and constants, in the
    order `(*stage.side_states, *stage.constants)`.
    """
    writer = Writer(device)
    side_ops = tuple(in_autocast(op, program.autocast, device.type) for op in stage.side_ops)
    stage = replace(stage, side_ops=side_ops)
    names = _local_names(program, stage)
    items = _items(program, stage)
    last_use = {name: i for i, item in enumerate(items) for name in item.reads}
    last_use |= {name: len(items) for name in stage.outputs}
    side = [names[n] for n in (*stage.side_states, *stage.constants)]
    if side:
        writer.add(f"{', '.join(side)}{',' if len(side) == 1 else ''} = side")
    for index, item in enumerate(items):
        if item.op is not None:
            writer.op(_renamed(item.op, names))
        else:
            call = program.calls[item.call]
            outs = ", ".join(names[n] for n in call.outs)
            outs += "" if not call.outs else ", = " if len(call.outs) == 1 else " = "
            comment = f"  # {program.graphs[call.graph].name} {call.fqn}".rstrip()
            arguments = ", ".join([str(item.call), *(names[n] for n in call.args)])
            writer.add(f"{outs}call({arguments}){comment}")
        dead = {n for n in (*item.reads, *item.writes) if last_use.get(n, index) == index}
        writer.delete(names[n] for n in dead)
    writer.add(f"return ({''.join(names[n] + ', ' for n in stage.outputs).rstrip()})")
    parameters = [names[n] for n in (*stage.inputs, *stage.batch_inputs)]
    return writer.compile(f"stage{stage.index}", ["call", "side", *parameters])


def side_function(
    program: Program, stage: StageSlice, values: Sequence[str], device: torch.device
) -> CompiledFunction:
    """Return `f(side, *batch) -> values`, which runs only the side ops that `values` need.

    `side` is as in `stage_function`, `batch` are the stage's batch inputs.
    """
    writer = Writer(device)
    names = _local_names(program, stage)
    needed, _ = _side_closure(program, set(values))
    side = [names[n] for n in (*stage.side_states, *stage.constants)]
    if side:
        writer.add(f"{', '.join(side)}{',' if len(side) == 1 else ''} = side")
    for op in needed:
        writer.op(_renamed(op, names))
    writer.add(f"return ({''.join(names[n] + ', ' for n in values).rstrip()})")
    parameters = [names[n] for n in stage.batch_inputs]
    return writer.compile(f"side{stage.index}", ["side", *parameters])


_RESERVED = ("torch", "aten", "device", "call", "side")


def _local_names(program: Program, stage: StageSlice) -> dict[str, str]:
    """Return a Python name for every value; none is that of an operator or of the function's own.

    A value is often called like the operator that made it, `getitem` for one.
    """
    values = [*stage.inputs, *stage.batch_inputs, *stage.side_states, *stage.constants]
    values += [op.name for op in stage.side_ops]
    values += [out for i in stage.calls for out in program.calls[i].outs]
    taken = {*_RESERVED, *(re.sub(r"\W", "_", op.target_name) for op in stage.side_ops)}
    names: dict[str, str] = {}
    for value in dict.fromkeys(values):
        name = re.sub(r"\W", "_", value)
        while name in taken:
            name += "_"
        taken.add(name)
        names[value] = name
    return names


def _renamed(op: Op, names: Mapping[str, str]) -> Op:
    return replace(op.reading(names.__getitem__), name=names[op.name])


def _items(program: Program, stage: StageSlice) -> list[_Item]:
    """Return side ops and calls in order; each side op stands just before its first reader."""
    items: list[_Item] = []
    op_by_name = {op.name: op for op in stage.side_ops}
    done: set[str] = set()

    def add_side(name: str) -> None:
        op = op_by_name.get(name)
        if op is None or name in done:
            return
        done.add(name)
        for read in op.inputs():
            add_side(read)
        items.append(_Item(op=op, call=-1, reads=op.inputs(), writes=(name,)))

    for index in stage.calls:
        call = program.calls[index]
        for name in call.args:
            add_side(name)
        items.append(_Item(op=None, call=index, reads=call.args, writes=call.outs))
    return items


class StageRoot(nn.Module):
    """The modules of a stage under the user's names, and the function that runs them.

    Attributes are kept in `__dict__`, so that no name of the user's can meet one of ours.
    """

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_autoplan_run"] = None
        self.__dict__["_autoplan_inputs"] = []
        self.__dict__["_autoplan_scalars"] = frozenset()

    @property
    def scalars(self) -> frozenset[str]:
        """Return the names of the parameters without a dimension that are stored with one."""
        found: frozenset[str] = self.__dict__["_autoplan_scalars"]
        return found

    def give_scalars_a_dimension(self) -> None:
        """Store parameters without a dimension with one, since FSDP slices dimension 0."""
        named = [(n, p) for n, p in self.named_parameters(remove_duplicate=False) if not p.dim()]
        stored = {id(p): nn.Parameter(p.detach().reshape(1), p.requires_grad) for _, p in named}
        for name, parameter in named:
            holder, key = find_state(self, name)
            holder[key] = stored[id(parameter)]
        self.__dict__["_autoplan_scalars"] = frozenset(name for name, _ in named)

    def set_function(self, run: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        """Set what `forward` runs: `run(activations, batch) -> outputs`."""
        self.__dict__["_autoplan_run"] = run

    def swap_function(self, run: Callable[..., tuple[Any, ...]]) -> Callable[..., Any] | None:
        """Set what `forward` runs and return what it ran before."""
        before: Callable[..., Any] | None = self.__dict__["_autoplan_run"]
        self.__dict__["_autoplan_run"] = run
        return before

    def feed(self, microbatches: Sequence[tuple[torch.Tensor, ...]]) -> None:
        """Queue the batch inputs of the next forwards, which every schedule runs in order."""
        self.__dict__["_autoplan_inputs"] = list(microbatches)

    def forward(self, *activations: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch = self.__dict__["_autoplan_inputs"].pop(0)
        result: tuple[torch.Tensor, ...] = self.__dict__["_autoplan_run"](activations, batch)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class RootContents:
    """What moves from the user's model into the root of a stage.

    Attributes:
        modules: FQNs of block modules, moved whole.
        states: FQNs of parameters and buffers of glue.
        wanted: of these, what the stage reads or shares; others only need a place.
    """

    modules: tuple[str, ...]
    states: tuple[str, ...]
    wanted: frozenset[str]


def root_contents(model: nn.Module, program: Program, stage: StageSlice) -> RootContents:
    """Return what the root of a stage holds; the first one also holds what no call reads."""
    takes_unused = stage.index == 0
    block_fqns = {call.fqn for call in program.calls if call.fqn}
    own_blocks = {program.calls[i].fqn for i in stage.calls}
    read = {f for i in stage.calls for f in program.calls[i].states}
    read |= set(stage.side_states.values())
    first_names = {program.aliases.get(fqn, fqn) for fqn in read}
    tied = {fqn for fqn, first in program.aliases.items() if first in first_names}
    foreign = tuple(f"{fqn}." for fqn in block_fqns - own_blocks)
    read_anywhere = _read_anywhere(program)
    states = []
    for fqn in _state_fqns(model):
        is_optional = fqn in tied or (takes_unused and fqn not in read_anywhere)
        if fqn in read or (is_optional and not fqn.startswith(foreign)):
            states.append(fqn)
    modules = dict.fromkeys(f for i in stage.calls if (f := program.calls[i].fqn))
    return RootContents(modules=tuple(modules), states=tuple(states), wanted=frozenset(read | tied))


def build_root(model: nn.Module, contents: RootContents, device: torch.device) -> StageRoot:
    """Return the root of a stage on a device; the user's submodules move into it as they are."""
    root = StageRoot()
    for fqn in contents.modules:
        _place_module(root, fqn, model)
    for fqn in contents.states:
        _place_state(root, fqn, model, contents.wanted)
    root.train(model.training)
    # Fake tensors, which a dry run has, cannot be moved.
    if any(x.device != device for x in (*root.parameters(), *root.buffers())):
        root.to(device)
    return root


def _state_fqns(model: nn.Module) -> list[str]:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return names + [name for name, _ in model.named_buffers(remove_duplicate=False)]


def _read_anywhere(program: Program) -> set[str]:
    read = {program.aliases.get(f, f) for call in program.calls for f in call.states}
    read |= set(program.side_states.values())
    return read | {f for f, first in program.aliases.items() if first in read}


def _container(root: nn.Module, fqn: str, model: nn.Module) -> nn.Module:
    """Return the module at `fqn` in the root, made of empty modules where there is none."""
    here = root
    for part in fqn.split(".") if fqn else ():
        child = here._modules.get(part)
        if child is None:
            child = nn.Module()
            here.add_module(part, child)
        here = child
    return here


def _place_module(root: nn.Module, fqn: str, model: nn.Module) -> None:
    parent, _, name = fqn.rpartition(".")
    _container(root, parent, model)._modules[name] = model.get_submodule(fqn)


def _place_state(root: nn.Module, fqn: str, model: nn.Module, wanted: frozenset[str]) -> None:
    """Put a state into the root: with its module, where the root wants all that the module has.

    A leaf module may hold a tied weight of this stage and a bias that another stage trains.
    """
    owner_fqn, _, name = fqn.rpartition(".")
    owner = model.get_submodule(owner_fqn)
    own = {f"{owner_fqn}.{key}" for key in (*owner._parameters, *owner._buffers)}
    if owner_fqn and not owner._modules and (own <= wanted or fqn not in wanted):
        parent, _, owner_name = owner_fqn.rpartition(".")
        _container(root, parent, model)._modules[owner_name] = owner
        return
    place = _container(root, owner_fqn, model)
    if place is owner:
        return
    if name in owner._parameters:
        place.register_parameter(name, owner._parameters[name])
    else:
        persistent = name not in owner._non_persistent_buffers_set
        place.register_buffer(name, owner._buffers[name], persistent=persistent)


def find_state(root: nn.Module, fqn: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds the state `fqn` now and later, and its key in it."""
    owner_fqn, _, name = fqn.rpartition(".")
    owner = root.get_submodule(owner_fqn)
    for states in (owner._parameters, owner._buffers):
        if name in states:
            return states, name
    raise EmitError(f"{fqn} is neither a parameter nor a buffer of the stage")


def crossing_metas(
    program: Program, names: Sequence[str], compute_dtype: torch.dtype | None, *, slices: int = 1
) -> tuple[TensorMeta, ...]:
    """Return the metas of values that leave a stage, in the dtype that the stage computes in.

    Args:
        program: the captured model.
        names: of the values.
        compute_dtype: of the stage; None: as captured.
        slices: tensor-parallel degree where activations cross as slices of tokens, else 1.

    The loss leaves the last stage as one number per micro-batch, in its own dtype.
    """
    metas = []
    for name in names:
        if name == program.loss:
            metas.append(TensorMeta((1,), program.metas[name].dtype, True))
            continue
        meta = program.metas[name]
        border: Border = "tokens" if slices > 1 else "whole"
        if meta.requires_grad and leaving_placement(meta.shape, slices, border) != "R":
            rows, tokens, features = meta.shape
            meta = replace(meta, shape=(rows, tokens // slices, features))
        if compute_dtype is not None and meta.dtype.is_floating_point:
            meta = TensorMeta(meta.shape, compute_dtype, meta.requires_grad)
        metas.append(meta)
    return tuple(metas)
