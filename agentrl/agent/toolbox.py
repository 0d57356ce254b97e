"""The tools of one episode: shared tools, and tools with state, which belong to this episode only.

Tools with state are methods of a user-supplied class. Each object of the class belongs to one episode.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any, cast

from pydantic import TypeAdapter

from agentrl.agent.filetools import SHIPPED_TOOLS
from agentrl.agent.mcp.servers import MCP_PREFIX, NO_TOOLS, ServerConnection, ServerTool, find_tool, offered
from agentrl.agent.memory import memory_tools
from agentrl.agent.tools import (
    NO_BOUNDS,
    Bounds,
    Tool,
    ToolOutcome,
    ToolWording,
    bounds_of,
    definition_problem,
    reworded_schema,
    runs_together,
)
from agentrl.agent.typed import TaskData, TypedTool, is_tool, run, typed_tool
from agentrl.base import user_code
from agentrl.errors import PluginError, TaskError
from agentrl.plugins.references import resolve
from agentrl.protocols import EpisodeMemory, Sandbox, ToolSource
from agentrl.records import Limits, Task
from agentrl.records.fields import json_value
from agentrl.task.recorded_tools import RECORDED_TOOLS, RecordedCall, Recording, arguments_key


class ToolInstance:
    """An episode's object of a class with `tool` methods. The first call of a tool creates the object, from the saved state if there is
    one.

    The state of a dataclass is its fields. Other classes define `state()`, which returns JSON data, and `restore(state)`, which is called
    on a new object. An optional `close()` is called at the end of the episode. All three methods may be async.
    """

    def __init__(self, kind: Any, saved: Any = None, *, restored: bool = False) -> None:
        self.kind = kind
        self._saved = saved
        self._restored = restored  # whether `_saved` contains a state
        self._object: Any = None
        self._opening = asyncio.Lock()

    @property
    def used(self) -> bool:
        """Whether there is a state to save."""
        return self._restored or self._object is not None

    async def open(self) -> Any:
        """Returns the object, which the first call creates."""
        async with self._opening:  # concurrent calls share one object
            if self._object is None:
                self._object = await (self._reopened() if self._restored else self._new())
            return self._object

    async def _new(self) -> Any:
        return await user_code.run_in_thread(self.kind, what=f"opening {self.kind.__name__}")

    async def _reopened(self) -> Any:
        if not hasattr(self.kind, "restore"):
            return _fields_of(self.kind).validate_python(json_value(self._saved))
        new = await self._new()
        await run(lambda: new.restore(json_value(self._saved)), new.restore, what=f"restoring {self.kind.__name__}")
        return new

    async def state(self, *, timeout_s: float) -> Any:
        """Returns the state as JSON data. Raises `ValueError` if the state cannot be captured."""
        if self._object is None:
            return self._saved
        what = f"the state of {self.kind.__name__}"

        async def captured() -> Any:
            if hasattr(self.kind, "state"):
                return await run(self._object.state, self._object.state, what=what)
            return _fields_of(self.kind).dump_python(self._object, mode="json", warnings="error")

        with user_code.fault_boundary() as fault:
            return json_value(await user_code.call_user_code(captured, what=what, timeout_s=timeout_s))
        assert fault.error is not None
        user_code.log_unexpected(what, fault.error)
        raise ValueError(f"{what} cannot be captured: {user_code.describe_error(fault.error)}") from fault.error

    async def close(self, *, timeout_s: float) -> None:
        """Closes the object. Logs errors."""
        closing, self._object = self._object, None
        if not hasattr(closing, "close"):
            return
        what = f"closing {self.kind.__name__}"
        with user_code.logging_faults(what):
            await user_code.call_user_code(lambda: run(closing.close, closing.close, what=what), what=what, timeout_s=timeout_s)


def marked_functions(kind: Any) -> list[Any]:
    """Returns the attributes of a class that are functions marked with `tool`, including those inside `staticmethod` or `classmethod`."""
    attributes = (inspect.getattr_static(kind, name, None) for name in dir(kind))
    functions = (item.__func__ if isinstance(item, staticmethod | classmethod) else item for item in attributes)
    return [function for function in functions if is_tool(function)]


@lru_cache(maxsize=1024)
def tool_methods(kind: Any) -> tuple[TypedTool, ...]:
    """Returns the tools of a class; empty if it has none. Raises `PluginError` if the class cannot be instantiated without arguments, the
    state of its objects cannot be captured, or a tool is not a plain method or not valid (`typed_tool`)."""
    if not (marked := marked_functions(kind)):
        return ()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(kind).parameters.values()
    if any(parameter.default is parameter.empty and parameter.kind not in variadic for parameter in parameters):
        raise PluginError(
            f"the tools of {kind.__name__} cannot be opened: the class requires arguments", fix="give each argument a default"
        )
    own = [name for name in ("state", "restore") if callable(getattr(kind, name, None))]
    if len(own) == 1 or not (own or dataclasses.is_dataclass(kind)):
        missing = "restore()" if own == ["state"] else "state()" if own else "state() and restore()"
        raise PluginError(
            f"the tools of {kind.__name__} have a state that cannot be captured: the class has no {missing}",
            fix="make the class a dataclass of JSON data, or define state(), which returns JSON data, and restore(state)",
        )
    if not own:
        _fields_of(kind)
    for function in marked:
        if not inspect.isfunction(inspect.getattr_static(kind, function.__name__, None)):
            raise PluginError(
                f"the tool {function.__name__} of {kind.__name__} is not a plain method",
                fix="define it with self, and with no decorator except @tool",
            )
    methods = tuple(typed_tool(function, method=True) for function in marked)
    return tuple(sorted(methods, key=lambda method: method.function.__code__.co_firstlineno))


@lru_cache(maxsize=1024)
def _fields_of(kind: Any) -> TypeAdapter[Any]:
    """Returns the adapter that reads and writes a dataclass as JSON data."""
    try:
        return TypeAdapter(kind)
    except Exception as error:
        reason = user_code.describe_error(error)
        raise PluginError(
            f"the tools of {kind.__name__} have a state that JSON cannot represent ({reason})",
            fix="use fields that JSON can represent, or define state() and restore()",
        ) from None


_MAX_LISTED, _MAX_NAME = 20, 80  # maximum argument names in an error, and characters in each


class Toolbox(Mapping[str, Tool]):
    """Maps the names that the agent uses to tools. Objects and connections are opened by the first call that uses them. The owner must call
    `close`."""

    def __init__(
        self, tools: Mapping[str, Tool], instances: Mapping[str, ToolInstance], connections: Mapping[str, ServerConnection]
    ) -> None:
        self._tools = tools
        self.instances = instances  # reference -> the episode's object of that class
        self.refer: Callable[[str], Awaitable[str]] | None = None  # stores the images in outputs (`ChatFormat.refer`)
        self._stateful: Mapping[str, ToolInstance | ServerConnection] = {**instances, **connections}

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    async def state(self, *, timeout_s: float) -> dict[str, Any]:
        """Returns a mapping reference -> state as JSON data, for the tool classes and servers that were used.

        Raises `ValueError` if a state cannot be captured within `timeout_s`, or is not JSON data.
        """
        return {reference: await owner.state(timeout_s=timeout_s) for reference, owner in self._stateful.items() if owner.used}

    async def close(self, *, timeout_s: float) -> None:
        """Closes the objects and connections that were opened. Logs errors."""
        async with AsyncExitStack() as stack:
            for owner in self._stateful.values():
                stack.push_async_callback(owner.close, timeout_s=timeout_s)


class RecipeTool:
    """A tool with the recipe's bounds and descriptions."""

    def __init__(self, tool: Tool, bounds: Bounds, wording: ToolWording) -> None:
        self.name, self.schema, self.needs_sandbox = tool.name, reworded_schema(tool.schema, wording), tool.needs_sandbox
        self.bounds, self.together = bounds_of(tool).overridden_by(bounds), runs_together(tool)
        self.opening_s, self.repeats = getattr(tool, "opening_s", 0.0), getattr(tool, "repeats", True)
        self._tool = tool

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        return await self._tool(arguments, sandbox, limits)


