"""Reserved memory: the allocator's rules, and steps replayed through them beside the peak."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.caching_allocator import CachingAllocator
from autoplan.cluster import Cluster
from autoplan.engines import LossKind, engine_named
from autoplan.estimating import estimate
from autoplan.flat_partitions import (
    PipeBuffers,
    gathered_pieces,
    pipe_buffers,
    reduced_buckets,
)
from autoplan.fusion import joined
from autoplan.graph import Trace
from autoplan.liveness import BlockEvents, block_memory, needed_marks
from autoplan.local import localize
from autoplan.losses import logits_bytes, with_loss
from autoplan.optimizers import Optimizer
from autoplan.plan import Recompute
from autoplan.plan_prices import plan_price
from autoplan.planner import make_planner
from autoplan.replay import Reserved, replayed
from autoplan.replay_groups import OutputCast, Parameter, ReplayedBlock
from autoplan.reserved import reserved_memory
from autoplan.settings import Setting, Workload
from autoplan.simple import simple_decisions
from autoplan.stage_ends import even_block_ends
from autoplan.tracer import trace
from autoplan.training_job import TrainingJob
from benchmarks.published_models import Decoder, Shape, batch_of
from tests.models_for_tests import LinearChain, mean_square

MIB = 2**20
CLUSTER = Cluster.parse("1x8:a100_sxm_80gb")
SHAPE = Shape(layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=4096, seq=128)


def test_segments_have_the_sizes_of_torch() -> None:
    allocator = CachingAllocator()
    for nbytes, reserved in ((1, 2), (MIB, 2), (MIB + 1, 22), (9 * MIB, 22), (25 * MIB + 1, 48)):
        allocator.allocate(nbytes)
        assert allocator.reserved == reserved * MIB
    assert allocator.allocated == 512 + MIB + MIB + 512 + 9 * MIB + 26 * MIB


def test_a_stream_takes_no_freed_block_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    allocator.free(allocator.allocate(30 * MIB, stream=1))
    allocator.allocate(30 * MIB, stream=0)
    assert allocator.reserved == 60 * MIB


def test_an_expandable_segment_grows_by_what_its_free_end_lacks() -> None:
    sizes = {}
    for is_expandable in (False, True):
        allocator = CachingAllocator(is_expandable=is_expandable)
        first, second = allocator.allocate(40 * MIB), allocator.allocate(60 * MIB)
        allocator.free(second)
        allocator.allocate(80 * MIB)
        allocator.free(first)
        sizes[is_expandable] = allocator.reserved // MIB
    assert sizes == {False: 180, True: 120}


def test_a_full_device_gives_back_free_segments_before_it_fails() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    first = allocator.allocate(60 * MIB)
    allocator.free(first)
    second = allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.is_exhausted) == (80 * MIB, False)
    allocator.allocate(30 * MIB)
    assert allocator.is_exhausted
    allocator.free(second)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 64 * MIB), st.integers(0, 2), st.integers(0, 9))),
    st.booleans(),
)
def test_live_blocks_never_overlap_and_all_comes_back(
    events: list[tuple[int, int, int]], is_expandable: bool
) -> None:
    allocator = CachingAllocator(is_expandable=is_expandable)
    live = []
    for nbytes, stream, choice in events:
        live.append(allocator.allocate(nbytes, stream))
        if choice < len(live):
            allocator.free(live.pop(choice))
        spans = sorted((b.address, b.address + b.size) for b in live)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
        assert allocator.allocated == sum(b.size for b in live) <= allocator.reserved
    for block in live:
        allocator.free(block)
    before = allocator.reserved
    for nbytes, stream, _ in events[:1]:
        allocator.allocate(nbytes, stream)
    assert allocator.reserved == before


@pytest.fixture(scope="module")
def traces() -> dict[int, Trace]:
    model, batch = Decoder.on_meta(SHAPE), batch_of(SHAPE)
    return {1: trace(model, batch, None, microbatch_size=1, backend="cuda")}


@pytest.mark.parametrize(
    ("dp", "pp", "zero", "rows", "recompute"),
    [
        (8, 1, 0, 1, "none"),
        (8, 1, 1, 2, "full"),
        (8, 1, 2, 2, "none"),
        (8, 1, 3, 2, "full"),
        (4, 2, 1, 4, "none"),
        (4, 2, 3, 4, "none"),
    ],
)
def test_replayed_steps_take_what_the_memory_model_says(
    traces: dict[int, Trace], dp: int, pp: int, zero: int, rows: int, recompute: str
) -> None:
    """Tensor by tensor the peak is the same, but for rounding to 512 bytes."""
    planner = make_planner(
        TrainingJob(
            Decoder.on_meta(SHAPE),
            CLUSTER,
            batch_of(SHAPE),
            global_batch_size=dp * rows,
            mixed_precision="bfloat16",
        )
    )
    planner.traces.captured = traces
    setting = Setting(
        dp=dp,
        tp=1,
        pp=pp,
        zero_stage=zero,
        microbatch_size=1,
        num_microbatches=rows,
        schedule="none" if pp == 1 else "1f1b",
    )
    decisions = simple_decisions(planner, setting, recompute)
    ends = even_block_ends(planner.trace(1), pp)
    pricer = planner.pricer(1)
    replayed = reserved_memory(pricer, setting, ends, decisions, is_expandable=False)
    priced = plan_price(pricer, setting, ends, decisions)
    for stage, memory in zip(replayed, priced.memory, strict=True):
        assert stage.allocated == pytest.approx(
            memory.peak - memory.by_category["reserve"], rel=0.05
        )
        assert stage.allocated <= stage.reserved


def test_reserved_memory_is_given_only_where_an_allocator_is_named() -> None:
    options: dict[str, Any] = {"loss_fn": mean_square, "dp": 4}
    cluster = Cluster.parse("1x4:cpu")
    model, batch = LinearChain(width=16, depth=3), torch.randn(8, 16)
    assert estimate(model, cluster, batch, **options).reserved_memory_bytes is None
    found = estimate(model, cluster, batch, allocator="expandable", **options)
    assert found.reserved_memory_bytes is not None
    assert found.reserved_memory_bytes[0] >= 2 * MIB
    with pytest.raises(ValueError, match="allocator='best'; allowed are segments, expandable"):
        estimate(model, cluster, batch, allocator="best", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "kept"), [("torch", 4), ("in_place", 4), ("compiled", 2), ("fused", 0)]
)
def test_loss_keeps_what_its_implementation_keeps(
    traces: dict[int, Trace], kind: LossKind, kept: int
) -> None:
    head = traces[1].blocks[traces[1].calls[-1].block]
    local = localize(head, {}, 1)
    logits = SHAPE.seq * SHAPE.vocab
    none = Recompute(mode="none")
    memory = block_memory(with_loss(local, kind), none)
    assert logits_bytes(local) == 4 * logits
    assert memory.kept == pytest.approx(kept * logits, rel=0.15, abs=0.3 * logits)
    # Forward holds logits and float32 probabilities; torch's own copies to float32 first.
    forward = {"torch": 8, "in_place": 6, "compiled": 2, "fused": 2}[kind]
    assert memory.forward_peak == pytest.approx(forward * logits, rel=0.15)


def test_a_compiled_block_holds_less_and_drops_marks_that_nothing_reads(
    traces: dict[int, Trace],
) -> None:
    block = next(b for b in traces[1].blocks if not b.is_glue)
    local = localize(block, {}, 1)
    none = Recompute(mode="none")
    assert block_memory(joined(local), none).kept <= block_memory(local, none).kept
    products = tuple(op.name for op in block.ops if op.kind == "gemm")
    marked = Recompute(mode="selective", keep=products)
    assert needed_marks(joined(local), marked).keep == products[:-1]


def test_stand_ins_are_one_weight_of_each_shape(traces: dict[int, Trace]) -> None:
    sizes = {}
    for engine in ("megatron", "megatron-te"):
        found = estimate(
            Decoder.on_meta(SHAPE),
            CLUSTER,
            batch_of(SHAPE),
            global_batch_size=8,
            mixed_precision="bfloat16",
            engine=engine,
            traces=traces,
        )
        sizes[engine] = max(found.peak_memory_bytes)
    width, wide = SHAPE.hidden, SHAPE.ffn
    # Query, key, value and output have one shape.
    assert sizes["megatron-te"] - sizes["megatron"] == 2 * (width * width + 2 * width * wide)


def test_flat_copies_of_deepspeed_follow_its_buckets() -> None:
    assert reduced_buckets([300_000_000, 100_000_000, 200_000_000]) == [400_000_000, 200_000_000]
    assert gathered_pieces(1_000_000_001, 4) == [500_000_000, 500_000_004]
    assert gathered_pieces(10, 4) == [12]


def _deepspeed_steps(
    parameter_mib: int, logits_mib: int, pipe: PipeBuffers | None = None
) -> Reserved:
    """Return what a stage of one block takes, whose forward makes logits and a loss of them."""
    events = BlockEvents(
        forward=(("logits", logits_mib * MIB), ("loss:internal", 2 * logits_mib * MIB)),
        backward=(),
        kept=frozenset({"loss:internal"}),
        outputs={},
        coming={},
        going={},
    )
    size = parameter_mib * MIB
    block = ReplayedBlock(
        events=events,
        accumulating=events,
        is_glue=False,
        inputs={},
        outputs={},
        held=frozenset(),
        parameters=(Parameter(name="weight", stored=2 * size, gathered=size, is_trained=True),),
        states={},
        cast=OutputCast(
            before="loss:internal", source="logits", nbytes=2 * logits_mib * MIB, num_kept=2
        ),
    )
    setting = Setting(
        dp=4, tp=1, pp=1, zero_stage=1, microbatch_size=1, num_microbatches=4, schedule="none"
    )
    workload = Workload(
        global_batch_size=16,
        optimizer=Optimizer.named("AdamW", is_foreach=True),
        mixed_precision="bfloat16",
        parameter_bytes_per_traced_byte=2,
        engine=engine_named("megatron-deepspeed"),
    )
    return replayed((block,), setting, workload, part_sizes=(1,), pipe=pipe)


def test_a_pipeline_engine_keeps_logits_until_the_second_next_are_made() -> None:
    resident = 1 + 3 * 2 / 4  # 16-bit parameters, and a quarter of copies and two states
    found = _deepspeed_steps(1, 40)
    # At the third cast: two older ones, its own, and the logits that it reads.
    assert found.allocated == pytest.approx((resident + 3 * 80 + 40) * MIB, rel=0.01)


def test_parameters_that_are_laid_flat_leave_what_they_were_made_in_reserved() -> None:
    parameter, share = 400, 200
    found = _deepspeed_steps(parameter, 1)
    # Made apart, then flat; a rank's copies, states and gradients. What is gathered finds room.
    assert found.reserved == pytest.approx((2 * parameter + 4 * share) * MIB, rel=0.01)


def test_a_pipeline_engine_holds_what_it_sends_and_receives() -> None:
    entering, leaving = 100 * MIB, 60 * MIB
    whole, sliced = (pipe_buffers(entering, leaving, tp) for tp in (1, 2))
    assert whole == PipeBuffers(standing=160 * MIB, received=100 * MIB, sent=60 * MIB)
    assert sliced == PipeBuffers(standing=80 * MIB, received=0, sent=30 * MIB, is_sliced=True)
    alone = _deepspeed_steps(1, 40).allocated
    held = _deepspeed_steps(1, 40, pipe=replace(whole, sent=0)).allocated
    assert held - alone == (160 + 100) * MIB
    assert _deepspeed_steps(1, 40, pipe=sliced).allocated - alone == pytest.approx(80 * MIB)


@pytest.mark.parametrize("pp", [2, 4])
def test_replayed_stages_of_a_pipeline_engine_take_what_the_memory_model_says(
    traces: dict[int, Trace], pp: int
) -> None:
    found = estimate(
        Decoder.on_meta(SHAPE),
        CLUSTER,
        batch_of(SHAPE),
        global_batch_size=8,
        dp=8 // pp,
        pp=pp,
        zero_stage=1,
        mixed_precision="bfloat16",
        engine="megatron-deepspeed",
        allocator="segments",
        traces=traces,
    )
    assert found.reserved_memory_bytes is not None
    reserve = [parts["reserve"] for parts in found.memory_by_category]
    for reserved, peak, outside in zip(
        found.reserved_memory_bytes, found.peak_memory_bytes, reserve, strict=True
    ):
        assert 0.95 * (peak - outside) <= reserved


def test_gradients_that_wait_whole_are_as_large_as_all_parameters(traces: dict[int, Trace]) -> None:
    engine = engine_named("litgpt")
    peaks = [
        max(
            estimate(
                Decoder.on_meta(SHAPE),
                CLUSTER,
                batch_of(SHAPE),
                global_batch_size=8,
                dp=8,
                zero_stage=3,
                engine=replace(engine, accumulates_whole=whole),
                traces=traces,
            ).peak_memory_bytes
        )
        for whole in (False, True)
    ]
    parameters = sum(p.numel() * 2 for p in Decoder.on_meta(SHAPE).parameters())
    assert peaks[1] - peaks[0] == parameters
