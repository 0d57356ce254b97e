"""Tasks from inspect_ai: `tasks.family="inspect:module@task"` or `"inspect:path/to/file.py@task"`.

Each sample is a task. inspect runs in a separate Python environment (`agentrl env add inspect-ai`), in a host that calls the gateway; see
`inside/inspect_host.py`. The inspect task's scorers compute the score, and its tools run in agentrl's sandboxes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

from agentrl.base import secrets
from agentrl.base.user_code import raising_as
from agentrl.config.recipe import OWN_SOLVER
from agentrl.environment.host import HostSpec, describe
from agentrl.environment.hosted import as_object, host_of, run_in, score_of
from agentrl.environment.venvs import environment_of, environment_python
from agentrl.errors import AgentRLError, InfrastructureError, PluginError, TaskError, UserError
from agentrl.plugins.references import current_project
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl.records import EnvironmentSpec, Episode, Limits, Message, SandboxSpec, Score, Split, Task

PACKAGE = "inspect-ai"
POSTED = "agentrl.gateway:posted_reward"
OPTIONS = ("args", "solver", "score", "values", "model_roles", "variables", "environment")


def host_spec(spec: EnvironmentSpec) -> HostSpec:
    """Returns the command of the host for an inspect task. Raises `UserError` if the host's Python environment is missing, ambiguous or not
    built, or if a secret in the options cannot be read."""
    root, options = current_project(), secrets.resolve_options(spec.options)
    config = {
        "task": spec.ref.removeprefix("inspect:"),
        **{name: options.get(name) or {} for name in ("args", "values", "model_roles")},
        **{name: options.get(name) or "" for name in ("solver", "score")},
        "wall_s": options["wall_s"],
        "path": [str(root)],
    }
    return HostSpec(
        name=spec.ref,
        python=str(environment_python(root, str(options.get("environment") or environment_of(root, PACKAGE)))),
        script="inspect_host.py",
        config=config,
        environment={str(name): str(value) for name, value in (options.get("variables") or {}).items()},
        folder=root,
    )


class InspectFamily:
    """The samples of an inspect task.

    Args:
        ref: `inspect:module@task` or `inspect:path/to/file.py@task`.
        seed: seed of the run, which determines the held-out samples.
        heldout: fraction of the samples to hold out.
        image: image of the sandboxes; required for tasks that use a sandbox.
        sandbox: additional fields of `SandboxSpec`.
        limits: fields of `Limits` that differ from their defaults; the default of `turns` is 16.
        args: arguments of the task function.
        solver: `module@solver`, a function that returns the solver to use instead of the task's solver; `agentrl` selects the turn loop.
        tools: tools of the turn loop.
        outputs: files that the scorers read after the turn loop (`Task.outputs`).
        score: name of the scorer, or `scorer/key`, whose value is the score; the default is the mean over all scorers.
        values: mapping value -> number, for scorers that return values other than C, P, I and N.
        model_roles: mapping role -> model, for scorers that grade with a model, such as `{"grader": "openai/gpt-5"}`.
        variables: additional environment variables of the host, such as API keys for these models.
        environment: name of the environment in `.environments/`; the default is the environment that contains the package inspect-ai.

    Raises `UserError` or `PluginError` if the task cannot be loaded, or if an argument is invalid.
    """

    def __init__(
        self,
        ref: str,
        *,
        seed: int = 0,
        heldout: float = 0.25,
        image: str = "",
        sandbox: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        tools: Sequence[str] = (),
        outputs: Sequence[str] = (),
        **options: Any,
    ) -> None:
        if unknown := sorted(set(options) - set(OPTIONS)):
            raise PluginError(f"tasks.family.options.{unknown[0]}: unknown option of inspect tasks", fix=f"use one of {', '.join(OPTIONS)}")
        own = options.get("solver") == OWN_SOLVER
        if (tools or outputs) and not own:
            raise PluginError(f"tasks.family.options: tools and outputs require solver={OWN_SOLVER}", fix="remove them")
        self.name = ref
        with raising_as(lambda error: PluginError(f"tasks.family.options: {error}", fix="correct sandbox or limits"), but=(AgentRLError,)):
            self._limits = Limits(**{"turns": 16, **(limits or {})})
            spec = SandboxSpec(image=image or "-", **(sandbox or {}))
        self._spec = EnvironmentSpec(ref=ref, options={**options, "wall_s": self._limits.wall_s})
        samples = describe(host_spec(self._spec))["samples"]
        self._samples = split_samples(samples, seed=seed, heldout=heldout)
        used = [sample for sample in samples if sample["sandbox"] is not None]
        if (used or tools) and not image:
            config = next((f" (with {sample['sandbox']})" for sample in used if sample["sandbox"]), "")
            raise UserError(
                f"{ref}: its samples use a sandbox{config}, but no image is set",
                fix='set tasks.family.options.image to a folder with an image.toml or a Dockerfile, such as "sandboxes/tables"',
            )
        self._sandbox = spec if used or tools else None
        self._tools, self._outputs = tuple(tools), tuple(outputs)
        self._own, self._verifier = own, f"{__name__}:score_ended" if own else POSTED

    def size(self, split: Split) -> int:
        """Returns the number of samples in the split."""
        return len(self._samples[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of a sample."""
        sample = self._samples[split][index]
        return Task(
            id=f"{self.name}/{sample['id']}"[:300],
            family=self.name,
            prompt=tuple(Message(role=message["role"], content=message["content"] or "-") for message in sample["prompt"]),
            tools=self._tools,
            sandbox=self._sandbox,
            verifiers=(self._verifier,),
            data={"sample": sample["id"], "sha256": sample["sha256"], **({"inspect": asdict(self._spec)} if self._own else {})},
            split=split,
            binary_files=sample["files"],
            outputs=self._outputs,
            limits=self._limits,
            environment=None if self._own else self._spec,  # otherwise the turn loop would act in the environment
        )


