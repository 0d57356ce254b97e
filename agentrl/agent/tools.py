"""The tools an agent may call. A task names them; a name with a colon is a plug-in reference to a tool of the user's own."""

from __future__ import annotations

import abc
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agentrl.base import user_code
from agentrl.base.outages import Outage
from agentrl.protocols import Sandbox
from agentrl.records import ExecResult, Limits
from agentrl.records.fields import Record, Text

MAX_TEXT = 300_000
"""Characters of a program that a tool runs; a sandbox takes no command line much longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome(Record):
    """What a call did. `answer` set means: the agent has submitted this, the episode ends."""

    output: Text
    ok: bool
    answer: Text | None = None


class InvalidOutcome(Exception):
    """A tool gave something that is no outcome."""


OUTAGE = "mcp_outage"
"""`ToolFault.kind` of an outage that a working server reports, so that the call can be repeated."""


class ToolFault(Exception):
    """A failed call. The agent is shown `text`, and the episode's record has `kind`.

    With an `outage` it is an infrastructure fault instead, unless the arguments provoked it (`agentrl.agent.outage_blame`).
    """

    def __init__(self, kind: str, text: str, *, outage: Outage | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.outage = outage


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the calls of one tool may take, in place of the task's limits; None: as the task says, or without a bound."""

    timeout_s: float | None = None  # of one call
    output_chars: int | None = None  # of one call; head and tail are kept, the cut is marked
    calls: int | None = None  # in one episode, all its agents together

    def apply_to(self, limits: Limits) -> Limits:
        """The limits of a call: the task's, with these laid over them."""
        if self.timeout_s is None and self.output_chars is None:
            return limits
        timeout_s, chars = self.timeout_s or limits.tool_timeout_s, self.output_chars or limits.tool_output_chars
        return replace(limits, tool_timeout_s=timeout_s, tool_output_chars=chars, episode_output_chars=limits.all_output_chars)

    def overridden_by(self, other: Bounds) -> Bounds:
        """These, but for what `other` says."""
        return Bounds(
            timeout_s=self.timeout_s if other.timeout_s is None else other.timeout_s,
            output_chars=self.output_chars if other.output_chars is None else other.output_chars,
            calls=self.calls if other.calls is None else other.calls,
        )


NO_BOUNDS = Bounds()


def bounds_of(tool: Tool) -> Bounds:
    """A tool without `bounds` has none of its own."""
    found = getattr(tool, "bounds", NO_BOUNDS)
    return found if isinstance(found, Bounds) else NO_BOUNDS


def runs_together(tool: Tool) -> bool:
    """Whether calls of it may run at the same time as others of the same turn; a tool that does not say runs alone, as does one that
    uses the sandbox, where programs run one at a time."""
    return getattr(tool, "together", False) is True and not tool.needs_sandbox


class Tool(Protocol):
    """One tool. The object serves all episodes, so it keeps nothing from one call to the next (`agentrl.agent.toolbox` has a place).

    `needs_sandbox` False: `sandbox` is None in the call and no sandbox is opened for it. A tool may also have `bounds` (a `Bounds`), and
    `together` (True: its calls may run at the same time as others of their turn that say so).
    """

    name: str
    needs_sandbox: bool
    schema: Mapping[str, Any]  # OpenAI function schema, rendered by the chat template

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        """Bad arguments are best an outcome with ok=False that tells the agent what is expected.

        After an exception, an invalid outcome or none in time, the agent gets an error and its episode is scored. An outage
        (`agentrl.base.outages`) ends the attempt instead. `InfrastructureError`, `TaskError` and `PluginError` keep their meaning.
        """
        ...


