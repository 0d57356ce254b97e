"""What makes two failures alike, as words: the tag, the tools called and how they ended, the lines of errors, how it all ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from agentrl.failure.answers import nonblank_lines
from agentrl.failure.timeline import Timeline, timeline_of
from agentrl.failure.trace import Trace
from agentrl.failure.triage import deciding_tag_name

MAX_FEATURES = 64
"""Features of one trace, the first ones."""
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+(?:\.\d+)?|'[^'\n]{0,80}'|\"[^\"\n]{0,80}\"|(?:/[\w.-]{1,80}){2,12}", re.IGNORECASE)
_WORD = re.compile(r"[a-z_]{3,30}")
_ERROR = re.compile(r"error|exception|traceback|fail|invalid|refused|denied|not found|timed out|no such", re.IGNORECASE)
_WEIGHTS = {"tag": 4, "turn": 1, "tool": 1, "next": 1, "error": 3, "word": 1, "ended": 2, "kind": 2, "why": 1}
_ERROR_LINES = 4
_WORDS = 24


def extract_features(trace: Trace) -> Counter[str]:
    """Feature -> weight before that of its rarity."""
    found: Counter[str] = Counter()
    for name, value in _named(trace, timeline_of(trace)):
        if len(found) == MAX_FEATURES:
            break
        found[f"{name}:{value}"] = _WEIGHTS[name]
    return found


def describe_trace(trace: Trace) -> str:
    """A trace in a few hundred characters, for an embedding."""
    seen = timeline_of(trace)
    tools = " ".join(call.tool[:40] for step in seen.steps[:12] for call in step.calls[:4])
    errors = " ".join(line[:160] for line in _error_lines(seen))
    parts = (deciding_tag_name(trace.tags), seen.stop_reason, tools, errors, seen.question[:240], (seen.answer or "no answer")[:80])
    return ". ".join(part for part in parts if part)


def _named(trace: Trace, seen: Timeline) -> Iterator[tuple[str, str]]:
    for tag in trace.tags[:2]:
        yield "tag", tag.name
    if trace.tags and trace.tags[0].turn is not None:
        yield "turn", str(min(trace.tags[0].turn, 9))
    if trace.task is not None:
        yield "kind", trace.task.kind[:60]
    yield "why", str(trace.why)
    yield "ended", seen.stop_reason or "unknown"
    for line in _error_lines(seen):
        yield "error", _CHANGING.sub("*", line.lower())[:160]
    before = "start"
    for step in seen.steps[:12]:
        for call in step.calls[:4]:
            ended = {True: "ok", False: "failed", None: "unknown"}[call.ok]
            yield "tool", f"{call.tool[:40]} {ended}"
            yield "next", f"{before} {call.tool[:40]}"
            before = call.tool[:40]
    words = _WORD.findall(_CHANGING.sub(" ", " ".join(_error_lines(seen)).lower()))
    for word in words[:_WORDS]:
        yield "word", word


def _error_lines(seen: Timeline) -> list[str]:
    """The lines that say what went wrong: the last of each output that failed, and those that look like an error."""
    found: list[str] = []
    for step in seen.steps:
        found += [error[:400] for error in step.malformed[:1]]
        for call in step.calls:
            said = nonblank_lines(call.output[-2000:])
            if (call.failed and said) or (said and call.ok is None and _ERROR.search(said[-1])):
                found.append(said[-1][:400])
            if len(found) >= _ERROR_LINES:
                return found[:_ERROR_LINES]
    return found
