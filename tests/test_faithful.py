"""Models in any state trace exactly, and are left bit for bit as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.batches import reduce_loss, split_batch
from autoplan.capturer import capture, meta_copy
from autoplan.tracer import trace_program
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import ConvNet, TinyGPT, mean_square
from tests.numerics import compare
from tests.programs import gradients_of, run_program

Build = Callable[[], tuple[nn.Module, Any]]


class Block(nn.Module):
    """Attention with a mask, a 0-d scale, an adapter on a frozen layer, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48).requires_grad_(False)
        self.narrow, self.widen = nn.Linear(16, 2, bias=False), nn.Linear(2, 48, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.norm = nn.LayerNorm(16)
        self.register_buffer("table", torch.linspace(0, 1, 16), persistent=False)
        self.table: torch.Tensor

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) + self.table
        parts = (self.qkv(y) + self.widen(self.narrow(y))).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
        z = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        out: torch.Tensor = x + self.scale * z.transpose(1, 2).flatten(2)
        return out


class Odd(nn.Module):
    """Keyword-only tensors, a flag, a nested input, a tie, and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(
        self,
        ids: torch.Tensor,
        *,
        extras: dict[str, torch.Tensor],
        repeat: bool = False,
        name: str = "",
    ) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask=extras["mask"])
        if repeat:
            x = self.blocks[0](x, mask=extras["mask"])
        out: torch.Tensor = self.head(x)
        return out


def odd() -> tuple[nn.Module, Any]:
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    batch = {"ids": torch.randint(20, (2, 6)), "extras": {"mask": mask}}
    return Odd(), {**batch, "repeat": True, "name": "odd"}


def dropout() -> tuple[nn.Module, Any]:
    model = TinyGPT(0.2)
    model.layers[1].eval()
    return model, torch.randint(50, (2, 16))


def mixed() -> tuple[nn.Module, Any]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(8, 8).to(torch.bfloat16)
            self.high = nn.Linear(8, 8).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.high(self.low(x.to(torch.bfloat16)).double())
            return out

    return nn.Sequential(Mixed()), torch.randn(4, 8)


def in_place() -> tuple[nn.Module, Any]:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x).mul_(2.0)
            y[:, :4].add_(1.0)
            out: torch.Tensor = y.relu_() + self.inner.weight.sum(0)
            return out

    return nn.Sequential(*(InPlace() for _ in range(2))), torch.randn(4, 8)


CASES: dict[str, Build] = {
    "odd": odd,
    "dropout": dropout,
    "mixed": mixed,
    "in_place": in_place,
    "conv": lambda: (ConvNet(), torch.randn(4, 3, 16, 16)),
}


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs, target = split_batch(model, batch, mean_square)
    return reduce_loss(model(*args, **kwargs), mean_square, target)


@pytest.mark.parametrize("name", CASES)
def test_planning_leaves_everything_as_it_was(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    torch.autograd.backward(loss_of(model, batch))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {n: t.detach().clone() for n, t in tensors.items()}
    versions = {n: t._version for n, t in tensors.items()}
    grads = {n: p.grad for n, p in model.named_parameters()}
    copies = {n: g.clone() for n, g in grads.items() if g is not None}
    modes = [m.training for m in model.modules()]
    attributes = [sorted(vars(m)) for m in model.modules()]
    inputs = copy.deepcopy(batch)
    random = torch.get_rng_state()
    trace_program(capture(model, batch, mean_square), model_name=name)
    assert torch.equal(torch.get_rng_state(), random)
    assert {n: t._version for n, t in tensors.items()} == versions
    assert all(torch.equal(t, values[n]) for n, t in tensors.items())
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    assert all(torch.equal(g, copies[n]) for n, g in grads.items() if g is not None)
    assert [m.training for m in model.modules()] == modes
    assert [sorted(vars(m)) for m in model.modules()] == attributes
    pairs = zip(pytree.tree_leaves(batch), pytree.tree_leaves(inputs), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_parameters_and_gradients_equal_eager(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    program = capture(model, batch, mean_square)
    result = trace_program(program, model_name=name)
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: loss_of(model, batch))
    assert result.num_parameters == sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert result.num_trained == trained
    leaves = [x for x in pytree.tree_leaves(batch) if isinstance(x, torch.Tensor)]
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    want = loss_of(twin, batch)
    gradients = gradients_of(want, twin)
    torch.manual_seed(1)
    got, found = run_program(program, model, leaves)
    torch.testing.assert_close(got, want.detach())
    assert compare(found, gradients) == []


@pytest.mark.parametrize("name", CASES)
def test_a_model_on_the_meta_device_gives_the_program_of_one_with_weights(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    assert capture(meta_copy(model), batch, mean_square).fingerprint == (
        capture(model, batch, mean_square).fingerprint
    )


def test_a_batch_dimension_elsewhere_is_told_by_the_first_tensor() -> None:
    """Only dimension 0 is ever the batch; a tensor without it is left as it is."""
    model = nn.Linear(8, 8)
    batch = (torch.randn(6, 8), torch.randn(8))

    def loss_fn(output: torch.Tensor, goal: torch.Tensor) -> torch.Tensor:
        return (output - goal).square().mean()

    program = capture(model, batch, loss_fn, microbatch_size=2)
    assert [meta.shape for meta in program.input_metas] == [(2, 8), (8,)]
