"""OpenTelemetry traces of a run: one trace for each training episode, and one span for each learner step.

The traces are built from the records of finished groups, on the thread of a tracker, so that nothing else in the run does work for them.
Groups from rollout workers are traced too. `agentrl.session.traces` opens the tracker. Spans and attributes have the names of the
OpenTelemetry conventions for generative AI.

The id of a span is a hash of what the span describes, such as `step 12`. So a span can link to the span of a learner step before that step
runs, and also after a resume.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from agentrl.base.user_code import printable
from agentrl.protocols import Tracker
from agentrl.records import Group, GroupUse, Parent, ScoredEpisode, ToolCall, Trajectory, Turn

log = logging.getLogger(__name__)

CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""Environment variable that adds the output of agents and tools to the spans if it is `true`."""
MAX_SPANS = 256
"""Maximum number of spans per episode. Additional spans are dropped, and the attribute `agentrl.spans_dropped` contains their number."""
MAX_LINKS = 128
"""Maximum number of episodes to which the span of a learner step links."""
MAX_TEXT, MAX_CONTENT = 256, 8192
"""Maximum number of characters in an attribute, and in an attribute with content."""
RETRY_S = 30.0
"""Seconds without exports after a failed export. Spans that arrive during this time are dropped and counted."""
_BATCH = 512  # maximum number of spans per export
_EPISODES = 65_536  # maximum number of groups whose episodes are remembered until a learner step uses the group
_NS = 1_000_000_000

UsesOfStep = Callable[[int], Mapping[int, GroupUse | None]]
"""A function that returns a mapping group index -> use for the groups used by the step that produced a version."""


class EpisodeTraces(Tracker):
    """A tracker that exports spans. Its methods may wait for a collector, so wrap it in `agentrl.observe.background.BackgroundTracker`."""

    def __init__(
        self, provider: Any, exporters: Sequence[Any], *, run_id: str, model: str, uses: UsesOfStep, alert: Callable[[str], None]
    ) -> None:
        self.exported, self.dropped = 0, 0
        """The number of spans that the collector accepted, and the number that were dropped because it did not accept them."""
        self._exporters, self._uses, self._alert = tuple(exporters), uses, alert
        self._spans = _Spans(provider, run_id=run_id, model=model)
        self._episodes: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # group -> ids of its episodes
        self._retry_at, self._alerted = 0.0, False

    def progress(self, index: int, group: Group) -> None:
        """Exports the episodes of a finished group."""
        self._episodes[index] = tuple(scored.episode.id for scored in group.episodes)
        while len(self._episodes) > _EPISODES:
            self._episodes.popitem(last=False)
        count = sum(min(MAX_SPANS, span_count(scored)) for scored in group.episodes)
        self._export((span for scored in group.episodes for span in self._spans.episode(index, scored)), count)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Exports the span of a learner step, and one span for each episode that the step used, which links to the step's span."""
        uses = self._uses(step)
        used = [(episode, use) for group, use in uses.items() for episode in self._episodes.pop(group, ())]
        self._export(self._spans.step(step, metrics, used), 1 + len(used))

    def close(self) -> None:
        """Closes the exporters. Idempotent."""
        for exporter in self._exporters:
            exporter.shutdown()
        self._exporters = ()
        if self.dropped:
            log.warning("traces: %d of %d spans were not exported", self.dropped, self.dropped + self.exported)

    def _export(self, spans: Iterator[Any], count: int) -> None:
        """Exports spans. After a failed export, spans are dropped without being built for `RETRY_S` seconds.

        `count`: approximate number of spans.
        """
        if time.monotonic() < self._retry_at or not self._exporters:
            self.dropped += count
            return
        while batch := list(islice(spans, _BATCH)):
            if not all([_succeeds(exporter, batch) for exporter in self._exporters]):
                self.dropped += max(len(batch), count)
                self._retry_at = time.monotonic() + RETRY_S
                self._alert_once()
                return
            self.exported += len(batch)
            count -= len(batch)

    def _alert_once(self) -> None:
        if not self._alerted:
            self._alerted = True
            self._alert(
                "traces are not exported, because the collector does not accept them; spans are dropped until it does\n"
                "  fix: check the collector and OTEL_EXPORTER_OTLP_ENDPOINT, or unset the variable"
            )


def span_count(scored: ScoredEpisode) -> int:
    """Returns the number of spans for an episode without a limit: one per trajectory, turn and tool call, and one for the score."""
    lines = scored.episode.trajectories
    return 1 + len(lines) + sum(1 + len(turn.tool_results) for line in lines for turn in line.own_turns)


def _succeeds(exporter: Any, spans: Sequence[Any]) -> bool:
    try:
        return bool(exporter.export(spans).value == 0)  # SpanExportResult.SUCCESS
    except Exception as error:
        log.debug("traces: %s", error)
        return False


