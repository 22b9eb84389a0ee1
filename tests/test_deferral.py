"""What a split backward leaves for later, from the trace, against autograd's own graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from autoplan.deferral import op_parts, released_bytes, splits, stage_backward
from autoplan.graph import Trace
from autoplan.local import localize
from autoplan.local_blocks import LocalBlock
from autoplan.split_backward import reads_again
from autoplan.tracer import trace
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.models_for_tests import LinearChain, mean_square


class Layers(nn.Module):
    """Linear layers in the order of their names, each name one layer, with a skip around each."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in dict.fromkeys(order)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.order:
            x = x + self.layers[name](x).relu()
        return x


def gpt(*, is_tied: bool = False) -> Trace:
    config = GPTConfig(
        vocab_size=32, max_tokens=8, num_layers=2, num_heads=2, width=8, is_head_tied=is_tied
    )
    return trace(GPT(config), batch_like(config, 2, 8), loss_fn, microbatch_size=2)


def local_of(traced: Trace, call: int) -> LocalBlock:
    return localize(traced.blocks[traced.calls[call].block], {}, 1, frozenset())


def targets(local: LocalBlock, part: str) -> set[str]:
    parts = op_parts(local)
    return {op.op.target for op in local.ops if op.op is not None and parts[op.name] == part}


def test_layers_of_a_block_join_and_an_embedding_is_left_for_later() -> None:
    traced = gpt()
    block = local_of(traced, 1)
    assert targets(block, "joint") == {"aten.linear.default", "aten.layer_norm.default"}
    assert targets(block, "weights") == set()
    assert "aten.embedding.default" in targets(local_of(traced, 0), "weights")


def test_what_is_let_go_of_lies_above_the_last_parameters() -> None:
    traced = gpt()
    head = local_of(traced, len(traced.calls) - 1)
    logits = 2 * 7 * 32 * 4
    assert logits <= released_bytes(head, op_parts(head)) <= 3 * logits
    # A block ends with a product, whose input its weights need.
    block = local_of(traced, 1)
    assert released_bytes(block, op_parts(block)) == 0


@pytest.mark.parametrize("order", ["abcd", "abac", "aabc", "abbc", "abcb", "abca"])
def test_stages_that_cannot_be_split_are_those_of_autograd(order: str) -> None:
    traced = trace(Layers(order), torch.randn(2, 6), mean_square, microbatch_size=2)
    calls = [i for i, call in enumerate(traced.calls) if call.states]
    assert len(calls) == len(order), "a block for each layer"
    for start in range(1, len(order)):
        model = Layers(order)
        entered = torch.randn(2, 6, requires_grad=True)
        made = entered
        for name in order[start:]:
            made = made + model.layers[name](made).relu()
        is_whole = reads_again([made], [entered])
        expected = "whole" if is_whole else "split"
        assert stage_backward(traced, range(calls[start], len(traced.calls))) == expected


class Biased(nn.Module):
    """Layers that add what one of them made of its parameters alone, as T5 adds positions."""

    def __init__(self, num_layers: int, source: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(num_layers))
        self.table = nn.ParameterList(
            nn.Parameter(torch.randn(6)) if i == source else None for i in range(num_layers)
        )
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None
        for index, layer in enumerate(self.layers):
            if index == self.source:
                bias = self.table[index].exp()
            x = x + layer(x).relu()
            if bias is not None:
                x = x * bias
        return x


@pytest.mark.parametrize("source", [0, 1, 3])
def test_a_value_of_parameters_alone_that_is_handed_on_forbids_a_split(source: int) -> None:
    traced = trace(Biased(4, source), torch.randn(2, 6), mean_square, microbatch_size=2)
    place = next(i for i, call in enumerate(traced.calls) if "exp" in call.outs)
    assert any("exp" in call.args for call in traced.calls[place + 1 :])
    assert splits(traced) is (place == 0), "the first stage has nothing to send back"
    assert stage_backward(traced, (place,)) == ("whole" if place else "late")
    rest = stage_backward(traced, range(max(1, place), len(traced.calls)))
    assert rest == "split", "nothing is handed on by the last stage"


@pytest.mark.parametrize(("order", "expected"), [("abcd", True), ("abcb", False), ("abca", True)])
def test_models_split_wherever_they_are_cut(order: str, expected: bool) -> None:
    traced = trace(Layers(order), torch.randn(2, 6), mean_square, microbatch_size=2)
    assert splits(traced) is expected


def test_the_first_stage_is_all_later_and_tied_ends_are_apart() -> None:
    traced = gpt(is_tied=True)
    assert stage_backward(traced, (0, 1)) == "late"
    assert splits(traced)
    chain = trace(LinearChain(depth=3), torch.randn(2, 16), mean_square, microbatch_size=2)
    assert _kinds(chain) == ["late", "split", "split", "split"][: len(chain.calls)]


def _kinds(traced: Trace) -> Sequence[str]:
    return [stage_backward(traced, (call,)) for call in range(len(traced.calls))]
