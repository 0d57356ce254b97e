"""A trace as lines: one conversation for each agent, and where one of them called another. The writers work from these.

Imported traces tell all that was said in one row, each message with its agent's name. There, what a sub-agent said stands before the
tool's answer that came of it. Where only assistants have names, all of them speak in one conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.failure.formats.values import UNPARSED, Gaps
from agentrl.failure.trace import CaptureReason, ImportedMessage, Trace
from agentrl.records import Message, Parent, Task, ToolResult, Trajectory, Turn, codec
from agentrl.records.fields import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationMessage:
    """One message of a line. `turn` is set where the policy said it in our own run, `result` where a tool answered there."""

    imported: ImportedMessage
    turn: Turn | None = None
    context: tuple[int, ...] = ()  # ids of all tokens before the completion of `turn`
    inherited: bool = False  # sampled in another episode
    number: int = 0  # of the turn in its trajectory
    result: ToolResult | None = None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What one agent was told and said, in order."""

    label: str  # unique among the lines of a trace
    name: str = ""  # of the agent, where the label is not it
    messages: list[ConversationMessage] = field(default_factory=list)
    parent: int | None = None  # the line that called it, or that it goes on from; None: it began with the trace
    answer: int | None = None  # place in the parent's `said` of the answer that came of it; None: there is none
    continues: Parent | None = None  # the turn that it goes on from, with a context of its own
    stop_reason: str = ""


def conversations_of(trace: Trace) -> tuple[Conversation, ...]:
    """The lines of a trace, the first agent's first; a line's parent stands before it."""
    if trace.task is not None and trace.episode is not None:
        return _own(trace.task, trace.episode.trajectories)
    if is_single_conversation(trace.spoken):
        return (Conversation(label="", messages=[ConversationMessage(imported=one) for one in trace.spoken]),)
    return _imported(trace.spoken)


def is_single_conversation(spoken: Sequence[ImportedMessage]) -> bool:
    """Whether all that was said is one conversation, whoever speaks in it."""
    return all(one.agent == "" for one in spoken if one.message.role != "assistant")


def build_trace(
    source: str, said: Sequence[ImportedMessage], origin: Mapping[str, str], gaps: Gaps, *, tools: Sequence[JsonObject] = ()
) -> Trace:
    """The trace of what was said elsewhere. Its id is a hash of its content and of the id that it had there."""
    if not tools and any(one.message.tool_calls for one in said):
        gaps.add("schemas of the tools")
    if broken := sum(UNPARSED in made.arguments for one in said for made in one.message.tool_calls):
        gaps.add(f"arguments of a call as an object: they are none, and their text is kept as {UNPARSED}", broken)
    content = codec.to_json([source, origin.get("id", ""), tools, said])
    id = f"{source}-{hashlib.sha256(content).hexdigest()[:16]}"
    return Trace(
        id=id,
        why=CaptureReason.IMPORTED,
        source=source,
        spoken=tuple(said),
        tools=tuple(tools),
        origin=dict(origin),
        missing=gaps.descriptions(),
    )  # fmt: skip


def unique_label(wanted: str, taken: dict[str, int]) -> str:
    """`wanted`, with a number where it is taken; adds it to `taken`, which keeps the next number of each name."""
    found = wanted
    while found in taken:
        taken[wanted] += 1
        found = f"{wanted or 'agent'} {taken[wanted]}"
    taken[found] = 1
    return found


def _imported(spoken: Sequence[ImportedMessage]) -> tuple[Conversation, ...]:
    made: dict[str, Conversation] = {}
    places: dict[str, int] = {}
    waiting: list[Conversation] = []  # lines nobody is known to have called, oldest first
    began: dict[str, int] = {}  # label -> place in `spoken` where it began
    heard: dict[str, int] = {}  # label -> place in `spoken` of its newest message
    for place, one in enumerate(spoken):
        line = made.get(one.agent)
        if line is None:
            line = made[one.agent] = Conversation(label=one.agent)
            places[one.agent], began[one.agent] = len(places), place
            if len(made) > 1:
                waiting.append(line)
        line.messages.append(ConversationMessage(imported=one))
        if one.message.role == "tool":
            while waiting and waiting[-1] is not line and began[waiting[-1].label] > heard.get(one.agent, place):
                called = waiting.pop()
                called.parent, called.answer = places[one.agent], len(line.messages) - 1
        heard[one.agent] = place
    for line in waiting:
        line.parent = 0
    return _parents_first(list(made.values()))


def _parents_first(found: list[Conversation]) -> tuple[Conversation, ...]:
    """A line may begin before the one that called it: it is put after, and parents are numbered anew."""
    order: list[int] = []
    children: dict[int | None, list[int]] = {}
    for number, line in enumerate(found):
        children.setdefault(line.parent, []).append(number)
    pending = list(reversed(children.get(None, [])))
    while pending:
        number = pending.pop()
        order.append(number)
        pending += reversed(children.get(number, []))
    places = {number: place for place, number in enumerate(order)}
    for line in found:
        line.parent = None if line.parent is None else places[line.parent]
    return tuple(found[number] for number in order)


def _own(task: Task, trajectories: Sequence[Trajectory]) -> tuple[Conversation, ...]:
    taken: dict[str, int] = {}
    made: list[Conversation] = []
    answers: dict[tuple[int, int, int], int] = {}  # trajectory, turn, call -> place of its answer
    for index, trajectory in enumerate(trajectories):
        line = Conversation(label=unique_label(trajectory.agent, taken), name=trajectory.agent, stop_reason=trajectory.stop_reason)
        parent = trajectory.parent
        if parent is not None:
            line.parent = parent.trajectory
            line.answer = None if parent.call is None else answers.get((parent.trajectory, parent.turn, parent.call))
            line.continues = parent if parent.call is None else None
        for message in trajectory.prompt or task.prompt:
            line.messages.append(ConversationMessage(imported=_spoken(message, line.label, f"call_{index}_p{len(line.messages)}")))
        context: tuple[int, ...] = ()
        for number, turn in enumerate(trajectory.turns):
            context += turn.prompt_ids
            one = _spoken(turn.message, line.label, f"call_{index}_{number}")
            inherited = number < len(trajectory.inherited)
            line.messages.append(ConversationMessage(imported=one, turn=turn, context=context, inherited=inherited, number=number))
            for call, result in enumerate(turn.tool_results):
                answers[index, number, call] = len(line.messages)
                id = one.call_ids[call] if call < len(one.call_ids) else ""
                told = ImportedMessage(
                    message=Message(role="tool", content=result.output), agent=line.label, answers=id, failed=not result.ok
                )
                line.messages.append(ConversationMessage(imported=told, result=result))
            context += turn.completion_ids
        made.append(line)
    return tuple(made)


def _spoken(message: Message, label: str, ids: str) -> ImportedMessage:
    return ImportedMessage(message=message, agent=label, call_ids=tuple(f"{ids}_{at}" for at in range(len(message.tool_calls))))
