"""Run the micro-batches of a step through the stages of a rank, by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from autoplan import compat
from autoplan.program import TensorMeta
from autoplan.schedules import schedule_actions
from autoplan.stages import StageRoot
from autoplan.transfers import Message, Step, buffers, settled_sends, with_messages

__all__ = ["PipelinePart", "pipeline_runner"]

_MULTI = ("interleaved", "zero_bubble")
_Finish = Callable[[float | None], None]
"""Waits for what was sent, so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePart:
    """One stage of this rank.

    Attributes:
        root: its module, wrapped by FSDP or not.
        index: of the stage.
        inputs: activations that enter from the stage before.
        outputs: activations that leave to the stage after, or the loss.
        before_backward: of its data parallelism; see `Sharder`.
    """

    root: StageRoot
    index: int
    inputs: Sequence[TensorMeta]
    outputs: Sequence[TensorMeta]
    before_backward: Callable[[bool], None]


def pipeline_runner(
    parts: Sequence[PipelinePart],
    *,
    num_stages: int,
    schedule: Literal["none", "gpipe", "1f1b", "interleaved", "zero_bubble"],
    num_microbatches: int,
    is_hidden: bool,
    device: torch.device,
    group: dist.ProcessGroup,
    timeout_s: float,
) -> Callable[[int], list[torch.Tensor]]:
    """Return what runs all micro-batches of a step and returns the losses of the last stage.

    Args:
        parts: the stages of this rank, in order; one for `gpipe` and `1f1b`.
        num_stages: stages of the pipeline.
        schedule: its name.
        num_microbatches: per step.
        is_hidden: keep torch's runtime from seeing an FSDP root.
        device: where the stages compute.
        group: this rank's peers on the other stages.
        timeout_s: how long a message may wait before it raises.
    """
    limit = timeout_s if device.type == "cpu" else None
    made = _made_by_list if schedule in _MULTI else _made_by_torch
    runner, finish = made(parts, num_stages, schedule, num_microbatches, is_hidden, device, group)
    target = torch.zeros(num_microbatches, 1)

    def run(count: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        with compat.waiting_at_most(limit):
            runner.step(target=target, losses=losses, return_outputs=False)
            finish(limit)
        return losses

    return run


def _made_by_torch(
    parts: Sequence[PipelinePart],
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    is_hidden: bool,
    device: torch.device,
    group: dist.ProcessGroup,
) -> tuple[Any, _Finish]:
    """Return torch's schedule of one stage a rank.

    Under 1F1B an activation's buffer is free once the backward of its micro-batch ended, and a
    gradient's once the one received before it has been used and sent on.
    """
    (part,) = parts
    is_1f1b = schedule == "1f1b"
    piece = _stage(
        part,
        num_stages,
        is_hidden,
        device,
        group,
        activations=num_stages - part.index if is_1f1b else None,
        gradients=2 if is_1f1b else None,
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner = kind(piece, num_microbatches, loss_fn=_first, scale_grads=False)
    return runner, lambda limit: None


def _made_by_list(
    parts: Sequence[PipelinePart],
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    is_hidden: bool,
    device: torch.device,
    group: dist.ProcessGroup,
) -> tuple[Any, _Finish]:
    """Return torch's schedule of several stages a rank, running our list with its messages.

    The list is torch's own; an FSDP root that it sees is gathered once, when the step begins, and
    reduced once, when it ends.
    """
    actions = schedule_actions(schedule, group.size(), num_microbatches, len(parts))
    lists = with_messages(actions)
    sizes = buffers(lists)
    pieces: list[Any] = [
        _stage(
            part,
            num_stages,
            is_hidden,
            device,
            group,
            activations=sizes[part.index].activations,
            gradients=sizes[part.index].gradients,
            sends_later=True,
        )
        for part in parts
    ]
    kinds = {
        "interleaved": ScheduleInterleaved1F1B,
        "zero_bubble": ScheduleInterleavedZeroBubble,
    }
    runner = kinds[schedule](pieces, num_microbatches, loss_fn=_first, scale_grads=False)
    gathered = [p.index for p in parts if isinstance(p.root, FSDPModule) and not is_hidden]
    rank = group.rank()
    compat.play(
        runner,
        [
            *((index, "UNSHARD", None) for index in gathered),
            *(_named(step) for step in lists[rank]),
            *((index, "REDUCE_GRAD", None) for index in gathered),
            *((index, "RESHARD", None) for index in gathered),
        ],
    )
    sender = _Sender(settled_sends(lists)[rank])
    compat.on_sends(runner, sender.send)
    return runner, sender.finish


def _named(step: Step) -> tuple[int, str, int | None]:
    if isinstance(step, Message):
        way, kind = "SEND" if step.is_send else "RECV", "B" if step.is_gradient else "F"
        return step.stage, f"{way}_{kind}", step.microbatch
    return step.stage, step.kind, step.microbatch


class _Sender:
    """Sends, and frees what was sent as soon as its receiver is surely ready for it.

    Torch's runtime holds all that a step sent until its end.
    """

    def __init__(self, settled: dict[Message, tuple[Message, ...]]) -> None:
        self._settled = settled
        self._works: dict[Message, list[Any]] = {}

    def send(self, stage: int, is_gradient: bool, microbatch: int, stages: Any) -> None:
        """Start a send, once those that cannot block have ended."""
        message = Message(stage, True, is_gradient, microbatch)
        for earlier in self._settled[message]:
            self._wait(earlier, None)  # these have been received
        self._works[message] = compat.start_sends(stages[stage], is_gradient, microbatch)

    def finish(self, limit: float | None) -> None:
        """Wait for what is left, so many seconds for each."""
        for message in list(self._works):
            self._wait(message, limit)

    def _wait(self, message: Message, limit: float | None) -> None:
        for work in self._works.pop(message):
            compat.wait(work, limit)


def _stage(
    part: PipelinePart,
    num_stages: int,
    is_hidden: bool,
    device: torch.device,
    group: dist.ProcessGroup,
    *,
    activations: int | None,
    gradients: int | None,
    sends_later: bool = False,
) -> compat.RingStage:
    return compat.RingStage(
        _Hidden(part.root) if is_hidden else part.root,
        part.index,
        num_stages,
        device,
        activations=activations,
        gradients=gradients,
        sends_later=sends_later,
        before_backward=part.before_backward,
        input_args=tuple(_example(meta) for meta in part.inputs),
        output_args=tuple(_example(meta) for meta in part.outputs),
        group=group,
    )


def _example(meta: TensorMeta) -> torch.Tensor:
    return torch.empty(
        meta.shape, dtype=meta.dtype, device="meta", requires_grad=meta.requires_grad
    )


class _Hidden(nn.Module):
    """Keeps torch's pipeline runtime from seeing an FSDP root and changing when it reshards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.inner(*inputs)


def _first(outputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return outputs[0]
