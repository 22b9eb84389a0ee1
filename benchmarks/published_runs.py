"""How near the predicted step time and peak memory are to published measurements.

    python benchmarks/published_runs.py FILE.csv ... [--json FILE] [--traces FOLDER]

Every row's model is built from its dimensions and priced as it was run, by `autoplan.estimate`.
Columns are described in the README of the measurements. A row that leaves something open is priced
under each plausible value; it counts as right inside the range and by its nearer end outside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoplan
from autoplan.errors import AutoplanError
from autoplan.estimating import Estimate
from autoplan.graph import Trace
from benchmarks.published_files import Texts, rows_of, texts_of
from benchmarks.published_models import Decoder, Shape, batch_of
from benchmarks.published_outcomes import Outcome, document_of, print_sources, summary
from benchmarks.published_rows import (
    Configuration,
    Skipped,
    configurations,
    measured_bytes,
    measured_time_s,
)

__all__ = ["Outcome", "TraceStore", "main", "price_row", "stages_of_first_node", "summary"]


class TraceStore:
    """Traces by model shape and micro-batch size; on disk where a folder is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._by_shape: dict[str, _Traces] = {}

    def of(self, shape: Shape, context_parallel: int = 1) -> MutableMapping[int, Trace]:
        """Return the traces of a shape, or of a part of its tokens; what is added is kept."""
        text = f"{shape} cp={context_parallel}" if context_parallel > 1 else str(shape)
        if text not in self._by_shape:
            self._by_shape[text] = _Traces(self.folder, text)
        return self._by_shape[text]


class _Traces(dict[int, Trace]):
    def __init__(self, folder: Path | None, text: str) -> None:
        super().__init__()
        self._prefix = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._prefix = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
            for path in folder.glob(f"{self._prefix.name}-*.json"):
                rows = int(path.stem.split("-")[-1])
                super().__setitem__(rows, Trace.from_json(path.read_text()))

    def __setitem__(self, rows: int, trace: Trace) -> None:
        super().__setitem__(rows, trace)
        if self._prefix is not None:
            Path(f"{self._prefix}-{rows}.json").write_text(trace.to_json())


def price_row(row: Mapping[str, Any], file: str, line: int, store: TraceStore) -> Outcome:
    """Return a row beside its prediction, or why it was skipped.

    A file may lack columns, and a row may have fewer or more cells than there are: a missing one is
    empty. Whatever else is wrong with a row is the reason why it is skipped.
    """
    texts = texts_of(row)
    try:
        if None in row:
            raise Skipped("more cells than the file has columns")
        return _price_row(texts, file, line, store)
    except Skipped as skipped:
        reason = str(skipped)
    except (ValueError, AutoplanError) as error:
        reason = f"estimate refuses: {str(error).splitlines()[0][:120]}"
    except Exception as error:  # a row of a foreign file must not hide the others
        reason = f"failed with {type(error).__name__}: {str(error)[:120]}"
    source = _source(texts, file)
    return Outcome(source=source, file=file, line=line, model=texts["model"], skipped=reason)


def _source(row: Mapping[str, str], file: str) -> str:
    return (row.get("source_id") or file).split("/")[0]


def _price_row(row: Texts, file: str, line: int, store: TraceStore) -> Outcome:
    source = _source(row, file)
    start: dict[str, Any] = {"source": source, "file": file, "line": line, "model": row["model"]}
    if row["duplicate_of"]:
        raise Skipped("copy of another row")
    time_s, memory = measured_time_s(row), measured_bytes(row)
    outcome = row["outcome"].lower()
    if time_s is None and memory is None and outcome not in ("fit", "oom"):
        raise Skipped("nothing was measured")
    found = configurations(row)
    has_profile = all(configuration.is_timed for configuration in found)
    if not has_profile and memory is None and outcome not in ("fit", "oom"):
        raise Skipped(f"no profile for GPU {row['gpu']}, and its memory was not measured")
    largest = max(configuration.cluster.device.memory_bytes for configuration in found)
    if memory is not None and memory[0] > _MOST_OF_DEVICE * largest:
        raise Skipped(f"peak_mem_gib {row['peak_mem_gib']} is more than the device has")
    kind = memory[1] if memory else ""
    prices = [_price(configuration, store, kind) for configuration in found]
    ooms = [_oom(price, configuration) for price, configuration in zip(prices, found, strict=True)]
    times = [price.step_time_s for price in prices]
    is_last = "last rank" in row.get("mem_kind", "")
    peaks = [
        _peak(price, kind, is_last, stages_of_first_node(configuration))
        for price, configuration in zip(prices, found, strict=True)
    ]
    is_timed = time_s is not None and has_profile and row.get("deterministic") != "true"
    is_timed = is_timed and "gpus" not in found[0].assumed  # how long a step takes is up to them
    return Outcome(
        **start,
        left_out=_left_out(row, is_timed=is_timed, has_memory=memory is not None),
        assumed="; ".join(f"{k} open" for k in found[0].assumed),
        time_s=time_s if is_timed else None,
        predicted_time_s=(min(times), max(times)) if is_timed else None,
        memory_bytes=memory[0] if memory else None,
        predicted_bytes=(min(peaks), max(peaks)) if memory else None,
        memory_kind=kind,
        is_oom=outcome == "oom" if outcome in ("fit", "oom") else None,
        predicted_oom=(min(low for low, _ in ooms), max(high for _, high in ooms)),
        categories=prices[0].time_by_category,
    )


