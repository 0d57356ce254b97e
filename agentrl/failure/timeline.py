"""One neutral view of a trace, which every rule, feature and page reads: turns in the order they happened, with calls and what they gave.

It is the same for an episode of ours, which has the task and exact turns, and for somebody else's, which has what was said.
Whatever the trace holds, a view is bounded: long texts keep head and tail, and turns beyond `MAX_TURNS` are left out and counted.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.base.outages import outage_phrase
from agentrl.failure.trace import ImportedMessage, Trace
from agentrl.records import Episode, Message, ToolCall, Trajectory, Turn

MAX_TURNS = 400
MAX_CALLS = 64
"""Calls of one turn."""
MAX_CHARS = 16_000
"""Characters of one text."""

_ENDS_OTHERWISE = ("submitted", "answered", "failed", "")  # stop reasons that name no limit
_ERROR = re.compile(
    r"(?:error|exception|failed|failure|fatal)\b\s*[:!-]|traceback \(most recent|\W{0,4}\"?(?:is_?)?error\"?\s*:(?!\s*(?:null|false|\"\"))",
    re.IGNORECASE,
)
_SHORT, _NEAR = 200, 40  # characters of an answer that may report an outage and nothing else, and before it says so
_RAISED = re.compile(r"(?:\w+\.){0,8}\w{0,60}(?:Error|Exception|Timeout)(?::|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """A tool call and what it gave. `ok` None: nothing says how it ended."""

    tool: str
    arguments: Mapping[str, Any]
    arguments_text: str  # the arguments as text
    call_hash: int  # equal for calls that are alike in name and arguments, within one process
    output: str = ""
    ok: bool | None = None
    error: str = ""  # the type of the error that it failed with, if that is known

    @property
    def failed(self) -> bool:
        return self.ok is False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One turn of one agent."""

    trajectory: int
    turn: int
    agent: str
    text: str
    calls: tuple[TraceCall, ...] = ()
    malformed: tuple[str, ...] = ()  # what was said of calls that could not be read
    truncated: bool = False  # the completion ran out of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A trace as rules read it."""

    steps: tuple[TraceStep, ...]  # as they happened: a sub-agent's turns follow the one that called it
    question: str  # the last message of the prompt
    instructions: str  # the prompt's other messages: instructions
    offered_tools: Mapping[str, Mapping[str, Any]] | None  # tool -> schema; None: nothing says which there were
    files: bool = False  # whether the task gave files to look at
    stop_reason: str = ""  # of the main agent; empty: nothing says how it ended
    answer: str | None = None
    truth: str | None = None  # the right answer, where the task states it in a line
    tolerance: float = 0.0  # within which a number is the truth, absolute
    more_turns: int = 0  # that are not in `steps`
    _places: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)

    @property
    def last_step(self) -> TraceStep | None:
        """The last turn of the main agent."""
        return next((step for step in reversed(self.steps) if step.agent == self.steps[0].agent), None)

    @property
    def hit_limit(self) -> bool:
        """Whether a limit ended it."""
        return self.stop_reason not in _ENDS_OTHERWISE

    def step_index(self, trajectory: int, turn: int | None) -> int:
        """Where a turn stands in `steps`; -1 for the whole episode, and past all others for one that is not there."""
        return -1 if turn is None else self._places.get((trajectory, turn), len(self.steps))


_seen: tuple[Trace, Timeline] | None = None


def timeline_of(trace: Trace) -> Timeline:
    """The view of a trace; the newest is remembered, so that each of many rules may ask for it."""
    global _seen
    kept = _seen
    if kept is not None and kept[0] is trace:
        return kept[1]
    made = _of_episode(trace, trace.episode) if trace.episode is not None else _of_words(trace)
    _seen = (trace, made)
    return made


def truncate_middle(text: str, most: int = MAX_CHARS) -> str:
    """Text of about `most` characters: head and tail, with the cut marked."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"


def _of_episode(trace: Trace, episode: Episode) -> Timeline:
    task = trace.task
    assert task is not None, "an episode comes with its task"
    steps: list[TraceStep] = []
    total = sum(len(one.turns) for one in episode.trajectories)
    for index, number in _in_order(episode.trajectories):
        if len(steps) == MAX_TURNS:
            break
        one = episode.trajectories[index]
        steps.append(_step(index, number, one.agent, one.turns[number]))
    truth, tolerance = task.data.get("answer"), task.data.get("tolerance")
    return Timeline(
        steps=tuple(steps),
        question=truncate_middle(task.prompt[-1].content),
        instructions=truncate_middle("\n".join(message.content for message in task.prompt[:-1])),
        offered_tools=None if any(":" in name for name in task.tools) else {name: {} for name in task.tools},
        files=bool(task.files or task.binary_files),
        stop_reason=episode.stop_reason,
        answer=None if episode.answer is None else truncate_middle(episode.answer),
        truth=truncate_middle(str(truth)) if isinstance(truth, str | int | float) and not isinstance(truth, bool) else None,
        tolerance=_tolerance(tolerance),
        more_turns=total - len(steps),
        _places=_placed(steps),
    )


def _tolerance(value: object) -> float:
    """A task's tolerance; 0 if it is not a finite number from 0 on."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        return 0.0
    return float(value)


