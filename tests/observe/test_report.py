"""The report from complete, partial and hostile run folders."""

from __future__ import annotations

import json
import random
import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from agentrl.cli.train import describe
from agentrl.errors import StoreError
from agentrl.observe import Summary, write_report
from agentrl.observe.charts import Chart, Series
from agentrl.observe.markup import environment, render, script
from agentrl.observe.report_data import read_run
from agentrl.observe.rundata import parse_object
from agentrl.observe.sections import failures_section as of_failures
from agentrl.observe.summary import Session
from agentrl.observe.transcripts import choose_pairs, show_episode

from .conftest import HOSTILE, evaluation, step_line, transcript, write_lines

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that every tag is closed, and collects the parts of the page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open, f"tags left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def shown(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def test_tasks_without_a_learning_signal_are_listed(run_dir: Path) -> None:
    def line(group: int, task: Any, kind: str, lowest: Any, highest: Any, counted: int = 8) -> dict[str, Any]:
        return {"group": group, "task": task, "key": task, "kind": kind, "counted": counted, "lowest": lowest, "highest": highest}

    lines = [line(n, f"sum {n % 30}", "sums", 1.0, 1.0) for n in range(60)]
    lines += [line(n, f"word {n}", "words", 0.0, n % 4 == 0) for n in range(60, 100)]
    lines += [line(100, "<b>odd</b>\x1b", "words", 0.0, 0.0), line(101, "<b>odd</b>\x1b", "words", 0.0, 0.0), lines[0]]
    lines += [
        line(102, "lost", "words", 0.0, 0.0, counted=0),
        line(103, "wrong", "words", "0", None),
        {"group": 1},
        line(1, 2, "sums", 0, 1),
    ]  # type: ignore[arg-type]
    write_lines(run_dir / "tasks.jsonl", lines)
    shown = Page(write_report(run_dir)).shown
    assert "sums 60 0% 100% 0%" in shown and "words 42 24% 0% 76%" in shown
    assert "scheduled repeatedly without a learning signal: 31 of 71 tasks" in shown
    assert "<b>odd</b>\N{REPLACEMENT CHARACTER} 2 0 2" in shown and "sum 18 2 2 0" in shown and "and 11 more" in shown
    assert "tasks.jsonl: 2 unreadable lines ignored" in shown


def test_a_complete_run_is_reported(run_dir: Path) -> None:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = Page(path)
    for text in ("43.8%", "95.6%", "+51.9 points [+43.0, +59.7]", "n = 160", "81.2%", "131 ms", "144k", "7 min 44 s", "join total"):
        assert text in page.shown, text
    for section in (
        "Learning",
        "By kind of task",
        "Inside the loop",
        "Time by stage",
        "Sample episodes",
        "Configuration",
        "Success against compute",
    ):
        assert section in page.shown, section
    assert "Success against compute" in page.shown and "the best of 4: " in page.shown and "0.9 at tokens 90.5" in page.shown
    assert "learner.max_grad_norm" in page.shown and "2.13.0+cpu" in page.shown
    assert sum(tag == "details" and attrs.get("class") == "episode" for tag, attrs in page.tags) == 6
    assert path.stat().st_size < 1_000_000


def test_starts_and_ends_are_listed(run_dir: Path) -> None:
    summary = Summary.read(run_dir)
    assert "Starts" not in Page(write_report(run_dir)).shown
    starts = (
        Session(began="2026-11-25T10:00:00+00:00", step=0, ended="failed", why="the run pauses: 40 of the newest 64 attempts failed"),
        Session(began="2026-11-25T11:00:00+00:00", step=3, ended="finished"),
    )
    summary.model_copy(update={"sessions": starts, "attempts_failed": 40}).write(run_dir)
    shown = Page(write_report(run_dir)).shown
    assert "Starts" in shown and "the run pauses: 40 of the newest 64" in shown and "40 attempts ended by faults" in shown
    assert "1 resumed    after step 3: failed" in describe(Summary.read(run_dir), run_dir)
    paused = summary.model_copy(update={"finished": False, "interrupted": True, "problems": ("the run ended early: it pauses",)})
    paused.write(run_dir)
    shown = Page(write_report(run_dir)).shown
    assert "interrupted" in shown and "the run ended early: it pauses" in shown and "no result" not in shown


