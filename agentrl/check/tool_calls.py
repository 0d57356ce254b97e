"""Checks that user-supplied tools load, have a valid schema, and return an outcome for any arguments."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.agent import Tool, ToolOutcome, load_tools
from agentrl.agent.mcp.servers import MCP_PREFIX
from agentrl.agent.toolbox import ToolInstance
from agentrl.base import user_code
from agentrl.base.error_text import one_line_error, raw_text
from agentrl.base.numbers import plural
from agentrl.base.processes import deadline_alarm
from agentrl.check import cheats
from agentrl.check.report import Finding, Proof, join_examples, shorten
from agentrl.errors import SandboxError, UserError
from agentrl.protocols import Sandbox, SandboxBackend, ToolSource
from agentrl.records import Task
from agentrl.task.outputs import sandbox_of

NAME = "the project's tools answer any call"
CALL_S = 15.0  # maximum duration of one call in this check, even if the task's limit is higher
_BROKE = "makes its sandbox fail, which excludes the episode"
_TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}


class _Blocked(BaseException):
    """Raised inside a tool if it blocks the event loop."""


async def prove_tools(tasks: Sequence[Task], sandboxes: SandboxBackend, run: ToolSource | None = None) -> Proof:
    """Calls each tool that a task refers to by a reference with a colon, with arguments that no schema allows. Built-in tools are skipped.

    Tools of MCP servers are called only if the server runs in the sandbox, because a call to any other server may have side effects. Raises
    `SandboxError` if no sandbox can be opened.
    """
    users: dict[str, Task] = {}
    for task in tasks:
        for name in task.tools:
            if ":" in name:
                users.setdefault(name, task)
    findings: list[Finding] = []
    for name, task in users.items():
        findings += await _prove(name, task, sandboxes, run)
    findings += _clashes(tasks, run)
    looked_at = f"{plural(len(users), 'tool')}: {join_examples(list(users))}" if users else "no task refers to a tool by reference"
    return Proof(name=NAME, looked_at=looked_at, findings=tuple(findings))


def _clashes(tasks: Sequence[Task], run: ToolSource | None) -> list[Finding]:
    clashing = []
    for tools in {task.tools for task in tasks}:
        names: list[str] = []
        with user_code.fault_boundary():  # a tool that does not load is reported elsewhere
            names = [tool_name for name in tools for tool_name in load_tools([name], None, run)]
        clashing += [name for name in dict.fromkeys(names) if names.count(name) > 1]
    return [
        Finding(severity="failure", what=f"two tools of one task have the name {name!r}; the agent gets only the last one")
        for name in clashing
    ]


async def _prove(reference: str, task: Task, sandboxes: SandboxBackend, run: ToolSource | None) -> list[Finding]:
    with user_code.fault_boundary() as fault:
        tools = load_tools([reference], None, run, task=task)
        wrong = {tool.name: _wrong_schema(tool) for tool in tools.values()}
    if (error := fault.error) is not None:
        why = raw_text(error) if isinstance(error, UserError | AttributeError) else one_line_error(error)
        return [Finding(severity="failure", what=f"tool {reference} does not load: {why}")]
    try:
        fresh = [await _fresh(instance.kind) for instance in tools.instances.values() for _ in range(2)]
        findings: list[Finding] = []
        for tool in tools.values():
            name = f"{reference}, method {tool.name}," if tools.instances else reference
            if reference.startswith(MCP_PREFIX) and not tool.needs_sandbox:
                findings += [Finding(severity="failure", what=f"tool {reference}: {problem}") for problem in wrong[tool.name]]
                continue
            findings += await _prove_calls(tool, name, wrong[tool.name], task, sandboxes)
        for instance in tools.instances.values():
            findings += await _prove_state(reference, instance, fresh)
        return findings
    finally:
        await tools.close(timeout_s=CALL_S)


async def _prove_calls(tool: Tool, reference: str, wrong: Sequence[str], task: Task, sandboxes: SandboxBackend) -> list[Finding]:
    """Checks one tool: its schema, and calls with arguments that no schema allows."""
    findings = [Finding(severity="failure", what=f"tool {reference}: {schema_problem}") for schema_problem in wrong]
    properties = {} if wrong else tool.schema["function"].get("parameters", {}).get("properties", {})
    bad: dict[str, list[str]] = {}
    sandbox: Sandbox | None = None
    try:
        for case, arguments in cheats.malformed_arguments(properties).items():
            if sandbox is None and tool.needs_sandbox:
                sandbox = await sandboxes.open(sandbox_of(task), files=task.contents())
            if problem := await _call(tool, arguments, sandbox, task):
                bad.setdefault(problem, []).append(case)
            if problem.startswith(_BROKE) and sandbox is not None:
                await sandbox.close()
                sandbox = None
    finally:
        if sandbox is not None:
            await sandbox.close()
    for problem, cases in bad.items():
        raises = problem.startswith("raises")
        more = " (the agent sees only a tool error; return a ToolOutcome that explains the problem)" if raises else ""
        findings.append(
            Finding(severity="warning" if raises else "failure", what=f"tool {reference} {problem}, given {join_examples(cases)}{more}")
        )
    return findings


async def _fresh(kind: Any) -> Any:
    """Returns the state of a new tool object that was never called; None if the object cannot be opened."""
    instance = ToolInstance(kind)
    try:
        with user_code.fault_boundary():
            await user_code.call_user_code(instance.open, what=f"opening {instance.kind.__name__}", timeout_s=CALL_S)
            return await instance.state(timeout_s=CALL_S)
        return None
    finally:
        await instance.close(timeout_s=CALL_S)


async def _prove_state(reference: str, instance: ToolInstance, fresh: Sequence[Any]) -> list[Finding]:
    """Checks that the state of tool objects can be saved and restored, and that the state does not leak into other episodes."""
    try:
        state = await instance.state(timeout_s=CALL_S)
    except ValueError as error:
        return [Finding(severity="failure", what=f"tool {reference}: {shorten(str(error), 200)}; its episodes cannot be captured")]
    problems = []
    restored = ToolInstance(instance.kind, state, restored=True)
    try:
        with user_code.fault_boundary() as fault:
            await user_code.call_user_code(restored.open, what=f"restoring {instance.kind.__name__}", timeout_s=CALL_S)
            if await restored.state(timeout_s=CALL_S) != state:
                problems.append("its restored state differs from the saved one, so a resumed episode has different tools")
        if fault.error is not None:
            problems.append(f"its state cannot be restored ({shorten(user_code.describe_error(fault.error), 200)})")
    finally:
        await restored.close(timeout_s=CALL_S)
    if fresh[0] == fresh[1] != await _fresh(instance.kind):
        problems.append("its state leaks into the next episode: keep state in self, set in __init__, not in the class or module")
    return [Finding(severity="failure", what=f"tool {reference}: {problem}") for problem in problems]


def _wrong_schema(tool: Tool) -> list[str]:
    """Returns the problems of a tool's declaration."""
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
        wrong.append("its schema has no description, so the agent does not know what it does")
    return [*wrong, *_wrong_parameters(function.get("parameters", {}))]


