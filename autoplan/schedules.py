"""Pipeline schedules as data: what each rank runs, in order, as a list of actions.

Stage `s` of a pipeline of `pp` ranks lives on rank `s % pp`; with `num_chunks` stages a rank the
pipeline has `pp * num_chunks` stages. An action prints as torch's schedules print it: `2F0` is the
forward of micro-batch 0 on stage 2. One generator each, held against torch's own lists in the
tests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, get_args

__all__ = [
    "MULTI_STAGE",
    "SCHEDULES",
    "Action",
    "ActionLists",
    "enough_rounds",
    "gpipe",
    "in_flight",
    "in_flight_by_stage",
    "interleaved",
    "most_in_flight",
    "one_f_one_b",
    "schedule_actions",
    "unrunnable_split",
    "zero_bubble",
]

Kind = Literal["F", "B", "I", "W"]

_CHANGE: Mapping[Kind, int] = {"F": 1, "B": -1, "I": 0, "W": -1}  # of micro-batches in flight


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a stage.

    Attributes:
        stage: index of the stage in the pipeline.
        kind: F forward, B whole backward, I backward to the inputs only, W to the weights only.
        microbatch: index.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as `text`, such as `2F0`.

        Raises:
            ValueError: it is no such text.
        """
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if match is None:
            kinds = ", ".join(get_args(Kind))
            raise ValueError(f"{text!r} is no action: write stage, one of {kinds}, micro-batch")
        stage, kind, microbatch = match.groups()
        return cls(int(stage), kind, int(microbatch))  # type: ignore[arg-type]


ActionLists = tuple[tuple[Action, ...], ...]


def gpipe(pp: int, num_microbatches: int) -> ActionLists:
    """Return all forwards, then all backwards (Huang et al. 2019)."""
    return tuple(
        tuple(Action(rank, kind, i) for kind in ("F", "B") for i in range(num_microbatches))
        for rank in range(pp)
    )


def one_f_one_b(pp: int, num_microbatches: int) -> ActionLists:
    """Return 1F1B: `pp - 1 - rank` forwards, then forward and backward in turn.

    At most `pp - rank` micro-batches are in flight (Narayanan et al. 2021, section 2.2.1).
    """
    return tuple(
        _alternating(_in_rounds(rank, pp, num_microbatches, 1), pp - 1 - rank) for rank in range(pp)
    )


def interleaved(pp: int, num_microbatches: int, num_chunks: int) -> ActionLists:
    """Return 1F1B over `num_chunks` stages a rank.

    Micro-batches pass in rounds of about `pp` through each of a rank's stages in turn; rank r warms
    up with `(num_chunks - 1) * round + 2 * (pp - 1 - r)` forwards (Narayanan et al. 2021, section
    2.2.2).

    Raises:
        ValueError: the micro-batches do not divide into rounds.
    """
    per_round = _round_size(pp, num_microbatches)
    return tuple(
        _alternating(
            _in_rounds(rank, pp, num_microbatches, num_chunks),
            (num_chunks - 1) * per_round + 2 * (pp - 1 - rank),
        )
        for rank in range(pp)
    )


def zero_bubble(pp: int, num_microbatches: int, num_chunks: int = 1) -> ActionLists:
    """Return ZB-H1: 1F1B whose weight gradients fill what would be bubble.

    Rank r makes the weight gradients of a micro-batch r micro-batches later than its input
    gradients (Qi et al. 2023, section 2.2), so that no more micro-batches are in flight than under
    1F1B.

    Raises:
        ValueError: the micro-batches do not divide into rounds.
    """
    per_round = _round_size(pp, num_microbatches)
    return tuple(
        _alternating(
            _in_rounds(rank, pp, num_microbatches, num_chunks),
            (num_chunks - 1) * per_round + pp - 1 - rank,
            weight_delay=rank,
        )
        for rank in range(pp)
    )


def _round_size(pp: int, num_microbatches: int) -> int:
    rounds = max(1, num_microbatches // pp)
    if num_microbatches % rounds:
        raise ValueError(
            f"{num_microbatches} micro-batches do not divide into {rounds} rounds over {pp} ranks: "
            f"use a multiple of {pp}"
        )
    return num_microbatches // rounds


def _in_rounds(
    rank: int, pp: int, num_microbatches: int, num_chunks: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return a rank's forwards and backwards in order, each as (stage, micro-batch)."""
    size = num_microbatches if num_chunks == 1 else _round_size(pp, num_microbatches)
    forwards, backwards = [], []
    for first in range(0, num_microbatches, size):
        for chunk in range(num_chunks):
            for i in range(first, first + size):
                forwards.append((chunk * pp + rank, i))
                backwards.append(((num_chunks - 1 - chunk) * pp + rank, i))
    return forwards, backwards


def _alternating(
    orders: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]],
    warmup: int,
    weight_delay: int | None = None,
) -> tuple[Action, ...]:
    """Return `warmup` forwards, then forward and backward in turn, then the other backwards.

    With a `weight_delay` each backward makes input gradients only, and the weight gradients of the
    backward `weight_delay` before it follow; those that are left come last.
    """
    forwards, backwards = orders
    warmup = min(warmup, len(forwards))
    actions = [Action(stage, "F", i) for stage, i in forwards[:warmup]]
    kind: Kind = "B" if weight_delay is None else "I"
    for index, (stage, i) in enumerate(backwards):
        if warmup + index < len(forwards):
            following = forwards[warmup + index]
            actions.append(Action(following[0], "F", following[1]))
        actions.append(Action(stage, kind, i))
        if weight_delay is not None and index >= weight_delay:
            earlier = backwards[index - weight_delay]
            actions.append(Action(earlier[0], "W", earlier[1]))
    if weight_delay:
        actions += [
            Action(s, "W", i) for s, i in backwards[max(0, len(backwards) - weight_delay) :]
        ]
    return tuple(actions)


