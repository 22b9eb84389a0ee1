"""Models and batches in forms that users write: what is captured, noted, and said of mistakes."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import autoplan
from autoplan.batches import batch_dims, reduce_loss
from autoplan.capturer import capture
from autoplan.errors import InfeasibleError, TraceError
from autoplan.plan import Plan
from autoplan.tracer import trace, trace_program
from tests.distributed import run_workers
from tests.numerics import compare
from tests.programs import gradients_of, run_program


@dataclass
class Rows:
    """A batch as a dataclass."""

    x: torch.Tensor
    mask: torch.Tensor


class FromDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = self.linear(rows.x)
        loss = (made.square().mean(1) * rows.mask).mean()
        return made, loss, rows.mask.sum()


def test_a_dataclass_and_a_mapping_of_another_type_are_batches() -> None:
    batch = {"rows": Rows(torch.randn(6, 4), torch.ones(6))}
    assert batch_dims(batch) == (0, 0)
    assert batch_dims(batch, {"rows": {"mask": None}}) == (0, None)
    assert capture(FromDataclass(), batch).batch_dims == (0, 0)
    assert batch_dims(UserDict(a=torch.ones(3, 2), b=torch.ones(3))) == (0, 0)


def test_the_loss_in_a_tuple_is_its_only_number_with_a_gradient() -> None:
    model, batch = FromDataclass(), {"rows": Rows(torch.randn(6, 4), torch.ones(6))}
    loss, _ = run_program(capture(model, batch), model, pytree.tree_leaves(batch))
    assert torch.equal(loss, model(**batch)[1])


def test_a_missing_loss_says_what_the_model_returns() -> None:
    two = (torch.ones(1, requires_grad=True), torch.ones((), requires_grad=True))
    for output, said in ((two, "a tuple of 2: a tensor of shape"), ({"logits": 1}, "'logits'")):
        with pytest.raises(TraceError, match=said):
            reduce_loss(output, None, ())


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return x + state


def test_a_batch_that_forward_cannot_take_names_its_arguments() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(TraceError, match=r"\(x: .*state.*'state'; of the 2 parts .* the last goes"):
        capture(TwoInputs(), (x, x), lambda out, target: (out - target).mean())
    with pytest.raises(TraceError, match=r"'state'; the batch has the keys 'x', 'hidden'"):
        capture(TwoInputs(), {"x": x, "hidden": x}, lambda out: out.mean())


def test_a_batch_of_another_kind_is_told_without_a_line_of_ours() -> None:
    with pytest.raises(TraceError, match=r"line unknown.*must be Tensor, not list"):
        capture(nn.Linear(4, 4), [torch.randn(4, 4)], lambda out: out.mean())


class Checked(nn.Module):
    """It counts what is chosen, and asserts that it is as much as there should be."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        torch._assert_async((made[chosen] < 1e6).all())
        _ = chosen.sum().item()
        loss: torch.Tensor = made.masked_fill(chosen[:, None], 0.0).square().mean()
        return loss


def test_what_only_checks_values_is_no_part_of_a_program() -> None:
    model, chosen = Checked(), torch.tensor([True, False, True, False])
    batch = {"x": torch.randn(4, 4), "chosen": chosen}
    program = capture(model, batch)
    names = {op.target_name for graph in program.graphs for op in graph.ops}
    assert not any("assert" in name or "item" in name or "nonzero" in name for name in names)
    assert program.notes == ()
    loss, _ = run_program(program, model, pytree.tree_leaves(batch))
    assert torch.equal(loss, model(**batch))


