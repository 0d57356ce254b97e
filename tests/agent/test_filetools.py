"""Tools for files: operations, errors, and agents that try to cheat or hang them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent import load_tools
from agentrl.agent.inside import files
from agentrl.agent.tools import ToolOutcome
from agentrl.records import ExecResult, Limits, SandboxSpec, Task
from agentrl.sandbox import select_backend
from agentrl.testing import ScriptedPolicy
from agentrl.testing.sandboxes import ScriptedSandbox
from tests.agent.test_tools import call

LIMITS = Limits(tool_timeout_s=5.0, tool_output_chars=1000)


class Box(ScriptedSandbox):
    """Runs the tools' programs in a folder, each in its own interpreter."""

    def __init__(self, home: Path) -> None:
        super().__init__("box", self.run, {})
        self.home = home

    def run(self, code: str) -> ExecResult:
        process = subprocess.run([sys.executable, "-I", "-c", code], cwd=self.home, capture_output=True, check=False, timeout=20)
        out, err = (text.decode("utf-8", "replace") for text in (process.stdout, process.stderr))
        return ExecResult(exit_code=process.returncode, stdout=out, stderr=err, wall_s=0.0)


@pytest.fixture
def box(tmp_path: Path) -> Box:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "outside.txt").write_text("secret\n")
    return Box(home)


async def use(box: Box, name: str, limits: Limits = LIMITS, **arguments: Any) -> ToolOutcome:
    outcome = await load_tools((name,))[name](arguments, box, limits)
    assert "Traceback" not in outcome.output, outcome.output
    return outcome


async def test_a_file_is_created_viewed_and_changed(box: Box) -> None:
    assert (await use(box, "create", path="src/a.py", text="one\ntwo\nthree\n")).output == "src/a.py has 3 lines now"
    os.chmod(box.home / "src/a.py", 0o755)
    assert (await use(box, "view", path="./src//a.py", start=2, end=2)).output == "     2\ttwo\nlines 2 to 2 of 3"
    assert (await use(box, "replace", path=f"{box.home}/src/a.py", old="two\n", new="zwei\n")).ok
    outcome = await use(box, "insert", path="src/a.py", line=3, text="vier")
    assert outcome.output.splitlines()[-1] == "     4\tvier"
    assert (box.home / "src/a.py").read_text() == "one\nzwei\nthree\nvier\n"
    assert (box.home / "src/a.py").stat().st_mode & 0o777 == 0o755, "an executable file stays executable"
    assert (await use(box, "view", path=".")).output == "src/"
    assert [path.name for path in (box.home / "src").iterdir()] == ["a.py"], "no temporary file remains"


async def test_line_ends_are_preserved(box: Box) -> None:
    (box.home / "dos").write_bytes(b"a\r\nb\r\n")
    await use(box, "replace", path="dos", old="a\nb", new="c\nd\ne")
    await use(box, "insert", path="dos", line=0, text="top")
    assert (box.home / "dos").read_bytes() == b"top\r\nc\r\nd\r\ne\r\n"
    await use(box, "replace", path="dos", old="d", new="d\nf")
    assert (box.home / "dos").read_bytes() == b"top\r\nc\r\nd\r\nf\r\ne\r\n", "the text to replace has no line end"
    (box.home / "open").write_bytes(b"no end")
    await use(box, "insert", path="open", line=1, text="more")
    assert (box.home / "open").read_bytes() == b"no end\nmore\n"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("view", {"path": "b"}, "no file or folder b; the folder contains: a, link, pipe"),
        ("view", {"path": "a", "start": 9}, "a has lines 1 to 3: there are none from 9 to the end"),
        ("view", {"path": "a", "start": 0}, 'start: Input should be greater than or equal to 1; for example {"path": "..."}'),
        ("view", {"path": "../outside.txt"}, "outside the working directory"),
        ("view", {"path": "/etc/passwd"}, "outside the working directory"),
        ("view", {"path": "a\0b"}, "contains NUL"),
        ("view", {"path": "\udcff\ud800"}, "error: view: "),
        ("view", {"path": "link"}, "links are not followed"),
        ("view", {"path": "up/outside.txt"}, "up in up/outside.txt cannot be opened"),
        ("view", {"path": "pipe"}, "not a regular file"),
        ("view", {"path": "raw"}, "not UTF-8 text"),
        ("create", {"path": "a", "text": ""}, "exists: change it with replace"),
        ("create", {"path": "link", "text": "x", "overwrite": True}, "is not a regular file"),
        ("create", {"path": "up/x", "text": "x"}, "links are not followed"),
        ("create", {"path": "n" * 300, "text": "x"}, "File name too long"),
        ("replace", {"path": "a", "old": "x", "new": "y"}, "old occurs 2 times in a, at lines 1, 3"),
        ("replace", {"path": "a", "old": "  y", "new": "z"}, "line 2 differs from its first line in white space only"),
        ("replace", {"path": "a", "old": "", "new": "z"}, "old is empty"),
        ("replace", {"path": "link", "old": "secret", "new": "z"}, "links are not followed"),
        ("insert", {"path": "a", "line": 4, "text": "z"}, "line must be from 0 (the beginning) to 3"),
        ("search", {"pattern": "(", "regex": True}, "not a valid regular expression"),
        ("search", {"pattern": "x", "path": "link"}, "links are not followed"),
    ],
)
async def test_impossible_operations_are_errors_and_change_nothing(box: Box, name: str, arguments: dict[str, Any], message: str) -> None:
    (box.home / "a").write_text("x\n y\nx\n")
    (box.home / "raw").write_bytes(b"\xff\xfe")
    (box.home / "link").symlink_to("../outside.txt")
    (box.home / "up").symlink_to("..")
    os.mkfifo(box.home / "pipe")
    outcome = await use(box, name, **arguments)
    assert not outcome.ok and message in outcome.output and "secret" not in outcome.output and outcome.output.startswith(f"error: {name}: ")
    assert (box.home / "a").read_text() == "x\n y\nx\n" and (box.home / "../outside.txt").read_text() == "secret\n"
    assert not (box.home / "../x").exists()


