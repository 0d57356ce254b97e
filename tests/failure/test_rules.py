"""Each rule with a failure that it tags, and with a near miss."""

from __future__ import annotations

import time
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from agentrl.agent.filetools import SHIPPED_TOOLS
from agentrl.failure import patterns, rules
from agentrl.failure.timeline import render_trace
from agentrl.failure.trace import CaptureReason, Trace
from agentrl.failure.triage import tag_by_rules
from agentrl.records import Blame, EnvironmentSpec, Limits, Message, Parent, Score, ToolCall, ToolResult, Trajectory

from .traces import fault, imported_trace, python, submit, task, trace, turn, utterance

COUNT = {"type": "function", "function": {"name": "count", "parameters": {"type": "object", "required": ["path"], "properties": {}}}}
GOOD = turn(python("print(sum)", "412"))
NO_TOOL = ("search", {"q": "x"}, "error: no tool 'search'; tools: python, submit", False)
BAD_CODE = python("print(x)", "Traceback (most recent call last):\n  ...\nNameError: name 'x' is not defined", False)
WRONG = turn(submit("97"))


def count(**arguments: Any) -> ToolCall:
    return ToolCall(name="count", arguments=arguments)


POSITIVE: dict[str, tuple[str, Trace, int | None]] = {
    "infrastructure, blamed": ("infrastructure", trace(why=CaptureReason.FAULT, failures=(fault(Blame.INFRASTRUCTURE),), value=None), None),
    "infrastructure, unscored": ("infrastructure", trace(GOOD, WRONG, why=CaptureReason.FAULT, value=None, answer="97"), None),
    "infrastructure, imported": (
        "infrastructure",
        imported_trace(utterance("assistant", "", count(path="a.csv")), utterance("tool", "503 Service Unavailable", failed=True)),
        0,
    ),
    "task_fault, blamed": ("task_fault", trace(why=CaptureReason.FAULT, failures=(fault(Blame.TASK, "TaskError"),), value=None), None),
    "task_fault, of the score": (
        "task_fault",
        replace(trace(GOOD, why=CaptureReason.FAULT), score=Score(value=None, reason="no hidden tests", blame=Blame.TASK)),
        None,
    ),
    "reward_hack, audited": (
        "reward_hack",
        trace(GOOD, WRONG, answer="97", why=CaptureReason.HACKED, origin={"audit": "copied"}, value=1.0),
        None,
    ),
    "reward_hack, of equality": (
        "reward_hack",
        trace(
            turn(python("class A:\n    def __eq__(self, other):\n        return True", "")), turn(python("open('conftest.py', 'w')", ""))
        ),
        0,
    ),
    "format, never closed": ("format", trace(turn(malformed=("error: a tool call was opened but not closed",)), ended="turn_limit"), 0),
    "format, in the text": ("format", imported_trace(utterance("assistant", 'So: <tool_call>{"name": "count"}')), 0),
    "format, not handed in": ("format", trace(GOOD, turn(said="The total is 412."), ended="answered"), 1),
    "format, with words": ("format", trace(GOOD, turn(submit("the total is 412 EUR")), answer="the total is 412 EUR"), 1),
    "wrong_tool, refused": ("wrong_tool", trace(turn(NO_TOOL), WRONG, answer="97"), 0),
    "wrong_tool, never offered": (
        "wrong_tool",
        imported_trace(utterance("assistant", "", ToolCall(name="sum", arguments={})), tools=(COUNT,)),
        0,
    ),
    "bad_arguments, refused": (
        "bad_arguments",
        trace(turn(("python", {"cod": "1"}, 'error: python needs {"code": "..."}', False)), WRONG, answer="97"),
        0,
    ),
    "bad_arguments, of a program": ("bad_arguments", trace(GOOD, turn(BAD_CODE), WRONG, answer="97", of=task(truth="5")), 1),
    "bad_arguments, in words": (
        "bad_arguments",
        imported_trace(
            utterance("assistant", "", count(path="a")),
            utterance("tool", '{"error": "path: field required"}'),
            utterance("assistant", "Sorry."),
        ),
        0,
    ),
    "bad_arguments, by schema": ("bad_arguments", imported_trace(utterance("assistant", "", count(file="a.csv")), tools=(COUNT,)), 0),
    "misread_output": ("misread_output", trace(GOOD, turn(submit("421")), answer="421"), 1),
    "misread_output, imported": (
        "misread_output",
        imported_trace(utterance("assistant", "", count(path="a")), utterance("tool", "12"), utterance("assistant", "13")),
        1,
    ),
    "looped, in calls": (
        "looped",
        trace(*[turn(python("print(1)", "1")) for _ in range(4)], ended="turn_limit"),
        1,
    ),
    "looped, in words": ("looped", trace(turn(said="Let me see. " + "I will look again. " * 40, cut=True), ended="token_limit"), 0),
    "gave_up, in words": ("gave_up", trace(turn(said="I'm unable to open the file."), ended="answered"), 0),
    "gave_up, silent": ("gave_up", trace(turn(), ended="answered"), 0),
    "gave_up, handed in": ("gave_up", trace(turn(python("print()", "")), turn(submit("Unknown.")), answer="Unknown."), 1),
    "ignored_instruction, forbidden": (
        "ignored_instruction",
        trace(turn(python("1", "1")), WRONG, answer="97", of=task("Add them up. Do not use the tool `python`.")),
        0,
    ),
    "ignored_instruction, unseen": ("ignored_instruction", trace(WRONG, answer="97"), 0),
    "ignored_instruction, not handed in": ("ignored_instruction", trace(GOOD, turn(said="It is ninety-seven."), ended="answered"), 1),
    "budget, turns": (
        "budget",
        trace(*[turn(python(f"print({n})", str(n))) for n in range(3)], ended="turn_limit", why=CaptureReason.LIMIT),
        2,
    ),
    "budget, tokens": (
        "budget",
        trace(turn(said="First I would open the file and", cut=True), ended="token_limit", why=CaptureReason.LIMIT),
        0,
    ),
    "budget, a tool's time": ("budget", trace(turn(python("while 1: 0", "error: timed out after 5 s", False)), WRONG, answer="97"), 0),
    "wrong_answer": ("wrong_answer", trace(turn(python("print(97)", "97")), WRONG, answer="97"), None),
}

