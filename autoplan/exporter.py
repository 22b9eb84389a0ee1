"""Export a module with `torch.export` and read the graph as a `FlatProgram`.

Errors of the export are told with the module and the line in which they arose. Regions under
`torch.no_grad()` are put in line, with `detach` on what enters them. Gradient checkpointing in the
model is put in line by the export; it is noticed here.
"""

from __future__ import annotations

import contextlib
import io
import operator
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from autoplan.errors import TraceError
from autoplan.program import Op, Ref, TensorMeta
from autoplan.segments import FlatProgram

__all__ = ["export"]

CHECKPOINT_NOTE = (
    "the model checkpoints activations itself (torch.utils.checkpoint or "
    "gradient_checkpointing_enable): the trace ignores it, because the plan decides what is "
    "recomputed; switch it off in the model"
)
GENERATOR_NOTE = (
    "the model or the loss draws from a torch.Generator of its own: a captured block draws from it "
    "anew at every run; pass such values with the batch"
)


def export(
    wrapper: nn.Module, tensors: tuple[torch.Tensor, ...], keys: Sequence[str], prefix: str
) -> FlatProgram:
    """Return the flat program of a module.

    Args:
        wrapper: module of flat tensor inputs that returns one tensor.
        tensors: its inputs, each a distinct tensor.
        keys: readable names of the inputs.
        prefix: attribute of `wrapper` that holds the user's model; cut from FQNs.

    Raises:
        TraceError: names the module, the line and the reason.
    """
    notes: list[str] = []
    with warnings.catch_warnings(), _watch_checkpoints(notes):
        warnings.simplefilter("ignore")
        try:
            # A failed export prints its partial graph to stderr; the message below says more.
            with contextlib.redirect_stderr(io.StringIO()):
                exported = torch.export.export(wrapper, tensors, strict=False)
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(_explain(error, wrapper, prefix)) from error
    return _Flattener(exported, prefix, notes).flat_program(keys)


@contextlib.contextmanager
def _watch_checkpoints(notes: list[str]) -> Iterator[None]:
    """Add a note when `torch.utils.checkpoint.checkpoint` runs, by either of its ways."""
    module: Any = torch.utils.checkpoint
    generator_name = "_checkpoint_without_reentrant_generator"
    plain: Any = getattr(module, generator_name, None)
    function: Any = module.CheckpointFunction

    def watched_plain(*args: Any, **kwargs: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return plain(*args, **kwargs)

    def watched_reentrant(run: Any, _: bool, *args: Any) -> Any:
        notes.append(CHECKPOINT_NOTE)
        return run(*args)

    if plain is not None:
        setattr(module, generator_name, watched_plain)
    function.apply = watched_reentrant
    try:
        yield
    finally:
        if plain is not None:
            setattr(module, generator_name, plain)
        del function.apply


def _explain(error: Exception, wrapper: nn.Module, prefix: str) -> str:
    """Return the message for a failed export: where, why, what to do."""
    fqn, line = _locate(error, wrapper, prefix)
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else 'no message'}"
    where = f"{fqn or 'the model'} ({line or 'line unknown'})"
    if "DataDependent" in type(error).__name__ or "data-dependent" in reason:
        return (
            f"{where}: its control flow or a shape depends on the values of a tensor, so one trace "
            f"cannot stand for every batch; compute both sides and select with torch.where, or "
            f"move the decision out of forward [{reason}]"
        )
    return f"{where}: torch.export could not capture the model [{reason}]"


def _locate(error: BaseException, wrapper: nn.Module, prefix: str) -> tuple[str, str]:
    """Return (module FQN, file:line) of the innermost user frame of an error or its causes."""
    names = {id(module): fqn for fqn, module in wrapper.named_modules()}
    fqn = line = ""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen and not fqn:
        seen.add(id(current))
        for frame, number in traceback.walk_tb(current.__traceback__):
            owner = frame.f_locals.get("self")
            if not isinstance(owner, nn.Module) or id(owner) not in names:
                continue
            if frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                continue
            found = names[id(owner)]
            if found == prefix or found.startswith(prefix + "."):
                fqn = found.removeprefix(prefix).removeprefix(".")
                line = f"{frame.f_code.co_filename.rpartition('/')[2]}:{number}"
        current = current.__cause__ or current.__context__
    return fqn, line


_TORCH_FOLDER = torch.__file__.rpartition("/")[0] + "/"

_SKIPPED = ("aten._assert_tensor_metadata.default", "aten._assert_async.msg")
_NO_OP_CASTS = ("aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten._to_copy.default")
_WITHOUT_GRADIENT = re.compile(
    r"aten\.(detach_?|(zeros|ones|empty|full|rand|randn|randint)_like|new_\w+|bernoulli|sign)\."
)


