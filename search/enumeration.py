"""Every mix of options that is fast enough, block by block, as far as bounds allow.

A mix takes an option for every block of some runs. With prices r of what is held and p of `once`
the (held, time, once) of the first blocks is followed only if

    time + p once + r held + sum over later blocks of min_o (time + p once + r held)[o]
        - r room - p most_once  <=  what is wanted

if the later blocks at their least in each number alone keep to the limits, and if no other holds as
little, is as fast, and has as little of `once`, where that can strike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SLACK", "Enumerated", "best_within"]

SLACK = 1e-9  # of a bound in floating point, relative to it
_MAX_LABELS = 4000
_SOME_LABELS = 1000  # where there are more


@dataclass(frozen=True, slots=True, kw_only=True)
class Enumerated:
    """A mix, and whether it is proven to be the fastest.

    Attributes:
        counts: blocks per run and option; empty: none was found, and proven, there is none.
        is_proof: all that might be better was followed.
    """

    counts: tuple[tuple[int, ...], ...]
    is_proof: bool


def best_within(
    counts: Sequence[int],
    numbers: Sequence[NDArray[np.int64]],
    limits: tuple[int, int, int],
    prices: tuple[float, float],
    *,
    is_thorough: bool = False,
) -> Enumerated:
    """Return the fastest mix within limits.

    Args:
        counts: blocks of each run.
        numbers: of each run, held, time and once of its options, [3, option].
        limits: of the sums of held, time and once over all blocks.
        prices: ticks of time per unit held and per tick of once; the nearer to those of the
            relaxation, the fewer mixes are followed.
        is_thorough: follow some mixes, spread evenly, where there are too many, instead of none.
    """
    room, wanted, most_once = limits
    weights = np.array([prices[0], 1.0, prices[1]])
    paid = prices[0] * room + prices[1] * most_once
    least = np.array([own.min(axis=1) for own in numbers])
    rest = np.array([(weights @ own).min() for own in numbers])
    after = (np.array(counts)[:, None] * least).sum(axis=0)
    bound = float((np.array(counts) * rest).sum()) - paid
    limit = wanted + abs(wanted) * SLACK
    can_strike = sum(n * int(own[2].max()) for n, own in zip(counts, numbers, strict=True))
    labels, most_labels = np.zeros((3, 1), dtype=np.int64), _MAX_LABELS
    history: list[tuple[int, NDArray[np.int64], NDArray[np.int64]]] = []
    for run, (count, own) in enumerate(zip(counts, numbers, strict=True)):
        for _ in range(count):
            bound -= rest[run]
            after = after - least[run]
            grown = (labels[:, :, None] + own[:, None, :]).reshape(3, -1)
            fits = (grown + after[:, None] <= np.array(limits)[:, None]).all(axis=0)
            fits &= weights @ grown + bound <= limit
            kept = np.nonzero(fits)[0]
            kept = kept[_undominated(grown[:, kept], can_strike > most_once)]
            if len(kept) > most_labels:
                most_labels = _SOME_LABELS if is_thorough else 0
                kept = kept[np.linspace(0, len(kept) - 1, most_labels).astype(np.int64)]
            if not len(kept):
                return Enumerated(counts=(), is_proof=most_labels == _MAX_LABELS)
            labels = grown[:, kept]
            history.append((run, kept // own.shape[1], kept % own.shape[1]))
    label = int(labels[1].argmin())
    found = [[0] * own.shape[1] for own in numbers]
    for run, parents, choices in reversed(history):
        found[run][int(choices[label])] += 1
        label = int(parents[label])
    return Enumerated(counts=tuple(map(tuple, found)), is_proof=most_labels == _MAX_LABELS)


def _undominated(labels: NDArray[np.int64], can_strike: bool) -> NDArray[np.int64]:
    """Return the places of labels that may be of use, those that hold least first.

    Of (held, time, once) in three rows. Where `once` can strike only those are left out that one of
    two others beats: the fastest, or that of least `once`, of what holds no more.
    """
    held, time, once = labels
    if not can_strike:
        once = np.zeros_like(once)
    order = np.lexsort((once, time, held))
    time, once = time[order], once[order]
    is_of_use = np.ones(len(order), dtype=np.bool_)
    for first, other in ((time, once), (once, time)):
        least = np.minimum.accumulate(first)
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = first[1:] < least[:-1]
        last = np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))
        is_of_use &= is_new | (other < other[last])
    return order[is_of_use]
