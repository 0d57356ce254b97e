"""Kuhn poker and tic-tac-toe as environments with two roles: `tasks.family="sandboxes.games:KuhnPoker"`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.environment import Game, Observation
from sandboxes.games.rules import CHANCE, Kuhn, State, TicTacToe

ROLES = ("first", "second")


class BoardGame(Game):
    """A game with rules from `sandboxes.games.rules`. One player acts in each turn."""

    roles = ROLES
    start: ClassVar[Any]

    def reset(self, seed: int) -> Mapping[str, Observation]:
        """Starts a game. The seed determines the game's random events."""
        draw, self.state = random.Random(seed), self.start
        while self.state.actor == CHANCE:
            chances, children = zip(*self.state.chances(), strict=True)
            self.state = draw.choices(children, chances)[0]
        return self._shown()

    def step(self, actions: dict[str, str]) -> tuple[Mapping[str, Observation], Mapping[str, float], bool]:
        """Applies the actions. At the end, each role receives what the other role pays."""
        state: State = self.state
        self.state = state.after(actions[ROLES[state.actor or 0]])
        if self.state.actor is not None:
            return self._shown(), {}, False
        gain = self.state.payoff
        return {}, {"first": gain, "second": -gain}, True

    def _shown(self) -> Mapping[str, Observation]:
        state: State = self.state
        return {ROLES[state.actor or 0]: Observation(text=state.view, actions=state.actions)}


class KuhnPoker(BoardGame):
    """Kuhn poker. `p` passes or folds, `b` bets or calls."""

    actions = ("p", "b")
    start = Kuhn()
    rewards = (-2.0, 2.0)
    forfeit = -2.0


class TicTacToeGame(BoardGame):
    """Tic-tac-toe. An action is the number of a free cell."""

    actions = tuple("123456789")
    start = TicTacToe()
    rewards = (-1.0, 1.0)
