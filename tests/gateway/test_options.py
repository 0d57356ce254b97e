"""Every request option, in each protocol that has it, is applied or refused in the protocol's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import pytest

from tests.gateway.test_chat_completions import calls

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"], "additionalProperties": False}
PATTERN = {"type": "object", "properties": {"at": {"type": "string", "pattern": "(a+)+"}}}


def tool(protocol: str, **more: Any) -> dict[str, Any]:
    """The tool `look` in each protocol's form."""
    if protocol == "messages":
        return {"name": "look", "input_schema": SCHEMA, **more}
    about = {"name": "look", "parameters": SCHEMA, **more}
    return {"type": "function", "function": about} if protocol == "chat" else {"type": "function", **about}


def body(protocol: str, *messages: Any, **more: Any) -> dict[str, Any]:
    """A request; plain messages are the same in all protocols."""
    conversation = list(messages) or [{"role": "user", "content": "one?"}]
    limit = {"max_tokens": 300} if protocol == "messages" else {}
    return {"model": "policy", ("input" if protocol == "responses" else "messages"): conversation, **limit, **more}


def parse_answer(protocol: str, answer: Mapping[str, Any]) -> tuple[str, list[tuple[str, Any]], str]:
    """The text of an answer, its calls and its finish reason."""
    if protocol == "chat":
        [choice] = answer["choices"]
        message = choice["message"]
        tool_calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message.get("tool_calls", ())]
        return message["content"] or "", tool_calls, choice["finish_reason"]
    if protocol == "messages":
        text = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
        return text, [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"], answer["stop_reason"]
    text = "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])
    tool_calls = [(item["name"], json.loads(item["arguments"])) for item in answer["output"] if item["type"] == "function_call"]
    return text, tool_calls, answer["status"]


END = {"chat": "stop", "messages": "end_turn", "responses": "completed"}
CALLED = {"chat": "tool_calls", "messages": "tool_use", "responses": "completed"}

# name -> protocol -> fields of the request. REFUSED adds the path that the error reports.
ACCEPTED: dict[str, dict[str, dict[str, Any]]] = {
    "temperature": {name: {"temperature": 0.3} for name in PATHS},
    "top_p": {name: {"top_p": 0.9} for name in PATHS},
    "seed": {"chat": {"seed": 3}},
    "penalties": {"chat": {"frequency_penalty": 0.5, "presence_penalty": -2}},
    "effort": {
        "chat": {"reasoning_effort": "high"},
        "messages": {"output_config": {"effort": "high"}},
        "responses": {"reasoning": {"effort": "low", "summary": "auto"}},
    },
    "verbosity": {"chat": {"verbosity": "low"}, "responses": {"text": {"verbosity": "low"}}},
    "plain text": {"chat": {"response_format": {"type": "text"}}, "responses": {"text": {"format": {"type": "text"}}}},
    "labels": {
        "chat": {"user": "u", "metadata": {"a": "b"}},
        "messages": {"metadata": {"user_id": "u"}},
        "responses": {"user": "u", "metadata": {}},
    },
    "tier": {"chat": {"service_tier": "auto"}, "messages": {"service_tier": "standard_only"}, "responses": {"service_tier": "default"}},
    "one choice": {"chat": {"n": 1, "logprobs": False, "logit_bias": {}}},
    "no truncation": {"responses": {"truncation": "disabled"}},
    "includes": {"responses": {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}},
    "no background": {"responses": {"background": False}},
    "choice none without tools": {
        "chat": {"tool_choice": "none"},
        "messages": {"tool_choice": {"type": "none"}},
        "responses": {"tool_choice": "none"},
    },
    "choice auto without tools": {
        "chat": {"tool_choice": "auto"},
        "messages": {"tool_choice": {"type": "auto"}},
        "responses": {"tool_choice": "auto"},
    },
    "one call at a time without tools": {
        "chat": {"parallel_tool_calls": False},
        "messages": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        "responses": {"parallel_tool_calls": False},
    },
    "context kept": {"messages": {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}},
    "thinking": {"messages": {"thinking": {"type": "adaptive", "display": "omitted"}}},
    "thinking in updates": {"messages": {"thinking": {"type": "adaptive", "display": "updates"}}},
    "no stop": {"chat": {"stop": []}, "messages": {"stop_sequences": []}},
}
NULLS: dict[str, Sequence[str]] = {
    "chat": (
        *("audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
        *("metadata", "modalities", "n", "parallel_tool_calls", "prediction", "presence_penalty", "reasoning_effort", "response_format"),
        *("seed", "service_tier", "stop", "store", "stream", "stream_options", "temperature", "tool_choice", "tools", "top_logprobs"),
        *("top_p", "user", "verbosity", "web_search_options", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    ),
    "messages": (
        *("container", "context_management", "inference_geo", "mcp_servers", "metadata", "output_config", "service_tier", "stop_sequences"),
        *("stream", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p", "cache_control"),
    ),
    "responses": (
        *(
            "background",
            "conversation",
            "include",
            "instructions",
            "max_output_tokens",
            "max_tool_calls",
            "metadata",
            "parallel_tool_calls",
        ),
        *("previous_response_id", "prompt", "reasoning", "safety_identifier", "service_tier", "store", "stream", "stream_options"),
        *("temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "user"),
    ),
}
REFUSED: dict[str, dict[str, tuple[dict[str, Any], str]]] = {
    "a temperature as text": {name: ({"temperature": "hot"}, "temperature") for name in PATHS},
    "a temperature out of range": {name: ({"temperature": 9}, "temperature") for name in PATHS},
    "top_p out of range": {name: ({"top_p": True}, "top_p") for name in PATHS},
    "several choices": {"chat": ({"n": 2}, "n")},
    "logprobs": {"chat": ({"logprobs": True}, "logprobs"), "responses": ({"top_logprobs": 2}, "top_logprobs")},
    "included logprobs": {"responses": ({"include": ["message.output_text.logprobs"]}, "include[0]")},
    "truncation": {"responses": ({"truncation": "auto"}, "truncation")},
    "a tier": {name: ({"service_tier": "flex"}, "service_tier") for name in PATHS},
    "an effort": {
        "chat": ({"reasoning_effort": 3}, "reasoning_effort"),
        "messages": ({"output_config": {"effort": "x"}}, "output_config.effort"),
        "responses": ({"reasoning": {"effort": "x"}}, "reasoning.effort"),
    },
    "a forced call without tools": {
        "chat": ({"tool_choice": "required"}, "tool_choice"),
        "messages": ({"tool_choice": {"type": "any"}}, "tool_choice"),
        "responses": ({"tool_choice": "required"}, "tool_choice"),
    },
    "a call of an unknown tool": {
        "chat": ({"tools": [tool("chat")], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
        "messages": ({"tools": [tool("messages")], "tool_choice": {"type": "tool", "name": "fly"}}, "tool_choice"),
        "responses": ({"tools": [tool("responses")], "tool_choice": {"type": "function", "name": "fly"}}, "tool_choice"),
    },
    "a choice of some tools": {
        "chat": ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        "messages": ({"tool_choice": {"type": "some"}}, "tool_choice"),
        "responses": ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    },
    "a forced call whose name the policy's form cannot express": {
        "chat": ({"tools": [{"type": "function", "function": {"name": 'a"b'}}], "tool_choice": "required"}, "tool_choice"),
        "messages": ({"tools": [{"name": 'a"b', "input_schema": {}}], "tool_choice": {"type": "any"}}, "tool_choice"),
        "responses": ({"tools": [{"type": "function", "name": 'a"b'}], "tool_choice": "required"}, "tool_choice"),
    },
    "an answer of another kind": {
        "chat": ({"response_format": {"type": "grammar"}}, "response_format.type"),
        "messages": ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        "responses": ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    },
    "a schema that cannot be compiled": {
        "chat": (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PATTERN}}},
            "response_format.json_schema.schema.properties.at.pattern",
        ),
        "messages": (
            {"output_config": {"format": {"type": "json_schema", "schema": PATTERN}}},
            "output_config.format.schema.properties.at.pattern",
        ),
        "responses": ({"text": {"format": {"type": "json_schema", "schema": PATTERN}}}, "text.format.schema.properties.at.pattern"),
    },
    "a server-side tool": {name: ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools[0].type") for name in PATHS},
    "parallel as text": {
        "chat": ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        "responses": ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    },
    "strict as text": {
        "chat": ({"tools": [tool("chat", strict="yes")]}, "tools[0].function.strict"),
        "messages": ({"tools": [tool("messages", strict="yes")]}, "tools[0].strict"),
        "responses": ({"tools": [tool("responses", strict="yes")]}, "tools[0].strict"),
    },
    "an empty stop": {"chat": ({"stop": ["a", ""]}, "stop[1]"), "messages": ({"stop_sequences": ["a", ""]}, "stop_sequences[1]")},
    "too many stops": {"chat": ({"stop": ["a"] * 17}, "stop"), "messages": ({"stop_sequences": ["a"] * 17}, "stop_sequences")},
    "tools that are not a list": {name: ({"tools": 0}, "tools") for name in PATHS},
    "a cleared context": {
        "messages": ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]")
    },
    "an unknown field": {name: ({"wings": None}, "wings") for name in PATHS},
    "an unknown field far inside": {
        "chat": ({"stream_options": {"wings": 1}}, "stream_options.wings"),
        "messages": ({"output_config": {"w": 1}}, "output_config.w"),
        "responses": ({"text": {"w": 1}}, "text.w"),
    },
    "a picture": {
        "chat": (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages[0].content[1].type",
        ),
        "messages": (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
            "messages[0].content[1].type",
        ),
        "responses": (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}]},
            "input[0].content[1].type",
        ),
    },
}


class Http:
    """A program's connection."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"})

    async def post(self, protocol: str, **more: Any) -> httpx.Response:
        return await self._http.post(PATHS[protocol], json=body(protocol, **more))

    async def answer(self, protocol: str, *messages: Any, **more: Any) -> Any:
        response = await self._http.post(PATHS[protocol], json=body(protocol, *messages, **more))
        assert response.status_code == 200, response.text
        return response.json()


async def run(run_episode: Any, script: Any, program: Any) -> Any:
    async def connected_program(url: str, key: str) -> None:
        await program(Http(url, key))

    outcome = await run_episode(connected_program, script=script if callable(script) else lambda turn, _: script)
    assert outcome.trained_once() and outcome.session.fault is None
    return outcome


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
async def test_supported_options_are_accepted(run_episode: Any, protocol: str) -> None:
    options = {name: by_protocol[protocol] for name, by_protocol in ACCEPTED.items() if protocol in by_protocol}

    async def program(http: Http) -> None:
        for name, extra in options.items():
            assert parse_answer(protocol, await http.answer(protocol, **extra)) == ("1", [], END[protocol]), name
        assert parse_answer(protocol, await http.answer(protocol, **dict.fromkeys(NULLS[protocol]))) == ("1", [], END[protocol])

    outcome = await run(run_episode, "1", program)
    assert outcome.counts == {"answered": len(options) + 1}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
async def test_unsupported_options_are_refused_in_the_protocols_format(run_episode: Any, protocol: str) -> None:
    async def program(http: Http) -> None:
        await http.answer(protocol)
        for name, by_protocol in REFUSED.items():
            if protocol not in by_protocol:
                continue
            extra, path = by_protocol[protocol]
            response = await http.post(protocol, **extra)
            assert response.status_code == 400, name
            ids = {response.headers["request-id"], response.headers["x-request-id"]}
            if protocol == "messages":
                error = response.json()
                assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error", name
                assert path in error["error"]["message"] and ids == {error["request_id"]}, name
            else:
                error = response.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", path) and error["message"] and len(ids) == 1, name

    await run(run_episode, "1", program)


@pytest.mark.parametrize("protocol", PATHS)
async def test_too_long_a_conversation_is_refused_with_the_usual_message(run_episode: Any, protocol: str) -> None:
    """Claude Code and litellm recognize Anthropic's wording, litellm also OpenAI's, and then shorten a conversation."""

    async def program(http: Http) -> None:
        await http.answer(protocol)
        conversation = {"input" if protocol == "responses" else "messages": [{"role": "user", "content": "x" * 30_000}]}
        response = await http.post(protocol, **conversation)
        error = response.json()["error"]
        assert response.status_code == 400 and error["type"] == "invalid_request_error"
        assert "prompt is too long" in error["message"] and "this model's maximum context length is" in error["message"]
        assert protocol == "messages" or error["code"] == "context_length_exceeded"

    await run(run_episode, "1", program)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("with_tools", [False, True], ids=["no tools", "choice none"])
async def test_text_stays_text_if_calls_are_disabled(run_episode: Any, protocol: str, with_tools: bool) -> None:
    """Without tools, or with `tool_choice` none; the conversation continues from the same tokens."""
    none = {"type": "none"} if protocol == "messages" else "none"
    more: dict[str, Any] = {"tools": [tool(protocol)], "tool_choice": none} if with_tools else {}
    looks = "I look." + calls("look", at="there")

    async def program(http: Http) -> None:
        answer = await http.answer(protocol, **more)
        assert parse_answer(protocol, answer) == (looks, [], END[protocol])
        history = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": looks}, {"role": "user", "content": "and?"}]
        await http.answer(protocol, *history, **more)

    outcome = await run(run_episode, looks, program)
    [trajectory] = outcome.episode.trajectories
    assert len(trajectory.turns) == 2 and not any(turn.message.tool_calls for turn in trajectory.turns)


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_an_answer_ends_before_a_stop_sequence_and_later_tokens_are_dropped(run_episode: Any, protocol: str, tokenizer: Any) -> None:
    option = "stop" if protocol == "chat" else "stop_sequences"

    async def program(http: Http) -> None:
        answer = await http.answer(protocol, **{option: ["Observation:", "\nEnd"]})
        assert parse_answer(protocol, answer)[::2] == ("I look.", "stop" if protocol == "chat" else "stop_sequence")
        assert protocol == "chat" or answer["stop_sequence"] == "Observation:"
        history = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "I look."}, {"role": "user", "content": "seen"}]
        answer = await http.answer(protocol, *history, **{option: ["nowhere"]})
        assert parse_answer(protocol, answer)[::2] == ("I look. Observation: seen\nEnd", END[protocol])

    outcome = await run(run_episode, "I look. Observation: seen\nEnd", program)
    [trajectory] = outcome.episode.trajectories
    assert [tokenizer.decode(turn.completion_ids) for turn in trajectory.turns] == [
        "I look. Observation:",
        "I look. Observation: seen\nEnd<|im_end|>",
    ]


@pytest.mark.parametrize("protocol", PATHS)
async def test_only_the_first_call_is_returned_if_parallel_calls_are_disabled(run_episode: Any, protocol: str) -> None:
    """The client gets the first call; the policy sees that the other was not run, and continues from the same tokens."""
    opt = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}} if protocol == "messages" else {"parallel_tool_calls": False}
    more: dict[str, Any] = {"tools": [tool(protocol)], **opt}

    async def program(http: Http) -> None:
        answer = await http.answer(protocol, **more)
        assert parse_answer(protocol, answer) == ("", [("look", {"at": "a"})], CALLED[protocol])
        await http.answer(protocol, *history(protocol, answer, "seen"), **more)

    outcome = await run(run_episode, lambda turn, _: calls("look", at="a") + calls("look", at="b") if not turn else "done", program)
    [trajectory] = outcome.episode.trajectories
    [(first, second), _] = [turn.tool_results for turn in trajectory.turns]
    assert (first.output, first.ok) == ("seen", True) and "one tool call at a time" in second.output and not second.ok


def history(protocol: str, answer: Any, *results: str) -> list[Any]:
    """The conversation after an answer with calls, and their results."""
    user = {"role": "user", "content": "one?"}
    if protocol == "chat":
        message = answer["choices"][0]["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        return [user, message, *({"role": "tool", "tool_call_id": i, "content": text} for i, text in zip(ids, results, strict=True))]
    if protocol == "messages":
        ids = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
        outputs = [{"type": "tool_result", "tool_use_id": i, "content": text} for i, text in zip(ids, results, strict=True)]
        return [user, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": outputs}]
    ids = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": i, "output": text} for i, text in zip(ids, results, strict=True)]
    return [user, *answer["output"], *outputs]


@pytest.mark.parametrize("protocol", PATHS)
async def test_a_strict_tool_is_called_only_with_valid_arguments(run_episode: Any, protocol: str) -> None:
    more = {"tools": [tool(protocol, strict=True)]}
    wrong, right = calls("look", at=3), calls("look", at="a")

    async def program(http: Http) -> None:
        answer = await http.answer(protocol, **more)
        assert parse_answer(protocol, answer) == ("", [("look", {"at": "a"})], CALLED[protocol])
        answer = await http.answer(protocol, *history(protocol, answer, "seen"), **more)
        assert parse_answer(protocol, answer) == (wrong, [], END[protocol]), "text if no call is valid"
        answer = await http.answer(protocol, {"role": "user", "content": "two?"}, tools=[tool(protocol)])
        assert parse_answer(protocol, answer)[1] == [("look", {"at": 3})], "a tool that is not strict accepts any arguments"

    outcome = await run(run_episode, lambda turn, _: (wrong + right, wrong, wrong)[turn], program)
    results = outcome.episode.trajectories[0].turns[0].tool_results
    assert [result.ok for result in results] == [False, True] and "needs a string" in results[0].output


async def test_the_older_functions_form_is_supported(run_episode: Any) -> None:
    """Calls have no ids in this form, and an answer has one call."""
    function = {"name": "look", "parameters": SCHEMA}

    async def program(http: Http) -> None:
        messages: list[Any] = [{"role": "user", "content": "one?"}]
        for number in range(2):
            answer = await http.answer("chat", *messages, functions=[function], function_call="auto")
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
            assert choice["message"]["function_call"] == {"name": "look", "arguments": '{"at": "a"}'}
            messages += [choice["message"], {"role": "function", "name": "look", "content": f"seen {number}"}]
        answer = await http.answer("chat", *messages, functions=[function], function_call="none")
        assert parse_answer("chat", answer) == (calls("look", at="a") + calls("look", at="b"), [], "stop")

    outcome = await run(run_episode, calls("look", at="a") + calls("look", at="b"), program)
    [trajectory] = outcome.episode.trajectories
    assert [turn.tool_results[0].output for turn in trajectory.turns[:2]] == ["seen 0", "seen 1"] and len(trajectory.turns) == 3


async def test_a_late_system_message_reaches_the_policy(run_episode: Any, tokenizer: Any) -> None:
    """As a coding agent sends them between turns, in each protocol."""
    for protocol in PATHS:

        async def program(http: Http, protocol: str = protocol) -> None:
            await http.answer(protocol)
            late = [
                {"role": "assistant", "content": "1"},
                {"role": "system", "content": "It is late."},
                {"role": "user", "content": "two?"},
            ]
            await http.answer(protocol, {"role": "user", "content": "one?"}, *late)

        outcome = await run(run_episode, "1", program)
        assert len(outcome.episode.trajectories) == 1, protocol
        assert "It is late." in tokenizer.decode(outcome.policy.prompts[-1])
