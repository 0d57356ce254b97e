"""A taskset for verifiers 0.4 as shown in its documentation."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    @vf.reward(weight=0.8)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 8)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Config(vf.TasksetConfig):
    count: int = 8


class Sums(vf.Taskset[Task, Config]):
    def load(self):
        for a in range(self.config.count):
            yield Task(Data(prompt=f"{a} + {a} = ?", system_prompt="Answer with a number.", answer=str(2 * a)), self.config.task)


__all__ = ["Sums"]
