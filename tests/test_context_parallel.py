"""Context parallelism: what is exchanged, worked, kept and refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.cluster import Cluster
from autoplan.context_batches import token_slices
from autoplan.context_parallel import exchanged, is_exchanged, with_context_held, with_context_times
from autoplan.engines import AUTOPLAN, ContextExchange
from autoplan.errors import PlanError
from autoplan.graph import BlockTrace, OpTrace, ShardOption, Trace
from autoplan.liveness import block_memory
from autoplan.local import localize
from autoplan.local_blocks import LocalBlock
from autoplan.optimizers import Optimizer
from autoplan.plan import Recompute
from autoplan.profiles.link import LinkProfile
from autoplan.settings import Workload
from autoplan.tensor_layout import megatron_axes
from autoplan.times import OpTime, Timer
from autoplan.tracer import trace
from benchmarks.published_models import Decoder, Shape, batch_of

NONE = Recompute(mode="none")
TOKENS, HEADS, KV_HEADS, WIDTH = 64, 8, 4, 128
EXCHANGES: tuple[ContextExchange, ...] = ("ring", "all_gather", "all_to_all")


def shape(tokens: int = TOKENS, **changes: Any) -> Shape:
    fields: dict[str, Any] = {
        "layers": 2,
        "hidden": WIDTH,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "ffn": 2 * WIDTH,
        "vocab": 512,
        "seq": tokens,
        "norm": "rms",
        "position": "rotary",
        "activation": "swiglu",
        "is_tied": False,
        "has_bias": False,
        "kernels": "megatron",
    }
    return Shape(**{**fields, **changes})


def traced(tokens: int) -> Trace:
    own = shape(tokens)
    return trace(Decoder.on_meta(own), batch_of(own), None, microbatch_size=1, backend="cuda")


@pytest.fixture(scope="module")
def blocks() -> dict[int, BlockTrace]:
    """Return the repeated block by the tokens that it runs on."""
    sizes = (TOKENS, TOKENS // 2, TOKENS // 4)
    return {n: next(b for b in traced(n).blocks if not b.is_glue) for n in sizes}


def workload(degree: int, exchange: ContextExchange = "all_gather") -> Workload:
    return Workload(
        global_batch_size=8,
        optimizer=Optimizer.named("AdamW", is_foreach=False),
        engine=replace(AUTOPLAN, context_exchange=exchange),
        context_parallel=degree,
    )


class WorkTimer(Timer):
    """A timer that notes the FLOPs of the attention kernels that it is asked for."""

    flops = 0.0

    def traced_time(self, op: OpTrace, option: ShardOption) -> OpTime:
        if op.attention is not None:
            batch, heads, seq_q, seq_k, head_dim, is_causal = op.attention
            work = 4.0 * batch * heads * seq_q * seq_k * head_dim
            self.flops += work / 2 if is_causal else work
        return super().traced_time(op, option)


def priced(local: LocalBlock, timer: Timer, own: Workload) -> dict[str, OpTime]:
    return with_context_times(local, {op.name: timer.op_time(op) for op in local.ops}, timer, own)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_one_rank_changes_nothing(blocks: dict[int, BlockTrace], exchange: ContextExchange) -> None:
    local, timer = localize(blocks[TOKENS], {}, 1), Timer(Cluster.parse("1x8:a100"), 1)
    own = workload(1, exchange)
    assert with_context_held(local, own) == local
    assert priced(local, timer, own) == {op.name: timer.op_time(op) for op in local.ops}


def test_kept_bytes_of_a_block_divide_by_the_ranks(blocks: dict[int, BlockTrace]) -> None:
    whole = block_memory(localize(blocks[TOKENS], {}, 1), NONE).kept
    for degree in (2, 4):
        local = localize(blocks[TOKENS // degree], {}, 1)
        assert degree * block_memory(with_context_held(local, workload(degree)), NONE).kept == whole


def test_what_is_kept_is_what_was_exchanged(blocks: dict[int, BlockTrace]) -> None:
    tokens = TOKENS // 2
    local = localize(blocks[tokens], {}, 1)
    query, keys = 2 * tokens * WIDTH, 2 * 2 * tokens * WIDTH * KV_HEADS // HEADS
    op = next(op for op in local.ops if is_exchanged(op))
    sizes = exchanged(local, op)
    assert (sizes.query, sizes.keys, sizes.rows) == (query, keys, 4 * HEADS * tokens)
    # Kept without: rotated queries and keys, and values inside the product of all three.
    own = query + keys // 2 + (query + keys)
    others = block_memory(local, NONE).kept - own
    expected = {"all_gather": own, "ring": query + keys, "all_to_all": 2 * query + keys}
    for exchange, nbytes in expected.items():
        held = with_context_held(local, workload(2, exchange))  # type: ignore[arg-type]
        assert block_memory(held, NONE).kept == others + nbytes, exchange


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_ranks_together_do_the_work_of_the_whole_mask(
    blocks: dict[int, BlockTrace], exchange: ContextExchange, tp: int
) -> None:
    degree = 2
    block = blocks[TOKENS // degree]
    local = localize(block, megatron_axes(block, tp) if tp > 1 else {}, tp)
    timer = WorkTimer(Cluster.parse("1x8:a100"), tp)
    timers = {op.name: timer.op_time(op) for op in local.ops}
    if exchange == "all_to_all":
        timer.flops = 0.0  # the kernel on a rank's own tokens does not run
    with_context_times(local, timers, timer, workload(degree, exchange))
    assert degree * timer.flops == 4 * TOKENS**2 * WIDTH / 2


@pytest.mark.parametrize(
    ("exchange", "forward", "backward"),
    [
        ("ring", {"send": 3}, {"send": 6}),
        # Gradients of keys go around in float32, once for each rank.
        ("all_gather", {"all_gather": 4}, {"all_gather": 4, "send": 2 * 4}),
        ("all_to_all", {"all_to_all": 1}, {"all_to_all": 1}),
    ],
)
def test_bytes_on_the_way_are_those_of_the_equations(
    blocks: dict[int, BlockTrace],
    monkeypatch: pytest.MonkeyPatch,
    exchange: ContextExchange,
    forward: dict[str, int],
    backward: dict[str, int],
) -> None:
    degree, tokens = 4, TOKENS // 4
    keys = 2 * 2 * tokens * WIDTH * KV_HEADS // HEADS
    local = localize(blocks[tokens], {}, 1)
    timer = Timer(Cluster.parse("1x8:a100"), 1)
    before = {op.name: timer.op_time(op) for op in local.ops}
    moved: dict[str, float] = {}

    def count(_: LinkProfile, name: str, nbytes: float, ranks: int) -> float:
        assert ranks == (2 if name == "send" else degree)
        moved[name] = moved.get(name, 0.0) + nbytes
        return nbytes

    monkeypatch.setattr(LinkProfile, "collective_time_s", count)
    monkeypatch.setattr("autoplan.context_parallel.overlaps_communication", lambda _: False)
    found = with_context_times(local, before, timer, workload(degree, exchange))
    (op,) = (op for op in local.ops if is_exchanged(op))
    own = 2 * tokens * WIDTH * 2 if exchange == "all_to_all" else 0  # queries and results
    assert found[op.name].forward_comm_s == sum(forward.values()) * keys + own
    assert found[op.name].backward_comm_s == sum(backward.values()) * keys + own


def test_repeated_keys_are_exchanged_with_a_head_for_each_of_queries(
    blocks: dict[int, BlockTrace],
) -> None:
    local = localize(blocks[TOKENS // 2], {}, 1)
    (op,) = (op for op in local.ops if is_exchanged(op))
    once, repeated = (exchanged(local, op, repeats_keys=given) for given in (False, True))
    assert repeated.keys == once.keys * HEADS // KV_HEADS == 2 * once.query
    assert replace(repeated, keys=once.keys) == once
    timer, own = Timer(Cluster.parse("1x8:a100"), 1), replace(workload(2), is_compiled=True)
    other = replace(own, engine=replace(own.engine, repeats_keys=True))
    # Compiled, nothing runs beside what is sent.
    few, many = (priced(local, timer, given)[op.name] for given in (own, other))
    assert few.backward_comm_s < many.backward_comm_s


def test_heads_that_do_not_divide_are_refused(blocks: dict[int, BlockTrace]) -> None:
    block = blocks[TOKENS // 4]
    local = localize(block, megatron_axes(block, 2), 2)
    with pytest.raises(ValueError, match="a rank has 4 of queries and 2 of keys"):
        priced(local, Timer(Cluster.parse("1x8:a100"), 2), workload(4, "all_to_all"))


def estimated(own: Shape, cluster: str, **options: Any) -> autoplan.Estimate:
    return autoplan.estimate(
        Decoder.on_meta(own), cluster, batch_of(own), global_batch_size=4, **options
    )


def test_ranks_of_one_sequence_share_states_as_data_parallel_ones_do() -> None:
    whole = estimated(shape(), "1x2:a100", dp=2, zero_stage=1)
    parts = estimated(shape(), "1x2:a100", dp=1, context_parallel=2, zero_stage=1)
    (one,), (other,) = whole.memory_by_category, parts.memory_by_category
    assert one["optimizer"] == other["optimizer"]
    assert one["parameters"] == other["parameters"]
    assert other["activations"] < one["activations"]
    assert parts.context_parallel == 2
    assert parts.time_by_category["context_parallel"] > 0
    assert "context_parallel" not in whole.time_by_category
    assert "with context_parallel=2" in str(parts)
    with pytest.raises(PlanError, match="context_parallel"):
        _ = parts.plan


def test_no_context_parallelism_is_a_degree_of_one() -> None:
    assert estimated(shape(), "1x2:a100", context_parallel=1) == estimated(shape(), "1x2:a100")


class Mixing(nn.Module):
    """Reads activations in some way before attention."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.read = read
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(tokens)
        hidden = hidden + self.read(hidden)
        hidden = nn.functional.scaled_dot_product_attention(hidden, hidden, hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("own", "options", "reason"),
    [
        (shape(), {"context_parallel": 3}, "must divide the 64 tokens"),
        (shape(6), {"context_parallel": 2, "dp": 1}, "6 tokens under a causal mask .* 4 chunks"),
        (shape(), {"context_parallel": 0}, "context_parallel=0: must be at least 1"),
        (shape(), {"context_parallel": 2, "dp": 2}, "dp=2 .* context_parallel=2 is not the 2"),
        (shape(), {"context_parallel": 2, "axis_order": "tp-pp-dp"}, "use 'tp-dp-pp'"),
        (shape(), {"context_parallel": 2, "batch_dim": None}, "batch along dimension 0 or 1"),
        (
            shape(attention="unfused", kv_heads=HEADS),
            {"context_parallel": 2},
            "aten.matmul.default .* mixes",
        ),
    ],
)
def test_what_cannot_be_run_on_parts_of_sequences_says_why(
    own: Shape, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        estimated(own, "1x2:a100", **options)


def price_of(read: Callable[[torch.Tensor], torch.Tensor]) -> autoplan.Estimate:
    batch = {key: torch.zeros(1, 8, dtype=torch.int64) for key in ("tokens", "labels")}
    return autoplan.estimate(
        Mixing(read), "1x2:a100", batch, global_batch_size=2, dp=1, context_parallel=2
    )


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("cumsum.default", lambda hidden: hidden.cumsum(1)),
        ("mean.dim", lambda hidden: hidden.mean(1, keepdim=True)),
        ("max.dim", lambda hidden: hidden.max(1, keepdim=True).values),
        ("max.dim", lambda hidden: hidden.max(1).values.unsqueeze(1)),
        ("sort.default", lambda hidden: hidden.sort(1).values),
        ("topk.default", lambda hidden: hidden.topk(1, 1).values),
    ],
)
def test_an_op_that_mixes_positions_is_named(
    name: str, read: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with pytest.raises(ValueError, match=rf"aten.{name} .* mixes positions"):
        price_of(read)


@pytest.mark.parametrize(
    "read",
    [
        lambda hidden: hidden.max(2, keepdim=True).values,
        lambda hidden: hidden.sort(2).values,
        lambda hidden: hidden.topk(1, 2).values,
    ],
)
def test_features_may_be_chosen_at_each_position(
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert price_of(read).context_parallel == 2


def test_a_batch_is_cut_along_its_positions() -> None:
    batch = {"tokens": torch.zeros(2, 8), "weights": torch.zeros(2), "name": "x"}
    found = token_slices(batch, 4)
    assert (found["tokens"].shape, found["weights"].shape, found["name"]) == ((2, 2), (2,), "x")
    assert token_slices([torch.zeros(8, 2, 3)], 4, 1)[0].shape == (2, 2, 3)
    with pytest.raises(ValueError, match="the same number of them along dimension 1, got 4, 8"):
        token_slices([torch.zeros(2, 8), torch.zeros(2, 4)], 2)
