"""Our search beside other planners on the same questions: `python benchmarks/peers.py FOLDER`.

FOLDER holds `piper/*.json`, the profiled layer graphs of Piper (NeurIPS 2021; msr-fiddle/piper).

piper      its graphs under its own objective, solved exactly; `listed` is what its algorithm, whose
           inner knapsack is a heuristic, reached; `ratio` is at most 1 where ours matches it
questions  models and clusters that others planned, asked of `autoplan.optimize`. Step times are
           predictions of each planner's own cost model and do not compare; seconds do, roughly.
           `theirs` is the configuration that was their answer, priced as ours is: where the answer
           leaves something open, the fastest reading that fits; `ratio` is ours over that, and at
           most 1
chains     keep or redo in a chain of equal ops under a memory budget, to proof
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.cluster import Cluster
from autoplan.estimating import estimate
from autoplan.graph import Trace
from autoplan.models import LoadedModel, load_model
from autoplan.optimizing import optimize
from autoplan.plan import Plan
from autoplan.report import table
from autoplan.search.choice import solve_choice
from autoplan.search.frontier import whole_frontier
from autoplan.search.problem import ChoiceOption, ChoiceProblem
from benchmarks.piper_instances import load_instance, solve_instance
from benchmarks.published_models import Decoder, Shape, batch_of

__all__ = ["chain_rows", "piper_rows", "question_rows"]

_GIB = 2**30
_PIPER_BANDWIDTH = 25 * _GIB  # bytes/s in its experiments; per ms for resnet, as its times are
_BUDGET = 0.35
_MATCH = 1 + 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PiperCase:
    """An instance, its memory and devices, and what Piper's algorithm reached and took."""

    name: str
    memory_gib: float
    devices: int
    microbatches: int
    listed: float
    digits: int
    seconds: float | None = None


PIPER_CASES = (
    PiperCase(
        name="bert32a100",
        memory_gib=8,
        devices=8,
        microbatches=1920,
        listed=0.1658558,
        digits=7,
        seconds=0.03,
    ),
    PiperCase(
        name="bert32a100",
        memory_gib=8,
        devices=32,
        microbatches=1920,
        listed=0.0415155,
        digits=7,
    ),
    PiperCase(
        name="bert32a100",
        memory_gib=8,
        devices=128,
        microbatches=1920,
        listed=0.0101209,
        digits=7,
    ),
    PiperCase(
        name="bert32a100",
        memory_gib=80,
        devices=64,
        microbatches=1920,
        listed=0.0156502,
        digits=7,
    ),
    PiperCase(
        name="bert32a100",
        memory_gib=8,
        devices=512,
        microbatches=1920,
        listed=0.0025611,
        digits=7,
        seconds=2.1,
    ),
    PiperCase(
        name="bert32a100",
        memory_gib=8,
        devices=2048,
        microbatches=960,
        listed=0.0009753,
        digits=7,
        seconds=23.9,
    ),
    PiperCase(
        name="resnet",
        memory_gib=4,
        devices=8,
        microbatches=7680,
        listed=73.49329,
        digits=5,
        seconds=1.8,
    ),
    PiperCase(
        name="resnet",
        memory_gib=1.5,
        devices=32,
        microbatches=7680,
        listed=50.97720,
        digits=5,
        seconds=4.1,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A planning problem that another planner answered.

    Attributes:
        planner: who, and the problem in words.
        model, seq, dtype: a config of transformers or a shape, and the rows.
        cluster, memory, batch: what it trains on, and rows of a step.
        answer, seconds: what was listed.
        readings: what the answer may mean, as arguments of `estimate` without a micro-batch size.
        microbatch_sizes: that it may mean.
    """

    planner: str
    model: Mapping[str, Any] | Shape
    seq: int
    cluster: str
    memory: str | None
    batch: int
    answer: str
    seconds: str
    dtype: torch.dtype = torch.bfloat16
    readings: tuple[Mapping[str, Any], ...] = ()
    microbatch_sizes: tuple[int, ...] = ()


def _gpt(hidden: int, layers: int, heads: int, vocabulary: int = 51200) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": 2048,
    }


def _megatron(hidden: int, layers: int, heads: int, vocabulary: int = 51200) -> Shape:
    """Return a GPT as Calculon models it: Megatron's kernels, scores of attention materialised."""
    return Shape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        vocab=vocabulary,
        seq=2048,
        dropout=True,
        attention="unfused",
        kernels="megatron",
    )


# Source: Touvron et al. 2023, Llama 2, table 1 and its released config.
_LLAMA2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}

