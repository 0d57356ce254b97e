"""An agent whose turns come from a third-party chat completions server.

The agent is for evaluations only, because the exact tokens are unknown. Like the turn loop, the agent uses the task's prompt, tools and
limits, and the episode's sandbox. Its turns contain text but no token ids. A fault of the chat completions server is recorded as an
infrastructure fault, and a fault of the model as a fault of the policy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from agentrl.agent import Toolbox, load_tools
from agentrl.agent.calls import MAX_CALLS, parse_call
from agentrl.agent.contexts import main_prompt
from agentrl.agent.invoke import count_calls, run_call
from agentrl.base.user_code import clip, printable
from agentrl.errors import JudgeError, PolicyFault, PromptRefusedError, ServingError, TaskError
from agentrl.judge.endpoint import CHARS_PER_TOKEN, Endpoint, Reply, token_usage
from agentrl.protocols import LiveEpisode
from agentrl.records import Completion, Message, SamplingParams, ToolCall, ToolResult
from agentrl.records.fields import text as encodable

_LONGEST_ID = 128
BYTES_PER_TOKEN = 64
"""Maximum bytes per token in a JSON response. A longer response contains more tokens than requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedCall:
    """One tool call in a response: its id, and the parsed call or a message about why it is invalid."""

    id: str
    name: str
    arguments: str  # as written; {} if invalid, because servers reject invalid arguments in later requests
    call: ToolCall | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer(Reply):
    """A response of the model, which becomes one turn."""

    calls: tuple[RequestedCall, ...] = ()
    cut: bool = False  # whether it was truncated at the token limit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatEndpoint(Endpoint):
    """An `Endpoint` whose responses may contain tool calls."""

    structured: Any = "never"

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> ChatAnswer:
        """Parses a chat completion. Raises `JudgeError` if the content is too long or not a chat completion."""
        if len(content) > self.max_bytes:
            raise JudgeError(f"{self._where()} returned more than {self.max_bytes:,} bytes")
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            message = choice["message"]
            answer, refusal, wanted = message.get("content"), message.get("refusal"), message.get("tool_calls") or []
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise JudgeError(f"{self._where()} did not return a chat completion") from None
        if not isinstance(wanted, list) or not isinstance(answer, str | None):
            raise JudgeError(f"{self._where()} did not return a chat completion")
        cost = token_usage(body.get("usage"), len(json.dumps(list(messages))) // CHARS_PER_TOKEN, content.decode(errors="replace"))
        text = answer if answer is not None else refusal if isinstance(refusal, str) else ""
        return ChatAnswer(
            text=encodable(text),
            **cost,
            calls=_calls(wanted[:MAX_CALLS]),
            cut=choice.get("finish_reason") == "length",
        )

    def _where(self) -> str:
        host = urlsplit(self.url).netloc if isinstance(self.url, str) else ""
        return f"policy {printable(self.model, 80)} at {host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAgent:
    """An `agentrl.protocols.Agent`.

    `tokens` maps an episode to its number of sampled tokens as counted by the server. The evaluation reads and removes the entry of an
    episode when the episode has finished.
    """

    endpoint: ChatEndpoint
    sampling: Mapping[str, Any] = field(default_factory=dict)  # additional keys in every request
    instructions: str | None = None  # replaces the system messages of tasks
    tokens: dict[str, int] = field(default_factory=dict)

    async def act(self, episode: LiveEpisode) -> str:
        """Runs an episode and returns its stop reason.

        Raises `TaskError` if the task limits thinking tokens, `PolicyFault` if the server rejects a conversation that contains the policy's
        text, and `ServingError` if the server fails in another way.
        """
        limits = episode.task.limits
        if limits.thinking_tokens is not None:
            raise TaskError(
                f"task {episode.task.id!r}: limits.thinking_tokens cannot be enforced for a model behind an endpoint",
                fix="remove the limit",
            )
        tools = load_tools(episode.task.tools, None, episode.tools, task=episode.task)
        try:
            return await self._turns(episode, tools)
        finally:
            await tools.close(timeout_s=limits.tool_timeout_s)

    async def _turns(self, episode: LiveEpisode, tools: Toolbox) -> str:
        main, limits = episode.trajectories[0], episode.task.limits
        prompt = main_prompt(main, episode.task, self.instructions)
        messages: list[dict[str, Any]] = [{"role": message.role, "content": message.content} for message in prompt]
        schemas = {"tools": [tool.schema for tool in tools.values()]} if tools else {}
        context = 0  # tokens, as the server counts them
        room = min(limits.episode_tokens, limits.all_tokens or limits.episode_tokens)
        while not (limit := main.limit() or ("token_limit" if context >= room else "")):
            most = min(limits.turn_tokens, room - context)
            answer = await self._asked(episode, messages, schemas, most)
            context = answer.prompt_tokens + answer.completion_tokens
            good = [call.call for call in answer.calls if isinstance(call.call, ToolCall)]
            message = Message(role="assistant", content=answer.text, tool_calls=tuple(good))
            unknown = Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length" if answer.cut else "stop")
            main.add_turn(unknown, message)
            if answer.cut:
                return "token_limit"
            if not answer.calls:
                episode.answer = None if "submit" in tools else answer.text
                return "answered"
            messages.append(_echo(answer))
            ended = await self._called(episode, tools, answer.calls, messages)
            if ended:
                return ended
        return limit

    async def _asked(
        self, episode: LiveEpisode, messages: Sequence[Mapping[str, Any]], schemas: Mapping[str, Any], most: int
    ) -> ChatAnswer:
        try:
            with episode.external_request(most, within_s=self.endpoint.timeout_s) as request:
                more = {**self.sampling, **schemas, self.endpoint.tokens_name: request.most}
                answer = await self.endpoint.ask(messages, more=more)
                request.tokens = answer.completion_tokens
        except PromptRefusedError as error:
            if episode.turn_count:  # the request contains the policy's text
                raise PolicyFault(f"the server rejects a conversation that contains the policy's text: {error}") from error
            raise ServingError(str(error)) from error
        except JudgeError as error:
            raise ServingError(str(error)) from error
        assert isinstance(answer, ChatAnswer), "ChatEndpoint parses its answers"
        self.tokens[episode.id] = self.tokens.get(episode.id, 0) + answer.completion_tokens
        return answer

    async def _called(self, episode: LiveEpisode, tools: Toolbox, calls: Sequence[RequestedCall], messages: list[dict[str, Any]]) -> str:
        """Runs the tool calls of a turn in order, until an answer is submitted or the sandbox is lost. Appends the results to `messages`.

        Returns the stop reason; empty if the episode continues.
        """
        began, counts = time.monotonic(), count_calls(episode)
        results: list[ToolResult] = []
        errors: list[ToolResult] = []  # recorded after the other results, as in the turn loop
        ended = ""
        for call in calls:
            if isinstance(call.call, str):
                output = episode.clip_output(clip(f"error: {call.call}", episode.task.limits.tool_output_chars))
                errors.append(ToolResult(name="", output=output, ok=False))
            else:
                started = time.monotonic()
                outcome = await run_call(episode, tools, call.call, counts)
                output = episode.clip_output(outcome.output)
                results.append(ToolResult(name=call.name[:64], output=output, ok=outcome.ok, wall_s=time.monotonic() - started))
                if outcome.answer is not None or episode.sandbox_lost:
                    episode.answer, ended = outcome.answer, "submitted" if outcome.answer is not None else "tool_timeout"
                    break
            messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        episode.trajectories[0].add_results([*results, *errors], wall_s=time.monotonic() - began)
        return ended


class NoPolicy:
    """A placeholder for the `agentrl.protocols.Policy` of an episode runner. A `ChatAgent` never calls it."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        """Always raises `ServingError`."""
        raise ServingError("a chat completions endpoint returns no exact tokens")


def _calls(wanted: Sequence[Any]) -> tuple[RequestedCall, ...]:
    """Parses tool calls. A call id that is invalid or repeated is replaced with an id that no call has."""
    calls: list[RequestedCall] = []
    ids = [encodable(one["id"]) if isinstance(one, dict) and isinstance(one.get("id"), str) else "" for one in wanted]
    unused = (name for name in map("call_{}".format, count()) if name not in ids)
    for call_id, one in zip(ids, wanted, strict=True):
        about = one.get("function") if isinstance(one, dict) else None
        name, arguments = (about.get("name"), about.get("arguments")) if isinstance(about, dict) else (None, None)
        arguments = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        fine = 0 < len(call_id) <= _LONGEST_ID and call_id not in {other.id for other in calls}
        call: ToolCall | str = "a tool call needs a function with a name and arguments"
        if isinstance(name, str) and isinstance(arguments, str | None):
            call = parse_call(name, arguments or "")
        calls.append(
            RequestedCall(
                id=call_id if fine else next(unused),
                name=encodable(name)[:256] if isinstance(name, str) else "",
                arguments=encodable(arguments.strip())
                if isinstance(call, ToolCall) and isinstance(arguments, str) and arguments.strip()
                else "{}",
                call=call,
            )
        )
    return tuple(calls)


def _echo(answer: ChatAnswer) -> dict[str, Any]:
    """Returns the message that represents a turn of the model in later requests."""
    calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}
