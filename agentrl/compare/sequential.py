"""Evidence that may be looked at after every case: the wealth of a bettor against "nothing has changed"."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STAKES = tuple(0.05 + 0.1 * place for place in range(10))  # shares of the wealth; a tenth of it begins with each


def e_value(differences: Sequence[float]) -> float:
    """Evidence for a drop, from case differences in the order in which their cases were tried.

    A bettor stakes shares of his wealth on each case to be worse after than before; he has `e_value` times what he began with
    (Waudby-Smith and Ramdas 2024, with a fixed mixture of stakes). If cases are no worse on average, given those before them, his
    wealth is a fair game or a losing one. So the probability that it ever reaches 1/alpha, whenever and however often one looks, is
    at most alpha (Ville 1939). That holds for new cases, not for further repeats of those that were looked at.

    Args:
        differences: [N] after minus before, each within [-1, 1].

    Raises `ValueError` for a difference beyond that.
    """
    if any(not -1 <= one <= 1 for one in differences):
        raise ValueError("differences of scores within [0, 1] lie within [-1, 1]")
    return math.fsum(math.exp(math.fsum(math.log1p(-stake * one) for one in differences)) for stake in _STAKES) / len(_STAKES)