async def _score_ended(task: Task, episode: Episode, sandboxes: SandboxBackend) -> Score:
    """Scores an episode of the turn loop with the scorers of its inspect task. The scorers receive the episode's messages, its answer, and
    a new sandbox with its outputs. If the scorers fail, raises `TaskError`, `InfrastructureError` or, if the policy is to blame,
    `RuntimeError`."""
    host, limit_s = host_of(EnvironmentSpec(**task.data["inspect"])), task.limits.wall_s
    async with AsyncExitStack() as stack:
        opened: list[Sandbox] = []
        opening = asyncio.Lock()  # concurrent requests share one sandbox

        async def serve(method: str, params: Mapping[str, Any]) -> Any:
            async with opening:
                if not opened:
                    if task.sandbox is None:
                        raise TaskError(f"task {task.id!r} has no sandbox, but its scorer uses one", fix="set tasks.family.options.image")
                    files = {path: data for path, data in {**task.contents(), **episode.outputs}.items() if path not in episode.removed}
                    opened.append(await sandboxes.open(task.sandbox, files=files))
                    stack.push_async_callback(opened[0].close)
            return await run_in(opened[0], method, params, limit_s=limit_s)

        params = {
            **{"episode": episode.id, "base_url": "http://127.0.0.1", "key": "-", "model": "-", "data": dict(task.data)},
            **{"turns": 0, "solve_s": limit_s, "ended": {"messages": list(_messages(task, episode)), "answer": episode.answer or ""}},
        }
        result = as_object(await host.call("play", params, timeout_s=limit_s, serve=serve), host)
    if isinstance(fault := result.get("fault"), Mapping):
        kind = {"task": TaskError, "policy": RuntimeError}.get(str(fault.get("blame")), InfrastructureError)
        raise kind(str(fault.get("message"))[:2000])
    return score_of(result)


def _messages(task: Task, episode: Episode) -> Iterator[dict[str, Any]]:
    """Yields the messages of the main trajectory in inspect's format."""
    for message in task.prompt:
        yield {"role": message.role, "content": message.content}
    for number, turn in enumerate(episode.trajectories[0].turns):
        calls = [
            {"id": f"call_{number}_{at}", "function": call.name, "arguments": dict(call.arguments)}
            for at, call in enumerate(turn.message.tool_calls)
        ]
        yield {"role": "assistant", "content": turn.message.content, "tool_calls": calls}
        for call, result in zip(calls, turn.tool_results, strict=False):
            yield {"role": "tool", "content": result.output, "tool_call_id": call["id"]}


class ScoreEnded:
    """An `agentrl.protocols.SandboxVerifier` that calls `_score_ended`."""

    needs_sandboxes = True
    __call__ = staticmethod(_score_ended)


score_ended = ScoreEnded()


def split_samples(samples: Sequence[Mapping[str, Any]], *, seed: int, heldout: float) -> dict[Split, list[Mapping[str, Any]]]:
    """Returns the samples by split. Holds out the fraction `heldout` of the samples: those with the lowest hashes of seed and `id`. At
    least one sample is held out and at least one is not, unless `heldout` is 0 or there is only one sample, which is then for training.
    Raises `PluginError` unless `heldout` is at least 0 and below 1."""
    if isinstance(heldout, bool) or not isinstance(heldout, int | float) or not 0 <= heldout < 1:
        raise PluginError(f"tasks.family.options.heldout must be at least 0 and below 1, got {heldout!r}", fix="heldout=0.25")
    order = sorted(samples, key=lambda each: hashlib.sha256(f"{seed}/{each['id']}".encode()).digest())
    count = min(max(1, round(heldout * len(order))), len(order) - 1) if heldout and len(order) > 1 else 0
    held = {sample["id"] for sample in order[:count]}
    return {
        Split.HELDOUT: [sample for sample in samples if sample["id"] in held],
        Split.TRAIN: [sample for sample in samples if sample["id"] not in held],
        Split.HELDOUT_REAL: [],
    }
