"""Rules of two-player zero-sum games as immutable states: Kuhn poker and tic-tac-toe.

Kuhn poker: H. W. Kuhn 1950, A simplified two-person poker. The value of Kuhn poker for the first player is -1/18.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Protocol, Self

CHANCE = -1
"""`State.actor` at a random event."""
CARDS = "JQK"
_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class State(Protocol):
    """A hashable state of a game. The players are 0 and 1. All states with the same view have the same actor, actions and depth."""

    @property
    def actor(self) -> int | None:
        """The player who acts, `CHANCE`, or None at the end."""

    @property
    def view(self) -> str:
        """The actor's information set, which includes the actor's earlier actions (perfect recall)."""
        ...

    @property
    def actions(self) -> tuple[str, ...]:
        """The legal actions of the actor."""
        ...

    @property
    def payoff(self) -> float:
        """Payment from player 1 to player 0 at the end."""
        ...

    def chances(self) -> Sequence[tuple[float, Self]]:
        """Returns a (probability, next state) pair for each outcome of a random event."""
        ...

    def after(self, action: str) -> Self:
        """Returns the state after an action."""
        ...


@dataclass(frozen=True, slots=True)
class Kuhn:
    """Kuhn poker: each player pays 1 and receives one of three cards. A bet is 1. `p` passes or folds, `b` bets or calls."""

    cards: str = ""  # the cards of players 0 and 1; empty before the deal
    moves: str = ""

    @property
    def actor(self) -> int | None:
        """The player who acts, `CHANCE`, or None at the end."""
        if not self.cards:
            return CHANCE
        return None if self.moves in ("pp", "pbp", "pbb", "bp", "bb") else len(self.moves) % 2

    @property
    def view(self) -> str:
        """The actor's card and all moves."""
        return f"card {self.cards[len(self.moves) % 2]} moves {self.moves or '-'}"

    @property
    def actions(self) -> tuple[str, ...]:
        """Both actions, which are always legal."""
        return ("p", "b")

    @property
    def payoff(self) -> float:
        """Payment to player 0: 1, or 2 after a called bet."""
        if self.moves in ("bp", "pbp"):  # a fold
            return 1.0 if self.moves == "bp" else -1.0
        sign = 1.0 if CARDS.index(self.cards[0]) > CARDS.index(self.cards[1]) else -1.0
        return sign * (2.0 if self.moves.endswith("bb") else 1.0)

    def chances(self) -> list[tuple[float, Kuhn]]:
        """Returns the six deals, each with its probability."""
        deals = ["".join(pair) for pair in permutations(CARDS, 2)]
        return [(1 / len(deals), replace(self, cards=deal)) for deal in deals]

    def after(self, action: str) -> Kuhn:
        """Returns the state after an action."""
        return replace(self, moves=self.moves + action)


@dataclass(frozen=True, slots=True)
class TicTacToe:
    """Tic-tac-toe. An action is the number of a free cell, from 1 to 9. Player 0 plays crosses."""

    board: str = "." * 9

    @property
    def _turn(self) -> int:
        return (9 - self.board.count(".")) % 2

    @property
    def _winner(self) -> str:
        return next((self.board[a] for a, b, c in _LINES if self.board[a] != "." and self.board[a] == self.board[b] == self.board[c]), "")

    @property
    def actor(self) -> int | None:
        """The player who acts, or None at the end."""
        return None if self._winner or "." not in self.board else self._turn

    @property
    def view(self) -> str:
        """The board, which both players see."""
        rows = " / ".join(self.board[row : row + 3] for row in (0, 3, 6))
        return f"you are {'xo'[self._turn]} board {rows}"

    @property
    def actions(self) -> tuple[str, ...]:
        """The free cells."""
        return tuple(str(cell + 1) for cell, mark in enumerate(self.board) if mark == ".")

    @property
    def payoff(self) -> float:
        """1 if crosses won, -1 if noughts won, else 0."""
        return {"x": 1.0, "o": -1.0}.get(self._winner, 0.0)

    def chances(self) -> list[tuple[float, TicTacToe]]:
        """Returns an empty list, because the game has no random events."""
        return []

    def after(self, action: str) -> TicTacToe:
        """Returns the state after an action."""
        cell = int(action) - 1
        return replace(self, board=self.board[:cell] + "xo"[self._turn] + self.board[cell + 1 :])
