"""How near the predicted step time and peak memory are to published measurements.

    python benchmarks/published_runs.py FILE.csv ... [--json FILE] [--traces FOLDER]

Every row's model is built from its dimensions and priced as it was run, by `autoplan.estimate`.
Columns are described in the README of the measurements. A row that leaves something open is priced
under each plausible value; it counts as right inside the range and by its nearer end outside.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoplan
from autoplan.errors import AutoplanError
from autoplan.estimating import Estimate
from autoplan.graph import Trace
from autoplan.report import table
from benchmarks.published_models import Decoder, Shape, batch_of
from benchmarks.published_rows import (
    Configuration,
    Skipped,
    configurations,
    measured_bytes,
    measured_time_s,
)

__all__ = ["Outcome", "TraceStore", "main", "price_row", "stages_of_first_node", "summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row beside its prediction.

    Attributes:
        source: the source_id, up to its first slash.
        file, line, model: where the row is and what it trained.
        skipped: why it was not priced, or empty.
        left_out: what was measured and is not compared, and why.
        assumed: what the row left open.
        time_s, predicted_time_s: measured, and the range predicted; None: not compared.
        memory_bytes, predicted_bytes: likewise, of the same kind.
        memory_kind: what was counted.
        is_oom, predicted_oom: whether it ran out of memory; two values where the range is open.
    """

    source: str
    file: str
    line: int
    model: str
    skipped: str = ""
    left_out: str = ""
    assumed: str = ""
    time_s: float | None = None
    predicted_time_s: tuple[float, float] | None = None
    memory_bytes: float | None = None
    predicted_bytes: tuple[float, float] | None = None
    memory_kind: str = ""
    is_oom: bool | None = None
    predicted_oom: tuple[bool, bool] | None = None
    categories: Mapping[str, float] = field(default_factory=dict)

    @property
    def time_error(self) -> float | None:
        """Return predicted / measured - 1, 0 inside the range."""
        return _error(self.time_s, self.predicted_time_s)

    @property
    def memory_error(self) -> float | None:
        """Return predicted / measured - 1, 0 inside the range."""
        return _error(self.memory_bytes, self.predicted_bytes)


def _error(measured: float | None, predicted: tuple[float, float] | None) -> float | None:
    if measured is None or predicted is None:
        return None
    low, high = predicted
    return (
        (min(max(measured, low), high) / measured - 1)
        if low <= measured <= high
        else ((low if measured < low else high) / measured - 1)
    )


