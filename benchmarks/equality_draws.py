"""Draw models, plans and batches, and compare every parallel run with the single device.

    python benchmarks/equality_draws.py --draws 300 --seed 1 [--json FILE] [--only NUMBER]

Hypothesis draws a model family, the degrees and their order, ZeRO stage and replicas, offload,
micro-batches, schedule, stages of a rank, their borders, recompute marks and tensor-parallel
layouts. Each draw runs in float64 on 1, 2, 4 or 8 forked gloo processes. Loss, all gradients
(gathered), their norm and clipped form, the parameters and buffers after the optimizer steps, and
the loss after two steps must equal those of the user's own module on one device, and every rank's
part of a checkpoint what the whole has there. The exit code is 1 if any draw differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import sys
import time
import unittest.mock
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.capturer import capture
from autoplan.chunks import chunked
from autoplan.emitter import parallelize
from autoplan.graph import Placement
from autoplan.layout_check import fsdp_can_slice
from autoplan.meshes import AXIS_ORDERS, AxisOrder
from autoplan.op_facts import written_inputs
from autoplan.plan import Layout, Plan, Recompute
from autoplan.program import BlockGraph, Program
from autoplan.runtime import ParallelModule
from autoplan.schedules import MULTI_STAGE, unrunnable_split
from autoplan.sharding import check_axes, layout_parameters, shard_options
from autoplan.shared_writes import changed_states
from autoplan.stage_check import are_separate
from benchmarks.equality_families import FAMILIES, TOKENS, build
from benchmarks.equality_reference import Result, differences, reference
from benchmarks.worker_pool import WorkerPool
from tests.layouts import agreeing_axes, prefer_axes, random_axes, shared_states
from tests.plans import hand_plan

__all__ = ["Draw", "draw_all", "plan_of", "run_draws"]

TOLERANCE = 1e-9
FLOAT32_TOLERANCE = 1e-5  # sums in another order inside a model that computes in float32
TIMEOUT_S = 60.0
LEARNING_RATE = 0.01

_TRIES = 200  # cuts drawn before a family is said to have none

_MARKABLE = ("linear", "addmm", "matmul", "bmm", "scaled_dot_product_attention", "layer_norm",
             "gelu", "convolution")  # fmt: skip

_WORLDS = (1, 2, 2, 2, 4, 4, 4, 8)
_MESHES = tuple(
    (dp, tp, world // (dp * tp))
    for world in _WORLDS
    for dp in (1, 2, 4, 8)
    for tp in (1, 2, 4)
    if world % (dp * tp) == 0 and world // (dp * tp) <= 4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One model, plan and batch; everything that is not a field follows from `seed`.

    With `slices_shared` parameters of several calls lie in slices, where all can read the same.
    With `is_shortened` the batch of the second step has fewer tokens than that of the plan, where
    the family has tokens.
    """

    family: str
    dp: int
    tp: int
    pp: int
    zero_stage: int
    microbatch_size: int
    num_microbatches: int
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
    layout: Literal["whole", "megatron", "random"]
    recompute: Literal["none", "full", "selective", "mixed"]
    optimizer: Literal["sgd", "adamw"]
    seed: int
    dp_replicate: int = 1
    axis_order: AxisOrder = "tp-dp-pp"
    num_chunks: int = 1
    offload: Literal["none", "optimizer"] = "none"
    slices_shared: bool = False
    is_shortened: bool = False

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.dp * self.tp * self.pp

    @property
    def rows(self) -> int:
        """Return the rows of the global batch."""
        return self.dp * self.microbatch_size * self.num_microbatches


