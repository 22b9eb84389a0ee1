"""Ranks that are threads of this process; their collectives meet in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["ThreadRanks"]

_Group: Any = dist.ProcessGroup  # the signatures of its methods differ between versions
_Work: Any = dist.Work


class _MemoryGroup(_Group):  # type: ignore[misc]
    """A group of threads of this process; collectives take what `exchange` hands over."""

    def __init__(self, rank: int, size: int, exchange: Callable[[int, Any], list[Any]]) -> None:
        super().__init__(rank, size)
        self._own, self._count, self._exchange = rank, size, exchange

    def size(self) -> int:
        return self._count

    def rank(self) -> int:
        return self._own

    def getBackendName(self) -> str:
        return "memory"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        every = self._exchange(self._own, [x.clone() for x in tensors])
        is_max = options is not None and options.reduceOp == dist.ReduceOp.MAX
        for index, tensor in enumerate(tensors):
            stacked = torch.stack([given[index] for given in every])
            tensor.copy_(stacked.amax(0) if is_max else stacked.sum(0))
        return _Done()

    def _allgather_base(
        self, output: torch.Tensor, given: torch.Tensor, options: Any = None
    ) -> Any:
        output.copy_(torch.cat(self._exchange(self._own, given.clone())).view_as(output))
        return _Done()

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, options: Any = None
    ) -> Any:
        total = torch.stack(self._exchange(self._own, given.clone())).sum(0)
        output.copy_(total.chunk(self._count)[self._own].view_as(output))
        return _Done()

    def alltoall_base(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_sizes: Any,
        input_sizes: Any,
        options: Any = None,
    ) -> Any:
        every = self._exchange(self._own, given.clone())
        output.copy_(torch.cat([x.chunk(self._count)[self._own] for x in every]).view_as(output))
        return _Done()

    # torch 2.13 has other names for these.
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base


class _Done(_Work):  # type: ignore[misc]
    def wait(self, timeout: Any = None) -> bool:
        return True


class ThreadRanks:
    """Ranks of one process that exchange tensors in memory.

    Attributes:
        size: number of ranks.
    """

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self.slots: list[Any] = [None] * size

    def member(self, rank: int) -> dist.ProcessGroup:
        """Return the process group of a rank."""
        return _MemoryGroup(rank, self.size, self.exchange)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks gave."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what `function(rank)` returns in a thread of each rank; raises its first error."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:  # raised again below, by the thread that waits
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            first = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
            raise (first or errors)[0]
        return results
