"""A taskset for verifiers 0.4: the model writes a program that answers a question about a table.

The tool `python` accepts a program. The program is compared with the reference program and never run, so no sandbox is needed.

    vf-eval programs                                   # as an evaluation, with this folder on PYTHONPATH
    agentrl train recipes/verifiers_programs.py        # as training tasks
"""

import ast
import json

import verifiers.v1 as vf

from agentrl.records import Split
from sandboxes.tables import Tables


class ProgramData(vf.TaskData):
    program: str
    column: str


class Tools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints.

        Args:
            code: Python source.
        """
        return "Handed in."


class ProgramTask(vf.Task[ProgramData]):
    @vf.reward(weight=0.8)
    async def right(self, trace: vf.Trace) -> float:
        return float(_normal(_written(trace)) == _normal(self.data.program))

    @vf.reward(weight=0.2)
    async def column(self, trace: vf.Trace) -> float:
        return float(bool(self.data.column) and repr(self.data.column) in _written(trace))

    @vf.stop
    async def handed_in(self, trace: vf.Trace) -> bool:
        return bool(_written(trace))


class ProgramConfig(vf.TasksetConfig):
    count: int = 2000
    seed: int = 0


class Programs(vf.Taskset[ProgramTask, ProgramConfig]):
    def load(self):
        family = Tables(self.config.seed)
        for index in range(self.config.count):
            task = family.task(Split.TRAIN, index)
            data = ProgramData(prompt=task.prompt[0].content, program=family.gold(task), column=task.data["names"].get("c", ""))
            yield ProgramTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: ProgramConfig) -> list[vf.Toolset]:
        return [Tools(vf.ToolsetConfig())]


def _written(trace: vf.Trace) -> str:
    """Returns the program in the model's first tool call; "?" if the call has none, and "" if there is no call."""
    for message in trace.assistant_messages:
        for call in message.tool_calls or []:
            try:
                return str(json.loads(call.arguments)["code"])
            except (ValueError, KeyError, TypeError):
                return "?"
    return ""


def _normal(program: str) -> str:
    try:
        return ast.dump(ast.parse(program))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return program.strip()


__all__ = ["Programs"]

if __name__ == "__main__":
    Tools.run()
