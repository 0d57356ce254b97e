"""Builds tools from typed functions: the schema is derived from the signature and the docstring, and arguments are validated before the
call."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable, Mapping
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
    """`Task.data` without the keys that contain the truth, such as `answer`, `expected` and `target`, at any depth."""
    seed: int = 0
    """Seed for the tool's random choices. It is the same in all attempts at the task, so only the agent's actions differ."""

    @classmethod
    def of(cls, task: Task) -> TaskData:
        """Returns the readable part of a task."""
        return cls(id=task.id, data=without_truth(task.data), seed=int(task.key[:8], 16))


NO_TASK = TaskData(id="")

_MARK, _BOUNDS, _TOGETHER = "__agentrl_tool__", "__agentrl_bounds__", "__agentrl_together__"
_INJECTED = (Sandbox, Limits, TaskData)  # the episode sets parameters of these types; the agent does not see them
_MAX_ERRORS = 5  # maximum errors shown for one call
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
    """Marks a function as a tool. The function itself stays unchanged.

        @tool
        async def search(query: str, limit: int = 5) -> str:
            '''Search the notes.

            Args:
                query: text that a note must contain
            '''
            return "\\n".join(matches(query)[:limit])

    A task refers to this tool as `mytools:search`. The agent sees the parameters with their types, the docstring up to its sections, and
    the entries of `Args`. Any type that pydantic can write as a JSON schema is allowed. A parameter annotated `Sandbox` receives the
    episode's sandbox, a parameter annotated `TaskData` receives the readable part of the episode's task, and a parameter annotated `Limits`
    receives the task's limits. If a function is not `async`, it runs in a thread.

    The function may return a string, which is shown to the agent unchanged; None, which is shown as an empty string; a `ToolOutcome`; or
    any other value that pydantic can write as JSON, which is shown as JSON.

    If the decorator marks methods, a task refers to their class, such as `mytools:Memory`. The tools of the class share one object per
    episode (`agentrl.agent.toolbox`).

    Args:
        timeout_s: maximum seconds for one call, instead of the task's limit.
        output_chars: maximum characters in one call's output, instead of the task's limit.
        calls: maximum number of calls in one episode.
        together: whether calls may run concurrently with other calls of the turn whose tools also allow it. Results keep the order of the
            calls.

    Raises `PluginError` if a bound is not more than 0, or if the decorated object is not a function.
    """
    if function is None:
        bounds = _bounds(timeout_s, output_chars, calls)

        def mark(marked: F) -> F:
            tool(marked)
            setattr(marked, _BOUNDS, bounds)
            setattr(marked, _TOGETHER, together)
            return marked

        return mark
    if not inspect.isfunction(function):
        raise PluginError(f"@tool marks functions and methods, not a {type(function).__name__}", fix="put it directly above def")
    setattr(function, _MARK, True)
    return function


def _bounds(timeout_s: float | None, output_chars: int | None, calls: int | None) -> Bounds:
    for name, value in {"timeout_s": timeout_s, "output_chars": output_chars, "calls": calls}.items():
        if value is not None and not value > 0:
            raise PluginError(f"@tool({name}={value!r}): the value must be more than 0", fix=f"omit {name} to use the task's limit")
    return Bounds(timeout_s=timeout_s, output_chars=output_chars, calls=calls)


def is_tool(value: Any) -> bool:
    """Returns whether `value` is a function or bound method that `tool` has marked."""
    return (inspect.isfunction(value) or inspect.ismethod(value)) and getattr(value, _MARK, False) is True


@dataclass(slots=True, eq=False)
class TypedTool:
    """A marked function as a tool."""

    name: str
    schema: Mapping[str, Any]
    needs_sandbox: bool
    function: Callable[..., Any]
    arguments: type[BaseModel]
    names: Mapping[str, str]  # field of `arguments` -> parameter
    injected: Mapping[str, type]  # parameter -> Sandbox, Limits or TaskData
    bounds: Bounds = NO_BOUNDS
    together: bool = False
    task: TaskData = NO_TASK
    owner: Callable[[], Awaitable[Any]] | None = None  # returns the object whose method the tool is
    repeats: bool = True  # whether a call may be repeated after an outage

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Validates the arguments and calls the function. Returns an error if the arguments are invalid. Raises `InvalidOutcome` if JSON
        cannot represent the result, and the exceptions of the function."""
        function = self.function if self.owner is None else getattr(await self.owner(), self.name)
        try:
            validated = self.arguments.model_validate(json_object(arguments))
        except ValueError as error:
            problem = _error_text(error) if isinstance(error, ValidationError) else user_code.error_text(error, 300)
            return ToolOutcome(output=f"error: {self.name}: {problem}{argument_example(self.schema)}", ok=False)
        values = {parameter: getattr(validated, field) for field, parameter in self.names.items()}
        available: dict[type, Any] = {Sandbox: sandbox, Limits: limits, TaskData: self.task}
        values |= {parameter: available[kind] for parameter, kind in self.injected.items()}
        return _outcome(await run(lambda: function(**values), function, what=f"tool {self.name}"))


async def run(call: Callable[[], Any], function: Callable[..., Any], *, what: str) -> Any:
    """Returns the result of `call()`, which calls `function`. The call is awaited if `function` is async; otherwise it runs in a thread."""
    result = call() if inspect.iscoroutinefunction(function) else await user_code.run_in_thread(call, what=what)
    return await result if inspect.isawaitable(result) else result  # a plain function may return an awaitable


