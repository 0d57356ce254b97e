"""A model behind an endpoint plays a role."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.environment import close_environments
from agentrl.errors import EnvironmentFault, JudgeError
from agentrl.judge.endpoint import Endpoint
from agentrl.judge.player import EndpointPlayer
from agentrl.records import Blame
from agentrl.testing import ScriptedPolicy
from agentrl.testing.chat_server import ChatServer, ScriptedAnswer
from tests.environment.test_players import KUHN, play, task_of
from tests.episodes import tokenizer as tokenizer

rival: Any = None  # the plug-in that the recipes of tests name


@pytest.mark.parametrize(("text", "action"), [("b", "b"), (" p\n", "p"), ("I bet: b.", "b")])
async def test_the_player_chooses_an_allowed_action(text: str, action: str) -> None:
    with ChatServer([ScriptedAnswer(text=text)]) as server:
        player = EndpointPlayer(endpoint=Endpoint(url=server.url, model="scripted"), instructions="Play well.")
        assert await player("second", ["card J moves p"], ("p", "b")) == action
        await player.endpoint.close()


@pytest.mark.parametrize("text", ["", "fold", "p or b", "pb"])
async def test_an_answer_that_names_no_action_or_several_is_a_fault(text: str) -> None:
    with ChatServer([ScriptedAnswer(text=text)]) as server:
        player = EndpointPlayer(endpoint=Endpoint(url=server.url, model="scripted"))
        with pytest.raises(EnvironmentFault, match="allowed actions instead of one"):
            await player("second", ["card J moves p"], ("p", "b"))
        await player.endpoint.close()


@pytest.mark.parametrize("actions", [(), ("p", "b")])
async def test_a_response_without_a_message_is_never_a_move(actions: tuple[str, ...]) -> None:
    with ChatServer([ScriptedAnswer(raw=b'{"detail": "p"}')]) as server:
        player = EndpointPlayer(endpoint=Endpoint(url=server.url, model="scripted"))
        with pytest.raises(JudgeError, match="scripted returned no move: the answer is not a chat completion"):
            await player("second", ["card J moves p"], actions)
        await player.endpoint.close()


async def test_a_move_that_is_cut_off_is_used() -> None:
    with ChatServer([ScriptedAnswer(text="I fold", finish_reason="length")]) as server:
        player = EndpointPlayer(endpoint=Endpoint(url=server.url, model="scripted"))
        assert await player("second", ["card J moves p"], ()) == "I fold"
        await player.endpoint.close()


@pytest.mark.slow
async def test_an_endpoint_that_dies_in_a_game_is_infrastructure(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ScriptedPolicy(tokenizer, lambda turn, _: "b")
    for answer, excluded in ((ScriptedAnswer(text="p"), False), (ScriptedAnswer(status=400), True)):
        with ChatServer([answer]) as server:
            player = EndpointPlayer(endpoint=Endpoint(url=server.url, model="scripted", patience_s=1.0))
            monkeypatch.setattr("tests.judge.test_player.rival", player)
            episode = await play(task_of(KUHN), policy, tokenizer, players={"second": "tests.judge.test_player:rival"})
            await player.endpoint.close()
        assert episode.left_out == excluded
        assert not excluded or episode.failures[0].blame is Blame.INFRASTRUCTURE
    await close_environments()
