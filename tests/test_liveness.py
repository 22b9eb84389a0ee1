"""The block memory model equals what the meter sees when the block runs.

Every decision on the frontiers of a GPT's block classes, without and with tensor parallelism, in
regions and without: bytes kept after forward, and the peak of forward and backward.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import autoplan
from autoplan.capturer import capture
from autoplan.executor import compile_graph
from autoplan.frontiers import Decision, block_decisions, plain_decision
from autoplan.graph import Trace
from autoplan.liveness import block_memory
from autoplan.local import localize
from autoplan.lowering import lower
from autoplan.meter import StorageMeter
from autoplan.program import BlockGraph, Program
from autoplan.recompute import keep_plan, run_region
from autoplan.sharding import shard_options
from autoplan.times import Timer
from autoplan.tracer import trace_program
from examples.gpt import GPT, GPTConfig, batch_like, loss_fn
from tests.distributed import run_workers

# Masks and statistics of a few bytes a row are left out of the model of vocabulary-parallel ops.
TOLERANCE = 0.02
SLACK_BYTES = 8_192


class _Seed(torch.autograd.Function):
    """Makes the gradient of a block's output as the next block would: nobody else holds it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.form = (output.shape, output.dtype)
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> torch.Tensor:
        shape, dtype = ctx.form
        return torch.ones(shape, dtype=dtype)


def _inputs(graph: BlockGraph) -> list[torch.Tensor]:
    made = []
    for meta in graph.input_metas:
        assert meta is not None
        if meta.dtype.is_floating_point:
            made.append(torch.randn(meta.shape, dtype=meta.dtype).requires_grad_())
        else:
            made.append(torch.zeros(meta.shape, dtype=meta.dtype))
    return made


def _measure(graph: BlockGraph, decision: Decision) -> tuple[int, int]:
    """Return bytes kept and the peak of forward and backward, inputs and states not counted."""
    inputs = _inputs(graph)
    states = tuple((torch.randn(s.meta.shape) * 0.02).requires_grad_() for s in graph.states)
    mode = decision.recompute.mode
    keep = keep_plan(graph.ops, decision.recompute.keep) if mode == "selective" else None
    function = compile_graph(graph, torch.device("cpu"), is_marked=keep is not None).function
    meter = StorageMeter()
    with meter:
        meter.baseline(tensors=[*inputs, *states])
        base = meter.live_bytes
        meter.reset_peak()
        if mode == "none":
            outputs = list(function(states, *inputs))
        else:
            outputs = list(run_region(lambda *a: function(states, *a), keep, *inputs))
        forward = meter.peak_bytes - base
        time.sleep(0.02)  # gloo's threads let go of their buffers a little late
        kept = meter.live_bytes - base - sum(o.nbytes for o in outputs)
        losses = [_Seed.apply(o) for o in outputs]  # type: ignore[no-untyped-call]
        outputs.clear()
        meter.reset_peak()
        torch.autograd.backward(losses)
        return kept, max(forward, meter.peak_bytes - base)


def _decisions(trace: Trace, degree: int) -> list[tuple[Decision, ...]]:
    """Return the decisions to try per class; all ranks run the same, so they are made once."""
    timer = Timer(autoplan.Cluster.parse("2:cpu"), degree)
    return [
        (*block_decisions(block, timer, points=3), plain_decision(block, timer, lean=True))
        for block in trace.blocks
    ]


def _compare(
    rank: int, program: Program, trace: Trace, degree: int, found: list[tuple[Decision, ...]]
) -> list[str]:
    """Return what differs, over all decisions of all block classes."""
    torch.manual_seed(0)
    wrong = []
    for graph, block, decisions in zip(program.graphs, trace.blocks, found, strict=True):
        for decision in decisions:
            local = localize(block, decision.axes, degree)
            memory = block_memory(local, decision.recompute)
            owners = {owner for op in local.ops for owner in op.saved}
            is_region = decision.recompute.mode != "none"
            held = sum(b for n, b in local.inputs.items() if is_region or n in owners)
            lowered = lower(
                graph, shard_options(graph), decision.axes, degree=degree, rank=rank, group=None
            )
            # a buffer that gloo holds late is not ours: the lowest of three runs counts
            runs = [_measure(lowered.graph, decision) for _ in range(3)]
            measured = tuple(map(min, *runs))
            peak = max(memory.forward_peak, memory.backward_peak - held)
            predicted = (memory.kept - held, peak)
            for name, p, m in zip(("kept", "peak"), predicted, measured, strict=True):
                if abs(p - m) > TOLERANCE * m + SLACK_BYTES:
                    wrong.append(f"{block.name} {decision}: {name} predicted {p}, measured {m}")
    return wrong


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("degree", [1, 2])
def test_block_memory_equals_what_the_meter_sees(degree: int, is_fused: bool) -> None:
    config = GPTConfig(
        vocab_size=512,
        max_tokens=64,
        num_layers=2,
        num_heads=4,
        width=128,
        is_head_tied=False,
        is_qkv_fused=is_fused,
    )
    program = capture(GPT(config), batch_like(config, 4, 64), loss_fn, microbatch_size=4)
    trace = trace_program(program, backend="cpu", model_name="GPT")
    decisions = _decisions(trace, degree)
    for wrong in run_workers(_compare, degree, program, trace, degree, decisions, timeout_s=300):
        assert not wrong, "\n".join(wrong)
