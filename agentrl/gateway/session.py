"""One session: the requests from one external program in one episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.base import loop_lag, user_code
from agentrl.errors import InfrastructureError, PolicyFault, TaskError
from agentrl.gateway.constraint import constraint
from agentrl.gateway.graph import ContextMatch, ConversationGraph, SampledTurn
from agentrl.gateway.request import Answer, AnswerCall, CompletionRequest, RequestError
from agentrl.gateway.tokens import ConversationTokens, NotAppended, Parsed, stopped, until
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import CUT, Blame, Completion, Failure, Message

MAX_AT_ONCE = 64
"""Maximum number of concurrent requests in one session."""
CHARS_PER_TOKEN = 64
"""Maximum characters in a conversation per available token. A longer conversation is rejected without being tokenized."""
MAX_REFUSED = 1000
"""Maximum number of rejected requests. One more ends the session."""
TIME_UP = "wall_limit"
"""The value of `LiveTrajectory.limit` when an episode's time is used up."""
MAIN, SUB_AGENT, AUXILIARY = "main", "sub-agent", "auxiliary"


@dataclass(slots=True, eq=False)
class _Completion:
    """A completion that is being sampled or was sampled, and whether a client has received it."""

    task: asyncio.Task[Answer]
    waiting: int = 1  # connected clients
    delivered: bool = False

    @property
    def failed(self) -> bool:
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


