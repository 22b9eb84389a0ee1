"""What cannot be exported stays one op that runs, trains, shards and recomputes as the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.errors import TraceError
from autoplan.opaque import OpaqueCall
from autoplan.plan import Recompute
from autoplan.program import Program
from autoplan.tracer import trace
from tests.distributed import run_workers
from tests.kept_bytes import kept_by_autograd, kept_by_trace
from tests.models_for_tests import Gate, GatedNet, LinearChain, mean_square
from tests.numerics import compare
from tests.plans import hand_plan
from tests.programs import gradients_of, run_program

WIDTH = 16


class Gated(nn.Module):
    """A residual block; where it has a gate, which of two layers runs depends on the input."""

    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.gate = Gate(WIDTH) if has_gate else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + torch.tanh(self.inner(self.gate(x)))
        return out


class GatedChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Gated(index == 1) for index in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calm_and_wild(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))
    return 0.2 * x, 5.0 * x


def opaque_ops(program: Program) -> list[str]:
    return [op.target_name for graph in program.graphs for op in graph.ops if is_opaque(op.target)]


def is_opaque(target: Any) -> bool:
    return isinstance(target, OpaqueCall)


def expected(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients, zeros for a branch that is not taken."""
    loss = mean_square(model(x))
    return loss.detach(), gradients_of(loss, model)


def test_both_branches_of_one_program_equal_the_module() -> None:
    model = GatedChain()
    program = capture(model, calm_and_wild()[0], mean_square)
    assert opaque_ops(program) == ["opaque_Gate"]
    assert any(note.startswith("blocks.1.gate stays one op") for note in program.notes)
    losses = []
    for x in calm_and_wild():
        want, gradients = expected(model, x)
        got, found = run_program(program, model, [x])
        losses.append(got)
        torch.testing.assert_close(got, want)
        assert compare(found, gradients) == []
    torch.testing.assert_close(losses, [torch.tensor(0.138875842), torch.tensor(28.9513855)])


def _step(rank: int, options: dict[str, Any]) -> list[str]:
    problems = []
    for x in calm_and_wild(8):
        model = GatedChain().double()
        batch = x.double()
        want, gradients = expected(model, batch)
        rows = 8 // (options.get("dp", 1) * options.get("num_microbatches", 1))
        program = capture(model, batch, mean_square, microbatch_size=rows)
        plan = hand_plan(program, "GatedChain", **options)
        module = parallelize(plan, model, batch, mean_square, device="cpu")
        got = module.train_step(module.shard_batch(batch))
        if abs(float(got - want)) > 1e-12 * float(want):
            problems.append(f"loss {float(got)} is not {float(want)}")
        problems += compare(module.full_gradients(), gradients)
    return problems


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": Recompute(mode="full")},
        {"dp": 2, "zero_stage": 3},
        {"dp": 2, "zero_stage": 1, "recompute": Recompute(mode="full")},
        {"pp": 2, "num_microbatches": 2},
    ],
    ids=str,
)
def test_an_emitted_module_takes_either_branch(options: dict[str, Any]) -> None:
    world_size = options.get("dp", 1) * options.get("pp", 1)
    for problems in run_workers(_step, world_size, options, timeout_s=100):
        assert problems == []


def _own_branch(rank: int) -> bool:
    model = GatedChain()
    batch = calm_and_wild(2)[0]
    program = capture(model, batch, mean_square)
    plan = hand_plan(program, "GatedChain", dp=2, zero_stage=3)
    module = parallelize(plan, model, batch, mean_square, device="cpu")
    module.train_step(calm_and_wild(2)[rank])
    return all(torch.isfinite(g).all().item() for g in module.full_gradients().values())


def test_ranks_that_take_different_branches_still_agree_on_what_to_reduce() -> None:
    assert run_workers(_own_branch, 2, timeout_s=60) == [True, True]


def test_its_cost_is_that_of_the_dearer_branch() -> None:
    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = x if x.sum() > 0 else self.inner(x)
            return out

    result = trace(nn.Sequential(nn.Linear(8, 8), Lopsided()), torch.randn(2, 8), mean_square)
    (op,) = [op for block in result.blocks for op in block.ops if op.kind == "opaque"]
    assert op.forward_flops == 2 * 2 * 8 * 8
    assert [option.axis for option in op.options] == ["whole"]
    assert not op.may_mark


