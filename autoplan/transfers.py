"""The messages of a schedule: where each rank sends and receives, and how many buffers it needs.

Under schedules that give a rank several stages nobody waits for a message before it is needed. A
rank hands over a result as soon as it is there; the receiver is ready for it from then on, and
waits where it needs it. Both follow from the action lists alone, so the memory model counts the
buffers of the very lists that run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autoplan.schedules import Action, ActionLists, schedule_actions

__all__ = [
    "Buffers",
    "Message",
    "Step",
    "buffers",
    "enough_for_buffers",
    "message_buffers",
    "most_sent",
    "settled_sends",
    "with_messages",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One end of a message: stage `stage` sends or receives it.

    Attributes:
        stage: whose end it is.
        is_send: else it is received.
        is_gradient: a gradient on its way back, else an activation on its way forward.
        microbatch: index.
    """

    stage: int
    is_send: bool
    is_gradient: bool
    microbatch: int

    def __str__(self) -> str:
        way, kind = "SEND" if self.is_send else "RECV", "B" if self.is_gradient else "F"
        return f"{self.stage}{way}_{kind}{self.microbatch}"


Step = Action | Message


def with_messages(actions: ActionLists) -> tuple[tuple[Step, ...], ...]:
    """Return the action lists with their messages.

    Ranks take turns; one whose next action lacks an input is passed over. A message is sent after
    the action that makes it, and the receiver is made ready at the same moment, which no order of
    sends and receives can block. The same as `_add_send_recv` of torch's pipelines.

    Raises:
        ValueError: the actions wait for each other.
    """
    num_ranks = len(actions)
    last = max(action.stage for own in actions for action in own)
    lists: list[list[Step]] = [[] for _ in actions]
    have: list[set[tuple[int, bool, int]]] = [set() for _ in actions]
    position = [0] * num_ranks
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, own in enumerate(actions):
            if position[rank] == len(own):
                continue
            action = own[position[rank]]
            need = _need(action, last)
            if need is not None and need not in have[rank]:
                continue
            position[rank] += 1
            is_moving = True
            lists[rank].append(action)
            target = _target(action, last)
            if target is None:
                continue
            is_gradient = action.kind != "F"
            receiver = target % num_ranks
            have[receiver].add((target, is_gradient, action.microbatch))
            if receiver != rank:
                i = action.microbatch
                lists[rank].append(Message(action.stage, True, is_gradient, i))
                lists[receiver].append(Message(target, False, is_gradient, i))
    stuck = [str(own[p]) for own, p in zip(actions, position, strict=True) if p < len(own)]
    if stuck:
        raise ValueError(f"the actions wait for each other at {', '.join(stuck)}")
    return tuple(map(tuple, lists))


def _need(action: Action, last: int) -> tuple[int, bool, int] | None:
    """Return what an action needs from another stage: whose input, is it a gradient, which."""
    if action.kind == "F":
        return (action.stage, False, action.microbatch) if action.stage > 0 else None
    if action.kind == "W" or action.stage == last:
        return None
    return action.stage, True, action.microbatch


def _target(action: Action, last: int) -> int | None:
    """Return the stage that an action's result goes to, or None."""
    if action.kind == "W":
        return None
    target = action.stage + (1 if action.kind == "F" else -1)
    return target if 0 <= target <= last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Receive buffers of a stage.

    Attributes:
        activations: received activations that are there at once, ready ones included.
        gradients: likewise received gradients.
    """

    activations: int
    gradients: int


def buffers(lists: Sequence[Sequence[Step]]) -> tuple[Buffers, ...]:
    """Return the buffers that each stage needs under lists with messages.

    An activation or gradient stays from where its receiver is made ready to the end of the
    micro-batch's backward there, the one of the weights if it is split.
    """
    found: dict[int, Buffers] = {}
    for own in lists:
        ends = "W" if any(isinstance(s, Action) and s.kind == "W" for s in own) else "B"
        live = {step.stage: [0, 0] for step in own}
        most = {stage: [0, 0] for stage in live}
        for step in own:
            now = live[step.stage]
            if isinstance(step, Action):
                if step.kind == ends:
                    now[:] = [max(0, count - 1) for count in now]
            elif not step.is_send:
                now[step.is_gradient] += 1
                peak = most[step.stage]
                peak[step.is_gradient] = max(peak[step.is_gradient], now[step.is_gradient])
        for stage, (activations, gradients) in most.items():
            found[stage] = Buffers(activations=activations, gradients=gradients)
    return tuple(found[stage] for stage in sorted(found))


@cache
def message_buffers(
    schedule: str, pp: int, num_microbatches: int, num_chunks: int
) -> tuple[Buffers, ...]:
    """Return the buffers of each stage under a schedule by its name; see `enough_for_buffers`."""
    return buffers(with_messages(schedule_actions(schedule, pp, num_microbatches, num_chunks)))


def enough_for_buffers(num_microbatches: int, pp: int) -> int:
    """Return micro-batches that need as many buffers: two rounds, where they come in rounds."""
    return num_microbatches if num_microbatches % pp else min(num_microbatches, 2 * pp)


def most_sent(pp: int, num_chunks: int) -> int:
    """Return the most gradients that a stage has sent and not freed; see `settled_sends`."""
    return pp if num_chunks > 1 else max(pp, 2 * pp - 2)


def settled_sends(lists: Sequence[Sequence[Step]]) -> list[dict[Message, tuple[Message, ...]]]:
    """Return per rank and send the earlier sends whose receivers are surely ready by then.

    Waiting for those cannot block, so their memory can be freed. What a rank knows of another is
    what that one had done when it sent the last message that was waited for here (Lamport 1978).
    """
    num_ranks = len(lists)
    place = [{step: index for index, step in enumerate(own)} for own in lists]
    last = max(step.stage for own in lists for step in own)
    known = [[-1] * num_ranks for _ in lists]
    told: dict[tuple[int, bool, int], list[int]] = {}
    waiting: list[dict[tuple[int, bool], deque[Message]]] = [{} for _ in lists]
    settled: list[dict[Message, tuple[Message, ...]]] = [{} for _ in lists]
    position = [0] * num_ranks

    def is_ready(message: Message, rank: int) -> bool:
        target = message.stage + (-1 if message.is_gradient else 1)
        end = Message(target, False, message.is_gradient, message.microbatch)
        peer = target % num_ranks
        return place[peer][end] <= known[rank][peer]

    is_moving = True
    while is_moving:
        is_moving = False
        for rank, own in enumerate(lists):
            while position[rank] < len(own):
                step = own[position[rank]]
                if isinstance(step, Action):
                    need = _need(step, last)
                    source = -1 if need is None else need[0] + (1 if need[1] else -1)
                    if need is not None and source % num_ranks != rank:
                        if need not in told:
                            break
                        known[rank] = list(map(max, known[rank], told[need]))
                known[rank][rank] = position[rank]
                if isinstance(step, Message) and step.is_send:
                    target = step.stage + (-1 if step.is_gradient else 1)
                    told[target, step.is_gradient, step.microbatch] = list(known[rank])
                    done = []
                    queues = waiting[rank]
                    for queue in queues.values():
                        while queue and is_ready(queue[0], rank):
                            done.append(queue.popleft())
                    settled[rank][step] = tuple(done)
                    queues.setdefault((step.stage, step.is_gradient), deque()).append(step)
                position[rank] += 1
                is_moving = True
    return settled
