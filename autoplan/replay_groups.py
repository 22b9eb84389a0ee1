"""Tensors of a replayed stage by key, and what FSDP and DeepSpeed gather and reduce of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.caching_allocator import Block, CachingAllocator
from autoplan.flat_partitions import gathered_pieces, reduced_buckets
from autoplan.liveness import BlockEvents
from autoplan.optimizers import Optimizer
from autoplan.resident import live_bytes, uses_fsdp
from autoplan.settings import Setting, Workload

__all__ = [
    "COMPUTE",
    "GATHER",
    "REDUCE",
    "FlatPartitions",
    "FsdpGroups",
    "Key",
    "OutputCast",
    "Parameter",
    "ReplayedBlock",
    "Tensors",
]

COMPUTE, GATHER, REDUCE = range(3)  # streams, each with its pools

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter on one rank: its name, bytes as stored and as computed with, before ZeRO.

    `copies`: ranks that hold the same, of an expert; 0: as many as there is data parallelism.
    """

    name: str
    stored: int
    gathered: int
    is_trained: bool
    copies: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputCast:
    """The last layer of a pipeline engine, which makes logits wide and keeps them for a while.

    Attributes:
        before: the tensor that a forward makes next.
        source: the logits, which go.
        nbytes: of the wide ones.
        num_kept: those of so many micro-batches are there, until the next one's are made.
    """

    before: str
    source: str
    nbytes: int
    num_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBlock:
    """A call of a stage.

    Attributes:
        events: its tensors in the first micro-batch of a step.
        accumulating: in later ones, where gradients are added to ones that exist.
        is_glue: its parameters are in the root's group.
        inputs, outputs: per local name the value's name in the chain and its bytes.
        held: inputs that are kept for the backward.
        parameters: those that no earlier call of the stage holds.
        states: name in the chain of each local state.
        cast: of its output, if it is the last of a pipeline engine's.
    """

    events: BlockEvents
    accumulating: BlockEvents
    is_glue: bool
    inputs: Mapping[str, tuple[str, int]]
    outputs: Mapping[str, tuple[str, int]]
    held: frozenset[str]
    parameters: tuple[Parameter, ...]
    states: Mapping[str, str]
    cast: OutputCast | None = None