def _in_order(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, int]]:
    """(trajectory, turn) as they happened: what a turn began comes after it and before the turns that followed."""
    begun: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(trajectories):
        if one.parent is not None:
            begun.setdefault((one.parent.trajectory, one.parent.turn), []).append(index)
    waiting = [(index, 0) for index, one in reversed(list(enumerate(trajectories))) if one.parent is None]
    while waiting:
        index, number = waiting.pop()
        if number >= len(trajectories[index].turns):
            continue
        yield index, number
        waiting.append((index, number + 1))
        waiting += [(child, 0) for child in reversed(begun.get((index, number), []))]


def _step(index: int, number: int, agent: str, turn: Turn) -> TraceStep:
    made = turn.message.tool_calls
    answers = [None] * len(made) if not turn.tool_results else [*turn.tool_results[: len(made)], *[None] * len(made)]
    calls = [
        _call(call, "" if result is None else result.output, None if result is None else result.ok)
        for call, result in zip(made[:MAX_CALLS], answers, strict=False)
    ]
    unread = tuple(truncate_middle(result.output, 600) for result in turn.tool_results[len(made) :])  # answers to what could not be read
    return TraceStep(
        trajectory=index,
        turn=number,
        agent=agent,
        text=truncate_middle(turn.message.content),
        calls=tuple(calls),
        malformed=unread[:MAX_CALLS],
        truncated=turn.finish_reason != "stop",
    )


def _call(call: ToolCall, output: str, ok: bool | None, answer: ImportedMessage | None = None) -> TraceCall:
    try:
        text = json.dumps(call.arguments, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # no record of ours
        text = "(arguments that are no JSON)"
    error, same = "" if answer is None else answer.error[:200], hash((call.name, text))
    return TraceCall(
        tool=call.name[:256],
        arguments=call.arguments,
        arguments_text=truncate_middle(text),
        call_hash=same,
        output=truncate_middle(output),
        ok=ok,
        error=error,
    )


def _of_words(trace: Trace) -> Timeline:
    """The view of what was said. A message of the assistant begins a turn; tools answer the call they name, else the oldest without one."""
    prompt: list[Message] = []
    steps: list[TraceStep] = []
    answered: list[dict[int, ImportedMessage]] = []
    counted: dict[str, int] = {}
    numbers: dict[str, int] = {}
    ids: dict[str, tuple[int, int]] = {}
    spoken: list[ImportedMessage] = []
    more = 0
    for one in trace.spoken:
        role = one.message.role
        if role == "assistant":
            if len(steps) == MAX_TURNS:
                more += 1
                continue
            line = numbers.setdefault(one.agent, len(numbers))
            turn = counted[one.agent] = counted.get(one.agent, -1) + 1
            ids |= {name: (len(steps), place) for place, name in enumerate(one.call_ids[:MAX_CALLS])}
            steps.append(TraceStep(trajectory=line, turn=turn, agent=one.agent, text=truncate_middle(one.message.content)))
            answered.append({})
            spoken.append(one)
        elif role == "tool":
            step, place = ids.get(one.answers) or _next_open(spoken, answered)
            if step >= 0:
                answered[step].setdefault(place, one)
        elif not steps:
            prompt.append(one.message)
    for index, one in enumerate(spoken):
        calls = tuple(
            _call(call, "" if found is None else found.message.content, None if found is None else _went_well(found, call), found)
            for place, call in enumerate(one.message.tool_calls[:MAX_CALLS])
            for found in (answered[index].get(place),)
        )
        steps[index] = TraceStep(
            trajectory=steps[index].trajectory, turn=steps[index].turn, agent=one.agent, text=steps[index].text, calls=calls
        )
    final = steps[-1] if steps else None
    return Timeline(
        steps=tuple(steps),
        question=truncate_middle(prompt[-1].content) if prompt else "",
        instructions=truncate_middle("\n".join(message.content for message in prompt[:-1])),
        offered_tools=_schemas(trace.tools),
        answer=final.text if final is not None and not final.calls and final.text.strip() else None,
        more_turns=more,
        _places=_placed(steps),
    )


def _went_well(answer: ImportedMessage, call: ToolCall) -> bool:
    """Whether a tool's answer is none of an error; most formats do not mark them, so that its words must say."""
    words = answer.message.content.strip()
    if answer.failed or answer.error or _ERROR.match(words[:200]) or _RAISED.match(words[-400:].rpartition("\n")[2]):
        return False
    return len(words) > _SHORT or not (said := outage_phrase(words, call.arguments)) or words.find(said) > _NEAR


def _next_open(spoken: Sequence[ImportedMessage], answered: Sequence[Mapping[int, ImportedMessage]]) -> tuple[int, int]:
    """The oldest call of the newest turn that nothing has answered; (-1, 0) when there is none."""
    if not spoken:
        return -1, 0
    calls = len(spoken[-1].message.tool_calls[:MAX_CALLS])
    return next(((len(spoken) - 1, place) for place in range(calls) if place not in answered[-1]), (-1, 0))


def _schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]] | None:
    """Tool -> schema of its arguments, of OpenAI's function schemas and of bare ones."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools[:1000]:
        inner = tool.get("function")
        about = inner if isinstance(inner, Mapping) else tool
        parameters = about.get("parameters", about.get("input_schema"))
        if isinstance(name := about.get("name"), str):
            found[name] = parameters if isinstance(parameters, Mapping) else {}
    return found or None


def _placed(steps: Sequence[TraceStep]) -> dict[tuple[int, int], int]:
    return {(step.trajectory, step.turn): place for place, step in enumerate(steps)}
