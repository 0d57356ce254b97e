"""Python environments for third-party packages: one virtual environment per package in `.environments/`, each built from a lock file.

`environments/NAME.lock` is a pip requirements file with a sha256 for each package, and with comments that record what was requested. Commit
this file. `.environments/NAME/` is built from the lock file, and can be removed at any time.
"""

from __future__ import annotations

import contextlib
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.base import untrusted_files
from agentrl.base.error_text import clip_text, reason_text
from agentrl.errors import UserError

LOCKS, BUILT = "environments", ".environments"
COMPLETE = "agentrl.lock"  # file in a built environment: a copy of its lock, written last
LOCK_BYTES = 4 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_PIN = re.compile(r"(?:([A-Za-z0-9._-]+)==(\S+)|\.\S*) --hash=sha256:[0-9a-f]{64}")
_ARCHIVES = (".whl", ".tar.gz", ".zip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The packages of an environment, as recorded in its lock file."""

    name: str
    requires: tuple[str, ...]  # as requested: requirements, or folders relative to the project
    python: str  # "3.11"
    platform: str  # "linux-x86_64": wheels differ between platforms
    pins: tuple[str, ...]  # lines of a requirements file with hashes
    folders: tuple[tuple[str, str], ...] = ()  # local packages: folder relative to the project, and the sha256 of its files

    @property
    def versions(self) -> dict[str, str]:
        """The version of each package by name, except for local packages."""
        pinned = (_PIN.match(line) for line in self.pins)
        return {canonical_name(match[1]): match[2] for match in pinned if match and match[1]}

    def to_text(self) -> str:
        """Returns the content of the lock file."""
        about = ["Written by `agentrl env add`; do not edit. `agentrl env sync` builds the environment from it."]
        about += [f"requires: {item}" for item in self.requires]
        about += [f"python: {self.python}", f"platform: {self.platform}"]
        about += [f"folder: {folder} {sha256}" for folder, sha256 in self.folders]
        return "".join(f"{line}\n" for line in [*(f"# {line}" for line in about), *self.pins])

    @classmethod
    def from_text(cls, name: str, text: str) -> Lock:
        """Parses a lock file. Raises `ValueError` if a line is not pinned, or if a required comment is missing or repeated."""
        comments: dict[str, list[str]] = {"requires": [], "python": [], "platform": [], "folder": []}
        pins = []
        for line in text.splitlines():
            key, sep, value = line.removeprefix("# ").partition(": ")
            if line.startswith("#"):
                if sep and key in comments:
                    comments[key].append(value)
            elif _PIN.fullmatch(line):
                pins.append(line)
            elif line:
                raise ValueError(f"it has an unpinned line: {clip_text(line)}")
        if not comments["requires"] or len(comments["python"]) != 1 or len(comments["platform"]) != 1:
            raise ValueError("one of the comments requires, python and platform is missing or repeated")
        folders = tuple((folder, sha256) for folder, _, sha256 in (line.rpartition(" ") for line in comments["folder"]))
        return cls(
            name=name,
            requires=tuple(comments["requires"]),
            python=comments["python"][0],
            platform=comments["platform"][0],
            pins=tuple(pins),
            folders=folders,
        )


class MissingPackage(UserError):
    """No environment of the project has a package."""


def read_locks(root: Path) -> dict[str, Lock]:
    """Returns the locks of a project's environments by name. Raises `UserError` if a file is not a valid lock."""
    return {path.stem: read_lock(path) for path in sorted((root / LOCKS).glob("*.lock"))}


def environment_python(root: Path, name: str) -> Path:
    """Returns the Python interpreter of an environment. Raises `UserError`, with the command to run, if the environment does not exist, is
    not built, was built from a different lock, or has an invalid lock."""
    path = root / LOCKS / f"{name}.lock"
    if not path.is_file():
        raise UserError(f"the project has no environment {name!r}", fix=f"agentrl env add {name}")
    if not is_built(root, read_lock(path)):
        raise UserError(f"the environment {name!r} is not built, or was built from a different lock", fix=f"agentrl env sync {name}")
    return python_of(root / BUILT / name)


def environment_of(root: Path, package: str) -> str:
    """Returns the name of the environment for a package: the environment with the package's name, or else the only environment that
    contains the package.

    Raises `MissingPackage` if there is no such environment, and `UserError` if there is more than one or if a lock is invalid.
    """
    locks, wanted = read_locks(root), canonical_name(package)
    if wanted in locks:
        return wanted
    having = [
        name for name, lock in locks.items() if wanted in lock.versions or any(name_of(item, root) == wanted for item in lock.requires)
    ]
    if len(having) == 1:
        return having[0]
    if not having:
        raise MissingPackage(f"no environment of the project has the package {package!r}", fix=f"agentrl env add {package}")
    raise UserError(f"{package!r} is in the environments {', '.join(having)}", fix="choose one with the option environment")


def is_path(item: str) -> bool:
    """Returns whether a requirement is the path of a folder or an archive rather than the name of a package."""
    return item.startswith((".", "/", "~")) or item.endswith(_ARCHIVES)


def is_folder(root: Path, item: str) -> bool:
    """Returns whether a requirement is an existing folder. Relative paths are relative to the project root."""
    return is_path(item) and (root / item).is_dir()


def name_of(item: str, root: Path) -> str:
    """Returns the canonical name of a requirement's package."""
    if is_folder(root, item):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            text = untrusted_files.read_bytes(root / item / "pyproject.toml", most=LOCK_BYTES).decode()
            return canonical_name(str(untrusted_files.loads(text)["project"]["name"]))
        return canonical_name((root / item).resolve().name)
    match = re.match(r"[A-Za-z0-9._]+(?:-[A-Za-z][A-Za-z0-9._]*)*" if is_path(item) else r"[A-Za-z0-9._-]+", Path(item).name)
    return canonical_name(match[0] if match else item)


def read_lock(path: Path) -> Lock:
    """Parses the lock file at a path. Raises `UserError` if the file cannot be read or is not a lock."""
    try:
        return Lock.from_text(path.stem, untrusted_files.read_bytes(path, most=LOCK_BYTES).decode())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not a valid environment lock: {reason_text(error)}",
            fix=f"restore it, or remove the environment: agentrl env remove {path.stem}",
        ) from None


def is_built(root: Path, lock: Lock) -> bool:
    """Returns whether the environment in `.environments/` was built completely from this lock."""
    with contextlib.suppress(OSError):
        return (root / BUILT / lock.name / COMPLETE).read_text(encoding="utf-8") == lock.to_text() and python_of(
            root / BUILT / lock.name
        ).exists()
    return False


def python_of(venv: Path) -> Path:
    """Returns the path of a virtual environment's interpreter."""
    return venv / "bin" / "python"


def this_platform() -> str:
    """Returns the operating system and the architecture, such as `linux-x86_64`."""
    return f"{platform.system()}-{platform.machine()}".lower()


def canonical_name(name: str) -> str:
    """Returns the normalized name of a package (PEP 503): lower case, with single hyphens as separators."""
    return re.sub(r"[-_.]+", "-", name).lower()
