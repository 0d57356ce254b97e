"""A command continues if its reader or terminal goes away: it finishes, writes its results, and keeps its exit code."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

# `agentrl train` with a loop that only prints: through the terminal tracker, rich, print, the log and descriptor 1.
_TRAIN = """
import logging, os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace

from agentrl.observe import RunTracker, Summary
from agentrl.observe.terminal import TerminalTracker
from agentrl.run import loop
from agentrl.session import preflight
from agentrl.session.folder import write_start

preflight.run_preflight = lambda recipe, folder, **_: SimpleNamespace()


async def train(recipe, start, checked, *, root, console):
    write_start(start.folder, recipe, start)
    (start.folder / "driver.pid").write_text(str(os.getpid()))
    tracker = RunTracker(start.folder, [TerminalTracker("t", steps=STEPS)], steps=STEPS)
    for step in range(1, STEPS + 1):
        tracker.log(step, {"episodes": 1.0, "reward_mean": 0.5})
        print("a line", flush=True)
        print("of two", file=sys.stderr, flush=True)
        logging.getLogger("x").warning("and a log")
        os.path.exists(start.folder / "go") or time.sleep(PAUSE)
    tracker.close()
    summary = Summary(name="t", finished=True, steps=STEPS, episodes=1, episodes_left_out=0, tokens_trained=1, weight_swaps=0,
                      sandbox_backend="none", seed=0, problems=PROBLEMS)
    summary.write(start.folder)
    return summary

loop.train = train
from agentrl.cli import main

main(["train", "recipes/quickstart.py", "--run-dir", sys.argv[1]])
"""


def command(run: Path, *, steps: int = 60, pause: float = 0.0, problems: tuple[str, ...] = ()) -> list[str]:
    text = _TRAIN.replace("STEPS", str(steps)).replace("PAUSE", str(pause)).replace("PROBLEMS", repr(problems))
    return [sys.executable, "-c", text, str(run)]


def assert_finished(run: Path, steps: int = 60) -> None:
    assert (run / "summary.json").is_file()
    assert len((run / "metrics.jsonl").read_text().splitlines()) == steps


@pytest.mark.slow
@pytest.mark.parametrize("end", ["| head -1", "2>&1 | head -1", "2>&1 >/dev/null | head -1", "| true", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_reader_that_exits_changes_neither_the_run_nor_its_exit_code(end: str, tmp_path: Path) -> None:
    shell = f'set -o pipefail; "$@" {end}'
    result = subprocess.run(["bash", "-c", shell, "bash", *command(tmp_path / "run", pause=0.01)], capture_output=True, timeout=120)
    assert_finished(tmp_path / "run")
    assert result.returncode == 0 and b"Broken pipe" not in result.stderr and b"Traceback" not in result.stderr, result.stderr.decode()


@pytest.mark.slow
def test_a_run_without_a_result_still_exits_with_1_if_its_output_is_not_read(tmp_path: Path) -> None:
    shell = 'set -o pipefail; "$@" | true'
    args = command(tmp_path / "run", pause=0.01, problems=("nothing was scored",))
    assert subprocess.run(["bash", "-c", shell, "bash", *args], capture_output=True, timeout=120).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "blocking"), [("stdout", True), ("stdout", False), ("stderr", True)])
def test_a_reader_that_does_not_read_does_not_stop_a_run(stream: str, blocking: bool, tmp_path: Path) -> None:
    """`agentrl train | sleep 1000`: the run writes its results and exits normally although the pipe stays full."""
    run = tmp_path / "run"
    args = command(run, steps=4000)
    args[2] = "import agentrl.cli.terminal as terminal\nterminal.PATIENCE_S = 1.0\n" + args[2]
    read, write = os.pipe()
    os.set_blocking(write, blocking)
    other = {"stdout": "stderr", "stderr": "stdout"}[stream]
    with open(tmp_path / "other", "wb") as file:
        child = subprocess.Popen(args, **{stream: write, other: file})
        os.close(write)
        assert child.wait(600) == 0
    assert_finished(run, 4000)
    printed = b""
    while content := os.read(read, 1 << 16):
        printed += content
    os.close(read)
    assert 60_000 < len(printed) < 70_000, "the capacity of a pipe"
    if stream == "stderr":
        assert b"report " in (tmp_path / "other").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("max_bytes", "complete"), [(1 << 20, True), (1 << 14, False)])
def test_a_reader_that_reads_late_gets_the_result(max_bytes: int, complete: bool, tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 3000
    args = command(run, steps=steps)
    args[2] = f"import agentrl.cli.terminal as terminal\nterminal._MOST = {max_bytes}\n{args[2]}"
    child = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_for(run / "summary.json")
    time.sleep(0.5)
    printed, _ = child.communicate(timeout=300)
    assert child.returncode == 0 and b"report " in printed[-1000:], printed[-1000:]
    assert (b"some output was dropped" in printed) is not complete
    assert (printed.count(b"a line\n") == steps) is complete
    assert len(printed) > 70_000, "more than the capacity of a pipe, including the newest output"


@pytest.mark.slow
def test_a_full_disk_and_a_forked_child_behave_as_without_a_run(tmp_path: Path) -> None:
    code = """
        import os, sys
        from agentrl.cli.terminal import outlast_readers, outlasting_terminal, settle
        outlast_readers()
        with outlasting_terminal():
            print("of the parent", flush=True)
            settle()
            if os.fork() == 0:
                print("of the child", flush=True)
                os._exit(0)
            os.wait()
            print("last")
        settle()
    """
    args = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(args, capture_output=True, timeout=300, check=True).stdout == b"of the parent\nof the child\nlast\n"
    with open("/dev/full", "wb") as full:
        result = subprocess.run(args, stdout=full, stderr=subprocess.PIPE, timeout=300)
    assert result.returncode != 0 and b"No space left" in result.stderr


@pytest.mark.slow
def test_a_forked_child_does_not_wait_for_the_output_of_its_parent(tmp_path: Path) -> None:
    code = """
        import os, sys
        import agentrl.cli.terminal as terminal
        terminal.PATIENCE_S = 3600.0
        terminal.outlast_readers()
        with terminal.outlasting_terminal():
            print("x" * 200_000, flush=True)
            if os.fork() == 0:
                terminal.settle()
                os._exit(0)
            os.wait()
        open(sys.argv[1], "x").close()
        terminal.settle()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "done")], stdout=subprocess.PIPE)
    try:
        wait_for(tmp_path / "done")
        assert child.communicate(timeout=300)[0] == b"x" * 200_000 + b"\n" and child.returncode == 0
    finally:
        child.kill()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def start_in_terminal(args: list[str], run: Path) -> tuple[int, int]:
    """Starts a command in a new terminal and waits until its run has started. Returns its process id and the terminal's other end."""
    child, terminal = pty.fork()
    if child == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and the command would too
        os.execv(args[0], args)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return child, terminal


