"""Print how long a plan takes from the module on: `python benchmarks/search_speed.py`.

Every case runs in a process of its own: the model is built on the meta device, then traced and
searched. `plan s` is what `autoplan.optimize` takes, `process s` includes starting Python and the
imports of torch and transformers.

growth   the same model with more layers, and the same model on more GPUs
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.models import LoadedModel, load_model
from benchmarks.apart import run_apart

__all__ = ["CASES", "Case", "measure", "table"]

MOST_GROWTH = 3.0
# Source: The Llama 3 Herd of Models (2024), Table 3; the depth is the case's own.
_LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planning problem and the seconds that it may take; None where only growth is claimed."""

    build: Callable[[], LoadedModel]
    cluster: str
    global_batch_size: int
    most_s: float | None = None


def _preset(name: str, seq: int | None = None) -> Callable[[], LoadedModel]:
    return lambda: load_model(name, seq=seq)


def _llama_of_depth(depth: int) -> Callable[[], LoadedModel]:
    def build() -> LoadedModel:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"llama-{depth}-layers.json"
            path.write_text(json.dumps({**_LLAMA_405B, "num_hidden_layers": depth}))
            return load_model(str(path), seq=8192)

    return build


def _resnet152() -> LoadedModel:
    from benchmarks.own_architectures import ResNet

    with torch.device("meta"):
        model = ResNet(depths=(3, 8, 36, 3))  # He et al. 2016, Table 1
        batch = (torch.empty(2, 3, 224, 224), torch.empty(2, dtype=torch.int64))
    loss_fn = torch.nn.functional.cross_entropy
    return LoadedModel(model=model, batch=batch, loss_fn=loss_fn, name="ResNet-152")


def _unet() -> LoadedModel:
    from benchmarks.own_architectures import UNet

    with torch.device("meta"):
        model = UNet(width=96, levels=5)
        batch = torch.empty(2, 3, 256, 256)
    return LoadedModel(
        model=model, batch=batch, loss_fn=lambda out: out.square().mean(), name="U-Net"
    )


CASES: Mapping[str, Case] = {
    "llama3-8b on 8": Case(
        build=_preset("llama3-8b"), cluster="1x8:h100_sxm_80gb", global_batch_size=64, most_s=5
    ),
    "gpt3-175b on 1,024": Case(
        build=_preset("gpt3-175b"),
        cluster="128x8:a100_sxm_80gb",
        global_batch_size=1536,
        most_s=10,
    ),
    "llama3-405b on 16,384": Case(
        build=_preset("llama3-405b"),
        cluster="2048x8:h100_sxm_80gb",
        global_batch_size=2048,
        most_s=20,
    ),
    "ResNet-152 on 8": Case(
        build=_resnet152, cluster="1x8:a100_sxm_40gb", global_batch_size=2048, most_s=30
    ),
    "U-Net on 8": Case(build=_unet, cluster="1x8:a100_sxm_40gb", global_batch_size=256, most_s=30),
    "12 layers on 512": Case(
        build=_llama_of_depth(12), cluster="64x8:h100_sxm_80gb", global_batch_size=512
    ),
    "126 layers on 512": Case(
        build=_llama_of_depth(126), cluster="64x8:h100_sxm_80gb", global_batch_size=512
    ),
    "llama3-8b on 8, batch 16,384": Case(
        build=_preset("llama3-8b"), cluster="1x8:h100_sxm_80gb", global_batch_size=16384
    ),
    "llama3-8b on 16,384, batch 16,384": Case(
        build=_preset("llama3-8b"), cluster="2048x8:h100_sxm_80gb", global_batch_size=16384
    ),
}

GROWTH = {
    "layers x 10.5": ("12 layers on 512", "126 layers on 512"),
    "GPUs x 2,048": ("llama3-8b on 8, batch 16,384", "llama3-8b on 16,384, batch 16,384"),
}


def measure(case: Case) -> dict[str, Any]:
    """Plan a case in this process; return seconds, the peak memory, and how far it is proven."""
    from autoplan.optimizing import find_plan
    from autoplan.planner import make_planner
    from autoplan.training_job import TrainingJob

    loaded = case.build()
    started, cpu = time.perf_counter(), time.process_time()
    planner = make_planner(
        TrainingJob(
            loaded.model,
            case.cluster,
            loaded.batch,
            global_batch_size=case.global_batch_size,
            loss_fn=loaded.loss_fn,
            name=loaded.name,
        )
    )
    plan = find_plan(planner)
    return {
        "plan_s": round(time.perf_counter() - started, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "trace_s": round(planner.traces.trace_time_s, 2),
        "search_s": round(plan.search.wall_time_s, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "status": plan.search.status,
        "gap": plan.search.gap,
        "settings": sum(plan.search.settings.values()),
        "mesh": str(plan.mesh),
        "step_time_s": plan.predicted.step_time_s,
    }


def _apart(name: str) -> dict[str, Any]:
    started = time.perf_counter()
    done = run_apart(__file__, "--one", name)
    if done.returncode:
        raise RuntimeError(f"case {name!r} failed:\n{done.stderr}")
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"case": name, **row, "process_s": round(time.perf_counter() - started, 2)}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| case | plan s | at most | trace s | search s | process s | peak RSS MiB | status | gap |"
        " settings | mesh |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        most = CASES[row["case"]].most_s
        cells = (
            row["case"],
            row["plan_s"],
            "" if most is None else f"{most:g}",
            row["trace_s"],
            row["search_s"],
            row["process_s"],
            row["peak_rss_bytes"] // 2**20,
            row["status"],
            f"{row['gap']:.2%}",
            row["settings"],
            row["mesh"],
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, and leave with 1 if a limit is passed or a case is not proven."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(CASES[arguments.one])))
        return
    rows = {name: _apart(name) for name in CASES}
    print(table(list(rows.values())))
    growth = {
        label: rows[after]["plan_s"] / rows[before]["plan_s"]
        for label, (before, after) in GROWTH.items()
    }
    print()
    for label, ratio in growth.items():
        print(f"{label}: {ratio:.2f} times the seconds (at most {MOST_GROWTH})")
    if arguments.json:
        document = {"cases": list(rows.values()), "growth": growth}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    too_slow = [
        name
        for name, row in rows.items()
        if row["plan_s"] > (CASES[name].most_s or float("inf")) or row["status"] != "optimal"
    ]
    if too_slow or max(growth.values()) > MOST_GROWTH:
        sys.exit(1)


if __name__ == "__main__":
    main()
