"""A walk that repeats what it knows of an action has the peak of one that walks every action."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoplan import memory
from autoplan.engines import ENGINES, Engine
from autoplan.memory import StageMemory, stage_memory
from autoplan.optimizers import Optimizer
from autoplan.repeated_walk import RepeatedWalk
from autoplan.settings import Setting
from autoplan.stage_costs import BlockMemory, GroupBytes, StageBackward, StageBlock
from autoplan.stage_walk import PartBytes, StageWalk

NUMBERS = st.integers(0, 6)
SCHEDULES: tuple[Any, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@st.composite
def stage_blocks(draw: st.DrawFn, scale: int) -> StageBlock:
    """Draw a block of a few bytes, or of so many times more."""

    def number() -> int:
        return draw(NUMBERS) * scale

    def walked(kept: int) -> BlockMemory:
        most, at_border = (kept + number() for _ in range(2))
        return BlockMemory(
            kept=kept,
            side=(),
            output=number(),
            forward_peak=kept + number(),
            backward_peak=most,
            parameter_grads=number(),
            held_output_bytes=min(kept, number()),
            border_backward_peak=at_border,
        )

    kept, trained = number(), number()
    shared = min(kept, number())
    return StageBlock(
        memory=walked(kept),
        accumulating=walked(kept),
        group=GroupBytes(
            stored=2 * trained,
            trained=2 * trained,
            gathered=trained,
            gathered_grads=trained,
            largest=trained // 2,
            early_grads=draw(st.sampled_from((0, 0, 3))),
            late_grads=draw(st.sampled_from((0, 0, 3))),
        ),
        is_glue=draw(st.booleans()),
        input_bytes=number(),
        shared_bytes=shared,
        deferred_bytes=number(),
        released_bytes=min(kept, number()),
        border_bytes=min(kept - shared, number()),
        carried_bytes=number(),
    )


@st.composite
def ranks(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of `stage_memory`: a rank of one or more stages of few kinds of blocks."""
    schedule = draw(st.sampled_from(("none", *SCHEDULES)))
    pp = 1 if schedule == "none" else draw(st.integers(2, 3))
    v = draw(st.integers(1, 3)) if schedule in ("interleaved", "zero_bubble") else 1
    rank = draw(st.integers(0, pp - 1))
    zero = 0 if schedule == "zero_bubble" else draw(st.integers(0, 3))
    setting = Setting(
        dp=draw(st.sampled_from((1, 2))) if zero == 0 else 2,
        tp=1,
        pp=pp,
        zero_stage=zero,
        microbatch_size=1,
        num_microbatches=pp * draw(st.integers(1, 5)),
        schedule=schedule,
        virtual_stages=v,
    )
    scale = draw(st.sampled_from((1, 1 << 20)))  # gradients are reduced together up to 4 MiB
    kinds = draw(st.lists(stage_blocks(scale), min_size=1, max_size=3))
    parts = tuple(
        PartBytes(
            num_blocks=draw(st.integers(1, 3)),
            side=draw(NUMBERS),
            entering=draw(NUMBERS) * (rank + part > 0),
            leaving=draw(NUMBERS) * (rank < pp - 1 or part < v - 1),
            handed=draw(st.sampled_from((0, 0, 1))) * (0 < rank < pp - 1),
            returning=draw(NUMBERS) * (rank + part > 0),
            backward=draw(st.sampled_from(get_args(StageBackward))),
        )
        for part in range(v)
    )
    return {
        "blocks": [draw(st.sampled_from(kinds)) for part in parts for _ in range(part.num_blocks)],
        "setting": setting,
        "optimizer": Optimizer.named("AdamW", is_foreach=draw(st.booleans())),
        "stage": rank,
        "is_mixed": zero > 0 and draw(st.booleans()),
        "is_gloo": draw(st.booleans()),
        "input_bytes": draw(NUMBERS),
        "standing_bytes": draw(NUMBERS),
        "parts": parts,
        "engine": draw(st.sampled_from(list(ENGINES.values()))),
    }


def by(walk: type[StageWalk], arguments: dict[str, Any]) -> StageMemory:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "RepeatedWalk", walk)
        return stage_memory(**arguments)


@given(ranks())
def test_a_repeated_walk_has_the_peak_of_a_plain_one(arguments: dict[str, Any]) -> None:
    assert by(RepeatedWalk, arguments) == by(StageWalk, arguments)


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what tells how many actions have been walked."""
    acts = []
    act = StageWalk.act

    def listed(self: StageWalk, *args: Any) -> None:
        acts.append(args)
        act(self, *args)

    monkeypatch.setattr(StageWalk, "act", listed)
    return lambda: len(acts)


@pytest.mark.parametrize(("schedule", "zero"), list(product(("1f1b", "interleaved"), (0, 2, 3))))
def test_a_long_warm_up_is_walked_once(
    schedule: Any, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = GroupBytes(stored=4, trained=4, gathered=4, gathered_grads=4, largest=4)
    kept = BlockMemory(
        kept=3, side=(), output=1, forward_peak=4, backward_peak=5, parameter_grads=4
    )
    block = StageBlock(memory=kept, accumulating=kept, group=group, is_glue=False, input_bytes=1)
    v = 2 if schedule == "interleaved" else 1
    setting = Setting(
        dp=2,
        tp=1,
        pp=16,
        zero_stage=zero,
        microbatch_size=1,
        num_microbatches=64,
        schedule=schedule,
        virtual_stages=v,
    )
    walked = counted(monkeypatch)
    stage_memory(
        [block] * v,
        setting,
        Optimizer.named("AdamW", is_foreach=False),
        parts=(PartBytes(num_blocks=1, leaving=1),) * v,
        engine=Engine(name="one"),
    )
    assert walked() <= 8 * v < len(memory.stage_actions(setting, 0)) / 4
