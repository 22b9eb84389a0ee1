"""Our plan beside the published one: `python benchmarks/published_quality.py FILE.csv ...`.

A row of published measurements gives a model, a cluster, a batch and the configuration that its
authors tuned. The configuration is priced by `autoplan.estimate`, the model is planned by
`autoplan.optimize` for the same cluster and batch, both as autoplan's own engine runs them, and the
ratio of the two predicted step times is printed with the category that changed most, and with what
the configuration uses beside its degrees.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import autoplan

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autoplan.errors import AutoplanError
from autoplan.report import table
from benchmarks.published_models import Decoder, batch_of
from benchmarks.published_rows import Configuration, Skipped, configurations

__all__ = ["compared", "is_beaten", "published_rows", "shown", "used_by"]

_OUTSIDE = ("product_dtype", "is_compiled")
_MATCH = 1 + 1e-6


def used_by(configuration: Configuration) -> str:
    """Return what a published configuration uses beside its degrees; plans have all of it."""
    options = configuration.options
    found = []
    if options.get("virtual_stages", 1) > 1:
        found.append(f"{options['virtual_stages']} stages a rank")
    if options.get("sequence_parallel"):
        found.append("sequence parallelism")
    if configuration.shape.is_tied and (options.get("tp") or 1) > 1:
        found.append("a tied embedding in slices")
    return ", ".join(found)


def compared(configuration: Configuration, label: str) -> dict[str, Any]:
    """Return the row of one configuration.

    Raises:
        Skipped: it is priced by speeds that our engine does not have.
        AutoplanError, ValueError: it cannot be priced, or nothing fits.
    """
    options = {k: v for k, v in configuration.options.items() if k != "engine"}
    if any(options.get(key) for key in _OUTSIDE):
        raise Skipped("float8 and compiled blocks are not planned")
    model, batch = Decoder.on_meta(configuration.shape), batch_of(configuration.shape)
    published = autoplan.estimate(
        model,
        configuration.cluster,
        batch,
        global_batch_size=configuration.global_batch,
        **options,
    )
    plan = autoplan.optimize(
        model,
        configuration.cluster,
        batch,
        global_batch_size=configuration.global_batch,
        optimizer=options["optimizer"],
        mixed_precision=options["mixed_precision"],
        compare=False,
    )
    own, theirs = plan.predicted.time_by_category, published.time_by_category
    gains = {name: theirs.get(name, 0.0) - own.get(name, 0.0) for name in {*own, *theirs}}
    most = max(gains, key=lambda name: abs(gains[name]))
    degrees = " ".join(f"{k}={options[k]}" for k in ("dp", "tp", "pp") if options.get(k))
    return {
        "row": label,
        "published": degrees,
        "ours": str(plan.mesh),
        "published_s": published.step_time_s,
        "fits": published.fits,
        "ours_s": plan.predicted.step_time_s,
        "ratio": plan.predicted.step_time_s / published.step_time_s,
        "most": f"{most} {gains[most]:+.3g} s",
        "published uses": used_by(configuration),
    }


def is_beaten(row: Mapping[str, Any]) -> bool:
    """Return whether the published configuration fits and is faster than the plan."""
    return bool(row["fits"]) and row["ratio"] > _MATCH


def published_rows(files: Sequence[Path], only: str = "") -> list[dict[str, Any]]:
    """Return the rows of tables of published measurements whose label holds a text."""
    return [row for path in files for row in _rows(path, only)]


def _rows(path: Path, wanted: str) -> list[dict[str, Any]]:
    rows = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            label = f"{path.stem}:{line} {row.get('model', '')}"
            if wanted not in label:
                continue
            try:
                rows.append(compared(configurations(row)[0], label))
            except (Skipped, AutoplanError, ValueError) as reason:
                print(f"{label}: left out: {str(reason).splitlines()[0][:120]}", file=sys.stderr)
    return rows


def shown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table."""
    cells = [
        tuple(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()) for row in rows
    ]
    return table([tuple(rows[0]), *cells])


def main() -> None:
    """Print the table; leave with 1 where a configuration that fits is faster."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="tables of published measurements")
    parser.add_argument("--only", default="", help="rows whose label holds this text")
    parser.add_argument("--json", type=Path, help="write the numbers to this file too")
    arguments = parser.parse_args()
    rows = published_rows(arguments.files, arguments.only)
    if not rows:
        sys.exit("no row could be compared")
    print(shown(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if any(map(is_beaten, rows)):
        sys.exit(1)


if __name__ == "__main__":
    main()
