"""Expert parallelism as `estimate` prices it: bytes of a rank, exchanges, groups of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoplan
from autoplan.cluster import Cluster
from autoplan.estimating import Estimate
from autoplan.expert_parallel import (
    EXCHANGE,
    REORDER,
    STACKED,
    ExpertParallel,
    divided,
    expert_states,
)
from autoplan.graph import BlockTrace, Trace
from autoplan.local import localize
from autoplan.tensor_layout import TOKEN_BORDERS, megatron_axes
from autoplan.times import Timer
from autoplan.tracer import trace
from benchmarks.published_experts import Experts, Latent
from benchmarks.published_models import Decoder, Shape, batch_of
from tests.small_experts import CHOSEN, COUNT, MEGATRON, SHAPE, mixtral

WIDTH, FFN, TOKENS = SHAPE.hidden, 128, SHAPE.seq
EXPERT_BYTES = 2 * COUNT * 3 * WIDTH * FFN  # of a layer, in bfloat16


@pytest.fixture(scope="module")
def whole() -> Trace:
    return trace(Decoder.on_meta(SHAPE), batch_of(SHAPE), microbatch_size=1, backend="cuda")


def of_experts(model: Trace) -> BlockTrace:
    return next(block for block in model.blocks if expert_states(block))


def price(cluster: str = "1x8:b200_sxm", **options: Any) -> Estimate:
    return autoplan.estimate(
        Decoder.on_meta(SHAPE), cluster, batch_of(SHAPE), **{**MEGATRON, **options}
    )


def test_one_rank_for_all_experts_is_no_expert_parallelism(whole: Trace) -> None:
    assert divided(whole, ExpertParallel(degree=1), 1) is whole
    assert price(expert_parallel=1) == price()


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_a_rank_holds_its_share_of_experts_and_computes_as_much(whole: Trace, degree: int) -> None:
    before, after = of_experts(whole), of_experts(divided(whole, ExpertParallel(degree=degree), 1))
    names = expert_states(before)
    held = [sum(s.nbytes for s in b.states if s.name in names) for b in (before, after)]
    assert held == [EXPERT_BYTES, EXPERT_BYTES // degree]
    rest = [sum(s.nbytes for s in b.states if s.name not in names) for b in (before, after)]
    assert rest[0] == rest[1]
    for old, new in zip(
        (op for op in before.ops if op.target in STACKED),
        (op for op in after.ops if op.target in STACKED),
        strict=True,
    ):
        assert old.gemm is not None
        assert new.gemm is not None
        assert new.gemm.batch == COUNT // degree
        assert new.gemm.batch * new.gemm.m == old.gemm.batch * old.gemm.m
        assert (new.gemm.n, new.gemm.k) == (old.gemm.n, old.gemm.k)


def test_rows_go_to_experts_and_back_in_two_exchanges_of_the_formula(whole: Trace) -> None:
    block = of_experts(divided(whole, ExpertParallel(degree=4), 1))
    exchanged = [op for op in block.ops if op.target == EXCHANGE]
    rows = 2 * TOKENS * CHOSEN * WIDTH  # bfloat16
    assert sorted(op.nbytes for op in exchanged) == [2 * TOKENS * CHOSEN, rows, rows]
    cluster = Cluster.parse("1x8:b200_sxm")
    timer = Timer(cluster, 1, experts=ExpertParallel(degree=4))
    for op in exchanged:
        found = timer.traced_time(op, op.options[0])
        once = cluster.intra.collective_time_s("all_to_all", op.nbytes, 4)
        assert (found.forward_comm_s, found.backward_comm_s) == (once, once)
        assert found.forward_s == found.backward_s == 0


def test_rows_are_put_in_order_only_where_a_rank_has_several_experts(whole: Trace) -> None:
    counts = [
        sum(op.target == REORDER for op in of_experts(divided(whole, degrees, 1)).ops)
        for degrees in (ExpertParallel(degree=4), ExpertParallel(degree=8))
    ]
    assert counts == [3, 0]


def test_what_enters_experts_is_kept_after_it_was_exchanged(whole: Trace) -> None:
    block = of_experts(divided(whole, ExpertParallel(degree=4), 1))
    first = next(op for op in block.ops if op.target in STACKED)
    (kept,) = first.saved
    assert kept.value == first.inputs[0]
    assert next(op.target for op in block.ops if op.name == kept.value) == REORDER


def test_an_exchange_between_nodes_takes_longer_than_inside_one() -> None:
    near, far = (
        price(cluster, expert_parallel=8, dp=8, tp=1).time_by_category["expert_parallel"]
        for cluster in ("1x8:b200_sxm", "2x4:b200_sxm")
    )
    assert far > 1.5 * near > 0


def test_optimizer_states_of_experts_are_shared_by_those_that_hold_the_same() -> None:
    bytes_ = {
        degree: price(expert_parallel=degree).memory_by_category[0] for degree in (1, 2, 4, 8)
    }
    layers = SHAPE.layers - 2
    for degree, held in bytes_.items():
        spared = layers * EXPERT_BYTES * (1 - 1 / degree)
        assert bytes_[1]["parameters"] - held["parameters"] == spared
        # float32 copies and two states, on 8 / degree ranks of 1 / degree of the experts.
        assert abs(bytes_[1]["optimizer"] - held["optimizer"]) <= 8 * 12


def test_experts_of_more_copies_are_reduced_over_them_alone() -> None:
    all_experts, half = (
        price(expert_parallel=degree).time_by_category["zero"] for degree in (8, 2)
    )
    assert all_experts < half  # with 8 of 8 ranks nothing of experts is left to reduce


@pytest.mark.parametrize("shared", [1, 2])
def test_tensor_parallel_layers_hand_slices_of_tokens_to_experts(shared: int) -> None:
    degrees = ExpertParallel(degree=2, tensor_parallel=shared)
    model = trace(Decoder.on_meta(SHAPE), batch_of(SHAPE), microbatch_size=1, backend="cuda")
    block = of_experts(divided(model, degrees, 2))
    axes = megatron_axes(block, 2, is_sequence_parallel=True)
    local = localize(block, axes, 2, borders=TOKEN_BORDERS, regathers=True)
    names = expert_states(block)
    held = sum(local.state_bytes[name] for name in names)
    assert held == EXPERT_BYTES // 2 // shared
    moved = sum(op.nbytes for op in local.ops if op.op and op.op.target == EXCHANGE)
    assert moved == (2 * 2 * TOKENS * CHOSEN * WIDTH + 2 * TOKENS * CHOSEN) // 2
    kept = {owner for op in local.ops if op.op and op.op.target in STACKED for owner in op.saved}
    rows = [n for n in kept if "__ordered" in n and n in local.value_bytes]
    whole_rows = 2 * TOKENS * CHOSEN * WIDTH
    assert [local.value_bytes[name] for name in rows] == [whole_rows * shared // 2]
    router = next(op for op in local.ops if op.op and op.op.fqn.endswith("router"))
    assert router.option.gemm_dim == "m"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_parallel": 3}, "does not divide the 8 ranks of a stage"),
        ({"expert_parallel": 0}, "must be at least 1"),
        ({"expert_parallel": 2, "expert_tensor_parallel": 4}, "the second 1 or tp=1"),
        ({"expert_parallel": 2, "engine": "autoplan"}, "the engines of Megatron-LM"),
        ({"expert_parallel": 2, "engine": "megatron-deepspeed"}, "not megatron-deepspeed"),
        ({"expert_parallel": 2, "tp": 2}, "needs sequence_parallel=True"),
        ({"expert_parallel": 2, "axis_order": "tp-pp-dp"}, "needs axis_order='tp-dp-pp'"),
        (
            {"expert_parallel": 16, "cluster": "2x8:b200_sxm"},
            "does not divide the 8 experts of block",
        ),
    ],
)
def test_what_expert_parallelism_cannot_be_says_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        price(**options)


def test_a_model_without_experts_cannot_divide_them() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match="no product of rows with a matrix per expert"):
        autoplan.estimate(
            model,
            "1x8:b200_sxm",
            torch.zeros(1, 8),
            loss_fn=lambda output: output.float().mean(),
            global_batch_size=8,
            engine="megatron",
            expert_parallel=2,
        )


def test_experts_of_transformers_are_divided_with_their_transposed_matrices() -> None:
    model, batch = mixtral()
    options: dict[str, Any] = {"global_batch_size": 16, "engine": "megatron", "zero_stage": 1}
    traces: dict[int, Trace] = {}

    def price_of(**more: Any) -> Estimate:
        return autoplan.estimate(model, "1x8:h100", batch, traces=traces, **options, **more)

    alone, divided_ = price_of(), price_of(expert_parallel=4)
    held = [price.memory_by_category[0]["parameters"] for price in (alone, divided_)]
    assert held[0] - held[1] == 2 * EXPERT_BYTES * 3 // 4
    assert divided_.time_by_category["expert_parallel"] > 0
    with pytest.raises(ValueError, match=r"aten._grouped_mm.default .* cannot be sliced"):
        price_of(expert_parallel=4, tp=2, tensor_layout="megatron", sequence_parallel=True)


def test_grouped_products_take_the_time_that_was_measured_of_them() -> None:
    device = Cluster.parse("1x8:b200_sxm").device
    # gemm_efficiency.csv, group_matmul on B200, ng=32, M=1024, N=4096, K=7168, fwd: 1029.9 TFLOP/s.
    found = device.grouped_time_s(1024, 4096, 7168, dtype="bfloat16", groups=32)
    assert found.how == "measured"
    assert found.time_s == pytest.approx(32 * 2 * 1024 * 4096 * 7168 / 1029e12, rel=0.01)
    h100 = Cluster.parse("1x8:h100_sxm_80gb").device
    assert h100.grouped_time_s(64, 64, 64, dtype="bfloat16", groups=4) == h100.gemm_time_s(
        64, 64, 64, dtype="bfloat16", batch=4
    )


MIXTRAL = replace(
    SHAPE,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=32000,
    seq=64,
    experts=Experts(count=8, chosen=2, ffn=14336),
)
LATENT = Latent(query_rank=1536, key_rank=512, key=128, position=64, value=128)


def _deepseek(layers: int, hidden: int, ffn: int, vocab: int, experts: Experts) -> Shape:
    return replace(
        SHAPE,
        layers=layers,
        hidden=hidden,
        heads=128,
        kv_heads=128,
        ffn=ffn,
        vocab=vocab,
        seq=64,
        experts=experts,
        latent=LATENT,
    )


@pytest.mark.parametrize(
    ("shape", "billions"),
    [
        # Jiang et al. 2024, Mixtral of Experts: 46.7; DeepSeek-V2: 236; DeepSeek-V3: 671.
        (MIXTRAL, 46.7),
        (
            _deepseek(
                60,
                5120,
                12288,
                102400,
                Experts(count=160, chosen=6, ffn=1536, shared_ffn=3072, dense_layers=1),
            ),
            235.7,
        ),
        (
            _deepseek(
                61,
                7168,
                18432,
                129280,
                Experts(count=256, chosen=8, ffn=2048, shared_ffn=2048, dense_layers=3),
            ),
            671.0,
        ),
    ],
)
def test_published_models_have_the_parameters_that_their_papers_state(
    shape: Shape, billions: float
) -> None:
    found = sum(p.numel() for p in Decoder.on_meta(shape).parameters())
    assert found / 1e9 == pytest.approx(billions, abs=0.06)
