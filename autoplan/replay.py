"""A stage's training steps, tensor by tensor, through a model of the caching allocator.

`stage_memory` says how many bytes are alive at most. What a device holds is more: freed blocks that
no later tensor fits in, and pools of streams that cannot lend each other memory (FSDP2 gathers and
reduces on streams of its own). Here every tensor of a step is made and let go in the order in which
the stage runs, by the laws of docs/design/memory-of-fsdp.md, and the allocator's rules say what is
reserved. Three steps are run: optimizer states appear at the end of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autoplan.caching_allocator import CachingAllocator
from autoplan.flat_partitions import PipeBuffers
from autoplan.memory import stage_actions
from autoplan.replay_groups import (
    FlatPartitions,
    FsdpGroups,
    Key,
    OutputCast,
    Parameter,
    ReplayedBlock,
    Tensors,
)
from autoplan.settings import Setting, Workload

__all__ = ["Reserved", "replayed"]

_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """What a stage's steps needed, context and communicators excluded.

    Attributes:
        allocated: most bytes of tensors.
        reserved: most bytes that the allocator held for them.
        fits: every tensor found room.
    """

    allocated: int
    reserved: int
    fits: bool


def replayed(
    blocks: Sequence[ReplayedBlock],
    setting: Setting,
    workload: Workload,
    *,
    stage: int = 0,
    part_sizes: Sequence[int],
    is_expandable: bool = False,
    capacity_bytes: int | None = None,
    pipe: PipeBuffers | None = None,
    fixed_bytes: Sequence[int] = (),
) -> Reserved:
    """Return what a stage's steps take and reserve.

    Args:
        blocks: in execution order.
        setting: degrees, ZeRO stage, micro-batches, schedule.
        workload: optimizer, precision, engine.
        stage: index of the rank of the pipeline, or of its only stage.
        part_sizes: numbers of blocks of its stages.
        is_expandable: segments of the allocator grow.
        capacity_bytes: of the device, less its reserve; None: any amount.
        pipe: what a pipeline engine holds of what enters and leaves the rank.
        fixed_bytes: of tensors that are always there, such as the batch.
    """
    allocator = CachingAllocator(is_expandable=is_expandable, capacity_bytes=capacity_bytes)
    run = _Replay(blocks, setting, workload, allocator, part_sizes, pipe or PipeBuffers())
    actions = stage_actions(setting, stage)
    run.start(fixed_bytes)
    for _ in range(_STEPS):
        run.step(actions)
    return Reserved(
        allocated=allocator.peak_allocated,
        reserved=allocator.peak_reserved,
        fits=not allocator.is_exhausted,
    )


class _Replay:
    def __init__(
        self,
        blocks: Sequence[ReplayedBlock],
        setting: Setting,
        workload: Workload,
        allocator: CachingAllocator,
        part_sizes: Sequence[int],
        pipe: PipeBuffers,
    ) -> None:
        self.blocks = blocks
        self.setting = setting
        self.workload = workload
        self.allocator = allocator
        self.tensors = Tensors(allocator)
        self.zero = setting.zero_stage
        self.is_mixed = workload.mixed_precision != "none"
        self.has_buffer = workload.engine.has_gradient_buffer
        self.is_offloaded = setting.offload != "none"
        self.shards = setting.dp if self.zero >= 1 else 1
        self.is_flat = workload.engine.is_flat
        last = max((i for i, b in enumerate(blocks) if not b.is_glue), default=None)
        keeps_last = workload.engine.keeps_last_gathered and setting.pp == 1
        self.stays_gathered = last if keeps_last else None
        self.root = len(blocks)
        self.groups: dict[int, list[Parameter]] = {}
        for index, block in enumerate(blocks):
            group = self.root if block.is_glue else index
            self.groups.setdefault(group, []).extend(block.parameters)
        self.groups = {group: found for group, found in self.groups.items() if found}
        self.flat = FlatPartitions(
            self.tensors,
            [*self._parameters()],
            workload.optimizer,
            shards=self.shards,
            item_bytes=2 if self.is_mixed else 4,
        )
        self.fsdp = FsdpGroups(self.tensors, self.groups, setting, workload)
        self.wrapped = self.fsdp.wrapped
        self.values: dict[Key, Key] = {}
        self.gradients: dict[Key, Key] = {}
        self.readers: dict[Key, int] = {}
        self.own: dict[tuple[int, int], dict[str, Key]] = {}
        self.reading: dict[str, int] = {}
        for block in blocks:
            for value, _ in block.inputs.values():
                self.reading[value] = self.reading.get(value, 0) + 1
        self.pipe = pipe
        self.sent: dict[int, list[Key]] = {}
        self.num_outputs = 0
        ends = list(accumulate(part_sizes))
        self.parts = [range(a, b) for a, b in zip((0, *ends), ends, strict=False)]

    # The resident state.

    def start(self, fixed_bytes: Sequence[int]) -> None:
        """Make what is there before the first step."""
        for number, nbytes in enumerate(fixed_bytes):
            self.tensors.make(("fixed", number), nbytes)
        self.fsdp.start()
        if self.is_flat:
            self.flat.start()
            return
        if self.is_offloaded:
            return
        for parameter in self._parameters():
            whole = parameter.gathered if self.has_buffer else -(-parameter.stored // self.shards)
            self.tensors.make(("parameter", parameter.name), whole)
        if self.has_buffer:
            self._start_buffers()

    def _start_buffers(self) -> None:
        trained = self._trained()
        is_wide = self.workload.engine.is_gradient_wide
        grads = sum(p.stored if is_wide else p.gathered for p in trained)
        self.tensors.make(("gradients",), grads)
        for parameter in trained:
            if parameter.stored > parameter.gathered:
                nbytes = -(-parameter.stored // self._shards_of(parameter))
                self.tensors.make(("copy", parameter.name), nbytes)

    def _shards_of(self, parameter: Parameter) -> int:
        return parameter.copies if parameter.copies and self.zero >= 1 else self.shards

    def _parameters(self) -> Iterable[Parameter]:
        return (p for block in self.blocks for p in block.parameters)

    def _trained(self) -> list[Parameter]:
        return [p for p in self._parameters() if p.is_trained]

    def step(self, actions: Sequence[tuple[str, bool, int]]) -> None:
        """Run the actions of a step and the optimizer."""
        self._zero_gradients()
        counts = {kind: dict.fromkeys(range(len(self.parts)), 0) for kind in "FB"}
        for kind, is_last, part in actions:
            if kind == "I":  # what it frees is counted with the backward of the weights
                continue
            number = counts[kind][part]
            counts[kind][part] += 1
            if kind == "F":
                self._forward(number, self.parts[part])
            else:
                self._backward(number, is_last, self.parts[part])
        if self.wrapped and self.zero <= 1 and self.setting.pp > 1:
            for group in sorted(self.groups, key=lambda g: -1 if g == self.root else g):
                self.fsdp.reduce(group, reshards=True)
        for group in self.groups:
            self.fsdp.release_whole(group)
        self.fsdp.drop_buffers()
        self.tensors.release(("reduce input",))
        if self.is_flat:
            self.flat.step()
        else:
            self._optimizer_step()

    def _zero_gradients(self) -> None:
        for group in self.groups:
            self.tensors.release(("shard", group))
        for parameter in self._parameters():
            self.tensors.release(("grad", parameter.name))

    def _optimizer_step(self) -> None:
        if self.is_offloaded:
            return
        trained = self._trained()
        sizes = {p.name: -(-p.stored // self._shards_of(p)) for p in trained}
        for name, nbytes in sizes.items():
            for number, size in enumerate(self.workload.optimizer.state_sizes(nbytes)):
                if ("state", name, number) not in self.tensors:
                    self.tensors.make(("state", name, number), size)
        widens = self.is_mixed and not self.workload.engine.is_gradient_wide and self.has_buffer
        if self.workload.optimizer.is_foreach or widens:
            for name, nbytes in sizes.items():
                self.tensors.make(("temporary", name), nbytes)
            for name in sizes:
                self.tensors.release(("temporary", name))
        elif not self.has_buffer:
            self.tensors.passing(2 * max(sizes.values(), default=0))

    # Forward.

    def _forward(self, number: int, part: range) -> None:
        if ("comes",) not in self.tensors:
            self.tensors.make(("comes",), self.pipe.standing)
        self.tensors.make(("received", number), self.pipe.received)
        self.fsdp.gather_forward(self.root)
        for index in part:
            self.fsdp.gather_forward(index)
            self._forward_of(number, index)
            if self.zero == 3 and index in self.groups and index != self.stays_gathered:
                self.fsdp.release_whole(index)
        self._keep_sent(number, part[-1])
        if self.pipe.is_sliced:
            self.tensors.make(("sent", number), self.pipe.sent)
        self.fsdp.drop_buffers()
        if self.zero == 3 and self.setting.pp > 1:
            self.fsdp.release_whole(self.root)

    def _forward_of(self, number: int, index: int) -> None:
        block = self.blocks[index]
        for value, nbytes in block.inputs.values():
            if (number, value) not in self.values:
                self._enter(number, value, nbytes)
        own = self.own[(number, index)] = {}
        for name, nbytes in block.events.forward:
            if block.cast is not None and name == block.cast.before and nbytes:
                self._keep_output(own, block.cast)
            self._play((number, index), name, nbytes)
        for local, (value, _) in block.outputs.items():
            storage = block.events.outputs[local]
            key: Key = (number, index, storage)
            if storage in block.inputs:
                key = self.values[(number, block.inputs[storage][0])]
            self.tensors.hold(key)
            self.values[(number, value)] = key
            self.readers[(number, value)] = self.reading.get(value, 0)
            self._let_go_unread(number, value)
        for name in [n for n in own if n not in block.events.kept]:
            self.tensors.release(own.pop(name))
        for local, (value, _) in block.inputs.items():
            if local in block.held:
                self.tensors.hold(self.values[(number, value)])
            self.readers[(number, value)] -= 1
            self._let_go_unread(number, value)

    def _keep_output(self, own: dict[str, Key], cast: OutputCast) -> None:
        """Make the output of a pipeline engine's last layer, which takes the oldest one's place."""
        self.tensors.make(("output", self.num_outputs), cast.nbytes)
        if cast.source in own:
            self.tensors.release(own.pop(cast.source))
        self.tensors.release(("output", self.num_outputs - cast.num_kept))
        self.num_outputs += 1

    def _enter(self, number: int, value: str, nbytes: int) -> None:
        key: Key = (number, "value", value)
        self.tensors.make(key, nbytes)
        self.values[(number, value)] = key
        self.readers[(number, value)] = self.reading[value]

    def _let_go_unread(self, number: int, value: str) -> None:
        if self.readers[(number, value)] == 0:
            key = self.values[(number, value)]
            if self.reading.get(value, 0) == 0 and self.pipe.sent and not self.pipe.is_sliced:
                self.sent.setdefault(number, []).append(key)
            else:
                self.tensors.release(key)

    def _keep_sent(self, number: int, last: int) -> None:
        """Name what stays of a stage's output apart, as a second forward makes it again."""
        own = self.own[(number, last)].values()
        for place, key in enumerate(self.sent.get(number, ())):
            if key not in own and key in self.tensors:
                self.sent[number][place] = ("sent", number, place)
                self.tensors.rename(key, ("sent", number, place))

    def _play(self, place: tuple[int, int], name: str, nbytes: int) -> None:
        """Make a tensor of a block, or let it go."""
        own = self.own[place]
        if nbytes == 0:
            if name in own:
                self.tensors.release(own.pop(name))
        elif name not in own:
            key = (*place, name)
            self.tensors.make(key, nbytes)
            own[name] = key

    # Backward.

    def _backward(self, number: int, is_last: bool, part: range) -> None:
        is_pipeline = self.setting.pp > 1
        syncs = self.wrapped and (self.zero >= 2 or (is_last and not is_pipeline))
        reshards = self.zero == 3 or (is_last and not is_pipeline)
        if self.wrapped and self.zero == 3:
            self.fsdp.gather_backward(self.root)
            self.fsdp.prefetch(self.root)
        for index in reversed(part):
            if self.wrapped and self.zero == 3 and not self.blocks[index].is_glue:
                self.fsdp.gather_backward(index)
                self.fsdp.prefetch(index)
            self._backward_of(number, index)
            if syncs and index in self.groups:
                self.fsdp.reduce(index, reshards)
        if syncs and self.root in self.groups:
            self.fsdp.reduce(self.root, reshards)
        for key in [k for k in self.gradients if k[0] == number]:
            if self.gradients[key][1] in part:
                self.tensors.release(self.gradients.pop(key))
        for key in (("sent", number), ("received", number), *self.sent.pop(number, ())):
            self.tensors.release(key)
        self.tensors.release(("reduce input",))

    def _backward_of(self, number: int, index: int) -> None:
        block = self.blocks[index]
        trained = [p for p in block.states.values() if ("grad", p) in self.tensors]
        is_mixed = self.is_mixed and not self.has_buffer
        adds_up = self.has_buffer and not self.is_flat
        adds_up = adds_up or (bool(trained) and not is_mixed and not self.is_flat)
        events = block.accumulating if adds_up else block.events
        own = self.own[(number, index)]
        for local, (value, nbytes) in block.outputs.items():
            key = self.gradients.pop((number, value), None)
            if key is None:
                key = (number, index, "coming", local)
                self.tensors.make(key, nbytes)
            own[events.coming[local]] = key
        for name, nbytes in events.backward:
            if name.startswith("pgrad:") and not adds_up:
                # A converted parameter is named after the one that is stored.
                state = name.removeprefix("pgrad:").split("__")[0]
                self._keep_gradient(block.states[state], nbytes)
            else:
                self._play((number, index), name, nbytes)
        for local, names in events.going.items():
            place = (number, block.inputs[local][0])
            for name in names[:1]:
                if name in own and place not in self.gradients:
                    self.tensors.hold(own[name])
                    self.gradients[place] = own[name]
        for key in self.own.pop((number, index)).values():
            self.tensors.release(key)
        for local in block.held:
            self.tensors.release(self.values[(number, block.inputs[local][0])])
        if self.wrapped and self.is_mixed and self.zero <= 1:
            self._widen(block)

    def _keep_gradient(self, name: str, nbytes: int) -> None:
        """Keep the gradient of a parameter, or add it to the one there is."""
        if self.workload.engine.steps_in_backward or ("grad", name) in self.tensors:
            self.tensors.passing(nbytes)
        else:
            self.tensors.make(("grad", name), nbytes)

    def _widen(self, block: ReplayedBlock) -> None:
        """Turn whole gradients into ones of the stored dtype, which wait for the reduction."""
        for parameter in block.parameters:
            if ("grad", parameter.name) in self.tensors:
                if ("wide", parameter.name) not in self.tensors:
                    self.tensors.make(("wide", parameter.name), parameter.stored)
                self.tensors.release(("grad", parameter.name))
