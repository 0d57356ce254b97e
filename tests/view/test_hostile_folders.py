"""An untrusted run folder cannot crash the view, exhaust its memory, or make it show or change other files of the user."""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.errors import StoreError, UserError
from agentrl.experience import SqliteStore
from agentrl.experience.episode_index import EpisodeIndex
from agentrl.experience.episode_query import EpisodeQuery
from agentrl.observe import tails
from agentrl.observe.tails import MetricsTable
from agentrl.session.exports import export_episodes
from agentrl.view import RunLibrary, failure_data
from agentrl.view.library import MAX_OPEN
from tests.view.test_bad_runs import PATHS, copy  # noqa: F401 - a fixture
from tests.view.test_server import HERE, client

HUGE = 1.7e308


async def all_pages(run: Path) -> dict[str, str]:
    """Returns the text of every page of a run, and checks that none is a server error."""
    paths = [f"/api/runs/{run.name}{path}" for path in (*PATHS, "/events", "/steps/2", "/steps/3", "/steps/11", "/groups/0/0", "/gate/1")]
    async with client(run.parent) as api:
        pages = {path: await api.get(path) for path in ("/api/runs", f"/api/compare?run={run.name}&run={run.name}", *paths)}
        pages |= {path: await api.get(f"/api/runs/{run.name}/failures/{path}") for path in await trace_ids(api)}
    assert {path: page.text for path, page in pages.items() if page.status_code >= 500} == {}
    return {path: page.text for path, page in pages.items()}


async def trace_ids(api: httpx.AsyncClient) -> list[str]:
    return [row["id"] for row in (await api.get("/api/runs/demo/failures")).json()["rows"]][:3]


async def operate(api: httpx.AsyncClient, operation: str, **body: Any) -> httpx.Response:
    content = json.dumps(body).encode()
    return await api.post(f"/api/runs/demo/operations/{operation}", content=content, headers={"origin": HERE})


async def test_numbers_that_overflow_do_not_hide_the_other_runs(copy: Path) -> None:  # noqa: F811
    summary = json.loads((copy / "summary.json").read_text())
    summary |= {"wall_s": {"a": 1e308, "b": 1e308}, "tokens": {"x": float("nan")}, "by_kind": {"after": {"x": float("inf")}}}
    (copy / "summary.json").write_text(json.dumps(summary))
    with (copy / "metrics.jsonl").open("a") as file:
        for number, value in enumerate((HUGE, -HUGE, HUGE)):
            names = ("reward_mean", "entropy", "step_s", "grad_norm", "audit_mean", "timeline/server/busy", "timeline/server/waiting")
            file.write(json.dumps({"step": 10 + number, **dict.fromkeys(names, value)}) + "\n")
    with (copy / "tasks.jsonl").open("a") as file:
        file.writelines(json.dumps({"group": group, "kind": "x", "mean": HUGE}) + "\n" for group in range(8))
    setback = '{"step": 1, "action": "a", "reasons": [NaN], "groups": [NaN, {"a": [Infinity]}, 3], "episodes": []}\n'
    (copy / "failures" / "updates.jsonl").write_text(setback)
    pages = await all_pages(copy)
    assert json.loads(pages["/api/runs/demo"])["setbacks"][0]["groups"] == [3]


@pytest.mark.parametrize("name", ["gate", "episodes", "failures/updates.jsonl"])
async def test_a_linked_folder_of_a_run_shows_no_file_from_elsewhere(copy: Path, tmp_path: Path, name: str) -> None:  # noqa: F811
    secret = tmp_path / "secret"
    (secret / "000001").mkdir(parents=True)
    (secret / "000001" / "verdict.json").write_text('{"outcome": "SECRET", "reason": "SECRET"}')
    messages = [{"role": "user", "content": "SECRET"}]
    lines = [json.dumps({"task_id": f"task-{number}", "split": "train", "messages": messages}) + "\n" for number in range(10)]
    (secret / "train.jsonl").write_text("".join(lines))
    (secret / "updates.jsonl").write_text('{"step": 1, "action": "SECRET", "reasons": [], "groups": [], "episodes": []}\n')
    path = copy / name
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(secret / "updates.jsonl" if name.endswith("jsonl") else secret)
    assert "SECRET" not in "".join((await all_pages(copy)).values())


