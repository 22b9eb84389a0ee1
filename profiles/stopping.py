"""Ctrl-C while measuring: it stops early, keeps what was measured, and a later run goes on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["Stop", "is_stopped", "stoppable"]


@dataclass(slots=True)
class Stop:
    """Whether somebody asked for an early end."""

    is_asked: bool = False


_STOPS: list[Stop] = []


def is_stopped() -> bool:
    """Return whether measuring should end with what there is."""
    return any(stop.is_asked for stop in _STOPS)


@contextmanager
def stoppable() -> Iterator[Stop]:
    """Let the first Ctrl-C ask for an early end; the second one is a `KeyboardInterrupt`.

    Signals come to the main thread only: in another one nothing changes.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        stop.is_asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, ask)
    _STOPS.append(stop)
    try:
        yield stop
    finally:
        _STOPS.remove(stop)
        signal.signal(signal.SIGINT, before)
