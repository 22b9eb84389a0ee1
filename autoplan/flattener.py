"""Read an exported graph as a `FlatProgram`.

Regions under `torch.no_grad()` are put in line, with `detach` on what enters them, and so are
autocast regions, with every op wrapped. Assertions and casts that change nothing are dropped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch._subclasses import FakeTensor

from autoplan.autocast import FOREIGN_NOTE, InAutocast
from autoplan.errors import TraceError
from autoplan.opaque import OpaqueCall
from autoplan.program import Op, Ref, TensorMeta
from autoplan.segments import FlatProgram
from autoplan.value_checks import checking_nodes

__all__ = ["ExportError", "flattened", "pack"]

GENERATOR_NOTE = (
    "the model or the loss draws from a torch.Generator of its own: a captured block draws from it "
    "anew at every run; pass such values with the batch"
)

_MOST_COMPARED = 1024
_NO_OP_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
_WITHOUT_GRADIENT = re.compile(
    r"aten\.(detach_?|(zeros|ones|empty|full|rand|randn|randint)_like|new_\w+|bernoulli|sign)\."
)


class ExportError(TraceError):
    """An export failed in a module.

    Attributes:
        fqn: of the module; empty for the model itself or the loss.
        line: `file:line` of the user's code, or empty.
        reason: the error in one line.
    """

    def __init__(self, message: str, *, fqn: str, line: str, reason: str) -> None:
        super().__init__(message)
        self.fqn = fqn
        self.line = line
        self.reason = reason


def flattened(
    exported: Any,
    prefix: str,
    calls: Sequence[OpaqueCall],
    notes: list[str],
    keys: Sequence[str],
) -> FlatProgram:
    """Return the flat program of an exported module.

    Args:
        exported: `torch.export.ExportedProgram`.
        prefix: attribute of the exported module that holds the user's model; cut from FQNs.
        calls: what the opaque ops of the graph stand for, by handle.
        notes: what was noticed on the way; more may be added.
        keys: readable names of the inputs.

    Raises:
        ExportError: the graph holds what cannot be planned.
    """
    return _Flattener(exported, prefix, calls, notes).flat_program(keys)


def pack(*values: Any) -> tuple[Any, ...]:
    """Return several outputs as one value."""
    return values


@dataclass(slots=True)
class _Flattener:
    """Reads an exported graph as ops; drops assertions, guards and casts that change nothing."""

    exported: Any
    prefix: str
    calls: Sequence[OpaqueCall]
    notes: list[str]
    alias: dict[Any, str] = field(default_factory=dict)
    regions: dict[Any, tuple[str, ...]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    stacks: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    metas: dict[str, TensorMeta | None] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    autocasts: list[tuple[str, torch.dtype | None, bool]] = field(default_factory=list)
    checks: set[Any] = field(default_factory=set)
    loss: str = ""

    def flat_program(self, keys: Sequence[str]) -> FlatProgram:
        signature = self.exported.graph_signature
        states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = dict(signature.inputs_to_lifted_tensor_constants)
        custom = dict(signature.inputs_to_lifted_custom_objs)
        equal = _equal_constants(lifted, self.exported.constants)
        self.checks |= checking_nodes(self.exported.graph)
        trained = {n for n, p in self.exported.named_parameters() if p.requires_grad}
        for node in self.exported.graph.nodes:
            if node.op == "placeholder" and node.name in custom:
                self.objects[node.name] = self.exported.constants[custom[node.name]]
            elif node.op == "placeholder" and lifted.get(node.name) in equal:
                self.alias[node] = equal[lifted[node.name]]
            elif node.op == "placeholder":
                is_trained = states.get(node.name, "") in trained
                self.metas[node.name] = _meta(node.meta.get("val"), is_trained)
                if node.name not in states and node.name not in lifted:
                    self.inputs.append(node.name)
            elif node.op == "output":
                self.loss = self._result(node.args[0])
            else:
                self._add(node, self.exported.graph_module, "")
        if any(isinstance(value, torch.Generator) for value in self.objects.values()):
            self.notes.append(GENERATOR_NOTE)
        used = {name for op in self.ops for name in op.inputs()}
        cut = self.prefix + "."
        return FlatProgram(
            inputs=tuple(self.inputs),
            input_metas=tuple(self._required(name) for name in self.inputs),
            input_keys=tuple(keys),
            states={n: f.removeprefix(cut) for n, f in states.items() if n in used},
            state_metas={n: self._required(n) for n in states if n in used},
            parameters=frozenset(n for n in signature.inputs_to_parameters if n in used),
            constants={n: self.exported.constants[f] for n, f in lifted.items() if n in used},
            constant_metas={n: self._required(n) for n in lifted if n in used},
            ops=tuple(self.ops),
            stacks=self.stacks,
            loss=self.loss,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _result(self, nodes: Sequence[Any]) -> str:
        """Return the value that the program makes: its output, or all of several as one tuple."""
        names = [self._name(node) for node in nodes]
        if len(names) == 1:
            return names[0]
        made = {op.name for op in self.ops}
        name = "outputs"
        while name in made or name in self.metas:
            name += "_"
        packed = Op(
            name=name,
            target=pack,
            args=tuple(Ref(one) for one in names),
            kwargs={},
            fqn="",
            line="",
            meta=None,
        )
        self.ops.append(packed)
        self.stacks[name] = ()
        self.metas[name] = None
        return name

    def _required(self, name: str) -> TensorMeta:
        meta = self.metas[name]
        assert meta is not None, f"the exported input {name} has no tensor meta"
        return meta

    def _name(self, node: Any) -> str:
        return self.alias.get(node, str(node.name))

    def _add(self, node: Any, owner: Any, inside: str) -> None:
        """Add one node; `inside` names the region whose graph it stands in, if any."""
        if node.op == "get_attr" or node in self.checks:
            return
        if node.op != "call_function":
            raise TraceError(f"{node.op} {node.target}: not supported in an exported graph")
        name = str(node.target)
        if str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            self._refuse(node, f"{node.target.__name__}, a transform of torch.func (vmap, grad)")
        if node.target is operator.getitem and node.args[0] in self.regions:
            self.alias[node] = self.regions[node.args[0]][node.args[1]]
            return
        if node.target is torch.ops.autoplan.opaque.default:
            self._add_opaque(node, inside)
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._add_region(node, owner, inside)
            return
        if self._is_no_op_cast(node, name):
            self.alias[node] = self._name(node.args[0])
            return
        self._add_op(node, name, inside)

    def _is_no_op_cast(self, node: Any, name: str) -> bool:
        if name not in _NO_OP_CASTS or not isinstance(node.args[0], torch.fx.Node):
            return False
        source, value = node.args[0].meta["val"], node.meta["val"]
        is_same = source.dtype == value.dtype and source.device == value.device
        # Under autocast a cast that changes nothing here may change something on another device.
        is_sure = not torch.is_autocast_enabled("cpu")
        return is_same and is_sure and not node.kwargs.get("copy", False)

    def _add_opaque(self, node: Any, inside: str) -> None:
        """Add the call that an `autoplan::opaque` stands for."""
        inputs, states, handle = node.args
        self._add_op(node, self.calls[handle].__name__, inside)
        op = self.ops[-1]
        self.ops[-1] = replace(
            op, target=self.calls[handle], args=self._template((*inputs, *states)), kwargs={}
        )

    def _add_op(self, node: Any, name: str, inside: str) -> None:
        value = node.meta.get("val")
        sources = [self.metas.get(self._name(n)) for n in node.all_input_nodes]
        needs_grad = any(meta is not None and meta.requires_grad for meta in sources)
        needs_grad = needs_grad and not _WITHOUT_GRADIENT.match(name)
        own = f"{inside}_{node.name}" if inside else node.name
        if inside:
            self.alias[node] = own
        self._refuse_symbols(node, value)
        meta = _meta(value, needs_grad and _is_float(value))
        is_tuple = isinstance(value, (tuple, list))
        self.metas[own] = TensorMeta((), torch.float32, needs_grad) if is_tuple else meta
        self.ops.append(
            Op(
                name=own,
                target=self._target(node.target),
                args=self._template(node.args),
                kwargs=self._template(dict(node.kwargs)),
                fqn="",
                line=_line(node),
                meta=meta,
            )
        )
        self.stacks[own] = self._stack(node)

    def _target(self, target: Any) -> Any:
        """Return the operator in the autocast regions that it runs in; the innermost decides."""
        if self.autocasts and isinstance(target, torch._ops.OpOverload):
            return InAutocast(target, *self.autocasts[-1])
        return target

    def _add_region(self, node: Any, owner: Any, inside: str) -> None:
        """Put the graph of a `torch.no_grad()` or autocast region in line."""
        name = node.target.name()
        inside = f"{inside}_{node.name}" if inside else str(node.name)
        if name == "wrap_with_autocast":
            device_type, dtype, is_enabled, _, graph, *outer = node.args
            if is_enabled and device_type != "cpu":
                self.notes.append(FOREIGN_NOTE)
            region = (device_type, dtype, is_enabled)
            self.autocasts.append(region)
            self._inline(node, getattr(owner, graph.target), outer, inside, detaches=False)
            self.autocasts.pop()
            return
        if name == "wrap_with_set_grad_enabled":
            is_enabled, graph, *outer = node.args
            self._inline(node, getattr(owner, graph.target), outer, inside, detaches=not is_enabled)
            return
        self._refuse(node, f"{name}, a graph inside the graph,")

    def _refuse(self, node: Any, what: str) -> NoReturn:
        fqn, line = self._fqn(node), _line(node)
        raise ExportError(
            f"{fqn or 'the model'} ({line or 'line unknown'}): {what} cannot be planned; write it "
            "with tensors of a batch, or move it into a module of its own, which stays one op",
            fqn=fqn,
            line=line,
            reason=f"{what} in the graph",
        )

    def _inline(
        self, node: Any, graph_module: Any, outer: list[Any], inside: str, *, detaches: bool
    ) -> None:
        """Add the ops of a region; `detaches` cuts the gradient of what enters."""
        outer = list(outer)
        self.checks |= checking_nodes(graph_module.graph)
        calls = [inner for inner in graph_module.graph.nodes if inner.op == "call_function"]
        for inner in graph_module.graph.nodes:
            if inner.op == "placeholder":
                source = outer.pop(0)
                self.alias[inner] = self._name(source)
                meta = self.metas.get(self.alias[inner])
                if detaches and meta is not None and meta.requires_grad:
                    self._detach(inner, meta, inside, calls[0])
            elif inner.op == "output":
                results = inner.args[0]
                results = results if isinstance(results, (tuple, list)) else (results,)
                self.regions[node] = tuple(self._name(result) for result in results)
            else:
                self._add(inner, graph_module, inside)

    def _detach(self, inner: Any, meta: TensorMeta, inside: str, first: Any) -> None:
        own = f"{inside}_detach_{inner.name}"
        detached = TensorMeta(meta.shape, meta.dtype)
        target = torch.ops.aten.detach.default
        args = (Ref(self.alias[inner]),)
        op = Op(
            name=own, target=target, args=args, kwargs={}, fqn="", line=_line(first), meta=detached
        )
        self.ops.append(op)
        self.stacks[own] = self._stack(first)
        self.alias[inner] = own
        self.metas[own] = detached

    def _stack(self, node: Any) -> tuple[tuple[str, str], ...]:
        return tuple(
            (key, path.removeprefix(self.prefix).removeprefix("."))
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()
            if path == self.prefix or path.startswith(self.prefix + ".")
        )

    def _refuse_symbols(self, node: Any, value: Any) -> None:
        """Raise if a size in the result depends on data."""
        leaves = value if isinstance(value, (tuple, list)) else [value]
        sizes: list[Any] = [size for x in leaves if isinstance(x, torch.Tensor) for size in x.shape]
        sizes += [x for x in leaves if isinstance(x, (torch.SymInt, torch.SymBool, torch.SymFloat))]
        if all(isinstance(size, int) for size in sizes):
            return
        fqn, line = self._fqn(node), _line(node)
        raise ExportError(
            f"{fqn or 'the model'} ({line or 'line unknown'}): the result of {node.target} has a "
            f"size or value that depends on data ({value}); sizes must be fixed: pad, or mask",
            fqn=fqn,
            line=line,
            reason=f"{node.target} gives a size that depends on data",
        )

    def _fqn(self, node: Any) -> str:
        stack = self._stack(node)
        return stack[-1][1] if stack else ""

    def _template(self, value: Any) -> Any:
        """Return arguments with nodes replaced by references, in plain containers."""
        if isinstance(value, torch.fx.Node):
            name = self._name(value)
            return self.objects[name] if name in self.objects else Ref(name)
        if isinstance(value, tuple):
            return tuple(self._template(item) for item in value)
        if isinstance(value, list):
            return [self._template(item) for item in value]
        if isinstance(value, Mapping):
            return {key: self._template(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self._template(x) for x in (value.start, value.stop, value.step)))
        return value


def _meta(value: Any, requires_grad: bool) -> TensorMeta | None:
    if not isinstance(value, torch.Tensor):
        return None
    return TensorMeta(tuple(value.shape), value.dtype, requires_grad)


def _equal_constants(lifted: Mapping[str, str], constants: Mapping[str, Any]) -> dict[str, str]:
    """Return for repeated small constants, by FQN, the node of the first equal one."""
    first: list[tuple[torch.Tensor, str]] = []
    equal: dict[str, str] = {}
    for name, fqn in lifted.items():
        value = constants[fqn]
        if isinstance(value, FakeTensor) or value.numel() > _MOST_COMPARED or value.is_meta:
            continue
        same = (n for t, n in first if t.dtype == value.dtype and torch.equal(t, value))
        found = next(same, None)
        if found is None:
            first.append((value, name))
        else:
            equal[fqn] = found
    return equal


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _line(node: Any) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""
