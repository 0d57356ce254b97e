"""Finds the policy that a user names for an evaluation, parses the options of requests to an endpoint, and builds a recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentrl.base import secrets, untrusted_files
from agentrl.base.error_text import one_line_error, reason_text
from agentrl.base.user_code import printable
from agentrl.base.web import validate_url
from agentrl.config.recipe import Recipe, SamplingConfig, build, load
from agentrl.config.rollout import SUITE_FAMILY
from agentrl.errors import PluginError, RecipeError, TaskError, UserError
from agentrl.failure.case import Suite, load_suite
from agentrl.failure.timeline import one_line
from agentrl.plugins import parts
from agentrl.plugins.parts import Part
from agentrl.plugins.references import project_root
from agentrl.records import Split, Task
from agentrl.session.models import SAMPLING_FILE
from agentrl.version.model_folder import read_json

_LONGEST_CONTEXT = 1 << 20
_LARGEST = 1 << 20  # maximum bytes of a sampling record
_SHOWN = 200  # maximum characters of a suite's string in an error message
_PART = parts.PartKind(key="--policy", what="policy", shipped={}, protocol="agentrl.protocols:Policy", arguments=())
_SAID_ELSEWHERE = {
    "model": "--model sets the model",
    "messages": "the case contains the messages",
    "tools": "the case contains the tools",
    "stream": "answers are not streamed",
    "n": "--repeats sets the number of attempts",
    "temperature": "set evaluation.sampling.temperature, or --request temperature=null for a server that does not accept a temperature",
    "top_p": "set evaluation.sampling.top_p",
    "max_tokens": "limits.turn_tokens sets the number of tokens",
    "max_completion_tokens": "limits.turn_tokens sets the number of tokens; --tokens-name max_completion_tokens sends it under this name",
}
"""Request key that cannot be set as an option -> what sets it instead."""
_FIX = "use a model folder or id, RUN@VERSION, http(s)://HOST/v1, or module:attr of a policy factory"
_MODEL_ID = re.compile(r"(?P<owner>[\w-][\w.-]*)/[\w-][\w.-]*")


class PolicySource(StrEnum):
    """The source of a policy."""

    FOLDER = "folder"  # a model folder or the id of a model on the Hugging Face Hub, served here
    VERSION = "version"  # a version of a run, served here with that run's settings
    ENDPOINT = "endpoint"  # a third-party chat completions server
    PLUGIN = "part"  # a user-supplied plug-in


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options for the requests to an endpoint, in addition to its model and key."""

    tokens_name: str = "max_tokens"  # request key for the token limit of a turn
    keys: Mapping[str, Any] = field(default_factory=dict)  # additional keys in each request
    without_temperature: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)  # name -> reference to the value

    @classmethod
    def parse(cls, requested: Sequence[str], headers: Sequence[str], tokens_name: str) -> RequestOptions:
        """Parses command-line options. Raises `UserError` if an option is invalid.

        Args:
            requested: keys to add to each request, as KEY=VALUE. A value is JSON or text. `temperature=null` omits the temperature from
                requests.
            headers: headers to add to each request, as NAME=REFERENCE.
            tokens_name: request key for the token limit of a turn; empty means `max_tokens`.
        """
        keys = {key: _json_or_text(value) for key, value in (_pair("--request", text, "reasoning_effort=low") for text in requested)}
        without = "temperature" in keys and keys["temperature"] is None
        for key in [key for key in keys if key in _SAID_ELSEWHERE and not (without and key == "temperature")]:
            raise UserError(f"--request {key} is not allowed: {_SAID_ELSEWHERE[key]}", fix=f"remove --request {key}")
        keys = {key: value for key, value in keys.items() if key != "temperature"}
        if problem := next(secrets.literal_secret_errors(keys, "--request"), ""):
            raise UserError(problem, fix="set headers by reference: --header NAME=env:VARIABLE")
        references = dict(_pair("--header", text, "api-key=env:THEIR_KEY") for text in headers)
        return cls(tokens_name=tokens_name or "max_tokens", keys=keys, without_temperature=without, headers=references)

    @property
    def summary(self) -> str:
        """A summary of the options, which is part of the policy's name; empty if there are none."""
        texts = [f"{key}={json.dumps(value)}" for key, value in self.keys.items()]
        return ", ".join([*texts, "no temperature"] if self.without_temperature else texts)


