"""Clean-room grading: hidden tests grade declared outputs in fresh sandboxes, after the agent's last action.

In mode `judge`, the tests and the programs under test run in separate sandboxes. The host executes the programs under test in a sandbox
with the task's files and the agent's outputs, and reads the results as data. The tests then run in a second sandbox that contains this data
but never executes a program under test. Therefore, such a program can neither read the expected values nor forge a test report. The other
modes run the tests and the code under test in one sandbox; docs/security.md describes the risk.

A test passes only if the report lists it as passed. In mode `harbor`, the value is the reward that the tests wrote. If the tests break
before they report, the gold solution is graded in the same way, once for each task. If the tests also break on the gold solution, the task
is at fault; otherwise, or if there is no gold solution, the agent's outputs are at fault.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import TaskError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import Episode, ExecResult, Score, Task
from agentrl.records.paths import is_plain_path
from agentrl.task.grading import Grading, GradingRun, grading_of
from agentrl.task.outputs import overlay, run_and_collect, sandbox_of

INSIDE = Path(__file__).parent / "inside"
JUDGE, CALL, CONTAINED, PYTEST, HARBOR = (
    (INSIDE / f"{name}.py").read_text(encoding="utf-8") for name in ("judge", "call", "contained", "pytest_child", "harbor")
)
RUN_OUTPUT_BYTES = 128 << 10  # maximum size of stdout and of stderr, each, in one run
READ_BYTES = 4 << 20  # maximum total size of the files that runs write
REPORT_BYTES = 1 << 20
PROVEN_TASKS = 4096
REWARD_KEY = "reward"
LATE_RETRIES = 1  # how often a grading that exceeded a time limit is repeated before its result counts
OPEN_S = 300.0
"""Deadline in seconds for opening a sandbox. A sandbox may become available only when an episode closes one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TestOutcome:
    """Results of the tests of a task."""

    __test__ = False  # not a pytest test class

    reward: float | None = None  # the reward that the tests wrote, if any
    errors: Mapping[str, str] = field(default_factory=dict)  # test -> error; "" if it passed
    broken: str = ""  # why there is no complete report
    untouched: bool = False  # whether the tests broke before they read any of the agent's files
    late: bool = False  # whether a time limit was exceeded


