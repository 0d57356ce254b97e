"""An agent whose turns somebody's server of chat completions says: for evaluations alone, since its exact tokens are not known.

It acts as the turn loop does: the task's prompt, the task's tools in the episode's sandbox, the task's limits. Its turns hold what was said
and no token ids. What the server does wrong is a fault of the infrastructure; what the model does wrong is the policy's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from agentrl.agent import Toolbox, load_tools
from agentrl.agent.calls import MAX_CALLS, parse_call
from agentrl.agent.tools import clip
from agentrl.agent.turncalls import count_calls, run_call
from agentrl.agent.wording import main_prompt
from agentrl.base.user_code import printable
from agentrl.errors import JudgeError, PolicyFault, PromptRefusedError, ServingError, TaskError
from agentrl.judge.endpoint import CHARS_PER_TOKEN, Endpoint, Reply, token_usage
from agentrl.protocols import LiveEpisode
from agentrl.records import Completion, Message, SamplingParams, ToolCall, ToolResult
from agentrl.records.fields import text as encodable

_LONGEST_ID = 128
BYTES_PER_TOKEN = 64
"""Most bytes of a JSON answer for each token. A longer answer cannot come from the tokens that were requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedCall:
    """One tool call of an answer: what the tool is given, or what is wrong with it, and how the server knows it."""

    id: str
    name: str
    arguments: str  # as written; {} if they cannot be read, since servers fail at such a call when they get it back
    call: ToolCall | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer(Reply):
    """One turn of the model."""

    calls: tuple[RequestedCall, ...] = ()
    cut: bool = False  # by its length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChatEndpoint(Endpoint):
    """An `Endpoint` whose answers may be tool calls."""

    structured: Any = "never"

    def _read(self, content: bytes, messages: Sequence[Mapping[str, Any]]) -> ChatAnswer:
        """Raises `JudgeError` for what is no chat completion: the server's fault."""
        if len(content) > self.max_bytes:
            raise JudgeError(f"{self._where()} gave an answer of more than {self.max_bytes:,} bytes")
        try:
            body = json.loads(content)
            choice = body["choices"][0]
            said = choice["message"]
            words, refusal, wanted = said.get("content"), said.get("refusal"), said.get("tool_calls") or []
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise JudgeError(f"{self._where()} gave an answer that is no chat completion") from None
        if not isinstance(wanted, list) or not isinstance(words, str | None):
            raise JudgeError(f"{self._where()} gave an answer that is no chat completion")
        cost = token_usage(body.get("usage"), len(json.dumps(list(messages))) // CHARS_PER_TOKEN, content.decode(errors="replace"))
        text = words if words is not None else refusal if isinstance(refusal, str) else ""
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
    """An `agentrl.protocols.Agent`. `tokens`: episode -> tokens that the server says it sampled, for whoever takes them out."""

    endpoint: ChatEndpoint
    sampling: Mapping[str, Any] = field(default_factory=dict)  # further keys of every request
    instructions: str | None = None  # in place of the system messages of tasks
    tokens: dict[str, int] = field(default_factory=dict)

    async def act(self, episode: LiveEpisode) -> str:
        limits = episode.task.limits
        if limits.thinking_tokens is not None:
            raise TaskError(
                f"task {episode.task.id!r}: nobody can end the thinking of a model behind an endpoint, as limits.thinking_tokens asks",
                fix="leave the limit out",
            )
        tools = load_tools(episode.task.tools, None, episode.tools, task=episode.task)
        try:
            return await self._turns(episode, tools)
        finally:
            await tools.close(timeout_s=limits.tool_timeout_s)

    async def _turns(self, episode: LiveEpisode, tools: Toolbox) -> str:
        main, limits = episode.trajectories[0], episode.task.limits
        prompt = main_prompt(main, episode.task, self.instructions)
        messages: list[dict[str, Any]] = [{"role": one.role, "content": one.content} for one in prompt]
        schemas = {"tools": [tool.schema for tool in tools.values()]} if tools else {}
        context = 0  # tokens, as the server counts them
        room = min(limits.episode_tokens, limits.all_tokens or limits.episode_tokens)
        while not (limit := main.limit() or ("token_limit" if context >= room else "")):
            most = min(limits.turn_tokens, room - context)
            answer = await self._asked(episode, messages, schemas, most)
            context = answer.prompt_tokens + answer.completion_tokens
            good = [one.call for one in answer.calls if isinstance(one.call, ToolCall)]
            said = Message(role="assistant", content=answer.text, tool_calls=tuple(good))
            unknown = Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length" if answer.cut else "stop")
            main.add_turn(unknown, said)
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
            if episode.turn_count:  # the request contains the model's text
                raise PolicyFault(f"the server refuses a conversation that contains the policy's text: {error}") from error
            raise ServingError(str(error)) from error
        except JudgeError as error:
            raise ServingError(str(error)) from error
        assert isinstance(answer, ChatAnswer), "the endpoint reads its answers itself"
        self.tokens[episode.id] = self.tokens.get(episode.id, 0) + answer.completion_tokens
        return answer

    async def _called(self, episode: LiveEpisode, tools: Toolbox, calls: Sequence[RequestedCall], messages: list[dict[str, Any]]) -> str:
        """Runs the calls of a turn in order, up to a submitted answer or a lost sandbox, and appends what they gave. The stop reason."""
        began, made = time.monotonic(), count_calls(episode)
        results: list[ToolResult] = []
        errors: list[ToolResult] = []  # after the others, as the turn loop records them
        ended = ""
        for one in calls:
            if isinstance(one.call, str):
                output = episode.clip_output(clip(f"error: {one.call}", episode.task.limits.tool_output_chars))
                errors.append(ToolResult(name="", output=output, ok=False))
            else:
                started = time.monotonic()
                outcome = await run_call(episode, tools, one.call, made)
                output = episode.clip_output(outcome.output)
                results.append(ToolResult(name=one.name[:64], output=output, ok=outcome.ok, wall_s=time.monotonic() - started))
                if outcome.answer is not None or episode.sandbox_lost:
                    episode.answer, ended = outcome.answer, "submitted" if outcome.answer is not None else "tool_timeout"
                    break
            messages.append({"role": "tool", "tool_call_id": one.id, "content": output})
        episode.trajectories[0].add_results([*results, *errors], wall_s=time.monotonic() - began)
        return ended


class NoPolicy:
    """The `agentrl.protocols.Policy` beside a `ChatAgent`, which samples nothing through it."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str, timeout_s: float) -> Completion:
        raise ServingError("an endpoint of chat completions gives no exact tokens")


def _calls(wanted: Sequence[Any]) -> tuple[RequestedCall, ...]:
    """Whatever a server gives as tool calls. Ids that are none, or are given twice, get one of ours."""
    made: list[RequestedCall] = []
    for number, one in enumerate(wanted):
        about = one.get("function") if isinstance(one, dict) else None
        name, arguments = (about.get("name"), about.get("arguments")) if isinstance(about, dict) else (None, None)
        arguments = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        given = one.get("id") if isinstance(one, dict) else None
        fine = isinstance(given, str) and 0 < len(given) <= _LONGEST_ID and given not in {other.id for other in made}
        call: ToolCall | str = "a tool call needs a function with a name and arguments"
        if isinstance(name, str) and isinstance(arguments, str | None):
            call = parse_call(name, arguments or "")
        made.append(
            RequestedCall(
                id=encodable(given) if fine else f"call_{number}",
                name=encodable(name)[:256] if isinstance(name, str) else "",
                arguments=encodable(arguments.strip())
                if isinstance(call, ToolCall) and isinstance(arguments, str) and arguments.strip()
                else "{}",
                call=call,
            )
        )
    return tuple(made)


def _echo(answer: ChatAnswer) -> dict[str, Any]:
    """A turn of the model as the server wants it back."""
    calls = [{"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}} for one in answer.calls]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}
