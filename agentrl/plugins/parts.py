"""The parts of a run that a recipe names: those that ship, by word, and anybody's, by reference. What ships is named in the same way.

A word stands for a reference to a part of agentrl; every other name is resolved by `agentrl.plugins`: `module:attr`, `./file.py:attr`,
or an entry point of the group `agentrl.plugins`. Whatever a reference gives is held to the protocol of its kind, which says how it is
called, before anything starts. Docs: "Bring your own parts".
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, JsonValue

from agentrl.base import secrets
from agentrl.base.error_text import one_line_error, raise_location
from agentrl.base.user_code import raising_as
from agentrl.errors import AgentRLError, PluginError
from agentrl.plugins import references
from agentrl.plugins.protocol_checks import ProtocolError, promised_class, protocol_errors, signature_error

Options = dict[str, JsonValue]
"""Keyword arguments for a part that is named by reference; JSON, so that `recipe.json` keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKind:
    """One kind of part: where a recipe names it, what ships, and the protocol that it fulfils."""

    key: str
    what: str
    shipped: Mapping[str, str]  # word -> reference
    protocol: str  # reference
    has_defaults: bool = False  # whether a method that is inherited from the protocol will do
    given: tuple[str, ...] | None = ()  # arguments of its factory, `*` before those by keyword; None: it is no factory, but called itself


BACKEND = PartKind(
    key="sandbox.backend",
    what="sandbox backend",
    shipped={
        "auto": "agentrl.sandbox.select:open_auto",
        "docker": "agentrl.sandbox.select:open_docker",
        "bubblewrap": "agentrl.sandbox.select:open_bubblewrap",
    },
    protocol="agentrl.protocols:SandboxBackend",
    given=("*", "root", "run_label"),
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
    given=("server", "*", "registry_folder"),
)
STORE = PartKind(
    key="store",
    what="experience store",
    shipped={"sqlite": "agentrl.experience.store:open_sqlite"},
    protocol="agentrl.protocols:ExperienceStore",
    given=("run_dir", "recipe"),
)
TRACKER = PartKind(
    key="trackers",
    what="tracker",
    shipped={"terminal": "agentrl.observe.tracker:open_terminal", "tensorboard": "agentrl.observe.tracker:open_tensorboard"},
    protocol="agentrl.protocols:Tracker",
    has_defaults=True,
    given=("run_dir", "recipe"),
)
AGENT = PartKind(
    key="rollout.agent",
    what="agent",
    shipped={"turns": "agentrl.agent.turns:TurnLoop", "delegating": "agentrl.agent.turns:TurnLoop"},
    protocol="agentrl.protocols:Agent",
    given=("*", "chat"),
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
    given=None,
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
    given=None,
)
KINDS = (AGENT, BACKEND, CHANNEL, STORE, TRACKER, ADVANTAGE, LOSS)


def check_name(kind: PartKind, name: str) -> str:
    """The name, if it is a word of this kind, looks like a reference, or is an installed entry point. Imports nothing; `ValueError`."""
    if name in kind.shipped or ":" in name or name in references.installed_plugins():
        return name
    known = [*kind.shipped, *references.installed_plugins()]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(f"no {kind.what} of that name; {meant}known here: {', '.join(known)}, or anybody's by reference: module:attr")


def check_options(kind: PartKind, name: str, options: Mapping[str, Any]) -> None:
    """Raises `ValueError` where options would do nothing."""
    if options and name in kind.shipped:
        raise ValueError(f"options do nothing with {kind.key}={name}: they are for a part that is named by reference")


AgentName = Annotated[str, AfterValidator(partial(check_name, AGENT)), AGENT]
Backend = Annotated[str, AfterValidator(partial(check_name, BACKEND)), BACKEND]
Channel = Annotated[str, AfterValidator(partial(check_name, CHANNEL)), CHANNEL]
Store = Annotated[str, AfterValidator(partial(check_name, STORE)), STORE]
TrackerName = Annotated[str, AfterValidator(partial(check_name, TRACKER)), TRACKER]
Advantage = Annotated[str, AfterValidator(partial(check_name, ADVANTAGE)), ADVANTAGE]
LossName = Annotated[str, AfterValidator(partial(check_name, LOSS)), LOSS]


