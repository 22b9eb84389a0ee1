"""Plans written by hand: even cuts, one recompute mode, no prediction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from autoplan.meshes import AxisOrder
from autoplan.plan import (
    BlockPlan,
    Layout,
    Mesh,
    Plan,
    Predicted,
    Recompute,
    SearchRecord,
    StagePlan,
)
from autoplan.program import Program

__all__ = ["hand_plan"]


def hand_plan(
    program: Program,
    model: str,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    zero_stage: int = 0,
    num_microbatches: int = 1,
    recompute: Recompute | None = None,
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b",
    num_chunks: int = 1,
    first_calls: Sequence[int] | None = None,
    layouts: Mapping[str, Layout] | None = None,
    mixed_precision: Literal["none", "bfloat16"] = "none",
    dp_replicate: int = 1,
    axis_order: AxisOrder = "tp-dp-pp",
    offload: Literal["none", "optimizer"] = "none",
) -> Plan:
    """Return a plan for a program; `first_calls` are the first calls of stages 1, 2, ..."""
    count, num_stages = len(program.calls), pp * num_chunks
    firsts = [
        0,
        *(first_calls or [count * stage // num_stages for stage in range(1, num_stages)]),
        count,
    ]
    layouts = dict(layouts or {})
    blocks = []
    for index, call in enumerate(program.calls):
        graph = program.graphs[call.graph]
        blocks.append(
            BlockPlan(
                call=index,
                fqn=call.fqn,
                block=graph.name,
                placements=graph.name if graph.name in layouts else "whole",
                recompute="none" if graph.is_glue or recompute is None else "blocks",
            )
        )
    return Plan(
        model=model,
        fingerprint=program.fingerprint,
        mesh=Mesh(dp=dp, tp=tp, pp=pp, dp_replicate=dp_replicate, axis_order=axis_order),
        zero_stage=zero_stage,
        microbatch_size=program.microbatch_size,
        num_microbatches=num_microbatches,
        global_batch_size=dp * num_microbatches * program.microbatch_size,
        schedule="none" if pp == 1 else schedule,
        mixed_precision=mixed_precision,
        offload=offload,
        optimizer="AdamW",
        stages=tuple(
            StagePlan(index=i, blocks=tuple(blocks[firsts[i] : firsts[i + 1]]))
            for i in range(num_stages)
        ),
        recompute={"none": Recompute(mode="none")} | ({"blocks": recompute} if recompute else {}),
        placements={"whole": Layout(block="", degree=1)} | layouts,
        predicted=Predicted(
            step_time_s=0.0,
            peak_memory_bytes=(),
            memory_by_category=(),
            stage_time_s=(),
            time_by_category={},
            capacity_bytes=0,
            lookups={},
        ),
        search=SearchRecord(
            status="priced", objective_s=0.0, bound_s=0.0, gap=0.0, wall_time_s=0.0
        ),
        provenance={},
    )
