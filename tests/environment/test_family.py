"""Tasks of environments: seeds, splits, limits, options and their errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.registration import registry

from agentrl.config.recipe import TasksConfig
from agentrl.environment.family import EnvironmentFamily
from agentrl.errors import PluginError, TaskError
from agentrl.plugins.parts import Part
from agentrl.protocols import TaskFamily
from agentrl.records import EnvironmentSpec, Split
from agentrl.task import gold_of, open_family

GUESS = "tests.environment.examples:Guess"


def family(ref: str = GUESS, seed: int = 0, **options: Any) -> TaskFamily:
    return open_family(TasksConfig(family=Part(ref, options)), seed=seed)


def test_seeds_of_splits_never_overlap() -> None:
    for seed in (0, 1, 715_827_882):
        tasks = family(seed=seed)
        seeds = {split: {tasks.task(split, index).environment.seed for index in range(500)} for split in Split}  # type: ignore[union-attr]
        assert all(len(own) == 500 for own in seeds.values())
        assert not seeds[Split.TRAIN] & seeds[Split.HELDOUT] and min(map(min, seeds.values())) >= 0


def test_options_go_to_the_family_and_to_the_environment() -> None:
    tasks = family("gymnasium:FrozenLake-v1", size=3, limits={"turns": 9}, context_turns=2, resume="restart", is_slippery=False)
    task = tasks.task(Split.TRAIN, 1)
    assert tasks.size(Split.TRAIN) == 3 and task.limits.turns == 9 and task.sandbox is None
    assert task.environment is not None and task.environment.ref == "gymnasium:FrozenLake-v1"
    assert dict(task.environment.options) == {"is_slippery": False}
    assert (task.environment.context_turns, task.environment.resume) == (2, "restart")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limits": {"turn": 9}}, "no field 'turn'"),
        ({"limits": {"turns": 0}}, "must be positive"),
        ({"size": -1}, "number of tasks"),
        ({"heldout": None}, "number of tasks"),
        ({"context_turns": 0}, "at least 1"),
        ({"resume": "never"}, "snapshot, replay, restart"),
        ({"pass_threshold": "high"}, "pass_threshold"),
    ],
)
def test_a_wrong_option_is_reported(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        family(**options)


@pytest.mark.parametrize(
    ("ref", "options", "threshold"),
    [
        ("gymnasium:CartPole-v1", {}, 475.0),
        ("gymnasium:FrozenLake-v1", {}, 0.7),
        ("gymnasium:Pendulum-v1", {}, None),
        ("gymnasium:Pendulum-v1", {"pass_threshold": -200}, -200),
        ("gymnasium:CartPole", {}, 475.0),
        ("gymnasium:gymnasium.envs.classic_control:CartPole-v1", {}, 475.0),
        ("gymnasium:NoSuchWorld-v0", {}, None),
        ("gymnasium:no_such_module:World-v0", {}, None),
        ("gymnasium:CartPole-v1", {"verifiers": ["mine:balanced"]}, 1.0),
        ("sandboxes.games:KuhnPoker", {}, None),
        ("sandboxes.doors:Doors", {}, 1.0),
        ("sandboxes.doors:Doors", {"pass_threshold": None}, None),
        ("openenv:http://127.0.0.1:1", {}, 1.0),
    ],
)
def test_the_pass_threshold_defaults_to_that_of_the_environment(ref: str, options: dict[str, Any], threshold: float | None) -> None:
    assert family(ref, **options).task(Split.TRAIN, 0).pass_threshold == threshold


def test_the_threshold_does_not_change_a_task() -> None:
    first, second = (family(pass_threshold=threshold).task(Split.TRAIN, 0) for threshold in (0.5, None))
    assert first.key == second.key


def test_other_verifiers_have_another_threshold() -> None:
    config = TasksConfig(family=Part("gymnasium:CartPole-v1"), verifiers=("mine:balanced",))
    assert open_family(config, seed=0).task(Split.TRAIN, 0).pass_threshold == 1.0


@pytest.mark.parametrize("threshold", [float("inf"), float("nan"), "475", None])
def test_a_registry_without_a_usable_threshold(threshold: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry["CartPole-v1"], "reward_threshold", threshold)
    assert family("gymnasium:CartPole-v1").task(Split.TRAIN, 0).pass_threshold is None


def test_gymnasium_may_be_missing_when_the_family_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gymnasium", "gymnasium.envs.registration"):
        monkeypatch.setitem(sys.modules, name, None)
    assert family("gymnasium:CartPole-v1").task(Split.TRAIN, 0).pass_threshold is None


def test_a_module_that_cannot_be_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_worlds.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PluginError, match=r"gymnasium:broken_worlds:World-v0 cannot be imported: .*ZeroDivisionError"):
        family("gymnasium:broken_worlds:World-v0")


def test_an_infinite_threshold_raises() -> None:
    with pytest.raises(ValueError, match="pass_threshold must be a finite number or None"):
        EnvironmentSpec(ref=GUESS, pass_threshold=float("inf"))


def test_tasks_contain_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_KEY", "s3cr3t-value")
    assert "s3cr3t" not in str(family(key="env:WORLD_KEY").task(Split.TRAIN, 0))


def test_verifiers_of_the_recipe_replace_the_sum_of_rewards() -> None:
    tasks = open_family(TasksConfig(family=Part(GUESS), verifiers=("a:b",)), seed=0)
    assert tasks.task(Split.TRAIN, 0).verifiers == ("a:b",)
    assert EnvironmentFamily(GUESS).task(Split.TRAIN, 0).verifiers == ("agentrl.environment:episode_return",)
    with pytest.raises(TaskError, match="no gold solutions"):
        gold_of(tasks, tasks.task(Split.TRAIN, 0))
