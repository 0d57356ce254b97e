"""Translates the keys in Harbor's task folders to agentrl's keys, and rejects keys that require something that sandboxes do not provide.

Harmless keys are accepted. A key that changes what a sandbox provides (a network, a GPU, root, a second container) causes an error with the
reason and the fix, because ignoring it would change the task.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import PydanticCustomError

UNSUPPORTED_KEY = "harbor_refused"
REWARD_FOLDER = b"/logs/verifier"  # the folder of the reward, which the tests of a Harbor folder mention
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)
_MEGABYTES = {"": 2.0**-20, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20}

_NO_NETWORK = 'programs have no network by default: set environment.network = ["pypi.org:443"] to allow hosts, or [] to allow none'
_NO_USER = "programs run as the sandbox's user and never as root: remove the key"
_NO_VARIABLES = "environment variables are not passed in: write {} and remove the key"


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {}, 0)


def _no_network(value: Any) -> bool:
    return _empty(value) or value == "no-network"


def _anything(value: Any) -> bool:
    return True


# Table -> key -> (test for harmless values, which are removed; reason why other values are an error).
_KEYS: Mapping[str, Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "": {
        "task": (_anything, ""),
        "source": (_anything, ""),
        "artifacts": (_empty, "only files of the working directory are collected: list them in outputs"),
        "steps": (_empty, "a task has only one instruction: create a folder for each step"),
    },
    "solution": {"env": (_empty, _NO_VARIABLES.format("export lines into solve.sh"))},
    "agent": {"user": (_empty, _NO_USER), "network_mode": (_no_network, _NO_NETWORK)},
    "verifier": {
        "env": (_empty, _NO_VARIABLES.format("export lines into test.sh")),
        "user": (_empty, _NO_USER),
        "network_mode": (_no_network, _NO_NETWORK),
        "environment_mode": (
            lambda value: value in ("", "shared"),
            "tests always run in a fresh sandbox with the task's image: remove the key",
        ),
        "environment": (_empty, "tests run in the task's image: install their dependencies in environment/Dockerfile"),
        "collect": (_empty, "no command runs between the agent and the tests: add the command to test.sh"),
    },
    "environment": {
        "allow_internet": (_empty, _NO_NETWORK),
        "network_mode": (_no_network, _NO_NETWORK),
        "gpus": (_empty, "a sandbox has no GPU: remove the task, or adapt it to the CPU"),
        "gpu_types": (_empty, "a sandbox has no GPU: remove the task, or adapt it to the CPU"),
        "os": (lambda value: value in ("", "linux"), "sandboxes run Linux"),
        "env": (_empty, _NO_VARIABLES.format("ENV lines into environment/Dockerfile")),
        "workdir": (_empty, "the Dockerfile sets the working directory: write WORKDIR there"),
        "mcp_servers": (_empty, "the key tools lists the agent's tools, which run in the sandbox"),
        "skills_dir": (_empty, "skills are not supported: describe them in instruction.md"),
        "healthcheck": (_empty, "no command runs in a sandbox before the agent: start services in solve.sh and test.sh"),
    },
}
_ASKS_FOR_NETWORK = ("allow_internet", "network_mode")


def translate_keys(description: dict[str, Any]) -> dict[str, Any]:
    """Returns a `task.toml` with Harbor's keys removed or replaced by agentrl's keys.

    Raises `PydanticCustomError` with one line for each rejected key.
    """
    ours = {key: dict(value) if isinstance(value, dict) else value for key, value in description.items()}
    hosts_named = isinstance(ours.get("environment"), dict) and "network" in ours["environment"]
    wrong: list[str] = []
    for name, keys in _KEYS.items():
        table = ours if not name else ours.get(name)
        if not isinstance(table, dict):
            continue
        for key in keys.keys() & table.keys():
            accepts, why = keys[key]
            value = table.pop(key)
            if not accepts(value) and not (hosts_named and key in _ASKS_FOR_NETWORK):
                wrong.append(f"{name + '.' if name else ''}{key} = {repr(value)[:80]}: {why}")
    if ours.get("solution") == {}:
        del ours["solution"]
    if "schema_version" in ours:
        ours["version"] = ours.pop("schema_version")
    if isinstance(ours.get("environment"), dict):
        wrong += _sizes(ours["environment"])
    if wrong:
        raise PydanticCustomError(UNSUPPORTED_KEY, "{lines}", {"lines": "\n".join(sorted(wrong))})
    return ours


def _sizes(environment: dict[str, Any]) -> list[str]:
    """Replaces `memory = "2G"` with `memory_mb = 2048`, and `storage` with `storage_mb`. Returns the problems."""
    wrong = []
    for key in ("memory", "storage"):
        if key not in environment:
            continue
        text = environment.pop(key)
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            wrong.append(f'environment.{key} = {text!r}: must be a size such as "512M" or "2G"')
        else:
            environment.setdefault(f"{key}_mb", max(1, round(float(match[1]) * _MEGABYTES[match[2].upper()])))
    return wrong


# Downloads in scripts -------------------------------------------------------------------------------------------------

_INSTALLS_AS_ROOT = re.compile(r"(?:sudo\s+)?(?:apt-get|apt|apk|dnf|yum|microdnf)\s+(?:-\S+\s+)*(?:update|install|add|upgrade)\b")
_DOWNLOADS = re.compile(
    r"(?:(?:curl|wget|git\s+clone)\b.*\bhttps?://(?!localhost|127\.|\[::1\])"
    r"|uvx\b(?!.*--offline)|uv\s+(?:pip|tool|add|sync|run)\b(?!.*--offline)|(?:npm|yarn|pnpm)\s+(?:install|add|ci)\b|cargo\s+install\b"
    r"|(?:python3?\s+-m\s+)?pip3?\s+install\b(?!.*(?:--no-index|--no-deps|\s\.(?:\s|$))))"
)


def script_problem(script: str, *, network: bool) -> str:
    """Returns why a script cannot work in a sandbox, as "line 3: ..."; empty if no problem is found.

    Only commands at the start of a line count, because they always run. A command inside an `if`, or after `||`, may be intended for other
    machines.
    """
    for number, line in enumerate(re.sub(r"\\\n", "  ", script).splitlines(), 1):
        if "||" in line:
            continue
        if _INSTALLS_AS_ROOT.match(line):
            return f"line {number} ({line.strip()[:100]}): installs packages, but the sandbox's root is read-only"
        if not network and _DOWNLOADS.match(line):
            return f"line {number} ({line.strip()[:100]}): downloads, but the sandbox has no network"
    return ""
