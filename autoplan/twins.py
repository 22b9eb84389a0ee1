"""Numerics of a plan on a small twin of its model, on gloo processes of this machine.

    plan, model --shrink--> twin --degrees of at most 2--> twin plans --launch--> losses, gradients

A twin has the classes of blocks of the model, few and narrow, in float64, without dropout. Its
plans have the ZeRO stage, replicas, schedule, recompute marks and layouts of the real one, each
layout and mark on some block of its class, over at most four processes, eight with replicas. A step
of it equals the single device's or the plan is wrong. Where the plan computes in bfloat16 a second
twin does too.

Run under torchrun as `python -m autoplan.twins FOLDER`; needs no solver.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan import codec
from autoplan.alike_programs import alike_axes
from autoplan.dry_run_result import TwinRun
from autoplan.errors import AutoplanError
from autoplan.launcher import launch
from autoplan.models import LoadedModel, load_model
from autoplan.op_facts import is_random
from autoplan.plan import BlockPlan, Layout, Mesh, Plan, Recompute, StagePlan
from autoplan.processes import run_worker
from autoplan.program import BlockGraph, Program
from autoplan.recapture import captured_for
from autoplan.schedules import MULTI_STAGE
from autoplan.sharding import check_axes, layout_parameters, shard_options
from autoplan.stage_check import are_separate
from autoplan.twin_steps import TWIN_ROWS, captured_twin, compare_step, in_dtype

__all__ = ["main", "run_twins", "shrink", "twin_degrees", "twin_dtypes", "twin_plan"]

_TOKENS = 16
_MOST_PARAMETERS = 4_000_000  # of a model that is its own twin
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


def shrink(loaded: LoadedModel, dtype: torch.dtype = torch.float64) -> LoadedModel:
    """Return a twin with weights of `dtype` on the CPU; the model stays as it is.

    Raises:
        AutoplanError: the model is large and has no transformers config to shrink.
    """
    torch.manual_seed(0)
    config = getattr(loaded.model, "config", None)
    if hasattr(config, "to_dict") and hasattr(loaded.model, "dummy_inputs"):
        model = type(loaded.model)(_small_config(config))
        tokens = torch.randint(_SIZES["vocab_size"], (TWIN_ROWS, _TOKENS))
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
    model = model.to(dtype).train(loaded.model.training)
    batch = in_dtype(batch, dtype)
    return LoadedModel(model=model, batch=batch, loss_fn=loaded.loss_fn, name=loaded.name)


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
    """Return meshes that split what a mesh splits in two; where it splits all, every pair.

    Replicas need four ranks of dp: two of two shards.
    """
    cut = {name: min(2, getattr(mesh, name)) for name in ("dp", "tp", "pp")}
    split = [name for name, degree in cut.items() if degree > 1]
    pairs = itertools.combinations(split, 2) if len(split) == 3 else [split]
    found = []
    for pair in pairs:
        degrees = {name: 2 if name in pair else 1 for name in cut}
        if mesh.dp_replicate > 1 and "dp" in pair:
            degrees |= {"dp": 4, "dp_replicate": 2}
        found.append(Mesh(**degrees, axis_order=mesh.axis_order))
    return found


def twin_dtypes(plan: Plan) -> tuple[torch.dtype, ...]:
    """Return the dtypes of the weights of twins: float64, and what the plan computes beside."""
    if plan.mixed_precision != "none":
        return torch.float64, torch.bfloat16
    return (torch.float64, torch.float32) if plan.autocast != "none" else (torch.float64,)


def twin_plan(
    plan: Plan, program: Program, twin: Program, mesh: Mesh, *, is_exact: bool = True
) -> Plan:
    """Return a plan of the twin that has the real plan's decisions in turn.

    Args:
        plan, program: the real ones.
        twin: captured program of the twin.
        mesh: of the twin's processes.
        is_exact: without the plan's own precision.
    """
    builder = _TwinBuilder(plan, program, twin, mesh)
    blocks = [builder.block(index) for index in range(len(twin.calls))]
    builder.agree(blocks)
    chunks = min(2, plan.num_chunks) if mesh.pp > 1 else 1
    stages = _even_stages(blocks, twin, mesh.pp * chunks)
    schedule = plan.schedule if mesh.pp > 1 else "none"
    if schedule in MULTI_STAGE and not _can_interleave(stages, twin, mesh.pp):
        schedule, stages = "1f1b", _even_stages(blocks, twin, mesh.pp)
    is_sharded = mesh.dp > 1 or plan.offload != "none"
    return replace(
        plan,
        fingerprint=twin.fingerprint,
        mesh=mesh,
        zero_stage=plan.zero_stage if is_sharded else 0,
        microbatch_size=TWIN_ROWS,
        num_microbatches=2 * mesh.pp,
        global_batch_size=mesh.dp * 2 * mesh.pp * TWIN_ROWS,
        schedule=schedule,
        mixed_precision="none" if is_exact else plan.mixed_precision,
        autocast="none" if is_exact else plan.autocast,
        stages=stages,
        recompute=builder.recompute,
        placements=builder.placements,
        shared=(),
    )


def _even_stages(blocks: Sequence[BlockPlan], twin: Program, count: int) -> tuple[StagePlan, ...]:
    """Return stages with as many blocks that are modules each."""
    owned = [index for index, call in enumerate(twin.calls) if call.fqn]
    firsts = [0, *(owned[len(owned) * stage // count] for stage in range(1, count)), len(blocks)]
    return tuple(
        StagePlan(index=i, blocks=tuple(blocks[firsts[i] : firsts[i + 1]])) for i in range(count)
    )


def _can_interleave(stages: Sequence[StagePlan], twin: Program, pp: int) -> bool:
    """Return whether every stage reads parameters, and no two of a rank the same one."""
    read = [
        {
            twin.aliases.get(fqn, fqn)
            for block in stage.blocks
            for fqn in twin.calls[block.call].states
        }
        for stage in stages
    ]
    return are_separate(read, pp)


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

    def agree(self, blocks: Sequence[BlockPlan]) -> None:
        """Store whole what calls would store differently: a stage sees its own calls only."""
        needed: dict[str, set[str]] = {}
        read: dict[tuple[str, str], str] = {}
        for block in blocks:
            call = self.twin.calls[block.call]
            graph = self.twin.graphs[call.graph]
            axes = self.placements[block.placements].axes
            texts = layout_parameters(graph, shard_options(graph), axes) if axes else {}
            for state, fqn in zip(graph.states, call.states, strict=True):
                first = self.twin.aliases.get(fqn, fqn)
                needed.setdefault(first, set()).add(texts.get(state.fqn, "R"))
                if axes:
                    read[block.placements, state.fqn] = first
        for (name, own), first in read.items():
            if len(needed[first]) > 1:
                layout = self.placements[name]
                self.placements[name] = replace(layout, parameters={**layout.parameters, own: "R"})

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
    exact = captured_twin(twin)
    drawing = [op.name for graph in exact.graphs for op in graph.ops if is_random(op)]
    if any("dropout" not in name and "attention" not in name for name in drawing):
        raise AutoplanError(f"{drawing[0]} draws random numbers, which a split draws otherwise")
    program = captured_for(plan, loaded.model, loaded.batch, loaded.loss_fn)
    smalls = {torch.float64: exact}
    found = []
    for mesh, dtype in itertools.product(twin_degrees(plan.mesh), twin_dtypes(plan)):
        is_exact = dtype == torch.float64
        if dtype not in smalls:
            smalls[dtype] = captured_twin(shrink(loaded, dtype), plan.autocast)
        small = smalls[dtype]
        with tempfile.TemporaryDirectory() as text:
            made = twin_plan(plan, program, small, mesh, is_exact=is_exact)
            made.save(Path(text) / "plan.json")
            arguments = ["-m", "autoplan.twins", text, "--model", spec]
            arguments += ["--seq", str(seq)] if seq is not None else []
            launch(arguments, mesh.world_size, timeout_s=_TIMEOUT_S, echo=False)
            found.append(codec.loads(TwinRun, (Path(text) / "result.json").read_text()))
    return tuple(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the twin plan in a folder on this rank; rank 0 writes the result."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seq", type=int, default=None)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    plan = Plan.load(options.folder / "plan.json")
    twin = shrink(load_model(options.model, seq=options.seq), twin_dtypes(plan)[-1])
    result = compare_step(plan, twin)
    if dist.get_rank() == 0:
        (options.folder / "result.json").write_text(codec.dumps(result))


if __name__ == "__main__":
    run_worker(main)
