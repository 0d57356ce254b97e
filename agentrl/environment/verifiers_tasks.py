"""Packages for verifiers: `tasks.family="verifiers:PACKAGE"` after `agentrl env add PACKAGE`, or `"verifiers:path/to/file.py"`.

The package runs in a separate Python environment, in a host that calls the gateway; see `inside/verifiers_host.py`. The package's rewards
determine the score.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.base import secrets
from agentrl.base.user_code import raising_as
from agentrl.environment.host import HostSpec, describe
from agentrl.environment.inspect_tasks import POSTED, split_samples
from agentrl.environment.venvs import MissingPackage, environment_of, environment_python
from agentrl.errors import AgentRLError, PluginError, UserError
from agentrl.plugins.references import current_project
from agentrl.records import EnvironmentSpec, Limits, Message, SandboxSpec, Split, Task

PREFIX, PACKAGE = "verifiers:", "verifiers"
HOSTED_RUNTIMES = ("prime", "modal", "e2b")
CONTAINERS = ("docker", "podman", "apptainer")
SIZE = 10_000


def host_spec(spec: EnvironmentSpec) -> HostSpec:
    """Returns the command of the host for a package.

    Raises `UserError` if the host's Python environment does not exist, is ambiguous or is not built, or if a secret in the options cannot
    be read.
    """
    root, options = current_project(), secrets.resolve_options(spec.options)
    package, folder = _located(root, spec.ref.removeprefix(PREFIX))
    python = environment_python(root, str(options.get("environment") or _environment(root, package)))
    config = {
        "package": package,
        "args": options.get("args") or {},
        "env": options.get("env") or {},
        "runtime": options.get("runtime") or "subprocess",
        "sandboxed": bool(options.get("sandboxed")),
        "size": options.get("size") or SIZE,
    }
    variables = {"PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys((folder, root))))} | {
        str(name): str(value) for name, value in (options.get("variables") or {}).items()
    }
    return HostSpec(name=spec.ref, python=str(python), script="verifiers_host.py", config=config, environment=variables, folder=root)


def _located(root: Path, package: str) -> tuple[str, Path]:
    """Returns the module of a package and the folder to search: the folder that contains the package's file or folder, or the project."""
    path = root / package
    if ("/" in package or package.endswith(".py")) and path.exists():
        return path.stem, path.resolve().parent
    return package, root


def _environment(root: Path, package: str) -> str:
    """Returns the name of the environment that contains a package, or else the name of the environment that contains verifiers, because
    verifiers includes some tasksets. Raises `UserError` if neither can be determined, or if several environments contain the package."""
    try:
        return environment_of(root, package)
    except MissingPackage as missing:
        try:
            return environment_of(root, PACKAGE)
        except UserError:
            raise missing from None


class VerifiersFamily:
    """The tasks of a package for verifiers.

    Args:
        ref: `verifiers:PACKAGE`, or `verifiers:path/to/file.py` for a module of the project.
        seed: seed of the run, which determines the held-out tasks if the package has no evaluation set.
        size: maximum number of tasks; the maximum for each set if the package has a training set and an evaluation set.
        heldout: fraction of the tasks to hold out if the package has no evaluation set.
        limits: fields of `Limits` that differ from their defaults; the default of `turns` is 16.
        args: fields of the taskset's configuration; for verifiers 0.3, arguments of `load_environment`.
        env: other fields of the environment's configuration, such as the model of a judge. Only for verifiers 0.4.
        image: image of the sandboxes for programs that the package starts. If no image is set, starting a program is a fault.
        sandbox: additional fields of `SandboxSpec`.
        runtime: `docker`, `podman` or `apptainer` to run these programs in containers that verifiers starts, instead of in sandboxes. Only
            for verifiers 0.4.
        variables: additional environment variables of the host.
        environment: name of the environment in `.environments/`; the default is the environment that contains the package.

    Raises `UserError` or `PluginError` if the package cannot be loaded, or if an argument is invalid.
    """

    def __init__(
        self,
        ref: str,
        *,
        seed: int = 0,
        size: int = SIZE,
        heldout: float = 0.25,
        limits: Mapping[str, Any] | None = None,
        image: str = "",
        sandbox: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        _check(size, heldout, options)
        self.name = ref
        self._spec = EnvironmentSpec(ref=ref, options={**options, "size": size, "sandboxed": bool(image)})
        with raising_as(lambda error: PluginError(f"tasks.family.options: {error}", fix="correct sandbox or limits"), but=(AgentRLError,)):
            self._limits = Limits(**{"turns": 16, **(limits or {})})
            self._sandbox = SandboxSpec(image=image, **(sandbox or {})) if image else None
        described: list[dict[str, Any]] = describe(host_spec(self._spec))["tasks"]
        drawn = split_samples([sample for sample in described if not sample["split"]], seed=seed, heldout=heldout)
        self._tasks = {split: [*drawn[split], *(sample for sample in described if sample["split"] == split.value)] for split in Split}

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
            sandbox=self._sandbox,
            verifiers=(POSTED,),
            data={"task": task["data"]},
            split=split,
            limits=self._limits,
            environment=self._spec,
        )


def _check(size: Any, heldout: Any, options: Mapping[str, Any]) -> None:
    """Raises `PluginError` if an option is unknown or invalid."""
    known = ("args", "env", "runtime", "variables", "environment")
    if unknown := sorted(set(options) - set(known)):
        raise PluginError(
            f"tasks.family.options.{unknown[0]}: unknown option of verifiers",
            fix=f"the options are size, heldout, limits, image, sandbox, {', '.join(known)}",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise PluginError(f"tasks.family.options.size must be a number of tasks, got {size!r}", fix="size=1000")
    if not isinstance(heldout, int | float) or not 0 <= heldout < 1:
        raise PluginError(f"tasks.family.options.heldout must be at least 0 and below 1, got {heldout!r}", fix="heldout=0.25")
    runtime = options.get("runtime")
    if runtime not in (None, *CONTAINERS):
        what = "is a hosted runtime" if runtime in HOSTED_RUNTIMES else "is unknown"
        raise PluginError(
            f"tasks.family.options.runtime: {runtime!r} {what}", fix=f"use one of {', '.join(CONTAINERS)}, or the option image"
        )
