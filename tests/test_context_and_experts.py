"""Sequences and experts divided over the same ranks: the price of both follows from each alone.

With `context_parallel` c and `expert_parallel` e on dp * c data-parallel ranks of a stage:

    parameters, gradients, optimizer   those of e alone on dp * c ranks: what lies where is the same
    activations, working memory        those of c alone: a rank receives as many rows as it sends
    exchanges of keys                  those of c alone
    gradients and optimizer, seconds   those of e alone
    exchanges of rows                  an all-to-all over e ranks of the rows of 1 / c of the tokens
    products                           those of c alone, and copies of rows into order
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import autoplan
from autoplan.cluster import Cluster
from autoplan.estimating import Estimate
from autoplan.expert_parallel import EXCHANGE, REORDER, ExpertParallel, divided
from autoplan.graph import BlockTrace, Trace
from autoplan.times import Timer
from benchmarks.published_experts import Experts
from benchmarks.published_models import Decoder, batch_of
from tests import small_experts
from tests.small_experts import CHOSEN, COUNT, MEGATRON, mixtral

WIDTH, TOKENS, ROWS = 256, 4096, MEGATRON["global_batch_size"]
EXPERT_LAYERS = 2
SHAPE = replace(
    small_experts.SHAPE,
    layers=3,
    hidden=WIDTH,
    ffn=512,
    seq=TOKENS,
    experts=Experts(count=COUNT, chosen=CHOSEN, ffn=512, shared_ffn=128, dense_layers=1),
)
TRACES: dict[int, dict[int, Trace]] = {}
"""By context-parallel degree and micro-batch size."""


@cache
def price(cluster: str = "1x8:b200_sxm", *, context: int = 1, **options: Any) -> Estimate:
    return autoplan.estimate(
        Decoder.on_meta(SHAPE),
        cluster,
        batch_of(SHAPE),
        context_parallel=context,
        traces=TRACES.setdefault(context, {}),
        **{**MEGATRON, **options},
    )


def of_experts(context: int, experts: int) -> BlockTrace:
    """Return the block with experts on the tokens of one rank."""
    price(context=context)
    trace = divided(TRACES[context][1], ExpertParallel(degree=experts), 1)
    return next(b for b in trace.blocks if any(op.target == EXCHANGE for op in b.ops))


DEGREES = [(2, 4), (4, 2), (2, 8), (8, 8)]


@pytest.mark.parametrize(("context", "experts"), DEGREES)
def test_states_lie_as_with_experts_alone_on_as_many_ranks(context: int, experts: int) -> None:
    (both,) = price(context=context, expert_parallel=experts).memory_by_category
    (alone,) = price(expert_parallel=experts).memory_by_category
    (neither,) = price().memory_by_category
    for name in ("parameters", "gradients", "optimizer"):
        assert both[name] == alone[name]
    assert both["parameters"] < neither["parameters"]


@pytest.mark.parametrize(("context", "experts"), DEGREES)
def test_activations_are_those_of_a_part_of_the_tokens(context: int, experts: int) -> None:
    both = price(context=context, expert_parallel=experts)
    alone = price(context=context)
    for name in ("activations", "working"):
        assert both.memory_by_category[0][name] == alone.memory_by_category[0][name]
    assert both.peak_memory_bytes < price(expert_parallel=experts).peak_memory_bytes


@pytest.mark.parametrize("cluster", ["1x8:b200_sxm", "2x4:b200_sxm"])
@pytest.mark.parametrize(("context", "experts"), DEGREES)
def test_each_exchange_takes_what_it_takes_alone(cluster: str, context: int, experts: int) -> None:
    both = price(cluster, context=context, expert_parallel=experts).time_by_category
    sequences = price(cluster, context=context).time_by_category
    rows = price(cluster, expert_parallel=experts).time_by_category
    assert both["context_parallel"] == pytest.approx(sequences["context_parallel"])
    for name in ("zero", "optimizer"):
        assert both[name] == pytest.approx(rows[name])
    link = Cluster.parse(cluster).link_for(experts, 1)
    moved = [op.nbytes for op in of_experts(context, experts).ops if op.target == EXCHANGE]
    whole = [op.nbytes for op in of_experts(1, experts).ops if op.target == EXCHANGE]
    assert [context * nbytes for nbytes in moved] == whole
    one_way_s = sum(link.collective_time_s("all_to_all", nbytes, experts) for nbytes in moved)
    steps = ROWS * context // 8  # micro-batches of a row on 8 / context groups of ranks
    assert both["expert_parallel"] == pytest.approx(steps * EXPERT_LAYERS * 2 * one_way_s)


@pytest.mark.parametrize(("context", "experts"), DEGREES)
def test_products_take_as_long_as_with_a_part_of_the_tokens(context: int, experts: int) -> None:
    """Experts of a rank multiply the rows of others instead of those that others multiply."""
    both = price(context=context, expert_parallel=experts).time_by_category["compute"]
    alone = price(context=context).time_by_category["compute"]
    timer = Timer(Cluster.parse("1x8:b200_sxm"), 1, experts=ExpertParallel(degree=experts))
    copies = [
        timer.traced_time(op, op.options[0])
        for op in of_experts(context, experts).ops
        if op.target == REORDER
    ]
    assert bool(copies) == (experts < COUNT)
    copies_s = sum(time.forward_s + time.backward_s for time in copies)
    steps = ROWS * context // 8
    assert both - alone == pytest.approx(steps * EXPERT_LAYERS * copies_s)


def test_tensor_parallel_layers_and_stages_change_neither_law() -> None:
    options: dict[str, Any] = {"tp": 2, "pp": 2, "sequence_parallel": True}
    cluster = "2x8:b200_sxm"
    both = price(cluster, context=2, expert_parallel=4, **options)
    sequences = price(cluster, context=2, **options)
    rows = price(cluster, expert_parallel=4, **options)
    for stage, held in enumerate(both.memory_by_category):
        for name in ("parameters", "gradients", "optimizer"):
            assert held[name] == rows.memory_by_category[stage][name]
        assert held["activations"] == sequences.memory_by_category[stage]["activations"]
    assert both.time_by_category["context_parallel"] == pytest.approx(
        sequences.time_by_category["context_parallel"]
    )


def test_rows_that_are_sorted_by_expert_may_be_of_a_part_of_the_tokens() -> None:
    """Transformers sorts and counts the experts that rows chose; each rank does so with its own."""
    model, batch = mixtral()
    options: dict[str, Any] = {"global_batch_size": 16, "engine": "megatron", "zero_stage": 1}

    def price_of(**more: Any) -> Estimate:
        return autoplan.estimate(model, "1x8:h100", batch, **options, **more)

    both = price_of(context_parallel=2, expert_parallel=4)
    sequences, rows = price_of(context_parallel=2), price_of(expert_parallel=4)
    held = [price.memory_by_category[0] for price in (both, sequences, rows)]
    for name in ("parameters", "gradients", "optimizer"):
        assert held[0][name] == held[2][name]
    for name in ("activations", "working"):
        assert held[0][name] == held[1][name]
    times = [price.time_by_category for price in (both, sequences)]
    assert times[0]["context_parallel"] == pytest.approx(times[1]["context_parallel"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"context": 2, "dp": 4, "expert_parallel": 3},
            r"expert_parallel=3 .* the 8 ranks of a stage \(dp=4 \* tp=1 \* context_parallel=2\)",
        ),
        ({"context": 3, "expert_parallel": 4}, "context_parallel=3 must divide the 4096 tokens"),
        ({"context": 16, "expert_parallel": 8}, "context_parallel=16 is not the 8 devices"),
        (
            {"context": 2, "expert_parallel": 16, "cluster": "2x8:b200_sxm"},
            "expert_parallel=16 does not divide the 8 experts of block",
        ),
        (
            {"context": 2, "expert_parallel": 2, "axis_order": "tp-pp-dp"},
            "context_parallel=2 with axis_order='tp-pp-dp'",
        ),
        ({"context": 2, "expert_parallel": 2, "engine": "autoplan"}, "engines of Megatron-LM"),
    ],
)
def test_degrees_of_both_that_do_not_divide_say_which(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        price(**options)
