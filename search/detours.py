"""Stretches of a run within a stage whose blocks hand over to each other in another way.

A run's options before those of its detours are plain: such a block takes over and hands on in the
usual way. A stage with n blocks of a run takes plain options for all of them, or for one detour

    plain ... plain  first  inner ... inner  last  plain ... plain          n >= 2

one option of `first`, one of `last`, and any number of the others: blocks of a run can change
places, so a stage with a detour is a stage with three runs and no detour (`without_detours`).
For bounds, `first` and `last` come in pairs, so each of the n blocks takes no less than

    min( plain, inner, (first + last) / 2 )                                          `block_minima`
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoplan.search.problem import BlockOption, Detour, PipelineProblem, Run

__all__ = [
    "Expanded",
    "block_minima",
    "hands_over",
    "kept_options",
    "least_once",
    "without_detours",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """A stage as runs without detours.

    Attributes:
        runs: of the stage.
        parts: per run of it the run that it is part of, and the indices of its options there.
    """

    runs: tuple[Run, ...]
    parts: tuple[tuple[int, tuple[int, ...]], ...]

    def collected(
        self, runs: Sequence[Run], counts: Sequence[Sequence[int]]
    ) -> tuple[tuple[int, ...], ...]:
        """Return counts per option of the runs that were expanded."""
        found = [[0] * len(run.options) for run in runs]
        for (run, options), own in zip(self.parts, counts, strict=True):
            for option, n in zip(options, own, strict=True):
                found[run][option] += n
        return tuple(map(tuple, found))


def without_detours(runs: Sequence[Run]) -> Iterator[Expanded]:
    """Yield the ways to run a stage of these runs: for every run no detour, or one of its own."""
    ways = [(None, *(run.detours if run.count > 1 else ())) for run in runs]
    for chosen in product(*ways):
        parts: list[tuple[int, int, tuple[int, ...]]] = []
        for index, (run, detour) in enumerate(zip(runs, chosen, strict=True)):
            plain = tuple(range(run.num_plain))
            if detour is None:
                parts.append((run.count, index, plain))
                continue
            parts += [(1, index, tuple(detour.first)), (1, index, tuple(detour.last))]
            if run.count > 2:
                parts.append((run.count - 2, index, (*plain, *detour.inner)))
        yield Expanded(
            runs=tuple(
                Run(count=count, options=tuple(runs[index].options[o] for o in options))
                for count, index, options in parts
            ),
            parts=tuple((index, options) for _, index, options in parts),
        )


def block_minima(runs: Sequence[Run], values: NDArray[Any]) -> NDArray[Any]:
    """Return [..., run] what a block takes at the least, of values [..., run, option]."""
    found = values.min(axis=-1)
    for index, run in enumerate(runs):
        if run.detours:
            own = values[..., index, :]
            found = found.astype(np.float64)
            found[..., index] = _least(run, lambda options, own=own: own[..., options].min(axis=-1))
    return np.asarray(found)


def _least(run: Run, least_of: Any) -> Any:
    """Return the least of a block, by what the least of some options is."""
    found = least_of(list(range(run.num_plain)))
    for detour in run.detours:
        turn = (least_of(list(detour.first)) + least_of(list(detour.last))) / 2
        found = np.minimum(found, turn)
        if detour.inner:
            found = np.minimum(found, least_of(list(detour.inner)))
    return found


def least_once(run: Run) -> int:
    """Return ticks of once that a block of a run takes at the least."""
    return int(_least(run, lambda options: min(run.options[o].once for o in options)))


def kept_options(run: Run, undominated: Any) -> tuple[Run, tuple[int, ...]]:
    """Return a run without options that others beat wherever they may stand, and what is left.

    Args:
        run: with its options.
        undominated: returns the indices of those of some options that no other of them beats.
    """

    def left(own: Sequence[int], rivals: Sequence[int] = ()) -> list[int]:
        every = [*rivals, *own]
        kept = {every[i] for i in undominated([run.options[o] for o in every])}
        return [option for option in own if option in kept]

    plain = left(range(run.num_plain))
    kept, detours = list(plain), []
    for detour in run.detours:
        ranges = []
        for own in (left(detour.first), left(detour.inner, plain), left(detour.last)):
            ranges.append(range(len(kept), len(kept) + len(own)))
            kept += own
        detours.append(Detour(first=ranges[0], inner=ranges[1], last=ranges[2]))
    options: tuple[BlockOption, ...] = tuple(run.options[o] for o in kept)
    return replace(run, options=options, detours=tuple(detours)), tuple(kept)


def hands_over(problem: PipelineProblem, ends: Sequence[int], options: Sequence[int]) -> bool:
    """Return whether in every stage each block takes over what the one before hands on."""
    starts = [0]
    for run in problem.runs:
        starts.append(starts[-1] + run.count)
    for first, stop in pairwise((0, *ends)):
        for run, (start, end) in zip(problem.runs, pairwise(starts), strict=True):
            own = options[max(first, start) : max(min(stop, end), max(first, start))]
            if not _is_path(run, own):
                return False
    return True


def _is_path(run: Run, options: Sequence[int]) -> bool:
    """Return whether options of neighbouring blocks go together, with one detour at most."""
    inside: Detour | None = None
    num_detours = 0
    for option in options:
        if inside is None:
            inside = next((d for d in run.detours if option in d.first), None)
            num_detours += inside is not None
            if inside is None and option >= run.num_plain:
                return False
        elif option in inside.last:
            inside = None
        elif option not in inside.inner:
            return False
    return inside is None and num_detours <= 1