class TraceStore:
    """Traces by model shape and micro-batch size; on disk where a folder is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._by_shape: dict[Shape, _Traces] = {}

    def of(self, shape: Shape) -> MutableMapping[int, Trace]:
        """Return the traces of a shape; what is added is kept."""
        if shape not in self._by_shape:
            self._by_shape[shape] = _Traces(self.folder, str(shape))
        return self._by_shape[shape]


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
    texts = _Texts({k: (v or "").strip() for k, v in row.items() if isinstance(k, str)})
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


class _Texts(dict[str, str]):
    """Cells of a row by column; one that the file lacks is empty."""

    def __missing__(self, key: str) -> str:
        return ""


def _source(row: Mapping[str, str], file: str) -> str:
    return (row.get("source_id") or file).split("/")[0]


def _price_row(row: _Texts, file: str, line: int, store: TraceStore) -> Outcome:
    source = _source(row, file)
    start: dict[str, Any] = {"source": source, "file": file, "line": line, "model": row["model"]}
    if row["duplicate_of"]:
        raise Skipped("copy of another row")
    time_s, memory = measured_time_s(row), measured_bytes(row)
    outcome = row["outcome"].lower()
    if time_s is None and memory is None and outcome not in ("fit", "oom"):
        raise Skipped("nothing was measured")
    found = configurations(row)
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
    is_timed = time_s is not None and row.get("deterministic") != "true"
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


def _left_out(row: _Texts, *, is_timed: bool, has_memory: bool) -> str:
    """Return what a row states and is not compared."""
    reasons = []
    if not is_timed and (row["iter_time_s"] or row["tokens_per_s_per_gpu"]):
        reasons.append("time: not one of the batch and length of the row, or deterministic mode")
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
        traces=store.of(shape),
        allocator=allocator,
        **configuration.options,
    )


def stages_of_first_node(configuration: Configuration) -> int:
    """Return how many stages have ranks on the first node; stages are the outermost dimension."""
    ranks = int(configuration.options["dp"] * configuration.options["tp"])
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


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the numbers of one source; None where nothing was compared."""
    used = [o for o in outcomes if not o.skipped]
    times = [o.time_error for o in used if o.time_error is not None]
    memories = [o.memory_error for o in used if o.memory_error is not None]
    calls = [o for o in used if o.is_oom is not None and o.predicted_oom is not None]
    right = [o for o in calls if o.is_oom in (o.predicted_oom or ())]
    return {
        "rows_used": len(used),
        "rows_skipped": len(outcomes) - len(used),
        "rows_with_open_fields": sum(bool(o.assumed) for o in used),
        "time_rows": len(times),
        "time_mape": _mean([abs(e) for e in times]),
        "time_worst": max(times, key=abs, default=None),
        "time_bias": _mean(times),
        "time_rank_correlation": _rank_correlation(
            [
                (o.time_s, sum(o.predicted_time_s) / 2)
                for o in used
                if o.time_s and o.predicted_time_s
            ]
        ),
        "memory_rows": len(memories),
        "memory_mape": _mean([abs(e) for e in memories]),
        "memory_worst": max(memories, key=abs, default=None),
        "memory_worst_under": min(
            [e for e in memories if e < 0], default=0.0 if memories else None
        ),
        "memory_bias": _mean(memories),
        "oom_right": len(right),
        "oom_wrong": len(calls) - len(right),
        "oom_open": sum(len(set(o.predicted_oom or ())) > 1 for o in calls),
        "fit_called_oom": sum(not o.is_oom for o in calls if o not in right),
        "oom_called_fit": sum(bool(o.is_oom) for o in calls if o not in right),
        "skipped": dict(Counter(o.skipped for o in outcomes if o.skipped).most_common()),
        "left_out": dict(Counter(o.left_out for o in outcomes if o.left_out).most_common()),
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 0, equal values sharing the mean of theirs."""
    order = sorted(values)
    first = {v: order.index(v) for v in set(values)}
    return [first[v] + (order.count(v) - 1) / 2 for v in values]


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, None for fewer than three pairs."""
    if len(pairs) < 3:
        return None
    xs, ys = (_ranks(side) for side in zip(*pairs, strict=True))
    mean = (len(xs) - 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(xs, ys, strict=True))
    norm = math.sqrt(sum((x - mean) ** 2 for x in xs) * sum((y - mean) ** 2 for y in ys))
    return cross / norm if norm else None


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def _print(by_source: Mapping[str, Sequence[Outcome]]) -> None:
    head = (
        "source", "used", "skipped", "open", "time", "mean", "worst", "bias", "rank",
        "memory", "mean", "worst", "under", "bias", "fit/OOM right", "open", "wrong",
    )  # fmt: skip
    rows = [head]
    for source, outcomes in by_source.items():
        s = summary(outcomes)
        rank = s["time_rank_correlation"]
        rows.append(
            (
                source, str(s["rows_used"]), str(s["rows_skipped"]),
                str(s["rows_with_open_fields"]), str(s["time_rows"]),
                _percent(s["time_mape"]).lstrip("+"), _percent(s["time_worst"]),
                _percent(s["time_bias"]), "" if rank is None else f"{rank:.3f}",
                str(s["memory_rows"]), _percent(s["memory_mape"]).lstrip("+"),
                _percent(s["memory_worst"]), _percent(s["memory_worst_under"]),
                _percent(s["memory_bias"]), str(s["oom_right"]), str(s["oom_open"]),
                str(s["oom_wrong"]),
            )
        )  # fmt: skip
    print(table(rows))
    for source, outcomes in by_source.items():
        for reason, count in summary(outcomes)["skipped"].items():
            print(f"  {source}: {count} skipped: {reason}")
        for reason, count in summary(outcomes)["left_out"].items():
            print(f"  {source}: {count} not compared, {reason}")


def _document(by_source: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    rows = [
        {**asdict(o), "time_error": o.time_error, "memory_error": o.memory_error}
        for outcomes in by_source.values()
        for o in outcomes
    ]
    return {"sources": {name: summary(o) for name, o in by_source.items()}, "rows": rows}


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a file with their lines; says what is wrong with a file without any."""
    count = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            for row in reader:
                count += 1
                yield reader.line_num, row
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        print(f"{path}: cannot be read as CSV after {count} rows: {error}")
        return
    if not count:
        print(f"{path}: has no rows")


def main(arguments: list[str] | None = None) -> None:
    """Price every row of the files and print a table per source."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", help="CSV files of measurements")
    parser.add_argument("--json", type=Path, help="write the numbers per source and per row here")
    parser.add_argument("--traces", type=Path, help="keep traces in this folder between runs")
    parser.add_argument("--only", help="price only sources whose name contains this")
    options = parser.parse_args(arguments)
    store = TraceStore(options.traces)
    by_source: dict[str, list[Outcome]] = {}
    start = time.perf_counter()
    for path in options.files:
        for line, row in _rows(path):
            if options.only and options.only not in (row.get("source_id") or ""):
                continue
            outcome = price_row(row, path.name, line, store)
            by_source.setdefault(outcome.source, []).append(outcome)
    _print(by_source)
    print(f"\nAll times and bytes are predictions of profiles; {time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(_document(by_source), indent=1))


if __name__ == "__main__":
    main()
