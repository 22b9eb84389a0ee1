from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoplan.axes import cut, equate, fresh, leaves
from autoplan.graph import Placement, ShardOption
from autoplan.program import BlockGraph, Op, Ref, State, TensorMeta
from autoplan.sharding import check_axes, layout_parameters, shard_options, transition
from tests.models import MODELS, blocks_of

Options = dict[str, tuple[ShardOption, ...]]


def _found(graph: BlockGraph) -> tuple[Options, dict[str, dict[str, ShardOption]]]:
    options = shard_options(graph)
    return options, {name: {o.axis: o for o in listed} for name, listed in options.items()}


def _op(graph: BlockGraph, target: str, number: int = 0) -> str:
    return [op.name for op in graph.ops if op.target_name.startswith(target)][number]


@pytest.mark.parametrize("name", MODELS)
def test_whole_comes_first_and_options_are_distinct(name: str) -> None:
    for graph in blocks_of(name).values():
        for op, (first, *others) in shard_options(graph).items():
            assert (first.axis, first.output, first.is_split) == ("whole", "R", False)
            assert len({o.axis for o in (first, *others)}) == 1 + len(others)
            assert len({(o.inputs, o.output) for o in (first, *others)}) == 1 + len(others), op


@pytest.mark.parametrize("name", MODELS)
def test_sliced_dims_divide_and_the_batch_is_never_sliced(name: str) -> None:
    for graph in blocks_of(name).values():
        for op in graph.ops:
            for option in shard_options(graph)[op.name]:
                places = zip((*op.inputs(), op.name), (*option.inputs, option.output), strict=True)
                for value, text in places:
                    placement, meta = Placement.parse(text), graph.meta(value)
                    if placement.kind != "shard" or meta is None:
                        continue
                    size = meta.shape[placement.dim]
                    assert size % (placement.outer * option.size) == 0
                    if value in graph.inputs and len(meta.shape) == 3:
                        assert placement.dim != 0


def test_llama_heads_are_the_key_value_heads() -> None:
    graph = blocks_of("llama")["block0"]
    _, found = _found(graph)
    attention = found[_op(graph, "aten.scaled_dot_product")]
    assert attention["heads"].size == 4
    assert attention["heads"].inputs == ("S(1)", "S(1)", "S(1)")
    assert "sequence" not in attention
    query, key, _, out, gate, _, down = (
        found[op.name] for op in graph.ops if op.target_name == "aten.linear.default"
    )
    for column in (query, key):
        assert column["heads"].inputs == ("R*", "S(0)")
        assert (column["heads"].output, column["heads"].gemm_dim) == ("S(2)", "n")
    assert (out["heads"].inputs, out["heads"].output) == (("S(2)", "S(1)"), "P")
    inner = next(axis for axis in gate if axis in down and gate[axis].gemm_dim == "n")
    assert (gate[inner].size, down[inner].gemm_dim, down[inner].output) == (48, "k", "P")


def test_query_groups_can_be_sliced_alone_where_there_is_one_key_value_head() -> None:
    graph = blocks_of("llama_one_kv_head")["block0"]
    _, found = _found(graph)
    option = found[_op(graph, "aten.scaled_dot_product")]["heads"]
    assert (option.size, option.inputs, option.output) == (8, ("S(1)", "R*", "R*"), "S(1)")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt"])
def test_norms_can_be_sliced_along_the_sequence_only(name: str) -> None:
    graph = blocks_of(name)["glue1"]
    _, found = _found(graph)
    kind = "aten.mean" if name == "llama" else "aten.layer_norm"
    option = found[_op(graph, kind)]
    assert set(option) == {"whole", "sequence"}
    assert option["sequence"].inputs == ("S(1)", "R*", "R*")[: len(option["whole"].inputs)]


def test_gpt2_fused_projection_has_three_pieces() -> None:
    graph = blocks_of("gpt2")["block0"]
    _, found = _found(graph)
    fused = found[_op(graph, "aten.addmm")]["heads"]
    assert (fused.size, fused.inputs, fused.output) == (4, ("S(0,3)", "R*", "S(1,3)"), "S(1,3)")
    split = found[_op(graph, "aten.split")]["heads"]
    assert (split.inputs, split.output) == (("S(2,3)",), "S(2)")
    row = found[_op(graph, "aten.addmm", 1)]["heads"]
    assert (row.inputs, row.output, row.gemm_dim) == (("R", "S(1)", "S(0)"), "P", "k")


def test_flattened_sequence_lies_inside_the_batch() -> None:
    graph = blocks_of("gpt2")["block0"]
    _, found = _found(graph)
    assert found[_op(graph, "aten.view")]["sequence"].output == "S(0,2)"


@pytest.mark.parametrize("name", ["gpt", "gpt_plain_attention"])
def test_own_attention_is_sliced_by_heads_from_projection_to_projection(name: str) -> None:
    graph = blocks_of(name)["block0"]
    _, found = _found(graph)
    linears = [op.name for op in graph.ops if op.target_name == "aten.linear.default"][:2]
    between = [op.name for op in graph.ops]
    between = between[between.index(linears[0]) : between.index(linears[1]) + 1]
    assert all("heads" in found[name] for name in between)


