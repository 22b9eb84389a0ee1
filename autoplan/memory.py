"""Bytes over time of a pipeline stage on one rank: what is resident and what each instant adds.

The instants are: the forward of every block with the most micro-batches alive, the backward of
every block, and the optimizer step. At each the model adds up parameters (shards and gathered
copies), gradients, optimizer state, kept activations and transients; the largest is the peak. The
laws of gathered copies and reduce buffers are those of FSDP2 (docs/design/memory-of-fsdp.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoplan.liveness import BlockMemory
from autoplan.settings import Optimizer, Setting

__all__ = ["GroupBytes", "Instant", "StageBlock", "StageMemory", "stage_memory", "static_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """Parameter bytes of a block on one rank after tensor parallelism, before ZeRO.

    Attributes:
        stored: of the parameters in the dtype in which they are stored.
        trained: of those that get a gradient.
        gathered: in the dtype of the computation, as an unsharded copy holds them.
        gathered_grads: gradients of the trained ones in the dtype of the computation.
        largest: the largest stored parameter.
    """

    stored: int
    trained: int
    gathered: int
    gathered_grads: int
    largest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlock:
    """A block in a stage: its activation bytes and its parameters.

    Attributes:
        memory: with parameter gradients held until the block's backward ends.
        accumulating: with every parameter gradient added to one that exists and freed at once.
        group: parameters of the block.
        is_glue: its parameters belong to the stage's root group.
        input_bytes: activation inputs of the block.
    """

    memory: BlockMemory
    accumulating: BlockMemory
    group: GroupBytes
    is_glue: bool
    input_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """An instant and the bytes of each category then."""

    name: str
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        """Return the bytes of all categories."""
        return sum(self.by_category.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The peak of a stage: bytes, when, and by category then."""

    peak: int
    instant: str
    by_category: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBytes:
    """What a group of parameters holds all the time, by category."""

    parameters: int
    gradients: int
    optimizer: int


def uses_fsdp(setting: Setting, is_mixed: bool) -> bool:
    """Return whether parameters are gathered from shards: ZeRO 1 to 3, or another stored dtype.

    ZeRO 0 holds whole parameters only once and reduces gradients in place.
    """
    return (setting.dp > 1 and setting.zero_stage >= 1) or is_mixed


