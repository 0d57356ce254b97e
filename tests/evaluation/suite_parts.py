"""A project for evaluations of suites: a scripted policy, scripted sandboxes, a verifier and a suite.

The policy submits "pass" in cases called good..., "fail" in bad..., and "pass" in every second attempt at flaky... .
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from agentrl.errors import UserError
from agentrl.failure.case import Baseline, Case, Suite, load_suite, save_case
from agentrl.failure.trace import Tag
from agentrl.records import Episode, Message, SandboxSpec, Score, Split, Task
from agentrl.testing import ScriptedPolicy, ScriptedSandboxes, byte_tokenizer
from agentrl.testing.sandboxes import printing

HERE = Path(__file__)
HOSTILE = "no \x1b[31m\x00 ]]> & <b>\u202ereversed\ud7ff\ufffe"
OVERRIDES = (f"sandbox.backend={HERE}:backend",)


class Sandboxes(ScriptedSandboxes):
    async def prepare(self, spec: SandboxSpec) -> None:
        if spec.image == "gone":
            raise UserError("no sandbox image at gone \x1b[31m", fix="write one")


def backend(*, root: Path, run_label: str) -> ScriptedSandboxes:
    return Sandboxes(printing("97"))


def policy() -> ScriptedPolicy:
    def say(turn: int, episode: str) -> str:
        name, number = re.findall(r"(good|bad|flaky|broken|leaves|exits)\w*-r(\d+)", episode)[0]
        if turn and name in ("leaves", "exits"):
            raise KeyboardInterrupt if name == "leaves" else SystemExit(0)
        right = name == "good" or (name == "flaky" and int(number) % 2 == 0)
        name, arguments = ("python", {"code": "print(97)"}) if turn == 0 else ("submit", {"answer": "pass" if right else f"fail {HOSTILE}"})
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    return ScriptedPolicy(byte_tokenizer(), say, version=7)


def no_policy() -> object:
    return object()


def failing_policy() -> ScriptedPolicy:
    raise UserError("there are no weights", fix="train some")


async def verdict(task: Task, episode: Episode) -> Score:
    if task.id.startswith("broken"):
        raise RuntimeError(f"no judge {HOSTILE}")
    if task.id.startswith("good_leaves"):
        raise KeyboardInterrupt
    return Score(value=float(episode.answer == "pass"), evidence=f"wanted pass, got {episode.answer}")


def make_case(
    name: str, *, threshold: float | None = None, repeats: int | None = None, baseline: Baseline | None = None, image: str = "none"
) -> Case:
    task = Task(
        id=name,
        family="f",
        prompt=(Message(role="user", content=f"What is case {name}?"),),
        tools=("python", "submit"),
        sandbox=SandboxSpec(image=image),
        verifiers=("tests.evaluation.suite_parts:verdict",),
        data={"answer": "pass"},
        split=Split.HELDOUT,
    )
    tags = (Tag(name="wrong_answer", by="rules"),)
    return Case(id=name, task=task, threshold=threshold, repeats=repeats, baseline=baseline, tags=tags, note="seen twice", by="anna")


def make_suite(folder: Path, *cases: Case) -> Suite:
    for case in cases:
        save_case(folder, case)
    return load_suite(folder)
