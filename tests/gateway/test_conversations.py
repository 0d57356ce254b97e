"""Roles, parents and answers are recognized if programs send a conversation back reworded or split differently."""

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


async def send(http: Any, *messages: Any, tools: Any = ()) -> Any:
    answer = await http.answer("chat", *messages, **({"tools": list(tools)} if tools else {}))
    return answer["choices"][0]["message"]


def as_text(message: Any, result: str) -> str:
    """A call and its result as text, as programs write them for models without tool calls."""
    call_texts = [f"{call['function']['name']}({call['function']['arguments']})" for call in message["tool_calls"]]
    return f"Calling tools: {call_texts}\nObservation: {result}"


REWRITTEN = {
    "as the assistant's text": lambda message: [{"role": "assistant", "content": as_text(message, "3")}, user("Go on.")],
    "as the user's text": lambda message: [user(as_text(message, "3"))],
    "as results without a call": lambda _: [{"role": "assistant", "content": "I asked."}, user(f"{WIDTH}: 3")],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [*REWRITTEN, "in one message"])
@pytest.mark.parametrize("system", [True, False])
async def test_a_main_agent_that_puts_its_calls_into_text_is_the_main_agent(run_episode: Any, form: str, system: bool) -> None:
    system_messages = [LEAD] if system else []

    async def program(http: Any) -> None:
        message = await send(http, *system_messages, user(TASK), tools=(ASK,))
        if form == "in one message":
            await send(http, *system_messages, user(f"{TASK}\n\n{as_text(message, '3')}"), tools=(ASK,))
        else:
            await send(http, *system_messages, user(TASK), *REWRITTEN[form](message), tools=(ASK,))
        await send(http, COMMIT, user("diff --git a b"))

    script = (calls("ask", question=WIDTH), "It is 3 cm wide.", "Measure the table")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    trajectories = outcome.episode.trajectories
    assert [(t.agent, t.parent) for t in trajectories] == [("main", None), ("main", Parent(trajectory=0, turn=0)), ("auxiliary", None)]
    assert outcome.episode.answer == "It is 3 cm wide."


@pytest.mark.parametrize("quotes", [False, True])
@pytest.mark.parametrize("tools", [False, True])
async def test_a_commit_message_is_not_the_answer_if_a_program_rewrites_its_history(run_episode: Any, quotes: bool, tools: bool) -> None:
    offered_tools: Any = (LOOK,) if tools else ()

    async def program(http: Any) -> None:
        first = await send(http, LEAD, user(TASK), tools=offered_tools)
        history = [{"role": "assistant", "content": "(something was said)"}, user("And now?")]
        await send(http, LEAD, user(TASK), *history, tools=offered_tools)
        commit_request = f"The work so far: {first['content']}" if quotes else "diff --git a b"
        await send(http, COMMIT, user(commit_request))

    script = ("I shall measure the table with a ruler first.", "It is 3 cm wide.", "Measure the table")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    assert [trajectory.agent for trajectory in outcome.episode.trajectories] == ["main", "main", "auxiliary"]
    assert outcome.episode.trajectories[1].parent == Parent(trajectory=0, turn=0) and outcome.episode.answer == "It is 3 cm wide."


@pytest.mark.parametrize("commit", [True, False])
async def test_a_program_with_separate_contexts_has_one_main_agent(run_episode: Any, commit: bool) -> None:
    """A changing map of the files is first in each request; the requests share only a system message."""

    async def program(http: Any) -> None:
        for number in range(2):
            await send(http, LEAD, user(f"The files, at {number}:\na.py"), user(TASK))
        if commit:
            await send(http, COMMIT, user("diff --git a b"))

    outcome = await run(run_episode, lambda turn, _: ("I measure.", "It is 3 cm wide.", "Measure the table")[turn], program)
    assert [trajectory.agent for trajectory in outcome.episode.trajectories] == ["main", "main", "auxiliary"][: 2 + commit]
    assert outcome.episode.answer == "It is 3 cm wide."


async def test_a_plan_and_its_execution_are_both_main_work(run_episode: Any) -> None:
    """Two requests with separate system messages; the second quotes the first one's answer and gives the final answer."""
    plan = "First measure the table with a ruler, then say it."

    async def program(http: Any) -> None:
        await send(http, {"role": "system", "content": "You plan."}, user(TASK))
        await send(http, {"role": "system", "content": "You carry out plans."}, user(f"The plan: {plan}"))

    outcome = await run(run_episode, lambda turn, _: (plan, "It is 3 cm wide.")[turn], program)
    assert [t.agent for t in outcome.episode.trajectories] == ["main", "main"] and outcome.episode.answer == "It is 3 cm wide."