@dataclass(slots=True)
class _Flattener:
    """Reads an exported graph as ops; drops assertions, guards and casts that change nothing."""

    exported: Any
    prefix: str
    notes: list[str]
    alias: dict[str, str] = field(default_factory=dict)
    regions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    stacks: dict[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    metas: dict[str, TensorMeta | None] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    loss: str = ""

    def flat_program(self, keys: Sequence[str]) -> FlatProgram:
        signature = self.exported.graph_signature
        states = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        lifted = dict(signature.inputs_to_lifted_tensor_constants)
        custom = dict(signature.inputs_to_lifted_custom_objs)
        trained = {n for n, p in self.exported.named_parameters() if p.requires_grad}
        for node in self.exported.graph.nodes:
            if node.op == "placeholder" and node.name in custom:
                self.objects[node.name] = self.exported.constants[custom[node.name]]
            elif node.op == "placeholder":
                is_trained = states.get(node.name, "") in trained
                self.metas[node.name] = _meta(node.meta.get("val"), is_trained)
                if node.name not in states and node.name not in lifted:
                    self.inputs.append(node.name)
            elif node.op == "output":
                self.loss = self._name(node.args[0][0])
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

    def _required(self, name: str) -> TensorMeta:
        meta = self.metas[name]
        assert meta is not None, f"the exported input {name} has no tensor meta"
        return meta

    def _name(self, node: Any) -> str:
        name: str = node.name
        return self.alias.get(name, name)

    def _add(self, node: Any, owner: Any, inside: str) -> None:
        """Add one node; `inside` names the region whose graph it stands in, if any."""
        if node.op == "get_attr":
            return
        if node.op != "call_function":
            raise TraceError(f"{node.op} {node.target}: not supported in an exported graph")
        name = str(node.target)
        if name in _SKIPPED:
            return
        if node.target is operator.getitem and self._name(node.args[0]) in self.regions:
            source = self.regions[self._name(node.args[0])][node.args[1]]
            self._rename(node, source)
            return
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            self._add_region(node, owner)
            return
        if self._is_no_op_cast(node, name):
            self._rename(node, self._name(node.args[0]))
            return
        self._add_op(node, name, inside)

    def _rename(self, node: Any, source: str) -> None:
        self.alias[node.name] = source
        self.metas[node.name] = self.metas.get(source)

    def _is_no_op_cast(self, node: Any, name: str) -> bool:
        if name not in _NO_OP_CASTS or not isinstance(node.args[0], torch.fx.Node):
            return False
        source, value = node.args[0].meta["val"], node.meta["val"]
        is_same = source.dtype == value.dtype and source.device == value.device
        return is_same and not node.kwargs.get("copy", False)

    def _add_op(self, node: Any, name: str, inside: str) -> None:
        value = node.meta.get("val")
        sources = [self.metas.get(self._name(n)) for n in node.all_input_nodes]
        needs_grad = any(meta is not None and meta.requires_grad for meta in sources)
        needs_grad = needs_grad and not _WITHOUT_GRADIENT.match(name)
        own = f"{inside}_{node.name}" if inside else node.name
        if inside:
            self.alias[node.name] = own
        meta = _meta(value, needs_grad and _is_float(value))
        is_tuple = isinstance(value, (tuple, list))
        self.metas[own] = TensorMeta((), torch.float32, needs_grad) if is_tuple else meta
        self.ops.append(
            Op(
                name=own,
                target=node.target,
                args=self._template(node.args),
                kwargs=self._template(dict(node.kwargs)),
                fqn="",
                line=_line(node),
                meta=meta,
            )
        )
        self.stacks[own] = self._stack(node)

    def _add_region(self, node: Any, owner: Any) -> None:
        """Put the graph of a `torch.no_grad()` region in line."""
        if node.target.name() != "wrap_with_set_grad_enabled" or node.args[0] is not False:
            raise TraceError(
                f"{_where(node, self.prefix)}: {node.target.name()} (a nested graph, such as "
                "autocast inside forward) cannot be planned yet: put autocast around the training "
                "step instead of inside forward"
            )
        graph_module = getattr(owner, node.args[1].target)
        outer = list(node.args[2:])
        calls = [inner for inner in graph_module.graph.nodes if inner.op == "call_function"]
        for inner in graph_module.graph.nodes:
            if inner.op == "placeholder":
                source = outer.pop(0)
                self._rename(inner, self._name(source))
                meta = self.metas[inner.name]
                if meta is not None and meta.requires_grad:
                    self._detach(inner, source, node, calls[0])
            elif inner.op == "output":
                results = inner.args[0]
                results = results if isinstance(results, (tuple, list)) else (results,)
                self.regions[node.name] = tuple(self._name(result) for result in results)
            else:
                self._add(inner, graph_module, node.name)

    def _detach(self, inner: Any, source: Any, region: Any, first: Any) -> None:
        own = f"{region.name}_detach_{inner.name}"
        meta = self.metas[inner.name]
        assert meta is not None
        detached = TensorMeta(meta.shape, meta.dtype)
        target = torch.ops.aten.detach.default
        args = (Ref(self._name(source)),)
        op = Op(
            name=own, target=target, args=args, kwargs={}, fqn="", line=_line(first), meta=detached
        )
        self.ops.append(op)
        self.stacks[own] = self._stack(first)
        self.alias[inner.name] = own
        self.metas[own] = self.metas[inner.name] = detached

    def _stack(self, node: Any) -> tuple[tuple[str, str], ...]:
        return tuple(
            (key, path.removeprefix(self.prefix).removeprefix("."))
            for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items()
            if path == self.prefix or path.startswith(self.prefix + ".")
        )

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
    if not all(isinstance(size, int) for size in value.shape):
        raise TraceError(f"a shape depends on data: {tuple(value.shape)}; sizes must be fixed")
    return TensorMeta(tuple(value.shape), value.dtype, requires_grad)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _line(node: Any) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0].rsplit('/', 1)[-1]}:{found[-1][1]}" if found else ""


def _where(node: Any, prefix: str) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    fqn = stack[-1][0].removeprefix(prefix).removeprefix(".") if stack else ""
    return f"{fqn or 'the model'} ({_line(node) or 'line unknown'})"
