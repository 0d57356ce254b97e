"""Games with roles, well and badly behaved, and functions that play them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from agentrl.environment import Game, Observation, PolicyFault


class Match(Game):
    """Both roles choose at once; the matcher wins if the coins agree. A third role is never called."""

    roles = ("matcher", "other", "idle")
    actions = ("heads", "tails")

    def reset(self, seed: int) -> Any:
        self.round = 0
        return {"matcher": "Choose.", "other": "Choose."}

    def step(self, actions: dict[str, str]) -> Any:
        self.round += 1
        gain = 1.0 if actions["matcher"] == actions["other"] else -1.0
        observations = {role: f"round {self.round}: {actions}" for role in ("matcher", "other")}
        return observations, {"matcher": gain, "other": -gain, "idle": 0.5}, self.round == 2


class Echo(Game):
    """The second role sees a long observation after the first role's action. Any text is allowed."""

    roles = ("talker", "echo")

    def reset(self, seed: int) -> Any:
        self.moves = 0
        return {"talker": "Speak."}

    def step(self, actions: dict[str, str]) -> Any:
        self.moves += 1
        return ({"echo": "x" * 200} if self.moves == 1 else {"talker": "Speak."}), {}, self.moves == 2


class Faulty(Match):
    """Fails in the way that its option selects."""

    games: ClassVar = 0

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def reset(self, seed: int) -> Any:
        first = super().reset(seed)
        return {"no role": {}, "unknown": {"judge": "x"}, "text": "x", "twice": {"matcher": Observation(text="x", actions=("a", "a"))}}.get(
            self.fault, first
        )

    def step(self, actions: dict[str, str]) -> Any:
        if self.fault == "forbids":
            raise PolicyFault("not now")
        if self.fault == "shared":
            Faulty.games += 1
            return {role: str(Faulty.games) for role in actions}, {}, Faulty.games % 7 == 0
        observations, rewards, _ = super().step(actions)
        results = {
            "ends silently": ({}, rewards, False),
            "reward of an unknown role": (observations, {"judge": 1.0}, True),
            "nan": (observations, {"matcher": float("nan")}, True),
            "pair": (observations, rewards),
        }
        return results[self.fault]


def heads(role: str, observations: Sequence[str], actions: Sequence[str]) -> str:
    return "heads"


async def pass_always(role: str, observations: Sequence[str], actions: Sequence[str]) -> str:
    await asyncio.sleep(0)
    return "p"


def raises(role: str, observations: Sequence[str], actions: Sequence[str]) -> str:
    raise ValueError("no idea")


def nonsense(role: str, observations: Sequence[str], actions: Sequence[str]) -> str:
    return "sideways"
