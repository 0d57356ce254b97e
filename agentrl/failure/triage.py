"""Triage: tags the first error in a trace, with its turn and a confidence. Rules are applied first, then a judge.

A rule receives a trace and returns a `Tag` or None. Among confident tags, the tag at the earliest turn wins, because later errors are
mostly consequences of the first. A tag for the whole episode (`turn` None) precedes all others. If no rule is confident, a judge may be
called. If the judge abstains, the tag is `wrong_answer` with low confidence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.base import user_code
from agentrl.errors import PluginError, UserError
from agentrl.failure.timeline import render_trace, timeline_of
from agentrl.failure.trace import BY_JUDGE, BY_PERSON, Tag, Trace
from agentrl.plugins.references import resolve

TriageRule = Callable[[Trace], Tag | None]

TAXONOMY = {
    "infrastructure": "a machine, server or network failed; not caused by the policy",
    "task_fault": "the task is broken; not caused by the policy",
    "reward_hack": "an attempt to get a score that the work did not earn",
    "format": "a call or answer that could not be parsed, though its content may be right",
    "wrong_tool": "a tool that does not exist, or the wrong tool for the step",
    "bad_arguments": "the right tool with arguments that it rejects or fails on",
    "misread_output": "a tool returned the answer, and the agent submitted another",
    "looped": "the same step again and again with the same outcome",
    "gave_up": "no attempt, or an attempt that was abandoned",
    "ignored_instruction": "the agent disregarded something that the task requires or forbids",
    "budget": "turns, tokens or time ran out",
    "wrong_answer": "a wrong answer for which no rule or judge gives a reason",
}
"""Tag -> description, for the tags of the shipped rules. User-supplied rules may return other tags."""

UNCLASSIFIED = "wrong_answer"
MIN_CONFIDENCE = 0.5
"""Minimum confidence at which a rule's tag is accepted. If all tags are below it, a judge may be called."""
MAX_TAGS = 8
"""Maximum number of tags per trace."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_MAX_NOTE = 500


class TriageJudge(Protocol):
    """A judge that reads a trace as text and tags the failure."""

    @property
    def name(self) -> str:
        """The judge's name, which its tags contain as `judge:NAME`."""
        ...

    async def __call__(self, text: str) -> Tag | None:
        """Returns a tag for a trace, or None to abstain. `text` is the trace as rendered by `render_trace`, and is untrusted."""
        ...


def load_rules(references: Sequence[str] = ()) -> tuple[TriageRule, ...]:
    """Returns the user-supplied rules, followed by the shipped rules. A reference names a rule or a list of rules.

    Raises `PluginError` if a reference does not resolve, or if a rule is asynchronous or not callable.
    """
    from agentrl.failure.rules import RULES

    rules: list[TriageRule] = []
    for reference in references:
        resolved = resolve(reference)
        for rule in resolved if isinstance(resolved, list | tuple) else [resolved]:
            if not callable(rule) or inspect.iscoroutinefunction(rule):
                raise PluginError(f"triage rule {reference!r} is not a plain function", fix="write def rule(trace: Trace) -> Tag | None")
            rules.append(rule)
    return (*rules, *RULES)


def tag_by_rules(trace: Trace, rules: Sequence[TriageRule]) -> tuple[Tag, ...]:
    """Returns the tags that rules assign to a trace: confident tags first, ordered by turn. The result is never empty.

    If no rule is confident, the first tag is `wrong_answer`. The result has at most `MAX_TAGS` tags. If a rule raises an exception, the
    exception is logged and the rule adds no tag.
    """
    timeline = timeline_of(trace)
    tags: list[tuple[tuple[bool, int, int], Tag]] = []
    for number, rule in enumerate(rules):
        tag = _apply(rule, trace)
        if tag is not None:
            tags.append(((tag.confidence < MIN_CONFIDENCE, timeline.step_index(tag.trajectory, tag.turn), number), tag))
    tags.sort(key=lambda item: item[0])
    chosen = [tag for _, tag in tags[:MAX_TAGS]]
    if not chosen or chosen[0].confidence < MIN_CONFIDENCE:
        chosen.insert(
            0, Tag(name=UNCLASSIFIED, by="rules", confidence=0.3 if trace.score is not None else 0.2, note="no rule is confident")
        )
    return tuple(chosen[:MAX_TAGS])


