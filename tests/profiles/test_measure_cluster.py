"""Measuring links as the ranks of a job; two processes stand for two nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import autoplan
from autoplan.cluster import Cluster
from autoplan.errors import ProfileError
from autoplan.profiles import load_profile
from autoplan.profiles.catalog import save_profile
from autoplan.profiles.measure_cluster import Nodes, groups_of


def test_groups_inside_and_over_nodes_are_measured() -> None:
    kinds = groups_of(Nodes(num_nodes=2, ranks_per_node=2))
    assert [(k.level, k.groups, k.ranks_per_node) for k in kinds] == [
        ("intra", ((0, 1), (2, 3)), 1),
        ("inter", ((0, 2), (1, 3)), 1),
        ("inter", ((0, 1, 2, 3),), 2),
    ]
    with pytest.raises(ProfileError, match="5 ranks with 2 on this node"):
        Nodes.of({"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"})


def test_ranks_of_a_job_measure_the_links_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    before = load_profile("cpu")
    save_profile(before, path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "autoplan.cli", "profile", "--gpu", "cpu"]
    command += ["--out", str(path), "--budget", "1s"]
    root = str(Path(autoplan.__path__[0]).parent)
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "PYTHONPATH": root}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    after = load_profile(path)
    assert (after.intra, after.gemm) == (before.intra, before.gemm)
    assert after.inter is not None
    assert "all_reduce" in {curve.collective for curve in after.inter.curves}
    assert after.inter.interference is not None
    assert after.inter.origins["interference"].kind == "measured"
    assert after.host.sharded_block > 0
    found = Cluster.from_device(after, num_nodes=2).link_for(2)
    rows = next(c.rows for c in after.inter.curves if c.collective == "all_reduce")
    assert found.collective_time_s("all_reduce", rows[-1][0], 2) == pytest.approx(rows[-1][1])
