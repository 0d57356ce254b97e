"""The process in which local environments run. `agentrl.environment.pool` starts this process and exchanges frames of JSON with it.

    python -m agentrl.environment.worker PROGRESS_FD

A frame contains operations from many episodes. The operations run in order, and their results are sent together. If an operation finishes
more than `FLUSH_S` seconds after the frame started or results were last sent, the results so far are sent immediately. The progress file
counts the starts and ends of operations, so that the driver knows which episode hangs. The process exits when its input ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import inspect
import json
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from agentrl.base.error_text import raise_location
from agentrl.base.user_code import describe_error
from agentrl.environment.base import Environment, StepRow, actions_of, call_of, number_of, step_row, text_of
from agentrl.environment.games import Game, as_data, observations_of, role_step_of, roles_of
from agentrl.errors import EnvironmentFault, PluginError, PolicyFault, TaskError
from agentrl.plugins.parts import environment_kind
from agentrl.plugins.references import resolve

FLUSH_S = 0.05
MAX_FRAME = 64 << 20
"""Maximum size of a frame, in bytes."""
MAX_RESULT = 32 << 20
"""Maximum size of a result, such as a snapshot, in bytes."""
SIZE = struct.Struct("<I")
PROGRESS = struct.Struct("<Q")


def environment_class(ref: str) -> tuple[Callable[..., Environment], str]:
    """Returns the class of an environment, and the argument in its reference, which is empty if there is none. Raises `PluginError`
    if the reference does not resolve."""
    kind = environment_kind(ref)
    return (resolve(ref), "") if kind is None else (resolve(kind.pooled), ref.partition(":")[2])


class OpenEnvironments:
    """The environments in one process, by the number of their episode."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Any, str]] = {}
        self._loop = asyncio.new_event_loop()

    def _done(self, result: Any) -> Any:
        return self._loop.run_until_complete(result) if inspect.isawaitable(result) else result

    def open(self, number: int, ref: str, options: dict[str, Any], seed: int) -> Any:
        """Opens an environment. Returns the environment's declarations and its first observation."""
        kind, argument = environment_class(ref)
        environment = kind(argument, **options) if argument else kind(**options)
        self._open[number] = environment, ref
        if isinstance(environment, Game):
            return self._open_game(environment, ref, seed)
        first = text_of(self._done(environment.reset(seed)), f"{ref}.reset()")
        resumable = callable(getattr(environment, "snapshot", None)) and callable(getattr(environment, "restore", None))
        return [str(environment.instructions), actions_of(environment.actions, ref), first, resumable]

    def _open_game(self, game: Game, ref: str, seed: int) -> Any:
        roles = roles_of(game.roles, ref)
        first = observations_of(self._done(game.reset(seed)), roles, f"{ref}.reset()", ended=False)
        actions, forfeit = actions_of(game.actions, ref), number_of(game.forfeit, ref, "forfeit")
        return {"instructions": str(game.instructions), "actions": actions, "first": as_data(first), "roles": roles, "forfeit": forfeit}

    def step(self, number: int, action: Any) -> StepRow | list[Any]:
        """Applies an action, or the actions of several roles."""
        environment, ref = self._open[number]
        if isinstance(environment, Game):
            played = role_step_of(self._done(environment.step(action["roles"])), roles_of(environment.roles, ref), f"{ref}.step()")
            return [as_data(played.observations), dict(played.rewards), played.terminated, played.truncated]
        return step_row(self._done(environment.step(call_of(action))), f"{ref}.step()")

    def snapshot(self, number: int) -> str:
        """Returns the state of an environment as base64."""
        environment, ref = self._open[number]
        state = self._done(environment.snapshot())
        if not isinstance(state, bytes):
            raise EnvironmentFault(f"{ref}.snapshot() returned {type(state).__name__} instead of bytes")
        return base64.b64encode(state).decode()

    def restore(self, number: int, state: str) -> str:
        """Restores the state of an environment and returns the observation."""
        environment, ref = self._open[number]
        return text_of(self._done(environment.restore(base64.b64decode(state))), f"{ref}.restore()")

    def close(self, number: int) -> None:
        """Closes an environment, even if it failed to open."""
        environment, _ = self._open.pop(number, (None, ""))
        if environment is not None:
            self._done(environment.close())


def answer(environments: OpenEnvironments, operation: list[Any]) -> list[Any]:
    """Runs one operation. Returns the episode's number, the outcome (`ok`, `policy`, `task` or `fault`), and the result or the error's
    text. Never raises."""
    number, name, *arguments = operation
    try:
        return [number, "ok", getattr(environments, name)(number, *arguments)]
    except PolicyFault as error:
        return [number, "policy", str(error)[:2000]]
    except (TaskError, PluginError) as error:
        return [number, "task", str(error)[:2000]]
    except EnvironmentFault as error:
        return [number, "fault", str(error)[:2000]]
    except BaseException as error:  # including SystemExit, which must end only this episode
        location = raise_location(error, libraries=True)
        return [number, "fault", f"{name}() raised {describe_error(error, 1500)}{f' ({location})' if location else ''}"[:2000]]


def main() -> None:
    """Runs operations until the input ends. Discards the output of environments."""
    progress = mmap.mmap(int(sys.argv[1]), PROGRESS.size)
    replies = os.dup(sys.stdout.fileno())
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    requests, environments, count, owner = os.fdopen(os.dup(sys.stdin.fileno()), "rb"), OpenEnvironments(), 0, os.getpid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    _be_killed_first()
    _send(replies, [])
    while head := requests.read(SIZE.size):
        results, size, sent = list[bytes](), 0, time.monotonic()
        for operation in json.loads(requests.read(SIZE.unpack(head)[0])):
            progress[:] = PROGRESS.pack(count + 1)
            result = encoded(answer(environments, operation))
            if os.getpid() != owner:  # this is a forked process that an environment did not stop
                os._exit(1)
            count += 2
            progress[:] = PROGRESS.pack(count)
            if size + len(result) > MAX_RESULT:
                _send(replies, results)
                results, size = [], 0
            results.append(result)
            size += len(result)
            if time.monotonic() - sent > FLUSH_S:
                _send(replies, results)
                results, size, sent = [], 0, time.monotonic()
        if results:
            _send(replies, results)


def encoded(result: list[Any]) -> bytes:
    """Returns a result as JSON, or a fault if the result cannot be written as JSON or is too long."""
    try:
        text = json.dumps(result).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return json.dumps([result[0], "fault", f"a result is not JSON data: {describe_error(error, 500)}"]).encode()
    if len(text) > MAX_RESULT:
        return json.dumps([result[0], "fault", f"a result has {len(text)} bytes; at most {MAX_RESULT} are allowed"]).encode()
    return text


def _be_killed_first() -> None:
    """Configures the kernel to kill this process before the driver if memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _send(to: int, results: list[bytes]) -> None:
    frame = b"[" + b",".join(results) + b"]"
    rest = memoryview(SIZE.pack(len(frame)) + frame)
    while rest:
        rest = rest[os.write(to, rest) :]


if __name__ == "__main__":
    main()
