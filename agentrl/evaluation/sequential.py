"""Evidence that may be looked at after every case: the wealth of a bettor against "nothing has changed"."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STAKES = tuple(0.05 + 0.1 * place for place in range(10))


def e_value(differences: Sequence[float]) -> float:
    """Evidence for a drop, from case differences in the order in which their cases were tried.

    A bettor stakes a share of his wealth on each case to be worse after than before: on a difference d, a stake s multiplies the wealth
    by 1 - s * d. A tenth of the first wealth is played with each stake of 0.05, 0.15, ..., 0.95, and `e_value` is the last wealth
    divided by the first: the mean over the stakes of the product over the cases (Waudby-Smith and Ramdas 2024). If cases are no worse
    on average, given those before them, the game is fair or a losing one. So the probability that the wealth ever reaches 1/alpha,
    whenever and however often one looks, is at most alpha (Ville 1939). That applies to new cases, not to further repeats of earlier
    ones.

    Args:
        differences: [N] after minus before, each within [-1, 1].

    Raises `ValueError` for a difference beyond that.
    """
    if any(not -1 <= one <= 1 for one in differences):
        raise ValueError("differences of scores within [0, 1] lie within [-1, 1]")
    return math.fsum(math.exp(math.fsum(math.log1p(-stake * one) for one in differences)) for stake in _STAKES) / len(_STAKES)