def test_servers_have_separate_curves_and_restarts_are_shown_if_any(run_dir: Path) -> None:
    for restarts, drawn in ((0, False), (2, True)):
        servers = {"replica0_tokens": 50.0, "replica1_tokens": 30.0, "replica0_restarts": 0, "replica1_restarts": restarts}
        write_lines(run_dir / "metrics.jsonl", [step_line(step, random.Random(0)) | servers for step in (1, 2)])
        shown = Page(write_report(run_dir)).shown
        assert "Tokens by server" in shown and "server 1" in shown and ("Restarts by server" in shown) is drawn


def test_the_timeline_shows_the_states_of_each_part(run_dir: Path) -> None:
    seconds = {
        "timeline/server/busy": 15.0,
        "timeline/server/waiting for requests": 5.0,
        "timeline/learner/down": 20.0,
        "timeline/x/busy": 9.0,
    }
    lines = [step_line(step, random.Random(step)) | seconds | {"utilization/server": 0.75} for step in range(1, 4)]
    write_lines(run_dir / "metrics.jsonl", lines)
    page = Page(write_report(run_dir))
    assert "server busy 45 s · 75% waiting for requests 15 s · 25%" in page.shown
    assert "learner down 1 min 00 s · 100%" in page.shown and "Utilization" in page.shown
    write_lines(run_dir / "metrics.jsonl", [line | {"timeline/server/busy": "much"} for line in lines])
    assert "server waiting for requests 15 s · 100%" in Page(write_report(run_dir)).shown


def test_the_sampling_settings_are_shown(run_dir: Path) -> None:
    path = run_dir / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe["rollout"] |= {"sampling": {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.05}}
    recipe["evaluation"] |= {"sampling": {"temperature": 0.0}}
    path.write_text(json.dumps(recipe))
    shown = Page(write_report(run_dir)).shown
    assert "(temperature 0.7, top-k 20, min-p 0.05)" in shown and "(greedy)" in shown


def test_the_page_loads_no_resources_and_its_policy_allows_one_script(run_dir: Path) -> None:
    page = Page(write_report(run_dir))
    names = [tag for tag, _ in page.tags]
    assert not set(names) & {"link", "img", "iframe", "object", "embed", "a", "form", "base"} and names.count("script") == 1
    for _, attributes in page.tags:
        assert not any(name.startswith("on") or name in ("src", "href", "action") for name in attributes)
    text = (run_dir / "report.html").read_text()
    assert "url(" not in text and "@import" not in text
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    (source,) = re.findall('<script type="module">(.*?)</script>', text, re.DOTALL)
    digest = b64encode(sha256(source.encode()).digest()).decode()
    assert policy is not None and policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_the_modules_of_the_charts_fit_into_one_script() -> None:
    """No import is left, and no two modules define the same name."""
    text = script()
    assert not re.search(r"^(?:import|export)\b", text, re.MULTILINE) and "</" not in text
    names = re.findall(r"^(?:const|let|function|class) ([\w$]+)", text, re.MULTILINE)
    assert {"lineChart", "visible", "svg", "number"} <= set(names) and len(names) == len(set(names))


def test_hostile_text_is_escaped_everywhere(run_dir: Path) -> None:
    line = transcript("after", 0, "heldout", 1.0, output=HOSTILE)
    for key in ("kind", "question", "answer", "truth", "stop_reason", "reason", "phase"):
        line[key] = f"{key}:{HOSTILE}"
    line["messages"] += [
        {"role": HOSTILE, "content": HOSTILE, "tool_calls": [{"name": HOSTILE, "arguments": {HOSTILE: HOSTILE, "b": 1}}]},
        {"role": "assistant", "content": "\ud800", "tool_calls": [{"name": "python", "arguments": {"code": HOSTILE}}]},
    ]
    write_lines(run_dir / "episodes" / "before.jsonl", [line | {"score": 0.0}])
    write_lines(run_dir / "episodes" / "after.jsonl", [line])
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["by_kind"]["after"][HOSTILE] = summary["by_kind"]["after"]["sum"]
    summary["versions"][HOSTILE] = HOSTILE
    (run_dir / "summary.json").write_text(json.dumps(summary))

    path = write_report(run_dir)
    page = Page(path)
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script"]
    assert page.shown.count("<script>alert('out')</script>") >= 16
    text = path.read_text(encoding="utf-8")
    assert not set(text) & set("\x1b\x00\u202e"), "no invisible characters, none that reverse text"
    assert "\\x1b[31m\\u202egnp.exe \\x00" in text and "\\ud800" in text


