"""Context parallelism: every rank has a part of each sequence, and attention reads the keys of all.

A rank runs a block on `tokens / degree` tokens; only attention mixes positions. Under a causal mask
a rank has two chunks, one from each end of the sequence, so that all ranks have equally much to do.
Three exchanges, by the software that has them; b is the bytes of a rank's queries, k those of its
keys and values together:

    ring        keys and values go around, one rank a step, beside the kernels of the step before;
                in backward their gradients go with them. (degree - 1) k forward, twice that
                backward (Liu et al. 2023, Ring attention; Transformer Engine,
                `AttnFuncWithCPAndKVP2P`).
    all_gather  the same steps on keys and values that were all gathered at the first one; gradients
                go around in float32 (torch, `_templated_ring_attention` with its default
                `_RotateMethod.ALL_GATHER`). Compiled, each collective is waited for where it is
                issued (`_functional_collectives._maybe_wrap_tensor`).
    all_to_all  queries, keys and values become those of a part of the heads for the whole sequence,
                and results come back the same way (Jacobs et al. 2023, DeepSpeed Ulysses;
                Transformer Engine from 2.8, `AttnFuncWithCPAndQKVOA2A`).

In a ring the first step is a rank's own block under the mask; every other is a whole block of half
as many keys, or of half as many queries. Priced is the rank that has all its queries in each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoplan.graph import OpTrace
from autoplan.local_blocks import LocalBlock, LocalOp
from autoplan.profiles.lookups import ITEM_BYTES
from autoplan.settings import Workload
from autoplan.step_costs import exposed_s, interference
from autoplan.times import OpTime, Timer, overlaps_communication

__all__ = [
    "Exchanged",
    "exchanged",
    "is_exchanged",
    "with_context_held",
    "with_context_times",
]

_WIDE = 4  # bytes of an element of the float32 sums of torch's ring attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What attention of one rank reads and writes, in bytes.

    Attributes:
        query: of its queries, as of its result.
        keys: of its keys and values together.
        rows: of one float32 a query and head (a logsumexp).
        wide: float32 bytes for a byte of these.
    """

    query: int
    keys: int
    rows: int
    wide: float


def is_exchanged(op: LocalOp) -> bool:
    """Return whether context parallelism moves what an op reads: fused attention does."""
    return op.op is not None and op.op.kind == "attention" and op.op.attention is not None


def _traced(op: LocalOp) -> OpTrace:
    assert op.op is not None, "see is_exchanged"
    return op.op


def _sizes(op: OpTrace) -> tuple[int, int, int, int, int, int]:
    assert op.attention is not None, "an attention op carries its sizes"
    return op.attention


def exchanged(local: LocalBlock, op: LocalOp, *, repeats_keys: bool = False) -> Exchanged:
    """Return the bytes that an attention op of a block reads and writes on this rank.

    Args:
        local: the block.
        op: of it.
        repeats_keys: see `autoplan.engines.Engine`.
    """
    traced = _traced(op)
    head_dim = _sizes(traced)[4]
    made = {other.name: other.value_bytes for other in local.ops}
    item = ITEM_BYTES.get(traced.dtype, _WIDE)
    keys = sum(made.get(name) or local.value_bytes.get(name, 0) for name in op.inputs[1:3])
    return Exchanged(
        query=op.value_bytes,
        keys=2 * op.value_bytes if repeats_keys else keys,
        rows=4 * op.value_bytes // (item * head_dim),
        wide=_WIDE / item,
    )


def _check_heads(local: LocalBlock, workload: Workload) -> None:
    """Check that an exchange of heads has as many as there are ranks.

    Raises:
        ValueError: says how many there are.
    """
    degree = workload.context_parallel
    for op in local.ops:
        if workload.engine.context_exchange != "all_to_all" or not is_exchanged(op):
            continue
        heads = _sizes(_traced(op))[1] // (local.degree if op.option.is_split else 1)
        sizes = exchanged(local, op)
        of_keys = heads * sizes.keys // (2 * sizes.query)
        if heads % degree or of_keys % degree:
            raise ValueError(
                f"context_parallel={degree} by an exchange of heads: a rank has {heads} of queries "
                f"and {of_keys} of keys, {degree} must divide both: lower it or tp"
            )


