"""Decisions that are priced side by side cost what each costs by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from autoplan.cluster import Cluster
from autoplan.engines import AUTOPLAN, MEGATRON, Engine
from autoplan.planner import Planner
from autoplan.search_options import block_options, call_bytes, least_option
from autoplan.settings import Setting
from autoplan.units import to_ticks
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

CHAIN = ChainSpec(
    width=16,
    vocabulary=32,
    bodies=(BodySpec(count=4, hidden=64, has_norm=True, has_view=True),),
    is_tied=True,
)


def settings_of(planner: Planner) -> list[Setting]:
    """Return settings of every ZeRO stage, schedule and placement, not every size."""
    found: dict[Setting, Setting] = {}
    for setting in planner.settings():
        kind = replace(setting, microbatch_size=1, num_microbatches=1, virtual_stages=1)
        found.setdefault(kind, setting)
    return list(found.values())


@pytest.mark.parametrize("name", ["2x4:a100", "1x4:cpu"])
@pytest.mark.parametrize("engine", [AUTOPLAN, MEGATRON], ids=lambda engine: engine.name)
@pytest.mark.parametrize("precision", ["none", "bfloat16"])
def test_decisions_side_by_side_cost_what_each_costs_alone(
    name: str, engine: Engine, precision: Literal["none", "bfloat16"]
) -> None:
    workload = replace(workload_of(16, "AdamW", precision), engine=engine)
    planner = planner_of(CHAIN, Cluster.parse(name), workload)
    num_decisions = 0
    for setting in settings_of(planner):
        pricer, live = planner.pricer(setting.microbatch_size), setting.live()[0]
        for call, convention in (
            (call, convention)
            for call in (0, 1, len(pricer.trace.calls) - 1)
            for convention in pricer.conventions(setting.tp)
        ):
            block = pricer.trace.calls[call].block
            decisions = pricer.decisions(block, setting.tp, convention)
            seconds = pricer.seconds(call, decisions, setting)
            options = block_options(pricer, call, decisions, setting, live)
            held = call_bytes(pricer, call, decisions, setting, live)
            least = least_option(pricer, call, convention, setting)
            for index, decision in enumerate(decisions):
                alone = pricer.price(call, decision, setting)
                priced = (seconds.forward_s, seconds.backward_s, seconds.once_s)
                own = tuple(float(values[index]) for values in priced)
                assert own == (alone.forward_s, alone.backward_s, alone.once_s)
                option = options[index]
                assert (option.forward, option.backward, option.once) == tuple(map(to_ticks, own))
                assert block_options(pricer, call, (decision,), setting, live) == (option,)
                assert option.kept * pricer.memory_unit >= held.kept[index]
                assert least.forward <= option.forward + option.backward
                assert least.once <= option.once
                assert least.static <= option.static
            num_decisions += len(decisions)
    assert num_decisions > len(settings_of(planner))


def test_a_table_is_made_once_and_keeps_what_it_is_of() -> None:
    planner = planner_of(CHAIN, Cluster.parse("1x4:a100"), workload_of(4))
    pricer = planner.pricer(1)
    decisions = pricer.decisions(1, 2)
    table = pricer.table(1, decisions, 2)
    assert pricer.table(1, list(decisions), 2) is table
    assert pricer.table(1, decisions[:1], 2) is not table
    assert all(own is given for own, given in zip(table.decisions, decisions, strict=True))