def function_schema(name: str, description: str, parameter: str, meaning: str) -> Mapping[str, Any]:
    """The OpenAI function schema of a tool with one required string parameter."""
    properties = {parameter: {"type": "string", "description": meaning}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class ProgramTool(abc.ABC):
    """A tool with one argument, a text, which is run in the episode's sandbox."""

    needs_sandbox = True

    def __init__(self, name: str, description: str, argument: str, meaning: str) -> None:
        self.name = name
        self.schema = function_schema(name, description, argument, meaning)
        self._argument = argument

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        text = arguments.get(self._argument)
        if not isinstance(text, str):
            return ToolOutcome(output=f'error: {self.name} needs {{"{self._argument}": "..."}}', ok=False)
        if "\0" in text or len(text) > MAX_TEXT:
            return ToolOutcome(output=f"error: {self.name} takes up to {MAX_TEXT} characters without NUL", ok=False)
        assert sandbox is not None, "needs_sandbox is True"
        result = await self.run(sandbox, text, timeout_s=limits.tool_timeout_s, output_bytes=4 * limits.tool_output_chars)
        return ToolOutcome(output=render_result(result, limits), ok=result.ok)

    @abc.abstractmethod
    async def run(self, sandbox: Sandbox, text: str, *, timeout_s: float, output_bytes: int) -> ExecResult:
        """Runs the agent's text."""


class PythonTool(ProgramTool):
    """Runs code in the episode's sandbox; every call is a fresh interpreter in the same working directory."""

    def __init__(self) -> None:
        super().__init__("python", "Run Python code in the sandbox and return what it prints.", "code", "Python source")

    async def run(self, sandbox: Sandbox, text: str, *, timeout_s: float, output_bytes: int) -> ExecResult:
        return await sandbox.python(text, timeout_s=timeout_s, output_bytes=output_bytes)


class PythonSessionTool(ProgramTool):
    """Runs code in one interpreter for the whole episode, which keeps its variables and shows the value of a last expression."""

    def __init__(self) -> None:
        description = "Run Python code in a session that keeps its variables, and return what it prints and the value of its last line."
        super().__init__("python_session", description, "code", "Python source")

    async def run(self, sandbox: Sandbox, text: str, *, timeout_s: float, output_bytes: int) -> ExecResult:
        return await sandbox.python(text, timeout_s=timeout_s, output_bytes=output_bytes, session="agent")


class ShellTool(ProgramTool):
    """Runs a command line with `sh -c` in the sandbox's home; every call is a fresh shell, only files are kept."""

    def __init__(self) -> None:
        super().__init__("shell", "Run a shell command in the sandbox and return what it prints.", "command", "a command for sh")

    async def run(self, sandbox: Sandbox, text: str, *, timeout_s: float, output_bytes: int) -> ExecResult:
        return await sandbox.exec(["sh", "-c", text], timeout_s=timeout_s, output_bytes=output_bytes)


class SubmitTool:
    """Hands in the final answer and ends the episode."""

    name = "submit"
    needs_sandbox = False
    schema = function_schema("submit", "Submit the final answer.", "answer", "the answer")

    async def __call__(self, arguments: Mapping[str, Any], sandbox: Sandbox | None, limits: Limits) -> ToolOutcome:
        answer = arguments.get("answer")
        if not isinstance(answer, str | int | float) or isinstance(answer, bool):
            return ToolOutcome(output='error: submit needs {"answer": "..."}', ok=False)
        return ToolOutcome(output="submitted", ok=True, answer=str(answer)[: limits.tool_output_chars])


BUILT_IN: Mapping[str, Tool] = {tool.name: tool for tool in (PythonTool(), PythonSessionTool(), ShellTool(), SubmitTool())}


def definition_problem(tool: Any) -> str:
    """What is wrong with an object that is to be a tool; empty when nothing is."""
    if inspect.isfunction(tool):
        return "is a function without @tool from agentrl.agent above it"
    if isinstance(tool, type):
        return f"is a class: name an object, such as search = {tool.__name__}()"
    if not callable(tool):
        return "cannot be called"
    try:
        name, needs_sandbox, schema = tool.name, tool.needs_sandbox, tool.schema
    except Exception as error:
        return f"has no name, needs_sandbox or schema ({user_code.describe_error(error)})"
    if not isinstance(name, str) or not name.strip():
        return f"has the name {name!r}, which is no text"
    if not isinstance(needs_sandbox, bool):
        return f"has needs_sandbox={needs_sandbox!r}, which is neither True nor False"
    try:
        json.dumps(dict(schema), allow_nan=False, ensure_ascii=False).encode()
        called = schema["function"]["name"]
    except Exception as error:
        return f"has a schema that is no OpenAI function schema ({user_code.describe_error(error)})"
    return "" if called == name else f"is called {name!r}, and {called!r} in its schema"


def render_result(result: ExecResult, limits: Limits) -> str:
    """What the agent is shown of a program: its output, then how it ended if not well; head and tail within the limit."""
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


def clip(text: str, limit: int) -> str:
    """Text of at most about `limit` characters: its head and tail, with the cut marked."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters cut ...\n{text[-half:]}"