def with_context_times(
    local: LocalBlock, times: Mapping[str, OpTime], timer: Timer, workload: Workload
) -> dict[str, OpTime]:
    """Return the times of a block's ops with attention over the tokens of all ranks.

    Args:
        local: the block on one rank's tokens.
        times: of its ops, on these alone.
        timer: of the tensor-parallel degree; the ranks that exchange lie that far apart.
        workload: its `context_parallel`, and the engine that exchanges.
    """
    found = dict(times)
    if workload.context_parallel == 1:
        return found
    _check_heads(local, workload)
    engine = workload.engine
    price = _heads_time if engine.context_exchange == "all_to_all" else _ring_time
    for op in local.ops:
        if is_exchanged(op):
            sizes = exchanged(local, op, repeats_keys=engine.repeats_keys)
            found[op.name] = price(sizes, op, times[op.name], timer, workload)
    return found


def _kernel_time(op: LocalOp, timer: Timer, sizes: tuple[int, int, int, int, int, int]) -> OpTime:
    """Return the seconds of the same kernel on other sizes; nothing was measured of that op."""
    other = replace(_traced(op), attention=sizes, signature="", cast_bytes=0, backward_cast_bytes=0)
    return timer.traced_time(other, op.option)


def _ring_time(
    sizes: Exchanged, op: LocalOp, own: OpTime, timer: Timer, workload: Workload
) -> OpTime:
    """Return the time of attention in as many steps as there are ranks."""
    traced = _traced(op)
    degree, is_gathered = workload.context_parallel, workload.engine.context_exchange != "ring"
    batch, heads, seq_q, seq_k, head_dim, is_causal = _sizes(traced)
    seen = -(-seq_k // 2) if is_causal else seq_k
    step = _kernel_time(op, timer, (batch, heads, seq_q, seen, head_dim, 0))
    link = timer.cluster.link_for(degree, timer.degree)
    slowed = interference(link)
    is_beside = overlaps_communication(timer.cluster)
    is_beside = is_beside and not (is_gathered and workload.is_compiled)

    def left_s(communication_s: float, compute_s: float) -> float:
        return exposed_s(communication_s, compute_s, slowed) if is_beside else communication_s

    def send_s(nbytes: float) -> float:
        return link.collective_time_s("send", nbytes, 2)

    rest = degree - 1
    if is_gathered:
        gather_s = link.collective_time_s("all_gather", degree * sizes.keys, degree)
        gradients_s = send_s(sizes.wide * sizes.keys)
        forward_comm = left_s(gather_s, own.forward_s)
        backward_comm = left_s(gather_s, own.backward_s)
        # Sent after each step, and waited for after the next one's kernel.
        backward_comm += rest * left_s(gradients_s, step.backward_s) + gradients_s
    else:
        forward_comm = left_s(send_s(sizes.keys), own.forward_s)
        forward_comm += (rest - 1) * left_s(send_s(sizes.keys), step.forward_s)
        backward_comm = left_s(send_s(sizes.keys), own.backward_s)
        backward_comm += (rest - 1) * left_s(send_s(2 * sizes.keys), step.backward_s)
        backward_comm += send_s(sizes.keys)  # gradients come home after the last step
    forward, backward = _merge_s(sizes, degree, timer, workload)
    return OpTime(
        forward_s=own.forward_s + rest * step.forward_s + forward,
        backward_s=own.backward_s + (rest * step.backward_s + backward) * traced.needs_grad,
        forward_comm_s=own.forward_comm_s + forward_comm,
        backward_comm_s=own.backward_comm_s + backward_comm * traced.needs_grad,
    )


def _merge_s(
    sizes: Exchanged, degree: int, timer: Timer, workload: Workload
) -> tuple[float, float]:
    """Return the seconds in which the results of the steps are put together, and their gradients.

    Transformer Engine has one kernel a step, in the dtype of the results; torch has one for each
    operator of `_SDPAMerger._merge_one` in float32, or compiled one for a step, and copies keys and
    values before it sends them and into their gradients (`_partial_update`).
    """
    query, keys, wide, rest = sizes.query, sizes.keys, sizes.wide, degree - 1
    if workload.engine.context_exchange == "ring":
        forward = timer.memory_s(2 * keys) + timer.memory_s(2 * query)
        forward += rest * timer.memory_s(3 * query)
        return forward, rest * (timer.memory_s(3 * query) + timer.memory_s(3 * keys))
    if workload.is_compiled:
        forward = rest * timer.memory_s((1 + 2 * wide) * query)
    else:
        forward = timer.memory_s((1 + wide) * query) * (degree + 1)  # to float32, and back
        forward += rest * (2 * timer.memory_s(3 * wide * query) + timer.memory_s(2 * wide * query))
    forward += rest * timer.memory_s(2 * keys)
    backward = degree * timer.memory_s((1 + 2 * wide) * query)
    backward += degree * (timer.memory_s((1 + 2 * wide) * keys) + timer.memory_s(2 * wide * keys))
    backward += rest * (timer.memory_s(2 * keys) + timer.memory_s(2 * wide * keys))
    return forward, backward + timer.memory_s((1 + wide) * (query + keys))


def _heads_time(
    sizes: Exchanged, op: LocalOp, own: OpTime, timer: Timer, workload: Workload
) -> OpTime:
    """Return the time of attention of a part of the heads over whole sequences.

    A tensor is copied into pieces before it is sent and, after it, into the order of the sequence,
    which the two chunks of each rank are not in.
    """
    traced = _traced(op)
    degree = workload.context_parallel
    batch, heads, seq_q, seq_k, head_dim, is_causal = _sizes(traced)
    whole = (batch, -(-heads // degree), degree * seq_q, degree * seq_k, head_dim, is_causal)
    kernel = _kernel_time(op, timer, whole)
    link = timer.cluster.link_for(degree, timer.degree)

    def moved_s(nbytes: float) -> float:
        return link.collective_time_s("all_to_all", nbytes, degree)

    copies_s = 2 * (2 * timer.memory_s(2 * sizes.query) + 2 * timer.memory_s(sizes.keys))
    moves_s = 2 * moved_s(sizes.query) + 2 * moved_s(sizes.keys / 2)
    casts_forward, casts_backward = traced.cast_bytes, traced.backward_cast_bytes
    is_trained = traced.needs_grad
    return OpTime(
        forward_s=kernel.forward_s + timer.memory_s(casts_forward) + copies_s,
        backward_s=(kernel.backward_s + timer.memory_s(casts_backward) + copies_s) * is_trained,
        forward_comm_s=own.forward_comm_s + moves_s,
        backward_comm_s=own.backward_comm_s + moves_s * is_trained,
    )


def with_context_held(local: LocalBlock, workload: Workload) -> LocalBlock:
    """Return a block whose attention holds what an exchange keeps and works on.

    ring: keys and values are copied into one buffer, and the one that came last is kept instead of
    them; all of them, and what each step gives, live until the forward ends. all_gather: what is
    gathered, and sums in float32. all_to_all: queries, keys, values and the result as they were
    exchanged are kept, the result that leaves as well by who reads it.
    """
    if workload.context_parallel == 1 or not any(map(is_exchanged, local.ops)):
        return local
    storage = {op.name: op.storage for op in local.ops}
    changed = {
        op.name: _held(
            op,
            exchanged(local, op, repeats_keys=workload.engine.repeats_keys),
            storage,
            workload,
        )
        for op in local.ops
        if is_exchanged(op)
    }
    return replace(local, ops=tuple(changed.get(op.name, op) for op in local.ops))


def _held(op: LocalOp, sizes: Exchanged, storage: Mapping[str, str], workload: Workload) -> LocalOp:
    degree = workload.context_parallel
    query, keys, rows = sizes.query, sizes.keys, sizes.rows
    owners = [storage.get(name, name) for name in op.inputs[:3]]
    if workload.engine.context_exchange == "all_gather":
        sums, gradients = int(sizes.wide * query), int(sizes.wide * keys)
        gathered = (keys, degree * keys, query, keys * workload.engine.repeats_keys)
        return _working(
            op,
            (*gathered, *[sums] * (2 if workload.is_compiled else 4)),
            (op.backward_temp_bytes, *gathered, keys, sums, gradients, gradients, gradients),
        )
    if workload.engine.context_exchange == "ring":
        gone = set(owners[1:]) - {owners[0]}
        kept = keys
        forward: tuple[int, ...] = (*[query, rows] * degree, *[keys] * (degree - 1))
        # A step's gradients; two buffers, each of keys, values and the gradients of both.
        backward: tuple[int, ...] = (op.backward_temp_bytes, query, keys, keys, 2 * keys)
    else:
        gone = {*owners, op.name}
        kept = 2 * query + keys
        forward = (query, keys) * 2
        kernel = (op.backward_temp_bytes, query, query, keys)
        backward = max(kernel, (query, keys) * 3, key=sum)
    saved = tuple(name for name in op.saved if name not in gone)
    op = replace(op, saved=saved, internal_bytes=op.internal_bytes + kept)
    return _working(op, forward, backward)


def _working(op: LocalOp, forward: tuple[int, ...], backward: tuple[int, ...]) -> LocalOp:
    """Return an op with other tensors that live while it runs, forward and backward."""
    return replace(op, forward_temp_bytes=sum(forward), backward_temp_bytes=sum(backward))
