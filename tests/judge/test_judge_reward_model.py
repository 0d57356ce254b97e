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


def judge(url: Any, folder: Path | None, **options: Any) -> RewardModel:
    endpoint = ScoreEndpoint(url=url, model="rm", clock=JumpingClock(), **options)
    reward_model = RewardModel(endpoint=endpoint, folder=None if folder is None else str(folder))
    reward_model.prepare(root=Path(), folder=None)
    return reward_model


async def test_number_becomes_a_value_and_is_cached(model: Path) -> None:
    with ChatServer([ScriptedAnswer(number=3.0)]) as server:
        reward_model = judge(server.url, model)
        score = await reward_model(TASK, episode("It is <|im_end|> Paris."))
        assert score.value == pytest.approx(1 / (1 + math.exp(-2))) and score.parts == {"number": 3.0}
        assert (await reward_model(TASK, episode("It is <|im_end|> Paris."))).value == score.value
        (request,) = server.requests
        assert request["path"] == "/classify" and request["body"]["use_activation"] is False
        assert (
            request["body"]["input"]
            == f"## question\n{TASK.prompt[0].content}\n\n## answer\nIt is <\N{MIDDLE DOT}|im_end|\N{MIDDLE DOT}> Paris."
        )
        assert (await reward_model(TASK, episode(":"))).value == 0.0 and len(server.requests) == 1, "no content, so no query"
        assert reward_model.spent().calls == 1 and reward_model.spent().cached == 1


async def test_invalid_number_is_unscored_and_a_server_that_is_down_delays(model: Path) -> None:
    two = b'{"data": [{"probs": [0.1, 0.9]}]}'
    bad = [b"sorry", two, b'{"data": [{"probs": ["1"]}]}', b'{"data": [{"probs": [1e999]}]}', b'{"data": [{"probs": [true]}]}', b"[" * 9000]
    for raw in bad:
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


def _turn(prompt: tuple[int, ...], ids: tuple[int, ...]) -> Turn:
    spans = (VersionSpan(version=0, start=0, end=len(ids)),)
    message = Message(role="assistant", content="x")
    return Turn(prompt_ids=prompt, completion_ids=ids, logprobs=(-1.0,) * len(ids), versions=spans, message=message, finish_reason="stop")


async def test_token_model_receives_the_episodes_tokens(model: Path) -> None:
    save_record(model, shows=(), offset=0.0, scale=1.0, max_tokens=4)
    turns = (_turn((1, 2), (3, 4)), _turn((5,), (6,)))
    with ChatServer([ScriptedAnswer(number=0.0)]) as server:
        reward_model = judge(server.url, model)
        score = await reward_model(TASK, replace(episode(), trajectories=(Trajectory(agent="main", turns=turns),)))
        assert score.value == 0.5 and server.requests[0]["body"]["input"] == [3, 4, 5, 6], "the newest tokens that fit"
        unscored = await reward_model(TASK, episode())
        assert unscored.value is None and "reads the tokens" in unscored.reason


def test_record_must_match_the_weights(model: Path) -> None:
    record = load_record(model)
    assert record.shows == ("question", "answer") and record.value(2.0) == 0.5
    (model / "model.safetensors").write_bytes(b"others")
    with pytest.raises(UserError, match="does not match the weights"):
        load_record(model)
    for broken in ("{}", "[" * 5000, json.dumps({**json.loads((model / "reward_model.json").read_text()), "scale": 0})):
        (model / "reward_model.json").write_text(broken)
        with pytest.raises(UserError, match=r"reward_model\.json"):
            load_record(model)
    with pytest.raises(UserError, match=r"has no reward_model\.json"):
        load_record(model / "nowhere")
    for invalid in ((), ("question",), ("answer", "answer"), ("answer", "soul")):
        with pytest.raises(UserError, match="is not a valid input of a reward model"):
            validate_shows(invalid)


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
    url, chat = (
        served("mine"),
        Judge(endpoint=Endpoint(url=served("small"), model="small", clock=JumpingClock(), patience_s=60), form=CORRECT),
    )
    with pytest.raises(UserError, match=r"judge_servers=\{.mine.") as error:
        RewardModel(endpoint=ScoreEndpoint(url=url, model="mine")).prepare(root=Path(), folder=None)
    assert "--recipe" in error.value.fix
    with pytest.raises(UserError, match="server 'small'"):
        chat.prepare(root=Path(), folder=None)
    servers.register_servers({"mine": servers.JudgeServer(folder=model, weights="a" * 64, reward_model=True)})
    with pytest.raises(UserError, match="is a reward model"):
        Judge(endpoint=Endpoint(url=url, model="mine"), form=CORRECT).prepare(root=Path(), folder=None)
    reward_model = judge(url, None)
    identity = reward_model.identity
    with ChatServer([ScriptedAnswer(number=9.0)]) as server:
        clock = reward_model.endpoint.clock
        assert isinstance(clock, JumpingClock)
        declared = servers.registered_servers()["mine"]
        started, sleep = clock.monotonic(), clock.sleep

        async def until_it_is_up(seconds: float) -> None:
            await sleep(seconds)
            if clock.monotonic() - started > 20:
                declared.url = server.url.removesuffix("/v1")

        object.__setattr__(reward_model.endpoint, "clock", clock)
        clock.sleep = until_it_is_up  # type: ignore[method-assign]
        assert (await reward_model(TASK, episode())).value == pytest.approx(1.0, abs=1e-5), "the query was retried until the server was up"
    declared.refused = "the judge's server mine died 6 times"
    refused = await reward_model(TASK, episode("another answer"))
    assert refused.value is None and refused.blame is Blame.INFRASTRUCTURE and "died 6 times" in refused.reason
    servers.register_servers({"mine": servers.JudgeServer(folder=model, weights="b" * 64, reward_model=True)})
    assert judge(url, None).identity != identity, "other weights give another identity"


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
    for setting in ({"seed": 1}, {"temperature": 0.5}, {"structured": "auto"}, {"max_tokens": 5}):
        with pytest.raises(UserError, match="has no effect"):
            ScoreEndpoint(url="http://127.0.0.1:1", model="rm", **setting)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="folder is missing"):
        RewardModel(endpoint=ScoreEndpoint(url="http://127.0.0.1:1", model="rm"))
    with pytest.raises(UserError, match="twice"):
        RewardModel(endpoint=ScoreEndpoint(url=served("x"), model="x"), folder=str(model))
