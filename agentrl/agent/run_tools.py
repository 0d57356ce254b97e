"""The recipe's tools in a run. Each MCP server is started once, and the tools that it lists are pinned for the run."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.agent import ChatFormat, load_tools
from agentrl.agent.mcp.messages import ServerError
from agentrl.agent.mcp.servers import MCP_PREFIX, START_TIMEOUT_S, RunTools, Server, ServerConnection
from agentrl.agent.mcp.transports import Unanswered
from agentrl.agent.tools import NO_BOUNDS, Bounds, ToolWording
from agentrl.base.files import write_atomically
from agentrl.base.liveness import AnswerLiveness
from agentrl.base.tool_list import InvalidMessage, ListedTool, excluded_tools, tool_difference, usable_tools
from agentrl.config.recipe import DelegationConfig
from agentrl.config.tools import MCPConfig, ToolConfig
from agentrl.errors import UserError
from agentrl.protocols import EpisodeMemory, SandboxBackend, TaskFamily
from agentrl.records import Split, Task
from agentrl.task.outputs import sandbox_of

log = logging.getLogger(__name__)

MCP_FILE = "mcp.json"
MAX_TASKS = 32
"""Maximum number of training tasks that are searched for tasks that use the servers."""
_CLOSE_S = 5.0
_MOST_REASONS = 8  # maximum reasons in one warning


def declared_tools(mcp: Mapping[str, MCPConfig], tools: Mapping[str, ToolConfig], root: Path) -> RunTools:
    """Returns the recipe's tools before any server is started. Raises `UserError` if a secret reference does not resolve."""
    servers = {name: Server(name=name, config=config, root=root, live=_live(name, config)) for name, config in mcp.items()}
    for server in servers.values():
        server.check_secrets()
    bounds = {
        name: Bounds(timeout_s=config.timeout_s, output_chars=config.output_chars, calls=config.calls) for name, config in tools.items()
    }
    wordings = {name: ToolWording(description=config.description, arguments=config.arguments) for name, config in tools.items()}
    return RunTools(
        servers=servers,
        bounds={name: limits for name, limits in bounds.items() if limits != NO_BOUNDS},
        words={name: wording for name, wording in wordings.items() if wording.description or wording.arguments},
    )


def _live(name: str, config: MCPConfig) -> AnswerLiveness | None:
    """Returns the liveness check for a server outside the sandbox; None for a server in a sandbox, because the agent can stop it."""
    if config.command:
        return None
    program = "run the program in a shell to test it. A call that gets no answer in time ends the program, and the next call restarts it"
    fix = program if config.host_command else "check the server; episodes reconnect automatically"
    return AnswerLiveness(f"MCP server {name}", fix=fix, first_s=START_TIMEOUT_S)


def candidate_tasks(family: TaskFamily, others: Iterable[Task] = ()) -> Iterator[Task]:
    """Yields the tasks that are searched for the run's servers to start: the first training tasks, one task from each held-out split, then
    `others`."""
    for split, most in {Split.TRAIN: MAX_TASKS, Split.HELDOUT: 1, Split.HELDOUT_REAL: 1}.items():
        size = family.size(split)
        for index in range(most if size is None else min(size, most)):
            yield family.task(split, index)
    yield from others


def with_sub_agent_tools(tasks: Iterable[Task], delegation: DelegationConfig | None) -> Iterator[Task]:
    """Yields the tasks. If sub-agents have separate tools, a copy of the first task with those tools follows that task."""
    for number, task in enumerate(tasks):
        yield task
        if not number and delegation is not None and delegation.tools is not None:
            yield replace(task, tools=delegation.tools)


async def pin_tools(
    tools: RunTools,
    tasks: Iterable[Task],
    sandboxes: SandboxBackend,
    *,
    folder: Path | None = None,
    every: bool = True,
    idle_words: bool = False,
    chat: ChatFormat | None = None,
    memory: EpisodeMemory | None = None,
) -> RunTools:
    """Returns the tools with each server's tool list. Each server is started as configured: in the sandbox of the first task that uses it,
    or outside a sandbox.

    Args:
        tasks: tasks of the run, of which at most `4 * MAX_TASKS` are read.
        folder: the run folder. In a resumed run, the servers must list the tools that the run started with (`save_tool_offers`).
        every: whether a server or a bound that no task uses is an error. If `every` is False, unused servers are excluded.
        idle_words: whether `tools` may describe tools that none of these tasks has, because other tasks of the run have them.
        chat: the policy's chat format, with which control tokens in every string from a server are escaped and tools that the policy cannot
            call are excluded.
        memory: the recipe's memory. `tools` may also describe the memory tools.

    Raises `UserError` if a server does not start, its tools cannot be offered (`usable_tools`) or differ from the tools at the run's start,
    or a server, a bound or a description is unused. Errors of a sandbox are raised unchanged.
    """
    if not tools.servers and not tools.bounds and not tools.words:
        return tools
    looked_at = list(itertools.islice(tasks, 4 * MAX_TASKS))
    users = {name: task for task in reversed(looked_at) for name in map(_server, task.tools) if name in tools.servers}
    if every and (unused := [name for name in tools.servers if name not in users]):
        raise UserError(
            f"mcp.{unused[0]} is unused: none of the first {len(looked_at)} tasks uses {MCP_PREFIX}{unused[0]}",
            fix=f"add {MCP_PREFIX}{unused[0]} to the tools of tasks, or remove the server",
        )
    before = _read(folder)
    listings = await asyncio.gather(*(_list_tools(tools.servers[name], task, sandboxes) for name, task in users.items()))
    servers = {server.name: _pin(server, listed, before.get(server.name), chat) for server, listed in listings}
    pinned = RunTools(servers=servers, bounds=tools.bounds, words=tools.words)
    if not idle_words:
        _check_used(pinned, looked_at, memory, every=every)
    return pinned


