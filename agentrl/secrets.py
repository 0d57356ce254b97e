"""Secrets by reference. A recipe has the location of a secret, `env:NAME` or `file:/PATH`, and never its value, because a run writes its
recipe to `recipe.json`, `run.json` and the report.

Imports only the standard library and `agentrl.errors`.
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
from urllib.parse import quote

from agentrl.errors import UserError

HOW = "write env:NAME for an environment variable of the run, or file:/PATH for a file"
HIDDEN = "[secret]"
"""Replaces a secret in the texts of a run."""
_MOST_BYTES = 64 << 10
_SHORTEST, _SHORTEST_GUESSED = 6, 16  # characters; shorter values also occur in ordinary texts
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]{0,199}|file:[/~][^\0\n]{0,4000}")
# A name whose value is a secret, by its last words: api_key, GITHUB_TOKEN, db.password; not tokens, tokenizer, eos_token.
_KEY = re.compile(
    r"(^|[^a-z])(api_?keys?|(access|secret|private|encryption|signing|account)_?key(_?id)?|secrets?|passwords?|passwd|passphrase|credentials?"
    r"|(access|auth|api|bearer|refresh|session|id|bot|personal|secret|hub|hf|github|gitlab|slack|wandb)_?token|authorization|dsn|^token)$",
    re.ASCII,
)
_VARIABLE = re.compile(
    r"(^|_)(API_?KEYS?|KEY|TOKEN|SECRETS?|PASS|PWD|CREDENTIALS?|AUTH|DSN|CONNECTION_STRING)(_|$)|PASSWORD|PASSWD|PASSPHRASE"
)
_NO_SECRET = ("PWD", "OLDPWD")  # working directories of the shell
_FLAG = re.compile(r"--?[a-z0-9_-]*?(api[_-]?key|(access|auth|api|bearer)[_-]?token|token|password|passwd|secret)(=.+)?", re.DOTALL | re.I)
_IN_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]{0,20}://)([^\s/?#@:]{0,256}:[^\s/?#@]{1,256})@")
_TOKEN = re.compile(
    r"\b(sk-[A-Za-z0-9_-]{20,}|gh[oprsu]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{30,}|glpat-[A-Za-z0-9_-]{20,}|xox[abeprs]-[A-Za-z0-9-]{10,}"
    r"|AKIA[0-9A-Z]{16}|hf_[A-Za-z0-9]{30,}|AIza[A-Za-z0-9_-]{35}|eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
)

_read: set[str] = set()  # every secret that this process has read


def is_reference(text: object) -> bool:
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def read(reference: str) -> str:
    """The secret at a reference, without a file's last line break. From then on, `redacted` hides it.

    Raises `UserError`, which does not repeat a possible secret, if there is none.
    """
    if not is_reference(reference):
        raise UserError("a secret is given by value, or its reference is misspelled", fix=HOW)
    kind, _, name = reference.partition(":")
    if kind == "env":
        return _checked(os.environ.get(name, ""), f"the environment variable {name}", f"export {name} before the run starts")
    try:
        path = Path(name).expanduser()
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1).decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise UserError(f"the secret file {name} cannot be read: {why}", fix="correct the path, or the file's mode") from None
    return _checked(text, f"the file {name}", "write only the secret into it")


def _checked(text: str, where: str, fix: str) -> str:
    if not text.strip() or len(text) > _MOST_BYTES or "\0" in text:
        raise UserError(f"{where} holds no secret", fix=fix)
    return registered(text)


def registered(secret: str) -> str:
    """Returns the secret unchanged. From then on, `redacted` hides it."""
    _read.add(secret)
    return secret


def resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plug-in, with references under secret keys replaced by the secrets. Raises `UserError` as `read` does."""
    return {key: _resolved(value, secret=_is_secret_key(key)) for key, value in options.items()}


def _resolved(value: Any, *, secret: bool) -> Any:
    if isinstance(value, Mapping):
        return resolved(value)
    return read(value) if secret and is_reference(value) else value


def literals(value: Any, where: str = "") -> Iterator[str]:
    """Error messages, without the secrets, for secrets in a recipe's value: `tracker_options.x.api_key holds a secret by value`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            path = f"{where}.{key}" if where else str(key)
            if _is_secret_key(str(key)) and isinstance(inner, str) and inner and not is_reference(inner):
                yield f"{path} holds a secret by value: {HOW}"
            else:
                yield from literals(inner, path)
    elif isinstance(value, str):
        if _IN_URL.search(value) or _TOKEN.search(value):
            yield f"{where or 'it'} holds a key or a password: remove it, and use a recipe key that takes a reference"
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        yield from _in_words(list(value), where)


def _in_words(words: list[Any], where: str) -> Iterator[str]:
    """As `literals`, for a list that may hold a program's arguments: `--token VALUE` and `--token=VALUE` count."""
    for word, after in zip(words, [*words[1:], None] if words else [], strict=True):
        flag = _FLAG.fullmatch(word) if isinstance(word, str) else None
        if flag and (flag.group(3) or (isinstance(after, str) and after and not after.startswith("-"))):
            yield f"{where} holds a secret by value after {word.partition('=')[0]}: pass it in a variable, by reference"
        else:
            yield from literals(word, where)


def _is_secret_key(key: str) -> bool:
    return _KEY.search(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", key).lower().replace("-", "_")) is not None


def redacted(text: str) -> str:
    """The text without the secrets that this process has read or has in its environment, and without passwords in URLs."""
    for secret in sorted(_read | _in_environment(), key=len, reverse=True):
        for form in {secret, json.dumps(secret)[1:-1], quote(secret, safe="")}:
            if len(secret) >= _SHORTEST and form in text:
                text = text.replace(form, HIDDEN)
    return _IN_URL.sub(rf"\1{HIDDEN}@", text) if "@" in text else text


@cache
def _in_environment() -> frozenset[str]:
    """Values of environment variables whose names mark a secret. Short values and paths are excluded, because ordinary texts hold them."""
    return frozenset(
        value
        for name, value in os.environ.items()
        if _is_secret_variable(name) and len(value) >= _SHORTEST_GUESSED and not re.search(r"[\s/]", value) and re.search(r"\d", value)
    )


class Redacting(logging.Formatter):
    """Formats log records, tracebacks included, and redacts the text."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child process that needs no secret: without secret variables, and without passwords in URLs."""
    return {
        name: value
        for name, value in environment.items()
        if not _is_secret_variable(name) and value not in _read and not _IN_URL.search(value) and not _TOKEN.search(value)
    }


def _is_secret_variable(name: str) -> bool:
    return name not in _NO_SECRET and _VARIABLE.search(name.upper()) is not None
