"""What a trace says of every dimension: exact labels, never from sizes, and slices that hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autoplan.axis_labels import op_name
from autoplan.capturer import capture
from autoplan.dimensions import program_dimensions
from autoplan.graph import OpDimensions, Placement, ShardOption, Trace
from autoplan.program import Op, Program, map_refs
from autoplan.tracer import trace_program
from benchmarks.architectures import build
from tests.test_batch_dims import build as build_told

TOKENS = ("batch", "sequence", "features")
IMAGE = ("batch", "features", "spatial", "spatial")
HEADS = ("batch", "heads", "sequence", "features")

Labels = Mapping[str, list[OpDimensions]]


@functools.cache
def program_of(name: str) -> Program:
    """Return the captured program of a small architecture with two rows."""
    torch.manual_seed(0)
    example = build(name, "small")
    return capture(example.model, example.batch, example.loss_fn, microbatch_size=2)


def told_of(program: Program) -> Labels:
    """Return what is told of the ops of a program, by operator name, in order."""
    told: dict[str, list[OpDimensions]] = {}
    for graph, dimensions in zip(program.graphs, program_dimensions(program), strict=True):
        for op in graph.ops:
            told.setdefault(op_name(op), []).append(dimensions[op.name])
    return told


@functools.cache
def told(name: str) -> Labels:
    """Return what is told of the ops of a small architecture."""
    return told_of(program_of(name))


def sliced(dimensions: OpDimensions) -> set[str]:
    """Return the kinds of the axes that an op can be sliced along."""
    return {option.axis for option in dimensions.slices}


def test_a_fused_projection_holds_heads_between_its_parts_and_their_features() -> None:
    projection = told("gpt2")["addmm"][0]
    assert projection.inputs == (
        ("features*heads*features",),
        ("batch*sequence", "features"),
        ("features", "features*heads*features"),
    )
    assert projection.output == ("batch*sequence", "features*heads*features")
    assert sliced(projection) == {"batch", "sequence", "heads", "features"}


def test_attention_can_be_sliced_along_batch_and_heads_only() -> None:
    attention = told("gpt2")["scaled_dot_product_attention"][0]
    assert attention.inputs == (HEADS, HEADS, HEADS)
    assert sliced(attention) == {"batch", "heads"}
    assert {option.size for option in attention.slices} == {2, 4}


def test_grouped_queries_share_the_heads_of_their_keys() -> None:
    attention = told("llama")["scaled_dot_product_attention"][0]
    assert attention.inputs == (HEADS, HEADS, HEADS)
    heads = [option for option in attention.slices if option.axis == "heads"]
    assert next((o.size, o.inputs) for o in heads) == (2, ("S(1)", "S(1)", "S(1)"))
    keys = told("llama")["linear"][1]
    assert keys.output == ("batch", "sequence", "heads*features")


def test_rotary_tables_are_positions_times_features_of_a_head() -> None:
    tables = {d.inputs[1] for d in told("llama")["mul"] if d.inputs[0] == HEADS}
    assert ("unknown", "unknown", "sequence", "features") in tables


def test_attention_across_two_sequences_is_told_as_within_one() -> None:
    attention = told("t5")["scaled_dot_product_attention"]
    assert [d.inputs[:3] for d in attention] == [(HEADS, HEADS, HEADS)] * 6
    assert {d.inputs[3][1:] for d in attention if len(d.inputs) > 3} <= {
        ("heads", "sequence", "sequence"),
        ("unknown", "sequence", "sequence"),
    }
    assert told("t5")["embedding"][1].output == ("sequence", "sequence", "heads")


def test_a_router_and_its_stacked_weights_have_experts() -> None:
    ops = told("mixtral")
    router = next(d for d in ops["linear"] if d.output[-1] == "experts")
    assert router.inputs == (("batch*sequence", "features"), ("experts", "features"))
    product = ops["transformers::grouped_mm_fallback"][0]
    assert product.inputs[1] == ("experts", "features", "features")
    assert product.output == ("batch*sequence*experts", "features")
    assert "experts" not in sliced(product)


def test_convolutions_tell_space_and_channels() -> None:
    first = told("unet")["conv2d"][0]
    assert first.inputs[:2] == (IMAGE, ("features", "features", "spatial", "spatial"))
    assert first.output == IMAGE
    assert sliced(first) == {"batch", "features"}
    assert {d.output for d in told("unet")["cat"]} == {IMAGE}
    assert {d.output for d in told("unet")["conv_transpose2d"]} == {IMAGE}


def test_batch_statistics_need_the_whole_batch() -> None:
    norm = told("resnet")["batch_norm"][0]
    assert norm.output == IMAGE
    assert sliced(norm) == {"features"}


def test_patches_of_an_image_are_a_sequence() -> None:
    ops = told("vit")
    assert ops["conv2d"][0].output == IMAGE
    assert ops["flatten"][0].output == ("batch", "features", "sequence")
    assert ops["cat"][0].output == TOKENS
    assert ops["scaled_dot_product_attention"][0].output == HEADS


def test_weights_over_positions_do_not_make_them_features() -> None:
    tokens = told("mlp_mixer")["linear"][0]
    assert tokens.inputs[:2] == (("batch", "features", "sequence"), ("features", "sequence"))
    assert tokens.output == ("batch", "features", "features")


@pytest.mark.parametrize(
    ("name", "op", "expected"),
    [
        ("sequence_first", "layer_norm", ("sequence", "batch", "features")),
        ("three_positions", "mul", ("batch", "sequence", "features")),
        ("recurrent", "lstm", ("sequence", "batch", "features")),
    ],
)
def test_the_batch_is_where_the_user_says(name: str, op: str, expected: tuple[str, ...]) -> None:
    dims = {"sequence_first": {"ids": 1, "labels": 1, "mask": None}, "recurrent": (1, 0)}
    model, batch, loss_fn = build_told(name)
    where: Any = dims.get(name, {"position_ids": 1})
    program = capture(model, batch, loss_fn, batch_dim=where)
    assert told_of(program)[op][0].output == expected


class Attention(nn.Module):
    """Attention and experts in plain operators, any sizes, with a convolution before."""

    def __init__(self, heads: int, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.heads = heads
        self.mix = nn.Conv1d(heads * width, heads * width, 3, padding=1)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)
        self.up = nn.Parameter(torch.randn(experts, heads * width, hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, heads * width))
        self.router = nn.Linear(heads * width, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)).softmax(-1)
        x = (scores @ v).transpose(1, 2).reshape(rows, length, -1)
        shares = self.router(x).softmax(-1)
        hidden = torch.relu(torch.einsum("bsf,efh->bseh", x, self.up))
        out = torch.einsum("bseh,ehf->bsef", hidden, self.down)
        result: torch.Tensor = (out * shares.unsqueeze(-1)).sum(2)
        return result


def labels_of(sizes: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return all labels of the model above for (rows, length, heads, width, hidden, experts)."""
    rows, length, *others = sizes
    model = Attention(*others)
    x = torch.randn(rows, length, others[0] * others[1])
    program = capture(model, x, lambda y: y.square().mean())
    dimensions = program_dimensions(program)
    return [
        (op.name, found[op.name].inputs, found[op.name].output)
        for graph, found in zip(program.graphs, dimensions, strict=True)
        for op in graph.ops
    ]


