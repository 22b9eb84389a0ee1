"""Gradients of parameters lie apart: told from the graph, and seen in what autograd makes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoplan import sharders
from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.gradient_memory import may_share_gradient
from autoplan.program import Program
from benchmarks.equality_draws import program_of as family_program
from benchmarks.equality_families import FAMILIES, build
from tests.distributed import run_workers
from tests.plans import hand_plan


class Aliased(nn.Module):
    """A model with a parameter whose gradient autograd makes as a view of one that goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.flat = nn.Parameter(torch.zeros(12))
        self.shift = nn.Parameter(torch.zeros(2, 6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.flat.view(2, 6)
        out: torch.Tensor = self.last((hidden + self.shift).exp() * self.scale)
        return out.square().mean()


def aliased() -> tuple[Aliased, torch.Tensor]:
    """Return the model in float64 and a batch."""
    torch.manual_seed(0)
    return Aliased().double(), torch.randn(4, 4, dtype=torch.float64)


def shared(program: Program) -> set[str]:
    """Return the FQNs of what may share the memory of its gradient in any call."""
    found = set()
    for call in program.calls:
        graph = program.graphs[call.graph]
        risky = may_share_gradient(graph)
        found |= {f for s, f in zip(graph.states, call.states, strict=True) if s.name in risky}
    return found


def test_what_is_added_may_share_and_what_is_multiplied_does_not() -> None:
    model, batch = aliased()
    assert shared(capture(model, batch, microbatch_size=2)) == {"flat", "shift"}


def test_a_bias_of_as_many_elements_as_the_result_may_share() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    batch = torch.randn(1, 3)
    found = shared(capture(model, batch, lambda out: out.sum()))
    assert found == {"0.bias", "1.bias"}
    assert shared(capture(model, torch.randn(2, 3), lambda out: out.sum())) == set()


def lying_together(rank: int, watched: dict[str, set[str]]) -> list[str]:
    """Return the parameters that are not watched and whose gradients share memory."""
    found = []
    for name, names in watched.items():
        model, family = build(name), FAMILIES[name]
        batch = family.batch(1, torch.Generator().manual_seed(1))
        given = {k: v for k, v in batch.items() if k != "labels" or name == "t5"}
        family.loss_fn(model(**given), batch).backward()  # type: ignore[no-untyped-call]
        named = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        storages = Counter(g.untyped_storage()._cdata for g in named.values())
        for key, gradient in named.items():
            storage = gradient.untyped_storage()
            is_alone = storages[storage._cdata] == 1 and storage.nbytes() == gradient.nbytes
            if not is_alone and key not in names:
                found.append(f"{name}: {key}")
    return found


def test_gradients_that_do_not_share_by_the_graph_do_not_share_in_fact() -> None:
    watched = {}
    for name in ("gpt2", "vit", "t5", "convnet"):
        program = family_program(name, 1)
        watched[name] = shared(program)
        trained = {f for call in program.calls for f in call.states}
        assert len(watched[name] & trained) < len(trained) / 2
    assert run_workers(lying_together, 1, watched) == [[]]


def gradients(rank: int, limit: int, num_microbatches: int, tp: int) -> list[str]:
    """Return the parameters whose gradients differ from those of one device."""
    sharders._TOGETHER_BYTES = limit
    model, _ = aliased()
    batch = torch.randn(
        4 * num_microbatches, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    losses = torch.stack([model(rows) for rows in torch.split(batch, 2)])
    losses.mean().backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model, example = aliased()
    program = capture(model, example, microbatch_size=2)
    plan = hand_plan(program, "Aliased", dp=2, tp=tp, num_microbatches=num_microbatches)
    module = parallelize(plan, model, example, device="cpu")
    module.train_step(module.shard_batch(batch))
    found = module.full_gradients()
    return [n for n, g in expected.items() if not torch.allclose(found[n], g, rtol=1e-10)]


@pytest.mark.parametrize(("num_microbatches", "tp"), [(1, 1), (2, 1), (1, 2)])
def test_gradients_that_are_reduced_in_place_change_no_other(
    num_microbatches: int, tp: int
) -> None:
    for limit in (1, 1 << 20):  # each alone, all together
        found = run_workers(gradients, 2 * tp, limit, num_microbatches, tp)
        assert found == [[]] * (2 * tp)


def in_another_order(rank: int) -> list[list[float]]:
    """Return the gradients of two parameters that each rank makes in another order."""
    first, last = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))
    reducer = sharders.GradientReducer(
        parameters=[first, last], group=dist.distributed_c10d._get_default_group(), overlaps=True
    )
    reducer.before_step(1)
    reducer.before_microbatch(0, 1)
    for parameter in (first, last) if rank == 0 else (last, first):
        parameter.square().sum().backward()  # type: ignore[no-untyped-call]
    reducer.after_step()
    assert first.grad is not None
    assert last.grad is not None
    return [first.grad.tolist(), last.grad.tolist()]


def test_ranks_that_make_gradients_in_another_order_reduce_the_same_together() -> None:
    for found in run_workers(in_another_order, 2):
        assert found == [[2.0, 4.0], [6.0]]