class Branching(nn.Module):
    """A module that must stay one op, in a model whose loss is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.gate(x)}


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x) if x.mean() > 0 else -self.linear(x)
        return made


def test_a_mistake_behind_a_module_that_stays_one_op_is_told() -> None:
    with pytest.raises(TraceError, match=r"'logits'.*met with gate kept as one op"):
        capture(Branching(), torch.randn(4, 4))


class Vmapped(nn.Module):
    def forward(this, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.vmap(lambda row: row.sum() * row)(x)
        return made.mean()


def test_a_transform_of_torch_func_is_refused_by_line() -> None:
    with pytest.raises(TraceError, match=r"test_user_models\.py:\d+\): _add_batch_dim.*vmap"):
        capture(Vmapped(), torch.randn(4, 4).requires_grad_())


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: Any) -> torch.Tensor:
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(scores, labels[0], lengths, labels[1], reduction="sum")
        return loss / x.shape[0]


def test_a_ctc_loss_is_captured_with_its_gradient() -> None:
    model = Speech()
    labels = (torch.randint(1, 7, (3, 4)), torch.tensor([4, 2, 3]))
    batch = {"x": torch.randn(3, 12, 5), "lengths": torch.tensor([12, 9, 10]), "labels": labels}
    program = capture(model, batch)
    loss, gradients = run_program(program, model, pytree.tree_leaves(batch))
    assert torch.equal(loss, model(**batch))
    for name, gradient in gradients_of(model(**batch), model).items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6), name
    assert trace(model, batch).notes == ()


SUMS = {
    "sum": lambda out: out.square().sum(),
    "reduction": lambda out: F.mse_loss(out, torch.zeros_like(out), reduction="sum"),
    "scaled": lambda out: out.square().sum() - 0.5 * out.sum(),
    "in steps": lambda out: 2 * out.sum(0).sum(),
}
MEANS = {
    "mean": lambda out: out.square().mean(),
    "of sums of rows": lambda out: out.sum(1).mean(),
    "by rows": lambda out: out.square().sum() / out.size(0),
    "times a share": lambda out: out.square().sum() * (1 / out.size(0)),
}


@pytest.mark.parametrize("name", [*SUMS, *MEANS])
def test_a_loss_that_is_a_sum_over_rows_is_noted(name: str) -> None:
    loss = SUMS.get(name) or MEANS[name]
    notes = trace(nn.Linear(4, 3), torch.randn(8, 4), loss).notes
    assert [note for note in notes if "sum over rows" in note] == list(notes)
    assert bool(notes) == (name in SUMS)


class SequenceFirst(nn.Module):
    """Attention, or a recurrence, over dimension 0 of (tokens, rows, features)."""

    def __init__(self, is_attention: bool) -> None:
        super().__init__()
        self.is_attention = is_attention
        self.attention, self.lstm = nn.MultiheadAttention(8, 2), nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, _ = self.attention(x, x, x, need_weights=False) if self.is_attention else self.lstm(x)
        loss: torch.Tensor = made.square().mean()
        return loss


@pytest.mark.parametrize("is_attention", [True, False])
def test_a_batch_that_is_looked_for_in_the_sequence_is_noted(is_attention: bool) -> None:
    model, x = SequenceFirst(is_attention), torch.randn(6, 4, 8)
    assert any("compares rows" in note for note in trace(model, x).notes)
    right = trace_program(capture(model, x, batch_dim=1), model_name="").notes
    assert not any("compares rows" in note for note in right)


class Layer(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(8, 8), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.shared(torch.tanh(self.own(x)))
        return made


class SharedParts(nn.Module):
    """Layers of their own that have one part in common."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(shared) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _shared_parts() -> tuple[SharedParts, torch.Tensor]:
    torch.manual_seed(0)
    return SharedParts().double(), torch.randn(4, 8, dtype=torch.float64)


def _train_in_two_stages(rank: int, plan: Plan) -> tuple[float, dict[str, torch.Tensor], float]:
    model, x = _shared_parts()
    module = plan.parallelize(model, x, device="cpu")
    loss = float(module.train_step(module.shard_batch(x)))
    gradients = module.full_gradients()
    return loss, gradients, float(module.clip_grad_norm_(1.0))


def _train_alone(rank: int) -> tuple[float, dict[str, torch.Tensor]]:
    model, x = _shared_parts()
    loss = model(x)
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_part_of_layers_on_both_stages_gets_the_gradients_of_all() -> None:
    model, x = _shared_parts()
    plan = autoplan.estimate(model, "2:cpu", x, pp=2, microbatch_size=2, schedule="1f1b").plan
    loss, gradients, norm = run_workers(_train_in_two_stages, 2, plan)[1]
    ((expected_loss, expected),) = run_workers(_train_alone, 1)
    assert abs(loss - expected_loss) < 1e-12
    assert compare({n: gradients[n] for n in expected}, expected) == []
    assert norm == pytest.approx(float(torch.cat([g.flatten() for g in expected.values()]).norm()))


