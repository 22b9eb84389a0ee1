"""Data parallelism of one stage: ZeRO 0 by own all-reduce, 1 to 3 by FSDP2.

Without mixed precision ZeRO 0 keeps one copy of every parameter: gradients are summed in place when
the backward of the last micro-batch has made them. Torch's `replicate` would hold a second copy of
all parameters during forward and backward, so it is used only where that copy has another dtype.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from autoplan import compat
from autoplan.stages import StageRoot, find_state

__all__ = ["GradientReducer", "Sharder", "Unsharded", "local_tensor", "shard", "store_in_float32"]


# Gradients below this size are reduced together: each collective of its own costs a launch.
_TOGETHER_BYTES = 4 << 20


class Sharder(Protocol):
    """What a training step asks of data parallelism."""

    def before_step(self, num_microbatches: int) -> None:
        """Prepare for the micro-batches of a step."""

    def before_microbatch(self, index: int, num_microbatches: int) -> None:
        """Prepare for the forward and backward of a micro-batch; not called under a pipeline."""

    def before_backward(self, is_last: bool) -> None:
        """Prepare for the backward of a micro-batch; called under a pipeline."""

    def after_step(self) -> None:
        """Finish the gradients of a step."""


class Unsharded:
    """No data parallelism."""

    def before_step(self, num_microbatches: int) -> None:
        return

    def before_microbatch(self, index: int, num_microbatches: int) -> None:
        return

    def before_backward(self, is_last: bool) -> None:
        return

    def after_step(self) -> None:
        return


@dataclass(slots=True)
class GradientReducer:
    """ZeRO 0: average gradients over the data-parallel ranks, as backward makes them.

    Small gradients move into one buffer and go together; a large one goes alone, without a copy.
    What goes together, and in which order, does not depend on when gradients are made: ranks may
    train batches of different shapes.

    Attributes:
        parameters: in the order in which backward makes their gradients, the same on all ranks.
        group: data-parallel ranks.
        overlaps: start each all-reduce in the backward of the last micro-batch.
    """

    parameters: Sequence[nn.Parameter]
    group: dist.ProcessGroup
    overlaps: bool
    _is_last: bool = False
    _buckets: list[list[nn.Parameter]] = field(default_factory=list)
    _bucket_of: dict[int, int] = field(default_factory=dict)
    _missing: list[int] = field(default_factory=list)
    _next: int = 0
    _works: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [p for p in self.parameters if p.requires_grad]
        self._buckets = _together(trained)
        self._bucket_of = {id(p): i for i, own in enumerate(self._buckets) for p in own}
        for parameter in trained if self.overlaps else ():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._on_gradient
            )

    def before_step(self, num_microbatches: int) -> None:
        self._is_last = False
        self._next = 0
        self._missing = [len(own) for own in self._buckets]

    def before_microbatch(self, index: int, num_microbatches: int) -> None:
        self._is_last = index == num_microbatches - 1

    def before_backward(self, is_last: bool) -> None:
        return

    def after_step(self) -> None:
        thawed = [p for p in self.parameters if id(p) not in self._bucket_of]
        for own in (*self._buckets[self._next :], *_together(thawed)):
            self._start(own)
        for work in self._works:
            work.wait()
        self._works.clear()
        self._is_last = False

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_last:
            return
        self._missing[self._bucket_of[id(parameter)]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start(self._buckets[self._next])
            self._next += 1

    def _start(self, parameters: Sequence[nn.Parameter]) -> None:
        small = []
        for parameter in parameters:
            if parameter.grad is None:
                continue
            normalise_gradient(parameter)
            local = local_tensor(parameter.grad)
            if local.is_contiguous():
                small.append(local)
            else:
                self._reduce(local)
        if len(small) == 1:
            self._reduce(small[0])
        elif small:
            buffer = torch.cat([gradient.view(-1) for gradient in small])
            pieces = torch.split(buffer, [gradient.numel() for gradient in small])
            for gradient, piece in zip(small, pieces, strict=True):
                gradient.data = piece.view(gradient.shape)
            self._reduce(buffer)

    def _reduce(self, tensor: torch.Tensor) -> None:
        tensor.div_(self.group.size())
        self._works.append(dist.all_reduce(tensor, group=self.group, async_op=True))


def _together(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in groups that are reduced together, each of one dtype."""
    buckets: list[list[nn.Parameter]] = []
    room, dtype = 0, None
    for parameter in parameters:
        size = local_tensor(parameter).nbytes
        if room <= 0 or size >= _TOGETHER_BYTES or parameter.dtype != dtype:
            buckets.append([])
            room, dtype = _TOGETHER_BYTES, parameter.dtype
        buckets[-1].append(parameter)
        room -= size
    return buckets


