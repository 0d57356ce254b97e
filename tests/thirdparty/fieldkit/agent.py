"""An agent that wraps the shipped one and records how its episodes ended."""

from __future__ import annotations

from pathlib import Path

from agentrl.agent import ChatFormat, TurnLoop
from agentrl.protocols import LiveEpisode


class JournalAgent:
    def __init__(self, *, chat: ChatFormat, journal: str) -> None:
        self._turns, self._journal = TurnLoop(chat=chat), Path(journal)

    async def act(self, episode: LiveEpisode) -> str:
        reason = await self._turns.act(episode)
        with self._journal.open("a") as file:
            file.write(f"{episode.task.id} {reason}\n")
        return reason