class CleanRoom:
    """The verifier for task folders. Its value is 1 if every test passes, otherwise 0. `parts["tests"]` is the share of tests that pass.

    In mode `harbor`, both are the reward that the tests wrote. If the agent left no outputs and removed no files, both are 0 and no test
    runs.
    """

    needs_sandboxes = True

    def __init__(self) -> None:
        self._gold: dict[str, TestOutcome] = {}

    async def __call__(self, task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
        """Grades the outputs of the episode. Raises `TaskError` if the tests are broken, and `InfrastructureError` if a sandbox fails."""
        plan = grading_of(task)
        if not episode.outputs and not episode.removed:
            return Score(value=0.0, parts={"tests": 0.0}, evidence="none of the declared outputs exists")
        outcome = await grade_outputs(task, plan, episode.outputs, sandboxes, removed=episode.removed)
        if outcome.broken:
            await self._check_gold(task, plan, outcome, sandboxes)
        errors = {name: error for name, error in outcome.errors.items() if error}
        if outcome.reward is not None:
            return Score(value=outcome.reward, parts={"tests": outcome.reward}, evidence=_evidence(errors))
        expected = plan.test_names()
        passed = sum(outcome.errors.get(name) == "" for name in expected)
        missing = {name: outcome.broken or "no report" for name in expected if name not in outcome.errors}
        right = passed == len(expected) and not errors and not outcome.broken
        return Score(value=float(right), parts={"tests": passed / len(expected)}, evidence=_evidence(errors | missing))

    async def _check_gold(self, task: Task, plan: Grading, outcome: TestOutcome, sandboxes: SandboxBackend) -> None:
        """Raises `TaskError` if the agent's outputs are not the reason why the tests break."""
        fix = "run agentrl check on the family"
        if outcome.untouched:
            raise TaskError(f"task {task.id}: its tests do not load: {outcome.broken}", fix=fix)
        if not plan.gold:
            return
        if task.key not in self._gold:
            _, collected = await run_and_collect(task, plan.gold, sandboxes, timeout_s=task.limits.wall_s)
            if len(self._gold) >= PROVEN_TASKS:
                self._gold.clear()
            self._gold[task.key] = await grade_outputs(task, plan, collected.files, sandboxes, removed=collected.removed)
        gold = self._gold[task.key]
        if gold.late:  # the machine may have been slow, so the next episode repeats the check
            del self._gold[task.key]
        if gold.broken:
            raise TaskError(f"task {task.id}: its tests break on the gold solution too: {gold.broken}", fix=fix)


grade = CleanRoom()  # tasks refer to this verifier as `agentrl.reward.cleanroom:grade`


async def grade_outputs(
    task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend, *, removed: Sequence[str] = ()
) -> TestOutcome:
    """Runs a task's tests on outputs in fresh sandboxes. Raises `InfrastructureError` if a sandbox fails.

    If a time limit is exceeded, all tests are repeated up to `LATE_RETRIES` times, because the machine may have been slow.
    """
    for attempt in range(LATE_RETRIES + 1):
        try:
            if plan.mode == "harbor":
                outcome = await _harbor(task, plan, outputs, removed, sandboxes)
            elif plan.mode == "judge":
                outcome = await _judge(task, plan, outputs, sandboxes)
            else:
                outcome = await _contained(task, plan, outputs, sandboxes)
        except TaskError:
            raise
        except ValueError as error:  # the sandbox rejected files because of their size or the length of a name
            outcome = TestOutcome(broken=f"the outputs cannot be placed in a sandbox: {error}"[:500])
        if not outcome.late or attempt == LATE_RETRIES:
            break
    return outcome


async def _report(
    task: Task, plan: Grading, sandboxes: SandboxBackend, program: str, *, files: Mapping[str, bytes], secret: str, stdin: bytes
) -> tuple[ExecResult, list[dict[str, Any]]]:
    """Runs a grading program in a fresh sandbox. Returns the program's result and the objects in its report.

    The report is empty if stdout contains lines without the secret, because only the program should write to this stdout.
    """
    sandbox = await sandboxes.open(sandbox_of(task), files=files, timeout_s=OPEN_S)
    try:
        argv = ["python3", "-I", "-B", "-c", program]
        result = await sandbox.exec(argv, stdin=stdin, timeout_s=plan.timeout_s, output_bytes=REPORT_BYTES)
    finally:
        await sandbox.close()
    *lines, rest = result.stdout.split("\n")
    marked = [line.partition(" ") for line in lines]
    if rest or any(mark != secret for mark, _, _ in marked):  # also true if stdout was truncated, because a line reports that
        return result, []
    try:
        report = [json.loads(text) for _, _, text in marked]
    except (ValueError, RecursionError):
        return result, []
    return result, report if all(isinstance(entry, dict) for entry in report) else []


async def _judge(task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend) -> TestOutcome:
    results, written = await _execute_runs(task, plan, outputs, sandboxes)
    files = {f"tests/{path}": data for path, data in plan.files().items()}
    files |= {f"outputs/{path}": data for path, data in outputs.items()}
    files |= {f"runs/{path}": data for path, data in written.items()}
    files["runs/results.json"] = json.dumps(results).encode()
    secret = secrets.token_hex(16)
    done, report = await _report(task, plan, sandboxes, JUDGE, files=files, secret=secret, stdin=secret.encode() + b"\n")
    late = done.reason == "timeout" or any(result["reason"] == "timeout" for result in results)
    loaded = report[0].get("loaded") if report else None
    if not isinstance(loaded, list) or not all(isinstance(name, str) for name in loaded):
        return TestOutcome(broken=_ending(done), untouched=not done.truncated, late=late)  # output about the agent's files may be truncated
    errors = _texts({entry.get("test"): entry.get("error") for entry in report[1:] if isinstance(entry.get("test"), str)})
    complete = len(errors) == len(report) - 1 and set(loaded) == set(errors) and done.exit_code == 0
    return TestOutcome(errors=errors, broken="" if complete else _ending(done), late=late)


async def _execute_runs(
    task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend
) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Executes all runs of the task in sandboxes that contain no tests.

    Returns the results in order, and a mapping `<index of the run>/<path>` -> contents of the file that the run wrote.
    """
    results: list[dict[str, Any]] = []
    written: dict[str, bytes] = {}
    tests, files = plan.files(), overlay(task.contents(), outputs)
    sandbox: Sandbox | None = None
    try:
        for number, run in enumerate(plan.runs):
            if sandbox is not None and run.fresh:
                await sandbox.close()
                sandbox = None
            if sandbox is None:
                sandbox = await sandboxes.open(sandbox_of(task), files=files, timeout_s=OPEN_S)
            results.append(await _execute_run(run, sandbox, tests))
            left = READ_BYTES - sum(map(len, written.values()))
            written |= {f"{number}/{path}": data for path, data in (await _read(sandbox, run.reads, left)).items()}
    finally:
        if sandbox is not None:
            await sandbox.close()
    return results, written


async def _execute_run(run: GradingRun, sandbox: Sandbox, tests: Mapping[str, bytes]) -> dict[str, Any]:
    stdin = tests[run.stdin_file] if run.stdin_file else run.stdin.encode()
    argv: Sequence[str] = run.argv
    if run.call:
        file, _, function = run.call.partition(":")
        argv = ["python3", "-I", "-B", "-c", CALL]
        stdin = json.dumps({"file": file, "function": function, "args": run.args, "kwargs": run.kwargs}).encode()
    try:
        for path, source in run.files.items():
            await sandbox.write(path, tests[source])
    except ValueError as error:  # an earlier run created something else at that path
        done = ExecResult(exit_code=None, stdout="", stderr=str(error)[:500], wall_s=0.0, reason="blocked")
    else:
        done = await sandbox.exec(argv, stdin=stdin, timeout_s=run.timeout_sec, output_bytes=RUN_OUTPUT_BYTES)
    fields = {name: getattr(done, name) for name in ("reason", "stdout", "stderr", "truncated")}
    return {"name": run.name, "exit": done.exit_code, **fields}


async def _read(sandbox: Sandbox, paths: Sequence[str], left: int) -> dict[str, bytes]:
    """Returns the regular files in `paths`, up to `left` bytes in total. For the tests, all other files are missing."""
    files: dict[str, bytes] = {}
    for path in paths:
        try:
            files[path] = await sandbox.read(path, max_bytes=left)
        except (FileNotFoundError, ValueError):
            continue
        left -= len(files[path])
    return files


async def _contained(task: Task, plan: Grading, outputs: Mapping[str, bytes], sandboxes: SandboxBackend) -> TestOutcome:
    files = {f"work/{path}": data for path, data in overlay(task.contents(), outputs).items()}
    files |= {f"tests/{path}": data for path, data in plan.files().items()}
    secret = secrets.token_hex(16)
    names = sorted({name.partition("::")[0] for name in plan.test_names()})
    request = json.dumps({"secret": secret, "mode": plan.mode, "child": PYTEST, "files": names}).encode()
    done, report = await _report(task, plan, sandboxes, CONTAINED, files=files, secret=secret, stdin=request)
    late = done.reason == "timeout"
    tests = report[0].get("tests") if len(report) == 1 else None
    if not isinstance(tests, dict):
        return TestOutcome(broken=_ending(done), late=late)
    errors = _texts(tests)
    stopped = len(errors) < len(tests) or (plan.mode == "pytest" and not set(plan.test_names()) <= set(errors))
    return TestOutcome(errors=errors, broken=f"not every test reported: {_ending(done)}" if stopped else "", late=late)


async def _harbor(
    task: Task, plan: Grading, outputs: Mapping[str, bytes], removed: Sequence[str], sandboxes: SandboxBackend
) -> TestOutcome:
    """Runs test.sh in a fresh sandbox with the image's working directory and the agent's changes.

    The value is the number in the reward file.
    """
    secret = secrets.token_hex(16)
    deleted = [path for path in removed if is_plain_path(path) and path not in outputs]
    request = json.dumps({"secret": secret, "tests": plan.tests, "written": list(outputs), "removed": deleted}).encode()
    files = overlay(task.contents(), outputs)
    done, report = await _report(task, plan, sandboxes, HARBOR, files=files, secret=secret, stdin=request)
    txt, as_json, code = [report[0].get(name) for name in ("txt", "json", "exit")] if len(report) == 1 else ("", "", None)
    if not isinstance(txt, str | None) or not isinstance(as_json, str | None) or not isinstance(code, int):
        return TestOutcome(broken=_ending(done), late=done.reason == "timeout")
    value, problem = parse_reward(txt, as_json)
    ending = f"exit code {code}; {done.stderr.strip()[-800:]}".rstrip("; ")
    if value is None:
        return TestOutcome(broken=f"{problem}: {ending}")
    return TestOutcome(reward=value, errors={"test.sh": "" if value == 1 else f"{problem or f'reward {value:g}'}: {ending}"})


def parse_reward(txt: str | None, as_json: str | None) -> tuple[float | None, str]:
    """Returns (reward, problem): the reward, from 0 to 1, in Harbor's reward.txt or reward.json, or None if both are missing.

    reward.txt contains a number, and reward.json contains an object with the number. An invalid file yields 0 and the problem. Any program
    in the sandbox may have written these files.
    """
    if txt is not None and txt.strip():
        return _reward_value(txt.strip(), "reward.txt")
    if as_json is None:
        return None, "tests/test.sh wrote neither /logs/verifier/reward.txt nor reward.json"
    try:
        content: Any = json.loads(as_json)
    except (ValueError, RecursionError):
        return 0.0, "reward.json is not JSON"
    if not isinstance(content, dict):
        return 0.0, "reward.json is not an object"
    if REWARD_KEY not in content and len(content) != 1:
        return 0.0, f"reward.json has {len(content)} keys, and none is {REWARD_KEY!r}"
    number = content.get(REWARD_KEY, next(iter(content.values()), None))
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0.0, f"reward.json does not contain a number: {str(number)[:80]!r}"
    return _reward_value(number, "reward.json")


def _reward_value(text: str | float, file: str) -> tuple[float, str]:
    try:
        value = float(text)
    except (ValueError, OverflowError):
        return 0.0, f"{file} does not contain a number: {str(text)[:80]!r}"
    if not math.isfinite(value) or not 0 <= value <= 1:
        return 0.0, f"{file} contains {str(text)[:80]}, but a reward is from 0 to 1"
    return value, ""


def _texts(entries: Mapping[Any, object]) -> dict[str, str]:
    """Returns the valid entries of a report (test -> error), as text that can be stored."""
    return {
        name.encode("utf-8", "replace").decode(): error.encode("utf-8", "replace").decode()
        for name, error in entries.items()
        if isinstance(name, str) and isinstance(error, str)
    }


def _evidence(errors: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {error}" for name, error in errors.items())[:2000]


def _ending(done: ExecResult) -> str:
    return f"{done.reason or f'exit code {done.exit_code}'}; {done.stderr.strip()[-800:]}".rstrip("; ")
