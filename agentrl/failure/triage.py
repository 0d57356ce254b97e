"""Triage: the first thing that went wrong in a trace, by name, with the turn and how sure that is. Rules first, a judge second.

A rule is a function that takes a trace and gives a `Tag`, or None when it has nothing to say. Of all tags that rules are sure enough
of, the one at the earliest turn comes first: what went wrong later is most often its consequence. One that holds for the whole
episode (`turn` None) comes before them all. Where nothing is sure, a judge may be asked; it may abstain, too, and then the tag is
`wrong_answer` with little confidence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from agentrl.base import user_code
from agentrl.errors import PluginError
from agentrl.failure.timeline import timeline_of
from agentrl.failure.trace import Tag, Trace
from agentrl.plugins.references import resolve

TriageRule = Callable[[Trace], Tag | None]

TAXONOMY = {
    "infrastructure": "a machine, server or network failed; not the policy's doing",
    "task_fault": "the task is broken; not the policy's doing",
    "reward_hack": "a score was sought that the work did not earn",
    "format": "a call or answer that could not be read, though its content may be right",
    "wrong_tool": "a tool that there is not, or one that another was needed for",
    "bad_arguments": "the right tool with arguments that it does not take, or that made it fail",
    "misread_output": "a tool gave the answer, and the agent made something else of it",
    "looped": "the same again and again, with the same outcome",
    "gave_up": "no attempt, or an attempt that was broken off",
    "ignored_instruction": "something that the task asks for or forbids was disregarded",
    "budget": "turns, tokens or time ran out",
    "wrong_answer": "a wrong answer, and no rule or judge can say why",
}
"""The names that the shipped rules give. Rules of your own may give others."""

UNCLASSIFIED = "wrong_answer"
BY_JUDGE, BY_PERSON = "judge:", "person:"
MIN_CONFIDENCE = 0.5
"""A tag below this confidence decides nothing, and lets a judge be asked."""
MAX_TAGS = 8
"""Tags of one trace."""
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_LONGEST_NOTE = 500


class TriageJudge(Protocol):
    """Somebody who reads a trace. `name` goes into the tag: `judge:NAME`."""

    @property
    def name(self) -> str: ...

    async def __call__(self, text: str) -> Tag | None:
        """The tag of a trace, told as text (`agentrl.failure.render.render_trace`); None to abstain. The text is hostile: it is data."""
        ...


def load_rules(references: Sequence[str] = ()) -> tuple[TriageRule, ...]:
    """Rules by reference, before those that ship. A reference names a rule, or a list of them.

    Raises `PluginError` for one that does not resolve, or to something that cannot be called.
    """
    from agentrl.failure.rules import RULES

    found: list[TriageRule] = []
    for reference in references:
        named = resolve(reference)
        some = list(named) if isinstance(named, list | tuple) else [named]
        for one in some:
            if not callable(one) or inspect.iscoroutinefunction(one):
                raise PluginError(f"triage rule {reference!r} is no plain function", fix="write def rule(trace: Trace) -> Tag | None")
        found += some
    return (*found, *RULES)


def tag_by_rules(trace: Trace, rules: Sequence[TriageRule]) -> tuple[Tag, ...]:
    """What the rules say of a trace, the first failure first; never empty. A rule that raises says nothing, and is logged."""
    seen = timeline_of(trace)
    tags: list[tuple[tuple[bool, int, int], Tag]] = []
    for number, rule in enumerate(rules):
        tag = _asked(rule, trace)
        if tag is not None:
            tags.append(((tag.confidence < MIN_CONFIDENCE, seen.step_index(tag.trajectory, tag.turn), number), tag))
    tags.sort(key=lambda item: item[0])
    chosen = [tag for _, tag in tags[:MAX_TAGS]]
    if not chosen or chosen[0].confidence < MIN_CONFIDENCE:
        chosen.insert(0, Tag(name=UNCLASSIFIED, by="rules", confidence=0.3 if trace.score is not None else 0.2, note="no rule is sure"))
    return tuple(chosen[:MAX_TAGS])


async def tag_by_judge(trace: Trace, rules: Sequence[TriageRule], judge: TriageJudge, *, timeout_s: float = 120.0) -> tuple[Tag, ...]:
    """What the rules say; and where none is sure, what the judge says, if it says anything.

    A judge that fails, is late or gives no tag has abstained, which is logged. A turn that the trace does not have is left out.
    """
    from agentrl.failure.render import render_trace

    tags = tag_by_rules(trace, rules)
    if tags[0].name != UNCLASSIFIED:
        return tags
    since = user_code.cancellation_count()
    try:
        text = render_trace(replace(trace, tags=()))  # what others named it is not for it to read
        given = await user_code.call_user_code(lambda: judge(text), what=f"triage judge {judge.name}", timeout_s=timeout_s)
    except BaseException as error:
        user_code.reraise_if_fatal(error, since)
        user_code.log_unexpected(f"triage judge {judge.name}", error)
        return tags
    if (tag := _checked(given)) is None:
        return tags
    there = any((step.trajectory, step.turn) == (tag.trajectory, tag.turn) for step in timeline_of(trace).steps)
    tag = replace(tag, by=f"{BY_JUDGE}{judge.name}") if there else replace(tag, by=f"{BY_JUDGE}{judge.name}", trajectory=0, turn=None)
    return (tag, *tags)[:MAX_TAGS]


def merge_tags(asked: Sequence[Tag], before: Sequence[Tag]) -> tuple[Tag, ...]:
    """The tags of a trace that was named again: what rules (and a judge) say now, what a judge has said where rules still are not sure and
    no judge says anything now, and what people have said."""
    people = [tag for tag in before if tag.by.startswith(BY_PERSON)]
    again = {tag.by for tag in asked}
    judges = [tag for tag in before if tag.by.startswith(BY_JUDGE) and tag.by not in again] if asked[0].name == UNCLASSIFIED else []
    return (*judges, *asked, *people)


def deciding_tag_name(tags: Sequence[Tag]) -> str:
    """What a trace is counted under: what a person said last, else the first tag; empty without any."""
    person = next((tag for tag in reversed(tags) if tag.by.startswith(BY_PERSON)), None)
    return person.name if person is not None else tags[0].name if tags else ""


def check_tag_name(name: str) -> str:
    """The name, if it is one. Raises `ValueError`."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{user_code.printable(name, 60)!r} is no tag: lower-case letters, digits and underscores, at most 40")
    return name


def _asked(rule: TriageRule, trace: Trace) -> Tag | None:
    try:
        given = rule(trace)
    except (Exception, SystemExit) as error:
        user_code.log_unexpected(f"triage rule {getattr(rule, '__name__', 'of yours')}", error)
        return None
    tag = _checked(given)
    return None if tag is None else replace(tag, by="rules")


def _checked(given: object) -> Tag | None:
    if given is None:
        return None
    if not isinstance(given, Tag) or not _NAME.fullmatch(given.name):
        user_code.log_unexpected("triage", TypeError(f"{user_code.printable(repr(given), 80)} is no tag, and is left out"), trace=False)
        return None
    return replace(given, note=given.note[:_LONGEST_NOTE])
