"""Loads and describes the task of an inspect host, and converts the scores of its samples. Runs in inspect's Python environment."""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from typing import Any

from host_channel import MAX_TEXT, TASK, Fault, describe_error
from load_hints import load_hint

MAX_SAMPLES = 100_000
MAX_INPUT = 20_000
OWN_SOLVER = "agentrl"
LARGEST = 1e300  # a number above it may not fit into a float
_WORDS = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}


def load_attribute(reference: str) -> Any:
    """Returns the object at `module@name` or `path/file.py@name`. Raises `Fault` if the reference is malformed, or the module cannot be
    imported or has no such attribute."""
    module, sep, name = reference.rpartition("@")
    if not sep or not module or not name:
        package, slash, task = reference.partition("/")
        example = f", for example {package}.{task}@{task}" if slash and "/" not in task else ""  # inspect's notation is package/task
        raise Fault(TASK, f"{reference!r} is not a reference to a task: write module@task or path/file.py@task{example}")
    try:
        if module.endswith(".py"):
            if not os.path.isfile(module):
                raise Fault(TASK, f"{module}: no such file; paths are relative to the project")
            spec = importlib.util.spec_from_file_location(os.path.basename(module)[:-3], module)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = loaded
            sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
            spec.loader.exec_module(loaded)
        else:
            loaded = importlib.import_module(module)
    except Fault:
        raise
    except BaseException as error:
        raise Fault(TASK, f"{module} cannot be imported: {describe_error(error)}{load_hint(error)}") from error
    if not hasattr(loaded, name):
        from inspect_ai._util.registry import is_registry_object

        known = sorted(key for key, value in vars(loaded).items() if is_registry_object(value, type="task"))
        raise Fault(TASK, f"{module} has no task {name!r}; its tasks are: {', '.join(known) or 'none'}")
    return getattr(loaded, name)


def load_task(config: dict[str, Any]) -> Any:
    """Returns the inspect task that a configuration describes. Raises `Fault` if the task or its solver cannot be loaded, or if the task
    has no scorer."""
    from inspect_ai import Task, task_with

    sys.path[:0] = config["path"]
    create = load_attribute(config["task"])
    try:
        task = create(**config["args"])
    except BaseException as error:
        raise Fault(TASK, f"{config['task']}(**{config['args']}) failed: {describe_error(error)}{load_hint(error)}") from error
    if not isinstance(task, Task):
        raise Fault(
            TASK, f"{config['task']} returned a {type(task).__name__}, not an inspect_ai.Task: specify a function decorated with @task"
        )
    if config["solver"] and config["solver"] != OWN_SOLVER:
        try:
            task = task_with(task, solver=load_attribute(config["solver"])())
        except Fault:
            raise
        except BaseException as error:
            raise Fault(TASK, f"solver {config['solver']} failed: {describe_error(error)}{load_hint(error)}") from error
    if not task.scorer:
        raise Fault(TASK, f"{config['task']} has no scorer, so its samples have no score: add one to the task")
    return task


def samples_of(task: Any) -> dict[str, Any]:
    """Returns the samples of a task by id. A sample without an id uses its number as its id, as in inspect. Raises `Fault` if there are no
    samples, too many, or two with the same id."""
    samples = {}
    if len(task.dataset) > MAX_SAMPLES:
        raise Fault(TASK, f"the task has {len(task.dataset)} samples; the maximum is {MAX_SAMPLES}: limit it with an argument of the task")
    for number, sample in enumerate(task.dataset, 1):
        sample.id = number if sample.id is None else sample.id
        if str(sample.id) in samples:
            raise Fault(TASK, f"two samples have the id {sample.id!r}")
        samples[str(sample.id)] = sample
    if not samples:
        raise Fault(TASK, "the task has no samples")
    return samples


