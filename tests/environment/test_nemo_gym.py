"""Sessions at NeMo Gym servers: cookies, tools, scores and masked samples."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx  # noqa: F401
import pytest

from agentrl.environment.nemo_gym import FAILURE_KINDS
from agentrl.environment.remote import RemoteOpener
from agentrl.errors import EnvironmentFault, PluginError, TaskError
from agentrl.records import Blame
from tests.environment.scenarios import call, counter_row
from tests.environment.test_remote import begin, counts
from tests.environment.test_remote import opener as opener
from tests.environment.web_servers import HttpRequest, answer, http_server


class NemoGym:
    """A NeMo Gym server whose `/verify` and `/step` give these answers; sessions are cookies."""

    def __init__(self, verified: Any = None, stepped: Any = None, reset: Any = None) -> None:
        self.pages = {"/verify": verified or {"reward": 1.0}, "/step": stepped, "/reset": reset or {"observation": "Go."}}
        self.sessions: list[str] = []
        self.closed: list[str] = []

    async def __call__(self, request: HttpRequest, writer: asyncio.StreamWriter) -> bytes:
        cookie = request.headers.get("cookie", "")
        if request.path == "/close":
            self.closed.append(cookie)
        if request.path in ("/seed_session", "/reset"):
            assert not cookie
            self.sessions.append(f"session={len(self.sessions)}")
            return answer(self.pages.get(request.path, {}), set_cookie=f"{self.sessions[-1]}; path=/; httponly")
        return answer(self.pages.get(request.path) or {"you": cookie}, set_cookie=f"{cookie}; path=/")


async def test_sessions_have_their_own_cookies(opener: RemoteOpener) -> None:
    async with http_server(NemoGym()) as url:
        environments = [await begin(opener, url, "nemo-gym", row=counter_row(index)) for index in range(3)]
        for index in (2, 0, 1, 1):
            step = await environments[index].step(call("look"))
            assert json.loads(step.observation.text) == {"you": f"session={index}"}
        for environment in environments:
            await environment.close()
    assert counts(opener) == (3, 3, 0)


@pytest.mark.parametrize("kind", [*FAILURE_KINDS, "mine:odd", None])
async def test_a_masked_sample_has_no_score(opener: RemoteOpener, kind: str | None) -> None:
    blame = FAILURE_KINDS.get(kind or "", Blame.INFRASTRUCTURE)
    verified = {"reward": 0.0, "mask_sample": True, "failure_kind": kind, "failure_reason": "why"}
    async with http_server(NemoGym(verified)) as url:
        environment = await begin(opener, url, "nemo-gym", row=counter_row(1))
        if blame is Blame.POLICY:
            assert (await environment.step("done")).reward == 0.0
        else:
            with pytest.raises(TaskError if blame is Blame.TASK else EnvironmentFault, match="returned no valid score"):
                await environment.step("done")
        await environment.close()


def test_the_failure_kinds_match_nemo_gym_0_7_0() -> None:
    """The kinds are those of `nemo_gym.failure_kinds` 0.7.0."""
    assert len(FAILURE_KINDS) == 22 and {*FAILURE_KINDS.values()} == {*Blame}


async def test_a_failure_kind_without_a_mask_is_a_score(opener: RemoteOpener) -> None:
    verified = {"reward": 0.25, "failure_kind": "judge_failed", "reward_components": {"form": 1, "sum": -0.75}}
    async with http_server(NemoGym(verified)) as url:
        environment = await begin(opener, url, "nemo-gym", row=counter_row(1))
        step = await environment.step("done")
        await environment.close()
    assert step.reward == 0.25 and step.terminated and step.parts == {"form": 1.0, "sum": -0.75}


@pytest.mark.parametrize("verified", [{"reward": None}, {"reward": float("inf")}, {"reward": 1, "reward_components": {"a": "x"}}, [], {}])
async def test_an_invalid_score_is_a_fault(opener: RemoteOpener, verified: Any) -> None:
    server = NemoGym()
    server.pages["/verify"] = json.dumps(verified).encode() if verified != {} else {"score": 1}
    async with http_server(server) as url:
        environment = await begin(opener, url, "nemo-gym", row=counter_row(1))
        with pytest.raises(EnvironmentFault):
            await environment.step("done")
        await environment.close()


async def test_gymnasium_servers_are_closed_if_they_support_it(opener: RemoteOpener) -> None:
    reset = {"observation": "Go.", "info": {"supports_explicit_close": True}}
    stepped = {"observation": "There.", "reward": 0.5, "truncated": True, "info": {"tool_outputs": [{"call_id": "call_0", "output": "{}"}]}}
    server = NemoGym(stepped=stepped, reset=reset)
    async with http_server(server) as url:
        abandoned = await begin(opener, url, "nemo-gym", row=counter_row(1), protocol="gymnasium")
        assert (await abandoned.reset()).text == "Go."
        await abandoned.close()
        played = await begin(opener, url, "nemo-gym", row=counter_row(1), protocol="gymnasium")
        await played.reset()
        step = await played.step(call("increment_counter", count=1))
        await played.close()
    assert (step.observation.text, step.reward, step.truncated, step.terminated) == ("{}\nThere.", 0.5, True, False)
    assert server.closed == ["session=0"]


async def test_an_unknown_protocol_is_an_error(opener: RemoteOpener) -> None:
    async with http_server(NemoGym()) as url:
        with pytest.raises(PluginError, match=r"options\.protocol: 'gym' is not a protocol .*\n  fix: use tools or gymnasium"):
            await begin(opener, url, "nemo-gym", row=counter_row(1), protocol="gym")