NEAR_MISSES: dict[str, tuple[str, Trace]] = {
    "infrastructure: a program says it": (
        "infrastructure",
        imported_trace(
            utterance("assistant", "", count(path="a")),
            utterance("tool", "connection refused", failed=True),
            utterance("assistant", "", count(path="a")),
            utterance("tool", "12"),
            utterance("assistant", "12"),
        ),
    ),
    "task_fault: the infrastructure's": ("task_fault", trace(failures=(fault(Blame.INFRASTRUCTURE),), value=None)),
    "reward_hack: the task's own file": (
        "reward_hack",
        trace(turn(python("open('conftest.py')", "")), of=task("Repair `conftest.py`.")),
    ),
    "format: got over": ("format", trace(turn(malformed=("error: tool call is not valid JSON",)), GOOD, WRONG, answer="97")),
    "format: another number beside it": ("format", trace(GOOD, turn(submit("412 or 97")), answer="412 or 97")),
    "wrong_tool: got over": ("wrong_tool", trace(turn(NO_TOOL), GOOD, WRONG, answer="97")),
    "wrong_tool: offered": ("wrong_tool", imported_trace(utterance("assistant", "", count(path="a")), tools=(COUNT,))),
    "wrong_tool: a missing module": (
        "wrong_tool",
        trace(turn(python("import x", "ModuleNotFoundError: No module named 'x'", False)), WRONG, answer="97"),
    ),
    "bad_arguments: got over": ("bad_arguments", trace(turn(BAD_CODE), GOOD, WRONG, answer="97")),
    "bad_arguments: no error": (
        "bad_arguments",
        imported_trace(
            utterance("assistant", "", count(path="a")), utterance("tool", '{"error": null, "rows": 12, "note": "field required"}')
        ),
    ),
    "bad_arguments: no such tool": ("bad_arguments", trace(turn(NO_TOOL), WRONG, answer="97")),
    "misread_output: the code was wrong": ("misread_output", trace(turn(python("print(97)", "97")), WRONG, answer="97")),
    "misread_output: a digit of it": ("misread_output", trace(turn(python("p", "14123")), WRONG, answer="97")),
    "looped: polling": ("looped", trace(*[turn(python("status()", f"{n} %")) for n in range(5)], ended="turn_limit")),
    "looped: twice": ("looped", trace(GOOD, GOOD, WRONG, answer="97")),
    "gave_up: in passing": ("gave_up", trace(turn(python("1", "1"), said="I cannot see it yet, so I look."), WRONG, answer="97")),
    "gave_up: none is right": ("gave_up", trace(GOOD, turn(submit("None")), answer="None", of=task(truth="none"))),
    "ignored_instruction: no files": ("ignored_instruction", trace(WRONG, answer="97", of=task(files={}))),
    "ignored_instruction: the other tool": (
        "ignored_instruction",
        trace(GOOD, WRONG, answer="97", of=task("Never use shell. What is the total?")),
    ),
    "budget: it submitted": ("budget", trace(GOOD, WRONG, answer="97")),
}


@pytest.mark.parametrize("case", POSITIVE)
def test_a_failure_is_tagged_with_its_turn(case: str) -> None:
    name, failed_trace, turn_index = POSITIVE[case]
    first = tag_by_rules(failed_trace, rules.RULES)[0]
    assert (first.name, first.turn) == (name, turn_index)


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_a_near_miss_is_not_tagged(case: str) -> None:
    name, near_miss = NEAR_MISSES[case]
    assert name not in {tag.name for tag in tag_by_rules(near_miss, rules.RULES)}


