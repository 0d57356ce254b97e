"""One session: the requests of one outside program, in one episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.base import loop_lag, user_code
from agentrl.errors import InfrastructureError, PolicyFault, TaskError
from agentrl.gateway.constraint import constraint
from agentrl.gateway.graph import ContextMatch, ConversationGraph, SampledTurn, alike
from agentrl.gateway.request import Answer, AnswerCall, CompletionRequest, RequestError, RequestMessage, said
from agentrl.gateway.tokens import ConversationTokens, NotAppended, Parsed, stopped, until
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import CUT, Blame, Completion, Failure, Message, Parent, ToolResult

log = logging.getLogger(__name__)

MAX_AT_ONCE = 64
"""Requests of one session that may be under way."""

CHARS_PER_TOKEN = 64
"""A conversation with more characters than this for each token that fits is too long, which is told without tokenizing it."""

MAX_REFUSED = 1000
"""Refusals after which a program has had its chances: its session is over."""

TIME_UP = "wall_limit"
"""The value of `LiveTrajectory.limit` at the end of an episode's time."""

MAIN, SUB_AGENT, AUXILIARY = "main", "sub-agent", "auxiliary"


@dataclass(slots=True, eq=False)
class _Given:
    """An answer that is being made or was made, and whether its client has got it."""

    task: asyncio.Task[Answer]
    waiting: int = 1  # clients that are there
    delivered: bool = False


