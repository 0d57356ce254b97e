"""Continues an agent from a summary of its work when its context is nearly full.

The request for the summary follows the last tool output, so that it needs no message that a chat template might reject. The summary is
sampled in its own trajectory, which starts with the context so far. A summary that is empty, was cut off or calls a tool is rejected, and
the next attempt starts from the same context. The agent continues in a new trajectory: its first prompt, with the summary appended to the
last message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.agent.chat import ChatFormat, ParsedCompletion
from agentrl.agent.policytext import read_turn
from agentrl.config.rollout import CompactionConfig
from agentrl.protocols import LiveEpisode, LiveTrajectory
from agentrl.records import Message, Parent, ToolResult

SUMMARY = "summary"
"""`Trajectory.agent` of a summary."""

HEAD = "Your summary of the work so far:"
_WITHHELD = "error: not shown, because there is no room for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryAttempt:
    """One attempt at a summary."""

    trajectory: LiveTrajectory
    tokens: int = 0  # sampled
    summary: str | None = None  # None if it was rejected, or not sampled
    limit: str = ""  # the limit that prevented sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Compactor:
    """The recipe's compaction for one chat format."""

    chat: ChatFormat
    config: CompactionConfig

    def due(self, tokens: int, room: int) -> bool:
        """Returns whether to summarize a context of `tokens`, of at most `room`."""
        return tokens >= (self.config.share * room if self.config.tokens is None else self.config.tokens)

    def asking(
        self, after: ParsedCompletion, results: Sequence[ToolResult], *, used: int, room: int
    ) -> tuple[tuple[ToolResult, ...], tuple[int, ...]]:
        """Returns the results of the turn `after` with the request appended, and their tokens.

        Outputs are withheld if they would leave no room for a summary after the `used` tokens of the context.
        """
        requested = self._with_request(results)
        delta = self.chat.tool_delta([result.output for result in requested], after)
        if used + len(delta) + self.config.summary_tokens <= room:
            return requested, delta
        requested = self._with_request([replace(result, output=_WITHHELD, ok=False) for result in results])
        return requested, self.chat.tool_delta([result.output for result in requested], after)

    def _with_request(self, results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        last = results[-1]
        return (*results[:-1], replace(last, output=f"{last.output}\n\n{self.config.request}"))

    async def attempt(
        self, episode: LiveEpisode, trajectory: LiveTrajectory, delta: Sequence[int], allowance: int | None
    ) -> SummaryAttempt:
        """Samples a summary of `trajectory` and the `delta` after its last turn, of at most `allowance` tokens."""
        parent = Parent(trajectory=trajectory.index, turn=len(trajectory.turns) - 1)
        summary = episode.open(SUMMARY, parent=parent, prompt=(Message(role="user", content=self.config.request),))
        summary.add_prompt([token for turn in trajectory.turns for token in (*turn.prompt_ids, *turn.completion_ids)])
        summary.add_prompt(delta)
        if limit := summary.limit():  # `Limits.all_tokens` counts this context twice
            summary.end(limit)
            return SummaryAttempt(trajectory=summary, limit=limit)
        most = self.config.summary_tokens if allowance is None else min(allowance, self.config.summary_tokens)
        completion = await summary.sample(stop_token_ids=self.chat.stop_token_ids, max_tokens=most, thinking=self.chat.thinking)
        episode.stage = "chat"
        parsed = read_turn(self.chat, summary, completion)
        text = parsed.answer.strip()
        accepted = completion.finish_reason == "stop" and text and not parsed.message.tool_calls and not parsed.errors
        summary.end("summarized" if accepted else "rejected")
        return SummaryAttempt(trajectory=summary, tokens=len(completion.token_ids), summary=text if accepted else None)

    def prompt(self, prompt: Sequence[Message], summary: str) -> tuple[Message, ...]:
        """Returns the prompt from which the agent continues: its first prompt, with the summary appended."""
        last = prompt[-1]
        return (*prompt[:-1], replace(last, content=f"{last.content}\n\n{HEAD}\n{self.chat.escape_text(summary)}"))
