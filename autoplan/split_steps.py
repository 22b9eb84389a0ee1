"""How long a step takes where backwards are split: by a closed form and by the schedule's lists.

Weight gradients fill what would be waited for. With even stages of forward f, backward to the
inputs b and to the parameters w, a step of ZB-H1 (Qi et al. 2023, section 2.2) takes

    m (f + b + w) + (pp - 1) max(f, b, f + b - w)

so every stage but one waits less than without a split, by min(b + w, f + w, 2 w). For uneven stages
that holds on the average only. So what is priced is the formula without a split, less

    at most (pp - 1) / pp of sum over blocks of min(b + w, f + w, 2 w), a v-th with v stages a rank,
    at most by how much the lists take less, each action as soon as its rank and inputs are there.

The first does not depend on where the chain is cut; and with the second no time is taken off that
the lists do not show. Where the formula without a split is longer than its lists, so is this.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoplan.schedules import schedule_actions
from autoplan.settings import Setting

__all__ = ["list_times", "saved_at_most", "saved_by_block", "steps_with_split"]

_ROUNDS = 4  # of micro-batches through the lists; later ones only add the pace of the slowest
_WHOLE = {1: "1f1b"}  # the schedule without a split, by stages a rank; else interleaved

Floats = NDArray[np.float64]


def saved_by_block(forward: float, inputs: float, weights: float) -> float:
    """Return what even stages of such blocks wait less for each because backwards are split."""
    return min(inputs + weights, forward + weights, 2 * weights)


def saved_at_most(saved: float, setting: Setting) -> float:
    """Return by how much a step is shorter at most, given the sum of `saved_by_block`."""
    return saved * (setting.pp - 1) / setting.pp / setting.virtual_stages


def steps_with_split(
    steps: ArrayLike,
    setting: Setting,
    forward: ArrayLike,
    inputs: ArrayLike,
    weights: ArrayLike,
    saved: ArrayLike,
) -> Floats:
    """Return the seconds (or ticks) of steps.

    Args:
        steps: [...] of the same stages without a split.
        setting: of the pipeline.
        forward, inputs, weights: [..., stage] of one micro-batch.
        saved: [...] sums of `saved_by_block`.
    """
    pp, m, v = setting.pp, setting.num_microbatches, setting.virtual_stages
    m = min(m, _ROUNDS * max(1, m // max(1, m // pp)))
    parts = [np.asarray(part, dtype=np.float64) for part in (forward, inputs, weights)]
    whole = list_times(_WHOLE.get(v, "interleaved"), pp, m, v, *parts)
    split = list_times(setting.schedule, pp, m, v, *parts)
    most = np.asarray(saved, dtype=np.float64) * saved_at_most(1.0, setting)
    return np.asarray(steps, dtype=np.float64) - np.minimum(most, whole - split)


def list_times(
    schedule: str,
    pp: int,
    num_microbatches: int,
    num_chunks: int,
    forward: Floats,
    inputs: Floats,
    weights: Floats,
) -> Floats:
    """Return when the last action of a schedule ends: [...] of [..., stage] by kind of action.

    A whole backward takes `inputs` and `weights` together. Nothing travels.
    """
    length = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights}
    free: list[Floats] = [np.zeros(forward.shape[:-1])] * pp
    ends: list[Floats] = []
    for rank, stage, kind, need in _in_order(schedule, pp, num_microbatches, num_chunks):
        start = free[rank] if need < 0 else np.maximum(free[rank], ends[need])
        free[rank] = start + length[kind][..., stage]
        ends.append(free[rank])
    return np.asarray(np.stack(free).max(axis=0))


@lru_cache(maxsize=64)
def _in_order(
    schedule: str, pp: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[int, int, str, int], ...]:
    """Return the actions such that each comes after what it needs.

    Each as rank, stage, kind, and the place of the action on another stage that it needs, or -1.
    """
    lists = schedule_actions(schedule, pp, num_microbatches, num_chunks)
    last_stage = pp * num_chunks - 1
    found: list[tuple[int, int, str, int]] = []
    made: dict[tuple[int, str, int], int] = {}
    position = [0] * pp
    while len(found) < sum(map(len, lists)):
        for rank, own in enumerate(lists):
            while position[rank] < len(own):
                action = own[position[rank]]
                way = "F" if action.kind == "F" else "B"
                source = action.stage + (-1 if way == "F" else 1)
                need = -1
                if action.kind != "W" and 0 <= source <= last_stage:
                    if (source, way, action.microbatch) not in made:
                        break
                    need = made[source, way, action.microbatch]
                if action.kind != "W":
                    made[action.stage, way, action.microbatch] = len(found)
                found.append((rank, action.stage, action.kind, need))
                position[rank] += 1
    return tuple(found)
