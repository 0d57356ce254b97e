"""The family `questions`: only splitting solves its tasks with the policy's token limits; and its verifier."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentrl.agent import ChatFormat
from agentrl.agent.template import auto_tokenizer
from agentrl.cli.running import load_recipe
from agentrl.errors import UserError
from agentrl.objective import assemble
from agentrl.plugins import parts
from agentrl.records import Episode, ExecResult, Group, Score, ScoredEpisode, Split, Task
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner
from agentrl.testing import ReadingPolicy, ScriptedSandboxes
from benchmarks.splitting import CREDITS
from recipes.base_policy import MODEL as TABLES_BASE
from recipes.splitting_policy import encode
from rewards.pages import answered
from sandboxes.pages import Questions
from sandboxes.pages.demonstrations import NO_ANSWER, Demonstration, call, demonstrate
from sandboxes.pages.questions import program
from sandboxes.pages.strategies import alone, at_once, given, handing_on, splitting
from sandboxes.tables.demonstrations import run_template

ROOT = Path(__file__).resolve().parents[2]
FAMILY = Questions()
PAGES = range(1, 4)
Reads = Callable[[Task], Callable[[str], str]]


@cache
def tokenizer() -> Any:
    return auto_tokenizer().from_pretrained(TABLES_BASE)


async def played(task: Task, strategy: Reads, name: str = "e", *, model_len: int = 0) -> ScoredEpisode:
    """Plays one attempt with the agent and the tokenizer of the recipe. Programs run like the family's templates."""
    _, recipe = load_recipe(ROOT / "recipes" / "splitting.py", [])

    def run_program(code: str) -> ExecResult:
        return ExecResult(exit_code=0, stdout=run_template(code, task.files), stderr="", wall_s=0.0)

    runner = EpisodeRunner(
        agent=parts.make_part(parts.AGENT, recipe.rollout.agent, chat=ChatFormat(tokenizer()), **recipe.rollout.agent_settings),
        policy=ReadingPolicy(tokenizer(), strategy(task)),
        sandboxes=ScriptedSandboxes(run_program),
        sampling=Sampling(),
        max_model_len=model_len or recipe.policy.max_model_len,
        request_timeout_s=60.0,
    )
    episode = await runner.run(task, episode_id=name)
    assert not episode.left_out
    return ScoredEpisode(episode=episode, score=await answered(task, episode))


@pytest.mark.slow
async def test_splitting_solves_a_task_and_one_context_does_not() -> None:
    tasks = [FAMILY.task(Split.TRAIN, index) for index in range(12)]
    for task in tasks:
        solved_attempt = await played(task, splitting)
        assert solved_attempt.score.value == 1.0 and len(solved_attempt.episode.trajectories) == 4
        for strategy in (alone, at_once, handing_on):
            failed = await played(task, strategy)
            assert failed.score.value == 0.0 and failed.episode.answer in (None, NO_ANSWER), strategy.__name__
    roomy = Questions(turn_tokens=400, episode_tokens=700).task(Split.TRAIN, 0)
    for strategy in (alone, at_once, handing_on):
        solved = await played(roomy, strategy, model_len=1024)
        assert solved.score.value == 1.0, f"{strategy.__name__}: with a longer context, it solves the task"


async def test_verifier_scores_each_helper_and_credit_follows() -> None:
    task = FAMILY.task(Split.TRAIN, 0)

    def saying(answer: str, page: int) -> Reads:
        """Returns a strategy whose helper of one page answers without looking."""
        return lambda task: lambda context: call("submit", answer=answer) if given(context) == [page] else splitting(task)(context)

    good, wrong = await played(task, splitting, "good"), await played(task, saying("no idea", 2), "wrong")
    assert good.score.branches == (None, 1.0, 1.0, 1.0) and good.score.without == (None, 0.0, 0.0, 0.0)
    assert (wrong.score.value, wrong.score.branches) == (0.0, (None, 1.0, 0.0, 1.0))
    assert good.score.parts == {"split": 1.0, "helpers": 1.0} and wrong.score.parts == {"split": 1.0, "helpers": 2 / 3}
    lone = await played(task, alone, "alone")
    assert lone.score.branches == (None,) and lone.score.parts == {"split": 0.0}
    group = Group(index=0, task_id=task.id, task_key=task.key, episodes=(good, wrong))
    samples = assemble(0, [group], load_recipe(ROOT / "recipes" / "splitting.py", ["objective.credit=verifier"])[1]).batch.samples
    credit = {(sample.episode_id, number % 4): max(sample.advantages, key=abs) for number, sample in enumerate(samples)}
    assert credit["wrong", 2] < 0 < credit["wrong", 1], "only the helper that did not look is blamed"