def load_tools(
    names: Sequence[str],
    saved: Mapping[str, Any] | None = None,
    run: ToolSource | None = None,
    memory: EpisodeMemory | None = None,
    task: Task | None = None,
    actions: Sequence[Tool] = (),
) -> Toolbox:
    """Returns the tools of one episode, with new objects for tools with state and new connections to MCP servers.

    Args:
        saved: the result of `Toolbox.state` from which this episode continues.
        run: the MCP servers, bounds and descriptions of the recipe (`LiveEpisode.tools`).
        memory: the episode's memory, whose tools come last; None means no memory.
        task: the episode's task, for tools that have a `TaskData` parameter; None if only names and schemas are needed.
        actions: the actions of the episode's environment.

    Raises:
        TaskError: a name is unknown, two tools have the same name, or the task has no valid recording.
        PluginError: a reference does not resolve to a valid tool.
        UserError: the recipe describes an argument that the tool does not have.
    """
    tools: dict[str, Tool] = {}
    instances: dict[str, ToolInstance] = {}
    connections: dict[str, ServerConnection] = {}
    run, saved = run or NO_TOOLS, saved or {}
    for name in names:
        for tool in _of_server(name, run, connections, saved) if name.startswith(MCP_PREFIX) else _loaded(name, instances, saved, task):
            if tool.name in tools:
                raise TaskError(f"two of the tools {', '.join(names)} are named {tool.name!r}", fix="rename one of them")
            tools[tool.name] = _of_recipe(tool, run)
    for tool in actions:
        if tool.name in tools:
            message = f"the task has a tool called {tool.name!r}, but an action of its environment has the same name"
            raise TaskError(message, fix="rename the tool")
        tools[tool.name] = tool
    for tool in memory_tools(memory) if memory is not None else ():
        if tool.name in tools:
            fix = "rename the task's tool, or remove the recipe's memory"
            raise TaskError(f"the task has a tool called {tool.name!r}, but a tool of the recipe's memory has the same name", fix=fix)
        tools[tool.name] = _of_recipe(tool, run)
    return Toolbox(tools, instances, connections)