class _Spans:
    """Builds the spans of episodes and learner steps, as objects of the OpenTelemetry SDK."""

    def __init__(self, provider: Any, *, run_id: str, model: str) -> None:
        self._api = import_module("opentelemetry.trace")
        self._span = import_module("opentelemetry.sdk.trace").ReadableSpan
        self._scope = import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope("agentrl")
        self._provider, self._run_id, self._model = provider, run_id, _short(model)
        self._content = os.environ.get(CONTENT, "").strip().lower() == "true"

    def episode(self, group: int, scored: ScoredEpisode) -> Iterator[Any]:
        """Yields the spans of an episode, at most `MAX_SPANS`. Yields none if the sampler excludes the episode or it has no trajectory."""
        lines, wanted = scored.episode.trajectories, span_count(scored)
        if lines and self._sampled(self._trace_id(scored.episode.id), "invoke_agent"):
            spans = (span for index, line in enumerate(lines) for span in self._agent(scored, index, line, group, wanted))
            yield (root := next(spans))
            yield from islice(spans, MAX_SPANS - 2)
            yield self._score(scored, root)

    def step(self, step: int, metrics: Mapping[str, float], used: Sequence[tuple[str, GroupUse | None]]) -> Iterator[Any]:
        """Yields the span of the learner step that produced version `step`, and one span in the trace of each episode that the step used.

        Args:
            used: pairs (episode id, how the step used the episode's group).
        """
        key, name = f"step {step}", f"train {step}"
        now = time.time()
        times = now - metrics.get("step_s", 0.0), now
        if self._sampled(self._trace_id(key), name):
            links = [self._context(episode, "trajectory 0") for episode, _ in used[:MAX_LINKS]]
            numbers = [(f"agentrl.{metric}", float(value)) for metric, value in metrics.items() if "/" not in metric][:96]
            yield self._make(
                name, key, "step", *times, {"agentrl.version": step, "agentrl.episodes": len(used), **dict(numbers)}, links=links
            )
        for episode, use in used:
            if not self._sampled(self._trace_id(episode), "invoke_agent"):
                continue
            attributes: dict[str, Any] = {"agentrl.version": step, "agentrl.trained": bool(use and use.tokens_trained)}
            if use is not None and use.reason:
                attributes["agentrl.reason"] = _short(use.reason)
            yield self._make("train", episode, "train", *times, attributes, parent="trajectory 0", links=[self._context(key, "step")])

    def _agent(self, scored: ScoredEpisode, index: int, line: Trajectory, group: int, wanted: int) -> Iterator[Any]:
        """Yields the spans of a trajectory: one for its agent, and one for each of its turns and tool calls.

        `wanted`: number of spans of the episode before the limit is applied.
        """
        episode, first = scored.episode, len(line.inherited)
        turns = [turn for turn in line.own_turns if turn.ended_at]  # 0 means unknown
        began = min((turn.ended_at - turn.generate_s for turn in turns), default=time.time())
        ended = max((turn.ended_at + turn.tool_s for turn in turns), default=began)
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": _short(line.agent),
            "gen_ai.conversation.id": _short(episode.id),
            "gen_ai.request.model": self._model,
            "gen_ai.usage.output_tokens": sum(turn.sampled for turn in turns),
            "agentrl.stop_reason": _short(line.stop_reason),
        }
        failure = None
        if not index:
            ended = max(ended, began + episode.wall_s) + scored.score.wall_s
            attributes |= {"agentrl.group": group, "agentrl.task": _short(episode.task_id), "agentrl.attempt": episode.attempt}
            failure = next(reversed(episode.failures), None)
            attributes |= {"agentrl.excluded": episode.left_out, "agentrl.sandbox_s": episode.sandbox_s}
            attributes |= {"agentrl.spans_dropped": wanted - MAX_SPANS} if wanted > MAX_SPANS else {}
        parent = None
        if line.parent is not None:
            parent = _parent_key(line.parent, episode.trajectories[line.parent.trajectory])
        error = _short(failure.kind) if failure is not None else ""
        name = f"invoke_agent {_short(line.agent)}"
        yield self._make(name, episode.id, f"trajectory {index}", began, ended, attributes, parent=parent, error=error)
        context = 0
        for number, turn in enumerate(line.turns):
            context += len(turn.prompt_ids)
            if number >= first and turn.ended_at:
                yield from self._turn(episode.id, f"trajectory {index}", number, turn, context)
            context += len(turn.completion_ids)

    def _turn(self, episode: str, agent: str, number: int, turn: Turn, context: int) -> list[Any]:
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vllm",
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": (_short(turn.finish_reason),),
            "gen_ai.usage.input_tokens": context,
            "gen_ai.usage.output_tokens": len(turn.completion_ids),
            "agentrl.versions": tuple(dict.fromkeys(span.version for span in turn.versions)),
        }
        if self._content:
            attributes["gen_ai.output.messages"] = _message(turn)
        links = [self._context(f"step {version}", "step") for version in attributes["agentrl.versions"] if version > 0]
        began, key = turn.ended_at - turn.generate_s, f"{agent} turn {number}"
        name = f"chat {self._model}"
        spans = [self._make(name, episode, key, began, turn.ended_at, attributes, parent=agent, links=links, client=True)]
        calls_s = sum(result.wall_s for result in turn.tool_results)
        sequential = calls_s <= turn.tool_s
        at = turn.ended_at + max(0.0, turn.tool_s - calls_s)  # the sandbox was opened before the first call
        for index, result in enumerate(turn.tool_results):
            tool = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": _short(result.name), "gen_ai.tool.type": "function"}
            if self._content:
                tool |= {"gen_ai.tool.call.result": _content(result.output)}
                if index < len(turn.message.tool_calls):
                    tool |= {"gen_ai.tool.call.arguments": _arguments(turn.message.tool_calls[index])}
            error = "" if result.ok else "tool_error"
            name = f"execute_tool {_short(result.name)}"
            spans.append(self._make(name, episode, f"{key} call {index}", at, at + result.wall_s, tool, parent=agent, error=error))
            at += result.wall_s if sequential else 0.0
        return spans

    def _score(self, scored: ScoredEpisode, root: Any) -> Any:
        score, ended = scored.score, root.end_time / _NS
        attributes: dict[str, Any] = {"gen_ai.evaluation.name": "score", "agentrl.pending": len(score.pending)}
        if score.value is not None:
            attributes["gen_ai.evaluation.score.value"] = float(score.value)
        attributes |= {f"agentrl.part.{_short(name)}": float(value) for name, value in list(score.parts.items())[:24]}
        if self._content and (score.reason or score.evidence):
            attributes["gen_ai.evaluation.explanation"] = _content(score.reason or score.evidence)
        error = "unscored" if score.is_absent else ""
        began = ended - score.wall_s
        return self._make("score", scored.episode.id, "score", began, ended, attributes, parent="trajectory 0", error=error)

    def _sampled(self, trace_id: int, name: str) -> bool:
        return bool(self._provider.sampler.should_sample(None, trace_id, name).decision.is_sampled())

    def _trace_id(self, of: str) -> int:
        return _hash(16, self._run_id, of)

    def _context(self, of: str, key: str) -> Any:
        flags = self._api.TraceFlags(self._api.TraceFlags.SAMPLED)
        return self._api.SpanContext(self._trace_id(of), _hash(8, self._run_id, of, key), is_remote=False, trace_flags=flags)

    def _make(
        self,
        name: str,
        of: str,
        key: str,
        began: float,
        ended: float,
        attributes: Mapping[str, Any],
        *,
        parent: str | None = None,
        links: Sequence[Any] = (),
        error: str = "",
        client: bool = False,
    ) -> Any:
        """Returns a span in the trace `of`. `key` and `parent` identify the span and its parent in that trace.

        `links` are the contexts of other spans to which the span links.
        """
        kinds, codes = self._api.SpanKind, self._api.StatusCode
        return self._span(
            name=name,
            context=self._context(of, key),
            parent=None if parent is None else self._context(of, parent),
            resource=self._provider.resource,
            attributes={**attributes, **({"error.type": error} if error else {})},
            links=tuple(self._api.Link(context) for context in links),
            kind=kinds.CLIENT if client else kinds.INTERNAL,
            status=self._api.Status(codes.ERROR if error else codes.UNSET),
            start_time=round(began * _NS),
            end_time=round(max(began, ended) * _NS),
            instrumentation_scope=self._scope,
        )


