"""Tensors of one block that are alive: by owner, with their peak, and gradients on their way."""

from __future__ import annotations

__all__ = ["Event", "Gradients", "Heap"]

# A tensor is made (name, bytes) or let go (name, 0).
Event = tuple[str, int]


class Heap:
    """Live bytes by owner, with their peak; `events` is filled where it is a list."""

    def __init__(self, events: list[Event] | None = None) -> None:
        self.live: dict[str, int] = {}
        self.total = 0
        self.peak = 0
        self.events = events

    def add(self, name: str, nbytes: int) -> None:
        if name in self.live or nbytes == 0:
            return
        self.live[name] = nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.total)
        if self.events is not None:
            self.events.append((name, nbytes))

    def drop(self, name: str) -> None:
        if self.events is not None and name in self.live:
            self.events.append((name, 0))
        self.total -= self.live.pop(name, 0)

    def transient(self, nbytes: int) -> None:
        self.peak = max(self.peak, self.total + nbytes)
        if self.events is not None and nbytes:
            self.events += [("transient", nbytes), ("transient", 0)]


class Gradients:
    """Gradients of values on their way back; one tensor may serve several values."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.held: dict[str, list[int]] = {}
        self.users: dict[int, int] = {}
        self.count = 0

    def receive(self, name: str, nbytes: int, transient: int = 0) -> None:
        """Make a new gradient of a value, or add one to what it has."""
        if self.held.get(name):
            self._add_up(name, nbytes, transient)
            return
        self.count += 1
        self.heap.add(f"grad:{self.count}", nbytes)
        self.held[name] = [self.count]
        self.users[self.count] = 1

    def pass_on(self, name: str, coming: list[int]) -> None:
        """Let a value use gradients that exist."""
        own = self.held.get(name)
        if own and self.users[own[0]] == 1 and len(own) == 1:
            return  # added in place to the one that it has alone
        for number in coming:
            self.users[number] += 1
        self.held[name] = [*(own or []), *coming]

    def collect(self, name: str, coming: list[int]) -> None:
        """Add the gradient of one part to those of the other parts of a tuple."""
        for number in coming:
            self.users[number] += 1
        self.held[name] = [*self.held.get(name, []), *coming]

    def _add_up(self, name: str, nbytes: int, transient: int) -> None:
        own = self.held[name]
        if len(own) == 1 and self.users[own[0]] == 1:
            self.heap.transient(nbytes + transient)
            return
        self.count += 1
        self.heap.add(f"grad:{self.count}", nbytes)
        self.heap.transient(transient)
        self.users[self.count] = 1
        self.held[name] = [self.count]
        self.release(own)

    def take(self, name: str) -> list[int]:
        """Return and forget the gradients of a value."""
        return self.held.pop(name, [])

    def release(self, numbers: list[int]) -> None:
        """Drop one use of each gradient."""
        for number in numbers:
            self.users[number] -= 1
            if self.users[number] == 0:
                self.heap.drop(f"grad:{number}")