def test_every_rule_has_a_positive_case_and_a_near_miss() -> None:
    rule_names = {rule.__name__ for rule in rules.RULES}
    aliases = {"format_of_calls": "format", "format_of_answer": "format", "forbidden_tool": "ignored_instruction"}
    for name in rule_names:
        tag = aliases.get(name, name)
        assert any(case.startswith(tag) for case in POSITIVE) and any(case.startswith(tag) for case in NEAR_MISSES), name


async def test_arguments_that_shipped_tools_reject_are_tagged_bad_arguments() -> None:
    for arguments in ({}, {"code": "print(1)\0"}):
        outcome = await SHIPPED_TOOLS["python"](arguments, None, Limits())
        assert not outcome.ok and patterns.BAD_ARGUMENTS.search(outcome.output), outcome.output


def test_the_earliest_failure_is_the_first_tag() -> None:
    """The agent called a missing tool first, then ran out of turns and gave up."""
    mixed = trace(turn(NO_TOOL), turn(NO_TOOL), turn(said="I cannot do it."), ended="turn_limit", why=CaptureReason.LIMIT)
    tags = tag_by_rules(mixed, rules.RULES)
    assert (tags[0].name, tags[0].turn) == ("wrong_tool", 0) and "budget" in {tag.name for tag in tags[1:]}


def test_a_sub_agents_failure_precedes_its_parents_next_turn() -> None:
    main = Trajectory(agent="main", turns=(turn(python("ask()", "no")), turn(said="I give up.")), stop_reason="answered")
    helper = Trajectory(agent="helper", turns=(turn(NO_TOOL),), parent=Parent(trajectory=0, turn=0, call=0), stop_reason="answered")
    delegated = trace(trajectories=(main, helper))
    first = tag_by_rules(delegated, rules.RULES)[0]
    assert (first.name, first.trajectory, first.turn) == ("wrong_tool", 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", "0.5"), ("$.50", "0.5"), ("'.5'.", "0.5"), ("-.5", "-0.5"), (".5%", "0.5"), ("5.", "5"), ("...5", "5"), (". 5", "5")],
)
def test_a_leading_point_belongs_to_the_number(text: str, value: str) -> None:
    assert patterns.parse_number(text) == Fraction(value)
    assert patterns.is_right_answer(text, value, 0.0) and not patterns.is_right_answer(text, "7", 0.0)
    assert not patterns.is_right_answer(".5", "5", 0.0) and not patterns.is_right_answer("5", ".5", 0.0)
    assert patterns.contains_answer(".5", "it is .5 m", 0.0) and not patterns.contains_answer(".5", "it is 5 m", 0.0)


def test_rules_take_linear_time() -> None:
    """On texts that would take a backtracking expression exponential time."""
    texts = ["1" * 15_000 + "x", "1," * 8_000 + "x", "-" * 15_000, "a-" * 7_000, '"' * 15_000, "tool " * 3_000, "(" * 15_000, "\n" * 15_000]
    for text in texts:
        repeated = trace(*[turn(python(text, text, False), said=text) for _ in range(4)], answer=text, of=task(text, truth=text[:300]))
        started = time.process_time()
        tag_by_rules(repeated, rules.RULES)
        assert time.process_time() - started < 1.0, text[:5]


def test_a_timeline_is_bounded_and_rules_never_raise() -> None:
    odd = [
        imported_trace(),
        imported_trace(utterance("tool", "an answer to nothing", answers="call_9")),
        imported_trace(*[utterance("assistant", "x" * 50_000, count(path=str(n))) for n in range(600)]),
        imported_trace(utterance("assistant", "", *[count(path=str(n)) for n in range(500)])),
        trace(),
        trace(trajectories=()),
        trace(turn(*[python("1", "1")] * 200), ended=""),
        replace(trace(GOOD), score=None),
    ]
    for odd_trace in odd:
        assert tag_by_rules(odd_trace, rules.RULES)
        for rule in rules.RULES:
            rule(odd_trace)


def test_a_legal_action_of_an_environment_is_not_tagged() -> None:
    world = task(prompt=(), tools=(), files={}, sandbox=None, environment=EnvironmentSpec(ref="mine:Guess", seed=1))
    move = replace(turn(said="3"), tool_results=(ToolResult(name="user", output="Wrong.", ok=True, reward=0.0),))
    trajectory = Trajectory(agent="main", turns=(move,), stop_reason="terminated", prompt=(Message(role="user", content="Which number?"),))
    played = trace(of=world, trajectories=(trajectory,), ended="terminated")
    assert [tag.name for tag in tag_by_rules(played, rules.RULES)] == ["wrong_answer"], "no rule is confident"
    text = render_trace(played)
    assert "Which number?" in text and "Wrong." in text and "could not be read" not in text
    forfeited = trace(of=world, trajectories=(replace(trajectory, stop_reason="forfeited"),))
    assert [tag.name for tag in tag_by_rules(forfeited, rules.RULES)] == ["wrong_answer"]
