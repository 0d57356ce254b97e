"""The replaceable parts of a run. A recipe selects a built-in part by its name, and a user-supplied part by a plug-in reference.

The name of a built-in part is an alias of a plug-in reference into agentrl. `agentrl.plugins.references` resolves all other names. Before a
run starts, each part is checked against the protocol for its kind. See docs/parts.md."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, Field, JsonValue, model_serializer, model_validator
from pydantic_core import ArgsKwargs

from agentrl.base import secrets
from agentrl.base.error_text import did_you_mean, one_line_error, raise_location
from agentrl.base.user_code import raising_as
from agentrl.errors import AgentRLError, PluginError
from agentrl.plugins import references
from agentrl.plugins.protocol_checks import ProtocolError, promised_class, protocol_errors, signature_error


@pydantic.dataclasses.dataclass(
    frozen=True, slots=True, repr=False, config={"extra": "forbid", "allow_inf_nan": False, "hide_input_in_errors": True}
)
class Part:
    """A replaceable part in a recipe: `"clip"`, `"mine.losses:loss"` or `Part("mine.losses:loss", options={"beta": 2})`.

    In data, a part is written as a string, or as `{"ref": ..., "options": {...}}` if it has options.
    """

    ref: Annotated[str, Field(min_length=1)]
    """The name of a built-in part, or a plug-in reference."""
    options: dict[str, JsonValue] = field(default_factory=dict)
    """Keyword arguments for a user-supplied part or a third-party tracker. They must be JSON values, because recipe.json stores them."""

    @model_validator(mode="before")
    @classmethod
    def _text_is_a_reference(cls, data: Any) -> Any:
        if not isinstance(data, str | Mapping | ArgsKwargs):
            raise ValueError('expected a string, or a mapping such as {"ref": "mine:part", "options": {"size": 3}}')
        return {"ref": data} if isinstance(data, str) else data

    @model_serializer
    def as_data(self) -> str | dict[str, Any]:
        """Returns the reference as a string, or a mapping if there are options."""
        return {"ref": self.ref, "options": self.options} if self.options else self.ref

    def __str__(self) -> str:
        return self.ref

    def __repr__(self) -> str:
        return f"Part({self.ref!r}, options={self.options})" if self.options else f"Part({self.ref!r})"


PART_KEYS = ("ref", "options")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKind:
    """A kind of part: the recipe key, the built-in parts, and the protocol."""

    key: str
    what: str
    shipped: Mapping[str, str]  # name of a built-in part -> plug-in reference
    protocol: str  # plug-in reference
    has_defaults: bool = False  # whether methods inherited from the protocol count as implemented
    arguments: tuple[str, ...] | None = ()  # the factory's arguments, `*` before keyword arguments; None if the part is called directly
    with_options: frozenset[str] = frozenset()  # built-in parts that accept options


BACKEND = PartKind(
    key="sandbox.backend",
    what="sandbox backend",
    shipped={
        "auto": "agentrl.sandbox.select:open_auto",
        "docker": "agentrl.sandbox.select:open_docker",
        "bubblewrap": "agentrl.sandbox.select:open_bubblewrap",
        "cell": "agentrl.sandbox.cell:open_cells",
        "agent-sandbox": "agentrl.sandbox.cell:open_claims",
    },
    protocol="agentrl.protocols:SandboxBackend",
    arguments=("*", "root", "run_label"),
    with_options=frozenset({"cell", "agent-sandbox"}),
)
CHANNEL = PartKind(
    key="serving.weight_transfer",
    what="weight channel",
    shipped={
        "file": "agentrl.serving.swap:FileWeightChannel",
        "delta": "agentrl.serving.swap:FileWeightChannel",
        "nccl": "agentrl.serving.swap:NcclWeightChannel",
    },
    protocol="agentrl.protocols:WeightChannel",
    arguments=("server", "*", "registry_folder"),
    with_options=frozenset({"file", "delta"}),  # `Recipe` checks them
)
STORE = PartKind(
    key="store",
    what="experience store",
    shipped=dict.fromkeys(("sqlite", "redis"), "agentrl.experience.store:open_sqlite"),
    protocol="agentrl.protocols:ExperienceStore",
    arguments=("run_dir", "recipe"),
    with_options=frozenset({"sqlite", "redis"}),  # `Recipe` and `agentrl.run.group_stream` check them
)
TRACKER = PartKind(
    key="trackers",
    what="tracker",
    shipped={
        "terminal": "agentrl.observe.tracker:open_terminal",
        "tensorboard": "agentrl.observe.tracker:open_tensorboard",
        "wandb": "agentrl.observe.services:open_wandb",
        "trackio": "agentrl.observe.services:open_trackio",
        "mlflow": "agentrl.observe.services:open_mlflow",
        "prometheus": "agentrl.observe.services:open_prometheus",
    },
    protocol="agentrl.protocols:Tracker",
    has_defaults=True,
    arguments=("run_dir", "recipe"),
    with_options=frozenset({"wandb", "trackio", "mlflow", "prometheus"}),
)
AGENT = PartKind(
    key="rollout.agent",
    what="agent",
    shipped={
        "turns": "agentrl.agent.turns:TurnLoop",
        "delegating": "agentrl.agent.turns:TurnLoop",
        "players": "agentrl.agent.players:Players",
    },
    protocol="agentrl.protocols:Agent",
    arguments=("*", "chat"),
    with_options=frozenset({"players"}),
)
ADVANTAGE = PartKind(
    key="objective.advantage",
    what="advantage estimator",
    shipped={
        "grpo": "agentrl.objective.advantages:grpo",
        "rloo": "agentrl.objective.advantages:rloo",
        "reinforce++": "agentrl.objective.advantages:reinforce_plus_plus",
        "reinforce++-baseline": "agentrl.objective.advantages:reinforce_plus_plus_baseline",
        "gae": "agentrl.objective.advantages:rewards_for_a_critic",
    },
    protocol="agentrl.protocols:AdvantageEstimator",
    arguments=None,
)
LOSS = PartKind(
    key="objective.loss",
    what="loss",
    shipped={
        "clip": "agentrl.objective.losses:ppo",
        "gspo": "agentrl.objective.losses:gspo",
        "cispo": "agentrl.objective.losses:cispo",
    },
    protocol="agentrl.protocols:Loss",
    arguments=None,
)
KINDS = (AGENT, BACKEND, CHANNEL, STORE, TRACKER, ADVANTAGE, LOSS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """Environments that `tasks.family` selects by a prefix: the plug-in references for their task family and for opening them."""

    family: str  # callable (reference, seed=, **options)
    pooled: str = ""  # class for environments in processes of the pool, called with the rest of the reference
    session: str = ""  # class for sessions with a server, called with (server, spec, options)
    host: str = ""  # function that returns the `HostSpec` for a specification, if the environment's program calls the model
    threshold_function: str = ""  # function (rest of the reference) -> pass threshold; empty means a threshold of 1


ENVIRONMENT_FAMILY = "agentrl.environment.family:EnvironmentFamily"
_GYMNASIUM_THRESHOLD = "agentrl.environment.gymnasium_environments:reward_threshold"
_REMOTE_FAMILY = "agentrl.environment.remote_family:RemoteFamily"
ENVIRONMENTS = {
    "envpool": EnvironmentKind(
        family=ENVIRONMENT_FAMILY,
        pooled="agentrl.environment.envpool_environments:EnvPoolEnvironment",
        threshold_function=_GYMNASIUM_THRESHOLD,
    ),
    "gymnasium": EnvironmentKind(
        family=ENVIRONMENT_FAMILY,
        pooled="agentrl.environment.gymnasium_environments:GymnasiumEnvironment",
        threshold_function=_GYMNASIUM_THRESHOLD,
    ),
    "inspect": EnvironmentKind(
        family="agentrl.environment.inspect_tasks:InspectFamily", host="agentrl.environment.inspect_tasks:host_spec"
    ),
    "nemo-gym": EnvironmentKind(family=_REMOTE_FAMILY, session="agentrl.environment.nemo_gym:NemoGymSession"),
    "openenv": EnvironmentKind(family=_REMOTE_FAMILY, session="agentrl.environment.openenv:OpenEnvSession"),
    "ors": EnvironmentKind(family=_REMOTE_FAMILY, session="agentrl.environment.ors:OrsSession"),
    "verifiers": EnvironmentKind(
        family="agentrl.environment.verifiers_tasks:VerifiersFamily", host="agentrl.environment.verifiers_tasks:host_spec"
    ),
}
"""Prefix in `tasks.family` -> environments. Tasks are stored, so secrets in options are resolved only when an environment is opened."""


def environment_kind(ref: str) -> EnvironmentKind | None:
    """Returns the kind of environments that the prefix of a reference selects; None for a plug-in reference."""
    return ENVIRONMENTS.get(ref.partition(":")[0])


def check_part(kind: PartKind, part: Part) -> Part:
    """Returns the part. Raises `ValueError` if the name is unknown, or if a built-in part that accepts no options has options."""
    name = part.ref
    if name in kind.shipped and part.options and name not in kind.with_options:
        raise ValueError(f"{kind.key}={name} accepts no options: remove them")
    if name in kind.shipped or ":" in name or name in references.installed_plugins():
        return part
    known = [*kind.shipped, *references.installed_plugins()]
    near = did_you_mean(name, known, "{}? ")
    raise ValueError(f"unknown {kind.what}; {near}known here: {', '.join(known)}; for a plug-in write module:attr")


Agent = Annotated[Part, AfterValidator(partial(check_part, AGENT)), AGENT]
Backend = Annotated[Part, AfterValidator(partial(check_part, BACKEND)), BACKEND]
Channel = Annotated[Part, AfterValidator(partial(check_part, CHANNEL)), CHANNEL]
Store = Annotated[Part, AfterValidator(partial(check_part, STORE)), STORE]
Tracker = Annotated[Part, AfterValidator(partial(check_part, TRACKER)), TRACKER]
Advantage = Annotated[Part, AfterValidator(partial(check_part, ADVANTAGE)), ADVANTAGE]
Loss = Annotated[Part, AfterValidator(partial(check_part, LOSS)), LOSS]


def load_part(kind: PartKind, part: Part) -> Any:
    """Loads a part's factory or, for an estimator or a loss, the part with its options.

    Raises `PluginError` if the name does not resolve or the part does not conform to the protocol. Raises `UserError` if an option refers
    to a missing secret.
    """
    shipped = part.ref in kind.shipped
    loaded = references.resolve(kind.shipped[part.ref]) if shipped else _resolve_user_part(kind, part.ref, part.options)
    return partial(loaded, **secrets.resolve_options(part.options)) if part.options else loaded


def make_part(kind: PartKind, part: Part, *arguments: Any, **named: Any) -> Any:
    """Creates a part with its factory and checks the part against its protocol.

    Raises the same errors as `load_part`, `PluginError` if the result does not conform to the protocol, and the errors of the factory. Any
    error of a user-supplied factory except `AgentRLError` and `OSError` becomes a `PluginError`.
    """
    factory, name = load_part(kind, part), part.ref
    if name in kind.shipped and name not in kind.with_options:
        return factory(*arguments, **named)

    def plugin_error(error: BaseException) -> PluginError:
        return PluginError(
            f"{kind.key} {name!r} could not be opened: {one_line_error(error)} ({raise_location(error)})",
            fix="correct its options, or the code at this location",
        )

    with raising_as(plugin_error, but=(AgentRLError, OSError)):
        built = factory(*arguments, **named)
    violations = protocol_errors(built, references.resolve(kind.protocol), has_defaults=kind.has_defaults)
    if violations:
        raise _protocol_violation(kind, name, f"its result, of class {type(built).__name__},", violations)
    return built


def _resolve_user_part(kind: PartKind, name: str, options: Mapping[str, Any]) -> Any:
    """Resolves a user-supplied part and checks it against the protocol without calling it."""
    try:
        resolved = references.resolve(name)
    except PluginError as error:
        raise PluginError(f"{kind.key}: {error.message}", fix=error.fix) from error
    protocol = references.resolve(kind.protocol)
    if not callable(resolved):
        raise PluginError(
            f"{kind.key} {name!r} is of type {type(resolved).__name__}, which is not callable", fix=_signature_fix(kind, protocol)
        )
    if kind.arguments is None:
        violations = [ProtocolError("it is a class, not a function", "refer to an instance")] if inspect.isclass(resolved) else []
        violations = violations or protocol_errors(resolved, protocol, options)
        if violations:
            raise _protocol_violation(kind, name, "it", violations)
        return resolved
    if inspect.iscoroutinefunction(resolved):
        raise PluginError(f"{kind.key} {name!r} is async, but is called without await", fix=_signature_fix(kind, protocol))
    positional, named = _call(kind)
    if problem := signature_error(resolved, *positional, **named, **options):
        raise PluginError(
            f"{kind.key} {name!r} cannot be called with ({', '.join(kind.arguments)}): {problem}", fix=_signature_fix(kind, protocol)
        )
    product = resolved if inspect.isclass(resolved) else promised_class(resolved)
    if product is None:
        raise PluginError(
            f"{kind.key} {name!r} has no return annotation, so its result cannot be checked before the run starts",
            fix=f"annotate it with the class that it returns, or with agentrl.protocols.{protocol.__name__}",
        )
    if product is not protocol and (violations := protocol_errors(product, protocol, has_defaults=kind.has_defaults)):
        raise _protocol_violation(kind, name, f"class {product.__name__}", violations)
    return resolved


def _call(kind: PartKind) -> tuple[list[None], dict[str, None]]:
    """Returns placeholders for the positional and keyword arguments of a factory of this kind."""
    names = list(kind.arguments or ())
    at = names.index("*") if "*" in names else len(names)
    return [None] * at, dict.fromkeys(names[at + 1 :])


def _signature_fix(kind: PartKind, protocol: type) -> str:
    if kind.arguments is None:
        return f"refer to a function with the signature of agentrl.protocols.{protocol.__name__}"
    return f"refer to a class or function that takes ({', '.join(kind.arguments)}) and returns an agentrl.protocols.{protocol.__name__}"


def _protocol_violation(kind: PartKind, name: str, subject: str, violations: list[ProtocolError]) -> PluginError:
    protocol, problems = kind.protocol.rpartition(":")[2], "; ".join(violation.problem for violation in violations)
    return PluginError(
        f"{kind.key} {name!r}: {subject} does not implement agentrl.protocols.{protocol}: {problems}",
        fix="\n       ".join(violation.fix for violation in violations),
    )