def _parent_key(parent: Parent, caller: Trajectory) -> str:
    """Returns the key of a trajectory's parent span: the call that started it or, if that call has no span, the caller's trajectory.

    A call has no span if it has no result, if its turn is inherited from another episode, or if the time of its turn is unknown.
    """
    turn, key = caller.turns[parent.turn], f"trajectory {parent.trajectory}"
    timed = parent.turn >= len(caller.inherited) and turn.ended_at
    called = parent.call is not None and parent.call < len(turn.tool_results)
    return f"{key} turn {parent.turn} call {parent.call}" if timed and called else key


def _message(turn: Turn) -> str:
    """Returns a turn's message in the JSON format of the OpenTelemetry conventions, with clipped strings."""
    calls = [
        {"type": "tool_call", "id": str(number), "name": _short(call.name), "arguments": _arguments(call)}
        for number, call in enumerate(turn.message.tool_calls)
    ]
    text = [{"type": "text", "content": _content(turn.message.content)}] * bool(turn.message.content)
    message = {"role": "assistant", "parts": [*text, *calls], "finish_reason": _short(turn.finish_reason)}
    return json.dumps([message])


def _arguments(call: ToolCall) -> str:
    return _content(json.dumps(dict(call.arguments), ensure_ascii=False))


def _hash(size: int, *parts: str) -> int:
    """Hashes `parts` to an id of `size` bytes. The id is never 0, which is invalid."""
    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:size], "big") or 1


def _short(text: str) -> str:
    return printable(text, MAX_TEXT)


def _content(text: str) -> str:
    return printable(text, MAX_CONTENT)
