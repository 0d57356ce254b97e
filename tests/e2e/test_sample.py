"""`agentrl sample` with a real server and real sandboxes: a run folder that grows, is interrupted, and that other commands read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.base.files import read_json_lines
from agentrl.base.processes import read_stat
from agentrl.experience import SqliteStore
from agentrl.records import Group
from tests.ledgers import indices

from .conftest import agentrl, start, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.bubblewrap]

RECIPE = "recipes/quickstart.py"
SMALL = ("rollout.group.size=4", "rollout.concurrency=4")


def stored(run: Path) -> dict[int, Group]:
    store = SqliteStore(run / "experience.sqlite")
    try:
        return {index: store.groups([index])[0] for index in indices(store)}
    finally:
        store.close()


def workers_of(run: Path) -> list[int]:
    """Process ids of the rollout workers of a run, without the processes that they are about to start, which share their command line."""
    own = ["-m", "agentrl.run.worker", str(run)]
    pids = [pid for pid, words in command_lines() if any(words[at : at + 3] == own for at in range(len(words)))]
    return [pid for pid in pids if read_stat(pid).parent not in pids]


def working_folder(pid: int) -> Path | None:
    with contextlib.suppress(OSError):
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    return None


def command_lines() -> Iterator[tuple[int, list[str]]]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                yield int(folder.name), (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")


@pytest.mark.usefixtures("nothing_left")
def test_sampling_can_be_interrupted_extended_and_used_for_training(tmp_path: Path, forked: tuple[str, ...]) -> None:
    run = tmp_path / "run"
    options = ("--run-dir", str(run), "--sandbox", "bubblewrap")
    process = start("sample", RECIPE, *SMALL, "rollout.workers=1", "store=redis", "--groups", "200", *options, by=forked)
    wait_for(lambda: bool(workers_of(run)) and (run / "experience.sqlite").exists() and len(stored(run)) >= 1, process, timeout=300)
    [killed] = workers_of(run)
    os.kill(killed, signal.SIGKILL)
    before = len(stored(run))
    wait_for(lambda: len(stored(run)) >= before + 2, process, timeout=120)  # the only worker was replaced
    assert killed not in workers_of(run) and len(workers_of(run)) == 1
    [server] = [pid for pid, words in command_lines() if words[0].startswith("redis-server") and working_folder(pid) == run / "redis"]
    os.kill(server, signal.SIGKILL)
    before = len(stored(run))
    wait_for(lambda: len(stored(run)) >= before + 2, process, timeout=120)  # its successor has all accepted groups
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output[-4000:]
    assert "rollout worker 0 is replaced: it was killed by signal 9, SIGKILL" in output
    assert "the Redis server was restarted" in output
    assert "finishing the groups in progress" in output and "interrupted; continue with: " in output and "Traceback" not in output
    first = stored(run)
    assert 2 <= len(first) < 100 and not (run / "model").exists() and not list((run / "checkpoints").iterdir())
    assert all(len(group.episodes) == 4 for group in first.values())

    code, output = agentrl("sample", RECIPE, "--resume", "--groups", "100", *options)
    assert code == 2 and "an earlier command requested 200 groups" in output
    (run / "sample.json").write_text(json.dumps({"groups": len(first) + 2}))  # instead of sampling all 200
    code, output = agentrl("sample", RECIPE, "--resume", "--json", *options, by=forked)
    assert code == 0, output[-4000:]
    result = json.loads(output.splitlines()[-1])
    groups = stored(run)
    assert sorted(groups) == list(range(len(first) + 2)) and all(groups[index] == group for index, group in first.items())
    assert result["groups"] == len(groups) and result["all"]["attempts"] + result["all"]["left_out"] == 4 * len(groups)
    assert json.loads((run / "sample.json").read_text()) == result and not result["unfinished"]
    assert len(read_json_lines(run / "episodes" / "train.jsonl")) == 4 * len(groups)

    code, output = agentrl("sample", RECIPE, "--resume", *options)
    assert code == 0 and "server" not in output, "without missing groups nothing is started"
    assert f"({len(groups)} groups of 4)" in output and stored(run) == groups
    code, output = agentrl("train", RECIPE, "--resume", *options)
    assert code == 2 and "was created by `agentrl sample`" in output, output

    code, output = agentrl("report", str(run))
    page = (run / "report.html").read_text()
    assert code == 0 and "Training tasks" in page and "no summary yet" not in page, output
    code, output = agentrl("tune", "sft", str(run), "--min-score", "0", "--epochs", "1", "--out", str(tmp_path / "tuned"))
    assert code == 0 and f"{len(groups)} demonstrations" in output and (tmp_path / "tuned" / "config.json").exists(), output[-4000:]
