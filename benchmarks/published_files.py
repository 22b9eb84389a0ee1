"""Files of published measurements, row by row."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["Texts", "rows_of", "texts_of"]

# Without any of these no model can be built.
_COLUMNS = ("layers", "hidden", "heads", "gpus", "gpu")
_LONGEST_CELL = 2**30


def rows_of(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a file with their lines; says what is wrong with a file without any.

    A byte that is no UTF-8 does not make a file unreadable: it is in a name or in notes.
    """
    count = 0
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
            reader = csv.DictReader(stream)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if reader.fieldnames and missing:
                print(f"{path}: has no column {', '.join(missing)}; columns are divided by commas")
            for row in reader:
                count += 1
                yield reader.line_num, row
    except (OSError, csv.Error) as error:
        print(f"{path}: cannot be read as CSV after {count} rows: {error}")
        return
    if not count:
        print(f"{path}: has no rows")


class Texts(dict[str, str]):
    """Cells of a row by column; one that the file lacks is empty."""

    def __missing__(self, key: str) -> str:
        return ""


def texts_of(row: Mapping[str, Any]) -> Texts:
    """Return the cells of a row, without what stands under no column."""
    return Texts({k: (v or "").strip() for k, v in row.items() if isinstance(k, str)})
