"""Clean-room grading: hidden tests judge declared outputs in fresh sandboxes, after the agent's last action.

In mode `judge` even those are separate. The host performs the task's runs in a sandbox with the task's files and the outputs, and
takes the results as data; the judging code then runs in another sandbox with this data and the tests, which never runs a program
under test. So a program can neither read what it is compared with nor write a report of the tests. The other modes run tests and
code under test in one sandbox; docs/security.md says what that costs.

A test has passed only if it reports so. In mode `harbor` the value is the reward that the tests wrote. When tests break instead of
reporting, the gold solution is graded in the same way, once for each task: if that breaks too, the task is to blame, else the
outputs are.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import Episode, ExecResult, Score, Task
from agentrl.records.paths import is_plain_path
from agentrl.reward.rewardfile import reward
from agentrl.task.grading import Grading, GradingRun, grading_of
from agentrl.task.outputs import overlay, run_and_collect

INSIDE = Path(__file__).parent / "inside"
JUDGE, CALL, CONTAINED, PYTEST, HARBOR = (
    (INSIDE / f"{name}.py").read_text() for name in ("judge", "call", "contained", "pytest_child", "harbor")
)
RUN_OUTPUT_BYTES = 128 << 10
"""Bytes kept of stdout, and of stderr, of one run."""
READ_BYTES = 4 << 20
"""Largest total size of the files that runs write."""
REPORT_BYTES = 1 << 20
PROVEN_TASKS = 4096
LATE_RETRIES = 1
"""How often a grading that exceeded a time limit is repeated before it scores."""
OPEN_S = 300.0
"""Deadline for opening a sandbox; it may have to wait until an episode closes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of the tests. `said`: test -> "" or its error. `broken`: why there is no complete report. `untouched`: it broke before
    any of the agent's files was read. `reward`: the value, where the tests give one. `late`: something ran into its time limit."""

    reward: float | None = None
    said: Mapping[str, str] = field(default_factory=dict)
    broken: str = ""
    untouched: bool = False
    late: bool = False


class CleanRoom:
    """The verifier of task folders: 1 when every test passes, else 0; `parts["tests"]` is the share that passes (a `SandboxVerifier`)."""

    needs_sandboxes = True

    def __init__(self) -> None:
        self._gold: dict[str, Outcome] = {}

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Raises `InfrastructureError`, and `TaskError` when the tests are broken."""
        plan = grading_of(task)
        if not episode.outputs and not episode.removed:
            return Score(value=0.0, parts={"tests": 0.0}, evidence="none of the declared outputs exists")
        outcome = await grade_outputs(task, plan, episode.outputs, sandboxes, removed=episode.removed)
        if outcome.broken:
            await self._prove(task, plan, outcome, sandboxes)
        if outcome.reward is not None:
            evidence = "\n".join(f"{name}: {error}" for name, error in outcome.said.items() if error)[:2000]
            return Score(value=outcome.reward, parts={"tests": outcome.reward}, evidence=evidence)
        expected = plan.test_names()
        passed = [name for name in expected if outcome.said.get(name) == ""]
        wrong = {name: error for name, error in outcome.said.items() if error}
        missing = {name: outcome.broken or "no report" for name in expected if name not in outcome.said}
        evidence = "\n".join(f"{name}: {error}" for name, error in {**wrong, **missing}.items())[:2000]
        right = len(passed) == len(expected) and not wrong and not outcome.broken
        return Score(value=float(right), parts={"tests": len(passed) / len(expected)}, evidence=evidence)

    async def _prove(self, task: Task, plan: Grading, outcome: Outcome, sandboxes: SandboxBackend) -> None:
        """Raises `TaskError` when it is not the agent's fault that the tests break."""
        if outcome.untouched:
            raise TaskError(f"task {task.id}: its tests do not load: {outcome.broken}", fix="run agentrl check on the family")
        if not plan.gold:
            return
        if task.key not in self._gold:
            _, collected = await run_and_collect(task, plan.gold, sandboxes, timeout_s=task.limits.wall_s)
            if len(self._gold) >= PROVEN_TASKS:
                self._gold.clear()
            self._gold[task.key] = await grade_outputs(task, plan, collected.files, sandboxes, removed=collected.removed)
        gold = self._gold[task.key]
        if gold.late:  # the machine may have been slow, so the next episode repeats the proof
            del self._gold[task.key]
        if reason := gold.broken:
            raise TaskError(f"task {task.id}: its tests break on the gold solution too: {reason}", fix="run agentrl check on the family")


