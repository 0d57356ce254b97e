"""`agentrl check`, `agentrl sandbox check` and `agentrl sandbox attack`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentrl.cli.running import JsonFlag, all_overrides, load_recipe, project_root
from agentrl.config.recipe import Recipe, SandboxConfig, TasksConfig
from agentrl.errors import UserError
from agentrl.plugins.parts import Part
from agentrl.plugins.references import add_project_root

if TYPE_CHECKING:
    from agentrl.check.purity import FamilySource
    from agentrl.check.report import CheckReport

BackendChoice = Annotated[str, typer.Option(help="docker, bubblewrap, auto, all, or module:attr.")]
ImageFolder = Annotated[str, typer.Option(help="Folder with an image.toml.")]
RuntimeName = Annotated[str, typer.Option(help="Container runtime for Docker, such as runsc or kata.")]


def check(
    target: Annotated[str, typer.Argument(help="Folder of task folders, a recipe file, or an environment such as mine:Guess.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Dotted overrides of the recipe, such as tasks.verifiers=...")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of tasks per split. Default: all tasks of a folder, 24 of a recipe.")
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option("--backend", "--sandbox", help="Sandbox backend: auto, docker, bubblewrap or module:attr. Overrides the recipe."),
    ] = None,
    parallel: Annotated[int, typer.Option(min=1, help="Number of tasks checked in parallel.")] = 8,
    as_json: JsonFlag = False,
) -> None:
    """Check in real sandboxes that a task family's gold solutions score 1, cheats score 0, splits do not overlap, and answers are hidden.

    An environment or a family that needs options is checked through a recipe that sets tasks.family.options.
    """
    from agentrl.check.check import check_family
    from agentrl.check.report import render
    from agentrl.session.judge_servers import standalone_judge_servers

    source, config, recipe = open_target(target, sandbox, overrides or [])
    wanted = count if count is not None or Path(target).is_dir() else 24

    async def checked() -> CheckReport:
        async with standalone_judge_servers(recipe, root=source.root):
            return await check_family(source, config, count=wanted, parallel=parallel, quiet=as_json)

    report = asyncio.run(checked())
    print(json.dumps(report.to_data()) if as_json else render(report))
    raise typer.Exit(0 if report.ok else 1)


def sandbox_check(
    backend: BackendChoice = "auto",
    image: ImageFolder = "sandboxes/tables",
    only: Annotated[str, typer.Option(help="Run only checks whose name contains this string.")] = "",
    runtime: RuntimeName = "",
    as_json: JsonFlag = False,
) -> None:
    """Check that a sandbox backend conforms to the protocol: limits, isolation, cleanup, and hostile programs."""
    from agentrl.check.check import check_backend, sandbox_configs

    root = project_root(Path.cwd() / image / "image.toml")
    add_project_root(root)
    checking = [check_backend(config, image, root=root, only=only, runtime=runtime) for config in sandbox_configs(backend)]
    results = [result for work in checking for result in asyncio.run(work)]
    if not results:
        raise UserError(f"no check matches --only {only!r}", fix="omit --only, which prints the names of all checks")
    if as_json:
        print(json.dumps(results))
    else:
        for item in results:
            verdict = "ok" if item["ok"] else "FAIL"
            print(f"{item['backend']:11} {verdict:4} {item['wall_s']:6.2f} s  {item['name']}  {item['detail']}")
    raise typer.Exit(0 if all(result["ok"] for result in results) else 1)


def sandbox_attack(
    backend: BackendChoice = "auto",
    image: ImageFolder = "sandboxes/tables",
    only: Annotated[str, typer.Option(help="Run only attacks whose name contains this string.")] = "",
    runtime: RuntimeName = "",
    as_json: JsonFlag = False,
) -> None:
    """Run hostile programs in a sandbox backend and report each as contained, ESCAPED or error. Takes about a minute per backend."""
    from agentrl.check.check import attack_backend, sandbox_configs
    from agentrl.sandbox.attacks import AttackResult

    def report(name: str, result: AttackResult) -> None:
        row = f"{name:11} {result.verdict:12} {result.wall_s:5.1f} s  {result.kind:16} {result.name:27} {result.evidence}"
        print(row, file=sys.stderr if as_json else sys.stdout, flush=True)

    root = project_root(Path.cwd() / image / "image.toml")
    results: list[dict[str, Any]] = []
    for config in sandbox_configs(backend):
        backend_results = asyncio.run(attack_backend(config, image, root=root, only=only, runtime=runtime, report=report))
        if not backend_results:
            raise UserError(f"no attack matches --only {only!r}", fix="omit --only, which prints the names of all attacks")
        counts = Counter(item["verdict"] for item in backend_results)
        tally = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        print(f"{config.backend}: {tally}", file=sys.stderr if as_json else sys.stdout)
        results += backend_results
    if as_json:
        print(json.dumps(results))
    bad = [item for item in results if item["verdict"] in ("ESCAPED", "error")]
    raise typer.Exit(1 if bad else 0)


def open_target(target: str, backend: str | None, overrides: Sequence[str] = ()) -> tuple[FamilySource, SandboxConfig, Recipe | None]:
    """Returns the task family, the sandbox settings and the recipe of a target: a folder of task folders, a recipe file, or a plug-in
    reference. The recipe is None unless the target is a recipe file. If `backend` selects several backends, the first is used. Raises
    `UserError` if the target cannot be opened, if there is no such backend, or if overrides are given without a recipe."""
    from agentrl.check.check import sandbox_configs
    from agentrl.check.purity import FamilySource

    path = Path(target)
    if path.is_dir() or (":" in target and not path.exists()):
        if overrides:
            raise UserError(
                f"{overrides[0]}: {target} accepts no overrides",
                fix="set tasks.family and tasks.family.options in a recipe, and check the recipe",
            )
        root = project_root((path.resolve() if path.is_dir() else Path.cwd()) / "task")
        add_project_root(root)
        family = str(path.resolve()) if path.is_dir() else target  # a `Path` would collapse the two slashes of openenv:http://HOST
        source = FamilySource(tasks=TasksConfig(family=Part(family)), root=root)
        source.open()  # report errors in the folder before those in the backend
        return source, sandbox_configs(backend or "auto")[0], None
    root, recipe = load_recipe(path, all_overrides(overrides, sandbox=backend))
    return FamilySource(tasks=recipe.tasks, root=root, seed=recipe.seed, mcp=recipe.mcp, tools=recipe.tools), recipe.sandbox, recipe
