"""Run a script on several processes of this machine, with a hard limit and no orphans."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from autoplan.errors import EmitError

__all__ = ["ERROR_FOLDER", "LaunchResult", "is_running", "launch"]

ERROR_FOLDER = "AUTOPLAN_ERROR_FOLDER"

_GRACE_S = 2.0
_GRACE_AFTER_ERROR_S = 5.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a launch ended.

    Attributes:
        output: what rank 0 printed.
        wall_time_s: from start to end.
    """

    output: str
    wall_time_s: float


def launch(
    arguments: Sequence[str],
    nproc: int,
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    echo: bool = True,
) -> LaunchResult:
    """Run `arguments` under torchrun on `nproc` processes and wait for the end.

    Args:
        arguments: a script with its arguments, or `-m module ...`.
        nproc: processes on this machine.
        timeout_s: hard limit; all processes are killed at it.
        env: additions to this process's environment.
        echo: print what rank 0 prints, as it comes.

    Raises:
        EmitError: a rank failed (with the first failing rank's traceback), or the time is over.
    """
    if nproc < 1:
        raise ValueError(f"nproc is {nproc}; it must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(nproc)),
            *("--log-dir", folder, "--redirects", _others(nproc, "3"), "--tee", "0:0"),
            *arguments,
        ]
        started = time.monotonic()
        process = subprocess.Popen(
            [part for part in command if part],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(env or {}), ERROR_FOLDER: folder},
            start_new_session=True,
        )
        lines: list[str] = []
        assert process.stdout is not None, "the output is piped"
        reader = threading.Thread(target=_read, args=(process.stdout, lines, echo), daemon=True)
        reader.start()
        try:
            status = _wait(process, Path(folder), started + timeout_s)
        except subprocess.TimeoutExpired:
            raise EmitError(
                f"the launch of {' '.join(arguments)} on {nproc} processes did not end in "
                f"{timeout_s:g} s and was killed; its last lines:\n{_tail(lines)}"
            ) from None
        finally:
            _kill_session(process)
            reader.join(timeout=_GRACE_S)
        if status != 0:
            raise EmitError(_first_error(Path(folder), status, lines))
        return LaunchResult(output="".join(lines), wall_time_s=time.monotonic() - started)


def _wait(process: subprocess.Popen[str], folder: Path, deadline: float) -> int:
    """Return torchrun's status; it has some seconds to end after the first error of a rank.

    It would give a rank that hangs, or is stopped, half a minute to end by itself.

    Raises:
        subprocess.TimeoutExpired: the deadline came before any error.
    """
    while True:
        left = deadline - time.monotonic()
        try:
            return process.wait(timeout=min(_POLL_S, max(left, 0.0)))
        except subprocess.TimeoutExpired:
            errors = [path.stat().st_mtime for path in folder.glob("error.*")]
            if errors and time.time() - min(errors) > _GRACE_AFTER_ERROR_S:
                return 1
            if left <= 0:
                raise


def _others(nproc: int, kind: str) -> str:
    """Return torchrun's text for: output of every rank but 0 goes to files."""
    return ",".join(f"{rank}:{kind}" for rank in range(1, nproc)) or "0"


def _read(stream: IO[str], lines: list[str], echo: bool) -> None:
    for line in stream:
        lines.append(line)
        if echo:
            sys.stdout.write(line)
            sys.stdout.flush()


def _kill_session(process: subprocess.Popen[str]) -> None:
    """End torchrun and its workers: each is a session of its own, so workers are found first."""
    workers = _descendants(process.pid)
    for pid in (process.pid, *workers):
        _signal(pid, signal.SIGTERM)
    _wait_for_end(workers)
    for pid in (process.pid, *workers):
        _signal(pid, signal.SIGKILL)
    process.wait()
    _wait_for_end(workers)


def _wait_for_end(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)


def _descendants(root: int) -> list[int]:
    """Return the processes below `root`, from the process table."""
    parents = _parents()
    found: list[int] = []
    for pid in sorted(parents):
        here: int | None = pid
        while here is not None and here != root:
            here = parents.get(here)
        if here == root and pid != root:
            found.append(pid)
    return found


def _parents() -> dict[int, int]:
    """Return the parent of every process."""
    if Path("/proc/self/stat").exists():
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                text = path.read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents[int(path.parent.name)] = int(text.rpartition(")")[2].split()[1])
        return parents
    command = ["ps", "-eo", "pid=,ppid="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = (line.split() for line in listing.splitlines())
    return {int(pid): int(parent) for pid, parent in pairs}


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def is_running(pid: int) -> bool:
    """Return whether a process has not ended; one that nobody has reaped yet has."""
    if Path("/proc/self/stat").exists():
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return text.rpartition(")")[2].split()[0] not in ("Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# What torchrun prints of each rank that failed; exit code -9 is signal 9.
_FAILURE = re.compile(r"rank +: (\d+) \(local_rank: \d+\)\s+exitcode +: -(\d+)")


def _first_error(folder: Path, status: int, lines: Sequence[str]) -> str:
    """Return what failed first: a signal, since peers fail of a rank that is gone, or an error."""
    for rank, number in _FAILURE.findall("".join(lines)):
        if int(number) not in (0, signal.SIGTERM):
            name = signal.Signals(int(number)).name
            hint = ": the machine may be out of memory" if name == "SIGKILL" else ""
            return f"rank {rank} was ended by {name}{hint}; the last lines:\n{_tail(lines)}"
    errors = sorted(folder.glob("error.*"), key=lambda path: int(path.name.split(".")[1]))
    if errors:
        rank = errors[0].name.split(".")[2]
        return f"rank {rank} failed first:\n{errors[0].read_text()}"
    return f"the launch ended with status {status} and no rank's traceback:\n{_tail(lines)}"


def _tail(lines: Sequence[str], count: int = 20) -> str:
    return "".join(lines[-count:])
