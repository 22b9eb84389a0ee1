"""Measured times of ops by signature: an SQLite file that profiling writes and searches read.

A row belongs to a profile name, a device, a driver, a torch version and a signature. Searches take
the rows of their profile and the torch that runs; of several devices or drivers the newest row.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from autoplan.errors import ProfileError
from autoplan.profiles.origin import check_positive

__all__ = ["CACHE_VARIABLE", "MeasuredOp", "OpTimesFile", "cache_file", "measured_ops"]

CACHE_VARIABLE = "AUTOPLAN_CACHE"
"""Environment variable: the folder of the cache, or `off`."""

_CREATE = """
CREATE TABLE IF NOT EXISTS op_times (
    profile TEXT NOT NULL, device TEXT NOT NULL, driver TEXT NOT NULL, torch TEXT NOT NULL,
    signature TEXT NOT NULL, forward_s REAL NOT NULL, backward_s REAL NOT NULL,
    measured_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (profile, device, driver, torch, signature)
)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOp:
    """Median seconds of one op: forward, and backward (0 where no gradient flows)."""

    forward_s: float
    backward_s: float


def cache_file() -> Path | None:
    """Return where measured ops are kept, whether or not it exists; None if that is switched off.

    `$AUTOPLAN_CACHE/op_times.sqlite`, by default in `~/.cache/autoplan`; `AUTOPLAN_CACHE=off` is
    none.
    """
    folder = os.environ.get(CACHE_VARIABLE, "")
    if folder.lower() == "off":
        return None
    return (Path(folder) if folder else Path.home() / ".cache" / "autoplan") / "op_times.sqlite"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTimesFile:
    """The rows of one device in a file.

    Attributes:
        path: of the SQLite file; it and its folder are made when a row is written.
        profile: name of the device profile that searches use.
        device: what the device says that it is.
        driver: its driver; empty where there is none.
        torch: version.
    """

    path: Path
    profile: str
    device: str
    driver: str
    torch: str

    def read(self) -> dict[str, MeasuredOp]:
        """Return what is measured by signature; a ProfileError names a file that is not ours."""
        if not self.path.exists():
            return {}
        with _connected(self.path) as connection:
            rows = connection.execute(
                "SELECT signature, forward_s, backward_s FROM op_times "
                "WHERE profile = ? AND device = ? AND driver = ? AND torch = ?",
                (self.profile, self.device, self.driver, self.torch),
            )
            return {s: MeasuredOp(forward_s=f, backward_s=b) for s, f, b in rows}

    def write(self, signature: str, measured: MeasuredOp) -> None:
        """Keep one measurement; a later one of the same signature takes its place."""
        check_positive("forward_s", measured.forward_s)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _connected(self.path) as connection:
            connection.execute(
                "INSERT OR REPLACE INTO op_times "
                "(profile, device, driver, torch, signature, forward_s, backward_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    *(self.profile, self.device, self.driver, self.torch, signature),
                    *(measured.forward_s, measured.backward_s),
                ),
            )


def measured_ops(profile: str, torch_version: str) -> Mapping[str, MeasuredOp]:
    """Return the cache's measurements for a profile and a torch version, by signature."""
    path = cache_file()
    if path is None or not path.exists():
        return {}
    return _newest(path, path.stat().st_mtime_ns, profile, torch_version)


@lru_cache(maxsize=8)
def _newest(
    path: Path, modified_ns: int, profile: str, torch_version: str
) -> Mapping[str, MeasuredOp]:
    with _connected(path) as connection:
        rows = connection.execute(
            "SELECT signature, forward_s, backward_s FROM op_times "
            "WHERE profile = ? AND torch = ? ORDER BY measured_at, rowid",
            (profile, torch_version),
        )
        return {s: MeasuredOp(forward_s=f, backward_s=b) for s, f, b in rows}


@contextlib.contextmanager
def _connected(path: Path) -> Iterator[sqlite3.Connection]:
    """Connect, with the table there; what is done is committed, and errors name the file."""
    connection = sqlite3.connect(path, timeout=30.0)
    try:
        with connection:
            connection.execute(_CREATE)
            yield connection
    except sqlite3.DatabaseError as error:
        raise ProfileError(
            f"{path}: {error}; remove the file, or set {CACHE_VARIABLE} to another folder or to off"
        ) from error
    finally:
        connection.close()