def _wrong_parameters(parameters: Any) -> list[str]:
    if parameters == {}:
        return []
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object" or not isinstance(parameters.get("properties"), Mapping):
        return ['its parameters are not {"type": "object", "properties": {...}}']
    wrong = []
    for name, schema in parameters["properties"].items():
        kinds = schema.get("type", []) if isinstance(schema, Mapping) else None
        if kinds is None or not set([kinds] if isinstance(kinds, str) else kinds) <= _TYPES:
            wrong.append(f"its parameter {name!r} has no JSON Schema type: {shorten(repr(schema))}")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not set(required) <= set(parameters["properties"]):
        wrong.append(f"it requires parameters that it does not have: {shorten(repr(required))}")
    return wrong


async def _call(tool: Tool, arguments: Mapping[str, Any], sandbox: Sandbox | None, task: Task) -> str:
    """Returns the problem with a call, or an empty string if the call returned an outcome."""
    limit = min(task.limits.tool_timeout_s, CALL_S)
    with user_code.fault_boundary() as fault, deadline_alarm(limit + 5.0, _Blocked):
        async with asyncio.timeout(limit + 2.0):
            outcome: Any = await tool(arguments, sandbox, task.limits)
    match fault.error:
        case None:
            return "" if isinstance(outcome, ToolOutcome) else f"returns {type(outcome).__name__}, not a ToolOutcome"
        case _Blocked():
            return f"blocks the event loop for more than {limit + 5.0:g} s (await slow operations, or use asyncio.to_thread)"
        case SandboxError():
            return f"{_BROKE}: {shorten(str(fault.error), 200)}"
        case TimeoutError():
            return f"returns no outcome within {limit:g} s"
        case _:
            return f"raises {type(fault.error).__name__}"
