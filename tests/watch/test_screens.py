"""The screens of `agentrl watch` on a run folder of real rollouts: in memory, printed, and in a terminal with keys."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.base.run_lock import drive_folder
from agentrl.errors import UserError
from agentrl.experience import SqliteStore
from agentrl.experience.audit import count, token_balance
from agentrl.observe import events, run_folders
from agentrl.observe.event_log import EventLog
from agentrl.observe.summary import record_end, record_start
from agentrl.records import Group, GroupUse, Message, Score, ScoredEpisode, ToolCall, ToolResult, Trajectory, Turn, VersionSpan
from agentrl.records.episode import Episode
from agentrl.view import RunLibrary
from agentrl.watch import open_screen, print_frame
from agentrl.watch.frames import Size
from agentrl.watch.screens import EpisodeScreen, RunScreen, RunsScreen
from agentrl.watch.terminal import keyboard
from tests.driving import make_recipe

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202e"
WIDE = Size(100, 40)


def episode(group: int, attempt: int, text: str) -> ScoredEpisode:
    call = ToolCall(name="python", arguments={"code": f"print({text!r})"})
    turn = Turn(
        prompt_ids=(1, 2),
        completion_ids=(3, 4),
        logprobs=(-0.1, -0.2),
        versions=(VersionSpan(version=1, start=0, end=2),),
        message=Message(role="assistant", content=f"thinking {text}", tool_calls=(call,)),
        finish_reason="stop",
        tool_results=(ToolResult(name="python", output=f"printed {text}\t.", ok=False, wall_s=0.5),),
        generate_s=1.25,
        ended_at=1000.0,
    )
    trajectory = Trajectory(agent="main", turns=(turn,), stop_reason="answered")
    finished = Episode(id=f"g{group:06d}-{attempt}-a0", task_id=f"task {text}", task_key="k", trajectories=(trajectory,), wall_s=2.0)
    return ScoredEpisode(episode=finished, score=Score(value=float(attempt), parts={"exact": float(attempt)}, reason="", evidence=text))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps, whose texts are hostile."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    folder.mkdir()
    (folder / "recipe.json").write_text(json.dumps(make_recipe().model_dump(mode="json") | {"steps": 4}))
    lines = [{"step": step, "reward_mean": step / 4, "step_s": 30.0, "loss": 1.0 / step} for step in (1, 2, 3)]
    lines[-1] |= {"utilization/server": 0.5, "utilization/learner": 0.25, "heldout": 0.75}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    store = SqliteStore(folder / "experience.sqlite")
    for index in range(8):
        texts = (f"plain {index}", f"{HOSTILE}{index}")
        members = tuple(episode(index, attempt, text) for attempt, text in enumerate(texts))
        prompt = (Message(role="user", content=f"How many? {HOSTILE}"),)
        store.put(Group(index=index, task_id="t", task_key="k", episodes=members, kind="count", prompt=prompt))
    store.commit(0, {0: GroupUse(tokens_trained=4)}, "checkpoints/000001")
    store.close()
    log = EventLog(folder)
    for event in (
        events.RunStarted(name="one", recipe="driving", steps=4),
        events.StageStarted(stage="train"),
        events.EpisodeStarted(episode="a", task_id="t", kind="count", split="train"),
        events.EpisodeStarted(episode="b", task_id="t", kind="count", split="train"),
        events.EpisodeEnded(episode="a", stop_reason="answered", turns=1, tokens=2, seconds=1.0),
        events.PartRestarted(part="server", text="it died"),
        events.AlertRaised(text=f"entropy fell {HOSTILE}"),
    ):
        log.record(event)
    log.close()
    record_start(folder)
    record_end(folder, "finished")
    return folder


def text_of(screen: Any, size: Size = WIDE) -> str:
    text = "\n".join(line.plain for line in screen.lines(size))
    assert all(char.isprintable() or char == "\n" for char in text)
    return text


@pytest.fixture
def screen(run: Path) -> Iterator[RunScreen]:
    opened = open_screen(run)
    assert isinstance(opened, RunScreen)
    opened.refresh()
    yield opened
    opened.close()


def test_a_finished_run_shows_curves_health_ledger_and_episodes(screen: RunScreen) -> None:
    text = text_of(screen)
    for part in ("one  finished", "step      3/4", "reward    0.750", "held-out 0.750", "learner 25% · server 50%", "server 1"):
        assert part in text, part
    store = SqliteStore(screen._folder / "experience.sqlite")
    assert token_balance(count(store.entries()).tokens) in text, "32 tokens, 4 of them trained"
    store.close()
    assert "entropy fell" in text and "left" not in text
    assert "> g000007-1-a0" in text, "the newest episode is selected"


def test_a_driven_run_shows_its_stage_the_time_left_and_episodes_in_flight(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "live"
    shutil.copytree(run, folder)
    with drive_folder(folder, command="x"):
        screen = RunScreen(folder)
        screen.refresh()
        text = text_of(screen)
        assert "live  running  train  episodes in flight: 1" in text and "about 30 s left" in text
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 4, "reward_mean": 1.0, "step_s": 30.0}) + "\n")
        screen.refresh()
        assert "step      4/4" in text_of(screen) and "reward    1.000" in text_of(screen)
        screen.close()
    screen.refresh()
    assert "live  finished" in text_of(screen)
    screen.close()


def test_arrows_select_an_episode_and_enter_opens_its_transcript(screen: RunScreen) -> None:
    screen.key("down")
    assert "> g000007-0-a0" in text_of(screen)
    opened = screen.key("enter")
    assert isinstance(opened, EpisodeScreen)
    text = text_of(opened)
    for part in ("g000007-0-a0", "score 0 · answered · 2 tokens · version 1 · 2.0 s", "── user", "How many?", "thinking plain 7"):
        assert part in text, part
    assert "print('plain 7')" in text and "python, 0.5 s, failed" in text and "printed plain 7" in text
    opened.key("p")
    assert "g000007-1-a0" in text_of(opened)
    opened.key("p")
    assert "g000007-1-a0" in text_of(opened), "it is already the first in the list"
    low = Size(100, 8)
    top = text_of(opened, low)
    opened.key("end")
    assert text_of(opened, low) != top and "score" in text_of(opened, low)
    opened.key("home")
    assert text_of(opened, low) == top


def test_a_folder_of_runs_lists_them_and_opens_one(run: Path) -> None:
    (run.parent / "empty").mkdir(exist_ok=True)
    screen = open_screen(run.parent)
    assert isinstance(screen, RunsScreen)
    screen.refresh()
    text = text_of(screen)
    assert "1 run in" in text and "> one" in text and "finished" in text and "3/4" in text and "0.750" in text
    opened = screen.key("enter")
    assert isinstance(opened, RunScreen)


def test_watch_and_view_list_the_same_runs(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is followed if its target is inside the folder, and an unreadable run does not hide the others."""
    root = tmp_path / "runs"
    for name in ("archive/old", "unreadable"):
        (root / name).mkdir(parents=True)
        (root / name / "recipe.json").write_text("{}")
    (root / "inside").symlink_to(root / "archive" / "old")
    (root / "outside").symlink_to(run)
    is_run = run_folders.is_run

    def denied(path: Path) -> bool:
        if path.name == "unreadable":
            raise PermissionError(13, "Permission denied", str(path))
        return is_run(path)

    monkeypatch.setattr(run_folders, "is_run", denied)
    screen = RunsScreen(root)
    screen.refresh()
    assert "1 run in" in text_of(screen) and "> inside" in text_of(screen)
    assert [entry.name for entry in RunLibrary(root).entries()] == ["inside"]


