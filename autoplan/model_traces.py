"""The traces of a model by micro-batch size: few are captured, the others follow from them."""

from __future__ import annotations

import time
from collections.abc import Collection, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoplan.backends import Backend
from autoplan.capturer import LossFn
from autoplan.graph import Trace
from autoplan.program_pickles import packed, unpacked
from autoplan.scaling import interpolate
from autoplan.tracer import recent_program, remember, trace

__all__ = ["TRACED_ROWS", "ModelTraces"]

TRACED_ROWS = (2, 4)
"""Micro-batches from whose traces those of other sizes follow."""


@dataclass(slots=True)
class ModelTraces:
    """The traces of a model, a batch and a loss, each of which is made once.

    Attributes:
        model: on any device, `meta` too.
        batch: example input, see `autoplan.capturer.capture`.
        loss_fn, batch_dim: likewise.
        autocast, backend: as for `autoplan.tracer.trace`.
        unusable: options that no plan may use: block class, op, axis.
        captured: the traces of captured programs, with every option; problems of the same model
            and batch may share the mapping.
        trace_time_s: seconds spent in capture.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None
    batch_dim: Any = 0
    autocast: torch.dtype | None = None
    backend: Backend = "cpu"
    unusable: frozenset[tuple[str, str, str]] = frozenset()
    captured: MutableMapping[int, Trace] = field(default_factory=dict)
    trace_time_s: float = 0.0
    _by_size: dict[int, Trace] = field(default_factory=dict)
    _usable: dict[int, Trace] = field(default_factory=dict)
    _elsewhere: dict[int, bytes | None] = field(default_factory=dict)

    def of(self, microbatch_size: int, most_rows: int) -> Trace:
        """Return the trace for a micro-batch size; others follow from those of `TRACED_ROWS`.

        Args:
            microbatch_size: rows.
            most_rows: of a micro-batch in any setting of the problem.
        """
        if microbatch_size not in self._by_size:
            found = None
            if _follows(microbatch_size, most_rows):
                low, high = (self.exact(rows) for rows in TRACED_ROWS)
                found = interpolate(low, high, microbatch_size)
            self._by_size[microbatch_size] = found or self.exact(microbatch_size)
        return self._by_size[microbatch_size]

    def exact(self, microbatch_size: int) -> Trace:
        """Return the trace of the program captured at a micro-batch size."""
        if microbatch_size not in self._usable:
            found = self._captured(microbatch_size)
            self._usable[microbatch_size] = found.without(self.unusable)
        return self._usable[microbatch_size]

    def _captured(self, microbatch_size: int) -> Trace:
        if microbatch_size not in self.captured:
            start = time.perf_counter()
            self.captured[microbatch_size] = self.capture(microbatch_size)
            self.trace_time_s += time.perf_counter() - start
        return self.captured[microbatch_size]

    def capture(self, microbatch_size: int) -> Trace:
        """Return the trace of a program that is captured anew."""
        return trace(
            self.model,
            self.batch,
            self.loss_fn,
            microbatch_size=microbatch_size,
            batch_dim=self.batch_dim,
            autocast=self.autocast,
            backend=self.backend,
        )

    def without(self, options: Collection[tuple[str, str, str]]) -> ModelTraces:
        """Return the same traces without some options: block class, op, axis."""
        return replace(self, unusable=self.unusable | set(options), _usable={}, _by_size={})

    def to_send(self, microbatch_size: int) -> tuple[Trace, bytes | None]:
        """Return a trace and its program in the form in which another process can read it."""
        found = self.capture(microbatch_size)
        program = recent_program(found.fingerprint)
        return found, packed(program) if program is not None else None

    def receive(self, microbatch_size: int, found: Trace, program: bytes | None) -> None:
        """Take what another process made by `to_send`."""
        self.captured[microbatch_size] = found
        self._elsewhere[microbatch_size] = program

    def recall_program(self, microbatch_size: int) -> None:
        """Have the program of a size at hand, by which the layouts of a plan are checked."""
        if microbatch_size not in self._elsewhere:
            return
        sent = self._elsewhere.pop(microbatch_size)
        program = unpacked(sent, self.captured[microbatch_size].fingerprint)
        if program is not None:
            remember(program)
        else:
            self.capture(microbatch_size)


def _follows(microbatch_size: int, most_rows: int) -> bool:
    """Return whether a size is above those traced, or between two that others need too."""
    is_between = microbatch_size == 3 and most_rows > microbatch_size
    return microbatch_size > TRACED_ROWS[1] or is_between
