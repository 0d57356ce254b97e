"""A real OpenEnv server, run by the Python of an environment with the package `openenv`: python openenv_server.py PORT SESSIONS.

Prints its port. Serves each of `ENVIRONMENTS` under its name; /counts returns how many environments were created and ended.
"""

import os
import random
import sys
import time
from enum import StrEnum
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

FEW = 3  # sessions of the environment `few`
COUNTS = {"created": 0, "ended": 0, "pid": os.getpid()}


class World(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        COUNTS["created"] += 1
        self._state = State()

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        COUNTS["ended"] += 1


class Answer(Action):
    message: str = Field(..., description="Message to echo")


class Echoed(Observation):
    echoed_message: str = ""


class Echo(World):
    """Like the template of `openenv init`, with an end."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed_message=f"ready, seed {seed}")

    def step(self, action: Answer, timeout_s: float | None = None, **kwargs: Any) -> Echoed:
        if action.message == "raise":
            raise RuntimeError("broken pump")
        if action.message == "sleep":
            time.sleep(3)
        if action.message == "silent":
            return Echoed(done=True)
        return Echoed(echoed_message=action.message, reward=0.1 * len(action.message), done=action.message == "end")


class Move(StrEnum):
    LEFT = "left"
    RIGHT = "right"


class Walk(Action):
    move: Move


class Seen(Observation):
    position: int
    goal: int


class Corridor(World):
    """The goal is at one of the two ends, by the seed."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.goal, self.position = random.Random(seed).choice([-2, 2]), 0
        return Seen(position=0, goal=self.goal)

    def step(self, action: Walk, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.position += 1 if action.move is Move.RIGHT else -1
        done = abs(self.position) == 2
        return Seen(position=self.position, goal=self.goal, done=done, reward=float(self.position == self.goal))


class Place(Action):
    """Places a piece."""

    x: int
    y: int
    colour: Literal["red", "blue"] = "red"


class Board(World):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed_message="an empty board")

    def step(self, action: Place, timeout_s: float | None = None, **kwargs: Any) -> Echoed:
        return Echoed(echoed_message=f"{action.colour} at {action.x},{action.y}", reward=1.0, done=True)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        from fastmcp import FastMCP

        server = FastMCP("tools")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)
        COUNTS["created"] += 1
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        return Observation(metadata={"message": "Add the numbers."})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("unknown action")

    @property
    def state(self) -> State:
        return self._state

    def close(self) -> None:
        COUNTS["ended"] += 1
        super().close()


ENVIRONMENTS: dict[str, tuple[type, type, type]] = {
    "echo": (Echo, Answer, Echoed),
    "corridor": (Corridor, Walk, Seen),
    "few": (Corridor, Walk, Seen),
    "board": (Board, Place, Echoed),
    "tools": (Tools, CallToolAction, CallToolObservation),
}


def main() -> None:
    app, port, sessions = FastAPI(), int(sys.argv[1]), int(sys.argv[2])
    app.get("/counts")(lambda: COUNTS)
    for name, kinds in ENVIRONMENTS.items():
        app.mount(f"/{name}", create_fastapi_app(*kinds, max_concurrent_envs=FEW if name == "few" else sessions, env_name=name))
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error")
    server, socket = uvicorn.Server(config), config.bind_socket()
    socket.listen(2048)  # so that a process that reads the port can connect
    print(socket.getsockname()[1], flush=True)
    server.run(sockets=[socket])


if __name__ == "__main__":
    main()
