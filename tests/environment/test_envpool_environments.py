"""EnvPool environments, which have the same form as Gymnasium environments."""

from __future__ import annotations

import pytest

from agentrl.environment.envpool_environments import EnvPoolEnvironment
from agentrl.environment.gymnasium_environments import GymnasiumEnvironment
from agentrl.errors import PluginError, TaskError
from agentrl.records import ToolCall
from tests.commands import agentrl

pytestmark = pytest.mark.models  # installed by `make setup-models`


def test_a_seed_determines_an_episode() -> None:
    environment = EnvPoolEnvironment("CartPole-v1")
    assert environment.actions == ("left", "right")

    def play(seed: int) -> list[str]:
        texts, ended = [environment.reset(seed)], False
        while not ended:
            text, reward, terminated, truncated = environment.step("left")
            assert reward == 1.0 and not truncated
            texts.append(text)
            ended = terminated
        return texts

    first = play(7)
    assert first[0].startswith("position ") and first == play(7) and first != play(8) and play(2**40) == play(0)
    environment.close()
    environment.close()


@pytest.mark.parametrize("id", ["FrozenLake-v1", "Pendulum-v1", "LaneKeeping-v0", "Pong-v5"])
def test_spaces_of_all_kinds_are_rendered_as_text(id: str) -> None:
    environment = EnvPoolEnvironment(id, formatter="tests.environment.examples:shape") if id == "Pong-v5" else EnvPoolEnvironment(id)
    assert environment.reset(0)
    calls = {"Pendulum-v1": [0.5], "LaneKeeping-v0": [0.0]}
    action = ToolCall(name="act", arguments={"action": calls[id]}) if id in calls else environment.actions[0]  # type: ignore[index]
    text, reward, terminated, truncated = environment.step(action)  # type: ignore[arg-type]
    assert text and isinstance(reward, float) and terminated is False and truncated is False
    environment.close()


def test_a_limit_on_steps_truncates_as_it_does_in_gymnasium() -> None:
    for kind in (EnvPoolEnvironment, GymnasiumEnvironment):
        environment = kind("MountainCar-v0", max_episode_steps=3)
        environment.reset(0)
        assert [environment.step("left")[2:] for _ in range(3)] == [(False, False), (False, False), (False, True)], kind


def test_a_game_of_two_players_is_rejected() -> None:
    with pytest.raises(TaskError, match="2 players"):
        EnvPoolEnvironment("Go9x9-v1").reset(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "CartPol-v1"}, "no environment CartPol-v1(.|\n)*use one of its .*CartPole-v1"),
        ({"id": "CartPole-v1", "nope": 1}, "unexpected keyword argument 'nope'"),
        ({"id": "CartPole-v1", "num_envs": 8}, "agentrl sets num_envs, batch_size and seed"),
        ({"id": "CartPole-v1", "seed": 8}, "agentrl sets num_envs, batch_size and seed"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(options: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        EnvPoolEnvironment(**options)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_check_passes() -> None:
    checked = agentrl("check", "envpool:CartPole-v1")
    assert checked.returncode == 0, checked.stdout + checked.stderr
