"""The context of an agent: its prompt, recorded turns, tool results, and a new context when the old one cannot be extended.

Tool results and user messages extend a context by a delta. If the chat template rewrites the old turns instead, the trajectory ends with
the stop reason `restarted`, and the conversation continues in a new trajectory, whose parent is the old one. Every sampled token stays in
the trajectory in which it was sampled, and is trained there.

Compaction continues a nearly full context from a summary. The request for the summary is appended to the last tool output, because a chat
template might reject a separate message. The summary is sampled in its own trajectory, which starts with the context so far. A summary is
rejected if it is empty, was cut off or calls a tool. The next attempt at a summary then starts from the same context. After a summary, the
agent continues in a new trajectory, which starts with the agent's first prompt and has the summary appended to the prompt's last message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.base import user_code
from agentrl.base.media import InvalidImage
from agentrl.errors import EnvironmentFault, InfrastructureError, PluginError, PolicyFault, TaskError, UserError
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Completion, Message, Observation, Parent, Task, ToolResult
from agentrl.records.chat import user_message
from agentrl.records.images import MARK

RESTARTED = "restarted"
"""The stop reason of a trajectory whose conversation continues in a different trajectory."""
SUMMARY = "summary"
"""The value of `Trajectory.agent` for a summary."""
HEAD = "Your summary of the work so far:"
SUMMARY_REQUEST = (
    "This conversation is nearly full. Sum up what you know and what is left to do, without a tool call."
    " You continue from that summary alone."
)
MAX_SUMMARY_TOKENS = 256
"""Maximum tokens in a summary. A summary may also use at most half of the room that is left when compaction is due."""
SUMMARY_ATTEMPTS = 2
"""Maximum attempts at a summary before the agent ends with `token_limit`. There is only one retry, because the prompt of each attempt is a
nearly full context."""
_WITHHELD = "error: not shown, because there is no room for it"


def main_prompt(trajectory: LiveTrajectory, task: Task, instructions: str | None) -> tuple[Message, ...]:
    """Returns the main agent's prompt for a task, and records it if `instructions` is set."""
    prompt = with_instructions(task.prompt, instructions)
    if instructions is not None:
        trajectory.describe("main", prompt)
    return prompt


async def refer_prompt(chat: ChatFormat, trajectory: LiveTrajectory, prompt: tuple[Message, ...], *, trusted: bool) -> tuple[Message, ...]:
    """Stores the images in a prompt, and returns the prompt with references to them. Records the prompt if it has images. Raises
    `TaskError` if an image is invalid or, for a trusted prompt with images, the chat format rejects the prompt."""
    try:
        stored = tuple([replace(message, content=await chat.refer(message.content)) for message in prompt])
    except InvalidImage as error:
        raise TaskError(f"the images of a prompt are invalid: {error}", fix="pass a PNG or JPEG file to image_text") from error
    if stored != prompt:
        trajectory.describe(trajectory.agent, stored)
        try:
            if trusted:  # an untrusted prompt contains an observation, which is escaped later
                chat.opening(stored, ())
        except UserError as error:  # such as one of the model's image tokens in the text
            raise TaskError(f"the chat template rejects a prompt with images: {error.message}", fix=error.fix) from error
    return stored


async def refer_observation(chat: ChatFormat, episode: LiveEpisode, observation: Observation) -> Observation:
    """Stores the images in an observation, and returns the observation with references to them.

    Raises `EnvironmentFault` if an image is invalid. If the policy has written an image reference in this episode, the observation is
    returned unchanged instead: the environment may repeat the policy's text, and the policy must not be able to end its episode with a
    fault.
    """
    try:
        return observation if MARK not in observation.text else replace(observation, text=await chat.refer(observation.text))
    except InvalidImage as error:
        turns = (turn for trajectory in episode.trajectories for turn in trajectory.turns)
        if any(MARK in f"{turn.message.content}{turn.message.tool_calls}" for turn in turns):
            return observation
        ref = getattr(episode.task.environment, "ref", "")
        raise EnvironmentFault(f"{ref}: the images of an observation are invalid: {error}") from error