_MEGATRON = {"stage_ends": "blocks", "tensor_layout": "megatron"}
_MODES = ({"recompute": "none"}, {"recompute": "full"})

QUESTIONS = (
    Question(
        planner="Calculon: GPT-3 175B, 4,096 A100-80",
        model=_megatron(12288, 96, 96),
        seq=2048,
        cluster="512x8:a100_sxm_80gb",
        memory=None,
        batch=1536,
        answer="3.829 s, t8 p4 d128",
        seconds="1,500",
        readings=(
            {
                **_MEGATRON,
                "tp": 8,
                "pp": 4,
                "virtual_stages": 24,
                "sequence_parallel": True,
                "recompute": "attention",
                "zero_stage": 1,
            },
        ),
        microbatch_sizes=(3,),
    ),
    Question(
        planner="Calculon: GPT-3 13B, 64 A100-80",
        model=_megatron(5120, 40, 40),
        seq=2048,
        cluster="8x8:a100_sxm_80gb",
        memory=None,
        batch=64,
        answer="1.0557 s, t1 p8 d8",
        seconds="120",
        readings=tuple(
            {**_MEGATRON, "pp": 8, "virtual_stages": 5, "zero_stage": zero} for zero in (0, 1)
        ),
        microbatch_sizes=(1,),
    ),
    Question(
        planner="Galvatron: Llama-2 7B, 8 GPUs of 38 GB",
        model=_LLAMA2_7B,
        seq=2048,
        cluster="1x8:a100_sxm_40gb",
        memory="38GB",
        batch=64,
        answer="4.181 s, d8 ZeRO, recompute all",
        seconds="111",
        readings=tuple({"recompute": "full", "zero_stage": zero} for zero in (2, 3)),
        microbatch_sizes=(1, 2, 4, 8),
    ),
    Question(
        planner="Galvatron: Llama-2 7B, 16 GPUs of 38 GB",
        model=_LLAMA2_7B,
        seq=2048,
        cluster="2x8:a100_sxm_40gb",
        memory="38GB",
        batch=64,
        answer="2.108 s, t4 d4",
        seconds="66",
        readings=tuple(
            {**_MEGATRON, **mode, "tp": 4, "zero_stage": zero, "sequence_parallel": is_sliced}
            for mode in _MODES
            for zero in (0, 1, 2, 3)
            for is_sliced in (False, True)
        ),
        microbatch_sizes=(1, 2, 4, 8, 16),
    ),
    Question(
        planner="Aceso: GPT 1.3B, 4 V100-32",
        model=_gpt(2048, 24, 32),
        seq=2048,
        cluster="1x4:v100_sxm_32gb",
        memory=None,
        batch=1024,
        answer="101.18 s",
        seconds="200",
        dtype=torch.float16,
    ),
)

_CHAINS = {17: "21, 0.4 s", 33: "39, 1.3 s", 49: "57, 3.5 s"}


def piper_rows(folder: Path, devices: int | None = None) -> list[dict[str, Any]]:
    """Return Piper's cases solved exactly; `devices` leaves out the larger ones."""
    rows = []
    for case in PIPER_CASES:
        if devices is not None and case.devices > devices:
            continue
        instance = load_instance(folder / "piper" / f"{case.name}.json", _PIPER_BANDWIDTH)
        assert instance is not None, f"{case.name} is listed, so it is small enough"
        found = solve_instance(
            instance,
            devices=case.devices,
            memory=case.memory_gib * _GIB,
            microbatches=case.microbatches,
        )
        rows.append(
            {
                "instance": f"{case.name}, {case.memory_gib:g} GiB, {case.devices} devices",
                "listed": case.listed,
                "listed_s": case.seconds,
                "time": found.time,
                "bound": found.bound,
                "seconds": round(found.seconds, 2),
                "ratio": round(found.time, case.digits) / case.listed,
                "stages": len(found.stages),
            }
        )
    return rows


