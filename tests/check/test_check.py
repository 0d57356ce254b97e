"""`agentrl check`: the shipped family passes on both backends, and faults of a family are reported by task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from agentrl.check import cheats, purity
from agentrl.check.check import _Prover, check_family, prove_tasks
from agentrl.check.purity import FamilySource
from agentrl.check.report import GOLD, IMAGE, NOTHING, CaseResult, CheckReport, Finding, Proof, _wrong_cases, render
from agentrl.check.verifiers import retry_sandbox_errors
from agentrl.cli import app
from agentrl.config import SandboxConfig, TasksConfig
from agentrl.errors import SandboxError
from agentrl.records import Split, Task
from agentrl.reward import TaskScorer
from agentrl.testing import ScriptedSandboxes
from agentrl.testing.sandboxes import printing
from tests.check import bad_families
from tests.check.bad_families import Good
from tests.driving import Family as Driving
from tests.driving import make_task

ROOT = Path(__file__).resolve().parents[2]
BOTH = [pytest.param("docker", marks=pytest.mark.docker), pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
CHEATS = {*cheats.TEXTS, *cheats.PROGRAMS}
RUNS = '[[run]]\nname = "one"\nargv = ["python3", "a.py"]\n'
STRICT = "def test_it(runs):\n    assert runs['one'].stdout == '42\\n'\n"
SOLVE = "open('a.py', 'w').write('print(6 * 7)')"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BOTH)
def test_shipped_family_passes(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks on one backend, and enough on the other to show that they behave the same there."""
    count, tasks = (10, 10) if backend == "bubblewrap" else (2, 4)  # of each split, and in total
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(app, ["check", "sandboxes/chores", "--backend", backend, "--count", str(count), "--parallel", "4"])
    assert result.exit_code == 0, result.output
    assert "ok    every gold solution scores 1" in result.output and f"{tasks * len(CHEATS)} cheats on {tasks} tasks" in result.output
    assert "FAIL" not in result.output and "warning" not in result.output


def write_task(family: Path, name: str, *, tests: str = STRICT, solve: str = SOLVE, outputs: str = "a.py", image: str = "") -> None:
    files = {
        "task.toml": f'outputs = ["{outputs}"]\n[environment]\nmemory_mb = 128\nstorage_mb = 16\n[verifier]\ntimeout_sec = 60\n',
        "instruction.md": "Write a.py, which prints 42.",
        "tests/test_it.py": tests,
        "tests/runs.toml": RUNS,
        "solution/solve.py": solve,
        **({"environment/image.toml": image} if image else {}),
    }
    for path, text in files.items():
        target = family / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


