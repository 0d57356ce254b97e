"""Reads chat templates, and tests user-supplied templates and tokenizers within bounds before they are used.

A template is a Jinja program. transformers runs it in a sandboxed environment that does not bound its time or memory. `probe_template`
renders the template in a separate process with limits on time and memory.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.base import untrusted_files
from agentrl.base.files import sha256_file
from agentrl.base.processes import import_environment
from agentrl.errors import UserError

SHIPPED_TEMPLATES = ("hermes", "chatml", "llama3", "mistral_v3", "mistral_v13", "deepseek_v3")
"""Names of the templates in `agentrl/agent/templates/`. None of these templates adds a system message."""
MAX_BYTES = 1 << 18
"""Maximum bytes in a template file: twenty times the size of the longest template among well-known models."""
MAX_RENDERED = 1 << 20
"""Maximum characters in the rendering of a short conversation."""

_FOLDER = Path(__file__).parent / "templates"
_ROOT = Path(__file__).resolve().parents[2]
_CPU_S = 10
_LOAD_S = 60  # CPU seconds to load a tokenizer: 20 times what 262,000 tokens and 514,000 merges take on a slow core
_WALL_S = 300  # enough for a busy machine
_MEMORY_BYTES = 4 << 30
_CHILD = "from agentrl.agent.template import _child; _child()"
_TOO_MUCH, _GAVE_UP = 3, 4  # exit statuses
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".delta")
_MOST_GROWTH = 64  # maximum output characters or tokens per input character
_PASSED: set[tuple[tuple[tuple[str, str], ...], str | None, float]] = set()  # (content of the folder, template, limit)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a program.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
"""A tool schema for testing templates."""


def read_template(name: str, root: Path) -> str:
    """Returns the text of a built-in template by its name, or of a file relative to `root`. Raises `UserError` if the file does not exist,
    has more than `MAX_BYTES` bytes, is not UTF-8 or is empty."""
    if name in SHIPPED_TEMPLATES:
        return (_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    path = root / name
    try:
        content = untrusted_files.read_bytes(path, most=MAX_BYTES) if path.stat().st_size <= MAX_BYTES else None
    except (OSError, ValueError):
        raise UserError(
            f"chat template {name!r} is neither built in ({', '.join(SHIPPED_TEMPLATES)}) nor a file",
            fix=f"use a built-in template, or create {path}",
        ) from None
    if content is None:
        raise UserError(f"{path} is not a chat template: it has more than {MAX_BYTES >> 10} KiB", fix="save only the template in this file")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not a chat template: {error}", fix="save it as UTF-8") from None
    if not text.strip():
        raise UserError(f"{path} is empty", fix="copy a Jinja template from tokenizer_config.json of an instruction-tuned model")
    return text


def select_template(templates: Any) -> Any:
    """Returns the template of a tokenizer. If there are several named templates, returns the one for tools, or the default if none is for
    tools; None if there is neither.

    `transformers` would choose a template for each rendering, depending on whether it has tools, but all renderings of a conversation must
    use the same template.
    """
    return templates.get("tool_use") or templates.get("default") if isinstance(templates, Mapping) else templates


def probe_template(text: str, *, cpu_s: float = _CPU_S) -> None:
    """Renders conversations of many shapes with a template in a separate process.

    Raises `UserError` if the template takes more than `cpu_s` seconds of CPU time or too much memory, or produces too much output, or if
    the process cannot run the test. `ChatFormat` reports other errors of the template later.
    """
    _try(text, None, cpu_s)


def probe_tokenizer(folder: str, text: str | None = None, *, cpu_s: float = _CPU_S) -> None:
    """Loads the tokenizer of a model in a separate process, encodes and decodes strings, and tests its template, or the template `text` if
    it is given.

    Loading has a separate time limit, because a large vocabulary takes seconds to load. Files that pass are tested once per process.

    Raises:
        UserError: as for `probe_template`, or the tokenizer exceeds the bounds or crashes. All other errors are reported when the tokenizer
            is loaded later.
    """
    key = (_content(Path(folder)), text, cpu_s)
    if key not in _PASSED:
        _try(text, folder, cpu_s)
        _PASSED.add(key)


def _content(folder: Path) -> tuple[tuple[str, str], ...]:
    """Returns the name and the SHA-256 hash of each file in a model folder, except the weights."""
    files = (path for path in sorted(folder.rglob("*")) if path.suffix not in _WEIGHTS and path.is_file())
    return tuple((path.relative_to(folder).as_posix(), sha256_file(path)) for path in files)


def _try(text: str | None, folder: str | None, cpu_s: float) -> None:
    subject = "the chat template" if folder is None else f"the tokenizer in {folder}, or its chat template,"
    code, errors = _run_child(text, folder, cpu_s)
    if code == _GAVE_UP:
        raise UserError(f"the tokenizer in {folder} cannot be used: {errors}", fix="use a different model, or download this one again")
    if code is not None and code > 0 and code != _TOO_MUCH:
        raise UserError(f"{subject} could not be tested: {errors}", fix="report it as a bug, with this message")
    if code != 0:
        load = "" if folder is None else f"{_LOAD_S} s of CPU time to load it, then "
        bounds = f"{load}{cpu_s:g} s of CPU time, {_MEMORY_BYTES >> 30} GiB and {MAX_RENDERED:,} characters"
        raise UserError(f"{subject} exceeds its limits ({bounds})", fix="use a different template, such as hermes, or a different model")


def _run_child(text: str | None, folder: str | None, cpu_s: float) -> tuple[int | None, str]:
    """Runs the test process. Returns the exit status (None if the process timed out) and the end of its stderr."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-c", _CHILD],  # -P: imports nothing from the current folder, which may be hostile
            input=json.dumps([text, folder, cpu_s]).encode(),
            capture_output=True,
            timeout=_WALL_S,
            env={**import_environment(_ROOT), "TRANSFORMERS_VERBOSITY": "critical"},  # stderr is quoted in the error
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return child.returncode, child.stderr.decode(errors="replace")[-500:]


