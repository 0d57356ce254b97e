from __future__ import annotations

import json
import math
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from agentrl.observe import Rate, RunTracker, StageClock, terminal
from agentrl.observe.terminal import TerminalTracker
from agentrl.observe.tracker import TensorBoard
from agentrl.protocols import Tracker
from agentrl.records import Blame, Episode, Failure, Group, Score, ScoredEpisode

STEP = {"reward_mean": 0.5, "tokens_per_s": 1234.0, "staleness_mean": 0.9, "staleness_max": 1, "swap_stall_ms": 112.0, "heldout": 0.75}


def group(index: int) -> Group:
    fault = Failure(stage="sandbox", blame=Blame.INFRASTRUCTURE, kind="died", message="")
    good = ScoredEpisode(episode=Episode(id="a", task_id="t", task_key="k", trajectories=()), score=Score(value=1.0))
    lost = ScoredEpisode(
        episode=Episode(id="b", task_id="t", task_key="k", trajectories=(), failures=(fault,)), score=Score(value=None, reason="died")
    )
    return Group(index=index, task_id="t", task_key="k", episodes=(good, lost))


def test_metrics_go_to_the_file_and_to_tensorboard(tmp_path: Path) -> None:
    tracker = RunTracker(tmp_path, [TensorBoard(tmp_path)], steps=2)
    interface: Tracker = tracker
    interface.log(1, STEP)
    interface.log(2, STEP | {"grad_norm": math.nan})
    interface.close()
    interface.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert {key: lines[0][key] for key in STEP} == STEP
    assert abs(lines[0]["time"] - time.time()) < 60
    assert lines[1]["grad_norm"] is None, "NaN is not JSON, and is not 0"

    events = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    events.Reload()
    assert {"train/reward_mean", "eval/heldout"} <= set(events.Tags()["tensors"])
    scalars = events.Tensors("eval/heldout")
    assert [(event.step, float(make_ndarray(event.tensor_proto))) for event in scalars] == [(1, 0.75), (2, 0.75)]


def test_a_full_disk_ends_only_the_event_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = RunTracker(tmp_path, [events := TensorBoard(tmp_path)], steps=2)
    tracker.log(1, STEP)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), events._file.fileno())
    before = threading.active_count()
    tracker.log(2, STEP)
    tracker.log(3, STEP)
    tracker.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/logs/tensorboard: OSError: [Errno 28] No space left on device; no more events are written there"
    ]
    assert "Traceback" not in caplog.text and threading.active_count() == before
    reader = EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    reader.Reload()
    assert [event.step for event in reader.Tensors("eval/heldout")] == [1]


def test_a_tracker_that_raises_system_exit_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Leaving(Tracker):
        def log(self, step: int, metrics: object) -> None:
            raise SystemExit(1)

    tracker = RunTracker(tmp_path, [Leaving(), events := TensorBoard(tmp_path)], steps=2)
    tracker.log(1, STEP)
    tracker.close()
    assert "tracker Leaving: SystemExit: 1" in caplog.text
    reader = EventAccumulator(str(events._folder))
    reader.Reload()
    assert [event.step for event in reader.Tensors("eval/heldout")] == [1], "the other trackers get the step"