async def test_a_missing_file_of_an_empty_folder_is_an_error(box: Box) -> None:
    (box.home / "sub").mkdir()
    assert "no file or folder sub/a; its folder is empty" in (await use(box, "view", path="sub/a")).output


async def test_a_search_is_bounded_and_shows_positions(box: Box) -> None:
    (box.home / "sub").mkdir()
    (box.home / "sub/a.py").write_text("import os\nos.exit()\n" + "x" * 5000 + "os\n")
    (box.home / "b.txt").write_text("os\n" * 500)
    (box.home / "odd\x1b[2J\nname.py").write_text("os\n")
    (box.home / "out").symlink_to("..")
    (box.home / "huge").write_bytes(b"")
    os.truncate(box.home / "huge", 1 << 40)
    lines = (await use(box, "search", pattern="os", files="*.py")).output.splitlines()
    assert lines[1:3] == ["sub/a.py:1: import os", "sub/a.py:2: os.exit()"] and lines[0] == "odd\ufffd[2J\ufffdname.py:1: os"
    assert (await use(box, "search", pattern=r"^os\.", regex=True, path="sub")).output.startswith(
        "sub/a.py:2: os.exit()\n1 matches in 1 of 1"
    )
    everything = await use(box, "search", pattern="os")
    assert len(everything.output) <= 1000 and "shown: narrow it" in everything.output and "large files" in everything.output
    assert (await use(box, "search", pattern="secret")).output == "0 matches in 0 of 3 files; not searched: large files"


@pytest.mark.slow
async def test_an_endless_search_stops_at_its_deadline(box: Box) -> None:
    (box.home / "a").write_text("a" * 60 + "!\n")
    started = time.monotonic()
    outcome = await use(box, "search", replace(LIMITS, tool_timeout_s=1.0), pattern="(a+)+$", regex=True)
    assert time.monotonic() - started < 60 and "when the time was up" in outcome.output


async def test_forged_output_of_a_sandbox_is_only_text(box: Box) -> None:
    box.run = lambda code: ExecResult(exit_code=0, stdout="\x1b]0;x\x07" * 1000, stderr="", wall_s=0.0)  # type: ignore[method-assign]
    box._answer = box.run
    assert len((await use(box, "view", path="a")).output) < 1100


@pytest.mark.bubblewrap
@pytest.mark.slow
async def test_an_episode_edits_and_searches(tokenizer: Any, task: Task, make_runner: Any, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "image.toml").write_text('suite = "bookworm"\npackages = ["python3"]\n')
    backend = select_backend("bubblewrap", run_label="test", root=tmp_path)
    turns = [
        call("create", path="run.sh", text="echo one\n"),
        call("shell", command="chmod +x run.sh; ln -s /etc/passwd p; mkfifo f"),
        call("replace", path="run.sh", old="one", new="two") + call("shell", command="./run.sh") + call("search", pattern="t"),
        call("view", path="p") + call("replace", path="/home/agent/f", old="a", new="b"),
        call("submit", answer="1"),
    ]
    names = ("create", "replace", "view", "search", "shell", "submit")
    limits = replace(LIMITS, turns=9, turn_tokens=600, episode_tokens=8000)
    task = replace(task, tools=names, sandbox=SandboxSpec(image="image"), limits=limits)
    try:
        runner = make_runner(ScriptedPolicy.saying(tokenizer, *turns), backend)
        episode = await replace(runner, max_model_len=8000).run(task, episode_id="e")
    finally:
        await backend.close()
    outputs = [[result.output for result in turn.tool_results] for turn in episode.trajectories[0].turns]
    assert outputs[2][1:] == ["two", "run.sh:1: echo two\n1 matches in 1 of 2 files"]
    assert "links are not followed" in outputs[3][0] and "not a regular file" in outputs[3][1]
    assert (episode.answer, episode.failures) == ("1", ())


def test_a_search_that_runs_out_of_time_counts_the_file_with_its_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowSearch(files.Search):
        def __init__(self, pattern: str, regex: bool, names: str) -> None:
            super().__init__(pattern, regex, names)
            matches = self.find
            self.find = lambda line: files.raise_time_up() if line == "last" else matches(line)  # type: ignore[assignment]

    (tmp_path / "a.txt").write_text("first\nlast\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "Search", SlowSearch)
    report = files.search("first", ".", "", False, 1000).splitlines()
    assert report == ["a.txt:1: first", "1 matches in 1 of 1 files; not searched: what remained when the time was up"]


def test_a_search_that_stops_at_the_maximum_reports_the_files_that_it_did_not_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x\n" * files.MAX_MATCHES)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/c.txt").write_text("x\n")
    monkeypatch.chdir(tmp_path)
    assert files.search("x", ".", "a*", False, 1000).endswith("narrow it with path, files or a longer pattern")
    report = files.search("x", ".", "", False, 1000).splitlines()[-1]
    assert report.startswith("1000 matches in 1 of 1 files") and report.endswith("not searched: files after the first 1000 matches")
