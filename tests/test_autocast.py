"""Kept bytes and results under autocast and in bfloat16 are those of a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.backends import Backend
from autoplan.capturer import capture
from autoplan.runner import true_metas
from autoplan.tracer import trace
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import ConvNet, TinyGPT, mean_square
from tests.numerics import compare
from tests.programs import gradients_of, run_program

BACKENDS: tuple[Backend, ...] = ("cpu", "cuda")


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def gpt(dropout: float) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 16))
    return TinyGPT(dropout), (ids, ids.clone()), token_loss


def conv() -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    return ConvNet(), (torch.randn(4, 3, 16, 16), torch.tensor([1, 2, 3, 4])), F.cross_entropy


CASES = {"gpt": lambda: gpt(0.0), "gpt_dropout": lambda: gpt(0.1), "conv": conv}


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_under_autocast_equal_a_real_run(name: str) -> None:
    model, batch, loss_fn = CASES[name]()
    result = trace(model, batch, loss_fn, autocast=torch.bfloat16)

    def run() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = loss_fn(model(batch[0]), batch[1])
            return loss

    assert kept_by_trace(result) == kept_by_autograd(model, run)
    assert kept_by_trace(result) != kept_by_trace(trace(model, batch, loss_fn))


@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_in_bfloat16_equal_a_real_run(name: str) -> None:
    model, batch, loss_fn = CASES[name]()
    model = model.to(torch.bfloat16)
    if batch[0].is_floating_point():
        batch = (batch[0].to(torch.bfloat16), batch[1])
    result = trace(model, batch, loss_fn)
    real = kept_by_autograd(model, lambda: loss_fn(model(batch[0]), batch[1]))
    assert kept_by_trace(result) == real


def test_crossing_values_have_the_dtype_of_autocast() -> None:
    model, batch, loss_fn = gpt(0.0)
    program = capture(model, batch, loss_fn, autocast=torch.bfloat16)
    plain = capture(model, batch, loss_fn)
    assert program.autocast is torch.bfloat16
    assert program.fingerprint != plain.fingerprint
    inner = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    chain = capture(inner, torch.randn(2, 8), mean_square, autocast=torch.bfloat16)
    assert chain.metas[chain.calls[0].outs[0]].dtype is torch.bfloat16


class PartlyCast(nn.Module):
    """A region in bfloat16, and in it one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.first(self.norm(x))
            with torch.autocast("cpu", enabled=False):
                x = self.second(x.float()).tanh()
        out: torch.Tensor = x + self.first(x)
        return out


def test_autocast_inside_forward_runs_and_keeps_as_eager_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(PartlyCast() for _ in range(3)))
    x = torch.randn(4, 16)
    program = capture(model, x, mean_square)
    want = mean_square(model(x))
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, want.detach())
    assert compare(found, gradients_of(want, model)) == []
    result = trace(model, x, mean_square)
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: mean_square(model(x)))
    gemms = [op for op in result.blocks[0].ops if op.kind == "gemm"]
    assert [op.dtype for op in gemms] == ["bfloat16", "float32", "float32"]


def test_autocast_of_another_device_inside_forward_is_noted() -> None:
    class OnGpu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out: torch.Tensor = self.inner(x)
            return out

    result = trace(nn.Sequential(OnGpu()), torch.randn(2, 8), mean_square)
    assert any("autocast inside forward is for another device" in note for note in result.notes)


def test_names_in_a_region_may_be_those_of_ops_outside() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            with torch.no_grad():
                z = self.second(x)
            out: torch.Tensor = self.second(y) * z + y
            return out

    torch.manual_seed(0)
    model, x = nn.Sequential(Twice()), torch.randn(2, 8)
    want = mean_square(model(x))
    got, found = run_program(capture(model, x, mean_square), model, [x])
    torch.testing.assert_close(got, want.detach())
    assert compare(found, gradients_of(want, model)) == []


class OnDevice(nn.Module):
    """A norm, a product, a softmax, and a cast that says what it wants."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.inner(self.norm(self.inner(x))).softmax(-1)
        out: torch.Tensor = scores.to(torch.bfloat16)
        return out


def test_a_trace_for_cuda_casts_what_autocast_casts_there() -> None:
    model, x = nn.Sequential(OnDevice()), torch.randn(4, 8)
    dtypes: dict[str, dict[str, str]] = {}
    for backend in BACKENDS:
        result = trace(model, x, mean_square, backend=backend, autocast=torch.bfloat16)
        ops = [op for block in result.blocks for op in block.ops]
        dtypes[backend] = {op.target.split(".")[1]: op.dtype for op in reversed(ops)}
    assert dtypes["cpu"]["layer_norm"] == "bfloat16"
    assert dtypes["cuda"]["layer_norm"] == "float32"
    assert dtypes["cuda"]["softmax"] == "float32"
    assert dtypes["cuda"]["linear"] == dtypes["cpu"]["linear"] == "bfloat16"
    assert dtypes["cuda"]["to"] == dtypes["cpu"]["to"] == "bfloat16"


def test_a_loss_keeps_float32_on_cuda_under_autocast() -> None:
    model, batch, loss_fn = gpt(0.0)
    result = trace(model, batch, loss_fn, backend="cuda", autocast=torch.bfloat16)
    (loss,) = (op for b in result.blocks for op in b.ops if "cross_entropy" in op.target)
    logits = 2 * 16 * 50
    assert sorted(saved.nbytes for saved in loss.saved)[-1] == 4 * logits
    casts = [cast for b in result.blocks for op in b.ops for cast in op.casts]
    assert casts
    assert result.fingerprint == trace(model, batch, loss_fn, autocast=torch.bfloat16).fingerprint


def test_values_that_cross_stages_have_the_dtype_of_the_device() -> None:
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)))
    program = capture(inner, torch.randn(2, 8), mean_square, autocast=torch.bfloat16)
    crossing = program.calls[0].outs[0]
    assert true_metas(program, "cpu") == dict(program.metas)
    assert program.metas[crossing].dtype is torch.bfloat16
    assert true_metas(program, "cuda")[crossing].dtype is torch.float32
