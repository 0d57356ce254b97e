"""The base class of a recipe and its sections: validation, overrides, and the keys that a resumed run may change.

`Section.but` derives a section or recipe from another section or recipe. The command line also applies its overrides with `Section.but`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from agentrl.base.error_text import did_you_mean, shortened, unknown_name, validation_text
from agentrl.errors import RecipeError
from agentrl.plugins.parts import PART_KEYS, Part
from agentrl.records.fields import encodable


@dataclass(frozen=True, slots=True)
class Needs:
    """Annotates a field with the condition under which its key has an effect. A recipe that sets the key although the condition is not met
    raises an error.

        every: Annotated[int, Needs("evaluation.every below steps", lambda recipe, own: own.every < recipe.step_limit)] = 0

    Args:
        what: text that completes the error message "KEY does nothing without ...".
        holds: returns whether the condition is met, given the recipe and the section that has the key.
    """

    what: str
    holds: Callable[[Any, Any], bool]


class Section(BaseModel):
    """A section of a recipe. Sections are immutable. Unknown keys and infinite or NaN numbers raise an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False, hide_input_in_errors=True)

    def but(self, *overrides: str | Mapping[str, Any], **changes: Any) -> Self:
        """Returns a validated copy with some keys changed: `recipe.but("learner.lr=1e-4", name="mine")`.

        Args:
            overrides: `a.b=value` as on the command line, or a mapping of such dotted keys to values. Setting a plug-in part removes the
                options of the previous part. Options in the same call are set after the part.
            changes: values by key. A new section replaces the previous section, including its defaults.

        Raises:
            RecipeError: unknown key or invalid value; the message contains the key and the allowed values.
        """
        data, pairs = self.model_dump(mode="json"), list[tuple[str, Any]]()
        for item in (*overrides, changes):
            if not isinstance(item, str | Mapping):
                raise RecipeError(f"but({shortened(item)}): expected a string or a mapping", fix='write recipe.but("learner.lr=1e-4")')
            pairs += [_pair(item)] if isinstance(item, str) else item.items()
        for key, value in sorted(pairs, key=lambda pair: _is_below_part(type(self), pair[0])):
            _assign(data, type(self), key, value)
        return build(type(self), data)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy. If `update` is set, validates it as `but` does, because pydantic's `model_copy` does not validate the changes."""
        return self.but(update) if update else super().model_copy(deep=deep)

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Suggests known keys for an unknown key. Rejects text that UTF-8 cannot encode."""
        try:
            validated = handler(data)
        except ValidationError as error:
            errors = error.errors(include_url=False)
        else:
            lines = [_unwritable(key, value) for key, value in validated if not _writable(value)]
            if not lines:
                return validated
            raise ValidationError.from_exception_data(cls.__name__, lines)
        lines = []
        for item in errors:
            message = item["msg"]
            if item["type"] == "extra_forbidden" and len(item["loc"]) == 1:
                message = _unknown_key(str(item["loc"][0]), cls)
            elif item["type"] == "unexpected_keyword_argument":
                message = unknown_name(str(item["loc"][-1]), PART_KEYS)
            elif item["type"] == "literal_error" and "ctx" in item:
                message += did_you_mean(str(item["input"]), re.findall("'(.+?)'", item["ctx"]["expected"]), "; {}?")
            lines.append({"type": PydanticCustomError(item["type"], message), "loc": item["loc"], "input": item["input"]})
        raise ValidationError.from_exception_data(cls.__name__, lines)


def keys_without_effect(
    root: Section, section: Section | None = None, path: str = "", inherited: tuple[tuple[Needs, Section], ...] = ()
) -> Iterator[str]:
    """Yields an error message for each key that a recipe sets although the key has no effect, because its `Needs` or the `Needs` of its
    section is not met."""
    section = section or root
    for name, field in type(section).model_fields.items():
        value, usual, key = getattr(section, name), field.get_default(call_default_factory=True), f"{path}{name}"
        conditions = (*inherited, *((needs, section) for needs in field.metadata if isinstance(needs, Needs)))
        if isinstance(usual, Section):
            yield from keys_without_effect(root, value, f"{key}.", conditions)
            continue
        for needs, owner in conditions:
            if value != usual and not needs.holds(root, owner):
                yield f"{key}={shortened(value)} does nothing without {needs.what}; otherwise leave it at {usual!r}"
        if isinstance(value, Section):
            yield from keys_without_effect(root, value, f"{key}.")
        elif isinstance(value, dict):
            for one, inner in value.items():
                if isinstance(inner, Section):
                    yield from keys_without_effect(root, inner, f"{key}.{one}.")


_RESUMABLE = "resumable"


def resumable(default: Any, **bounds: Any) -> Any:
    """Returns a `Field` that a resumed run may change, with all keys below it, because it affects speed, length, machine or reports, but
    not what is learned."""
    return Field(default, json_schema_extra={_RESUMABLE: True}, **bounds)


def resumable_keys(kind: type[Section], prefix: str = "") -> list[str]:
    """Returns patterns for the keys that a resumed run may change: `serving.*` matches all keys of a section, `judge_servers.*.threads` any
    name.

    A list of sections counts as one key.
    """
    keys: list[str] = []
    for name, field in kind.model_fields.items():
        key, inner = f"{prefix}{name}", section_of(field.annotation)
        several = named_section_of(field.annotation)
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get(_RESUMABLE):
            keys += [key] if inner is None else [key, f"{key}.*"]
        elif inner is not None:
            keys += resumable_keys(inner, f"{key}.")
        elif several is not None:
            keys += resumable_keys(several, f"{key}.*.")
    return keys


def key_docs(kind: type[Section]) -> dict[str, str]:
    """Returns key -> docstring for the keys of a section, read from its source.

    pydantic's `use_attribute_docstrings` would read the docstrings at each import, which takes a third of the time to load a recipe.
    """
    docs = {}
    for section in reversed(kind.__mro__):
        if issubclass(section, Section) and section is not Section:
            (source,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
            assert isinstance(source, ast.ClassDef)
            for field, text in pairwise(source.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name() as key), ast.Expr(value=ast.Constant(value=str() as words)):
                        docs[key.id] = inspect.cleandoc(words)
    return docs


def _writable(value: object) -> bool:
    """Whether UTF-8 can encode all text in a value. Nested sections are checked separately."""
    match value:
        case str():
            return encodable(value)
        case Mapping():
            return all(_writable(key) and _writable(inner) for key, inner in value.items())
        case list() | tuple():
            return all(map(_writable, value))
        case Part():
            return _writable(value.as_data())
    return True


def _unwritable(key: str, value: object) -> InitErrorDetails:
    error = PydanticCustomError("unwritable", "it contains half of a surrogate pair, which UTF-8 cannot encode")
    return {"type": error, "loc": (key,), "input": value}


S = typing.TypeVar("S", bound=Section)


def build(kind: type[S], data: Mapping[str, Any]) -> S:
    """Validates plain data and returns it as a section. Raises `RecipeError` with one line per invalid key."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise RecipeError(validation_text(error), fix=f"see {inspect.getfile(kind)} for every key, its default and its effect") from None


