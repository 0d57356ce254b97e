"""Finds the source of a model: a folder, a GGUF file, or a GGUF file in an installed package. The source's code is not
imported or run."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path, PurePosixPath

from agentrl.base.files import sha256_file
from agentrl.errors import UserError
from agentrl.version.model_folder import read_json

PACKAGE = "package:"
_KINDS = "a Hugging Face folder, a GGUF file, or package:NAME"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_READ = (".safetensors", ".json", ".jinja", ".txt", ".model")
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")
_LISTED = 12  # maximum number of package files listed in an error message
_LARGEST_LICENCE = 1 << 20  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of an import: one GGUF file, or a folder."""

    path: Path
    name: str  # as recorded, without this machine's folders
    sha256: dict[str, str]  # file name -> hex digest
    package: str = ""  # name and version of its distribution
    licence: str = ""  # an id, if the source has one
    licences: tuple[Path, ...] = ()  # licence files

    @property
    def is_gguf(self) -> bool:
        """Whether the source is a GGUF file."""
        return self.path.suffix == ".gguf"


def find_source(text: str) -> Source:
    """Returns the source that `text` describes. Raises `UserError` if the source does not exist, is ambiguous, differs from the file that
    its package installed, or is not a model in safetensors or GGUF format."""
    if text.startswith(PACKAGE):
        return _in_package(text.removeprefix(PACKAGE))
    path = Path(text)
    try:
        there, folder = path.exists(), path.is_dir()
    except (OSError, ValueError):
        there = folder = False
    if not there:
        raise UserError(f"{text} does not exist", fix=f"give {_KINDS}; download a model from a hub first")
    if folder:
        return _folder(path)
    if path.suffix in _PICKLES:
        raise _pickled(path)
    if path.suffix != ".gguf" or not path.is_file():
        raise UserError(f"{path} is not a GGUF file", fix=f"give {_KINDS}")
    return Source(path=path, name=path.name, sha256={path.name: sha256_file(path)})


def _folder(path: Path) -> Source:
    weights = sorted(path.glob("*.safetensors"))
    if not weights and (others := sorted(file.name for file in path.iterdir() if file.suffix == ".gguf")):
        raise UserError(f"{path} contains {', '.join(others)[:500]}", fix=f"give the file: {path / others[0]}")
    if not weights and any(file.suffix in _PICKLES for file in path.iterdir()):
        raise _pickled(path)
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a model: it has no config.json", fix=f"give {_KINDS}")
    read_json(path / "config.json")
    files = [file for file in sorted(path.iterdir()) if file.is_file() and file.suffix in _READ]
    licences = tuple(file for pattern in _LICENCES for file in sorted(path.glob(pattern)) if _is_inside(file, path))
    return Source(
        path=path,
        name=path.resolve().name,
        sha256={file.name: sha256_file(file) for file in files},
        licence=_of_card(path / "README.md"),
        licences=_texts(licences),
    )


def _is_inside(file: Path, folder: Path) -> bool:
    """Whether a file to copy is in this folder or in the hub's cache. A symbolic link could point to any file."""
    real, root = file.resolve(), folder.resolve()
    return real.is_relative_to(root) or (root.parent.name == "snapshots" and real.is_relative_to(root.parents[1] / "blobs"))


def _pickled(path: Path) -> UserError:
    fix = "use the model's safetensors, or a GGUF file"
    return UserError(f"{path} contains pickled weights, and loading them can run arbitrary code", fix=fix)


def _of_card(path: Path) -> str:
    """Returns the licence in the header of a model card; empty if there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(1 << 16)
    except OSError:
        return ""
    if not head.startswith("---\n"):
        return ""
    for line in head[4:].partition("\n---")[0].splitlines():
        key, _, value = line.partition(":")
        if key == "license":
            return value.strip().strip("'\"")[:100]
    return ""


def _in_package(text: str) -> Source:
    name, _, wanted = text.partition("/")
    package = _distribution(name)
    by_path = {str(file): file for file in package.files or ()}
    there = sorted(path for path in by_path if path.endswith(".gguf"))
    if not there:
        data = [path for path in by_path if not path.endswith((".py", ".pyc")) and ".dist-info/" not in path]
        holds = ", ".join([*data[:_LISTED], *(["..."] if len(data) > _LISTED else [])])
        raise UserError(
            f"package {name!r} contains no GGUF file; it contains {holds or 'only Python files'}", fix="use a different package"
        )
    matches = [path for path in there if not wanted or path == wanted or path.endswith(f"/{wanted}")]
    if len(matches) != 1:
        which = f"no file {wanted!r}" if not matches else "more than one GGUF file"
        raise UserError(f"package {name!r} has {which}; its GGUF files are {', '.join(there)[:1000]}", fix=f"give {PACKAGE}{name}/FILE")
    path = _inside(package, matches[0])
    digest = sha256_file(path)
    stated = by_path[matches[0]].hash
    ours = base64.urlsafe_b64encode(bytes.fromhex(digest)).rstrip(b"=").decode()  # as in a wheel's RECORD
    if stated is not None and stated.mode == "sha256" and stated.value != ours:
        raise UserError(f"{path} is not the file that {name!r} installed", fix=f"pip install --force-reinstall --no-deps {name}")
    licences = [
        _inside(package, path) for path in by_path if any(fnmatch(PurePosixPath(path).name.upper(), pattern) for pattern in _LICENCES)
    ]
    return Source(
        path=path,
        name=matches[0],
        sha256={path.name: digest},
        package=f"{package.metadata['Name']} {package.version}",
        licence=next((licence[:100] for key in ("License-Expression", "License") for licence in package.metadata.get_all(key) or ()), ""),
        licences=_texts(tuple(licences)),
    )


def _distribution(name: str) -> Distribution:
    """Returns an installed distribution by its name or by the name of one of its modules. Raises `UserError` unless exactly one matches."""
    try:
        return distribution(name)
    except (PackageNotFoundError, ValueError):
        names = sorted(set(packages_distributions().get(name, ())))
    if len(names) != 1:
        fix = "correct the name; if it is correct, check who publishes the package, then install it with pip"
        if names:
            raise UserError(
                f"{name!r} is a module of {len(names)} packages: {', '.join(names)}", fix=f"name one of them, such as package:{names[0]}"
            )
        raise UserError(f"package {name!r} is not installed", fix=fix)
    return distribution(names[0])


def _inside(package: Distribution, path: str) -> Path:
    """Returns the path of a file in a package. Raises `UserError` if the file is missing or outside the package's folder."""
    root = Path(str(package.locate_file(""))).resolve()
    file = Path(str(package.locate_file(path)))
    if PurePosixPath(path).is_absolute() or not file.resolve().is_relative_to(root):
        raise UserError(f"package {package.metadata['Name']!r} has a file outside its folder: {path}", fix="use a different package")
    if not file.is_file():
        raise UserError(f"package {package.metadata['Name']!r} is missing {path}", fix="reinstall it")
    return file


def _texts(files: tuple[Path, ...]) -> tuple[Path, ...]:
    return tuple(file for file in files if file.is_file() and file.stat().st_size <= _LARGEST_LICENCE)
