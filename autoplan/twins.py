"""Numerics of a plan on a small twin of its model, on gloo processes of this machine.

    plan, model --shrink--> twin --degrees of at most 2--> twin plans --launch--> losses, gradients

A twin has the classes of blocks of the model, few and narrow, in float64, without dropout. Its
plans have the ZeRO stage, schedule, recompute marks and layouts of the real one, each layout and
mark on some block of its class, over at most four processes. A step of it equals the single
device's or the plan is wrong.

Run under torchrun as `python -m autoplan.twins FOLDER`; needs no solver.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan import codec
from autoplan.batches import reduce_loss, split_batch
from autoplan.capturer import capture
from autoplan.dry_run_result import TwinRun
from autoplan.emitter import captured_for, parallelize
from autoplan.errors import AutoplanError
from autoplan.evaluation import alike_axes
from autoplan.launcher import launch
from autoplan.models import LoadedModel, load_model
from autoplan.op_facts import is_random
from autoplan.plan import BlockPlan, Layout, Mesh, Plan, Recompute, StagePlan
from autoplan.processes import run_worker
from autoplan.program import BlockGraph, Program
from autoplan.sharding import check_axes, shard_options
from autoplan.training import global_batch

__all__ = ["main", "run_twins", "shrink", "twin_degrees", "twin_plan"]

_ROWS = 2  # of a micro-batch of a twin
_TOKENS = 16
_MOST_PARAMETERS = 4_000_000  # of a model that is its own twin
_TOLERANCE, _COARSE_TOLERANCE = 1e-9, 1e-4
_TIMEOUT_S = 240.0
_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "ffn_dim": 48,
    "n_inner": 64,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 4,
    "n_head": 4,
    "head_dim": 8,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
    "n_positions": 64,
}


def shrink(loaded: LoadedModel) -> LoadedModel:
    """Return a twin in float64 with weights on the CPU; the model stays as it is.

    Raises:
        AutoplanError: the model is large and has no transformers config to shrink.
    """
    torch.manual_seed(0)
    config = getattr(loaded.model, "config", None)
    if hasattr(config, "to_dict") and hasattr(loaded.model, "dummy_inputs"):
        model = type(loaded.model)(_small_config(config))
        tokens = torch.randint(_SIZES["vocab_size"], (_ROWS, _TOKENS))
        batch = {key: tokens.clone() for key in loaded.batch}
    else:
        count = sum(p.numel() for p in loaded.model.parameters())
        tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
        if count > _MOST_PARAMETERS or any(x.is_meta for x in tensors):
            raise AutoplanError(
                f"{loaded.name} has {count:,} parameters and no transformers config to shrink: "
                f"give a model of up to {_MOST_PARAMETERS:,} with weights, or --no-numerics"
            )
        model, batch = copy.deepcopy(loaded.model), loaded.batch
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = model.double().train(loaded.model.training)
    batch = {k: _double(v) for k, v in batch.items()} if isinstance(batch, Mapping) else batch
    if isinstance(batch, (tuple, list)):
        batch = type(batch)(_double(v) for v in batch)
    elif isinstance(batch, torch.Tensor):
        batch = _double(batch)
    return LoadedModel(model=model, batch=batch, loss_fn=loaded.loss_fn, name=loaded.name)


def _double(value: Any) -> Any:
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_real else value


def _small_config(config: Any) -> Any:
    """Return a config of few, narrow layers; key-value heads keep their ratio where it is small."""
    small = copy.deepcopy(config)
    for key, size in _SIZES.items():
        value = getattr(small, key, None)
        if isinstance(value, int) and not isinstance(value, bool):
            setattr(small, key, min(value, size))
    heads, groups = (
        getattr(config, k, None) for k in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(groups, int):
        small.num_key_value_heads = 4 if groups == heads else 2 if groups > 1 else 1
    for key, value in small.to_dict().items():
        if ("drop" in key or key.endswith("pdrop")) and isinstance(value, float):
            setattr(small, key, 0.0)
        if key.endswith("token_id") and isinstance(value, int):
            setattr(small, key, min(value, _SIZES["vocab_size"] - 1))
    small.use_cache = False
    return small


def twin_degrees(mesh: Mesh) -> list[Mesh]:
    """Return meshes of at most four processes; where all degrees split, every pair of them."""
    cut = {name: min(2, getattr(mesh, name)) for name in ("dp", "tp", "pp")}
    split = [name for name, degree in cut.items() if degree > 1]
    pairs = itertools.combinations(split, 2) if len(split) == 3 else [split]
    chosen = [{name: 2 if name in pair else 1 for name in cut} for pair in pairs]
    return [Mesh(dp=c["dp"], tp=c["tp"], pp=c["pp"], axis_order=mesh.axis_order) for c in chosen]


def twin_plan(plan: Plan, program: Program, twin: Program, mesh: Mesh) -> Plan:
    """Return a plan of the twin that has the real plan's decisions in turn.

    Args:
        plan, program: the real ones.
        twin: captured program of the twin.
        mesh: of the twin's processes.
    """
    builder = _TwinBuilder(plan, program, twin, mesh)
    blocks = [builder.block(index) for index in range(len(twin.calls))]
    return replace(
        plan,
        fingerprint=twin.fingerprint,
        mesh=mesh,
        zero_stage=plan.zero_stage if mesh.dp > 1 else 0,
        microbatch_size=_ROWS,
        num_microbatches=2 * mesh.pp,
        global_batch_size=mesh.dp * 2 * mesh.pp * _ROWS,
        schedule="none" if mesh.pp == 1 else "gpipe" if plan.schedule == "gpipe" else "1f1b",
        mixed_precision="none",
        autocast="none",
        stages=_even_stages(blocks, twin, mesh.pp),
        recompute=builder.recompute,
        placements=builder.placements,
        shared=(),
    )


def _even_stages(blocks: Sequence[BlockPlan], twin: Program, pp: int) -> tuple[StagePlan, ...]:
    """Return stages with as many blocks that are modules each."""
    owned = [index for index, call in enumerate(twin.calls) if call.fqn]
    firsts = [0, *(owned[len(owned) * stage // pp] for stage in range(1, pp)), len(blocks)]
    return tuple(
        StagePlan(index=i, blocks=tuple(blocks[firsts[i] : firsts[i + 1]])) for i in range(pp)
    )


class _TwinBuilder:
    """Carries layouts and marks over to the blocks of a twin."""

    def __init__(self, plan: Plan, program: Program, twin: Program, mesh: Mesh) -> None:
        self.plan, self.program, self.twin, self.mesh = plan, program, twin, mesh
        self.recompute: dict[str, Recompute] = {"none": Recompute(mode="none")}
        self.placements: dict[str, Layout] = {"whole": Layout(block="", degree=1)}
        self._used: dict[str, int] = {}

    def block(self, index: int) -> BlockPlan:
        """Return the plan of a call of the twin: the next that the real plan has for its kind."""
        call = self.twin.calls[index]
        graph = self.twin.graphs[call.graph]
        kind = _kind(self.twin, index)
        given = [b for s in self.plan.stages for b in s.blocks]
        alike = [b for b in given if _kind(self.program, b.call) == kind]
        distinct = list({(b.placements, b.recompute): b for b in alike}.values())
        placements = recompute = ""
        if distinct:
            turn = self._used.get(kind, 0)
            self._used[kind] = turn + 1
            chosen = distinct[turn % len(distinct)]
            real = self.program.graphs[self.program.calls[chosen.call].graph]
            placements = self._layout(chosen.placements, real, graph)
            recompute = self._marks(chosen.recompute, real, graph)
        return BlockPlan(
            call=index,
            fqn=call.fqn,
            block=graph.name,
            placements=placements or "whole",
            recompute=recompute or "none",
        )

    def _layout(self, name: str, real: BlockGraph, graph: BlockGraph) -> str:
        layout = self.plan.placements.get(name)
        if self.mesh.tp == 1 or layout is None or not layout.axes:
            return ""
        options = shard_options(graph)
        axes = alike_axes(real, layout.axes, graph, options)
        try:
            check_axes(graph, options, axes, self.mesh.tp)
        except ValueError:
            return ""  # does not divide at the twin's sizes
        own = f"{name} of {graph.name}"
        self.placements[own] = Layout(block=graph.name, degree=self.mesh.tp, axes=axes)
        return own

    def _marks(self, name: str, real: BlockGraph, graph: BlockGraph) -> str:
        entry = self.plan.recompute[name]
        keep = tuple(n for n in _alike_names(real, graph, entry.keep))
        mode = entry.mode if entry.mode != "selective" or keep else "full"
        own = f"{name} of {graph.name}"
        self.recompute[own] = Recompute(mode=mode, keep=keep if mode == "selective" else ())
        return own


def _kind(program: Program, index: int) -> str:
    """Return what calls of one class share across depths: their module, or their states."""
    call = program.calls[index]
    text = call.fqn or ",".join(call.states) or program.graphs[call.graph].name
    return re.sub(r"\d+", "*", text)


def _alike_names(real: BlockGraph, graph: BlockGraph, names: Sequence[str]) -> list[str]:
    """Return the ops of a graph that are the ops `names` of another."""
    before = [(op.target_name, op.fqn) for op in real.ops]
    now = [(op.target_name, op.fqn) for op in graph.ops]
    matcher = difflib.SequenceMatcher(None, before, now, autojunk=False)
    found = {
        real.ops[m.a + i].name: graph.ops[m.b + i].name
        for m in matcher.get_matching_blocks()
        for i in range(m.size)
    }
    return [found[name] for name in names if name in found]


def run_twins(
    plan: Plan, loaded: LoadedModel, spec: str, seq: int | None = None
) -> tuple[TwinRun, ...]:
    """Run a step of every twin plan on processes of this machine, beside the single device.

    Args:
        plan, loaded: the real ones.
        spec: what `loaded` was made of; every process makes it again.
        seq: likewise.

    Raises:
        AutoplanError: there is no twin of the model.
        EmitError: a process failed.
    """
    twin = shrink(loaded)
    small = capture(twin.model, twin.batch, twin.loss_fn, microbatch_size=_ROWS)
    drawing = [op.name for graph in small.graphs for op in graph.ops if is_random(op)]
    if any("dropout" not in name and "attention" not in name for name in drawing):
        raise AutoplanError(f"{drawing[0]} draws random numbers, which a split draws otherwise")
    program = captured_for(plan, loaded.model, loaded.batch, loaded.loss_fn)
    found = []
    for mesh in twin_degrees(plan.mesh):
        with tempfile.TemporaryDirectory() as text:
            twin_plan(plan, program, small, mesh).save(Path(text) / "plan.json")
            arguments = ["-m", "autoplan.twins", text, "--model", spec]
            arguments += ["--seq", str(seq)] if seq is not None else []
            launch(arguments, mesh.world_size, timeout_s=_TIMEOUT_S, echo=False)
            found.append(codec.loads(TwinRun, (Path(text) / "result.json").read_text()))
    return tuple(found)


def compare_step(plan: Plan, twin: LoadedModel) -> TwinRun:
    """Run a step of a twin plan on this rank and hold it against the single device."""
    batch = global_batch(twin.batch, plan.global_batch_size, 0)
    alone = copy.deepcopy(twin.model)
    args, kwargs, target = split_batch(alone, batch, twin.loss_fn)
    loss = reduce_loss(alone(*args, **kwargs), twin.loss_fn, target)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    module = parallelize(plan, copy.deepcopy(twin.model), twin.batch, twin.loss_fn, device="cpu")
    got = float(module.train_step(module.shard_batch(batch)))
    gradients = module.full_gradients()
    errors = {name: _error(gradients.get(name), tensor) for name, tensor in expected.items()}
    worst = max(errors, key=lambda name: errors[name], default="")
    loss_error = abs(got - float(loss)) / max(abs(float(loss)), 1e-12)
    program = capture(twin.model, twin.batch, twin.loss_fn, microbatch_size=_ROWS)
    narrow = {torch.float32, torch.bfloat16, torch.float16}
    metas = [op.meta for g in program.graphs for op in g.ops if op.meta is not None]
    is_coarse = any(meta.dtype in narrow for meta in metas)
    tolerance = _COARSE_TOLERANCE if is_coarse else _TOLERANCE
    return TwinRun(
        mesh=str(plan.mesh),
        loss_error=loss_error,
        gradient_error=errors.get(worst, 0.0),
        worst=worst,
        tolerance=tolerance,
    )


def _error(got: torch.Tensor | None, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest entry, with a floor for zero gradients."""
    if got is None:
        return float("inf") if bool(expected.any()) else 0.0
    scale = max(float(expected.abs().max()), 1e-3)
    return float((got - expected).abs().max()) / scale


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the twin plan in a folder on this rank; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seq", type=int, default=None)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    twin = shrink(load_model(options.model, seq=options.seq))
    result = compare_step(Plan.load(options.folder / "plan.json"), twin)
    if dist.get_rank() == 0:
        (options.folder / "result.json").write_text(codec.dumps(result))


if __name__ == "__main__":
    run_worker(main)
