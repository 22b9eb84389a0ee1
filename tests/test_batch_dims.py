"""A batch that is not dimension 0, where the user tells so: forms, errors, planning and running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoplan
from autoplan.batches import BatchDims, batch_dims, batch_rows, microbatch_like
from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.errors import TraceError
from autoplan.plan import Plan
from autoplan.planning_commands import parse_batch_dim
from autoplan.training import global_batch
from tests.distributed import run_workers
from tests.numerics import compare

ROWS = 4
TOKENS = 6
WIDTH = 16
VOCABULARY = 32

Batch = Mapping[str, torch.Tensor]
DIMS: Mapping[str, Any] = {
    "sequence_first": {"ids": 1, "labels": 1, "mask": None},
    "three_positions": {"position_ids": 1},
    "recurrent": (1, 0),
}


class SequenceFirst(nn.Module):
    """`nn.TransformerEncoder` as it is by default: (sequence, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(ids), mask=mask))  # type: ignore[no-any-return]


class ThreePositions(nn.Module):
    """Positions of time, height and width as one (3, batch, sequence) tensor, as Qwen-VL has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.axes = nn.ModuleList(nn.Embedding(TOKENS, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for axis, table in zip(position_ids, self.axes, strict=True):
            x = x * (1 + table(axis))
        return self.head(x)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """`nn.LSTM` as it is by default, and a target of one class a row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][-1])  # type: ignore[no-any-return]


def _token_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def build(name: str) -> tuple[nn.Module, Any, Callable[..., torch.Tensor]]:
    """Return a model in float64, a batch of `ROWS` rows, and the loss."""
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS, TOKENS))
    labels = torch.randint(VOCABULARY, (ROWS, TOKENS))
    positions = torch.randint(TOKENS, (3, ROWS, TOKENS))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    first = {"ids": ids.T.contiguous(), "labels": labels.T.contiguous(), "mask": mask}
    three = {"ids": ids, "labels": labels, "position_ids": positions}
    series = (torch.randn(TOKENS, ROWS, WIDTH).double(), labels[:, 0].clone())
    built: dict[str, tuple[nn.Module, Any, Callable[..., torch.Tensor]]] = {
        "sequence_first": (SequenceFirst(), first, _token_loss),
        "three_positions": (ThreePositions(), three, _token_loss),
        "recurrent": (Recurrent(), series, F.cross_entropy),
    }
    model, batch, loss_fn = built[name]
    return model.double(), batch, loss_fn


