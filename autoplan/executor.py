"""Compile captured graphs to Python functions: one line per op, dead values deleted at once.

The text of a function is kept beside it, so what runs can be read (`ParallelModule.code`).
"""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch

from autoplan.collectives import Redistribute
from autoplan.program import BlockGraph, Op, Ref

__all__ = ["CompiledFunction", "Writer", "compile_graph"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledFunction:
    """A generated function, its text, and the objects that the text names."""

    function: Callable[..., Any]
    source: str
    objects: Mapping[str, Any]


class Writer:
    """Collects lines of a generated function and the objects that they name."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._objects: dict[str, Any] = {"torch": torch, "device": device}
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Append one line of the function's body."""
        self.lines.append(f"    {line}")

    def bind(self, name: str, value: Any) -> str:
        """Make `value` readable as `name` in the function; returns the name it got."""
        free = name
        number = 1
        while free in self._objects and not _is_same(self._objects[free], value):
            number += 1
            free = f"{name}_{number}"
        self._objects[free] = value
        return free

    def marked(self, index: int, op: Op) -> None:
        """Append the lines that tell the region which op runs, and run it."""
        if isinstance(op.target, Redistribute):
            value = self.text(op.args[0])
            self.add(f"{op.name} = region.through({index}, {self._target(op)}, {value})")
            return
        self.add(f"region.at({index})")
        self.op(op)

    def op(self, op: Op) -> None:
        """Append the line that runs `op`."""
        arguments = [self.text(value) for value in op.args]
        arguments += [f"{key}={self.text(value)}" for key, value in op.kwargs.items()]
        self.add(f"{op.name} = {self._target(op)}({', '.join(arguments)})")

    def delete(self, names: Iterable[str]) -> None:
        """Append the deletion of dead values, if there are any."""
        dead = sorted(names)
        if dead:
            self.add(f"del {', '.join(dead)}")

    def compile(self, name: str, parameters: Sequence[str]) -> CompiledFunction:
        """Return the function of the lines so far."""
        source = "\n".join([f"def {name}({', '.join(parameters)}):", *self.lines, ""])
        file = f"<autoplan {name} {id(self):x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace = dict(self._objects)
        exec(compile(source, file, "exec"), namespace)
        function = namespace[name]
        assert isinstance(function, FunctionType), "the generated name is no function"
        return CompiledFunction(function=function, source=source, objects=dict(self._objects))

    def _target(self, op: Op) -> str:
        if isinstance(op.target, torch._ops.OpOverload):
            namespace, _, rest = op.target._schema.name.partition("::")
            if namespace == "aten":
                self.bind("aten", torch.ops.aten)
                return f"aten.{rest}.{op.target._overloadname}"
        return self.bind(re.sub(r"\W", "_", op.target_name), op.target)

    def text(self, value: Any) -> str:
        """Return the Python text of an argument; `Ref`s stand for local names."""
        if isinstance(value, Ref):
            return value.name
        if isinstance(value, torch.device):
            return "device" if value.type == "meta" else f"torch.{value!r}"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            return str(value)
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, complex, str)):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(self.text(item) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(self.text(item) + ', ' for item in value).rstrip()})"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self.text(part) for part in parts)})"
        if isinstance(value, Mapping):
            items = (f"{key!r}: {self.text(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        return self.bind(f"constant_{type(value).__name__}", value)


def _is_same(bound: Any, value: Any) -> bool:
    """Return whether two objects may have one name: equal redistributions are one."""
    return bound is value or (isinstance(value, Redistribute) and bound == value)


def compile_graph(
    graph: BlockGraph, device: torch.device, *, is_marked: bool = False
) -> CompiledFunction:
    """Return the function of a block graph.

    Args:
        graph: the block graph.
        device: takes the place of the meta device that the graph was captured on.
        is_marked: tell a recompute region before each op which op runs.

    Returns:
        `f(states, *inputs) -> outputs`, or `f(states, region, *inputs) -> outputs` when marked.
    """
    writer = Writer(device)
    states = [state.name for state in graph.states]
    if states:
        writer.add(f"{', '.join(states)}{',' if len(states) == 1 else ''} = states")
    last_use = last_uses(graph.ops, graph.outputs)
    known = {*states, *graph.inputs}
    writer.delete(name for name in known if name not in last_use)
    for index, op in enumerate(graph.ops):
        if is_marked:
            writer.marked(index, op)
        else:
            writer.op(op)
        read = {*op.inputs(), op.name}
        writer.delete(name for name in read if last_use.get(name, index) == index)
    writer.add(f"return ({''.join(name + ', ' for name in graph.outputs).rstrip()})")
    parameters = ["states", *(["region"] if is_marked else []), *graph.inputs]
    return writer.compile(graph.name, parameters)


def last_uses(ops: Sequence[Op], outputs: Iterable[str]) -> dict[str, int]:
    """Return, per value read, the index of the last op that reads it; outputs never end."""
    uses = {name: index for index, op in enumerate(ops) for name in op.inputs()}
    return uses | {name: len(ops) for name in outputs}
