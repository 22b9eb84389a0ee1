"""What the blocks of a plan's stages cost, as plain numbers: seconds and bytes of one rank.

This is what the simulator reads, and what a saved plan carries so that its step can be simulated
again without the model. Every number is a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "BlockCosts",
    "BlockMemory",
    "BlockSeconds",
    "GroupBytes",
    "PlanCosts",
    "StageBackward",
    "StageBlock",
    "StageCosts",
]

StageBackward = Literal["split", "whole", "late"]
"""Where backwards are split, whether a stage's runs in two parts, all at once, or all later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    """Bytes of one micro-batch in one block on one rank.

    Attributes:
        kept: held from forward to backward, activation inputs included, side inputs not.
        side: names of the side inputs that are held too (one copy a stage).
        output: bytes of the values that leave.
        forward_peak: most bytes alive during forward, over what was there before the block; the
            inputs are not counted, they were there.
        backward_peak: most bytes alive during backward, this block's kept ones and the gradients of
            its outputs included, parameter gradients too.
        parameter_grads: bytes of parameter gradients that the backward makes.
        held_inputs: names of the activation inputs in `kept`.
        held_outputs: names of the outputs whose storage is in `kept`.
        held_output_bytes: bytes of those.
        border_backward_peak: as `backward_peak`, where the outputs leave the stage: a pipeline
            holds them until the end, and their gradients lie in its receive buffers, not here.
    """

    kept: int
    side: tuple[str, ...]
    output: int
    forward_peak: int
    backward_peak: int
    parameter_grads: int
    held_inputs: tuple[str, ...] = ()
    held_outputs: tuple[str, ...] = ()
    held_output_bytes: int = 0
    border_backward_peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """Parameter bytes of a block on one rank after tensor parallelism, before ZeRO.

    Attributes:
        stored: of the parameters in the dtype in which they are stored.
        trained: of those that get a gradient.
        gathered: in the dtype of the computation, as an unsharded copy holds them.
        gathered_grads: gradients of the trained ones in the dtype of the computation.
        largest: the largest stored parameter.
        early_grads: bytes of gradients that this block's backward makes first, of parameters that
            count with an earlier block of the stage, such as a tied embedding.
        late_grads: bytes of this block's gradients that a later block makes first.
        trained_tensors: how many parameters get a gradient.
        experts: of all this, what other ranks hold of than the rest: experts under expert
            parallelism; None: nothing.
        copies: ranks that hold the same; 0: as many as there is data parallelism.
    """

    stored: int
    trained: int
    gathered: int
    gathered_grads: int
    largest: int = 0
    early_grads: int = 0
    late_grads: int = 0
    trained_tensors: int = 0
    experts: GroupBytes | None = None
    copies: int = 0

    @property
    def parts(self) -> tuple[GroupBytes, ...]:
        """Return the group, or what lies on other ranks than the rest apart from it."""
        if self.experts is None:
            return (self,)
        rest = replace(
            self,
            experts=None,
            **{
                name: getattr(self, name) - getattr(self.experts, name)
                for name in ("stored", "trained", "gathered", "gathered_grads", "trained_tensors")
            },
        )
        return (rest, self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBlock:
    """A block in a stage: its activation bytes and its parameters.

    Attributes:
        memory: with parameter gradients held until the block's backward ends.
        accumulating: with every parameter gradient added to one that exists and freed at once.
        group: parameters of the block.
        is_glue: its parameters belong to the stage's root group.
        input_bytes: activation inputs of the block that nothing before it in the stage keeps, and
            that lie in no receive buffer.
        shared_bytes: kept bytes that an earlier block of the stage keeps too: its output, or a
            value that both read.
        deferred_bytes: gradients that a split backward keeps for the one of the weights: of the
            results of ops that read parameters.
        released_bytes: kept bytes that it lets go of at once, where no block after this one in the
            stage has parameters.
        border_bytes: of what it adds to what the stage keeps, bytes that cross a border of the
            stage, which are there until the stage's backward ends.
        carried_bytes: gradients that blocks after it made of values that came before it, which lie
            there beside its backward.
    """

    memory: BlockMemory
    accumulating: BlockMemory
    group: GroupBytes
    is_glue: bool
    input_bytes: int
    shared_bytes: int = 0
    deferred_bytes: int = 0
    released_bytes: int = 0
    border_bytes: int = 0
    carried_bytes: int = 0

    @property
    def own_kept(self) -> int:
        """Return the bytes that the block adds to what its stage keeps."""
        return self.memory.kept - self.shared_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of a block on one rank: of one micro-batch, of one collective, of one step.

    Attributes:
        forward, backward: arithmetic of one micro-batch, without recomputation.
        weight_backward: the part of `backward` that a split backward leaves for later.
        recompute: arithmetic of what runs again in backward.
        forward_tensor_parallel, backward_tensor_parallel, recompute_tensor_parallel: its
            tensor-parallel collectives.
        gather: one all-gather of its parameters over the data-parallel ranks; 0 under ZeRO 0.
        reduce: one reduction of its gradients over them.
        optimizer: its part of the optimizer step.
        ties: once a step, sums of gradients that other stages have too.
    """

    forward: float
    backward: float
    weight_backward: float = 0.0
    recompute: float = 0.0
    forward_tensor_parallel: float = 0.0
    backward_tensor_parallel: float = 0.0
    recompute_tensor_parallel: float = 0.0
    gather: float = 0.0
    reduce: float = 0.0
    optimizer: float = 0.0
    ties: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCosts:
    """A block as it was decided: its seconds and its bytes."""

    seconds: BlockSeconds
    bytes: StageBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """A stage on one of its ranks.

    Attributes:
        blocks: names of its blocks in `PlanCosts.blocks`, in order.
        send_s: seconds of sending one micro-batch's activations to the next stage, or as many
            bytes of gradients back; 0 for the last.
        side_bytes: side values that one micro-batch holds.
        input_bytes: batch inputs of a step.
        entering_bytes, leaving_bytes: activations of a micro-batch that cross its borders.
        handed_bytes: of those, what enters and is sent on as it is, in its receive buffer.
        returning_bytes: gradients of a micro-batch that are sent back.
        backward: how a schedule that splits backwards runs its; see `autoplan.deferral`.
    """

    blocks: tuple[str, ...]
    send_s: float = 0.0
    side_bytes: int = 0
    input_bytes: int = 0
    entering_bytes: int = 0
    leaving_bytes: int = 0
    handed_bytes: int = 0
    returning_bytes: int = 0
    backward: StageBackward = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCosts:
    """All that a simulation of a plan needs beside its degrees and its schedule.

    Attributes:
        blocks: distinct blocks by name.
        stages: in pipeline order.
        overlaps: collectives run beside kernels on their own streams; on CPU they do not.
        state_bytes_per_byte: optimizer state per byte of trained parameter.
        is_foreach: the optimizer step holds a temporary as large as the parameters.
        reserve_bytes: set aside on every device.
    """

    blocks: Mapping[str, BlockCosts]
    stages: tuple[StageCosts, ...]
    overlaps: bool
    state_bytes_per_byte: float = 2.0
    is_foreach: bool = False
    reserve_bytes: int = 0
