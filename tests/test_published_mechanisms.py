"""What prices published runs: layouts, folded recompute, schedules, engines, fused kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autoplan.cluster import Cluster
from autoplan.decomposed import beside_products, left_s
from autoplan.engines import ENGINES, MEGATRON, engine_named
from autoplan.fusion import fused_kernels
from autoplan.graph import BlockTrace, Trace
from autoplan.inner_recompute import attention_core, folded
from autoplan.liveness import block_memory
from autoplan.local import localize
from autoplan.nodes import NODES
from autoplan.optimizers import Optimizer
from autoplan.plan import Recompute
from autoplan.profiles.link import broadcast_time_s
from autoplan.resident import static_bytes
from autoplan.settings import Setting, Workload
from autoplan.stage_costs import GroupBytes
from autoplan.step_costs import (
    INTERFERENCE,
    data_parallel_times,
    exposed_s,
    pipeline_step_s,
)
from autoplan.tensor_layout import TOKEN_BORDERS, WHOLE_BORDERS, megatron_axes
from autoplan.times import OpTime
from autoplan.tracer import trace
from benchmarks.published_models import Decoder, Shape, batch_of

NONE = Recompute(mode="none")
ROWS, TOKENS, WIDTH, HEADS, DEGREE = 2, 64, 128, 8, 4


@pytest.fixture(scope="module")
def gpt() -> Trace:
    shape = Shape(
        layers=2,
        hidden=WIDTH,
        heads=HEADS,
        kv_heads=HEADS,
        ffn=4 * WIDTH,
        vocab=512,
        seq=TOKENS,
        dropout=True,
        attention="unfused",
        kernels="megatron",
    )
    return trace(
        Decoder.on_meta(shape), batch_of(shape), None, microbatch_size=ROWS, backend="cuda"
    )


def block_of(model: Trace) -> BlockTrace:
    return next(block for block in model.blocks if not block.is_glue)


def kept_sbh(block: BlockTrace, degree: int, *, sequence: bool, selective: bool) -> float:
    """Return kept bytes of a layer in units of tokens * rows * width."""
    axes = megatron_axes(block, degree, is_sequence_parallel=sequence) if degree > 1 else {}
    borders = TOKEN_BORDERS if sequence else WHOLE_BORDERS
    local = localize(block, axes, degree, borders=borders, regathers=True)
    if selective:
        local = folded(local, attention_core(block))
    return block_memory(local, NONE).kept / (ROWS * TOKENS * WIDTH)


@pytest.mark.parametrize(
    ("sequence", "selective", "formula"),
    [
        (False, False, 10 + 24 / DEGREE + 5 * HEADS * TOKENS / WIDTH / DEGREE),
        (True, False, (34 + 5 * HEADS * TOKENS / WIDTH) / DEGREE),
        (False, True, 10 + 24 / DEGREE),
        (True, True, 34 / DEGREE),
    ],
)
def test_kept_bytes_of_a_gpt_layer_are_those_of_korthikanti_2022_table_2(
    gpt: Trace, sequence: bool, selective: bool, formula: float
) -> None:
    statistics = 0.15  # means and deviations of two norms, which the table leaves out
    kept = kept_sbh(block_of(gpt), DEGREE, sequence=sequence, selective=selective)
    assert formula <= kept <= formula + statistics


def test_megatron_layout_has_two_reductions_forward_and_two_backward(gpt: Trace) -> None:
    block = block_of(gpt)
    for sequence, forward, backward in (
        (False, ["all_reduce"] * 2, ["all_reduce"] * 2),
        (True, ["all_gather", "reduce_scatter"] * 2, ["reduce_scatter", "all_gather"] * 2),
    ):
        axes = megatron_axes(block, DEGREE, is_sequence_parallel=sequence)
        borders = TOKEN_BORDERS if sequence else WHOLE_BORDERS
        local = localize(block, axes, DEGREE, borders=borders)
        states = {state.name for state in block.states}
        moved = [op.transition for op in local.ops if op.transition and op.inputs[0] not in states]
        assert [f for f, _ in moved if f not in ("", "slice")] == forward
        assert [b for _, b in moved if b not in ("", "slice")] == backward


def test_attention_core_is_the_scores_and_what_follows_until_the_values(gpt: Trace) -> None:
    block = block_of(gpt)
    kinds = [op.kind for op in block.ops if op.name in attention_core(block)]
    assert kinds[0] == kinds[-1] == "gemm"
    assert not any(op.kind == "gemm" for op in block.ops if op.name in attention_core(block)[1:-1])


def test_folded_region_keeps_less_and_needs_it_again_in_backward(gpt: Trace) -> None:
    block = block_of(gpt)
    local = localize(block, {}, 1)
    plain, nested = (
        block_memory(part, NONE) for part in (local, folded(local, attention_core(block)))
    )
    assert nested.kept < plain.kept
    assert nested.backward_peak - nested.kept > plain.backward_peak - plain.kept


def setting(pp: int, m: int, parts: int = 1) -> Setting:
    return Setting(
        dp=1,
        tp=1,
        pp=pp,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=m,
        schedule="interleaved" if parts > 1 else "1f1b",
        virtual_stages=parts,
    )


def test_interleaving_divides_the_bubble_by_the_virtual_stages() -> None:
    stages = [1.0, 1.0, 1.0, 1.0]
    assert pipeline_step_s(stages, setting(4, 8)) == 8 + 3
    assert pipeline_step_s(stages, setting(4, 8, 3)) == 8 + 3 / 3


def test_hidden_communication_costs_only_what_it_slows_down() -> None:
    assert exposed_s(0.0, 1.0) == 0.0
    assert exposed_s(0.5, 1.0) == pytest.approx((INTERFERENCE - 1) * 0.5)
    assert exposed_s(2.0, 1.0) == pytest.approx(1.0 + (INTERFERENCE - 1))
    assert exposed_s(2.0, 0.0) == 2.0


def test_megatron_holds_eighteen_bytes_a_parameter_and_shards_twelve() -> None:
    group = GroupBytes(stored=4000, trained=4000, gathered=2000, gathered_grads=2000)
    adam = Optimizer.named("AdamW", is_foreach=False)
    whole = static_bytes(group, setting(1, 1), adam, MEGATRON)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (2000, 4000, 12000)
    sharded = Setting(
        dp=4, tp=1, pp=1, zero_stage=1, microbatch_size=1, num_microbatches=1, schedule="none"
    )
    assert static_bytes(group, sharded, adam, MEGATRON).optimizer == 3000


def test_unknown_engine_is_refused_with_the_known_ones() -> None:
    assert engine_named("megatron") is ENGINES["megatron"]
    with pytest.raises(ValueError, match="engine='ddp'; allowed are autoplan, fsdp1"):
        engine_named("ddp")


def test_joint_kernels_never_move_more_than_their_parts(gpt: Trace) -> None:
    local = localize(block_of(gpt), {}, 1)
    joint = fused_kernels(local)
    apart = {op.name: op.op.forward_bytes for op in local.ops if op.op is not None}
    assert any(len(kernel.ops) > 1 for kernel in joint)
    for kernel in joint:
        assert kernel.forward_bytes <= sum(apart[name] for name in kernel.ops)


def test_whole_tensors_are_broadcast_to_those_that_share_states_and_reduced_over_all() -> None:
    group = GroupBytes(
        stored=2**28, trained=2**28, gathered=2**27, gathered_grads=2**27, trained_tensors=8
    )
    workload = Workload(
        global_batch_size=64,
        optimizer=Optimizer.named("AdamW", is_foreach=False),
        mixed_precision="bfloat16",
        engine=ENGINES["internevo"],
    )
    cluster = Cluster.parse("8x8:a100")
    setting = Setting(
        dp=64, tp=1, pp=1, zero_stage=1, microbatch_size=1, num_microbatches=1, schedule="1f1b"
    )
    wide = data_parallel_times(group, setting, workload, cluster)
    narrow = data_parallel_times(group, replace(setting, dp_replicate=8), workload, cluster)
    link = cluster.link_for(64, 1)
    assert wide.once_gather_s == pytest.approx(8 * broadcast_time_s(2**24, 64, link))
    assert narrow.once_gather_s == pytest.approx(8 * broadcast_time_s(2**24, 8, cluster.intra))
    assert wide.once_reduce_s == narrow.once_reduce_s
    assert wide.once_reduce_s == link.collective_time_s("all_reduce", 2**27, 64)


def test_a_collective_in_pieces_leaves_one_of_them_exposed(gpt: Trace) -> None:
    assert left_s(1.0, 4.0, 4, 1.0) == pytest.approx(0.25)
    assert left_s(4.0, 1.0, 4, 1.0) == pytest.approx(3.25)
    assert left_s(1.0, 4.0, 4, 1.2) == pytest.approx(0.25 + 0.2 * 0.75)
    assert left_s(0.0, 1.0, 4, 1.2) == 0.0
    block = block_of(gpt)
    axes = megatron_axes(block, DEGREE, is_sequence_parallel=True)
    local = localize(block, axes, DEGREE, borders=TOKEN_BORDERS)
    times = {
        op.name: OpTime(forward_s=0.0, backward_s=0.0, forward_comm_s=1.0, backward_comm_s=1.0)
        if op.op is None
        else OpTime(forward_s=8.0, backward_s=16.0)
        for op in local.ops
    }
    found = beside_products(local, times, DEGREE, 1.0)
    changed = {name: time for name, time in found.items() if time != times[name]}
    # Before both projections, after both others.
    assert len(changed) == 4
    for time in changed.values():
        assert time.forward_comm_s == time.backward_comm_s == pytest.approx(0.25)
        assert time.forward_s == time.backward_s == 0.0


@pytest.mark.parametrize("name", NODES)
def test_preset_of_a_node_is_a_cluster_of_any_number_of_them(name: str, tmp_path: Path) -> None:
    one, four = Cluster.parse(name), Cluster.parse(f"4:{name}")
    assert (one.num_nodes, four.num_nodes) == (1, 4)
    assert one.device.name == NODES[name].device
    file = tmp_path / "cluster.yaml"
    file.write_text(f"num_nodes: 4\nnode: {name}\n")
    assert Cluster.parse(file).inter.bytes_per_s == four.inter.bytes_per_s


def test_preset_with_another_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("node: p5\ndevice: h100\n")
    with pytest.raises(ValueError, match="the node p5 has one already"):
        Cluster.parse(file)
