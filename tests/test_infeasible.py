"""What does not fit says what it needs and what to do, and doing that fits."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from autoplan.bounds import held_excess, static_reason, unrunnable_reason
from autoplan.cluster import Cluster, NodeGroup
from autoplan.errors import InfeasibleError, SearchLimitError
from autoplan.held import mean_room, static_need
from autoplan.leanest import least_memory, least_of, least_within
from autoplan.limits import kept_constraints, make_limits
from autoplan.optimizing import find_plan, optimize
from autoplan.planner import Planner, make_planner
from autoplan.profiles import load_profile
from autoplan.remedies import Trials, conflicting
from autoplan.search.mesh import Progress
from autoplan.stage_bytes import rank_memory
from autoplan.stage_ends import even_stage_ends
from autoplan.training_job import TrainingJob
from autoplan.units import format_bytes_up, parse_bytes
from autoplan.verifier import verify_plan
from tests.models_for_tests import LinearChain, TinyGPT, mean_square
from tests.small_traces import BodySpec, ChainSpec, planner_of, workload_of

BODY = BodySpec(count=3, hidden=64, has_norm=True, has_view=True)
CHAIN = ChainSpec(width=16, vocabulary=32, bodies=(BODY,))


def cluster_of(text: str, memory: int | str) -> Cluster:
    return Cluster.parse(text).with_memory(memory, reserve_bytes=0)


def error_of(planner: Planner) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        find_plan(planner)
    return caught.value


@pytest.fixture(scope="module")
def gpu_error() -> InfeasibleError:
    return error_of(planner_of(CHAIN, cluster_of("1x2:v100", "40KiB"), workload_of(4)))


def test_message_states_need_capacity_category_and_remedies(gpu_error: InfeasibleError) -> None:
    text = str(gpu_error)
    assert gpu_error.need_bytes > gpu_error.capacity_bytes == 40 * 1024
    assert re.search(r"no plan fits: .*dp=\d.* needs [\d.]+ KiB a device \(at ", text)
    assert "1x2:v100_sxm_32gb has 40.00 KiB" in text
    assert f"the largest part is {gpu_error.category} with " in text
    assert [f"remedy: {r}" for r in gpu_error.remedies] == text.splitlines()[2:]


def test_what_conflicts_without_any_pin_is_named_and_irreducible(
    gpu_error: InfeasibleError,
) -> None:
    line = next(x for x in str(gpu_error).splitlines() if x.startswith("conflict: "))
    assert "40.00 KiB a device, 2 devices and nothing in host memory do not go" in line
    planner = planner_of(CHAIN, cluster_of("1x2:v100", "40KiB"), workload_of(4))
    offloading = replace(planner.workload, offload=("optimizer", "activations"))
    assert find_plan(planner.unpriced(workload=offloading))
    assert find_plan(planner_of(CHAIN, cluster_of("1x4:v100", "40KiB"), workload_of(4)))


def test_the_device_that_is_too_small_is_the_one_that_counts() -> None:
    large = replace(load_profile("a100_sxm_80gb"), reserve_bytes=0)
    small = NodeGroup(num_nodes=1, device=replace(large, name="small", memory_bytes=4096))
    cluster = replace(Cluster.from_device(large, num_nodes=2, gpus_per_node=1), slower=(small,))
    error = error_of(planner_of(CHAIN, cluster, workload_of(4), {"pp": 2}))
    assert error.capacity_bytes == 4096 < error.need_bytes
    assert any(remedy.startswith("devices of ") for remedy in error.remedies)


def test_error_survives_the_broadcast_to_other_ranks(gpu_error: InfeasibleError) -> None:
    again = pickle.loads(pickle.dumps(gpu_error))
    assert str(again) == str(gpu_error)
    assert again.remedies == gpu_error.remedies


def test_device_memory_that_is_named_fits_and_less_does_not(gpu_error: InfeasibleError) -> None:
    match = re.fullmatch(r"device memory of (.*) on the same devices", gpu_error.remedies[0])
    assert match is not None
    named = parse_bytes(match.group(1))
    assert named >= gpu_error.need_bytes
    plan = find_plan(planner_of(CHAIN, cluster_of("1x2:v100", named), workload_of(4)))
    assert max(plan.predicted.peak_memory_bytes) <= named
    less = int(gpu_error.need_bytes * 0.97)
    error_of(planner_of(CHAIN, cluster_of("1x2:v100", less), workload_of(4)))


def test_devices_that_are_no_larger_than_what_did_not_fit_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def least_asked(planner: Planner, **options: Any) -> Any:
        asked.append(planner.cluster.capacity_bytes)
        return least_within(planner, **options)

    monkeypatch.setattr("autoplan.remedies.least_within", least_asked)
    planner = planner_of(CHAIN, cluster_of("1x2:v100", "40KiB"), workload_of(4))
    need = least_memory(planner).need_bytes
    sizes = [need - 2000, need - 3000, need - 1, need - 2, need, need + 9, need - 1500]
    clusters = [cluster_of("1x2:a100", size) for size in sizes]
    trials = Trials(planner)
    assert [trials.fits(cluster=own) for own in clusters] == [size >= need for size in sizes]
    assert asked == [need - 2000, need - 1, need, need + 9]
    assert all(
        Trials(planner).fits(cluster=own) == (own.capacity_bytes >= need) for own in clusters
    )


def test_more_devices_that_are_named_fit(gpu_error: InfeasibleError) -> None:
    named = next(r for r in gpu_error.remedies if " devices (" in r)
    match = re.fullmatch(r"(\d+) devices \((.*)\)", named)
    assert match is not None
    cluster = cluster_of(match.group(2), "40KiB")
    assert cluster.world_size == int(match.group(1)) > 2
    planner = planner_of(CHAIN, cluster, workload_of(4))
    plan = find_plan(planner)
    assert verify_plan(plan, planner.traces.exact(plan.microbatch_size), cluster) == ()


def test_next_device_of_the_catalog_fits(gpu_error: InfeasibleError) -> None:
    named = next(r for r in gpu_error.remedies if r.startswith("devices of "))
    match = re.fullmatch(r"devices of .* each \((.*)\)", named)
    assert match is not None
    assert find_plan(planner_of(CHAIN, Cluster.parse(match.group(1)), workload_of(4)))


def test_a_pin_that_stands_in_the_way_is_named() -> None:
    free = planner_of(CHAIN, cluster_of("1x2:cpu", "1GiB"), workload_of(4))
    need = least_memory(free).need_bytes
    cluster = cluster_of("1x2:cpu", int(need * 1.02))
    error = error_of(planner_of(CHAIN, cluster, workload_of(4), {"dp": 2, "zero_stage": 0}))
    named = [r for r in error.remedies if r.startswith("without the pin")]
    assert named
    for remedy in named:
        kept = {k: v for k, v in (("dp", 2), ("zero_stage", 0)) if f"{k}={v}" not in remedy}
        assert find_plan(planner_of(CHAIN, cluster, workload_of(4), kept))


def test_a_limit_that_stands_in_the_way_is_named_and_conflicts() -> None:
    free = planner_of(CHAIN, cluster_of("1x2:cpu", "1GiB"), workload_of(4))
    cluster = cluster_of("1x2:cpu", int(least_memory(free).need_bytes * 1.02))
    planner = planner_of(CHAIN, cluster, workload_of(4))
    planner.limits = make_limits({"dp": (2, 2)}, {"zero_stage": [1, 2, 3]})
    error = error_of(planner)
    assert "dp within 2..2" in str(error).splitlines()[1]
    named = [r for r in error.remedies if r.startswith("without the limit ")]
    assert named
    for remedy in named:
        is_bound = remedy.endswith("dp within 2..2")
        planner.limits = make_limits(
            None if is_bound else {"dp": (2, 2)}, {"zero_stage": [1, 2, 3]} if is_bound else None
        )
        assert find_plan(planner.unpriced())


@pytest.mark.parametrize(
    ("cluster", "pins", "forbid", "share"),
    [
        # 128 devices, the most that remedies try, have no setting without tp for 8 rows.
        ("1x8:v100", {"pp": 1}, {"tp": [2, 4]}, 0.5),
        ("1x2:h100 + 1x2:a100", {"pp": 2, "zero_stage": 0}, {}, 0.5),
        ("1x2:h100 + 1x2:a100", {"microbatch_size": 4, "recompute": "none"}, {}, 0.8),
    ],
)
def test_without_any_one_of_what_conflicts_a_plan_is_found(
    cluster: str, pins: dict[str, Any], forbid: dict[str, Any], share: float
) -> None:
    limits = make_limits(None, forbid)

    def planner(memory: int | str) -> Planner:
        made = planner_of(CHAIN, cluster_of(cluster, memory), workload_of(8), pins)
        made.limits = limits
        return made

    tight = planner(int(least_memory(planner("1GiB")).need_bytes * share))
    with pytest.raises(InfeasibleError):
        find_plan(tight, compare=False)
    names = conflicting(Trials(tight))
    assert names
    for name in names:
        kept = [other for other in names if other != name]
        own, left = kept_constraints(pins, limits, kept)
        offload = () if "host" in kept else ("optimizer", "activations")
        most = replace(tight.cluster, num_nodes=16 * tight.cluster.num_nodes, gpus_per_node=8)
        sizes = [tight.cluster] if "devices" in kept else [tight.cluster, most]
        changes = {
            "pins": own,
            "limits": left,
            "workload": replace(tight.workload, offload=offload),
        }
        assert any(is_found(tight.unpriced(cluster=size, **changes)) for size in sizes)


def is_found(planner: Planner) -> bool:
    try:
        find_plan(planner, compare=False)
    except (InfeasibleError, ValueError):
        return False
    return True


def test_memory_that_nothing_helps_is_said_to_be_the_reason_alone() -> None:
    error = error_of(planner_of(CHAIN, cluster_of("1x1:v100", "2KiB"), workload_of(1)))
    line = str(error).splitlines()[1]
    assert line.startswith("conflict: 2.00 KiB a device alone, nothing fits with 128 devices, all")
    assert [r.split(" of ")[0] for r in error.remedies] == ["device memory", "devices"]


def test_a_smaller_micro_batch_is_named_where_it_is_pinned() -> None:
    wide = ChainSpec(width=8, vocabulary=64, bodies=(replace(BODY, hidden=64),))
    cluster = cluster_of("1x1:cpu", "1GiB")
    free = planner_of(wide, cluster, workload_of(8))
    tight = cluster_of("1x1:cpu", least_memory(free).need_bytes)
    error = error_of(planner_of(wide, tight, workload_of(8), {"microbatch_size": 8}))
    named = next(r for r in error.remedies if r.startswith("microbatch_size="))
    size = int(named.split("=")[1].split()[0])
    assert size < 8
    assert find_plan(planner_of(wide, tight, workload_of(8), {"microbatch_size": size}))


def test_plan_of_least_memory_is_found_where_the_search_is_too_coarse() -> None:
    roomy = planner_of(CHAIN, cluster_of("1x2:cpu", "1GiB"), workload_of(4))
    need = least_memory(roomy).need_bytes
    planner = planner_of(CHAIN, cluster_of("1x2:cpu", need), workload_of(4))
    plan = find_plan(planner)
    assert max(plan.predicted.peak_memory_bytes) <= need
    assert verify_plan(plan, planner.traces.exact(plan.microbatch_size), planner.cluster) == ()


def test_least_memory_recomputes_where_what_blocks_keep_adds_up() -> None:
    deep = ChainSpec(width=8, vocabulary=8, bodies=(replace(BODY, count=6, hidden=32),))

    def need(**pins: Any) -> int:
        cluster = cluster_of("1x1:cpu", "1GiB")
        return least_memory(
            planner_of(deep, cluster, workload_of(32), {"microbatch_size": 32, **pins})
        ).need_bytes

    assert need() < 0.8 * need(recompute="none")
    assert need() <= min(need(recompute="full"), need(recompute="selective"))


def test_no_plan_of_least_memory_is_below_what_ranks_hold_together() -> None:
    deep = ChainSpec(width=8, vocabulary=16, bodies=(replace(BODY, count=9, hidden=32),))
    planner = planner_of(deep, cluster_of("1x8:cpu", "20KiB"), workload_of(16))
    found = 0
    for setting in planner.settings():
        if setting.virtual_stages == 1 and setting.microbatch_size in (1, 4):
            bound = held_excess(planner, setting)
            assert least_of(planner, setting).excess_bytes >= bound
            found += bound > 0
    assert found


@pytest.mark.parametrize("cluster", ["1x4:cpu", "1x4:v100", "1x2:h100 + 1x2:a100"])
def test_no_plan_of_least_memory_is_below_what_an_optimizers_step_needs(cluster: str) -> None:
    deep = ChainSpec(width=8, vocabulary=16, bodies=(replace(BODY, count=5, hidden=32),))
    planner = planner_of(deep, cluster_of(cluster, "8KiB"), workload_of(8))
    refused = 0
    for setting in planner.settings():
        if setting.virtual_stages == 1 and setting.microbatch_size == 1:
            excess = least_of(planner, setting).excess_bytes
            need, room = static_need(planner, setting), mean_room(planner.cluster, setting)
            assert excess >= need - room
            assert excess >= held_excess(planner, setting)
            if static_reason(planner, setting) is not None:
                assert excess > 0
                refused += 1
    assert refused


def test_unlike_devices_that_hold_too_little_together_are_refused_without_a_search() -> None:
    large = replace(load_profile("a100_sxm_80gb"), memory_bytes=60_000, reserve_bytes=0)
    small = NodeGroup(num_nodes=1, device=replace(large, name="small", memory_bytes=4096))
    cluster = replace(Cluster.from_device(large, num_nodes=2, gpus_per_node=1), slower=(small,))
    planner = planner_of(CHAIN, cluster, workload_of(4), {"pp": 2})
    assert max(static_need(planner, s) for s in planner.settings()) < large.memory_bytes
    reasons = [static_reason(planner, setting) for setting in planner.settings()]
    assert all(reason is not None and reason.endswith("in the mean") for reason in reasons)


def test_ranks_with_the_same_blocks_hold_no_more_than_the_first_of_them() -> None:
    deep = ChainSpec(width=8, vocabulary=16, bodies=(replace(BODY, count=9, hidden=32),))
    planner = planner_of(deep, cluster_of("1x4:cpu", "1GiB"), workload_of(8), {"pp": 4, "dp": 1})
    even = 0
    for setting in planner.settings():
        pricer = planner.pricer(setting.microbatch_size)
        ends = even_stage_ends(pricer.trace, setting.pp * setting.virtual_stages)
        least = least_of(planner, setting)
        spans = [range(start, end) for start, end in pairwise((0, *ends))]
        walked = [
            rank_memory(pricer, setting, rank, spans, least.decisions).peak
            for rank in range(setting.pp)
        ]
        assert least.need_bytes <= max(walked)
        if least.ends == ends:
            even += 1
            assert least.need_bytes == max(walked)
    assert even


@pytest.mark.parametrize(
    ("cluster", "pins", "share"),
    [
        ("1x2:v100", {}, 0.6),
        ("1x2:cpu", {"zero_stage": 0}, 0.9),
        ("1x1:h100 + 1x1:a100", {"recompute": "none"}, 0.5),
    ],
)
def test_what_is_left_out_early_changes_no_word_of_an_infeasible_answer(
    cluster: str, pins: dict[str, Any], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planner(memory: int | str) -> Planner:
        return planner_of(CHAIN, cluster_of(cluster, memory), workload_of(8), pins)

    tight = int(least_memory(planner("1GiB")).need_bytes * share)
    answer = str(error_of(planner(tight)))
    monkeypatch.setattr("autoplan.planner.static_reason", unrunnable_reason)
    monkeypatch.setattr("autoplan.leanest.static_need", lambda planner, setting: 0)
    monkeypatch.setattr(Trials, "_any_fits", lambda self, changed, _: self._leanest_fits(changed))
    assert str(error_of(planner(tight))) == answer


def test_sizes_round_up_so_that_reading_them_back_never_gives_less() -> None:
    for number in (1, 1023, 1025, 2**20 + 1, 3 * 2**30 - 1, 123456789):
        assert number <= parse_bytes(format_bytes_up(number)) <= number * 1.01 + 1


def test_heads_that_do_not_divide_leave_attention_whole() -> None:
    batch = torch.randint(50, (4, 16))
    model = TinyGPT(depth=1)
    planner = make_planner(
        TrainingJob(model, "1x3:cpu", batch, loss_fn=mean_square), pins={"tp": 3, "dp": 1}
    )
    plan = find_plan(planner, compare=False)
    trace = planner.traces.exact(plan.microbatch_size)
    assert verify_plan(plan, trace, planner.cluster) == ()
    ops = {(b.name, op.name): op for b in trace.blocks for op in b.ops}
    for layout in plan.placements.values():
        for name, axis in layout.axes.items():
            op = ops[layout.block, name]
            assert op.kind != "attention"
            assert axis == "partial" or next(o.size for o in op.options if o.axis == axis) % 3 == 0


def test_batch_that_does_not_divide_says_which_degrees_would() -> None:
    pins = {"dp": 4}
    planner = planner_of(CHAIN, cluster_of("1x4:cpu", "1GiB"), workload_of(6), pins)
    with pytest.raises(ValueError, match=r"global batch 6 and dp=4.*dp may be 1, 2\)"):
        find_plan(planner)


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"tpp": 2}, r"cannot pin 'tpp' \(did you mean tp\?\); allowed are dp, tp, pp"),
        ({"loss": len}, r"cannot pin 'loss' \(did you mean loss_fn\?\); allowed are dp, tp, pp"),
        ({"recompute": "some"}, r"recompute='some'; allowed are none, full, selective"),
        ({"tp": 0}, r"tp=0: must be a whole number of at least 1"),
        ({"tp": 1.5}, r"tp=1.5: must be a whole number of at least 1"),
        ({"tp": True}, r"tp=True: must be a whole number of at least 1"),
        ({"zero_stage": -1}, r"zero_stage=-1: must be a whole number of at least 0"),
        ({"schedule": "zb"}, r"schedule='zb'; allowed are 1f1b, gpipe, interleaved, zero_bubble"),
        ({"zero_stage": 4}, r"zero_stage=4; allowed are 0, 1, 2, 3"),
        ({"tp": 3}, r"no setting is possible for 2 devices, global batch 4 and tp=3: dp \* tp"),
        ({"pp": 2, "num_microbatches": 1, "schedule": "1f1b"}, r"with num_microbatches >= pp"),
    ],
)
def test_wrong_pins_say_what_is_allowed(pins: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize(LinearChain(depth=2), "1x2:cpu", torch.randn(4, 16), loss_fn=mean_square, **pins)


def test_zero_stage_without_data_parallelism_is_refused() -> None:
    planner = planner_of(
        CHAIN, cluster_of("1x2:cpu", "1GiB"), workload_of(4), {"tp": 2, "zero_stage": 3}
    )
    with pytest.raises(ValueError, match=r"zero_stage=3.*zero_stage above 0 needs dp above 1"):
        find_plan(planner)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adamm"}, "optimizer 'Adamm' is not known; known are adamw"),
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'; allowed are auto, none, bfloat16"),
        ({"mixed_precision": "bfloat16"}, "this one has torch.float32"),
        ({"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
    ],
)
def test_wrong_options_say_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimize(
            LinearChain(depth=2),
            "1x2:cpu",
            torch.randn(4, 16),
            loss_fn=mean_square,
            **options,
        )


def test_time_limit_without_a_plan_says_so() -> None:
    planner = planner_of(CHAIN, cluster_of("1x2:cpu", "60KiB"), workload_of(4))
    with pytest.raises(SearchLimitError, match="without a plan: raise time_limit_s"):
        find_plan(planner, time_limit_s=0.0)


def test_time_limit_returns_what_is_known_to_fit_with_its_gap() -> None:
    planner = planner_of(CHAIN, cluster_of("1x2:cpu", "1GiB"), workload_of(4))
    plan = find_plan(planner, time_limit_s=0.0)
    assert plan.search.status == "feasible"
    assert 0 < plan.search.gap < 1
    assert plan.search.bound_s < plan.search.objective_s
    assert verify_plan(plan, planner.traces.exact(plan.microbatch_size), planner.cluster) == ()


def test_interrupt_after_a_first_plan_returns_it_with_its_gap() -> None:
    def interrupt(state: Progress) -> None:
        if state.objective is not None:
            raise KeyboardInterrupt

    planner = planner_of(CHAIN, cluster_of("1x4:cpu", "60KiB"), workload_of(4))
    plan = find_plan(planner, progress=interrupt, compare=False)
    assert plan.search.status == "feasible"
    assert 0 < plan.search.gap < 1
    assert plan.search.settings["unexplored"] > 0
    assert verify_plan(plan, planner.traces.exact(plan.microbatch_size), planner.cluster) == ()
