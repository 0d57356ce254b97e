"""Splits a trace into conversations, one per agent, linked to the conversations that called them.

The modules that write ATIF and OpenAI documents use these conversations. An imported trace is a list of messages, each with the name of its
agent. A sub-agent's messages precede the tool result that they produced. If only assistant messages have an agent name, all messages form
one conversation.
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
    """One message.

    `turn` is set if agentrl's policy sampled the message, and `result` if the message is a tool result from an agentrl run.
    """

    imported: ImportedMessage
    turn: Turn | None = None
    context: tuple[int, ...] = ()  # ids of all tokens before the completion of `turn`
    inherited: bool = False  # sampled in a different episode
    number: int = 0  # number of the turn in its trajectory
    result: ToolResult | None = None


@dataclass(slots=True, kw_only=True)
class Conversation:
    """The messages of one agent, in order."""

    label: str  # unique in the trace
    name: str = ""  # name of the agent, if it differs from the label
    messages: list[ConversationMessage] = field(default_factory=list)
    parent: int | None = None  # index of the conversation that called it or that it continues; None means it started with the trace
    answer: int | None = None  # index of the parent's message that holds the result of this conversation; None means there is none
    continues: Parent | None = None  # the turn that it continues in a new context
    stop_reason: str = ""


def conversations_of(trace: Trace) -> tuple[Conversation, ...]:
    """Returns the conversations in a trace, the conversation of the first agent first.

    A conversation follows the conversation that called it.
    """
    if trace.task is not None and trace.episode is not None:
        return _from_episode(trace.task, trace.episode.trajectories)
    if is_single_conversation(trace.spoken):
        return (Conversation(label="", messages=[ConversationMessage(imported=utterance) for utterance in trace.spoken]),)
    return _from_messages(trace.spoken)


def is_single_conversation(spoken: Sequence[ImportedMessage]) -> bool:
    """Whether imported messages form one conversation, because only assistant messages have an agent name."""
    return all(utterance.agent == "" for utterance in spoken if utterance.message.role != "assistant")


def build_trace(
    source: str, messages: Sequence[ImportedMessage], origin: Mapping[str, str], gaps: Gaps, *, tools: Sequence[JsonObject] = ()
) -> Trace:
    """Builds a trace from imported messages. The id of the trace contains a hash of its content and of its id in the source."""
    if not tools and any(message.message.tool_calls for message in messages):
        gaps.add("schemas of the tools")
    if broken := sum(UNPARSED in call.arguments for message in messages for call in message.message.tool_calls):
        gaps.add(f"arguments of a call as an object: their text is kept as {UNPARSED}", broken)
    content = codec.to_json([source, origin.get("id", ""), tools, messages])
    return Trace(
        id=f"{source}-{hashlib.sha256(content).hexdigest()[:16]}",
        why=CaptureReason.IMPORTED,
        source=source,
        spoken=tuple(messages),
        tools=tuple(tools),
        origin=dict(origin),
        missing=gaps.descriptions(),
    )


def unique_label(wanted: str, taken: dict[str, int]) -> str:
    """Returns the label `wanted`, followed by a number if `wanted` is already in use.

    Adds the result to `taken`, which counts uses by label.
    """
    label = wanted
    while label in taken:
        taken[wanted] += 1
        label = f"{wanted or 'agent'} {taken[wanted]}"
    taken[label] = 1
    return label


def _from_messages(spoken: Sequence[ImportedMessage]) -> tuple[Conversation, ...]:
    conversations: dict[str, Conversation] = {}
    numbers: dict[str, int] = {}
    uncalled: list[Conversation] = []  # conversations without a known parent, the oldest first
    started: dict[str, int] = {}  # label -> index in `spoken` of its first message
    newest: dict[str, int] = {}  # label -> index in `spoken` of its newest message
    for index, one in enumerate(spoken):
        conversation = conversations.get(one.agent)
        if conversation is None:
            conversation = conversations[one.agent] = Conversation(label=one.agent)
            numbers[one.agent], started[one.agent] = len(numbers), index
            if len(conversations) > 1:
                uncalled.append(conversation)
        conversation.messages.append(ConversationMessage(imported=one))
        if one.message.role == "tool":
            while uncalled and uncalled[-1] is not conversation and started[uncalled[-1].label] > newest.get(one.agent, index):
                child = uncalled.pop()
                child.parent, child.answer = numbers[one.agent], len(conversation.messages) - 1
        newest[one.agent] = index
    for conversation in uncalled:
        conversation.parent = 0
    return _parents_first(list(conversations.values()))


def _parents_first(conversations: list[Conversation]) -> tuple[Conversation, ...]:
    """Orders conversations so that each one follows its parent, and updates the parent indices."""
    order: list[int] = []
    children: dict[int | None, list[int]] = {}
    for number, conversation in enumerate(conversations):
        children.setdefault(conversation.parent, []).append(number)
    pending = list(reversed(children.get(None, [])))
    while pending:
        number = pending.pop()
        order.append(number)
        pending += reversed(children.get(number, []))
    positions = {number: position for position, number in enumerate(order)}
    for conversation in conversations:
        conversation.parent = None if conversation.parent is None else positions[conversation.parent]
    return tuple(conversations[number] for number in order)


def _from_episode(task: Task, trajectories: Sequence[Trajectory]) -> tuple[Conversation, ...]:
    taken: dict[str, int] = {}
    conversations: list[Conversation] = []
    answers: dict[tuple[int, int, int], int] = {}  # (trajectory, turn, call) -> index of its result
    for index, trajectory in enumerate(trajectories):
        label, parent = unique_label(trajectory.agent, taken), trajectory.parent
        conversation = Conversation(label=label, name=trajectory.agent, stop_reason=trajectory.stop_reason)
        messages = conversation.messages
        if parent is not None:
            conversation.parent = parent.trajectory
            conversation.answer = None if parent.call is None else answers.get((parent.trajectory, parent.turn, parent.call))
            conversation.continues = parent if parent.call is None else None
        for message in trajectory.prompt or task.prompt:
            messages.append(ConversationMessage(imported=_with_call_ids(message, label, f"call_{index}_p{len(messages)}")))
        context: tuple[int, ...] = ()
        for number, turn in enumerate(trajectory.turns):
            context += turn.prompt_ids
            one = _with_call_ids(turn.message, label, f"call_{index}_{number}")
            inherited = number < len(trajectory.inherited)
            messages.append(ConversationMessage(imported=one, turn=turn, context=context, inherited=inherited, number=number))
            for call, result in enumerate(turn.tool_results):
                answers[index, number, call] = len(messages)
                id = one.call_ids[call] if call < len(one.call_ids) else ""
                answer = ImportedMessage(message=Message(role="tool", content=result.output), agent=label, answers=id, failed=not result.ok)
                messages.append(ConversationMessage(imported=answer, result=result))
            context += turn.completion_ids
        conversations.append(conversation)
    return tuple(conversations)


def _with_call_ids(message: Message, label: str, prefix: str) -> ImportedMessage:
    return ImportedMessage(message=message, agent=label, call_ids=tuple(f"{prefix}_{number}" for number in range(len(message.tool_calls))))
