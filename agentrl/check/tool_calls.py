"""Tools of a project's own: they load, their schema describes them, and whatever a model passes them gives an outcome."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent import Tool, ToolOutcome, load_tools
from agentrl.agent.mcp.servers import MCP_PREFIX
from agentrl.agent.tool_instances import ToolInstance
from agentrl.base import user_code
from agentrl.base.processes import deadline_alarm
from agentrl.check import malformed
from agentrl.check.findings import Finding, Proof, join_examples, plural, shorten
from agentrl.errors import SandboxError, UserError
from agentrl.protocols import Sandbox, SandboxBackend, ToolSource
from agentrl.records import Task

NAME = "tools of the project's own answer any call"
CALL_S = 15.0
"""Longest that one call may take here, whatever the task allows."""
_BROKE = "makes its sandbox fail, so that the episode is left out"
_TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}


class _Blocked(BaseException):
    """A tool that holds the event loop: raised in the middle of it."""


async def prove_tools(tasks: Sequence[Task], sandboxes: SandboxBackend, run: ToolSource | None = None) -> Proof:
    """Calls each tool that a task names by reference, with arguments that no schema allows.

    Tools of MCP servers too, where the server is in the sandbox; of one outside nobody knows what a call does.
    """
    users: dict[str, Task] = {}
    for task in tasks:
        for name in task.tools:
            if ":" in name:
                users.setdefault(name, task)
    found: list[Finding] = []
    for name, task in users.items():
        found += await _prove(name, task, sandboxes, run)
    found += _clashes(tasks, run)
    looked_at = f"{plural(len(users), 'tool')}: {join_examples(list(users))}" if users else "no tool is named by reference"
    return Proof(name=NAME, looked_at=looked_at, findings=tuple(found))


def _clashes(tasks: Sequence[Task], run: ToolSource | None) -> list[Finding]:
    clashing = []
    for tools in {task.tools for task in tasks}:
        try:
            names = [one for name in tools for one in load_tools([name], None, run)]
        except Exception:  # a tool is anybody's code, and one that does not load is told elsewhere
            continue
        clashing += [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return [
        Finding(severity="failure", what=f"two tools of one task are called {name!r}; the agent has only the last") for name in clashing
    ]


async def _prove(reference: str, task: Task, sandboxes: SandboxBackend, run: ToolSource | None) -> list[Finding]:
    try:
        tools = load_tools([reference], None, run, task=task)
        wrong = {tool.name: _wrong_schema(tool) for tool in tools.values()}
    except (UserError, AttributeError) as error:
        return [Finding(severity="failure", what=f"tool {reference} does not load: {error}")]
    except (Exception, SystemExit) as error:  # a tool is anybody's code
        return [Finding(severity="failure", what=f"tool {reference} does not load: {type(error).__name__}: {error}")]
    try:
        fresh = [await _fresh(kept.kind) for kept in tools.instances.values() for _ in range(2)]
        found: list[Finding] = []
        for tool in tools.values():
            name = f"{reference}, method {tool.name}," if tools.instances else reference
            if reference.startswith(MCP_PREFIX) and not tool.needs_sandbox:
                found += [Finding(severity="failure", what=f"tool {reference}: {one}") for one in wrong[tool.name]]
                continue
            found += await _prove_calls(tool, name, wrong[tool.name], task, sandboxes)
        for kept in tools.instances.values():
            found += await _prove_state(reference, kept, fresh)
        return found
    finally:
        await tools.close(timeout_s=CALL_S)


async def _prove_calls(tool: Tool, reference: str, wrong: Sequence[str], task: Task, sandboxes: SandboxBackend) -> list[Finding]:
    """One tool: its schema, and how it takes what no schema allows."""
    found = [Finding(severity="failure", what=f"tool {reference}: {one}") for one in wrong]
    properties = {} if wrong else tool.schema["function"].get("parameters", {}).get("properties", {})
    bad: dict[str, list[str]] = {}
    sandbox: Sandbox | None = None
    try:
        for what, arguments in malformed.arguments(properties).items():
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
            Finding(severity="warning" if raises else "failure", what=f"tool {reference} {problem}, given {join_examples(cases)}{more}")
        )
    return found


async def _fresh(kind: Any) -> Any:
    """What tools keep that nobody has called yet; None where they cannot even be opened, which their calls tell."""
    kept = ToolInstance(kind)
    try:
        await user_code.call_user_code(kept.open, what=f"opening {kept.kind.__name__}", timeout_s=CALL_S)
        return await kept.state(timeout_s=CALL_S)
    except (Exception, SystemExit):  # a tool is anybody's code
        return None
    finally:
        await kept.close(timeout_s=CALL_S)


async def _prove_state(reference: str, kept: ToolInstance, fresh: Sequence[Any]) -> list[Finding]:
    """Whether what the tools keep can be taken and given back, and stays with the episode that has called them."""
    try:
        state = await kept.state(timeout_s=CALL_S)
    except ValueError as error:
        return [Finding(severity="failure", what=f"tool {reference}: {shorten(str(error), 200)}; such an episode is never captured")]
    found = []
    again = ToolInstance(kept.kind, state, restored=True)
    try:
        await user_code.call_user_code(again.open, what=f"restoring {kept.kind.__name__}", timeout_s=CALL_S)
        if await again.state(timeout_s=CALL_S) != state:
            found.append("a state that is restored is another one: an episode that goes on has other tools than it had")
    except (Exception, SystemExit) as error:  # a tool is anybody's code
        found.append(f"its state is not restored ({shorten(user_code.describe_error(error), 200)})")
    finally:
        await again.close(timeout_s=CALL_S)
    if fresh[0] == fresh[1] != await _fresh(kept.kind):
        found.append("what one episode tells it is there for the next: keep state in self, made in __init__, not in the class or module")
    return [Finding(severity="failure", what=f"tool {reference}: {one}") for one in found]


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
            wrong.append(f"its parameter {name!r} has no type of JSON schema: {shorten(repr(one))}")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not set(required) <= set(parameters["properties"]):
        wrong.append(f"it requires parameters that it does not have: {shorten(repr(required))}")
    return wrong


async def _call(tool: Tool, arguments: Mapping[str, Any], sandbox: Sandbox | None, task: Task) -> str:
    """What is wrong with how a call went; empty when it gave an outcome."""
    limit = min(task.limits.tool_timeout_s, CALL_S)
    try:
        with deadline_alarm(limit + 5.0, _Blocked):
            async with asyncio.timeout(limit + 2.0):
                outcome: Any = await tool(arguments, sandbox, task.limits)
    except _Blocked:
        return f"holds the whole run for more than {limit + 5.0:g} s (await what waits, or use asyncio.to_thread)"
    except SandboxError as error:
        return f"{_BROKE}: {shorten(str(error), 200)}"
    except TimeoutError:
        return f"gives no outcome within {limit:g} s"
    except (Exception, SystemExit) as error:  # a tool is anybody's code
        return f"raises {type(error).__name__}"
    return "" if isinstance(outcome, ToolOutcome) else f"gives {type(outcome).__name__}, not a ToolOutcome"
