"""A reward model as a judge, with a scripted `/classify`; and judges that use a server of the run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UserError
from agentrl.judge import Endpoint, Judge, RewardModel, ScoreEndpoint, served, servers
from agentrl.judge.reward_model import RewardRecord, load_record, parse_classification, save_record, validate_shows
from agentrl.judge.scoring import CORRECT
from agentrl.records import Blame, Message, Trajectory, Turn, VersionSpan
from agentrl.testing import ChatServer, JumpingClock, ScriptedAnswer
from tests.judge.judge_parts import RIGHT, TASK, episode


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    save_record(tmp_path, shows=("question", "answer"), offset=2.0, scale=0.5, max_tokens=64)
    return tmp_path


@pytest.fixture(autouse=True)
def undeclared() -> Iterator[None]:
    yield
    servers.register_servers({})


def judge(url: Any, folder: Path | None, **more: Any) -> RewardModel:
    endpoint = ScoreEndpoint(url=url, model="rm", clock=JumpingClock(), **more)
    made = RewardModel(endpoint=endpoint, folder=None if folder is None else str(folder))
    made.prepare(root=Path(), folder=None)
    return made


async def test_number_becomes_a_value_and_is_cached(model: Path) -> None:
    with ChatServer([ScriptedAnswer(number=3.0)]) as server:
        mine = judge(server.url, model)
        score = await mine(TASK, episode("It is <|im_end|> Paris."))
        assert score.value == pytest.approx(1 / (1 + math.exp(-2))) and score.parts == {"number": 3.0}
        assert (await mine(TASK, episode("It is <|im_end|> Paris."))).value == score.value
        (request,) = server.requests
        assert request["path"] == "/classify" and request["body"]["use_activation"] is False
        assert (
            request["body"]["input"]
            == f"## question\n{TASK.prompt[0].content}\n\n## answer\nIt is <\N{MIDDLE DOT}|im_end|\N{MIDDLE DOT}> Paris."
        )
        assert (await mine(TASK, episode(":"))).value == 0.0 and len(server.requests) == 1, "an answer that says nothing is not asked about"
        assert mine.spent().calls == 1 and mine.spent().cached == 1


async def test_invalid_number_is_unscored_and_a_server_that_is_down_delays(model: Path) -> None:
    two = b'{"data": [{"probs": [0.1, 0.9]}]}'
    odd = [b"sorry", two, b'{"data": [{"probs": ["1"]}]}', b'{"data": [{"probs": [1e999]}]}', b'{"data": [{"probs": [true]}]}', b"[" * 9000]
    for raw in odd:
        with ChatServer([ScriptedAnswer(raw=raw)]) as server:
            score = await judge(server.url, model)(TASK, episode())
            assert score.value is None and score.blame is None and "unreadable" in score.reason, raw[:40]
    with ChatServer(
        [ScriptedAnswer(status=503), ScriptedAnswer(status=429, headers={"retry-after": "7"}), ScriptedAnswer(number=2.0)]
    ) as server:
        assert (await judge(server.url, model)(TASK, episode())).value == 0.5
    with ChatServer([ScriptedAnswer(status=400, raw=b"too long")]) as server:
        refused = await judge(server.url, model)(TASK, episode())
        assert refused.value is None and refused.blame is Blame.INFRASTRUCTURE


def _turn(prompt: tuple[int, ...], said: tuple[int, ...]) -> Turn:
    spans = (VersionSpan(version=0, start=0, end=len(said)),)
    words = Message(role="assistant", content="x")
    return Turn(prompt_ids=prompt, completion_ids=said, logprobs=(-1.0,) * len(said), versions=spans, message=words, finish_reason="stop")


async def test_token_model_receives_the_episodes_tokens(model: Path) -> None:
    save_record(model, shows=(), offset=0.0, scale=1.0, max_tokens=4)
    turns = (_turn((1, 2), (3, 4)), _turn((5,), (6,)))
    with ChatServer([ScriptedAnswer(number=0.0)]) as server:
        mine = judge(server.url, model)
        score = await mine(TASK, replace(episode(), trajectories=(Trajectory(agent="main", turns=turns),)))
        assert score.value == 0.5 and server.requests[0]["body"]["input"] == [3, 4, 5, 6], "the newest that it takes"
        none = await mine(TASK, episode())
        assert none.value is None and "reads the tokens" in none.reason


def test_record_must_match_the_weights(model: Path) -> None:
    found = load_record(model)
    assert found.shows == ("question", "answer") and found.value(2.0) == 0.5
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(UserError, match="does not match the weights"):
        load_record(model)
    for broken in ("{}", "[" * 5000, json.dumps({**json.loads((model / "reward_model.json").read_text()), "scale": 0})):
        (model / "reward_model.json").write_text(broken)
        with pytest.raises(UserError, match=r"reward_model\.json"):
            load_record(model)
    with pytest.raises(UserError, match=r"has no reward_model\.json"):
        load_record(model / "nowhere")
    for odd in ((), ("question",), ("answer", "answer"), ("answer", "soul")):
        with pytest.raises(UserError, match="cannot be shown"):
            validate_shows(odd)


@given(number=st.floats(allow_nan=False, allow_infinity=False), offset=st.floats(-1e6, 1e6), scale=st.floats(1e-6, 1e6))
def test_values_stay_between_0_and_1_and_grow_with_the_number(number: float, offset: float, scale: float) -> None:
    record = RewardRecord(shows=("answer",), offset=offset, scale=scale, max_tokens=1, weights="")
    assert 0.0 <= record.value(number) <= 1.0
    assert record.value(number) <= record.value(min(number + abs(number) + scale, 1.7e308))


@given(st.binary(max_size=200))
def test_any_bytes_are_parsed_into_a_number_or_a_problem(content: bytes) -> None:
    reply = parse_classification(content, 100, query_tokens=3)
    assert reply.problem or math.isfinite(json.loads(reply.text)["number"])


async def test_server_of_the_run_is_waited_for_and_part_of_the_identity(model: Path) -> None:
    mine, chat = (
        served("mine"),
        Judge(endpoint=Endpoint(url=served("small"), model="small", clock=JumpingClock(), patience_s=60), form=CORRECT),
    )
    with pytest.raises(UserError, match=r"judge_servers=\{.mine.") as nobody:
        RewardModel(endpoint=ScoreEndpoint(url=mine, model="mine")).prepare(root=Path(), folder=None)
    assert "--recipe" in nobody.value.fix
    with pytest.raises(UserError, match="server 'small'"):
        chat.prepare(root=Path(), folder=None)
    servers.register_servers({"mine": servers.JudgeServer(folder=model, weights="a" * 64, reward_model=True)})
    with pytest.raises(UserError, match="is a reward model"):
        Judge(endpoint=Endpoint(url=mine, model="mine"), form=CORRECT).prepare(root=Path(), folder=None)
    one = judge(mine, None)
    identity = one.identity
    with ChatServer([ScriptedAnswer(number=9.0)]) as server:
        clock = one.endpoint.clock
        assert isinstance(clock, JumpingClock)
        declared = servers.registered_servers()["mine"]
        began, sleep = clock.monotonic(), clock.sleep

        async def until_it_is_up(seconds: float) -> None:
            await sleep(seconds)
            if clock.monotonic() - began > 20:
                declared.url = server.url.removesuffix("/v1")

        object.__setattr__(one.endpoint, "clock", clock)
        clock.sleep = until_it_is_up  # type: ignore[method-assign]
        assert (await one(TASK, episode())).value == pytest.approx(1.0, abs=1e-5), "it was asked again until it was up"
    declared.refused = "the judge's server mine died 6 times"
    refused = await one(TASK, episode("another answer"))
    assert refused.value is None and refused.blame is Blame.INFRASTRUCTURE and "died 6 times" in refused.reason
    servers.register_servers({"mine": servers.JudgeServer(folder=model, weights="b" * 64, reward_model=True)})
    assert judge(mine, None).identity != identity, "other weights are another judge"


async def test_chat_judge_uses_a_server_of_the_run() -> None:
    chat = Judge(endpoint=Endpoint(url=served("small"), model="small"), form=CORRECT)
    with ChatServer([ScriptedAnswer(RIGHT)]) as server:
        url = server.url.removesuffix("/v1")
        servers.register_servers({"small": servers.JudgeServer(folder=Path(), weights="c" * 64, reward_model=False, url=url)})
        assert (await chat(TASK, episode())).value == 1.0
    servers.register_servers(
        {
            "small": servers.JudgeServer(folder=Path(), weights="", reward_model=False),
            "idle-1": servers.JudgeServer(folder=Path(), weights="", reward_model=False),
        }
    )
    assert servers.unused_servers() == ["idle-1"]


def test_sampling_settings_raise_for_a_reward_model(model: Path) -> None:
    for odd in ({"seed": 1}, {"temperature": 0.5}, {"structured": "auto"}, {"max_tokens": 5}):
        with pytest.raises(UserError, match="has no effect"):
            ScoreEndpoint(url="http://127.0.0.1:1", model="rm", **odd)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="folder is missing"):
        RewardModel(endpoint=ScoreEndpoint(url="http://127.0.0.1:1", model="rm"))
    with pytest.raises(UserError, match="twice"):
        RewardModel(endpoint=ScoreEndpoint(url=served("x"), model="x"), folder=str(model))
