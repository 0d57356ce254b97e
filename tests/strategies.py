"""Hypothesis strategies for records: `records(kind)` generates valid records with extreme field values."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any

from hypothesis import settings
from hypothesis import strategies as st

from agentrl import records as nouns
from agentrl.records.fields import JsonObject, Text
from agentrl.records.sampling import MAX_TOP_K, Supports


def examples(number: int) -> int:
    """Returns a number of examples, scaled like hypothesis's default of 100 examples by the profile in use."""
    return max(5, number * settings.default.max_examples // 100)


WORST = [
    "",
    "\0",
    "\ud83d",
    "\udc00\ud800",
    "\u2028\u2029\x85",
    "\x1b[2J",
    "\r\n",
    "<tool_call>",
    "</script>",
    "\U0001f600",
    '"\\',
    "\ufffe",
    "é" * 40,
]
any_text = st.sampled_from(WORST) | st.text(max_size=6) | st.text(st.characters(categories=["Cs", "Cc", "Cf", "Lo"]), max_size=4)
utf8_text = any_text.map(lambda text: text.encode("utf-8", "replace").decode())
numbers = st.floats() | st.sampled_from([0.0, -0.0, 5e-324, 1.7e308, 2.0**53])
wholes = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 5)

json_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | utf8_text
json_values = st.recursive(
    json_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(utf8_text, inner, max_size=3), max_leaves=6
)
json_objects = st.dictionaries(utf8_text, json_values, max_size=3)


