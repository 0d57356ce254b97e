"""Sandbox images: a folder with an `image.toml`, built once per content and machine.

    suite = "bookworm"            # Debian release
    packages = ["python3"]        # python3 is what the exec server runs on
    pull = "python:3.11-slim"     # optional: tried first by the Docker backend, where a registry answers

The recipe's hash names the result: `<cache>/images/<hash>/base.tar`, extracted beside it for bubblewrap and imported as
`agentrl/<folder name>:<hash>` for Docker. Both backends therefore run the very same tree. The exec server is not part of an
image: it is handed to each sandbox when it opens, so a changed one is never served stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import SandboxUnavailable, UserError

BUILD_S = 900.0
LAYOUT = 3
"""Raised when the way images are built changes, so that none built the old way is used."""
MOUNT_POINTS = ("home/agent", "agentrl")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/var/cache/apt/*")

Progress = Callable[[str], None]


def silent(message: str) -> None:
    """A progress callback that says nothing."""


class ImageRecipe(BaseModel):
    """The contents of an `image.toml`; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str = Field("bookworm", pattern=r"^[a-z][a-z0-9-]*$")
    """Debian release."""
    packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")], ...] = ("python3",)
    """Debian packages beyond the essential ones; must bring a python3."""
    pull: str = Field("", pattern=r"^$|^[a-z0-9][A-Za-z0-9./:@_-]*$")
    """Registry reference that the Docker backend tries before building; the image must hold python3 (3.9 or later)."""
    variant: Literal["minbase"] = "minbase"

    @property
    def key(self) -> str:
        """sha256 (first 16 hex digits) of everything that decides what the image holds."""
        text = json.dumps([LAYOUT, self.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class Image(BaseModel):
    """A recipe with its place in the cache: `Image(name="tables", recipe=..., cache=Path("~/.cache/agentrl"))`."""

    model_config = ConfigDict(frozen=True)

    name: str
    recipe: ImageRecipe
    cache: Path

    @property
    def tag(self) -> str:
        return f"agentrl/{self.name}:{self.recipe.key}"

    @property
    def folder(self) -> Path:
        return self.cache / "images" / self.recipe.key

    @property
    def rootfs(self) -> Path:
        return self.folder / "rootfs"

    @property
    def tarball(self) -> Path:
        return self.folder / "base.tar"


def cache_folder() -> Path:
    """`$AGENTRL_CACHE`, else `~/.cache/agentrl`."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")


def load_image(folder: Path, *, cache: Path | None = None) -> Image:
    """Reads `folder/image.toml`. Raises `UserError` naming the file, the key and the fix."""
    path = folder / "image.toml"
    try:
        recipe = ImageRecipe.model_validate(tomllib.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(
            f"no sandbox image at {folder}: {path} does not exist",
            fix=f'write {path} with the lines: suite = "bookworm" and packages = ["python3"]',
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserError(f"{path}: {lines}", fix=f"known keys: {', '.join(ImageRecipe.model_fields)}") from None
    name = "".join(c if c.isalnum() else "-" for c in folder.resolve().name.lower()).strip("-") or "image"
    return Image(name=name, recipe=recipe, cache=cache or cache_folder())


def ensure_tarball(image: Image, progress: Progress = silent) -> Path:
    """Path of the image's file tree as a tar archive, built when it is not in the cache (minutes the first time)."""
    if image.tarball.exists():
        return image.tarball
    with locked(image):
        if not image.tarball.exists():
            progress(f"building sandbox image {image.name} ({image.recipe.suite}, {', '.join(image.recipe.packages)}); about a minute")
            _build(image)
    return image.tarball


def ensure_rootfs(image: Image, progress: Progress = silent) -> Path:
    """Path of the image's file tree as a folder."""
    if image.rootfs.exists():
        return image.rootfs
    tarball = ensure_tarball(image, progress)
    with locked(image):
        if not image.rootfs.exists():
            progress(f"unpacking sandbox image {image.name}")
            beside = image.folder / f"rootfs.{os.getpid()}"
            beside.mkdir(mode=0o755)
            _run(["tar", "--extract", f"--file={tarball}", f"--directory={beside}", "--exclude=./dev/*"], beside)
            beside.rename(image.rootfs)
    return image.rootfs


@contextmanager
def locked(image: Image, what: str = "files", *, timeout_s: float = BUILD_S + 60) -> Iterator[None]:
    """Holds one of the image's locks between processes; the lock goes with the process that holds it. Not re-entrant."""
    image.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with open(image.folder / f"{what}.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another process has been building {image.folder} for {timeout_s:.0f} s", fix=f"end it, or remove {image.folder}"
                    ) from None
                time.sleep(0.2)
        yield


def _build(image: Image) -> None:
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailable(
            f"sandbox image {image.name!r} must be built, and mmdebstrap is not installed",
            fix="apt-get install mmdebstrap  (as root)" + ("" if image.recipe.pull else '; or give image.toml a `pull = "..."` reference'),
        )
    beside = image.folder / f"base.{os.getpid()}.tar"
    folders = " ".join(f'"$1/{path}"' for path in MOUNT_POINTS)
    command = ["mmdebstrap", f"--variant={image.recipe.variant}", f"--include={','.join(image.recipe.packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    command += [f"--customize-hook=mkdir -p {folders}", image.recipe.suite, str(beside)]
    _run(command, beside)
    beside.rename(image.tarball)


def _run(command: list[str], target: Path) -> None:
    """Runs a build step in its own process group with a deadline; on failure nothing half-made stays."""
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=BUILD_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        _remove(target)
        raise UserError(f"{command[0]} did not finish in {BUILD_S:.0f} s", fix="check that the package mirror answers") from None
    except BaseException:
        _remove(target)
        raise
    if process.returncode != 0:
        _remove(target)
        tail = "\n".join(output.decode("utf-8", "replace").splitlines()[-12:])
        raise UserError(
            f"{' '.join(command)} failed with status {process.returncode}:\n{tail}",
            fix="check suite and packages in image.toml, that the package mirror answers, and the free disk space",
        )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