def _child() -> None:
    # transformers imports torch if it is installed, which takes half of the CPU time here. Tokenizers do not need it.
    sys.modules["torch"] = None  # type: ignore[assignment]  # its import then fails as if it were not installed
    try_within(*json.load(sys.stdin))


def try_within(text: str | None, folder: str | None, cpu_s: float) -> None:
    """Runs the test in the current process. Exceptions raised by the template or the tokenizer are suppressed.

    Exits with `_TOO_MUCH` if the memory, the output or a `range()` in the template exceeds its bound, and with `_GAVE_UP` after a panic in
    the tokenizer's library. A process that exceeds the bound on CPU time is killed.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    load = None
    if folder is not None:
        load = auto_tokenizer().from_pretrained
    _bound(cpu_s, _LOAD_S if load is not None else 0)
    try:
        tokenizer = None if load is None else load(folder, trust_remote_code=False)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        text = text or (None if tokenizer is None else select_template(tokenizer.chat_template))
        if isinstance(text, str):
            _render_all(render_jinja_template, text)
        if tokenizer is not None:
            _encode_all(tokenizer)
    except (MemoryError, OverflowError):  # OverflowError: Jinja's sandbox limits ranges
        sys.exit(_TOO_MUCH)
    except (SystemExit, KeyboardInterrupt):
        raise
    except Exception:  # the later use of the tokenizer reports it
        return
    except BaseException as error:  # a panic of the tokenizer's library
        print(f"{type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
        sys.exit(_GAVE_UP)


def _bound(cpu_s: float, load_s: float) -> None:
    """Bounds the additional CPU time and memory of this process.

    Args:
        cpu_s: CPU seconds for the test. The total bound on CPU time is about `load_s + cpu_s`.
        load_s: CPU seconds after which ITIMER_PROF kills the process while it loads a tokenizer. 0 means that no tokenizer is loaded; the
            timer then expires after `cpu_s`. After loading, `try_within` sets the timer to `cpu_s`.
    """
    signal.setitimer(signal.ITIMER_PROF, load_s or cpu_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    bound = math.ceil(used.ru_utime + used.ru_stime + load_s + cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (bound, bound + 1))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES, taken + _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render_all(render: Callable[..., tuple[list[str], Any]], text: str) -> None:
    for messages, tools in _conversations():
        room = MAX_RENDERED + _MOST_GROWTH * sum(len(message["content"]) for message in messages)
        try:
            rendered, _ = render([messages], tools=tools, chat_template=text, add_generation_prompt=True)
        except (MemoryError, OverflowError):
            raise
        except Exception:  # reported by ChatFormat, which also has the tokenizer
            continue
        if len(rendered[0]) > room:
            sys.exit(_TOO_MUCH)


def _encode_all(tokenizer: Any) -> None:
    every = "".join(chr(number) for number in range(0x3000) if chr(number).isprintable())
    for sample in ("", " ", "a", " a\n\n  b\tC 12345 <a|b> 'x' ", "\u00e9\u0301\u4e2d\u6587 \U0001f600\u200d", every, "ab" * 5000):
        ids = tokenizer.encode(sample, add_special_tokens=False)
        if len(ids) > _MOST_GROWTH * (len(sample.encode()) + 1) or len(tokenizer.decode(ids)) > _MOST_GROWTH * (len(sample) + 1):
            sys.exit(_TOO_MUCH)


def _conversations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Yields pairs of messages and tools: short and long conversations with various numbers of messages, with and without tools and a
    system message."""
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(1)"}}}
    user: dict[str, Any] = {"role": "user", "content": "-"}
    tool: dict[str, Any] = {"role": "tool", "content": "1"}
    answer: dict[str, Any] = {"role": "assistant", "content": "-"}
    called = {**answer, "tool_calls": [call]}
    for count in (*range(1, 13), 40, 200):
        rounds = [user, *[called, tool] * count][:count]
        yield rounds, None
        yield [{"role": "system", "content": "-"}, *rounds], [TOOL]
        yield [user, answer] * count, None
    long = {"role": "user", "content": "a long text, \u00e9\n" * 2000}
    yield [long, called, {**tool, "content": long["content"]}], [TOOL] * 40


def auto_tokenizer() -> Any:
    """Returns transformers' `AutoTokenizer`.

    Importing `AutoTokenizer` loads `GenerationMixin`, which imports compilers, scikit-learn and pandas and takes three of the import's four
    seconds of CPU time. Only models with custom code need `GenerationMixin`, and no such model is loaded here, so an empty class replaces
    it during the import.
    """
    import transformers.generation

    lazy: Any = transformers.generation
    if "transformers.models.auto.auto_factory" in sys.modules or "GenerationMixin" in vars(lazy):
        from transformers import AutoTokenizer
    else:
        lazy.GenerationMixin = type("GenerationMixin", (), {})
        try:
            from transformers import AutoTokenizer
        finally:
            del lazy.GenerationMixin
    return AutoTokenizer
