"""Builds the timeline of a trace: its turns in chronological order, with their tool calls and outputs. Renders a trace as text.

Rules, features and pages use timelines, which have the same form for agentrl's episodes and for imported conversations. The size of a
timeline is bounded: only the head and tail of a long string are kept, and turns beyond `MAX_TURNS` are only counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.base import user_code
from agentrl.base.outages import outage_phrase
from agentrl.failure.trace import ImportedMessage, Trace, deciding_tag
from agentrl.records import Episode, Message, ToolCall, Trajectory, Turn
from agentrl.records.chat import user_message

MAX_TURNS = 400
MAX_CALLS = 64
"""Maximum number of calls per turn."""
MAX_CHARS = 16_000
"""Maximum characters of one string."""
MAX_RENDERED_CHARS = 60_000
"""Maximum characters of a rendered trace."""
_TEXT_CHARS = 4000  # maximum characters of one string in a rendered trace; always allowed in the failing turn
_LEAST_TEXT_CHARS = 160  # smallest limit on one string, in a rendered trace that contains many strings
_LINE_CHARS = 300

_NOT_LIMITS = ("submitted", "answered", "failed", "terminated", "truncated", "forfeited", "")  # stop reasons other than limits
_ERROR = re.compile(
    r"(?:error|exception|failed|failure|fatal)\b\s*[:!-]|traceback \(most recent|\W{0,4}\"?(?:is_?)?error\"?\s*:(?!\s*(?:null|false|\"\"))",
    re.IGNORECASE,
)
_RAISED = re.compile(r"(?:\w+\.){0,8}\w{0,60}(?:Error|Exception|Timeout)(?::|$)")
_SHORT_OUTPUT, _OUTAGE_WITHIN = 200, 40  # an output of at most 200 characters is an outage if it names one within the first 40


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """A tool call with its output."""

    tool: str
    arguments: Mapping[str, Any]
    arguments_text: str
    call_hash: int  # equal for calls with the same name and arguments, within one process
    output: str = ""
    ok: bool | None = None  # None means unknown
    error: str = ""  # type of the error, if known

    @property
    def failed(self) -> bool:
        """Whether the call is known to have failed."""
        return self.ok is False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One turn of one agent."""

    trajectory: int
    turn: int
    agent: str
    text: str
    calls: tuple[TraceCall, ...] = ()
    malformed: tuple[str, ...] = ()  # error messages about calls that could not be parsed
    truncated: bool = False  # the completion ran out of tokens
    reply: str = ""  # the user message that answered a turn without calls, such as the observation after a text action


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A trace in chronological order."""

    steps: tuple[TraceStep, ...]  # a sub-agent's turns follow the turn that called it
    question: str  # last message of the prompt
    instructions: str  # the prompt's other messages
    offered_tools: Mapping[str, Mapping[str, Any]] | None  # tool -> schema; None means unknown
    files: bool = False  # whether the task has files
    stop_reason: str = ""  # stop reason of the main agent; empty means unknown
    answer: str | None = None
    truth: str | None = None  # the correct answer, if it is one string or number
    tolerance: float = 0.0  # absolute tolerance of a numeric truth
    more_turns: int = 0  # turns that `steps` omits
    _indices: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def last_step(self) -> TraceStep | None:
        """The last turn of the main agent; None if there are no turns."""
        return next((step for step in reversed(self.steps) if step.agent == self.steps[0].agent), None)

    @property
    def hit_limit(self) -> bool:
        """Whether the episode stopped because it reached a limit."""
        return self.stop_reason not in _NOT_LIMITS

    def step_index(self, trajectory: int, turn: int | None) -> int:
        """Returns the index of a turn in `steps`; -1 if `turn` is None (the episode as a whole), `len(steps)` if the turn is unknown."""
        return -1 if turn is None else self._indices.get((trajectory, turn), len(self.steps))


_newest: tuple[Trace, Timeline] | None = None


def timeline_of(trace: Trace) -> Timeline:
    """Returns the timeline of a trace. The most recent timeline is cached, because every rule reads it."""
    global _newest
    cached = _newest
    if cached is not None and cached[0] is trace:
        return cached[1]
    timeline = _from_episode(trace, trace.episode) if trace.episode is not None else _from_messages(trace)
    _newest = (trace, timeline)
    return timeline


def truncate_middle(text: str, most: int = MAX_CHARS) -> str:
    """Shortens text to about `most` characters: its head and tail, with a mark where the middle was removed."""
    return user_code.clip(text, most)


def render_trace(trace: Trace) -> str:
    """Returns a trace as text: question, turns, outcome.

    `>>` marks the failing turn. Turns are counted from 1, unlike in records, which count from 0.
    """
    timeline = timeline_of(trace)
    tag = deciding_tag(trace.tags)
    failing = None if tag is None else (tag.trajectory, tag.turn)
    texts = sum(2 + 2 * len(step.calls) + len(step.malformed) for step in timeline.steps)
    room = min(_TEXT_CHARS, max(_LEAST_TEXT_CHARS, MAX_RENDERED_CHARS // (1 + texts)))
    several = any(step.trajectory != 0 for step in timeline.steps)
    lines = list(_rendered_header(trace, timeline))
    for step in timeline.steps:
        lines += _rendered_turn(step, marked=failing == (step.trajectory, step.turn), several=several, room=room)
    if timeline.more_turns:
        lines.append(f"... {timeline.more_turns} more turns are not shown ...")
    return truncate_middle("\n".join([*lines, *_rendered_footer(trace, timeline)]), MAX_RENDERED_CHARS)


def one_line(text: str, most: int = _LINE_CHARS) -> str:
    """Returns text as one printable line of at most `most` characters."""
    text = " ".join(user_code.printable(text, 4 * most).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _from_episode(trace: Trace, episode: Episode) -> Timeline:
    task = trace.task
    assert task is not None, "a trace with an episode has a task"
    steps: list[TraceStep] = []
    for index, number in _in_order(episode.trajectories):
        if len(steps) == MAX_TURNS:
            break
        trajectory = episode.trajectories[index]
        steps.append(_step(index, number, trajectory.agent, trajectory.turns[number]))
    prompt = (task.environment is not None and episode.trajectories[0].prompt) or task.prompt
    truth, tolerance = task.data.get("answer"), task.data.get("tolerance")
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < math.inf:
        tolerance = 0.0
    return Timeline(
        steps=tuple(steps),
        question=truncate_middle(prompt[-1].content if prompt else task.question),
        instructions=truncate_middle("\n".join(message.content for message in prompt[:-1])),
        offered_tools=None
        if task.environment is not None or any(":" in name for name in task.tools)
        else {name: {} for name in task.tools},
        files=bool(task.files or task.binary_files),
        stop_reason=episode.stop_reason,
        answer=None if episode.answer is None else truncate_middle(episode.answer),
        truth=truncate_middle(str(truth)) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None,
        tolerance=float(tolerance),
        more_turns=sum(len(trajectory.turns) for trajectory in episode.trajectories) - len(steps),
        _indices=_indices(steps),
    )


def _in_order(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, int]]:
    """Yields (trajectory, turn) in chronological order. A sub-agent's turns follow the turn that called the sub-agent."""
    children: dict[tuple[int, int], list[int]] = {}
    for index, trajectory in enumerate(trajectories):
        if trajectory.parent is not None:
            children.setdefault((trajectory.parent.trajectory, trajectory.parent.turn), []).append(index)
    stack = [(index, 0) for index, trajectory in reversed(list(enumerate(trajectories))) if trajectory.parent is None]
    while stack:
        index, number = stack.pop()
        if number >= len(trajectories[index].turns):
            continue
        yield index, number
        stack.append((index, number + 1))
        stack += [(child, 0) for child in reversed(children.get((index, number), []))]


