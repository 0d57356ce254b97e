"""Tasks of inspect_ai: `tasks.family="inspect:module@task"` or `"inspect:path/to/file.py@task"`.

Each sample is a task. inspect runs in an environment of its own (`agentrl env add inspect-ai`), in a host that calls the gateway; see
`inside/inspect_host.py`. The task's scorers give the score, and its tools run in agentrl's sandboxes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentrl.environment.host import HostSpec, describe
from agentrl.environment.venvs import environment_of, environment_python
from agentrl.errors import PluginError, UserError
from agentrl.records import EnvironmentSpec, Limits, Message, SandboxSpec, Split, Task

PACKAGE = "inspect-ai"
VERIFIER = "agentrl.gateway:posted_reward"
AGENT = "agentrl.environment.hosted:HostedAgent"


def host_spec(spec: EnvironmentSpec) -> HostSpec:
    """Returns how the host of an inspect task is started. Raises `UserError` if its environment is not built."""
    root = Path.cwd()
    options = spec.options
    python = environment_python(root, str(options.get("environment") or environment_of(root, PACKAGE)))
    config = {
        "task": spec.ref.removeprefix("inspect:"),
        **{name: options.get(name) or {} for name in ("args", "values", "model_roles")},
        **{name: options.get(name) or "" for name in ("solver", "score")},
        "path": [str(root)],
    }
    return HostSpec(name=spec.ref, python=str(python), script="inspect_host.py", config=config, environment=_texts(options), folder=root)


def _texts(options: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in (options.get("variables") or {}).items()}


class InspectFamily:
    """The samples of an inspect task.

    Args:
        ref: `inspect:module@task` or `inspect:path/to/file.py@task`.
        seed: seed of the run, which draws the held-out samples.
        heldout: share of the samples that is held out.
        image: image of the sandboxes, for tasks that use one.
        sandbox: further fields of `SandboxSpec`.
        limits: fields of `Limits` that differ from the default.
        args: arguments of the task function.
        solver: `module@solver`, a function that returns the solver to use instead of the task's.
        score: name of the scorer, or `scorer/key`, whose value is the score; the default is the mean of all scorers.
        values: word -> number for scorers with values of their own, in addition to C, P, I and N.
        model_roles: role -> model for scorers that grade with a model, such as `{"grader": "openai/gpt-5"}`.
        variables: additional environment variables of the host, such as keys of these models.
        environment: name of the environment in `.environments/`; the default is the one with the package inspect-ai.

    Raises `UserError` or `PluginError` for a task that cannot be loaded, or an invalid value.
    """

    agent = AGENT

    def __init__(
        self,
        ref: str,
        *,
        seed: int = 0,
        heldout: float = 0.25,
        image: str = "",
        sandbox: Mapping[str, Any] | None = None,
        limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        known = ("args", "solver", "score", "values", "model_roles", "variables", "environment")
        if unknown := sorted(set(options) - set(known)):
            raise PluginError(
                f"tasks.family.options.{unknown[0]}: unknown option of inspect tasks", fix=f"the options are {', '.join(known)}"
            )
        if unknown := sorted({*(limits or {})} - {field.name for field in fields(Limits)}):
            raise PluginError(f"tasks.family.options.limits has no field {unknown[0]!r}", fix="use fields of agentrl.records.Limits")
        if not 0 <= heldout < 1:
            raise PluginError(f"tasks.family.options.heldout must be at least 0 and below 1, got {heldout}", fix="heldout=0.25")
        self.name = ref
        self._spec = EnvironmentSpec(ref=ref, options=options)
        self._limits = Limits(**{"turns": 16, **(limits or {})})
        described = describe(host_spec(self._spec))
        self._samples = split_samples(described["samples"], seed=seed, heldout=heldout)
        used = [each for samples in self._samples.values() for each in samples if each["sandbox"] is not None]
        if used and not image:
            raise UserError(
                f"{ref}: {len(used)} samples use a sandbox{_configured(used)}, and agentrl runs them in sandboxes of its own",
                fix='set tasks.family.options.image to a folder with an image.toml or a Dockerfile, such as "sandboxes/tables"',
            )
        self._sandbox = SandboxSpec(image=image, **(sandbox or {})) if used else None

    def size(self, split: Split) -> int:
        """Returns the number of samples in the split."""
        return len(self._samples[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of a sample."""
        sample = self._samples[split][index]
        return Task(
            id=f"{self.name}/{sample['id']}"[:300],
            family=self.name,
            prompt=(Message(role="user", content=sample["input"] or "-"),),
            tools=(),
            sandbox=self._sandbox,
            verifiers=(VERIFIER,),
            data={"sample": sample["id"], "sha256": sample["sha256"]},
            split=split,
            limits=self._limits,
            environment=self._spec,
        )


def _configured(samples: list[Mapping[str, Any]]) -> str:
    configured = next((each["sandbox"] for each in samples if each["sandbox"]), "")
    return f" (with {configured})" if configured else ""


def split_samples(samples: list[Mapping[str, Any]], *, seed: int, heldout: float) -> dict[Split, list[Mapping[str, Any]]]:
    """Holds out a share of the samples: those with the lowest hashes of seed and id."""
    order = sorted(samples, key=lambda each: hashlib.sha256(f"{seed}/{each['id']}".encode()).digest())
    count = min(max(1, round(heldout * len(order))), len(order) - 1) if heldout and len(order) > 1 else 0
    held = {each["id"] for each in order[:count]}
    return {
        Split.HELDOUT: [each for each in samples if each["id"] in held],
        Split.TRAIN: [each for each in samples if each["id"] not in held],
        Split.HELDOUT_REAL: [],
    }