@st.composite
def draws(draw: st.DrawFn, family: str) -> Draw:
    """Draw any valid combination for a family."""
    world = draw(st.sampled_from(_WORLDS))
    dp, tp, pp = draw(st.sampled_from([m for m in _MESHES if prod(m) == world]))
    zero_stage = draw(st.integers(0, 3)) if dp > 1 else 0
    recompute: Any = draw(st.sampled_from(("none", "full", "selective", "mixed")))
    schedule, num_chunks = draw(st.sampled_from(_schedules(pp, zero_stage, recompute)))
    least = pp if schedule == "1f1b" else 1
    num_microbatches = draw(st.integers(least, least + 2))
    if schedule in MULTI_STAGE and num_microbatches > pp:
        num_microbatches = 2 * pp  # whole rounds
    shards = [dp // n for n in (2, 4) if dp % n == 0 and n < dp]
    layout: Any = draw(st.sampled_from(("whole", "megatron", "random"))) if tp > 1 else "whole"
    slices_shared = draw(st.booleans()) if tp > 1 else False
    may_shorten = layout != "random" and not slices_shared  # tokens may be sliced then
    return Draw(
        family=family,
        dp=dp,
        tp=tp,
        pp=pp,
        zero_stage=zero_stage,
        microbatch_size=draw(st.integers(1, 2)),
        num_microbatches=num_microbatches,
        schedule=schedule,
        layout=layout,
        recompute=recompute,
        optimizer=draw(st.sampled_from(("sgd", "adamw"))),
        seed=draw(st.integers(0, 2**16)),
        dp_replicate=draw(st.sampled_from((1, *shards))) if zero_stage else 1,
        axis_order=draw(st.sampled_from(AXIS_ORDERS)) if dp > 1 and pp > 1 else AXIS_ORDERS[0],
        num_chunks=num_chunks,
        offload=draw(st.sampled_from(("none", "optimizer"))) if zero_stage == 3 else "none",
        slices_shared=slices_shared,
        is_shortened=draw(st.sampled_from((False, False, True))) if may_shorten else False,
    )


def _schedules(pp: int, zero_stage: int, recompute: str) -> list[tuple[Any, int]]:
    """Return schedules that torch can run, with stages of each rank."""
    if pp == 1:
        return [("gpipe", 1)]
    found: list[tuple[Any, int]] = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]
    if unrunnable_split("zero_bubble", zero_stage, is_mixed=False, recomputes=recompute != "none"):
        return found
    return [*found, ("zero_bubble", 1), ("zero_bubble", 2)]


def draw_all(count: int, seed: int) -> list[Draw]:
    """Return `count` draws, families in turn; the same for the same seed."""
    families = tuple(FAMILIES)
    return [_draw_one(families[i % len(families)], f"{seed} {i}") for i in range(count)]


def _draw_one(family: str, seed: str) -> Draw:
    """Return one draw. Hypothesis varies examples of one run only slightly: each has its own."""
    found: list[Draw] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4,
        database=None,
        deadline=None,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(draws(family))
    def collect(draw: Draw) -> None:
        found.append(draw)

    collect()
    return _settled(found[-1])  # the first is always the simplest


def _settled(draw: Draw) -> Draw:
    """Return a draw with one stage a rank where the family cannot be cut into more."""
    program = program_of(draw.family, draw.microbatch_size)
    if _cuts(program, draw, random.Random(0)) is not None:
        return draw
    return replace(draw, num_chunks=1, schedule="gpipe")


@functools.cache
def program_of(family: str, rows: int) -> Program:
    """Return the captured program of a family for micro-batches of `rows` rows."""
    one = FAMILIES[family]
    batch = one.batch(rows, torch.Generator().manual_seed(1))
    return capture(build(family), batch, one.loss_fn, microbatch_size=rows)


def plan_of(draw: Draw) -> Plan:
    """Return the plan of a draw."""
    program = program_of(draw.family, draw.microbatch_size)
    chance = random.Random(draw.seed)
    firsts = _cuts(program, draw, chance)
    assert firsts is not None, "a draw was not settled"
    plan = hand_plan(
        program,
        type(build(draw.family)).__name__,
        dp=draw.dp,
        tp=draw.tp,
        pp=draw.pp,
        zero_stage=draw.zero_stage,
        num_microbatches=draw.num_microbatches,
        schedule=draw.schedule,
        num_chunks=draw.num_chunks,
        first_calls=firsts,
        dp_replicate=draw.dp_replicate,
        axis_order=draw.axis_order,
        offload=draw.offload,
        layouts=_layouts(draw, program),
    )
    marks = {"none": Recompute(mode="none")}
    stages = []
    for stage in plan.stages:
        blocks = []
        for block in stage.blocks:
            graph = program.graphs[program.calls[block.call].graph]
            entry = _mark(draw, graph, chance)
            name = f"{block.call}/{entry.mode}" if entry.mode == "selective" else entry.mode
            marks[name] = entry
            blocks.append(replace(block, recompute=name))
        stages.append(replace(stage, blocks=tuple(blocks)))
    return replace(plan, stages=tuple(stages), recompute=marks)


