"""Print how tracing scales with depth and size: `python benchmarks/trace_scaling.py`.

depth    a GPT of 96 layers over one of 12, in one process: both are traced in turn, several
         times, and the least times are compared
size     the largest presets, each in a process of its own: seconds and peak memory
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.models import load_model
from autoplan.tracer import trace
from benchmarks.apart import run_apart

__all__ = ["depth_ratio", "gpt", "preset_cost"]

PRESETS = ("gpt3-175b", "llama3-405b", "mixtral-8x7b", "deepseek-v3")
MOST_SECONDS = 6.0
MOST_BYTES = 3 * 2**29
MOST_RATIO = 1.3


def gpt(depth: int) -> tuple[Any, Any]:
    """Return GPT-2 with so many layers, on the meta device, and a batch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(n_layer=depth))
        ids = torch.empty((1, 512), dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}


def _cpu_seconds(model: Any, batch: Any) -> float:
    started = time.process_time()
    trace(model, batch)
    return time.process_time() - started


def depth_ratio(depths: tuple[int, int] = (12, 96), repeats: int = 5) -> float:
    """Return the least CPU time to trace the deeper model over that of the other."""
    shallow, deep = (gpt(depth) for depth in depths)
    _cpu_seconds(*shallow)
    pairs = [(_cpu_seconds(*shallow), _cpu_seconds(*deep)) for _ in range(repeats)]
    return min(pair[1] for pair in pairs) / min(pair[0] for pair in pairs)


def preset_cost(name: str) -> dict[str, Any]:
    """Trace a preset in this process; return its CPU and wall seconds and the peak memory."""
    loaded = load_model(name)
    started, wall = time.process_time(), time.perf_counter()
    result = trace(loaded.model, loaded.batch, loaded.loss_fn, backend="cuda")
    return {
        "name": name,
        "cpu_s": round(time.process_time() - started, 2),
        "wall_s": round(time.perf_counter() - wall, 2),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": result.num_parameters,
        "calls": len(result.calls),
    }


def _apart(*arguments: str) -> Any:
    done = run_apart(__file__, *arguments)
    done.check_returncode()
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Print the table, and leave with 1 if a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    parser.add_argument("--one", choices=(*PRESETS, "depth"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one == "depth":
        print(json.dumps(depth_ratio()))
        return
    if arguments.one:
        print(json.dumps(preset_cost(arguments.one)))
        return
    ratio = _apart("--one", "depth")
    rows = [_apart("--one", name) for name in PRESETS]
    print(f"96 layers over 12 layers: {ratio:.2f} (at most {MOST_RATIO})\n")
    print("| preset | parameters | blocks | CPU s | wall s | peak RSS MiB |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = (row["name"], row["parameters"], row["calls"], row["cpu_s"], row["wall_s"])
        print("|", " | ".join(map(str, (*cells, row["peak_rss_bytes"] // 2**20))), "|")
    if arguments.json:
        text = json.dumps({"depth_ratio": ratio, "presets": rows}, indent=1)
        arguments.json.write_text(text + "\n")
    passed = [r for r in rows if r["cpu_s"] > MOST_SECONDS or r["peak_rss_bytes"] > MOST_BYTES]
    if ratio > MOST_RATIO or passed:
        sys.exit(1)


if __name__ == "__main__":
    main()