def test_vocabulary_can_be_sliced_from_table_and_head_to_loss() -> None:
    graphs = blocks_of("llama")
    _, table = _found(graphs["glue0"])
    option = table[_op(graphs["glue0"], "aten.embedding")]["vocabulary"]
    assert (option.inputs, option.output) == (("S(0)", "R"), "P")
    _, found = _found(graphs["glue1"])
    loss = found[_op(graphs["glue1"], "aten.cross_entropy")]["vocabulary"]
    assert (loss.inputs, loss.output, loss.is_split) == (("S(1)", "R"), "R", True)
    assert found[_op(graphs["glue1"], "aten.linear")]["vocabulary"].output == "S(2)"


def test_unknown_op_is_only_whole() -> None:
    meta = TensorMeta((2, 8, 4), torch.float32, True)
    op = Op(
        name="v0",
        target=torch.ops.aten.cummax.default,
        args=(Ref("x0"), 1),
        kwargs={},
        fqn="",
        line="",
        meta=None,
    )
    state = State(name="s0", fqn="w", is_absolute=False, is_parameter=True, meta=meta)
    graph = BlockGraph(
        name="block0",
        is_glue=False,
        inputs=("x0",),
        input_metas=(meta,),
        states=(state,),
        ops=(op,),
        outputs=("v0",),
        fingerprint="",
    )
    assert [option.axis for option in shard_options(graph)["v0"]] == ["whole"]


@pytest.mark.parametrize("name", MODELS)
def test_options_do_not_depend_on_the_micro_batch(name: str) -> None:
    for one, two in zip(blocks_of(name, 1).values(), blocks_of(name, 2).values(), strict=True):
        first, second = shard_options(one), shard_options(two)
        assert {n: [o.axis for o in x] for n, x in first.items()} == {
            n: [o.axis for o in x] for n, x in second.items()
        }


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do() -> None:
    graph = blocks_of("llama")["block0"]
    options, _ = _found(graph)
    name = _op(graph, "aten.scaled_dot_product")
    message = rf"{name} cannot slice axis heads of size 4 over tp=8; allowed degrees are 1, 2, 4"
    with pytest.raises(ValueError, match=message):
        check_axes(graph, options, {name: "heads"}, 8)
    check_axes(graph, options, {name: "heads"}, 4)


def test_axes_and_ops_that_do_not_exist_are_refused() -> None:
    graph = blocks_of("llama")["block0"]
    options, _ = _found(graph)
    name = _op(graph, "aten.mean")
    with pytest.raises(ValueError, match=f"{name} has no axis heads; it has whole, sequence"):
        check_axes(graph, options, {name: "heads"}, 2)
    with pytest.raises(ValueError, match="has no op v999"):
        check_axes(graph, options, {"v999": "heads"}, 2)


def test_parameters_are_sliced_only_where_all_readers_agree() -> None:
    graph = blocks_of("gpt2")["block0"]
    options, _ = _found(graph)
    fused, row = _op(graph, "aten.addmm"), _op(graph, "aten.addmm", 1)
    layout = layout_parameters(graph, options, {fused: "heads", row: "sequence"})
    assert layout["attn.c_attn.weight"] == "S(1,3)"
    assert layout["attn.c_attn.bias"] == "R"
    assert layout["attn.c_proj.weight"] == "R"


PLACEMENTS = [Placement.parse(text) for text in ("R", "R*", "P", "S(0)", "S(1)", "S(1,3)")]


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS))
def test_transitions_never_are_free_and_wrong(produced: Placement, required: Placement) -> None:
    names = transition(produced, required)
    if names == ("", ""):
        assert produced == required
    if produced.kind == "partial_gradient":
        assert names is None
    if required.kind == "partial" and produced.kind != "partial":
        assert names is None
    if produced.kind == required.kind == "shard" and produced != required:
        expected = None if produced.dim == required.dim else ("all_to_all", "all_to_all")
        assert names == expected


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_cut_splits_an_axis_wherever_it_occurs(sizes: list[int], data: st.DataObject) -> None:
    dim = fresh(prod(sizes))
    other = list(dim)
    at = prod(sizes[: data.draw(st.integers(0, len(sizes)))])
    assert cut(dim, at)
    assert [x.size for x in leaves(dim)] == [x.size for x in leaves(other)]
    assert prod(x.size for x in leaves(dim)) == prod(sizes)


@settings(derandomize=True, deadline=None)
@given(st.permutations([2, 2, 3]), st.permutations([2, 2, 3]))
def test_equated_dims_are_the_same_atoms_or_stay_two(a: list[int], b: list[int]) -> None:
    first, second = fresh(12), fresh(12)
    assert all(cut(first, prod(a[:i])) for i in (1, 2))
    assert all(cut(second, prod(b[:i])) for i in (1, 2))
    same = equate(first, second)
    left, right = leaves(first), leaves(second)
    assert same == (left == right)
    assert same == (a == b)