def with_instructions(prompt: Sequence[Message], instructions: str | None) -> tuple[Message, ...]:
    """Returns the prompt with `instructions` in place of its system messages; None changes nothing."""
    if instructions is None:
        return tuple(prompt)
    return (Message(role="system", content=instructions), *(message for message in prompt if message.role != "system"))


@contextmanager
def reading_policy_text(what: str) -> Iterator[None]:
    """Raises `PolicyFault` in place of an exception that the policy's text causes. The tokens stay recorded, and the episode is scored.

    A template, tokenizer or parser may raise any exception on such text. Faults that already assign the blame are raised unchanged.

    Args:
        what: completes the error message "the policy's text cannot be ...".
    """
    with user_code.fault_boundary() as fault:
        yield
    if (error := fault.error) is not None:
        if user_code.first_cause(error, InfrastructureError, PluginError, TaskError, PolicyFault) is not None:
            raise error
        user_code.log_unexpected(f"the policy's text cannot be {what}", error)
        raise PolicyFault(f"the policy's text cannot be {what}: {user_code.describe_error(error, 1000)}") from error


def read_turn(
    chat: ChatFormat, trajectory: LiveTrajectory, completion: Completion, schemas: Sequence[Mapping[str, Any]] = ()
) -> ParsedCompletion:
    """Parses a completion and adds it to its trajectory as a turn. If the completion is unreadable, adds a turn with an empty message and
    raises `PolicyFault`."""
    turns = len(trajectory.turns)
    try:
        with reading_policy_text("read"):
            parsed = chat.parse(completion.token_ids, schemas)
            trajectory.add_turn(completion, parsed.message)
            return parsed
    except PolicyFault:
        if len(trajectory.turns) == turns:
            trajectory.add_turn(completion, Message(role="assistant", content=""))
        raise


def current_trajectory(episode: LiveEpisode) -> LiveTrajectory:
    """Returns the trajectory in which the main agent continues. In a resumed episode, no sub-agent is running."""
    main = episode.trajectories[0].agent
    return next(trajectory for trajectory in reversed(episode.trajectories) if trajectory.agent == main and not trajectory.stop_reason)


def continue_context(
    chat: ChatFormat,
    episode: LiveEpisode,
    trajectory: LiveTrajectory,
    after: ParsedCompletion,
    *,
    prompt: Sequence[Message],
    schemas: Sequence[Mapping[str, Any]],
    agent: str = "main",
) -> LiveTrajectory:
    """Adds the recorded results of the last turn, or the user message after it, to the agent's context.

    Returns the trajectory in which the agent's next turn is sampled: `trajectory`, or a new one if the template rewrites its turns. If the
    turn limit is reached, a context that cannot be extended stays unchanged. Raises `UserError` if the template rejects the conversation.

    Args:
        after: the last turn of `trajectory`.
        prompt: the agent's first prompt.
    """
    results = trajectory.turns[-1].tool_results
    if not chat.answer_rewrite_reason(results, after):
        trajectory.add_prompt(chat.answer_delta(results, after))
        return trajectory
    if trajectory.limit() == "turn_limit":  # no turn follows
        return trajectory
    conversation = _since_prompt(episode, trajectory)
    try:
        full = chat.render_conversation(prompt, conversation, schemas)
    except UserError:  # some templates reject a result without a call, such as the result of a malformed call
        full = chat.render_conversation(prompt, _with_user_results(conversation), schemas)
    context = [token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)]
    if list(full[: len(context)]) == context:  # this time the template only appends
        trajectory.add_prompt(full[len(context) :])
        return trajectory
    trajectory.end(RESTARTED)
    restarted = episode.open(agent, parent=Parent(trajectory=trajectory.index, turn=len(trajectory.turns) - 1))
    restarted.add_prompt(full)
    return restarted


