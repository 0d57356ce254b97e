"""The tool protocol, the bounds on tool calls, and the built-in tools that run programs or submit an answer."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from agentrl.base import user_code
from agentrl.base.outages import Outage
from agentrl.base.user_code import clip
from agentrl.errors import UserError
from agentrl.protocols import Sandbox
from agentrl.records import ExecResult, Limits
from agentrl.records.fields import Record, Text

MAX_TEXT = 300_000
"""Maximum characters in a program that a tool runs. A sandbox does not accept command lines that are much longer than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome(Record):
    """The outcome of a call. An `answer` is the agent's final answer, and ends the episode."""

    output: Text
    ok: bool
    answer: Text | None = None
    reward: float | None = None  # reward of this action in the task's environment
    parts: Mapping[str, float] = field(default_factory=dict)


class InvalidOutcome(Exception):
    """A tool returned an invalid outcome."""


OUTAGE = "mcp_outage"
"""The value of `ToolFault.kind` for an outage that a working server reports. The call can be repeated."""


class ToolFault(Exception):
    """A failed call. The agent sees `text`, and the episode's record contains `kind`.

    If `outage` is set, the call is an infrastructure fault instead, unless the arguments provoked it (`agentrl.agent.outage_blame`).
    """

    def __init__(self, kind: str, text: str, *, outage: Outage | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.outage = outage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on one tool's calls, which replace the task's limits. None means the task's limit, or no bound if the task has no such
    limit."""

    timeout_s: float | None = None  # for one call
    output_chars: int | None = None  # for one call; longer output is cut to its head and tail, and the cut is marked
    calls: int | None = None  # in one episode, by all its agents

    def apply_to(self, limits: Limits) -> Limits:
        """Returns the task's limits with these bounds on one call applied. `calls` is enforced separately."""
        if self.timeout_s is None and self.output_chars is None:
            return limits
        timeout_s, chars = self.timeout_s or limits.tool_timeout_s, self.output_chars or limits.tool_output_chars
        return replace(limits, tool_timeout_s=timeout_s, tool_output_chars=chars, episode_output_chars=limits.all_output_chars)

    def overridden_by(self, other: Bounds) -> Bounds:
        """Returns these bounds, overridden by the bounds that `other` sets."""
        return Bounds(
            timeout_s=self.timeout_s if other.timeout_s is None else other.timeout_s,
            output_chars=self.output_chars if other.output_chars is None else other.output_chars,
            calls=self.calls if other.calls is None else other.calls,
        )


NO_BOUNDS = Bounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolWording:
    """Descriptions that replace the descriptions in a tool's schema. An empty string changes nothing."""

    description: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)  # argument -> its description


def reworded_schema(schema: Mapping[str, Any], wording: ToolWording) -> Mapping[str, Any]:
    """Returns a tool's function schema with these descriptions. Raises `UserError` if a description is for an argument that the tool does
    not have."""
    changed = copy.deepcopy(dict(schema))
    function = changed["function"]
    if wording.description:
        function["description"] = wording.description
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    known: dict[str, Any] = properties if isinstance(properties, dict) else {}
    for name, meaning in wording.arguments.items():
        if not isinstance(known.get(name), dict):
            raise UserError(
                f"tools.{function['name']}.arguments.{name}: the tool has no such argument",
                fix=f"use one of {', '.join(known)}, or remove it" if known else "remove it",
            )
        if meaning:
            known[name]["description"] = meaning
    return changed


def bounds_of(tool: Tool) -> Bounds:
    """Returns the bounds of a tool; `NO_BOUNDS` if it has no valid attribute `bounds`."""
    bounds = getattr(tool, "bounds", NO_BOUNDS)
    return bounds if isinstance(bounds, Bounds) else NO_BOUNDS


def runs_together(tool: Tool) -> bool:
    """Returns whether calls of a tool may run concurrently with other calls of the turn. Calls of tools that use the sandbox never run
    concurrently."""
    return getattr(tool, "together", False) is True and not tool.needs_sandbox


