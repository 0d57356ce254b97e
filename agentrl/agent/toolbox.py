"""The tools of one episode: those that all episodes share, and those that keep a state, which is this episode's alone."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import lru_cache
from typing import Any, cast

from pydantic import TypeAdapter

from agentrl.agent.mcp.servers import MCP_PREFIX, NO_TOOLS, ServerConnection, ServerTool, named, offered
from agentrl.agent.memory import memory_tools
from agentrl.agent.recorded import recorded_tools
from agentrl.agent.shipped import SHIPPED_TOOLS
from agentrl.agent.tools import NO_BOUNDS, Bounds, Tool, ToolOutcome, bounds_of, definition_problem, runs_together
from agentrl.agent.typed import TaskData, TypedTool, is_tool, run, typed_tool
from agentrl.agent.wording import ToolWording, reworded_schema
from agentrl.base import user_code
from agentrl.errors import PluginError, TaskError
from agentrl.plugins.references import resolve
from agentrl.protocols import EpisodeMemory, Sandbox, ToolSource
from agentrl.records import Limits, Task
from agentrl.records.fields import json_value
from agentrl.task.recorded_tools import RECORDED_TOOLS as RECORDED


class Toolbox(Mapping[str, Tool]):
    """Tools by the name the agent calls them. Nothing is opened before it is called; who has one closes it."""

    def __init__(self, tools: Mapping[str, Tool], kept: Mapping[str, ToolInstance], connections: Mapping[str, ServerConnection]) -> None:
        self._tools = tools
        self._connections = connections  # mcp:SERVER -> this episode's connection to it
        self.instances = kept  # reference -> the object of this episode that its tools are methods of

    def __getitem__(self, name: str) -> Tool:
        return self._tools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    async def state(self, *, timeout_s: float) -> dict[str, Any]:
        """Reference -> what its tools keep, as JSON; without those that were never called.

        Raises `ValueError` for a state that cannot be taken within `timeout_s`, or is no JSON.
        """
        every: dict[str, ToolInstance | ServerConnection] = {**self.instances, **self._connections}
        return {reference: await one.state(timeout_s=timeout_s) for reference, one in every.items() if one.used}

    async def close(self, *, timeout_s: float) -> None:
        """Closes what was opened, all of it, whatever one of them does; that is logged."""
        async with AsyncExitStack() as stack:
            every: list[ToolInstance | ServerConnection] = [*self.instances.values(), *self._connections.values()]
            for one in every:
                stack.push_async_callback(one.close, timeout_s=timeout_s)


class ToolInstance:
    """An object of a class with `tool` methods, in one episode: opened when first called, with the state that was saved if there is one.

    A dataclass's state is its fields. Another class says what it is: `state()` gives JSON, `restore(state)` takes it on a new
    object. `close()`, where there is one, is called at the end of the episode. All three may be async.
    """

    def __init__(self, kind: Any, saved: Any = None, *, restored: bool = False) -> None:
        self.kind = kind
        self._saved = saved
        self._restored = restored  # whether `_saved` is a state that an episode goes on from
        self._object: Any = None
        self._opening = asyncio.Lock()

    @property
    def used(self) -> bool:
        return self._restored or self._object is not None

    async def open(self) -> Any:
        async with self._opening:  # calls that run together share one object
            if self._object is None:
                self._object = await (self._reopened() if self._restored else self._new())
            return self._object

    async def _new(self) -> Any:
        return await user_code.run_in_thread(self.kind, what=f"opening {self.kind.__name__}")

    async def _reopened(self) -> Any:
        what = f"restoring {self.kind.__name__}"
        if not hasattr(self.kind, "restore"):
            return _fields_of(self.kind).validate_python(json_value(self._saved))
        made = await self._new()
        await run(lambda: made.restore(json_value(self._saved)), made.restore, what=what)
        return made

    async def state(self, *, timeout_s: float) -> Any:
        """Raises `ValueError` when there is none to be had."""
        if self._object is None:
            return self._saved
        what, since = f"the state of {self.kind.__name__}", user_code.cancellation_count()
        try:
            return json_value(await user_code.call_user_code(self._state, what=what, timeout_s=timeout_s))
        except BaseException as error:
            user_code.reraise_if_fatal(error, since)
            user_code.log_unexpected(what, error)
            raise ValueError(f"{what} cannot be taken: {user_code.describe_error(error)}") from error

    async def _state(self) -> Any:
        if hasattr(self.kind, "state"):
            return await run(self._object.state, self._object.state, what=f"the state of {self.kind.__name__}")
        return _fields_of(self.kind).dump_python(self._object, mode="json", warnings="error")

    async def close(self, *, timeout_s: float) -> None:
        made, self._object = self._object, None
        if not hasattr(made, "close"):
            return
        what, since = f"closing {self.kind.__name__}", user_code.cancellation_count()
        try:
            await user_code.call_user_code(lambda: run(made.close, made.close, what=what), what=what, timeout_s=timeout_s)
        except BaseException as error:
            user_code.reraise_if_fatal(error, since)
            user_code.log_unexpected(what, error)


class InstanceTool:
    """One `tool` method of a class, on the object that this episode has of it."""

    repeats = False  # after an outage, which may have changed the object

    def __init__(self, method: TypedTool, kept: ToolInstance) -> None:
        self.name, self.schema, self.needs_sandbox = method.name, method.schema, method.needs_sandbox
        self.bounds, self.together = method.bounds, method.together
        self._method = method
        self._kept = kept

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        function: Callable[..., Any] = getattr(await self._kept.open(), self.name)
        return await self._method.call(function, arguments, sandbox, limits)


class RecipeTool:
    """A tool with bounds and words that the recipe lays over its own."""

    def __init__(self, tool: Tool, bounds: Bounds, words: ToolWording) -> None:
        self.name, self.schema, self.needs_sandbox = tool.name, reworded_schema(tool.schema, words), tool.needs_sandbox
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
) -> Toolbox:
    """The tools of one episode. Tools that keep state have a new one in each toolbox, as have MCP servers a connection.

    Args:
        saved: what `Toolbox.state` gave, of the episode that this one goes on from.
        run: the MCP servers, bounds and words of the recipe (`LiveEpisode.tools`); None: there are none.
        memory: of the episode (`LiveEpisode.memory`), whose tools come after the others; None: it has none.
        task: of the episode, for tools that take a `TaskData`; None: what they give is not looked at.

    Raises:
        TaskError: a name is neither built in, nor a server of the recipe's, nor a reference, or two tools have one name.
        PluginError: a reference does not resolve, or to something that is no tool.
    """
    tools: dict[str, Tool] = {}
    kept: dict[str, ToolInstance] = {}
    connections: dict[str, ServerConnection] = {}
    run, saved = run or NO_TOOLS, saved or {}
    for name in names:
        for tool in _of_server(name, run, connections, saved) if name.startswith(MCP_PREFIX) else _loaded(name, kept, saved, task):
            if tool.name in tools:
                raise TaskError(f"two of the tools {', '.join(names)} are called {tool.name!r}", fix="give each tool a name of its own")
            tools[tool.name] = _of_recipe(tool, run)
    for tool in memory_tools(memory) if memory is not None else ():
        if tool.name in tools:
            fix = "give the task's tool another name, or leave the recipe's memory out"
            raise TaskError(f"a tool of the task is called {tool.name!r}, as is one of the recipe's memory", fix=fix)
        tools[tool.name] = _of_recipe(tool, run)
    return Toolbox(tools, kept, connections)


def _of_recipe(tool: Tool, run: ToolSource) -> Tool:
    """A tool as the recipe has it. Raises `UserError` for words on an argument that it does not take."""
    if tool.name not in run.bounds and tool.name not in run.words:
        return tool
    return RecipeTool(tool, run.bounds.get(tool.name, NO_BOUNDS), run.words.get(tool.name, ToolWording()))


def _of_server(name: str, run: ToolSource, connections: dict[str, ServerConnection], saved: Mapping[str, Any]) -> tuple[Tool, ...]:
    """The tools that a name stands for which begins with `mcp:`, of one connection."""
    server, one = named(run, name)
    key = f"{MCP_PREFIX}{server.name}"
    connection = connections.setdefault(key, ServerConnection(server, restored=key in saved))
    return tuple(ServerTool(offer, connection) for offer in offered(server, one))


def _loaded(name: str, kept: dict[str, ToolInstance], saved: Mapping[str, Any], task: Task | None) -> tuple[Tool, ...]:
    """The tools that one name of a task stands for."""
    if name == RECORDED:
        return recorded_tools(task)
    if name in SHIPPED_TOOLS:
        return (SHIPPED_TOOLS[name],)
    if ":" not in name:
        raise TaskError(f"unknown tool {name!r}", fix=f"use {', '.join(SHIPPED_TOOLS)}, or a reference such as mytools:search")
    found = resolve(name)
    if inspect.isfunction(found) and is_tool(found):
        return (_knowing(typed_tool(found), task),)
    if isinstance(found, type) and (methods := _methods(found)):
        kept[name] = ToolInstance(found, saved.get(name), restored=name in saved)
        return tuple(InstanceTool(_knowing(method, task), kept[name]) for method in methods)
    if problem := _shared(found) or definition_problem(found):
        fix = (
            "a tool is a function under @tool, or an object with name, needs_sandbox (True or False), schema and an async "
            "__call__(arguments, sandbox, limits)"
        )
        raise PluginError(f"tool {name!r} {problem}", fix=fix)
    return (cast(Tool, found),)


def _knowing(one: TypedTool, task: Task | None) -> TypedTool:
    """The tool with the task's data, if it has a parameter for it."""
    if task is None or TaskData not in one.given.values():
        return one
    return dataclasses.replace(one, task=TaskData.of(task))