def _since_prompt(episode: LiveEpisode, trajectory: LiveTrajectory) -> list[Message]:
    """Returns the messages since the prompt, in this trajectory and the trajectories that it was restarted from."""
    chain = [trajectory]
    while (parent := chain[-1].parent) is not None and episode.trajectories[parent.trajectory].stop_reason == RESTARTED:
        chain.append(episode.trajectories[parent.trajectory])
    messages: list[Message] = []
    for turn in (turn for part in reversed(chain) for turn in part.turns):
        role = "tool" if user_message(turn.message, turn.tool_results) is None else "user"
        messages += (turn.message, *(Message(role=role, content=result.output) for result in turn.tool_results))
    return messages


def _with_user_results(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages, with each result that belongs to no call changed to a user message."""
    calls, changed = 0, []
    for message in messages:
        is_result = message.role == "tool"
        changed.append(replace(message, role="user") if is_result and calls <= 0 else message)
        calls = calls - 1 if is_result else len(message.tool_calls)
    return changed


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAttempt:
    """One attempt at a summary."""

    trajectory: LiveTrajectory
    summary: str | None = None  # None if it was rejected or not sampled
    limit: str = ""  # the limit that prevented sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Compactor:
    """Compacts contexts as the recipe configures, for one chat format."""

    chat: ChatFormat
    share: float  # fraction of the room at which a context is summarized

    def due(self, tokens: int, room: int) -> bool:
        """Returns whether to summarize a context of `tokens` tokens that may grow to `room` tokens."""
        return tokens >= self.share * room

    def summary_tokens(self, room: int) -> int:
        """Returns the maximum number of tokens in a summary of a context that may have `room` tokens. A summary that reaches this maximum
        is rejected."""
        return max(1, min(MAX_SUMMARY_TOKENS, int((1 - self.share) * room / 2)))

    def with_summary_request(
        self, after: ParsedCompletion, results: Sequence[ToolResult], *, used: int, room: int
    ) -> tuple[tuple[ToolResult, ...], tuple[int, ...]]:
        """Returns the results of the turn `after` with the summary request appended, and the token ids that show these results.

        Outputs are withheld if they would leave no room for a summary after the `used` tokens of the context.
        """
        requested = self._with_request(results)
        delta = self.chat.tool_delta([result.output for result in requested], after)
        if used + len(delta) + self.summary_tokens(room) <= room:
            return requested, delta
        requested = self._with_request([replace(result, output=_WITHHELD, ok=False) for result in results])
        return requested, self.chat.tool_delta([result.output for result in requested], after)

    def _with_request(self, results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        last = results[-1]
        return (*results[:-1], replace(last, output=f"{last.output}\n\n{SUMMARY_REQUEST}"))

    async def attempt(self, episode: LiveEpisode, trajectory: LiveTrajectory, delta: Sequence[int], *, room: int) -> SummaryAttempt:
        """Samples a summary of `trajectory` and the `delta` after its last turn, for a context that may have `room` tokens. Raises
        `PolicyFault` if the summary is unreadable."""
        parent = Parent(trajectory=trajectory.index, turn=len(trajectory.turns) - 1)
        summary = episode.open(SUMMARY, parent=parent, prompt=(Message(role="user", content=SUMMARY_REQUEST),))
        summary.add_prompt([token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)])
        summary.add_prompt(delta)
        if limit := summary.limit():  # `Limits.all_tokens` counts this context twice
            summary.end(limit)
            return SummaryAttempt(trajectory=summary, limit=limit)
        most = self.summary_tokens(room)
        completion = await summary.sample(stop_token_ids=self.chat.stop_token_ids, max_tokens=most, thinking=self.chat.thinking)
        episode.stage = "chat"
        parsed = read_turn(self.chat, summary, completion)
        text = parsed.answer.strip()
        accepted = completion.finish_reason == "stop" and text and not parsed.message.tool_calls and not parsed.errors
        summary.end("summarized" if accepted else "rejected")
        return SummaryAttempt(trajectory=summary, summary=text if accepted else None)

    def prompt(self, prompt: Sequence[Message], summary: str) -> tuple[Message, ...]:
        """Returns the prompt from which the agent continues: its first prompt, with the summary appended."""
        last = prompt[-1]
        return (*prompt[:-1], replace(last, content=f"{last.content}\n\n{HEAD}\n{self.chat.escape_text(summary)}"))
