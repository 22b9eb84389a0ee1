"""The stages of one rank: what each runs with, and their parameters and buffers as one module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoplan.sharders import Sharder
from autoplan.stages import StageRoot
from autoplan.step_buffers import StepBuffers
from autoplan.step_means import StepMeans

__all__ = ["JoinedRoots", "StagePart", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """One stage of this rank.

    Attributes:
        root: its modules.
        sharder: its data parallelism.
        buffers: what its forward changes.
        means: the means over the step in it.
        wanted: positions of the batch leaves that it reads.
    """

    root: StageRoot
    sharder: Sharder
    buffers: StepBuffers
    means: StepMeans
    wanted: tuple[int, ...]


class JoinedRoots(nn.Module):
    """The parameters and buffers of several stages under the user's names."""

    def __init__(self, roots: Sequence[StageRoot]) -> None:
        super().__init__()
        self.__dict__["_autoplan_roots"] = tuple(roots)

    @property
    def _roots(self) -> tuple[StageRoot, ...]:
        roots: tuple[StageRoot, ...] = self.__dict__["_autoplan_roots"]
        return roots

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


def joined(parts: Sequence[StagePart]) -> nn.Module:
    """Return the root of a rank: that of its stage, or those of its stages as one."""
    return parts[0].root if len(parts) == 1 else JoinedRoots([part.root for part in parts])