class Tensors:
    """Tensors by key, each freed when the last of its holders lets go."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.blocks: dict[Key, Block] = {}
        self.holders: dict[Key, int] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.blocks

    def make(self, key: Key, nbytes: int, stream: int = COMPUTE) -> None:
        assert key not in self.blocks, key
        if nbytes > 0:
            self.blocks[key] = self.allocator.allocate(nbytes, stream)
            self.holders[key] = 1

    def hold(self, key: Key) -> None:
        if key in self.blocks:
            self.holders[key] += 1

    def release(self, key: Key) -> None:
        if key not in self.blocks:
            return
        self.holders[key] -= 1
        if self.holders[key] == 0:
            del self.holders[key]
            self.allocator.free(self.blocks.pop(key))

    def rename(self, key: Key, other: Key) -> None:
        self.blocks[other] = self.blocks.pop(key)
        self.holders[other] = self.holders.pop(key)

    def passing(self, nbytes: int, stream: int = COMPUTE) -> None:
        """Make a tensor and let it go."""
        self.make(("passing",), nbytes, stream)
        self.release(("passing",))


class FlatPartitions:
    """What DeepSpeed's ZeRO-1 lays flat: parameters, and a rank's share of copies and states.

    Args:
        tensors: of the stage.
        parameters: in their order.
        optimizer: its states.
        shards: ranks that share them.
        item_bytes: of an element of the gradients.
    """

    def __init__(
        self,
        tensors: Tensors,
        parameters: Sequence[Parameter],
        optimizer: Optimizer,
        *,
        shards: int,
        item_bytes: int,
    ) -> None:
        self.tensors = tensors
        self.parameters = parameters
        self.optimizer = optimizer
        self.shards = shards
        self.item_bytes = item_bytes
        self.trained = [p for p in parameters if p.is_trained]
        self.share_bytes = -(-sum(p.stored for p in self.trained) // shards)

    def start(self) -> None:
        """Make what is there before the first step, beside the memory the model was made in.

        Megatron-LM makes its parameters on the device in the dtype of the computation; ZeRO moves
        them to the host and brings them back in one tensor (`move_to_cpu`), and what they leave
        stays with the allocator.
        """
        for parameter in self.parameters:
            self.tensors.make(("made", parameter.name), parameter.gathered)
        for parameter in self.parameters:
            self.tensors.release(("made", parameter.name))
        self.tensors.make(("parameter",), sum(p.gathered for p in self.parameters))
        self.tensors.make(("copy",), self.share_bytes)
        self.tensors.make(("grad",), self.share_bytes)
        for number, nbytes in enumerate(self.optimizer.state_sizes(self.share_bytes)):
            self.tensors.make(("state", number), nbytes)
        self.tensors.release(("grad",))

    def step(self) -> None:
        """Reduce gradients in flat buckets, step on this rank's share, gather parameters."""
        sizes = [p.gathered // self.item_bytes for p in self.trained]
        share = -(-sum(sizes) // self.shards)
        self._beside(reduced_buckets(sizes))
        self._release_gradients(after=share)
        # The norm is taken in float64, of what the rank's share holds of each gradient.
        self.tensors.passing(8 * min(share, max(sizes)))
        self.tensors.make(("flat",), share * self.item_bytes)
        self.tensors.make(("grad",), self.share_bytes)
        self.tensors.release(("flat",))
        self._release_gradients(after=0)
        self.tensors.release(("grad",))
        self._beside(gathered_pieces(sum(sizes), self.shards))

    def _release_gradients(self, after: int) -> None:
        """Let gradients go that start after so many elements."""
        start = 0
        for parameter in self.trained:
            if start >= after:
                self.tensors.release(("grad", parameter.name))
            start += parameter.gathered // self.item_bytes

    def _beside(self, elements: Sequence[int]) -> None:
        """Make tensors of so many elements all at once and let them go.

        Nothing waits between the collectives that read them, but the host does before it makes
        anything else: for the first norm, and for the sizes of the next micro-batch.
        """
        for number, count in enumerate(elements):
            self.tensors.make(("beside", number), count * self.item_bytes)
        for number in range(len(elements)):
            self.tensors.release(("beside", number))


class FsdpGroups:
    """Groups of parameters that FSDP gathers and reduces; where it does not run, no gather acts.

    Attributes:
        groups: the parameters by group; a block's own are under its index, glue's under `root`.
        wrapped: FSDP runs.
    """

    def __init__(
        self,
        tensors: Tensors,
        groups: dict[int, list[Parameter]],
        setting: Setting,
        workload: Workload,
    ) -> None:
        self.tensors = tensors
        self.groups = groups
        self.setting = setting
        self.zero = setting.zero_stage
        self.is_mixed = workload.mixed_precision != "none"
        self.is_offloaded = setting.offload != "none"
        self.copies_gathered = workload.engine.copies_gathered
        has_buffer = workload.engine.has_gradient_buffer
        self.wrapped = uses_fsdp(setting, self.is_mixed) and not has_buffer
        self.shards = setting.dp if self.zero >= 1 else 1
        self.last: int | None = None
        self.is_gradient_wide = workload.engine.is_gradient_wide
        self.has_bucket = workload.engine.bucket_elements > 0
        sizes = [sum(p.gathered for p in own) for own in groups.values()]
        self.live = live_bytes(workload.engine, setting, sizes)
        self.largest = max(sizes, default=0)

    def start(self) -> None:
        """Make what DeepSpeed keeps gathered beside the parameters that run."""
        self.tensors.make(("live",), max(0, self.live - self.largest), GATHER)

    def gather_forward(self, group: int) -> None:
        """Make a group whole before a block's forward, unless it is."""
        if not self.wrapped or group not in self.groups or self._is_gathered(group):
            return
        earlier = self.last
        if self.zero > 0 and self.setting.dp > 1:
            self._gather(group)
        self._make_whole(group)
        if earlier is not None and earlier != group:
            self.tensors.release(("buffer", earlier))

    def _gather(self, group: int) -> None:
        size = sum(p.gathered for p in self.groups[group])
        if self.is_offloaded:
            stored = sum(p.stored for p in self.groups[group])
            self.tensors.make(("copied in",), -(-stored // self.shards), GATHER)
        if self.is_mixed:
            self.tensors.make(("cast",), size // self.setting.dp, GATHER)
        self.tensors.make(("buffer", group), size, GATHER)
        self.tensors.release(("cast",))
        self.tensors.release(("copied in",))
        self.last = group

    def _is_gathered(self, group: int) -> bool:
        return ("whole", self.groups[group][0].name) in self.tensors

    def _make_whole(self, group: int) -> None:
        if not self.copies_gathered:
            # FSDP1 computes with views of what the collective filled.
            key = ("whole", self.groups[group][0].name)
            if ("buffer", group) in self.tensors:
                self.tensors.rename(("buffer", group), key)
            else:
                self.tensors.make(key, sum(p.gathered for p in self.groups[group]), GATHER)
            return
        for parameter in self.groups[group]:
            self.tensors.make(("whole", parameter.name), parameter.gathered)

    def release_whole(self, group: int) -> None:
        """Let a group's whole parameters go."""
        for parameter in self.groups.get(group, ()):
            self.tensors.release(("whole", parameter.name))

    def drop_buffers(self) -> None:
        """Let go what gathers have filled."""
        for group in self.groups:
            self.tensors.release(("buffer", group))
        self.last = None

    def gather_backward(self, group: int) -> None:
        """Make a group whole before a block's backward, from what a prefetch has brought."""
        if group not in self.groups or self._is_gathered(group):
            return
        if ("buffer", group) not in self.tensors and self.setting.dp > 1:
            self._gather(group)
        self._make_whole(group)
        self.tensors.release(("buffer", group))

    def prefetch(self, index: int) -> None:
        """Gather the group whose backward is next after that of `index`."""
        earlier = next((i for i in reversed(range(index)) if i in self.groups), None)
        if earlier is None or self.setting.dp == 1 or self._is_gathered(earlier):
            return
        if self.live and 2 * self.largest > self.live:
            return
        if ("buffer", earlier) not in self.tensors:
            self._gather(earlier)

    def reduce(self, group: int, reshards: bool) -> None:
        """Reduce a group's gradients to this rank's shard."""
        if reshards:
            self.release_whole(group)
        self.tensors.release(("reduce input",))
        trained = [p for p in self.groups[group] if p.is_trained]
        size = sum(p.stored if self.is_mixed else p.gathered for p in trained)
        narrow = sum(p.gathered for p in trained)
        if not self.has_bucket:
            self.tensors.make(("reduce input",), size if self.is_gradient_wide else narrow)
        for parameter in self.groups[group]:
            self.tensors.release(("grad", parameter.name))
            self.tensors.release(("wide", parameter.name))
        shard = -(-size // self.shards)
        if self.is_offloaded or ("shard", group) in self.tensors:
            self.tensors.passing(shard, REDUCE)
        else:
            self.tensors.make(("shard", group), shard, REDUCE)
