"""Run the micro-batches of a step through one stage of a pipeline, by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from autoplan import compat
from autoplan.program import TensorMeta
from autoplan.stages import StageRoot

__all__ = ["pipeline_runner"]


def pipeline_runner(
    root: StageRoot,
    *,
    index: int,
    num_stages: int,
    schedule: Literal["none", "gpipe", "1f1b"],
    num_microbatches: int,
    inputs: Sequence[TensorMeta],
    outputs: Sequence[TensorMeta],
    is_hidden: bool,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Callable[[int], list[torch.Tensor]]:
    """Return what runs all micro-batches of a step and returns the losses of the last stage.

    Args:
        root: module of the stage, wrapped by FSDP or not.
        index: of the stage.
        num_stages: stages of the pipeline.
        schedule: `gpipe` or `1f1b`.
        num_microbatches: per step.
        inputs: activations that enter from the stage before.
        outputs: activations that leave to the stage after, or the loss.
        is_hidden: keep torch's runtime from seeing an FSDP root.
        device: where the stage computes.
        group: this rank's peers on the other stages.
    """
    piece = compat.RingStage(
        _Hidden(root) if is_hidden else root,
        index,
        num_stages,
        device,
        schedule=schedule,
        input_args=tuple(_example(meta) for meta in inputs),
        output_args=tuple(_example(meta) for meta in outputs),
        group=group,
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
    runner = kind(piece, num_microbatches, loss_fn=_first, scale_grads=False)
    target = torch.zeros(num_microbatches, 1)

    def run(count: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        runner.step(target=target, losses=losses, return_outputs=False)
        return losses

    return run


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
