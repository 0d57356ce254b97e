"""User-supplied rules, judges that fail or abstain, and the tag that decides."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import PluginError
from agentrl.failure.rules import RULES
from agentrl.failure.trace import Tag, Trace, deciding_tag_name
from agentrl.failure.triage import TAXONOMY, load_rules, tag_by_judge, tag_by_rules

from .traces import python, submit, trace, turn
from .transcripts import labelled

UNCLEAR = trace(turn(python("print(97)", "97")), turn(submit("97")), answer="97")
GAVE_UP = trace(turn(said="I cannot."), ended="answered")

RULE = """
from agentrl.failure.trace import Tag, Trace
from agentrl.failure.timeline import timeline_of


def wrong_unit(trace: Trace) -> Tag | None:
    seen = timeline_of(trace)
    return Tag(name="wrong_unit", by="me", turn=1, confidence=0.9) if seen.answer == "97" else None


def broken(trace):
    raise SystemExit("no")


def odd(trace):
    return "wrong_unit"


def shouting(trace):
    return Tag(name="WRONG UNIT", by="me")


RULES = [broken, odd, shouting, wrong_unit]
number = 3
"""


@pytest.fixture
def rule_file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(RULE)
    return str(path)


def test_a_user_supplied_rule_may_give_a_new_tag(rule_file: str) -> None:
    rules = load_rules([f"{rule_file}:wrong_unit"])
    tags = tag_by_rules(UNCLEAR, rules)
    assert (tags[0].name, tags[0].by, tags[0].turn) == ("wrong_unit", "rules", 1)
    assert tag_by_rules(GAVE_UP, rules)[0].name == "gave_up"


def test_rules_that_raise_or_return_no_tag_are_ignored(rule_file: str) -> None:
    assert [tag.name for tag in tag_by_rules(UNCLEAR, load_rules([f"{rule_file}:RULES"]))] == ["wrong_unit"]


def test_an_invalid_rule_is_an_error(rule_file: str) -> None:
    with pytest.raises(PluginError, match="is not a plain function"):
        load_rules([f"{rule_file}:number"])
    with pytest.raises(PluginError, match="has no attribute"):
        load_rules([f"{rule_file}:nothing"])


def test_shipped_tags_are_in_the_taxonomy_and_each_has_a_confident_rule() -> None:
    assert tag_by_rules(UNCLEAR, RULES)[0].name == "wrong_answer" and tag_by_rules(UNCLEAR, RULES)[0].confidence < 0.5
    assert {rule.__name__ for rule in RULES} - {"format_of_calls", "format_of_answer", "forbidden_tool"} <= set(TAXONOMY)


class Judge:
    name = "reader"

    def __init__(self, answer: Any) -> None:
        self.answer, self.read = answer, ""

    async def __call__(self, text: str) -> Tag | None:
        self.read = text
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer == "late":
            await asyncio.sleep(60)
        return self.answer  # type: ignore[no-any-return]


async def test_the_judge_runs_only_if_no_rule_is_confident() -> None:
    judge = Judge(Tag(name="misread_output", by="", confidence=0.7, turn=1))
    tags = await tag_by_judge(UNCLEAR, RULES, judge)
    assert (tags[0].name, tags[0].by) == ("misread_output", "judge:reader") and "97" in judge.read
    judge.read = ""
    assert (await tag_by_judge(GAVE_UP, RULES, judge))[0].name == "gave_up" and not judge.read, "not run after a confident rule"


@pytest.mark.parametrize("answer", [None, "late", "a tag", RuntimeError("503"), Tag(name="No Tag", by="x")])
async def test_a_judge_that_abstains_fails_or_returns_nonsense_changes_nothing(answer: Any) -> None:
    assert (await tag_by_judge(UNCLEAR, RULES, Judge(answer), timeout_s=0.05))[0].name == "wrong_answer"


def test_a_persons_tag_overrides_all_others() -> None:
    by_rule, first, second = (Tag(name=name, by=by) for name, by in (("looped", "rules"), ("budget", "person:a"), ("format", "person:b")))
    assert [deciding_tag_name(tags) for tags in ((), (by_rule,), (by_rule, first), (first, by_rule, second))] == [
        "",
        "looped",
        "budget",
        "format",
    ]


def test_a_rule_gets_the_trace_itself(rule_file: str) -> None:
    received: list[Trace] = []

    def record(trace: Trace) -> None:
        received.append(trace)

    tag_by_rules(UNCLEAR, [record])
    assert received == [UNCLEAR]


def test_transcripts_get_the_labelled_tag_and_turn() -> None:
    transcripts, rules = labelled(), load_rules()
    tagged = [(name, turn, tag_by_rules(trace, rules)[0]) for name, turn, trace in transcripts]
    mismatches = [f"{name} {turn}: {tag.name} {tag.turn} {tag.note}" for name, turn, tag in tagged if (tag.name, tag.turn) != (name, turn)]
    assert len(transcripts) == 110 and len(mismatches) <= 2, "\n".join(mismatches)