@functools.cache
def distinct() -> list[tuple[Any, ...]]:
    """Return the labels where no two sizes, nor products of them, are equal."""
    return labels_of((5, 7, 11, 13, 17, 19))


def test_no_dimension_of_plain_attention_and_experts_is_unknown() -> None:
    unknown = [name for name, _, output in distinct() if "unknown" in output]
    assert all("unsqueeze" in name for name in unknown)  # of size 1, made from nothing
    products = {name: output for name, _, output in distinct() if "matmul" in name}
    assert list(products.values()) == [("batch", "heads", "sequence", "sequence"), HEADS]
    experts = [output for name, _, output in distinct() if "einsum" in name]
    assert experts[0] == ("batch", "sequence", "experts", "features")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([2, 3, 4]), min_size=6, max_size=6))
def test_sizes_that_coincide_change_no_label(sizes: list[int]) -> None:
    assert labels_of(tuple(sizes)) == distinct()


def test_one_row_is_still_the_batch() -> None:
    assert {labels[2][0] for labels in labels_of((1, 7, 11, 13, 17, 19)) if labels[2]} <= {
        label[2][0] for label in distinct() if label[2]
    }


class Convolutions(nn.Module):
    """Every kind of operator on images that has a rule of its own for slices."""

    def __init__(self) -> None:
        super().__init__()
        self.full = nn.Conv2d(4, 6, 3, padding=1)
        self.own = nn.Conv2d(6, 6, 3, groups=6)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2, bias=False)
        self.back = nn.ConvTranspose2d(4, 6, 2, stride=2)
        self.norm = nn.GroupNorm(3, 6)
        self.batch_norm = nn.BatchNorm2d(6).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.own(self.full(x)), 2)
        x = self.batch_norm(self.norm(self.back(self.grouped(x))))
        larger: torch.Tensor = F.interpolate(x, scale_factor=2, mode="bilinear")
        return larger.softmax(1)


