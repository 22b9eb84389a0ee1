"""Measure between processes of this machine: torchrun is started with `main` as its worker."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoplan.errors import ProfileError
from autoplan.profiles.budgets import Deadline
from autoplan.profiles.link import Level, LinkProfile
from autoplan.profiles.origin import Origin
from autoplan.profiles.stopping import is_stopped
from autoplan.profiles.tables import COLLECTIVES, CollectiveTable

__all__ = ["MeasuredGroup", "link_of", "measure_group", "measure_groups"]

START_UP_S = 180.0  # torchrun, importing torch in every process, rendezvous; at most
HOST_SHARE = 0.2  # of the time left after the start, for what the host takes around collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroup:
    """What was measured in a group of processes.

    Attributes:
        curves: of every collective that the backend has.
        interference: of products and an all_reduce; None: not measured.
        host: `host.*.seconds` around collectives, of groups of two.
        least_s: seconds for starting the processes and for what is measured in any case.
    """

    curves: tuple[CollectiveTable, ...]
    interference: float | None = None
    host: Mapping[str, float] = field(default_factory=dict)
    least_s: float = 0.0


def measure_groups(
    degrees: Sequence[int],
    *,
    deadline: Deadline,
    backend: str = "gloo",
    progress: Callable[[str], None] = lambda message: None,
) -> tuple[MeasuredGroup, ...]:
    """Return what groups of processes of this machine take, the first one in any case.

    A larger group is started where it can end in time: at least as long as the one before it took
    before it could measure more than it must, and longer where processes share cores.

    Args:
        degrees: of the groups, rising.
        deadline: of all.
        backend: as in `measure_group`.
        progress: told about each group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    groups: list[MeasuredGroup] = []
    for index, degree in enumerate(degrees):
        name = f"collectives of {degree} processes"
        progress(name)
        if is_stopped():
            break
        if groups:
            crowding = max(1.0, degree / cores) / max(1.0, degrees[index - 1] / cores)
            if groups[-1].least_s * crowding > deadline.left_s:
                progress(f"{name} left out: no time to start them")
                break
        budget_s = deadline.left_s * degree / sum(degrees[index:])
        groups.append(measure_group(degree, budget_s=budget_s, backend=backend))
    return tuple(groups)


def measure_group(
    degree: int, *, budget_s: float, backend: str = "gloo", origin: str = "collectives"
) -> MeasuredGroup:
    """Return what one group size on this machine takes: curves, interference, and the host.

    Sends and the host are measured between two processes only.

    Args:
        degree: processes to start on this machine, at least 2.
        budget_s: seconds for starting up and measuring; a few points are measured in any case.
        backend: `gloo`, or `nccl` with one GPU per process.
        origin: id of the origin of the rows.

    Raises:
        ProfileError: if the processes fail or do not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(degree), "-m", "autoplan.profiles.measure_links"]
        begun_s = time.time()  # the one clock that all processes have
        command += ["--out", str(out), "--backend", backend]
        command += ["--begun-s", repr(begun_s), "--budget-s", repr(budget_s)]
        _run(command, START_UP_S + 3 * budget_s)
        found = json.loads(out.read_text(encoding="utf-8"))
    return MeasuredGroup(
        curves=tables_of(found["rows"], degree, origin),
        interference=found["interference"],
        host=found["host"],
        least_s=found["least_s"],
    )


def tables_of(
    rows: Mapping[str, Sequence[tuple[int, float]]],
    degree: int,
    origin: str,
    ranks_per_node: int = 1,
) -> tuple[CollectiveTable, ...]:
    """Return measured rows by collective as tables."""
    return tuple(
        CollectiveTable(
            collective=collective,
            degree=degree,
            origin=origin,
            rows=tuple((int(nbytes), float(time_s)) for nbytes, time_s in rows[collective]),
            ranks_per_node=ranks_per_node,
        )
        for collective in COLLECTIVES
        if rows.get(collective)
    )


def link_of(
    curves: Sequence[CollectiveTable],
    *,
    name: str,
    level: Level,
    measured: Origin,
    interference: float | None = None,
) -> LinkProfile:
    """Return the link that measured curves describe.

    Args:
        curves: at least one of an all_reduce, with the origin `collectives`.
        name: of the link.
        level: inside a node or between nodes.
        measured: origin of every number; its text is replaced.
        interference: of kernels and collectives.
    """
    sends = [curve for curve in curves if curve.collective == "send"]
    reduces = [curve for curve in curves if curve.collective == "all_reduce"]
    # Of one rank's own port: the group that shares its node's ports the least.
    largest = min(reduces, key=lambda curve: (curve.ranks_per_node, -curve.degree))
    nbytes, time_s = max(largest.rows)
    degree = largest.degree
    shortest = min(min(curve.rows) for curve in (sends or reduces))
    what = "send" if sends else "all_reduce"
    notes = {
        "collectives": "median over repeats of the slowest process, one thread each",
        "latency_s": f"smallest {what}, {shortest[0]} bytes",
        "bytes_per_s": f"ring bandwidth of an all_reduce of {nbytes} bytes by {degree} processes",
        "setup_s": "contained in latency_s",
    }
    if interference is not None:
        notes["interference"] = "products beside an all_reduce, autoplan.profiles.measure_groups"
    return LinkProfile(
        name=name,
        level=level,
        latency_s=shortest[1],
        bytes_per_s=float(f"{2 * (degree - 1) / degree * nbytes / time_s:.4g}"),
        interference=interference,
        curves=tuple(curves),
        origins={key: replace(measured, text=text) for key, text in notes.items()},
        origin_by_field={key: key for key in notes if key != "collectives"},
    )


def _run(command: list[str], timeout_s: float) -> None:
    """Run torchrun in its own process group; kill the group when it takes too long."""
    import autoplan

    root = str(Path(autoplan.__path__[0]).parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise ProfileError(
            f"measuring collectives did not end in {timeout_s:.0f} s: are other jobs running?"
        ) from None
    except KeyboardInterrupt:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        raise ProfileError(f"measuring collectives failed:\n{output[-2000:]}")


def main(arguments: list[str] | None = None) -> None:
    """Measure as one rank of a torchrun job; rank 0 writes `--out`."""
    parser = argparse.ArgumentParser(description="worker of measure_group")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--begun-s", type=float, required=True)
    parser.add_argument("--budget-s", type=float, required=True)
    options = parser.parse_args(arguments)

    import torch
    import torch.distributed as dist

    from autoplan.profiles.measure_groups import (
        collective_rows,
        common_deadline,
        interference_ratio,
    )
    from autoplan.profiles.measure_hooks import hook_seconds

    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(options.backend)
    deadline = common_deadline(options.begun_s + options.budget_s, None, device)
    interference = interference_ratio(None, device)
    host: dict[str, float] = {}
    if dist.get_world_size() == 2:
        host = hook_seconds(device, slice_s=HOST_SHARE * deadline.left_s / 5)
    least_s = time.time() - options.begun_s
    rows = collective_rows(None, device, deadline=deadline)
    if dist.get_rank() == 0:
        found = {"rows": rows, "interference": interference, "host": host, "least_s": least_s}
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # interpreters that tear down gloo threads sometimes hang


if __name__ == "__main__":
    main()
