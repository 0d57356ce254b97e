"""Sandbox images: a folder with an `image.toml`, or with a `Dockerfile` and no `image.toml`, built once per content and machine.

    suite = "bookworm"            # Debian release
    packages = ["python3"]        # python3 is what the exec server runs on
    pull = "python:3.11-slim"     # optional: tried first by the Docker backend, where a registry answers

The hash of the recipe, or of the whole build context (`agentrl.sandbox.build_context`), names the result:
`<cache>/images/<hash>/base.tar`, extracted beside it for bubblewrap and imported as `agentrl/<folder name>:<hash>` for Docker.
Both backends therefore run the very same tree. WORKDIR and ENV of a Dockerfile are kept as files of that
tree (see `agentrl.sandbox.layout`); entry point and user are ignored. The
exec server is not part of an image: each sandbox gets it when it opens, so it is never stale.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.base import toml
from agentrl.errors import SandboxUnavailable, UserError
from agentrl.sandbox import build_context, builds, cancellation
from agentrl.sandbox.build_context import BuildContext

BUILD_S = 900.0
LOOK_S = 0.5
NOTE_S = 3600.0
LAYOUT = 3
"""Incremented when the way images are built changes, so that none built the old way is used."""
MOUNT_POINTS = ("home/agent", "agentrl")
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/var/cache/apt/*")

Progress = Callable[[str], None]


def no_progress(message: str) -> None:
    """A progress callback that does nothing."""


class ImageRecipe(BaseModel):
    """The contents of an `image.toml`; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str = Field("bookworm", pattern=r"^[a-z][a-z0-9-]*$")
    """Debian release."""
    packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")], ...] = ("python3",)
    """Debian packages beyond the essential ones; must include python3."""
    pull: str = Field("", pattern=r"^$|^[a-z0-9][A-Za-z0-9./:@_-]*$")
    """Registry reference that the Docker backend tries before building; the image must hold python3 (3.9 or later)."""
    variant: Literal["minbase"] = "minbase"

    @property
    def key(self) -> str:
        """sha256 (first 16 hex digits) of everything that determines the image's contents."""
        text = json.dumps([LAYOUT, self.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_KEYS = ", ".join(ImageRecipe.model_fields)
_FORMS = {
    "suite": 'suite is the name of a Debian release: suite = "bookworm"',
    "packages": 'packages is a list of names of Debian packages: packages = ["python3", "jq"]',
    "pull": 'pull is what `docker pull` takes: pull = "python:3.11-slim"',
    "variant": 'variant can only be "minbase"',
}


class Image(BaseModel):
    """A recipe with its folder in the cache: `Image(name="tables", recipe=..., cache=Path("~/.cache/agentrl"))`."""

    model_config = ConfigDict(frozen=True)

    name: str
    recipe: ImageRecipe | BuildContext
    cache: Path

    @property
    def tag(self) -> str:
        return f"agentrl/{self.name}:{self.recipe.key}"

    @property
    def built_tag(self) -> str:
        """The daemon's name for what it built from a Dockerfile, before it is processed further."""
        return f"{self.tag}-built"

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
    """Reads `folder/image.toml`, or the build context of `folder/Dockerfile`. Raises `UserError` naming the file, the key and the fix."""
    path = folder / "image.toml"
    from_dockerfile = not path.exists() and os.path.lexists(folder / build_context.DOCKERFILE)
    recipe = build_context.read_build_context(folder) if from_dockerfile else _read(path)
    return Image(name=_name(folder.resolve()), recipe=recipe, cache=cache or cache_folder())


def _read(path: Path) -> ImageRecipe:
    example = f'write {path} with the lines: suite = "bookworm" and packages = ["python3"]'
    try:
        return ImageRecipe.model_validate(toml.loads(path.read_text()))
    except FileNotFoundError:
        raise UserError(f"no sandbox image at {path.parent}: {path} does not exist, nor a Dockerfile", fix=example) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", fix=example) from None
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        wrong = dict.fromkeys(str(item["loc"][0]) for item in error.errors())
        raise UserError(f"{path}: {lines}", fix="; ".join(_FORMS.get(key, f"remove {key}; known keys: {_KEYS}") for key in wrong)) from None
    except ValueError as error:
        raise UserError(f"{path} {error}", fix=example) from None


def _name(folder: Path) -> str:
    """An image's name: that of its folder, or of its task where the folder is a task's `environment`."""
    name = folder.parent.name if folder.name == "environment" else folder.name
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-") or "image"


def ensure_tarball(image: Image, progress: Progress = no_progress) -> Path:
    """Path of the image's file tree as a tar archive, built when it is not in the cache (minutes the first time)."""
    if image.tarball.exists():
        return image.tarball
    with locked(image):
        if not image.tarball.exists():
            if isinstance(image.recipe, BuildContext):
                ensure_built(image, progress)
                progress(f"exporting the file tree of sandbox image {image.name} from Docker")
                _export(image)
            else:
                progress(f"building sandbox image {image.name} ({image.recipe.suite}, {', '.join(image.recipe.packages)}); about a minute")
                _build(image)
    return image.tarball


def ensure_built(image: Image, progress: Progress = no_progress) -> None:
    """Has the Docker daemon build the image's Dockerfile if it has not yet (see `agentrl.sandbox.builds.ensure_built`)."""
    assert isinstance(image.recipe, BuildContext)
    with locked(image, "build"):
        builds.ensure_built(image.built_tag, image.recipe, progress)


def ensure_rootfs(image: Image, progress: Progress = no_progress) -> Path:
    """Path of the image's file tree as a folder."""
    if image.rootfs.exists():
        return image.rootfs
    tarball = ensure_tarball(image, progress)
    with locked(image):
        if not image.rootfs.exists():
            progress(f"unpacking sandbox image {image.name}")
            beside = image.folder / f"rootfs.{os.getpid()}"
            beside.mkdir(mode=0o755)
            _run(
                ["tar", "--extract", f"--file={tarball}", f"--directory={beside}", "--anchored", "--exclude=./dev/*", "--exclude=dev/*"],
                beside,
            )
            beside.rename(image.rootfs)
    return image.rootfs


def record_use(file: Path) -> None:
    """Records, at most once an hour, that a file of an image is in use; records nothing in a cache this user cannot write to."""
    with suppress(OSError):
        if file.stat().st_mtime < time.time() - NOTE_S:
            os.utime(file)


@contextmanager
def locked(image: Image, what: str = "files", *, timeout_s: float = BUILD_S + 60) -> Iterator[None]:
    """Holds one of the image's inter-process locks; it is released when its holder dies. Not re-entrant."""
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
                cancellation.raise_if_cancelled()
                time.sleep(0.2)
        yield


def _export(image: Image) -> None:
    beside = image.folder / f"base.{os.getpid()}.tar"
    try:
        builds.export(image.built_tag, beside)
    except BaseException:
        _remove(beside)
        raise
    beside.rename(image.tarball)


def _build(image: Image) -> None:
    recipe = image.recipe
    assert isinstance(recipe, ImageRecipe)
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailable(
            f"sandbox image {image.name!r} must be built, and mmdebstrap is not installed",
            fix="apt-get install mmdebstrap  (as root)" + ("" if recipe.pull else '; or give image.toml a `pull = "..."` reference'),
        )
    beside = image.folder / f"base.{os.getpid()}.tar"
    folders = " ".join(f'"$1/{path}"' for path in MOUNT_POINTS)
    command = ["mmdebstrap", f"--variant={recipe.variant}", f"--include={','.join(recipe.packages)}"]
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    command += [f"--customize-hook=mkdir -p {folders}", recipe.suite, str(beside)]
    _run([*_own_mounts(), *command], beside)
    _check_python(beside, image.name)
    beside.rename(image.tarball)


def _own_mounts() -> list[str]:
    """Words before a command whose mounts nobody else should see, and which are gone with it, however it ends; none without the right."""
    words = ["unshare", "--mount", "--propagation", "private"]
    try:
        allowed = subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    return words if allowed else []


def _check_python(tarball: Path, name: str) -> None:
    """Raises `UserError`, and removes the tree, when one made of Debian packages has no python3 that the exec server runs on."""
    listing = subprocess.run(["tar", "-tvf", str(tarball), "--occurrence=1", "./usr/bin/python3"], capture_output=True, check=False)
    version = re.search(rb"-> python3\.(\d+)\s", listing.stdout)
    if version is None or int(version[1]) < 9:
        _remove(tarball)
        problem = "no python3" if version is None else f"python3.{int(version[1])}"
        raise UserError(
            f"sandbox image {name}: its packages include {problem}; the exec server needs python3 3.9 or later",
            fix='add "python3" to packages in image.toml, or name a newer suite',
        )


def _run(command: list[str], target: Path) -> None:
    """Runs a build step in its own process group with a deadline; on failure nothing half-built is left."""
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                output = _output(process)
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


def _output(process: subprocess.Popen[bytes]) -> bytes:
    deadline = time.monotonic() + BUILD_S
    while True:
        try:
            return process.communicate(timeout=LOOK_S)[0]
        except subprocess.TimeoutExpired:
            cancellation.raise_if_cancelled()
            if time.monotonic() > deadline:
                raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
