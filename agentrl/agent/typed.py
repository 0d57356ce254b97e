"""Tools from typed functions: the schema comes from the signature and the docstring, and arguments are validated before the call."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_json

from agentrl.agent.arguments import argument_example
from agentrl.agent.tools import NO_BOUNDS, Bounds, InvalidOutcome, ToolOutcome
from agentrl.base import user_code
from agentrl.errors import PluginError
from agentrl.protocols import Sandbox
from agentrl.records import Limits, Task
from agentrl.records.fields import json_object
from agentrl.task.leaks import without_truth

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The part of a task that a tool may read."""

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """`Task.data` without the truth: without keys such as `answer`, `expected` and `target`, at any depth."""
    seed: int = 0
    """Seed for random choices of the tool. It is the same in all attempts at the task, so only the agent's actions differ."""

    @classmethod
    def of(cls, task: Task) -> TaskData:
        return cls(id=task.id, data=without_truth(task.data), seed=int(task.key[:8], 16))


NO_TASK = TaskData(id="")

_MARK, _BOUNDS, _TOGETHER = "__agentrl_tool__", "__agentrl_bounds__", "__agentrl_together__"
_GIVEN = (Sandbox, Limits, TaskData)  # the episode sets parameters of these types; the agent does not see them
_TOLD_ERRORS = 5  # of those that one call's arguments may have
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields):[ \t]*", re.MULTILINE)
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)")


@overload
def tool(function: F) -> F: ...


@overload
def tool(
    *, timeout_s: float | None = None, output_chars: int | None = None, calls: int | None = None, together: bool = False
) -> Callable[[F], F]: ...


def tool(
    function: Any = None,
    *,
    timeout_s: float | None = None,
    output_chars: int | None = None,
    calls: int | None = None,
    together: bool = False,
) -> Any:
    """Marks a function as a tool of its name; it stays the function it is.

        @tool
        async def search(query: str, limit: int = 5) -> str:
            '''Search the notes.

            Args:
                query: words that a note must have
            '''
            return "\\n".join(found(query)[:limit])

    A task names it by reference: `mytools:search`. What the agent is told comes from the function: parameters and their types, the
    docstring before its sections, and the entries of `Args`. Types are those that pydantic can write as JSON schema: str, int, float,
    bool, Literal, Enum, list, dict, Optional, dataclasses. A parameter annotated `Sandbox` gets the episode's sandbox, one annotated
    `TaskData` the readable part of its task, one annotated `Limits` its limits. It gives the text that the agent is shown, a `ToolOutcome`,
    or a value that is shown as JSON. A function that is not `async` runs in a thread.

    With options, `@tool(calls=3, timeout_s=60.0, output_chars=500)`, they take the place of the task's limits for this tool: its calls in
    an episode, the seconds of one, and the characters shown of one. `together=True` says that its calls may run at the same time as
    others of the same turn whose tools say so too; results keep the order of the calls.

    On methods, its class is named, `mytools:Memory`, and is a set of tools that keep state for one episode (`agentrl.agent.toolbox`).
    """
    if function is None:
        bounds = _bounds(timeout_s, output_chars, calls)

        def marked(one: F) -> F:
            tool(one)
            setattr(one, _BOUNDS, bounds)
            setattr(one, _TOGETHER, together)
            return one

        return marked
    if not inspect.isfunction(function):
        raise PluginError(f"@tool marks functions and methods, not a {type(function).__name__}", fix="put it right above def")
    setattr(function, _MARK, True)
    return function


def _bounds(timeout_s: float | None, output_chars: int | None, calls: int | None) -> Bounds:
    for name, value in {"timeout_s": timeout_s, "output_chars": output_chars, "calls": calls}.items():
        if value is not None and not value > 0:
            raise PluginError(f"@tool({name}={value!r}): it must be more than 0", fix=f"leave {name} out for the task's own limit")
    return Bounds(timeout_s=timeout_s, output_chars=output_chars, calls=calls)


def is_tool(thing: Any) -> bool:
    """Whether it is a function, or a bound method, that `tool` has marked."""
    return (inspect.isfunction(thing) or inspect.ismethod(thing)) and getattr(thing, _MARK, False) is True


@dataclass(slots=True, eq=False)
class TypedTool:
    """What a marked function is to an agent. `call` runs it, or the method of an object that it was on the object's class."""

    name: str
    schema: Mapping[str, Any]
    needs_sandbox: bool
    function: Callable[..., Any]
    arguments: type[BaseModel]
    names: Mapping[str, str]  # field of `arguments` -> parameter
    given: Mapping[str, type]  # parameter -> Sandbox, Limits or TaskData
    bounds: Bounds = NO_BOUNDS
    together: bool = False
    task: TaskData = NO_TASK

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        return await self.call(self.function, arguments, sandbox, limits)

    async def call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits
    ) -> ToolOutcome:
        """Calls `function` with what the arguments are as Python objects. Wrong ones are answered, and it is not called."""
        try:
            values = self.arguments.model_validate(json_object(arguments))
        except ValueError as error:
            told = _told(error) if isinstance(error, ValidationError) else user_code.error_text(error, 300)
            return ToolOutcome(output=f"error: {self.name}: {told}{argument_example(self.schema)}", ok=False)
        taken = {parameter: getattr(values, field) for field, parameter in self.names.items()}
        theirs: dict[type, Any] = {Sandbox: sandbox, Limits: limits, TaskData: self.task}
        taken |= {parameter: theirs[kind] for parameter, kind in self.given.items()}
        return _outcome(await run(lambda: function(**taken), function, what=f"tool {self.name}"))


