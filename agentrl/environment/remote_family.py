"""The task family for remote environments. A task is defined by a seed, by a task on the server, or by a row of a data set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from agentrl.base import secrets, untrusted_files
from agentrl.base.installation import install_command
from agentrl.environment.family import EnvironmentFamily
from agentrl.environment.remote import RemoteOptions, RemoteServer
from agentrl.environment.remote_http import need
from agentrl.errors import EnvironmentFault, PluginError, TaskError
from agentrl.records import Message, Split, Task

T = TypeVar("T")

_DEADLINE_S = 60.0  # deadline for a request about the server's tasks
_LARGEST = 512 << 20  # maximum size of a data set, in bytes
_OUT_OF = 4  # at most one in this many tasks of a split is held out


class RemoteFamily(EnvironmentFamily):
    """Tasks for a server: `openenv:URL`, `ors:URL` or `nemo-gym:URL`.

    The tasks come from the server's splits (ORS, and OpenEnv if `split` is set), from the rows of a data set (NeMo Gym), or from seeds.

    Args:
        split: the server's split that is used for training.
        heldout_split: the server's split of held-out tasks; the default is its first split of type test or validation. If there is no such
            split, the last tasks of `split` are held out.
        tasks: file with the rows of a NeMo Gym data set, one JSON object per line; the last rows are held out.
        size: maximum number of training tasks.
        heldout: maximum number of held-out tasks; if they are taken from `split` or `tasks`, at most a quarter of these.
        options: arguments of `EnvironmentFamily`, `RemoteOptions` and the kind of server.

    Raises `PluginError` if an option is invalid or a package is missing, and `UserError` if the URL is invalid or the key cannot be read.
    """

    def __init__(
        self,
        ref: str,
        *,
        split: str | None = None,
        heldout_split: str | None = None,
        tasks: str | None = None,
        size: int | None = None,
        heldout: int = 256,
        resume: str = "restart",
        **options: Any,
    ) -> None:
        super().__init__(ref, size=size, heldout=heldout, resume=resume, **options)
        self._kind, _, url = ref.partition(":")
        own, self._others = RemoteOptions.split({**self._spec.options, "key": ""})
        self._server: Callable[[], RemoteServer] = lambda: RemoteServer(self._kind, url, replace(own, key=self._key()))
        self._server()  # checks the URL
        if self._kind == "openenv" and find_spec("websockets") is None:
            raise PluginError(f"tasks.family {ref!r} needs the package websockets", fix=install_command("openenv"))
        if (self._kind == "nemo-gym") is not (tasks is not None):
            raise PluginError(
                f"tasks.family.options.tasks must be set for a NeMo Gym server and for no other server, got {tasks!r}",
                fix="for NeMo Gym, set tasks to the file with the rows; for other servers, remove tasks",
            )
        self._tasks, self._heldout_split = tasks, heldout_split
        self._split = split or ("train" if self._kind == "ors" else "")

    def size(self, split: Split) -> int | None:
        """Returns the number of tasks in a split; None if it is endless. Raises `PluginError` if the server does not report the number, or
        if the data set cannot be read."""
        if self._tasks is None and not self._split:
            return super().size(split)
        return self._ranges[split][2]

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split. Raises `TaskError` if the row has no valid prompt, and the errors of `size`."""
        task = super().task(split, index)
        if self._tasks is None and not self._split:
            return task
        name, first, _ = self._ranges[split]
        prompt: tuple[Message, ...] = ()
        more: dict[str, Any] = {"split": name, "index": first + index}
        if self._tasks is not None:
            row = self._rows[first + index]
            prompt, more = prompt_of(row, f"{self._tasks}, row {first + index + 1}"), {"row": row}
        assert task.environment is not None, "EnvironmentFamily sets it"
        return replace(task, prompt=prompt, environment=replace(task.environment, options={**task.environment.options, **more}))

    @cached_property
    def _ranges(self) -> Mapping[Split, tuple[str, int, int]]:
        """Maps each split to the server's split, the index of the first task and the number of tasks."""
        if self._tasks is not None:
            total, other, held = len(self._rows), "", 0
        else:
            total, other, held = self._asked(self._count_tasks)
        most, size = super().size(Split.HELDOUT) or 0, super().size(Split.TRAIN)
        held = min(held, most) if other else min(most, total // _OUT_OF)
        train = total if other else total - held
        return {
            Split.TRAIN: (self._split, 0, train if size is None else min(size, train)),
            Split.HELDOUT: (other or self._split, 0 if other else train, held),
            Split.HELDOUT_REAL: (self._split, 0, 0),
        }

    @cached_property
    def _rows(self) -> Sequence[dict[str, Any]]:
        path = Path(self._tasks or "")
        try:
            lines = untrusted_files.read_bytes(path, most=_LARGEST).splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise PluginError(f"tasks.family.options.tasks: {path} cannot be read: {error}", fix="write one JSON object per line") from None
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise PluginError(
                f"tasks.family.options.tasks: {path} is empty or has a line that is not an object", fix="write one JSON object per line"
            )
        return rows

    async def _count_tasks(self, server: RemoteServer) -> tuple[int, str, int]:
        """Returns the number of training tasks, the name of the held-out split (empty if the server has none), and the number of tasks in
        the held-out split (without one, the number of training tasks)."""
        http = server.http
        names = need(await http.json("GET", "/list_environments"), list, "/list_environments")
        name = self._others.get("environment") or (names[0] if names else "")
        path, other = f"/{quote(str(name), safe='')}", self._heldout_split or ""
        if not other:
            splits = need(await http.json("GET", f"{path}/splits"), list, "the splits")
            others = (split for split in splits if isinstance(split, dict) and split.get("type") in ("test", "validation"))
            other = next((str(split.get("name")) for split in others if split.get("name") != self._split), "")
        counts = []
        for split in (self._split, *([other] if other else [])):
            answer = need(await http.json("POST", f"{path}/num_tasks", {"split": split}), dict, "/num_tasks")
            counts.append(need(answer.get("num_tasks"), int, f"the number of tasks of split {split!r}"))
        return counts[0], other, counts[-1]

    def _asked(self, question: Callable[[RemoteServer], Coroutine[Any, Any, T]]) -> T:
        """Returns the result of `question`, which sends requests to the server. `question` runs in a thread with a separate event loop.
        Raises `PluginError` if the server gives no valid answer within `_DEADLINE_S`."""

        async def ask() -> T:
            """Sends the requests, then closes the connections."""
            server = self._server()
            try:
                async with asyncio.timeout(_DEADLINE_S):
                    return await question(server)
            finally:
                await server.close()

        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(asyncio.run, ask()).result()
            except (EnvironmentFault, TimeoutError) as error:
                raise PluginError(f"tasks.family {self.name!r}: {error or 'no answer'}", fix="start the server") from error

    def _key(self) -> str:
        key = self._spec.options.get("key", "")
        return secrets.read_secret(str(key)) if secrets.is_reference(key) else str(key)


def prompt_of(row: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    """Returns the prompt in a row of a NeMo Gym data set. Parts of a message without text, such as images, are dropped. Raises `TaskError`
    if the row has no messages, if an item is not a message, or if no part of a message has text."""
    parameters = row.get("responses_create_params")
    task_input = parameters.get("input") if isinstance(parameters, Mapping) else None
    items = [{"role": "user", "content": task_input}] if isinstance(task_input, str) else task_input
    instructions = parameters.get("instructions") if isinstance(parameters, Mapping) else None
    first = (Message(role="system", content=instructions),) if isinstance(instructions, str) else ()
    messages: list[Message] = []
    for item in items if isinstance(items, list) else ():
        content, role = (item.get("content"), item.get("role")) if isinstance(item, Mapping) else (None, None)
        if isinstance(content, list):
            texts = [str(part["text"]) for part in content if isinstance(part, Mapping) and part.get("text") is not None]
            content = "\n".join(texts) if texts else None
        if not isinstance(content, str) or role not in ("system", "developer", "user", "assistant"):
            raise TaskError(f"{where}: responses_create_params.input has an item that is not a text message", fix="remove the row")
        messages.append(Message(role="system" if role == "developer" else role, content=content))
    if not messages:
        raise TaskError(f"{where}: responses_create_params.input has no message", fix="correct or remove the row")
    return (*first, *messages)
