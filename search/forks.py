"""Work in forked processes: they see what this process knew, and send back what they find.

Only for functions without side effects. Whoever waits for one gets what the function returns, or
does the work itself where the process cannot: nothing depends on it but the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Beside", "Forked", "StandstillError", "first_to_answer", "usable_cores"]

STANDSTILL_S = 20.0
_SOON_S = 1.0  # most answers come sooner, before it is worth a look at what a process has taken
_PR_SET_PDEATHSIG = 1  # prctl(2)

T = TypeVar("T")


def usable_cores() -> int:
    """Return how many processes may run at once here; 1 where processes cannot be forked.

    They cannot on Windows, not safely on macOS, and not by a process that ends with its parent.
    """
    if not sys.platform.startswith("linux") or multiprocessing.current_process().daemon:
        return 1
    return len(os.sched_getaffinity(0))


class Forked:
    """A forked process that serves this one over a pipe, and ends with it.

    Args:
        serve: run there with its end of the pipe until that raises EOFError.
    """

    def __init__(self, serve: Callable[[Connection], None]):
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(serve, theirs, os.getpid()), daemon=True, name="autoplan worker"
        )
        self._process.start()
        theirs.close()

    def processor_s(self) -> float:
        """Return the processor seconds that the process has taken so far; 0 after its end."""
        try:
            text = Path(f"/proc/{self._process.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # what it said may wait in the pipe still
            return 0.0
        fields = text.rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # proc(5)

    def end(self) -> int | None:
        """End the process; return its exit code if it ended by itself before."""
        self._process.join(0)
        code = self._process.exitcode
        self._process.kill()
        self._process.join()
        self.connection.close()
        return code


def _serve(serve: Callable[[Connection], None], pipe: Connection, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the parent
    if os.getppid() != parent:  # which ended before
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to hear
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread of the parent may have held the locks of its streams when it forked. What would be
    # told here, the parent's own part of the work tells too.
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent wants no more
        serve(pipe)
    os._exit(0)


class StandstillError(OSError):
    """Processes that wait for what never comes."""


def first_to_answer(working: Sequence[Forked]) -> list[Forked]:
    """Wait for processes that are at work; return those that have something to say or ended.

    Raises:
        StandstillError: none of them takes any processor time: a lock that another thread of the
            parent held when it forked is never let go.
    """
    connections = [forked.connection for forked in working]
    before: list[float] | None = None
    limit_s = min(_SOON_S, STANDSTILL_S)
    while True:
        heard = wait(connections, limit_s)
        if heard:
            return [forked for forked in working if forked.connection in heard]
        taken = [forked.processor_s() for forked in working]
        if taken == before:
            raise StandstillError(f"no worker has moved for {STANDSTILL_S:g} s")
        before, limit_s = taken, STANDSTILL_S


class Beside(Generic[T]):
    """A function that runs in a forked process while this one goes on.

    Args:
        function: without side effects; what it returns must pickle.
    """

    def __init__(self, function: Callable[[], T]):
        self._function = function
        self._forked = Forked(self._run)

    def _run(self, pipe: Connection) -> None:
        try:
            answer: Any = (True, self._function())
        except Exception as error:  # the parent meets it again, with its own traceback
            answer = (False, repr(error))
        pipe.send(answer)

    def is_done(self) -> bool:
        """Return whether the process has answered or ended."""
        return self._forked.connection.poll()

    def end(self) -> None:
        """End the process; nobody waits for what it finds."""
        self._forked.end()

    def result(self) -> T:
        """Return what the function returns; it is called here where its process failed."""
        try:
            first_to_answer([self._forked])
            is_done, answer = self._forked.connection.recv()
        except (EOFError, OSError):
            is_done, answer = False, None
        finally:
            code = self._forked.end()
        if is_done:
            found: T = answer
            return found
        if answer is None:
            warnings.warn(
                f"a worker process ended before its work was done (exit code {code}); it is done "
                "again in this one",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._function()