def _pair(option: str, text: str, example: str) -> tuple[str, str]:
    key, parted, value = text.partition("=")
    if not parted or not key.strip():
        raise UserError(f"{option} {printable(text, 80)} contains no =", fix=f"write it like {option} {example}")
    return key.strip(), value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPolicy:
    """A policy as the user specified it."""

    source: PolicySource
    name: str  # as the user typed it
    model: str  # absolute folder, model id, URL or plug-in reference
    run: Path | None = None  # run whose recipe configures its server
    model_name: str = ""  # name of the model at the endpoint
    key_env: str = ""  # environment variable with the endpoint's key; empty if the endpoint needs no key
    requests: RequestOptions = field(default_factory=RequestOptions)  # options for requests to the endpoint

    @property
    def served(self) -> bool:
        """Whether the policy runs on a server that the evaluation starts."""
        return self.source in (PolicySource.FOLDER, PolicySource.VERSION)

    @property
    def version(self) -> int:
        """The number of the policy's version in its run; 0 if the policy is not a version of a run."""
        return int(Path(self.model).name) if self.source is PolicySource.VERSION else 0


def find_policy(named: str, *, model_name: str = "", key_env: str = "", requests: RequestOptions | None = None) -> NamedPolicy:
    """Returns the policy that `named` identifies.

    Raises `UserError` if there is no such folder or version, if an endpoint's URL is invalid or its `model_name` is missing, or if an
    option of endpoints is given for another policy. A model id or a plug-in reference is not resolved.
    """
    if named.startswith(("http://", "https://")):
        if not model_name:
            raise UserError("an endpoint needs the name of its model", fix="set it with --model (--agentrl-model in pytest)")
        validate_url(named)
        options = requests or RequestOptions()
        name = f"{model_name} at {named}{options.summary and f' ({options.summary})'}"
        return NamedPolicy(source=PolicySource.ENDPOINT, name=name, model=named, model_name=model_name, key_env=key_env, requests=options)
    if model_name or key_env or (requests or RequestOptions()) != RequestOptions():
        raise UserError(
            f"a model name, a key, request keys and headers require an endpoint, but --policy {named} is not an endpoint",
            fix="use --policy http(s)://HOST/v1, or remove these options",
        )
    if (version_of_run := version_folder(named)) is not None:
        run, folder = version_of_run
        return NamedPolicy(source=PolicySource.VERSION, name=named, model=str(folder), run=run)
    if Path(named).is_dir():
        return NamedPolicy(source=PolicySource.FOLDER, name=named, model=str(Path(named).resolve()))
    if ":" in named:
        return NamedPolicy(source=PolicySource.PLUGIN, name=named, model=named)
    if (model_id := _MODEL_ID.fullmatch(named)) and not Path(model_id["owner"]).exists():  # runs/mistyped is not an id
        return NamedPolicy(source=PolicySource.FOLDER, name=named, model=named)
    raise UserError(f"--policy {named}: no such folder or version of a run", fix=_FIX)


def recipe_policy(recipe: Recipe) -> NamedPolicy:
    """Returns the model of a recipe as a policy. The model may be a version's folder (`--model RUN@VERSION`)."""
    model, folder = recipe.policy.model, Path(recipe.policy.model)
    is_version = folder.parent.name == "versions" and folder.name.isdecimal()
    return NamedPolicy(source=PolicySource.VERSION if is_version else PolicySource.FOLDER, name=model, model=model)


