"""A call of the chain bound to a stage's modules: what runs when the chain reaches it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.autocast import around_step
from autoplan.executor import compile_graph
from autoplan.gradient_memory import may_share_gradient
from autoplan.host_activations import on_host
from autoplan.op_facts import written_values
from autoplan.program import BlockGraph
from autoplan.recompute import KeepPlan, Nowhere, keep_plan, run_region
from autoplan.stages import find_state

__all__ = ["BoundCall", "bind_call", "install", "own_gradient", "runs_again", "written_places"]

Localise = Callable[[torch.Tensor], torch.Tensor]


class BoundCall:
    """A block graph with the states it reads and its recompute entry.

    States are fetched from the modules each time: FSDP puts its gathered parameters there.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        holders: Sequence[tuple[dict[str, Any], str]],
        localise: Sequence[Localise | None],
        *,
        mode: Literal["none", "full", "selective", "offload"],
        keep: KeepPlan | None,
        cloned: Sequence[int],
        changed: Sequence[int],
        is_scalar: Sequence[bool] = (),
        is_shared: Sequence[bool] = (),
        autocast: torch.dtype | None = None,
        device_type: str = "cpu",
        source: str = "",
    ) -> None:
        """Bind `function(states, [region,] *inputs)`.

        Args:
            function: of a block graph; takes a region where `keep` is given.
            holders: per state, the dictionary that holds it and its key.
            localise: per state, how its local form is read; None: as it is stored.
            mode, keep: what is recomputed and kept.
            cloned: positions of inputs that the function writes to, in a recomputed region.
            changed: positions of states that it writes to, likewise.
            is_scalar: per state, whether the function reads it without a dimension, however it is
                stored; empty: none is.
            is_shared: per state, whether its gradient may lie where others lie; empty: all may.
            autocast, device_type: the autocast around the step; None if there is none.
            source: its text.
        """
        self._function = function
        self._holders = list(holders)
        self._localise = list(localise)
        self._mode = mode
        self._keep = keep
        self._cloned = list(cloned)
        self._changed = list(changed)
        self._is_scalar = list(is_scalar) or [False] * len(self._holders)
        self._is_shared = list(is_shared) or [True] * len(self._holders)
        self._autocast = functools.partial(around_step, autocast, device_type)
        self.source = source

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        # Each call has a context of its own, so that its casts of weights do not outlive it in the
        # cache of autocast; checkpointing enters the same context for the second run.
        with self._autocast():
            return self._call(*inputs)

    def _call(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        if self._mode == "offload":
            states = self._states()
            tensors = [x for x in (*states, *inputs) if isinstance(x, torch.Tensor)]
            with on_host(tensors):
                kept: tuple[torch.Tensor, ...] = self._function(states, *inputs)
            return kept
        if self._mode == "none" or not torch.is_grad_enabled():
            return self._run(*([Nowhere()] if self._keep is not None else []), *inputs)
        if not self._cloned and not self._changed:
            return run_region(self._run, self._keep, *inputs)
        return run_region(self._repeatable(), self._keep, *inputs)

    def _run(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = self._function(self._states(), *inputs)
        return result

    def _repeatable(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        """Return one forward of a region that writes to its inputs or buffers.

        It may run again: inputs are written as copies; the first run writes to the buffers, later
        runs write to copies of what they held before.
        """
        states = self._states()
        before = {i: states[i].clone() for i in self._changed}
        is_first = True
        first_input = 1 if self._keep is not None else 0

        def run(*inputs: Any) -> tuple[torch.Tensor, ...]:
            nonlocal is_first
            entering = list(inputs)
            for index in self._cloned:
                entering[first_input + index] = entering[first_input + index].clone()
            states = list(self._states())
            if not is_first:
                for index, value in before.items():
                    states[index] = value.clone()
            is_first = False
            result: tuple[torch.Tensor, ...] = self._function(tuple(states), *entering)
            return result

        return run

    def _states(self) -> tuple[torch.Tensor, ...]:
        states = []
        for (holder, key), localise, is_scalar, is_shared in zip(
            self._holders, self._localise, self._is_scalar, self._is_shared, strict=True
        ):
            state = holder[key]
            is_distributed = isinstance(state, DTensor)
            if is_shared and not is_distributed and state.requires_grad and state.is_leaf:
                own_gradient(state)
            if localise is not None:
                state = localise(state)
            elif is_distributed:
                state = state.to_local()
            if is_shared and is_distributed and state.requires_grad:
                state = _OwnGradient.apply(state)  # type: ignore[no-untyped-call]
            states.append(state.reshape(()) if is_scalar and state.dim() else state)
        return tuple(states)


def bind_call(
    graph: BlockGraph,
    fqns: Sequence[str],
    root: nn.Module,
    *,
    mode: Literal["none", "full", "selective", "offload"],
    keep: Sequence[str],
    localise: Sequence[Localise | None],
    device: torch.device,
    autocast: torch.dtype | None = None,
    compiler: str | None = None,
) -> BoundCall:
    """Return a (lowered) block graph bound to the states `fqns` of a stage's root.

    A backend of `torch.compile` as `compiler` compiles what runs inside a recomputed region, not
    the region: checkpointing then restores random state around it, which compiled code around a
    checkpoint does not on every version.
    """
    kept = None
    if mode == "selective":
        kept = keep_plan(graph.ops, keep, is_autocast=autocast is not None)
    compiled = compile_graph(graph, device, is_marked=kept is not None)
    cloned, changed = written_places(graph) if runs_again(mode) else ((), ())
    function = compiled.function
    shared = may_share_gradient(graph)
    if compiler is not None and kept is None:
        function = torch.compile(function, backend=compiler, dynamic=False)
        shared = frozenset(state.name for state in graph.states)
    return BoundCall(
        function,
        [find_state(root, fqn) for fqn in fqns],
        localise,
        mode=mode,
        keep=kept,
        cloned=cloned,
        changed=changed,
        is_scalar=[state.is_parameter and not state.meta.shape for state in graph.states],
        is_shared=[state.name in shared for state in graph.states],
        autocast=autocast,
        device_type=device.type,
        source=compiled.source,
    )


def runs_again(mode: str) -> bool:
    """Return whether a block of this recompute mode runs its forward a second time."""
    return mode in ("full", "selective")


def written_places(graph: BlockGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the positions of the inputs and of the states that a graph writes to."""
    written = written_values(graph.ops)
    inputs = tuple(i for i, name in enumerate(graph.inputs) if name in written)
    states = tuple(i for i, state in enumerate(graph.states) if state.name in written)
    return inputs, states


def own_gradient(parameter: torch.Tensor) -> None:
    """Give a plain parameter a gradient whose memory nothing else has, from now on.

    Autograd takes the first gradient that it gets as it is if no other tensor object is it, be it a
    view of the gradient of another parameter, or of one that goes on: `cat` of a class token with
    patches that is added to positions gives the token a part of the positions' gradient. Adding
    micro-batches up, summing over ranks and clipping, all in place, would then happen twice to it.
    """
    if not hasattr(parameter, _IS_OWN):
        setattr(parameter, _IS_OWN, True)
        hook = functools.partial(_owned, weakref.ref(parameter))
        parameter.register_hook(hook)  # type: ignore[no-untyped-call]


_IS_OWN = "_autoplan_has_own_gradient"


def _owned(weak: weakref.ReferenceType[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """Return a copy of the first gradient; later ones are added to it."""
    parameter = weak()
    return gradient.clone() if parameter is not None and parameter.grad is None else gradient


class _OwnGradient(torch.autograd.Function):
    """Give a local parameter a gradient whose memory nothing else has.

    Autograd adds to the first gradient that it gets in place, unless other things hold it. It does
    not see what holds the local tensor in a DTensor, nor other views of it: the gradients of two
    parameters, or of a parameter and an activation, would be one memory.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor) -> torch.Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (gradient,) = gradients
        return gradient.clone()


class _BlockForward:
    """Takes the place of a block's `forward`: runs the call that the chain has reached."""

    def __init__(self) -> None:
        self.calls: dict[Hashable, BoundCall] = {}

    def __call__(self, index: Hashable, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return self.calls[index](*inputs)


def install(block: nn.Module, index: Hashable, call: BoundCall) -> Callable[..., Any]:
    """Return what runs `call` inside whatever hooks the module has: `block(index, *inputs)`."""
    forward = block.__dict__.get("forward")
    if not isinstance(forward, _BlockForward):
        forward = _BlockForward()
        block.__dict__["forward"] = forward
    forward.calls[index] = call
    return functools.partial(block, index)