@pytest.mark.slow
def test_tensorboard_is_written_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import agentrl.observe
from agentrl.observe.tracker import TensorBoard
assert not {{"torch", "scipy", "tensorboard"}} & set(sys.modules), "reading a run folder needs none of them"
folder = Path({str(tmp_path)!r})
tracker = agentrl.observe.RunTracker(folder, [TensorBoard(folder)])
tracker.log(1, {{"loss": 1.0}})
tracker.close()
assert not {{"torch", "tensorflow"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_resumed_run_continues_after_a_torn_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    tracker = RunTracker(tmp_path)
    tracker.log(2, {"loss": 1.0})
    tracker.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_stages_are_timed_and_add_up() -> None:
    tracker, started = StageClock(), time.monotonic()
    assert tracker.wall_s == {}
    tracker.stage("start")
    time.sleep(0.05)
    tracker.stage("train", "2 steps")
    time.sleep(0.02)
    tracker.stage("start")
    time.sleep(0.05)
    assert list(tracker.wall_s) == ["start", "train"]
    tracker.close()
    spent = tracker.wall_s
    assert spent["start"] >= 0.1 and spent["train"] >= 0.02 and sum(spent.values()) <= time.monotonic() - started
    time.sleep(0.02)
    assert tracker.wall_s == spent, "the clock stops when it is closed"


def test_the_time_before_the_first_stage_counts() -> None:
    clock = StageClock(began=time.monotonic() - 5)
    clock.stage("start")
    clock.close()
    assert list(clock.wall_s) == ["prepare", "start"]
    assert 5 <= clock.wall_s["prepare"] < 6 and clock.wall_s["start"] < 1


def _run_a_while(tracker: RunTracker) -> None:
    tracker.stage("start", "server and learner")
    tracker.stage("evaluate before")
    for done in range(1, 9):
        tracker.evaluating(done, 8)
    tracker.evaluated("before", {"heldout": Rate.from_successes(3, 8)})
    tracker.stage("train", "3 steps")
    for step in range(1, 4):
        for index in range(4):
            tracker.progress(index, group(index))
        tracker.log(step, STEP)


def test_without_a_terminal_each_event_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = RunTracker(tmp_path, [TerminalTracker(tmp_path.name, steps=3)], steps=3)
    _run_a_while(tracker)
    tracker.close()
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "\x1b" not in out
    assert [line[10:].strip() for line in lines[:4]] == [
        "start  server and learner",
        "evaluate before",
        "before: held-out 0.375 [0.137, 0.694] n=8",
        "train  3 steps",
    ]
    assert lines[4].endswith("alert: episodes are excluded: infrastructure: died:"), "a reason is reported once, at the first episode"
    assert len(lines) == 8
    assert "step 2/3  reward 0.500  1,234 tokens/s  staleness 0.9 (max 1)  swap 112 ms  held-out 0.750" in lines[6]
    assert [bool(re.search(r"  about \d+:\d\d left$", line)) for line in lines[5:]] == [True, True, False]


def test_the_remaining_time_after_a_resume_uses_new_steps_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now)
    progress = terminal.Progress(name="r", steps=10)
    progress.begin_stage("start", "")
    now += 50
    for late in (5, 3):  # steps of the killed driver that it had not recorded
        progress.finished_step(late, {})
    assert progress.left_s is None
    now += 30
    progress.begin_stage("train", "")
    now += 1  # its groups were already sampled
    progress.finished_step(6, {})
    assert progress.left_s is None
    now += 40
    progress.finished_step(7, {})
    assert progress.left_s == 120
    progress.begin_stage("evaluate step7", "")
    progress.begin_stage("train", "")
    assert progress.left_s == 120


def test_without_a_terminal_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = RunTracker(tmp_path, steps=3)
    _run_a_while(tracker)
    tracker.close()
    assert capfd.readouterr() == ("", "")


_LIVE = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_tracker import _run_a_while, RunTracker, TerminalTracker
folder = Path(sys.argv[1])
tracker = RunTracker(folder, [TerminalTracker(folder.name, steps=9)], steps=9)
_run_a_while(tracker)
time.sleep(0.6)  # two refreshes of the panel
tracker.close()
"""


@pytest.mark.slow
def test_the_live_panel_is_removed_at_the_end(tmp_path: Path) -> None:
    reader, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-c", _LIVE, str(tmp_path / "quickstart"), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.STDOUT, env=environment)
    os.close(terminal)
    parts: list[bytes] = []

    def drain() -> None:
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # the other side of the terminal is gone
                return
            parts.append(part)

    draining = threading.Thread(target=drain)
    draining.start()
    assert process.wait(300) == 0
    draining.join(60)
    os.close(reader)
    screen = b"".join(parts).decode()
    for text in ("quickstart", "3/9", "about", "held-out 0.750", "24  excluded 12  swaps 3"):
        assert text in screen, text
    assert screen.count("\x1b[?25l") == screen.count("\x1b[?25h") > 0, "the cursor is shown again"
