"""Writes demonstrations of mixed quality for the base policy of `questions`. The policy learns valid but rarely useful tool calls.

An agent with several pages works through them alone, delegates them all to one helper, or delegates each page to a different helper. An
agent with a single page reads the page, writes a program, and submits the program's output. Every agent fails occasionally.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from agentrl.records import Split, Task
from sandboxes.pages.questions import Questions, program, request
from sandboxes.tables.demonstrations import run_template

SPLITTING = 0.35  # fraction of the agents with several pages that delegate each page to a different helper
HANDING_ON = 0.15  # fraction of the agents with several pages that delegate all pages to one helper; the others work alone
CAREFUL = 0.8  # fraction of correct programs
GUESSING = 0.05  # fraction of the agents with one page that answer without a program
HELPERS = 0.45  # fraction of demonstrations by an agent with one page
JOINING = 0.2  # fraction of demonstrations that train only the last move, which combines the helpers' answers
NO_ANSWER = "error: the helper ended without an answer (token_limit)"
END = "<|im_end|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An assistant turn, the results of its calls (empty after `submit`), and whether the turn is trained."""

    says: str
    shown: tuple[str, ...] = ()
    learn: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The request to an agent, whether it may delegate, and its moves."""

    task: Task
    prompt: str
    delegates: bool
    moves: tuple[Move, ...]


def demonstrations(seed: int, count: int, *, pages: int = 3) -> Iterator[Demonstration]:
    """Yields `count` demonstrations for training tasks, with a seed that runs do not use."""
    family = Questions(seed=3_000_003 + seed, pages=pages)
    for index in range(count):
        yield demonstrate(family.task(Split.TRAIN, index), Random(f"questions:{seed}:{index}"))


def demonstrate(task: Task, rng: Random) -> Demonstration:
    """Returns a demonstration of a task."""
    pages, part = len(task.data["answers"]), rng.random()
    if part < HELPERS:
        page = rng.randint(1, pages)
        return Demonstration(task=task, prompt=request(page, page), delegates=False, moves=_one_page(task, page, rng))
    everything, way = request(1, pages), rng.random()
    if part < HELPERS + JOINING:
        return Demonstration(task=task, prompt=everything, delegates=True, moves=_split(task, rng, learn=False))
    if way < SPLITTING:
        return Demonstration(task=task, prompt=everything, delegates=True, moves=_split(task, rng))
    if way < SPLITTING + HANDING_ON:
        moves = Move(says=turn(call("delegate", task=everything)), shown=(NO_ANSWER,)), _submitted("error")
        return Demonstration(task=task, prompt=everything, delegates=True, moves=moves)
    # a helper with all pages proceeds like an agent that works alone
    return Demonstration(task=task, prompt=everything, delegates=rng.random() < 0.8, moves=_alone(task, rng))


def call(name: str, **arguments: Any) -> str:
    """Returns the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def turn(*calls: str) -> str:
    """Returns an assistant turn that consists of these calls."""
    return "\n".join(calls) + END


def _submitted(answer: str) -> Move:
    return Move(says=turn(call("submit", answer=answer)))


def _one_page(task: Task, page: int, rng: Random) -> tuple[Move, ...]:
    read = _read(task, page)
    if rng.random() < GUESSING:
        return read, _submitted(str(rng.randint(1, 999)))
    ran = _ran(task, page, rng)
    return read, ran, _submitted(ran.shown[0])


def _split(task: Task, rng: Random, *, learn: bool = True) -> tuple[Move, ...]:
    pages = range(1, len(task.data["answers"]) + 1)
    answers = tuple(_ran(task, page, rng).shown[0] for page in pages)
    calls = [call("delegate", task=request(page, page)) for page in pages]
    return Move(says=turn(*calls), shown=answers, learn=learn), _submitted("\n".join(answers))


def _alone(task: Task, rng: Random) -> tuple[Move, ...]:
    moves = [move for page in range(1, len(task.data["answers"]) + 1) for move in (_read(task, page), _ran(task, page, rng))]
    return *moves, _submitted("\n".join(move.shown[0] for move in moves[1::2]))


def _read(task: Task, page: int) -> Move:
    return Move(says=turn(call("read", page=page)), shown=(task.files[f"page{page}.txt"],))


def _ran(task: Task, page: int, rng: Random) -> Move:
    question = task.data["questions"][page - 1]
    code = program(question) if rng.random() < CAREFUL else program(question, sloppy=rng)
    return Move(says=turn(call("python", code=code)), shown=(run_template(code, task.files),))
