"""Bytes over time of one block on one rank: forward, between, and backward.

The simulation walks the local ops as the emitted code does: a value is freed after its last reader
unless autograd keeps it, backward runs in reverse order, gradients of values with several readers
are added up, and a recompute region first runs its forward again. Parameters and their gradients
are not counted here; gradients are reported by op so that the caller can place them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autoplan.block_heap import Event, Gradients, Heap
from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.plan import Recompute
from autoplan.stage_costs import BlockMemory

__all__ = [
    "BlockEvents",
    "BlockMemory",
    "block_events",
    "block_memory",
    "needed_marks",
    "offloaded_bytes",
    "redone_ops",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvents:
    """Every tensor of a block that is made and let go, in order.

    Attributes:
        forward, backward: events of one micro-batch; inputs and states are others'.
        kept: tensors that stay from forward to backward.
        outputs: storage of each value that leaves the block.
        coming: gradient tensor of each of them, there when the backward starts.
        going: gradient tensors of each input, there when the backward ends.
    """

    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    kept: frozenset[str]
    outputs: Mapping[str, str]
    coming: Mapping[str, str]
    going: Mapping[str, tuple[str, ...]]


def block_memory(
    local: LocalBlock, recompute: Recompute, *, accumulating: bool = False
) -> BlockMemory:
    """Return the bytes of one micro-batch of a block under a recompute decision.

    Args:
        local: the block as one rank runs it.
        recompute: what is kept.
        accumulating: parameter gradients are added to ones that exist and freed at once; otherwise
            they stay until the block's backward ends.
    """
    return _walked(local, recompute, accumulating)[0]


def block_events(
    local: LocalBlock, recompute: Recompute, *, accumulating: bool = False
) -> BlockEvents:
    """Return the tensors behind `block_memory`, one by one; arguments as there."""
    forward: list[Event] = []
    backward: list[Event] = []
    _, kept, gradients = _walked(local, recompute, accumulating, (forward, backward))
    numbers = range(1, 1 + len(dict.fromkeys(local.outputs)))
    return BlockEvents(
        forward=tuple(forward),
        backward=tuple(backward),
        kept=frozenset(kept),
        outputs={name: _storage(local, name) for name in local.outputs},
        coming={n: f"grad:{i}" for n, i in zip(dict.fromkeys(local.outputs), numbers, strict=True)},
        going={n: tuple(f"grad:{i}" for i in gradients.held.get(n, ())) for n in local.inputs},
    )


def _walked(
    local: LocalBlock,
    recompute: Recompute,
    accumulating: bool,
    events: tuple[list[Event], list[Event]] | None = None,
) -> tuple[BlockMemory, dict[str, int], Gradients]:
    """Return the bytes of a block, what it keeps by owner, and the gradients that leave it."""
    heap = Heap(events[0] if events else None)
    saved = local.saved
    region = recompute.mode in ("full", "selective")
    is_away = recompute.mode == "offload"
    marked = _marked(local, recompute.keep) if region else {}
    kept_owners = set() if is_away else set(marked) if region else set(saved)
    internal = not (region or is_away)
    _run_forward(local, local.ops, heap, kept_owners, marked, internal=internal)
    forward_peak = heap.peak
    outputs = {_storage(local, name) for name in local.outputs}
    inputs = dict(local.inputs)
    held_inputs = set(inputs) if region else {n for n in inputs if n in saved}
    casts = {name for op in local.ops for name, _ in op.casts}
    passing = (outputs | casts) - kept_owners
    kept = {n: b for n, b in heap.live.items() if n not in passing}
    kept_total = sum(kept.values()) + sum(inputs[n] for n in held_inputs)
    side = tuple(n for n in local.side_inputs if region or n in saved)
    output_bytes = sum(local.value_bytes.get(n, 0) for n in outputs if n not in inputs)
    backward = Heap()
    grads, gradients = _backward(
        local,
        backward,
        kept,
        {n: inputs[n] for n in held_inputs},
        region,
        accumulating,
        events[1] if events else None,
        _away_sizes(local) if is_away else None,
    )
    memory = BlockMemory(
        kept=kept_total,
        side=side,
        output=output_bytes,
        forward_peak=forward_peak,
        backward_peak=backward.peak,
        parameter_grads=grads,
        held_inputs=tuple(n for n in inputs if n in held_inputs),
        held_outputs=tuple(n for n in local.outputs if _storage(local, n) in kept),
        held_output_bytes=sum(b for n, b in kept.items() if n in outputs),
        border_backward_peak=backward.border_peak,
    )
    return memory, kept, gradients


def offloaded_bytes(local: LocalBlock) -> int:
    """Return the bytes that a forward copies to the host, and its backward back.

    What each op saves, once per op that saves it, but for inputs and parameters.
    """
    sizes = _away_sizes(local)
    saved = sum(sizes.get(owner, 0) for op in local.ops for owner in op.saved)
    return saved + sum(op.internal_bytes for op in local.ops)


def _away_sizes(local: LocalBlock) -> dict[str, int]:
    """Return the bytes of the storages that the block makes and autograd saves, by owner."""
    saved = local.saved - set(local.inputs) - set(local.side_inputs)
    sizes = {op.storage: op.nbytes for op in local.ops if op.storage == op.name}
    sizes |= {name: nbytes for op in local.ops for name, nbytes in op.casts}
    return {owner: sizes[owner] for owner in saved if owner in sizes}


def redone_ops(local: LocalBlock, recompute: Recompute) -> tuple[LocalOp, ...]:
    """Return the ops that run again in backward under a recompute decision.

    In a region every op runs again that is not kept, until the last tensor that a backward needs
    is there (non-reentrant checkpointing stops early). A kept addend (a row-parallel product)
    keeps its reduced form, and neither runs again.
    """
    if recompute.mode in ("none", "offload"):
        return ()
    keep = set(recompute.keep)
    redone = []
    for op in local.ops[: _rerun_end(local)]:
        source = op.inputs[0] if op.op is None and op.mark_bytes else op.name
        if source not in keep:
            redone.append(op)
    return tuple(redone)


def needed_marks(local: LocalBlock, recompute: Recompute) -> Recompute:
    """Return a decision without marks on results that no backward and no second forward reads.

    A compiler does not save them; eager checkpointing does whatever its policy names.
    """
    if recompute.mode != "selective":
        return recompute
    read = set(local.saved)
    for op in redone_ops(local, recompute):
        read |= {_storage(local, name) for name in op.inputs}
    keep = tuple(name for name in recompute.keep if _storage(local, name) in read)
    return replace(recompute, keep=keep)


def _rerun_end(local: LocalBlock) -> int:
    """Return the index after the last op that a second forward runs.

    It stops once everything is there that a backward needs; an op that only needs its inputs saves
    them before its kernel runs, so the last such op does not run. Reentrant checkpointing does not
    stop.
    """
    if local.is_reentrant:
        return len(local.ops)
    for index in range(len(local.ops) - 1, -1, -1):
        op = local.ops[index]
        if op.internal_bytes or op.storage in op.saved:
            return index + 1
        if op.saved:
            return index
    return 0


def _storage(local: LocalBlock, name: str) -> str:
    return local.storages.get(name, name)


def _marked(local: LocalBlock, keep: Iterable[str]) -> dict[str, int]:
    """Return bytes that keep marks hold, by owner: of a partial result its converted forms."""
    wanted = set(keep)
    partial = {op.name for op in local.ops if op.is_partial}
    held = {}
    for op in local.ops:
        if op.op is None:
            is_held = op.inputs[0] in wanted & partial
        else:
            is_held = op.name in wanted and not op.is_partial
        if is_held and op.mark_bytes > 0:
            held[op.storage] = op.mark_bytes
    return held


def _run_forward(
    local: LocalBlock,
    ops: Sequence[LocalOp],
    heap: Heap,
    kept: set[str],
    marked: Mapping[str, int],
    internal: bool,
) -> None:
    """Walk the ops forward; leaves in the heap what is kept and what leaves the block.

    What is in the heap before stands for results that are there already and do not run again.
    """
    there = set(heap.live)
    stays = {*kept, *local.inputs, *local.side_inputs}
    stays |= {state.name for state in local.block.states}
    stays |= {_storage(local, name) for name in local.outputs}
    ending: dict[int, list[str]] = {}
    for owner, index in local.last_readers.items():
        if owner not in stays:
            ending.setdefault(index, []).append(owner)
    over: set[str] = set()
    for index, op in enumerate(ops):
        over.update(ending.get(index, ()))
        for name, nbytes in op.casts:
            heap.add(name, nbytes)
        if op.name in there and op.op is not None:
            continue
        if op.storage == op.name:
            is_kept = op.name in kept or op.unkept_bytes is None
            heap.add(op.name, op.nbytes if is_kept else op.unkept_bytes or 0)
        heap.transient(op.forward_temp_bytes + (0 if internal else op.internal_bytes))
        if internal:
            heap.add(f"{op.name}:internal", op.internal_bytes)
        extra = marked.get(op.storage, 0) - op.nbytes if op.storage == op.name else 0
        if extra > 0:
            heap.add(f"{op.name}:marked", extra)
        if not over.isdisjoint(heap.live):
            for owner in [name for name in heap.live if name in over]:
                heap.drop(owner)


def _backward(
    local: LocalBlock,
    heap: Heap,
    kept: Mapping[str, int],
    inputs: Mapping[str, int],
    region: bool,
    accumulating: bool,
    events: list[Event] | None,
    fetched: Mapping[str, int] | None = None,
) -> tuple[int, Gradients]:
    """Walk the backward; return the bytes of parameter gradients it makes, and those of inputs.

    What is `fetched` from the host comes for each op that saved it and goes with it.

    In a region the marked results live until the backward ends. `events` is filled with what
    happens after the start, when what is kept and the gradients of the outputs are there.
    """
    for name, nbytes in (*kept.items(), *inputs.items()):
        heap.add(name, nbytes)
    gradients = Gradients(heap)
    for name in dict.fromkeys(local.outputs):
        nbytes = local.value_bytes.get(_storage(local, name), 0)
        gradients.enter(name, nbytes, is_held=region and local.is_reentrant)
    heap.events = events
    if region:
        end = _rerun_end(local)
        _run_forward(local, local.ops[:end], heap, set(local.saved) | set(kept), {}, internal=True)
        for name, nbytes in (cast for op in local.ops[end : end + 1] for cast in op.casts):
            heap.add(name, nbytes)
        _drop_unneeded(local, heap, set(kept) | set(inputs))
    uses = _saved_uses(local)
    # A second forward makes its own outputs: what was sent is no tensor of this backward.
    outputs = {_storage(local, name) for name in local.outputs} & kept.keys()
    held = set(inputs) | (set(kept) if region else set())
    sizes = {op.name: op.value_bytes for op in local.ops}
    made = 0
    for op in reversed(local.ops):
        coming = gradients.take(op.name)
        if fetched is not None:
            heap.add(f"{op.name}:internal", op.internal_bytes)
            for owner in op.saved:
                heap.add(owner, fetched.get(owner, 0))
        for name in op.grads:
            if op.op is not None and op.op.target == "getitem":
                gradients.collect(name, coming)
            elif op.passes_gradient and coming:
                gradients.pass_on(name, coming)
            else:
                nbytes = sizes.get(name, 0) or local.value_bytes.get(name, 0)
                gradients.receive(name, nbytes)
        for name, nbytes in op.parameter_grads:
            if f"pgrad:{name}" not in heap.live:
                made += nbytes
                heap.add(f"pgrad:{name}", nbytes)
            else:
                heap.transient(nbytes)
        heap.transient(op.backward_temp_bytes)
        if accumulating:
            for name, _ in op.parameter_grads:
                heap.drop(f"pgrad:{name}")
        gradients.release(coming)
        gradients.add_up()
        heap.drop(f"{op.name}:internal")
        for owner in op.saved:
            uses[owner] -= 1
            is_over = uses[owner] == 0 or fetched is not None
            if is_over and owner not in held:
                heap.drop(owner, is_held=owner in outputs)
    gradients.release(gradients.entered)
    return made, gradients


def _drop_unneeded(local: LocalBlock, heap: Heap, there: set[str]) -> None:
    """Drop what the second forward made and no backward needs, when its frame ends."""
    needed = local.saved | there
    if local.is_reentrant:
        needed |= {_storage(local, name) for name in local.outputs}
    for owner in [n for n in heap.live if n not in needed and ":" not in n]:
        heap.drop(owner)


def _saved_uses(local: LocalBlock) -> dict[str, int]:
    uses: dict[str, int] = {}
    for op in local.ops:
        for owner in op.saved:
            uses[owner] = uses.get(owner, 0) + 1
    return uses