def _of_recipe(tool: Tool, run: ToolSource) -> Tool:
    """Returns the tool with the recipe's bounds and descriptions. Raises `UserError` if a description is for an argument that the tool does
    not have."""
    if tool.name not in run.bounds and tool.name not in run.words:
        return tool
    return RecipeTool(tool, run.bounds.get(tool.name, NO_BOUNDS), run.words.get(tool.name, ToolWording()))


def _of_server(name: str, run: ToolSource, connections: dict[str, ServerConnection], saved: Mapping[str, Any]) -> tuple[Tool, ...]:
    """Returns the tools to which a name that starts with `mcp:` refers. All tools of a server share one connection."""
    server, tool = find_tool(run, name)
    key = f"{MCP_PREFIX}{server.name}"
    connection = connections.setdefault(key, ServerConnection(server, restored=key in saved))
    return tuple(ServerTool(offer, connection) for offer in offered(server, tool))


def _loaded(name: str, instances: dict[str, ToolInstance], saved: Mapping[str, Any], task: Task | None) -> tuple[Tool, ...]:
    """Returns the tools to which one name in a task refers."""
    if name == RECORDED_TOOLS:
        return recorded_tools(task)
    if name in SHIPPED_TOOLS:
        return (SHIPPED_TOOLS[name],)
    if ":" not in name:
        raise TaskError(f"unknown tool {name!r}", fix=f"use {', '.join(SHIPPED_TOOLS)}, or a reference such as mytools:search")
    resolved = resolve(name)
    if inspect.isfunction(resolved) and is_tool(resolved):
        return (_with_task(typed_tool(resolved), task),)
    if isinstance(resolved, type) and (methods := tool_methods(resolved)):
        instances[name] = ToolInstance(resolved, saved.get(name), restored=name in saved)
        return tuple(dataclasses.replace(_with_task(method, task), owner=instances[name].open, repeats=False) for method in methods)
    owner = type(resolved.__self__) if inspect.ismethod(resolved) else type(resolved)
    shared = f"is an object of {owner.__name__}, which all episodes would share: refer to the class" if marked_functions(owner) else ""
    if problem := shared or definition_problem(resolved):
        fix = (
            "use a function with the decorator @tool, or an object with name, needs_sandbox (True or False), schema and an async "
            "__call__(arguments, sandbox, limits)"
        )
        raise PluginError(f"tool {name!r} {problem}", fix=fix)
    return (cast(Tool, resolved),)


def _with_task(tool: TypedTool, task: Task | None) -> TypedTool:
    """Returns the tool with the task's data added if the tool has a `TaskData` parameter; otherwise returns it unchanged."""
    if task is None or TaskData not in tool.injected.values():
        return tool
    return dataclasses.replace(tool, task=TaskData.of(task))


class RecordedTool:
    """One tool in a recording. The tool has no state: if several recorded calls have the same arguments, it returns the output of the first
    call."""

    needs_sandbox = False
    bounds, together = NO_BOUNDS, False

    def __init__(self, schema: Mapping[str, Any], calls: Sequence[RecordedCall]) -> None:
        self.schema = schema
        self.name = str(schema["function"]["name"])
        parameters = schema["function"].get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        self._declared = frozenset(properties if isinstance(properties, dict) else ())
        self._calls: dict[str, RecordedCall] = {}
        for call in calls:
            self._calls.setdefault(arguments_key(call.arguments), call)

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        call = self._calls.get(arguments_key(arguments))
        if call is not None:
            return ToolOutcome(output=call.output, ok=not call.failed)
        recorded = (
            "no call of it is recorded" if not self._calls else f"{len(self._calls)} calls are recorded, with the arguments {self._names()}"
        )
        return ToolOutcome(output=f"error: {self.name} has no recorded answer to this call; {recorded}", ok=False)

    def _names(self) -> str:
        """Returns the names of the recorded arguments. The arguments' values stay hidden, because the recorded agent may have passed the
        answer to the task."""
        names = dict.fromkeys(name[:_MAX_NAME] for call in self._calls.values() for name in call.arguments if name in self._declared)
        return ", ".join(list(names)[:_MAX_LISTED]) or "that its schema does not declare"


def recorded_tools(task: Task | None) -> tuple[RecordedTool, ...]:
    """Returns the tools of a task's recording; empty if `task` is None. Raises `TaskError` if the task has no valid recording."""
    if task is None:
        return ()
    recording = Recording.of(task)
    return tuple(
        RecordedTool(schema, [call for call in recording.calls if call.name == schema["function"]["name"]]) for schema in recording.tools
    )