def alone(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the user's own module on the whole batch."""
    model, batch, loss_fn = build(name)
    loss: Any
    if isinstance(batch, tuple):
        loss = loss_fn(model(batch[0]), batch[1])
    else:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        loss = loss_fn(model(**inputs), batch)
    torch.autograd.backward(loss)
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def plan(name: str, **pins: Any) -> Plan:
    """Return a plan for two processes; micro-batches of one row where nothing else is pinned."""
    model, batch, loss_fn = build(name)
    pins = {"microbatch_size": 1, **pins}
    return autoplan.optimize(
        model, "2:cpu", batch, loss_fn=loss_fn, batch_dim=DIMS[name], compare=False, **pins
    )


def differences(rank: int, plans: list[tuple[str, str]]) -> list[str]:
    """Run plans, read from their JSON, on this rank; returns what differs from one device."""
    problems = []
    for name, text in plans:
        expected_loss, expected = alone(name)
        model, batch, loss_fn = build(name)
        module = parallelize(Plan.from_json(text), model, batch, loss_fn, device="cpu")
        loss = module.train_step(module.shard_batch(batch))
        found = compare(module.full_gradients(), expected)
        if abs(float(loss - expected_loss)) > 1e-12:
            found.append(f"loss {float(loss)} is not {float(expected_loss)}")
        problems += [f"{name}: {problem}" for problem in found]
    return problems


def test_plans_split_the_batch_where_it_was_told_to_be() -> None:
    plans = [(name, plan(name, dp=2)) for name in DIMS]
    plans += [("sequence_first", plan("sequence_first", pp=2, microbatch_size=2))]
    plans += [("sequence_first", plan("sequence_first", tp=2))]
    assert [p.num_microbatches for _, p in plans] == [2, 2, 2, 2, 4]
    texts = [(name, p.to_json()) for name, p in plans]
    for problems in run_workers(differences, 2, texts):
        assert problems == []


def test_micro_batches_are_captured_in_the_told_dimensions() -> None:
    model, batch, loss_fn = build("sequence_first")
    program = capture(model, batch, loss_fn, microbatch_size=2, batch_dim=DIMS["sequence_first"])
    assert dict(zip(program.input_keys, program.batch_dims, strict=True)) == {
        "['ids']": 1, "['labels']": 1, "['mask']": None,
    }  # fmt: skip
    assert [meta.shape for meta in program.input_metas] == [(6, 2), (6, 2), (6, 6)]


def test_a_trace_and_a_plan_say_where_the_batch_is() -> None:
    model, batch, loss_fn = build("three_positions")
    trace = autoplan.trace(model, batch, loss_fn, batch_dim={"position_ids": -2})
    assert trace.batch_dims == (0, 0, 1)
    assert plan("recurrent").batch_dims == (1, 0)


def test_an_estimate_takes_the_rows_of_the_told_dimension() -> None:
    model, batch, loss_fn = build("recurrent")
    priced = autoplan.estimate(model, "2:cpu", batch, loss_fn=loss_fn, batch_dim=(1, 0))
    assert priced.plan.global_batch_size == ROWS
    assert priced.plan.num_microbatches == 2


def tensors(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    """Return tensors of the shapes."""
    return tuple(torch.zeros(shape) for shape in shapes)


def test_one_number_holds_for_every_input_of_that_size() -> None:
    batch = tensors((5, 3), (5, 3, 7), (5, 5), ())
    assert batch_dims(batch, 1) == (1, 1, None, None)
    assert batch_dims(batch) == (0, 0, 0, None)
    assert batch_rows(batch, 1) == 3


def test_what_is_told_beats_equal_sizes() -> None:
    batch = {"x": tensors((3, 4))[0], "sections": tensors((3,))[0]}
    assert batch_dims(batch) == (0, 0)
    assert batch_dims(batch, {"sections": None}) == (0, None)


def test_parts_of_a_part_are_told_by_its_one_number() -> None:
    batch = {"images": tensors((3, 2, 8), (1, 2)), "labels": tensors((2,))[0]}
    dims = batch_dims(batch, {"images": 1})
    assert dims == (1, 1, 0)
    example = microbatch_like(batch, 6, dims)
    assert [x.shape for x in (*example["images"], example["labels"])] == [(3, 6, 8), (1, 6), (6,)]


@pytest.mark.parametrize(
    ("batch", "told", "message"),
    [
        (tensors((5, 3), (3,)), 1, r"\[1\] of shape \(3,\) has no dimension 1"),
        (tensors((5, 3)), (1, 0), "tells 2 parts, the batch has 1 there"),
        (tensors((5, 3), (4,)), (1, 0), r"\[1\] .* has 4 rows in its batch dimension 0, .* has 3"),
        ({"x": tensors((5, 3))[0]}, {"y": 1}, "tells 'y', which the batch lacks; it has 'x'"),
        (tensors((5, 3)), 1.0, "is 1.0: it must be an int, None for no batch"),
        (tensors((5, 3)), True, "is True: it must be an int"),
        (tensors((5, 3)), {"x": 1}, "it has no keys"),
        (tensors((5, 3)), BatchDims((0, 0)), "has 1 tensors, batch dimensions are known for 2"),
    ],
)
def test_a_batch_dimension_that_does_not_fit_is_refused(
    batch: Any, told: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        batch_dims(batch, told)


def test_a_batch_without_a_batch_dimension_is_refused() -> None:
    with pytest.raises(TraceError, match="no tensor with a batch dimension"):
        batch_dims(tensors((5, 3)), None)


def test_the_command_line_tells_a_batch_dimension_in_three_forms() -> None:
    assert parse_batch_dim("1") == 1
    assert parse_batch_dim("1,none") == (1, None)
    assert parse_batch_dim("ids=0, positions=-2,mask=None") == {
        "ids": 0, "positions": -2, "mask": None,
    }  # fmt: skip
    for text in ("x=1,0", "one", "x="):
        with pytest.raises(ValueError, match="--batch-dim"):
            parse_batch_dim(text)


def test_the_training_loop_grows_a_batch_along_its_batch_dimensions() -> None:
    batch = {"x": torch.arange(6).reshape(3, 2), "mask": torch.eye(3)}
    dims = batch_dims(batch, {"x": 1, "mask": None})
    grown = global_batch(batch, 5, 0, dims)
    assert grown["x"].shape == (3, 5)
    assert torch.equal(grown["x"][:, :2], batch["x"])
    assert grown["mask"] is batch["mask"]
    later = global_batch(batch, 5, 1, dims)
    assert not torch.equal(later["x"], grown["x"])