def static_bytes(group: GroupBytes, setting: Setting, optimizer: Optimizer) -> StaticBytes:
    """Return the resident bytes of a group under a ZeRO stage; shares round up."""
    shards = setting.dp if setting.zero_stage >= 1 else 1
    states = int(group.trained * optimizer.state_bytes_per_byte)
    return StaticBytes(
        parameters=-(-group.stored // shards),
        gradients=-(-group.trained // shards),
        optimizer=-(-states // shards),
    )


def stage_memory(
    blocks: Sequence[StageBlock],
    setting: Setting,
    optimizer: Optimizer,
    *,
    live: int,
    is_mixed: bool = False,
    side_bytes: int = 0,
    input_bytes: int = 0,
    transfer_bytes: int = 0,
    reserve: int = 0,
) -> StageMemory:
    """Return the peak of a stage over all instants.

    Args:
        blocks: in execution order.
        setting: degrees, ZeRO stage, micro-batches.
        optimizer: its memory law.
        live: micro-batches alive at once in this stage.
        is_mixed: parameters are computed with in another dtype than they are stored in.
        side_bytes: side values held by one micro-batch.
        input_bytes: batch inputs of one step that stay for the whole step.
        transfer_bytes: pipeline receive buffers.
        reserve: bytes set aside on the device.
    """
    model = _Stage(blocks, setting, optimizer, live, is_mixed)
    fixed = side_bytes * live + input_bytes + transfer_bytes
    best: Instant | None = None
    for instant in model.instants():
        if best is None or instant.total > best.total:
            best = instant
    assert best is not None, "a stage has at least the instant of the optimizer step"
    by_category = dict(best.by_category)
    by_category["activations"] += 0 if best.name == "optimizer step" else fixed
    by_category["reserve"] = reserve
    return StageMemory(peak=sum(by_category.values()), instant=best.name, by_category=by_category)


class _Stage:
    def __init__(
        self,
        blocks: Sequence[StageBlock],
        setting: Setting,
        optimizer: Optimizer,
        live: int,
        is_mixed: bool,
    ) -> None:
        self.blocks = blocks
        self.setting = setting
        self.optimizer = optimizer
        self.live = live
        self.wrapped = uses_fsdp(setting, is_mixed)
        self.zero = setting.zero_stage
        groups = [b.group for b in blocks]
        statics = [static_bytes(g, setting, optimizer) for g in groups]
        self.parameters = sum(s.parameters for s in statics)
        self.gradients = sum(s.gradients for s in statics)
        self.sharded_grads = [s.gradients for s in statics]
        self.optimizer_bytes = sum(s.optimizer for s in statics)
        self.kept = [b.memory.kept for b in blocks]
        self.root = sum(b.group.gathered for b in blocks if b.is_glue)
        self.root_grads = sum(b.group.gathered_grads for b in blocks if b.is_glue)
        self.gathered = [0 if b.is_glue else b.group.gathered for b in blocks]
        self.grads = [0 if b.is_glue else b.group.gathered_grads for b in blocks]

    def instants(self) -> Iterator[Instant]:
        yield self._step()
        m, live = self.setting.num_microbatches, self.live
        scenarios = [(live, m > live)] if m != live else [(live, False)]
        if m == live and live > 1:
            scenarios.append((live - 1, True))
        for alive, has_grads in scenarios:
            for index in range(len(self.blocks)):
                yield self._forward(index, alive, has_grads)
                yield self._backward(index, alive, has_grads)

    def _step(self) -> Instant:
        temporary = (
            self.gradients
            if self.optimizer.is_foreach
            else max((b.group.largest for b in self.blocks), default=0)
        )
        if not self.optimizer.is_foreach and self.zero >= 1:
            temporary = -(-temporary // self.setting.dp)
        return self._instant("optimizer step", 0, temporary, self.gradients)

    def _instant(self, name: str, activations: int, working: int, gradients: int) -> Instant:
        return Instant(
            name=name,
            by_category={
                "parameters": self.parameters,
                "gradients": gradients,
                "optimizer": self.optimizer_bytes,
                "activations": activations,
                "working": working,
                "reserve": 0,
            },
        )

    def _accumulated(self, has_grads: bool) -> int:
        """Return bytes of gradients that earlier micro-batches of the step left."""
        if not has_grads:
            return 0
        if self.wrapped and self.zero <= 1:
            return self.root_grads + sum(self.grads)
        return self.gradients

    def _forward(self, index: int, alive: int, has_grads: bool) -> Instant:
        block = self.blocks[index]
        before = (alive - 1) * sum(self.kept) + sum(self.kept[:index])
        working = block.input_bytes + block.memory.forward_peak
        working += self._gathered_forward(index)
        return self._instant(
            f"forward of block {index}", before, working, self._accumulated(has_grads)
        )

    def _gathered_forward(self, index: int) -> int:
        """Return bytes of unsharded copies and all-gather buffers while a block runs forward."""
        if not self.wrapped:
            return 0
        buffer = self.gathered[index] if self.setting.dp > 1 and self.zero >= 1 else 0
        if self.zero >= 3:
            return self.root + self.gathered[index] + buffer
        if self.zero == 2 and self.setting.num_microbatches == 1:
            return self.root + sum(self.gathered[: index + 1]) + buffer
        return self.root + sum(self.gathered) + buffer

    def _backward(self, index: int, alive: int, has_grads: bool) -> Instant:
        block = self.blocks[index]
        memory = block.memory
        held = (alive - 1) * sum(self.kept) + sum(self.kept[: index + 1])
        accumulated = self._accumulated(has_grads)
        if not self.wrapped:
            if has_grads:
                memory = block.accumulating
            else:
                accumulated = sum(self.sharded_grads[index + 1 :])
            working = memory.backward_peak - memory.kept
            return self._instant(f"backward of block {index}", held, working, accumulated)
        working = memory.backward_peak - memory.kept + self._gathered_backward(index)
        if self.zero <= 1:
            if not has_grads:
                accumulated = self.root_grads + sum(self.sharded_grads[index + 1 :])
        else:
            reduced = self.gradients if has_grads else sum(self.sharded_grads[index + 1 :])
            accumulated = reduced + self.root_grads
        return self._instant(f"backward of block {index}", held, working, accumulated)

    def _gathered_backward(self, index: int) -> int:
        """Return bytes of copies, prefetched buffers and reduce buffers in a block's backward."""
        later = next((g for g in self.grads[index + 1 :] if g), 0)
        if self.zero >= 3:
            earlier = next((g for g in reversed(self.gathered[:index]) if g), 0)
            return self.root + self.gathered[index] + earlier + later
        if self.zero == 2:
            return self.root + sum(self.gathered[: index + 1]) + later
        return self.root + sum(self.gathered) + later