def _shared(found: Any) -> str:
    """Whether it would hand what one episode keeps to the next."""
    owner = type(found.__self__) if inspect.ismethod(found) else type(found)
    if not _marked(owner):
        return ""
    return f"is one object of {owner.__name__}, which all episodes would share: name the class"


def _marked(kind: Any) -> list[Any]:
    return [one for name in dir(kind) if is_tool(one := _underneath(inspect.getattr_static(kind, name, None)))]


def _underneath(attribute: Any) -> Any:
    return attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute


@lru_cache(maxsize=1024)
def _methods(kind: Any) -> tuple[TypedTool, ...]:
    """The tools of a class that keeps state. Raises `PluginError` when its state cannot be captured, or it cannot be opened."""
    if not (marked := _marked(kind)):
        return ()
    if [parameter for parameter in inspect.signature(kind).parameters.values() if _required(parameter)]:
        raise PluginError(f"the tools of {kind.__name__} cannot be opened: it takes arguments", fix="give each a default")
    own = [name for name in ("state", "restore") if callable(getattr(kind, name, None))]
    if len(own) == 1 or not (own or dataclasses.is_dataclass(kind)):
        missing = "restore()" if own == ["state"] else "state()" if own else "state() and restore()"
        raise PluginError(
            f"the tools of {kind.__name__} keep a state that cannot be captured: it has no {missing}",
            fix="make it a dataclass of JSON data, or have state() give JSON and restore(state) take it",
        )
    if not own:
        _fields_of(kind)
    for one in marked:
        if not inspect.isfunction(inspect.getattr_static(kind, one.__name__, None)):
            raise PluginError(f"the tool {one.__name__} of {kind.__name__} is no plain method", fix="give it self, and @tool alone")
    methods = tuple(typed_tool(one, method=True) for one in marked)
    return tuple(sorted(methods, key=lambda one: one.function.__code__.co_firstlineno))


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


@lru_cache(maxsize=1024)
def _fields_of(kind: Any) -> TypeAdapter[Any]:
    """What reads and writes a dataclass as JSON."""
    try:
        return TypeAdapter(kind)
    except Exception as error:
        reason = user_code.describe_error(error)
        raise PluginError(
            f"the tools of {kind.__name__} keep a state that JSON cannot hold ({reason})", fix="or give it state() and restore()"
        ) from None
