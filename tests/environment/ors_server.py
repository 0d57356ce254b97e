"""A real ORS server, run by the Python of an environment with the package `ors-sdk`: python ors_server.py PORT. Prints its port."""

import os
import sys
from typing import Any

import uvicorn
from ors import Environment, Server, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel

COUNTS = {"created": 0, "ended": 0, "pid": os.getpid()}
TASKS = {"train": 6, "test": 2}


class Number(BaseModel):
    value: int


class Sums(Environment):
    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name="train", type="train"), Split(name="test", type="test")]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        return [{"a": index, "b": 10} for index in range(TASKS[split])]

    def setup(self) -> None:
        if self.task_spec["a"] == 5:
            raise RuntimeError("no image")
        COUNTS["created"] += 1

    def teardown(self) -> None:
        COUNTS["ended"] += 1

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"What is {self.task_spec['a']} + {self.task_spec['b']}?")]

    @tool
    def hint(self) -> ToolOutput:
        """Gives a hint."""
        return ToolOutput(blocks=[TextBlock(text="x" * 5000)], reward=-0.1)

    @tool
    def submit(self, params: Number) -> ToolOutput:
        """Submits the sum."""
        if params.value == 13:
            raise RuntimeError("unlucky")
        right = params.value == self.task_spec["a"] + self.task_spec["b"]
        return ToolOutput(blocks=[TextBlock(text="Right." if right else "Wrong.")], reward=float(right), finished=True)


def main() -> None:
    app = Server([Sums]).app
    app.get("/sums/counts")(lambda: COUNTS)
    app.router.routes.insert(0, app.router.routes.pop())  # before /{env_name}/...
    config = uvicorn.Config(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
    server, socket = uvicorn.Server(config), config.bind_socket()
    print(socket.getsockname()[1], flush=True)
    server.run(sockets=[socket])


if __name__ == "__main__":
    main()
