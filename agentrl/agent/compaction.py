"""Going on from a summary: past a limit of its context an agent is asked what it has found, and begins again with its own answer.

The request stands after the last tool output, so that it needs no message of its own that a chat template might not take there. The
summary is sampled in a trajectory of its own, which begins with the context so far: one that is rejected, because it is empty, was cut
off or calls a tool, is nobody's context, and the next attempt is made from the same place. The agent goes on in a new trajectory,
whose prompt is the first one with the summary after its last message.
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
"""`Trajectory.agent` where a summary was sampled."""

HEAD = "Your summary of the work so far:"
_WITHHELD = "error: not shown, for there is no room left for it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One attempt at a summary."""

    line: LiveTrajectory
    tokens: int = 0  # sampled
    summary: str | None = None  # None: it was rejected, or never sampled
    limit: str = ""  # why none could be sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Compactor:
    """What a recipe says of compaction, in the tokens of one chat."""

    chat: ChatFormat
    config: CompactionConfig

    def due(self, tokens: int, room: int) -> bool:
        """Whether a context of so many tokens is to be summed up; a whole one may have `room`."""
        return tokens >= (self.config.share * room if self.config.tokens is None else self.config.tokens)

    def asking(
        self, after: ParsedCompletion, results: Sequence[ToolResult], *, used: int, room: int
    ) -> tuple[tuple[ToolResult, ...], tuple[int, ...]]:
        """The results of the turn `after` with the request after the last of them, and their tokens.

        Outputs are withheld where they would leave no room for a summary after the `used` tokens of the context.
        """
        asked = self._with_request(results)
        delta = self.chat.tool_delta([result.output for result in asked], after)
        if used + len(delta) + self.config.summary_tokens <= room:
            return asked, delta
        asked = self._with_request([replace(result, output=_WITHHELD, ok=False) for result in results])
        return asked, self.chat.tool_delta([result.output for result in asked], after)

    def _with_request(self, results: Sequence[ToolResult]) -> tuple[ToolResult, ...]:
        last = results[-1]
        return (*results[:-1], replace(last, output=f"{last.output}\n\n{self.config.request}"))

    async def attempt(self, episode: LiveEpisode, line: LiveTrajectory, delta: Sequence[int], allowance: int | None) -> Tried:
        """Samples a summary of `line`, whose last turn is followed by `delta`, of at most `allowance` tokens (None: as the recipe says)."""
        parent = Parent(trajectory=line.index, turn=len(line.turns) - 1)
        asked = episode.open(SUMMARY, parent=parent, prompt=(Message(role="user", content=self.config.request),))
        asked.add_prompt([token for turn in line.turns for token in (*turn.prompt_ids, *turn.completion_ids)])
        asked.add_prompt(delta)
        if limit := asked.limit():  # the context counts twice from here on, which `Limits.all_tokens` may have no room for
            asked.end(limit)
            return Tried(line=asked, limit=limit)
        most = self.config.summary_tokens if allowance is None else min(allowance, self.config.summary_tokens)
        completion = await asked.sample(stop_token_ids=self.chat.stop_token_ids, max_tokens=most, thinking=self.chat.thinking)
        episode.stage = "chat"
        parsed = read_turn(self.chat, asked, completion)
        words = parsed.answer.strip()  # without what was thought
        taken = completion.finish_reason == "stop" and words and not parsed.message.tool_calls and not parsed.errors
        asked.end("summarized" if taken else "rejected")
        return Tried(line=asked, tokens=len(completion.token_ids), summary=words if taken else None)

    def prompt(self, prompt: Sequence[Message], summary: str) -> tuple[Message, ...]:
        """What the agent goes on from: what it was told, and its summary after the last message."""
        last = prompt[-1]
        return (*prompt[:-1], replace(last, content=f"{last.content}\n\n{HEAD}\n{self.chat.escape_text(summary)}"))
