"""Sandbox images: folders with an `image.toml`, or else a `Dockerfile`. Each version is built once per machine.

An `image.toml` may set `suite`, a Debian release (default: "bookworm"), and `packages` (default: ["python3"], which the exec server needs).
If an `image.toml` also sets `pull`, a reference such as "python:3.11-slim", the Docker backend first tries to pull that image.

The result of a build is `<cache>/images/<hash>/base.tar`, with the hash of the `image.toml` or of the build context
(`agentrl.sandbox.builds`). The archive is unpacked in the same folder for bubblewrap, and imported as `agentrl/<folder name>:<hash>` for
Docker, so both backends run the same tree. The WORKDIR and ENV of a Dockerfile are stored as files in that tree (see
`agentrl.sandbox.layout`); the entry point and the user of the Dockerfile are ignored. The exec server is not part of an image: each sandbox
receives the current exec server when it opens.
"""

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
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import docker
import requests
import urllib3
from docker.errors import APIError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.base import untrusted_files
from agentrl.base.error_text import reason_text
from agentrl.errors import SandboxError, SandboxUnavailable, UserError
from agentrl.sandbox import builds, docker_client, waiting
from agentrl.sandbox.builds import BUILD_S, BuildContext
from agentrl.sandbox.builds import Progress as Progress

