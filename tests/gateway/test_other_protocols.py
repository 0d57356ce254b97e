"""The unmodified Anthropic SDK and the OpenAI SDK's Responses give the same episodes as chat completions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from agentrl.records import ToolResult
from tests.gateway.test_chat_completions import calls, client

if TYPE_CHECKING:  # importing the SDKs takes each worker two seconds; tests import them on use
    import anthropic

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CALLABLE: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": None}
COMPLETIONS = ("<think>hm</think>I look." + calls("look", at="é") + calls("look", at="b"), "It is é.", "Yes.")


def tool_results(outcome: Any) -> list[tuple[ToolResult, ...]]:
    """The results after each turn of an episode that is one trajectory of exact tokens."""
    assert not outcome.episode.failures
    [trajectory] = outcome.episode.trajectories
    assert outcome.trained_once() and [turn.message.content for turn in trajectory.turns] == ["<think>hm</think>I look.", *COMPLETIONS[1:]]
    assert outcome.episode.answer == "Yes."
    return [turn.tool_results for turn in trajectory.turns]


def claude(url: str, key: str) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_anthropic_messages(run_episode: Any, streamed: bool) -> None:
    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]}]

            async def send() -> Any:
                request: Any = {"model": "policy", "max_tokens": 300, "messages": messages, "tools": [LOOK], "system": "Be brief."}
                request["thinking"] = {"type": "enabled", "budget_tokens": 1024}
                if not streamed:
                    return await sdk.messages.create(**request)
                async with sdk.messages.stream(**request) as stream:
                    return await stream.get_final_message()

            message = await send()
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert message.stop_reason == "tool_use" and message.content[2].input == {"at": "é"} and message.usage.output_tokens > 0
            echoed_blocks = [
                block.model_dump(include={"type", "text", "id", "name", "input"}) for block in message.content[1:]
            ]  # the reasoning is dropped
            results = [
                {"type": "tool_result", "tool_use_id": message.content[2].id, "content": [{"type": "text", "text": "A"}]},
                {"type": "tool_result", "tool_use_id": message.content[3].id, "content": "none", "is_error": True},
            ]
            messages += [{"role": "assistant", "content": echoed_blocks}, {"role": "user", "content": results}]
            message = await send()
            assert message.stop_reason == "end_turn"
            messages += [{"role": "assistant", "content": message.content[0].text}, {"role": "user", "content": "sure?"}]
            await send()

    results = tool_results(await run_episode(program, *COMPLETIONS))
    assert [(result.name, result.output, result.ok) for result in results[0]] == [("look", "A", True), ("look", "none", False)]
    assert [(result.name, result.output) for result in results[1]] == [("user", "sure?")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("by_id", [False, True], ids=["all-items", "previous-response"])
async def test_openai_responses(run_episode: Any, streamed: bool, by_id: bool) -> None:
    async def program(url: str, key: str) -> None:
        async with client(url, key) as sdk:
            items: list[Any] = []

            async def send(*added: Any, after: Any = None) -> Any:
                items.extend(added)
                options = {"input": list(added), "previous_response_id": after and after.id} if by_id else {"input": items}
                request: Any = {"model": "policy", "tools": [CALLABLE], "instructions": "Be brief.", "store": by_id, **options}
                if not streamed:
                    response = await sdk.responses.create(**request)
                else:
                    async with sdk.responses.stream(**{name: value for name, value in request.items() if value is not None}) as stream:
                        response = await stream.get_final_response()
                echoed_fields = {"type", "role", "content", "call_id", "name", "arguments"}
                items.extend(item.model_dump(include=echoed_fields) for item in response.output if item.type != "reasoning")
                return response

            response = await send({"role": "user", "content": "look"})
            assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
            assert json.loads(response.output[2].arguments) == {"at": "é"} and response.usage.output_tokens > 0
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id, "output": name}
                for call, name in zip(response.output[2:], "AB", strict=True)
            ]
            response = await send(*outputs, after=response)
            assert response.output_text == "It is é." and response.status == "completed"
            await send({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}, after=response)

    results = tool_results(await run_episode(program, *COMPLETIONS))
    assert [(result.name, result.output) for result in results[0]] == [("look", "A"), ("look", "B")]
    assert [(result.name, result.output) for result in results[1]] == [("user", "sure?")]


@pytest.mark.parametrize("text", ["I look at it first.", "I look at what is there before I change anything in it."], ids=["short", "long"])
async def test_a_title_that_quotes_a_running_call_is_not_a_sub_agent(run_episode: Any, text: str) -> None:
    """The agent requests a title for the conversation, with the complete history, while the first call runs."""

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            options: Any = {"model": "policy", "max_tokens": 300, "system": "You help.", "tools": [LOOK]}
            messages: list[Any] = [{"role": "user", "content": "Mend area.py."}]
            message = await sdk.messages.create(messages=messages, **options)
            text_block, call = message.content
            transcript = f"Conversation:\nUser: Mend area.py.\nAssistant: {text_block.text}\n@look({call.id}): {json.dumps(call.input)}\n"
            title_request: Any = [{"role": "user", "content": f"Your task: a title for this.\n{transcript}"}]
            await sdk.messages.create(model="policy", max_tokens=300, messages=title_request, system="Titles.")
            messages += [{"role": "assistant", "content": [block.model_dump() for block in message.content]}]
            messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "seen"}]}]
            await sdk.messages.create(messages=messages, **options)

    outcome = await run_episode(program, text + calls("look", at="the file area.py and its test"), "Mending area", "Done.")
    assert outcome.trained_once() and outcome.episode.answer == "Done."
    assert [(trajectory.agent, len(trajectory.turns)) for trajectory in outcome.episode.trajectories] == [("main", 2), ("auxiliary", 1)]


async def test_tools_in_a_namespace_are_called_by_both_names(run_episode: Any) -> None:
    """A coding agent with sub-agents: its calls are sent back with a separate namespace and continue from the sampled tokens."""
    import openai

    spawn = {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": SCHEMA, "strict": False}
    team: Any = {"type": "namespace", "name": "team", "description": "Sub-agents.", "tools": [spawn]}

    async def program(url: str, key: str) -> None:
        async with client(url, key, max_retries=0) as sdk:
            items: list[Any] = [{"role": "user", "content": "go"}]
            response = await sdk.responses.create(model="policy", input=items, tools=[CALLABLE, team], store=False)
            in_team, plain = response.output
            assert (in_team.namespace, in_team.name) == ("team", "spawn") and (plain.namespace, plain.name) == (None, "look")
            items += [item.model_dump(exclude_none=True, exclude={"status"}) for item in response.output]
            items += [{"type": "function_call_output", "call_id": item.call_id, "output": item.name} for item in response.output]
            await sdk.responses.create(model="policy", input=items, tools=[CALLABLE, team], store=False)
            for bad in ([team, team], [team, {**CALLABLE, "name": "team__spawn"}], [{**team, "tools": [{"type": "custom", "name": "x"}]}]):
                with pytest.raises(openai.BadRequestError):
                    await sdk.responses.create(model="policy", input=items, tools=bad)

    outcome = await run_episode(program, calls("team__spawn", at="a") + calls("look"), "done")
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1
    assert [result.output for result in outcome.episode.trajectories[0].turns[0].tool_results] == ["spawn", "look"]
    assert outcome.counts == {"answered": 2, "refused_invalid": 2, "refused_unsupported": 1}


FIND: Any = {"name": "find", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
MOVE: Any = {
    **{"name": "move", "description": "Moves.", "strict": True, "defer_loading": True},
    "input_schema": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
}
LATER: Any = {"name": "later", "description": "Is never searched for.", "input_schema": {"type": "object"}, "defer_loading": True}


async def test_a_deferred_tool_is_shown_when_a_result_refers_to_it(run_episode: Any, tokenizer: Any) -> None:
    """In a program with a tool search, the list of tools grows with the search results; the context stays."""

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            messages: list[Any] = [{"role": "user", "content": "go"}]

            async def send(*tools: Any, content: Any, **options: Any) -> None:
                message = await sdk.messages.create(model="policy", max_tokens=300, messages=messages, tools=list(tools), **options)
                [call] = [block for block in message.content if block.type == "tool_use"]
                messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
                messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]})

            await send(LOOK, FIND, LATER, content=[{"type": "tool_reference", "tool_name": "move"}])
            await send(LOOK, FIND, MOVE, LATER, content="moved")  # the call that does not match the schema is withheld
            message = await sdk.messages.create(model="policy", max_tokens=300, messages=messages, tools=[LOOK, FIND, MOVE, LATER])
            assert message.content[0].text == "done"

    outcome = await run_episode(program, calls("find", query="mov"), calls("move", by="far") + calls("move", by=3), "done")
    [trajectory] = outcome.episode.trajectories
    assert outcome.trained_once() and len(trajectory.turns) == 3 and not outcome.episode.failures
    assert outcome.counts == {"answered": 3, "withheld_call": 1}
    first, second, _ = (tokenizer.decode(prompt) for prompt in outcome.policy.prompts)
    assert "Moves." not in first and "never searched" not in second
    definition = {"name": "move", "description": "Moves.", "parameters": MOVE["input_schema"]}
    assert json.dumps({"type": "function", "function": definition}) in second


async def test_tool_references_are_checked_and_bounded(run_episode: Any) -> None:
    import anthropic

    def after(*content: Any) -> Any:
        call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": list(content)}
        return [*good_request["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    good_request: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "tools": [FIND, MOVE]}
    to_move = {"type": "tool_reference", "tool_name": "move"}

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            await sdk.messages.create(**good_request)
            large = {**MOVE, "description": "m" * 100_000}
            bad_requests: list[tuple[dict[str, Any], type[Exception], str]] = [
                ({"messages": after({**to_move, "tool_name": "fly"})}, anthropic.BadRequestError, "tool_name"),
                ({"messages": after({"type": "tool_reference"})}, anthropic.BadRequestError, "tool_name"),
                ({"messages": after(*[to_move] * 100), "tools": [FIND, large]}, anthropic.APIStatusError, "references to tools"),
                ({"tool_choice": {"type": "tool", "name": "move"}}, anthropic.BadRequestError, "tool_choice"),
                ({"tools": [{**MOVE, "defer_loading": "yes"}]}, anthropic.BadRequestError, "defer_loading"),
            ]
            for extra, error_type, error_text in bad_requests:
                with pytest.raises(error_type, match=error_text):
                    await sdk.messages.create(**{**good_request, **extra})

    outcome = await run_episode(program, "1")
    assert outcome.counts == {"answered": 1, "refused_invalid": 4, "refused_too_large": 1}


async def test_each_protocol_has_its_own_error_format(run_episode: Any) -> None:
    import anthropic
    import openai

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            good_request: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "one?"}]}
            await sdk.messages.create(**good_request)
            bad_requests: list[tuple[dict[str, Any], Any, str]] = [
                ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
                ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "invalid_request_error"),
                ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "invalid_request_error"),
                ({"extra_body": {"wings": 2}}, anthropic.BadRequestError, "invalid_request_error"),
            ]
            for extra, error_type, name in bad_requests:
                with pytest.raises(error_type) as refused:
                    await sdk.messages.create(**{**good_request, **extra})
                assert refused.value.body["error"]["type"] == name
        async with claude(url, "wrong") as sdk:
            with pytest.raises(anthropic.AuthenticationError):
                await sdk.messages.create(**good_request)
        async with client(url, key, max_retries=0) as openai_sdk:
            for extra, error_type in (
                ({"previous_response_id": "resp_0"}, openai.NotFoundError),
                ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
                ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError),
                ({"text": {"format": {"type": "grammar"}}}, openai.BadRequestError),
            ):
                with pytest.raises(error_type):
                    await openai_sdk.responses.create(**{"model": "policy", "input": "one?", **extra})

    outcome = await run_episode(program, "1")
    assert outcome.trained_once() and outcome.counts["answered"] == 1