@pytest.mark.slow
def test_any_part_of_the_folder_may_be_missing(run_dir: Path) -> None:
    parts = [path.relative_to(run_dir) for path in run_dir.rglob("*") if path.is_file()]
    for missing in parts:
        copy = run_dir.parent / "copy"
        shutil.copytree(run_dir, copy)
        (copy / missing).unlink()
        Page(write_report(copy))
        shutil.rmtree(copy)
    empty = run_dir.parent / "empty"
    empty.mkdir()
    assert "no summary yet" in Page(write_report(empty)).shown
    with pytest.raises(StoreError, match="no run folder"):
        write_report(run_dir.parent / "absent")


def test_an_interrupted_run_is_reported(run_dir: Path) -> None:
    """Without the last evaluation, with a torn line, a repeated step and a value that is not finite."""
    summary = json.loads((run_dir / "summary.json").read_text())
    summary |= {"finished": False, "interrupted": True, "heldout_after": None, "heldout_real_after": None, "swap_stall_ms_p50": None}
    summary["by_kind"].pop("after")
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "episodes" / "after.jsonl").unlink()
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()[:3]
    again = json.dumps(json.loads(lines[2]) | {"loss": None})
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines, lines[0][:40], again, ""]))
    page = Page(write_report(run_dir))
    assert "interrupted" in page.shown and "43.8% → n/a" in page.shown
    assert "metrics.jsonl: 1 unreadable line ignored" in page.shown
    assert "before, step 0" in page.shown, "episodes of the only phase"


def test_unreadable_files_become_notes(run_dir: Path) -> None:
    names = ("metrics.jsonl", "evaluations.json", "recipe.json", "summary.json")
    for name in names:
        (run_dir / name).unlink(missing_ok=True)
        (run_dir / name).mkdir()
    shown = Page(write_report(run_dir)).shown
    assert all(f"{name} cannot be read: Is a directory" in shown for name in names)


def test_the_folder_of_an_evaluation_shows_its_rates(tmp_path: Path) -> None:
    rates = evaluation(0.5) | {"ci_low": 0.41, "ci_high": 0.59, "n": 96}
    (tmp_path / "evaluations.json").write_text(json.dumps({"eval": {"heldout": rates}}))
    shown = Page(write_report(tmp_path)).shown
    assert "evaluated" in shown and "50.0%" in shown and "n = 96" in shown and "no summary" not in shown and "n/a" not in shown


def test_a_damaged_summary_becomes_a_note(run_dir: Path) -> None:
    (run_dir / "summary.json").write_text("{")
    (run_dir / "recipe.json").write_text("[]")
    shown = Page(write_report(run_dir)).shown
    assert "summary.json does not validate" in shown and "recipe.json cannot be read" in shown and "Learning" in shown


def test_excluded_tasks_are_counted(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps(summary | {"tasks_quarantined": 417}))
    assert re.search(r"417\s*tasks in quarantine", Page(write_report(run_dir)).shown)