def section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a field with this annotation; None for other fields."""
    if typing.get_origin(annotation) in (dict, tuple):  # sections by name, or a list of sections
        return None
    for kind in (annotation, *typing.get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def named_section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a field that maps names to sections; None for other fields."""
    return section_of(typing.get_args(annotation)[1]) if typing.get_origin(annotation) is dict else None


def listed_section_of(annotation: Any) -> type[Section] | None:
    """Returns the section class of a field that is a list of sections; None for other fields."""
    return section_of(typing.get_args(annotation)[0]) if typing.get_origin(annotation) is tuple else None


def _unknown_key(key: str, kind: type[Section]) -> str:
    sections = ((name, section_of(field.annotation)) for name, field in kind.model_fields.items())
    elsewhere = [f"{name}.{key}" for name, inner in sections if inner is not None and key in inner.model_fields]
    return unknown_name(key, kind.model_fields, elsewhere=elsewhere)


def _pair(override: str) -> tuple[str, Any]:
    """Returns the key and the value in `a.b=value`. The value is parsed as JSON or as True, False or None if possible, else it is a
    string."""
    key, sep, text = override.partition("=")
    if not sep or not key:
        raise RecipeError(f"override {shortened(override)} is not KEY=VALUE", fix="write it as learner.lr=1e-4")
    try:
        return key, json.loads(text)
    except (ValueError, RecursionError):
        return key, {"True": True, "False": False, "None": None}.get(text, text)