def _outcome(value: Any) -> ToolOutcome:
    if isinstance(value, ToolOutcome):
        return value
    if isinstance(value, str):
        return ToolOutcome(output=value, ok=True)
    try:
        return ToolOutcome(output="" if value is None else to_json(value).decode(), ok=True)
    except ValueError:
        kind = user_code.printable(type(value).__name__, 64)
        raise InvalidOutcome(f"it returned {kind}, which is neither text, a ToolOutcome, nor JSON data") from None


def _error_text(error: ValidationError) -> str:
    """Returns the errors in the arguments, such as "query: Field required; limit: Input should be a valid integer"."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{'.'.join(str(part)[:40] for part in entry['loc'][:8])}: {entry['msg'][:200]}" for entry in errors[:_MAX_ERRORS]]
    more = [f"and {len(errors) - _MAX_ERRORS} more"] if len(errors) > _MAX_ERRORS else []
    return user_code.printable("; ".join(texts + more), 1500)


@lru_cache(maxsize=1024)
def typed_tool(function: Callable[..., Any], *, method: bool = False) -> TypedTool:
    """Returns a marked function as a tool. Raises `PluginError` if its docstring is missing or invalid, a parameter has no usable type, or
    it takes the sandbox although it is not async or allows concurrency.

    Args:
        method: whether the first parameter is `self`.
    """
    name = function.__name__
    parameters = list(inspect.signature(function).parameters.values())[1 if method else 0 :]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise _invalid(
            name, f"has annotations that do not resolve ({user_code.describe_error(error)})", "import the names that the annotations use"
        ) from None
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    injected: dict[str, type] = {}
    description, meanings = _docstring(function, {parameter.name for parameter in parameters})
    for number, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = str(parameter).partition(":")[0]
            raise _invalid(name, f"has the parameter {shown!r}", "declare each parameter by name: the agent passes arguments by name")
        key = parameter.name
        if key not in hints:
            raise _invalid(name, f"has the parameter {key!r} without a type", f"annotate it, as in {key}: str")
        if hints[key] in _INJECTED:
            injected[key] = hints[key]
            continue
        options = {"description": meanings[key]} if key in meanings else {}
        default = ... if parameter.default is parameter.empty else parameter.default
        names[f"p{number}"] = key
        fields[f"p{number}"] = (hints[key], Field(default, alias=key, **options))  # type: ignore[call-overload]
    needs_sandbox, together = Sandbox in injected.values(), getattr(function, _TOGETHER, False)
    if needs_sandbox and not inspect.iscoroutinefunction(function):
        raise _invalid(name, "takes the sandbox but is not async", f"write async def {name}(...), and await the sandbox's methods")
    if needs_sandbox and together:
        raise _invalid(name, "has together=True and takes the sandbox, where programs run one at a time", "omit together")
    try:
        arguments = create_model(name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)
        schema = _schema(name, description, arguments)
    except Exception as error:  # pydantic raises many exception types, and user-supplied types may raise any
        reason = user_code.describe_error(error)
        raise _invalid(name, f"has parameters that JSON cannot represent ({reason})", "use str, int, float, bool, list, dict") from None
    return TypedTool(name, schema, needs_sandbox, function, arguments, names, injected, getattr(function, _BOUNDS, NO_BOUNDS), together)


def _schema(name: str, description: str, arguments: type[BaseModel]) -> Mapping[str, Any]:
    generated = _untitled(arguments.model_json_schema())
    parameters = {"type": "object", "properties": generated.get("properties", {}), "required": generated.get("required", [])}
    if "$defs" in generated:
        parameters["$defs"] = generated["$defs"]
    schema = {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
    json.dumps(schema, allow_nan=False).encode()
    return schema


def _untitled(schema: Any, *, names: bool = False) -> Any:
    """Returns a JSON schema without pydantic's titles, which repeat names and cost tokens. `names`: whether the keys of `schema` are names
    of properties or definitions, not JSON Schema keywords."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    data = () if names else ("default", "enum", "const", "examples")
    return {
        key: item if key in data else _untitled(item, names=not names and key in ("properties", "$defs"))
        for key, item in schema.items()
        if names or key != "title"
    }


def _docstring(function: Callable[..., Any], parameters: set[str]) -> tuple[str, dict[str, str]]:
    """Returns the description, and a mapping parameter -> its entry in `Args`."""
    name, text = function.__name__, inspect.getdoc(function) or ""
    parts = _SECTION.split(text)
    description = re.sub(r"(?<!\n)\n(?!\n)", " ", parts[0].strip())
    if not description:
        raise _invalid(name, "has no docstring", "add a docstring that describes the tool to the agent")
    meanings: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments"):
            meanings = _entries(name, body, parameters)
    return description, meanings


def _entries(name: str, body: str, parameters: set[str]) -> dict[str, str]:
    entries: dict[str, str] = {}
    indent, current = None, ""
    for line in filter(str.strip, body.splitlines()):
        entry, depth = _ENTRY.fullmatch(line.strip()), len(line) - len(line.lstrip())
        if entry and (entry[1] in parameters or indent is None or depth <= indent):
            current, indent = entry[1], depth if indent is None else indent
            if current not in parameters:
                raise _invalid(name, f"has no parameter {current!r}, which its docstring describes", "correct the docstring")
            entries[current] = entry[2].strip()
        elif current:
            entries[current] = f"{entries[current]} {line.strip()}".strip()
    return {parameter: text for parameter, text in entries.items() if text}


def _invalid(name: str, problem: str, fix: str) -> PluginError:
    return PluginError(f"the tool {name} {problem}", fix=fix)
