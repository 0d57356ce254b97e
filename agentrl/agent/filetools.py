"""Tools for the files in a sandbox: view, create, replace, insert, search.

Each call runs one program in the episode's sandbox (`agentrl.agent.inside.files`) as the agent. No part of the program runs on the host,
and its output is as untrusted as the agent's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from agentrl.agent.tools import BUILT_IN, MAX_TEXT, Tool, ToolOutcome, render_result
from agentrl.agent.typed import tool, typed_tool
from agentrl.protocols import Sandbox
from agentrl.records import Limits

Content = Annotated[str, Field(max_length=MAX_TEXT)]
FilePath = Annotated[str, Field(min_length=1, max_length=4096)]
NamePattern = Annotated[str, Field(max_length=255)]
LineNumber = Annotated[int, Field(ge=1)]
_TIME_SHARE = 0.8  # fraction of a call's time limit after which the program stops itself, because a kill stops all programs in the sandbox


@tool
async def view(path: FilePath, sandbox: Sandbox, limits: Limits, start: LineNumber = 1, end: LineNumber | None = None) -> ToolOutcome:
    """Show a text file with line numbers, or list a folder.

    Args:
        path: a file or folder, relative to the working directory
        start: first line, from 1
        end: last line; by default the rest of the file, as far as it fits
    """
    return await _run("view", sandbox, limits, path=path, start=start, end=end)


@tool
async def create(path: FilePath, text: Content, sandbox: Sandbox, limits: Limits, overwrite: bool = False) -> ToolOutcome:
    """Write a new text file. Missing folders are created.

    Args:
        path: the file, relative to the working directory
        text: the content of the file
        overwrite: true to replace an existing file
    """
    return await _run("create", sandbox, limits, path=path, text=text, overwrite=overwrite)


@tool
async def replace(path: FilePath, old: Content, new: Content, sandbox: Sandbox, limits: Limits) -> ToolOutcome:
    """Replace a piece of text that occurs exactly once in a text file.

    Args:
        path: the file, relative to the working directory
        old: the text to replace, exactly as in the file, with enough context to be unique
        new: the new text; empty to delete the old one
    """
    return await _run("replace", sandbox, limits, path=path, old=old, new=new)


@tool
async def insert(path: FilePath, line: Annotated[int, Field(ge=0)], text: Content, sandbox: Sandbox, limits: Limits) -> ToolOutcome:
    """Insert lines into a text file.

    Args:
        path: the file, relative to the working directory
        line: the number of the line after which to insert; 0 for the beginning
        text: the lines
    """
    return await _run("insert", sandbox, limits, path=path, line=line, text=text)


@tool
async def search(
    pattern: Content, sandbox: Sandbox, limits: Limits, path: FilePath = ".", files: NamePattern = "", regex: bool = False
) -> ToolOutcome:
    """Search text files for lines that contain a text.

    Args:
        pattern: the text, or a Python regular expression if regex is true
        path: a file, or a folder to search recursively
        files: names of files to search, such as *.py; by default all
        regex: whether pattern is a regular expression
    """
    return await _run("search", sandbox, limits, pattern=pattern, path=path, files=files, regex=regex)


FILE_TOOLS: Mapping[str, Tool] = {function.__name__: typed_tool(function) for function in (view, create, replace, insert, search)}
SHIPPED_TOOLS: Mapping[str, Tool] = {**BUILT_IN, **FILE_TOOLS}
"""The tools that a task refers to by a plain name."""


async def _run(operation: str, sandbox: Sandbox, limits: Limits, **arguments: Any) -> ToolOutcome:
    call = (operation, _TIME_SHARE * limits.tool_timeout_s, {**arguments, "limit": limits.tool_output_chars})
    code = f"{_source()}\nmain(*{call!r})\n"
    result = await sandbox.python(code, timeout_s=limits.tool_timeout_s, output_bytes=4 * limits.tool_output_chars + 4096)
    return ToolOutcome(output=render_result(result, limits), ok=result.ok)


@cache
def _source() -> str:
    return (Path(__file__).parent / "inside" / "files.py").read_text(encoding="utf-8")
