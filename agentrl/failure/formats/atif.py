"""ATIF, the Agent Trajectory Interchange Format (v1.0 to v1.8): what Harbor writes and reads, and what traces are exported as.

Its specification is rfcs/0001-trajectory-format.md of the Harbor repository; the package `atif` has models of it. A document is one
agent's steps, with the documents of its sub-agents inside. Paths that a document names are never opened. `atif_export` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.errors import UserError
from agentrl.failure.formats.conversations import build_trace, unique_label
from agentrl.failure.formats.values import (
    Gaps,
    as_object,
    as_objects,
    as_string,
    build_message,
    build_origin,
    build_tool_call,
    message_text,
    object_or_empty,
    parse_time,
    printable_label,
    tool_schemas,
    type_name,
)
from agentrl.failure.trace import ImportedMessage, Trace
from agentrl.records import ToolCall

NAME = "atif"
OURS = "agentrl"
"""Key in `extra` of what ATIF has no field for."""
NEWEST = 8
DEEPEST = 16
"""Levels of sub-agents in one document."""
MOST_AGENTS = 10_000

_VERSION = re.compile(r"ATIF-v1\.(\d{1,3})")
_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_COUNTED = ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd")
_TOKENS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def recognises(document: Any) -> bool:
    """Whether a JSON document claims to be of this format."""
    return isinstance(document, dict) and (
        str(document.get("schema_version", "")).upper().startswith("ATIF") or ("steps" in document and "agent" in document)
    )


def parse(document: Any, where: Mapping[str, str]) -> Trace:
    """The trace of one document. Raises `ValueError` that says what is wrong with it."""
    whole = as_object(document, "the document")
    _check_version(whole)
    reading = _Reading()
    said = list(reading.trajectory(whole, "", 0))
    if not said:
        raise ValueError("has no steps")
    agent = object_or_empty(whole.get("agent"))
    known = build_origin(
        id=whole.get("trajectory_id") or whole.get("session_id"),
        session=whole.get("session_id"),
        trajectory=whole.get("trajectory_id"),
        agent=agent.get("name"),
        agent_version=agent.get("version"),
        model=agent.get("model_name"),
        schema=whole.get("schema_version"),
        notes=whole.get("notes"),
        started=reading.started.isoformat() if reading.started else "",
    )
    if isinstance(whole.get("continued_trajectory_ref"), str):
        reading.gaps.add(f"its continuation, which is in another file: {printable_label(whole['continued_trajectory_ref'])}")
    if whole.get("final_metrics") is not None or set(object_or_empty(whole.get("extra"))) - {OURS}:
        reading.gaps.add("final metrics and extra of the trajectory: they are not kept")
    if reading.untimed:
        reading.gaps.add("time of a message", reading.untimed)
    offered = tool_schemas(agent.get("tool_definitions"), reading.gaps)
    return build_trace(NAME, said, {**where, **known, **build_origin(**reading.known)}, reading.gaps, tools=offered)


def _check_version(whole: Mapping[str, Any]) -> None:
    version = whole.get("schema_version")
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or int(match[1]) > NEWEST:
        told = f"has the schema_version {version[:40]!a}" if isinstance(version, str) else "has no schema_version"
        raise UserError(f"{told}; known are ATIF-v1.0 to ATIF-v1.{NEWEST}", fix="export it again as one of these")


@dataclass(slots=True)
class _Reading:
    """One document and the sub-agents in it, as far as they are read."""

    gaps: Gaps = field(default_factory=Gaps)
    taken: dict[str, int] = field(default_factory=dict)  # labels
    known: dict[str, Any] = field(default_factory=dict)  # of sub-agents: "id:LABEL", "model:LABEL", "version:LABEL"
    started: datetime | None = None
    untimed: int = 0

    def trajectory(self, whole: dict[str, Any], at: str, depth: int) -> Iterator[ImportedMessage]:
        """All that is said in a trajectory, what its sub-agents say before the answers that came of it."""
        if depth > DEEPEST or len(self.taken) >= MOST_AGENTS:
            raise ValueError(f"has more than {DEEPEST} levels of sub-agents, or more than {MOST_AGENTS} of them")
        who = self._who(whole, at, depth)
        inner: dict[str, dict[str, Any]] = {}
        loose: list[dict[str, Any]] = []  # nobody can refer to them
        for number, other in enumerate(as_objects(whole.get("subagent_trajectories"), f"{at}subagent_trajectories")):
            id = other.get("trajectory_id")
            if isinstance(id, str) and id not in inner:
                inner[id] = other
            else:
                self.gaps.add(f"whose sub-agent {at}subagent_trajectories[{number}] is: its trajectory_id is missing, or another's too")
                loose.append(other)
        model = object_or_empty(whole.get("agent")).get("model_name")
        for number, step in enumerate(as_objects(whole.get("steps"), f"{at}steps"), start=1):
            if step.get("step_id") != number:
                self.gaps.add("step_id of a step: it is not its place, which is kept")
            yield from self._step(step, f"{at}step {number}", who, model, inner, depth)
        for other in [*inner.values(), *loose]:
            yield from self.trajectory(other, f"{at}sub-agent {printable_label(other.get('trajectory_id'))}: ", depth + 1)

    def _who(self, whole: Mapping[str, Any], at: str, depth: int) -> str:
        agent = as_object(whole.get("agent"), f"{at}agent")
        name = printable_label(agent.get("name"))
        if not name:
            self.gaps.add("name of an agent")
        if depth == 0 and object_or_empty(object_or_empty(whole.get("extra")).get(OURS)).get("unnamed") is True:
            name = ""
        who = unique_label(name, self.taken)
        if depth:
            self.known[f"id:{who}"], self.known[f"session:{who}"] = whole.get("trajectory_id"), whole.get("session_id")
            self.known[f"name:{who}"] = name if name != who else ""
            self.known[f"model:{who}"], self.known[f"version:{who}"] = agent.get("model_name"), agent.get("version")
            if agent.get("tool_definitions"):
                self.gaps.add("schemas of a sub-agent's tools: only the first agent's are kept")
        return who

    def _step(
        self, step: dict[str, Any], at: str, who: str, model: Any, inner: dict[str, dict[str, Any]], depth: int
    ) -> Iterator[ImportedMessage]:
        role = _ROLES.get(as_string(step.get("source"), f"{at}: source"))
        if role is None:
            raise ValueError(f"{at}: source is {type_name(step.get('source'))} that is none of system, user, agent")
        ours = object_or_empty(object_or_empty(step.get("extra")).get(OURS))
        calls, ids = self._calls(step, at)
        self._left_out(step, model)
        seconds = self._time(step)
        if ours.get("bare") is not True:
            yield build_message(
                printable_label(ours.get("role"))[:40] or role,
                message_text(step.get("message"), f"{at}: message", self.gaps),
                calls=calls,
                call_ids=ids,
                reasoning=as_string(step.get("reasoning_content"), f"{at}: reasoning_content"),
                agent=printable_label(ours.get("agent")) or who,
                at_s=seconds,
            )
        results = as_objects(as_object(step.get("observation"), f"{at}: observation").get("results"), f"{at}: results")
        for number, result in enumerate(results):
            yield from self._result(result, f"{at}: results[{number}]", who, seconds, inner, depth)

    def _calls(self, step: Mapping[str, Any], at: str) -> tuple[list[ToolCall], list[str]]:
        calls, ids = [], []
        for number, one in enumerate(as_objects(step.get("tool_calls"), f"{at}: tool_calls")):
            calls.append(build_tool_call(one.get("function_name"), one.get("arguments"), f"{at}: tool_calls[{number}]", self.gaps))
            made = object_or_empty(object_or_empty(one.get("extra")).get(OURS)).get("made_id") is True
            ids.append("" if made else as_string(one.get("tool_call_id"), f"{at}: tool_calls[{number}].tool_call_id"))
        return calls, ids

    def _result(
        self, result: dict[str, Any], at: str, who: str, seconds: float | None, inner: dict[str, dict[str, Any]], depth: int
    ) -> Iterator[ImportedMessage]:
        refs = as_objects(result.get("subagent_trajectory_ref"), f"{at}.subagent_trajectory_ref")
        for ref in refs:
            id = ref.get("trajectory_id")
            other = inner.pop(id, None) if isinstance(id, str) else None
            if other is not None:
                yield from self.trajectory(other, f"sub-agent {printable_label(id)}: ", depth + 1)
            else:
                self.gaps.add(
                    f"a sub-agent's separate trajectory: {printable_label(ref.get('trajectory_path') or id or ref.get('session_id'))}"
                )
        ours = object_or_empty(object_or_empty(result.get("extra")).get(OURS))
        answers = as_string(result.get("source_call_id"), f"{at}.source_call_id") or as_string(ours.get("answers"), f"{at}.extra")
        if result.get("content") is None and not refs:
            self.gaps.add("content of a result")
        text = message_text(result.get("content"), f"{at}.content", self.gaps)
        at_s = ours.get("at_s")
        timed = float(at_s) if isinstance(at_s, int | float) and abs(at_s) < 1e12 else seconds
        yield build_message("tool", text, answers=answers, failed=ours.get("failed") is True, agent=who, at_s=timed)

    def _time(self, step: Mapping[str, Any]) -> float | None:
        when = parse_time(step.get("timestamp"))
        if when is None:
            self.untimed += 1
            return None
        self.started = self.started or when
        return (when - self.started).total_seconds()

    def _left_out(self, step: Mapping[str, Any], model: Any) -> None:
        """What a step holds and a trace of somebody else's agent does not keep."""
        metrics = object_or_empty(step.get("metrics"))
        if any(metrics.get(key) for key in _TOKENS):
            self.gaps.add("exact tokens and logprobs of a step: they are not kept")
        if any(metrics.get(key) is not None for key in _COUNTED):
            self.gaps.add("token counts or cost of a step: they are not kept")
        if step.get("model_name") not in (None, model):
            self.gaps.add(f"model of single steps ({printable_label(step['model_name'])}): only the agent's is kept")
        if set(object_or_empty(step.get("extra"))) - {OURS}:
            self.gaps.add("extra of a step: it is not kept")
        if step.get("is_copied_context") is True:
            self.gaps.add("which steps are copied from another trajectory")
        if step.get("reasoning_effort") is not None:
            self.gaps.add("reasoning effort of a step: it is not kept")
