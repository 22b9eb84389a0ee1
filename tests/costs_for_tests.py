"""Costs of pipelines for the simulator, and a simulation tick by tick, written on its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from autoplan.schedules import Action, ActionLists, schedule_actions
from autoplan.stage_costs import (
    BlockCosts,
    BlockMemory,
    BlockSeconds,
    GroupBytes,
    PlanCosts,
    StageBlock,
    StageCosts,
)

__all__ = ["brute_force_step", "costs_of", "pipelines", "uniform_costs"]

_NOTHING = BlockMemory(
    kept=0, side=(), output=0, forward_peak=0, backward_peak=0, parameter_grads=0
)
_NO_BYTES = StageBlock(
    memory=_NOTHING,
    accumulating=_NOTHING,
    group=GroupBytes(stored=0, trained=0, gathered=0, gathered_grads=0),
    is_glue=False,
    input_bytes=0,
)


def costs_of(
    stages: Sequence[Sequence[BlockSeconds]], *, overlaps: bool = False, send_s: float = 0.0
) -> PlanCosts:
    """Return costs of stages given by the seconds of their blocks; every cut costs the same."""
    blocks, listed = {}, []
    for stage, own in enumerate(stages):
        names = tuple(f"s{stage}b{index}" for index in range(len(own)))
        for name, seconds in zip(names, own, strict=True):
            blocks[name] = BlockCosts(seconds=seconds, bytes=_NO_BYTES)
        is_last = stage == len(stages) - 1
        listed.append(StageCosts(blocks=names, send_s=0.0 if is_last else send_s))
    return PlanCosts(blocks=blocks, stages=tuple(listed), overlaps=overlaps)


def uniform_costs(num_stages: int, seconds: BlockSeconds, **options: Any) -> PlanCosts:
    """Return costs of equal stages of one block."""
    return costs_of([[seconds]] * num_stages, **options)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PlanCosts, ActionLists, int]:
    """Draw costs in whole seconds, action lists for them, and a ZeRO stage."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    pp = draw(st.integers(1, 3))
    num_chunks = draw(st.integers(1, 2)) if name == "interleaved" else 1
    m = pp * draw(st.integers(1, 2))
    zero = draw(st.integers(0, 1 if name == "zero_bubble" else 3))
    number = st.integers(0, 4)

    def block() -> BlockSeconds:
        backward = draw(st.integers(1, 5))
        return BlockSeconds(
            forward=draw(st.integers(1, 4)),
            backward=backward,
            weight_backward=draw(st.integers(0, backward)),
            recompute=draw(number),
            forward_tensor_parallel=draw(number),
            backward_tensor_parallel=draw(number),
            recompute_tensor_parallel=draw(number),
            gather=draw(number),
            reduce=draw(number),
            optimizer=draw(number),
        )

    stages = [[block() for _ in range(draw(st.integers(1, 3)))] for _ in range(pp * num_chunks)]
    costs = costs_of(stages, overlaps=draw(st.booleans()), send_s=draw(number))
    return costs, schedule_actions(name, pp, m, num_chunks), zero


def brute_force_step(
    actions: ActionLists, seconds: dict[tuple[int, str], int], send: int, *, overlaps: bool
) -> int:
    """Return the ticks of a step in which stages only compute and send, tick by tick.

    Args:
        actions: per rank.
        seconds: whole ticks, at least 1, by (stage, kind).
        send: ticks of one message between ranks, at least 1 or 0.
        overlaps: a sender goes on while its messages travel, one after another per direction.
    """
    num_stages = 1 + max(stage for stage, _ in seconds)
    rank_of = {a.stage: rank for rank, own in enumerate(actions) for a in own}
    waiting = [list(own) for own in actions]
    busy_until = [0] * len(actions)
    running: list[Action | None] = [None] * len(actions)
    wire_until: dict[tuple[int, str], int] = {}
    there: dict[tuple[int, str, int], int] = {}
    tick = 0
    while any(waiting) or any(running):
        for rank in range(len(actions)):
            action = running[rank]
            if action is not None and busy_until[rank] == tick:
                running[rank] = None
                kind = "F" if action.kind == "F" else "B"
                target = action.stage + (1 if kind == "F" else -1)
                if action.kind != "W" and 0 <= target < num_stages:
                    travel = send if rank_of[target] != rank else 0
                    start = max(tick, wire_until.get((rank, kind), 0)) if overlaps else tick
                    there[action.stage, kind, action.microbatch] = start + travel
                    wire_until[rank, kind] = start + travel
                    if not overlaps:
                        busy_until[rank] = start + travel
        for rank, left in enumerate(waiting):
            if running[rank] is not None or busy_until[rank] > tick or not left:
                continue
            action = left[0]
            source = action.stage + (-1 if action.kind == "F" else 1)
            needs = action.kind != "W" and 0 <= source < num_stages
            key = (source, "F" if action.kind == "F" else "B", action.microbatch)
            if not needs or there.get(key, tick + 1) <= tick:
                running[rank] = left.pop(0)
                busy_until[rank] = tick + seconds[action.stage, action.kind]
        tick += 1
    return max(tick - 1, *busy_until, *there.values(), 0)