def test_scores_beyond_0_and_1_are_not_shown_as_percent(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    summary["heldout_after"] = {"value": 3.25, "ci_low": 2.5, "ci_high": 4.0, "n": 10}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert "2.500 to 4.000" in Page(write_report(run_dir)).shown


def test_chosen_pairs_show_gains_a_loss_and_a_remaining_failure() -> None:
    before = [transcript("before", n, "heldout", score) for n, score in enumerate((0.0, 0.0, 0.0, 1.0, 0.0, 1.0))]
    after = [transcript("after", n, "heldout", score) for n, score in enumerate((1.0, 1.0, 1.0, 0.0, 0.0, 1.0))]
    lonely = transcript("after", 99, "heldout", 1.0)
    chosen = choose_pairs(before, [*after, lonely], 4)
    assert [(a["score"], b["score"]) for a, b in chosen] == [(0.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)]
    assert all(a["task_id"] == b["task_id"] for a, b in chosen)
    assert len(choose_pairs(before, after, 20)) == 6


def test_the_data_of_charts_are_escaped() -> None:
    series = Series(label='<b>&\x1b"', points=((1, 0.0),), line=False)
    drawer: Any = environment().get_template("chart.html").module
    built = str(drawer.chart(Chart(title='"><script>', series=[series])))
    assert "<script>" not in built and "<b>" not in built and "\x1b" not in built
    (figure,) = re.findall('data-chart="([^"]*)"', built)
    data = json.loads(unescape(figure))
    assert data["title"] == '"><script>' and data["series"][0]["label"] == '<b>&\x1b"'


def test_a_missing_template_value_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        render("report.html")


def failures_file(**changes: Any) -> dict[str, Any]:
    tags = {"misread_output": 30, "wrong_tool": 4}
    example = transcript("train", 1, "train", 0.0, output=HOSTILE) | {"tag": "misread_output", "turn": 1, "note": HOSTILE, "trace": "g1"}
    return {
        "episodes": 200, "failures": 34, "kept": 20, "dropped": 14, "tags": tags, "why": {"failed": 34},
        "phases": [{"phase": "before", "episodes": 100, "tags": tags}, {"phase": "train", "episodes": 100, "tags": {"wrong_tool": 1}}],
        "steps": [{"step": step, "episodes": 20, "tags": {"misread_output": 10 - step}} for step in range(5)],
        "versions": [{"version": number, "episodes": 20, "tags": tags} for number in range(40)],
        "examples": [example],
    } | changes  # fmt: skip


def test_failures_are_shown_by_tag_step_phase_and_version(run_dir: Path) -> None:
    (run_dir / "failures").mkdir()
    (run_dir / "failures" / "failures.json").write_text(json.dumps(failures_file()))
    path = write_report(run_dir)
    page = Page(path)
    for text in ("Failures", "34 training and evaluation episodes failed", "Share of training episodes", "misread output, turn 2"):
        assert text in page.shown, text
    assert "training version 0 4 9" in page.shown, "ten of forty versions are shown, including the first and the last"
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script"] and "\x1b" not in path.read_text()


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        json.dumps({"tags": "x"}),
        json.dumps(failures_file(tags={"a": "x", "b": True})),
        json.dumps(failures_file(steps=[3, {"step": "x"}, {"step": 1, "episodes": 0, "tags": []}], phases={}, versions=None)),
        json.dumps(failures_file(examples=[{}, 3, {"messages": 3, "turn": "x"}], kept=None, dropped="x")),
    ],
)
def test_a_damaged_digest_removes_only_its_section(run_dir: Path, content: str) -> None:
    (run_dir / "failures").mkdir()
    (run_dir / "failures" / "failures.json").write_text(content)
    assert "Sample episodes" in Page(write_report(run_dir)).shown


ODD: tuple[Any, ...] = (5, -1.5, float("inf"), "x", None, [], {}, True, [5], [{"role": 5, "tool_calls": 5}], 10**400, "\ud83d", {"a": 5})


def altered(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    changed = dict(data) if isinstance(data, dict) else list(data)
    changed[path[0]] = altered(data[path[0]], path[1:], value)
    return changed


def paths_in(data: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the path of every key and of the first item of every list."""
    for key in data if isinstance(data, dict) else range(min(1, len(data))) if isinstance(data, list) else ():
        yield (key,)
        yield from ((key, *rest) for rest in paths_in(data[key]))


@pytest.mark.slow
def test_a_value_of_a_wrong_type_removes_only_its_row(run_dir: Path) -> None:
    episode = transcript("train", 1, "train", 0.0)
    episode |= {"trajectories": [{"agent": "sub", "stop_reason": "answered", "messages": episode["messages"]}]}
    failing = failures_file(examples=[episode | {"tag": "looped", "turn": 1, "note": "again"}])
    for value in ODD:
        for path in paths_in(episode):
            line = parse_object(json.dumps(altered(episode, path, value)))
            assert line is not None and show_episode(line) and choose_pairs([episode, line], [line, episode], 2)
        for path in paths_in(failing):
            of_failures(parse_object(json.dumps(altered(failing, path, value))) or {})
    evaluations = {"after": {"heldout": evaluation(0.5)}}
    for value in ODD:  # before the other files grow
        for path in paths_in(evaluations):
            (run_dir / "evaluations.json").write_text(json.dumps(altered(evaluations, path, value)))
            read_run(run_dir)
    rows = [altered(episode, path, value) | {"task_id": f"{path} {value}", "step": path} for value in ODD for path in paths_in(episode)]
    lines = "".join(json.dumps(line) + "\n" for line in rows if isinstance(line["messages"], list))
    for name in ("train", "before", "after"):
        (run_dir / "episodes" / f"{name}.jsonl").write_text(lines)
    steps = [altered(step_line(3, random.Random(0)), path, value) for value in ODD for path in paths_in(step_line(3, random.Random(0)))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    assert "Sample episodes" in Page(write_report(run_dir)).shown