def _assign(data: dict[str, Any], model: type[Section], dotted: str, value: Any) -> None:
    """Sets the value of the key `dotted` in the data of a section. Raises `RecipeError` for an unknown key."""
    if not isinstance(dotted, str):
        raise RecipeError(f"{shortened(dotted)} is not a recipe key", fix='write a key as a string, such as "learner.lr"')
    *parents, leaf = dotted.split(".")
    node = data
    for depth, part in enumerate(parents):
        where, field = ".".join(parents[: depth + 1]), model.model_fields.get(part.partition("[")[0])
        inner = None if field is None else section_of(field.annotation)
        if field is None:
            sections = [name for name, one in model.model_fields.items() if one.annotation is Part or section_of(one.annotation)]
            raise RecipeError(
                f"{where}: {unknown_name(part, sections, what='section') if sections else unknown_name(part, model.model_fields)}"
            )
        if (several := named_section_of(field.annotation)) is not None:
            _assign_named(node, part, several, [*parents[depth + 1 :], leaf], value, where=where)
            return
        if field.annotation is Part:
            current = node.get(part, {} if field.is_required() else field.default)
            node[part] = _with_part_key(_plain(current), [*parents[depth + 1 :], leaf], value, where=where)
            return
        if typing.get_origin(field.annotation) is dict:
            node[part] = _with_item(node.get(part), [*parents[depth + 1 :], leaf], value, where=where)
            return
        if (listed := listed_section_of(field.annotation)) is not None:
            name, keys = where.partition("[")[0], ", ".join(f'"{key}": ...' for key in listed.model_fields)
            raise RecipeError(f"{dotted}: {name} is a list, whose items cannot be set alone", fix=f"write {name}=[{{{keys}}}]")
        if inner is None:
            raise RecipeError(f"{dotted}: {where} has no keys", fix=f"set the key itself: {where}=VALUE")
        if node.get(part) is None:
            node[part] = {}  # an override turns an optional section on
        node, model = node[part], inner
        if not isinstance(node, dict):
            raise RecipeError(f"{where}: expected a section, got {shortened(node)}")
    if leaf not in model.model_fields:
        raise RecipeError(f"{dotted}: {_unknown_key(leaf, model)}")
    node[leaf] = _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Part):
        return value.as_data()
    return value.model_dump(mode="json") if isinstance(value, Section) else value


def _is_below_part(model: type[Section] | None, dotted: object) -> bool:
    """Whether a key addresses a field of a plug-in part, as `objective.loss.options.beta` does."""
    for name in str(dotted).split(".")[:-1]:
        field = model.model_fields.get(name) if model else None
        if field is None or field.annotation is Part:
            return field is not None
        model = section_of(field.annotation)
    return False


def _with_part_key(current: Any, keys: list[str], value: Any, *, where: str) -> dict[str, Any]:
    """Returns the data of a plug-in part after an override of its `ref`, its `options` or one option."""
    name, *option = keys
    if name not in PART_KEYS or (name == "ref" and option):
        key = ".".join([where, *keys])
        raise RecipeError(f"{key}: {unknown_name(name, PART_KEYS)}", fix=f"write an option as {where}.options.NAME=VALUE")
    data = current if isinstance(current, dict) else {"ref": current}
    return {**data, name: _with_item(data.get(name), option, value, where=f"{where}.{name}") if option else value}


def _with_item(current: Any, keys: list[str], value: Any, *, where: str) -> dict[str, Any]:
    """Returns the mapping `current` with one key set. The key may contain dots."""
    if not isinstance(current or {}, dict):
        raise RecipeError(f"{where}: expected a mapping, got {shortened(current)}")
    return {**(current or {}), ".".join(keys): value}


def _assign_named(node: dict[str, Any], part: str, model: type[Section], names: list[str], value: Any, *, where: str) -> None:
    """Sets a named section (`judge_servers.small={...}`) or a key in it."""
    sections = node[part] = dict(node.get(part) or {})
    name, *rest = names
    if not rest:
        sections[name] = _plain(value)
        return
    one = sections[name] = sections.get(name) or {}
    if not isinstance(one, dict):
        raise RecipeError(f"{where}.{name}: expected a section, got {shortened(one)}")
    _assign(one, model, ".".join(rest), value)
