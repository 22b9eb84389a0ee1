"""Compare a parallel step with the single-device model: loss and every gradient, in float64."""

from __future__ import annotations

import functools
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.capturer import capture
from autoplan.emitter import parallelize
from autoplan.plan import Plan
from autoplan.program import Program
from examples.gpt import GPT, GPTConfig, loss_fn
from tests.plans import hand_plan

__all__ = [
    "MODELS",
    "Case",
    "build",
    "check_cases",
    "check_plan",
    "check_plans",
    "global_batch",
    "program_of",
    "reference",
]

GRADIENT_TOLERANCE = 1e-9
FLOOR = 1e-7  # the gradients of key biases are zero but for rounding, 1e-17 where others are 1e-2
ROWS = 2
TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and the arguments of its hand-written plan."""

    model: str
    plan: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Return the processes it needs."""
        return int(self.plan.get("dp", 1) * self.plan.get("tp", 1) * self.plan.get("pp", 1))


def _gpt(**options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        config = GPTConfig(
            vocab_size=64, max_tokens=32, num_layers=4, num_heads=4, width=32, **options
        )
        return GPT(config), loss_fn

    return build


class _Scaled(nn.Module):
    """A GPT whose logits are scaled by a parameter without a dimension."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.1))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.inner(input_ids) * self.scale.exp()
        return scaled


def _gpt_scaled() -> tuple[nn.Module, Any]:
    model, loss = _gpt(is_head_tied=False)()
    return _Scaled(model), loss


def _llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config), _hf_loss


def _gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=64,
        n_positions=32,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config), _hf_loss


def _hf_loss(output: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return loss_fn(output.logits, batch)


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "gpt": _gpt(is_head_tied=False),
    "gpt_tied": _gpt(),
    "gpt_dropout": _gpt(dropout=0.2),
    "gpt_split": _gpt(is_qkv_fused=False, is_head_tied=False),
    "gpt_scaled": _gpt_scaled,
    "llama": _llama,
    "gpt2": _gpt2,
}


def build(name: str) -> tuple[nn.Module, Any]:
    """Return a model in float64 with unequal, nonzero weights everywhere, and its loss."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, loss


def global_batch(rows: int) -> dict[str, torch.Tensor]:
    """Return `rows` rows of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(64, (rows, TOKENS), generator=generator)}


@functools.cache
def program_of(name: str, microbatch_size: int = ROWS) -> Program:
    """Return the captured program of a model; call it before forking, and workers have it too."""
    model, loss = build(name)
    return capture(model, global_batch(microbatch_size), loss, microbatch_size=microbatch_size)


@functools.cache
def reference(name: str, rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss and gradients of the user's own module and forward on the whole batch."""
    model, loss = build(name)
    batch = global_batch(rows)
    output = model(batch["input_ids"])
    value = loss(output, batch)
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return value.detach(), gradients


def check_cases(rank: int, cases: tuple[Case, ...]) -> list[str]:
    """Run every case on this rank; returns what does not agree (empty: all agrees).

    The first captures its model again, as users' processes do. A capture takes longer than the two
    steps, so the others take the program that is there.
    """
    problems = [f"{cases[0]}: {problem}" for problem in _check(cases[0])] if cases else []
    for case in cases[1:]:
        program = program_of(case.model)
        with unittest.mock.patch("autoplan.recapture.capture", return_value=program):
            problems += [f"{case}: {problem}" for problem in _check(case)]
    return problems


def _check(case: Case) -> list[str]:
    model, _ = build(case.model)
    arguments = dict(case.plan)
    program = program_of(case.model)
    layouts = arguments.pop("layouts", None)
    if layouts is not None:
        arguments["layouts"] = layouts(program, arguments.get("tp", 1))
    keep = arguments.pop("recompute", None)
    if keep is not None:
        arguments["recompute"] = keep(program)
    plan = hand_plan(program, type(model).__name__, **arguments)
    return check_plan(case.model, plan)


def check_plan(name: str, plan: Plan, tolerance: float = GRADIENT_TOLERANCE) -> list[str]:
    """Run two steps of a plan on this rank; returns what differs from the user's own module."""
    differences = functools.partial(compare, tolerance=tolerance)
    model, loss = build(name)
    rows = plan.global_batch_size
    batch = global_batch(rows)
    names = [name for name, _ in model.named_parameters()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    module = parallelize(plan, model, batch, loss, device="cpu")
    del model
    expected_loss, expected = reference(name, rows)
    problems = []
    for step in range(2):
        for parameter in module.parameters():
            parameter.grad = None
        value = module.train_step(module.shard_batch(batch))
        if abs(float(value - expected_loss)) > 1e-3 * tolerance * float(expected_loss):
            problems.append(f"step {step}: loss {float(value)} is not {float(expected_loss)}")
        problems += differences(module.full_gradients(), expected)
    state = module.full_state()
    problems += [f"{n} changed" for n, t in before.items() if not torch.equal(t, state[n])]
    norm = module.clip_grad_norm_(0.5)
    wanted = torch.cat([g.flatten() for g in expected.values()]).norm()
    if abs(float(norm - wanted)) > tolerance * float(wanted):
        problems.append(f"norm {float(norm)} is not {float(wanted)}")
    scale = min(1.0, 0.5 / (float(wanted) + 1e-6))
    problems += differences(module.full_gradients(), {n: g * scale for n, g in expected.items()})
    unknown = [name for name, _ in module.named_parameters() if name not in names]
    return problems + [f"{name} is no name of the model's" for name in unknown]


def check_plans(
    rank: int, plans: Sequence[tuple[str, str, Plan]], tolerance: float = GRADIENT_TOLERANCE
) -> list[str]:
    """Run (what, model, plan) one after the other; returns what does not agree."""
    problems = []
    for what, name, plan in plans:
        # That a model is captured again, and the same, is what `check_cases` shows.
        program = program_of(name, plan.microbatch_size)
        with unittest.mock.patch("autoplan.recapture.capture", return_value=program):
            problems += [f"{what}: {problem}" for problem in check_plan(name, plan, tolerance)]
    return problems


def compare(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    tolerance: float = GRADIENT_TOLERANCE,
) -> list[str]:
    """Return the gradients that differ by more than the tolerance, relative with a floor."""
    problems = [f"{name}: missing" for name in expected if name not in got]
    problems += [f"{name}: not expected" for name in got if name not in expected]
    for name in expected.keys() & got.keys():
        if got[name].shape != expected[name].shape:
            problems.append(f"{name}: shape {tuple(got[name].shape)}")
            continue
        scale = max(float(expected[name].abs().max()), FLOOR)
        error = float((got[name] - expected[name]).abs().max()) / scale
        if not error < tolerance:
            problems.append(f"{name}: gradient off by {error:.1e}")
    return problems
