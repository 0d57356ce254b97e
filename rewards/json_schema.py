"""Checks that an answer is JSON that conforms to a schema (`jsonschema`), and optionally that it equals the truth.

    rewards.json_schema:json_schema                      with task.data = {"schema": {"type": "object", "required": ["city"]}}
    form = JsonSchema(schema={"type": "array"})          in rewards/mine.py, referenced as rewards.mine:form

A schema may contain patterns and be recursive, so validation runs in a subprocess with a deadline. A `$ref` to anything outside the schema
is an error. Nothing is downloaded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from fractions import Fraction
from typing import Any, ClassVar

from pydantic import Field

from agentrl.base.numbers import is_whole, parse_number, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, ConfiguredVerifier, answer_of, require_package, strip_code_fence, zero_score
from agentrl.reward.worker import QUEUE_TIMEOUT_S, AnswerFault, SubprocessWorker

DEADLINE_S = 3.0


class JsonSchema(ConfiguredVerifier):
    """Scores 1 if the answer is JSON that conforms to the schema, else 0. Settings are in `task.data["json_schema"]`.

    The schema is `task.data["schema"]`, or the field `schema`. With `equal`, the JSON must also equal the truth, and the score has the
    parts `fits` and `equal`. Integers equal floats with the same value. NaN, Infinity and repeated keys are invalid. Formats are checked,
    and an unknown format is a task fault. Patterns are interpreted as in ECMAScript. Conforming to a schema does not show that an answer is
    correct, so use this verifier as a part or a required criterion of a rubric, unless the schema allows only one answer.
    """

    name: ClassVar[str] = "json_schema"
    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S

    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    """None means the schema in the task's `data["schema"]`."""
    fenced: bool = False
    """Whether to unwrap an answer that is a single fenced block (`agentrl.reward.configured.strip_code_fence`)."""
    equal: bool = False
    """Whether the answer must also equal the truth."""
    longest: int = Field(100_000, gt=0)
    """Maximum length in characters; a longer answer is wrong."""

    def model_post_init(self, context: Any) -> None:
        """Raises `PluginError` if the package is missing."""
        require_package("jsonschema")

    async def __call__(self, task: Task, episode: Episode) -> Score:
        """Scores the answer. Raises `TaskError` if the truth, the schema or a setting is invalid."""
        rules = self.for_task(task)
        schema = rules.json_schema if rules.json_schema is not None else task.data.get("schema")
        if not isinstance(schema, Mapping | bool):
            raise TaskError(f"task {task.id}: there is no JSON schema in data.schema")
        truth = [rules.truth_of(task)] if rules.equal else []
        nothing = {"fits": 0.0} | ({"equal": 0.0} if rules.equal else {})
        text, problem = answer_of(episode, longest=rules.longest)
        if problem:
            return zero_score(problem, **nothing)
        request = {"schema": schema, "text": strip_code_fence(text, "json") if rules.fenced else text, "truth": truth}
        try:
            result = await _worker.evaluate(request, control=request | {"text": "null"})
        except AnswerFault as error:
            return zero_score(f"answer {text[:EVIDENCE_CHARS]!r}: validating it against the schema {error}", **nothing)
        if result["schema"]:
            raise TaskError(f"task {task.id}: its JSON schema cannot be used: {result['schema']}")
        right = not result["misfit"] and (result["equal"] or not rules.equal)
        parts = {"fits": float(not result["misfit"])} | ({"equal": float(result["equal"])} if rules.equal else {})
        return Score(value=float(right), parts=parts, evidence=result["misfit"] or ("" if right else "it does not equal the truth"))


def strict_json(text: str) -> Any:
    """Returns the JSON value of a string. A whole number in any notation becomes an int and keeps all digits.

    Raises `ValueError` for invalid JSON, repeated keys, NaN, and numbers outside the range of a float, such as 1e999 and 1e-999.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            raise ValueError("a key is repeated")
        return fields

    def exact(digits: str) -> int | float:
        rounded = float(digits)
        if math.isfinite(rounded) and not rounded.is_integer():
            return rounded
        value = parse_number(digits)  # a whole number, or a number near a whole number
        if value is None or math.isinf(rounded) or (value and not rounded):
            raise ValueError(f"{digits[:40]} is too large or too small")
        return int(value) if is_whole(value) else rounded

    def never(name: str) -> Any:
        raise ValueError(f"{name} is not valid JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_float=exact, parse_constant=never)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def same_json(first: Any, second: Any) -> bool:
    """Whether two JSON values are equal. true and 1 are not equal, but 1 and 1.0 are."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_json(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same_json, first, second))
    if isinstance(first, int | float) and isinstance(second, int | float):
        return same_number(first, second, relative=0.0)
    return bool(first == second)


def prepare() -> None:
    """Imports the large module. Runs in the subprocess before the first request."""
    import jsonschema  # noqa: F401


