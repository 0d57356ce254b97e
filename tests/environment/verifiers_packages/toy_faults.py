"""A taskset for verifiers 0.4 with one task for each fault."""

import asyncio

import verifiers.v1 as vf

KINDS = ("nan", "raises", "setup", "hangs", "large", "text", "endless", "good")


class Data(vf.TaskData):
    kind: str


class State(vf.State):
    blob: str = ""


class Task(vf.Task[Data, State]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.kind == "setup":
            raise RuntimeError("no seat free")

    @vf.stop
    async def endless(self, trace: vf.Trace) -> bool:
        return False

    @vf.metric
    async def size(self, trace: vf.Trace) -> float:
        return float("inf") if self.data.kind == "large" else 1.0

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        match self.data.kind:
            case "nan":
                return float("nan")
            case "raises":
                raise ValueError("the answer key is missing")
            case "hangs":
                await asyncio.sleep(3600)
            case "large":
                trace.state.blob = "x" * (10 << 20)
                trace.info["blob"] = "x" * (10 << 20)
            case "text":
                return "much"
        return 1.0


class Faults(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=kind, name=kind, kind=kind), self.config.task) for kind in KINDS]


__all__ = ["Faults"]
