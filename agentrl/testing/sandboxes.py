"""Sandboxes that run no programs; a function returns the result of each program. `sample_task` returns a task for tests that do not depend
on what the task is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.errors import SandboxError
from agentrl.records import ExecResult, Message, SandboxSpec, Split, Task

_TASK = Task(
    id="t",
    family="f",
    prompt=(Message(role="user", content="q"),),
    tools=("submit",),
    sandbox=SandboxSpec(image="i"),
    verifiers=(),
    data={"answer": "4"},
    split=Split.TRAIN,
)

Answer = Callable[[str], ExecResult]


def sample_task(**changes: Any) -> Task:
    """Returns a training task with the answer "4", except for these changed fields."""
    return replace(_TASK, **changes)


def printing(text: str) -> Answer:
    """Returns a function that returns, for every program, a successful result with the output `text`."""
    return lambda code: ExecResult(exit_code=0, stdout=text, stderr="", wall_s=0.0)


class ScriptedSandbox:
    """A sandbox in which `answer(code)` returns the result of each program. The sandbox keeps its files in memory."""

    def __init__(self, name: str, answer: Answer, files: Mapping[str, bytes]) -> None:
        self.id = name
        self.files = dict(files)
        self.closed = False
        self.sessions: list[str] = []  # session of each call so far; empty if the call had none
        self._answer = answer

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, output_bytes: int = 65536, env: Mapping[str, str] | None = None
    ) -> ExecResult:
        """Returns the function's result for the program and its arguments, joined by spaces."""
        return await self.python(" ".join(argv), timeout_s=timeout_s, output_bytes=output_bytes)

    async def python(self, code: str, *, timeout_s: float, output_bytes: int = 65536, session: str = "") -> ExecResult:
        """Returns the function's result for code."""
        if self.closed:
            raise SandboxError("the sandbox is closed")
        self.sessions.append(session)
        return self._answer(code)

    async def read(self, path: str, *, max_bytes: int) -> bytes:
        """Reads a file in the sandbox."""
        data = self.files.get(path)
        if data is None:
            raise FileNotFoundError(path)
        if len(data) > max_bytes:
            raise ValueError(f"{path} is larger than {max_bytes} bytes")
        return data

    async def write(self, path: str, data: bytes) -> None:
        """Writes a file in the sandbox."""
        self.files[path] = data

    async def snapshot(self) -> bytes:
        """Returns the files as a snapshot."""
        return json.dumps({path: data.hex() for path, data in self.files.items()}).encode()

    async def pause(self) -> None:
        """Does nothing."""

    async def resume(self) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Marks the sandbox as closed."""
        self.closed = True


class ScriptedSandboxes:
    """A backend of scripted sandboxes; `opened` contains all sandboxes that were opened."""

    name = "scripted"

    def __init__(self, answer: Answer) -> None:
        self.opened: list[ScriptedSandbox] = []
        self._answer = answer

    async def prepare(self, spec: SandboxSpec) -> None:
        """Does nothing."""

    async def open(
        self, spec: SandboxSpec, *, files: Mapping[str, bytes] | None = None, snapshot: bytes | None = None, timeout_s: float = 60.0
    ) -> ScriptedSandbox:
        """Opens a scripted sandbox."""
        restored = {path: bytes.fromhex(data) for path, data in json.loads(snapshot or b"{}").items()}
        sandbox = ScriptedSandbox(f"scripted-{len(self.opened)}", self._answer, {**restored, **(files or {})})
        self.opened.append(sandbox)
        return sandbox

    async def close(self) -> None:
        """Closes all of its sandboxes."""
        for sandbox in self.opened:
            await sandbox.close()
