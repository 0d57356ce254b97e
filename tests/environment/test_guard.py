"""Every fault of a user-supplied opener is an infrastructure fault."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentrl.environment import close_environments, guard, open_environment
from agentrl.errors import EnvironmentFault
from agentrl.records import EnvironmentSpec
from tests.environment.examples import Remote

REF = "tests.environment.examples:Remote"


@pytest.fixture(autouse=True)
async def closed() -> AsyncIterator[None]:
    yield
    await close_environments()


async def test_one_opener_serves_all_episodes_and_is_closed_once() -> None:
    before = Remote.closed
    for _ in range(2):
        environment = await open_environment(EnvironmentSpec(ref=REF))
        assert (await environment.reset()).text == "Go." and (await environment.step("a")).reward == 1.0
        await environment.close()
    await close_environments()
    assert Remote.closed == before + 1


@pytest.mark.parametrize("how", ["raise", "hang", "tuple", "long"])
async def test_a_step_that_fails_is_a_fault(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "TIMEOUT_S", 0.2)
    environment = await open_environment(EnvironmentSpec(ref=REF, options={"how": how}))
    with pytest.raises(EnvironmentFault, match="step"):
        await environment.step("a")


async def test_faults_in_opening_and_closing_are_infrastructure_faults() -> None:
    with pytest.raises(EnvironmentFault, match="no connection"):
        await open_environment(EnvironmentSpec(ref=REF, options={"how": "open"}))
    environment = await open_environment(EnvironmentSpec(ref=REF, options={"how": "close"}))
    with pytest.raises(EnvironmentFault, match="lost"):
        await environment.close()
    environment = await open_environment(EnvironmentSpec(ref=REF, options={"how": "reset"}))
    assert (await environment.reset()).text == "text"  # text is converted


@pytest.mark.parametrize(
    ("opener", "message"), [("Unusable", "opening .*Unusable: RuntimeError: no licence"), ("Nameless", "instructions")]
)
async def test_an_opener_or_environment_that_cannot_be_created_is_a_fault(opener: str, message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        await open_environment(EnvironmentSpec(ref=f"tests.environment.examples:{opener}"))
