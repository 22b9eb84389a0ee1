"""A program survives the way to another process, or is not sent at all."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import pytest
import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.program import Program
from autoplan.program_pickles import packed, unpacked
from tests.models_for_tests import GatedNet, mean_square
from tests.numerics import build, global_batch, program_of
from tests.programs import run_program


class Weighted(nn.Module):
    """Casts inside its forward, and multiplies by numbers that are no state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        out: torch.Tensor = y.float() * torch.tensor([0.5, 2.0] * 4)
        return out


def sent(program: Program) -> Program:
    """Return what another process makes of a program and sends back."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lambda: theirs.send(packed(program)), daemon=True)
    process.start()
    data = ours.recv()
    process.join()
    found = unpacked(data, program.fingerprint)
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["gpt", "gpt_dropout", "llama"])
def test_a_program_that_was_sent_is_the_same(name: str) -> None:
    program = program_of(name)
    assert sent(program) == program


def test_a_program_that_was_sent_computes_the_same() -> None:
    model, _ = build("gpt")
    program, batch = program_of("gpt"), tuple(global_batch(2).values())
    loss, gradients = run_program(program, model, batch)
    again, gradients_again = run_program(sent(program), model, batch)
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name], gradient), name


def test_autocast_regions_and_constants_are_sent() -> None:
    model, x = Weighted(), torch.randn(4, 8)
    program = capture(model, x, mean_square)
    assert program.constants
    found = sent(program)
    loss, gradients = run_program(found, model, (x,))
    expected = mean_square(model(x))
    assert torch.equal(loss, expected.detach())
    (gradient,) = torch.autograd.grad(expected, [model.inner.weight])
    assert torch.equal(gradients["inner.weight"], gradient)


def test_a_program_with_a_module_as_one_op_is_not_sent() -> None:
    model = GatedNet()
    program = capture(model, torch.randn(4, 8), mean_square)
    assert packed(program) is None
    assert unpacked(None, program.fingerprint) is None


def test_what_is_read_must_be_the_program_that_is_wanted() -> None:
    program = program_of("gpt")
    other = replace(program, loss="another")
    assert unpacked(packed(other), program.fingerprint) is None
    assert unpacked(b"no pickle", program.fingerprint) is None