def part(tensor: torch.Tensor, text: str, size: int, rank: int, degree: int) -> torch.Tensor:
    """Return the slice of a tensor that a rank has under a placement of an axis of `size`."""
    placement = Placement.parse(text)
    if placement.kind != "shard":
        return tensor
    dim, outer = placement.dim, placement.outer
    inner = tensor.shape[dim] // (outer * size)
    shape = tensor.shape
    whole = tensor.reshape(*shape[:dim], outer, size, inner, *shape[dim + 1 :])
    own: torch.Tensor = whole.chunk(degree, dim + 1)[rank]
    return own.flatten(dim, dim + 2).contiguous()


def run_sliced(op: Op, values: Mapping[str, torch.Tensor], option: ShardOption) -> torch.Tensor:
    """Return the result of an op that is run slice by slice and put together."""
    degree = next(d for d in range(2, option.size + 1) if option.size % d == 0)
    results = []
    for rank in range(degree):
        own = {
            name: part(values[name], text, option.size, rank, degree)
            for name, text in zip(op.inputs(), option.inputs, strict=True)
        }
        if option.output == "P" and rank:  # a bias is added once
            own |= {n: torch.zeros_like(x) for n, x in own.items() if x.dim() == 1}
        results.append(run(op, own, values))
    if option.output == "P":
        return torch.stack(results).sum(0)
    placement = Placement.parse(option.output)
    dim, outer = placement.dim, placement.outer
    parts = [r.reshape(*r.shape[:dim], outer, -1, *r.shape[dim + 1 :]) for r in results]
    return torch.cat(parts, dim + 1).flatten(dim, dim + 1)


def run(op: Op, own: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run an op on slices; a convolution of each channel alone has as many groups as channels."""
    args = list(op.args)
    first = op.inputs()[0]
    if op_name(op) == "conv2d" and len(args) > 6 and args[6] == whole[first].shape[1]:
        args[6] = own[first].shape[1]
    kwargs = map_refs(dict(op.kwargs), own.__getitem__)
    result: torch.Tensor = op.target(*map_refs(args, own.__getitem__), **kwargs)
    return result


def test_ops_on_images_give_the_same_from_slices() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    program = capture(Convolutions().double(), x, lambda y: y.square().mean())
    checked = set()
    for graph, dimensions in zip(program.graphs, program_dimensions(program), strict=True):
        for op in graph.ops:
            metas = {name: graph.meta(name) for name in op.inputs()}
            values = {n: torch.rand(m.shape).double() + 0.5 for n, m in metas.items() if m}
            for option in dimensions[op.name].slices:
                got, expected = run_sliced(op, values, option), run(op, values, values)
                assert torch.allclose(got, expected, atol=1e-9), (op.target_name, option)
                checked.add((op_name(op), option.axis))
    sliced_along = {
        "conv2d": {"batch", "features"},
        "conv_transpose2d": {"batch", "features"},
        "max_pool2d": {"batch", "features"},
        "group_norm": {"batch"},
        "batch_norm": {"batch", "features", "spatial"},
        "upsample_bilinear2d": {"batch", "features"},
        "softmax": {"batch", "spatial"},
    }
    for name, axes in sliced_along.items():
        assert {axis for op, axis in checked if op == name} == axes, name


def test_a_trace_prints_its_dimensions_and_keeps_them_in_json() -> None:
    trace = trace_program(program_of("gpt2"), model_name="GPT2")
    assert Trace.from_json(trace.to_json()) == trace
    text = trace.dimension_report()
    attention = next(line for line in text.splitlines() if "v14_scaled" in line)
    assert "batch 2 x heads 4 x sequence 16 x features 8" in attention
    assert "batch(2): S(0), S(0), S(0) -> S(0); heads(4): S(1), S(1), S(1) -> S(1)" in attention
    assert "block0, 3 calls" in text