def nested(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


anything = st.one_of(
    any_text,
    numbers,
    st.sampled_from(
        [10**400, 10**3999, 10**4000, -(10**5000), 1 << 63, nested(63), nested(64), nested(300), b"\xff", (1, (2,)), {1: 2}, {2}]
    ),
    st.dictionaries(any_text, any_text | numbers | st.sampled_from([nested(63), nested(64), (1,), {1}]), max_size=2),
    st.lists(any_text | numbers, max_size=2).map(tuple),
    st.lists(any_text | wholes, max_size=2),
    st.none() | st.booleans() | st.integers(),
)
"""Values that a field must reject, or only just accepts."""

TURNS = 2


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Returns a strategy for the type of a field, read like `agentrl.records.fields` reads annotations."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint == Text:
        return any_text
    if hint == JsonObject:
        return json_objects
    assert origin is not Annotated, hint
    if origin in (types.UnionType, typing.Union):
        return st.none() | of(inner[0])
    if origin is tuple:
        return st.lists(of(inner[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(of(inner[0]), of(inner[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return records(hint)
    simple = {
        str: utf8_text,
        int: wholes,
        float: numbers.filter(lambda value: value == value),
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
    }
    return simple[hint]


def fields_of(kind: type[Any]) -> dict[str, st.SearchStrategy[Any]]:
    """The strategy of every field of a record. `_FITTING` adjusts fields that depend on each other."""
    hints = typing.get_type_hints(kind, include_extras=True)
    strategies = {field.name: of(hints[field.name]) for field in dataclasses.fields(kind) if field.name not in _OWN.get(kind.__name__, {})}
    return strategies | _OWN.get(kind.__name__, {})


def records(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.deferred(
        lambda: st.fixed_dictionaries(fields_of(kind)).map(_FITTING.get(kind.__name__, lambda data: data)).map(lambda data: kind(**data))
    )


Data = dict[str, Any]
_names = st.sampled_from(["human", "\N{GRINNING FACE}\x00", "x" * 200])
paths = utf8_text.map(lambda text: "./" + text.replace("/", "|"))


def _turn(data: Data) -> Data:
    count = len(data["completion_ids"])
    spans = (nouns.VersionSpan(version=data["versions"], start=0, end=count),) if count else ()
    ids = data["completion_ids"]
    return data | {"logprobs": data["logprobs"][:count], "versions": spans, "supports": _supports(data, ids), "forced": _forced(data, ids)}


def _forced(data: Data, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the first token if forced tokens were drawn and another token follows."""
    return (0,) if data["forced"] and len(token_ids) > 1 else ()


def _limits(data: Data) -> Data:
    thinking, maximum = data["thinking_tokens"], data["turn_tokens"] - 1
    return data | {"thinking_tokens": None if thinking is None or not maximum else min(thinking, maximum)}


def _supports(data: Data, token_ids: tuple[int, ...]) -> Supports | None:
    """Returns supports if they were drawn and can be encoded: alternately the token with a neighbour, and the full vocabulary."""
    if data["supports"] is None or any(not 0 <= token < 1 << 31 for token in token_ids):
        return None
    return Supports.from_rows([() if index % 2 else {token, token // 2} for index, token in enumerate(token_ids)])


def _completion(data: Data) -> Data:
    return data | {"supports": _supports(data, data["token_ids"]), "forced": _forced(data, data["token_ids"])}


def _scored(data: Data) -> Data:
    turns = tuple(len(trajectory.turns) for trajectory in data["episode"].trajectories)
    score = data["score"]
    rewards = tuple((0.5,) * count for count in turns) if score.turn_rewards else ()
    branches, without = score.branches * len(turns), score.without * len(turns)  # one value per trajectory, or none
    return data | {"score": dataclasses.replace(score, turn_rewards=rewards, branches=branches, without=without)}


def _score(data: Data) -> Data:
    parts = {part.name: part for part in data["pending"]}
    partial = data["partial"] if parts and math.isfinite(data["partial"]) else 0.0
    data = data | {"pending": tuple(parts.values()), "partial": partial, "value": None if parts else data["value"]}
    return data | ({"reason": data["reason"] or "-"} if data["value"] is None else {"blame": None})


def _sample(data: Data) -> Data:
    count = len(data["token_ids"])
    cut = {name: data[name][:count] for name in ("loss_mask", "logprobs", "advantages", "versions", "rewards")}
    spare = "advantages" if data["group_index"] % 2 else "rewards"
    return data | cut | {spare: (), "supports": _supports(data, data["token_ids"])}


def _tree(data: Data) -> Data:
    """A second trajectory that comes from the last turn of the first, if there is one."""
    first, *rest = data["trajectories"] or (None,)
    if first is None or not first.turns:
        return data
    calls = first.turns[-1].message.tool_calls
    parent = nouns.Parent(trajectory=0, turn=len(first.turns) - 1, call=len(calls) - 1 if calls else None)
    return data | {"trajectories": (first, *(dataclasses.replace(trajectory, parent=parent) for trajectory in rest))}


_rows = st.lists(numbers, min_size=2, max_size=2).map(tuple)
_positive = {"min_value": 1, "max_value": 1 << 40}
_DRAWN = {
    "temperature": st.floats(min_value=0.01),
    "top_k": st.integers(1, MAX_TOP_K),
    "top_p": st.floats(0, 1, exclude_min=True),
    "min_p": st.floats(0, 1),
}
_OWN: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "SandboxSpec": {
        **{name: st.integers(**_positive) for name in ("memory_mb", "processes", "disk_mb", "open_files")},
        "cpus": st.floats(min_value=0.01),
        "network": st.just(("pypi.org:443",)) | st.just(()),
    },
    "Limits": {
        **{name: st.integers(**_positive) for name in ("turns", "turn_tokens", "episode_tokens", "tool_output_chars")},
        **{name: st.floats(min_value=0.01) for name in ("tool_timeout_s", "wall_s")},
        **{name: st.none() | st.integers(**_positive) for name in ("episode_output_chars", "tool_calls", "all_tokens", "thinking_tokens")},
    },
    "Task": {
        "prompt": st.lists(st.deferred(lambda: records(nouns.Message)), min_size=1, max_size=2).map(tuple),
        "files": st.dictionaries(paths, utf8_text, max_size=2),
        "binary_files": st.dictionaries(paths, st.sampled_from(["", "/w=="]), max_size=2),
        "outputs": st.lists(paths, max_size=2).map(tuple),
    },
    "EnvironmentSpec": {
        "ref": st.sampled_from(["gymnasium:CartPole-v1", "mine:\N{GRINNING FACE}"]),
        "context_turns": st.none() | st.integers(**_positive),
        "resume": st.sampled_from(nouns.environment.RESUMES),
        "pass_threshold": st.none() | st.floats(allow_nan=False, allow_infinity=False),
    },
    "Step": {"reward": st.floats(-1e300, 1e300)},
    "VersionSpan": {"start": st.just(0), "end": st.integers(1, 9)},
    "Turn": {"logprobs": _rows, "versions": wholes},
    "Supports": {"sizes": st.just(b"\1\0\0\0\2\0"), "ids": st.just(b"\7\0\0\0\7\0\0\0\xff\xff\xff\x7f")},
    "Trajectory": {"inherited": st.just(()), "parent": st.none()},
    "EpisodeState": {
        "trajectories": st.tuples(st.deferred(lambda: records(nouns.Trajectory).filter(lambda trajectory: trajectory.turns))),
        "prompt_ids": st.tuples(st.just((7,))),
    },
    "Score": {
        "turn_rewards": st.lists(st.just((0.25, -0.0)), max_size=1).map(tuple),
        **{name: st.lists(st.none() | of(float), max_size=1).map(tuple) for name in ("branches", "without")},
    },
    "Sample": {
        **{name: _rows for name in ("logprobs", "advantages", "rewards")},
        "loss_mask": st.just((False, True)),
        "versions": st.tuples(wholes, wholes),
    },
    "PolicyVersion": {"weights": st.sampled_from([nouns.WHOLE_MODEL, nouns.ADAPTER])},
    "PendingPart": {
        "name": _names,
        "low": st.sampled_from([-1.0, 0.0]),
        "high": st.sampled_from([0.5, 1e300]),
        "weight": st.sampled_from([0.5, 1e-300]),
        "expires_at": st.none() | st.sampled_from([0.0, 1.8e9]),
    },
    "Cancelled": {"tokens": st.integers(0, 2**40)},  # the ledger adds them up
    "LateScore": {name: _names for name in ("episode_id", "part", "scored_by", "key")} | {"value": st.floats(-1e300, 1e300)},
    "Probe": {
        "token_ids": st.just(((1, 2), (3, 4, 5))),
        "logprobs": st.tuples(numbers.map(lambda number: (number,)), _rows),
        "next_ids": st.just(((7, 8), ())),
        "next_logprobs": st.tuples(_rows, st.just(())),
    },
    "Sampling": _DRAWN,
    "SamplingParams": _DRAWN,
}
_FITTING: dict[str, Callable[[Data], Data]] = {
    "Limits": _limits,
    "Turn": _turn,
    "Completion": _completion,
    "Episode": _tree,
    "ScoredEpisode": _scored,
    "Score": _score,
    "Sample": _sample,
}


def numbered(groups: list[nouns.Group]) -> list[nouns.Group]:
    """Returns the groups with the indices 0, 1, ... and episode ids that no two groups share."""
    return [
        replace(
            group,
            index=index,
            episodes=tuple(replace(e, episode=replace(e.episode, id=f"{index} {e.episode.id}")) for e in group.episodes),
        )
        for index, group in enumerate(groups)
    ]
