"""The path from outputs and the reports of a grading sandbox to the score. Every sandbox is hostile, including the judge's."""

from __future__ import annotations

import ast
import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import TaskError
from agentrl.plugins.references import add_project_root, content_root
from agentrl.records import Episode, ExecResult, SandboxSpec, Score, Task, codec
from agentrl.records.paths import is_plain_path
from agentrl.reward import TaskScorer, cleanroom
from agentrl.reward.cleanroom import parse_reward
from agentrl.sandbox import arguments
from agentrl.task.grading import GRADING_KEY, Grading, Mode, encode_files
from agentrl.task.outputs import WHOLE_DIRECTORY, collect_outputs, select_files
from agentrl.testing.sandboxes import ScriptedSandbox, ScriptedSandboxes, sample_task
from tests.fuzz import mutators
from tests.fuzz.mutators import join, split
from tests.fuzz.target import Check, Target, must

SECRET = "secret"
"""Placeholder in an input's report for the grader's secret, which a compromised sandbox has read."""
EXACT = "rewards.tables:exact_answer"
GRADE = "agentrl.reward.cleanroom:grade"
_TESTS: Mapping[Mode, dict[str, bytes]] = {
    "judge": {"test_a.py": b"def test_one(outputs): ...\n"},
    "pytest": {"test_a.py": b"def test_one(): ...\n"},
    "shell": {"test.sh": b"true\n"},
    "harbor": {"test.sh": b"echo 1 > /logs/verifier/reward.txt\n"},
}


class _TakenOver(ScriptedSandbox):
    """A grading sandbox that answers with the input, in which the placeholder is replaced by its secret."""

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", **options: Any) -> ExecResult:
        result = await super().exec(argv, **options)
        return ExecResult(exit_code=0, stdout=result.stdout.replace(SECRET, _secret(stdin)), stderr=result.stderr, wall_s=0.0)


class _TakenOverSandboxes(ScriptedSandboxes):
    async def open(self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, **_: Any) -> ScriptedSandbox:
        return _TakenOver("fuzzed", self._answer, files or {})


def _secret(stdin: bytes) -> str:
    """The judge reads its secret as a line, the others in a request."""
    text = stdin.decode()
    return text.partition('"secret": "')[2].partition('"')[0] if text.startswith("{") else text.strip()


def _task(data: Mapping[str, Any], verifier: str) -> Task:
    return sample_task(verifiers=(verifier,), data=data, outputs=("a.txt",))


def prepare(scratch: Path) -> Check:
    add_project_root(content_root())
    loop = asyncio.new_event_loop()
    tasks = {
        mode: _task({GRADING_KEY: Grading(mode=mode, tests=encode_files(files), timeout_s=5.0).model_dump(mode="json")}, GRADE)
        for mode, files in _TESTS.items()
    }
    answer_tasks = {"text": _task({"answer": "north"}, EXACT), "number": _task({"answer": "-12.5", "tolerance": 0.005}, EXACT)}
    reports = _inside("contained").reports

    def check(data: bytes) -> None:
        label, body = split(data)
        text = body.decode("utf-8", "replace")
        if label in tasks:
            loop.run_until_complete(_graded(tasks[label], text))
        elif label in answer_tasks:
            loop.run_until_complete(_answer(answer_tasks[label], text))
        elif label == "listing":
            loop.run_until_complete(_collected(text))
        elif label == "reward.txt":
            _check_reward(*parse_reward(text, None))
        elif label == "reward.json":
            _check_reward(*parse_reward(None, text))
        elif label == "reports":
            results = reports(body, b"key")
            must(all(isinstance(name, str) and isinstance(error, str) for name, error in results.items()), "a report that is not text")
            must(set(results.values()) <= {"a report that the tests did not write"}, "a report was forged without the key")

    return check


async def _graded(task: Task, output: str) -> None:
    """Runs the verifier of task folders in sandboxes with this output."""
    sandboxes = _TakenOverSandboxes(lambda code: ExecResult(exit_code=0, stdout=output, stderr=output[:100], wall_s=0.0))
    episode = Episode(id="fuzz", task_id=task.id, task_key=task.key, trajectories=(), outputs={"a.txt": b"x"})
    try:
        _check_score(await cleanroom.CleanRoom()(task, episode, sandboxes))
    except TaskError:
        must(
            GRADING_KEY in task.data and task.data[GRADING_KEY]["mode"] == "judge",
            "only tests that do not load are the task's fault without a gold solution",
        )


