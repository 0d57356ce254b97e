from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.cli import suites
from agentrl.cli.train import describe
from agentrl.errors import StoreError
from agentrl.failure import Quarantine
from agentrl.judge import Judge, Prices
from agentrl.judge.scoring import CORRECT
from agentrl.learner.driver_reports import UpdateFailureLog
from agentrl.observe import Summary
from agentrl.observe.report import _tiles
from agentrl.records import Cancelled, Episode, Group, Score, ScoredEpisode, Trajectory
from agentrl.session import measure
from agentrl.session.measure import cancelled_metrics, judge_costs
from agentrl.testing import ChatServer, ScriptedAnswer
from tests.judge.judge_parts import RIGHT, TASK, endpoint, episode


def group(index: int, *wall_s: float, cancelled: tuple[Cancelled, ...] = ()) -> Group:
    trajectories = (Trajectory(agent="main", turns=()),)
    episodes = [Episode(id=f"{index}-{n}", task_id="t", task_key="k", trajectories=trajectories, wall_s=s) for n, s in enumerate(wall_s)]
    scored = tuple(ScoredEpisode(episode=episode, score=Score(value=1.0)) for episode in episodes)
    return Group(index=index, task_id="t", task_key="k", episodes=scored, cancelled=cancelled)


@pytest.mark.parametrize("content", [b"{]\n", b"null\n", b"\xff\n", b"[" * 100_000 + b"\n"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("metrics.jsonl", measure.recorded_steps),
        ("quarantine.jsonl", Quarantine),
        ("failures/updates.jsonl", lambda folder: UpdateFailureLog(folder).read()),
        ("evaluations.json", lambda folder: measure.recorded_rates(folder, "before", of="", splits=())),
    ],
)
def test_the_error_for_a_damaged_file_of_a_resumed_run_names_the_file_and_the_fix(
    tmp_path: Path, name: str, read: Callable[[Path], object], content: bytes
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StoreError, match=rf"{name} is damaged: .*\n  fix: restore the file"):
        read(tmp_path)


def test_cancelled_attempts_are_counted_next_to_the_others() -> None:
    assert cancelled_metrics([group(0, 1.0), group(1, 1.0)]) == {}, "a run without cancelled attempts has no such metrics"
    two_turns = Cancelled(episode_id="a", reason="spare", turns=2, tokens=300, wall_s=9.0)
    no_turn = Cancelled(episode_id="b", reason="spare", turns=0, tokens=0, wall_s=5.0)
    not_started = Cancelled(episode_id="c", reason="equal", begun=False)
    assert cancelled_metrics([group(0, 1.0, 3.0, cancelled=(two_turns, not_started)), group(1, 2.0, cancelled=(no_turn,))]) == {
        "attempts_cancelled": 2,
        "attempts_not_begun": 1,
        "tokens_cancelled": 300,
        "groups_stopped": 1,
        "cancelled_tokens_mean": 150,
        "cancelled_wall_s_mean": 7,
        "counted_wall_s_mean": 2,
    }


async def test_judge_costs_are_reported_and_a_damaged_ledger_is_logged(tmp_path: Path) -> None:
    assert judge_costs(tmp_path) == {} and not list(tmp_path.iterdir()), "a run without judges has no such metrics and no ledger"
    with ChatServer([ScriptedAnswer(RIGHT), ScriptedAnswer("I am sorry.")]) as server:
        for name in ("one", "other"):
            priced = endpoint(server.url, model=name, prices=Prices(prompt=1e6, completion=1e6))
            judge = Judge(endpoint=priced, form=CORRECT)
            judge.prepare(root=tmp_path, folder=tmp_path)
            await judge(TASK, episode())
            await judge(TASK, episode())
            await judge.close()
    spent = judge_costs(tmp_path)
    figures = {name: spent[name] for name in ("calls", "cached", "unreadable", "prompt_tokens", "completion_tokens")}
    assert figures == {"calls": 3, "cached": 1, "unreadable": 2, "prompt_tokens": 300, "completion_tokens": 30} and spent["money"] == 330
    summary = Summary(
        name="x", finished=True, steps=1, episodes=1, episodes_left_out=0, tokens_trained=1, weight_swaps=1, sandbox_backend="b", seed=0,
        judges=spent,
    )  # fmt: skip
    line = "3 judge queries, 1 cached, 330 tokens, money 330; 2 unreadable"
    assert line in describe(summary, tmp_path)
    assert suites.with_judge_costs("a table", spent) == f"a table\njudges  {line}" and suites.with_judge_costs("a table", {}) == "a table"
    assert {("3", "questions to judges"), ("330", "judge cost"), ("2", "questions without a verdict")} <= {*_tiles(summary)}
    for file in tmp_path.glob("judges.sqlite*"):
        file.unlink()
    (tmp_path / "judges.sqlite").write_bytes(b"no database" * 100)
    assert judge_costs(tmp_path) == {}


@pytest.mark.parametrize(("to", "of", "renamed"), [("step4", "weights", True), (None, "weights", False), ("step4", "other", False)])
def test_the_last_evaluation_of_a_run_with_more_steps_belongs_to_its_step(tmp_path: Path, to: str | None, of: str, renamed: bool) -> None:
    (tmp_path / "evaluations.json").write_text(json.dumps({"before": {}, "after": {"heldout": {"of": "weights", "value": 0.5}}}))
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes" / "after.jsonl").write_text("{}\n")
    for _ in range(2):
        measure.rename_evaluation(tmp_path, "after", to, of=of)
        assert set(json.loads((tmp_path / "evaluations.json").read_text())) == ({"before", "step4"} if renamed else {"before"})
    assert (tmp_path / "episodes" / "step4.jsonl").exists() == renamed
