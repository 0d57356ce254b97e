"""Self-play with a league, with the real servers and the learner: the short form of `recipes/kuhn_poker.py`."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from agentrl.agent.chat import load_chat
from agentrl.experience import SqliteStore
from agentrl.version.league import LeagueTable
from benchmarks.selfplay import average, bets, report
from tests.ledgers import indices

from .conftest import agentrl, summary

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.deepspeed]


@pytest.mark.usefixtures("nothing_left")
def test_a_policy_trains_against_itself_and_a_past_version(
    tmp_path: Path, forked: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer  # not at the top: it imports DeepSpeed and pandas, and every worker collects this file

    run = tmp_path / "run"
    few = ("steps=1", "learner.lr_schedule=constant", "objective.entropy_coef=0.1")
    few += ("rollout.groups_per_step=8", "rollout.group.size=4", "rollout.concurrency=32")
    code, output = agentrl("train", "recipes/kuhn_poker.py", *few, "--run-dir", str(run), by=forked)
    assert code == 0, output[-4000:]
    result = summary(run)
    assert (result["steps"], result["weight_swaps"], result["episodes_left_out"]) == (1, 1, 0)
    store = SqliteStore(run / "experience.sqlite")
    groups = store.groups(indices(store))
    store.close()
    games = [scored.episode for group in groups for scored in group.episodes]
    rivals = [trajectory for game in games for trajectory in game.trajectories if trajectory.policy]
    assert 0 < len(rivals) < len(games) and {line.policy for line in rivals} == {"version 0"}
    assert not any(turn.completion_ids for line in rivals for turn in line.turns)
    for scored in (scored for group in groups for scored in group.episodes):
        assert scored.score.branches and sum(map(float, scored.score.branches)) == 0.0, "each role receives what the other pays"
    [step] = [line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "episodes" in line]
    own = sum(turn.sampled for game in games for trajectory in game.trajectories if not trajectory.policy for turn in trajectory.turns)
    assert step["tokens_sampled"] == own and step["tokens_trained"] > 0
    assert abs(step["ratio_mean"] - 1) < 1e-3, "choices are scored over the actions that were allowed"
    assert sum(results.games for results in LeagueTable(run).results.values()) == len(rivals)
    base = run / "versions" / "000000"
    table, tokenizer = bets(base, load_chat(str(base))), AutoTokenizer.from_pretrained(base)
    for turn in (turn for game in games for trajectory in game.trajectories if not trajectory.policy for turn in trajectory.turns):
        bet = table[re.findall(r"card \w moves [-pb]+", tokenizer.decode(list(turn.prompt_ids)))[-1]]
        expected = bet if turn.message.content == "b" else 1 - bet
        assert turn.logprobs[0] == pytest.approx(math.log(expected), abs=1e-3), "the benchmark scores what the server samples"
    assert average([table, table]) == average([table, dict.fromkeys(table, 1.0)], [2.0, 0.0]) == pytest.approx(table)
    report(run, every=1)
    shown = capsys.readouterr().out
    assert "version    1: exploitability 0." in shown and "of the linear average 0." in shown
