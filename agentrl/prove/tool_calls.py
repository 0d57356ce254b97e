"""Tools of a project's own: they load, their schema describes them, and whatever a model passes them gives an outcome."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from agentrl.errors import SandboxError, UserError
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.prove import odd
from agentrl.prove.findings import Finding, Proof, clipped, examples, plural
from agentrl.records import Task
from agentrl.rollout.tools import Tool, ToolOutcome, load_tools

NAME = "tools of the project's own answer any call"
CALL_S = 15.0
"""Longest that one call may take here, whatever the task allows."""
_BROKE = "makes its sandbox fail, so that the episode is left out"
_TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}


class _Blocked(BaseException):
    """A tool that holds the event loop: raised in the middle of it."""


async def prove_tools(tasks: Sequence[Task], sandboxes: SandboxBackend) -> Proof:
    """Calls each tool that a task names by reference, with arguments that no schema allows."""
    users: dict[str, Task] = {}
    for task in tasks:
        for name in task.tools:
            if ":" in name:
                users.setdefault(name, task)
    found: list[Finding] = []
    for name, task in users.items():
        found += await _prove(name, task, sandboxes)
    found += _clashes(tasks)
    looked_at = f"{plural(len(users), 'tool')}: {examples(list(users))}" if users else "no tool is named by reference"
    return Proof(name=NAME, looked_at=looked_at, findings=tuple(found))


def _clashes(tasks: Sequence[Task]) -> list[Finding]:
    clashing = []
    for tools in {task.tools for task in tasks}:
        try:
            names = [next(iter(load_tools([name]))) for name in tools]
        except Exception:  # a tool is anybody's code, and one that does not load is told elsewhere
            continue
        clashing += [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return [
        Finding(severity="failure", what=f"two tools of one task are called {name!r}; the agent has only the last") for name in clashing
    ]


async def _prove(reference: str, task: Task, sandboxes: SandboxBackend) -> list[Finding]:
    try:
        tool = next(iter(load_tools([reference]).values()))
        wrong = _wrong_schema(tool)
    except (UserError, AttributeError) as error:
        return [Finding(severity="failure", what=f"tool {reference} does not load: {error}")]
    except (Exception, SystemExit) as error:  # a tool is anybody's code
        return [Finding(severity="failure", what=f"tool {reference} does not load: {type(error).__name__}: {error}")]
    found = [Finding(severity="failure", what=f"tool {reference}: {one}") for one in wrong]
    properties = {} if wrong else tool.schema["function"].get("parameters", {}).get("properties", {})
    bad: dict[str, list[str]] = {}
    sandbox: Sandbox | None = None
    try:
        for what, arguments in odd.arguments(properties).items():
            if sandbox is None and tool.needs_sandbox:
                sandbox = await sandboxes.open(task.sandbox, files=task.contents())
            if problem := await _call(tool, arguments, sandbox, task):
                bad.setdefault(problem, []).append(what)
            if problem.startswith(_BROKE) and sandbox is not None:
                await sandbox.close()
                sandbox = None
    finally:
        if sandbox is not None:
            await sandbox.close()
    for problem, cases in bad.items():
        raises = problem.startswith("raises")
        more = " (the agent is told of a tool error; say what you expect instead)" if raises else ""
        found.append(
            Finding(severity="warning" if raises else "failure", what=f"tool {reference} {problem}, given {examples(cases)}{more}")
        )
    return found


def _wrong_schema(tool: Tool) -> list[str]:
    """What is wrong with a tool besides what it does."""
    wrong: list[str] = []
    if not isinstance(tool.name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", tool.name):
        wrong.append(f"its name {tool.name!r} is not 1 to 64 letters, digits, _ and -")
    if not isinstance(tool.needs_sandbox, bool):
        wrong.append(f"needs_sandbox is {tool.needs_sandbox!r}, not True or False")
    try:
        json.dumps(tool.schema, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return [*wrong, f"its schema cannot be written as JSON: {error}"]
    function = tool.schema.get("function") if isinstance(tool.schema, Mapping) else None
    if not isinstance(function, Mapping) or tool.schema.get("type") != "function":
        return [*wrong, 'its schema is not {"type": "function", "function": {...}}']
    if not isinstance(function.get("description"), str) or not function["description"].strip():
        wrong.append("its schema has no description, so the agent is not told what it does")
    return [*wrong, *_wrong_parameters(function.get("parameters", {}))]


def _wrong_parameters(parameters: Any) -> list[str]:
    if parameters == {}:
        return []
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object" or not isinstance(parameters.get("properties"), Mapping):
        return ['its parameters are not {"type": "object", "properties": {...}}']
    wrong = []
    for name, one in parameters["properties"].items():
        kinds = one.get("type", []) if isinstance(one, Mapping) else None
        if kinds is None or not set([kinds] if isinstance(kinds, str) else kinds) <= _TYPES:
            wrong.append(f"its parameter {name!r} has no type of JSON schema: {clipped(repr(one))}")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not set(required) <= set(parameters["properties"]):
        wrong.append(f"it requires parameters that it does not have: {clipped(repr(required))}")
    return wrong


async def _call(tool: Tool, arguments: Mapping[str, Any], sandbox: Sandbox | None, task: Task) -> str:
    """What is wrong with how a call went; empty when it gave an outcome."""
    limit = min(task.limits.tool_timeout_s, CALL_S)
    try:
        with _unblocked(limit + 5.0):
            async with asyncio.timeout(limit + 2.0):
                outcome: Any = await tool(arguments, sandbox, task.limits)
    except _Blocked:
        return f"holds the whole run for more than {limit + 5.0:g} s (await what waits, or use asyncio.to_thread)"
    except SandboxError as error:
        return f"{_BROKE}: {clipped(str(error), 200)}"
    except TimeoutError:
        return f"gives no outcome within {limit:g} s"
    except (Exception, SystemExit) as error:  # a tool is anybody's code
        return f"raises {type(error).__name__}"
    return "" if isinstance(outcome, ToolOutcome) else f"gives {type(outcome).__name__}, not a ToolOutcome"


@contextmanager
def _unblocked(limit_s: float) -> Iterator[None]:
    """Raises `_Blocked` in code that keeps the event loop from running for this long. Only the main thread can be told."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise _Blocked

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
