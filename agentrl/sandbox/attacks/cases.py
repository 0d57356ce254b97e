"""The attacks: programs with settings in their docstrings, tricks of a hostile server, and hostile archives.

A program's docstring starts with a description, followed by lines `key: value`:

    kind        the class of attack
    seconds     its time limit, at which the sandbox must end it
    within      deadline of the answer in seconds, if less than `seconds`
    ends        how it may end: exit, timeout, memory, killed (default: exit)
    run         `snippet` to run in the warm interpreter instead of a new one, `session` to run in a session
    host        what the host does next (see `agentrl.sandbox.attacks.host_steps`)
    network     `allowed` or `gateway` for an allow-list with one server of the host, at `allowed_port` or `gateway_port`
    needs       what the promise requires: `control groups`, `two users`, or a machine such as x86_64

It prints a line that starts with `ESCAPED:` and what it achieved, or with `held:` and what it saw instead.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox.attacks import hostile_server

PROGRAMS = Path(__file__).parent / "programs"
HOSTILE_SERVER = Path(hostile_server.__file__)
KINDS = ("resources", "lifetime", "protocol", "escape", "files", "network", "grader", "between episodes")
_ENDS = ("exit", "timeout", "memory", "killed")
_RUNS = ("", "snippet", "session")
_NETWORKS = ("", "allowed", "gateway")
_KEYS = {"kind", "seconds", "within", "ends", "run", "host", "network", "needs"}
_SNAPSHOT_TRICKS = ("empty_chunks", "endless_chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack: a program to run in a sandbox, a trick of its exec server, or neither if only the host acts."""

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
    archives = "Archives with `..`, absolute names, links to write through, devices and false sizes, restored as a snapshot."
    attacks = [*(program_attack(path) for path in sorted(PROGRAMS.glob("*.py"))), *map(_trick, hostile_server.TRICKS)]
    attacks.append(Attack(name="hostile_archives", kind="files", description=archives, host="hostile_archives", seconds=30.0, within=30.0))
    return sorted(attacks, key=lambda attack: KINDS.index(attack.kind))


def program_attack(path: Path) -> Attack:
    """The attack in a program's file. Raises `ValueError` with the file and the key if its docstring is invalid."""
    text = path.read_text(encoding="utf-8")
    description, _, rest = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")
    keys = dict(line.split(": ", 1) for line in rest.splitlines() if line.strip())
    if not description or keys.keys() - _KEYS or keys.get("kind") not in KINDS:
        raise ValueError(f"{path}: the docstring needs a description, then lines of {sorted(_KEYS)}; got {keys}")
    ends = tuple(word.strip() for word in keys.get("ends", "exit").split(","))
    network, run = keys.get("network", ""), keys.get("run", "")
    for key, words, known in (("ends", ends, _ENDS), ("network", (network,), _NETWORKS), ("run", (run,), _RUNS)):
        if not set(words) <= set(known):
            raise ValueError(f"{path}: {key}: {keys[key]}; known: {', '.join(filter(None, known))}")
    seconds = float(keys.get("seconds", "10"))
    return Attack(
        name=path.stem,
        kind=keys["kind"],
        description=" ".join(description.split()),
        program=text,
        seconds=seconds,
        within=float(keys.get("within", seconds)),
        ends=ends,
        run=run,
        host=keys.get("host", ""),
        network=network,
        needs=keys.get("needs", ""),
    )


def _trick(name: str) -> Attack:
    description = f"A compromised exec server: {hostile_server.TRICKS[name]}"
    step = "snapshot" if name in _SNAPSHOT_TRICKS else "run"
    return Attack(name=f"server_{name}", kind="protocol", description=description, trick=name, host=step, seconds=1.0)


def hostile_server_source(trick: str) -> str:
    """The source of an exec server that plays `trick`."""
    return HOSTILE_SERVER.read_text(encoding="utf-8").replace('TRICK = ""', f"TRICK = {trick!r}", 1)