def _cuts(program: Program, draw: Draw, chance: random.Random) -> list[int] | None:
    """Return the first calls of all stages but the first, or None where none were found.

    Each stage has a parameter, no two stages of a rank share one, and a state that the forward
    changes is on one stage.
    """
    joined = [state.calls for state in changed_states(program)]
    states = [{program.aliases.get(fqn, fqn) for fqn in call.states} for call in program.calls]
    num_stages = draw.pp * draw.num_chunks
    if num_stages > len(states):
        return None
    for _ in range(_TRIES):
        ends = [0, *sorted(chance.sample(range(1, len(states)), num_stages - 1)), len(states)]
        stages = [set().union(*states[a:b]) for a, b in pairwise(ends)]
        is_split = any(min(calls) < end <= max(calls) for calls in joined for end in ends[1:-1])
        if not is_split and are_separate(stages, draw.pp):
            return ends[1:-1]
    return None


def _mark(draw: Draw, graph: BlockGraph, chance: random.Random) -> Recompute:
    """Return the recompute entry of a block; glue takes part only in mixed draws."""
    mode: Literal["none", "full", "selective"] = "none"
    if draw.recompute == "mixed":
        mode = chance.choice(("none", "full", "selective"))
    elif not graph.is_glue:
        mode = draw.recompute
    written = {name for op in graph.ops for name in written_inputs(op)}
    legal = [
        op.name
        for op in graph.ops
        if op.target_name.removeprefix("aten.").partition(".")[0] in _MARKABLE
        and op.name not in written
    ]
    keep = tuple(name for name in legal if chance.random() < 0.4)
    if mode == "selective" and not keep:
        mode = "full"
    return Recompute(mode=mode, keep=keep if mode == "selective" else ())


def _layouts(draw: Draw, program: Program) -> dict[str, Layout]:
    layouts = {}
    shards = draw.dp // draw.dp_replicate
    agreeing = agreeing_axes(program, draw.tp, draw.seed) if draw.slices_shared else {}
    for graph in program.graphs if draw.layout != "whole" or agreeing else ():
        options = shard_options(graph)
        if graph.name in agreeing:
            axes = agreeing[graph.name]
        elif draw.layout == "whole":
            continue
        elif draw.layout == "random":
            axes = random_axes(graph, options, draw.tp, draw.seed)
        else:
            axes = prefer_axes(graph, options, draw.tp)
        check_axes(graph, options, axes, draw.tp)
        stored = layout_parameters(graph, options, axes)
        if not agreeing:
            stored |= dict.fromkeys(shared_states(program, graph), "R")
        for state in graph.states:
            placed = Placement.parse(stored[state.fqn])
            if draw.zero_stage and not fsdp_can_slice(state.meta.shape, placed, shards):
                stored[state.fqn] = "R"
        layouts[graph.name] = Layout(block=graph.name, degree=draw.tp, axes=axes, parameters=stored)
    return layouts


def run_draw(rank: int, draw: Draw) -> list[str]:
    """Run a draw on this rank; return what is wrong here, rank 0 all that was gathered."""
    family = FAMILIES[draw.family]
    generator = torch.Generator().manual_seed(draw.seed)
    batches = [family.batch(draw.rows, generator) for _ in range(3)]
    if draw.is_shortened:
        batches[1] = shortened(batches[1])
    program = program_of(draw.family, draw.microbatch_size)
    with (
        unittest.mock.patch("autoplan.recapture.capture", return_value=program),
        unittest.mock.patch("autoplan.device_meshes.init_device_mesh", _mesh_of),
    ):
        module = parallelize(
            plan_of(draw), build(draw.family), batches[0], family.loss_fn, device="cpu"
        )
    optimizer = make_optimizer(draw, module.parameters())
    losses, gradients, clipped = [], {}, {}
    norms = []
    for step, batch in enumerate(batches):
        losses.append(float(module.train_step(module.shard_batch(batch))))
        if step == 2:
            break
        if step == 0:
            gradients = module.full_gradients()
        norms.append(float(module.clip_grad_norm_(0.5)))
        if step == 0:
            clipped = module.full_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    got = Result(
        losses=losses,
        norms=norms,
        gradients=gradients,
        clipped=clipped,
        state=module.full_state(),
    )
    misplaced = _misplaced_chunks(rank, module, got.state)
    if rank != 0:
        return misplaced
    parts = (draw.dp * draw.num_microbatches) if family.has_batch_statistics else 1
    expected = reference(
        build(draw.family),
        batches,
        family.loss_fn,
        functools.partial(make_optimizer, draw),
        num_parts=parts,
    )
    is_random = draw.layout == "random" or draw.slices_shared
    loose = family.sums_in_float32 or (family.computes_in_float32 and is_random)
    tolerance = FLOAT32_TOLERANCE if loose else TOLERANCE
    return [*misplaced, *differences(got, expected, tolerance)]


