"""Games for two policies, and the exact exploitability of a policy in them."""

from sandboxes.games.worlds import KuhnPoker, TicTacToeGame

__all__ = ["KuhnPoker", "TicTacToeGame"]
