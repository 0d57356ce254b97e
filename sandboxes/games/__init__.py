"""Games for two policies, and the exact exploitability of a policy in these games."""

from sandboxes.games.environments import KuhnPoker, TicTacToeGame

__all__ = ["KuhnPoker", "TicTacToeGame"]
