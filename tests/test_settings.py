"""The space of settings, and what lies beside the blocks that ranks of several stages are dealt."""

from __future__ import annotations

from dataclasses import replace

from autoplan.cluster import Cluster
from autoplan.interleaving import Alike, lightened
from autoplan.scaling import interpolate
from autoplan.search.problem import BlockOption, PipelineSolution
from autoplan.settings import Setting, settings_of
from tests.small_traces import BodySpec, ChainSpec, planner_of, small_trace, workload_of

CHAIN = ChainSpec(width=8, vocabulary=16, bodies=(BodySpec(count=2, hidden=16),))
ONE = Cluster.parse("1x1:cpu").with_memory("1GiB", reserve_bytes=0)


def option(seconds: int, once: int = 0) -> BlockOption:
    return BlockOption(forward=seconds, backward=0, once=once, kept=0, static=0, working=0)


def test_every_micro_batch_that_divides_the_batch_is_in_the_space() -> None:
    sizes = {s.microbatch_size for s in settings_of(ONE, workload_of(312), 4, {})}
    assert sizes == {size for size in range(1, 313) if 312 % size == 0}


def test_a_size_between_two_that_are_traced_follows_from_them() -> None:
    planner = planner_of(CHAIN, ONE, workload_of(12))
    between, exact = planner.trace(3), small_trace(CHAIN, 3)
    assert between == interpolate(small_trace(CHAIN, 2), small_trace(CHAIN, 4), 3)
    assert [block.ops for block in between.blocks] == [block.ops for block in exact.blocks]
    assert planner.trace(4) == small_trace(CHAIN, 4)
    pinned = planner_of(CHAIN, ONE, workload_of(12), {"microbatch_size": 3})
    assert pinned.trace(3) == small_trace(CHAIN, 3)


def test_what_lies_beside_alike_blocks_waits_with_its_round_and_not_with_its_rank() -> None:
    setting = Setting(
        dp=1,
        tp=1,
        pp=2,
        zero_stage=0,
        microbatch_size=1,
        num_microbatches=8,
        schedule="interleaved",
        virtual_stages=2,
    )
    # The last rank is the slowest by far, so the share of the first rank seems to have time.
    embedding, block, head = (option(2, 8), option(5)), (option(10),), (option(30),)
    found = PipelineSolution(
        status="optimal",
        ends=(2, 3, 4, 6),
        options=(1, 0, 0, 0, 0, 0),
        objective=0,
        bound=0,
    )
    per_call = [embedding, block, block, block, block, head]
    alike = Alike(calls=range(1, 5), num_calls=6, least=(0, 0))
    lighter = lightened(alike, per_call, found, setting)
    assert lighter == replace(found, options=(0, 0, 0, 0, 0, 0))
    dear = [(option(2, 200), option(5)), block, block, block, block, head]
    assert lightened(alike, dear, found, setting) == found
