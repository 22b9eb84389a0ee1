"""Kept bytes of a trace are those of what a planned module runs, in every dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from autoplan.backends import Backend
from autoplan.capturer import capture
from autoplan.kernels import recurrent_workspace_bytes
from autoplan.tracer import trace, trace_program
from benchmarks.architectures import Example, build
from benchmarks.kept_bytes import (
    kept_by_autograd,
    kept_by_trace,
    kept_tensors,
    run_captured,
    surplus,
)
from benchmarks.trace_coverage import loss_of
from tests.models_for_tests import mean_square

BACKENDS: tuple[Backend, ...] = ("cpu", "cuda")

# One of each family that computes or keeps something of its own; the benchmark runs all.
FAMILIES = {
    "bfloat16": ("falcon", "mixtral", "t5", "whisper"),
    "autocast": ("qwen2_moe", "deberta_v2", "convnext", "unet", "mlp_mixer"),
    "float32": ("lstm", "mamba2", "dit"),
}
CASES = [(name, dtype) for dtype, names in FAMILIES.items() for name in names]


def example_of(name: str, dtype: str) -> Example:
    pytest.importorskip("transformers")
    example = build(name, "small")
    for module in example.model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    if dtype != "bfloat16":
        return example

    def lower(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.bfloat16() if is_float else leaf

    batch = pytree.tree_map(lower, example.batch)
    return replace(example, model=example.model.bfloat16(), batch=batch)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_kept_bytes_equal_those_of_the_captured_program(name: str, dtype: str) -> None:
    example = example_of(name, dtype)
    autocast = torch.bfloat16 if dtype == "autocast" else None
    program = capture(example.model, example.batch, example.loss_fn, autocast=autocast)
    result = trace_program(program, model_name=name)
    real = kept_by_autograd(
        example.model, lambda: run_captured(program, example.model, example.batch, autocast)
    )
    assert kept_by_trace(result) == real


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("falcon", ("4 x int64[1] of 8 B",)),
        ("clip", ("2 x int64[4] of 32 B",)),
        ("lstm", ("1 x float32[2, 16] of 256 B",)),
    ],
)
def test_an_eager_forward_keeps_only_copies_of_what_a_plan_shares(
    name: str, more: tuple[str, ...]
) -> None:
    example = example_of(name, "float32")
    program = capture(example.model, example.batch, example.loss_fn)
    planned = kept_tensors(
        example.model, lambda: run_captured(program, example.model, example.batch)
    )
    eager = kept_tensors(example.model, lambda: loss_of(example))
    assert sorted(surplus(eager, planned)) == sorted(more)
    assert surplus(planned, eager) == ()


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("sizes", [(1, 3), (20, 50), (50, 20), (64, 64), (256, 256), (300, 512)])
def test_the_workspace_of_an_lstm_is_that_of_its_kernel(steps: int, sizes: tuple[int, int]) -> None:
    width, hidden = sizes
    x = torch.randn(steps, 5, width)
    kept = kept_tensors(layer := nn.LSTM(width, hidden), lambda: layer(x)[0])
    (workspace,) = (tensor for tensor in kept if tensor.dtype is torch.uint8)
    arguments = [x, *[None] * 9, hidden]
    assert recurrent_workspace_bytes("aten::mkldnn_rnn_layer", arguments) == workspace.nbytes


class Keeping(torch.autograd.Function):
    """Saves its input, and holds a mask as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.mask = x > 0
        out: torch.Tensor = x * ctx.mask
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = gradient * ctx.mask * x.sign().abs()
        return found


class Sharing(nn.Module):
    """Views that share storages, writes in place, and inputs that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 6, 16))
        self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 16)
        self.frozen = nn.Parameter(torch.randn(16), requires_grad=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        x = self.start.expand(4, 6, 16) if x is None else x
        wide = self.up(x)
        wide[..., :16].mul_(2.0)
        first, second, third = wide.chunk(3, dim=-1)
        both = torch.cat([first, second], dim=1)[:, ::2]
        out = F.relu(self.down(both), inplace=True) * third.transpose(0, 1).transpose(0, 1)
        kept: torch.Tensor = Keeping.apply(self.drop(out) + self.frozen) * self.start  # type: ignore[no-untyped-call]
        return kept + x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharing() for _ in range(3))

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        x = None
        for layer in self.layers:
            x = layer(x)
        assert x is not None
        out: torch.Tensor = x * scale[:, None, None]
        return out


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "autocast"])
def test_views_writes_parameters_and_attributes_are_kept_as_in_eager_mode(dtype: str) -> None:
    torch.manual_seed(0)
    model, scale = Chain(), torch.rand(4)
    if dtype == "bfloat16":
        model, scale = model.bfloat16(), scale.bfloat16()
    autocast = torch.bfloat16 if dtype == "autocast" else None
    result = trace(model, scale, mean_square, autocast=autocast)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast is not None):
            return mean_square(model(scale))

    assert kept_by_trace(result) == kept_by_autograd(model, run)


@pytest.mark.parametrize(
    ("norm", "on_cpu", "on_cuda"),
    [
        (lambda: nn.LayerNorm(8), 2 * 4 * 16, 2 * 4 * 16),
        (lambda: nn.LayerNorm(8, elementwise_affine=False), 2 * 2 * 16, 2 * 4 * 16),
        (lambda: nn.GroupNorm(2, 4), 2 * 4 * 8, 2 * 4 * 8),
        (lambda: nn.BatchNorm1d(4), 2 * 4 * 4, 2 * 4 * 4),
        (lambda: nn.InstanceNorm1d(4, affine=True), 3 * 4 * 16, 3 * 4 * 16),  # and its weights
    ],
)
def test_statistics_of_norms_over_16_bits_have_the_dtype_of_the_kernel(
    norm: Any, on_cpu: int, on_cuda: int
) -> None:
    model = nn.Sequential(norm())
    x = torch.randn(4, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    real = kept_tensors(model, lambda: model(x))
    statistics = sum(t.untyped_storage().nbytes() for t in real if t.numel() < x.numel())
    assert statistics == on_cpu
    for backend, expected in zip(BACKENDS, (on_cpu, on_cuda), strict=True):
        result = trace(Scaled(model), x.detach(), mean_square, backend=backend)
        (op,) = (op for b in result.blocks for op in b.ops if "_norm." in op.target)
        assert sum(s.nbytes for s in op.saved if not s.value) == expected


class Scaled(nn.Module):
    """Gives its input a gradient by a product with a parameter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x * self.scale)
        return out
