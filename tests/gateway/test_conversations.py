"""Conversations that programs send back reworded or in other pieces: roles, parents and answers are recognized."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest

from agentrl.gateway import ConversationTokens
from agentrl.gateway.request import RequestError
from agentrl.records import Message, Parent
from tests.chats import chat_of
from tests.gateway.test_chat_completions import ASK, LOOK, calls, user
from tests.gateway.test_options import PATHS, body, run, tool
from tests.gateway.test_other_protocols import claude

TASK = "Find out how wide the table is, and say it in centimetres."
LEAD = {"role": "system", "content": "You lead a team.\nYou may use tools."}
COMMIT = {"role": "system", "content": "You write commit messages of one line."}
WIDTH = "what is the width of the table?"


async def words(http: Any, *messages: Any, tools: Any = ()) -> Any:
    made = await http.answer("chat", *messages, **({"tools": list(tools)} if tools else {}))
    return made["choices"][0]["message"]


def as_text(message: Any, result: str) -> str:
    """A call and its result as text, as programs write them for models without tool calls."""
    made = [f"{one['function']['name']}({one['function']['arguments']})" for one in message["tool_calls"]]
    return f"Calling tools: {made}\nObservation: {result}"


REWRITTEN = {
    "as the assistant's words": lambda said: [{"role": "assistant", "content": as_text(said, "3")}, user("Go on.")],
    "as the user's words": lambda said: [user(as_text(said, "3"))],
    "as results without a call": lambda said: [{"role": "assistant", "content": "I asked."}, user(f"{WIDTH}: 3")],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", [*REWRITTEN, "in one message"])
@pytest.mark.parametrize("system", [True, False])
async def test_a_main_agent_that_puts_its_calls_into_text_is_the_main_agent(lead: Any, way: str, system: bool) -> None:
    head = [LEAD] if system else []

    async def program(http: Any) -> None:
        said = await words(http, *head, user(TASK), tools=(ASK,))
        if way == "in one message":
            await words(http, *head, user(f"{TASK}\n\n{as_text(said, '3')}"), tools=(ASK,))
        else:
            await words(http, *head, user(TASK), *REWRITTEN[way](said), tools=(ASK,))
        await words(http, COMMIT, user("diff --git a b"))

    script = (calls("ask", question=WIDTH), "It is 3 cm wide.", "Measure the table")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    lines = outcome.episode.trajectories
    assert [(line.agent, line.parent) for line in lines] == [("main", None), ("main", Parent(trajectory=0, turn=0)), ("auxiliary", None)]
    assert outcome.episode.answer == "It is 3 cm wide."


@pytest.mark.parametrize("quotes", [False, True])
@pytest.mark.parametrize("tools", [False, True])
async def test_a_commit_message_is_not_the_answer_of_a_program_that_rewrites_its_history(lead: Any, quotes: bool, tools: bool) -> None:
    offered: Any = (LOOK,) if tools else ()

    async def program(http: Any) -> None:
        first = await words(http, LEAD, user(TASK), tools=offered)
        history = [{"role": "assistant", "content": "(something was said)"}, user("And now?")]
        await words(http, LEAD, user(TASK), *history, tools=offered)
        about = f"The work so far: {first['content']}" if quotes else "diff --git a b"
        await words(http, COMMIT, user(about))

    script = ("I shall measure the table with a ruler first.", "It is 3 cm wide.", "Measure the table")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    assert [line.agent for line in outcome.episode.trajectories] == ["main", "main", "auxiliary"]
    assert outcome.episode.trajectories[1].parent == Parent(trajectory=0, turn=0) and outcome.episode.answer == "It is 3 cm wide."


@pytest.mark.parametrize("commit", [True, False])
async def test_a_program_with_separate_contexts_has_one_main_agent(lead: Any, commit: bool) -> None:
    """A changing map of the files is first in each request; the requests share only a system message."""

    async def program(http: Any) -> None:
        for number in range(2):
            await words(http, LEAD, user(f"The files, at {number}:\na.py"), user(TASK))
        if commit:
            await words(http, COMMIT, user("diff --git a b"))

    outcome = await run(lead, lambda turn, _: ("I measure.", "It is 3 cm wide.", "Measure the table")[turn], program)
    assert [line.agent for line in outcome.episode.trajectories] == ["main", "main", "auxiliary"][: 2 + commit]
    assert outcome.episode.answer == "It is 3 cm wide."


async def test_a_plan_and_its_execution_are_both_main_work(lead: Any) -> None:
    """Two requests with separate system messages; the second quotes the first one's answer, and gives the final answer."""
    plan = "First measure the table with a ruler, then say it."

    async def program(http: Any) -> None:
        await words(http, {"role": "system", "content": "You plan."}, user(TASK))
        await words(http, {"role": "system", "content": "You carry out plans."}, user(f"The plan: {plan}"))

    outcome = await run(lead, lambda turn, _: (plan, "It is 3 cm wide.")[turn], program)
    assert [line.agent for line in outcome.episode.trajectories] == ["main", "main"] and outcome.episode.answer == "It is 3 cm wide."