def _step(index: int, number: int, agent: str, turn: Turn) -> TraceStep:
    parsed, results, reply = turn.message.tool_calls, turn.tool_results, user_message(turn.message, turn.tool_results)
    calls = []
    for position, call in enumerate(parsed[:MAX_CALLS]):
        result = results[position] if position < len(results) else None
        calls.append(_call(call, "" if result is None else result.output, None if result is None else result.ok))
    unparsed = results[len(parsed) :] if reply is None else ()  # results of calls that could not be parsed
    malformed = tuple(truncate_middle(result.output, 600) for result in unparsed)
    return TraceStep(
        trajectory=index,
        turn=number,
        agent=agent,
        text=truncate_middle(turn.message.content),
        calls=tuple(calls),
        malformed=malformed[:MAX_CALLS],
        truncated=turn.finish_reason != "stop",
        reply=truncate_middle(reply or ""),
    )


def _call(call: ToolCall, output: str, ok: bool | None, error: str = "") -> TraceCall:
    try:
        text = json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # the trace does not come from agentrl
        text = "(arguments that are not JSON)"
    return TraceCall(
        tool=call.name[:256],
        arguments=call.arguments,
        arguments_text=truncate_middle(text),
        call_hash=hash((call.name, text)),
        output=truncate_middle(output),
        ok=ok,
        error=error[:200],
    )