def recorded_policy(suites: Sequence[Suite], *, option: str = "--policy") -> NamedPolicy:
    """Returns the policy that the suites' `suite.toml` files name, which is a model in the project of the suites.

    The policy must be in the project but not in a suite's folder, because a suite may come from a third party, and the recipe of a run may
    execute code.

    Raises `UserError` if the suites name no policy or different policies, or if the policy does not exist or is stored elsewhere.
    """
    first, *others = suites
    settings, named = first.folder / "suite.toml", first.policy
    if not named:
        raise UserError(f"{first.folder} is a suite, but its suite.toml sets no policy", fix=f"use {option} FOLDER or {option} RUN@VERSION")
    if any(other.policy != named for other in others):
        raise UserError("the suites set different policies", fix=f"use {option} FOLDER or {option} RUN@VERSION")
    root = project_of(suites).resolve()
    shown = f"{settings}: policy = {one_line(named, _SHOWN)!r}"
    typed = named if Path.cwd().resolve() == root else str(root / named)
    path = untrusted_files.resolve_inside(named, root)
    version = None if path is None else version_folder(typed)
    used = version or ([] if path is None else [path])  # both paths are checked: the run contains the recipe, and the version may be a link
    if not used or not all(folder.is_relative_to(root) for folder in used):
        raise UserError(f"{shown} is outside the project {root}", fix="use a model of the project, such as runs/NAME@VERSION")
    folders = [suite.folder.resolve() for suite in suites if suite.folder.resolve() != root]
    if any(part.is_relative_to(folder) for part in used for folder in folders):
        raise UserError(f"{shown} is in the folder of a suite", fix=f"if you trust it, use {option} FOLDER or RUN@VERSION")
    model = used[-1]
    if version is None and not model.is_dir():
        note = f" ({one_line(first.note, _SHOWN)})" if first.note else ""
        raise UserError(f"{shown} does not exist{note}", fix=f"train it, or evaluate a different policy: {option} FOLDER or RUN@VERSION")
    if version is None:
        return NamedPolicy(source=PolicySource.FOLDER, name=typed, model=str(model))
    return NamedPolicy(source=PolicySource.VERSION, name=typed, model=str(model), run=version[0])


def version_folder(named: str) -> tuple[Path, Path] | None:
    """Returns the run folder and model folder of RUN@VERSION; None for any other name, and if RUN contains no versions.

    Raises `UserError` if the run has no complete model of that version.
    """
    run, at, number = named.rpartition("@")
    if not at or not number.isdecimal() or len(number) > 9 or not (Path(run) / "versions").is_dir():
        return None
    folder = Path(run) / "versions" / f"{int(number):06d}"
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{run} has no complete model of version {int(number)}: it does not exist, is an adapter, or its weights were removed",
            fix=f"choose a different version (agentrl versions list {run}), or raise learner.keep_versions",
        )
    return Path(run).resolve(), folder.resolve()


def project_of(suites: Sequence[Suite]) -> Path:
    """Returns the project of the suites, to which their image and verifier paths are relative.

    Raises `UserError` if the suites belong to more than one project.
    """
    roots = sorted({project_root(suite.folder) for suite in suites})
    if len(roots) > 1:
        raise UserError(f"the suites belong to two projects: {roots[0]} and {roots[1]}", fix="evaluate them one after the other")
    return roots[0]


def recipe_for(policy: NamedPolicy, suites: Sequence[Suite], overrides: Sequence[str] = ()) -> Recipe:
    """Returns a recipe that evaluates a policy on suites.

    For a version of a run, the run's settings for serving, sampling and sandboxes apply. For a model that a run exported, the run's
    sampling settings apply. Otherwise defaults apply. Raises `RecipeError` if an override is invalid, a case needs too large a context, or
    an endpoint does not support a sampling setting. Raises `UserError` if a run's recipe or a model's sampling settings cannot be read.
    """
    data: dict[str, Any] = {"policy": {"max_model_len": _room(suites)}} if policy.run is None else _of_run(policy.run)
    data["name"] = re.sub(r"[^A-Za-z0-9_.-]+", "-", "-".join(suite.folder.resolve().name for suite in suites)).lstrip("-_.")[:60] or "suite"
    data["policy"] |= {
        "model": policy.name if policy.source is PolicySource.ENDPOINT else policy.model,
        "chat_template": None,
    }  # the version's folder already contains the run's template
    if policy.source is PolicySource.FOLDER:
        data["policy"]["max_model_len"] = min(data["policy"]["max_model_len"], _longest(Path(policy.model)))
    folders = "\n".join(str(suite.folder.resolve()) for suite in suites)
    data["tasks"] = {"family": Part(SUITE_FAMILY, options={"folders": folders})}
    sampling = data.get("evaluation", {}).get("sampling", {})
    if policy.source is PolicySource.FOLDER:
        sampling = recorded_sampling(Path(policy.model))
    data |= {"evaluation": {"sampling": sampling, "heldout": 0, "heldout_real": 0}, "gate": None, "trackers": ["terminal"]}
    recipe = build(data).but(*overrides)
    sampling = recipe.evaluation.sampling
    if policy.source is PolicySource.ENDPOINT and (sampling.top_k or sampling.min_p):
        raise RecipeError("chat completions do not support top_k and min_p of evaluation.sampling", fix="remove them")
    return recipe


