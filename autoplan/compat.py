"""Every private torch interface that the emitter uses, each probed when it is imported.

Tried on torch 2.11 to 2.13; a version without one of these names fails here, at import, by name.
What only the capture uses is left as it is where it is missing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed._composable import replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.tensor import placement_types

from autoplan import split_backward
from autoplan.errors import EmitError
from autoplan.patching import replaced

__all__ = [
    "RingStage",
    "fake_processes",
    "flatten_axes",
    "is_strided",
    "on_sends",
    "pieces_of",
    "play",
    "replicate",
    "set_timeout",
    "sliced_dim",
    "start_sends",
    "strided_dim",
    "wait",
    "waiting_at_most",
]


def _probe(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise EmitError(
            f"torch {torch.__version__} has no {owner.__name__}.{name}, which autoplan needs to "
            "run a plan; planning works without it. Use torch 2.11 to 2.13."
        )
    return getattr(owner, name)


_set_pg_timeout = _probe(distributed_c10d, "_set_pg_timeout")
_strided_shard = _probe(placement_types, "_StridedShard")
_replicate = _probe(replicate_with_fsdp, "replicate")
_flatten = _probe(DeviceMesh, "_flatten")
# The methods that make a stage's receive buffers: torch 2.12 and later, and 2.11.
_IS_LATER = hasattr(PipelineStage, "_setup_forward_recv_info")
_make_activations = _probe(
    PipelineStage, "_setup_forward_recv_info" if _IS_LATER else "_prepare_forward_infra"
)
_make_gradients = _probe(
    PipelineStage, "_setup_backward_recv_info" if _IS_LATER else "_prepare_backward_infra"
)
_Action = _probe(torch_schedules, "_Action")
_ComputationType = _probe(torch_schedules, "_ComputationType")
_batch_p2p = _probe(torch_schedules, "_batch_p2p")
_probe(torch_schedules, "_wait_batch_p2p")


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all axes of a mesh as one, of that name; made once for every root mesh."""
    flat: DeviceMesh = _flatten(mesh, name)
    return flat


def set_timeout(group: dist.ProcessGroup, timeout_s: float) -> None:
    """Set how long a collective of `group` may wait before it raises."""
    if dist.get_backend(group) != "fake":
        _set_pg_timeout(timedelta(seconds=timeout_s), group)


def wait(work: Any, timeout_s: float | None) -> None:
    """Wait for a message.

    Gloo waits for a peer that hangs without an end, whatever time its group has, unless it is told
    a time here. NCCL would block the host, and has a watchdog with the group's time: None.
    """
    if timeout_s is None:
        work.wait()
    else:
        work.wait(timedelta(seconds=timeout_s))


@contextlib.contextmanager
def waiting_at_most(timeout_s: float | None) -> Iterator[None]:
    """Let torch's pipeline schedules wait for a message as `wait` does."""

    def wait_for_all(works: Sequence[Any]) -> None:
        for work in works:
            wait(work, timeout_s)

    with replaced(torch_schedules, _wait_batch_p2p=wait_for_all):
        yield


def strided_dim(placement: Any) -> int:
    """Return the dimension that a strided shard slices."""
    dim: int = placement.dim
    return dim


def sliced_dim(placement: Any) -> int:
    """Return the dimension that a shard or strided shard slices."""
    dim: int = placement.dim
    return dim


def pieces_of(placement: Any) -> int:
    """Return in how many pieces a placement slices its dimension: 1 unless strided."""
    return int(placement.split_factor) if is_strided(placement) else 1


def is_strided(placement: Any) -> bool:
    """Return whether a placement is a strided shard."""
    return isinstance(placement, _strided_shard)


def replicate(module: nn.Module, **options: Any) -> None:
    """Keep whole parameters on every rank of a mesh, computing in the policy's dtype."""
    _replicate(module, **options)


@contextlib.contextmanager
def fake_processes(world_size: int, rank: int) -> Iterator[None]:
    """Make this process rank `rank` of a group whose collectives send nothing.

    Torch's pipelines vote over point-to-point messages in their first step, which is left out, and
    FSDP cuts each parameter for every rank of the group, of which only this rank's part is made.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stage_methods: dict[str, Any] = {"_get_init_p2p_neighbors_ops": lambda self: []}
    for name in ("_warmup_forward_vote", "_warmup_backward_result"):
        stage_methods[name] = lambda self, *args, **kwargs: _One()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            replaced(PipelineStage, **stage_methods),
            replaced(_fsdp_param, _chunk_with_empty=_Chunks),
        ):
            yield
    finally:
        dist.destroy_process_group()


class _Chunks:
    """The chunks of a tensor for every rank, each made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.shape[dim] // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start, whole = index * self._size, self._tensor.shape[self._dim]
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, whole - start))


class _One:
    def item(self) -> int:
        return 1