def load_part(kind: PartKind, name: str, options: Mapping[str, Any] | None = None) -> Any:
    """What a name stands for: the factory of a part, or an estimator or loss itself, with its options laid over it.

    Raises `PluginError` when it does not resolve, or does not fulfil the protocol of its kind: the message names what is missing; and
    `UserError` for a secret among the options that is not where they say.
    """
    found = references.resolve(kind.shipped[name]) if name in kind.shipped else _held(kind, name, options or {})
    return partial(found, **secrets.resolve_options(options)) if options else found


def make_part(kind: PartKind, name: str, options: Mapping[str, Any] | None, *arguments: Any, **named: Any) -> Any:
    """A part, made by its factory with these arguments and its options, and held to its protocol once more.

    Raises `PluginError` as `load_part` does, and for whatever somebody else's factory raises that is no error of ours.
    """
    factory = load_part(kind, name, options)
    if name in kind.shipped:
        return factory(*arguments, **named)

    def told(error: BaseException) -> PluginError:
        return PluginError(
            f"{kind.key} {name!r} could not be opened: {one_line_error(error)} ({raise_location(error)})", fix="correct it there"
        )

    with raising_as(told, but=(AgentRLError, OSError)):
        made = factory(*arguments, **named)
    lacks = protocol_errors(made, references.resolve(kind.protocol), has_defaults=kind.has_defaults)
    if lacks:
        raise _unfit(kind, name, f"what it made, of class {type(made).__name__},", lacks)
    return made


def _held(kind: PartKind, name: str, options: Mapping[str, Any]) -> Any:
    """Somebody's part, resolved and held to the protocol, as far as can be told without calling it."""
    try:
        found = references.resolve(name)
    except PluginError as error:
        raise PluginError(f"{kind.key}: {error.message}", fix=error.fix) from error
    protocol = references.resolve(kind.protocol)
    if not callable(found):
        raise PluginError(f"{kind.key} {name!r} is of type {type(found).__name__}, and will be called", fix=_how(kind, protocol))
    if kind.given is None:
        lacks = [ProtocolError("it is a class, and will be called as a function", "name an instance")] if inspect.isclass(found) else []
        lacks = lacks or protocol_errors(found, protocol, options)
        if lacks:
            raise _unfit(kind, name, "it", lacks)
        return found
    if inspect.iscoroutinefunction(found):
        raise PluginError(f"{kind.key} {name!r} is async, and will not be awaited", fix=_how(kind, protocol))
    given, named = _call(kind)
    if problem := signature_error(found, *given, **named, **options):
        raise PluginError(f"{kind.key} {name!r} cannot be called with ({', '.join(kind.given)}): {problem}", fix=_how(kind, protocol))
    made = found if inspect.isclass(found) else promised_class(found)
    if made is None:
        raise PluginError(
            f"{kind.key} {name!r} does not say what it returns, so that nobody could tell before the start whether that is a {kind.what}",
            fix=f"annotate it with the class that it makes, or with agentrl.protocols.{protocol.__name__}",
        )
    if made is not protocol and (lacks := protocol_errors(made, protocol, has_defaults=kind.has_defaults)):
        raise _unfit(kind, name, f"class {made.__name__}", lacks)
    return found


def _call(kind: PartKind) -> tuple[list[None], dict[str, None]]:
    """Stand-ins for the arguments that a factory of this kind is called with."""
    names = list(kind.given or ())
    at = names.index("*") if "*" in names else len(names)
    return [None] * at, dict.fromkeys(names[at + 1 :])


def _how(kind: PartKind, protocol: type) -> str:
    if kind.given is None:
        return f"name a function that is called as agentrl.protocols.{protocol.__name__} says"
    return f"name a class or function that takes ({', '.join(kind.given)}) and makes an agentrl.protocols.{protocol.__name__}"


def _unfit(kind: PartKind, name: str, subject: str, lacks: list[ProtocolError]) -> PluginError:
    protocol = kind.protocol.rpartition(":")[2]
    return PluginError(
        f"{kind.key} {name!r}: {subject} does not fulfil agentrl.protocols.{protocol}: {'; '.join(one.problem for one in lacks)}",
        fix="\n       ".join(one.fix for one in lacks),
    )