async def run(call: Callable[[], Any], function: Callable[..., Any], *, what: str) -> Any:
    """What `call()` gives, which calls `function`: awaited where that is async, in a thread where it is not."""
    given = call() if inspect.iscoroutinefunction(function) else await user_code.run_in_thread(call, what=what)
    return await given if inspect.isawaitable(given) else given  # also of a plain function around an async one


def _outcome(value: Any) -> ToolOutcome:
    if isinstance(value, ToolOutcome):
        return value
    if isinstance(value, str):
        return ToolOutcome(output=value, ok=True)
    try:
        return ToolOutcome(output="" if value is None else to_json(value).decode(), ok=True)
    except ValueError:
        kind = user_code.printable(type(value).__name__, 64)
        raise InvalidOutcome(f"it gave {kind}, which is neither text, a ToolOutcome, nor a value of JSON") from None


def _told(error: ValidationError) -> str:
    """What is wrong with the arguments, for the agent: "query: Field required; limit: Input should be a valid integer"."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{'.'.join(str(part)[:40] for part in one['loc'][:8])}: {one['msg'][:200]}" for one in found[:_TOLD_ERRORS]]
    if len(found) > len(told):
        told.append(f"and {len(found) - len(told)} more")
    return user_code.printable("; ".join(told), 1500)


@lru_cache(maxsize=1024)
def typed_tool(function: Callable[..., Any], *, method: bool = False) -> TypedTool:
    """A marked function as a tool. Raises `PluginError` that says what a schema cannot be made of.

    Args:
        method: its first parameter is the object.
    """
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise _refused(name, f"has annotations that do not resolve ({user_code.describe_error(error)})", "import what they name") from None
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    given: dict[str, type] = {}
    description, told = _docstring(function, {one.name for one in parameters})
    for number, one in enumerate(parameters):
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise _refused(
                name, f"has the parameter {str(one).partition(':')[0]!r}", "name each parameter: the agent gives arguments by name"
            )
        if one.name not in hints:
            raise _refused(name, f"has the parameter {one.name!r} without a type", f"annotate it, as in {one.name}: str")
        if hints[one.name] in _GIVEN:
            given[one.name] = hints[one.name]
            continue
        options = {"description": told[one.name]} if one.name in told else {}
        default = ... if one.default is one.empty else one.default
        names[f"p{number}"] = one.name
        fields[f"p{number}"] = (hints[one.name], Field(default, alias=one.name, **options))  # type: ignore[call-overload]
    if Sandbox in given.values() and not inspect.iscoroutinefunction(function):
        raise _refused(name, "takes the sandbox and is not async", f"write async def {name}(...), and await what the sandbox does")
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
        schema = _schema(name, description, arguments)
    except Exception as error:  # pydantic's many, and those of a user's own types
        reason = user_code.describe_error(error)
        raise _refused(name, f"has parameters that JSON cannot hold ({reason})", "use str, int, float, bool, list, dict, ...") from None
    if getattr(function, _TOGETHER, False) and Sandbox in given.values():
        raise _refused(name, "says together=True and takes the sandbox, where programs run one at a time", "leave together out")
    bounds, together = getattr(function, _BOUNDS, NO_BOUNDS), getattr(function, _TOGETHER, False)
    return TypedTool(name, schema, Sandbox in given.values(), function, arguments, names, given, bounds, together)


def _schema(name: str, description: str, arguments: type[BaseModel]) -> Mapping[str, Any]:
    made = _untitled(arguments.model_json_schema())
    parameters = {"type": "object", "properties": made.get("properties", {}), "required": made.get("required", [])}
    if "$defs" in made:
        parameters["$defs"] = made["$defs"]
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    json.dumps(schema, allow_nan=False).encode()
    return schema


def _untitled(schema: Any, *, names: bool = False) -> Any:
    """A JSON schema without pydantic's titles, which repeat names and cost tokens. `names`: its keys are names, not keywords."""
    if isinstance(schema, list):
        return [_untitled(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: one for key, one in schema.items() if names or key != "title"}
    return {
        key: one if key in ("default", "enum", "const", "examples") and not names else _untitled(one, names=key in ("properties", "$defs"))
        for key, one in kept.items()
    }


def _docstring(function: Callable[..., Any], parameters: set[str]) -> tuple[str, dict[str, str]]:
    """The description, and parameter -> what its entry in `Args` says."""
    name, text = function.__name__, inspect.getdoc(function) or ""
    parts = _SECTION.split(text)
    description = re.sub(r"(?<!\n)\n(?!\n)", " ", parts[0].strip())
    if not description:
        raise _refused(name, "has no docstring", "say in it what the tool does: the agent reads it")
    told: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments"):
            told = _entries(name, body, parameters)
    return description, told


def _entries(name: str, body: str, parameters: set[str]) -> dict[str, str]:
    told: dict[str, str] = {}
    indent, current = None, ""
    for line in filter(str.strip, body.splitlines()):
        entry, depth = _ENTRY.fullmatch(line.strip()), len(line) - len(line.lstrip())
        if entry and (entry[1] in parameters or indent is None or depth <= indent):
            current, indent = entry[1], depth if indent is None else indent
            if current not in parameters:
                raise _refused(name, f"has no parameter {current!r}, which its docstring tells of", "correct the docstring")
            told[current] = entry[2].strip()
        elif current:
            told[current] = f"{told[current]} {line.strip()}".strip()
    return {parameter: text for parameter, text in told.items() if text}


def _refused(name: str, problem: str, fix: str) -> PluginError:
    return PluginError(f"the tool {name} {problem}", fix=fix)
