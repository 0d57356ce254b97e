"""Checks the code and images to which the cases of a suite refer.

A suite is data and may come from a third party, but its verifiers, tools and environments run with the user's rights. So a case may refer
to images in the project, and to code in the project and in installed packages. Other images and other code are rejected. Code in the
suite's folder is also rejected, even if that folder is inside the project.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from agentrl.base import secrets, untrusted_files
from agentrl.base.user_code import printable
from agentrl.environment.venvs import BUILT
from agentrl.errors import UserError
from agentrl.failure.case import Case, Suite
from agentrl.plugins.parts import Part, environment_kind
from agentrl.plugins.references import project_root
from agentrl.records import Task, codec

_SHOWN = 200  # maximum characters of a reference in an error message
_SEPARATORS = re.compile(r'["\\\s:@;,=\x00-\x1f\x7f]+')  # of references and paths in an option
_DATA = re.compile(r"suite\.toml|practice\.jsonl|cases(/[^/]+\.json)?|[^/]+\.md")  # files that contain no code


def check_project(suites: Sequence[Suite], root: Path) -> None:
    """Raises `UserError` if the suites' project is not that of the current directory. An evaluation runs code of the suites' project.

    Args:
        root: the project of the suites.
    """
    here = Path.cwd().resolve()
    if root.resolve() not in (here, project_root(here / "x").resolve()):
        raise UserError(
            f"suite {suites[0].folder} belongs to a different project, {root}, whose code would run with your permissions",
            fix=f"if you trust that code, cd {root} and evaluate the suite there",
        )


def check_suite_code(suite: Suite, root: Path, *, family: Part | None = None) -> None:
    """Raises `UserError` if a case refers to a file or image outside the project `root`, to code in the suite's folder, to that folder if
    it may contain code, or to a secret.

    Args:
        family: the task family of the recipe that evaluates the suite. Secrets to which it refers may be used for the same environment.
    """
    paths = suite.folder.rglob("*")
    only_cases = all(_DATA.fullmatch(path.relative_to(suite.folder).as_posix()) and not path.is_symlink() for path in paths)
    for case in suite.cases:
        _check_secrets(suite, case, family)
        for wrong, where in _outside(case, suite.folder.resolve(), root.resolve(), only_cases=only_cases):
            raise UserError(
                f"case {case.id} of suite {suite.folder} refers to {printable(wrong, _SHOWN)!r}, {where}",
                fix="a suite may refer only to code and images of the project: review them, then copy them into the project",
            )


def _check_secrets(suite: Suite, case: Case, family: Part | None) -> None:
    """Raises `UserError` if the environment of a case could send a secret of this machine somewhere else than the recipe does."""
    for ref, options in _environments(case.task):
        allowed = set() if family is None or family.ref != ref else {*_secrets(family.options)}
        if unknown := {*_secrets(options)} - allowed:
            raise UserError(
                f"case {case.id} of suite {suite.folder} would give the secret {min(unknown)} to {printable(ref, _SHOWN)!r}",
                fix="evaluate the suite with a recipe whose tasks.family is this environment and refers to this secret",
            )


def _environments(task: Task) -> list[tuple[str, Any]]:
    """Returns reference and options of each environment that the task opens. A task of inspect has a second one, for its scorers."""
    spec, scored = task.environment, task.data.get("inspect")
    pairs = [] if spec is None else [(spec.ref, spec.options)]
    return pairs if scored is None else [*pairs, (str(scored.get("ref")) if isinstance(scored, Mapping) else "", scored)]


def _secrets(value: Any) -> Iterator[str]:
    """Yields the references to secrets in a value."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item)
    elif secrets.is_reference(value):
        yield value


def _outside(case: Case, suite: Path, root: Path, *, only_cases: bool) -> Iterator[tuple[str, str]]:
    spec = case.task.environment
    environment = (spec.ref,) if spec is not None and environment_kind(spec.ref) is None else ()
    for reference in (*case.task.verifiers, *case.task.tools, *environment):
        module, colon, _ = reference.rpartition(":")
        if module.endswith(".py"):
            file = untrusted_files.resolve_inside(module, Path.cwd())
            if file is None:
                yield reference, "which is not a path"
            elif not file.is_relative_to(root):
                yield reference, f"which is outside the project {root}"
            code = [] if file is None else [file]
        elif colon and not all(name.isidentifier() for name in module.split(".")):
            yield reference, "which is not a module"
            code = []
        else:
            code = [path.resolve() for path in _of_module(module, root)] if colon else []
        if suite != root and any(path.is_relative_to(suite) for path in code):
            yield reference, "which is code in the suite's folder"
    for part, file in _of_environment(case.task, root):
        if file == suite and only_cases:  # the folder contains no code, and its name may be an ordinary word
            continue
        if suite != root and _SEPARATORS.search(str(suite.relative_to(root) if suite.is_relative_to(root) else suite)):
            yield str(suite), "a folder whose name contains a separator or white space, so that it cannot be recognized in the options"
        if suite != root and file.is_relative_to(suite):
            other_files = "which is the suite's folder, and the folder contains files other than cases"
            yield part, other_files if file == suite else "which is code in the suite's folder"
        elif part.endswith(".py") and not file.is_relative_to(root) and os.path.exists(file):  # otherwise it is text, or a path elsewhere
            yield part, f"which is outside the project {root}"
    if case.task.sandbox is None:
        return
    image = case.task.sandbox.image
    path = untrusted_files.resolve_inside(image, root)
    if path is None:
        yield image, "an image whose name is not a path"
    elif not path.is_relative_to(root):
        yield image, f"an image outside the project {root}"


def _of_environment(task: Task, root: Path) -> Iterator[tuple[str, Path]]:
    """Yields each string and word in the environment's reference and options, with the paths that it may have as a file or as a module.

    Any option may be a reference, start a program, or be a variable such as PYTHONPATH. Control characters are escaped as in JSON. Skips an
    environment on a server: its options are sent to the server, and run no code here.
    """
    local = [(ref, options) for ref, options in _environments(task) if (kind := environment_kind(ref)) is None or not kind.session]
    text = codec.to_json(local).decode() if local else ""
    for part in {*re.split('[":@]', text), *text.split('"'), *_SEPARATORS.split(text)} - {""}:
        module = part if "/" in part else part.replace(".", "/")
        for name in {part, part.rpartition(".")[0] or part, module, module.replace("-", "_").lower()}:
            for base in (root, root / BUILT, Path.cwd()):
                path = untrusted_files.resolve_inside(name, base)
                always = base != Path.cwd() or base == root  # in the current directory, a word must be the name of a file
                if path is not None and (always or any(os.path.isfile(f"{path}{end}") for end in ("", ".py", "/__init__.py"))):
                    yield part, path


def _of_module(module: str, root: Path) -> Iterator[Path]:
    """Yields the paths that a module may have in the project, and the paths at which Python finds the module's top-level package.

    Python may find the package in the current directory, which may be the suite's folder.
    """
    for end in (".py", ""):
        yield (root / module.replace(".", "/")).with_suffix(end)
    importlib.invalidate_caches()
    spec = PathFinder.find_spec(module.partition(".")[0], [str(root), *sys.path])  # imports nothing
    if spec is not None:
        yield from map(Path, (*filter(None, [spec.origin]), *(spec.submodule_search_locations or ())))