grade = CleanRoom()
"""The verifier's reference in tasks: `agentrl.reward.cleanroom:grade`."""


async def grade_outputs(
    task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend, *, removed: Sequence[str] = ()
) -> Outcome:
    """Runs a task's tests on outputs, in fresh sandboxes. If anything exceeds its time limit, all tests are repeated up to `LATE_RETRIES`
    times, because the machine may have been slow. Raises `InfrastructureError`."""
    for _ in range(LATE_RETRIES):
        outcome = await _graded(task, plan, outputs, sandboxes, removed)
        if not outcome.late:
            return outcome
    return await _graded(task, plan, outputs, sandboxes, removed)


async def _graded(task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend, removed: Sequence[str]) -> Outcome:
    try:
        if plan.mode == "harbor":
            return await _harbor(task, plan, outputs, removed, sandboxes)
        if plan.mode == "judge":
            return await _judge(task, plan, outputs, sandboxes)
        return await _contained(task, plan, outputs, sandboxes)
    except ValueError as error:  # the sandbox refused files: too large, or a name too long
        if isinstance(error, TaskError):
            raise
        return Outcome(broken=f"the outputs cannot be placed in a sandbox: {error}"[:500])


async def _judge(task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend) -> Outcome:
    results, written = await _perform(task, plan, outputs, sandboxes)
    files = {f"tests/{path}": data for path, data in plan.files().items()}
    files |= {f"outputs/{path}": data for path, data in outputs.items()}
    files |= {f"runs/{path}": data for path, data in written.items()}
    files["runs/results.json"] = json.dumps(results).encode()
    secret = secrets.token_hex(16)
    sandbox = await sandboxes.open(task.sandbox, files=files, timeout_s=OPEN_S)
    try:
        argv = ["python3", "-I", "-B", "-c", JUDGE]
        done = await sandbox.exec(argv, stdin=secret.encode() + b"\n", timeout_s=plan.timeout_s, output_bytes=REPORT_BYTES)
    finally:
        await sandbox.close()
    late = done.reason == "timeout" or any(one["reason"] == "timeout" for one in results)
    lines = _report(done, secret)
    loaded = lines[0].get("loaded") if lines else None
    if not isinstance(loaded, list) or not _are_texts(loaded):
        return Outcome(broken=_ending(done), untouched=not done.truncated, late=late)  # so much is said of what the agent handed in
    said = _texts({line.get("test"): line.get("error") for line in lines[1:] if _are_texts([line.get("test")])})
    complete = len(said) == len(lines) - 1 and set(loaded) == set(said) and done.exit_code == 0
    return Outcome(said=said, broken="" if complete else _ending(done), late=late)


