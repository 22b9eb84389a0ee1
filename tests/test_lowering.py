from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from autoplan.chunks import gathered
from autoplan.collectives import Redistribute, join_slices, local_shape, local_slice, spread
from autoplan.graph import Placement, ShardOption
from autoplan.interpreter import run_graph
from autoplan.lowering import dtensor_placement, fsdp_dim, lower
from autoplan.program import BlockGraph
from autoplan.sharded_ops import ShardedRandom, VocabularyCrossEntropy
from autoplan.sharding import shard_options
from tests.distributed import run_workers
from tests.layouts import megatron_axes, random_axes
from tests.models import MODELS, VOCABULARY, blocks, blocks_of, gpt2

Options = Mapping[str, tuple[ShardOption, ...]]
TOLERANCE = 1e-10


def _values(graph: BlockGraph) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return seeded inputs and states, unequal in every element."""
    generator = torch.Generator().manual_seed(7)
    inputs = []
    for meta in graph.input_metas:
        assert meta is not None
        if meta.dtype.is_floating_point:
            inputs.append(torch.randn(meta.shape, generator=generator, dtype=meta.dtype))
        elif meta.dtype is torch.bool:
            inputs.append(torch.ones(meta.shape, dtype=torch.bool).tril())
        else:
            ids = torch.randint(VOCABULARY, meta.shape, generator=generator)
            # One row that the loss ignores; an embedding has no such row.
            inputs.append(ids.masked_fill(ids == 5, -100) if len(meta.shape) == 1 else ids)
    states = {
        s.fqn: torch.randn(s.meta.shape, generator=generator, dtype=s.meta.dtype) / 3
        for s in graph.states
    }
    return inputs, states


def _run(
    graph: BlockGraph, inputs: Sequence[torch.Tensor], states: Mapping[str, torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return outputs, gradients of inputs that have one, and gradients of states."""
    entering = [
        x.detach().requires_grad_(meta is not None and meta.requires_grad)
        for x, meta in zip(inputs, graph.input_metas, strict=True)
    ]
    trained = {s.fqn for s in graph.states if s.meta.requires_grad}
    held = {fqn: x.detach().requires_grad_(fqn in trained) for fqn, x in states.items()}
    outputs = run_graph(graph, entering, held)
    total = torch.stack(
        [(out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs]
    )
    (total.sum() if outputs[0].dim() else outputs[0]).backward()
    gradients = {fqn: x.grad if x.grad is not None else x * 0 for fqn, x in held.items()}
    outputs = tuple(out.detach() for out in outputs)
    return outputs, [x.grad for x in entering if x.grad is not None], gradients


def _check_metas(
    graph: BlockGraph, inputs: Sequence[torch.Tensor], states: Mapping[str, torch.Tensor]
) -> None:
    """Every value has the shape and dtype that the graph says."""
    ops = tuple(op.name for op in graph.ops if op.meta is not None)
    with torch.no_grad():
        values = run_graph(replace(graph, outputs=ops), inputs, states)
    for name, value in zip(ops, values, strict=True):
        meta = graph.meta(name)
        assert meta is not None
        assert (tuple(value.shape), value.dtype) == (meta.shape, meta.dtype), name
    for state in graph.states:
        assert tuple(states[state.fqn].shape) == state.meta.shape, state.fqn


def _gathered(tensor: torch.Tensor, placement: Placement, degree: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(degree)]
    dist.all_gather(parts, tensor.contiguous())
    if placement.kind == "replicate":
        for part in parts:
            torch.testing.assert_close(part, tensor, rtol=0, atol=1e-12)
    return join_slices(parts, placement)


def _errors(
    rank: int, graph: BlockGraph, options: Options, choices: Sequence[Mapping[str, str]]
) -> list[float]:
    """Return per choice of axes the largest difference to the single-device block."""
    degree = dist.get_world_size()
    inputs, states = _values(graph)
    expected = _run(graph, inputs, states)
    largest: list[float] = []
    for axes in choices:
        block = lower(graph, options, axes, degree=degree, rank=rank, group=None)
        placed = {fqn: Placement.parse(text) for fqn, text in block.parameters.items()}
        local = {fqn: local_slice(x, placed[fqn], rank, degree) for fqn, x in states.items()}
        _check_metas(block.graph, inputs, local)
        outputs, input_gradients, gradients = _run(block.graph, inputs, local)
        pairs = list(zip(outputs, expected[0], strict=True))
        pairs += zip(input_gradients, expected[1], strict=True)
        pairs += [
            (_gathered(gradients[fqn], placed[fqn], degree), expected[2][fqn]) for fqn in states
        ]
        scale = [max(float(want.abs().max()), 1.0) for _, want in pairs]
        found = [float((a - b).abs().max()) for a, b in pairs]
        largest.append(max(e / s for e, s in zip(found, scale, strict=True)))
    return largest


@pytest.mark.parametrize(("name", "degree"), [("llama", 4), ("gpt2", 2), ("gpt", 2)])
def test_megatron_assignment_equals_the_whole_block(name: str, degree: int) -> None:
    graph = blocks_of(name)["block0"]
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    errors = run_workers(_errors, degree, graph, options, [axes])
    assert max(max(e) for e in errors) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", ["glue0", "block0", "glue1"])
def test_random_assignments_equal_the_whole_block(name: str, block: str) -> None:
    graph = blocks_of(name)[block]
    options = shard_options(graph)
    choices = [random_axes(graph, options, 2, seed) for seed in range(8)]
    errors = run_workers(_errors, 2, graph, options, choices)
    assert max(max(e) for e in errors) < TOLERANCE


def test_random_assignments_over_four_ranks_equal_the_whole_block() -> None:
    graph = blocks_of("llama")["block0"]
    options = shard_options(graph)
    choices = [random_axes(graph, options, 4, seed) for seed in range(8)]
    errors = run_workers(_errors, 4, graph, options, choices)
    assert max(max(e) for e in errors) < TOLERANCE


def _dropped_out(
    rank: int, graph: BlockGraph, options: Options, axes: Mapping[str, str]
) -> tuple[bool, bool, bool]:
    """Return whether gradients repeat under recomputation, generators stay equal, slices differ."""
    degree = dist.get_world_size()
    inputs, states = _values(graph)
    block = lower(graph, options, axes, degree=degree, rank=rank, group=None)
    placed = {fqn: Placement.parse(text) for fqn, text in block.parameters.items()}
    local = {fqn: local_slice(x, placed[fqn], rank, degree) for fqn, x in states.items()}

    def gradients(is_recomputed: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        held = {fqn: x.detach().requires_grad_() for fqn, x in local.items()}
        entering = inputs[0].detach().requires_grad_()

        def forward(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = run_graph(block.graph, [x], held)[0]
            return out

        out = checkpoint(forward, entering, use_reentrant=False) if is_recomputed else None
        (forward(entering) if out is None else out).square().sum().backward()
        found = [entering.grad, *(x.grad for x in held.values())]
        return [x for x in found if x is not None]

    plain, again = gradients(False), gradients(True)
    for fqn, gradient in zip(local, plain[1:], strict=True):
        _gathered(gradient, placed[fqn], degree)
    state = torch.get_rng_state().double()
    others = [torch.empty_like(state) for _ in range(degree)]
    dist.all_gather(others, state)
    target = ShardedRandom(torch.ops.aten.dropout.default, rank)
    mask = target(torch.ones(1000, dtype=torch.float64), 0.5, True)
    masks = [torch.empty_like(mask) for _ in range(degree)]
    dist.all_gather(masks, mask)
    return (
        all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)),
        all(torch.equal(x, state) for x in others),
        not torch.equal(masks[0], masks[1]),
    )


def test_sharded_dropout_differs_by_rank_and_repeats_under_recomputation() -> None:
    graph = blocks(gpt2(dropout=0.2))["block0"]
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    lowered = lower(graph, options, axes, degree=2, rank=0, group=None).graph
    assert sum(isinstance(op.target, ShardedRandom) for op in lowered.ops) == 1
    assert run_workers(_dropped_out, 2, graph, options, axes) == [(True, True, True)] * 2


def test_whole_block_is_unchanged() -> None:
    graph = blocks_of("llama")["block0"]
    block = lower(graph, shard_options(graph), {}, degree=2, rank=0, group=None)
    assert [op.name for op in block.graph.ops] == [op.name for op in graph.ops]
    assert set(block.parameters.values()) == {"R"}


def test_degree_one_returns_the_graph_itself() -> None:
    graph = blocks_of("gpt2")["block0"]
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    block = lower(graph, options, axes, degree=1, rank=0, group=None)
    assert block.graph is graph
    assert set(block.parameters.values()) == {"R"}


def test_megatron_gpt2_block_stores_slices_and_reduces_twice() -> None:
    graph = blocks_of("gpt2")["block0"]
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    block = lower(graph, options, axes, degree=2, rank=1, group=None)
    assert {fqn: p for fqn, p in block.parameters.items() if p != "R"} == {
        "attn.c_attn.weight": "S(1,3)",
        "attn.c_proj.weight": "S(0)",
        "mlp.c_fc.bias": "S(0)",
        "mlp.c_fc.weight": "S(1)",
        "mlp.c_proj.weight": "S(0)",
    }
    made = [op.name for op in block.graph.ops if isinstance(op.target, Redistribute)]
    assert made == [
        "s2__S0_3",
        "v1_view__Rstar",
        "v19_addmm__R",
        "v24_view__Rstar",
        "v36_addmm__R",
    ]


def _stored(rank: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    full = torch.randn(12, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    same = []
    for text in ("R", "S(0)", "S(1)", "S(0,3)", "S(1,3)"):
        placement = Placement.parse(text)
        stored = distribute_tensor(full, mesh, [dtensor_placement(placement)])
        local = local_slice(full, placement, rank, dist.get_world_size())
        back = gathered(DTensor.from_local(local, mesh, [dtensor_placement(placement)]))
        same.append(torch.equal(stored.to_local(), local) and torch.equal(back, full))
    return same


def test_local_slices_are_what_dtensor_stores() -> None:
    assert run_workers(_stored, 2) == [[True] * 5] * 2


@pytest.mark.parametrize(
    ("text", "dim"), [("R", 0), ("S(0)", 0), ("S(1)", 0), ("S(1,3)", 0), ("S(0,3)", 1)]
)
def test_fsdp_shards_another_dim_than_a_strided_shard(text: str, dim: int) -> None:
    assert fsdp_dim(Placement.parse(text)) == dim


@settings(derandomize=True, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.integers(0, 2), st.integers(1, 3))
def test_joined_slices_are_the_whole_tensor(degree: int, outer: int, dim: int, inner: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = outer * degree * inner
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    placement = Placement(kind="shard", dim=dim, outer=outer)
    parts = [local_slice(full, placement, rank, degree) for rank in range(degree)]
    assert all(part.shape == local_shape(shape, placement, degree) for part in parts)
    assert torch.equal(join_slices(parts, placement), full)
    assert torch.equal(spread(full, placement, degree), torch.stack(parts))


def _losses(rank: int, dtype: torch.dtype) -> float:
    """Return the largest difference of loss and gradient to the operator on whole logits."""
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(20, 32, generator=generator) * 8).to(dtype)
    target = torch.randint(32, (20,), generator=generator)
    target[3] = 7
    sliced = Placement(kind="shard", dim=1)
    largest = 0.0
    for reduction in range(3):
        whole = logits.detach().requires_grad_()
        part = local_slice(logits, sliced, rank, 2).requires_grad_()
        wanted = torch.ops.aten.cross_entropy_loss.default(whole, target, None, reduction, 7)
        got = VocabularyCrossEntropy(rank, None)(part, target, None, reduction, 7)
        weight = torch.linspace(0, 1, wanted.numel()).view(wanted.shape).to(dtype) + 1
        (wanted * weight).sum().backward()
        (got * weight).sum().backward()  # type: ignore[no-untyped-call]
        assert whole.grad is not None
        assert part.grad is not None
        assert part.grad.dtype == dtype
        expected = local_slice(whole.grad, sliced, rank, 2)
        for a, b in ((got, wanted), (part.grad, expected)):
            largest = max(largest, float((a - b).detach().abs().max() / b.detach().abs().max()))
    return largest


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
def test_vocabulary_cross_entropy_equals_the_whole_loss(
    dtype: torch.dtype, tolerance: float
) -> None:
    assert max(run_workers(_losses, 2, dtype)) < tolerance