@dataclass(slots=True)
class FsdpSharder:
    """ZeRO 1 to 3, and ZeRO 0 in mixed precision, by FSDP2 on a stage's root.

    Attributes:
        root: the wrapped stage root.
        zero_stage: as planned.
        is_hidden: the pipeline runtime does not see the root, which then reduces gradients in every
            micro-batch.
        has_replicas: shards are summed over replicas, once a step.
    """

    root: FSDPModule
    zero_stage: int
    is_hidden: bool
    has_replicas: bool = False

    def before_step(self, num_microbatches: int) -> None:
        if self.is_hidden and self.zero_stage == 2:
            self.root.set_reshard_after_backward(False)

    def before_microbatch(self, index: int, num_microbatches: int) -> None:
        is_last = index == num_microbatches - 1
        if self.zero_stage < 3:
            self.root.set_reshard_after_backward(is_last)
        if self.has_replicas:
            self.root.set_requires_all_reduce(is_last)
        if self.zero_stage < 2:
            self.root.set_requires_gradient_sync(is_last)
            self.root.set_is_last_backward(is_last)

    def before_backward(self, is_last: bool) -> None:
        if self.has_replicas and self.is_hidden:  # else torch's runtime reduces once a step
            self.root.set_requires_all_reduce(is_last)

    def after_step(self) -> None:
        if self.is_hidden:
            for module in self.root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    module.reshard()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def normalise_gradient(parameter: torch.Tensor) -> None:
    """Bring a gradient to the placements of its parameter (sum the addends of other ranks)."""
    gradient = parameter.grad
    if (
        isinstance(parameter, DTensor)
        and isinstance(gradient, DTensor)
        and gradient.placements != parameter.placements
    ):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def store_in_float32(model: nn.Module) -> None:
    """Turn parameters of a smaller dtype into float32 masters; FSDP computes with casts of them."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() < 4:
            parameter.data = parameter.data.float()


def shard(
    root: StageRoot,
    blocks: Sequence[nn.Module],
    *,
    states: Sequence[str],
    zero_stage: int,
    mesh: DeviceMesh,
    is_mixed: bool,
    is_pipeline: bool,
    offload: str = "none",
) -> Sharder:
    """Apply data parallelism to a stage root in place.

    Args:
        root: holds the parameters of glue itself, and the blocks.
        blocks: modules that become units of their own, in execution order.
        states: FQNs of the states that the stage reads, in execution order; repeats are allowed.
        zero_stage: 0 to 3.
        mesh: the data-parallel mesh; of size 1 it matters for mixed precision only. With two axes,
            parameters are sharded over the second and replicated over the first.
        is_mixed: compute in bfloat16 and reduce in float32.
        is_pipeline: several stages; ZeRO 2 and 3 then hide the root from torch's runtime.
        offload: `optimizer`: shards and their gradients lie in host memory.
    """
    if mesh.size() == 1 and not is_mixed and offload == "none":
        return Unsharded()
    if zero_stage == 0 and not is_mixed:
        return GradientReducer(
            parameters=_in_backward_order(root, states),
            group=mesh.get_group(),
            overlaps=not is_pipeline,
        )
    root.give_scalars_a_dimension()
    # FSDP warns of writes to what a module returned: see `autoplan.written_inputs`.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy()
    if is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    wrap: Callable[..., Any]
    if zero_stage == 0:
        wrap = functools.partial(compat.replicate, mesh=mesh, mp_policy=policy)
    else:
        wrap = functools.partial(
            fully_shard,
            mesh=mesh,
            mp_policy=policy,
            shard_placement_fn=_fsdp_placement,
            **_offload_policy(offload, mesh),
        )
    for block in _separable(root, blocks):
        if zero_stage == 0:
            wrap(block)
        else:
            wrap(block, reshard_after_forward=zero_stage == 3)
    if zero_stage == 0:
        wrap(root)
    else:
        wrap(root, reshard_after_forward=zero_stage == 3 and is_pipeline)
    assert isinstance(root, FSDPModule), "the stage root was not wrapped"
    return FsdpSharder(
        root,
        zero_stage,
        is_hidden=is_pipeline and zero_stage >= 2,
        has_replicas=mesh.ndim > 1,
    )


def _in_backward_order(root: nn.Module, states: Sequence[str]) -> list[nn.Parameter]:
    """Return all parameters: those read last first, those that nothing reads at the end."""
    read = (holder[key] for holder, key in (find_state(root, fqn) for fqn in states))
    first = {id(one): one for one in read if isinstance(one, nn.Parameter)}
    rest = {id(p): p for p in root.parameters() if id(p) not in first}
    return [*reversed(first.values()), *rest.values()]


def _offload_policy(offload: str, mesh: DeviceMesh) -> dict[str, OffloadPolicy]:
    """Return the argument of `fully_shard`; only memory that a device copies from is pinned."""
    if offload == "none":
        return {}
    return {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")}


def _fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """Let FSDP slice another dimension than a strided tensor-parallel shard does.

    Two strided slices of one dimension are put back in the wrong order by `full_tensor`.
    """
    if not isinstance(parameter, DTensor):
        return None
    taken = {compat.strided_dim(p) for p in parameter.placements if compat.is_strided(p)}
    return Shard(1) if 0 in taken and parameter.dim() > 1 else None


def _separable(root: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with the rest of the stage; each block once."""
    owners: dict[int, set[int]] = {}
    inside = {id(m): index for index, b in enumerate(blocks) for m in b.modules()}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(inside.get(id(module), -1))
    unique = {id(block): block for block in blocks}
    return [
        block
        for block in unique.values()
        if list(block.parameters())
        and all(len(owners[id(parameter)]) == 1 for parameter in block.parameters())
    ]