class Stateful(nn.Module):
    """It changes a buffer as `how` says, and reads a table that is no buffer."""

    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.table = how, nn.Linear(4, 4), torch.arange(4.0)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.last = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        here = made.detach().mean(0)
        if self.how == "assigned":
            self.mean, self.steps = self.mean * 0.5 + here, self.steps + 1
        elif self.how == "assigned to data":
            self.mean.data = self.mean.data * 0.5 + here
            self.steps += 1
        elif self.how == "written to data":
            self.mean.data.mul_(0.5).add_(here)
            self.steps.data += 1
        elif self.how == "no buffer":
            self.last = here
        else:
            self.mean = here.double()
        loss: torch.Tensor = (made * self.mean + self.table).square().mean()
        return loss


@pytest.mark.parametrize("how", ["assigned", "assigned to data", "written to data"])
def test_a_buffer_that_the_forward_changes_is_a_state_however_it_does(how: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Stateful(how)), torch.randn(3, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    program = capture(model, x)
    assert "the forward changes 1.mean and 1 other buffers" in program.notes[0]
    loss, _ = run_program(program, model, [x])
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(before)
    assert torch.equal(loss, model(x))
    assert int(after["1.steps"]) == 1
    assert torch.equal(after["1.mean"], model.state_dict()["1.mean"])


@pytest.mark.parametrize(("how", "said"), [("no buffer", "1.last"), ("other dtype", "1.mean")])
def test_a_state_that_a_plan_cannot_keep_is_refused_by_name(how: str, said: str) -> None:
    with pytest.raises(TraceError, match=f"{said}.*must"):
        capture(nn.Sequential(nn.Linear(4, 4), Stateful(how)), torch.randn(3, 4))


class Momentum(nn.Module):
    """A frozen copy that follows the trained layer, and batch norm over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.online = nn.Linear(8, 4)
        self.target = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.target.weight.data.mul_(0.9).add_(self.online.weight[:, :4].data, alpha=0.1)
            goal = self.target(x)
        loss: torch.Tensor = (self.online(self.stem(x)) - goal).square().mean()
        return loss


def test_a_parameter_that_the_forward_changes_is_neither_sliced_nor_sharded() -> None:
    plan = autoplan.optimize(Momentum(), "2:cpu", torch.randn(8, 4), workers=1)
    assert (plan.mesh.tp, plan.zero_stage) == (1, 0)
    with pytest.raises(InfeasibleError, match=r"the parameter target\.weight.*pin tp=1"):
        autoplan.optimize(Momentum(), "2:cpu", torch.randn(8, 4), tp=2, workers=1)


def test_a_model_that_cannot_run_on_one_row_gets_two_at_least() -> None:
    options: tuple[dict[str, Any], ...] = ({}, {"pp": 2})
    for pins in options:
        plan = autoplan.optimize(Momentum(), "2:cpu", torch.randn(8, 4), workers=1, **pins)
        assert plan.microbatch_size > 1


def _changed_copy(rank: int, plan: Plan) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Momentum(), torch.randn(8, 4)
    module = plan.parallelize(model, x, device="cpu")
    return float(module.train_step(x)), module.full_state()["target.weight"]


def _changed_alone(rank: int) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Momentum(), torch.randn(8, 4)
    return float(model(x)), model.target.weight


def test_a_call_that_only_writes_runs_and_its_write_stays() -> None:
    plan = autoplan.estimate(Momentum(), "1:cpu", torch.randn(8, 4), microbatch_size=8).plan
    ((loss, weight),) = run_workers(_changed_copy, 1, plan)
    ((expected_loss, expected),) = run_workers(_changed_alone, 1)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert torch.allclose(weight, expected)


class Slope(nn.Module):
    """The square of a network's slope: its gradient is a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return slope.square().mean()


def test_gradients_in_a_forward_are_refused_by_name() -> None:
    with pytest.raises(TraceError, match=r"torch\.autograd\.grad in forward"):
        capture(Slope(), torch.randn(4, 2))