@pytest.mark.slow
def test_a_closed_terminal_does_not_end_a_run(tmp_path: Path) -> None:
    """The kernel sends SIGHUP, and every later write fails with EIO, including those of the live panel's thread."""
    run = tmp_path / "run"
    child, terminal = start_in_terminal(command(run, pause=0.1), run)
    os.close(terminal)
    (run / "go").touch()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert_finished(run)
    assert f"the terminal was closed (SIGHUP); process {child} continues" in (run / "logs" / "driver.log").read_text()


@pytest.mark.slow
def test_a_run_without_its_terminal_still_ends_with_sigterm(tmp_path: Path) -> None:
    run = tmp_path / "run"
    child, terminal = start_in_terminal(command(run, steps=10_000, pause=0.1), run)
    os.close(terminal)
    time.sleep(0.3)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


@pytest.mark.slow
def test_a_result_that_cannot_be_written_is_a_failure() -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "agentrl", "version"], stdout=full, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=60
        )
    assert result.returncode != 0


@pytest.mark.slow
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_sighup_handler_is_restored_and_sighup_stays_ignored_under_nohup(before: signal.Handlers) -> None:
    code = f"""
        import os, signal
        from agentrl.cli.terminal import outlasting_terminal
        signal.signal(signal.SIGHUP, signal.{before.name})
        heard = []
        with outlasting_terminal(heard.append):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
        assert len(heard) == {int(before is signal.SIG_DFL)}, heard
        assert signal.getsignal(signal.SIGHUP) is signal.{before.name}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
