"""`agentrl cluster`: shows the resources that a run needs, and writes the files that Kubernetes and Docker need to start it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.cli import command_group
from agentrl.cli.running import JsonFlag, all_overrides, load_recipe, say
from agentrl.errors import UserError

if TYPE_CHECKING:
    from agentrl.cluster.fit import ClusterNode
    from agentrl.cluster.plan import ClusterPlan
    from agentrl.config import Recipe

cluster_app = command_group()

RecipeFile = Annotated[Path, typer.Argument(help="Recipe file: a Python file with a module-level `recipe`.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Dotted overrides, such as serving.replicas=4.")]


@cluster_app.command(
    "plan",
    epilog="Example: agentrl cluster plan recipes/quickstart.py rollout.workers=8; "
    "agentrl cluster plan recipes/quickstart.py --cluster head:6379",
)
def plan(
    recipe: RecipeFile,
    overrides: Overrides = None,
    cluster: Annotated[
        str | None, typer.Option(help="Ray cluster: auto, HOST:PORT or ray://HOST:PORT. Also show whether the plan fits this cluster.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the parts that a recipe starts and the resources that each reserves, without starting anything.

    With --cluster, or with cluster.address in the recipe, also show the nodes of the cluster. The exit code is 2 if the plan cannot fit.
    """
    from agentrl.cluster.plan import plan_here

    _, loaded = load_recipe(recipe, all_overrides(overrides, cluster=cluster))
    if loaded.cluster.is_local:
        _show_plan(plan_here(loaded), as_json=as_json)
        return
    _plan_on_cluster(loaded, as_json=as_json)


def _plan_on_cluster(recipe: Recipe, *, as_json: bool) -> None:
    from agentrl.cluster.fit import fit_as_data, fit_plan, no_fit_error
    from agentrl.cluster.plan import plan_parts
    from agentrl.cluster.ray_nodes import list_nodes

    nodes = list_nodes(recipe.cluster.address)
    has_gpus = any(node.total.get("GPU", 0) for node in nodes)
    planned = plan_parts(recipe, on_gpus=recipe.device == "cuda" or (recipe.device == "auto" and has_gpus))
    fit = fit_plan(planned, nodes)
    if as_json:
        print(json.dumps(planned.as_data() | fit_as_data(fit, nodes)))
        raise typer.Exit(2 if fit.is_impossible else 0)
    if fit.is_impossible:
        raise no_fit_error(planned, nodes, fit.problems)
    _show_plan(planned, nodes, assignment_note(planned, nodes))


def assignment_note(plan: ClusterPlan, nodes: Sequence[ClusterNode]) -> str:
    """Returns a sentence that states whether the plan fits now."""
    from agentrl.cluster.fit import fit_plan

    now = fit_plan(plan, nodes, now=True)
    if now.assignment is not None:
        return "The plan fits."
    if fit_plan(plan, nodes).assignment is not None:
        return "The plan fits the cluster, but not the resources that other jobs leave free: " + (
            "; ".join(now.problems) or "they are too fragmented"
        )
    return (
        "No assignment to nodes was found, but the cluster has enough resources in total. "
        "Ray may find one; this is more likely if the parts reserve less."
    )


def _show_plan(plan: ClusterPlan, nodes: Sequence[ClusterNode] = (), note: str = "", *, as_json: bool = False) -> None:
    from agentrl.cluster.fit import describe_nodes, describe_plan, fit_plan

    if as_json:
        print(json.dumps(plan.as_data()))
        return
    print(describe_plan(plan, fit_plan(plan, nodes).assignment if nodes else None))
    if nodes:
        print(f"\n{describe_nodes(nodes)}\n\n{note}")