def _from_messages(trace: Trace) -> Timeline:
    """Returns the timeline of an imported conversation.

    Each assistant message is a turn. A tool message is assigned to the call that it names or, if it names none, to the oldest unanswered
    call of the newest turn.
    """
    prompt: list[Message] = []
    steps: list[TraceStep] = []
    replies: list[ImportedMessage] = []  # for each step, the assistant's message
    answers: list[dict[int, ImportedMessage]] = []  # for each step: call -> the tool's result
    turn_counts: dict[str, int] = {}
    trajectories: dict[str, int] = {}
    calls_by_id: dict[str, tuple[int, int]] = {}
    more_turns = 0
    for utterance in trace.spoken:
        role = utterance.message.role
        if role == "assistant" and len(steps) == MAX_TURNS:
            more_turns += 1
        elif role == "assistant":
            trajectory = trajectories.setdefault(utterance.agent, len(trajectories))
            turn = turn_counts[utterance.agent] = turn_counts.get(utterance.agent, -1) + 1
            calls_by_id |= {name: (len(steps), number) for number, name in enumerate(utterance.call_ids[:MAX_CALLS])}
            steps.append(
                TraceStep(trajectory=trajectory, turn=turn, agent=utterance.agent, text=truncate_middle(utterance.message.content))
            )
            answers.append({})
            replies.append(utterance)
        elif role == "tool":
            step, number = calls_by_id.get(utterance.answers) or _next_unanswered(replies, answers)
            if step >= 0:
                answers[step].setdefault(number, utterance)
        elif not steps:
            prompt.append(utterance.message)
    steps = [
        replace(step, calls=tuple(_answered(call, results.get(n)) for n, call in enumerate(reply.message.tool_calls[:MAX_CALLS])))
        for step, reply, results in zip(steps, replies, answers, strict=True)
    ]
    final = steps[-1] if steps else None
    return Timeline(
        steps=tuple(steps),
        question=truncate_middle(prompt[-1].content) if prompt else "",
        instructions=truncate_middle("\n".join(message.content for message in prompt[:-1])),
        offered_tools=_schemas(trace.tools),
        answer=final.text if final is not None and not final.calls and final.text.strip() else None,
        more_turns=more_turns,
        _indices=_indices(steps),
    )


def _next_unanswered(replies: Sequence[ImportedMessage], answers: Sequence[Mapping[int, ImportedMessage]]) -> tuple[int, int]:
    """Returns the indices (step, call) of the oldest unanswered call in the newest turn; (-1, 0) if there is no such call."""
    calls = len(replies[-1].message.tool_calls[:MAX_CALLS]) if replies else 0
    return next(((len(replies) - 1, number) for number in range(calls) if number not in answers[-1]), (-1, 0))


def _answered(call: ToolCall, answer: ImportedMessage | None) -> TraceCall:
    if answer is None:
        return _call(call, "", None)
    return _call(call, answer.message.content, _succeeded(answer, call), answer.error)


