"""A trace as text: for a terminal, and for a judge. Whatever it holds, nothing of it can move a cursor, and its length is bounded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentrl.base import user_code
from agentrl.failure.timeline import Step, View, clip, view
from agentrl.failure.trace import Tag, Trace
from agentrl.failure.triage import name_of

LONGEST = 60_000
"""Characters of a whole trace."""
_OF_A_TEXT = 4000
_LEAST = 160  # of a text where there are many; the failing turn is always shown with `_OF_A_TEXT`
_OF_A_LINE = 300
_MARK = ">>"


def told(trace: Trace) -> str:
    """A trace as it reads best: what was asked, every turn, the turn that failed marked with `>>`, what came of it.

    Turns are counted from 1 here, as wherever a person reads of them; records count from 0.
    """
    seen = view(trace)
    tag = decisive(trace.tags)
    failing = None if tag is None else (tag.trajectory, tag.turn)
    texts = sum(2 + 2 * len(step.calls) + len(step.malformed) for step in seen.steps)
    room = min(_OF_A_TEXT, max(_LEAST, LONGEST // (1 + texts)))  # for each text, so that no turn is cut out where there are many
    parts = [*_head(trace, seen), *(line for step in seen.steps for line in _turn(step, seen, failing, room))]
    if seen.more_turns:
        parts.append(f"... {seen.more_turns} more turns are not shown ...")
    return clip("\n".join([*parts, *_foot(trace, seen)]), LONGEST)


def line(text: str, most: int = _OF_A_LINE) -> str:
    """One printable line."""
    words = " ".join(user_code.printable(text, 4 * most).split())
    return words if len(words) <= most else f"{words[: most - 3]}..."


def decisive(tags: Sequence[Tag]) -> Tag | None:
    """The tag that a trace is counted under."""
    return next((tag for tag in tags if tag.name == name_of(tags)), None)


def _head(trace: Trace, seen: View) -> Iterator[str]:
    versions = ", ".join(map(str, trace.versions)) or "-"
    yield f"trace {line(trace.id)}  {trace.why}  phase {line(trace.phase) or '-'}  step {trace.step}  versions {versions}"
    if trace.task is not None:
        yield f"task  {line(trace.task.id)}  {line(trace.task.family)}  {trace.task.split}"
    origin = "  ".join(f"{line(key, 40)} {line(value, 80)}" for key, value in list(trace.origin.items())[:12])
    if origin:
        yield f"from  {origin}"
    for gap in trace.missing[:12]:
        yield f"missing  {line(gap)}"
    if seen.told.strip():
        yield from ("", "instructions", *_body(seen.told))
    yield from ("", "question", *_body(seen.asked or "(none)"))


def _turn(step: Step, seen: View, failing: tuple[int, int | None] | None, room: int) -> Iterator[str]:
    marked = failing == (step.trajectory, step.turn)
    most = _OF_A_TEXT if marked else room
    several = any(other.trajectory != 0 for other in seen.steps)
    who = f" of {line(step.agent, 40) or 'agent'} ({step.trajectory})" if several else ""
    yield ""
    yield f"{_MARK if marked else '  '} turn {step.turn + 1}{who}{'  (cut: out of tokens)' if step.cut else ''}"
    if step.said.strip():
        yield from _body(step.said, most)
    for call in step.calls:
        yield f"     call {line(call.tool, 80)}"
        single = next(iter(call.arguments.values())) if len(call.arguments) == 1 else None
        yield from _body(single if isinstance(single, str) else call.shown, most, deep=True)
        ended = {True: "gave", False: "failed", None: "gave (nothing says how it ended)" if call.output else "was not answered"}[call.ok]
        yield f"     {ended}"
        yield from _body(call.output, most, deep=True) if call.output.strip() else ()
    for error in step.malformed:
        yield "     a call that could not be read"
        yield from _body(error, most, deep=True)
    if not step.said.strip() and not step.calls and not step.malformed:
        yield "     (nothing)"


def _foot(trace: Trace, seen: View) -> Iterator[str]:
    yield ""
    yield f"ended   {line(seen.stop_reason) or 'not told'}"
    yield f"answer  {'(none)' if seen.answer is None else line(seen.answer)}"
    if seen.truth is not None:
        yield f"truth   {line(seen.truth)}"
    if trace.score is not None:
        value = "none" if trace.score.value is None else f"{trace.score.value:g}"
        yield f"score   {value}"
        for name, part in list(trace.score.parts.items())[:20]:
            yield f"        {line(name, 100)} {part:g}"
        for name, words in (("evidence", trace.score.evidence), ("reason", trace.score.reason)):
            if words.strip():
                yield from (name, *_body(words))
    for failure in trace.episode.failures[:8] if trace.episode is not None else ():
        yield f"fault   {failure.blame}: {line(failure.stage, 40)} {line(failure.kind, 80)}: {line(failure.message)}"
    for tag in trace.tags:
        where = "" if tag.turn is None else f" at turn {tag.turn + 1}" + (f" of trajectory {tag.trajectory}" if tag.trajectory else "")
        yield f"tag     {line(tag.name, 60)}{where}  {tag.confidence:.0%} by {line(tag.by, 60)}{f'  {line(tag.note)}' if tag.note else ''}"


def _body(text: str, most: int = _OF_A_TEXT, *, deep: bool = False) -> Iterator[str]:
    indent = "       " if deep else "     "
    shown = user_code.printable(clip(text, most).expandtabs(4), 2 * most + 100)
    return (f"{indent}{row}" for row in shown.rstrip("\n").split("\n"))
