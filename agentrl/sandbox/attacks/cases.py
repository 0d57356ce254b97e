"""The suite's attacks: programs with the settings in their docstrings, tricks of a hostile server, hostile archives.

A program's docstring begins with what it does, followed by `key: value` lines:

    kind        the class of attack
    seconds     how long it may run before the sandbox has to end it
    within      deadline of the answer in seconds, where that is less than `seconds`
    ends        how it may end: exit, timeout, memory, killed (default: exit)
    run         `snippet` to run in the warm interpreter instead of a new one, `session` to run in a session
    host        what the host does next (`agentrl.sandbox.attacks.host_steps`)
    network     `allowed` or `gateway` to run with an allow-list of one server of the host: at `allowed_port` or `gateway_port`
    needs       what the promise requires: `control groups`, `two users`, or a machine such as x86_64

It prints a line that starts with `ESCAPED:` when it got what it wanted, or `held:` with what it saw instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox.attacks import hostile_server

PROGRAMS = Path(__file__).parent / "programs"
HOSTILE_SERVER = Path(hostile_server.__file__)
KINDS = ("resources", "lifetime", "protocol", "escape", "files", "network", "grader", "between episodes")
ENDS = ("exit", "timeout", "memory", "killed")
RUNS = ("", "snippet", "session")
NETWORKS = ("", "allowed", "gateway")
_KEYS = {"kind", "seconds", "within", "ends", "run", "host", "network", "needs"}
_SNAPSHOT_TRICKS = ("empty_chunks", "endless_chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack: a program to run in a sandbox, or a trick to replace its exec server, or neither (the host acts)."""

    name: str
    kind: str
    description: str
    program: str = ""
    trick: str = ""
    seconds: float = 10.0
    within: float = 10.0
    ends: tuple[str, ...] = ("exit",)
    run: str = ""
    host: str = ""
    network: str = ""
    needs: str = ""


def load_attacks() -> list[Attack]:
    """Every attack, by class."""
    every = [*(program_attack(path) for path in sorted(PROGRAMS.glob("*.py"))), *_tricks()]
    every.append(Attack(name="hostile_archives", kind="files", description=_ARCHIVES, host="hostile_archives", seconds=30.0, within=30.0))
    return sorted(every, key=lambda attack: KINDS.index(attack.kind))


_ARCHIVES = "Archives with `..`, absolute names, links to write through, devices, lying sizes, handed in as a snapshot."


def program_attack(path: Path) -> Attack:
    """The attack in a program's file. Raises `ValueError` naming the file and the key when its docstring is wrong."""
    text = path.read_text(encoding="utf-8")
    description, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
    keys = dict(line.split(": ", 1) for line in rest.splitlines() if line.strip())
    if not description or keys.keys() - _KEYS or keys.get("kind") not in KINDS:
        raise ValueError(f"{path}: the docstring needs a description, then lines of {sorted(_KEYS)}; got {keys}")
    ends = tuple(word.strip() for word in keys.get("ends", "exit").split(","))
    if not set(ends) <= set(ENDS):
        raise ValueError(f"{path}: ends: {keys['ends']}; known: {', '.join(ENDS)}")
    if keys.get("network", "") not in NETWORKS:
        raise ValueError(f"{path}: network: {keys['network']}; known: {', '.join(NETWORKS[1:])}")
    if keys.get("run", "") not in RUNS:
        raise ValueError(f"{path}: run: {keys['run']}; known: {', '.join(RUNS[1:])}")
    seconds = float(keys.get("seconds", "10"))
    return Attack(
        name=path.stem,
        kind=keys["kind"],
        description=" ".join(description.split()),
        program=text,
        seconds=seconds,
        within=float(keys.get("within", seconds)),
        ends=ends,
        run=keys.get("run", ""),
        host=keys.get("host", ""),
        network=keys.get("network", ""),
        needs=keys.get("needs", ""),
    )


def _tricks() -> Iterator[Attack]:
    for node in ast.parse(HOSTILE_SERVER.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and [argument.arg for argument in node.args.args] == ["link", "number"]:
            description = "Exec server taken over: " + (ast.get_docstring(node) or "").split("\n")[0]
            step = "snapshot" if node.name in _SNAPSHOT_TRICKS else "run"
            yield Attack(name=f"server_{node.name}", kind="protocol", description=description, trick=node.name, host=step, seconds=1.0)


def hostile_server_source(trick: str) -> str:
    """The source of an exec server that plays `trick`."""
    return HOSTILE_SERVER.read_text(encoding="utf-8").replace('TRICK = ""', f"TRICK = {trick!r}", 1)
