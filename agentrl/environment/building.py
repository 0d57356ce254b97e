"""Builds and removes the Python environments that `agentrl.environment.venvs` describes. Uses pip."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from agentrl.base import untrusted_files
from agentrl.base.error_text import cause_in_log, clip_text
from agentrl.base.files import folder_manifest, tail_bytes, wait_for_lock, write_atomically
from agentrl.base.scratch import ScratchFolder
from agentrl.environment.venvs import (
    BUILT,
    COMPLETE,
    LOCKS,
    NAME,
    Lock,
    canonical_name,
    is_built,
    is_folder,
    is_path,
    name_of,
    python_of,
    read_lock,
    this_platform,
)
from agentrl.errors import InfrastructureError, UserError

_LOG = "pip.log"
_BUILD_S = 3600.0
_OTHER_BUILD_S = 600.0  # maximum wait for another process that is building the environment
_PROBE_S = 60.0
_LOG_BYTES, _REPORT_BYTES = 64 << 10, 256 << 20
_SKIPPED = ("__pycache__", "build", "dist", ".git", ".venv", "*.egg-info", ".mypy_cache", ".ruff_cache", ".pytest_cache")

Report = Callable[[str], object]


def add_environment(
    root: Path, requires: Sequence[str], *, name: str = "", python: str = "", upgrade: bool = False, report: Report = lambda text: None
) -> Lock:
    """Builds an environment and writes its lock. If a lock with the same requirements, Python version and platform exists, its local
    folders are unchanged and `upgrade` is False, builds from that lock.

    Args:
        requires: requirements such as `inspect-ai==0.3.285`, or paths of folders, wheels or archives. The default of `name` is derived from
            the first requirement.
        python: path, name or version of a Python interpreter, such as `3.12`; the default is the interpreter of this process.
        upgrade: whether to resolve the requirements again, which may select newer versions.

    Raises:
        UserError: `name` or a requirement is invalid, a requirement or the Python interpreter cannot be found, versions conflict, a package
            cannot be built, or another process is building the environment.
        InfrastructureError: there is no connection to the package index, or a command of the build runs for longer than an hour.
    """
    wanted = tuple(_checked_requirement(item, root) for item in requires)
    name = name or name_of(wanted[0], root)
    if not NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a valid environment name", fix="use letters, digits, '.', '_' and '-'")
    executable, version = _find_python(python)
    with _building(root, name, report):
        path = root / LOCKS / f"{name}.lock"
        known = read_lock(path) if path.is_file() else None
        if known and (known.requires, known.python, known.platform) == (wanted, version, this_platform()) and not upgrade:
            with contextlib.suppress(_FolderChanged):
                _build(root, known, executable, report)
                return known
        with _replacing(root / BUILT / name, executable, report) as venv:
            report(f"resolving {', '.join(wanted)}")
            lock = _resolve(root, venv, name, wanted, version, report)
            _install(root, venv, lock, report)
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, lock.to_text(), durable=True)
            write_atomically(venv / COMPLETE, lock.to_text(), durable=True)
    return lock


def sync_environment(root: Path, name: str, *, report: Report = lambda text: None) -> Lock:
    """Builds an environment from its lock, unless it is built already. Raises the same errors as `add_environment`, and `UserError` if
    there is no valid lock, or if it was written on a different platform or a local folder has changed since."""
    path = root / LOCKS / f"{name}.lock"
    if not path.is_file():
        raise UserError(f"the project has no environment {name!r}", fix="agentrl env list")
    lock = read_lock(path)
    if lock.platform != this_platform():
        raise UserError(
            f"{path} was written on {lock.platform}, but this machine is {this_platform()}",
            fix=f"agentrl env add {' '.join(lock.requires)}",
        )
    executable, _ = _find_python(lock.python)
    with _building(root, name, report):
        try:
            _build(root, lock, executable, report)
        except _FolderChanged as changed:
            raise UserError(f"{changed} differs from {path}", fix=f"agentrl env add {' '.join(lock.requires)}") from None
    return lock


def remove_environment(root: Path, name: str) -> bool:
    """Removes an environment and its lock. Returns whether the environment or the lock existed. Raises `UserError` if another process is
    building the environment."""
    if not NAME.fullmatch(name):
        return False
    path, venv = root / LOCKS / f"{name}.lock", root / BUILT / name
    if not path.exists() and not venv.exists():
        return False
    with _building(root, name, lambda text: None):
        path.unlink(missing_ok=True)
        shutil.rmtree(venv, ignore_errors=True)
    return True


class _FolderChanged(Exception):
    """The folder of a local package is missing or differs from the lock."""


def _build(root: Path, lock: Lock, executable: str, report: Report) -> None:
    for folder, sha256 in lock.folders:
        if not (root / folder).is_dir() or _folder_sha256(root / folder) != sha256:
            raise _FolderChanged(folder)
    if is_built(root, lock):
        report(f"{lock.name} is already built")
        return
    with _replacing(root / BUILT / lock.name, executable, report) as venv:
        _install(root, venv, lock, report)
        write_atomically(venv / COMPLETE, lock.to_text(), durable=True)


@contextlib.contextmanager
def _building(root: Path, name: str, report: Report) -> Iterator[None]:
    """Holds the lock on an environment's folder. First restores the previous environment if an earlier build was interrupted."""
    base = root / BUILT
    base.mkdir(exist_ok=True)
    if not (base / ".gitignore").exists():
        (base / ".gitignore").write_text("*\n")
    handle = os.open(base / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not wait_for_lock(handle, fcntl.LOCK_EX, within_s=1.0):
            report(f"waiting for another agentrl process that is building {name}")
            if not wait_for_lock(handle, fcntl.LOCK_EX, within_s=_OTHER_BUILD_S):
                raise UserError(f"another agentrl process has been building {name} for {_OTHER_BUILD_S:g} s", fix="wait for it, or stop it")
        _restore(base / name)
        yield
    finally:
        os.close(handle)


def _restore(venv: Path) -> None:
    """Restores the environment that an interrupted build was replacing."""
    old = venv.with_name(f".{venv.name}.old")
    if old.exists():
        if (venv / COMPLETE).exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            shutil.rmtree(venv, ignore_errors=True)
            old.rename(venv)


@contextlib.contextmanager
def _replacing(venv: Path, executable: str, report: Report) -> Iterator[Path]:
    """Creates a virtual environment at a path and yields the path. If the `with` block raises an exception, restores the previous
    environment. The scripts in a virtual environment contain absolute paths, so the environment cannot be built elsewhere and renamed."""
    old = venv.with_name(f".{venv.name}.old")
    if (venv / COMPLETE).exists():
        venv.rename(old)
    else:
        shutil.rmtree(venv, ignore_errors=True)
    try:
        report("creating the environment")
        venv.mkdir()
        _run([executable, "-m", "venv", str(venv)], venv / _LOG)
        yield venv
    except BaseException:
        with contextlib.suppress(OSError):
            _restore(venv) if old.exists() else shutil.rmtree(venv, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _resolve(root: Path, venv: Path, name: str, wanted: tuple[str, ...], version: str, report: Report) -> Lock:
    """Returns a lock with the newest compatible versions of the packages, without installing them."""
    with ScratchFolder() as scratch:
        result, limits = scratch / "report.json", scratch / "limits.txt"
        limits.write_text(_torch_limit(wanted))
        copies = {item: str(_copy_package(root / item, scratch)) for item in wanted if is_folder(root, item)}
        targets = [copies.get(item) or (str(root / item) if is_path(item) else item) for item in wanted]
        _pip(root, venv, "install", "--dry-run", "--ignore-installed", "--report", str(result), "--constraint", str(limits), *targets)
        try:
            items = json.loads(untrusted_files.read_bytes(result, most=_REPORT_BYTES))["install"]
        except (OSError, ValueError, KeyError) as error:
            raise InfrastructureError(f"pip wrote no report: {error}") from error
        pins = sorted(line for item in items if (line := _pin(item, root)))
    folders = tuple((item, _folder_sha256(root / item)) for item in copies)
    if users := _users_of_torch(items):
        report(f"torch will be installed: it is required by {users}")
    report(f"{len(items)} packages")
    return Lock(name=name, requires=wanted, python=version, platform=this_platform(), pins=tuple(pins), folders=folders)


def _pin(item: dict[str, Any], root: Path) -> str:
    """Returns the line for a package in the lock; empty for a local folder. Raises `UserError` if the source cannot be pinned."""
    name, version, source = item["metadata"]["name"], item["metadata"]["version"], item["download_info"]
    if "dir_info" in source:
        return ""
    archive = source.get("archive_info", {})
    sha256 = archive.get("hashes", {}).get("sha256") or archive.get("hash", "").removeprefix("sha256=")
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise UserError(
            f"{name} {version} has no sha256, so it cannot be pinned", fix="use a release from a package index, an archive or a folder"
        )
    if item.get("is_direct"):
        path = os.path.relpath(unquote(urlsplit(source["url"]).path), root)
        return f"{path if path.startswith('.') else f'./{path}'} --hash=sha256:{sha256}"
    return f"{name}=={version} --hash=sha256:{sha256}"


def _install(root: Path, venv: Path, lock: Lock, report: Report) -> None:
    report(f"installing {len(lock.pins) + len(lock.folders)} packages")
    with ScratchFolder() as scratch:
        pinned = scratch / "requirements.txt"
        pinned.write_text(lock.to_text())
        _pip(root, venv, "install", "--no-compile", "--no-deps", "--require-hashes", "-r", str(pinned))
        for folder, _ in lock.folders:
            _pip(root, venv, "install", "--no-deps", str(_copy_package(root / folder, scratch)))
    report("checking")
    _pip(root, venv, "check")


def _pip(root: Path, venv: Path, *arguments: str) -> None:
    pip = [str(python_of(venv)), "-m", "pip", "--no-input", "--disable-pip-version-check", "--retries", "3", "--timeout", "30"]
    _run([*pip, arguments[0], *(("--progress-bar", "off") if arguments[0] == "install" else ()), *arguments[1:]], venv / _LOG, cwd=root)


def _run(command: list[str], log: Path, *, cwd: Path | None = None) -> None:
    """Runs a program and appends its output to a log. If the program fails, raises `UserError` or `InfrastructureError` with the cause from
    the log."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    with log.open("ab") as output:
        start = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=clean, cwd=cwd, start_new_session=True
        )
        try:
            status = process.wait(_BUILD_S)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise InfrastructureError(f"{' '.join(command[:4])} did not finish within {_BUILD_S:g} s") from None
            raise
    if status:
        raise _failure(tail_bytes(log, most=_LOG_BYTES, start=start))


_CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"DO NOT MATCH THE HASHES", "the index serves files that differ from the lock", "agentrl env add ... --upgrade"),
    (r"No space left on device|Disk quota exceeded", "the disk is full", "free space, then repeat the command"),
    (
        r"NewConnectionError|Failed to establish a new connection|NameResolutionError|ConnectTimeoutError|ProxyError|ReadTimeoutError",
        "no connection to the package index",
        "check the network and pip's configuration (pip config list), then repeat the command",
    ),
    (
        r"Requires-Python ([^\n;]+)|requires a different Python: [^\n]*?not in '([^']+)'",
        "the package requires a different Python version: {}",
        "choose one with --python, such as --python 3.12",
    ),
    (r"No matching distribution found for ([^\n]+)", "the index has no package {}", "check the name and the version"),
    (r"The conflict is caused by:\n((?:    .*\n){1,6})", "versions conflict:\n{}", "request different versions"),
    (
        r"No module named '?ensurepip|ensurepip is not available",
        "this Python cannot create environments",
        "install its package python3-venv",
    ),
    (r"Failed (?:to build|building wheel for) '?([\w.-]+)", "{} cannot be built from source", "install its build dependencies"),
)


def _failure(log: str) -> Exception:
    for pattern, message, fix in _CAUSES:
        if match := re.search(pattern, log):
            detail = next((clip_text(group) for group in match.groups() if group), "")
            kind = InfrastructureError if "connection" in message else UserError
            text = message.format(detail)
            return UserError(text, fix=fix) if kind is UserError else InfrastructureError(f"{text}\n  fix: {fix}")
    return UserError(f"pip failed: {cause_in_log(log)[0]}", fix="see the message from pip")


def _find_python(wanted: str) -> tuple[str, str]:
    """Returns the path and version of a Python interpreter. Raises `UserError` if no such interpreter runs on this machine."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if wanted in ("", here):
        return sys.executable, here
    names = [f"python{wanted}", wanted] if wanted[0].isdecimal() else [wanted]
    for executable in filter(None, map(shutil.which, names)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            shows = "import sys; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([executable, "-I", "-c", shows], capture_output=True, text=True, timeout=_PROBE_S, check=False)
            if done.returncode == 0 and re.fullmatch(r"3\.\d+", version := done.stdout.strip()):
                return executable, version
    raise UserError(f"Python {wanted!r} is not available on this machine", fix="install it, or give its path: --python /path/to/python3")


def _checked_requirement(item: str, root: Path) -> str:
    """Returns a requirement as the lock stores it, with a path relative to the project. Raises `UserError` if the requirement is
    invalid."""
    if is_path(item):
        path = Path(item).resolve()
        if not path.exists():
            raise UserError(f"there is no file or folder {item}", fix="give a package's name, or the path of its folder")
        if path.is_dir() and not (path / "pyproject.toml").is_file() and not (path / "setup.py").is_file():
            raise UserError(f"{item} is not a package: it has no pyproject.toml", fix="give the folder with the pyproject.toml")
        text = os.path.relpath(path, root)
        return text if text.startswith(".") else f"./{text}"
    if not re.fullmatch(r"[A-Za-z0-9][^\s#]*( *(;|[<>=!~]=?) *[^\n#@]+)?", item) or "://" in item:
        raise UserError(f"{item!r} is not a valid requirement", fix="write NAME, NAME==VERSION, or the path of a folder or wheel")
    return item


def _copy_package(folder: Path, scratch: Path) -> Path:
    """Copies a package's folder and returns the copy, because a build may write into the folder."""
    target = scratch / folder.resolve().name
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns(*_SKIPPED), dirs_exist_ok=True)
    return target


def _folder_sha256(folder: Path) -> str:
    with ScratchFolder() as scratch:
        return hashlib.sha256(json.dumps(folder_manifest(_copy_package(folder, scratch))).encode()).hexdigest()


def _torch_limit(wanted: Sequence[str]) -> str:
    """Returns a constraint that limits torch to the version in this process; empty if torch is one of the requirements or is not
    installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        if not any(canonical_name(item).startswith("torch") for item in wanted):
            return f"torch=={metadata.version('torch').partition('+')[0]}\n"
    return ""


def _users_of_torch(items: list[dict[str, Any]]) -> str:
    names = {canonical_name(item["metadata"]["name"]) for item in items}
    if "torch" not in names:
        return ""
    users = [
        item["metadata"]["name"]
        for item in items
        if any(re.match(r"torch\b(?!.*extra ==)", need) for need in item["metadata"].get("requires_dist", ()))
    ]
    return ", ".join(sorted(users)[:3]) or "you"
