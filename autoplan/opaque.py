"""Modules and functions that stay one op: what `torch.export` cannot look into, or must not.

    module that branches on data   -> one op that runs the module, whichever branch it takes
    custom autograd function       -> one op, because its backward is not that of its forward

In the export a custom op stands for the call. Its result's shapes, its cost and what it keeps are
found by running it on fake tensors. Where a Python decision needs the value of a tensor, both
answers are tried: every question is answered with 0 and false, then with 1 and true. The results
must agree in shape; the dearer run counts.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from autoplan.answers import Answers
from autoplan.autocast import around_step
from autoplan.errors import TraceError
from autoplan.kernels import Meter, tensors_in
from autoplan.shortening import fingerprint

__all__ = ["OpaqueCall", "OpaqueCalls", "empty_copy", "empty_like", "opaque_op"]


class OpaqueCall:
    """A call of a module or function as one op.

    Called with the tensors of its arguments and then its states; returns the tensors of its result
    as a tuple.

    Attributes:
        __name__: `opaque_Gate`, `opaque_Gate_2`, ...; equal names are equal computations.
        label: the class, for messages.
        is_random: whether it draws from the random state.
        writes: positions of the tensors that it writes to.
        num_outputs: tensors that it returns.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        label: str,
        spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        state_names: Sequence[str],
    ) -> None:
        self.__name__ = f"opaque_{label}"
        self.label = label
        self.is_random = False
        self.writes: tuple[int, ...] = ()
        self.num_outputs = 0
        self._function = function
        self._spec = spec
        self._leaves = [_Hole() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._state_names = tuple(state_names)
        self._answer = 0

    @property
    def statics(self) -> tuple[str, str]:
        """Return what distinguishes two calls of one function, as text."""
        return str(self._spec), repr(self._leaves)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with Answers(self._answer):
                return self._tensors(self.run(tensors))
        return self._tensors(self.run(tensors))

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the result as the module or function gives it."""
        count = len(tensors) - len(self._state_names)
        waiting = list(tensors[:count])
        leaves = [waiting.pop(0) if isinstance(x, _Hole) else x for x in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        states = dict(zip(self._state_names, tensors[count:], strict=True))
        return self._function(states, args, kwargs)

    def _tensors(self, result: Any) -> tuple[torch.Tensor, ...]:
        return tuple(tensors_in(result))

    def probe(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, tuple[_Shape, ...]]:
        """Find what the call returns and costs by running it on fake tensors like `tensors`.

        Returns:
            The result with its tensors replaced by their position, and the shapes of those.

        Raises:
            TraceError: it does not run on fake tensors, or its result's shape depends on data.
        """
        shapes = [_Shape.of(tensor) for tensor in tensors]
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        found: list[_Probe] = []
        errors: list[Exception] = []
        for answer in (0, 1):
            try:
                found.append(_apart(lambda answer=answer: self._probe_once(answer, shapes, dtype)))  # type: ignore[misc]
            except Exception as error:
                errors.append(error)
        if not found:
            raise TraceError(f"{self.label} does not run on fake tensors: {errors[0]}")
        if any(probe.shapes != found[0].shapes for probe in found):
            raise TraceError(f"the result of {self.label} has a shape that depends on data")
        dearest = max(found, key=lambda probe: (probe.flops, probe.nbytes))
        self._answer = dearest.answer
        self.is_random = any(probe.is_random for probe in found)
        self.writes = tuple(sorted({i for probe in found for i in probe.writes}))
        self.num_outputs = len(dearest.shapes)
        return dearest.result, dearest.shapes

    def _probe_once(
        self, answer: int, shapes: Sequence[_Shape], autocast: torch.dtype | None
    ) -> _Probe:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode, torch.enable_grad(), around_step(autocast):
            tensors = [shape.empty() for shape in shapes]
            versions = [tensor._version for tensor in tensors]
            meter = Meter(tensors)
            with meter, Answers(answer):
                result = self.run(tensors)
            leaves, spec = pytree.tree_flatten(result)
            made = tensors_in(leaves)
            order = iter(range(len(made)))
            marked = [_Place(next(order)) if isinstance(x, torch.Tensor) else x for x in leaves]
            return _Probe(
                answer=answer,
                result=pytree.tree_unflatten(marked, spec),
                shapes=tuple(_Shape.of(tensor) for tensor in made),
                flops=meter.flops,
                nbytes=meter.nbytes,
                is_random=meter.is_random,
                writes=tuple(
                    i
                    for i, (tensor, version) in enumerate(zip(tensors, versions, strict=True))
                    if tensor._version != version
                ),
            )


class _Hole:
    """Stands where a tensor goes in the arguments."""

    def __repr__(self) -> str:
        return "tensor"


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands where the tensor with this position goes in the result."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        size = tuple(int(extent) for extent in tensor.shape)
        stride = tuple(int(step) for step in tensor.stride())
        return cls(size=size, stride=stride, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype)
        # A leaf that needs a gradient must not be written to; what enters a module is no leaf.
        return made.requires_grad_().view_as(made) if self.requires_grad else made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    answer: int
    result: Any
    shapes: tuple[_Shape, ...]
    flops: int
    nbytes: int
    is_random: bool
    writes: tuple[int, ...]


def _apart(function: Callable[[], _Probe]) -> _Probe:
    """Run `function` in a thread, where none of the export's modes are active."""
    results: list[_Probe] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _no_kernel(*_: Any) -> Any:
    raise TraceError("this op exists for tracing only")


opaque_op = torch.library.custom_op(
    "autoplan::opaque",
    _no_kernel,
    mutates_args=(),
    schema="(Tensor[] inputs, Tensor[] states, int handle) -> Tensor[]",
)
"""What stands for an opaque call in an export; the handle is its place in `OpaqueCalls.calls`."""

_shapes_by_handle: dict[int, tuple[_Shape, ...]] = {}


@opaque_op.register_fake
def _opaque_fake(
    inputs: list[torch.Tensor], states: list[torch.Tensor], handle: int
) -> list[torch.Tensor]:
    return [shape.empty() for shape in _shapes_by_handle[handle]]


class _GiveEveryGradient(torch.autograd.Function):
    """Identity on the first argument; the others get a gradient of zeros, added to their own.

    A module that takes a branch leaves the parameters of the other without a gradient, and ranks
    that take different branches would then disagree on what to reduce.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        ctx.metas = [(state.shape, state.dtype, state.device) for state in states]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        zeros = [torch.zeros(s, dtype=d, device=device) for s, d, device in ctx.metas]
        return gradient, *zeros


@dataclass(slots=True)
class OpaqueCalls:
    """The opaque calls of one export, in the order in which they were met."""

    calls: list[OpaqueCall] = field(default_factory=list)
    keys: list[Any] = field(default_factory=list)

    def replace(self, module: nn.Module, original: nn.Module) -> None:
        """Make `module`, part of a copy, one op in an export; `original` is the user's."""
        skeleton = empty_copy(original, "meta")
        names = [name for name, _ in module.named_parameters()]
        names += [name for name, _ in module.named_buffers()]
        label = type(module).__name__
        key = fingerprint(original)

        def function(states: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
            return _run_module(skeleton, states, args, kwargs)

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            tensors = dict(module.named_parameters()) | dict(module.named_buffers())
            states = [tensors[name] for name in names]
            return self.call(function, label, key, (args, kwargs), names, states)

        module.forward = stand_in

    def call(
        self,
        function: Callable[..., Any],
        label: str,
        key: Any,
        arguments: tuple[Any, Any],
        names: Sequence[str] = (),
        states: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Put one opaque call into the graph that is being exported and return its result."""
        leaves, spec = pytree.tree_flatten(arguments)
        opaque = OpaqueCall(function, label, spec, leaves, names)
        inputs = tensors_in(leaves)
        result, shapes = opaque.probe([*inputs, *states])
        full_key = (label, key, opaque.statics)
        if full_key not in self.keys:
            self.keys.append(full_key)
        same = [known for known in self.keys if known[0] == label]
        if same.index(full_key):
            opaque.__name__ += f"_{same.index(full_key) + 1}"
        handle = len(self.calls)
        self.calls.append(opaque)
        _shapes_by_handle[handle] = shapes
        made = torch.ops.autoplan.opaque(inputs, list(states), handle)
        marked, result_spec = pytree.tree_flatten(result)
        filled = [made[x.index] if isinstance(x, _Place) else x for x in marked]
        return pytree.tree_unflatten(filled, result_spec)

    @contextlib.contextmanager
    def watch_functions(self) -> Iterator[None]:
        """Make custom autograd functions opaque while the context is active."""
        base: Any = torch.autograd.Function
        plain = base.__dict__["apply"]

        def watched(cls: Any, *args: Any, **kwargs: Any) -> Any:
            apply = plain.__get__(None, cls)
            if cls.__module__.split(".")[0] in ("torch", "autoplan"):
                return apply(*args, **kwargs)
            if threading.current_thread() is not exporting:
                return apply(*args, **kwargs)
            if not tensors_in((args, kwargs)):
                return apply(*args, **kwargs)

            def function(_: Any, args: Any, kwargs: Any) -> Any:
                return cls.apply(*args, **kwargs)

            return self.call(function, cls.__name__, cls, (args, kwargs))

        exporting = threading.current_thread()
        base.apply = classmethod(watched)
        try:
            yield
        finally:
            base.apply = plain


def _run_module(skeleton: nn.Module, states: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
    result = torch.func.functional_call(skeleton, dict(states), args, kwargs)
    trained = [state for state in states.values() if state.requires_grad]
    leaves, spec = pytree.tree_flatten(result)
    wanted = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if trained and wanted:
        leaves[wanted[0]] = _GiveEveryGradient.apply(leaves[wanted[0]], *trained)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(leaves, spec)


def empty_copy(model: nn.Module, device: str, without: Sequence[nn.Module] = ()) -> nn.Module:
    """Return a structural copy of `model` with empty parameters and buffers; ties are kept.

    A tensor that is an attribute and neither (a table of rotations) stays itself, with its values.

    Args:
        model: stays as it is.
        device: of the empty tensors.
        without: modules that an empty one stands for in the copy.

    Raises:
        TraceError: the model cannot be copied.
    """
    memo: dict[int, Any] = {id(module): nn.Module() for module in without}
    for module in _modules(model, set(memo)):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in memo:
                empty = empty_like(parameter, device)
                memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = empty_like(buffer, device)
    for module in _modules(model, {id(one) for one in without}):
        for tensor in tensors_in(list(vars(module).values())):
            memo.setdefault(id(tensor), tensor)
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise TraceError(f"{type(model).__name__} cannot be copied: {error}") from error


def _modules(module: nn.Module, without: set[int]) -> Iterator[nn.Module]:
    if id(module) not in without:
        yield module
        for child in module.children():
            yield from _modules(child, without)


def empty_like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """Return an uninitialised tensor with the shape, strides and dtype of `tensor`."""
    return torch.empty_strided(
        tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=device
    )
