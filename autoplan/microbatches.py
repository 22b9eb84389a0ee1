"""Run the micro-batches of a step through one stage of a pipeline, by torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from autoplan import compat
from autoplan.plan import Plan
from autoplan.program import Program
from autoplan.stages import StageRoot, StageSlice, crossing_metas

__all__ = ["pipeline_runner"]


def pipeline_runner(
    plan: Plan,
    program: Program,
    stage: StageSlice,
    root: StageRoot,
    *,
    num_stages: int,
    device: torch.device,
    group: dist.ProcessGroup,
    compute_dtype: torch.dtype | None,
) -> Callable[[int], list[torch.Tensor]]:
    """Return what runs all micro-batches of a step and returns the losses of the last stage.

    Args:
        plan, program: what is run.
        stage: the slice of this rank.
        root: its module, wrapped by FSDP or not.
        num_stages: stages of the pipeline.
        device: where the stage computes.
        group: this rank's peers on the other stages.
        compute_dtype: of activations under mixed precision; None where it is the model's own.
    """

    def examples(names: Sequence[str]) -> tuple[torch.Tensor, ...]:
        if program.loss in names:
            return (torch.empty(1, device="meta", requires_grad=True),)
        return tuple(
            torch.empty(m.shape, dtype=m.dtype, device="meta", requires_grad=m.requires_grad)
            for m in crossing_metas(program, names, compute_dtype)
        )

    is_hidden = plan.zero_stage >= 2 and (plan.mesh.dp > 1 or compute_dtype is not None)
    piece = compat.RingStage(
        _Hidden(root) if is_hidden else root,
        stage.index,
        num_stages,
        device,
        schedule=plan.schedule,
        input_args=examples(stage.inputs),
        output_args=examples(stage.outputs),
        group=group,
    )
    kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[plan.schedule]
    schedule = kind(piece, plan.num_microbatches, loss_fn=_first, scale_grads=False)
    target = torch.zeros(plan.num_microbatches, 1)

    def run(count: int) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        schedule.step(target=target, losses=losses, return_outputs=False)
        return losses

    return run


class _Hidden(nn.Module):
    """Keeps torch's pipeline runtime from seeing an FSDP root and changing when it reshards."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.inner(*inputs)


def _first(outputs: tuple[torch.Tensor, ...], target: torch.Tensor) -> torch.Tensor:
    return outputs[0]
