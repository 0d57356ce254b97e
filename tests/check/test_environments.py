"""The proofs of `agentrl check` about environments, each with an environment that violates it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from agentrl.check import environments
from agentrl.check.environments import prove_environment
from agentrl.check.report import Proof
from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments
from agentrl.environment.dialogue import POLICY
from agentrl.plugins.parts import Part
from agentrl.records import Split
from agentrl.task import open_family
from sandboxes.desk import Desk
from tests.commands import agentrl

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
async def clean_environments(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(environments, "FRESH", 1)  # starting a process takes a second on a busy machine
    yield
    await close_environments()


async def prove(name: str, seeds: int = 2, *, module: str = "tests.environment.examples", **options: object) -> dict[str, Proof]:
    part = Part(f"{module}:{name}", {"limits": {"turns": 6}, **options})  # type: ignore[dict-item]
    family = open_family(TasksConfig(family=part), seed=0)
    return {proof.name: proof for proof in await prove_environment([family.task(Split.TRAIN, index) for index in range(seeds)])}


async def test_a_good_environment_passes_and_its_expert_beats_random_actions() -> None:
    proofs = await prove("Walk")
    (note,) = [finding for proof in proofs.values() for finding in proof.findings]
    assert all(proof.ok for proof in proofs.values()) and note.severity == "note", proofs
    assert note.what.startswith("first turn:\n    ") and note.what.endswith("    Allowed actions: left, right")
    assert set(proofs) == {
        "episodes can be played",
        "equal seeds and actions give equal episodes",
        "concurrent episodes share no state",
        "reset restarts an unfinished episode",
        "a snapshot continues an episode",
        "rewards are in their range",
        "baselines",
    }
    rows = {row[0]: row for row in proofs["baselines"].table}
    assert rows["expert"][2] == "1" and float(rows["random"][2]) < 1


@pytest.mark.parametrize(
    ("fault", "claim"),
    [
        ("random", "equal seeds and actions give equal episodes"),
        ("shared", "concurrent episodes share no state"),
        ("kept", "reset restarts an unfinished episode"),
        ("snapshot", "a snapshot continues an episode"),
        ("reward", "rewards are in their range"),
    ],
)
async def test_each_fault_of_an_environment_is_a_failure(fault: str, claim: str) -> None:
    assert not (await prove("Walk", fault=fault))[claim].ok


async def test_a_difference_between_episodes_is_shown_once_with_its_step() -> None:
    (finding,) = (await prove("Walk", fault="random"))["equal seeds and actions give equal episodes"].findings
    when = r"(a reset with the same seed|\d+ equal actions?)"
    assert re.fullmatch(rf"observation differs: .* and .*, after {when}", finding.what) and len(finding.tasks) > 1, finding


async def test_a_weak_expert_is_a_warning() -> None:
    expert, _ = (await prove("Lazy", seeds=2))["baselines"].findings
    assert (expert.severity, expert.what) == ("warning", "the expert earns no more than random actions")


async def test_an_environment_that_raises_is_a_failure_of_the_first_claim() -> None:
    proofs = await prove("Faulty", seeds=1)
    (note,) = [finding for proof in proofs.values() for finding in proof.findings]
    assert note.what.endswith("Allowed actions: any text")  # so no random action can be drawn
    proofs = await prove("Broken", seeds=2)
    assert "the lamp broke" in proofs["episodes can be played"].findings[0].what


async def test_random_calls_follow_the_schema() -> None:
    proofs = await prove("Doors")
    assert proofs["episodes can be played"].ok and float({row[0]: row for row in proofs["baselines"].table}["random"][1]) == 2


async def test_a_game_with_several_roles_is_played_by_one_actor() -> None:
    assert all(proof.ok for proof in (await prove("KuhnPoker", 4, module="sandboxes.games")).values())
    assert all(proof.ok for proof in (await prove("TicTacToeGame", limits={"turns": 9}, module="sandboxes.games")).values())
    assert all(proof.ok for proof in (await prove("Match", module="tests.environment.games")).values()), "simultaneous moves"
    proofs = await prove("Faulty", module="tests.environment.games", fault="shared")
    assert not proofs["concurrent episodes share no state"].ok


def test_the_command_takes_the_reference_of_an_environment() -> None:
    result = agentrl("check", "tests.environment.examples:Walk", "--count", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "equal seeds and actions give equal episodes" in result.stdout and "expert" in result.stdout and "gold" not in result.stdout
    result = agentrl("check", "tests.environment.examples:Broken", "--count", "2")
    assert result.returncode == 1 and "the lamp broke" in result.stdout


async def test_a_user_played_by_the_policy_has_a_stand_in() -> None:
    proofs = await prove_environment([Desk(user=POLICY, buttons=True, turns=6).task(Split.TRAIN, index) for index in range(2)])
    assert len(proofs) > 4 and all(proof.ok for proof in proofs), proofs


async def test_an_endless_environment_gets_a_warning_and_a_range_must_be_two_numbers() -> None:
    proofs = await prove("Endless")
    (finding,) = proofs["baselines"].findings
    assert (finding.severity, finding.what) == ("warning", "no episode ended within limits.turns=6")
    (finding,) = proofs["rewards are in their range"].findings
    assert "two numbers" in finding.what and "'high'" in finding.what


async def test_an_environment_that_ends_its_process_at_the_start_is_a_failure_with_its_name() -> None:
    (proof,) = (await prove("Faulty", how="die", at="reset")).values()
    assert not proof.ok and "tests.environment.examples:Faulty does not start: its process ended" in proof.findings[0].what