async def test_a_sub_agent_that_rewrites_its_history_stays_one_and_the_next_one_is_another(lead: Any) -> None:
    """Both start while their calls run, and the second one's task is a separate message after text of the framework."""
    others = ("what is the height of the table?", WIDTH)

    async def program(http: Any) -> None:
        said = await words(http, LEAD, user(TASK), tools=(ASK,))
        for question in others:
            opening = [{"role": "system", "content": "You help."}, user("It is 10:00."), user(question)]
            found = await words(http, *opening, tools=(LOOK,))
            await words(http, *opening, user(as_text(found, "3")), tools=(LOOK,))
        shown = [{"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in said["tool_calls"]]
        await words(http, LEAD, user(TASK), said, *shown, tools=(ASK,))

    script = ("".join(calls("ask", question=one) for one in others), calls("look"), "3 cm", calls("look"), "4 cm", "3 cm and 4 cm")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    main = Parent(trajectory=0, turn=0, call=0), Parent(trajectory=0, turn=0, call=1)
    assert [(line.agent, line.parent) for line in outcome.episode.trajectories] == [
        ("main", None),
        ("sub-agent", main[0]),
        ("sub-agent", Parent(trajectory=1, turn=0)),
        ("sub-agent", main[1]),
        ("sub-agent", Parent(trajectory=3, turn=0)),
    ]
    assert outcome.episode.answer == "3 cm and 4 cm"


async def test_a_restart_after_an_unused_answer_belongs_to_the_main_agent(lead: Any) -> None:
    async def program(http: Any) -> None:
        for _ in range(3):
            await words(http, LEAD, user(TASK), tools=(ASK,))
        await words(http, {"role": "system", "content": "You measure."}, user("Measure."), tools=(LOOK,))

    script = (calls("ask", question=WIDTH), calls("ask", question=WIDTH), "It is 3 cm wide.", "3")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    first, second, third, other = outcome.episode.trajectories
    assert [line.agent for line in (first, second, third)] == ["main"] * 3 and outcome.episode.answer == "It is 3 cm wide."
    assert (second.parent, third.parent) == (None, None)
    assert other.agent == "sub-agent", "another request while a call is running"


@pytest.mark.slow
async def test_two_sub_agents_with_the_same_task_belong_to_two_calls(lead: Any) -> None:
    async def program(http: Any) -> None:
        await words(http, LEAD, user(TASK), tools=(ASK,))
        for _ in range(2):
            await words(http, user(WIDTH), tools=(LOOK,))

    script = (calls("ask", question=WIDTH) * 2, "3 cm", "4 cm")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    lines = outcome.episode.trajectories
    assert [line.agent for line in lines] == ["main", "sub-agent", "sub-agent"]
    assert [line.parent and (line.parent.trajectory, line.parent.call) for line in lines] == [None, (0, 0), (0, 1)]


async def test_questions_with_the_same_examples_are_separate(lead: Any) -> None:
    examples = [user("2 + 2?"), {"role": "assistant", "content": "4"}]

    async def program(http: Any) -> None:
        for question in ("3 + 3?", "4 + 4?", "4 + 4?"):
            await words(http, LEAD, *examples, user(question))

    outcome = await run(lead, lambda turn, _: str(turn), program)
    assert [line.parent for line in outcome.episode.trajectories] == [None, None, None]


# One turn in several pieces ---------------------------------------------------------------------------------------------

TEXT, CALL = {"role": "assistant", "content": "I look, and then\n\nsay it."}, {"at": "a"}


def pieces(protocol: str, way: str, answer: Any) -> list[Any]:
    """An answer of text and two calls, given back in pieces, with the results of the calls."""
    if protocol == "chat":
        made = answer["choices"][0]["message"]["tool_calls"]
        results = [{"role": "tool", "tool_call_id": one["id"], "content": f"seen {at}"} for at, one in enumerate(made)]
        one, two = ({"role": "assistant", "content": None, "tool_calls": [call]} for call in made)
        both: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": made}
    elif protocol == "messages":
        made = [block for block in answer["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": one["id"], "content": f"seen {at}"} for at, one in enumerate(made)]
        results = [{"role": "user", "content": [block]} for block in blocks]
        one, two = ({"role": "assistant", "content": [call]} for call in made)
        both = {"role": "assistant", "content": made}
    else:
        one, two = (item for item in answer["output"] if item["type"] == "function_call")
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"seen {at}"} for at, call in enumerate((one, two))
        ]
        return {
            "calls before text": [one, two, TEXT, *results],
            "text between calls": [one, TEXT, two, *results],
            "two texts": [*halves(), one, two, *results],
            "each call with its result": [TEXT, one, results[0], two, results[1]],
        }[way]
    return {
        "calls before text": [both, TEXT, *results],
        "text between calls": [one, TEXT, two, *results],
        "two texts": [*halves(), both, *results],
        "each call with its result": [TEXT, one, results[0], two, results[1]],
    }[way]