async def test_huge_files_and_pipes_become_notes(copy: Path) -> None:  # noqa: F811
    os.truncate(copy / "metrics.jsonl", tails.MAX_BYTES + 1)
    os.truncate(copy / "sessions.jsonl", 1 << 40)
    pages = await all_pages(copy)
    assert "metrics.jsonl cannot be read, because it is larger than" in pages["/api/runs/demo"]
    (copy / "sessions.jsonl").unlink()
    os.mkfifo(copy / "sessions.jsonl")
    await all_pages(copy)


def test_metrics_that_appear_late_do_not_exceed_the_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails, "MAX_CELLS", 1000)
    monkeypatch.setattr(tails, "MAX_ROWS", 400)
    rows = [{"step": step, "a": 1.0} for step in range(300)] + [{"step": 299, **{f"k{number}": 1.0 for number in range(300)}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = MetricsTable(tmp_path / "metrics.jsonl")
    table.refresh()
    assert table.cells <= 1000 and len(table.steps) == 300 and table.keys == ["a", "k0", "k1"]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step}) + "\n" for step in range(300, 600))
    table.refresh()
    assert table.cells <= 1000 and len(table.steps) <= 400 and "400 steps" in table.notes[0]


@pytest.mark.parametrize("operation", ["tag", "label"])
async def test_an_operation_writes_to_no_file_outside_of_the_run(copy: Path, tmp_path: Path, operation: str) -> None:  # noqa: F811
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" / "anna.jsonl"
    victim.write_text("line\nwithout an end")
    if operation == "tag":
        (copy / "operations.jsonl").symlink_to(victim)
    else:
        (copy / "labels").symlink_to(victim.parent)
    async with client(copy.parent, user="anna") as api:
        (trace, *_) = await trace_ids(api)
        fields = {"tag": "other"} if operation == "tag" else {"label": "right"}
        refused = await operate(api, operation, trace=trace, **fields)
        trace_data = (await api.get(f"/api/runs/demo/failures/{trace}")).json()
    assert refused.status_code == 422 and "link" in refused.json()["error"]["message"]
    assert victim.read_text() == "line\nwithout an end"
    assert not any(tag["name"] == "other" for tag in trace_data["tags"]), "no tag was added"


async def test_an_operation_fails_if_its_log_is_a_pipe_or_its_text_is_invalid(copy: Path) -> None:  # noqa: F811
    async with client(copy.parent, user="anna") as api:
        (trace, *_) = await trace_ids(api)
        for body in ({"tag": "other", "note": "\ud800"}, {"tag": "other", "note": "a\0b"}):
            assert (await operate(api, "tag", trace=trace, **body)).status_code == 422
        assert (await operate(api, "promote", trace=trace, suite="a\0b")).status_code == 422
        assert (await operate(api, "promote", trace=trace, suite="a" * 1900)).status_code == 422
        os.mkfifo(copy / "operations.jsonl")
        assert (await operate(api, "tag", trace=trace, tag="other")).status_code == 422
        assert (await api.get("/api/runs/demo/failures/clusters?tag=%00")).status_code == 400


