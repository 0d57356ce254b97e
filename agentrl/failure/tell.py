"""Renders a trace as text for a terminal or a judge: printable, and bounded in length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl import usercode
from agentrl.failure.trace import Tag, Trace
from agentrl.failure.triage import name_of
from agentrl.failure.view import Timeline, TraceStep, clip, timeline_of

LONGEST = 60_000
"""Characters of a rendered trace."""
_TEXT_CHARS = 4000  # of one text; of texts in the failing turn always
_LEAST_TEXT_CHARS = 160  # of one text in a trace with many
_LINE_CHARS = 300
_MARK = ">>"


def told(trace: Trace) -> str:
    """The text of a trace: question, turns, outcome. `>>` marks the failing turn. Turns are counted from 1 (records count from 0)."""
    timeline = timeline_of(trace)
    tag = decisive(trace.tags)
    failing = None if tag is None else (tag.trajectory, tag.turn)
    texts = sum(2 + 2 * len(step.calls) + len(step.malformed) for step in timeline.steps)
    room = min(_TEXT_CHARS, max(_LEAST_TEXT_CHARS, LONGEST // (1 + texts)))
    several = any(step.trajectory != 0 for step in timeline.steps)
    lines = list(_header(trace, timeline))
    for step in timeline.steps:
        lines += _turn(step, marked=failing == (step.trajectory, step.turn), several=several, room=room)
    if timeline.more_turns:
        lines.append(f"... {timeline.more_turns} more turns are not shown ...")
    return clip("\n".join([*lines, *_footer(trace, timeline)]), LONGEST)


def line(text: str, most: int = _LINE_CHARS) -> str:
    """A text as one printable line of at most `most` characters."""
    text = " ".join(usercode.printable(text, 4 * most).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def decisive(tags: Sequence[Tag]) -> Tag | None:
    """The tag under which a trace is counted."""
    return next((tag for tag in tags if tag.name == name_of(tags)), None)


def _header(trace: Trace, timeline: Timeline) -> Iterator[str]:
    versions = ", ".join(map(str, trace.versions)) or "-"
    yield f"trace {line(trace.id)}  {trace.why}  phase {line(trace.phase) or '-'}  step {trace.step}  versions {versions}"
    if trace.task is not None:
        yield f"task  {line(trace.task.id)}  {line(trace.task.family)}  {trace.task.split}"
    if trace.origin:
        yield "from  " + "  ".join(f"{line(key, 40)} {line(value, 80)}" for key, value in list(trace.origin.items())[:12])
    for gap in trace.missing[:12]:
        yield f"missing  {line(gap)}"
    if timeline.instructions.strip():
        yield from ("", "instructions", *_body(timeline.instructions))
    yield from ("", "question", *_body(timeline.question or "(none)"))


def _turn(step: TraceStep, *, marked: bool, several: bool, room: int) -> Iterator[str]:
    most = _TEXT_CHARS if marked else room
    agent = f" of {line(step.agent, 40) or 'agent'} ({step.trajectory})" if several else ""
    yield ""
    yield f"{_MARK if marked else '  '} turn {step.turn + 1}{agent}{'  (cut: out of tokens)' if step.truncated else ''}"
    if step.text.strip():
        yield from _body(step.text, most)
    for call in step.calls:
        yield f"     call {line(call.tool, 80)}"
        single = next(iter(call.arguments.values())) if len(call.arguments) == 1 else None
        yield from _body(single if isinstance(single, str) else call.arguments_text, most, deep=True)
        unknown = "returned (success unknown)" if call.output else "no result"
        yield f"     {unknown if call.ok is None else 'returned' if call.ok else 'failed'}"
        yield from _body(call.output, most, deep=True) if call.output.strip() else ()
    for error in step.malformed:
        yield "     a call that could not be read"
        yield from _body(error, most, deep=True)
    if not step.text.strip() and not step.calls and not step.malformed:
        yield "     (nothing)"


def _footer(trace: Trace, timeline: Timeline) -> Iterator[str]:
    yield ""
    yield f"ended   {line(timeline.stop_reason) or 'unknown'}"
    yield f"answer  {'(none)' if timeline.answer is None else line(timeline.answer)}"
    if timeline.truth is not None:
        yield f"truth   {line(timeline.truth)}"
    if trace.score is not None:
        yield f"score   {'none' if trace.score.value is None else f'{trace.score.value:g}'}"
        for name, part in list(trace.score.parts.items())[:20]:
            yield f"        {line(name, 100)} {part:g}"
        for name, text in (("evidence", trace.score.evidence), ("reason", trace.score.reason)):
            if text.strip():
                yield from (name, *_body(text))
    for failure in trace.episode.failures[:8] if trace.episode is not None else ():
        yield f"fault   {failure.blame}: {line(failure.stage, 40)} {line(failure.kind, 80)}: {line(failure.message)}"
    for tag in trace.tags:
        where = "" if tag.turn is None else f" at turn {tag.turn + 1}" + (f" of trajectory {tag.trajectory}" if tag.trajectory else "")
        yield f"tag     {line(tag.name, 60)}{where}  {tag.confidence:.0%} by {line(tag.by, 60)}{f'  {line(tag.note)}' if tag.note else ''}"


def _body(text: str, most: int = _TEXT_CHARS, *, deep: bool = False) -> Iterator[str]:
    indent = "       " if deep else "     "
    shown = usercode.printable(clip(text, most).expandtabs(4), 2 * most + 100)
    return (f"{indent}{row}" for row in shown.rstrip("\n").split("\n"))