async def _answer(task: Task, answer: str) -> None:
    score = await TaskScorer()(task, Episode(id="fuzz", task_id=task.id, task_key=task.key, trajectories=(), answer=answer))
    _check_score(score)
    must(score.value in (0.0, 1.0), f"an answer without a verdict: {score.reason}")


def _check_score(score: Score) -> None:
    must(score.value is not None and math.isfinite(score.value) and 0 <= score.value <= 1, "a score out of range")
    must(len(score.evidence) <= 4000, "evidence that is too long")
    must(codec.from_json(Score, codec.to_json(score)) == score, "a score changes when it is read back")


async def _collected(output: str) -> None:
    """Collects outputs from an agent's sandbox that lists arbitrary files, each of which can be read."""
    sandbox = _HasEveryFile("fuzzed", lambda code: ExecResult(exit_code=0, stdout=output, stderr="", wall_s=0.0), {})
    for patterns in ([WHOLE_DIRECTORY], ["src/**", "*.txt"]):
        collected = await collect_outputs(sandbox, patterns)
        must(all(is_plain_path(path) for path in (*collected.files, *collected.removed)), "a path that leads out of a folder")
        must(WHOLE_DIRECTORY in patterns or select_files(collected.files, patterns) == collected.files, "a file that was not requested")
        episode = Episode(id="fuzz", task_id="t", task_key="k", trajectories=(), outputs=collected.files, removed=collected.removed)
        must(codec.from_json(Episode, codec.to_json(episode)) == episode, "an episode changes when it is read back")


class _HasEveryFile(ScriptedSandbox):
    """A sandbox that has every file."""

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        return arguments.plain_path(path).encode("utf-8", "surrogateescape")[:max_bytes]


def _check_reward(value: float | None, wrong: str) -> None:
    must(value is None or 0 <= value <= 1, "a reward out of range")
    must(len(wrong) < 1000, "a message that is too long")


def _inside(name: str) -> ModuleType:
    """A program of the grading sandbox as a module, without its last line, which runs it."""
    tree = ast.parse((cleanroom.INSIDE / f"{name}.py").read_text())
    del tree.body[-1]
    module = ModuleType(f"inside_{name}")
    exec(compile(tree, f"{name}.py", "exec"), vars(module))
    return module


def seeds() -> Sequence[bytes]:
    judged = b'secret {"loaded": ["test_a.py::test_one"]}\nsecret {"test": "test_a.py::test_one", "error": ""}\n'
    rewarded = b'secret {"exit": 0, "txt": "1\\n", "json": null}\n'
    texts = [b"north", b" north ", b"", b"x" * 2000]
    numbers = [b"-12.5", b"-1.25e1", b"nan", b"1e999", b"-12_5", "-١٢".encode(), b"0x1p3"]
    return [
        *(join("judge", judged), join("judge", b"secret {}\n"), join("harbor", rewarded)),
        *(join(mode, b'secret {"tests": {"test_a.py::test_one": "", "test.sh": ""}}\n') for mode in ("pytest", "shell")),
        *(join("text", text) for text in texts),
        *(join("number", text) for text in numbers),
        *(join("reward.txt", text) for text in (b"1", b"0.5\n", b"-1", b"inf")),
        *(join("reward.json", text) for text in (b'{"reward": 1}', b'{"score": 0.5}', b"[]", b'{"reward": true}')),
        *(
            join("listing", text)
            for text in (b'["src/a.py", "b.txt", "../c.txt"]', b'[["src/a.py", "d"], ["gone"]]', b'["src/a.txt", "src/a.txt/b"]')
        ),
        join("reports", b'00ff {"test": "a", "error": ""}\n'),
    ]


_REPORT = mutators.json_in(b"secret ", b"\n")
_KINDS: Mapping[str, mutators.Mutator] = {
    **{str(mode): _REPORT for mode in _TESTS},
    **dict.fromkeys(("text", "number", "reward.txt", "reports"), mutators.lines),
    "reward.json": mutators.json_text,
    "listing": mutators.json_text,
}

target = Target(
    name="grading",
    about="answers, reports of tests and rewards, from judging to the score",
    prepare=prepare,
    seeds=seeds,
    mutate=mutators.labelled(_KINDS),
    words=(
        b"secret ",
        b'"loaded":',
        b'"test":',
        b'"error":',
        b'"tests":',
        b'"txt":',
        b'"json":',
        b'"exit":',
        b"test_a.py::test_one",
        b"1e-400",
        b"NaN",
        b"\xc2\x85",
    ),
)
