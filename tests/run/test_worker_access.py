"""A rollout worker without the run folder: fetched files, episodes and notes stored by the driver, and hostile requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from agentrl.cluster.file_service import FileService
from agentrl.config.tools import MemoryConfig
from agentrl.errors import UserError
from agentrl.experience import FolderCheckpoints
from agentrl.memory import NoteStore, WrittenNotes
from agentrl.records.episode import Memo
from agentrl.rollout import excluded_group, task_fault
from agentrl.run.worker import UNUSABLE, main
from agentrl.run.worker_access import DriverCheckpoints, WorkerAccess, read_key
from agentrl.run.worker_api import ADDRESS_FILE
from tests.driving import make_task
from tests.run.test_workers import Drive


@asynccontextmanager
async def driving(folder: Path) -> AsyncIterator[tuple[Drive, WorkerAccess]]:
    """A driver with a run folder, and the access of a worker on another host."""
    drive = Drive(folder)
    drive.api.service.add(FileService(folder).routes())
    async with drive.api.serving(), AsyncExitStack() as stack:
        data = json.loads((folder / ADDRESS_FILE).read_text())
        yield drive, WorkerAccess.remote(data["url"], read_key(folder / ADDRESS_FILE), stack=stack, root=Path())


async def test_a_worker_fetches_tokenizer_and_template_without_weights_and_deletes_them(tmp_path: Path) -> None:
    base = tmp_path / "versions" / "000000"
    base.mkdir(parents=True)
    for name in ("tokenizer.json", "config.json", "chat_template.jinja", "model.safetensors", "pytorch_model.bin"):
        (base / name).write_text(name)
    (tmp_path / "mcp.json").write_text("{}")
    async with driving(tmp_path) as (_, access):
        folder = await access.policy_folder()
        assert sorted(path.name for path in folder.iterdir()) == ["chat_template.jinja", "config.json", "tokenizer.json"]
        assert (access.folder / "mcp.json").read_text() == "{}"
    assert not access.folder.exists()


async def test_the_drivers_notes_are_searched_like_local_ones(tmp_path: Path) -> None:
    config = MemoryConfig()
    store = NoteStore(None, config)
    store.commit(
        0, [WrittenNotes(episode=f"e{n}", task_key=f"k{n}", memo=Memo(scope="s", notes=(f"the cache is cold {n}",))) for n in range(3)]
    )
    async with driving(tmp_path) as (drive, access):
        drive.api.memory = SimpleNamespace(search=store.search)  # type: ignore[assignment]
        notes = access.notes(config)
        expected = store.search("cache", scope="s", version=1, task_key="k1")
        matches = await asyncio.to_thread(notes.search, "cache", scope="s", version=1, task_key="k1")
        assert matches == expected and len(matches) == 2, "notes of other attempts at its task are excluded"


async def test_a_damaged_or_foreign_state_is_ignored(tmp_path: Path) -> None:
    async with driving(tmp_path) as (drive, _):
        waiting = asyncio.create_task(drive.leases.run_group(3, make_task(3)))
        connection = drive.connect("a")
        lease = json.loads(await connection.call("/lease", {}))["id"]
        group = excluded_group(3, make_task(3).id, make_task(3).key, task_fault(ValueError("x")), size=1)
        checkpoints = DriverCheckpoints(connection, {3: lease}.get)
        assert await checkpoints.load(3, 0) is None
        await checkpoints.save_scored(3, 0, group.episodes[0])
        assert await checkpoints.load(3, 0) == group.episodes[0] == await FolderCheckpoints(tmp_path / "running").load(3, 0)
        (tmp_path / "running" / "000003" / "0.scored").write_bytes(b"damaged")
        assert await checkpoints.load(3, 0) is None
        await checkpoints.save_scored(4, 0, group.episodes[0])
        assert sorted(path.name for path in (tmp_path / "running").iterdir()) == ["000003"], "without a lease nothing is written"
        waiting.cancel()
        connection.close()


async def test_a_state_that_arrives_after_its_lease_was_lost_is_rejected(tmp_path: Path) -> None:
    async with driving(tmp_path) as (drive, access):
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        connection = drive.connect("a")
        lease = json.loads(await connection.call("/lease", {}))["id"]
        host, port = access.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /running/{lease}/0/state HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {access.key}\r\ncontent-length: 3\r\n\r\n"
        writer.write(head.encode() + b"o")
        await asyncio.sleep(0.2)  # the driver has read the head
        await drive.leases.lose("a")
        writer.write(b"ld")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503")
        assert not (tmp_path / "running").exists()
        writer.close()
        waiting.cancel()
        connection.close()


async def test_a_hostile_path_writes_nothing(tmp_path: Path) -> None:
    async with driving(tmp_path) as (drive, access):
        waiting = asyncio.create_task(drive.leases.run_group(0, make_task(0)))
        connection = drive.connect("a")
        lease = json.loads(await connection.call("/lease", {}))["id"]
        paths = [f"/running/{lease}/-1/state", f"/running/{lease}/x/state", f"/running/{lease}/0/..", f"/running/{lease}/0/state.py"]
        paths += ["/running/none/0/state", f"/running/{lease}/99999999999/state"]
        headers: Any = {"authorization": f"Bearer {access.key}"}
        async with httpx.AsyncClient(base_url=access.url, headers=headers) as client:
            answers = [(await client.post(path, content=b"x")).status_code for path in paths]
        assert all(400 <= status <= 503 for status in answers), answers
        assert not (tmp_path / "running").exists()
        waiting.cancel()
        connection.close()


async def test_a_worker_with_the_key_of_an_earlier_run_ends_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with driving(tmp_path) as (_, access):
        stale = replace(access, key="of an earlier run")
        assert await asyncio.to_thread(main, lambda stack: stale) == UNUSABLE
    assert "the key is missing or wrong" in (errors := capsys.readouterr().err) and "fix: use the key of this run's driver" in errors
    assert await asyncio.to_thread(main, lambda stack: access) == 1, "the driver has ended"
    assert "cannot reach the driver at http://127.0.0.1:" in capsys.readouterr().err


def test_a_key_file_contains_the_address_file_or_only_the_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text('{"url": "http://10.0.0.1:1", "key": "abc"}')
    assert read_key(path) == "abc"
    path.write_text("abc\n")
    assert read_key(path) == "abc"
    path.write_text("{")
    with pytest.raises(UserError, match="contains no key"):
        read_key(path)
