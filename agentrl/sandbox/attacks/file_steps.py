"""Steps of the host after attacks on its handling of files and arguments: it must answer in time, with the right blame."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agentrl.errors import SandboxError
from agentrl.sandbox.attacks.arena import Escaped
from agentrl.sandbox.attacks.host_steps import MEBIBYTE, STEPS, StepContext
from agentrl.sandbox.channel_sandbox import ChannelSandbox
from agentrl.task.outputs import CollectedOutputs, collect_outputs

__all__ = ["STEPS"]

T = TypeVar("T")
SOON_S = 10.0
"""Deadline of one step over an agent's files, on a busy machine."""
SAID = (
    "\ud800",
    "\udfff/x",
    "\udcff",
    "a\0b",
    "",
    ".",
    "..",
    "/etc/passwd",
    "a/../../b",
    "x" * 256,
    "x/" * 5000 + "x",
    "=",
    "A=B",
    "\u202e",
)
"""What a model may write as a name, an argument or a variable of a tool."""


async def _in_time(what: str, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(SOON_S):
            return await work
    except TimeoutError:
        raise Escaped(f"{what} takes more than {SOON_S:.0f} s") from None


async def _collected(scene: StepContext) -> CollectedOutputs:
    return await _in_time("collecting the outputs", collect_outputs(scene.sandbox, ["**", "result"]))


async def _captured(scene: StepContext) -> str:
    """Whatever the modes and names, a snapshot can be made and opens into the same files."""
    try:
        archive = await _in_time("a snapshot", scene.sandbox.snapshot())
        copy = await _in_time("opening from a snapshot", scene.backend.open(scene.arena.spec, snapshot=archive))
    except ValueError as error:
        raise Escaped(f"the agent has opted out of being captured: {error}") from None
    try:
        again = await copy.snapshot()
    finally:
        await copy.close()
    if again != archive:
        raise Escaped(f"a copy is not as its original: {len(again)} bytes of archive, {len(archive)} before")
    collected = await _collected(scene)
    return f"a snapshot of {len(archive)} bytes opens as it was; {len(collected.files)} outputs, {len(collected.refused)} refused"


async def _captured_or_too_large(scene: StepContext) -> str:
    try:
        archive = await _in_time("a snapshot", scene.sandbox.snapshot())
        said = f"a snapshot of {len(archive)} bytes"
    except ValueError as error:
        if "the working directory" not in str(error):
            raise Escaped(f"refused for another reason than size: {error}") from None
        said = str(error)
    collected = await _collected(scene)
    return f"{said}; {len(collected.files)} outputs, {len(collected.refused)} refused"


async def _nobody_at_the_outputs(scene: StepContext) -> str:
    collected = await _collected(scene)
    left = await scene.says("import os\nprint([pid for pid in os.listdir('/proc') if pid.isdigit() and int(pid) not in (1, os.getpid())])")
    if left != "[]":
        raise Escaped(f"processes {left} went on while outputs were taken")
    return f"{len(collected.files)} outputs, nobody beside them"


async def _odd_arguments(scene: StepContext) -> str:
    """Everything that a model may write, in every argument of a sandbox: a result, or an error not blamed on the machine."""
    refused = answered = 0
    for text in SAID:
        for name, call in _CALLS.items():
            try:
                await _in_time(name, call(scene.sandbox, text))
                answered += 1
            except (ValueError, FileNotFoundError) as error:
                str(error).encode()
                refused += 1
            except SandboxError as error:
                raise Escaped(f"{name} with {text[:20]!r} ends the sandbox, and the failure is the machine's: {error}") from None
    result = await scene.sandbox.exec(["sh", "-c", "exit 70"], timeout_s=10)
    if result.exit_code != 70:
        raise Escaped(f"a program's own exit code 70 came as {result}")
    return f"{refused} refused, {answered} answered"


_CALLS: dict[str, Callable[[ChannelSandbox, str], Awaitable[object]]] = {
    "read": lambda sandbox, text: sandbox.read(text, max_bytes=MEBIBYTE),
    "write": lambda sandbox, text: sandbox.write(text, b"x"),
    "argv": lambda sandbox, text: sandbox.exec(["true", text], timeout_s=10),
    "program": lambda sandbox, text: sandbox.exec([text], timeout_s=10),
    "a variable's name": lambda sandbox, text: _ran(sandbox, {text: "x"}),
    "a variable": lambda sandbox, text: _ran(sandbox, {"X": text}),
    "code": lambda sandbox, text: sandbox.python(f"print({text!r}, '{text}')", timeout_s=10),
    "session": lambda sandbox, text: sandbox.python("1", timeout_s=10, session=text),
}


async def _ran(sandbox: ChannelSandbox, env: dict[str, str]) -> None:
    """Runs `true` with these variables; a failure to start must not look like its own exit."""
    result = await sandbox.exec(["true"], env=env, timeout_s=10)
    if result.exit_code != 0:
        raise Escaped(f"`true` with {env!r:.60} seems to exit with {result.exit_code}")


STEPS.update(
    captured=_captured,
    captured_or_too_large=_captured_or_too_large,
    nobody_at_the_outputs=_nobody_at_the_outputs,
    odd_arguments=_odd_arguments,
)