def verdict(request: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the error in the schema, why the text does not conform to the schema, and whether the text equals the truth.

    Runs in the subprocess.
    """
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = request["schema"]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    result = {"schema": "", "misfit": "", "equal": False}
    try:
        kind.check_schema(schema)
        checker = _checker(kind.FORMAT_CHECKER)
        if unknown := sorted(set(_formats(schema)) - set(checker.checkers)):
            return result | {"schema": f"format {unknown[0][:80]!r} cannot be checked: use a pattern, or remove it"}
        value = strict_json(request["text"])
        strict = jsonschema.validators.extend(kind, {"pattern": _pattern, "multipleOf": _multiple_of})
        error = next(iter(strict(_with_patterns(schema), registry=Registry(), format_checker=checker).iter_errors(value)), None)
    except jsonschema.SchemaError as problem:
        return result | {"schema": str(problem.message)[:300]}
    except Unresolvable as problem:
        return result | {"schema": f"$ref {str(problem.ref)[:200]!r} points outside the schema"}
    except ValueError as problem:
        return result | {"misfit": f"it is not valid JSON: {str(problem)[:200]}"}
    misfit = "" if error is None else f"at {error.json_path[:100]}: {error.message[:200]}"
    equal = bool(request["truth"]) and same_json(value, request["truth"][0])
    return result | {"misfit": misfit, "equal": equal}


_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "examples"})


def _formats(schema: Any) -> Iterator[str]:
    """Yields the values of `format` in a schema and in its nested schemas."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _formats(entry)
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            if key == "format" and isinstance(inner, str):
                yield inner
            elif key in _BY_NAME and isinstance(inner, dict):
                yield from _formats(list(inner.values()))
            elif key not in _DATA:
                yield from _formats(inner)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """Checks `pattern` as in ECMAScript: `$` matches only the end, not before a final line break, and \\d matches ASCII digits."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not re.search(_ascii_pattern(pattern), instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _multiple_of(validator: Any, divisor: Any, instance: Any, schema: Any) -> Iterator[Any]:
    """Checks `multipleOf` on the decimal numbers as written: 19.99 is a multiple of 0.01, although its float is not."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "number") and Fraction(repr(instance)) % Fraction(repr(divisor)):
        yield ValidationError(f"{instance!r} is not a multiple of {divisor!r}")


def _with_patterns(schema: Any) -> Any:
    """Returns a copy of the schema in which the patterns of `patternProperties` are interpreted as in `_pattern`."""
    if isinstance(schema, list):
        return [_with_patterns(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {}
    for key, inner in schema.items():
        if key in _BY_NAME and isinstance(inner, dict):
            names = {name: _ascii_pattern(name) if key == "patternProperties" else name for name in inner}
            copy[key] = {names[name]: _with_patterns(entry) for name, entry in inner.items()}
        else:
            copy[key] = inner if key in _DATA else _with_patterns(inner)
    return copy


def _ascii_pattern(pattern: str) -> str:
    """Returns a pattern for Python that matches as in `_pattern`. `jsonschema` joins such patterns with `|`, so flags are not global."""
    flags, rest = _FLAGS.fullmatch(pattern).groups("")  # type: ignore[union-attr]  # matches any text
    return f"(?a{flags}:{_END.sub(_to_the_end, rest)})"


_FLAGS = re.compile(r"(?:\(\?([imsx]+)\))?(.*)", re.DOTALL)
_END = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_TIME = re.compile(r"\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)


def _to_the_end(match: re.Match[str]) -> str:
    return r"\Z" if match[0] == "$" else match[0]


def _checker(known: Any) -> Any:
    """Returns the package's format checker, with stricter checks for e-mail addresses and for dates and times (RFC 3339)."""
    from jsonschema import FormatChecker

    checker = FormatChecker(formats=())
    checker.checkers = dict(known.checkers) | {
        "email": (_is_email, ()),
        "idn-email": (_is_email, ()),
        "time": (_is_time, ValueError),
        "date-time": (_is_moment, ValueError),
    }
    return checker


def _is_email(text: object) -> bool:
    return not isinstance(text, str) or _EMAIL.fullmatch(text) is not None


def _is_time(text: object) -> bool:
    return not isinstance(text, str) or (_TIME.fullmatch(text) is not None and bool(time.fromisoformat(text.upper()[:8])))


def _is_moment(text: object) -> bool:
    if not isinstance(text, str):
        return True
    day, _, hour = text[:10], text[10:11], text[11:]
    return (
        text[10:11] in ("T", "t")
        and re.fullmatch(r"\d{4}-\d\d-\d\d", day, re.ASCII) is not None
        and bool(date.fromisoformat(day))
        and _is_time(hour)
    )


_worker = SubprocessWorker(verdict, prepare=prepare, deadline_s=DEADLINE_S, memory=1 << 30, processes=2)
json_schema = JsonSchema()
