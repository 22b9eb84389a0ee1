"""The captured chain is the model, at every depth and for every form of batch."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoplan.capturer import capture, meta_copy, microbatch_like, split_batch
from autoplan.errors import TraceError
from autoplan.program import Program, refs
from autoplan.shortening import find_runs
from tests.models_for_tests import LinearChain, TinyGPT, mean_square


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens(rows: int = 2, seq: int = 16) -> torch.Tensor:
    return torch.randint(0, 50, (rows, seq))


def hf_model(kind: str, depth: int) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=32, n_layer=depth, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=2
        )
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=depth,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
        )
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def shape_of(program: Program) -> list[tuple[str, str, int, int]]:
    """Return what must not depend on shortening: per call its FQN, graph, and arity."""
    return [
        (call.fqn, program.graphs[call.graph].fingerprint, len(call.args), len(call.outs))
        for call in program.calls
    ]


def block_fqns(program: Program) -> list[str]:
    return [call.fqn for call in program.calls if call.fqn]


def assert_is_chain(program: Program) -> None:
    """Every value is made before it is read, and every state is bound."""
    made = {*program.inputs, *program.constants, *program.side_states}
    for op in program.side_ops:
        assert set(op.inputs()) <= made
        made.add(op.name)
    for call in program.calls:
        graph = program.graphs[call.graph]
        assert set(call.args) <= made
        assert len(call.states) == len(graph.states)
        known = {*graph.inputs, *(state.name for state in graph.states)}
        for op in graph.ops:
            assert set(op.inputs()) <= known
            known.add(op.name)
        assert set(graph.outputs) <= known
        made |= set(call.outs)
    assert program.loss in made


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_shortening_gives_the_program_of_full_depth(kind: str) -> None:
    model = hf_model(kind, 6)
    batch = {"input_ids": tokens(), "labels": tokens()}
    short, full = capture(model, batch), capture(model, batch, full_depth=True)
    assert shape_of(short) == shape_of(full)
    assert [call.states for call in short.calls] == [call.states for call in full.calls]
    assert short.aliases == full.aliases
    assert_is_chain(short)
    assert_is_chain(full)


def test_shortening_keeps_the_wiring_between_calls() -> None:
    model = TinyGPT(depth=7)
    program = capture(model, (tokens(), tokens()), token_loss)
    assert_is_chain(program)
    assert block_fqns(program) == [f"layers.{i}" for i in range(7)]
    calls = [call for call in program.calls if call.fqn]
    for before, after in itertools.pairwise(calls):
        assert set(before.outs) <= set(after.args)


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_a_layer_that_differs_in_one_attribute_is_not_merged(changed: int) -> None:
    model = TinyGPT(depth=6)
    layer: Any = model.layers[changed]
    layer.norm1.eps = 0.5
    program = capture(model, (tokens(), tokens()), token_loss)
    graphs = [call.graph for call in program.calls if call.fqn]
    assert len(set(graphs)) == 2
    assert [i for i in range(6) if graphs[i] == graphs[changed]] == [changed]


def test_a_layer_in_another_mode_is_not_merged() -> None:
    model = TinyGPT(dropout=0.1, depth=5)
    model.layers[1].eval()
    program = capture(model, (tokens(), tokens()), token_loss)
    graphs = [call.graph for call in program.calls if call.fqn]
    assert graphs.count(graphs[1]) == 1


def test_a_frozen_layer_is_not_merged() -> None:
    model = TinyGPT(depth=5)
    model.layers[4].requires_grad_(False)
    program = capture(model, (tokens(), tokens()), token_loss)
    graphs = [call.graph for call in program.calls if call.fqn]
    assert graphs.count(graphs[4]) == 1


def test_a_layer_used_twice_is_two_calls_on_one_module() -> None:
    class Twice(TinyGPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in (*self.layers, self.layers[0]):
                x = layer(x)
            out: torch.Tensor = self.head(self.norm(x))
            return out

    program = capture(Twice(), (tokens(), tokens()), token_loss)
    assert block_fqns(program) == ["layers.0", "layers.1", "layers.2", "layers.0"]


def test_a_chain_of_linears_gives_eight_blocks_and_a_head() -> None:
    program = capture(LinearChain(), torch.randn(4, 16), mean_square)
    assert block_fqns(program) == [f"blocks.{i}" for i in range(8)]
    assert [program.graphs[call.graph].is_glue for call in program.calls] == [False] * 8 + [True]
    assert program.calls[-1].states == ("head.weight",)
    assert_is_chain(program)


def test_the_first_block_differs_where_its_input_needs_no_gradient() -> None:
    program = capture(LinearChain(), torch.randn(4, 16), mean_square)
    first, second = (program.graphs[program.calls[i].graph] for i in (0, 1))
    metas = [graph.input_metas[0] for graph in (first, second)]
    assert [meta.requires_grad for meta in metas if meta is not None] == [False, True]


def test_batch_forms_give_the_same_program() -> None:
    model = TinyGPT()
    ids, target = tokens(), tokens()

    def from_mapping(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return token_loss(output, batch["target"])

    by_tuple = capture(model, (ids, target), token_loss)
    by_mapping = capture(model, {"ids": ids, "target": target}, from_mapping)
    assert shape_of(by_tuple) == shape_of(by_mapping)
    assert by_mapping.input_keys == ("['ids']", "['target']")
    alone = capture(model, ids, mean_square)
    assert alone.input_keys == ("",)
    assert block_fqns(alone) == block_fqns(by_tuple)


def test_equal_tensors_in_a_batch_stay_distinct_inputs() -> None:
    ids = tokens()
    program = capture(TinyGPT(), (ids, ids), token_loss)
    assert len(program.inputs) == 2
    read = {name for call in program.calls for name in call.args}
    read |= {name for op in program.side_ops for name in refs((op.args, dict(op.kwargs)))}
    assert set(program.inputs) <= read


def test_microbatch_size_resizes_batch_tensors_only() -> None:
    batch = {"ids": tokens(8), "scale": torch.ones(3), "flag": True}
    example = microbatch_like(batch, 2)
    assert example["ids"].shape == (2, 16)
    assert example["scale"].shape == (3,)
    assert example["flag"] is True
    program = capture(TinyGPT(), (tokens(8), tokens(8)), token_loss, microbatch_size=2)
    assert program.microbatch_size == 2
    assert [meta.shape for meta in program.input_metas] == [(2, 16), (2, 16)]


def test_split_batch_leaves_keys_that_forward_does_not_take_to_the_loss() -> None:
    batch = {"ids": tokens(), "target": tokens()}
    args, kwargs, target = split_batch(TinyGPT(), batch, token_loss)
    assert args == ()
    assert list(kwargs) == ["ids"]
    assert target == (batch,)


def test_a_target_is_missing_is_an_error() -> None:
    with pytest.raises(TraceError, match="pass the batch as"):
        capture(TinyGPT(), tokens(), token_loss)


def test_a_batch_without_tensors_is_an_error() -> None:
    with pytest.raises(TraceError, match="no tensor with a batch dimension"):
        capture(TinyGPT(), {"ids": 3}, token_loss)


def test_a_failing_forward_names_its_module_and_line() -> None:
    model = TinyGPT()
    model.layers[1].up = nn.Linear(7, 7)
    with pytest.raises(TraceError, match=r"layers\.1 \(models_for_tests\.py:\d+\)"):
        capture(model, (tokens(), tokens()), token_loss)


def test_an_error_in_the_loss_names_its_line_and_how_it_is_called() -> None:
    def loss_of_model(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch)
        return loss

    batch = (torch.randn(2, 4), torch.randn(2, 4))
    with pytest.raises(
        TraceError, match=r"loss_fn \(test_capture\.py:\d+\) failed.*output, target"
    ):
        capture(nn.Linear(4, 4), batch, loss_fn=loss_of_model)


def test_a_loss_that_branches_on_data_names_its_line() -> None:
    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.sum() if output.max() > 0 else output.mean()

    with pytest.raises(TraceError, match=r"loss_fn \(test_capture\.py:\d+\): its control flow"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), loss_fn=loss_fn)


def test_a_loss_may_close_over_real_tensors() -> None:
    goal = torch.randn(4, 64)
    program = capture(LinearChain(), torch.randn(4, 16), lambda out: F.mse_loss(out, goal))
    (constant,) = program.constants.values()
    assert torch.equal(constant, goal)
    assert_is_chain(program)


def test_factory_calls_without_a_device_are_captured() -> None:
    class WithMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x) * torch.ones(8).cumsum(0)
            return out

    program = capture(WithMask(), torch.randn(2, 8), mean_square)
    assert [op.target_name for op in program.side_ops] == [
        "aten.ones.default",
        "aten.cumsum.default",
    ]


def test_loss_and_activations_need_a_gradient_and_detached_ones_do_not() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers[1](self.layers[0](x).detach())
            return out

    program = capture(Detached(), torch.randn(2, 8), mean_square)
    assert program.metas[program.loss].requires_grad
    (crossing,) = program.calls[0].outs
    assert not program.metas[crossing].requires_grad


def test_the_loss_of_a_float32_model_needs_a_gradient_after_a_cast_that_does_nothing() -> None:
    program = capture(LinearChain(), torch.randn(2, 16), lambda out: out.float().mean())
    assert program.metas[program.loss].requires_grad


def test_meta_copy_keeps_ties_and_reads_no_weight() -> None:
    copied = meta_copy(TinyGPT())
    assert copied.get_parameter("head.weight") is copied.get_parameter("tokens.weight")
    assert all(p.is_meta for p in copied.parameters())


def test_fingerprints_follow_structure_and_shape() -> None:
    def print_of(depth: int, seq: int) -> str:
        model = TinyGPT(depth=depth)
        return capture(model, (tokens(2, seq), tokens(2, seq)), token_loss).fingerprint

    assert print_of(3, 16) == print_of(3, 16)
    assert len({print_of(3, 16), print_of(4, 16), print_of(3, 8)}) == 3


def test_a_model_with_its_own_generator_is_noted_and_has_a_stable_fingerprint() -> None:
    def noisy(output: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        return (output - noise).square().mean()

    first, second = (capture(LinearChain(), torch.randn(2, 16), noisy) for _ in range(2))
    assert any("torch.Generator" in note for note in first.notes)
    assert first.fingerprint == second.fingerprint


def test_layers_with_equal_partial_functions_are_merged_and_unequal_ones_are_not() -> None:
    def depths(*approximations: str) -> int:
        model = TinyGPT(depth=len(approximations))
        for index, approximate in enumerate(approximations):
            layer: Any = model.layers[index]
            layer.act = functools.partial(F.gelu, approximate=approximate)
        return sum(run.count for run in find_runs(model).runs)

    assert depths("tanh", "tanh", "tanh", "tanh") == 4
    assert depths("none", "tanh", "tanh", "tanh") == 3


def test_an_embedding_with_sparse_gradients_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    with pytest.raises(TraceError, match=r"^0: aten.embedding.default makes sparse gradients"):
        capture(model, torch.zeros(2, 3, dtype=torch.int64), lambda out: out.mean())