async def test_every_credit_method_has_its_inputs() -> None:
    task = FAMILY.task(Split.TRAIN, 1)
    strategies = {"split": splitting, "alone": alone, "handed on": handing_on}
    attempts = [await played(task, strategy, name) for name, strategy in strategies.items()]
    group = Group(index=0, task_id=task.id, task_key=task.key, episodes=tuple(attempts))
    for credit in CREDITS:
        recipe = load_recipe(ROOT / "recipes" / "splitting.py", [f"objective.credit={credit}"])[1]
        samples = assemble(0, [group], recipe).batch.samples
        main = {sample.episode_id: max(sample.advantages, key=abs) for sample in reversed(samples)}  # an episode's first is the main one
        assert main["split"] > 0 > main["alone"], credit


@pytest.mark.parametrize("answer", [None, "", "x", "\n\n", "1\n2\n3\n4", "9" * 5000])
async def test_wrong_answers_score_0(answer: str | None) -> None:
    task = FAMILY.task(Split.TRAIN, 3)
    episode = Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=answer)
    assert (await answered(task, episode)).value == 0.0
    truth: Score = await answered(task, Episode(id="e", task_id=task.id, task_key=task.key, trajectories=(), answer=task.data["answer"]))
    assert truth.value == 1.0


def test_tasks_are_pure_and_have_a_file_for_each_question() -> None:
    assert Questions(seed=3).task(Split.TRAIN, 7) == Questions(seed=3).task(Split.TRAIN, 7) != Questions(seed=4).task(Split.TRAIN, 7)
    for index in range(40):
        task = FAMILY.task(Split.HELDOUT, index)
        assert len(task.files) == 6 and run_template(FAMILY.gold(task), task.files).split("\n") == [str(answer) for answer in answers(task)]
    for wrong in (lambda: Questions(pages=1), lambda: FAMILY.task(Split.TRAIN, -1), lambda: FAMILY.task(Split.HELDOUT_REAL, 0)):
        with pytest.raises(UserError):
            wrong()


def answers(task: Task) -> list[str]:
    """Returns the output of the right programs. Totals are rounded."""
    printed = [run_template(program(question), task.files) for question in task.data["questions"]]
    assert all(
        output == truth or abs(float(output) - float(truth)) <= tolerance
        for output, truth, tolerance in zip(printed, task.data["answers"], task.data["tolerances"], strict=True)
    )
    return printed


@pytest.mark.slow
def test_demonstrations_contain_every_move_but_rarely_the_right_one() -> None:
    demonstrations = [demonstrate(FAMILY.task(Split.TRAIN, index), Random(index)) for index in range(600)]
    counts = Counter(strategy_of(demonstration) for demonstration in demonstrations)
    assert set(counts) == {"one page", "joining", "splitting", "handing on", "alone"}
    assert 0.25 < counts["splitting"] / (counts["splitting"] + counts["handing on"] + counts["alone"]) < 0.45
    chat = ChatFormat(tokenizer())
    for demonstration in demonstrations[:60]:
        row = encode(chat, tokenizer(), demonstration)
        learned = tokenizer().decode([token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label >= 0])
        everything = "".join(move.says for move in demonstration.moves if move.learn)
        assert learned == everything or (strategy_of(demonstration) == "alone" and everything.startswith(learned)), (
            "only the policy's text is learned"
        )
        assert len(row["input_ids"]) == len(row["labels"]) <= FAMILY.limits.episode_tokens


def strategy_of(demonstration: Demonstration) -> str:
    first = json.loads(demonstration.moves[0].says.partition("\n</tool_call>")[0].removeprefix("<tool_call>\n"))
    if len({*PAGES} & {int(word) for word in demonstration.prompt.rstrip(".").split() if word.isdigit()}) == 1:
        return "one page"
    if not demonstration.moves[0].learn:
        return "joining"
    if first["name"] == "delegate":
        return "handing on" if first["arguments"]["task"] == demonstration.prompt else "splitting"
    return "alone"
