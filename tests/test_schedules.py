"""Action lists: checked by hand, against torch's own, and by the laws that make them schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from autoplan.schedules import (
    Action,
    ActionLists,
    gpipe,
    interleaved,
    most_in_flight,
    one_f_one_b,
    schedule_actions,
    zero_bubble,
)
from autoplan.transfers import (
    Message,
    buffers,
    enough_for_buffers,
    message_buffers,
    most_sent,
    settled_sends,
    with_messages,
)


def as_text(lists: ActionLists) -> list[str]:
    return [" ".join(map(str, own)) for own in lists]


def test_gpipe_of_two_stages_is_as_drawn_by_hand() -> None:
    assert as_text(gpipe(2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_1f1b_of_three_stages_is_as_drawn_by_hand() -> None:
    assert as_text(one_f_one_b(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_of_two_ranks_is_as_drawn_by_hand() -> None:
    assert as_text(interleaved(2, 4, 2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_zero_bubble_of_two_stages_is_as_drawn_by_hand() -> None:
    assert as_text(zero_bubble(2, 2)) == ["0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"]


class _Stage:
    """As much of a stage as torch's schedules ask for to make their lists."""

    has_backward = True
    is_first = is_last = False
    group = submod = None
    device = "cpu"

    def __init__(self, index: int, pp: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = index, num_stages
        self.group_size, self.group_rank = pp, index % pp
        self.stage_index_to_group_rank = {i: i % pp for i in range(num_stages)}


def torch_lists(kind: Any, pp: int, num_microbatches: int, num_chunks: int) -> list[str] | None:
    """Return torch's lists without its idle slots, or None where it refuses the numbers."""
    stages = [_Stage(chunk * pp, pp, pp * num_chunks) for chunk in range(num_chunks)]
    try:
        made = kind(stages, num_microbatches, loss_fn=lambda *_: None)
    except ValueError:
        return None
    order = made.pipeline_order
    return [" ".join(str(a) for a in order[rank] if a is not None) for rank in range(pp)]


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_interleaved_and_zero_bubble_lists_are_those_of_torch(pp: int, num_chunks: int) -> None:
    pairs = (
        (torch_schedules.ScheduleInterleaved1F1B, interleaved),
        (torch_schedules.ScheduleInterleavedZeroBubble, zero_bubble),
    )
    for num_microbatches in range(1, 13):
        for theirs, ours in pairs:
            expected = torch_lists(theirs, pp, num_microbatches, num_chunks)
            if expected is None:
                with pytest.raises(ValueError, match="do not divide into"):
                    ours(pp, num_microbatches, num_chunks)
            else:
                assert as_text(ours(pp, num_microbatches, num_chunks)) == expected


def kinds(actions: Sequence[Any]) -> str:
    """Return the letters of a list; torch numbers micro-batches only when it runs them."""
    letters = (getattr(a, "kind", None) or a.computation_type.value for a in actions)
    return "".join(x for x in letters if x in "FB")


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_1f1b_and_gpipe_run_in_the_order_of_torch(pp: int) -> None:
    for m in range(pp, 9):
        for theirs, ours in (
            (torch_schedules.Schedule1F1B, one_f_one_b),
            (torch_schedules.ScheduleGPipe, gpipe),
        ):
            stage: Any = _Stage(0, pp, pp)
            made: Any = theirs(stage, m, loss_fn=lambda *_: None)
            order = made._get_pipeline_order()
            for rank, own in enumerate(ours(pp, m)):
                assert kinds([a for a in order[rank] if a is not None]) == kinds(own)


@st.composite
def lists(draw: st.DrawFn) -> tuple[str, int, int, int]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero_bubble"]))
    pp = draw(st.integers(1, 5))
    num_chunks = draw(st.integers(1, 3)) if name in ("interleaved", "zero_bubble") else 1
    return name, pp, pp * draw(st.integers(1, 4)), num_chunks


@given(lists())
@settings(deadline=None)
def test_a_schedule_runs_every_micro_batch_of_its_own_stages_once(
    case: tuple[str, int, int, int],
) -> None:
    name, pp, m, num_chunks = case
    for rank, own in enumerate(schedule_actions(name, pp, m, num_chunks)):
        backward = ("I", "W") if name == "zero_bubble" else ("B",)
        expected = {
            Action(chunk * pp + rank, kind, i)
            for chunk in range(num_chunks)
            for kind in ("F", *backward)
            for i in range(m)
        }
        assert set(own) == expected
        assert len(own) == len(expected)


@given(lists())
@settings(deadline=None)
def test_an_action_comes_after_what_it_needs_on_its_own_rank(
    case: tuple[str, int, int, int],
) -> None:
    for own in schedule_actions(*case):
        seen: set[Action] = set()
        for action in own:
            needed = {"F": "", "B": "F", "I": "F", "W": "I"}[action.kind]
            texts = {f"{action.stage}{kind}{action.microbatch}" for kind in needed}
            assert texts <= {str(a) for a in seen}
            seen.add(action)


@given(lists())
@settings(deadline=None)
def test_an_action_prints_and_parses_back(case: tuple[str, int, int, int]) -> None:
    assert all(Action.parse(str(a)) == a for own in schedule_actions(*case) for a in own)


def test_in_flight_micro_batches_are_counted_from_the_list() -> None:
    assert [most_in_flight(own) for own in one_f_one_b(4, 8)] == [4, 3, 2, 1]
    assert [most_in_flight(own) for own in gpipe(4, 8)] == [8, 8, 8, 8]
    # Memory of ZB-H1 is that of 1F1B's first stage on every stage (Qi et al. 2023, table 2).
    assert max(most_in_flight(own) for own in zero_bubble(4, 8)) == 4
    # Narayanan et al. 2021, section 2.2.2: more in flight by 1 + (p - 1) / (p v) of p v chunks.
    assert most_in_flight(interleaved(4, 8, 2)[0]) == 4 * 2 + 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dualpipe", 2, 2), "allowed are none, gpipe, 1f1b, interleaved, zero_bubble"),
        (("1f1b", 2, 2, 2), "only interleaved and zero_bubble take more than one"),
        (("none", 2, 2), "pp=2 stages need a schedule"),
        (("interleaved", 2, 5, 2), "5 micro-batches do not divide into 2 rounds"),
        (("gpipe", 0, 1), "pp is 0"),
    ],
)
def test_a_schedule_that_cannot_be_says_what_can(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule_actions(*arguments)


def test_text_that_is_no_action_is_refused() -> None:
    with pytest.raises(ValueError, match="'2X0' is no action"):
        Action.parse("2X0")


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_messages_come_in_the_order_of_torch(pp: int, num_chunks: int) -> None:
    for name in ("interleaved", "zero_bubble"):
        for m in (pp, 3 * pp):
            actions = schedule_actions(name, pp, m, num_chunks)
            theirs = {r: [torch_schedules._Action.from_str(str(a)) for a in own]
                      for r, own in enumerate(actions)}  # fmt: skip
            expected = torch_schedules._add_send_recv(
                theirs, stage_to_rank=lambda stage: stage % pp, num_stages=pp * num_chunks
            )
            found = with_messages(actions)
            assert [[str(s) for s in own] for own in found] == [
                [str(a) for a in expected[rank]] for rank in range(pp)
            ]


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_two_rounds_need_all_the_buffers_and_few_sends_are_open(pp: int, num_chunks: int) -> None:
    for name in ("interleaved", "zero_bubble"):
        lists = with_messages(schedule_actions(name, pp, 6 * pp, num_chunks))
        m = enough_for_buffers(6 * pp, pp)
        assert buffers(lists) == message_buffers(name, pp, m, num_chunks)
        for own, settled in zip(lists, settled_sends(lists), strict=True):
            open_sends: dict[int, int] = {}
            for step in own:
                if isinstance(step, Message) and step.is_send and step.is_gradient:
                    open_sends[step.stage] = open_sends.get(step.stage, 0) + 1
                for done in settled.get(step, ()) if isinstance(step, Message) else ():
                    open_sends[done.stage] = open_sends.get(done.stage, 0) - done.is_gradient
                assert max(open_sends.values(), default=0) <= most_sent(pp, num_chunks)


def test_lists_that_wait_for_each_other_are_refused() -> None:
    actions = ((Action(0, "F", 0), Action(0, "B", 0)), (Action(1, "B", 0), Action(1, "F", 0)))
    with pytest.raises(ValueError, match="wait for each other"):
        with_messages(tuple(tuple(reversed(own)) for own in actions))
