"""How long to wait before a server is asked again: what its headers say, or longer each time. And the clock that is waited by."""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

TRANSIENT = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses after which the same request may well succeed. 529 is what some servers say when they are overloaded."""

_FIRST_S = 1.0
_LEAST_S = 0.25  # minimum wait after a second refusal in a row, even if the server requests less
_LONGEST_S = 60.0  # of a wait that the server did not ask for
PROBE_S = 60.0
"""Seconds after which one question checks whether the server is back, if the server requested a wait longer than `patience_s`."""
_SPREAD = 0.1  # of a wait that the server asked for: callers come back one after another, and none too early
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d))+")
_PIECE = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")


class Clock(Protocol):
    """What time it is, and waiting. Tests bring one that does not wait."""

    def monotonic(self) -> float: ...

    def time(self) -> float:
        """Seconds since 1970."""
        ...

    async def sleep(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The machine's own."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def requested_wait_s(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds that a server asks to wait; None when its headers do not say, or say nothing that can be read.

    `retry-after-ms` goes before `retry-after` (seconds, or a date as in RFC 9110), and both before `x-ratelimit-reset-*`: the longest
    of those whose `x-ratelimit-remaining-*` is not above 0.

    Args:
        headers: by lower-case name.
        now: seconds since 1970.
    """
    if (text := headers.get("retry-after-ms")) is not None and (number := _number(text)) is not None:
        return number / 1000
    if (text := headers.get("retry-after")) is not None and (seconds := _seconds_or_date(text, now)) is not None:
        return seconds
    waits = [
        wait
        for name, text in headers.items()
        if name.startswith("x-ratelimit-reset-") and _used_up(headers.get(name.replace("-reset-", "-remaining-", 1)))
        if (wait := _duration(text)) is not None
    ]
    return max(waits, default=None)


def backoff_s(tries: int, asked: float | None, *, refused: int = 1, luck: float | None = None) -> float:
    """Seconds to wait after so many tries (from 1): at least what was asked for, else 1, 2, 4, ... up to 60, less up to half of it.

    If a server requests no wait, or one that lies in the past, and refuses again, the wait is at least 0.25, 0.5, 1, ... up to 60 seconds.

    Args:
        refused: rounds of requests in a row that the server has refused, this one included.
        luck: from 0 to 1, in place of a random number.
    """
    luck = random.random() if luck is None else luck
    if asked is not None:
        least = min(_LEAST_S * 2 ** min(refused - 2, 16), _LONGEST_S) if refused > 1 else 0.0
        return max(asked, least) * (1 + _SPREAD * luck)
    return float(min(_FIRST_S * 2 ** min(tries - 1, 16), _LONGEST_S) * (1 - luck / 2))


def _seconds_or_date(text: str, now: float) -> float | None:
    if (seconds := _number(text)) is not None:
        return seconds
    try:
        then = email.utils.parsedate_to_datetime(text[:64]).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, then - now)


def _duration(text: str) -> float | None:
    """Seconds in "1s", "6m0s", "20ms" or a bare number."""
    text = text.strip()[:64]
    if _DURATION.fullmatch(text):
        return math.fsum(float(number) * _UNITS[unit] for number, unit in _PIECE.findall(text))
    return _number(text)


def _number(text: str) -> float | None:
    text = text.strip()
    return float(text) if len(text) <= 32 and _NUMBER.fullmatch(text) else None


def _used_up(remaining: str | None) -> bool:
    number = _number(remaining) if remaining is not None else None
    return number is None or number <= 0
