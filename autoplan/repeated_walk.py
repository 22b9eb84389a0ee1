"""A walk of a stage's bytes that walks each action once, however often it comes again.

Once a schedule is warm, what parameters and gradients hold before an action is what they held
before it a micro-batch ago, and only what is kept of micro-batches differs. Every sum of a walk
counts that alike, so the action makes the sums of then, all moved by as much as is kept more now.
A forward, and a backward to the inputs, leaves gradients alone: there they may differ too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.stage_walk import Sizes, StageWalk

__all__ = ["RepeatedWalk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Walked:
    """What an action does in a state.

    Attributes:
        copies, gradients: numbers of the states in which it ends; no gradients where it leaves
            them alone.
        activations, fixed: bytes by which it changes them.
        peak: the largest sum, less activations and what is fixed before the action, and less
            gradients where it leaves them alone.
        name, parts: of that sum; likewise.
    """

    copies: int
    gradients: int | None
    activations: int
    fixed: int
    peak: int
    name: str
    parts: dict[str, int]


@dataclass(slots=True)
class _States:
    """The states that some sizes have been in, each with a number."""

    known: list[tuple[Any, ...]]
    numbers: dict[tuple[Any, ...], int]

    def number(self, sizes: tuple[Sizes, Sizes], *others: Any) -> int:
        """Return the number of a state: the same for the same."""
        state = (*(frozenset(own.items()) for own in sizes), *others)
        number = self.numbers.setdefault(state, len(self.known))
        if number == len(self.known):
            self.known.append((*(own.copied() for own in sizes), *others))
        return number


class RepeatedWalk(StageWalk):
    """A `StageWalk` with the same peak, without samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[tuple[object, ...], _Walked] = {}
        self._copies_known, self._gradients_known = _States([], {}), _States([], {})
        self._copies, self._gradients = self._copies_number(), self._gradients_number()
        self._part = 0
        self._are_copies_behind = self._are_gradients_behind = False

    def act(self, kind: str, is_last: bool, part: int, held: int) -> None:
        """Do what the walk of an action does, and walk it where that is not known."""
        self._part = part
        how = self.part_bytes[part].backward
        spares = kind == "F" or (kind == "I" and how != "whole") or (kind == "W" and how == "whole")
        key = (self._copies, None if spares else self._gradients, kind, is_last, part, held)
        walked = self._known.get(key)
        if walked is None:
            self._catch_up()
            walked = self._known[key] = self._watched(kind, is_last, part, held, spares)
        else:
            self._repeat(walked)
            self._are_copies_behind |= walked.copies != self._copies
            if walked.gradients is not None:
                self._are_gradients_behind |= walked.gradients != self._gradients
        self._copies = walked.copies
        if walked.gradients is not None:
            self._gradients = walked.gradients

    def settle(self) -> None:
        """Bring sizes into the states of now, and the stage of the last action in."""
        self._catch_up()
        self.enter(self._part)

    def _catch_up(self) -> None:
        """Bring sizes into the states of now."""
        if self._are_copies_behind:
            gathered, buffers, self.reduce_input = self._copies_known.known[self._copies]
            self.gathered.become(gathered)
            self.buffers.become(buffers)
        if self._are_gradients_behind:
            found = self._gradients_known.known[self._gradients]
            gradients, sharded, marks, self.unmerged, self.waiting = found
            self.gradients.become(gradients)
            self.sharded.become(sharded)
            self.marks = set(marks)
        self._are_copies_behind = self._are_gradients_behind = False

    def _copies_number(self) -> int:
        return self._copies_known.number((self.gathered, self.buffers), self.reduce_input)

    def _gradients_number(self) -> int:
        others = (frozenset(self.marks), self.unmerged, self.waiting)
        return self._gradients_known.number((self.gradients, self.sharded), *others)

    def _gradient_bytes(self) -> int:
        """Return the bytes of gradients now."""
        gradients, sharded, _, unmerged, _ = self._gradients_known.known[self._gradients]
        return int(gradients.total + sharded.total + unmerged)

    def _watched(self, kind: str, is_last: bool, part: int, held: int, spares: bool) -> _Walked:
        """Walk an action, and return what it does; `spares`: it leaves gradients alone."""
        activations, fixed = self.activations, self.fixed
        peak, name, parts = self.peak, self.peak_name, self.peak_parts
        there = self._gradient_bytes() if spares else 0
        self.peak = -1
        super().act(kind, is_last, part, held)
        before = activations + fixed
        own = {
            **self.peak_parts,
            "gradients": self.peak_parts["gradients"] - there,
            "activations": self.peak_parts["activations"] - before,
        }
        walked = _Walked(
            copies=self._copies_number(),
            gradients=None if spares else self._gradients_number(),
            activations=self.activations - activations,
            fixed=self.fixed - fixed,
            peak=self.peak - before - there,
            name=self.peak_name,
            parts=own,
        )
        if self.peak <= peak:
            self.peak, self.peak_name, self.peak_parts = peak, name, parts
        return walked

    def _repeat(self, walked: _Walked) -> None:
        """Do what an action does, but for sizes."""
        before = self.activations + self.fixed
        held = 0 if walked.gradients is not None else self._gradient_bytes()
        if walked.peak + before + held > self.peak:
            self.peak, self.peak_name = walked.peak + before + held, walked.name
            self.peak_parts = {
                **walked.parts,
                "gradients": walked.parts["gradients"] + held,
                "activations": walked.parts["activations"] + before,
            }
        self.activations += walked.activations
        self.fixed += walked.fixed