def describe(config: dict[str, Any]) -> Any:
    """Returns the task's samples, each with id, prompt (cut to `MAX_INPUT` characters per message), digest of the content, sandbox, and
    files if the solver is `agentrl`. Raises `Fault` if the task or a sample is invalid."""
    task = load_task(config)
    described = []
    for name, sample in samples_of(task).items():
        content = sample.model_dump(mode="json", fallback=str)
        messages = [{"role": "user", "content": content["input"]}] if isinstance(content["input"], str) else content["input"]
        for entry in (content, *messages):
            entry.pop("id", None)  # the ids of messages are random
        sandbox = sample.sandbox or task.sandbox
        described.append(
            {
                "id": name,
                "prompt": [{"role": message["role"], "content": _text(message["content"])} for message in messages],
                "sha256": hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")).hexdigest(),
                "sandbox": None if sandbox is None else sandbox.config if isinstance(sandbox.config, str) else "",
                "files": _files(sample, name) if config["solver"] == OWN_SOLVER else {},
            }
        )
    return {"samples": described}


def _text(content: Any) -> str:
    return (content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content))[:MAX_INPUT]


def _files(sample: Any, name: str) -> dict[str, str]:
    """Returns path -> content in base64 for the files in a sample's sandbox. Raises `Fault` if the sandbox needs something that only
    inspect's solvers set up."""
    from inspect_ai._util.file import file as open_file

    if sample.setup:
        raise Fault(TASK, f"sample {name!r} has a setup script, which solver=agentrl does not run: use the task's solver")
    files = {}
    for path, source in (sample.files or {}).items():
        if ":" in path or path.startswith("/"):
            raise Fault(TASK, f"sample {name!r}: file {path!r} is not relative to the working directory: use the task's solver")
        data = source.encode()
        if not source.startswith("data:") and len(source) < MAX_TEXT and os.path.isfile(source):
            with open(source, "rb") as content:
                data = content.read()
        elif source.startswith("data:"):
            with open_file(source, "rb") as content:
                data = content.read()
        files[path] = base64.b64encode(data).decode()
    return files


def score_result(scores: dict[str, Any], chosen: str, values: dict[str, float]) -> dict[str, Any]:
    """Returns the value of a sample, its parts and its evidence.

    Each scorer's value is a part. If a scorer returns a dictionary or a list, each entry is also a part, and the scorer's value is the mean
    of the entries. Entries that are None are ignored. The sample's value is the part `chosen`, or the mean over its scorers if `chosen` is
    empty. The sample has no value if the part `chosen` is not a number, or if `chosen` is empty and any scorer or entry is not a number.

    Args:
        values: mapping string -> number, in addition to inspect's C, P, I, N, yes, no, true and false.
    """
    parts: dict[str, float] = {}
    missing: list[str] = []
    for name, score in scores.items():
        value = score.value
        if isinstance(value, dict | list | tuple):
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            numbers = {f"{name}/{key}": _number(each, values) for key, each in entries if each is not None}
            numeric = {key: number for key, number in numbers.items() if number is not None}
            parts |= numeric
            missing += [f"{key} has no numeric value" for key in numbers if key not in numeric]
            if numeric and len(numeric) == len(numbers):
                parts[name] = sum(numeric.values()) / len(numeric)
            elif not numbers:
                missing.append(f"{name} returned no entries")
        elif (number := _number(value, values)) is not None:
            parts[name] = number
        elif isinstance(value, float):
            missing.append(f"{name}: unscored{f': {score.reason}' if score.reason else ''}")
        else:
            missing.append(f"{name} returned {value!r:.80}, which is not a number: map it with the option values")
    evidence = "\n".join(f"{name}: {score.explanation}" for name, score in scores.items() if score.explanation)[:MAX_TEXT]
    result = {"parts": parts, "evidence": evidence, "value": None}
    if chosen:
        if chosen in parts:
            return result | {"value": parts[chosen]}
        return result | {"reason": "; ".join([*missing, f"the sample has no score {chosen!r}"])[:MAX_TEXT]}
    if missing or not scores:
        return result | {"reason": "; ".join(missing)[:MAX_TEXT] or "no scorer returned a score"}
    return result | {"value": sum(parts[name] for name in scores) / len(scores)}


def _number(value: Any, values: dict[str, float]) -> float | None:
    if isinstance(value, str):
        if value in values:
            return values[value]
        if value.lower() in _WORDS:
            return _WORDS[value.lower()]
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else None
