"""A suite evaluated on a chat completions server over real HTTP: tools, limits and blame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import UserError
from agentrl.evaluation.chat_agent import ChatAgent, ChatAnswer, ChatEndpoint, NoPolicy
from agentrl.evaluation.open_policy import prepare_evaluation
from agentrl.evaluation.policies import RequestOptions, find_policy
from agentrl.evaluation.suites import SuiteEvaluation, evaluate_suites
from agentrl.failure.case import Suite
from agentrl.judge import Endpoint
from agentrl.records import Episode, Limits
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ChatServer, ScriptedAnswer, ScriptedSandboxes
from agentrl.testing.clock import run_virtually
from agentrl.testing.sandboxes import printing, sample_task
from tests.evaluation.suite_parts import HERE, make_case, make_suite

QUICK = (f"sandbox.backend={HERE}:backend", "serving.request_timeout_s=2", "serving.startup_timeout_s=2")
Script = Callable[[dict[str, Any], int], ScriptedAnswer]


def says(content: str | None = None, *calls: tuple[str, str], finish: str = "stop", usage: tuple[int, int] = (50, 7)) -> ScriptedAnswer:
    tools = [{"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": text}} for n, (name, text) in enumerate(calls)]
    message = {"role": "assistant", "content": content, **({"tool_calls": tools} if tools else {})}
    body = {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1]},
    }
    return ScriptedAnswer(raw=json.dumps(body).encode())


SUBMIT = says(None, ("submit", '{"answer": "pass"}'))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.rollout.group.RETRY_S", 0.0)


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "pyproject.toml").write_text("")
    return make_suite(tmp_path / "s", make_case("good"))


async def evaluate(suite: Suite, server: ChatServer, *, key_env: str = "", limits: dict[str, Any] | None = None) -> SuiteEvaluation:
    cases = [replace(case, task=replace(case.task, limits=replace(case.task.limits, **(limits or {})))) for case in suite.cases]
    policy = find_policy(server.url, model_name="theirs", key_env=key_env)
    with prepare_evaluation(policy, [replace(suite, cases=tuple(cases))], overrides=QUICK) as prepared:
        (evaluation,) = await evaluate_suites(prepared, console=False)
    return evaluation


async def test_an_endpoint_uses_the_tasks_tools_and_is_scored(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "k-123")
    turns = [says("let me see", ("python", '{"code": "print(97)"}'), ("python", "{oops")), SUBMIT]
    with ChatServer(turns) as server:
        evaluation = await evaluate(suite, server, key_env="THEIR_KEY")
    (outcome,) = evaluation.outcomes
    assert (outcome.status, outcome.scores) == ("passed", (1.0,))
    (attempt,) = evaluation.results.attempts
    assert (attempt.tokens, attempt.turns, attempt.ended) == (14, 2, "submitted")
    first, second = (request["body"] for request in server.requests)
    assert first["model"] == "theirs" and {tool["function"]["name"] for tool in first["tools"]} == {"python", "submit"}
    assert first["max_tokens"] == 256 and server.requests[0]["headers"]["authorization"] == "Bearer k-123"
    *_, answer, tool_result, wrong = second["messages"]
    assert [call["id"] for call in answer["tool_calls"]] == ["c0", "c1"] and answer["content"] == "let me see"
    assert (tool_result["tool_call_id"], tool_result["content"]) == ("c0", "97") and "not valid JSON" in wrong["content"]
    text = (evaluation.folder.parent / "recipe.json").read_text() + (evaluation.folder / "about.json").read_text()
    assert "k-123" not in text


async def test_an_endpoint_gets_the_instructions_of_the_evaluation(suite: Suite) -> None:
    instructions = ('rollout.instructions="Look first."', 'tools={"submit": {"description": "Hand in."}}')
    with (
        ChatServer([SUBMIT]) as server,
        prepare_evaluation(find_policy(server.url, model_name="m"), [suite], overrides=(*QUICK, *instructions)) as prepared,
    ):
        (evaluation,) = await evaluate_suites(prepared, console=False)
    (body,) = (request["body"] for request in server.requests)
    assert (body["messages"][0]["role"], body["messages"][0]["content"]) == ("system", "Look first.")
    assert [tool["function"]["description"] for tool in body["tools"] if tool["function"]["name"] == "submit"] == ["Hand in."]
    assert evaluation.results.attempts[0].task_key == suite.cases[0].key, "the case stays comparable"


async def test_request_options_change_the_requests(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "k-456-very-secret")
    requests = RequestOptions.parse(
        ["reasoning_effort=low", "temperature=null", 'extra={"a": [1]}'], ["api-key=env:THEIR_KEY"], "max_completion_tokens"
    )
    with ChatServer([SUBMIT]) as server:
        policy = find_policy(server.url, model_name="m", requests=requests)
        with prepare_evaluation(policy, [suite], overrides=QUICK) as prepared:
            (run,) = await evaluate_suites(prepared, console=False)
        plain = find_policy(server.url, model_name="m")
    (request,) = server.requests
    assert request["headers"]["api-key"] == "k-456-very-secret" and (request["body"]["reasoning_effort"], request["body"]["extra"]) == (
        "low",
        {"a": [1]},
    )
    assert request["body"]["max_completion_tokens"] == 256 and not {"max_tokens", "temperature"} & request["body"].keys()
    assert run.outcomes[0].status == "passed" and policy.name == plain.name + ' (reasoning_effort="low", extra={"a": [1]}, no temperature)'
    assert "very-secret" not in "".join(path.read_text() for path in run.folder.parent.rglob("*.json"))


@pytest.mark.parametrize(
    ("requested", "headers", "reason"),
    [
        (["temperature=0.5"], [], r"set evaluation\.sampling\.temperature, or --request temperature=null"),
        (["max_tokens=5"], [], r"limits\.turn_tokens"),
        (["max_completion_tokens=5"], [], "--tokens-name max_completion_tokens"),
        (["messages=[]"], [], "the case contains"),
        (["effort"], [], "contains no ="),
        (["api_key=sk-12345678901234567890"], [], "contains a secret"),
        ([], ["api-key"], "contains no ="),
    ],
)
def test_invalid_request_options_raise(requested: list[str], headers: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        RequestOptions.parse(requested, headers, "")
    with pytest.raises(UserError, match="require an endpoint"):
        find_policy("runs/x@1", requests=RequestOptions.parse(["a=1"], [], ""))


@pytest.mark.parametrize("headers", [{"api-key": "sk-by-value"}, {"host": "env:A"}, {"a b": "env:A"}, {"authorization": "env:A"}])
def test_header_values_must_be_references(headers: dict[str, str]) -> None:
    with pytest.raises(UserError, match="must be an additional header with a reference as its value"):
        Endpoint(url="http://127.0.0.1:1/v1", model="m", headers=headers)


@pytest.mark.parametrize(
    ("answer", "limits", "ended"),
    [
        (says("I give up"), {}, "answered"),
        (says(None, ("python", "{}"), usage=(700, 1)), {"all_tokens": 700}, "token_limit"),
        (says("x" * 100, finish="length"), {}, "token_limit"),
        (says(None, ("python", "{}"), usage=(2000, 1)), {}, "token_limit"),
        (says(None, ("nothing_of_that_name", "{}")), {"turns": 3}, "turn_limit"),
    ],
)
async def test_faults_of_the_model_are_scored(suite: Suite, answer: ScriptedAnswer, limits: dict[str, Any], ended: str) -> None:
    with ChatServer([answer]) as server:
        evaluation = await evaluate(suite, server, limits=limits)
    assert (evaluation.outcomes[0].status, evaluation.results.attempts[0].ended) == ("failed", ended)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "answer",
    [
        ScriptedAnswer(raw=b"{}"),
        ScriptedAnswer(raw=b"[" * 100_000),
        ScriptedAnswer(raw=b'{"choices": [{"message": {"content": 3}}]}'),
        ScriptedAnswer(raw=b'{"choices": [{"message": {"content": "' + b"x" * (2 << 20)),
        ScriptedAnswer(status=401, raw=b"no"),
        ScriptedAnswer(status=307, headers={"location": "http://127.0.0.1:1/"}),
        ScriptedAnswer(breaks_off=True),
        ScriptedAnswer(hangs=True),
    ],
)
async def test_faults_of_the_server_are_never_scored(suite: Suite, answer: ScriptedAnswer) -> None:
    with ChatServer([answer]) as server:
        evaluation = await evaluate(suite, server)
    assert (evaluation.outcomes[0].status, evaluation.outcomes[0].scores) == ("unscored", (None,))
    assert "ServingError" in evaluation.results.attempts[0].reason, evaluation.results.attempts


async def test_a_missing_key_is_reported_before_any_request(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THEIR_KEY", raising=False)
    with ChatServer([SUBMIT]) as server:
        evaluation = await evaluate(suite, server, key_env="THEIR_KEY")
    assert not server.requests and "THEIR_KEY does not contain a valid key" in evaluation.results.attempts[0].reason


async def test_invalid_calls_are_answered_with_an_error(suite: Suite) -> None:
    message = {
        "content": None,
        "tool_calls": [None, {"id": "x" * 999, "function": {"name": "python", "arguments": {"code": "1"}}}, {"id": 3}],
    }
    invalid_calls = ScriptedAnswer(raw=json.dumps({"choices": [{"message": message}]}).encode())
    with ChatServer([invalid_calls, SUBMIT]) as server:
        evaluation = await evaluate(suite, server)
    assert evaluation.outcomes[0].status == "passed"
    replies = [item for item in server.requests[1]["body"]["messages"] if item["role"] == "tool"]
    assert [item["tool_call_id"] for item in replies] == ["call_0", "call_1", "call_2"]
    assert [item["content"] == "97" for item in replies] == [False, True, False] and "needs a function" in replies[0]["content"]


def test_replaced_ids_of_calls_are_new() -> None:
    endpoint = ChatEndpoint(url="http://127.0.0.1:1/v1", model="m")
    for given, ids in {
        ("call_1", None): ["call_1", "call_0"],
        (None, "call_0", None): ["call_1", "call_0", "call_2"],
        ("call_0", "call_0", "a", "a"): ["call_0", "call_1", "a", "call_2"],
    }.items():
        message = {"content": None, "tool_calls": [{"id": each, "function": {"name": "python", "arguments": "{}"}} for each in given]}
        answer = endpoint._read(json.dumps({"choices": [{"message": message}]}).encode(), [])
        assert [call.id for call in answer.calls] == ids


async def test_an_attempt_is_scored_if_the_server_rejects_the_models_text(suite: Suite) -> None:
    """The server accepts the first request and rejects the one with the model's text: the policy's failure, not an infrastructure fault."""
    with ChatServer([says("x", ("python", '{"code": "print(97)"}')), ScriptedAnswer(text="", status=400)]) as server:
        evaluation = await evaluate(suite, server)
    (outcome,) = evaluation.outcomes
    assert (outcome.status, outcome.scores) == ("failed", (0.0,))
    with ChatServer([ScriptedAnswer(text="", status=400)]) as server:
        evaluation = await evaluate(replace(suite, folder=suite.folder), server)
    assert evaluation.outcomes[0].scores == (None,), "the model has not answered yet"


async def test_invalid_arguments_of_a_call_are_sent_back_as_empty_ones(suite: Suite) -> None:
    """Servers fail with status 500 for arguments that are not JSON."""
    with ChatServer([says(None, ("python", "{oops"), ("python", "[1]"), ("python", " ")), SUBMIT]) as server:
        await evaluate(suite, server)
    (answer,) = [message for message in server.requests[1]["body"]["messages"] if message["role"] == "assistant"]
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == ["{}", "{}", "{}"]


# Time limits with a chat completions server: an endless model is cut off and scored, a stalled server is not the model's fault.
TIMED_TASK = replace(sample_task(), tools=(), limits=Limits(turns=2, turn_tokens=100_000, episode_tokens=100_000, wall_s=60.0))


class PacedEndpoint:
    """Streams 20 tokens per second; from `stalls` seconds on it sends nothing."""

    tokens_name, timeout_s = "max_tokens", 120.0

    def __init__(self, stalls: float) -> None:
        self.stalls = stalls

    async def ask(self, messages: Sequence[Mapping[str, Any]], *, more: Mapping[str, Any]) -> ChatAnswer:
        now, first = asyncio.get_running_loop().time(), asyncio.get_running_loop().time() < 10.0
        tokens = min(40, more["max_tokens"]) if first else more["max_tokens"]
        await asyncio.sleep(10**6 if now >= self.stalls else tokens / 20.0)
        return ChatAnswer(text="x" * tokens, prompt_tokens=5, completion_tokens=tokens, cut=not first)


async def run_two_episodes(endpoint: Any) -> list[Episode]:
    runner = EpisodeRunner(
        agent=ChatAgent(endpoint=endpoint),
        policy=NoPolicy(),
        sandboxes=ScriptedSandboxes(printing("")),
        sampling=Sampling(),
        max_model_len=10**6,
        request_timeout_s=120.0,
    )
    first = await runner.run(TIMED_TASK, episode_id="first")
    await asyncio.sleep(20)
    return [first, await runner.run(TIMED_TASK, episode_id="second")]


@pytest.mark.parametrize(("stalls", "excluded"), [(10**6, False), (15.0, True)])
def test_a_model_that_never_ends_is_scored_and_a_stalled_server_is_not(stalls: float, excluded: bool) -> None:
    first, second = run_virtually(run_two_episodes(PacedEndpoint(stalls)))
    assert first.trajectories[0].stop_reason == "answered" and not first.left_out
    assert second.left_out is excluded and second.wall_s <= TIMED_TASK.limits.wall_s + 1
    assert second.trajectories[0].stop_reason == ("wall_limit" if excluded else "token_limit")