_MOST_OF_DEVICE = 1.1  # what is printed in decimal units may seem a little more


def _left_out(row: Texts, *, is_timed: bool, has_memory: bool) -> str:
    """Return what a row states and is not compared."""
    reasons = []
    if not is_timed and (row["iter_time_s"] or row["tokens_per_s_per_gpu"]):
        reasons.append(
            "time: not one of the batch and length of the row, deterministic mode, no profile, "
            "or its number of GPUs is open"
        )
    if not has_memory and row["peak_mem_gib"]:
        reasons.append(f"memory: kind {row['mem_kind'][:40]!r} is not known")
    if not is_timed and not has_memory and row["outcome"].lower() not in ("fit", "oom"):
        reasons.append(f"outcome {row['outcome'][:20]!r} is neither fit nor oom")
    return "; ".join(reasons)


# Below this share of the device the allocator's waste decides nothing.
_NEARLY_FULL = 0.75


def _price(configuration: Configuration, store: TraceStore, kind: str) -> Estimate:
    """Return the price of a configuration, with reserved memory where it is needed."""
    counts_reserved = kind in ("reserved", "device")
    allocator = configuration.allocator
    price = _estimate(configuration, store, allocator if counts_reserved else None)
    fullest = max(price.peak_memory_bytes) / price.capacity_bytes
    if not counts_reserved and allocator is not None and _NEARLY_FULL < fullest <= 1:
        return _estimate(configuration, store, allocator)
    return price


# What a process takes of a device beside tensors was measured from 0.47 GiB (context alone, kernels
# loaded when used) to the reserve of the profiles (and torch.distributed with its communicators);
# published rows do not say it. Source: ml-engineering, training/performance.
_LEAST_RESERVE_BYTES = int(0.47 * 2**30)


def _oom(price: Estimate, configuration: Configuration) -> tuple[bool, bool]:
    """Return whether a configuration runs out with the least reserve, and with the profile's."""
    if price.fits:
        return False, False
    cluster = configuration.cluster
    spared = cluster.reserved_bytes - min(cluster.reserved_bytes, _LEAST_RESERVE_BYTES)
    needed = [*price.peak_memory_bytes]
    if price.reserved_memory_bytes is not None:
        needed += [b + cluster.reserved_bytes for b in price.reserved_memory_bytes]
    return max(needed) - spared > price.capacity_bytes, True


def _estimate(
    configuration: Configuration, store: TraceStore, allocator: Literal["segments"] | None
) -> Estimate:
    shape = configuration.shape
    return autoplan.estimate(
        Decoder.on_meta(shape),
        configuration.cluster,
        batch_of(shape),
        global_batch_size=configuration.global_batch,
        traces=store.of(shape, configuration.options["context_parallel"]),
        allocator=allocator,
        **configuration.options,
    )


def stages_of_first_node(configuration: Configuration) -> int:
    """Return how many stages have ranks on the first node; stages are the outermost dimension."""
    degrees = configuration.options
    ranks = int(degrees["dp"] * degrees["context_parallel"] * degrees["tp"])
    return -(-configuration.cluster.gpus_per_node // ranks)


def _peak(price: Estimate, kind: str, is_last: bool, visible: int) -> int:
    """Return the predicted peak of the kind that was measured.

    `allocated` and `reserved` count tensors and what the caching allocator holds for them, `device`
    context and communicators too. The latter is what `nvidia-smi` shows, on one node: the first,
    from which a run is watched, so only stages that have ranks there count.
    """
    context = [parts.get("reserve", 0) for parts in price.memory_by_category]
    if kind in ("reserved", "device") and price.reserved_memory_bytes is not None:
        stages = list(price.reserved_memory_bytes)
    else:
        pairs = zip(price.peak_memory_bytes, context, strict=True)
        stages = [peak - outside for peak, outside in pairs]
    if kind == "device":
        stages = [nbytes + outside for nbytes, outside in zip(stages, context, strict=True)]
        stages = stages[:visible]
    return stages[-1] if is_last else max(stages)


def _priced(
    files: Sequence[Path], only: str | None, store: TraceStore
) -> tuple[dict[str, list[Outcome]], bool]:
    """Return the outcomes of all rows by source, and whether somebody stopped before the end."""
    by_source: dict[str, list[Outcome]] = {}
    try:
        for path in files:
            for line, row in rows_of(path):
                if only and only not in (row.get("source_id") or ""):
                    continue
                outcome = price_row(row, path.name, line, store)
                by_source.setdefault(outcome.source, []).append(outcome)
    except KeyboardInterrupt:
        return by_source, True
    return by_source, False


def main(arguments: list[str] | None = None) -> None:
    """Price every row of the files and print a table per source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="CSV files of measurements")
    parser.add_argument("--json", type=Path, help="write the numbers per source and per row here")
    parser.add_argument("--traces", type=Path, help="keep traces in this folder between runs")
    parser.add_argument("--only", help="price only sources whose name contains this")
    options = parser.parse_args(arguments)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    by_source, is_stopped = _priced(options.files, options.only, TraceStore(options.traces))
    print_sources(by_source)
    print(f"\nAll times and bytes are predictions of profiles; {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(document_of(by_source), indent=1))
    if is_stopped:
        print("Stopped before the last row: the numbers are of those before")
        raise SystemExit(130)


if __name__ == "__main__":
    main()