@dataclass(slots=True, eq=False)
class Session:
    """Answers requests with completions from the episode's policy, and records every sampled token in one turn of the episode's tree.

    `counts` contains, among others, the numbers of `answered`, `branch`, `restart`, `sub_agent`, `replayed` and `refused_...` requests.
    """

    episode: LiveEpisode
    tokens: ConversationTokens
    models: tuple[str, ...]
    on_busy: Callable[[bool], None] = lambda busy: None  # called with True when sampling starts, and with False when it ends
    counts: Counter[str] = field(default_factory=Counter)
    fault: BaseException | None = None  # why the session cannot sample any more, unless the program caused this
    limit: str = ""  # "turn_limit" or "wall_limit" once it is reached; "refused" after too many rejected requests
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set with `fault` or `limit`
    ended: bool = False
    stored_answers: dict[str, Any] = field(default_factory=dict)  # id -> stored answer
    stalls: loop_lag.StallCount | None = field(default_factory=loop_lag.current_stalls)  # event-loop stalls of the episode
    _refused: int = 0
    _graph: ConversationGraph = field(default_factory=ConversationGraph)
    _completions: dict[tuple[object, ...], _Completion] = field(default_factory=dict)
    _tasks: set[asyncio.Task[Answer]] = field(default_factory=set)
    _busy: set[int] = field(default_factory=set)  # trajectories in which a turn is being sampled
    _shown: dict[int, tuple[int, int]] = field(default_factory=dict)  # trajectory -> numbers of tools and messages in its first request
    _names: dict[int, str] = field(default_factory=dict)  # trajectory -> name
    _asides: set[int] = field(default_factory=set)  # trajectories that may be auxiliary
    _answered_at: dict[int, float] = field(default_factory=dict)

    async def complete(self, request: CompletionRequest, *, disconnected: asyncio.Event | None = None) -> tuple[Answer, Callable[[], None]]:
        """Returns an answer, and a function to call once the client has received it. Raises `RequestError` if the session cannot answer.

        A repeated request receives the earlier answer if the client declares a retry, or if no client has received that answer or is
        waiting for it. A new answer is sampled in all other cases, and if sampling the earlier answer failed.

        Args:
            disconnected: set when the client disconnects, after which the completion is still recorded.
        """
        self._check(request)
        request = self._graph.rejoin(request)
        match = self._graph.locate(request)
        shape = json.dumps(request.shape, sort_keys=True)
        options = (request.max_tokens, request.calls, request.single, request.strict, request.stop, request.forced, shape)
        key = (match.end.digest, frozenset(match.context.system), match.context.tools, request.after, *options)
        completion = self._completions.get(key)
        if completion is not None and (request.retry or not (completion.waiting or completion.delivered)) and not completion.failed:
            self.counts["replayed"] += 1
            completion.waiting += 1
        else:
            completion = self._completions[key] = self._start(request, match)
        return await self._wait(completion, disconnected)

    def count(self, request: CompletionRequest) -> int:
        """Returns the number of prompt tokens in a request. Raises `RequestError` if it is invalid or `MAX_REFUSED` were counted before."""
        self._check(request)
        self.counts["counted"] += 1
        if self.counts["counted"] > MAX_REFUSED:
            raise RequestError("too_many", f"The tokens of at most {MAX_REFUSED} requests of a session are counted.")
        self._check_length(request)
        request = self._graph.rejoin(request)
        before, new = self._graph.continued_turn(request)
        with contextlib.suppress(NotAppended):
            if before is not None:
                more = self.tokens.delta(before.with_withheld(new), before.parsed, before.all_ids, ended=before.ended)
                return before.tokens + len(more)
        return len(self.tokens.opening(_messages(request), request.tools))

    def _check(self, request: CompletionRequest) -> None:
        """Raises `RequestError` if this session cannot answer a request."""
        if self.ended or self.fault is not None or self.limit == "refused":
            raise RequestError("ended", "This session has ended.")
        if request.model not in self.models:
            raise RequestError(
                "unknown_model", f"The model {request.model[:100]!a} does not exist or you do not have access to it.", param="model"
            )
        if request.after and request.after not in self.stored_answers:
            raise RequestError("not_found", f"Previous response with id {request.after[:100]!a} not found.", param="previous_response_id")
        if not request.messages and not request.after:
            raise RequestError("invalid", "messages must contain a message that is not a system message.", param="messages")

    def _check_length(self, request: CompletionRequest) -> None:
        if request.chars > CHARS_PER_TOKEN * self.episode.task.limits.episode_tokens:
            raise _too_long()

    def refused(self, kind: str) -> None:
        """Counts a rejected request. Ends the session after more than `MAX_REFUSED`."""
        self.counts[f"refused_{kind}"] += 1
        self._refused += 1
        if self._refused > MAX_REFUSED and not self.limit:
            self._reach("refused")

    def _reach(self, limit: str) -> None:
        self.limit = self.limit or limit
        self.over.set()

    def _start(self, request: CompletionRequest, match: ContextMatch) -> _Completion:
        """Adds the request to the tree at once, so that later requests see it, and starts sampling. Raises `RequestError` at a limit."""
        if len(self._busy) >= MAX_AT_ONCE:
            raise RequestError("too_many", f"{MAX_AT_ONCE} requests of this session are in progress; wait for one of them.")
        if self.episode.turn_count + len(self._busy) >= self.episode.task.limits.turns:
            self._reach("turn_limit")
            raise RequestError("turn_limit", f"All {self.episode.task.limits.turns} turns of this session are used up.")
        self._check_length(request)
        grammar = constraint(request, self.tokens.chat)
        trajectory, match, prompt = self._trajectory(request, match)
        trajectory.add_prompt(prompt)
        try:
            limit = trajectory.limit()
        except TaskError as error:
            if not self._busy:
                self.fail(error)
                raise RequestError("context_length", error.message) from None
            limit = "token_limit"  # the request would fit without those in progress
        if limit == TIME_UP:
            raise self._time_is_up()
        if limit:
            trajectory.end(limit)
            if not trajectory.turns:
                trajectory.describe(trajectory.agent, ())  # do not store prompts of rejected conversations
            raise _too_long()
        self._busy.add(trajectory.index)
        if len(self._busy) == 1:
            self.on_busy(True)
        sampling = self._sample(request, match, trajectory, len(prompt), grammar)
        task = asyncio.create_task(sampling, name=f"session {self.episode.id}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return _Completion(task)

    def _done(self, task: asyncio.Task[Answer]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved: all clients may have disconnected

    def _trajectory(self, request: CompletionRequest, match: ContextMatch) -> tuple[LiveTrajectory, ContextMatch, tuple[int, ...]]:
        """Returns the trajectory for the request's turn, the updated match, and the prompt tokens to add to the trajectory."""
        before = match.before
        if before is not None:
            try:
                match = replace(match, new=before.with_withheld(match.new))
                new = self.tokens.delta(match.new, before.parsed, before.all_ids, ended=before.ended)
                return self._continued(match, before, new)
            except NotAppended:
                match = replace(match, kind="restart", before=None, new=request.messages, system_changed=False)
        messages = _messages(request)
        if request.after and match.kind != "root":
            raise RequestError("invalid", "The conversation cannot continue from that response with different tools or instructions.")
        prompt = self.tokens.opening(messages, request.tools)
        if match.kind == "root" and not self._shown:
            trajectory = self.episode.trajectories[0]
            self._describe(trajectory, MAIN, messages)
        else:
            trajectory = self._open(match, messages)
            if match.aside:
                self._asides.add(trajectory.index)
        if match.answers is not None:
            self._graph.answered(match.answers)
        if match.kind != "root":
            self.counts[match.kind] += 1
        self._shown[trajectory.index] = (len(request.tools), len(messages))
        return trajectory, match, prompt

    def _continued(
        self, match: ContextMatch, before: SampledTurn, new: tuple[int, ...]
    ) -> tuple[LiveTrajectory, ContextMatch, tuple[int, ...]]:
        """Returns the trajectory of `before` if that trajectory can continue and ends with `before`; otherwise a new branch, in which the
        context tokens are not trained. Also returns the match and the prompt tokens."""
        self._graph.answered(before)
        if match.system_changed:
            self.counts["system_kept"] += 1
        trajectory = before.trajectory
        if before.turn == len(trajectory.turns) - 1 and trajectory.index not in self._busy and not trajectory.stop_reason:
            seconds = max(0.0, time.monotonic() - self._answered_at.get(trajectory.index, time.monotonic()))
            trajectory.add_results(before.results(match.new), wall_s=seconds)
            return trajectory, match, new
        self.counts["branch"] += 1
        context = [token for turn in trajectory.turns[: before.turn + 1] for token in (*turn.prompt_ids, *turn.completion_ids)]
        branch = self._open(match, [message.message for message in match.new])
        self._shown[branch.index] = self._shown[trajectory.index]
        return branch, match, (*context, *new)

    def _open(self, match: ContextMatch, prompt: Sequence[Message]) -> LiveTrajectory:
        name = SUB_AGENT if match.kind == "sub_agent" else MAIN if match.parent is None else self._names[match.parent.trajectory]
        trajectory = self.episode.open(name, parent=match.parent, prompt=prompt)
        self._names[trajectory.index] = name
        return trajectory

    def _describe(self, trajectory: LiveTrajectory, name: str, prompt: Sequence[Message] | None = None) -> None:
        trajectory.describe(name, prompt)
        self._names[trajectory.index] = name

    async def _sample(
        self, request: CompletionRequest, match: ContextMatch, trajectory: LiveTrajectory, new_tokens: int, grammar: str
    ) -> Answer:
        try:
            if limit := trajectory.limit():  # another turn has used up the rest in the meantime
                if limit == TIME_UP:
                    raise self._time_is_up()
                trajectory.end(limit)
                raise _too_long()
            completion = await trajectory.sample(
                stop_token_ids=self.tokens.chat.stop_token_ids, max_tokens=request.max_tokens, stop=request.stop, constraint=grammar
            )
            parsed, stop = self._read(trajectory, completion, request)
            if completion.finish_reason == CUT:
                self._time_is_up()
        except RequestError:
            raise
        except Exception as error:
            self.fail(error)
            raise RequestError("failed", "The policy is not available at the moment.") from error
        finally:
            self._busy.discard(trajectory.index)
            if not self._busy:
                self.on_busy(False)
        self.counts["answered"] += 1
        self.counts["malformed_call"] += bool(parsed.errors)
        return self._record(request, match, trajectory, new_tokens, parsed, stop)

    def _read(self, trajectory: LiveTrajectory, completion: Completion, request: CompletionRequest) -> tuple[Parsed, str]:
        """Parses a completion and adds it as a turn. Returns the parsed completion and the stop sequence that ends it, or "".

        If the completion is unreadable, adds a turn with an empty message and raises `PolicyFault`.
        """
        chat, stop = self.tokens.chat, ""
        with user_code.fault_boundary() as fault:  # a tokenizer may raise anything
            count, stop = self.tokens.up_to(completion.token_ids, request.stop)
            completion = stopped(completion, count) if stop else completion
            calls = request.calls and bool(request.known_tools)
            parsed = chat.parse(completion.token_ids, request.known_tools, calls=calls)
            if parsed.message.tool_calls and len(self._withheld(parsed, request)) == len(parsed.message.tool_calls):
                parsed = chat.parse(completion.token_ids, request.known_tools, calls=False)
        if (error := fault.error) is not None:
            user_code.log_unexpected("the policy's text cannot be read", error)
            trajectory.add_turn(completion, Message(role="assistant", content=""))
            raise PolicyFault(f"the policy's text cannot be read: {user_code.describe_error(error, 1000)}") from error
        trajectory.add_turn(completion, parsed.message)
        return parsed, stop

    def _withheld(self, parsed: Parsed, request: CompletionRequest) -> dict[int, str]:
        """Returns the texts shown in place of results, for the calls that the client does not receive: index of the call -> text."""
        schemas = {tool["function"]["name"]: tool for tool in request.known_tools if tool["function"]["name"] in request.strict}
        withheld: dict[int, str] = {}
        for number, call in enumerate(parsed.message.tool_calls):
            if call.name in schemas and (errors := self.tokens.chat.argument_errors(schemas[call.name], call.arguments)):
                withheld[number] = f"error: this call was not run: {errors}"
            elif request.single and len(withheld) < number:
                withheld[number] = "error: this call was not run: only one tool call at a time"
        return withheld

    def _record(
        self, request: CompletionRequest, match: ContextMatch, trajectory: LiveTrajectory, new_tokens: int, parsed: Parsed, stop: str
    ) -> Answer:
        """Adds the turn to the graph and returns the answer."""
        message, ids = parsed.message, trajectory.turns[-1].completion_ids
        withheld = self._withheld(parsed, request)
        all_ids = tuple(f"call_{secrets.token_hex(12)}" for _ in message.tool_calls)
        pairs = zip(all_ids, message.tool_calls, strict=True)
        calls = tuple(AnswerCall(id=name, call=call) for at, (name, call) in enumerate(pairs) if at not in withheld)
        known = {tool["function"]["name"] for tool in request.known_tools}
        self.counts["unknown_tool_called"] += sum(call.name not in known for call in message.tool_calls)
        self.counts["withheld_call"] += len(withheld)
        answer_id, text = secrets.token_hex(12), until(parsed.answer, request.stop)[0].rstrip()
        last = self._graph.last(trajectory)
        prompt_tokens = (last.tokens if last is not None else 0) + new_tokens
        self._graph.add(
            SampledTurn(
                trajectory=trajectory,
                turn=len(trajectory.turns) - 1,
                end=match.end.said(text, [(called.call.name, called.call.arguments) for called in calls]),
                context=match.context,
                messages=len(request.messages),
                all_ids=all_ids,
                withheld={all_ids[at]: reason for at, reason in withheld.items()},
                tokens=prompt_tokens + len(ids),
                ended=bool(ids) and ids[-1] in self.tokens.chat.stop_token_ids,
                answer_id=answer_id,
                parsed=parsed,
                text=text,
            )
        )
        self._answered_at[trajectory.index] = time.monotonic()
        reasoning = message.content.removesuffix(parsed.answer)
        return Answer(
            id=answer_id,
            model=request.model,
            text=text,
            reasoning=reasoning.replace("<think>", "").replace("</think>", "").strip(),
            calls=calls,
            cut=trajectory.turns[-1].finish_reason != "stop",
            stop=stop,
            prompt_tokens=prompt_tokens,
            completion_tokens=len(ids),
            created=int(time.time()),
        )

    async def _wait(self, completion: _Completion, disconnected: asyncio.Event | None) -> tuple[Answer, Callable[[], None]]:
        def delivered() -> None:
            completion.delivered = True

        left = asyncio.create_task(disconnected.wait()) if disconnected is not None else None
        waits = True
        try:
            await asyncio.wait({completion.task} | ({left} if left else set()), return_when=asyncio.FIRST_COMPLETED)
            if not completion.task.done():  # the client may have closed only its sending side
                self.counts["client_gone"] += 1
                completion.waiting, waits = completion.waiting - 1, False
                await asyncio.wait({completion.task})
            if completion.task.cancelled():
                raise RequestError("ended", "This session has ended.")
            return completion.task.result(), delivered
        finally:
            completion.waiting -= waits
            if left is not None:
                left.cancel()

    def _time_is_up(self) -> RequestError:
        """Ends the session because the episode's time is used up, and returns the error for the client."""
        self._reach(TIME_UP)
        return RequestError("turn_limit", "The time of this session is used up.")

    def request_failed(self, error: Exception) -> None:
        """Ends the session because the gateway failed on a request.

        After the policy's first answer, the request contains the policy's text, so an error other than an `InfrastructureError` is a fault
        of the policy, and the episode is scored. Otherwise `error` is the session's fault.
        """
        if not self.counts["answered"] or isinstance(error, InfrastructureError):
            self.fail(error)
            return
        fault = PolicyFault(f"the gateway failed on a request that contains the policy's text: {user_code.describe_error(error, 1000)}")
        fault.__cause__ = error
        self.fail(fault)

    def fail(self, error: BaseException) -> None:
        """Ends the session with a fault that the program did not cause. Only the first fault counts."""
        self.fault = self.fault or error
        self.over.set()

    async def close(self) -> None:
        """Ends the session: cancels sampling, and sets the final names of trajectories. Idempotent."""
        if self.ended:
            return
        self.ended = True
        tasks = tuple(self._tasks)
        self.counts["dropped"] += len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._completions.clear()
        self._name_auxiliary()
        counts = {name.removeprefix("refused_"): count for name, count in self.counts.items() if name.startswith("refused_")}
        if text := ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if name not in ("failed", "ended")):
            self.episode.add_failure(
                Failure(stage="gateway", blame=Blame.POLICY, kind="requests_refused", message=text, turn=self.episode.turn_count)
            )

    def _name_auxiliary(self) -> None:
        """Marks contexts with one turn, such as titles and summaries, as `auxiliary` if no request continues them and they do not belong to
        the main agent.

        A context without a parent is auxiliary if its requests declare no tools, or if it quotes the main agent's context.
        """
        trajectories = self.episode.trajectories
        asides = {each.index for each in trajectories if each.index in self._asides and len(each.turns) == 1}
        parents = {each.parent.trajectory for each in trajectories if each.parent is not None}
        continued = {each.parent.trajectory for each in trajectories if each.parent is not None and each.index not in asides}
        work = self._work([each for each in trajectories if each.index in self._shown and each.parent is None], continued)
        for each in trajectories:
            if each.index in self._shown and each.parent is None and work:
                self._describe(each, MAIN if each.index in work else AUXILIARY)
            elif each.parent is not None and each.index in asides - parents:
                parent = trajectories[each.parent.trajectory]
                continues = parent.index in work | continued or len(parent.turns) > 1 or parent.parent is not None
                if continues or self._shown.get(parent.index, (0, 0))[0]:
                    self._describe(each, AUXILIARY)

    def _work(self, roots: Sequence[LiveTrajectory], continued: set[int]) -> set[int]:
        """Returns the contexts without a parent that belong to the main agent: the contexts with tools or with more than one turn.

        If there are no such contexts, returns those that share a system message: the program requests each turn in a separate context.
        """
        work = {root.index for root in roots if self._shown[root.index][0] or len(root.turns) > 1 or root.index in continued}
        last = [turn for root in roots if (turn := self._graph.last(root)) is not None]
        return work or {
            turn.trajectory.index for turn in last for other in last if turn is not other and turn.context.same_system(other.context)
        }

    def last_words(self) -> str | None:
        """Returns the text of the main agent's newest answer; None if there is no answer."""
        main = [each for each in self.episode.trajectories if each.index in self._names and self._names[each.index] == MAIN]
        turns = [turn for trajectory in main if (turn := self._graph.last(trajectory)) is not None]
        newest = max(turns, key=lambda turn: self._answered_at[turn.trajectory.index], default=None)
        return None if newest is None else newest.text


def _too_long() -> RequestError:
    """Returns an error with the wording of Anthropic's and OpenAI's errors, which causes programs to shorten their conversation."""
    text = "prompt is too long: this model's maximum context length is exceeded by the conversation."
    return RequestError("context_length", text, param="messages")


def _messages(request: CompletionRequest) -> list[Message]:
    return [*(Message(role="system", content=text) for text in request.system), *(message.message for message in request.messages)]