async def check(family: Path, backend: Any) -> dict[str, dict[str, CaseResult]]:
    (family / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    return by_task(await report_on(family, backend))


async def report_on(family: Path, backend: Any) -> CheckReport:
    source = FamilySource(tasks=TasksConfig(family=str(family)), root=family.parent)
    return await check_family(source, SandboxConfig(backend=backend), count=None, parallel=4, quiet=True)


def by_task(report: CheckReport) -> dict[str, dict[str, CaseResult]]:
    """Task -> case -> result."""
    results: dict[str, dict[str, CaseResult]] = {}
    for result in report.cases:
        results.setdefault(result.task.rpartition("/")[2], {})[result.case] = result
    return results


def test_failures_have_one_row_per_cause() -> None:
    """48 tasks lack a file, and a verifier scores the cheats of 20 tasks 1: 188 cases, two causes."""
    missing = [
        CaseResult(task=f"t-{n}", case=GOLD, wanted=1.0, value=None, detail=f"t-{n}: no file data/{n}.csv", wall_s=0.1) for n in range(48)
    ]
    cheated = [
        CaseResult(task=f"u-{n}", case=case, wanted=0.0, value=value, detail=f"prints {n}", wall_s=0.1)
        for n in range(20)
        for case, value in (*((f"cheat {k}", 1.0) for k in range(6)), (NOTHING, 0.5))
    ]
    table = _wrong_cases((*missing, *cheated))
    assert table.title == "68 of 68 tasks are wrong"
    first, second = list(zip(*(column.cells for column in table.columns), strict=True))
    assert first[:4] == ("u-0, u-1, u-2, and 17 more", "cheat 0 (20), cheat 1 (20), cheat 2 (20), and 4 more", "0", "0.5 to 1")
    assert second == ("t-0, t-1, t-2, and 45 more", f"{GOLD} (48)", "1", "-", "t-0: no file data/0.csv")


@pytest.mark.parametrize("backend", BOTH)
async def test_faults_of_a_family_are_reported_by_task(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cheat_names = {"exits with 0", "empty outputs", "fake report", "links to the tests"}
    for kind in ("PROGRAMS", "TEXTS"):
        monkeypatch.setattr(cheats, kind, {name: text for name, text in getattr(cheats, kind).items() if name in cheat_names})
    family = tmp_path / "family"
    write_task(family, "good")
    write_task(family, "gold-fails", solve="raise SystemExit('no idea')")
    write_task(family, "gold-is-wrong", solve="open('a.py', 'w').write('print(41)')")
    write_task(family, "weak", tests="def test_it(runs):\n    assert runs['one'].exit == 0\n")
    write_task(family, "no-image", image='suite = "bookworm"\npackages = []\nsuit = "x"\n')
    write_task(family, "no-tool")
    toml = family / "no-tool" / "task.toml"
    toml.write_text('tools = ["pyhton"]\n' + toml.read_text())
    write_task(family, "broken-tests", tests="import nowhere\n\ndef test_it(runs):\n    pass\n")
    results = await check(family, backend)
    wrong = {name: {case for case, result in cases.items() if not result.ok} for name, cases in results.items()}
    assert wrong["good"] == set() and set(results["good"]) == {GOLD, NOTHING, *cheat_names}
    assert wrong["gold-fails"] == {GOLD} and "no idea" in results["gold-fails"][GOLD].detail
    assert wrong["gold-is-wrong"] == {GOLD} and results["gold-is-wrong"][GOLD].value == 0.0
    assert wrong["weak"] == cheat_names - {"links to the tests"}
    assert wrong["no-tool"] == {GOLD} and "unknown tool 'pyhton'" in results["no-tool"][GOLD].detail
    assert wrong["no-image"] == {IMAGE} and "suit" in results["no-image"][IMAGE].detail
    assert results["broken-tests"][GOLD].value is None and "nowhere" in results["broken-tests"][GOLD].detail
    table = render(CheckReport(cases=tuple(result for cases in results.values() for result in cases.values()), proofs=(), not_proven=()))
    assert "6 of 7 tasks are wrong" in table and "family/weak" in table and "family/good" not in table


def test_mistakes_in_folders_exit_with_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.cli import main

    write_task(tmp_path / "family", "one")
    (tmp_path / "family" / "one" / "task.toml").write_text("")
    (tmp_path / "family" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    for arguments in (["check", str(tmp_path / "family")], ["check", str(tmp_path / "family"), "--backend", "host"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert "one: task.toml: outputs: is missing" in capsys.readouterr().err


def test_unknown_backend_raises(capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.cli import main

    with pytest.raises(SystemExit) as stop:
        main(["check", str(ROOT / "sandboxes" / "chores"), "--backend", "host"])
    assert stop.value.code == 2 and "no sandbox backend 'host'" in capsys.readouterr().err


@pytest.mark.bubblewrap
def test_json_report_has_every_case(tmp_path: Path) -> None:
    family = tmp_path / "family"
    write_task(family, "weak", tests="def test_it(runs):\n    assert runs['one'].exit == 0\n")
    (family / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    result = CliRunner().invoke(app, ["check", str(family), "--backend", "bubblewrap", "--json"])
    report = json.loads(result.stdout)
    results = {item["case"]: item for item in report["cases"]}
    assert set(report) == {"ok", "cases", "proofs", "not_proven"} and not report["ok"]
    assert len(report["proofs"]) == 7 and all(
        set(proof) == {"name", "looked_at", "findings", "unproven", "table", "ok"} for proof in report["proofs"]
    )
    assert result.exit_code == 1 and results["exits with 0"]["value"] == 1.0 and results[GOLD]["value"] == 1.0
    assert len(results) == 2 + len(CHEATS)


def test_report_accepts_any_text() -> None:
    result = CaseResult(task="f/[b]", case=GOLD, wanted=1.0, value=None, detail="[/red] what a test said [bold]\x1b[31m", wall_s=0.0)
    finding = Finding(severity="warning", what="[/red] and \x1b[31m")
    proof = Proof(name="a proof", looked_at="1 task", findings=(finding,))
    text = render(CheckReport(cases=(result,), proofs=(proof,), not_proven=("that [b] is \x1b right",)))
    assert "[/red] what a test said [bold]" in text and "f/[b]" in text and "\x1b" not in text
    assert "that [b] is" in text and "warning: [/red] and" in text and "ok    a proof" in text


async def test_sandbox_fault_is_retried_and_ends_the_check_if_persistent() -> None:
    calls = 0

    async def fail_twice() -> int:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise SandboxError("busy")
        return calls

    assert await retry_sandbox_errors(fail_twice) == 3
    calls = -9
    with pytest.raises(SandboxError):
        await retry_sandbox_errors(fail_twice)


async def test_family_that_exits_in_gold_fails_its_case() -> None:
    class Leaves(Driving):
        def gold(self, task: Task) -> str:
            raise SystemExit(0)

    prover = _Prover(family=Leaves(), sandboxes=ScriptedSandboxes(printing("42")), scorer=TaskScorer(), parallel=1)
    result = await prover.case(make_task(0), GOLD)
    assert (result.ok, result.value) == (False, None) and "gold() failed: SystemExit: 0" in result.detail


class Uncreatable(Good):
    """No task can be created."""

    def task(self, split: Split, index: int) -> Task:
        raise KeyError("region")


class Empty(Good):
    """No split has a task."""

    def size(self, split: Split) -> int | None:
        return 0


@pytest.mark.parametrize(("kind", "problem"), [(Uncreatable, "KeyError: 'region'"), (Empty, "split train has no tasks")])
async def test_a_family_without_training_tasks_fails_the_check(kind: type[Good], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_families, kind.__name__, kind, raising=False)
    monkeypatch.setattr("agentrl.check.splits.SAMPLE", 4)
    monkeypatch.setattr(
        "agentrl.check.purity._draw_in_subprocess", lambda source, draws: [purity._draw(source.open(), draw) for draw in draws]
    )
    source = FamilySource(tasks=TasksConfig(family=f"tests.check.bad_families:{kind.__name__}"), root=ROOT)
    report = await check_family(source, SandboxConfig(backend="bubblewrap"), count=2, quiet=True)
    assert not report.ok and report.cases == () and problem in render(report)
    assert report.not_proven == ("any other claim: there is no task",)  # in particular, no cheats were tried
    assert "the family does not use its seed" not in render(report)


async def test_a_check_continues_after_a_first_task_that_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Good):
        def task(self, split: Split, index: int) -> Task:
            if (split, index) == (Split.TRAIN, 0):
                raise KeyError("region")
            return super().task(split, index)

    async def scripted(*_: object, **__: object) -> ScriptedSandboxes:
        return ScriptedSandboxes(printing("42"))

    monkeypatch.setattr(bad_families, "Late", Late, raising=False)
    monkeypatch.setattr("agentrl.check.check.open_sandboxes", scripted)
    monkeypatch.setattr("agentrl.check.splits.SAMPLE", 4)
    monkeypatch.setattr(
        "agentrl.check.purity._draw_in_subprocess", lambda source, draws: [purity._draw(source.open(), draw) for draw in draws]
    )
    source = FamilySource(tasks=TasksConfig(family="tests.check.bad_families:Late"), root=ROOT)
    report = await check_family(source, SandboxConfig(backend="bubblewrap"), count=2, quiet=True)
    assert {result.task for result in report.cases} == {"sums-train-1", "sums-heldout-0", "sums-heldout-1"}
    assert not report.ok and "1 task cannot be created: KeyError: 'region'" in render(report)


async def test_a_failure_of_the_sandboxes_is_raised_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead(ScriptedSandboxes):
        async def open(self, *_: object, **__: object) -> NoReturn:
            raise SandboxError("the daemon is gone")

    monkeypatch.setattr("agentrl.check.verifiers.RETRIES", 0)
    with pytest.raises(SandboxError, match="the daemon is gone"):
        await prove_tasks(Good(), [Good().task(Split.TRAIN, 0)], Dead(printing("")), root=ROOT)