@cluster_app.command(
    "manifest",
    epilog="Example: agentrl cluster manifest recipes/quickstart.py device=cpu rollout.workers=4 store=redis --image registry/agentrl:1"
    " --out run.yaml",
)
def manifest(
    recipe: RecipeFile,
    overrides: Overrides = None,
    image: Annotated[str, typer.Option(help="Image for all pods; see `agentrl cluster dockerfile`.")] = "agentrl:latest",
    namespace: Annotated[str, typer.Option(help="Namespace of all objects.")] = "default",
    storage: Annotated[str, typer.Option(help="Size of the volume for the run folder.")] = "100Gi",
    egress: Annotated[
        list[str] | None, typer.Option(help="Address range that the driver and workers may reach, such as 203.0.113.0/24. Default: none.")
    ] = None,
    cells: Annotated[
        int, typer.Option(min=0, help="Number of pods for sandboxes. 0: sandboxes open in the pods of the driver and workers.")
    ] = 0,
    cell_memory: Annotated[str, typer.Option(help="Memory of each sandbox pod, shared by its sandboxes.")] = "8Gi",
    out: Annotated[Path | None, typer.Option(help="File to write. Default: standard output.")] = None,
) -> None:
    """Write the Kubernetes objects for a run as YAML: a KubeRay RayJob, Redis, network policies and a volume.

    The recipe must set device=cpu or device=cuda. The file contains no secrets: Redis reads its password from a Kubernetes Secret. The
    first lines of the file show the command that creates the Secret.
    """
    from agentrl.cluster.manifest import ManifestOptions, build_objects, object_name
    from agentrl.cluster.plan import plan_parts
    from agentrl.cluster.yaml_text import to_yaml

    all_overrides = tuple(overrides or ())
    root, loaded = load_recipe(recipe, ["cluster.address=auto", *all_overrides])
    if loaded.device == "auto":
        raise UserError("device=auto: the manifest must specify whether pods request GPUs", fix="add device=cuda or device=cpu")
    path = recipe.resolve().relative_to(root.resolve()).as_posix()
    options = ManifestOptions(
        recipe=path,
        overrides=all_overrides,
        image=image,
        namespace=namespace,
        storage=storage,
        egress=tuple(egress or ()),
        cells=cells,
        cell_memory=cell_memory,
    )
    objects = build_objects(loaded, plan_parts(loaded, on_gpus=loaded.device == "cuda"), options)
    name = object_name(loaded.name)
    comments = [
        f"Run {loaded.name} of {path}. Needs the KubeRay operator 1.7 and Kubernetes 1.33 or later.",
        f"kubectl -n {namespace} create secret generic {name}-redis --from-literal=password=$(openssl rand -hex 32)",
        *([f"kubectl -n {namespace} create secret generic {name}-sandbox --from-literal=key=$(openssl rand -hex 32)"] if cells else []),
        f"kubectl apply -f {shlex.quote(str(out)) if out else 'THIS_FILE'}",
    ]
    _write(to_yaml(objects, comments=comments), out)


@cluster_app.command("dockerfile", epilog="Example: agentrl cluster dockerfile --out build/Dockerfile")
def write_dockerfile(
    gpu: Annotated[bool, typer.Option("--gpu", help="Build for NVIDIA GPUs. Default: for CPUs.")] = False,
    project: Annotated[Path, typer.Option(help="Project folder, which becomes /project in the image.")] = Path(),
    requirement: Annotated[str | None, typer.Option(help="Requirement for pip that installs agentrl. Default: this version.")] = None,
    out: Annotated[Path | None, typer.Option(help="File to write, next to its .dockerignore. Default: standard output.")] = None,
) -> None:
    """Write a Dockerfile for the image that all pods of a run use. The image contains the project and its sandbox images."""
    from agentrl.cluster.dockerfile import IGNORED, dockerfile, project_requirement

    installed = project_requirement(project, "gpu" if gpu else "cpu", requirement)
    images = sorted(path.parent.relative_to(project).as_posix() for path in project.glob("sandboxes/*/image.toml"))
    _write(dockerfile("gpu" if gpu else "cpu", installed, images), out)
    if out is not None:
        out.with_name(f"{out.name}.dockerignore").write_text("".join(f"{pattern}\n" for pattern in IGNORED), encoding="utf-8")


def _write(text: str, out: Path | None) -> None:
    if out is None:
        print(text, end="")
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}", fix="choose a different --out") from error
    say(f"wrote {out}", file=sys.stderr)