async def test_a_sub_agent_that_rewrites_its_history_is_one_sub_agent(run_episode: Any) -> None:
    """Both start while their calls run, and the second one's task is a separate message after text of the framework."""
    tasks = ("what is the height of the table?", WIDTH)

    async def program(http: Any) -> None:
        message = await send(http, LEAD, user(TASK), tools=(ASK,))
        for text in tasks:
            opening = [{"role": "system", "content": "You help."}, user("It is 10:00."), user(text)]
            call_message = await send(http, *opening, tools=(LOOK,))
            await send(http, *opening, user(as_text(call_message, "3")), tools=(LOOK,))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message["tool_calls"]]
        await send(http, LEAD, user(TASK), message, *results, tools=(ASK,))

    script = ("".join(calls("ask", question=text) for text in tasks), calls("look"), "3 cm", calls("look"), "4 cm", "3 cm and 4 cm")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    parents = Parent(trajectory=0, turn=0, call=0), Parent(trajectory=0, turn=0, call=1)
    assert [(trajectory.agent, trajectory.parent) for trajectory in outcome.episode.trajectories] == [
        ("main", None),
        ("sub-agent", parents[0]),
        ("sub-agent", Parent(trajectory=1, turn=0)),
        ("sub-agent", parents[1]),
        ("sub-agent", Parent(trajectory=3, turn=0)),
    ]
    assert outcome.episode.answer == "3 cm and 4 cm"


async def test_a_restart_after_an_unused_answer_belongs_to_the_main_agent(run_episode: Any) -> None:
    async def program(http: Any) -> None:
        for _ in range(3):
            await send(http, LEAD, user(TASK), tools=(ASK,))
        await send(http, {"role": "system", "content": "You measure."}, user("Measure."), tools=(LOOK,))

    script = (calls("ask", question=WIDTH), calls("ask", question=WIDTH), "It is 3 cm wide.", "3")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    first, second, third, other = outcome.episode.trajectories
    assert [trajectory.agent for trajectory in (first, second, third)] == ["main"] * 3 and outcome.episode.answer == "It is 3 cm wide."
    assert (second.parent, third.parent) == (None, None)
    assert other.agent == "sub-agent", "another request while a call is running"


@pytest.mark.slow
async def test_two_sub_agents_with_the_same_task_belong_to_two_calls(run_episode: Any) -> None:
    async def program(http: Any) -> None:
        await send(http, LEAD, user(TASK), tools=(ASK,))
        for _ in range(2):
            await send(http, user(WIDTH), tools=(LOOK,))

    script = (calls("ask", question=WIDTH) * 2, "3 cm", "4 cm")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    trajectories = outcome.episode.trajectories
    assert [trajectory.agent for trajectory in trajectories] == ["main", "sub-agent", "sub-agent"]
    assert [t.parent and (t.parent.trajectory, t.parent.call) for t in trajectories] == [None, (0, 0), (0, 1)]


async def test_questions_with_the_same_examples_are_separate(run_episode: Any) -> None:
    examples = [user("2 + 2?"), {"role": "assistant", "content": "4"}]

    async def program(http: Any) -> None:
        for question in ("3 + 3?", "4 + 4?", "4 + 4?"):
            await send(http, LEAD, *examples, user(question))

    outcome = await run(run_episode, lambda turn, _: str(turn), program)
    assert [trajectory.parent for trajectory in outcome.episode.trajectories] == [None, None, None]


# One turn in several pieces ---------------------------------------------------------------------------------------------

TEXT, CALL = {"role": "assistant", "content": "I look, and then\n\nsay it."}, {"at": "a"}


def pieces(protocol: str, order: str, answer: Any) -> list[Any]:
    """An answer of text and two calls as separate messages, with the results of the calls."""
    if protocol == "chat":
        calls = answer["choices"][0]["message"]["tool_calls"]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"seen {n}"} for n, call in enumerate(calls)]
        first, second = ({"role": "assistant", "content": None, "tool_calls": [call]} for call in calls)
        joined: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    elif protocol == "messages":
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": call["id"], "content": f"seen {n}"} for n, call in enumerate(calls)]
        results = [{"role": "user", "content": [block]} for block in blocks]
        first, second = ({"role": "assistant", "content": [call]} for call in calls)
        joined = {"role": "assistant", "content": calls}
    else:
        first, second = (item for item in answer["output"] if item["type"] == "function_call")
        results = [
            {"type": "function_call_output", "call_id": call["call_id"], "output": f"seen {n}"} for n, call in enumerate((first, second))
        ]
        return {
            "calls before text": [first, second, TEXT, *results],
            "text between calls": [first, TEXT, second, *results],
            "two texts": [*halves(), first, second, *results],
            "each call with its result": [TEXT, first, results[0], second, results[1]],
        }[order]
    return {
        "calls before text": [joined, TEXT, *results],
        "text between calls": [first, TEXT, second, *results],
        "two texts": [*halves(), joined, *results],
        "each call with its result": [TEXT, first, results[0], second, results[1]],
    }[order]