@dataclass(slots=True, eq=False)
class Session:
    """Answers requests with what the episode's policy samples, and keeps every sampled token in one turn of the episode's tree.

    `counts` says how often each thing happened: `answered`, `branch`, `restart`, `sub_agent`, `replayed`, and `refused_...` by reason.
    """

    episode: LiveEpisode
    tokens: ConversationTokens
    models: tuple[str, ...]
    on_busy: Callable[[bool], None] = lambda busy: None  # told when the first completion is begun and the last one made
    counts: Counter[str] = field(default_factory=Counter)
    fault: BaseException | None = None  # why nothing can be sampled any more: no fault of the program
    limit: str = ""  # "turn_limit" or "wall_limit" once it is reached; "refused" after too many refusals
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set with `fault` or `limit`
    ended: bool = False
    stored_answers: dict[str, Any] = field(default_factory=dict)  # id -> stored answer, as it was written
    stalls: loop_lag.StallCount | None = field(default_factory=loop_lag.current_stalls)  # of the episode, which its requests do not excuse
    _refused: int = 0
    _graph: ConversationGraph = field(default_factory=ConversationGraph)
    _given: dict[tuple[object, ...], _Given] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)
    _busy: set[int] = field(default_factory=set)  # trajectories in which a turn is being sampled
    _shown: dict[int, tuple[int, int]] = field(default_factory=dict)  # trajectory -> tools and messages of its first request
    _names: dict[int, str] = field(default_factory=dict)  # of trajectories
    _asides: set[int] = field(default_factory=set)  # trajectories that may be auxiliary
    _answered_at: dict[int, float] = field(default_factory=dict)

    async def complete(self, asked: CompletionRequest, *, gone: asyncio.Event | None = None) -> tuple[Answer, Callable[[], None]]:
        """An answer, and what to call once its client has it.

        The same request again gets the same answer where nobody has got that yet, or where the client says that it asks once more.
        Otherwise it is another attempt, and sampled anew.

        Args:
            gone: set when the client goes away; what is being sampled is kept for it.

        Raises:
            Refused: with the reason.
        """
        self._check(asked)
        asked = self._graph.rejoin(asked)
        place = self._graph.locate(asked)
        shape = json.dumps(asked.shape, sort_keys=True)
        options = (asked.max_tokens, asked.calls, asked.single, asked.strict, asked.stop, asked.forced, shape)
        same = (place.end.digest, place.system, place.tools, asked.after, *options)
        given = self._given.get(same)
        if given is not None and (asked.retry or not (given.waiting or given.delivered)) and not _failed(given.task):
            self.counts["replayed"] += 1
            given.waiting += 1
        else:
            given = self._given[same] = self._begin(asked, place)
        return await self._wait(given, gone)

    def count(self, asked: CompletionRequest) -> int:
        """The number of prompt tokens of a request. Does not change the graph and samples nothing. Raises `RequestError`."""
        self._check(asked)
        self.counts["counted"] += 1
        if self.counts["counted"] > MAX_REFUSED:
            raise RequestError("too_many", f"The tokens of {MAX_REFUSED} requests of this session were counted.")
        if asked.chars > CHARS_PER_TOKEN * self.episode.task.limits.episode_tokens:
            raise _too_long()
        asked = self._graph.rejoin(asked)
        before, new = self._graph.goes_on(asked)
        with contextlib.suppress(NotAppended):
            if before is not None:
                more = self.tokens.delta(_with_withheld(new, before), before.parsed, before.all_ids, ended=before.ended)
                return before.tokens + len(more)
        return len(self.tokens.opening(_shown(asked), asked.tools))

    def _check(self, asked: CompletionRequest) -> None:
        """Raises `RequestError` for a request that this session cannot answer."""
        if self.ended or self.fault is not None or self.limit == "refused":
            raise RequestError("ended", "This session has ended.")
        if asked.model not in self.models:
            raise RequestError(
                "unknown_model", f"The model {asked.model[:100]!a} does not exist or you do not have access to it.", param="model"
            )
        if asked.after and asked.after not in self.stored_answers:
            raise RequestError("not_found", f"Previous response with id {asked.after[:100]!a} not found.", param="previous_response_id")
        if not asked.messages and not asked.after:
            raise RequestError("invalid", "messages must hold a message that is not of the system.", param="messages")

    def refused(self, kind: str) -> None:
        """Counts a request that was not carried out."""
        self.counts[f"refused_{kind}"] += 1
        self._refused += 1
        if self._refused > MAX_REFUSED and not self.limit:
            self.limit = "refused"
            self.over.set()

    def _begin(self, asked: CompletionRequest, place: ContextMatch) -> _Given:
        """Takes the request's place in the tree at once, so that those after it see it; the completion comes later."""
        if len(self._busy) >= MAX_AT_ONCE:
            raise RequestError("too_many", f"{MAX_AT_ONCE} requests of this session are under way; wait for one of them.")
        if self.episode.turn_count + len(self._busy) >= self.episode.task.limits.turns:
            self.limit = "turn_limit"
            self.over.set()
            raise RequestError("turn_limit", f"All {self.episode.task.limits.turns} turns of this session are used up.")
        if asked.chars > CHARS_PER_TOKEN * self.episode.task.limits.episode_tokens:
            raise _too_long()
        spells = constraint(asked, self.tokens.chat)
        line, place, prompt = self._line(asked, place)
        line.add_prompt(prompt)
        try:
            limit = line.limit()
        except TaskError as error:
            if not self._busy:
                self.fail(error)
                raise RequestError("context_length", error.message) from None
            limit = "token_limit"  # it would fit, but for those under way
        if limit == TIME_UP:
            raise self._time_is_up()
        if limit:
            line.end(limit)
            if not line.turns:
                line.describe(line.agent, ())  # a thousand refused conversations need not be kept
            raise _too_long()
        self._busy.add(line.index)
        if len(self._busy) == 1:
            self.on_busy(True)
        sampling = self._sampled(asked, place, line, len(prompt), spells)
        task = asyncio.create_task(sampling, name=f"session {self.episode.id}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return _Given(task)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: its clients may all have gone away

    def _line(self, asked: CompletionRequest, place: ContextMatch) -> tuple[LiveTrajectory, ContextMatch, tuple[int, ...]]:
        """The trajectory that the request's turn goes into, and the tokens that come before the completion."""
        before = place.before
        if before is not None:
            try:
                place = replace(place, new=_with_withheld(place.new, before))
                new = self.tokens.delta(place.new, before.parsed, before.all_ids, ended=before.ended)
                return self._goes_on(place, before, new)
            except NotAppended:
                place = replace(place, kind="restart", before=None, new=asked.messages, system_changed=False)
        messages = _shown(asked)
        if asked.after and place.kind != "root":
            raise RequestError("invalid", "The conversation cannot go on from that response with other tools or instructions.")
        prompt = self.tokens.opening(messages, asked.tools)
        first = self.episode.trajectories[0]
        if place.kind == "root" and not self._shown:
            line = first
            self._describe(line, MAIN, messages)
        else:
            line = self._open(place, messages, place.parent)
            if place.aside:
                self._asides.add(line.index)
        if place.answers is not None:
            self._graph.answered(place.answers)
        if place.kind != "root":
            self.counts[place.kind] += 1
        self._shown[line.index] = (len(asked.tools), len(messages))
        return line, place, prompt

    def _goes_on(
        self, place: ContextMatch, before: SampledTurn, new: tuple[int, ...]
    ) -> tuple[LiveTrajectory, ContextMatch, tuple[int, ...]]:
        """In the turn's own trajectory where it is the last one there, else in a branch, which holds its context as tokens not trained."""
        self._graph.answered(before)
        if place.system_changed:
            self.counts["system_kept"] += 1
        line = before.line
        if before.turn == len(line.turns) - 1 and line.index not in self._busy and not line.stop_reason:
            seconds = max(0.0, time.monotonic() - self._answered_at.get(line.index, time.monotonic()))
            line.add_results(_results(place.new, before), wall_s=seconds)
            return line, place, new
        self.counts["branch"] += 1
        context = [token for turn in line.turns[: before.turn + 1] for token in (*turn.prompt_ids, *turn.completion_ids)]
        branch = self._open(place, [one.message for one in place.new], before.parent)
        self._shown[branch.index] = self._shown[line.index]
        return branch, place, (*context, *new)

    def _open(self, place: ContextMatch, prompt: Sequence[Message], parent: Parent | None) -> LiveTrajectory:
        name = self._name(place)
        line = self.episode.open(name, parent=parent, prompt=prompt)
        self._names[line.index] = name
        return line

    def _describe(self, line: LiveTrajectory, name: str, prompt: Sequence[Message] | None = None) -> None:
        line.describe(name, prompt)
        self._names[line.index] = name

    def _name(self, place: ContextMatch) -> str:
        if place.kind == "sub_agent":
            return SUB_AGENT
        if place.parent is None:
            return MAIN
        return self._names[place.parent.trajectory]

    async def _sampled(self, asked: CompletionRequest, place: ContextMatch, line: LiveTrajectory, new: int, spells: str) -> Answer:
        try:
            if limit := line.limit():  # since it was taken, another turn has used up what was left
                if limit == TIME_UP:
                    raise self._time_is_up()
                line.end(limit)
                raise _too_long()
            completion = await line.sample(
                stop_token_ids=self.tokens.chat.stop_token_ids, max_tokens=asked.max_tokens, stop=asked.stop, constraint=spells
            )
            parsed, stop = self._read(line, completion, asked)
            if completion.finish_reason == CUT:
                self._time_is_up()
        except RequestError:
            raise
        except Exception as error:
            self.fail(error)
            raise RequestError("failed", "The policy cannot be asked at the moment.") from error
        finally:
            self._busy.discard(line.index)
            if not self._busy:
                self.on_busy(False)
        self.counts["answered"] += 1
        self.counts["malformed_call"] += bool(parsed.errors)
        return self._kept(asked, place, line, new, parsed, stop)

    def _read(self, line: LiveTrajectory, completion: Completion, asked: CompletionRequest) -> tuple[Parsed, str]:
        """Reads a completion and adds it as a turn. Also returns the stop sequence that ends it.

        Raises `PolicyFault` if it cannot be read; the turn is added anyway.
        """
        chat, stop = self.tokens.chat, ""
        try:
            count, stop = self.tokens.up_to(completion.token_ids, asked.stop)
            completion = stopped(completion, count) if stop else completion
            calls = asked.calls and bool(asked.known_tools)
            parsed = chat.parse(completion.token_ids, asked.known_tools, calls=calls)
            if parsed.message.tool_calls and len(self._withheld(parsed, asked)) == len(parsed.message.tool_calls):
                parsed = chat.parse(completion.token_ids, asked.known_tools, calls=False)
        except Exception as error:  # a tokenizer may raise anything at what a model says
            user_code.log_unexpected("the policy's text cannot be read", error)
            line.add_turn(completion, Message(role="assistant", content=""))
            raise PolicyFault(f"the policy's text cannot be read: {user_code.describe_error(error, 1000)}") from error
        line.add_turn(completion, parsed.message)
        return parsed, stop

    def _withheld(self, parsed: Parsed, asked: CompletionRequest) -> dict[int, str]:
        """The calls of a completion that the client does not receive: index of the call -> text for the policy in place of a result."""
        schemas = {tool["function"]["name"]: tool for tool in asked.known_tools if tool["function"]["name"] in asked.strict}
        withheld: dict[int, str] = {}
        for number, call in enumerate(parsed.message.tool_calls):
            if call.name in schemas and (wrong := self.tokens.chat.argument_errors(schemas[call.name], call.arguments)):
                withheld[number] = f"error: this call was not made: {wrong}"
            elif asked.single and len(withheld) < number:
                withheld[number] = "error: this call was not made: only one tool call at a time"
        return withheld

    def _kept(self, asked: CompletionRequest, place: ContextMatch, line: LiveTrajectory, new: int, parsed: Parsed, stop: str) -> Answer:
        message, ids = parsed.message, line.turns[-1].completion_ids
        withheld = self._withheld(parsed, asked)
        all_ids = tuple(f"call_{secrets.token_hex(12)}" for _ in message.tool_calls)
        calls = tuple(
            AnswerCall(id=name, call=one)
            for at, (name, one) in enumerate(zip(all_ids, message.tool_calls, strict=True))
            if at not in withheld
        )
        known = {tool["function"]["name"] for tool in asked.known_tools}
        self.counts["unknown_tool_called"] += sum(one.name not in known for one in message.tool_calls)
        self.counts["withheld_call"] += len(withheld)
        answer_id, text = secrets.token_hex(12), until(parsed.answer, asked.stop)[0].rstrip()
        last = self._graph.last(line)
        before = (last.tokens if last is not None else 0) + new
        node = SampledTurn(
            line=line,
            turn=len(line.turns) - 1,
            end=place.end.said(text, [(one.call.name, one.call.arguments) for one in calls]),
            opening=place.opening,
            messages=len(asked.messages),
            system=place.system,
            lengths=place.lengths,
            tools=place.tools,
            all_ids=all_ids,
            withheld={all_ids[at]: reason for at, reason in withheld.items()},
            tokens=before + len(ids),
            ended=bool(ids) and ids[-1] in self.tokens.chat.stop_token_ids,
            answer_id=answer_id,
            parsed=parsed,
            text=text,
        )
        self._graph.add(node)
        self._answered_at[line.index] = time.monotonic()
        thought = message.content.removesuffix(parsed.answer)
        return Answer(
            id=answer_id,
            model=asked.model,
            text=text,
            reasoning=thought.replace("<think>", "").replace("</think>", "").strip(),
            calls=calls,
            cut=line.turns[-1].finish_reason != "stop",
            stop=stop,
            prompt_tokens=before,
            completion_tokens=len(ids),
            created=int(time.time()),
        )

    async def _wait(self, given: _Given, gone: asyncio.Event | None) -> tuple[Answer, Callable[[], None]]:
        def delivered() -> None:
            given.delivered = True

        left = asyncio.create_task(gone.wait()) if gone is not None else None
        waits = True
        try:
            await asyncio.wait({given.task} | ({left} if left else set()), return_when=asyncio.FIRST_COMPLETED)
            if not given.task.done():  # the client may have closed one direction only, and read its answer
                self.counts["client_gone"] += 1
                given.waiting, waits = given.waiting - 1, False
                await asyncio.wait({given.task})
            if given.task.cancelled():
                raise RequestError("ended", "This session has ended.")
            return given.task.result(), delivered
        finally:
            given.waiting -= waits
            if left is not None:
                left.cancel()

    def _time_is_up(self) -> RequestError:
        """Ends the session at the end of the episode's time."""
        self.limit = self.limit or TIME_UP
        self.over.set()
        return RequestError("turn_limit", "The time of this session is used up.")

    def request_failed(self, error: Exception) -> None:
        """Ends the session because the gateway failed on a request. After the policy's first answer, the request contains its text, and the
        episode is scored. Before that, it is an infrastructure fault."""
        if not self.counts["answered"] or isinstance(error, InfrastructureError):
            self.fail(error)
            return
        fault = PolicyFault(f"the gateway failed on a request that contains the policy's text: {user_code.describe_error(error, 1000)}")
        fault.__cause__ = error
        self.fail(fault)

    def fail(self, error: BaseException) -> None:
        """Ends the session with a fault that is not the program's; the first one counts."""
        if self.fault is None:
            self.fault = error
        self.over.set()

    async def close(self) -> None:
        """Ends the session: what is being sampled is dropped, and trajectories get the names that the whole of it shows. Idempotent."""
        if self.ended:
            return
        self.ended = True
        tasks = tuple(self._tasks)
        self.counts["dropped"] += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._given.clear()
        self._seal()

    def _seal(self) -> None:
        """Marks contexts of one turn that no request continues and that are not the main work as `auxiliary`: titles, summaries.

        Contexts without a parent are auxiliary if they have no tools. So are contexts that quote the work or ask about it without tools.
        """
        lines = self.episode.trajectories
        asides = {line.index for line in lines if line.index in self._asides and len(line.turns) == 1}
        parents = {line.parent.trajectory for line in lines if line.parent is not None}
        followed = {line.parent.trajectory for line in lines if line.parent is not None and line.index not in asides}
        work = self._work([line for line in lines if line.index in self._shown and line.parent is None], followed)
        for line in lines:
            if line.index in self._shown and line.parent is None and work:
                self._describe(line, MAIN if line.index in work else AUXILIARY)
            elif line.parent is not None and line.index in asides - parents:
                about = lines[line.parent.trajectory]
                goes_on = about.index in work | followed or len(about.turns) > 1 or about.parent is not None
                if goes_on or self._shown.get(about.index, (0, 0))[0]:
                    self._describe(line, AUXILIARY)
        theirs = {name.removeprefix("refused_"): count for name, count in self.counts.items() if name.startswith("refused_")}
        refused = {name: count for name, count in theirs.items() if name not in ("failed", "ended")}
        if refused:
            text = ", ".join(f"{name} {count}" for name, count in sorted(refused.items()))
            self.episode.add_failure(
                Failure(stage="gateway", blame=Blame.POLICY, kind="requests_refused", message=text, turn=self.episode.turn_count)
            )

    def _work(self, roots: Sequence[LiveTrajectory], followed: set[int]) -> set[int]:
        """The contexts without a parent that belong to the main agent: those with tools or more than one turn.

        If there are none, the program requests each turn in a separate context, and the contexts that share a system message are the work.
        """
        work = {line.index for line in roots if self._shown[line.index][0] or len(line.turns) > 1 or line.index in followed}
        last = [node for line in roots if (node := self._graph.last(line)) is not None]
        return work or {one.line.index for one in last for other in last if one is not other and alike(one, other.system, other.lengths)}

    def last_words(self) -> str | None:
        """What the main agent said last; None: nothing."""
        turns = [
            node for line in self.episode.trajectories if (node := self._graph.last(line)) is not None and self._names[line.index] == MAIN
        ]
        newest = max(turns, key=lambda node: self._answered_at[node.line.index], default=None)
        return None if newest is None else newest.text


def _too_long() -> RequestError:
    """Uses the wording of Anthropic's and OpenAI's errors, by which programs decide to shorten their conversation."""
    text = "prompt is too long: this model's maximum context length is exceeded by the conversation."
    return RequestError("context_length", text, param="messages")


def _failed(task: asyncio.Task[Answer]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def _shown(asked: CompletionRequest) -> list[Message]:
    return [*(Message(role="system", content=one) for one in asked.system), *(one.message for one in asked.messages)]


def _with_withheld(new: tuple[RequestMessage, ...], before: SampledTurn) -> tuple[RequestMessage, ...]:
    """The messages after a turn, with a result for each call that the client did not receive, in the order of the calls."""
    results = [one for one in new if one.message.role == "tool"]
    if not (results and before.withheld):
        return new
    results += [said("tool", reason, call_id=name, ok=False) for name, reason in before.withheld.items()]
    order = {name: at for at, name in enumerate(before.all_ids)}
    results.sort(key=lambda one: order.get(one.call_id, len(order)))
    return (*results, *(one for one in new if one.message.role != "tool"))


def _results(new: Sequence[RequestMessage], before: SampledTurn) -> list[ToolResult]:
    """What the program showed after a turn: the results of its calls, then all else."""
    calls = before.line.turns[before.turn].message.tool_calls
    names = dict(zip(before.all_ids, (one.name for one in calls), strict=True))
    tools = [one for one in new if one.message.role == "tool"]
    found = [ToolResult(name=names.get(one.call_id, "")[:64], output=one.message.content, ok=one.ok) for one in tools]
    others = [one.message for one in new if one.message.role != "tool"]
    return [*found, *(ToolResult(name=one.role[:64], output=one.content, ok=True) for one in others)]
