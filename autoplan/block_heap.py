"""Tensors of one block that are alive: by owner, with their peak, and gradients on their way."""

from __future__ import annotations

__all__ = ["Event", "Gradients", "Heap"]

# A tensor is made (name, bytes) or let go (name, 0).
Event = tuple[str, int]


class Heap:
    """Live bytes by owner, with their peak; `events` is filled where it is a list.

    `border_peak` is the peak at the border of a pipeline's stage: what `drop` lets go as held by
    others stays, and what was `received` lies in a buffer that is counted elsewhere.
    """

    def __init__(self, events: list[Event] | None = None) -> None:
        self.live: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self.held = 0
        self.received: dict[str, int] = {}
        self.border_peak = 0
        self.events = events

    def add(self, name: str, nbytes: int) -> None:
        if name in self.live or nbytes == 0:
            return
        self.live[name] = nbytes
        self.total += nbytes
        self._note(self.total)
        if self.events is not None:
            self.events.append((name, nbytes))

    def drop(self, name: str, *, is_held: bool = False) -> None:
        if self.events is not None and name in self.live:
            self.events.append((name, 0))
        nbytes = self.live.pop(name, 0)
        self.total -= nbytes
        if is_held:
            self.held += nbytes
        self.held += self.received.pop(name, 0)

    def receive(self, name: str) -> None:
        """Let a live tensor be one that lies in a receive buffer."""
        if name in self.live:
            self.received[name] = self.live[name]
            self.held -= self.live[name]

    def own(self, name: str) -> None:
        """Let what is added to a received tensor be one of its own: the buffer is not written."""
        if name in self.received:
            self.held += self.received.pop(name)
            self._note(self.total)

    def _note(self, total: int) -> None:
        if total > self.peak:
            self.peak = total
        if total + self.held > self.border_peak:
            self.border_peak = total + self.held

    def transient(self, nbytes: int) -> None:
        self._note(self.total + nbytes)
        if self.events is not None and nbytes:
            self.events += [("transient", nbytes), ("transient", 0)]


class Gradients:
    """Gradients of values on their way back; one tensor may serve several values."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.held: dict[str, list[int]] = {}
        self.users: dict[int, int] = {}
        self.count = 0
        self.entered: list[int] = []
        self._coming: list[tuple[str, int, int]] = []

    def enter(self, name: str, nbytes: int, *, is_held: bool = False) -> None:
        """Let a gradient of a value be there before the backward starts, in `entered` if held."""
        self.receive(name, nbytes)
        self.heap.receive(f"grad:{self.count}")
        if is_held:
            self.users[self.count] += 1
            self.entered.append(self.count)

    def receive(self, name: str, nbytes: int) -> None:
        """Make a gradient of a value; `add_up` adds it to the one that the value may have."""
        number = self._make(nbytes)
        if self.held.get(name):
            self._coming.append((name, number, nbytes))
        else:
            self.held[name] = [number]

    def pass_on(self, name: str, coming: list[int]) -> None:
        """Let a value use gradients that exist."""
        own = self.held.get(name)
        if own and self.users[own[0]] == 1 and len(own) == 1:
            self.heap.own(f"grad:{own[0]}")  # added in place to the one that it has alone
            return
        for number in coming:
            self.users[number] += 1
        self.held[name] = [*(own or []), *coming]

    def collect(self, name: str, coming: list[int]) -> None:
        """Add the gradient of one part to those of the other parts of a tuple."""
        for number in coming:
            self.users[number] += 1
        self.held[name] = [*self.held.get(name, []), *coming]

    def add_up(self) -> None:
        """Add what came to what was there, as autograd does when the op's backward has ended.

        It adds in place to a gradient that one value has alone, and makes a new one otherwise.
        """
        for name, number, nbytes in self._coming:
            own = self.held[name]
            if len(own) > 1 or self.users[own[0]] > 1:
                self.held[name] = [self._make(nbytes)]
                self.release(own)
            else:
                self.heap.own(f"grad:{own[0]}")
            self.release([number])
        self._coming.clear()

    def _make(self, nbytes: int) -> int:
        self.count += 1
        self.heap.add(f"grad:{self.count}", nbytes)
        self.users[self.count] = 1
        return self.count

    def take(self, name: str) -> list[int]:
        """Return and forget the gradients of a value."""
        return self.held.pop(name, [])

    def release(self, numbers: list[int]) -> None:
        """Drop one use of each gradient."""
        for number in numbers:
            self.users[number] -= 1
            if self.users[number] == 0:
                self.heap.drop(f"grad:{number}")
