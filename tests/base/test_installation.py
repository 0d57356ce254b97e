"""Every install command in the product or a page installs this project, or a package in its metadata or locks."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from agentrl.base import installation
from agentrl.base.installation import DISTRIBUTION, install_command, requirement
from agentrl.cli.project import init_project

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
# Sources and pages. Tests and the changelog are excluded because they quote wrong commands.
PRINTED = (
    "agentrl",
    "docs",
    "recipes",
    "rewards",
    "sandboxes",
    "scripts",
    "evals",
    "requirements",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
)
TEXT = {".py", ".md", ".in", ".toml", ".sh", ".lock", ".txt", ""}
COMMAND = re.compile(r"\b(?:pip3?|uv pip|uv|pipx|uvx|poetry|conda) (?:install|add|run)\b([^`\n]*)")
EXTRA = re.compile(r"\bagentrl\[[^\]\n]*\]")
CALL = re.compile(r"install_command\(([^()]*)\)")
TAKES_A_VALUE = ("-r", "--retries")
ALLOWED = {
    "docs/bring-your-own-agent.md": "openai",  # in a sandbox's image
    "scripts/workloads/packages.sh": "./own-1-py3-none-any.whl",
    "agentrl/model/source.py": "{name}",  # an installed distribution's own name
    "agentrl/cli/doctor.py": "the",  # prose: the packages of a lock
    "agentrl/cluster/dockerfile.py": "{installed} uv",  # `project_requirement`; uv chooses the build of torch
}


def pages() -> list[Path]:
    paths = []
    for name in PRINTED:
        path = ROOT / name
        paths += [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file() and child.suffix in TEXT]
    excluded = Path(installation.__file__)  # builds the commands; tested below
    return [path for path in paths if path != excluded and not {"__pycache__", "models"} & {*path.parts}]


@cache
def known_packages() -> set[str]:
    """Packages in the metadata and locks of this project."""
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    for lock in (ROOT / "requirements").glob("*.lock"):
        lines += [line for line in lock.read_text().splitlines() if line and not line.startswith("#")]
    return {Requirement(line.partition(" #")[0]).name.lower().replace("_", "-") for line in lines}


def invalid_commands(text: str, *, allowed: str = "") -> list[str]:
    """Errors in commands whose first operand is a package unknown to this project, or its old name."""
    errors = [f"{match}: agentrl is another project's package" for match in EXTRA.findall(text)]
    for command in COMMAND.findall(text):
        tokens = [token.strip("'\",;()") for token in command.split()]
        operands = [token for previous, token in pairwise(["", *tokens]) if not token.startswith("-") and previous not in TAKES_A_VALUE]
        for operand in operands[:1]:
            name, extras = re.split(r"[=<>@~! ]", operand)[0].removesuffix("]").partition("[")[::2]
            if not set(filter(None, extras.split(","))) <= EXTRAS:
                errors.append(f"pip install{command}: no such extra")
            elif name not in (".", *allowed.split()) and name.lower().replace("_", "-") not in known_packages() | {DISTRIBUTION}:
                errors.append(f"pip install{command}: {name} is not a package that this project names")
    return errors


@pytest.mark.slow
def test_every_printed_command_installs_this_project_or_a_known_package() -> None:
    errors_by_file = {}
    for path in pages():
        name = str(path.relative_to(ROOT))
        if errors := invalid_commands(path.read_text(encoding="utf-8"), allowed=ALLOWED.get(name, "")):
            errors_by_file[name] = errors
    assert errors_by_file == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'agentrl[gateway]'",
        "install agentrl[cpu] or more",
        "pip install agentrl",
        "`pip install stranger`",
        "pip install -e '.[no]'",
    ],
)
def test_commands_with_unknown_packages_are_detected(text: str) -> None:
    assert invalid_commands(text)


def test_the_extras_in_suggested_fixes_exist() -> None:
    calls = [call for path in pages() if path.suffix == ".py" for call in CALL.findall(path.read_text(encoding="utf-8"))]
    literal = {word for call in calls for word in re.findall(r"['\"]([a-z]+)['\"]", call)}
    assert {"gateway", "models", "cpu", "gpu", "reasoning"} <= literal <= EXTRAS


@pytest.mark.slow
def test_a_checkout_is_installed_from_its_folder() -> None:
    command = shlex.split(install_command("gateway", "rewards"))
    assert command == ["pip", "install", "-e", f"{ROOT}[gateway,rewards]"]
    offline = ["--dry-run", "--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--report", "-"]
    result = subprocess.run([sys.executable, "-m", *command[:2], *offline, *command[2:]], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (item,) = json.loads(result.stdout)["install"]
    assert item["metadata"]["name"] == DISTRIBUTION == PROJECT["name"] and item["download_info"]["url"] == ROOT.as_uri()
    assert set(item["requested_extras"]) == {"gateway", "rewards"} and item["metadata"]["version"] == PROJECT["version"]


def installed_as(folder: Path, record: dict[str, object] | None) -> Path:
    """A folder like site-packages with the package and its metadata."""
    info = folder / "agentrl_posttraining-0.1.0.dist-info"
    (folder / "agentrl").mkdir(parents=True)
    info.mkdir()
    shutil.copy(installation.__file__, folder / "agentrl")
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: 0.1.0\n")
    if record is not None:
        (info / "direct_url.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize(
    ("record", "command", "expected"),
    [
        (None, "pip install 'agentrl-posttraining[cpu]==0.1.0'", "agentrl-posttraining==0.1.0"),
        (
            {"url": "https://x.example/a.whl", "archive_info": {}},
            "pip install 'agentrl-posttraining[cpu] @ https://x.example/a.whl'",
            "agentrl-posttraining @ https://x.example/a.whl",
        ),
        (
            {"url": "https://x.example/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc", "requested_revision": "main"}},
            "pip install 'agentrl-posttraining[cpu] @ git+https://x.example/r.git@abc'",
            "agentrl-posttraining @ git+https://x.example/r.git@abc",
        ),
        ({"url": "file:///a%20b/c", "dir_info": {}}, "pip install '/a b/c[cpu]'", "agentrl-posttraining @ file:///a%20b/c"),
    ],
)
def test_other_installations_are_extended_from_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: dict[str, object] | None, command: str, expected: str
) -> None:
    root = installed_as(tmp_path / "site", record)
    monkeypatch.syspath_prepend(str(root))
    assert install_command("cpu", root=root) == command
    assert requirement(root=root) == expected
    assert Requirement(requirement(root=root)).name == DISTRIBUTION
    # Metadata of another copy on the path do not apply to this one.
    (tmp_path / "copied").mkdir()
    assert install_command("cpu", root=tmp_path / "copied").startswith("pip install 'CHECKOUT[cpu]', where CHECKOUT is a copy of")


def test_damaged_records_of_pip_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, text in enumerate(("{", "[]", '{"url": 3}', "null")):
        root = installed_as(tmp_path / str(number), {})
        (root / "agentrl_posttraining-0.1.0.dist-info" / "direct_url.json").write_text(text)
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(root))
            assert install_command(root=root) == "pip install agentrl-posttraining==0.1.0"


def test_a_new_project_depends_on_this_installation(tmp_path: Path) -> None:
    init_project(tmp_path / "mine", "mine")
    (depends,) = tomllib.loads((tmp_path / "mine" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert Requirement(depends).name == DISTRIBUTION and Requirement(depends).url == ROOT.as_uri()


# Which build of torch set-up installs.
FILE = Path(__file__).resolve().parents[2] / "scripts" / "install_torch.py"


class Commands:
    """Simulates the commands of set-up: the version in the configured index, and whether PyTorch's index answers."""

    def __init__(self, *, served: str, reachable: bool) -> None:
        self.served, self.reachable, self.installed = served, reachable, list[str]()

    def __call__(self, command: Sequence[str], timeout_s: float | None) -> subprocess.CompletedProcess[str]:
        code, out = 0, ""
        if "--report" in command:
            out = json.dumps({"install": [{"metadata": {"version": self.served}}]})
        elif "--torch-backend" in command:
            assert "--dry-run" not in command or timeout_s is not None, "an index that does not answer must not delay set-up"
            code = 0 if self.reachable else 124
            if "--dry-run" not in command:
                self.installed.append("uv")
        elif "uv" not in command:
            self.installed.append("pip")
        return subprocess.CompletedProcess(command, code, out, "")


@pytest.mark.parametrize(
    ("served", "reachable", "has_gpu", "installed"),
    [
        ("2.13.0+cpu", True, False, "pip"),
        ("2.13.0", True, False, "uv"),
        ("2.13.0", False, False, "pip"),
        ("2.13.0", True, True, "pip"),
    ],
)
def test_a_machine_without_a_gpu_gets_the_cpu_build_if_there_is_one(served: str, reachable: bool, has_gpu: bool, installed: str) -> None:
    spec = importlib.util.spec_from_file_location("install_torch", FILE)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    commands = Commands(served=served, reachable=reachable)
    assert script.install("python", "2.13.0", has_gpu=has_gpu, run=commands) == 0
    assert commands.installed == [installed]