class Tool(Protocol):
    """One tool. A tool object serves all episodes and must not keep state (`agentrl.agent.toolbox` supports tools with state).

    If `needs_sandbox` is False, `sandbox` is None in the call and no sandbox is opened. Optional attributes: `bounds` (a `Bounds`),
    `together` (if True, its calls may run concurrently with other calls of the turn that also allow it), `repeats` (if False, a call is not
    repeated after an outage), and `opening_s` (additional seconds for each call).
    """

    name: str
    needs_sandbox: bool
    schema: Mapping[str, Any]  # OpenAI function schema, rendered by the chat template

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Runs a call. If the arguments are invalid, the outcome should have ok=False and a text that describes the expected arguments.

        If the call raises an exception, returns an invalid outcome or does not return in time, the agent receives an error and its episode
        is scored. An outage (`agentrl.base.outages`) ends the attempt instead. The exceptions `InfrastructureError`, `TaskError` and
        `PluginError` are raised to the caller.
        """


def function_schema(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    """Returns the OpenAI function schema of a tool with one required string parameter."""
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


@dataclass(slots=True, eq=False, kw_only=True)
class ProgramTool:
    """A tool that runs the text of its one argument in the episode's sandbox."""

    name: str
    schema: Mapping[str, Any]
    argument: str
    run: Callable[..., Awaitable[ExecResult]]  # called with (sandbox, text, timeout_s=, output_bytes=)

    needs_sandbox = True

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Runs the text. Returns an error if the text is missing, contains NUL or has more than `MAX_TEXT` characters."""
        text = arguments.get(self.argument)
        if not isinstance(text, str):
            return ToolOutcome(output=f'error: {self.name} needs {{"{self.argument}": "..."}}', ok=False)
        if "\0" in text or len(text) > MAX_TEXT:
            return ToolOutcome(output=f"error: {self.name} accepts up to {MAX_TEXT} characters without NUL", ok=False)
        assert sandbox is not None, "needs_sandbox is True"
        result = await self.run(sandbox, text, timeout_s=limits.tool_timeout_s, output_bytes=4 * limits.tool_output_chars)
        return ToolOutcome(output=render_result(result, limits), ok=result.ok)


PYTHON = ProgramTool(
    name="python",
    schema=function_schema("python", "Run Python code in the sandbox and return what it prints.", "code", "Python source"),
    argument="code",
    run=lambda sandbox, code, **bounds: sandbox.python(code, **bounds),
)
"""Runs code in a new interpreter for each call."""
PYTHON_SESSION = ProgramTool(
    name="python_session",
    schema=function_schema(
        "python_session",
        "Run Python code in a session that keeps its variables, and return what it prints and the value of its last line.",
        "code",
        "Python source",
    ),
    argument="code",
    run=lambda sandbox, code, **bounds: sandbox.python(code, **bounds, session="agent"),
)
"""Runs code in one interpreter per episode, which keeps its variables and shows the value of the last expression."""
SHELL = ProgramTool(
    name="shell",
    schema=function_schema("shell", "Run a shell command in the sandbox and return what it prints.", "command", "a command for sh"),
    argument="command",
    run=lambda sandbox, command, **bounds: sandbox.exec(["sh", "-c", command], **bounds),
)
"""Runs a command line in a new shell for each call."""


class SubmitTool:
    """Submits the final answer, cut to the limit on a tool's output, and ends the episode."""

    name = "submit"
    needs_sandbox = False
    schema = function_schema("submit", "Submit the final answer.", "answer", "the answer")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        answer = arguments.get("answer")
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            return ToolOutcome(output='error: submit needs {"answer": "..."}', ok=False)
        return ToolOutcome(output="submitted", ok=True, answer=str(answer)[: limits.tool_output_chars])


BUILT_IN: Mapping[str, Tool] = {tool.name: tool for tool in (PYTHON, PYTHON_SESSION, SHELL, SubmitTool())}


def definition_problem(tool: Any) -> str:
    """Returns why an object is not a valid tool; empty if it is."""
    if inspect.isfunction(tool):
        return "is a function without the decorator @tool from agentrl.agent"
    if isinstance(tool, type):
        return f"is a class: refer to an object, such as search = {tool.__name__}()"
    if not callable(tool):
        return "cannot be called"
    try:
        name, needs_sandbox, schema = tool.name, tool.needs_sandbox, tool.schema
    except Exception as error:
        return f"has no name, needs_sandbox or schema ({user_code.describe_error(error)})"
    if not isinstance(name, str) or not name.strip():
        return f"has the name {name!r}, but a name must be a non-empty string"
    if not isinstance(needs_sandbox, bool):
        return f"has needs_sandbox={needs_sandbox!r}, which is neither True nor False"
    try:
        json.dumps(dict(schema), allow_nan=False, ensure_ascii=False).encode()
        called = schema["function"]["name"]
    except Exception as error:
        return f"has an invalid OpenAI function schema ({user_code.describe_error(error)})"
    return "" if called == name else f"has the name {name!r}, but {called!r} in its schema"


def render_result(result: ExecResult, limits: Limits) -> str:
    """Returns the text that shows a program's result to the agent, cut to the limit: its output, notes about its session, and an error line
    if it was killed or failed without text on stderr."""
    text = result.stdout.rstrip("\n")
    if result.stderr.strip():
        text = f"{text}\n{result.stderr.rstrip()}".lstrip("\n")
    if result.reason == "timeout":
        text = f"{text}\nerror: timed out after {limits.tool_timeout_s:g} s".lstrip("\n")
    elif result.exit_code is None:
        text = f"{text}\nerror: killed ({result.reason or 'unknown'})".lstrip("\n")
    elif result.exit_code != 0 and not result.stderr.strip():
        text = f"{text}\nerror: exit code {result.exit_code}".lstrip("\n")
    if result.restarted:
        text = f"note: this is a new session; variables of earlier calls are gone\n{text}".rstrip("\n")
    if result.session_ended:
        text = f"{text}\nnote: the session has ended; the next call starts a new one".lstrip("\n")
    return clip(text, limits.tool_output_chars)
