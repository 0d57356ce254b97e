"""A training run with real parts, except that the text of the policy comes from `agentrl.testing.hostile`, distributed over its episodes.

    python -m tests.e2e.hostile_run SERVERS LEARNERS PROJECT RUN_DIR BACKEND

The server is real, loads every version the learner publishes, and answers all requests without a script.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl import cli
from agentrl.records import Completion, SamplingParams, VersionSpan
from agentrl.serving.supervisor import SupervisedServer
from agentrl.session import builders
from agentrl.testing import byte_tokenizer
from agentrl.testing.hostile import RIGHT, SCRIPTS
from tests.e2e import forked

GROUP_SIZE, GROUPS_PER_STEP, STEPS = 8, 4, 2
CONTEXT = 16384
TOKENIZER = byte_tokenizer()

FAMILY = """
import ast, operator
from agentrl.records import Limits, Message, SandboxSpec, Score, Task
from agentrl.agent.tools import ToolOutcome, function_schema

OPERATORS = {ast.Add: operator.add, ast.Div: operator.truediv}
PEOPLE = {"ada": "1815"}


class Calculator:
    name, needs_sandbox = "calculator", False
    schema = function_schema("calculator", "Adds and divides.", "expression", "such as 1+2")

    async def __call__(self, arguments, sandbox, limits):
        node = ast.parse(arguments["expression"], mode="eval").body
        value = OPERATORS[type(node.op)](node.left.value, node.right.value)
        return ToolOutcome(output=str(value), ok=True)


class Lookup:
    name, needs_sandbox = "lookup", False
    schema = function_schema("lookup", "When a person was born.", "name", "a name")

    async def __call__(self, arguments, sandbox, limits):
        return ToolOutcome(output=PEOPLE[arguments["name"]], ok=True)


class ReadFile:
    name, needs_sandbox = "read_file", True
    schema = function_schema("read_file", "Shows a file.", "path", "relative")

    async def __call__(self, arguments, sandbox, limits):
        return ToolOutcome(output=(await sandbox.read(arguments["path"], max_bytes=10_000)).decode(), ok=True)


calculator, lookup, read_file = Calculator(), Lookup(), ReadFile()


async def verifier(task, episode):
    return Score(value=float(episode.answer == "42"), evidence=f"answer {episode.answer}, outputs {sorted(episode.outputs)}")


class Family:
    name = "hostile"

    def __init__(self, seed):
        pass

    def size(self, split):
        return None

    def task(self, split, index):
        return Task(
            id=f"{split}-{index}", family=self.name, prompt=(Message(role="user", content=f"What is 6 * 7? ({split} {index})"),),
            tools=("python", "shell", "submit", "mine:calculator", "mine:lookup", "mine:read_file"),
            sandbox=SandboxSpec(image="image", memory_mb=128, processes=16, disk_mb=16),
            verifiers=("mine:verifier",), data={"answer": "42"}, split=split, outputs=("**",) if index % 2 else (),
            limits=Limits(turns=8, turn_tokens=12000, episode_tokens=14000, tool_timeout_s=2.0, tool_output_chars=400, wall_s=300.0),
        )

    def gold(self, task):
        return "print(6 * 7)"
"""

RECIPE = f"""
from agentrl.config import *
recipe = Recipe(
    name="hostile", steps={STEPS}, policy=PolicyConfig(model="model", dtype="float32", max_model_len={CONTEXT}),
    tasks=TasksConfig(family="mine:Family"),
    rollout=RolloutConfig(group=GroupConfig(size={GROUP_SIZE}), groups_per_step={GROUPS_PER_STEP}, concurrency=16, checkpoint_turns=True),
    evaluation=EvalConfig(heldout=0, heldout_real=0),
    serving=ServingConfig(max_num_seqs=16, kv_cache_gb=0.3, threads=1),
    learner=LearnerConfig(lr=1e-4, zero_stage=0, threads=1, max_tokens_per_microbatch={CONTEXT}),
)
"""


def write_project(project: Path, image: Path) -> None:
    """A project: a tiny model with a long context, a family whose tools raise, and a recipe."""
    from agentrl.testing.tiny_model import make_model

    model = make_model(0, hidden=64, layers=2, vocabulary=len(TOKENIZER))
    model.config.max_position_embeddings = CONTEXT
    model.config.eos_token_id = TOKENIZER.eos_token_id
    model.save_pretrained(project / "model")
    TOKENIZER.save_pretrained(project / "model")
    (project / "image").mkdir()
    shutil.copy2(image, project / "image" / "image.toml")
    (project / "pyproject.toml").write_text("")
    (project / "mine.py").write_text(FAMILY)
    (project / "recipe.py").write_text(RECIPE)


def script_of(episode: str) -> tuple[str, Sequence[str]]:
    """The script of an episode such as g000001-3-a0: every name in turn, with one correct attempt per group."""
    group, member, _ = episode.split("-")
    index = int(group[1:]) * (GROUP_SIZE - 1) + int(member)
    names = list(SCRIPTS)
    return ("right", RIGHT) if int(member) == GROUP_SIZE - 1 else (names[index % len(names)], SCRIPTS[names[index % len(names)]])


class Scripted(SupervisedServer):
    """Returns its script instead of sampled tokens; logprobs are invented, versions are the serving ones."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        episode, _, turn = request_id.rpartition("-")
        _, turns = script_of(episode)
        text = turns[int(turn)] if int(turn) < len(turns) else "I have nothing more to say."
        ids: list[int] = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id][: params.max_tokens]
        spans = (VersionSpan(version=self.version, start=0, end=len(ids)),)
        finish = "stop" if ids[-1] == TOKENIZER.eos_token_id else "length"
        return Completion(token_ids=tuple(ids), logprobs=(-0.5,) * len(ids), versions=spans, finish_reason=finish)


def main(servers: str, learners: str, project: str, run_dir: str, backend: str, *options: Any) -> None:
    forked.use(Path(servers), Path(learners))
    builders.SupervisedServer = Scripted  # type: ignore[misc]
    cli.main(["train", f"{project}/recipe.py", "--run-dir", run_dir, "--sandbox", backend, *options])


if __name__ == "__main__":
    main(*sys.argv[1:])
