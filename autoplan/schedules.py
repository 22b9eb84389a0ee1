"""The order of forwards and backwards on each rank of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.settings import Setting

__all__ = ["Action", "actions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A forward or a backward of one micro-batch in one part of a rank's blocks.

    Attributes:
        kind: `F` or `B`.
        microbatch: number, from 0.
        part: which of the rank's `virtual_stages` parts, from 0 at the front of the model.
    """

    kind: Literal["F", "B"]
    microbatch: int
    part: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.part}"


def actions(setting: Setting, rank: int, num_microbatches: int | None = None) -> list[Action]:
    """Return what a rank of the pipeline does in a step, in order.

    Args:
        setting: degrees and schedule.
        rank: of the pipeline, from 0.
        num_microbatches: other than the setting's.

    Returns:
        GPipe (Huang et al. 2019), 1F1B (Narayanan et al. 2019, section 3.2) or, with several
        virtual stages, its interleaved form (Narayanan et al. 2021, section 2.2).
    """
    m = setting.num_microbatches if num_microbatches is None else num_microbatches
    if setting.virtual_stages > 1:
        return _interleaved(m, setting.pp, setting.virtual_stages, rank)
    if setting.schedule == "gpipe":
        order = range(m)
        return [_action("F", i) for i in order] + [_action("B", i) for i in order]
    warm = min(m, setting.pp - rank) if setting.pp > 1 else 1
    done = [_action("F", i) for i in range(warm)]
    for index in range(m):
        done.append(_action("B", index))
        if warm + index < m:
            done.append(_action("F", warm + index))
    return done


def _action(kind: Literal["F", "B"], microbatch: int, part: int = 0) -> Action:
    return Action(kind=kind, microbatch=microbatch, part=part)


def _interleaved(m: int, pp: int, parts: int, rank: int) -> list[Action]:
    """Groups of pp micro-batches go through part after part.

    A rank starts with 2 (pp - rank - 1) + (parts - 1) pp forwards more than the one that each
    backward then follows.
    """
    total = m * parts
    warm = min(total, 2 * (pp - rank - 1) + (parts - 1) * pp + 1)
    forwards = [_place(k, pp, parts) for k in range(total)]
    backwards = [(i, parts - 1 - part) for i, part in forwards]
    done = [_action("F", *forwards[k]) for k in range(warm)]
    for index in range(total):
        done.append(_action("B", *backwards[index]))
        if warm + index < total:
            done.append(_action("F", *forwards[warm + index]))
    return done


def _place(k: int, pp: int, parts: int) -> tuple[int, int]:
    """Return micro-batch and part of the k-th forward of a rank."""
    return k // (pp * parts) * pp + k % pp, k % (pp * parts) // pp
