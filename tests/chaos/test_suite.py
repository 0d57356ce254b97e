"""The suite's verdicts and its command line, without a run. tests/e2e/test_chaos.py runs a short form of the suite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.chaos import CASES, Case, ChaosError, Result, Subject, suite
from agentrl.chaos.parts import Injected
from agentrl.chaos.subject import MARK, ended
from agentrl.cli.chaos import render_results
from tests.commands import agentrl
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def outcome(injected: Injected | Exception, *, slack: float = 1.0, bound_s: float | None = 10.0) -> Result:
    def inject(run: Subject) -> Injected:
        if isinstance(injected, Exception):
            raise injected
        return injected

    case = Case(number=1, name="any", injects="Any fault.", inject=inject, bound_s=bound_s)
    return suite._run_case(case, cast(Any, SimpleNamespace(exit_code=None)), slack)


def test_a_case_fails_without_its_fault_and_beyond_its_bound() -> None:
    assert outcome(Injected(witness="gone", recovered_s=9.0)).ok
    late = outcome(Injected(witness="gone", recovered_s=11.0))
    assert not late.ok and late.problem == "took 11.0 s, more than the bound of 10 s" and late.witness == "gone"
    assert outcome(Injected(witness="gone", recovered_s=11.0), slack=2.0).ok
    assert outcome(Injected(witness="gone", recovered_s=99.0), bound_s=None).ok
    missed = outcome(ChaosError("the moment was missed"))
    assert not missed.ok and missed.problem == "the moment was missed" and missed.recovered_s is None


def test_the_table_names_each_case_once_and_the_docs_have_all_of_them() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line.split("|")[1:4] for line in page.splitlines() if line.startswith("| ") and line.split("|")[1].strip().isdecimal()]
    assert sorted((int(number), name.strip().strip("`")) for number, name, _ in rows) == sorted((case.number, case.name) for case in CASES)
    bounds = {case.name: "-" if case.bound_s is None else f"{case.bound_s:g} s" for case in CASES}
    assert {name.strip().strip("`"): bound.strip() for _, name, bound in rows} == bounds


def test_the_command_lists_the_cases_and_rejects_an_unknown_one() -> None:
    listed = agentrl("chaos", "list")
    assert [line.split()[1] for line in listed.stdout.splitlines()] == [case.name for case in sorted(CASES, key=lambda case: case.number)]
    assert len(json.loads(agentrl("chaos", "list", "--json").stdout)) == len(CASES)
    unknown = agentrl("chaos", "run", "--case", "999")
    assert unknown.returncode == 2 and "there is no case 999" in unknown.stderr and "agentrl chaos list" in unknown.stderr


def test_the_report_has_a_row_for_each_result() -> None:
    results = [
        Result(case=" 1 server", witness="gone", recovered_s=21.04, bound_s=90.0),
        Result(case="34 disk", skipped="it needs root"),
        Result(case="   afterwards", problem="2 groups were lost"),
    ]
    rows = [line.split() for line in render_results(results).splitlines()[1:]]
    assert rows[0] == ["1", "server", "21.0", "s", "90", "s", "yes", "gone"]
    assert rows[1][:5] == ["34", "disk", "-", "-", "skip"] and rows[2][:4] == ["afterwards", "-", "-", "NO"]


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_of_the_suite_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agentrl", "chaos", "run", "--case", "1", "--work", str(tmp_path / "work")]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: _driver(process.pid) is not None)
        driver = _driver(process.pid)
        assert driver is not None and MARK in Path(f"/proc/{driver}/environ").read_text()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output
    wait_until(lambda: ended(driver))  # if Popen() is interrupted, the kernel kills the driver a moment later


def _driver(suite_pid: int) -> int | None:
    """The run under test, once it has its own name."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == suite_pid and b"recipes/quickstart.py" in (entry / "cmdline").read_bytes():
                    return int(entry.name)
            except OSError:
                continue
    return None


def test_a_run_gets_sighup_although_the_suite_runs_under_nohup(tmp_path: Path) -> None:
    run, (reader, writer) = Subject(tmp_path / "run", steps=1, backend="bubblewrap", log=tmp_path / "log"), os.pipe()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        child = run.spawn((sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGHUP).name)"), writer)
    finally:
        signal.signal(signal.SIGHUP, before)
        os.close(writer)
    with open(reader) as output:
        assert output.read() == "SIG_DFL\n" and child.wait() == 0


def test_a_child_that_has_not_started_its_program_is_not_another_worker(tmp_path: Path) -> None:
    class Own(Subject):
        @property
        def pid(self) -> int:
            return os.getpid()

    (tmp_path / "forking_worker.py").write_text("import os\nos.fork()\nos.write(1, b'%d\\n' % os.getpid())\nos.read(0, 1)\n")
    run = Own(tmp_path / "run", steps=1, backend="bubblewrap", log=tmp_path / "log")
    command = (sys.executable, "-m", "forking_worker")
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        pids = {int(worker.stdout.readline()), int(worker.stdout.readline())}
        assert len(pids) == 2 and run.processes("forking_worker") == [worker.pid]
        worker.communicate(b"..")
