"""Packages for verifiers 0.4 that cannot be used, as modules `toy_broken_KIND`."""

import sys
import types

import verifiers.v1 as vf
from toy_sums import Config, Data, Sums, Task
from verifiers.v1.runtimes import ModalConfig, PrimeConfig


class NoTasks(Sums):
    def load(self):
        return []


class Raises(Sums):
    def load(self):
        yield from super().load()
        raise KeyError("column 'answer'")


class Hub(Sums):
    def load(self):
        try:
            raise OSError("[Errno -3] Temporary failure in name resolution")
        except OSError as error:
            raise RuntimeError("load_dataset failed") from error


class Large(Sums):
    def load(self):
        yield Task(Data(prompt="x", answer="x" * (10 << 20)), self.config.task)


class Boxed(Task):
    NEEDS_CONTAINER = True


class Container(vf.Taskset[Boxed, Config]):
    def load(self):
        yield Boxed(Data(prompt="x", answer="x"), self.config.task)


class Hosted(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=ModalConfig())


class HostedEnv(vf.Env[Hosted]):
    async def run(self, task, agents):
        await agents.player.run(task)


class Server(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "far"


class Far(Task):
    @classmethod
    def toolsets(cls, config):
        return [Server(vf.ToolsetConfig(runtime=PrimeConfig()))]


class FarTools(vf.Taskset[Far, Config]):
    def load(self):
        yield Far(Data(prompt="x", answer="x"), self.config.task)


class JudgedTaskConfig(vf.TaskConfig):
    grader: vf.JudgeConfig = vf.JudgeConfig()


class JudgedConfig(Config):
    task: JudgedTaskConfig = JudgedTaskConfig()


class Judged(vf.Taskset[Task, JudgedConfig]):
    load = Sums.load


EXPORTS = {
    "judged": [Judged],
    "all": None,
    "none": [],
    "two": [Sums, NoTasks],
    "empty": [NoTasks],
    "raises": [Raises],
    "hub": [Hub],
    "large": [Large],
    "container": [Container],
    "hosted": [Sums, HostedEnv],
    "far": [FarTools],
    "good": [Sums],
}
for kind, exported in EXPORTS.items():
    module = sys.modules[f"toy_broken_{kind}"] = types.ModuleType(f"toy_broken_{kind}")
    if exported is not None:
        module.__all__ = [taskset.__name__ for taskset in exported]
        module.__dict__.update({taskset.__name__: taskset for taskset in exported})