def halves() -> list[Any]:
    head, tail = TEXT["content"].split("\n\n")
    return [{"role": "assistant", "content": head}, {"role": "assistant", "content": tail}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("protocol", PATHS)
@pytest.mark.parametrize("order", ["calls before text", "text between calls", "two texts", "each call with its result"])
async def test_a_split_turn_is_one_turn(run_episode: Any, protocol: str, order: str) -> None:
    async def program(http: Any) -> None:
        answer = await http.answer(protocol, tools=[tool(protocol)])
        await http.answer(protocol, user("one?"), *pieces(protocol, order, answer), tools=[tool(protocol)])

    script = (TEXT["content"] + calls("look", at="a") + calls("look", at="b"), "done")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    [trajectory] = outcome.episode.trajectories
    assert [result.output for result in trajectory.turns[0].tool_results] == ["seen 0", "seen 1"] and outcome.counts == {"answered": 2}


@pytest.mark.parametrize("protocol", PATHS)
async def test_a_continued_answer_is_two_turns_even_if_sent_back_as_one_message(run_episode: Any, protocol: str) -> None:
    """A program continues after a cut answer, and sends both parts as one message or as two."""
    limit = "max_output_tokens" if protocol == "responses" else "max_tokens"

    async def program(http: Any) -> None:
        start, rest = ({"role": "assistant", "content": text} for text in ("a long", "answer"))
        await http.answer(protocol, **{limit: 6})
        await http.answer(protocol, user("one?"), start)
        await http.answer(protocol, user("one?"), start, rest, user("two?"))
        await http.answer(protocol, user("one?"), {**start, "content": "a long answer"}, user("three?"))

    outcome = await run(run_episode, lambda turn, _: ("a long answer", "answer", "2", "3")[turn], program)
    assert [len(trajectory.turns) for trajectory in outcome.episode.trajectories] == [3, 1] and outcome.counts["branch"] == 1


async def test_calls_may_be_sent_back_with_other_ids(run_episode: Any) -> None:
    async def program(http: Any) -> None:
        message = await send(http, user("one?"), tools=(LOOK,))
        renamed_calls = [{**call, "id": f"abc{index}"} for index, call in enumerate(message["tool_calls"])]
        results = [{"role": "tool", "tool_call_id": call["id"], "content": call["id"]} for call in reversed(renamed_calls)]
        await send(http, user("one?"), {**message, "tool_calls": renamed_calls}, *results, tools=(LOOK,))

    script = (calls("look") + calls("look", at="b"), "done")
    outcome = await run(run_episode, lambda turn, _: script[turn], program)
    [trajectory] = outcome.episode.trajectories
    assert [result.name for result in trajectory.turns[0].tool_results] == ["look", "look"]


@pytest.mark.slow
async def test_a_coding_agent_with_kept_reasoning_and_reminders(run_episode: Any, tokenizer: Any) -> None:
    """Claude Code sends a late system message, keeps reasoning, and sends thinking blocks back."""
    context_management: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}

    async def program(url: str, key: str) -> None:
        async with claude(url, key) as sdk:
            options: Any = {"model": "policy", "max_tokens": 300, "system": "You code.", "thinking": {"type": "adaptive"}}
            options |= {"tools": [{"name": "look", "input_schema": {"type": "object"}}], "betas": ["context-management-2025-06-27"]}
            messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "<system-reminder>a</system-reminder>"}]}]
            message = await sdk.beta.messages.create(messages=messages, context_management=context_management, **options)
            messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in message.content]}]
            result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "seen"}
            messages += [{"role": "user", "content": [result]}, {"role": "system", "content": "Mind the budget."}]
            await sdk.beta.messages.create(messages=messages, context_management=context_management, **options)

    outcome = await run_episode(program, "<think>hm</think>I look." + calls("look"), "done")
    assert outcome.trained_once() and len(outcome.episode.trajectories) == 1 and outcome.counts == {"answered": 2}
    assert tokenizer.decode(outcome.policy.prompts[-1]).count("Mind the budget.") == 1


async def test_late_system_messages_become_user_messages_if_the_template_refuses_them(tokenizer: Any) -> None:
    refusal = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{% endfor %}"
    strict_tokenizer = copy.deepcopy(tokenizer)
    strict_tokenizer.chat_template = refusal + tokenizer.chat_template
    tokens = ConversationTokens(chat_of(strict_tokenizer))
    ids = tokens.opening([Message(role=role, content=role) for role in ("system", "user", "assistant", "system", "user")], ())
    assert tokenizer.decode(ids).count("<|im_start|>user\nsystem<|im_end|>") == 1
    with pytest.raises(RequestError):
        tokens.opening([Message(role="system", content="a")] * 2 + [Message(role="user", content="b")], ())


async def test_many_pieces_of_a_turn_take_linear_time(run_episode: Any) -> None:
    """Each piece may be the end of a sampled turn."""
    messages = [{"role": "assistant", "content": "x" * 1000} for _ in range(4000)]

    async def program(url: str, key: str) -> None:
        async with httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=10) as http:
            response = await http.post(PATHS["chat"], content=json.dumps(body("chat", user("one?"), *messages)))
            assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"

    await run_episode(program)