async def _perform(
    task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Performs every run, in a sandbox without tests: results in order, and `<number of the run>/<path>` -> file it wrote."""
    results: list[dict[str, Any]] = []
    written: dict[str, bytes] = {}
    tests, below = plan.files(), overlay(task.contents(), outputs)
    sandbox: Sandbox | None = None
    try:
        for number, run in enumerate(plan.runs):
            if sandbox is not None and run.fresh:
                await sandbox.close()
                sandbox = None
            if sandbox is None:
                sandbox = await sandboxes.open(task.sandbox, files=below, timeout_s=OPEN_S)
            results.append(await _one_run(run, sandbox, tests))
            left = READ_BYTES - sum(map(len, written.values()))
            written |= {f"{number}/{path}": data for path, data in (await _read(sandbox, run.reads, left)).items()}
    finally:
        if sandbox is not None:
            await sandbox.close()
    return results, written


async def _one_run(run: GradingRun, sandbox: Sandbox, tests: Mapping[str, bytes]) -> dict[str, Any]:
    stdin = tests[run.stdin_file] if run.stdin_file else run.stdin.encode()
    argv: Sequence[str] = run.argv
    if run.call:
        file, _, function = run.call.partition(":")
        argv = ["python3", "-I", "-B", "-c", CALL]
        stdin = json.dumps({"file": file, "function": function, "args": run.args, "kwargs": run.kwargs}).encode()
    try:
        for path, source in run.files.items():
            await sandbox.write(path, tests[source])
    except ValueError as error:  # an earlier run left something at that path
        done = ExecResult(exit_code=None, stdout="", stderr=str(error)[:500], wall_s=0.0, reason="blocked")
    else:
        done = await sandbox.exec(argv, stdin=stdin, timeout_s=run.timeout_sec, output_bytes=RUN_OUTPUT_BYTES)
    return {
        "name": run.name,
        "exit": done.exit_code,
        "reason": done.reason,
        "stdout": done.stdout,
        "stderr": done.stderr,
        "truncated": done.truncated,
    }


async def _read(sandbox: Sandbox, paths: Sequence[str], left: int) -> dict[str, bytes]:
    """Those of `paths` that are regular files within `left` bytes; for the tests the others are missing."""
    files: dict[str, bytes] = {}
    for path in paths:
        try:
            files[path] = await sandbox.read(path, max_bytes=left)
        except (FileNotFoundError, ValueError):
            continue
        left -= len(files[path])
    return files


async def _contained(task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend) -> Outcome:
    files = {f"work/{path}": data for path, data in overlay(task.contents(), outputs).items()}
    files |= {f"tests/{path}": data for path, data in plan.files().items()}
    secret = secrets.token_hex(16)
    names = sorted({name.partition("::")[0] for name in plan.test_names()})
    request = json.dumps({"secret": secret, "mode": plan.mode, "child": PYTEST, "files": names}).encode()
    sandbox = await sandboxes.open(task.sandbox, files=files, timeout_s=OPEN_S)
    try:
        argv = ["python3", "-I", "-B", "-c", CONTAINED]
        done = await sandbox.exec(argv, stdin=request, timeout_s=plan.timeout_s, output_bytes=REPORT_BYTES)
    finally:
        await sandbox.close()
    late = done.reason == "timeout"
    lines = _report(done, secret)
    tests = lines[0].get("tests") if len(lines) == 1 else None
    if not isinstance(tests, dict):
        return Outcome(broken=_ending(done), late=late)
    said = _texts(tests)
    stopped = len(said) < len(tests) or (plan.mode == "pytest" and not set(plan.test_names()) <= set(said))
    return Outcome(said=said, broken=f"not every test reported: {_ending(done)}" if stopped else "", late=late)


async def _harbor(task: Task, plan: Grading, outputs: Mapping[str, bytes], removed: Sequence[str], sandboxes: SandboxBackend) -> Outcome:
    """Runs test.sh in a fresh sandbox with the image's working directory and the agent's changes; its reward file is the value."""
    secret = secrets.token_hex(16)
    gone = [path for path in removed if is_plain_path(path) and path not in outputs]
    request = json.dumps({"secret": secret, "tests": plan.tests, "written": list(outputs), "removed": gone}).encode()
    sandbox = await sandboxes.open(task.sandbox, files=overlay(task.contents(), outputs), timeout_s=OPEN_S)
    try:
        argv = ["python3", "-I", "-B", "-c", HARBOR]
        done = await sandbox.exec(argv, stdin=request, timeout_s=plan.timeout_s, output_bytes=REPORT_BYTES)
    finally:
        await sandbox.close()
    lines = _report(done, secret)
    txt, as_json, code = [lines[0].get(name) for name in ("txt", "json", "exit")] if len(lines) == 1 else ("", "", None)
    if not isinstance(txt, str | None) or not isinstance(as_json, str | None) or not isinstance(code, int):
        return Outcome(broken=_ending(done), late=done.reason == "timeout")
    value, wrong = reward(txt, as_json)
    ending = f"exit code {code}; {done.stderr.strip()[-800:]}".rstrip("; ")
    if value is None:
        return Outcome(broken=f"{wrong}: {ending}")
    return Outcome(reward=value, said={"test.sh": "" if value == 1 else f"{wrong or f'reward {value:g}'}: {ending}"})


def _report(done: ExecResult, secret: str) -> list[dict[str, Any]]:
    """The lines of a report, each an object; none if there is anything else, since only the reporting program has that stdout."""
    *texts, rest = done.stdout.split("\n")
    lines = [text.partition(" ") for text in texts]
    if rest or any(mark != secret for mark, _, _ in lines):  # where stdout is cut, a line says so; tests may print more than is kept
        return []
    try:
        report = [json.loads(text) for _, _, text in lines]
    except (ValueError, RecursionError):
        return []
    return report if all(isinstance(line, dict) for line in report) else []


def _are_texts(said: Iterable[object]) -> bool:
    return all(isinstance(text, str) for text in said)


def _texts(said: Mapping[Any, object]) -> dict[str, str]:
    """The valid entries of a report (test -> error), as text that can be stored."""
    return {
        name.encode("utf-8", "replace").decode(): error.encode("utf-8", "replace").decode()
        for name, error in said.items()
        if isinstance(name, str) and isinstance(error, str)
    }


def _ending(done: ExecResult) -> str:
    how = done.reason or f"exit code {done.exit_code}"
    return f"{how}; {done.stderr.strip()[-800:]}".rstrip("; ")