@pytest.mark.parametrize("damage", ["no files", "torn lines", "a text as store", "an older schema", "a link", "removed"])
def test_a_damaged_run_shows_its_readable_parts_and_an_error_for_the_rest(run: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    screen = RunScreen(folder)
    if damage == "no files":
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif damage == "torn lines":
        (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "reward_mean": 0.5}\n{"step": "x"}\n\xff\xfe[[[[\n{"step": 2, "rew')
    elif damage == "a text as store":
        (folder / "experience.sqlite").write_text("not a database" * 100)
    elif damage == "an older schema":
        import sqlite3

        with sqlite3.connect(folder / "experience.sqlite") as db:
            db.execute("DROP TABLE episodes")
        db.close()
    elif damage == "a link":
        (folder / "metrics.jsonl").unlink()
        (folder / "metrics.jsonl").symlink_to("/etc/passwd")
    else:
        screen.refresh()
        shutil.rmtree(folder)
    screen.refresh()
    text = text_of(screen)
    expected = {
        "no files": "no episodes",
        "torn lines": "1 unreadable line ignored",
        "a text as store": "experience.sqlite",
        "an older schema": "has no index of its episodes",
        "a link": "metrics.jsonl cannot be read",
        "removed": "was removed or renamed",
    }
    assert text.startswith("run  ") and expected[damage] in text
    screen.key("down"), screen.key("enter")
    screen.close()


VALUES = st.one_of(
    st.none(), st.booleans(), st.text(max_size=5), st.floats(), st.integers(-(10**30), 10**30), st.just([1]), st.just({"value": 1e308})
)
KEYS = ("step", "reward_mean", "loss", "step_s", "heldout", "utilization/server", "time")


@given(st.lists(st.fixed_dictionaries({key: VALUES for key in KEYS}), max_size=6), VALUES, VALUES)
def test_no_untrusted_number_or_text_breaks_a_frame(lines: list[dict[str, Any]], steps: object, value: object) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "recipe.json").write_text(json.dumps({"steps": steps}))
        (folder / "evaluations.json").write_text(json.dumps({"after": {"heldout": {"value": value}}, "before": value}))
        with drive_folder(folder, command="x"):
            for screen in (RunScreen(folder), RunsScreen(folder.parent)):
                screen.refresh()
                text_of(screen)
                screen.close()


def test_a_folder_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        open_screen(tmp_path / "missing")


def test_without_a_terminal_one_frame_is_printed_without_control_characters(run: Path) -> None:
    output = io.StringIO()
    print_frame(open_screen(run), Console(file=output, width=80))
    rows = output.getvalue().splitlines()
    assert rows[0] == "one  finished" and all(len(row) <= 80 for row in rows) and "q quit" not in output.getvalue()
    assert all(char.isprintable() or char == "\n" for char in output.getvalue())


@pytest.mark.slow
def test_the_command_in_a_terminal_follows_keys_and_restores_the_terminal(run: Path) -> None:
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-m", "agentrl", "watch", str(run.parent)]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True)
    received = b""

    def wait_for(text: str, *, since: int = 0) -> int:
        nonlocal received
        deadline = time.monotonic() + 60
        while text.encode() not in received[since:]:
            assert time.monotonic() < deadline and process.poll() is None, received[since:].decode(errors="replace")
            if select.select([master], [], [], 0.2)[0]:
                received += os.read(master, 1 << 16)
        return len(received)

    try:
        wait_for("> one")
        os.write(master, b"\r")
        at = wait_for("> g000007-1-a0")
        os.write(master, b"\x1b[B")
        at = wait_for("> g000007-0-a0", since=at)
        os.write(master, b"\r")
        at = wait_for("thinking plain 7", since=at)
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
        at = wait_for("scroll", since=at)
        os.write(master, b"n")
        at = wait_for("g000006-1-a0", since=at)
        os.write(master, b"\x1b[D")
        wait_for("episode ", since=at)
        os.write(master, b"q")
        assert process.wait(30) == 0
        assert termios.tcgetattr(slave) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)
    assert b"\x1b]" not in received and b"\x1b[2J" not in received.replace(b"\x1b[2J\x1b[H", b"") and b"\x07" not in received
    assert "\u202e".encode() not in received


def test_the_screens_take_no_lock_of_the_run(run: Path, tmp_path: Path) -> None:
    """A driver that starts while a screen is open always gets its lock."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    screen = RunScreen(folder)

    async def refresh_often() -> None:
        for _ in range(20):
            await asyncio.to_thread(screen.refresh)

    with drive_folder(folder, command="x"):
        pass
    asyncio.run(refresh_often())
    with drive_folder(folder, command="x"):
        screen.refresh()
    screen.close()


def test_a_closed_standard_input_is_no_keyboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert keyboard() is None