def halves() -> list[Any]:
    head, tail = TEXT["content"].split("\n\n")
    return [{"role": "assistant", "content": head}, {"role": "assistant", "content": tail}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("way", ["calls before text", "text between calls", "two texts", "each call with its result"])
async def test_a_split_turn_is_one_turn(lead: Any, protocol: str, way: str) -> None:
    async def program(http: Any) -> None:
        made = await http.answer(protocol, tools=[tool(protocol)])
        await http.answer(protocol, user("one?"), *pieces(protocol, way, made), tools=[tool(protocol)])

    script = (TEXT["content"] + calls("look", at="a") + calls("look", at="b"), "done")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    [line] = outcome.episode.trajectories
    assert [one.output for one in line.turns[0].tool_results] == ["seen 0", "seen 1"] and outcome.counts == {"answered": 2}


@pytest.mark.parametrize("protocol", PATHS)
async def test_two_joined_turns_are_two_turns(lead: Any, protocol: str) -> None:
    """A program continues after a cut answer, and sends both parts as one message or as two."""
    bound = "max_output_tokens" if protocol == "responses" else "max_tokens"

    async def program(http: Any) -> None:
        start, rest = ({"role": "assistant", "content": text} for text in ("a long", "answer"))
        await http.answer(protocol, **{bound: 6})
        await http.answer(protocol, user("one?"), start)
        await http.answer(protocol, user("one?"), start, rest, user("two?"))
        await http.answer(protocol, user("one?"), {**start, "content": "a long answer"}, user("three?"))

    outcome = await run(lead, lambda turn, _: ("a long answer", "answer", "2", "3")[turn], program)
    assert [len(line.turns) for line in outcome.episode.trajectories] == [3, 1] and outcome.counts["branch"] == 1


async def test_calls_may_come_back_with_other_ids(lead: Any) -> None:
    async def program(http: Any) -> None:
        said = await words(http, user("one?"), tools=(LOOK,))
        named = [{**one, "id": f"abc{at}"} for at, one in enumerate(said["tool_calls"])]
        shown = [{"role": "tool", "tool_call_id": one["id"], "content": one["id"]} for one in reversed(named)]
        await words(http, user("one?"), {**said, "tool_calls": named}, *shown, tools=(LOOK,))

    script = (calls("look") + calls("look", at="b"), "done")
    outcome = await run(lead, lambda turn, _: script[turn], program)
    [line] = outcome.episode.trajectories
    assert [one.name for one in line.turns[0].tool_results] == ["look", "look"]


@pytest.mark.slow
async def test_a_coding_agent_with_kept_reasoning_and_reminders(lead: Any, tokenizer: Any) -> None:
    """As Claude Code does: a late system message, kept reasoning, and thinking blocks sent back."""
    keep: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            given: Any = {"model": "policy", "max_tokens": 300, "system": "You code.", "thinking": {"type": "adaptive"}}
            given |= {"tools": [{"name": "look", "input_schema": {"type": "object"}}], "betas": ["context-management-2025-06-27"]}
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]}]
            made = await sdk.beta.messages.create(messages=messages, context_management=keep, **given)
            messages += [{"role": "assistant", "content": [one.model_dump(exclude_none=True) for one in made.content]}]
            result = {"type": "tool_result", "tool_use_id": made.content[-1].id, "content": "seen"}
            messages += [{"role": "user", "content": [result]}, {"role": "system", "content": "Mind the budget."}]
            await sdk.beta.messages.create(messages=messages, context_management=keep, **given)

    outcome = await lead(program, "<think>hm</think>I look." + calls("look"), "done")
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1 and outcome.counts == {"answered": 2}
    assert tokenizer.decode(outcome.policy.prompts[-1]).count("Mind the budget.") == 1


async def test_a_template_without_late_system_messages_shows_them_as_the_users(tokenizer: Any) -> None:
    refuses = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{% endfor %}"
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = refuses + tokenizer.chat_template
    tokens = ConversationTokens(chat_of(strict))
    ids = tokens.opening([Message(role=role, content=role) for role in ("system", "user", "assistant", "system", "user")], ())
    assert tokenizer.decode(ids).count("<|im_start|>user\nsystem<|im_end|>") == 1
    with pytest.raises(RequestError):
        tokens.opening([Message(role="system", content="a")] * 2 + [Message(role="user", content="b")], ())


async def test_many_pieces_of_a_turn_take_linear_time(lead: Any) -> None:
    """Each piece may be the end of a sampled turn."""
    many = [{"role": "assistant", "content": "x" * 1000} for _ in range(4000)]

    async def program(url: str, key: str) -> None:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=10) as http:
            made = await http.post(PATHS["chat"], content=json.dumps(body("chat", user("one?"), *many)))
            assert made.status_code == 400 and made.json()["error"]["code"] == "context_length_exceeded"

    await lead(program)