def test_kept_bytes_are_those_of_the_dearer_branch() -> None:
    model, (calm, _) = GatedChain(), calm_and_wild()
    real = kept_by_autograd(model, lambda: mean_square(model(calm)))
    assert kept_by_trace(trace(model, calm, mean_square)) == real


def test_a_shape_that_depends_on_data_makes_the_module_around_it_opaque() -> None:
    class Select(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x.sum(1) > 0]

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.select, self.inner = Select(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(self.select(x)).sum(0)
            return out

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pool())
    program = capture(model, torch.randn(4, WIDTH), mean_square)
    assert opaque_ops(program) == ["opaque_Pool"]
    x = torch.randn(4, WIDTH)
    want, gradients = expected(model, x)
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, want)
    assert compare(found, gradients) == []


def test_equal_opaque_blocks_share_a_class_and_unequal_ones_do_not() -> None:
    def graphs_of(model: nn.Module) -> list[int]:
        program = capture(model, torch.randn(2, 8), mean_square)
        return [call.graph for call in program.calls if call.fqn][1:]

    model = GatedNet(depth=6)
    assert len(set(graphs_of(model))) == 1
    gate: Any = model.blocks[3].get_submodule("gate")
    gate.limit = 2.0
    graphs = graphs_of(model)
    assert [i for i, graph in enumerate(graphs) if graph != graphs[0]] == [2]


def test_what_is_wrong_in_eager_mode_too_is_an_error_and_not_opaque() -> None:
    model = LinearChain()
    model.blocks[3] = nn.Linear(7, 7)
    with pytest.raises(TraceError, match="could not capture"):
        capture(model, torch.randn(2, 16), mean_square)


def test_a_branch_in_the_model_itself_is_an_error() -> None:
    class Top(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(TraceError, match=r"the model \(test_opaque\.py:\d+\): its control flow"):
        capture(Top(), torch.randn(2, 8), mean_square)


class Straight(torch.autograd.Function):
    """Rounds; its gradient is that of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, step: float) -> torch.Tensor:
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class Quantized(nn.Module):
    def __init__(self, step: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Straight.apply(self.inner(x), self.step)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("full_depth", [False, True])
def test_a_custom_autograd_function_keeps_its_own_backward(full_depth: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Quantized(0.25) for _ in range(4)))
    program = capture(model, torch.randn(4, WIDTH), mean_square, full_depth=full_depth)
    x = torch.randn(4, WIDTH)
    want, gradients = expected(model, x)
    assert float(gradients["0.inner.weight"].abs().max()) > 0
    got, found = run_program(program, model, [x])
    torch.testing.assert_close(got, want)
    assert compare(found, gradients) == []


def test_custom_functions_with_other_constants_are_other_classes() -> None:
    model = nn.Sequential(Quantized(0.25), Quantized(0.5), Quantized(0.25))
    program = capture(model, torch.randn(4, WIDTH), mean_square)
    graphs = [program.graphs[call.graph] for call in program.calls if call.fqn]
    names = [op.target_name for graph in graphs for op in graph.ops if is_opaque(op.target)]
    assert names == ["opaque_Straight", "opaque_Straight_2", "opaque_Straight"]


def test_a_program_with_opaque_calls_has_a_stable_fingerprint() -> None:
    def of(make: Callable[[], nn.Module]) -> str:
        return capture(make(), calm_and_wild()[0], mean_square).fingerprint

    assert of(GatedChain) == of(GatedChain)


def test_random_and_writing_modules_are_told() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.drop(self.norm(x if x.sum() > 0 else -x))
            return out

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Noisy())
    result = trace(model, torch.randn(4, WIDTH), mean_square)
    (op,) = [op for block in result.blocks for op in block.ops if op.kind == "opaque"]
    assert op.is_random
    assert op.mutates
    assert float(model.get_buffer("1.norm.running_mean").abs().max()) == 0