async def tag_by_judge(trace: Trace, rules: Sequence[TriageRule], judge: TriageJudge, *, timeout_s: float = 120.0) -> tuple[Tag, ...]:
    """Returns the tags that rules assign to a trace, preceded by the judge's tag if no rule is confident.

    If the judge fails, times out or returns anything other than a tag or None, the problem is logged and the judge counts as abstaining. If
    the trace does not contain the turn that the judge's tag names, the turn is removed from the tag.
    """
    tags = tag_by_rules(trace, rules)
    if tags[0].name != UNCLASSIFIED:
        return tags
    answer: object = None
    with user_code.logging_faults(f"triage judge {judge.name}"):
        text = render_trace(replace(trace, tags=()))  # without tags, so that the judge is not influenced
        answer = await user_code.call_user_code(lambda: judge(text), what=f"triage judge {judge.name}", timeout_s=timeout_s)
    if (tag := _valid_tag(answer)) is None:
        return tags
    tag = replace(tag, by=f"{BY_JUDGE}{judge.name}")
    if not any((step.trajectory, step.turn) == (tag.trajectory, tag.turn) for step in timeline_of(trace).steps):
        tag = replace(tag, trajectory=0, turn=None)
    return (tag, *tags)[:MAX_TAGS]


def merge_tags(new: Sequence[Tag], before: Sequence[Tag]) -> tuple[Tag, ...]:
    """Returns the new tags of a trace merged with its earlier tags.

    `new` must not be empty. Tags set by a person are kept. Tags set by a judge are kept if no rule is confident, which means that the first
    new tag is `wrong_answer` or set by a judge, unless the same judge returned a new tag. They follow the new tag of another judge.
    """
    people = [tag for tag in before if tag.by.startswith(BY_PERSON)]
    sources, judged = {tag.by for tag in new}, new[:1] if new[0].by.startswith(BY_JUDGE) else []
    unsure = bool(judged) or new[0].name == UNCLASSIFIED
    judges = [tag for tag in before if tag.by.startswith(BY_JUDGE) and tag.by not in sources] if unsure else []
    return (*judged, *judges, *new[len(judged) :], *people)


def check_tag_name(name: str) -> str:
    """Returns a tag name unchanged. Raises `ValueError` if it is not a valid tag name."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{user_code.printable(name, 60)!r} is not a valid tag: use at most 40 lower-case letters, digits and underscores")
    return name


def manual_tag(name: str, *, by: str, turn: int | None = None, trajectory: int = 0, note: str = "") -> Tag:
    """Returns a tag set by a person. Raises `UserError` if the name is invalid.

    Args:
        by: the name of the person.
        turn: the turn at which the failure starts, counted from 1; None means no single turn.
    """
    index = None if turn is None else turn - 1
    try:
        return Tag(name=check_tag_name(name), by=f"{BY_PERSON}{by}", trajectory=trajectory, turn=index, note=note)
    except ValueError as error:
        raise UserError(str(error), fix="use a name such as wrong_unit") from None


def _apply(rule: TriageRule, trace: Trace) -> Tag | None:
    answer: object = None
    with user_code.logging_faults(f"triage rule {getattr(rule, '__name__', rule)}"):
        answer = rule(trace)
    tag = _valid_tag(answer)
    return None if tag is None else replace(tag, by="rules")


def _valid_tag(answer: object) -> Tag | None:
    if answer is None:
        return None
    if not isinstance(answer, Tag) or not _NAME.fullmatch(answer.name):
        user_code.log_unexpected("triage", TypeError(f"{user_code.printable(repr(answer), 80)} is not a tag and is ignored"), trace=False)
        return None
    return replace(answer, note=answer.note[:_MAX_NOTE])
