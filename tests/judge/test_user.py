"""A model behind an endpoint plays the user of a conversation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from agentrl.environment import close_environments
from agentrl.environment.dialogue import GREETING
from agentrl.errors import JudgeError
from agentrl.judge.endpoint import Endpoint
from agentrl.judge.user import EndpointUser
from agentrl.records import Blame
from agentrl.testing.chat_server import ChatServer, ScriptedAnswer
from tests.environment.test_dialogue import outputs, play, task_of
from tests.episodes import tokenizer as tokenizer

customer: Any = None  # the plug-in that the tasks of tests name


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


def user_of(server: ChatServer) -> EndpointUser:
    return EndpointUser(endpoint=Endpoint(url=server.url, model="scripted", patience_s=1.0), instructions="Play. ")


async def test_the_model_sees_its_brief_and_both_sides_of_the_conversation() -> None:
    with ChatServer([ScriptedAnswer(text="Hi.")]) as server:
        user = user_of(server)
        assert await user("You are Ana.", [("user", "Refund."), ("agent", "Why?")]) == "Hi."
        await user.endpoint.close()
        messages = server.requests[0]["body"]["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "Play. You are Ana."),
        ("user", GREETING),
        ("assistant", "Refund."),
        ("user", "Why?"),
    ]


async def test_a_cut_text_is_used_and_no_text_is_a_fault() -> None:
    with ChatServer([ScriptedAnswer(text="I want", finish_reason="length")]) as server:
        user = user_of(server)
        assert await user("", []) == "I want"
        await user.endpoint.close()
    with ChatServer([ScriptedAnswer(text=" ")]) as server:
        user = user_of(server)
        with pytest.raises(JudgeError, match="returned no text: empty"):
            await user("", [])
        await user.endpoint.close()
        assert len(server.requests) == 3


async def test_an_endpoint_that_dies_in_a_conversation_is_infrastructure(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of("tests.judge.test_user:customer")
    for answer, expected in ((ScriptedAnswer(text="Thanks. [END]"), ["Thanks."]), (ScriptedAnswer(status=503), [])):
        with ChatServer([answer]) as server:
            user = user_of(server)
            monkeypatch.setattr("tests.judge.test_user.customer", user)
            episode = await play(task, tokenizer, "hi")
            await user.endpoint.close()
        assert outputs(episode) == expected and episode.left_out == (not expected)
        assert expected or episode.failures[0].blame is Blame.INFRASTRUCTURE
