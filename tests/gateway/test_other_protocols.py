"""The Anthropic SDK, and Responses of the OpenAI SDK, unchanged: the same episodes as over chat completions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from agentrl.records import ToolResult
from tests.gateway.test_chat_completions import calls, client

if TYPE_CHECKING:  # two seconds of imports for each worker; they are made where the SDKs are used
    import anthropic

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK: Any = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
CALLABLE: Any = {"type": "function", "name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": None}
SAID = ("<think>hm</think>I look." + calls("look", at="é") + calls("look", at="b"), "It is é.", "Yes.")


def one_line(outcome: Any) -> list[tuple[ToolResult, ...]]:
    """The results after each turn of an episode that is one trajectory of exact tokens."""
    assert not outcome.episode.failures
    [line] = outcome.episode.trajectories
    assert outcome.trained_once() and [turn.message.content for turn in line.turns] == ["<think>hm</think>I look.", *SAID[1:]]
    assert outcome.episode.answer == "Yes."
    return [turn.tool_results for turn in line.turns]


def claude(url: str, key: str) -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_anthropic_messages(lead: Any, streams: bool) -> None:
    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]}]

            async def ask() -> Any:
                given: Any = {"model": "policy", "max_tokens": 300, "messages": messages, "tools": [LOOK], "system": "Be brief."}
                given["thinking"] = {"type": "enabled", "budget_tokens": 1024}
                if not streams:
                    return await sdk.messages.create(**given)
                async with sdk.messages.stream(**given) as stream:
                    return await stream.get_final_message()

            made = await ask()
            assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert made.stop_reason == "tool_use" and made.content[2].input == {"at": "é"} and made.usage.output_tokens > 0
            shown = [
                block.model_dump(include={"type", "text", "id", "name", "input"}) for block in made.content[1:]
            ]  # the reasoning is dropped
            results = [
                {"type": "tool_result", "tool_use_id": made.content[2].id, "content": [{"type": "text", "text": "A"}]},
                {"type": "tool_result", "tool_use_id": made.content[3].id, "content": "none", "is_error": True},
            ]
            messages += [{"role": "assistant", "content": shown}, {"role": "user", "content": results}]
            made = await ask()
            assert made.stop_reason == "end_turn"
            messages += [{"role": "assistant", "content": made.content[0].text}, {"role": "user", "content": "sure?"}]
            await ask()

    results = one_line(await lead(program, *SAID))
    assert [(one.name, one.output, one.ok) for one in results[0]] == [("look", "A", True), ("look", "none", False)]
    assert [(one.name, one.output) for one in results[1]] == [("user", "sure?")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("refers", [False, True], ids=["all-items", "previous-response"])
async def test_openai_responses(lead: Any, streams: bool, refers: bool) -> None:
    async def program(url: str, key: str) -> None:
        async with client(url, key) as sdk:
            items: list[Any] = []

            async def ask(*new: Any, after: Any = None) -> Any:
                items.extend(new)
                more = {"input": list(new), "previous_response_id": after.id if after else None} if refers else {"input": items}
                given: Any = {"model": "policy", "tools": [CALLABLE], "instructions": "Be brief.", "store": refers, **more}
                if not streams:
                    made = await sdk.responses.create(**given)
                else:
                    async with sdk.responses.stream(**{name: one for name, one in given.items() if one is not None}) as stream:
                        made = await stream.get_final_response()
                kept = ({"type", "role", "content", "call_id", "name", "arguments"}, "reasoning")
                items.extend(one.model_dump(include=kept[0]) for one in made.output if one.type != kept[1])
                return made

            made = await ask({"role": "user", "content": "look"})
            assert [one.type for one in made.output] == ["reasoning", "message", "function_call", "function_call"]
            assert json.loads(made.output[2].arguments) == {"at": "é"} and made.usage.output_tokens > 0
            outputs = [
                {"type": "function_call_output", "call_id": one.call_id, "output": name}
                for one, name in zip(made.output[2:], "AB", strict=True)
            ]
            made = await ask(*outputs, after=made)
            assert made.output_text == "It is é." and made.status == "completed"
            await ask({"role": "user", "content": [{"type": "input_text", "text": "sure?"}]}, after=made)

    results = one_line(await lead(program, *SAID))
    assert [(one.name, one.output) for one in results[0]] == [("look", "A"), ("look", "B")]
    assert [(one.name, one.output) for one in results[1]] == [("user", "sure?")]


@pytest.mark.parametrize("words", ["I look at it first.", "I look at what is there before I change anything in it."], ids=["short", "long"])
async def test_a_title_that_quotes_a_running_call_is_not_a_sub_agent(lead: Any, words: str) -> None:
    """An agent that names its conversations requests a title while the first call runs, with the complete history."""

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            given: Any = {"model": "policy", "max_tokens": 300, "system": "You help.", "tools": [LOOK]}
            messages: list[Any] = [{"role": "user", "content": "Mend area.py."}]
            made = await sdk.messages.create(messages=messages, **given)
            said, call = made.content
            told = f"Conversation:\nUser: Mend area.py.\nAssistant: {said.text}\n@look({call.id}): {json.dumps(call.input)}\n"
            asked: Any = [{"role": "user", "content": f"Your task: a title for this.\n{told}"}]
            await sdk.messages.create(model="policy", max_tokens=300, messages=asked, system="Titles.")
            messages += [{"role": "assistant", "content": [one.model_dump() for one in made.content]}]
            messages += [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "seen"}]}]
            await sdk.messages.create(messages=messages, **given)

    outcome = await lead(program, words + calls("look", at="the file area.py and its test"), "Mending area", "Done.")
    assert outcome.trained_once() and outcome.episode.answer == "Done."
    assert [(line.agent, len(line.turns)) for line in outcome.episode.trajectories] == [("main", 2), ("auxiliary", 1)]


async def test_tools_in_a_namespace_are_called_by_both_names(lead: Any) -> None:
    """A coding agent with sub-agents: its calls come back with the namespace separate, and continue from the sampled tokens."""
    import openai

    spawn = {"type": "function", "name": "spawn", "description": "Starts one.", "parameters": SCHEMA, "strict": False}
    team: Any = {"type": "namespace", "name": "team", "description": "Sub-agents.", "tools": [spawn]}

    async def program(url: str, key: str) -> None:
        async with client(url, key, max_retries=0) as sdk:
            items: list[Any] = [{"role": "user", "content": "go"}]
            made = await sdk.responses.create(model="policy", input=items, tools=[CALLABLE, team], store=False)
            in_team, plain = made.output
            assert (in_team.namespace, in_team.name) == ("team", "spawn") and (plain.namespace, plain.name) == (None, "look")
            items += [one.model_dump(exclude_none=True, exclude={"status"}) for one in made.output]
            items += [{"type": "function_call_output", "call_id": one.call_id, "output": one.name} for one in made.output]
            await sdk.responses.create(model="policy", input=items, tools=[CALLABLE, team], store=False)
            for bad in ([team, team], [team, {**CALLABLE, "name": "team__spawn"}], [{**team, "tools": [{"type": "custom", "name": "x"}]}]):
                with pytest.raises(openai.BadRequestError):
                    await sdk.responses.create(model="policy", input=items, tools=bad)

    outcome = await lead(program, calls("team__spawn", at="a") + calls("look"), "done")
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1
    assert [one.output for one in outcome.episode.trajectories[0].turns[0].tool_results] == ["spawn", "look"]
    assert outcome.counts == {"answered": 2, "refused_invalid": 2, "refused_unsupported": 1}


FIND: Any = {"name": "find", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
MOVE: Any = {
    **{"name": "move", "description": "Moves.", "strict": True, "defer_loading": True},
    "input_schema": {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]},
}
LATER: Any = {"name": "later", "description": "Is never searched for.", "input_schema": {"type": "object"}, "defer_loading": True}


async def test_a_deferred_tool_is_shown_when_a_result_refers_to_it(lead: Any, tokenizer: Any) -> None:
    """A program with a tool search: the list of tools grows with search results, and the context stays."""

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            messages: list[Any] = [{"role": "user", "content": "go"}]

            async def ask(*tools: Any, content: Any, **more: Any) -> None:
                made = await sdk.messages.create(model="policy", max_tokens=300, messages=messages, tools=list(tools), **more)
                [call] = [block for block in made.content if block.type == "tool_use"]
                messages.append({"role": "assistant", "content": [block.model_dump() for block in made.content]})
                messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": content}]})

            await ask(LOOK, FIND, LATER, content=[{"type": "tool_reference", "tool_name": "move"}])
            await ask(LOOK, FIND, MOVE, LATER, content="moved")  # the call that does not match the schema is withheld
            made = await sdk.messages.create(model="policy", max_tokens=300, messages=messages, tools=[LOOK, FIND, MOVE, LATER])
            assert made.content[0].text == "done"

    outcome = await lead(program, calls("find", query="mov"), calls("move", by="far") + calls("move", by=3), "done")
    [line] = outcome.episode.trajectories
    assert outcome.trained_once() and len(line.turns) == 3 and not outcome.episode.failures
    assert outcome.counts == {"answered": 3, "withheld_call": 1}
    first, second, _ = (tokenizer.decode(prompt) for prompt in outcome.policy.prompts)
    assert "Moves." not in first and "never searched" not in second
    definition = {"name": "move", "description": "Moves.", "parameters": MOVE["input_schema"]}
    assert json.dumps({"type": "function", "function": definition}) in second


async def test_tool_references_are_checked_and_bounded(lead: Any) -> None:
    import anthropic

    def after(*content: Any) -> Any:
        call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": list(content)}
        return [*good["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]

    good: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], "tools": [FIND, MOVE]}
    to_move = {"type": "tool_reference", "tool_name": "move"}

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            await sdk.messages.create(**good)
            large = {**MOVE, "description": "m" * 100_000}
            wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
                ({"messages": after({**to_move, "tool_name": "fly"})}, anthropic.BadRequestError, "tool_name"),
                ({"messages": after({"type": "tool_reference"})}, anthropic.BadRequestError, "tool_name"),
                ({"messages": after(*[to_move] * 100), "tools": [FIND, large]}, anthropic.APIStatusError, "references to tools"),
                ({"tool_choice": {"type": "tool", "name": "move"}}, anthropic.BadRequestError, "tool_choice"),
                ({"tools": [{**MOVE, "defer_loading": "yes"}]}, anthropic.BadRequestError, "defer_loading"),
            ]
            for more, kind, says in wrong:
                with pytest.raises(kind, match=says):
                    await sdk.messages.create(**{**good, **more})

    outcome = await lead(program, "1")
    assert outcome.counts == {"answered": 1, "refused_invalid": 4, "refused_too_large": 1}


async def test_each_protocol_has_its_own_error_format(lead: Any) -> None:
    import anthropic
    import openai

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            good: Any = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "one?"}]}
            await sdk.messages.create(**good)
            wrong: list[tuple[dict[str, Any], Any, str]] = [
                ({"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
                ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError, "invalid_request_error"),
                ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, anthropic.BadRequestError, "invalid_request_error"),
                ({"extra_body": {"wings": 2}}, anthropic.BadRequestError, "invalid_request_error"),
            ]
            for more, kind, name in wrong:
                with pytest.raises(kind) as refused:
                    await sdk.messages.create(**{**good, **more})
                assert refused.value.body["error"]["type"] == name
        async with claude(url, "wrong") as sdk:
            with pytest.raises(anthropic.AuthenticationError):
                await sdk.messages.create(**good)
        async with client(url, key, max_retries=0) as other:
            for more, kind in (
                ({"previous_response_id": "resp_0"}, openai.NotFoundError),
                ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
                ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError),
                ({"text": {"format": {"type": "grammar"}}}, openai.BadRequestError),
            ):
                with pytest.raises(kind):
                    await other.responses.create(**{"model": "policy", "input": "one?", **more})

    outcome = await lead(program, "1")
    assert outcome.trained_once() and outcome.counts["answered"] == 1