async def test_clusters_run_no_module_of_the_current_folder(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    commands: list[list[str]] = []
    real = failure_data.subprocess.run
    monkeypatch.setattr(failure_data.subprocess, "run", lambda command, **options: (commands.append(command), real(["false"]))[1])
    async with client(copy.parent) as api:
        await api.get("/api/runs/demo/failures/clusters")
    assert commands[0][:3] == [sys.executable, "-P", "-m"], "an untrusted folder may have a module `agentrl`"


@pytest.mark.parametrize("to", ["parquet", "jsonl"])
def test_an_export_overwrites_no_file_outside_of_the_run(copy: Path, tmp_path: Path, to: Any) -> None:  # noqa: F811
    if to == "parquet":
        pytest.importorskip("pyarrow")
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    (copy / "exports" / to).mkdir(parents=True)
    (copy / "exports" / to / f".episodes.{to}.part").symlink_to(victim)
    assert export_episodes(copy, to, query=EpisodeQuery()).episodes and victim.read_text() == "unchanged"
    shutil.rmtree(copy / "exports")
    (tmp_path / "elsewhere").mkdir()
    (copy / "exports").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="outside the run folder"):
        export_episodes(copy, to, query=EpisodeQuery())
    assert not list((tmp_path / "elsewhere").iterdir())
    assert export_episodes(copy, to, tmp_path / "elsewhere", query=EpisodeQuery()).episodes, "a folder from the user may be anywhere"


async def test_deleted_episodes_are_reported_as_deleted_and_not_as_damaged(copy: Path) -> None:  # noqa: F811
    store = SqliteStore(copy / "experience.sqlite")
    for step in range(2):
        store._delete_episodes(step)
    store.close()
    pages = await all_pages(copy)
    assert "keep_steps" in pages["/api/runs/demo/facets"] and "keep_steps" in pages["/api/runs/demo/groups/0/0"]
    assert "damaged" not in "".join(pages.values())
    with EpisodeIndex(copy) as index, pytest.raises(StoreError, match="were deleted"):
        index.group(0)
    assert not export_episodes(copy, "jsonl", query=EpisodeQuery()).is_complete
    with pytest.raises(UserError, match="keep_steps"):
        export_episodes(copy, "jsonl", query=EpisodeQuery(step=1))


def test_episodes_whose_names_differ_in_special_characters_have_a_sample_each(copy: Path) -> None:  # noqa: F811
    store = SqliteStore(copy / "experience.sqlite")
    (group,) = store.groups([0])
    for phase, name in (("a/b", "x/y"), ("a_b", "x_y"), ("a?b", "../x\n")):
        episode = group.episodes[0]
        score = replace(episode.score, value=HUGE)
        renamed = replace(episode, episode=replace(episode.episode, id=name), score=score)
        store.put_evaluated(phase, 3, replace(group, episodes=(renamed,), split="heldout", cancelled=()))
    store.close()
    exported = export_episodes(copy, "eval", query=EpisodeQuery(split="heldout"))
    with zipfile.ZipFile(exported.folder / "evaluation-a_b.eval") as archive:
        samples = [name for name in archive.namelist() if name.startswith("samples/")]
    assert len(samples) == len(set(samples)) == 3 and not any(".." in name for name in samples)


async def test_a_run_is_opened_without_reading_the_others(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(runs / "demo", tmp_path / "a b")
    (tmp_path / "link").symlink_to(runs / "demo")
    library = RunLibrary(tmp_path)
    (entry,) = library.entries()
    monkeypatch.setattr(RunLibrary, "entries", lambda self: pytest.fail("all folders were read"))
    assert (source := library.open(entry.id)) is not None and source.path == tmp_path / "a b"
    names = ("..", ".", "", "a b", "link", "../demo", "~", "~2e2e", "~2e", "~zz", "~2f657463", "~6120622f2e", "~00", "/etc", "\ud800")
    assert [name for name in names if library.open(name) is not None] == []
    library.close()


async def test_a_run_in_use_keeps_its_store_while_many_others_are_opened(runs: Path, tmp_path: Path) -> None:
    for number in range(MAX_OPEN + 2):
        shutil.copytree(runs / "other", tmp_path / f"r{number:02d}")
    library = RunLibrary(tmp_path)
    source = library.open("r00")
    assert source is not None
    with source.lock, ThreadPoolExecutor(1) as thread:
        store = source.store()
        for number in range(1, MAX_OPEN + 2):
            thread.submit(library.open, f"r{number:02d}").result()
        assert store.groups((0,))[0].index == 0
    library.close()


def test_a_loop_of_links_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("a")
    library = RunLibrary(tmp_path)
    assert library.open("a") is None and library.entries() == []
