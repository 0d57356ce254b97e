"""Families of remote environments: seeds, the tasks of a server, and rows of a data set."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx  # noqa: F401
import pytest

from agentrl.config.recipe import TasksConfig
from agentrl.environment import close_environments
from agentrl.environment.remote import RemoteOpener
from agentrl.errors import PluginError, TaskError, UserError
from agentrl.plugins.parts import Part
from agentrl.records import Split, Task
from agentrl.task import open_family
from tests.environment.scenarios import counter_row
from tests.environment.test_remote import Ors
from tests.environment.web_servers import answer, fake_openenv, http_server


def family(ref: str, **options: Any) -> Any:
    return open_family(TasksConfig(family=Part(ref, options)), seed=3)


async def test_the_key_is_sent_and_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEIR_KEY", "s3cret-s3cret")
    server, opener = Ors(), RemoteOpener()
    async with http_server(server) as url:
        task = await asyncio.to_thread(family(f"ors:{url}", key="env:THEIR_KEY").task, Split.TRAIN, 0)
        assert task.environment is not None and task.environment.options["key"] == "env:THEIR_KEY"
        await (await opener.open(task.environment)).close()
        await opener.close()
    assert server.keys == {"s3cret-s3cret"}


async def test_tasks_of_an_ors_server() -> None:
    async with http_server(Ors()) as url:
        tasks = await asyncio.to_thread(sizes, f"ors:{url}", size=5)
        assert tasks == (5, 3)
        assert await asyncio.to_thread(sizes, f"ors:{url}", heldout_split="exam", heldout=2) == (8, 2)
        remote_tasks = family(f"ors:{url}")
        (first, heldout) = await asyncio.to_thread(lambda: (remote_tasks.task(Split.TRAIN, 4), remote_tasks.task(Split.HELDOUT, 2)))
        assert first.environment.options == {"split": "train", "index": 4}
        assert heldout.environment.options == {"split": "exam", "index": 2}
        assert first == await asyncio.to_thread(family(f"ors:{url}").task, Split.TRAIN, 4)


async def test_the_last_tasks_are_held_out_if_a_server_has_one_split() -> None:
    async with http_server(Ors(world__splits=answer([{"name": "train", "type": "train"}]))) as url:
        remote_tasks = family(f"ors:{url}")
        assert await asyncio.to_thread(lambda: (remote_tasks.size(Split.TRAIN), remote_tasks.size(Split.HELDOUT))) == (6, 2)
        assert remote_tasks.task(Split.HELDOUT, 0).environment.options == {"split": "train", "index": 6}


def sizes(ref: str, **options: Any) -> tuple[int | None, int | None]:
    remote_tasks = family(ref, **options)
    return remote_tasks.size(Split.TRAIN), remote_tasks.size(Split.HELDOUT)


def test_rows_of_a_data_set(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({**counter_row(index), "n": index}) + "\n" for index in range(8)))
    remote_tasks = family("nemo-gym:http://127.0.0.1:1", tasks=str(rows))
    assert (remote_tasks.size(Split.TRAIN), remote_tasks.size(Split.HELDOUT)) == (6, 2)
    task: Task = remote_tasks.task(Split.HELDOUT, 1)
    assert task.environment is not None and task.environment.options["row"]["n"] == 7
    assert [message.content for message in task.prompt] == ["add 1 then add 2 then get the count"]


@pytest.mark.parametrize("content", ["", "{", "[]\n", '{"a": 1}\n3\n'])
def test_a_bad_data_set_is_an_error_of_the_recipe(tmp_path: Path, content: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(content)
    with pytest.raises(PluginError, match=r"rows\.jsonl"):
        sizes("nemo-gym:http://127.0.0.1:1", tasks=str(rows))


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]}


@pytest.mark.parametrize("prompt", [None, 3, [], [{"type": "function_call"}], [{"role": "tool", "content": "x"}], [IMAGE]])
@pytest.mark.parametrize("instructions", [{}, {"instructions": "Be brief."}])
def test_a_row_without_a_prompt_of_text_is_a_broken_task(tmp_path: Path, prompt: Any, instructions: dict[str, str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"responses_create_params": {"input": prompt, **instructions}}) + "\n")
    with pytest.raises(TaskError, match="row 1"):
        family("nemo-gym:http://127.0.0.1:1", tasks=str(rows)).task(Split.TRAIN, 0)


def test_instructions_are_the_system_message(tmp_path: Path) -> None:
    parts = [{"type": "input_text", "text": "What?"}, *IMAGE["content"]]
    rows = tmp_path / "rows.jsonl"
    parameters = {"input": [{"role": "user", "content": parts}], "instructions": "Be brief."}
    rows.write_text(json.dumps({"responses_create_params": parameters}) + "\n")
    prompt = family("nemo-gym:http://127.0.0.1:1", tasks=str(rows)).task(Split.TRAIN, 0).prompt
    assert [(message.role, message.content) for message in prompt] == [("system", "Be brief."), ("user", "What?")]


@pytest.mark.parametrize(
    ("ref", "options", "error"),
    [
        ("openenv:ftp://host/", {}, UserError),
        ("openenv:http://user:pw@host/", {}, UserError),
        ("openenv:http://host/?key=1", {}, UserError),
        ("openenv:file:///etc/passwd", {}, UserError),
        ("ors:", {}, UserError),
        ("ors:http://host", {"step_s": -1}, PluginError),
        ("ors:http://host", {"sessions": 1.5}, PluginError),
        ("nemo-gym:http://host", {}, PluginError),
        ("ors:http://host", {"tasks": "rows.jsonl"}, PluginError),
    ],
)
def test_invalid_families(ref: str, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        family(ref, **options)


def test_a_server_that_does_not_answer_is_in_the_error() -> None:
    with pytest.raises(
        PluginError, match=r"tasks.family 'ors:http://127.0.0.1:9': ors server 127.0.0.1:9: request /list_environments failed"
    ):
        sizes("ors:http://127.0.0.1:9")


async def test_seeds_are_the_tasks_of_an_openenv_server() -> None:
    async with fake_openenv() as fake:
        remote_tasks = family(fake.ref, size=4, heldout=2)
        assert (remote_tasks.size(Split.TRAIN), remote_tasks.size(Split.HELDOUT)) == (4, 2)
        seeds = {remote_tasks.task(split, index).environment.seed for split in (Split.TRAIN, Split.HELDOUT) for index in range(2)}
        assert len(seeds) == 4
        assert remote_tasks.task(Split.TRAIN, 1).environment.resume == "restart"
    await close_environments()
