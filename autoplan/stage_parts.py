"""The stages of one rank: what each runs with, and their parameters and buffers as one module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.batch_splitter import BatchSplitter
from autoplan.entries import Entry, leaving
from autoplan.program import TensorMeta
from autoplan.sharders import Sharder
from autoplan.stages import StageRoot
from autoplan.step_buffers import StepBuffers
from autoplan.step_means import StepMeans

__all__ = ["JoinedRoots", "StagePart", "StepForm", "joined", "root_function"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One stage of this rank.

    Attributes:
        root: its modules.
        sharder: its data parallelism.
        buffers: what its forward changes.
        means: the means over the step in it.
        wanted: positions of the batch leaves that it reads, of those that the rank reads.
        function: what the root runs, for batches of one shape.
    """

    root: StageRoot
    sharder: Sharder
    buffers: StepBuffers
    means: StepMeans
    wanted: tuple[int, ...]
    function: Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """What the training steps of this rank run for batches of one shape.

    Attributes:
        parts: the stages of this rank.
        splitter: cuts its batches.
        run_step: runs all micro-batches of a step and returns their losses.
    """

    parts: tuple[StagePart, ...]
    splitter: BatchSplitter
    run_step: Callable[[int], list[torch.Tensor]]


def root_function(
    function: Callable[..., Sequence[torch.Tensor]],
    side: Callable[[], tuple[torch.Tensor, ...]],
    calls: Mapping[int, Callable[..., Any]],
    modules: Mapping[int, Callable[..., Any]],
    changed: StepBuffers,
    *,
    outputs: Sequence[TensorMeta],
    loss_share: int | None,
    is_split: bool,
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return what the root of a stage runs: `run(activations, batch) -> outputs`.

    Args:
        function: of the stage: takes what runs a call, side values, activations and batch leaves.
        side: reads the buffers and constants of its side ops.
        calls: bound blocks by index.
        modules: of the calls that are modules, what runs the module with its call.
        changed: buffers that the forward changes.
        outputs: of the stage.
        loss_share: the loss is divided by it, where the stage computes the loss; else None.
        is_split: the backward runs in two parts.
    """

    def call(index: int, *inputs: Any) -> Any:
        return modules.get(index, calls[index])(*inputs)

    def run(
        activations: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        entered = [Entry.apply(x) for x in activations]  # type: ignore[no-untyped-call]
        changed.enter()
        made = function(call, side(), *entered, *batch)
        changed.leave()
        if loss_share is not None:
            return (made[0].reshape(1) / loss_share,)
        pairs = zip(made, outputs, strict=True)
        return tuple(leaving(x.to(meta.dtype), is_split) for x, meta in pairs)

    return run


class JoinedRoots(nn.Module):
    """The parameters and buffers of several stages under the user's names."""

    def __init__(self, roots: Sequence[StageRoot]) -> None:
        super().__init__()
        self.__dict__["_autoplan_roots"] = tuple(roots)

    @property
    def _roots(self) -> tuple[StageRoot, ...]:
        roots: tuple[StageRoot, ...] = self.__dict__["_autoplan_roots"]
        return roots

    @property
    def scalars(self) -> frozenset[str]:
        """Return those of every stage; see `StageRoot.scalars`."""
        return frozenset().union(*(root.scalars for root in self._roots))

    def train(self, mode: bool = True) -> JoinedRoots:
        """Switch every stage to train or eval mode."""
        self.training = mode
        for root in self._roots:
            root.train(mode)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of every stage."""
        for root in self._roots:
            yield from root.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of every stage, each name once."""
        seen: set[str] = set()
        for root in self._roots:
            for name, buffer in root.named_buffers(prefix, recurse, remove_duplicate):
                if name not in seen:
                    seen.add(name)
                    yield name, buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the states of every stage."""
        state: dict[str, Any] = {}
        for root in self._roots:
            state |= root.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load what `state_dict` returned."""
        unknown = set(state_dict) - set(self.state_dict())
        if strict and unknown:
            raise RuntimeError(f"no stage of this rank has {', '.join(sorted(unknown))}")
        for root in self._roots:
            own = {name: state_dict[name] for name in root.state_dict() if name in state_dict}
            root.load_state_dict(own, strict=strict, assign=assign)
        return None


def joined(parts: Sequence[StagePart]) -> StageRoot | JoinedRoots:
    """Return the root of a rank: that of its stage, or those of its stages as one."""
    return parts[0].root if len(parts) == 1 else JoinedRoots([part.root for part in parts])
