"""What fine-tuning holds: adapters on frozen weights, narrow states, steps in the backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoplan.cluster import Cluster
from autoplan.engines import AUTOPLAN, Engine
from autoplan.estimating import Estimate, estimate
from autoplan.fusion import joined, with_narrow_operands
from autoplan.graph import Trace
from autoplan.liveness import block_events, block_memory
from autoplan.local import localize
from autoplan.optimizers import Optimizer
from autoplan.plan import Recompute
from autoplan.tracer import trace
from benchmarks.published_models import Adapter, Decoder, Shape
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import LinearChain, mean_square

WIDTH, DEPTH, DP = 16, 3, 4
CLUSTER = Cluster.parse(f"1x{DP}:cpu").with_memory("8GiB", reserve_bytes=0)
SHAPE = Shape(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=64,
    vocab=64,
    seq=8,
    norm="rms",
    position="none",
    activation="swiglu",
    is_tied=False,
    has_bias=False,
    adapter=Adapter(rank=2, targets=("query", "value", "down")),
)
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(SHAPE.vocab, (2, SHAPE.seq), generator=GENERATOR)
BATCH = {"tokens": TOKENS, "labels": TOKENS.roll(1, 1)}


def priced(engine: Engine = AUTOPLAN, **options: Any) -> Estimate:
    model = LinearChain(width=WIDTH, depth=DEPTH)
    batch = torch.zeros(2 * DP, WIDTH)
    return estimate(model, CLUSTER, batch, loss_fn=mean_square, engine=engine, dp=DP, **options)


@pytest.fixture(scope="module")
def adapted() -> tuple[Decoder, Trace]:
    model = Decoder(SHAPE).train()
    return model, trace(model, BATCH, None, microbatch_size=2)


def test_frozen_weights_keep_what_autograd_keeps(adapted: tuple[Decoder, Trace]) -> None:
    model, traced = adapted
    assert kept_by_trace(traced) == kept_by_autograd(model, lambda: model(**BATCH))


def test_only_adapters_have_gradients_and_optimizer_state(adapted: tuple[Decoder, Trace]) -> None:
    model, _ = adapted
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in model.parameters())
    found = estimate(model, "1x1:cpu", BATCH, microbatch_size=2)
    parts = found.memory_by_category[0]
    assert parts["parameters"] == 4 * whole
    assert parts["optimizer"] == 8 * trained


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("name", ["AdamW8bit", "adamw_8bit", "Adam8bit"])
def test_narrow_states_take_a_byte_an_element_whatever_the_parameter(
    name: str, item_bytes: int
) -> None:
    found = Optimizer.named(name, is_foreach=True, item_bytes=item_bytes)
    elements = 1 << 20
    sizes = found.state_sizes(elements * item_bytes)
    assert sum(sizes) == pytest.approx(2 * elements, rel=0.02)
    assert sum(sizes) == int(elements * item_bytes * found.state_bytes_per_byte)
    assert len(sizes) == 2


@pytest.mark.parametrize("name", ["PagedAdamW8bit", "paged_adamw_8bit", "PagedAdamW"])
def test_paged_states_need_nothing_of_the_device_but_move(name: str) -> None:
    found = Optimizer.named(name, is_foreach=True)
    assert found.state_sizes(1 << 20) == ()
    assert found.traffic_bytes_per_byte > 3


def test_an_unknown_optimizer_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match="'Lion' is not known; known are adamw"):
        Optimizer.named("Lion", is_foreach=True)
    with pytest.raises(ValueError, match="'paged sgd' is not known"):
        Optimizer.named("paged sgd", is_foreach=True)


def test_estimate_counts_narrow_states() -> None:
    wide, narrow = (
        priced(optimizer=name).memory_by_category[0]["optimizer"] for name in ("AdamW", "AdamW8bit")
    )
    assert narrow == pytest.approx(wide / 4, rel=0.02)


def test_a_step_in_the_backward_holds_the_gradient_of_one_block_at_most() -> None:
    one = estimate(
        LinearChain(width=64, depth=6), "1x1:cpu", torch.zeros(1, 64), loss_fn=mean_square
    )
    stepped = estimate(
        LinearChain(width=64, depth=6),
        "1x1:cpu",
        torch.zeros(1, 64),
        loss_fn=mean_square,
        engine=replace(AUTOPLAN, name="own", steps_in_backward=True),
    )
    layer = 4 * (64 * 64 + 64)
    assert one.memory_by_category[0]["gradients"] > 4 * layer
    assert stepped.memory_by_category[0]["gradients"] <= layer


def test_gradients_go_through_a_bucket_and_parameters_stay_up_to_a_number_of_them() -> None:
    elements = 10_000
    bucket = replace(AUTOPLAN, name="own", bucket_elements=elements)
    twice = replace(bucket, bucket_elements=2 * elements)
    for zero in (0, 1, 2, 3):
        peaks = [priced(e, zero_stage=zero).peak_memory_bytes[0] for e in (bucket, twice)]
        assert peaks[1] - peaks[0] == (2 * elements if zero else 0)
        assert peaks[0] <= priced(zero_stage=zero).peak_memory_bytes[0] + 2 * elements
    whole = sum(4 * p.numel() for p in LinearChain(width=WIDTH, depth=DEPTH).parameters())
    plain, few, half, every, more = (
        priced(replace(AUTOPLAN, name="own", live_elements=n), zero_stage=3).peak_memory_bytes[0]
        for n in (0, 1, whole // 4, whole // 2, whole)
    )
    assert few <= plain + 2 < half < every == more <= plain + whole


def test_a_compiler_writes_operands_of_float8_products_narrow_unless_they_are_kept(
    adapted: tuple[Decoder, Trace],
) -> None:
    block = next(b for b in adapted[1].blocks if not b.is_glue)
    local = joined(localize(block, {}, 1))
    narrow = with_narrow_operands(local)
    changed = {op.name: op for op in narrow.ops if op.unkept_bytes is not None}
    assert changed
    assert all(4 * (op.unkept_bytes or 0) == op.nbytes for op in changed.values())
    none, full = Recompute(mode="none"), Recompute(mode="full")
    assert block_memory(narrow, none).kept == block_memory(local, none).kept
    assert block_memory(narrow, full).backward_peak == block_memory(local, full).backward_peak
    made = [sum(n for _, n in block_events(b, full).forward) for b in (local, narrow)]
    assert made[0] - made[1] == sum(op.nbytes - (op.unkept_bytes or 0) for op in changed.values())
