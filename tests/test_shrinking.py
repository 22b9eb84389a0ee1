"""Smaller forms of block graphs keep the ops, the layouts, and what may be sliced."""

from __future__ import annotations

import functools

import pytest
import torch

from autoplan.capturer import capture
from autoplan.executor import compile_graph
from autoplan.graph import Placement
from autoplan.program import BlockGraph
from autoplan.sharding import shard_options
from autoplan.shrinking import axes_of, shrink_graph
from tests.models import Attention, Block, PlainAttention, RepeatedKeys, blocks_of

ATTENTIONS = {"fused": Attention, "chunks": PlainAttention, "repeated": RepeatedKeys}


@functools.cache
def wide_block(name: str) -> BlockGraph:
    """Return the graph of a block with 64 heads of 32, on 384 tokens, captured without numbers."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(Block(2048, ATTENTIONS[name](2048, 64)) for _ in range(3)))
        batch = torch.empty(2, 384, 2048)
    program = capture(model, batch, lambda out: out.sum(), microbatch_size=1)
    return next(graph for graph in program.graphs if not graph.is_glue)


def elements(graph: BlockGraph) -> int:
    metas = [*(s.meta for s in graph.states), *(op.meta for op in graph.ops)]
    return sum(torch.Size(meta.shape).numel() for meta in metas if meta is not None)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_wide_block_becomes_small_and_still_runs(name: str) -> None:
    graph = wide_block(name)
    small = shrink_graph(graph, shard_options(graph), 4, axes_of(graph)).graph
    assert elements(graph) > 2**25
    assert elements(small) < 2**19
    assert [op.name for op in small.ops] == [op.name for op in graph.ops]
    states = tuple(torch.randn(s.meta.shape) for s in small.states)
    inputs = [torch.randn(meta.shape) for meta in small.input_metas if meta is not None]
    outputs = compile_graph(small, torch.device("cpu")).function(states, *inputs)
    metas = [small.meta(name) for name in small.outputs]
    assert [tuple(x.shape) for x in outputs] == [meta.shape for meta in metas if meta is not None]


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_smaller_options_slice_the_same_dimensions_at_the_same_degrees(degree: int) -> None:
    graph = wide_block("repeated")
    options = shard_options(graph)
    small = shrink_graph(graph, options, degree, axes_of(graph))
    for name, listed in options.items():
        for captured, own in zip(listed, small.options[name], strict=True):
            assert own.axis == captured.axis
            assert captured.size % degree or own.size % degree == 0
            for a, b in zip(
                (*captured.inputs, captured.output), (*own.inputs, own.output), strict=True
            ):
                one, two = Placement.parse(a), Placement.parse(b)
                assert (one.kind, one.dim, one.outer > 1) == (two.kind, two.dim, two.outer > 1)


def test_a_smaller_graph_has_the_options_that_its_own_axes_give() -> None:
    graph = wide_block("fused")
    small = shrink_graph(graph, shard_options(graph), 2, axes_of(graph))
    assert shard_options(small.graph) == small.options


def test_a_graph_that_is_small_stays_as_it_is() -> None:
    graph = blocks_of("gpt")["glue0"]
    small = shrink_graph(graph, shard_options(graph), 64, axes_of(graph))
    assert small.graph.ops == graph.ops
    assert small.options == shard_options(graph)
