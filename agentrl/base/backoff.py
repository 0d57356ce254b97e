"""Computes how long to wait before a server is called again, and provides the clock that measures the wait."""

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
"""HTTP statuses after which the same request may succeed. Some servers send 529 when they are overloaded."""

_FIRST_S = 1.0
_LEAST_S = 0.25  # minimum wait after a second consecutive rejection, even if the server requests less
_LONGEST_S = 60.0  # maximum wait that the server did not request
PROBE_S = 60.0  # seconds after which one query probes the server, if the server requested a wait longer than `patience_s`
_SPREAD = 0.1  # random fraction added to a requested wait, so that callers do not return at the same time
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d))+")
_PIECE = re.compile(r"([0-9.]+)(ms|s|m|h|d)")
_NUMBER = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,9})?")


class Clock(Protocol):
    """Time and waiting. Tests use a fake clock."""

    def monotonic(self) -> float:
        """Returns the time of a monotonic clock, in seconds."""
        ...

    def time(self) -> float:
        """Returns the seconds since 1970."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The system clock."""

    def monotonic(self) -> float:
        """Returns the time of a monotonic clock, in seconds."""
        return time.monotonic()

    def time(self) -> float:
        """Returns the seconds since 1970."""
        return time.time()

    async def sleep(self, seconds: float) -> None:
        """Waits."""
        await asyncio.sleep(seconds)


def requested_wait_s(headers: Mapping[str, str], *, now: float) -> float | None:
    """Returns the seconds that a server asks the client to wait; None if its headers contain no valid wait.

    Reads `retry-after-ms`, else `retry-after` (seconds, or a date as in RFC 9110), else the longest `x-ratelimit-reset-*` whose
    `x-ratelimit-remaining-*` is 0 or missing.

    Args:
        headers: the response headers, by lower-case name.
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


def backoff_s(tries: int, requested_s: float | None, *, refused: int = 1, luck: float | None = None) -> float:
    """Returns the seconds to wait after `tries` attempts (from 1).

    The wait is the requested wait, extended by a random part of up to a tenth. If no wait was requested, it is 1, 2, 4, ... up to 60
    seconds, minus a random part of up to half. If the server rejects several rounds in a row, a requested wait is raised to at least 0.25,
    0.5, 1, ... up to 60 seconds.

    Args:
        requested_s: the wait that the server requested.
        refused: number of consecutive rejected rounds of requests, including this one.
        luck: a number from 0 to 1 that replaces the random number.
    """
    luck = random.random() if luck is None else luck
    if requested_s is not None:
        least = min(_LEAST_S * 2 ** min(refused - 2, 16), _LONGEST_S) if refused > 1 else 0.0
        return max(requested_s, least) * (1 + _SPREAD * luck)
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
    """Returns the seconds in a duration such as "1s", "6m0s" or "20ms", or in a bare number of seconds."""
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
