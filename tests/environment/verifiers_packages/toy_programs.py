"""A taskset for verifiers 0.4 whose reward runs the policy's answer as a program."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Task(vf.Task[Data]):
    NEEDS_CONTAINER = False

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.answer != "nothing":
            await runtime.write("folder/-input.txt", b"\x00\xff42")

    @vf.reward(weight=1.0)
    async def prints(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        if self.data.answer == "nothing":
            return 1.0
        content = await runtime.read("folder/-input.txt")
        process = await runtime.run(["python3", "-c", trace.last_reply], {})
        return float(content == b"\x00\xff42" and process.stdout.strip() == self.data.answer)


class Programs(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt="print 42", answer=answer), self.config.task) for answer in ("42", "nothing")]


__all__ = ["Programs"]
