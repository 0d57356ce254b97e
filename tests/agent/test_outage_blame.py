"""The blame for a tool's outage, which is decided by the calls of other episodes."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent import ToolOutcome
from agentrl.agent.invoke import CallResult, call_tool
from agentrl.agent.outage_blame import MAX_CALLS_PER_TOOL, ONE_IN, SEEN_DOWN, Caller, CallRecord
from agentrl.agent.tools import function_schema
from agentrl.errors import ToolUnavailable
from agentrl.protocols import Sandbox
from agentrl.records import Blame, Limits
from agentrl.testing.clock import run_virtually


def caller(episode: int, task: str = "t", attempt: int = 0) -> Caller:
    return Caller(attempt=f"g000000-{episode}-a{attempt}", task=task)


class Tool:
    """Calls of one tool in order."""

    def __init__(self) -> None:
        self.record = CallRecord()

    def ok(self, *episodes: int, task: str = "t") -> None:
        for episode in episodes:
            self.record.answered("search", caller(episode, task))

    def failing(self, episode: int, task: str = "t", attempt: int = 0) -> Any:
        return self.record.failed("search", caller(episode, task, attempt))

    def down(self, *episodes: int, task: str = "t") -> None:
        for episode in episodes:
            self.failing(episode, task)


def test_a_tool_that_answers_no_episode_is_down_for_all() -> None:
    tool = Tool()
    for attempt, episode in itertools.product(range(3), range(8)):
        case = tool.failing(episode, attempt=attempt)
        assert case.contested == (not attempt and episode < SEEN_DOWN), "only the first outages are contested"
        assert not case.provoked(sure=True)


def test_a_call_that_fails_while_calls_of_others_are_answered_is_blamed_on_the_policy() -> None:
    tool = Tool()
    tool.ok(1, 2)
    case = tool.failing(0)
    assert case.contested
    tool.ok(3, 4)
    assert case.provoked(sure=True)


@pytest.mark.parametrize(("answered", "failed"), [(0, 2), (1, 4), (2, 7)])
def test_an_outage_that_most_other_episodes_see_is_an_infrastructure_fault(answered: int, failed: int) -> None:
    tool = Tool()
    tool.ok(*range(20, 30))
    case = tool.failing(0)
    tool.ok(*range(1, 1 + answered))
    tool.down(*range(10, 10 + failed))
    assert not case.provoked(sure=True)


def test_one_episode_that_calls_often_counts_once() -> None:
    tool = Tool()
    tool.ok(20)
    case = tool.failing(0)
    tool.ok(*[1] * 50)
    tool.down(2, 3, 4, 5)
    assert not case.provoked(sure=True)


def test_provoked_outages_are_not_evidence_of_an_outage() -> None:
    tool = Tool()
    tool.ok(*range(50, 60))
    for episode in range(20):
        case = tool.failing(episode)
        tool.ok(100 + episode)
        assert case.provoked(sure=True)
    last = tool.failing(30)
    tool.ok(200)
    assert last.provoked(sure=True)


def test_a_tool_that_fails_every_attempt_at_a_task_is_an_infrastructure_fault() -> None:
    """If each task has a database and one database is down, attempts at its task are not scored for that outage."""
    tool = Tool()
    tool.ok(*range(100, 140), task="other")
    for attempt in range(3):
        cases = [tool.failing(episode, attempt=attempt) for episode in range(8)]
        tool.ok(*range(200, 240), task="other")
        for case in cases:
            assert not case.provoked(sure=True)
            assert case.note == "; the tool answers calls from other tasks, but none from this task"


def test_sequential_attempts_are_excused_if_the_tool_is_down_for_their_task() -> None:
    tool = Tool()
    tool.ok(*range(100, 140), task="other")
    for episode, attempt in itertools.product(range(8), range(3)):
        case = tool.failing(episode, attempt=attempt)
        assert not case.provoked(sure=True), (episode, attempt)


def test_one_attempt_that_fails_while_others_are_answered_is_blamed() -> None:
    tool = Tool()
    tool.ok(1, 2)
    case = tool.failing(0)
    tool.ok(*range(200, 240), task="other")
    assert case.provoked(sure=True)


def test_outages_that_no_other_call_shows_are_rarely_excused() -> None:
    tool, excused = Tool(), 0
    for episode in range(MAX_CALLS_PER_TOOL // 2):
        tool.ok(1000 + episode)
        excused += not tool.failing(episode).provoked(sure=False)
    assert excused == 1 + (MAX_CALLS_PER_TOOL // 2) // ONE_IN


def test_an_excused_episode_stays_excused() -> None:
    """The retry may see the outage too."""
    tool = Tool()
    tool.ok(1, 2)
    first = tool.failing(0)
    assert not first.provoked(sure=True) and first.note
    second = tool.failing(0, attempt=1)
    assert not second.provoked(sure=True)


def test_two_outages_without_an_answer_between_them_are_not_yet_an_outage_for_all() -> None:
    tool = Tool()
    tool.ok(1, 2)
    assert [tool.failing(episode).provoked(sure=True) for episode in (3, 4, 5, 6)] == [False, True, False, False]


def test_calls_that_ended_while_a_late_one_was_waiting_are_evidence() -> None:
    tool = Tool()
    tool.ok(1, 2, 3)
    ended_before = tool.record.ended
    tool.ok(4, 5)
    assert tool.record.failed("search", caller(0), since=ended_before).provoked(sure=True)
    assert not tool.record.failed("search", caller(9)).provoked(sure=True), "excused: no other call ended after it"


def test_the_newest_call_of_an_episode_counts() -> None:
    tool = Tool()
    tool.ok(*range(10, 20))
    case = tool.failing(0)
    tool.ok(1, 2, 3, 4, 5)
    tool.down(1, 2, 3, 4)
    assert not case.provoked(sure=True), "the tool went down in the meantime"


def test_the_thresholds_of_the_first_rule() -> None:
    """A quarter of the other episodes must be answered, and two failures are needed."""
    tool = Tool()
    tool.ok(20)
    case = tool.failing(0)
    tool.ok(1)
    tool.down(2, 3, 4)
    assert case.provoked(sure=True), "1 of 4 other episodes was answered"
    tool.down(5)
    assert not case.provoked(sure=True), "1 of 5 other episodes was answered"
    tool = Tool()
    tool.ok(20, task="other")
    case = tool.failing(0)
    tool.down(1, 2)
    assert not case.provoked(sure=True) and case.note == "", "the tool is down for all tasks, not only for this one"


def test_a_tool_that_no_other_attempt_at_the_task_has_called_is_not_down_for_it() -> None:
    tool = Tool()
    tool.ok(1, 2, task="other")
    case = tool.failing(0)
    tool.ok(3, task="other")
    assert not case.provoked(sure=True) and case.note == "; no other call shows an outage of the tool"


def test_calls_that_ended_before_a_late_call_started_are_not_evidence() -> None:
    tool = Tool()
    tool.ok(1)
    assert not tool.record.failed("search", caller(0), since=tool.record.ended).provoked(sure=True)


def test_ended_calls_are_counted() -> None:
    tool = Tool()
    counts = [tool.record.ended]
    tool.ok(1)
    counts.append(tool.record.ended)
    tool.failing(2)
    assert [*counts, tool.record.ended] == [0, 1, 2]


def test_an_outage_is_contested_until_4_other_episodes_have_it() -> None:
    tool = Tool()
    assert [tool.failing(episode).contested for episode in range(6)] == [True] * 4 + [False] * 2


def test_an_answer_makes_an_outage_contested_for_512_calls() -> None:
    tool = Tool()
    tool.ok(99)
    assert [tool.failing(number % 10).contested for number in range(512)][-2:] == [True, False]


def test_a_withdrawn_call_is_not_evidence() -> None:
    tool = Tool()
    withdrawn = tool.failing(0)
    withdrawn.withdraw()
    withdrawn.withdraw()
    assert [tool.failing(episode).contested for episode in range(1, 6)] == [True] * 4 + [False]


def test_one_episode_in_32_may_have_an_outage_of_its_own() -> None:
    tool = Tool()
    tool.ok(*range(100, 131))
    assert [tool.failing(episode).provoked(sure=False) for episode in (0, 1)] == [False, True]
    tool.ok(131)
    assert not tool.failing(2).provoked(sure=False)


@pytest.mark.parametrize(("other_episodes", "expected"), [(4095, True), (4096, False)])
def test_the_first_outages_of_4096_episodes_are_recorded(other_episodes: int, expected: bool) -> None:
    """A second attempt with an outage confirms it."""
    tool = Tool()
    tool.failing(0)
    for episode in range(1, other_episodes + 1):
        tool.failing(episode)
    tool.ok(*range(5000, 5512))
    assert tool.failing(0, attempt=1).provoked(sure=False) is expected


@pytest.mark.parametrize(("other_tools", "touched", "expected"), [(1023, False, True), (1024, False, False), (1024, True, True)])
def test_the_1024_tools_that_were_called_last_are_recorded(other_tools: int, touched: bool, expected: bool) -> None:
    tool = Tool()
    tool.ok(1)
    for number in range(other_tools):
        if touched and number == other_tools - 1:
            tool.ok(2)
        tool.record.answered(f"tool{number}", caller(3))
    cases = [tool.failing(episode) for episode in range(10, 15)]
    assert cases[-1].contested is expected, "the answered call is still recorded"


calls = st.lists(st.tuples(st.integers(0, 6), st.sampled_from("ab"), st.booleans(), st.booleans(), st.integers(0, 2)), max_size=60)


@given(calls)
def test_without_a_single_answer_no_call_is_ever_blamed(history: list[tuple[int, str, bool, bool, int]]) -> None:
    tool = Tool()
    for episode, task, _, sure, attempt in history:
        assert not tool.failing(episode, task, attempt).provoked(sure=sure)


@given(calls)
def test_every_history_of_calls_has_a_decision(history: list[tuple[int, str, bool, bool, int]]) -> None:
    tool = Tool()
    for episode, task, ok, sure, attempt in history:
        if ok:
            tool.ok(episode, task=task)
        else:
            case = tool.failing(episode, task, attempt)
            assert case.provoked(sure=sure) in (True, False)


class Backend:
    """A tool whose backend is down at times, for all or for some arguments."""

    name, needs_sandbox = "search", False
    schema = function_schema("search", "Searches.", "text", "anything")

    def __init__(self, down: Iterator[bool], *, repeats: bool = True) -> None:
        self.down, self.repeats, self.calls = down, repeats, 0

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        self.calls += 1
        await asyncio.sleep(0.1)
        if arguments["text"] == "bad" or next(self.down):
            raise ConnectionResetError(104, "Connection reset by peer")
        return ToolOutcome(output="found", ok=True)


def call_concurrently(tool: Backend, record: CallRecord, *texts: str) -> list[CallResult | BaseException]:
    """Concurrent calls, one per episode and text, after an answered call."""

    async def play() -> list[CallResult | BaseException]:
        record.answered("search", caller(99))
        calls = [call_tool(tool, {"text": text}, None, Limits(), turn=1, record=record, caller=caller(n)) for n, text in enumerate(texts)]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    return run_virtually(play())


def test_a_momentary_outage_has_no_effect() -> None:
    tool = Backend(iter([True, True, *[False] * 9]))
    results = call_concurrently(tool, CallRecord(), "a", "b", "c")
    assert [result.outcome.output for result in results if isinstance(result, CallResult)] == ["found"] * 3 and tool.calls == 5
    assert [result.failure for result in results if isinstance(result, CallResult)] == [None] * 3


def test_failing_calls_are_distinguished_from_an_outage() -> None:
    tool = Backend(itertools.repeat(False))
    bad_call, *good_calls = call_concurrently(tool, CallRecord(), "bad", *"abcdef")
    assert isinstance(bad_call, CallResult) and bad_call.failure is not None and bad_call.failure.blame is Blame.POLICY
    assert bad_call.outcome.output.startswith("error: search failed: ConnectionResetError") and tool.calls == 6 + 4
    assert all(isinstance(result, CallResult) and result.outcome.ok for result in good_calls)
    during_outage = call_concurrently(Backend(itertools.repeat(True)), CallRecord(), "bad", *"abcdef")
    assert all(isinstance(result, ToolUnavailable) for result in during_outage)


def test_a_tool_with_state_is_not_called_again() -> None:
    tool = Backend(itertools.repeat(True), repeats=False)
    results = call_concurrently(tool, CallRecord(), *"abcdef")
    assert tool.calls == 6 and all(isinstance(result, ToolUnavailable) for result in results)


def test_a_backend_that_loses_one_call_in_ten_fails_no_episode() -> None:
    rng = random.Random(7)
    tool = Backend(iter(lambda: rng.random() < 0.1, None))
    results = call_concurrently(tool, CallRecord(), *["a"] * 200)
    assert all(isinstance(result, CallResult) and result.outcome.ok for result in results)
