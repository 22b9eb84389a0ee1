"""A call of the chain bound to a stage's modules: what runs when the chain reaches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.executor import compile_graph
from autoplan.program import BlockGraph
from autoplan.recompute import KeepPlan, Nowhere, keep_plan, run_region
from autoplan.stages import find_state

__all__ = ["BoundCall", "install"]

Localise = Callable[[torch.Tensor], torch.Tensor]


class BoundCall:
    """A block graph with the states it reads and its recompute entry.

    States are fetched from the modules each time: FSDP puts its gathered parameters there.
    """

    def __init__(
        self,
        graph: BlockGraph,
        fqns: Sequence[str],
        root: nn.Module,
        *,
        mode: Literal["none", "full", "selective"],
        keep: Sequence[str],
        localise: Sequence[Localise | None],
        device: torch.device,
    ) -> None:
        self._holders = [find_state(root, fqn) for fqn in fqns]
        self._localise = list(localise)
        self._mode = mode
        self._keep: KeepPlan | None = None
        if mode == "selective":
            self._keep = keep_plan(graph.ops, keep)
        compiled = compile_graph(graph, device, is_marked=self._keep is not None)
        self._function = compiled.function
        self.source = compiled.source

    def __call__(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        if self._mode == "none" or not torch.is_grad_enabled():
            return self._run(*([Nowhere()] if self._keep is not None else []), *inputs)
        return run_region(self._run, self._keep, *inputs)

    def _run(self, *inputs: Any) -> tuple[torch.Tensor, ...]:
        result: tuple[torch.Tensor, ...] = self._function(self._states(), *inputs)
        return result

    def _states(self) -> tuple[torch.Tensor, ...]:
        states = []
        for (holder, key), localise in zip(self._holders, self._localise, strict=True):
            state = holder[key]
            if localise is not None:
                state = localise(state)
            elif isinstance(state, DTensor):
                state = state.to_local()
            states.append(state)
        return tuple(states)


class _BlockForward:
    """Takes the place of a block's `forward`: runs the call that the chain has reached."""

    def __init__(self) -> None:
        self.calls: dict[int, BoundCall] = {}

    def __call__(self, index: int, *inputs: Any) -> tuple[torch.Tensor, ...]:
        return self.calls[index](*inputs)


def install(block: nn.Module, index: int, call: BoundCall) -> None:
    """Make `block(index, *inputs)` run `call`, inside whatever hooks the module has."""
    forward = block.__dict__.get("forward")
    if not isinstance(forward, _BlockForward):
        forward = _BlockForward()
        block.__dict__["forward"] = forward
    forward.calls[index] = call
