"""JSON that fits a schema (`jsonschema`), and whose content may be compared with the truth.

    rewards.json_schema:json_schema                      with task.data = {"schema": {"type": "object", "required": ["city"]}}
    form = JsonSchema(schema={"type": "array"})          in rewards/mine.py, referenced as rewards.mine:form

A schema may hold patterns, and be recursive: what an agent wrote is held to it in a process that is ended at a deadline. A `$ref` that
leads out of the schema is refused; nothing is fetched.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Any, ClassVar

from pydantic import Field

from agentrl.base.numbers import is_whole, parse_number, same_number
from agentrl.errors import TaskError
from agentrl.records import Episode, Score, Task
from agentrl.reward.configured import EVIDENCE_CHARS, ConfiguredVerifier, answer_of, require_package, strip_code_fence, zero_score
from agentrl.reward.worker import QUEUE_TIMEOUT_S, AnswerFault, SubprocessWorker

DEADLINE_S = 3.0


class JsonSchema(ConfiguredVerifier):
    """1 when the answer is JSON that fits the schema, else 0. Settings in `task.data["json_schema"]`.

    The schema is `task.data["schema"]`, or the one given here. With `equal`, the JSON must also equal the truth, where whole numbers equal
    floats of the same value, and the parts `fits` and `equal` tell the two apart. NaN, Infinity and repeated keys are no JSON here.
    Formats are checked; a format that cannot be checked is the task's fault. Patterns have the meaning of ECMAScript.
    A form alone says nothing of what is right: it is a part or a gate of a rubric, unless the schema leaves one answer.
    """

    name: ClassVar[str] = "json_schema"
    timeout_s: ClassVar[float] = QUEUE_TIMEOUT_S

    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    """None: the task has it, in `data["schema"]`."""
    fenced: bool = False
    """Whether to unwrap an answer that is one fenced block (`agentrl.reward.configured.strip_code_fence`)."""
    equal: bool = False
    """Whether the answer must also equal the truth."""
    longest: int = Field(100_000, gt=0)
    """Characters; a longer answer is wrong."""

    def model_post_init(self, context: Any) -> None:
        require_package("jsonschema")

    async def __call__(self, task: Task, episode: Episode) -> Score:
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
            told = await _worker.evaluate(request, sound=request | {"text": "null"})
        except AnswerFault as error:
            return zero_score(f"answer {text[:EVIDENCE_CHARS]!r}: at it the schema {error}", **nothing)
        if told["schema"]:
            raise TaskError(f"task {task.id}: its JSON schema cannot be used: {told['schema']}")
        right = not told["misfit"] and (told["equal"] or not rules.equal)
        parts = {"fits": float(not told["misfit"])} | ({"equal": float(told["equal"])} if rules.equal else {})
        return Score(value=float(right), parts=parts, evidence=told["misfit"] or ("" if right else "it does not equal the truth"))


def strict_json(text: str) -> Any:
    """The JSON value of a text. A whole number is an int, however it is written, and keeps every digit.

    Raises `ValueError` for anything else, for repeated keys, for NaN, and for numbers that no float holds: 1e999 and 1e-999.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is repeated")
        return found

    def exact(digits: str) -> int | float:
        rounded = float(digits)
        if math.isfinite(rounded) and not rounded.is_integer():
            return rounded
        value = parse_number(digits)  # whole, or next to it
        if value is None or math.isinf(rounded) or (value and not rounded):
            raise ValueError(f"{digits[:40]} is too large or too small")
        return int(value) if is_whole(value) else rounded

    def never(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=once, parse_float=exact, parse_constant=never)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true and 1 are not, 1 and 1.0 are."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same_number(one, other, relative=0.0)
    return bool(one == other)


def prepare() -> None:
    """In the process, before anything is asked."""
    import jsonschema  # noqa: F401


def verdict(request: Mapping[str, Any]) -> dict[str, Any]:
    """In the process: what is wrong with the schema, why the text does not fit it, and whether it equals the truth."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    schema = request["schema"]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    told = {"schema": "", "misfit": "", "equal": False}
    try:
        kind.check_schema(schema)
        checker = _checker(kind.FORMAT_CHECKER)
        if unknown := sorted(set(_formats(schema)) - set(checker.checkers)):
            return told | {"schema": f"format {unknown[0][:80]!r} cannot be checked: use a pattern, or remove it"}
        value = strict_json(request["text"])
        strict = jsonschema.validators.extend(kind, {"pattern": _pattern})
        error = next(iter(strict(schema, registry=Registry(), format_checker=checker).iter_errors(value)), None)
    except jsonschema.SchemaError as problem:
        return told | {"schema": str(problem.message)[:300]}
    except Unresolvable as problem:
        return told | {"schema": f"$ref {str(problem.ref)[:200]!r} leads out of it"}
    except ValueError as problem:
        return told | {"misfit": f"it is no JSON: {str(problem)[:200]}"}
    misfit = "" if error is None else f"at {error.json_path[:100]}: {error.message[:200]}"
    equal = bool(request["truth"]) and same_json(value, request["truth"][0])
    return told | {"misfit": misfit, "equal": equal}


_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"enum", "const", "default", "examples"})


def _formats(schema: Any) -> Iterator[str]:
    """The values of `format` in a schema and its nested schemas."""
    if isinstance(schema, list):
        for one in schema:
            yield from _formats(one)
    elif isinstance(schema, dict):
        for key, inner in schema.items():
            if key == "format" and isinstance(inner, str):
                yield inner
            elif key in _BY_NAME and isinstance(inner, dict):
                yield from _formats(list(inner.values()))
            elif key not in _DATA:
                yield from _formats(inner)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    """`pattern` as in ECMAScript: `$` matches only the end of the text, not before a final line break, and \\d matches ASCII digits."""
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not re.search(_END.sub(_to_the_end, pattern), instance, re.ASCII):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


_END = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\$", re.DOTALL)
_EMAIL = re.compile(r"[^@\s]+@[^@\s]+")
_TIME = re.compile(r"\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d)", re.ASCII | re.IGNORECASE)


def _to_the_end(match: re.Match[str]) -> str:
    return r"\Z" if match[0] == "$" else match[0]


def _checker(known: Any) -> Any:
    """The format checker of the package, with stricter checks of e-mail addresses and of dates and times (RFC 3339)."""
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