def shortened(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a batch without the last tokens of its rows, if it has tokens."""
    if not all(leaf.dim() > 1 and leaf.shape[1] == TOKENS for leaf in batch.values()):
        return dict(batch)
    return {key: leaf[:, : TOKENS - 3].contiguous() for key, leaf in batch.items()}


def _misplaced_chunks(
    rank: int, module: ParallelModule, state: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return what is wrong with the parts of parameters that ranks would save to a checkpoint.

    This rank's must be what the whole parameters have there; rank 0 finds those that nobody has.
    """
    problems = []
    held: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        held[name] = torch.zeros(parameter.shape, dtype=torch.bool)
        for chunk in chunked(parameter).chunks:
            sizes = zip(chunk.offsets, chunk.local.shape, strict=True)
            at = tuple(slice(start, start + size) for start, size in sizes)
            held[name][at] = True
            # A parameter without a dimension is stored with one under FSDP.
            if not torch.equal(state[name].reshape(parameter.shape)[at], chunk.local):
                problems.append(f"rank {rank} has another {name}{list(at)}")
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.gather_object(held, ranks if rank == 0 else None)
    for name in state if rank == 0 else ():
        parts = [own[name] for own in ranks if name in own]
        if parts and not torch.stack(parts).any(0).all():
            problems.append(f"a part of {name} is on no rank")
    return problems


@functools.cache
def _mesh_of(device: str, sizes: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of some degrees; a worker makes the groups of each once."""
    return init_device_mesh(device, sizes, mesh_dim_names=mesh_dim_names)


def make_optimizer(draw: Draw, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer of a draw.

    The large eps keeps gradients that are zero but for rounding (key biases) from being scaled up.
    """
    if draw.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=1e-3)
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def run_draws(
    chosen: Sequence[Draw], *, on_draw: Callable[[int, Draw, list[str], float], None] | None = None
) -> dict[int, list[str]]:
    """Return, by number of the draw, what does not agree; empty if all agree."""
    for draw in chosen:
        program_of(draw.family, draw.microbatch_size)
    problems: dict[int, list[str]] = {}
    for world_size in sorted({draw.world_size for draw in chosen}):
        with WorkerPool(run_draw, world_size, TIMEOUT_S) as pool:
            for number, draw in enumerate(chosen):
                if draw.world_size != world_size:
                    continue
                started = time.monotonic()
                try:
                    found = [problem for own in pool.run(draw) for problem in own]
                except RuntimeError as error:
                    found = [str(error)]
                if found:
                    problems[number] = found
                if on_draw is not None:
                    on_draw(number, draw, found, time.monotonic() - started)
    return problems


def main() -> None:
    """Run the draws, print what differs and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--only", type=int, default=None, help="run one draw by its number")
    options = parser.parse_args()
    chosen = draw_all(options.draws, options.seed)
    if options.only is not None:
        chosen = [chosen[options.only]]
    started = time.monotonic()
    rows: list[dict[str, Any]] = []

    def show(number: int, draw: Draw, found: list[str], wall_s: float) -> None:
        rows.append({**asdict(draw), "problems": found, "wall_s": round(wall_s, 2)})
        if found:
            text = "\n".join(found[:6])[-1500:].replace("\n", "\n  ")
            print(f"draw {number}: {draw}\n  {text}", flush=True)

    problems = run_draws(chosen, on_draw=show)
    wall_s = time.monotonic() - started
    worlds = Counter(draw.world_size for draw in chosen)
    print(
        f"{len(chosen) - len(problems)} of {len(chosen)} draws equal the single device "
        f"({len({d.family for d in chosen})} families; processes: "
        f"{', '.join(f'{n} on {w}' for w, n in sorted(worlds.items()))}), {wall_s:.0f} s"
    )
    if options.json is not None:
        document = {"seed": options.seed, "wall_s": wall_s, "draws": rows}
        options.json.write_text(json.dumps(document, indent=1))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
