"""Random models trace, and their kept bytes, FLOPs and results equal those of an eager run."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autoplan.capturer import capture
from autoplan.tracer import trace_program
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import mean_square
from tests.numerics import compare
from tests.programs import gradients_of, run_program

WIDTH, TOKENS, ROWS = 8, 6, 2

KINDS = ("linear", "norm", "gelu", "conv", "attention", "dropout", "residual", "split", "concat",
         "in_place", "reuse", "tie")  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).chunk(3, -1)
        query, key, value = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class Step(nn.Module):
    """One random operation on (rows, tokens, width)."""

    def __init__(self, kind: str, earlier: list[Step]) -> None:
        super().__init__()
        self.kind = kind
        self.inner: nn.Module = nn.Identity()
        if kind in ("linear", "residual", "split", "in_place"):
            self.inner = nn.Linear(WIDTH, WIDTH)
        elif kind == "concat":
            self.inner = nn.Linear(2 * WIDTH, WIDTH)
        elif kind == "norm":
            self.inner = nn.LayerNorm(WIDTH)
        elif kind == "conv":
            self.inner = nn.Conv1d(TOKENS, TOKENS, 3, padding=1, groups=2)
        elif kind == "attention":
            self.inner = Attention()
        elif kind == "dropout":
            self.inner = nn.Dropout(0.3)
        linears = [s.inner for s in earlier if isinstance(s.inner, nn.Linear)]
        same = [linear for linear in linears if linear.in_features == WIDTH]
        if kind == "reuse" and earlier:
            self.inner = earlier[0].inner if earlier[0].kind != "concat" else nn.Identity()
        if kind == "tie":
            linear = nn.Linear(WIDTH, WIDTH)
            if same:
                linear.weight = same[0].weight
            self.inner = linear

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor
        if self.kind == "gelu":
            y = F.gelu(x)
        elif self.kind == "residual":
            y = x + self.inner(x)
        elif self.kind == "split":
            left, right = self.inner(x).split(WIDTH // 2, -1)
            y = torch.cat([left.sigmoid(), right.tanh()], -1)
        elif self.kind == "concat":
            y = self.inner(torch.cat([x, first], -1))
        elif self.kind == "in_place":
            y = self.inner(x).relu_()
        else:
            y = self.inner(x)
        return y


class Random(nn.Module):
    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        steps: list[Step] = []
        for kind in kinds:
            steps.append(Step(kind, steps))
        self.steps = nn.ModuleList(steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.enter(x)
        for step in self.steps:
            x = step(x, first)
        return x


def flops_of(result: Any) -> tuple[int, int]:
    ops = [op for call in result.calls for op in result.blocks[call.block].ops]
    return sum(op.forward_flops for op in ops), sum(op.backward_flops for op in ops)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
def test_a_random_model_traces_exactly(kinds: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Random(kinds), torch.randn(ROWS, TOKENS, WIDTH)
    program = capture(model, x, mean_square)
    result = trace_program(program, model_name="Random")
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: mean_square(model(x)))
    assert result.num_parameters == sum(p.numel() for p in model.parameters())
    torch.manual_seed(1)
    want = mean_square(model(x))
    gradients = gradients_of(want, model)
    torch.manual_seed(1)
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, want.detach())
    assert compare(found, gradients) == []
    if "conv" in kinds:
        return
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = FlopCounterMode(display=False), FlopCounterMode(display=False)
        with forward:
            loss = mean_square(model(x))
        with backward:
            torch.autograd.backward(loss)
    assert flops_of(result) == (forward.get_total_flops(), backward.get_total_flops())
