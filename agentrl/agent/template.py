"""Chat templates that ship, by word, and those in files; and a stranger's template tried within bounds before anything relies on it.

A template is a program in Jinja. transformers runs it in an environment that reaches nothing outside of it, but that sets no bound on its
time or memory: `try_template` does, in a process of its own.
"""

from __future__ import annotations

import math
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from agentrl import foreign
from agentrl.errors import UserError
from agentrl.processes import importing_from

SHIPPED = ("hermes", "chatml", "llama3", "mistral_v3", "mistral_v13", "deepseek_v3")
"""Words for templates in `agentrl/agent/templates/`. None has a system message of its own."""

MAX_BYTES = 1 << 18
"""Bytes of a template's file; the longest of well-known models have a twentieth of it."""

MAX_RENDERED = 1 << 20
"""Characters that a template may make of three short messages."""

_FOLDER = Path(__file__).parent / "templates"
_ROOT = Path(__file__).resolve().parents[2]
_CPU_S = 10
_WALL_S = 120  # on a machine that is busy with something else
_MEMORY_BYTES = 4 << 30
_CHILD = "from agentrl.agent.template import _child; _child()"
_TOO_MUCH = 3  # exit status

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a program.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
"""A schema as tools have it, for trials."""


def read_template(name: str, root: Path) -> str:
    """The text of a shipped template by its word, or of a file relative to `root`. Raises `UserError`."""
    if name in SHIPPED:
        return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    path = root / name
    try:
        content = foreign.content(path, most=MAX_BYTES) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        raise UserError(
            f"chat template {name!r} is neither one that ships ({', '.join(SHIPPED)}) nor a file", fix=f"name one of them, or make {path}"
        ) from None
    if content is None:
        raise UserError(f"{path} is no chat template: it has more than {MAX_BYTES >> 10} KiB", fix="give the template alone")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no chat template: {error}", fix="save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"{path} is empty", fix="write a Jinja template into it, as in tokenizer_config.json of an instruction-tuned model")
    return text


def try_template(text: str, *, cpu_s: float = _CPU_S) -> None:
    """Renders three short conversations with a template in a process of its own.

    Raises `UserError` for one that takes more than `cpu_s` seconds of CPU time, too much memory, or writes too much. What else may be
    wrong with a template `agentrl.agent.ChatFormat` tells, which may be made of it after this.
    """
    bounds = f"{cpu_s:g} s of CPU time, {_MEMORY_BYTES >> 30} GiB and {MAX_RENDERED:,} characters for three short messages"
    code, said = _tried(text, cpu_s)
    if code is not None and code > 0 and code != _TOO_MUCH:
        raise UserError(f"the chat template could not be tried: {said[-500:]}", fix="report this as a bug")
    if code != 0:
        raise UserError(
            f"the chat template does not end within bounds ({bounds})", fix="use another one, such as hermes; a template is a short program"
        )


def _tried(text: str, cpu_s: float) -> tuple[int | None, str]:
    """How a process that renders with the template ends: exit status, None when it does not, and what it says of an error."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD, str(cpu_s)],  # -P: nothing is imported from the current folder, maybe the stranger's
            input=text.encode("utf-8", "surrogatepass"),
            capture_output=True,
            timeout=_WALL_S,
            env=importing_from(_ROOT),
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stderr.decode(errors="replace")


def _child() -> None:
    render_within(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"), float(sys.argv[1]))


def render_within(text: str, cpu_s: float) -> None:
    """What the process of `try_template` does. It returns, also if the template raises; exits with `_TOO_MUCH`; or the kernel ends it."""
    from transformers.utils.chat_template_utils import render_jinja_template

    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # CPU time of the process; the signal ends it
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound = math.ceil(used.ru_utime + used.ru_stime + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (bound, bound + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for messages, tools in _conversations():
        try:
            rendered, _ = render_jinja_template([messages], tools=tools, chat_template=text, add_generation_prompt=True)
        except (MemoryError, OverflowError):  # the second from a range that Jinja's environment bounds
            sys.exit(_TOO_MUCH)
        except Exception:  # told, with the tokenizer, by ChatFormat
            continue
        if len(rendered[0]) > MAX_RENDERED:
            sys.exit(_TOO_MUCH)


def _conversations() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(1)"}}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "-", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    return [(turns[:1], None), (turns, None), ([{"role": "system", "content": "-"}, *turns], [TOOL])]