class RingStage(PipelineStage):
    """A pipeline stage whose receive buffers are as many as the schedule has in flight.

    Torch's stage has one receive buffer per micro-batch for activations, and one for gradients.
    Here they are rings: a buffer is used again by the micro-batch that is a ring later. And a
    backward that torch cannot split (see `autoplan.split_backward`) runs whole where it would be
    split, with nothing left for later.

    Attributes:
        activations, gradients: buffers of each kind at most; None: one per micro-batch.
        sends_later: a gradient may still be on its way when the buffer of the one that it was made
            of is used again.
        before_backward: called before each backward with whether it is the last of the step.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        activations: int | None,
        gradients: int | None,
        sends_later: bool,
        before_backward: Callable[[bool], None],
        **options: Any,
    ) -> None:
        super().__init__(submodule, stage_index, num_stages, device, **options)
        self._activations = activations
        self._gradients = gradients
        self._sends_later = sends_later
        self._needs_gradient = [x.requires_grad for x in options["input_args"]]
        self._before_backward = before_backward
        self._is_whole: bool | None = None
        self._ended: set[int] = set()

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run the backward of a micro-batch, or its part to the inputs."""
        self._before_backward(last_backward)
        made, entered = self.fwd_cache.get(bwd_chunk_id, ((), ()))
        if not full_backward and not self.is_first and self.has_backward:
            if self._is_whole is None:
                ends = made if loss is None else (loss,)
                inputs = [x for x in entered if isinstance(x, torch.Tensor)]
                # Behind frozen stages there is no gradient to make first, and torch makes none.
                is_apart = any(x.requires_grad for x in inputs)
                self._is_whole = (
                    not is_apart
                    or split_backward.reads_again(ends, inputs)
                    or split_backward.hands_on_parameters(ends, inputs)
                )
            if self._is_whole:
                full_backward = True
                self._ended.add(bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        # Torch's split backward adds to what is here, and a later micro-batch has the same tensors.
        for value in entered:
            if isinstance(value, torch.Tensor):
                value.grad = None
        if self._sends_later and not self.is_first:
            self._own_gradients(bwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends of a backward: torch 2.12 would send what frozen stages never need."""
        if self.has_backward and not self.is_first:
            if self.grad_send_info is None:
                self.grad_send_info = self._create_grad_send_info(self.args_recv_info[0])
            rows = zip(
                self.grad_send_info, self._needs_gradient, self.bwd_cache[bwd_chunk_id], strict=True
            )
            self.grad_send_info = [
                None if gradient is None and not is_needed else stage
                for stage, is_needed, gradient in rows
            ]
        operations: list[dist.P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return operations

    def _own_gradients(self, chunk: int) -> None:
        """Copy gradients to send that are the received ones: a skip may hand on what it gets."""
        if self.is_last or not self.has_backward:
            return
        received = {
            info.buffer.untyped_storage()._cdata
            for info in self.grad_recv_info[chunk]
            if isinstance(info.buffer, torch.Tensor)
        }
        self.bwd_cache[chunk] = tuple(
            x.clone() if x is not None and x.untyped_storage()._cdata in received else x
            for x in self.bwd_cache[chunk]
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Run the part of a backward to the parameters, where it was split."""
        if bwd_chunk_id in self._ended:
            self._ended.remove(bwd_chunk_id)
        else:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _make_ring(self, num_microbatches: int, *rest: Any) -> Any:
        """Make the receive buffers of activations."""
        ring = _ring(self._activations, num_microbatches)
        made = _make_activations(self, ring, *rest)
        for chunk in range(ring, num_microbatches):
            self.args_recv_info[chunk] = self.args_recv_info[chunk % ring]
        return made

    def _make_gradient_ring(self, num_microbatches: int) -> None:
        """Make the receive buffers of gradients."""
        ring = _ring(self._gradients, num_microbatches)
        _make_gradients(self, ring)
        self.chunks = num_microbatches
        for chunk in range(ring, num_microbatches):
            self.grad_recv_info[chunk] = self.grad_recv_info[chunk % ring]


def _ring(size: int | None, num_microbatches: int) -> int:
    # The first stage receives no activations and the last no gradients, but both look for them.
    return num_microbatches if size is None else max(1, min(size, num_microbatches))


for _method, _make in (
    (_make_activations, RingStage._make_ring),
    (_make_gradients, RingStage._make_gradient_ring),
):
    setattr(RingStage, _method.__name__, _make)


def play(schedule: Any, steps: Sequence[tuple[int, str, int | None]]) -> None:
    """Make a schedule of several stages a rank run these steps on this rank, in this order.

    Args:
        schedule: of `torch.distributed.pipelining`, with its own lists.
        steps: of this rank: stage, torch's name of the action, micro-batch or None.
    """
    actions = [_Action(stage, _ComputationType(kind), i) for stage, kind, i in steps]
    schedule.pipeline_order_with_comms = {schedule.rank: actions}


def on_sends(schedule: Any, send: Callable[[int, bool, int, Any], None]) -> None:
    """Let `send(stage, is_gradient, micro-batch, stages)` send what a schedule sends."""

    def run(action: Any, context: Any) -> None:
        stages = {stage.stage_index: stage for stage in context.schedule_ref._stages}
        is_gradient = action.computation_type == _ComputationType.SEND_B
        send(action.stage_index, is_gradient, action.microbatch_index, stages)

    table = schedule._comp_type_to_function_map
    table[_ComputationType.SEND_F] = table[_ComputationType.SEND_B] = run


def start_sends(stage: Any, is_gradient: bool, microbatch: int) -> list[Any]:
    """Start sending what a stage made of a micro-batch; returns what to wait for."""
    make = stage.get_bwd_send_ops if is_gradient else stage.get_fwd_send_ops
    works: list[Any] = _batch_p2p(make(microbatch))
    return works