def question_rows(names: str = "") -> list[dict[str, Any]]:
    """Return the questions answered by `autoplan.optimize`; `names` picks some by their text."""
    rows = []
    for question in QUESTIONS:
        if names not in question.planner:
            continue
        cluster = Cluster.parse(question.cluster)
        if question.memory is not None:
            cluster = cluster.with_memory(question.memory)
        loaded = _loaded(question)
        started = time.perf_counter()
        plan = optimize(
            loaded.model, cluster, loaded.batch, global_batch_size=question.batch, name="model"
        )
        seconds = time.perf_counter() - started
        theirs = _theirs_s(question, cluster, loaded)
        rows.append(
            {
                "question": question.planner,
                "answer": question.answer,
                "answer_s": question.seconds,
                "step_time_s": plan.predicted.step_time_s,
                "bound_s": plan.search.bound_s,
                "gap": plan.search.gap,
                "mesh": _in_words(plan),
                "seconds": round(seconds, 2),
                "theirs": theirs,
                "ratio": None if theirs is None else plan.predicted.step_time_s / theirs,
            }
        )
    return rows


def _loaded(question: Question) -> LoadedModel:
    if isinstance(question.model, Shape):
        model, batch = Decoder.on_meta(question.model), batch_of(question.model)
        return LoadedModel(model=model, batch=batch, loss_fn=None, name="model")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        path.write_text(json.dumps(question.model))
        return load_model(str(path), seq=question.seq, dtype=question.dtype)


def _in_words(plan: Plan) -> str:
    words = [str(plan.mesh), f"ZeRO-{plan.zero_stage}", f"mbs={plan.microbatch_size}"]
    chunks = len(plan.stages) // plan.mesh.pp
    words += [f"v={chunks}"] * (chunks > 1)
    words += [plan.schedule] * (plan.schedule in ("gpipe", "zero_bubble"))
    return " ".join([*words, "sequence-parallel"] if plan.slices > 1 else words)


def _theirs_s(question: Question, cluster: Cluster, loaded: LoadedModel) -> float | None:
    """Return the predicted seconds of the fastest reading of an answer that fits here."""
    traces: dict[int, Trace] = {}
    prices = [
        estimate(
            loaded.model,
            cluster,
            loaded.batch,
            loss_fn=loaded.loss_fn,
            global_batch_size=question.batch,
            microbatch_size=size,
            traces=traces,
            **reading,
        )
        for size in question.microbatch_sizes
        for reading in question.readings
    ]
    return min((price.step_time_s for price in prices if price.fits), default=None)


def chain_rows() -> list[dict[str, Any]]:
    """Return chains of unit ops, forward and backward counted, solved at a budget of results.

    In a recompute region every result that is not kept is made once more; a solver that may redo
    results several times, and frees them in between, answers another question.
    """
    rows = []
    for size, listed in _CHAINS.items():
        forward = (size - 1) // 2
        keep, redo = (
            ChoiceOption(produces=0, time=0, memory=1),
            ChoiceOption(produces=0, time=1, memory=0),
        )
        problem = ChoiceProblem(ops=((keep, redo),) * forward, links=())
        budget = int(_BUDGET * forward)
        started = time.perf_counter()
        points = whole_frontier(problem)
        seconds = time.perf_counter() - started
        assert points is not None, "a chain is narrow"
        fastest = next(point for point in points if point.memory <= budget)
        check = solve_choice(problem, budget, time_limit_s=60)
        rows.append(
            {
                "chain": f"{size} ops, {budget} of {forward} results kept",
                "checkmate": listed,
                "cost": size + fastest.time,
                "cp_sat": size + check.time,
                "points": len(points),
                "seconds": round(seconds, 4),
            }
        )
    return rows


def _shown(rows: list[dict[str, Any]]) -> str:
    def text(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:.7g}" if isinstance(value, float) else str(value)

    return table([tuple(rows[0]), *(tuple(text(v) for v in row.values()) for row in rows)])


def main() -> None:
    """Print the tables, and leave with 1 where an exact search is worse than what is listed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder that holds piper/")
    parser.add_argument("--devices", type=int, help="leave out instances with more devices")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    piper = piper_rows(arguments.folder, arguments.devices)
    print(_shown(piper))
    left_out = sorted(
        path.stem
        for path in (arguments.folder / "piper").glob("*.json")
        if path.stem not in {case.name for case in PIPER_CASES}
    )
    for name in left_out:
        print(f"  {name}: left out, no value is listed for it")
    questions = question_rows()
    print(f"\n{_shown(questions)}")
    chains = chain_rows()
    print(f"\n{_shown(chains)}")
    if arguments.json:
        document = {"piper": piper, "questions": questions, "chains": chains}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    if any((row["ratio"] or 0.0) > _MATCH for row in [*piper, *questions]):
        sys.exit(1)


if __name__ == "__main__":
    main()
