"""Forked gloo processes of one group that stay alive over many tasks.

Forking after torch is imported starts a rank in a hundredth of a second, and what a process builds
once (meshes, the rules of DTensor) serves all later tasks. A rank that fails or hangs ends the
pool's processes; the next task gets new ones.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["WorkerPool"]


class WorkerPool:
    """Runs `function(rank, task)` on every process of a group.

    Args:
        function: runs with the default process group; its result must pickle.
        size: number of processes.
        timeout_s: of one task; then its processes are killed.
    """

    def __init__(self, function: Callable[[int, Any], Any], size: int, timeout_s: float) -> None:
        self._function = function
        self._size = size
        self._timeout_s = timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, task: Any) -> list[Any]:
        """Return what each rank returned.

        Raises:
            RuntimeError: a rank raised (with its traceback), died, or the time is over.
        """
        self._start()
        for _, pipe in self._workers:
            pipe.send(task)
        results = self._collect(self._workers)
        errors = sorted(r for r in results if isinstance(r, _Failure))
        if errors:
            self._end()
            raise RuntimeError(f"rank {errors[0].rank}: {errors[0].text}")
        return results

    def _collect(self, chosen: list[tuple[Any, Connection]]) -> list[Any]:
        deadline = time.monotonic() + self._timeout_s
        results: list[Any] = [None] * len(chosen)
        waiting = set(range(len(chosen)))
        while waiting:
            for rank in sorted(waiting):
                process, pipe = chosen[rank]
                if pipe.poll(0.002):
                    results[rank] = pipe.recv()
                    waiting.discard(rank)
                elif not process.is_alive():
                    results[rank] = _Failure(time.monotonic_ns(), rank, "died")
                    waiting.discard(rank)
            has_failed = any(isinstance(r, _Failure) for r in results)
            if waiting and (has_failed or time.monotonic() > deadline):
                if not has_failed:
                    now = time.monotonic_ns()
                    text = f"no result after {self._timeout_s:g} s on ranks {sorted(waiting)}"
                    results[min(waiting)] = _Failure(now, min(waiting), text)
                break
        return results

    def _start(self) -> None:
        if self._workers:
            return
        context = mp.get_context("fork")
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            group = _Group(f"{self._folder.name}/store", rank, self._size, self._timeout_s)
            arguments = (self._function, group, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _end(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _Failure(tuple[int, int, str]):
    """When (ns), which rank, and what: sorts by time."""

    def __new__(cls, when: int, rank: int, text: str) -> _Failure:
        return super().__new__(cls, (when, rank, text))

    def __getnewargs__(self) -> tuple[int, int, str]:
        return self[0], self[1], self[2]

    @property
    def rank(self) -> int:
        return self[1]

    @property
    def text(self) -> str:
        return self[2]


@dataclass(frozen=True, slots=True)
class _Group:
    path: str
    rank: int
    size: int
    timeout_s: float


def _serve(function: Callable[[int, Any], Any], group: _Group, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(group.path, group.size),  # type: ignore[attr-defined]
            rank=group.rank,
            world_size=group.size,
            timeout=timedelta(seconds=group.timeout_s),
        )
        while True:
            task = pipe.recv()
            pipe.send(function(group.rank, task))
    except EOFError:
        os._exit(0)
    except BaseException:
        pipe.send(_Failure(time.monotonic_ns(), group.rank, traceback.format_exc()))
        os._exit(1)
