"""Renders a trace as text for a terminal or a judge: printable, and bounded in length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.base import user_code
from agentrl.failure.timeline import Timeline, TraceStep, timeline_of, truncate_middle
from agentrl.failure.trace import Tag, Trace
from agentrl.failure.triage import deciding_tag_name

MAX_CHARS = 60_000
"""Characters of a rendered trace."""
_TEXT_CHARS = 4000  # of one text; of texts in the failing turn always
_LEAST_TEXT_CHARS = 160  # of one text in a trace with many
_LINE_CHARS = 300
_MARK = ">>"


def render_trace(trace: Trace) -> str:
    """The text of a trace: question, turns, outcome. `>>` marks the failing turn. Turns are counted from 1 (records count from 0)."""
    timeline = timeline_of(trace)
    tag = deciding_tag(trace.tags)
    failing = None if tag is None else (tag.trajectory, tag.turn)
    texts = sum(2 + 2 * len(step.calls) + len(step.malformed) for step in timeline.steps)
    room = min(_TEXT_CHARS, max(_LEAST_TEXT_CHARS, MAX_CHARS // (1 + texts)))
    several = any(step.trajectory != 0 for step in timeline.steps)
    lines = list(_header(trace, timeline))
    for step in timeline.steps:
        lines += _turn(step, marked=failing == (step.trajectory, step.turn), several=several, room=room)
    if timeline.more_turns:
        lines.append(f"... {timeline.more_turns} more turns are not shown ...")
    return truncate_middle("\n".join([*lines, *_footer(trace, timeline)]), MAX_CHARS)


def one_line(text: str, most: int = _LINE_CHARS) -> str:
    """A text as one printable line of at most `most` characters."""
    text = " ".join(user_code.printable(text, 4 * most).split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def deciding_tag(tags: Sequence[Tag]) -> Tag | None:
    """The tag under which a trace is counted."""
    return next((tag for tag in tags if tag.name == deciding_tag_name(tags)), None)


def _header(trace: Trace, timeline: Timeline) -> Iterator[str]:
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


def _turn(step: TraceStep, *, marked: bool, several: bool, room: int) -> Iterator[str]:
    most = _TEXT_CHARS if marked else room
    agent = f" of {one_line(step.agent, 40) or 'agent'} ({step.trajectory})" if several else ""
    yield ""
    yield f"{_MARK if marked else '  '} turn {step.turn + 1}{agent}{'  (cut: out of tokens)' if step.truncated else ''}"
    if step.text.strip():
        yield from _body(step.text, most)
    for call in step.calls:
        yield f"     call {one_line(call.tool, 80)}"
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