def _pin(server: Server, listed: list[object], before: tuple[ListedTool, ...] | None, chat: ChatFormat | None) -> Server:
    """Returns the server with its usable tools. `before`: the usable tools when a resumed run first started; None for a server without a
    stored list."""
    try:
        usable = before or usable_tools(listed, server.config.only)
    except InvalidMessage as error:
        raise _refused(server, f"it offers {error}") from None
    shown_tools, reasons = _shown(usable, chat)
    if reasons and (server.config.only or not shown_tools):
        raise _refused(server, next(iter(reasons.values())))
    reasons |= {} if server.config.only else excluded_tools(listed)
    if reasons:
        more = f"; and {len(reasons) - _MOST_REASONS} more" if len(reasons) > _MOST_REASONS else ""
        listing = "; ".join(itertools.islice(reasons.values(), _MOST_REASONS))
        log.warning("mcp.%s: %d of its tools are not offered: %s%s", server.name, len(reasons), listing, more)
    if before is not None and (difference := tool_difference(before, listed)):
        raise UserError(
            f"mcp.{server.name}: its tools have changed since the run started: {difference}",
            fix="install the version of the server that the run started with, or start a new run",
        )
    return replace(server, offers=shown_tools, excluded=reasons)


def _shown(usable: Sequence[ListedTool], chat: ChatFormat | None) -> tuple[tuple[ListedTool, ...], dict[str, str]]:
    """Returns the tools as the agent sees them, and a mapping name -> reason for the tools that cannot be offered to this policy."""
    shown_tools, reasons = [], {}
    for tool in usable:
        rewritten = tool.rewritten(str if chat is None else chat.escape_text)
        if rewritten.shape != tool.shape:
            reasons[tool.name] = f"a value in the schema of the tool {tool.name} contains a control token of the model"
        elif reason := "" if chat is None else chat.tool_problem(rewritten.schema):
            reasons[tool.name] = f"the tool {tool.name}: {reason}"
        else:
            shown_tools.append(rewritten)
    return tuple(shown_tools), reasons


def save_tool_offers(tools: RunTools, folder: Path) -> None:
    """Stores the tool lists that a run starts with, if they are not stored yet."""
    if tools.servers and not (folder / MCP_FILE).exists():
        data = {name: [offer.to_data() for offer in server.offers or ()] for name, server in tools.servers.items()}
        write_atomically(folder / MCP_FILE, json.dumps(data, indent=1, ensure_ascii=False))


def _check_used(tools: RunTools, tasks: Sequence[Task], memory: EpisodeMemory | None, *, every: bool) -> None:
    """Raises `UserError` if the recipe bounds or describes a tool that none of `tasks` has. If `every` is False, raises it only if none of
    `tasks` has any of the described tools."""
    if not every and not tools.words:
        return
    known = {name for names in {task.tools for task in tasks} for name in load_tools(names, None, tools, memory)}
    unused = [name for name in tools.bounds if name not in known] if every else []
    silent = [name for name in tools.words if name not in known]
    unused += silent if every or len(silent) == len(tools.words) else []
    if unused:
        raise UserError(
            f"tools.{unused[0]} is unused: none of the first tasks has a tool with this name",
            fix=f"use one of {', '.join(sorted(known))}, or remove it" if known else "remove it",
        )


async def _list_tools(server: Server, task: Task, sandboxes: SandboxBackend) -> tuple[Server, list[object]]:
    """Starts a server, and returns the server and its tool list. Raises `UserError` if the server does not start or respond."""
    sandbox, connection = None, ServerConnection(server)
    try:
        if server.in_sandbox:
            await sandboxes.prepare(sandbox_of(task))
            sandbox = await sandboxes.open(sandbox_of(task), files=task.contents())
        return server, await connection.list_tools(sandbox)
    except (Unanswered, InvalidMessage, ServerError) as error:
        raise _refused(server, str(error)) from None
    finally:
        await connection.close(timeout_s=_CLOSE_S)
        if sandbox is not None:
            await sandbox.close()


def _refused(server: Server, problem: str) -> UserError:
    fixes = {
        "command": "put the program into the image of the tasks' sandbox (image.toml), and try it there",
        "host_command": "install the program on this machine, and try it in a shell",
        "url": "start the server, or correct the address",
    }
    key = next(name for name in fixes if getattr(server.config, name))
    return UserError(f"mcp.{server.name}: {problem}", fix=fixes[key])


def _server(name: str) -> str:
    return name.removeprefix(MCP_PREFIX).partition("/")[0] if name.startswith(MCP_PREFIX) else ""


def _read(folder: Path | None) -> dict[str, tuple[ListedTool, ...]]:
    """Returns the tool lists that a resumed run started with; empty if none are stored."""
    if folder is None or not (folder / MCP_FILE).is_file():
        return {}
    data = json.loads((folder / MCP_FILE).read_text(encoding="utf-8"))
    return {name: usable_tools(listed, ()) for name, listed in data.items()}