def _succeeded(answer: ImportedMessage, call: ToolCall) -> bool:
    """Whether a tool's result reports no error. Most formats do not mark errors, so the text is searched for error messages."""
    text = answer.message.content.strip()
    if answer.failed or answer.error or _ERROR.match(text[:200]) or _RAISED.match(text[-400:].rpartition("\n")[2]):
        return False
    return len(text) > _SHORT_OUTPUT or not (outage := outage_phrase(text, call.arguments)) or text.find(outage) > _OUTAGE_WITHIN


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]] | None:
    """Returns a mapping tool -> schema of arguments, from OpenAI function schemas with or without a wrapper; None if no tool has a name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools[:1000]:
        inner = tool.get("function")
        function = inner if isinstance(inner, Mapping) else tool
        parameters = function.get("parameters", function.get("input_schema"))
        if isinstance(name := function.get("name"), str):
            schemas[name] = parameters if isinstance(parameters, Mapping) else {}
    return schemas or None


def _indices(steps: Sequence[TraceStep]) -> dict[tuple[int, int], int]:
    return {(step.trajectory, step.turn): index for index, step in enumerate(steps)}


def _rendered_header(trace: Trace, timeline: Timeline) -> Iterator[str]:
    versions = ", ".join(map(str, trace.versions)) or "-"
    yield f"trace {one_line(trace.id)}  {trace.why}  phase {one_line(trace.phase) or '-'}  step {trace.step}  versions {versions}"
    if trace.task is not None:
        yield f"task  {one_line(trace.task.id)}  {one_line(trace.task.family)}  {trace.task.split}"
    if trace.origin:
        yield "from  " + "  ".join(f"{one_line(key, 40)} {one_line(value, 80)}" for key, value in list(trace.origin.items())[:12])
    for gap in trace.missing[:12]:
        yield f"missing  {one_line(gap)}"
    if timeline.instructions.strip():
        yield from ("", "instructions", *_body(timeline.instructions))
    yield from ("", "question", *_body(timeline.question or "(none)"))


def _rendered_turn(step: TraceStep, *, marked: bool, several: bool, room: int) -> Iterator[str]:
    most = _TEXT_CHARS if marked else room
    agent = f" of {one_line(step.agent, 40) or 'agent'} ({step.trajectory})" if several else ""
    yield ""
    yield f"{'>>' if marked else '  '} turn {step.turn + 1}{agent}{'  (cut: out of tokens)' if step.truncated else ''}"
    if step.text.strip():
        yield from _body(step.text, most)
    for call in step.calls:
        yield f"     call {one_line(call.tool, 80)}"
        single = next(iter(call.arguments.values())) if len(call.arguments) == 1 else None
        yield from _body(single if isinstance(single, str) else call.arguments_text, most, deep=True)
        unknown = "returned (success unknown)" if call.output else "no result"
        yield f"     {unknown if call.ok is None else 'returned' if call.ok else 'failed'}"
        yield from _body(call.output, most, deep=True) if call.output.strip() else ()
    if step.reply.strip():
        yield "     returned"
        yield from _body(step.reply, most, deep=True)
    for error in step.malformed:
        yield "     a call that could not be read"
        yield from _body(error, most, deep=True)
    if not step.text.strip() and not step.calls and not step.malformed:
        yield "     (nothing)"


def _rendered_footer(trace: Trace, timeline: Timeline) -> Iterator[str]:
    yield ""
    yield f"ended   {one_line(timeline.stop_reason) or 'unknown'}"
    yield f"answer  {'(none)' if timeline.answer is None else one_line(timeline.answer)}"
    if timeline.truth is not None:
        yield f"truth   {one_line(timeline.truth)}"
    if trace.score is not None:
        yield f"score   {'none' if trace.score.value is None else f'{trace.score.value:g}'}"
        for name, part in list(trace.score.parts.items())[:20]:
            yield f"        {one_line(name, 100)} {part:g}"
        for name, text in (("evidence", trace.score.evidence), ("reason", trace.score.reason)):
            if text.strip():
                yield from (name, *_body(text))
    for failure in trace.episode.failures[:8] if trace.episode is not None else ():
        yield f"fault   {failure.blame}: {one_line(failure.stage, 40)} {one_line(failure.kind, 80)}: {one_line(failure.message)}"
    for tag in trace.tags:
        where = "" if tag.turn is None else f" at turn {tag.turn + 1}" + (f" of trajectory {tag.trajectory}" if tag.trajectory else "")
        note = f"  {one_line(tag.note)}" if tag.note else ""
        yield f"tag     {one_line(tag.name, 60)}{where}  {tag.confidence:.0%} by {one_line(tag.by, 60)}{note}"


def _body(text: str, most: int = _TEXT_CHARS, *, deep: bool = False) -> Iterator[str]:
    indent = "       " if deep else "     "
    shown = user_code.printable(truncate_middle(text, most).expandtabs(4), 2 * most + 100)
    return (f"{indent}{row}" for row in shown.rstrip("\n").split("\n"))