PREPARE_S = 10.0
LAYOUT = 3
"""Increment it when the build process changes, so that images from the old process are not used."""
_PULL_S = 300.0
_LOOK_S = 0.5
_RECORD_USE_S = 3600.0
_MOUNT_POINTS = ("home/agent", "agentrl")
_EXCLUDED = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/var/cache/apt/*")


def no_progress(message: str) -> None:
    """A progress callback that does nothing."""


class ImageRecipe(BaseModel):
    """The contents of an `image.toml`. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str = Field("bookworm", pattern=r"^[a-z][a-z0-9-]*$")
    """Debian release."""
    packages: tuple[Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]*$")], ...] = ("python3",)
    """Debian packages in addition to the essential ones; must include python3."""
    pull: str = Field("", pattern=r"^$|^[a-z0-9][A-Za-z0-9./:@_-]*$")
    """Registry reference that the Docker backend tries to pull before it builds; the image must have python3 (3.9 or later)."""

    @property
    def key(self) -> str:
        """sha256 (first 16 hex digits) of everything that determines the image's contents."""
        text = json.dumps([LAYOUT, {**self.model_dump(mode="json"), "variant": "minbase"}], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_KEYS = ", ".join(ImageRecipe.model_fields)
_FORMS = {
    "suite": 'suite is the name of a Debian release: suite = "bookworm"',
    "packages": 'packages is a list of Debian package names: packages = ["python3", "jq"]',
    "pull": 'pull is an image reference for `docker pull`: pull = "python:3.11-slim"',
}


class StoredImage(BaseModel):
    """A cached image of which only the key is known."""

    model_config = ConfigDict(frozen=True)

    key: str = Field(pattern=r"^[0-9a-f]{16}$")


class Image(BaseModel):
    """A recipe, and the cache that stores the image built from it, such as `Image(name="tables", recipe=..., cache=cache_folder())`."""

    model_config = ConfigDict(frozen=True)

    name: str
    recipe: ImageRecipe | BuildContext | StoredImage
    cache: Path

    @property
    def tag(self) -> str:
        """The image's name in the Docker daemon."""
        return f"agentrl/{self.name}:{self.recipe.key}"

    @property
    def built_tag(self) -> str:
        """The daemon's name for the image built from a Dockerfile, before further processing."""
        return f"{self.tag}-built"

    @property
    def folder(self) -> Path:
        """The image's folder in the cache."""
        return self.cache / "images" / self.recipe.key

    @property
    def rootfs(self) -> Path:
        """The file tree as a folder."""
        return self.folder / "rootfs"

    @property
    def tarball(self) -> Path:
        """The file tree as a tar archive."""
        return self.folder / "base.tar"


def cache_folder() -> Path:
    """Returns `$AGENTRL_CACHE`, or `~/.cache/agentrl`."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")


def load_image(folder: Path, *, cache: Path | None = None) -> Image:
    """Returns the image that `folder/image.toml` describes or, if that does not exist, `folder/Dockerfile`. Raises `UserError` if neither
    exists, or if the file or the build context is invalid."""
    path = folder / "image.toml"
    from_dockerfile = not os.path.exists(path) and os.path.lexists(folder / builds.DOCKERFILE)  # unlike `Path.exists`, never raise
    recipe = builds.read_build_context(folder) if from_dockerfile else _read(path)
    home = folder.resolve()
    name = home.parent.name if home.name == "environment" else home.name  # a task keeps its image in its folder `environment`
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in name.lower()).strip("-") or "image"
    return Image(name=name, recipe=recipe, cache=cache or cache_folder())


def _read(path: Path) -> ImageRecipe:
    example = f'write {path} with the lines: suite = "bookworm" and packages = ["python3"]'
    try:
        return ImageRecipe.model_validate(untrusted_files.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(f"no sandbox image at {path.parent}: neither {path} nor a Dockerfile exists", fix=example) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason_text(error)}", fix=example) from None
    except ValidationError as error:
        lines = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        keys = dict.fromkeys(str(item["loc"][0]) for item in error.errors())
        raise UserError(f"{path}: {lines}", fix="; ".join(_FORMS.get(key, f"remove {key}; known keys: {_KEYS}") for key in keys)) from None
    except ValueError as error:
        raise UserError(f"{path} {error}", fix=example) from None


def ensure_tarball(image: Image, progress: Progress = no_progress) -> Path:
    """Returns the path of the image's file tree as a tar archive. Builds the archive if it is not cached; a build may take minutes.

    Raises `UserError` if the build fails or its tools are missing, and `SandboxError` if the daemon fails or the caller is cancelled.
    """
    if image.tarball.exists():
        return image.tarball
    with locked(image):
        if image.tarball.exists():
            pass
        elif isinstance(image.recipe, BuildContext):
            ensure_built(image, progress)
            progress(f"exporting the file tree of sandbox image {image.name} from Docker")
            with _part(image.tarball) as part:
                builds.export(image.built_tag, part)
        else:
            assert isinstance(image.recipe, ImageRecipe)
            progress(
                f"building sandbox image {image.name} ({image.recipe.suite}, {', '.join(image.recipe.packages)}); this takes about a minute"
            )
            _build(image)
    return image.tarball


def ensure_built(image: Image, progress: Progress = no_progress) -> None:
    """Builds the image from its Dockerfile if the Docker daemon does not have it (see `agentrl.sandbox.builds.ensure_built`)."""
    assert isinstance(image.recipe, BuildContext)
    with locked(image, "build"):
        builds.ensure_built(image.built_tag, image.recipe, progress)


def ensure_rootfs(image: Image, progress: Progress = no_progress) -> Path:
    """Returns the path of the image's file tree as a folder. Unpacks the archive if the folder is not cached. Raises the errors of
    `ensure_tarball`, and `UserError` if the archive cannot be unpacked."""
    if image.rootfs.exists():
        return image.rootfs
    tarball = ensure_tarball(image, progress)
    with locked(image):
        if not image.rootfs.exists():
            progress(f"unpacking sandbox image {image.name}")
            with _part(image.rootfs) as part:
                part.mkdir(mode=0o755)
                excluded = ("--anchored", "--exclude=./dev/*", "--exclude=dev/*")
                _run(["tar", "--extract", f"--file={tarball}", f"--directory={part}", *excluded])
    return image.rootfs


def ensure_docker_image(image: Image, progress: Progress = no_progress) -> str:
    """Returns the image's tag. If the daemon lacks the image, first builds, pulls or imports the image, which may take minutes. Blocking.

    Raises `UserError` if the image cannot be built or has no python3 for the exec server, and `SandboxError` if the daemon fails.
    """
    docker_client.reachable(PREPARE_S)  # raises if the daemon is silent
    with docker_client.connection() as api:
        if builds.has_image(api, image.tag):
            return image.tag
        with locked(image, "docker"):
            if not builds.has_image(api, image.tag) and not _tagged(api, image, progress):
                tarball = ensure_tarball(image, progress)
                progress(f"importing sandbox image {image.name} into Docker")
                repository, version = image.tag.split(":")
                output = api.import_image_from_file(str(tarball), repository=repository, tag=version)
                for line in str(output).splitlines():
                    if line.startswith("{") and "error" in (message := json.loads(line)):
                        raise SandboxError(f"docker import of {tarball} failed: {message['error']}")
    return image.tag


def _tagged(api: docker.APIClient, image: Image, progress: Progress) -> bool:
    """Tags the image that the daemon built or pulled. Returns False if the file tree must be imported instead."""
    source = image.built_tag
    if isinstance(image.recipe, BuildContext):
        ensure_built(image, progress)
        if not builds.usable_as_is(source):
            return False
    else:
        assert isinstance(image.recipe, ImageRecipe)
        source = image.recipe.pull
        if not source or not _pulled(image, source, progress):
            return False
    api.tag(source, *image.tag.split(":"))
    return True


def _pulled(image: Image, reference: str, progress: Progress) -> bool:
    """Tries to pull `reference`. Returns False if the registry does not respond or does not have the image. Raises `TaskError` if the image
    has no python3 for the exec server."""
    progress(f"pulling {reference} for sandbox image {image.name}")
    with contextlib.closing(docker_client.new_client(_PULL_S)) as api:
        try:
            _pull(reference)
            builds.check_python(api, reference, f"image.toml of {image.name}: pull: {reference}")
        except (APIError, requests.RequestException, urllib3.exceptions.HTTPError) as error:
            progress(f"cannot pull {reference} ({str(error)[:120]}); building the image instead")
            return False
    return True


def _pull(reference: str) -> None:
    """Pulls an image. Raises the errors of the library, of `requests` and of `docker_client.daemon_messages`, and a timeout if the daemon
    sends nothing for `_PULL_S`."""

    def request(api: docker.APIClient) -> Iterable[Any]:
        post = api.post
        api.post = lambda url, **options: post(url, **{**options, "timeout": _PULL_S})  # `pull` sets no timeout (docker 7.2)
        messages: Iterable[Any] = api.pull(reference, stream=True)
        return messages

    for _ in docker_client.daemon_messages(request, what="pull", timeout_s=_PULL_S):
        pass


def record_use(file: Path) -> None:
    """Updates the modification time of a file that is in use, at most once an hour. Does nothing if this user cannot write to the cache."""
    with contextlib.suppress(OSError):
        if file.stat().st_mtime < time.time() - _RECORD_USE_S:
            os.utime(file)


@contextlib.contextmanager
def locked(image: Image, name: str = "files", *, timeout_s: float = BUILD_S + 60) -> Iterator[None]:
    """Holds one of the image's inter-process locks for the block. A lock is released when the process that holds it exits. Not re-entrant.
    Raises `UserError` if the lock is not free within `timeout_s`, and `SandboxError` if the caller is cancelled."""
    image.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with open(image.folder / f"{name}.lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another process has been building {image.folder} for {timeout_s:.0f} s", fix=f"stop it, or remove {image.folder}"
                    ) from None
                waiting.raise_if_cancelled()
                time.sleep(0.2)
        yield


@contextlib.contextmanager
def _part(path: Path) -> Iterator[Path]:
    """Yields a temporary path. After the block, renames the file or folder at the temporary path to `path`, or removes it if the block
    raises."""
    part = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield part
        part.rename(path)
    except BaseException:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
        raise


def _build(image: Image) -> None:
    """Builds the file tree from Debian packages. Raises `UserError` if mmdebstrap is not installed, the build fails, or the tree has no
    python3 for the exec server."""
    recipe = image.recipe
    assert isinstance(recipe, ImageRecipe)
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailable(
            f"the build of sandbox image {image.name!r} requires mmdebstrap, which is not installed",
            fix="apt-get install mmdebstrap  (as root)" + ("" if recipe.pull else '; or add a reference `pull = "..."` to image.toml'),
        )
    with _part(image.tarball) as part:
        folders = " ".join(f'"$1/{path}"' for path in _MOUNT_POINTS)
        command = ["mmdebstrap", "--variant=minbase", f"--include={','.join(recipe.packages)}"]
        command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED]
        command += [f"--customize-hook=mkdir -p {folders}", recipe.suite, str(part)]
        _run([*_private_mounts(), *command])
        listing = subprocess.run(["tar", "-tvf", str(part), "--occurrence=1", "./usr/bin/python3"], capture_output=True, check=False)
        version = re.search(rb"-> python3\.(\d+)\s", listing.stdout)
        if version is None or int(version[1]) < 9:
            problem = "no python3" if version is None else f"python3.{int(version[1])}"
            raise UserError(
                f"sandbox image {image.name}: its packages include {problem}; the exec server needs python3 3.9 or later",
                fix='add "python3" to packages in image.toml, or set a newer suite',
            )


def _private_mounts() -> list[str]:
    """Returns a command prefix that hides the mounts of a command from other processes, and removes these mounts when the command exits.

    Empty if this process may not create a mount namespace.
    """
    prefix = ["unshare", "--mount", "--propagation", "private"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    return prefix if allowed else []


def _run(command: list[str]) -> None:
    """Runs a build step in a new process group. Raises `UserError` if the step fails or takes more than `BUILD_S` seconds, and
    `SandboxError` if the caller is cancelled."""
    deadline = time.monotonic() + BUILD_S
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=_LOOK_S)
                    break
                except subprocess.TimeoutExpired:
                    waiting.raise_if_cancelled()
                    if time.monotonic() > deadline:
                        raise UserError(
                            f"{command[0]} did not finish within {BUILD_S:.0f} s", fix="check that the package mirror answers"
                        ) from None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        tail = "\n".join(output.decode("utf-8", "replace").splitlines()[-12:])
        raise UserError(
            f"{' '.join(command)} failed with status {process.returncode}:\n{tail}",
            fix="check suite and packages in image.toml, the free disk space, and whether the package mirror answers",
        )
