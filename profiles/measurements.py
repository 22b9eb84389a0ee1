"""Read the published measurement files that the shipped profiles are built from."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from autoplan.errors import ProfileError
from autoplan.profiles.origin import Origin
from autoplan.profiles.tables import Collective, CollectiveTable

__all__ = ["Fact", "Measurements"]

Row = dict[str, str]

_LONG_SWEEP, _NEXT_SIZE = 60, 1.4  # rows of a sweep, and the least ratio of sizes in a longer one


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of a file, in that file's unit, with what the file says about it."""

    value: float
    kind: str
    notes: str
    source: str
    device: str

    def origin(self, note: str = "") -> Origin:
        """Return where the fact comes from; `note` says what was done to it."""
        parts = [part for part in (note, self.notes, self.source) if part]
        kind = {"spec": "datasheet", "assumed": "assumed"}.get(self.kind, "published")
        text = "; ".join(parts)
        if kind == "datasheet":
            return Origin(kind="datasheet", text=text, device=self.device)
        if kind == "assumed":
            return Origin(kind="assumed", text=text, device=self.device)
        return Origin(kind="published", text=text, device=self.device)


class Measurements:
    """The CSV files of one folder, each read once when it is first needed."""

    def __init__(self, folder: Path) -> None:
        """Remember the folder; nothing is read yet."""
        self.folder = folder

    @cached_property
    def devices(self) -> list[Row]:
        """Rows of devices.csv: device, quantity, value, unit, kind, notes, source."""
        return self._read("devices")

    @cached_property
    def gemm(self) -> list[Row]:
        """Rows of gemm_efficiency.csv."""
        return self._read("gemm_efficiency")

    @cached_property
    def attention(self) -> list[Row]:
        """Rows of attention_kernels.csv."""
        return self._read("attention_kernels")

    @cached_property
    def collectives(self) -> list[Row]:
        """Rows of collectives.csv."""
        return self._read("collectives")

    @cached_property
    def liger(self) -> list[Row]:
        """Rows of liger_ops.csv."""
        return self._read("liger_ops")

    def find(
        self, devices: Sequence[str | None], quantity: str, notes_contain: str = ""
    ) -> Fact | None:
        """Return a quantity of the first device that has it; None as a device means any."""
        for device in devices:
            for row in self.devices:
                is_device = device is None or row["device"] == device
                if is_device and row["quantity"] == quantity and notes_contain in row["notes"]:
                    return Fact(
                        value=float(row["value"]),
                        kind=row["kind"],
                        notes=row["notes"],
                        source=row["source"],
                        device=row["device"],
                    )
        return None

    def need(self, devices: Sequence[str | None], quantity: str, notes_contain: str = "") -> Fact:
        """Return what `find` finds.

        Raises:
            ProfileError: if no device has the quantity.
        """
        fact = self.find(devices, quantity, notes_contain)
        if fact is None:
            raise ProfileError(f"devices.csv has no {quantity!r} for any of {list(devices)}")
        return fact

    def sweep(self, source_id: str, collective: Collective, gpus: int) -> CollectiveTable:
        """Return the size sweep of one source; rows marked as outliers are left out.

        Of a long sweep the sizes a factor of 1.4 apart count, and a size of none is one byte.

        Raises:
            ProfileError: if there is none.
        """
        found = self._sweep_rows(source_id, collective, gpus)
        ratio = _NEXT_SIZE if len(found) > _LONG_SWEEP else 0.0
        rows: list[tuple[int, float]] = []
        for row in found:
            nbytes = max(1, int(row["size_bytes"]))
            if not rows or nbytes >= ratio * rows[-1][0]:
                rows.append((nbytes, _seconds(row["time_us"])))
        return CollectiveTable(collective=collective, degree=gpus, origin="nccl", rows=tuple(rows))

    def sweep_origin(self, source_id: str, gpus: Sequence[int]) -> Origin:
        """Return the origin of all_reduce sweeps over so many GPUs."""
        row = self._sweep_rows(source_id, "all_reduce", gpus[0])[0]
        sizes = ", ".join(map(str, gpus))
        tool = "Aceso's profiler" if source_id.startswith("aceso") else "nccl-tests"
        text = f"{tool} size sweep on {sizes} GPUs, {row['interconnect']}; {row['source']}"
        return Origin(kind="published", text=text, device=row["gpu"])

    def node_ring(self, source_id: str) -> tuple[tuple[int, float], Origin]:
        """Return nodes and bus bytes per second of an all_reduce over all their GPUs, and origin.

        Raises:
            ProfileError: if there is none.
        """
        row = next((r for r in self.collectives if r["source_id"] == source_id), None)
        if row is None or int(row["nodes"]) < 2:
            raise ProfileError(f"collectives.csv has no all_reduce over nodes of {source_id}")
        text = (
            f"all_reduce over {row['nodes']} nodes, {row['gpus']} GPUs, {row['interconnect']}, "
            f"{row['notes'].split(',')[0]}; {row['source']}"
        )
        origin = Origin(kind="published", text=text, device=row["gpu"])
        return (int(row["nodes"]), float(row["busbw_gb_s"]) * 1e9), origin

    def sends(self, source_id: str, gpu: str, op: str) -> tuple[CollectiveTable, Origin]:
        """Return messages by size, of which a source printed the bandwidth, and their origin."""
        rows = [
            row
            for row in self.collectives
            if (row["source_id"], row["gpu"], row["op"]) == (source_id, gpu, op)
        ]
        times = [
            (int(r["size_bytes"]), float(r["size_bytes"]) / (float(r["busbw_gb_s"]) * 1e9))
            for r in rows
        ]
        (small, small_s), (large, large_s) = times[:2]
        start_s = small_s - (large_s - small_s) / (large - small) * small
        times = [(1, max(start_s, 1e-6)), *times]
        table = CollectiveTable(
            collective="send",
            degree=2,
            origin="nccl",
            rows=tuple((nbytes, float(f"{time_s:.4g}")) for nbytes, time_s in times),
        )
        text = (
            f"{op} by size, time from the printed bandwidth; 1 byte: the line through the two "
            f"smallest; {rows[0]['source']}"
        )
        return table, Origin(kind="published", text=text, device=gpu)

    def bus(self, source_id: str, gpu: str, op: str = "all_reduce") -> Fact:
        """Return the highest printed bus bandwidth of one source, GB/s.

        Raises:
            ProfileError: if there is none.
        """
        rows = [
            row
            for row in self.collectives
            if row["source_id"] == source_id and row["gpu"] == gpu and row["op"] == op
        ]
        if not rows:
            raise ProfileError(f"collectives.csv has no {op} of {source_id} on {gpu}")
        best = max(rows, key=lambda row: float(row["busbw_gb_s"]))
        return Fact(
            value=float(best["busbw_gb_s"]),
            kind="measured",
            notes=best["interconnect"],
            source=best["source"],
            device=gpu,
        )

    def _sweep_rows(self, source_id: str, collective: Collective, gpus: int) -> list[Row]:
        rows = [
            row
            for row in self.collectives
            if row["source_id"] == source_id
            and row["op"] == collective
            and row["gpus"] == str(gpus)
            and row["time_us"]
            and "outlier" not in row["notes"]
        ]
        if not rows:
            raise ProfileError(f"collectives.csv has no {collective} sweep of {source_id}")
        return sorted(rows, key=lambda row: int(row["size_bytes"]))

    def _read(self, name: str) -> list[Row]:
        path = self.folder / f"{name}.csv"
        try:
            with path.open(encoding="utf-8", newline="") as file:
                return list(csv.DictReader(file))
        except OSError as error:
            raise ProfileError(f"cannot read the measurements {path}: {error}") from None


def _seconds(microseconds: str) -> float:
    return float(f"{float(microseconds) * 1e-6:.6g}")
