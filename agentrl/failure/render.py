"""A trace as text: for a terminal, and for a judge. Whatever it holds, nothing of it can move a cursor, and its length is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.base import user_code
from agentrl.failure.timeline import Timeline, TraceStep, timeline_of, truncate_middle
from agentrl.failure.trace import Tag, Trace
from agentrl.failure.triage import deciding_tag_name

MAX_CHARS = 60_000
"""Characters of a whole trace."""
_OF_A_TEXT = 4000
_LEAST = 160  # of a text where there are many; the failing turn is always shown with `_OF_A_TEXT`
_OF_A_LINE = 300
_MARK = ">>"


def render_trace(trace: Trace) -> str:
    """A trace as it reads best: what was asked, every turn, the turn that failed marked with `>>`, what came of it.

    Turns are counted from 1 here, as wherever a person reads of them; records count from 0.
    """
    seen = timeline_of(trace)
    tag = deciding_tag(trace.tags)
    failing = None if tag is None else (tag.trajectory, tag.turn)
    texts = sum(2 + 2 * len(step.calls) + len(step.malformed) for step in seen.steps)
    room = min(_OF_A_TEXT, max(_LEAST, MAX_CHARS // (1 + texts)))  # for each text, so that no turn is cut out where there are many
    parts = [*_head(trace, seen), *(line for step in seen.steps for line in _turn(step, seen, failing, room))]
    if seen.more_turns:
        parts.append(f"... {seen.more_turns} more turns are not shown ...")
    return truncate_middle("\n".join([*parts, *_foot(trace, seen)]), MAX_CHARS)


def one_line(text: str, most: int = _OF_A_LINE) -> str:
    """One printable line."""
    words = " ".join(user_code.printable(text, 4 * most).split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def deciding_tag(tags: Sequence[Tag]) -> Tag | None:
    """The tag that a trace is counted under."""
    return next((tag for tag in tags if tag.name == deciding_tag_name(tags)), None)


def _head(trace: Trace, seen: Timeline) -> Iterator[str]:
    versions = ", ".join(map(str, trace.versions)) or "-"
    yield f"trace {one_line(trace.id)}  {trace.why}  phase {one_line(trace.phase) or '-'}  step {trace.step}  versions {versions}"
    if trace.task is not None:
        yield f"task  {one_line(trace.task.id)}  {one_line(trace.task.family)}  {trace.task.split}"
    origin = "  ".join(f"{one_line(key, 40)} {one_line(value, 80)}" for key, value in list(trace.origin.items())[:12])
    if origin:
        yield f"from  {origin}"
    for gap in trace.missing[:12]:
        yield f"missing  {one_line(gap)}"
    if seen.instructions.strip():
        yield from ("", "instructions", *_body(seen.instructions))
    yield from ("", "question", *_body(seen.question or "(none)"))


def _turn(step: TraceStep, seen: Timeline, failing: tuple[int, int | None] | None, room: int) -> Iterator[str]:
    marked = failing == (step.trajectory, step.turn)
    most = _OF_A_TEXT if marked else room
    several = any(other.trajectory != 0 for other in seen.steps)
    who = f" of {one_line(step.agent, 40) or 'agent'} ({step.trajectory})" if several else ""
    yield ""
    yield f"{_MARK if marked else '  '} turn {step.turn + 1}{who}{'  (cut: out of tokens)' if step.truncated else ''}"
    if step.text.strip():
        yield from _body(step.text, most)
    for call in step.calls:
        yield f"     call {one_line(call.tool, 80)}"
        single = next(iter(call.arguments.values())) if len(call.arguments) == 1 else None
        yield from _body(single if isinstance(single, str) else call.arguments_text, most, deep=True)
        ended = {True: "gave", False: "failed", None: "gave (nothing says how it ended)" if call.output else "was not answered"}[call.ok]
        yield f"     {ended}"
        yield from _body(call.output, most, deep=True) if call.output.strip() else ()
    for error in step.malformed:
        yield "     a call that could not be read"
        yield from _body(error, most, deep=True)
    if not step.text.strip() and not step.calls and not step.malformed:
        yield "     (nothing)"


def _foot(trace: Trace, seen: Timeline) -> Iterator[str]:
    yield ""
    yield f"ended   {one_line(seen.stop_reason) or 'not told'}"
    yield f"answer  {'(none)' if seen.answer is None else one_line(seen.answer)}"
    if seen.truth is not None:
        yield f"truth   {one_line(seen.truth)}"
    if trace.score is not None:
        value = "none" if trace.score.value is None else f"{trace.score.value:g}"
        yield f"score   {value}"
        for name, part in list(trace.score.parts.items())[:20]:
            yield f"        {one_line(name, 100)} {part:g}"
        for name, words in (("evidence", trace.score.evidence), ("reason", trace.score.reason)):
            if words.strip():
                yield from (name, *_body(words))
    for failure in trace.episode.failures[:8] if trace.episode is not None else ():
        yield f"fault   {failure.blame}: {one_line(failure.stage, 40)} {one_line(failure.kind, 80)}: {one_line(failure.message)}"
    for tag in trace.tags:
        where = "" if tag.turn is None else f" at turn {tag.turn + 1}" + (f" of trajectory {tag.trajectory}" if tag.trajectory else "")
        note = f"  {one_line(tag.note)}" if tag.note else ""
        yield f"tag     {one_line(tag.name, 60)}{where}  {tag.confidence:.0%} by {one_line(tag.by, 60)}{note}"


def _body(text: str, most: int = _OF_A_TEXT, *, deep: bool = False) -> Iterator[str]:
    indent = "       " if deep else "     "
    shown = user_code.printable(truncate_middle(text, most).expandtabs(4), 2 * most + 100)
    return (f"{indent}{row}" for row in shown.rstrip("\n").split("\n"))
