"""Builds run folders with the parts of a real run: scripted attempts, the store, the tracker and the capture of failures.

    python -m tests.view.runs FOLDER STEPS SECONDS

adds steps to a run at an interval, like a driver.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agentrl.agent import TurnLoop
from agentrl.base.files import append_lines, json_line
from agentrl.base.run_lock import drive_folder
from agentrl.config import Recipe, build
from agentrl.experience import SqliteStore
from agentrl.failure import Capture
from agentrl.failure.digest import write_digest
from agentrl.objective import assemble
from agentrl.observe import RunTracker
from agentrl.observe.summary import Summary, record_end
from agentrl.records import Episode, Group, GroupUse, Limits, Message, SandboxSpec, Score, Split, Task
from agentrl.records.late_score import PendingPart
from agentrl.records.sampling import Sampling
from agentrl.rollout import EpisodeRunner, GroupRunner
from agentrl.session.folder import RunStart, write_start
from agentrl.session.transcript import append_transcripts, transcript
from agentrl.task.weighting import GroupOutcome
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.chats import chat_of, shared_tokenizer

KINDS = ("join", "count")
CALL = '<tool_call>\n{{"name": "python", "arguments": {{"code": "{code}"}}}}\n</tool_call>'
SUBMIT = '<tool_call>\n{{"name": "submit", "arguments": {{"answer": "{answer}"}}}}\n</tool_call>'
FALL = 3
"""The step at which the reward drops: no attempt at a task of kind join is right."""

Script = Callable[[int, str], str]


def recipe_of(steps: int, **changes: Any) -> Recipe:
    """A recipe with groups of four attempts, of which two make a step."""
    data = {"name": "demo", "steps": steps, "policy": {"model": "m"}, "tasks": {"family": "a:b"}}
    return build({**data, "rollout": {"group": {"size": 4}, "groups_per_step": len(KINDS)}, **changes})


def task_of(index: int) -> Task:
    """Returns the task of a group. The index determines its kind."""
    return Task(
        id=f"task-{index}",
        family="demo",
        prompt=(Message(role="user", content=f"How many rows has table {index}?"),),
        tools=("python", "submit"),
        sandbox=SandboxSpec(image="none"),
        verifiers=(),
        data={"answer": "3", "kind": KINDS[index % len(KINDS)]},
        split=Split.TRAIN,
        limits=Limits(turns=3, turn_tokens=4000, episode_tokens=8000, wall_s=60.0),
    )


def usual(turn: int, episode: str) -> str:
    """Attempt n of a group of step s is right if n is at most s, except for kind join at step `FALL`, where none is."""
    if turn == 0:
        return "I look at the *table*." + CALL.format(code="print(len(rows))")
    group, attempt = int(episode[1:7]), int(episode.split("-")[1])
    step = group // len(KINDS) + 1
    falls = step == FALL and KINDS[group % len(KINDS)] == "join"
    return SUBMIT.format(answer="3" if attempt < step and not falls else "4")


class RunMaker:
    """A run folder that grows step by step."""

    def __init__(self, folder: Path, *, steps: int = 5, script: Script = usual, output: str = "3\n", **changes: Any) -> None:
        self.folder, self.steps, self.done = folder, steps, 0
        self.recipe = recipe_of(steps, **changes)
        tokenizer = shared_tokenizer()
        if not (folder / "recipe.json").exists():
            write_start(folder, self.recipe, RunStart(recipe=Path("recipes/demo.py"), folder=folder, overrides=()))
            (folder / "model").mkdir()
            tokenizer.backend_tokenizer.save(str(folder / "model" / "tokenizer.json"))
        self.store = SqliteStore(folder / "experience.sqlite")
        self.done = len({entry.step for entry in self.store.entries() if entry.step is not None})
        self.tracker = RunTracker(folder, steps=steps)
        self.capture = Capture(folder, self.recipe.capture, origin={"run": folder.name})
        self._runner = EpisodeRunner(
            policy=ScriptedPolicy(tokenizer, script),
            sandboxes=ScriptedSandboxes(printing(output)),
            agent=TurnLoop(chat=chat_of(tokenizer)),
            sampling=Sampling(),
            max_model_len=16384,
            request_timeout_s=60.0,
        )

    def sample(self, index: int, *, pending: bool = False) -> Group:
        """Samples, scores and stores a group. With `pending`, its scores wait for a part."""

        async def score(task: Task, episode: Episode) -> Score:
            right = float(episode.answer == "3")
            if pending:
                return Score(value=None, pending=(PendingPart(name="review"),), partial=right)
            return Score(value=right, parts={"exact": right}, evidence=f"answer {episode.answer!r}, truth '3'")

        task = task_of(index)
        runner = GroupRunner(runner=self._runner, scorer=score, slots=asyncio.Semaphore(4), group_size=4, max_retries=0)
        with ThreadPoolExecutor(1) as thread:  # the thread of a test may have a running loop
            group = thread.submit(asyncio.run, runner.run_group(index, task)).result().with_task(task)
        self.store.put_all([group])
        self.capture.capture_group(task, group, step=self.done)
        append_lines(self.folder / "tasks.jsonl", [json_line(asdict(GroupOutcome.from_group(task, group)))])
        scored = [transcript(task, attempt, phase="train", step=self.done) for attempt in group.episodes[:1]]
        append_transcripts(self.folder / "episodes" / "train.jsonl", scored)
        return group

    def step(self) -> None:
        """Samples the groups of the next step and commits it, with the metrics of a learner."""
        first = self.done * len(KINDS)
        groups = [self.sample(first + number) for number in range(len(KINDS))]
        self.store.assign(self.done, [group.index for group in groups])
        assembled = assemble(self.done, groups, self.recipe)
        uses = {}
        for group in groups:
            trained = sum(sum(sample.loss_mask) for sample in assembled.batch.samples if sample.group_index == group.index)
            uses[group.index] = GroupUse(tokens_trained=trained, reason=assembled.drop_reasons.get(group.index, ""))
        self.store.commit(self.done, uses, f"checkpoints/{self.done + 1:06d}")
        scores = [attempt.score.value or 0.0 for group in groups for attempt in group.scored]
        self.done += 1
        metrics = {"reward_mean": sum(scores) / len(scores), "entropy": 0.5 / self.done, "clip_fraction": 0.01, "step_s": 2.0}
        busy = {"timeline/server/busy": 1.5, "timeline/server/waiting for weights": 0.5, "timeline/learner/busy": 2.0}
        self.tracker.log(self.done, metrics | busy | {"episodes": 8.0, "tokens_trained": float(assembled.batch.denominator)})

    def finish(self) -> None:
        """Writes the summary, and records the end."""
        write_digest(self.folder)
        (group,) = self.store.groups([0])
        renamed = [
            replace(row, episode=replace(row.episode, id=f"after-heldout-{number:05d}-a0")) for number, row in enumerate(group.episodes)
        ]
        self.store.put_evaluated("after", self.done, replace(group, episodes=tuple(renamed), split="heldout"))
        record_end(self.folder, "finished")
        entries = self.store.entries()
        trained = sum(0 if entry.use is None else entry.use.tokens_trained for entry in entries)
        fields = {
            "steps": self.done,
            "episodes": 4 * len(entries),
            "episodes_left_out": 0,
            "tokens_trained": trained,
            "weight_swaps": self.done,
        }
        Summary(name="demo", finished=True, sandbox_backend="scripted", seed=0, wall_s={"train": 12.0}, **fields).write(self.folder)  # type: ignore[arg-type]

    def close(self) -> None:
        """Closes the files."""
        self.capture.close()
        self.tracker.close()
        self.store.close()


def make_run(folder: Path, *, steps: int = 5, script: Script = usual, finish: bool = True, **options: Any) -> Path:
    """Builds a run with `steps` finished steps."""
    maker = RunMaker(folder, steps=steps, script=script, **options)
    try:
        for _ in range(steps):
            maker.step()
        if finish:
            maker.finish()
    finally:
        maker.close()
    return folder


def with_text(group: Group, text: str) -> Group:
    """Returns the group with `text` in every text and name that an agent, tool, verifier or task can write."""
    episodes = []
    for scored in group.episodes:
        trajectories = []
        for trajectory in scored.episode.trajectories:
            turns = tuple(
                replace(
                    turn,
                    message=replace(
                        turn.message,
                        content=text,
                        tool_calls=tuple(
                            replace(c, name=text[:150], arguments={text[:80]: text, "code": text}) for c in turn.message.tool_calls
                        ),
                    ),
                    tool_results=tuple(replace(result, name=text[:150], output=text) for result in turn.tool_results),
                )
                for turn in trajectory.turns
            )
            trajectories.append(replace(trajectory, turns=turns, agent=text[:80], prompt=(Message(role=text[:30], content=text),)))
        episode = replace(
            scored.episode, trajectories=tuple(trajectories), answer=text, outputs={text[:60].replace("/", "_"): text.encode()[:9000]}
        )
        score = replace(scored.score, evidence=text, parts={text[:60]: 1.0, "exact": scored.score.value or 0.0})
        episodes.append(replace(scored, episode=episode, score=score))
    return replace(group, episodes=tuple(episodes), kind=text[:70], task_id=text[:180], prompt=(Message(role="user", content=text),))


def main(folder: str, steps: str, seconds: str) -> None:
    """Adds steps to a run folder, as its driver."""
    with drive_folder(Path(folder), command="tests.view.runs"):
        maker = RunMaker(Path(folder), steps=int(steps) + 5)
        print("open", flush=True)
        for _ in range(int(steps)):
            sys.stdin.readline()
            maker.step()
            print("step", maker.done, flush=True)
            time.sleep(float(seconds))
        maker.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
