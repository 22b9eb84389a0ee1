from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
import torch.distributed as dist

from autoplan.collectives import join_slices, local_slice
from autoplan.graph import Placement, ShardOption
from autoplan.interpreter import run_graph
from autoplan.lowering import lower
from autoplan.program import BlockGraph
from autoplan.sharding import shard_options, transition
from tests.distributed import run_workers
from tests.models import MODELS, VOCABULARY, blocks, llama

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
    held = {fqn: x.detach().requires_grad_(x.is_floating_point()) for fqn, x in states.items()}
    outputs = run_graph(graph, entering, held)
    total = torch.stack(
        [(out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum() for out in outputs]
    )
    (total.sum() if outputs[0].dim() else outputs[0]).backward()
    gradients = {fqn: x.grad if x.grad is not None else x * 0 for fqn, x in held.items()}
    return outputs, [x.grad for x in entering if x.grad is not None], gradients


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


def _random_axes(graph: BlockGraph, options: Options, degree: int, seed: int) -> dict[str, str]:
    """Return any choice that is valid; views and sliced inputs tempt it to stay sliced."""
    draw = random.Random(seed)
    produced: dict[str, Placement] = {}
    axes: dict[str, str] = {}

    def is_valid(inputs: Sequence[str], option: ShardOption) -> bool:
        needs = zip(inputs, option.inputs, strict=True)
        return option.size % degree in (0, 1 % degree * (not option.is_split)) and all(
            transition(produced.get(v, Placement(kind="replicate")), Placement.parse(text))
            for v, text in needs
        )

    for op in graph.ops:
        valid = [o for o in options[op.name] if is_valid(op.inputs(), o)]
        option = draw.choice(valid[1:] if len(valid) > 1 and draw.random() < 0.8 else valid)
        axes[op.name] = option.axis
        produced[op.name] = Placement.parse(option.output)
    return axes


def _prefer(graph: BlockGraph, options: Options, preferred: Sequence[str]) -> dict[str, str]:
    """Return for every op the first of the preferred axes that it has."""
    axes = {}
    for op in graph.ops:
        have = {option.axis for option in options[op.name]}
        found = [axis for axis in preferred if axis in have]
        if found:
            axes[op.name] = found[0]
    return axes


def megatron_axes(graph: BlockGraph, options: Options) -> dict[str, str]:
    """Return column and row parallel products: heads in attention, the inner width in the MLP."""
    inner = {
        option.axis
        for op in graph.ops
        for option in options[op.name]
        if option.gemm_dim == "n" and option.axis not in ("features", "heads")
        if any(o.axis == option.axis and o.gemm_dim == "k" for s in options.values() for o in s)
    }
    return _prefer(graph, options, ["heads", *sorted(inner)])


@pytest.mark.parametrize(("name", "degree"), [("llama", 4), ("gpt2", 2), ("gpt", 2)])
def test_megatron_assignment_equals_the_whole_block(name: str, degree: int) -> None:
    graph = blocks(MODELS[name]())["block0"]
    options = shard_options(graph)
    axes = megatron_axes(graph, options)
    errors = run_workers(_errors, degree, graph, options, [axes])
    assert max(max(e) for e in errors) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("block", ["glue0", "block0", "glue1"])
def test_random_assignments_equal_the_whole_block(name: str, block: str) -> None:
    graph = blocks(MODELS[name]())[block]
    options = shard_options(graph)
    choices = [_random_axes(graph, options, 2, seed) for seed in range(8)]
    errors = run_workers(_errors, 2, graph, options, choices)
    assert max(max(e) for e in errors) < TOLERANCE


def test_random_assignments_over_four_ranks_equal_the_whole_block() -> None:
    graph = blocks(llama())["block0"]
    options = shard_options(graph)
    choices = [_random_axes(graph, options, 4, seed) for seed in range(8)]
    errors = run_workers(_errors, 4, graph, options, choices)
    assert max(max(e) for e in errors) < TOLERANCE