class SuiteTasks:
    """An `agentrl.protocols.TaskFamily` whose tasks are the tasks of a suite's cases, for evaluations without a user-supplied recipe.

    Args:
        folders: absolute paths of the suites, one per line.
    """

    name = "suites"

    def __init__(self, *, seed: int, folders: str) -> None:
        self._tasks = [case.task for folder in folders.split("\n") for case in load_suite(Path(folder)).cases]

    def size(self, split: Split) -> int:
        """Returns the number of cases for the training split, and 0 for any other split."""
        return len(self._tasks) if split is Split.TRAIN else 0

    def task(self, split: Split, index: int) -> Task:
        """Returns the task of the case with this index, modulo the number of cases."""
        return self._tasks[index % len(self._tasks)]

    def gold(self, task: Task) -> str:
        """Raises `TaskError`, because captured cases have no gold solution."""
        raise TaskError(f"case {task.id!r} was captured and has no gold solution")


def check_policy_plugin(policy: NamedPolicy) -> None:
    """Raises `PluginError` if the policy's reference does not resolve to a policy factory. Does not call the factory."""
    parts.load_part(_PART, Part(policy.model))


def load_policy_plugin(policy: NamedPolicy) -> Any:
    """Calls a policy factory. Returns an `agentrl.protocols.Policy` whose attribute `tokenizer` encodes and decodes its token ids.

    Raises the errors of `check_policy_plugin`, and `PluginError` if the factory fails or the returned object has no `tokenizer`.
    """
    loaded = parts.make_part(_PART, Part(policy.model))
    if getattr(loaded, "tokenizer", None) is None:
        raise PluginError(
            f"--policy {policy.model!r}: the policy, of class {type(loaded).__name__}, has no tokenizer",
            fix="set its attribute `tokenizer` to a Hugging Face tokenizer with a chat template, like agentrl.testing.ScriptedPolicy",
        )
    return loaded


def _of_run(run: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = load(run / "recipe.json").model_dump(mode="json")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the recipe of {run}: {getattr(error, 'message', None) or error}"[:2000],
            fix="use the version's folder instead of RUN@VERSION; it is then served with the default settings",
        ) from None
    return data


def _room(suites: Sequence[Suite]) -> int:
    """Returns the context length in tokens that the case with the highest token limit needs."""
    longest = max(case.task.limits.episode_tokens for suite in suites for case in suite.cases)
    if longest > _LONGEST_CONTEXT:
        raise RecipeError(
            f"a case needs a context of {longest:,} tokens, more than the default maximum", fix="set policy.max_model_len=..."
        )
    return max(16, longest)


def _longest(model: Path) -> int:
    """Returns the maximum context length of a model in tokens; `_LONGEST_CONTEXT` if the folder does not contain it."""
    try:
        positions = read_json(model / "config.json").get("max_position_embeddings")
    except (OSError, ValueError):
        return _LONGEST_CONTEXT
    return positions if type(positions) is int and positions >= 16 else _LONGEST_CONTEXT


def recorded_sampling(model: Path) -> dict[str, Any]:
    """Returns the `evaluation.sampling` settings with which a model was evaluated, as recorded in its folder or the recipe of its run.

    The result is empty if neither contains such settings. Raises `UserError` if the settings cannot be read.
    """
    path = model / SAMPLING_FILE
    try:
        if path.is_file():
            recorded = json.loads(untrusted_files.read_bytes(path, most=_LARGEST, inside=model))
        elif model.parent.name == "versions" and (model.parent.parent / "recipe.json").is_file():
            recorded = load(model.parent.parent / "recipe.json").evaluation.sampling.model_dump(mode="json")
        else:
            return {}
        return {name: recorded[name] for name in SamplingConfig.model_fields}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        problem = reason_text(error) if isinstance(error, OSError) else one_line_error(error)
        raise UserError(
            f"{path} cannot be read: {problem}", fix="delete the file, and set evaluation.sampling.temperature, top_k, ..."
        ) from None
