"""Rewards that a process on the host posts to a session: the score that an external environment or a person gives an episode.

The agent option `reward_key_file` is the path of a key file that only the user who runs the gateway can read. A holder of the key posts a
reward while the program runs, or within `WAIT_S` seconds after it exits:

    POST /sessions/ID/reward   {"value": 0.5, "parts": {"speed": 1.0}, "evidence": "won in 12 moves"}

The verifier `agentrl.gateway:posted_reward` returns the reward as the score of a task. The key of a session cannot post rewards, so no
agent can reward itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.errors import UserError
from agentrl.gateway.checks import known_fields, mapping, text
from agentrl.gateway.request import RequestError
from agentrl.records import Episode, Score, Task

WAIT_S = 20.0
"""Seconds for which a session waits for its reward after the program exits. A session without a reward has no score, rather than a score of
0."""
MAX_SESSIONS = 4096
MAX_PARTS = 64
MAX_EVIDENCE = 10_000
_MAX_NUMBER = 1e300


class PostedRewards:
    """Rewards by session, for all open sessions and the newest `MAX_SESSIONS` others."""

    def __init__(self) -> None:
        self._rewards: OrderedDict[str, asyncio.Future[Score]] = OrderedDict()
        self._open: Counter[str] = Counter()  # 2 while an attempt starts before a cancelled one with the same id has ended
        self._keys: set[bytes] = set()

    def make_key(self, path: str) -> None:
        """Writes a new key into a file that only the current user can read. Earlier keys stay valid. Raises `UserError` if the file cannot
        be written."""
        key = f"sk-agentrl-host-{secrets.token_urlsafe(32)}"
        new = Path(f"{path}.new")
        try:
            new.unlink(missing_ok=True)
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(key + "\n")
            new.replace(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise UserError(f"rollout.agent.options.reward_key_file: {path}: {reason}", fix="use a writable path") from None
        self._keys.add(key.encode())

    @contextlib.contextmanager
    def open(self, session: str) -> Iterator[None]:
        """Accepts a reward for a session from now on, and discards an earlier reward for it. The session is open during the block."""
        self._rewards[session] = asyncio.get_running_loop().create_future()
        self._rewards.move_to_end(session)
        self._open[session] += 1
        ended = (other for other in self._rewards if other not in self._open)
        for other in list(itertools.islice(ended, max(0, len(self._rewards) - MAX_SESSIONS))):
            del self._rewards[other]
        try:
            yield
        finally:
            self._open -= Counter((session,))

    def check_key(self, key: str) -> None:
        """Raises `RequestError` if the key does not belong to the host."""
        if not any(hmac.compare_digest(key.encode("utf-8", "replace"), known) for known in self._keys):
            raise RequestError("wrong_key", "Incorrect API key provided.")

    def post(self, session: str, body: Any) -> None:
        """Stores the reward for a session. Raises `RequestError` if the reward is invalid, or if the session is unknown or already has a
        reward."""
        fields = known_fields(body, ("value", "parts", "evidence"))
        parts = mapping(fields.get("parts") or {}, "parts")
        if len(parts) > MAX_PARTS:
            raise RequestError("invalid", f"parts has {len(parts)} entries; the maximum is {MAX_PARTS}.", param="parts")
        evidence = text(fields.get("evidence") or "", "evidence")[:MAX_EVIDENCE]
        numbers = {name: _number(value, f"parts.{name}"[:100]) for name, value in parts.items()}
        try:
            score = Score(value=_number(fields.get("value"), "value"), parts=numbers, evidence=evidence)
        except ValueError as error:
            raise RequestError("invalid", str(error)[:300]) from None
        reward = self._rewards.get(session)
        if reward is None:
            raise RequestError("not_found", f"There is no session {session[:100]!a}.")
        if reward.done():
            raise RequestError("invalid", "This session already has a reward.")
        reward.set_result(score)

    def store(self, session: str, score: Score) -> None:
        """Stores the reward for an open session that has none yet; otherwise does nothing."""
        if (reward := self._rewards.get(session)) is not None and not reward.done():
            reward.set_result(score)

    async def wait(self, session: str) -> None:
        """Returns once an open session has its reward, or after `WAIT_S` seconds."""
        await asyncio.wait({self._rewards[session]}, timeout=WAIT_S)

    def of(self, session: str) -> Score:
        """Returns the reward for a session; a score without a value if no reward was posted."""
        reward = self._rewards.get(session)
        if reward is None:
            return Score(value=None, reason="no session with this id accepts rewards: set rollout.agent.options.reward_key_file")
        return reward.result() if reward.done() else Score(value=None, reason="no reward was posted to this session")


POSTED_REWARDS = PostedRewards()
"""The rewards posted to this process. The gateway stores them, and the verifier looks them up by the episode's id."""


async def posted_reward(task: Task, episode: Episode) -> Score:
    """A verifier that returns the reward posted to the episode's session; a score without a value if no reward was posted."""
    return POSTED_REWARDS.of(episode.id)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_NUMBER:
        raise RequestError("invalid", f"{where} must be a finite number.", param=where)
    return float(value)
