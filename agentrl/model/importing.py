"""Builds a model folder: finds the source, loads and verifies it, and writes the folder atomically."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, Literal

import agentrl
from agentrl.agent.template import SHIPPED_TEMPLATES, probe_template, probe_tokenizer, read_template, select_template
from agentrl.base import files
from agentrl.base.error_text import disk_full_error
from agentrl.base.installation import install_command
from agentrl.base.scratch import ScratchFolder
from agentrl.errors import UserError
from agentrl.model.gguf import GgufHeader, check_data, read_header
from agentrl.model.source import Source, find_source
from agentrl.version.deltas import read_safetensors_header
from agentrl.version.model_folder import check_model, check_model_files, read_json

RECORD = "agentrl_import.json"
_FORMAT = 1
_BYTES = {"float32": 4, "bfloat16": 2}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")  # keys in config.json
_SPARE_BYTES = 256 << 20  # disk space to leave free
_SAMPLE = "A tall\n\n1. café, 17*23 =  4096;\n    1: 'π' <x> don't 𝄞"
_TOOLS = ("transformers", "tokenizers", "torch", "gguf")

_OF_A_MODEL = (
    *(RECORD, "*config.json", "tokenizer*.json", "*tokens*.json", "vocab.*", "merges.txt", "chat_template*", "*.safetensors", "*.model"),
    *("*.safetensors.index.json", "*.bin", "*.bin.index.json", "LICEN[CS]E*", "NOTICE*", "COPYING*", "README*", ".gitattributes"),
)
"""Name patterns of the files in a model folder. `--force` deletes no other files."""

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """The result of an import."""

    folder: Path
    record: dict[str, Any]  # the content of agentrl_import.json
    fresh: bool  # False if the folder already held the same import


def import_model(
    source: str,
    target: Path,
    *,
    chat_template: str | None = None,
    dtype: Dtype = "float32",
    force: bool = False,
    root: Path | None = None,
    on_stage: Callable[[str], None] = lambda _: None,
) -> Imported:
    """Writes the model folder `target` from `source`: a Hugging Face folder, a GGUF file, or `package:NAME[/FILE]`.

    Args:
        chat_template: name of a built-in template, or a file relative to `root` (default: the current folder). None keeps the model's
            template.
        force: whether to replace an existing model folder.
        on_stage: called with the name of each stage.

    Raises `UserError` if the source is missing, unreadable or damaged, if the model cannot be served or trained exactly, if a package is
    missing, if the disk has too little space, if `target` may not be replaced, or if another import is writing `target`. Raises `OSError`
    if the disk becomes full during the import.
    """
    try:
        return _import(source, target, chat_template, dtype, force, root or Path.cwd(), on_stage)
    except OSError as error:
        if disk_full_error(error) is not None:
            raise
        where = error.filename or target
        raise UserError(f"{where}: {error.strerror or error}", fix="correct the problem, or choose a different source or folder") from error


def _import(
    source: str, target: Path, chat_template: str | None, dtype: Dtype, force: bool, root: Path, on_stage: Callable[[str], None]
) -> Imported:
    origin = find_source(source)
    text = None if chat_template is None else read_template(chat_template, root)
    request = {
        "source": {"name": origin.name, "package": origin.package, "sha256": origin.sha256},
        "dtype": dtype,
        "chat_template": None if text is None else sha256(text.encode()).hexdigest(),
    }
    if (existing := _same(target, request)) is not None:
        return Imported(folder=target, record=existing, fresh=False)
    _check_target(target, origin, force=force)
    _check_installed(origin)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _alone(target):
        part = files.partial_folder(target)
        try:
            record = _make(origin, part, text, chat_template, dtype, on_stage) | {"asked": request}
            record["files"] = files.folder_manifest(part)
            files.write_atomically(part / RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
            _check_target(target, origin, force=force)  # again, because the import took minutes
            files.commit_folder(part, target)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return Imported(folder=target, record=record, fresh=True)


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Allows one process at a time to build a folder. Raises `UserError` if another process is building the folder."""
    path = target.with_name(f".{target.name}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            there = path.stat()
        except (BlockingIOError, FileNotFoundError):  # not found: the holder has just finished and removed it
            there = None
        if there is None or there.st_ino != os.fstat(handle).st_ino:
            raise UserError(f"another import is writing {target}", fix="wait until it finishes, or choose a different folder")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _same(target: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the record of a folder that already contains the requested import and is undamaged; otherwise None."""
    try:
        record = json.loads((target / RECORD).read_text(encoding="utf-8"))
        if record["format"] != _FORMAT or record["asked"] != request:
            return None
        recorded, _ = record["files"], record["chat_template"]["shows_tools"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    there = files.folder_manifest(target)
    there.pop(RECORD)
    return record if isinstance(record, dict) and there == recorded else None


def _check_target(target: Path, source: Source, *, force: bool) -> None:
    if target.resolve() in (here := Path.cwd().resolve(), *here.parents):
        raise UserError(f"{str(target)!r} is the current folder, or contains it", fix="give a new folder, such as models/mine")
    if not target.exists() and not target.is_symlink():
        return
    if target.is_symlink() or not target.is_dir():
        raise UserError(f"{target} exists and is not a folder", fix="choose a different folder")
    if not any(target.iterdir()):
        return
    if source.path.resolve().is_relative_to(target.resolve()):
        raise UserError(f"{target} contains the source", fix="choose a different folder")
    others = sorted(
        path.name for path in target.iterdir() if not path.is_file() or not any(fnmatch(path.name, pattern) for pattern in _OF_A_MODEL)
    )
    model = any((target / name).is_file() for name in (RECORD, "config.json"))
    if not force or not model:
        content = "contains a different model, or a modified one" if model else "is not a model folder"
        raise UserError(f"{target} exists and {content}", fix="choose a different folder" + (", or use --force" if model else ""))
    if others:
        listed = ", ".join(map(repr, others[:5])) + (", ..." if len(others) > 5 else "")
        raise UserError(f"{target} also contains files that --force does not delete: {listed}", fix="choose a different folder")


def _check_installed(source: Source) -> None:
    for package in ("torch", "transformers"):
        if find_spec(package) is None:
            fix = f"{install_command('cpu')}, or with [gpu]; agentrl doctor shows what is missing"
            raise UserError(f"{package} is not installed", fix=fix)
    if source.is_gguf and find_spec("gguf") is None:
        raise UserError("the package gguf is not installed", fix=install_command("models"))


def _make(source: Source, part: Path, text: str | None, named: str | None, dtype: Dtype, on_stage: Callable[[str], None]) -> dict[str, Any]:
    """Fills the folder `part` and returns the record of the import."""
    if text is not None and source.is_gguf:
        probe_template(text)
    with ScratchFolder() as work:
        header, kinds = None, dict[str, int]()
        folder = source.path
        if source.is_gguf:
            header = read_header(source.path)
            kinds = check_data(header)
            _check_header(header)
            values = header.values
            folder = work  # contains no other file from the source's folder
            (folder / source.path.name).symlink_to(source.path.resolve())
        else:
            check_model_files(folder, chat_template=False)
            check_model(folder)
            values = _check_folder(folder)
        on_stage("loading the libraries")
        from agentrl.model import loading

        file = source.path.name if header is not None else None
        _quiet()
        on_stage(f"reading {source.name}")
        config = loading.read_config(folder, file, header)
        parameters = loading.check_size(config, values=values, exact=header is not None)
        _check_disk(part, parameters * _BYTES[dtype])
        template = _save_tokenizer(folder, header, part, text, config)
        on_stage(f"loading {parameters:,} parameters as {dtype}")
        prints = loading.save_model(loading.load_model(folder, config, dtype, file=file), config, part)
    on_stage("checking the written model: the same bits, and the same logprobs in the learner")
    check_model_files(part)
    check_model(part)
    loading.check_saved(part, dtype, prints)
    for path in source.licences:
        shutil.copyfile(path, part / path.name)
    licence_text = _plain((header.text("general.license") if header is not None else "") or source.licence)
    return {
        "format": _FORMAT,
        "source": {"name": source.name, "package": source.package, "sha256": source.sha256, "stored": kinds},
        "model": {"type": config.model_type, "parameters": parameters, "dtype": dtype},
        "licence": {"id": licence_text, "files": [path.name for path in source.licences]},
        "chat_template": {"name": named or "the model's own", **template},
        "tools": {"agentrl": agentrl.__version__} | {name: package_version for name in _TOOLS if (package_version := _version(name))},
    }


def _plain(text: str) -> str:
    """Returns third-party text as one short printable line."""
    return "".join(character for character in " ".join(text[:1000].split()) if character.isprintable())[:100]


def _check_header(header: GgufHeader) -> None:
    kind = header.text("general.type") or "model"
    if kind != "model":
        raise UserError(f"{header.path} contains only part of a model: {kind[:80]}", fix="give the model's GGUF file")
    if header.metadata.get("split.count", 1) not in (0, 1):
        raise UserError(f"{header.path} is one of several files of a model", fix="join them with llama-gguf-split --merge")
    _check_layers(header.metadata.get(f"{header.architecture}.block_count"), len(header.tensors))


def _check_folder(folder: Path) -> int:
    """Returns the number of elements in a folder's safetensors files, whose headers `check_model_files` has checked."""
    shapes = [entry["shape"] for path in sorted(folder.glob("*.safetensors")) for entry in read_safetensors_header(path).values()]
    config = read_json(folder / "config.json")
    inner = config.get("text_config") or config
    for key in _LAYERS:
        _check_layers(inner.get(key), len(shapes))
    return sum(map(prod, shapes))


def _check_layers(layers: object, tensors: int) -> None:
    """Raises `UserError` if there are more layers than tensors, before a library allocates the layers."""
    if layers is not None and (not isinstance(layers, int) or layers > tensors):
        raise UserError(
            f"the configuration has {layers!r} layers, but the files contain {tensors} tensors", fix="download or copy it again"
        )


def _check_disk(part: Path, weights: int) -> None:
    free, needed = shutil.disk_usage(part).free, weights + _SPARE_BYTES
    if free < needed:
        raise UserError(
            f"{part.parent}: the model needs {needed >> 20} MiB, but only {free >> 20} MiB are free",
            fix="free disk space, or choose a different folder",
        )


def _save_tokenizer(folder: Path, header: GgufHeader | None, part: Path, text: str | None, config: Any) -> dict[str, Any]:
    """Writes the tokenizer with its chat template and returns the template's record. Raises `UserError` if the template does not fit the
    tokenizer."""
    from transformers import AutoTokenizer

    from agentrl.agent.chat import ChatFormat
    from agentrl.base.error_text import one_line_error
    from agentrl.model.loading import load_tokenizer

    if header is None:
        probe_tokenizer(str(folder), text)
    try:
        if header is not None:
            tokenizer = load_tokenizer(folder, header)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except UserError:
        raise
    except Exception as error:  # its parsers raise many kinds of exceptions
        raise UserError(f"the tokenizer cannot be read: {one_line_error(error)}", fix="import the model's Hugging Face folder") from error
    template = text or select_template(tokenizer.chat_template)
    if not template:
        raise UserError("the model has no chat template", fix=f"give one with --chat-template: {', '.join(SHIPPED_TEMPLATES)}, or a file")
    if text is None and header is not None:
        probe_template(template)
    tokenizer.chat_template = template
    tokenizer.model_max_length = getattr(config.get_text_config(), "max_position_embeddings", None) or tokenizer.model_max_length
    tokenizer.save_pretrained(part)
    saved = AutoTokenizer.from_pretrained(part, trust_remote_code=False, local_files_only=True)
    if saved.encode(_SAMPLE, add_special_tokens=False) != tokenizer.encode(_SAMPLE, add_special_tokens=False):
        raise UserError("the tokenizer returns different tokens after it is saved and loaded", fix="import the model's Hugging Face folder")
    try:
        chat = ChatFormat(saved)
    except UserError as error:
        reason = error.message.removeprefix("policy.model: ")
        fix = error.fix.partition("; or set policy.rewritten_context")[0]
        raise UserError(reason, fix=fix.replace("policy.chat_template", "--chat-template")) from error
    return {"sha256": sha256(template.encode()).hexdigest(), "shows_tools": chat.shows_tools(), "tool_format": chat.tool_format}


def _quiet() -> None:
    """Disables transformers' progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
