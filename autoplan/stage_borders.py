"""What of a stage's values crosses its borders, by name: whoever holds it, it is there once.

An activation that enters lies in a receive buffer, and one that leaves is held until the backward
of its micro-batch ends, whichever blocks of the stage keep it too. A skip may be kept by a later
block than the first, made by an earlier one than the last, or only be handed on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autoplan.block_work import BlockWork
from autoplan.graph import CallTrace, Trace

__all__ = [
    "Skip",
    "StageBorders",
    "borders_of",
    "carried_bytes",
    "crossing_places",
    "kept_by",
    "unkept_bytes",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """A value of a stage whose gradient lies beside the backwards of calls in between.

    Attributes:
        after: place in the stage of the first call that it lies beside.
        last: of the last call that reads it, which makes the gradient.
        name: that it has there.
    """

    after: int
    last: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBorders:
    """The values that cross a stage's borders.

    Attributes:
        entering: bytes of each activation that comes from the stage before, what is only handed on
            included.
        leaving: likewise to the stage after.
        returning: bytes of the gradients that go back for those that entered.
        skips: values that calls read which do not follow the one that made them, or the border.
    """

    entering: Mapping[str, int]
    leaving: Mapping[str, int]
    returning: int
    skips: tuple[Skip, ...]

    @property
    def handed_bytes(self) -> int:
        """Return the bytes of what enters and leaves as it is."""
        return sum(nbytes for name, nbytes in self.leaving.items() if name in self.entering)

    def kept_bytes(self, kept: Mapping[str, int]) -> int:
        """Return of what a block keeps, bytes by name, those that its stage holds in any case."""
        total = 0
        for name, nbytes in kept.items():
            crossing = self.entering.get(name, self.leaving.get(name, 0))
            total += min(nbytes, crossing)
        return total


class _Known:
    """A trace as a key: two are alike where they are one, which takes no time to tell."""

    __slots__ = ("trace",)

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __hash__(self) -> int:
        return id(self.trace)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.trace is self.trace


def borders_of(trace: Trace, calls: range, *, slices: int = 1) -> StageBorders:
    """Return what crosses the borders of a stage.

    Args:
        trace: of the model.
        calls: of the stage.
        slices: tensor-parallel degree where activations cross as slices of tokens, else 1.
    """
    return _borders(_Known(trace), calls, slices)


@lru_cache(maxsize=4096)
def _borders(known: _Known, calls: range, slices: int) -> StageBorders:
    trace = known.trace
    before = {out for call in trace.calls[: calls.start] for out in call.outs}
    made = {out: index for index in calls for out in trace.calls[index].outs}
    entering: dict[str, int] = {}
    leaving: dict[str, int] = {}
    last_read: dict[str, tuple[int, str]] = {}
    returning = 0
    for index in range(calls.start, len(trace.calls)):
        call = trace.calls[index]
        for value, name in zip(trace.blocks[call.block].inputs, call.args, strict=True):
            if name not in before and name not in made:
                continue
            nbytes = -(-value.nbytes // slices)
            if name in before and name not in entering:
                entering[name] = nbytes
                returning += nbytes if value.needs_grad else 0
            if index >= calls.stop:
                leaving.setdefault(name, nbytes)
            elif value.needs_grad:
                last_read[name] = (index, value.name)
    skips = []
    for name, (last, own) in last_read.items():
        after = made.get(name, calls.start - 1) + 1
        if after < last:
            skips.append(Skip(after=after - calls.start, last=last - calls.start, name=own))
    return StageBorders(entering=entering, leaving=leaving, returning=returning, skips=tuple(skips))


def kept_by(call: CallTrace, work: BlockWork, inputs: Sequence[str]) -> dict[str, int]:
    """Return the activations of the program that a call keeps, with the bytes of their storages.

    `inputs`: names of the block's inputs. Two results of one storage are both named; the second has
    no bytes of its own.
    """
    local, memory = work.local, work.memory
    kept = {
        value: local.inputs[name]
        for name, value in zip(inputs, call.args, strict=True)
        if name in memory.held_inputs
    }
    counted: set[str] = set()
    for name, value in zip(local.outputs, call.outs, strict=True):
        if name in memory.held_outputs:
            owner = local.storages.get(name, name)
            kept.setdefault(value, 0 if owner in counted else local.value_bytes.get(owner, 0))
            counted.add(owner)
    return kept


def carried_bytes(borders: StageBorders, works: Sequence[BlockWork]) -> list[int]:
    """Return per call of a stage the bytes of gradients that lie there beside its backward.

    A value that several calls read gets its gradient from the last of them, and holds it until the
    backward of the call that made it; one that entered, until the stage's backward ends.
    """
    carried = [0] * len(works)
    for skip in borders.skips:
        for place in range(skip.after, skip.last):
            carried[place] += works[skip.last].local.inputs[skip.name]
    return carried


def unkept_bytes(trace: Trace, kept: Sequence[Collection[str]]) -> int:
    """Return the most bytes that cross a cut and that the first call behind it to read them drops.

    What enters a stage lies in a receive buffer; all but this much of it is also counted as kept by
    a block of the stage, or leaves the stage again.

    Args:
        trace: of the model.
        kept: per call the names of the block's inputs that it keeps in any case.
    """
    dropped: dict[str, int] = {}
    most = 0
    for index in range(len(trace.calls) - 1, 0, -1):
        call = trace.calls[index]
        for name in call.outs:
            dropped.pop(name, None)
        for value, name in zip(trace.blocks[call.block].inputs, call.args, strict=True):
            if value.is_activation:
                dropped[name] = 0 if value.name in kept[index] else value.nbytes
        most = max(most, sum(dropped.values()))
    return most


def crossing_places(
    trace: Trace, calls: range
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], tuple[tuple[int, int], ...]]:
    """Return what crosses a stage's borders by the places where the stage makes and reads it.

    Bytes and the calls that read it of what enters; bytes and the call that makes it, -1 where it
    entered, of what leaves.

    Stages of the same blocks in which these are equal hold the same of what crosses.
    """
    borders = borders_of(trace, calls)
    reads: dict[str, list[int]] = {name: [] for name in borders.entering}
    made: dict[str, int] = {}
    for place, index in enumerate(calls):
        call = trace.calls[index]
        made.update(dict.fromkeys(call.outs, place))
        for name in call.args:
            if name in reads:
                reads[name].append(place)
    return (
        tuple((nbytes, tuple(reads[name])) for name, nbytes in borders.entering.items()),
        tuple((nbytes, made.get(name, -1)) for name, nbytes in borders.leaving.items()),
    )