_GENERATORS: dict[str, Callable[[int, int, int], ActionLists]] = {
    "none": lambda pp, m, v: tuple(
        tuple(Action(rank, kind, i) for i in range(m) for kind in ("F", "B")) for rank in range(pp)
    ),
    "gpipe": lambda pp, m, v: gpipe(pp, m),
    "1f1b": lambda pp, m, v: one_f_one_b(pp, m),
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
SCHEDULES = tuple(_GENERATORS)
MULTI_STAGE = ("interleaved", "zero_bubble")


@lru_cache(maxsize=256)
def schedule_actions(
    schedule: str, pp: int, num_microbatches: int, num_chunks: int = 1
) -> ActionLists:
    """Return the actions of a schedule by its name in a plan; `none` is a loop without a pipeline.

    Raises:
        ValueError: no such schedule, or numbers that it cannot take; says which it can.
    """
    if schedule not in _GENERATORS:
        raise ValueError(f"schedule {schedule!r}; allowed are {', '.join(SCHEDULES)}")
    for name, value in (("pp", pp), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name} is {value}: it must be at least 1")
    if num_chunks < 1 or (num_chunks > 1 and schedule not in MULTI_STAGE):
        raise ValueError(
            f"schedule {schedule} with {num_chunks} stages a rank: only "
            f"{' and '.join(MULTI_STAGE)} take more than one"
        )
    if schedule == "none" and pp > 1:
        raise ValueError(f"pp={pp} stages need a schedule: gpipe, 1f1b, interleaved, zero_bubble")
    return _GENERATORS[schedule](pp, num_microbatches, num_chunks)


def unrunnable_split(
    schedule: str, zero_stage: int, *, is_mixed: bool, recomputes: bool = False
) -> str | None:
    """Return why torch cannot run a schedule's split backward with other decisions, or None.

    FSDP, which mixed precision needs too, reduces gradients in the backward to the inputs, where
    weights have none yet: they come out wrong, without an error. What is recomputed runs again for
    the inputs and then for every group of parameters: right, but many times as long.
    """
    if schedule != "zero_bubble":
        return None
    if recomputes:
        return (
            "zero_bubble splits backwards, and torch would run a recomputed block again for each "
            "of its layers: keep everything (recompute='none'), or use another schedule"
        )
    if zero_stage == 0 and not is_mixed:
        return None
    what = f"zero_stage={zero_stage}" if zero_stage else "mixed precision"
    return (
        f"zero_bubble splits backwards, and {what} is run by FSDP, which cannot reduce gradients "
        "that come in two parts: use zero_stage=0 in one dtype, or another schedule"
    )


def enough_rounds(num_microbatches: int, pp: int) -> int:
    """Return micro-batches after which a schedule in rounds repeats itself."""
    if num_microbatches % pp:
        return num_microbatches
    return min(num_microbatches, _ROUNDS * pp)


_ROUNDS = 3  # two warm up at most


@cache
def in_flight(schedule: str, pp: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
    """Return per rank the most micro-batches that are alive at once, summed over its stages."""
    listed = schedule_actions(schedule, pp, num_microbatches, num_chunks)
    return tuple(most_in_flight(own) for own in listed)


def in_flight_by_stage(
    schedule: str, pp: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[int, ...], ...]:
    """Return per rank how many micro-batches of each of its stages are alive when most are."""
    found = []
    for own in schedule_actions(schedule, pp, num_microbatches, num_chunks):
        live, most = [0] * num_chunks, (0,) * num_chunks
        for action in own:
            live[action.stage // pp] += _CHANGE[action.kind]
            if sum(live) > sum(most):
                most = tuple(live)
        found.append(most)
    return tuple(found)


def most_in_flight(actions: Sequence[Action]) -> int:
    """Return the most micro-batches of a rank's stages whose forward ran and backward has not.

    Counted from the list; a split backward ends with its weight gradients.
    """
    live = most = 0
    for action in actions:
        live += _CHANGE[action.kind]
        most = max(most, live)
    return most
