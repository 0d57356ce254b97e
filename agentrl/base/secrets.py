"""Secrets by reference. A recipe contains the location of a secret, `env:NAME` or `file:/PATH`, and never its value, because a run writes
its recipe to `recipe.json`, `run.json` and the report.

Imports only the standard library, `agentrl.errors`, and `agentrl.base.secret_forms`, which recognizes secrets.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from agentrl.base import secret_forms
from agentrl.errors import UserError

HOW_TO_REFER = "write env:NAME for an environment variable of the run, or file:/PATH for a file"
HIDDEN = "[secret]"
"""Replaces a secret in the output of a run."""
_MOST_BYTES = 64 << 10
_SHORTEST, _SHORTEST_GUESSED = 6, 16  # characters; shorter values also occur in ordinary text
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,199}|file:[/~][^\0\n]{0,4000}")
_COMMANDS = ("command", "cmd", "args", "argv", "arguments", "flags")

_read: set[str] = set()  # every secret that this process has read


def is_reference(text: object) -> bool:
    """Whether a value is a string with the form of a reference to a secret."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def read_secret(reference: str) -> str:
    """Returns the secret that a reference points to, without the line breaks at the end of a file. From then on, `redact` hides the secret.

    Raises `UserError` if the reference is invalid, or if the secret is missing, empty, unreadable or larger than 64 KiB. The message never
    repeats text that may be a secret.
    """
    if not is_reference(reference):
        raise UserError("a secret is given by value, or its reference is misspelled", fix=HOW_TO_REFER)
    kind, _, name = reference.partition(":")
    if kind == "env":
        return _checked(os.environ.get(name, ""), f"the environment variable {name}", f"export {name} before the run starts")
    try:
        path = Path(name).expanduser()
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise UserError(f"the file {name} is larger than {_MOST_BYTES >> 10} KiB", fix="write only the secret into it")
        text = data.decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(f"the secret file {name} cannot be read: {why}", fix="correct the path, or the file's mode") from None
    return _checked(text, f"the file {name}", "write only the secret into it")


def _checked(text: str, where: str, fix: str) -> str:
    if not text.strip() or len(text.encode("utf-8", "surrogateescape")) > _MOST_BYTES or "\0" in text:
        raise UserError(f"{where} contains no secret", fix=fix)
    return register(text)


def register(secret: str) -> str:
    """Returns the secret unchanged. From then on, `redact` hides the secret and the password or token of every URL in it,
    except values of fewer than 6 characters."""
    _read.add(secret)
    for rest in re.findall(r"://(\S+)", secret):
        login = rest[: secret_forms.login_end(rest)]
        tokens = [part for part in re.split(r"[/?&=#:]", rest[len(login) :]) if secret_forms.looks_generated(part)]
        _read.update(
            part for text in (login.partition(":")[2] or login, *tokens) for part in (text, unquote(text)) if len(part) >= _SHORTEST
        )
    return secret


def resolve_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a plug-in. If an option's name suggests a secret, its reference is replaced by the secret.

    Raises `UserError` under the same conditions as `read_secret`.
    """
    return {key: _resolved(str(key), value) for key, value in options.items()}


def _resolved(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _resolved(key if secret_forms.marks_secrets(key) else str(name), one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_resolved(key, item) for item in value)
    return read_secret(value) if is_reference(value) and secret_forms.may_be_secret(key) else value


def literal_secret_errors(value: Any, where: str = "") -> Iterator[str]:
    """Yields an error message, such as `store.options.api_key contains a secret by value`, for each secret in a recipe's value. The
    messages do not contain the secrets."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if secret_forms.holds_secret(str(key)):
                yield f"a key of {where or 'it'} is a secret: remove it"
            else:
                yield from _under(str(key), inner, f"{where}.{key}" if where else str(key))
    elif isinstance(value, str):
        if secret_forms.holds_secret(value):
            yield f"{where or 'it'} contains a key or a password: remove it, and use a recipe key that takes a reference"
        elif "\n" not in value:
            words = secret_forms.split_command(value) if where.rpartition(".")[2] in _COMMANDS else [value]
            yield from _in_words(words, where, shell=True)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        yield from _in_words([word if isinstance(word, str) else "" for word in value], where)
        for index, one in enumerate(value):
            if not isinstance(one, str) or secret_forms.holds_secret(one):
                yield from literal_secret_errors(one, f"{where}.{index}" if isinstance(one, Mapping) else where)


def _under(key: str, value: Any, path: str) -> Iterator[str]:
    """Yields the error messages of `literal_secret_errors` for the value of a key."""
    if isinstance(value, Mapping) and secret_forms.marks_secrets(key):
        for name, one in value.items():
            yield from _under(key, one, f"{path}.{name}")
    elif isinstance(value, list | tuple) and secret_forms.marks_secret(key):
        for one in value:
            yield from _under(key, one, path)
    elif (isinstance(value, str) and secret_forms.is_secret(key, value)) or _is_pin(key, value):
        yield f"{path} contains a secret by value: {HOW_TO_REFER}"
    else:
        yield from literal_secret_errors(value, path)


def _is_pin(key: str, value: Any) -> bool:
    """Whether a value is a password of four or more digits, which a command-line override turns into a number. False for a token id such
    as `token: 50256`."""
    return type(value) is int and abs(value) > 999 and secret_forms.marks_secret(key) and not key.lower().endswith("token")


def _in_words(words: Sequence[str], where: str, *, shell: bool = False) -> Iterator[str]:
    for name in secret_forms.secrets_in_command(words, shell=shell):
        yield f"{where or 'it'} contains a secret by value after {name}: pass it in a variable, by reference"


def redact(text: str) -> str:
    """Returns a string without the secrets that this process has read or has in its environment, and without logins and webhooks in
    URLs. Short secrets are not hidden, because they also occur in ordinary text."""
    for secret in sorted(_read | _in_environment(), key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""), quote(secret)}:
            if len(secret) >= _SHORTEST and form in text:
                text = text.replace(form, HIDDEN)
    return secret_forms.hide_logins(text, HIDDEN)


@cache
def _in_environment() -> frozenset[str]:
    """Returns the values of environment variables whose names mark a secret, except values that also occur in ordinary text: short values,
    values without a digit, and values with white space or a slash."""
    return frozenset(
        value
        for name, value in os.environ.items()
        if secret_forms.is_secret_variable(name)
        and len(value) >= _SHORTEST_GUESSED
        and not re.search(r"[\s/]", value)
        and re.search(r"\d", value)
    )


class RedactingFormatter(logging.Formatter):
    """Formats log records, tracebacks included, and redacts the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record, and redacts the text with `redact`."""
        return redact(super().format(record))


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a child process that needs no secrets: without secret variables, and without values that contain a
    secret."""
    known = [secret for secret in _read if len(secret) >= _SHORTEST]
    return {
        name: value
        for name, value in environment.items()
        if not secret_forms.is_secret_variable(name)
        and not secret_forms.holds_secret(value)
        and not any(secret in value for secret in known)
    }
