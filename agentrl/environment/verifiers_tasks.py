"""Packages for verifiers: `tasks.family="verifiers:PACKAGE"`, after `agentrl env add PACKAGE`.

The package runs in its own environment, in a host that calls the gateway; see `inside/verifiers_host.py`. Its rewards are the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.base import secrets
from agentrl.base.user_code import raising_as
from agentrl.environment.host import HostSpec, describe
from agentrl.environment.inspect_tasks import POSTED, split_samples
from agentrl.environment.venvs import environment_of, environment_python
from agentrl.errors import AgentRLError, PluginError, UserError
from agentrl.records import EnvironmentSpec, Limits, Message, Split, Task

PREFIX, PACKAGE = "verifiers:", "verifiers"
HOSTED_RUNTIMES = ("prime", "modal", "e2b")
RUNTIMES = ("subprocess", "docker", "podman", "apptainer")
SIZE = 10_000


def host_spec(spec: EnvironmentSpec) -> HostSpec:
    """Returns how the host of a package is started. Raises `UserError` if its environment is not built."""
    root, options = Path.cwd(), secrets.resolve_options(spec.options)
    package = spec.ref.removeprefix(PREFIX)
    python = environment_python(root, str(options.get("environment") or _environment(root, package)))
    config = {
        "package": package,
        "args": options.get("args") or {},
        "env": options.get("env") or {},
        "runtime": options.get("runtime") or RUNTIMES[0],
        "size": options.get("size") or SIZE,
    }
    variables = {"PYTHONPATH": str(root)} | {str(name): str(value) for name, value in (options.get("variables") or {}).items()}
    return HostSpec(name=spec.ref, python=str(python), script="verifiers_host.py", config=config, environment=variables, folder=root)


def _environment(root: Path, package: str) -> str:
    """Returns the environment with a package, or with verifiers, which contains some tasksets."""
    try:
        return environment_of(root, package)
    except UserError as missing:
        try:
            return environment_of(root, PACKAGE)
        except UserError:
            raise missing from None


class VerifiersFamily:
    """The tasks of a package for verifiers.

    Args:
        ref: `verifiers:PACKAGE`.
        seed: seed of the run, which draws the held-out tasks of a package without an evaluation set.
        size: largest number of tasks, or of tasks of each set.
        heldout: share of the tasks that is held out.
        limits: fields of `Limits` that differ from the default.
        args: fields of the taskset's configuration; for verifiers 0.3, arguments of `load_environment`.
        env: other fields of the environment's configuration, such as the model of a judge. Only for verifiers 0.4.
        runtime: where programs run that the package starts: `subprocess` (this machine), `docker`, `podman` or `apptainer`.
        variables: additional environment variables of the host.
        environment: name of the environment in `.environments/`; the default is the one with the package.

    Raises `UserError` or `PluginError` for a package that cannot be loaded, or an invalid value.
    """

    def __init__(
        self,
        ref: str,
        *,
        seed: int = 0,
        size: int = SIZE,
        heldout: float = 0.25,
        limits: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check(size, heldout, options)
        self.name = ref
        self._spec = EnvironmentSpec(ref=ref, options={**options, "size": size})
        with raising_as(
            lambda error: PluginError(f"tasks.family.options.limits: {error}", fix="use fields of Limits"), but=(AgentRLError,)
        ):
            self._limits = Limits(**{"turns": 16, **(limits or {})})
        described: list[dict[str, Any]] = describe(host_spec(self._spec))["tasks"]
        drawn = split_samples([each for each in described if not each["split"]], seed=seed, heldout=heldout)
        self._tasks = {split: [*drawn[split], *(each for each in described if each["split"] == split.value)] for split in Split}

    def size(self, split: Split) -> int:
        """Returns the number of tasks in the split."""
        return len(self._tasks[split])

    def task(self, split: Split, index: int) -> Task:
        """Returns the task at an index of a split."""
        task = self._tasks[split][index]
        return Task(
            id=f"{self.name}/{task['split']}/{task['id']}"[:300],
            family=self.name,
            prompt=(Message(role="user", content=task["prompt"] or "-"),),
            tools=(),
            verifiers=(POSTED,),
            data={"task": task["data"]},
            split=split,
            limits=self._limits,
            environment=self._spec,
        )


def _check(size: Any, heldout: Any, options: Mapping[str, Any]) -> None:
    """Raises `PluginError` for an option that is unknown or invalid."""
    known = ("args", "env", "runtime", "variables", "environment")
    if unknown := sorted(set(options) - set(known)):
        raise PluginError(
            f"tasks.family.options.{unknown[0]}: unknown option of verifiers",
            fix=f"the options are size, heldout, limits, {', '.join(known)}",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PluginError(f"tasks.family.options.size must be a number of tasks, got {size!r}", fix="size=1000")
    if not isinstance(heldout, int | float) or not 0 <= heldout < 1:
        raise PluginError(f"tasks.family.options.heldout must be at least 0 and below 1, got {heldout!r}", fix="heldout=0.25")
    runtime = options.get("runtime", RUNTIMES[0])
    if runtime in HOSTED_RUNTIMES:
        raise PluginError(f"tasks.family.options.runtime: {runtime!r} is a hosted runtime", fix=f"use one of {', '.join(RUNTIMES)}")
    if runtime not in RUNTIMES:
        raise PluginError(f"tasks.family.options.runtime: no runtime {runtime!r}", fix=f"use one of {', '.join(RUNTIMES)}")
