"""A taskset with a tool server, whose tool keeps state."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Lookup(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "book"

    @vf.tool
    def lookup(self, name: str) -> str:
        """Returns the number of a person."""
        return {"anna": "17", "ben": "23"}.get(name, "unknown")


class Task(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Lookup(vf.ToolsetConfig())]

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Numbers(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="What is anna's number?", answer="17"), self.config.task)]


__all__ = ["Numbers"]

if __name__ == "__main__":
    Lookup.run()
