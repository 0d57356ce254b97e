"""Checks whether a user-supplied class, object or function conforms to a protocol, without calling it.

If a method is missing, the message contains the required signature. If a signature is wrong, the message contains both signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from agentrl.base.error_text import unknown_name


class ProtocolError(NamedTuple):
    """A violation of a protocol, and the fix."""

    problem: str
    fix: str


def protocol_errors(
    candidate: Any, protocol: type, options: Mapping[str, Any] | None = None, *, has_defaults: bool = False
) -> list[ProtocolError]:
    """Returns the ways in which a class, an object, or a function (for a callable protocol) violates `protocol`; empty if it conforms.

    Data attributes are checked only on objects, because a class may set them in `__init__`. `options` contains additional keyword arguments
    for a callable protocol. A method inherited from the protocol does not count as implemented unless `has_defaults` is true.
    """
    errors: list[ProtocolError] = []
    for name, wanted in _methods(protocol).items():
        theirs = candidate if name == "__call__" and inspect.isroutine(candidate) else _looked_up(candidate, name)
        if not callable(theirs) or (not has_defaults and inspect.unwrap(getattr(theirs, "__func__", theirs)) is wanted):
            errors.append(ProtocolError(f"it has no method {name}", f"write {_written(name, wanted)}"))
        elif problem := _misfit(name, theirs, wanted, unbound=_is_unbound(candidate, name), options=options or {}):
            errors.append(ProtocolError(problem, f"write {_written(name, wanted)}"))
    if not inspect.isclass(candidate):
        for name in _attributes(protocol):
            if not hasattr(candidate, name):
                errors.append(ProtocolError(f"it has no attribute {name}", f"set self.{name} in __init__"))
    return errors


def signature_error(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Returns the reason why `function` cannot be called with these arguments; empty if the call is possible, or if the signature is
    unknown."""
    try:
        signature = inspect.signature(_constructor(function))
    except (TypeError, ValueError):
        return ""
    names = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for name in named:
        if name not in names and not takes_any:
            return f"{name}: {unknown_name(name, names, what='argument')}"
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    return ""


_OPTION_TYPES: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "bool": ("true or false", (bool,)),
    "str": ("a string", (str,)),
    "Sequence[str]": ("a list of strings", (list, tuple)),
}


def option_type_error(function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Describes the first option whose value does not have the type of the parameter's annotation; empty if there is none, or if the
    signature is unknown. Checks only annotations in `_OPTION_TYPES`, accepts None for each, and does not check the items of a list."""
    try:
        parameters = inspect.signature(_constructor(function)).parameters
    except (TypeError, ValueError):
        return ""
    for name, value in options.items():
        annotation = parameters[name].annotation if name in parameters else ""
        wanted, types = _OPTION_TYPES.get(str(getattr(annotation, "__name__", annotation)), ("", (object,)))
        if wanted and value is not None and (not isinstance(value, types) or (type(value) is bool and bool not in types)):
            return f"{name} must be {wanted}, got {value!r:.80}"
    return ""


def _constructor(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the callable whose signature applies to a call of `function`. A class that inherits `__init__` from a Protocol accepts no
    arguments."""
    if inspect.isclass(function) and all(getattr(base, "_is_protocol", base is object) for base in _bases_with_init(function)):
        return lambda: None
    return function


def _bases_with_init(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if "__init__" in vars(base) and vars(base)["__init__"].__name__ != "_no_init_or_replace_init"]


def _methods(protocol: type) -> dict[str, Callable[..., Any]]:
    """Returns the public methods of a protocol and its bases, and `__call__`."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            methods |= {name: member for name, member in vars(base).items() if inspect.isfunction(member) and _counts(name)}
    return methods


def _attributes(protocol: type) -> Iterator[str]:
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            yield from (name for name in vars(base).get("__annotations__", {}) if _counts(name))


def _counts(name: str) -> bool:
    return name == "__call__" or not name.startswith("_")


def _looked_up(candidate: Any, name: str) -> Any:
    if name == "__call__" and inspect.isclass(candidate):  # every class has the `__call__` of its metaclass
        return next((vars(base)[name] for base in candidate.__mro__ if name in vars(base)), None)
    return getattr(candidate, name, None)


def _is_unbound(candidate: Any, name: str) -> bool:
    """Whether the method was looked up on a class and still has the parameter `self`."""
    return inspect.isclass(candidate) and inspect.isfunction(inspect.getattr_static(candidate, name, None))


def _misfit(name: str, theirs: Callable[..., Any], wanted: Callable[..., Any], *, unbound: bool, options: Mapping[str, Any]) -> str:
    """Returns why a method does not match the protocol's method (different arguments, or only one is async); empty if it matches."""
    ours = list(inspect.signature(wanted).parameters.values())[1:]
    required = [parameter for parameter in ours if parameter.default is parameter.empty]
    for parameters in (ours, required):
        positional = [None] * (sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters) + unbound)
        named = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
        if problem := signature_error(theirs, *positional, **named, **(options if name == "__call__" else {})):
            return f"{name} cannot be called as required: {problem}"
    awaited = _is_async(wanted)
    if inspect.isroutine(theirs) and awaited != _is_async(theirs) and not (awaited and _promises(theirs)):
        return f"{name} {'is not async, but will be awaited' if awaited else 'is async, but is called without await'}"
    return ""


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(inspect.unwrap(function))


def _promises(function: Callable[..., Any]) -> bool:
    """Whether a plain function is annotated as returning an awaitable."""
    annotation = str(inspect.signature(function).return_annotation)
    return any(word in annotation for word in ("Awaitable", "Coroutine", "Future"))


class _Raw(str):
    """An annotation that is printed as written in the source."""

    def __repr__(self) -> str:
        return str(self)


def _written(name: str, wanted: Callable[..., Any]) -> str:
    """Returns the first line of a method of the protocol, as in a class body."""
    signature = inspect.signature(wanted)
    parameters = [parameter.replace(annotation=_raw(parameter.annotation)) for parameter in signature.parameters.values()]
    shown = signature.replace(parameters=parameters, return_annotation=_raw(signature.return_annotation))
    return f"`{'async ' if _is_async(wanted) else ''}def {name}{shown}`"


def _raw(annotation: Any) -> Any:
    return _Raw(annotation) if isinstance(annotation, str) else annotation


def promised_class(factory: Callable[..., Any]) -> type | None:
    """Returns the class in a factory's return annotation; None if there is no class or it cannot be resolved."""
    try:
        annotation = inspect.signature(factory, eval_str=True).return_annotation
    except (NameError, TypeError, ValueError, AttributeError, SyntaxError):
        return None
    return annotation if inspect.isclass(annotation) and annotation is not inspect.Signature.empty else None
