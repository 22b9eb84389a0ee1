"""The trace equals what autograd and the FLOP counter say, and touches nothing of the user's."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoplan.backends import Backend
from autoplan.capturer import capture
from autoplan.errors import TraceError
from autoplan.graph import BlockTrace, OpTrace, Trace
from autoplan.tracer import trace, trace_program
from tests.kept_bytes import kept_by_autograd, kept_by_block, kept_by_trace
from tests.models_for_tests import (
    ConvNet,
    GatedNet,
    KorthikantiBlock,
    LinearChain,
    TinyGPT,
    mean_square,
)

BACKENDS: tuple[Backend, ...] = ("cpu", "cuda")


def token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def tokens(rows: int = 2, seq: int = 16) -> torch.Tensor:
    return torch.randint(0, 50, (rows, seq))


def blocks_of(result: Trace) -> list[BlockTrace]:
    return [block for block in result.blocks if not block.is_glue]


def flops(result: Trace) -> int:
    return sum(
        op.forward_flops + op.backward_flops
        for call in result.calls
        for op in result.blocks[call.block].ops
    )


def op_of(block: BlockTrace, target: str) -> OpTrace:
    return next(op for op in block.ops if op.target.startswith(f"aten.{target}."))


def hf_model(kind: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
        ids = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.GPT2Config(**sizes, **ids, **changes)
    else:
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=50,
            **changes,
        )
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config).train()


def own_case(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
    torch.manual_seed(0)
    if name == "conv":
        return ConvNet(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))), F.cross_entropy
    if name == "chain":
        return LinearChain(), (torch.randn(4, 16),), mean_square
    dropout = 0.1 if name == "gpt_dropout" else 0.0
    return TinyGPT(dropout), (tokens(), tokens()), token_loss


@pytest.mark.parametrize("name", ["gpt", "gpt_dropout", "conv", "chain"])
def test_kept_bytes_equal_autograd_on_real_tensors(name: str) -> None:
    model, batch, loss_fn = own_case(name)
    result = trace(model, batch, loss_fn)
    real = kept_by_autograd(model, lambda: loss_fn(model(batch[0]), *batch[1:]))
    assert kept_by_trace(result) == real


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        ("gpt2", {}),
        ("llama", {}),
        ("llama", {"attn_implementation": "eager"}),
    ],
)
def test_kept_bytes_of_transformers_models_equal_autograd(
    kind: str, changes: dict[str, Any]
) -> None:
    model = hf_model(kind, **changes)
    batch = {"input_ids": tokens(), "labels": tokens()}
    result = trace(model, batch)
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: model(**batch).loss)
    assert len(blocks_of(result)) == 1


@pytest.mark.parametrize("kind", ["Bert", "T5", "Mistral"])
def test_masks_and_position_biases_are_those_of_an_eager_run(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "num_attention_heads": 4}
    if kind == "T5":
        sizes = {"vocab_size": 50, "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4}
        config = transformers.T5Config(num_layers=2, decoder_start_token_id=0, **sizes)
        model = transformers.T5ForConditionalGeneration(config)
    elif kind == "Bert":
        config = transformers.BertConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, **sizes
        )
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.MistralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_key_value_heads=2,
            sliding_window=8,
            **sizes,
        )
        model = transformers.MistralForCausalLM(config)
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "use_cache"):
            module.config.use_cache = False
    model.train()
    batch = {"input_ids": tokens(), "labels": tokens()}
    result = trace(model, batch)
    predicted, real = kept_by_trace(result), kept_by_autograd(model, lambda: model(**batch).loss)
    # T5 works out the same bucket numbers twice; the trace has them once.
    spare = 2 * 16 * 16 * 8 if kind == "T5" else 0
    assert 0 <= sum(real) - sum(predicted) <= spare
    assert result.num_parameters == sum(p.numel() for p in model.parameters())


def test_kept_bytes_of_one_block_equal_its_own_run() -> None:
    model = TinyGPT(0.1)
    (block,) = blocks_of(trace(model, (tokens(), tokens()), token_loss))
    x = torch.randn(2, 16, 32, requires_grad=True)
    assert kept_by_block(block) == kept_by_autograd(model, lambda: model.layers[0](x))


def test_kept_bytes_of_a_gpt2_block_equal_its_own_run() -> None:
    model = hf_model("gpt2")
    batch = {"input_ids": tokens(), "labels": tokens()}
    (block,) = blocks_of(trace(model, batch))
    x = torch.randn(2, 16, 32, requires_grad=True)
    real = kept_by_autograd(model, lambda: model.transformer.h[0](x))
    assert kept_by_block(block) == real


@pytest.mark.parametrize(
    ("backend", "shape", "expected_mib"),
    [
        ("cuda", (4, 1024, 1024, 16), 456 + 16 / 256),
        ("cuda", (1, 2048, 12288, 96), 2736 + 8 / 256),
        ("cpu", (4, 1024, 1024, 16), 456 + 8 / 256 + 72),
    ],
)
def test_kept_bytes_of_a_block_follow_korthikanti(
    backend: Any, shape: tuple[int, int, int, int], expected_mib: float
) -> None:
    """34 sbh + 5 as^2b and statistics of two norms; on the CPU these and noise have 2 bytes."""
    rows, seq, width, heads = shape
    with torch.device("meta"):
        model = nn.Sequential(KorthikantiBlock(width, heads).to(torch.bfloat16))
    x = torch.empty(rows, seq, width, dtype=torch.bfloat16, device="meta")
    (block,) = blocks_of(trace(model, x, mean_square, backend=backend))
    assert sum(kept_by_block(block)) / 2**20 == pytest.approx(expected_mib, abs=0.01)


def test_cuda_rules_keep_no_scores_and_one_byte_masks() -> None:
    model, batch = TinyGPT(0.1), (tokens(), tokens())
    (on_cpu,) = blocks_of(trace(model, batch, token_loss))
    (on_cuda,) = blocks_of(trace(model, batch, token_loss, backend="cuda"))
    scores = 2 * 4 * 16 * 16 * 4
    attention = "scaled_dot_product_attention"
    assert any(saved.nbytes == scores for saved in op_of(on_cpu, attention).saved)
    kept = op_of(on_cuda, attention).saved
    qkv, out, logsumexp = 3 * 2 * 16 * 32 * 4, 2 * 16 * 32 * 4, 2 * 4 * 16 * 4
    assert sorted(saved.nbytes for saved in kept) == sorted([qkv, out, logsumexp])
    assert [saved.nbytes for saved in op_of(on_cuda, "dropout").saved] == [2 * 16 * 32]
    assert op_of(on_cuda, attention).is_random


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_flops_equal_the_formula_of_a_gpt(backend: Any) -> None:
    """6 N D for every product of weights, 12 L h s^2 b for attention, nothing else."""
    model, (rows, seq, width, depth) = TinyGPT(), (2, 16, 32, 3)
    result = trace(model, (tokens(rows, seq), tokens(rows, seq)), token_loss, backend=backend)
    weights = depth * 12 * width * width + width * 50
    expected = 6 * weights * rows * seq + 12 * depth * width * seq * seq * rows
    assert flops(result) == expected


def test_flops_of_gpt3_equal_the_published_formula() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048}
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        ids = torch.empty(1, 2048, dtype=torch.int64)
    result = trace(model, {"input_ids": ids, "labels": ids}, backend="cuda")
    layers = 96 * 12 * 12288**2
    expected = 6 * (layers + 50257 * 12288) * 2048 + 12 * 96 * 12288 * 2048**2
    assert flops(result) == expected
    assert result.num_parameters == sum(p.numel() for p in model.parameters())


def test_gemm_dims_and_attention_shape_are_read_off_the_kernels() -> None:
    (block,) = blocks_of(trace(TinyGPT(), (tokens(), tokens()), token_loss))
    gemms = [op.gemm for op in block.ops if op.gemm is not None]
    assert [(g.batch, g.m, g.n, g.k) for g in gemms] == [
        (1, 32, 96, 32),
        (1, 32, 32, 32),
        (1, 32, 128, 32),
        (1, 32, 32, 128),
    ]
    assert op_of(block, "scaled_dot_product_attention").attention == (2, 4, 16, 16, 8, 1)


def test_a_convolution_is_a_gemm_over_its_patches() -> None:
    result = trace(ConvNet(), (torch.randn(4, 3, 16, 16), torch.zeros(4).long()), F.cross_entropy)
    gemms = [op.gemm for b in result.blocks for op in b.ops if op.target == "aten.conv2d.default"]
    shapes = [(g.m, g.n, g.k) for g in gemms if g is not None]
    assert shapes == [(4 * 16 * 16, 8, 3 * 9), (4 * 8 * 8, 8, 4 * 9)]


def test_marks_are_refused_for_views_random_and_written_values() -> None:
    model, batch, loss_fn = own_case("gpt_dropout")
    (block,) = blocks_of(trace(model, batch, loss_fn))
    assert op_of(block, "linear").may_mark
    assert op_of(block, "linear").mark_bytes == op_of(block, "linear").nbytes
    assert not op_of(block, "dropout").may_mark
    assert not op_of(block, "view").may_mark
    norm = op_of(block, "layer_norm")
    assert norm.mark_bytes == norm.nbytes + 2 * 2 * 16 * 4


def test_a_value_that_a_later_block_writes_to_carries_no_mark() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Hardtanh(inplace=True))
    result = trace(model, torch.randn(2, 4), mean_square)
    by_target = {op.target: op for block in result.blocks for op in block.ops}
    assert by_target["aten.hardtanh_.default"].mutates
    assert not by_target["aten.sigmoid.default"].may_mark
    assert by_target["aten.linear.default"].may_mark


def test_views_own_no_bytes_and_name_their_storage() -> None:
    (block,) = blocks_of(trace(TinyGPT(), (tokens(), tokens()), token_loss))
    views = [op for op in block.ops if op.kind == "view"]
    assert views
    names = {op.name for op in block.ops} | {value.name for value in block.inputs}
    for op in views:
        assert op.nbytes == 0
        assert op.storage != op.name
        assert op.storage in names


def test_inputs_of_every_op_are_those_of_the_program() -> None:
    program = capture(TinyGPT(), (tokens(), tokens()), token_loss)
    result = trace_program(program, model_name="TinyGPT")
    for graph, block in zip(program.graphs, result.blocks, strict=True):
        assert [op.inputs() for op in graph.ops] == [op.inputs for op in block.ops]
        for op in block.ops:
            assert all(len(option.inputs) == len(op.inputs) for option in op.options)


def test_bytes_of_an_elementwise_op_are_its_tensors() -> None:
    (block,) = blocks_of(trace(TinyGPT(), (tokens(), tokens()), token_loss))
    gelu = op_of(block, "gelu")
    assert gelu.forward_bytes == 2 * gelu.nbytes
    assert gelu.backward_bytes == 3 * gelu.nbytes
    assert gelu.forward_flops == gelu.backward_flops == 0


def test_sums_of_gradients_are_charged_to_all_readers_but_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            out: torch.Tensor = y.sin() + y.neg()
            return out

    result = trace(nn.Sequential(Twice()), torch.randn(2, 8), mean_square)
    by_target = {op.target: op for op in result.blocks[0].ops}
    size = 2 * 8 * 4
    assert by_target["aten.neg.default"].backward_bytes == 2 * size
    cosine_and_product = 2 * size + 3 * size
    assert by_target["aten.sin.default"].backward_bytes == cosine_and_product + 3 * size


def test_temporaries_of_the_loss_are_metered() -> None:
    result = trace(TinyGPT(), (tokens(), tokens()), token_loss)
    loss = op_of(result.blocks[-1], "cross_entropy_loss")
    log_probabilities = 2 * 16 * 50 * 4
    assert loss.backward_temp_bytes == log_probabilities
    assert loss.forward_temp_bytes == 0


def test_crossing_bytes_count_what_later_calls_read() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.layers[0](x)
            out: torch.Tensor = self.layers[2](self.layers[1](first).tanh()) + first
            return out

    result = trace(Skip(), torch.randn(2, 8), mean_square)
    size = 2 * 8 * 4
    assert result.crossing_bytes[:2] == (size, 2 * size)


def test_shared_parameters_count_once() -> None:
    model = TinyGPT()
    result = trace(model, (tokens(), tokens()), token_loss)
    assert result.num_parameters == sum(p.numel() for p in model.parameters())
    assert result.shared == (("tokens.weight", "head.weight"),)


def test_frozen_parameters_are_told_apart() -> None:
    model = LinearChain()
    model.blocks[0].requires_grad_(False)
    result = trace(model, torch.randn(2, 16), mean_square)
    assert result.num_parameters - result.num_trained == 16 * 16
    first = result.blocks[result.calls[0].block]
    assert [state.is_trained for state in first.states] == [False]
    assert not first.ops[0].needs_grad
    assert first.ops[0].backward_flops == 0


def test_activations_are_told_from_batch_inputs() -> None:
    result = trace(TinyGPT(), (tokens(), tokens()), token_loss)
    last = result.blocks[-1]
    assert [(v.is_activation, v.needs_grad) for v in last.inputs] == [(True, True), (False, False)]


def test_tracing_leaves_the_model_and_the_random_state_as_they_were() -> None:
    model = TinyGPT(0.1)
    model.layers[1].eval()
    torch.autograd.backward(token_loss(model(tokens()), tokens()))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    before = torch.get_rng_state()
    trace(model, (torch.zeros(2, 16).long(), torch.zeros(2, 16).long()), token_loss)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(p.grad is grads[name] for name, p in model.named_parameters())
    assert [module.training for module in model.modules()] == modes
    assert model.head.weight is model.tokens.weight


def test_batch_statistics_of_the_model_stay_as_they_were() -> None:
    model = ConvNet()
    trace(model, (torch.randn(4, 3, 16, 16), torch.zeros(4).long()), F.cross_entropy)
    assert int(model.get_buffer("norm.num_batches_tracked")) == 0
    assert float(model.get_buffer("norm.running_mean").abs().sum()) == 0


def test_a_trace_round_trips_through_json() -> None:
    result = trace(TinyGPT(0.1), (tokens(), tokens()), token_loss, backend="cuda")
    assert Trace.from_json(result.to_json()) == result


def test_the_same_model_gives_the_same_trace() -> None:
    batch = (tokens(), tokens())
    assert trace(TinyGPT(0.1), batch, token_loss) == trace(TinyGPT(0.1), batch, token_loss)


def test_microbatch_size_scales_kept_bytes() -> None:
    model, batch = TinyGPT(), (tokens(8), tokens(8))
    sizes = [
        sum(kept_by_trace(trace(model, batch, token_loss, microbatch_size=rows)))
        for rows in (1, 2, 3)
    ]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def test_a_branch_on_data_is_an_error_that_names_module_and_line() -> None:
    with pytest.raises(TraceError, match=r"blocks\.1\.gate \(models_for_tests\.py:\d+\)"):
        capture(GatedNet(), torch.randn(2, 8), mean_square, allow_opaque=False)


def test_a_loss_that_is_no_scalar_is_an_error() -> None:
    with pytest.raises(TraceError, match=r"the loss is a tensor of shape \(2, 16, 50\)"):
        trace(TinyGPT(), tokens())


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="'cpu' or 'cuda'"):
        trace(LinearChain(), torch.randn(2, 16), mean_square, backend="tpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_in_forward_is_noted_and_ignored(use_reentrant: bool) -> None:
    class Checkpointed(TinyGPT):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.tokens(ids)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            out: torch.Tensor = self.head(self.norm(x))
            return out

    result = trace(Checkpointed(), (tokens(), tokens()), token_loss)
    assert any("checkpoints activations itself" in note for note in result.notes)
    (block,) = blocks_of(result)
    (plain,) = blocks_of(trace(TinyGPT(), (tokens(), tokens()), token_loss))
    assert kept_by_block(block) == kept_by_block(plain)


def test_checkpointing_in_transformers_is_noted() -> None:
    model = hf_model("gpt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable()
    result = trace(model, {"input_ids": tokens(), "labels": tokens()})
    assert any("checkpoints activations itself" in note for note in result.notes)


def test_notes_name_parameters_that_the_loss_does_not_use() -> None:
    model = LinearChain()
    model.spare = nn.Linear(2, 2)
    result = trace(model, torch.randn(2, 16), mean_square)
    assert any("spare.bias, spare.weight" in note for note in result.notes)


def test_a_recurrent_kernel_is_opaque_and_what_cudnn_keeps_is_noted() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)[0]
            return out

    on_cpu, on_cuda = (
        trace(Recurrent(), torch.randn(2, 4, 8), mean_square, backend=backend)
        for backend in BACKENDS
    )
    assert "opaque" in {op.kind for block in on_cpu.blocks for op in block.ops}
    assert not any("cuDNN" in note for note in on_cpu.notes)
    assert any("cuDNN keeps a reserve" in note for note in on_cuda.notes)


def test_eval_mode_is_noted() -> None:
    result = trace(TinyGPT(0.1).eval(), (tokens(), tokens()), token_loss)
    assert any("eval mode" in note for note in result.notes)
    assert not any(op.is_random for block in result.blocks for op in block.ops)


def test_a_region_without_gradients_keeps_nothing() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                goal = self.teacher(x).tanh()
            out: torch.Tensor = self.student(x) - goal
            return out

    model, x = Frozen(), torch.randn(2, 8)
    result = trace(model, x, mean_square)
    assert kept_by_trace(result) == kept_by_autograd(model, lambda: mean_square(model(x)))
    ops = {op.name: op for block in result.blocks for op in block.ops}
    assert [op.needs_grad for op in ops.values() if op.target == "aten.tanh.default"] == [False]
    teacher_forward = student_forward = student_weight_gradient = 2 * 2 * 8 * 8
    assert flops(result) == teacher_forward + student_forward + student_weight_gradient


def test_tracing_a_llama_of_126_layers_takes_seconds() -> None:
    model = hf_model("llama")
    model.config.num_hidden_layers = 126
    with torch.device("meta"):
        model = type(model)(model.config)
    started = time.process_time()
    result = trace(model, {"input_ids": tokens(), "labels": tokens()}, backend="cuda")
    assert time.process_time() - started < 20
    assert len(result.calls) == 128
    assert math.isclose(sum(result.crossing_bytes), 127 * 2 * 16 * 32 * 4)
