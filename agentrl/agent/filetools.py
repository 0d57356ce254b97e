"""Tools for the files of a sandbox: view, create, replace, insert, search.

Each call is one program in the episode's sandbox (`agentrl.agent.inside.files`), which runs as the agent: nothing of it happens on the
host, and nothing that it prints is believed to be more than the agent's words.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.agent.tools import MAX_TEXT, Tool, ToolOutcome, render_result
from agentrl.agent.typed import tool, typed_tool
from agentrl.protocols import Sandbox
from agentrl.records import Limits

Words = Annotated[str, Field(max_length=MAX_TEXT)]
Place = Annotated[str, Field(min_length=1, max_length=4096)]
Pattern = Annotated[str, Field(max_length=255)]
FromOne = Annotated[int, Field(ge=1)]
_SHARE = 0.8  # of the time of a call, after which the program stops itself: one that is stopped takes every program of the sandbox along


@tool
async def view(path: Place, sandbox: Sandbox, limits: Limits, start: FromOne = 1, end: FromOne | None = None) -> ToolOutcome:
    """Show a text file with line numbers, or what a folder holds.

    Args:
        path: a file or folder, relative to the working directory
        start: first line, from 1
        end: last line; left out, the rest of the file as far as it fits
    """
    return await _run("view", sandbox, limits, path=path, start=start, end=end)


@tool
async def create(path: Place, text: Words, sandbox: Sandbox, limits: Limits, overwrite: bool = False) -> ToolOutcome:
    """Write a new text file; folders on the way to it are made.

    Args:
        path: the file, relative to the working directory
        text: all that the file is to hold
        overwrite: true to put it in the place of a file that exists
    """
    return await _run("create", sandbox, limits, path=path, text=text, overwrite=overwrite)


@tool
async def replace(path: Place, old: Words, new: Words, sandbox: Sandbox, limits: Limits) -> ToolOutcome:
    """Replace a piece of a text file that occurs in it exactly once.

    Args:
        path: the file, relative to the working directory
        old: the text to be replaced, exactly as it is in the file, with enough around it to occur once
        new: what takes its place; empty to remove it
    """
    return await _run("replace", sandbox, limits, path=path, old=old, new=new)


@tool
async def insert(path: Place, line: Annotated[int, Field(ge=0)], text: Words, sandbox: Sandbox, limits: Limits) -> ToolOutcome:
    """Insert lines into a text file.

    Args:
        path: the file, relative to the working directory
        line: the number of the line after which they come; 0 for the beginning
        text: the lines
    """
    return await _run("insert", sandbox, limits, path=path, line=line, text=text)


@tool
async def search(
    pattern: Words,
    sandbox: Sandbox,
    limits: Limits,
    path: Place = ".",
    files: Pattern = "",
    regex: bool = False,
) -> ToolOutcome:
    """Search text files for lines that hold a text.

    Args:
        pattern: the text, or with regex a regular expression of Python
        path: a file, or a folder with all that is below it
        files: names of files to look at, such as *.py; left out, all
        regex: whether pattern is a regular expression
    """
    return await _run("search", sandbox, limits, pattern=pattern, path=path, files=files, regex=regex)


FILE_TOOLS: Mapping[str, Tool] = {one.__name__: typed_tool(one) for one in (view, create, replace, insert, search)}


async def _run(operation: str, sandbox: Sandbox, limits: Limits, **arguments: Any) -> ToolOutcome:
    call = (operation, _SHARE * limits.tool_timeout_s, {**arguments, "room": limits.tool_output_chars})
    code = f"{_source()}\nmain(*{call!r})\n"
    result = await sandbox.python(code, timeout_s=limits.tool_timeout_s, output_bytes=4 * limits.tool_output_chars + 4096)
    return ToolOutcome(output=render_result(result, limits), ok=result.ok)


@cache
def _source() -> str:
    return (Path(__file__).parent / "inside" / "files.py").read_text(encoding="utf-8")
